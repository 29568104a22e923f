"""Safetensors: what is written is read, here and by the library itself."""

import json
import os
import pathlib
import tempfile

from absl.testing import absltest, parameterized
import ml_dtypes
import numpy as np
import safetensors
import safetensors.numpy

from longstraw_jax.weights import safetensors_files
from longstraw_jax.weights.safetensors_files import (
  SafetensorsSource,
  write_safetensors,
)
from longstraw_jax.weights.source import TensorInfo, TensorSource


def make_folder(test):
  folder = tempfile.TemporaryDirectory()
  test.addCleanup(folder.cleanup)
  return pathlib.Path(folder.name)


def write_raw(file, header, data=b"", length=None):
  """A file from its header, which may be any text."""
  if not isinstance(header, (str, bytes)):
    header = json.dumps(header)
  if isinstance(header, str):
    header = header.encode()
  length = len(header) if length is None else length
  file.write_bytes(length.to_bytes(8, "little") + header + data)
  return file


def tensor(dtype="F32", shape=(1,), offsets=(0, 4)):
  return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


def arrays():
  rng = np.random.default_rng(0)
  made = {
    "odd": rng.integers(0, 255, 3).astype(np.uint8),
    "scalar": np.array(1.5, np.float32),
    "empty": np.zeros((0, 3), np.float16),
    "matrix": rng.normal(size=(5, 7)).astype(np.float32),
    "bf16": rng.normal(size=(2, 3)).astype(ml_dtypes.bfloat16),
    "flags": np.array([True, False]),
    "long": np.array([-1, 2**40]),
  }
  return made


def items(made):
  return [
    (TensorInfo(name, array.shape, array.dtype), array)
    for name, array in made.items()
  ]


class WriteReadTest(parameterized.TestCase):
  def setUp(self):
    super().setUp()
    self.folder = make_folder(self)

  def _assert_holds(self, source, made):
    self.assertIsInstance(source, TensorSource)
    self.assertCountEqual(source.tensors, made)
    for name, array in made.items():
      info = source.tensors[name]
      self.assertEqual(info, TensorInfo(name, array.shape, array.dtype))
      got = source.read(name)
      self.assertEqual((got.shape, got.dtype), (array.shape, array.dtype))
      np.testing.assert_array_equal(got, array)

  @parameterized.parameters(
    (10**9, ["model.safetensors"]),
    (
      150,
      ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"],
    ),
    (1, None),
  )
  def test_round_trip_and_the_library_agree(self, max_shard_bytes, names):
    made = arrays()
    paths = write_safetensors(
      self.folder, items(made), max_shard_bytes=max_shard_bytes
    )
    self._assert_holds(SafetensorsSource(self.folder), made)
    self.assertLen(paths, len(made) if names is None else len(names))
    if names is not None:
      self.assertEqual([path.name for path in paths], names)
    theirs = {}
    for path in paths:
      theirs |= safetensors.numpy.load_file(path)
      with safetensors.safe_open(path, "numpy") as opened:
        self.assertEqual(opened.metadata(), {"format": "pt"})
    self.assertCountEqual(theirs, made)
    for name, array in made.items():
      np.testing.assert_array_equal(theirs[name], array)
    left = {path.name for path in self.folder.iterdir()}
    index = {safetensors_files.INDEX_NAME} if len(paths) > 1 else set()
    self.assertEqual(left, {path.name for path in paths} | index)

  def test_index_names_each_shard_and_the_total(self):
    made = arrays()
    write_safetensors(self.folder, items(made), max_shard_bytes=150)
    index = json.loads(
      (self.folder / "model.safetensors.index.json").read_text()
    )
    total = sum(array.nbytes for array in made.values())
    self.assertEqual(index["metadata"], {"total_size": total})
    for name, shard in index["weight_map"].items():
      self.assertIn(name, SafetensorsSource(self.folder / shard).tensors)

  def test_reads_what_the_library_writes(self):
    made = arrays()
    safetensors.numpy.save_file(made, self.folder / "other.safetensors")
    self._assert_holds(
      SafetensorsSource(self.folder / "other.safetensors"), made
    )

  @parameterized.parameters(
    ml_dtypes.float8_e4m3fn,
    ml_dtypes.float8_e5m2,
    ml_dtypes.float8_e8m0fnu,
    np.uint16,
    np.complex64,
  )
  def test_rarer_dtypes(self, dtype):
    made = {"x": np.array([1, 2, 4]).astype(dtype)}
    write_safetensors(self.folder, items(made))
    self._assert_holds(SafetensorsSource(self.folder), made)
    with safetensors.safe_open(
      self.folder / "model.safetensors", "numpy"
    ) as opened:
      self.assertEqual(opened.get_slice("x").get_shape(), [3])

  def test_reading_copies_nothing(self):
    write_safetensors(self.folder, items(arrays()))
    source = SafetensorsSource(self.folder)
    first, again = source.read("matrix"), source.read("matrix")
    self.assertFalse(first.flags.owndata or first.flags.writeable)
    self.assertTrue(np.shares_memory(first, again))
    self.assertTrue(first.flags.aligned)  # behind a tensor of 3 bytes

  def test_tensors_are_made_one_by_one(self):
    live = []

    def make(name):
      array = np.ones(4, np.float32)
      live.append(name)
      return array

    wanted = [TensorInfo(n, (4,), np.dtype(np.float32)) for n in "abc"]
    made = ((info, lambda n=info.name: make(n)) for info in wanted)
    write_safetensors(self.folder, made)
    self.assertEqual(live, ["a", "b", "c"])

  def test_a_failed_write_leaves_nothing(self):
    def fail():
      raise OSError("no space left")

    info = TensorInfo("x", (2,), np.dtype(np.float32))
    other = TensorInfo("y", (2,), np.dtype(np.float32))
    with self.assertRaisesRegex(OSError, "no space left"):
      write_safetensors(
        self.folder,
        [(info, np.ones(2, np.float32)), (other, fail)],
        max_shard_bytes=8,
      )
    self.assertEmpty(list(self.folder.iterdir()))

  @parameterized.named_parameters(
    ("shape", np.zeros(3, np.float32), r"'x' came as float32 of shape \(3,\)"),
    ("dtype", np.zeros(2, np.float64), "'x' came as float64"),
    ("order", np.zeros(2, ">f4"), "'x' came as >f4"),
  )
  def test_refuses_other_than_announced(self, array, message):
    info = TensorInfo("x", (2,), np.dtype(np.float32))
    with self.assertRaisesRegex(ValueError, message):
      write_safetensors(self.folder, [(info, lambda: array)])

  def test_writer_refusals(self):
    one = (TensorInfo("x", (), np.dtype(np.float32)), np.float32(1))
    with self.assertRaisesRegex(ValueError, "'x' is taken"):
      write_safetensors(self.folder, [one, one])
    text = TensorInfo("x", (), np.dtype("U1"))
    with self.assertRaisesRegex(ValueError, "'x' has dtype <U1: convert"):
      write_safetensors(self.folder, [(text, np.array("a"))])
    with self.assertRaisesRegex(ValueError, "max_shard_bytes is 0"):
      write_safetensors(self.folder, [one], max_shard_bytes=0)
    write_safetensors(self.folder, [one])
    with self.assertRaisesRegex(FileExistsError, "holds 'model.safetensors'"):
      write_safetensors(self.folder, [one])


