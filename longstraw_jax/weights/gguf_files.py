"""GGUF checkpoints: metadata, and tensors dequantized one at a time.

A file is a header of typed key-value pairs, a table of tensors and their data.
The header is read here and not by the gguf library's reader, which makes three
numpy arrays of every string (2.5 s and 170 MB for a vocabulary of 49 thousand)
and trusts the counts it finds. The library dequantizes.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

import dataclasses
import functools
import math
import mmap
import os
import pathlib
import struct

import ml_dtypes
import numpy as np

from longstraw_jax.weights.source import TensorInfo

MAX_HEADER_BYTES = 100_000_000  # vocabulary and tensor table; ten times common
MAX_DIMS = 4  # of ggml
DEFAULT_ALIGNMENT = 32

Value = str | int | float | bool | list

# What the converters of the supported models write, by ggml's type numbers.
TYPES = {
  0: "F32",
  1: "F16",
  2: "Q4_0",
  3: "Q4_1",
  8: "Q8_0",
  12: "Q4_K",
  14: "Q6_K",
  30: "BF16",
}
_BLOCKS = {  # elements and bytes of a block
  "F32": (1, 4),
  "F16": (1, 2),
  "BF16": (1, 2),
  "Q4_0": (32, 18),
  "Q4_1": (32, 20),
  "Q8_0": (32, 34),
  "Q4_K": (256, 144),
  "Q6_K": (256, 210),
}
_FLOATS = {
  "F32": np.dtype("<f4"),
  "F16": np.dtype("<f2"),
  "BF16": np.dtype(ml_dtypes.bfloat16),
}

_SCALARS = {  # of metadata, by the format's type numbers
  0: np.dtype("<u1"),
  1: np.dtype("<i1"),
  2: np.dtype("<u2"),
  3: np.dtype("<i2"),
  4: np.dtype("<u4"),
  5: np.dtype("<i4"),
  6: np.dtype("<f4"),
  7: np.dtype("?"),
  10: np.dtype("<u8"),
  11: np.dtype("<i8"),
  12: np.dtype("<f8"),
}
_STRING, _ARRAY = 8, 9

_SLAB = 1 << 20  # elements dequantized at once


@dataclasses.dataclass(frozen=True)
class _Entry:
  info: TensorInfo
  kind: str
  begin: int  # in the file
  end: int


class GgufSource:
  """A GGUF file.

  Attributes:
    path: the file.
    metadata: every key-value pair; arrays are lists.
    tensors: every tensor by name, as float32, shapes in row-major order: a
      matrix is [out, in], the reverse of the file's own.
    types: the stored type of every tensor, such as "Q4_1".
  """

  def __init__(self, path: str | os.PathLike[str]):
    """Reads and checks the header; no tensor data is read.

    Args:
      path: a GGUF file of version 2 or 3, in one piece.

    Raises:
      FileNotFoundError: if there is no such file.
      ValueError: if it is no GGUF, truncated or malformed, or holds a tensor
        of a type other than those in `TYPES`.
    """
    self.path = pathlib.Path(path)
    if not self.path.is_file():
      raise FileNotFoundError(f"no GGUF file at {str(path)!r}")
    with self.path.open("rb") as file:
      if file.read(4) != b"GGUF":
        raise self._refuse("it does not begin with 'GGUF'", "give a GGUF file")
      self._data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    cursor = _Cursor(self._data, self._refuse)
    num_tensors, num_pairs = self._read_counts(cursor)
    self.metadata: dict[str, Value] = {}
    for _ in range(num_pairs):
      self._read_pair(cursor)
    if self.metadata.get("split.count", 1) not in (0, 1):
      raise self._refuse(
        f"it is one of {self.metadata['split.count']} pieces",
        "join them with llama-gguf-split --merge",
      )
    alignment = self.metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    if type(alignment) is not int or alignment < 1 or alignment.bit_count() > 1:
      raise self._refuse(f"its general.alignment is {alignment!r:.80}")
    self._entries: dict[str, _Entry] = {}
    rows = [self._read_row(cursor) for _ in range(num_tensors)]
    start = -(-cursor.offset // alignment) * alignment
    for name, kind, shape, offset in rows:
      self._place(name, kind, shape, start + offset, alignment)
    self._check_overlap()
    self.tensors = {name: e.info for name, e in self._entries.items()}
    self.types = {name: e.kind for name, e in self._entries.items()}

  def read(self, name: str) -> np.ndarray:
    """Returns one tensor as float32, dequantized where it is stored otherwise.

    Args:
      name: a key of `tensors`.

    Returns:
      The array; a read-only view of the mapped file if the type is F32.

    Raises:
      KeyError: if there is no such tensor.
      ImportError: if it is quantized and the gguf library is not installed.
    """
    entry = self._entries[name]
    shape = entry.info.shape
    size = entry.end - entry.begin
    data = np.frombuffer(self._data, np.uint8, size, entry.begin)
    if entry.kind in _FLOATS:
      stored = data.view(_FLOATS[entry.kind]).reshape(shape)
      return stored.astype(np.float32, copy=False)
    decode = _decoder(entry.kind)
    values, block_bytes = _BLOCKS[entry.kind]
    blocks = data.reshape(-1, block_bytes)
    # In slabs, because the library holds its result twice.
    out = np.empty((len(blocks), values), np.float32)
    step = _SLAB // values
    for i in range(0, len(blocks), step):
      slab = blocks[i : i + step]
      out[i : i + step] = decode(slab.reshape(1, -1)).reshape(-1, values)
    return out.reshape(shape)

  def _refuse(self, wrong: str, remedy: str = "fetch it again") -> ValueError:
    return ValueError(f"{str(self.path)!r} cannot be read: {wrong}; {remedy}")

  def _read_counts(self, cursor: "_Cursor") -> tuple[int, int]:
    cursor.take(4)
    version = cursor.integer("<I")
    if version not in (2, 3):
      # The bytes of a small number, the other way round.
      endian = "big-endian, " if version and version % 65536 == 0 else ""
      raise self._refuse(
        f"it is {endian}of version {version}",
        "convert it to a little-endian GGUF of version 3",
      )
    return cursor.integer("<Q"), cursor.integer("<Q")

  def _read_pair(self, cursor: "_Cursor") -> None:
    key = cursor.string()
    if key in self.metadata:
      raise self._refuse(f"it has the key {key!r} twice")
    kind = cursor.integer("<I")
    if kind == _STRING:
      self.metadata[key] = cursor.string()
    elif kind == _ARRAY:
      kind, length = cursor.integer("<I"), cursor.integer("<Q")
      if kind == _STRING:
        self.metadata[key] = cursor.strings(length)
      else:
        self.metadata[key] = cursor.scalars(key, kind, length)
    else:
      self.metadata[key] = cursor.scalars(key, kind, 1)[0]

  def _read_row(self, cursor: "_Cursor") -> tuple[str, int, list[int], int]:
    name = cursor.string()
    num_dims = cursor.integer("<I")
    if num_dims > MAX_DIMS:
      raise self._refuse(f"tensor {name!r} has {num_dims} axes")
    dims = [cursor.integer("<Q") for _ in range(num_dims)]
    return name, cursor.integer("<I"), dims[::-1], cursor.integer("<Q")

  def _place(self, name, number, shape, begin, alignment) -> None:
    if name in self._entries:
      raise self._refuse(f"it has the tensor {name!r} twice")
    if number not in TYPES:
      raise self._refuse(
        f"tensor {name!r} is of type {_type_name(number)}",
        f"convert it to one of {', '.join(TYPES.values())}",
      )
    kind = TYPES[number]
    values, block_bytes = _BLOCKS[kind]
    count = math.prod(shape)
    if math.prod(max(n, 1) for n in shape) >= 2**61 or (
      values > 1 and (not shape or shape[-1] % values)
    ):
      raise self._refuse(
        f"tensor {name!r} of type {kind} has the shape {tuple(shape)}"
      )
    end = begin + count // values * block_bytes
    if begin % alignment:
      raise self._refuse(f"tensor {name!r} begins off its alignment")
    if end > len(self._data):
      raise self._refuse(
        f"it is truncated: tensor {name!r} ends at byte {end}, the file at "
        f"{len(self._data)}"
      )
    info = TensorInfo(name, tuple(shape), np.dtype(np.float32))
    self._entries[name] = _Entry(info, kind, begin, end)

  def _check_overlap(self) -> None:
    end = 0
    for entry in sorted(
      self._entries.values(), key=lambda entry: (entry.begin, entry.end)
    ):
      if entry.begin < end:
        raise self._refuse(f"tensor {entry.info.name!r} overlaps another one")
      end = entry.end


class _Cursor:
  """Reads a header from its start; every size is checked before it is used."""

  def __init__(self, data, refuse):
    self.offset = 0
    self._data = data
    self._limit = min(len(data), MAX_HEADER_BYTES)
    self._refuse = refuse

  def take(self, size: int) -> int:
    """Steps over `size` bytes; returns where they begin."""
    begin = self.offset
    if begin + size > self._limit:
      if self._limit < len(self._data):
        raise self._refuse(f"its header is longer than {self._limit} bytes")
      raise self._refuse(
        f"it is truncated: its header reaches byte {begin + size}, the file "
        f"{self._limit}"
      )
    self.offset = begin + size
    return begin

  def integer(self, form: str) -> int:
    begin = self.take(struct.calcsize(form))
    return struct.unpack_from(form, self._data, begin)[0]

  def string(self) -> str:
    begin = self.take(self.integer("<Q"))
    # Some vocabularies have entries that are no UTF-8; no key should fail.
    return self._data[begin : self.offset].decode("utf-8", errors="replace")

  def strings(self, length: int) -> list[str]:
    return [self.string() for _ in range(length)]

  def scalars(self, key: str, kind: int, length: int) -> list:
    if kind not in _SCALARS:
      raise self._refuse(f"the key {key!r} has the unknown type {kind}")
    dtype = _SCALARS[kind]
    begin = self.take(length * dtype.itemsize)
    return np.frombuffer(self._data, dtype, length, begin).tolist()


def _type_name(number: int) -> str:
  try:
    return _library().GGMLQuantizationType(number).name
  except (ImportError, ValueError):
    return str(number)


@functools.cache
def _library():
  try:
    import gguf  # only readers of quantized tensors need it
  except ImportError as error:
    raise ImportError(
      "reading quantized tensors needs: pip install gguf"
    ) from error
  return gguf


def _decoder(kind: str):
  gguf = _library()
  number = gguf.GGMLQuantizationType[kind]
  return lambda blocks: gguf.quants.dequantize(blocks, number)
