"""GGUF: tensors against decoders written from the format, hostile headers."""

import pathlib
import struct
import tempfile

from absl.testing import absltest, parameterized
import gguf
import numpy as np

from longstraw_jax.weights import gguf_files
from longstraw_jax.weights.gguf_files import GgufSource
from longstraw_jax.weights.source import TensorInfo, TensorSource

QUANTIZED = ("Q4_0", "Q4_1", "Q8_0", "Q4_K", "Q6_K")


def make_folder(test):
  folder = tempfile.TemporaryDirectory()
  test.addCleanup(folder.cleanup)
  return pathlib.Path(folder.name)


def write_gguf(file, pairs=(), tensors=()):
  """Writes a file with the gguf library.

  Args:
    file: its path.
    pairs: (method of the writer, its arguments).
    tensors: (name, array, type name), arrays of bytes for quantized types.
  """
  writer = gguf.GGUFWriter(file, "llama")
  for method, *args in pairs:
    getattr(writer, method)(*args)
  for name, array, kind in tensors:
    dtype = gguf.GGMLQuantizationType[kind]
    writer.add_tensor(name, array, raw_dtype=dtype)
  writer.write_header_to_file()
  writer.write_kv_data_to_file()
  writer.write_tensors_to_file()
  writer.close()
  return file


def half(data):
  return float(np.frombuffer(bytes(data), "<f2")[0])


def decode_q4_0(block):
  scale, codes = half(block[:2]), block[2:]
  low, high = [c & 15 for c in codes], [c >> 4 for c in codes]
  return [scale * (c - 8) for c in low + high]


def decode_q4_1(block):
  scale, least, codes = half(block[:2]), half(block[2:4]), block[4:]
  low, high = [c & 15 for c in codes], [c >> 4 for c in codes]
  return [scale * c + least for c in low + high]


def decode_q8_0(block):
  return [half(block[:2]) * (c - 256 if c > 127 else c) for c in block[2:]]