class HostileFileTest(parameterized.TestCase):
  def setUp(self):
    super().setUp()
    self.file = make_folder(self) / "bad.safetensors"

  def _refused(self, message, by_the_library=True):
    with self.assertRaisesRegex(ValueError, message) as raised:
      SafetensorsSource(self.file)
    self.assertIn("bad.safetensors", str(raised.exception))
    self.assertNotIn("\n", str(raised.exception))
    if not by_the_library:
      return
    with self.assertRaises(safetensors.SafetensorError):
      with safetensors.safe_open(self.file, "numpy"):
        pass

  @parameterized.named_parameters(
    ("no_json", "{", "header is not JSON"),
    ("no_text", b"\xff\xfe{}", "header is not JSON"),
    ("list", "[]", "no object"),
    ("deep", "[" * 10**5, "header is not JSON"),
    ("digits", '{"a":' + "9" * 5000 + "}", "header is not JSON"),
    ("entry", {"a": 3}, "'a' has the header 3"),
    ("metadata", {"__metadata__": {"a": 1}}, "__metadata__"),
    ("dtype", {"a": tensor("F33")}, "'a' has the unknown dtype 'F33'; store"),
    ("no_dtype", {"a": {"shape": []}}, "unknown dtype None"),
    ("shape", {"a": tensor(shape=[-1])}, r"the shape \[-1\]"),
    ("shape_text", {"a": tensor(shape="1")}, "the shape '1'"),
    (
      "huge",
      {"a": tensor(shape=[0, 2**62, 2**62], offsets=[0, 0])},
      "has the shape",
    ),
    ("offsets", {"a": tensor(offsets=[4, 0])}, r"data_offsets \[4, 0\]"),
    ("offset_float", {"a": tensor(offsets=[0, 4.0])}, "data_offsets"),
    (
      "disagree",
      {"a": tensor(shape=[2])},
      r"4 bytes, but F32 of shape \[2\] takes 8",
    ),
    ("gap", {"a": tensor(offsets=[1, 5])}, "byte 1 and so leaves a gap"),
    (
      "overlap",
      {"a": tensor(), "b": tensor("U8", offsets=[3, 4])},
      "'b' begins at data byte 3 and so overlaps",
    ),
  )
  def test_refuses_header(self, header, message):
    write_raw(self.file, header, bytes(5))
    self._refused(message)

  def test_refuses_twice_the_same_key(self):
    entry = json.dumps(tensor())
    write_raw(self.file, f'{{"a": {entry}, "a": {entry}}}', bytes(4))
    self._refused("the key 'a' twice", by_the_library=False)

  @parameterized.parameters((3, "is truncated"), (5, "bytes behind"))
  def test_refuses_wrong_length(self, size, message):
    write_raw(self.file, {"a": tensor()}, bytes(size))
    self._refused(message)

  @parameterized.parameters(
    (10**6, "gives its header 1000000 bytes but has 10"),
    (2**63, "allowed are 100000000"),
  )
  def test_refuses_header_length(self, length, message):
    write_raw(self.file, "{}", length=length)
    self._refused(message)

  def test_refuses_a_stub(self):
    self.file.write_bytes(b"\x02\0\0")
    self._refused("3 bytes, too few")

  def test_says_where_no_checkpoint_is(self):
    with self.assertRaisesRegex(FileNotFoundError, "no folder with"):
      SafetensorsSource(self.file.parent)
    with self.assertRaisesRegex(FileNotFoundError, "absent"):
      SafetensorsSource(self.file.parent / "absent")

  def test_empty_checkpoint(self):
    write_raw(self.file, "{}")
    self.assertEmpty(SafetensorsSource(self.file).tensors)


class IndexTest(parameterized.TestCase):
  def setUp(self):
    super().setUp()
    self.folder = make_folder(self) / "model"
    self.folder.mkdir()
    write_raw(self.folder / "s1.safetensors", {"a": tensor()}, b"\0\0\x80?")
    write_raw(self.folder / "s2.safetensors", {"b": tensor()}, bytes(4))

  def _index(self, weight_map):
    if not isinstance(weight_map, str):
      weight_map = json.dumps({"weight_map": weight_map})
    (self.folder / "model.safetensors.index.json").write_text(weight_map)

  def _refused(self, message, kind=ValueError):
    with self.assertRaisesRegex(kind, message) as raised:
      SafetensorsSource(self.folder)
    self.assertNotIn("\n", str(raised.exception))

  def test_opens(self):
    self._index({"a": "s1.safetensors", "b": "s2.safetensors"})
    source = SafetensorsSource(self.folder)
    self.assertCountEqual(source.tensors, "ab")
    self.assertEqual(source.read("a"), 1)

  @parameterized.parameters(
    "../s1.safetensors",
    "/etc/s1.safetensors",
    "x/s1.safetensors",
    "..\\s1.safetensors",
    "s1.safetensors\0",
    "s1.bin",
    "..",
    "",
    None,
  )
  def test_refuses_paths_out_of_the_folder(self, shard):
    self._index({"a": shard})
    self._refused("places tensor 'a' in .*named without a folder")

  def test_follows_links_as_caches_have(self):
    blob = self.folder.parent / "blob"
    os.rename(self.folder / "s1.safetensors", blob)
    os.symlink("../blob", self.folder / "s1.safetensors")
    self._index({"a": "s1.safetensors"})
    self.assertEqual(SafetensorsSource(self.folder).read("a"), 1)
    blob.unlink()
    self._refused("s1.safetensors' is missing", FileNotFoundError)

  def test_refuses_disagreement_with_the_shards(self):
    self._index({"a": "s1.safetensors", "c": "s2.safetensors"})
    self._refused("tensor 'c' in 's2.safetensors', which lacks it")
    self._index({"a": "s2.safetensors", "b": "s1.safetensors"})
    self._refused("tensor 'a' in 's2.safetensors', which lacks it")
    self._index({"a": "s3.safetensors"})
    self._refused("s3.safetensors' is missing", FileNotFoundError)

  def test_refuses_a_tensor_in_two_shards(self):
    write_raw(
      self.folder / "s2.safetensors",
      {"b": tensor(), "a": tensor(offsets=(4, 8))},
      bytes(8),
    )
    self._index({"a": "s1.safetensors", "b": "s2.safetensors"})
    self._refused("tensor 'a' is in 's1.safetensors' and in 's2.safetensors'")

  @parameterized.parameters(
    ("[]", "no object"),
    ("{", "not JSON"),
    ("{}", "no weight_map"),
    ('{"weight_map": {"a": "s1.safetensors", "a": "x"}}', "key 'a' twice"),
  )
  def test_refuses_malformed(self, text, message):
    self._index(text)
    self._refused(message)

  def test_refuses_two_checkpoints_in_one_folder(self):
    self._index({"a": "s1.safetensors"})
    write_raw(self.folder / "model.safetensors", "{}")
    self._refused("holds both")


if __name__ == "__main__":
  absltest.main()