def decode_q4_k(block):
  scale, least = half(block[:2]), half(block[2:4])
  packed, codes = block[4:16], block[16:]
  values = []
  for i in range(8):  # of 32 elements, two in the halves of the same bytes
    if i < 4:
      factor, offset = packed[i] & 63, packed[i + 4] & 63
    else:
      factor = (packed[i + 4] & 15) | (packed[i - 4] >> 6) << 4
      offset = (packed[i + 4] >> 4) | (packed[i] >> 6) << 4
    for c in codes[32 * (i // 2) : 32 * (i // 2 + 1)]:
      code = c >> 4 if i % 2 else c & 15
      values.append(scale * factor * code - least * offset)
  return values


def decode_q6_k(block):
  low, high, factors = block[:128], block[128:192], block[192:208]
  scale = half(block[208:])
  values = []
  for i in range(256):
    part, rest = divmod(i, 128)
    quarter, at = divmod(rest, 32)
    byte = low[64 * part + 32 * (quarter % 2) + at]
    code = byte >> 4 if quarter > 1 else byte & 15
    code |= (high[32 * part + at] >> 2 * quarter & 3) << 4
    factor = factors[i // 16]
    factor -= 256 if factor > 127 else 0
    values.append(scale * factor * (code - 32))
  return values


DECODERS = {
  "Q4_0": (18, decode_q4_0),
  "Q4_1": (20, decode_q4_1),
  "Q8_0": (34, decode_q8_0),
  "Q4_K": (144, decode_q4_k),
  "Q6_K": (210, decode_q6_k),
}


def random_rows(kind, num_rows, blocks_per_row):
  """Random bytes, but scales that are sane halves."""
  rng = np.random.default_rng(0)
  size, _ = DECODERS[kind]
  blocks = rng.integers(0, 256, (num_rows, blocks_per_row, size), np.uint8)
  halves = rng.uniform(-0.1, 0.1, (num_rows, blocks_per_row, 2))
  halves = halves.astype("<f2").view(np.uint8)
  if kind == "Q6_K":
    blocks[..., -2:] = halves[..., :2]
  else:
    count = 4 if kind in ("Q4_1", "Q4_K") else 2
    blocks[..., :count] = halves[..., :count]
  return blocks.reshape(num_rows, -1)


class ReadTest(parameterized.TestCase):
  def setUp(self):
    super().setUp()
    self.file = make_folder(self) / "model.gguf"

  @parameterized.product(kind=QUANTIZED, slab=[gguf_files._SLAB, 512])
  def test_decodes_as_the_format_says(self, kind, slab):
    rows = random_rows(kind, 3, 2)
    size, decode = DECODERS[kind]
    want = [decode(block.tolist()) for block in rows.reshape(-1, size)]
    want = np.asarray(want).reshape(3, -1)
    write_gguf(self.file, tensors=[("x", rows, kind)])
    source = GgufSource(self.file)
    self.assertEqual(source.types, {"x": kind})
    saved, gguf_files._SLAB = gguf_files._SLAB, slab
    self.addCleanup(setattr, gguf_files, "_SLAB", saved)
    got = source.read("x")
    self.assertEqual(got.dtype, np.float32)
    # One rounding a product or sum.
    np.testing.assert_allclose(got, want, rtol=3e-7, atol=1e-6)
    self.assertGreater(np.abs(want).max(), 0.1)

  def test_floats_and_shapes(self):
    matrix = np.arange(6, dtype=np.float32).reshape(2, 3) / 7
    narrow = (matrix.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)
    write_gguf(
      self.file,
      tensors=[
        ("f32", matrix, "F32"),
        ("f16", matrix.astype(np.float16), "F16"),
        ("bf16", narrow, "BF16"),
        ("vector", matrix[0], "F32"),
        ("cube", matrix.reshape(1, 2, 3), "F32"),
      ],
    )
    source = GgufSource(self.file)
    self.assertIsInstance(source, TensorSource)
    for name in ("f32", "f16", "bf16"):
      info = TensorInfo(name, (2, 3), np.dtype(np.float32))
      self.assertEqual(source.tensors[name], info)
      got = source.read(name)
      self.assertEqual((got.shape, got.dtype), ((2, 3), np.float32))
      np.testing.assert_allclose(got, matrix, rtol=2**-7)
    np.testing.assert_array_equal(source.read("f32"), matrix)
    self.assertFalse(source.read("f32").flags.owndata)
    self.assertEqual(source.read("vector").shape, (3,))
    self.assertEqual(source.read("cube").shape, (1, 2, 3))
    # The file itself has the fastest axis first.
    theirs = gguf.GGUFReader(self.file).tensors[0]
    self.assertEqual(theirs.shape.tolist(), [3, 2])

  def test_metadata(self):
    names = [f"token {i}" for i in range(1000)] + ["", "é"]
    write_gguf(
      self.file,
      [
        ("add_uint32", "a.u32", 7),
        ("add_int64", "a.i64", -(2**40)),
        ("add_float32", "a.f32", 0.5),
        ("add_bool", "a.bool", True),
        ("add_string", "a.text", "ü"),
        ("add_array", "a.names", names),
        ("add_array", "a.ints", [1, -2, 3]),
        ("add_array", "a.flags", [True, False]),
      ],
    )
    got = GgufSource(self.file).metadata
    want = {
      "general.architecture": "llama",
      "a.u32": 7,
      "a.i64": -(2**40),
      "a.f32": 0.5,
      "a.bool": True,
      "a.text": "ü",
      "a.names": names,
      "a.ints": [1, -2, 3],
      "a.flags": [True, False],
    }
    self.assertEqual(got, want)
    for key, value in want.items():
      self.assertIs(type(got[key]), type(value))


STRING, U32 = 8, 4


def text(value):
  data = value.encode()
  return struct.pack("<Q", len(data)) + data


def pair(key, kind, data):
  return text(key) + struct.pack("<I", kind) + data


def row(name="x", dims=(4,), kind=0, offset=0):
  return (
    text(name)
    + struct.pack(f"<I{len(dims)}Q", len(dims), *dims)
    + struct.pack("<IQ", kind, offset)
  )


class HostileFileTest(parameterized.TestCase):
  def setUp(self):
    super().setUp()
    self.file = make_folder(self) / "bad.gguf"

  def _write(self, pairs=(), rows=(), data=b"", counts=None, version=3):
    counts = counts or (len(rows), len(pairs))
    head = b"GGUF" + struct.pack("<IQQ", version, *counts)
    head += b"".join(pairs) + b"".join(rows)
    self.file.write_bytes(head + bytes(-len(head) % 32) + data)

  def _refused(self, message):
    with self.assertRaisesRegex(ValueError, message) as raised:
      GgufSource(self.file)
    self.assertIn("bad.gguf", str(raised.exception))
    self.assertNotIn("\n", str(raised.exception))

  def test_this_form_opens(self):
    rows = [row("a"), row("none", (0, 4), offset=32), row("b", offset=32)]
    self._write(rows=rows, data=bytes(32) + struct.pack("<4f", 1, 2, 3, 4))
    source = GgufSource(self.file)
    np.testing.assert_array_equal(source.read("b"), [1, 2, 3, 4])
    self.assertEqual(source.read("none").shape, (4, 0))
    with self.assertRaises(KeyError):
      source.read("c")

  def test_says_what_it_is_not(self):
    with self.assertRaisesRegex(FileNotFoundError, "bad.gguf"):
      GgufSource(self.file)
    for data in (b"", b"GGU", b"GGML" + bytes(100)):
      self.file.write_bytes(data)
      self._refused("does not begin with 'GGUF'")
    self._write(version=1)
    self._refused("of version 1; convert")
    self._write(version=3 << 24)
    self._refused("big-endian")

  @parameterized.parameters(4, 10, 23)
  def test_refuses_a_stub(self, size):
    self._write()
    self.file.write_bytes(self.file.read_bytes()[:size])
    self._refused("is truncated")

  @parameterized.named_parameters(
    ("pairs", dict(counts=(0, 2**64 - 1))),
    ("tensors", dict(counts=(2**64 - 1, 0))),
    ("key", dict(pairs=[struct.pack("<Q", 2**63)])),
    ("text", dict(pairs=[pair("a", STRING, struct.pack("<Q", 2**63))])),
    ("list", dict(pairs=[pair("a", 9, struct.pack("<IQ", U32, 2**62))])),
    ("texts", dict(pairs=[pair("a", 9, struct.pack("<IQ", STRING, 2**62))])),
  )
  def test_counts_are_not_trusted(self, kwargs):
    self._write(**kwargs)
    self._refused("is truncated: its header")

  def test_refuses_an_endless_header(self):
    saved, gguf_files.MAX_HEADER_BYTES = gguf_files.MAX_HEADER_BYTES, 64
    self.addCleanup(setattr, gguf_files, "MAX_HEADER_BYTES", saved)
    self._write(pairs=[pair("a", STRING, text("x" * 99))])
    self._refused("header is longer than 64 bytes")

  @parameterized.named_parameters(
    ("twice", [pair("a", STRING, text("x"))] * 2, "the key 'a' twice"),
    ("type", [pair("a", 99, b"")], "'a' has the unknown type 99"),
    (
      "nested",
      [pair("a", 9, struct.pack("<IQ", 9, 1))],
      "'a' has the unknown type 9",
    ),
    (
      "alignment",
      [pair("general.alignment", U32, struct.pack("<I", 24))],
      "alignment is 24",
    ),
    (
      "split",
      [pair("split.count", U32, struct.pack("<I", 3))],
      "one of 3 pieces; join them",
    ),
  )
  def test_refuses_pairs(self, pairs, message):
    self._write(pairs)
    self._refused(message)

  @parameterized.named_parameters(
    ("q5", [row("w.x", (32,), 6)], "'w.x' is of type Q5_0; convert it to one"),
    ("int", [row("w.x", (32,), 26)], "'w.x' is of type I32"),
    ("unknown", [row("w.x", (32,), 77)], "'w.x' is of type 77"),
    ("block", [row("w.x", (31,), 2)], r"'w.x' of type Q4_0 has the shape"),
    ("scalar", [row("w.x", (), 2)], r"has the shape \(\)"),
    ("axes", [row("w.x", (1,) * 5)], "'w.x' has 5 axes"),
    ("huge", [row("w.x", (2**40, 2**40))], "has the shape"),
    ("empty", [row("w.x", (0, 2**63))], "has the shape"),
    ("end", [row("w.x", (9,))], "truncated: tensor 'w.x' ends at byte"),
    ("far", [row("w.x", offset=2**62)], "truncated: tensor 'w.x'"),
    ("off", [row("w.x", offset=4)], "'w.x' begins off its alignment"),
    ("twice", [row("w.x"), row("w.x")], "the tensor 'w.x' twice"),
    ("overlap", [row("v"), row("w.x")], "'w.x' overlaps"),
  )
  def test_refuses_tensors(self, rows, message):
    self._write(rows=rows, data=bytes(32))
    self._refused(message)


if __name__ == "__main__":
  absltest.main()
