"""Safetensors checkpoints: memory-mapped reading and streaming writing.

A file is 8 bytes of header length (little-endian), that many bytes of JSON and
the tensors' bytes back to back. A checkpoint of several files ("shards") has an
index that names each tensor's shard. The header is read here and not by the
safetensors library because that library's numpy side has no float8. It refuses
what the library refuses, so that whatever opens here opens elsewhere.
"""

from collections.abc import Callable, Iterable, Mapping
import dataclasses
import json
import math
import os
import pathlib
import sys
import tempfile

import ml_dtypes
import numpy as np

from longstraw_jax.weights.source import TensorInfo

SINGLE_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"
MAX_HEADER_BYTES = 100_000_000  # the safetensors library's own limit

# The packed 4- and 6-bit types are left out: no numpy type has their layout.
DTYPES = {
  "BOOL": np.dtype(np.bool_),
  "U8": np.dtype(np.uint8),
  "I8": np.dtype(np.int8),
  "U16": np.dtype(np.uint16),
  "I16": np.dtype(np.int16),
  "U32": np.dtype(np.uint32),
  "I32": np.dtype(np.int32),
  "U64": np.dtype(np.uint64),
  "I64": np.dtype(np.int64),
  "F16": np.dtype(np.float16),
  "BF16": np.dtype(ml_dtypes.bfloat16),
  "F32": np.dtype(np.float32),
  "F64": np.dtype(np.float64),
  "C64": np.dtype(np.complex64),
  "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
  "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
  "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),
  "F8_E4M3FNUZ": np.dtype(ml_dtypes.float8_e4m3fnuz),
  "F8_E5M2FNUZ": np.dtype(ml_dtypes.float8_e5m2fnuz),
}
_DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}

_Item = tuple[TensorInfo, np.ndarray | Callable[[], np.ndarray]]


@dataclasses.dataclass(frozen=True)
class _Entry:
  info: TensorInfo
  begin: int  # in the file, header included
  end: int


class SafetensorsSource:
  """A safetensors checkpoint, its data mapped and never copied.

  Attributes:
    path: the folder or file it was opened from.
    tensors: every tensor by name, in the order of the shards. Tensors that the
      shards hold and the index does not name are among them.
    metadata: of all files together.
  """

  def __init__(self, path: str | os.PathLike[str]):
    """Reads and checks every header; no tensor data is read.

    Args:
      path: a folder with `model.safetensors`, or with
        `model.safetensors.index.json` and the shards it names; or one
        .safetensors file.

    Raises:
      FileNotFoundError: if there is no checkpoint, or a shard is missing.
      ValueError: if a file is truncated, malformed or at odds with the index.
    """
    self.path = pathlib.Path(path)
    weight_map: dict[str, str] = {}
    if self.path.is_file():
      files = [self.path]
    else:
      single, index = self.path / SINGLE_NAME, self.path / INDEX_NAME
      if single.is_file() and index.is_file():
        raise ValueError(
          f"{str(self.path)!r} holds both {SINGLE_NAME} and {INDEX_NAME}: "
          "remove one of them, or give the path of the file"
        )
      if index.is_file():
        weight_map = _read_index(index)
        names = list(dict.fromkeys(weight_map.values()))
        files = [self.path / name for name in names]
      elif single.is_file():
        files = [single]
      else:
        raise FileNotFoundError(
          f"{str(self.path)!r} is no .safetensors file and no folder with "
          f"{SINGLE_NAME} or {INDEX_NAME}"
        )
    self.tensors: dict[str, TensorInfo] = {}
    self.metadata: dict[str, str] = {}
    self._places: dict[str, tuple[pathlib.Path, _Entry]] = {}
    self._maps: dict[pathlib.Path, np.ndarray] = {}
    for file in files:
      self._add(file)
    for name, shard in weight_map.items():
      if name not in self._places or self._places[name][0].name != shard:
        raise ValueError(
          f"{INDEX_NAME} of {str(self.path)!r} places tensor {name!r} in "
          f"{shard!r}, which lacks it: fetch the index and the shards again, "
          "from one revision"
        )

  def read(self, name: str) -> np.ndarray:
    """Returns one tensor as a read-only view of the mapped file.

    Args:
      name: a key of `tensors`.

    Returns:
      The array. Its pages are read when touched, and the system may drop them
      again, so reading a checkpoint takes the memory of what the caller copies.

    Raises:
      KeyError: if there is no such tensor.
    """
    file, entry = self._places[name]
    if file not in self._maps:
      self._maps[file] = np.memmap(file, np.uint8, mode="r").view(np.ndarray)
    flat = self._maps[file][entry.begin : entry.end]
    return flat.view(entry.info.dtype).reshape(entry.info.shape)

  def _add(self, file: pathlib.Path) -> None:
    if not file.is_file():
      raise FileNotFoundError(
        f"shard {str(file)!r} is missing but {INDEX_NAME} names it: fetch the "
        "checkpoint again"
      )
    metadata, entries = _read_header(file)
    self.metadata |= metadata
    for entry in entries:
      name = entry.info.name
      if name in self._places:
        raise ValueError(
          f"tensor {name!r} is in {self._places[name][0].name!r} and in "
          f"{file.name!r} of {str(self.path)!r}: keep it in one shard"
        )
      self._places[name] = (file, entry)
      self.tensors[name] = entry.info


def write_safetensors(
  folder: str | os.PathLike[str],
  tensors: Iterable[_Item],
  *,
  max_shard_bytes: int = 5_000_000_000,
  metadata: Mapping[str, str] | None = None,
) -> list[pathlib.Path]:
  """Writes a checkpoint, one tensor in memory at a time.

  Files appear under their final names only when all of them are complete, the
  index last, so a full disk or a stopped run leaves no half checkpoint.

  Args:
    folder: made if absent; may hold no checkpoint yet.
    tensors: what will be written, and the array or a function that makes it.
      Give functions where the tensors together are too large for memory: each
      is called once, when its turn comes.
    max_shard_bytes: most tensor data a file takes, save that a larger tensor
      has a file of its own. One file is `model.safetensors`; more are
      `model-00001-of-0000N.safetensors` and so on, with an index.
    metadata: of every file; None writes {"format": "pt"}, which the
      transformers library asks for.

  Returns:
    The paths of the shards.

  Raises:
    FileExistsError: if the folder holds a checkpoint.
    ValueError: if two tensors share a name, a dtype has no safetensors name, or
      an array differs from its `TensorInfo`.
  """
  if max_shard_bytes < 1:
    raise ValueError(f"max_shard_bytes is {max_shard_bytes}: give 1 or more")
  folder = pathlib.Path(folder)
  folder.mkdir(parents=True, exist_ok=True)
  for old in sorted(folder.glob("model*.safetensors*")):
    raise FileExistsError(
      f"{str(folder)!r} already holds {old.name!r}: give another folder"
    )
  shards = _plan(list(tensors), max_shard_bytes)
  names = [SINGLE_NAME]
  if len(shards) > 1:
    names = [
      f"model-{i + 1:05}-of-{len(shards):05}.safetensors"
      for i in range(len(shards))
    ]
  metadata = {"format": "pt"} if metadata is None else dict(metadata)
  with tempfile.TemporaryDirectory(prefix=".partial-", dir=folder) as partial:
    made = [pathlib.Path(partial, name) for name in names]
    for file, shard in zip(made, shards, strict=True):
      _write_shard(file, shard, metadata)
    if len(shards) > 1:
      made.append(pathlib.Path(partial, INDEX_NAME))
      _write_index(made[-1], names, shards)
    for file in made:
      os.replace(file, folder / file.name)
  return [folder / name for name in names]


def write_safetensors_file(
  file: str | os.PathLike[str],
  tensors: Iterable[_Item],
  metadata: Mapping[str, str],
) -> None:
  """Writes one file of any name, one tensor in memory at a time.

  It appears when it is complete, in place of an older one of its name.

  Args:
    file: its folder is made if absent.
    tensors: as in write_safetensors.
    metadata: of the file.

  Raises:
    ValueError: as in write_safetensors.
  """
  file = pathlib.Path(file)
  file.parent.mkdir(parents=True, exist_ok=True)
  (shard,) = _plan(list(tensors), sys.maxsize)
  with tempfile.TemporaryDirectory(
    prefix=".partial-", dir=file.parent
  ) as partial:
    made = pathlib.Path(partial, file.name)
    _write_shard(made, shard, dict(metadata))
    os.replace(made, file)


def _refuse(file: pathlib.Path, wrong: str, remedy: str = "") -> ValueError:
  remedy = remedy or "fetch it again"
  return ValueError(f"{str(file)!r} cannot be read: {wrong}; {remedy}")


def _load_json(file: pathlib.Path, data: bytes, what: str) -> dict:
  twice = []

  def pairs(items):
    seen = {}
    for key, value in items:
      if key in seen:
        twice.append(key)
      seen[key] = value
    return seen

  try:
    value = json.loads(data.decode("utf-8"), object_pairs_hook=pairs)
  except (ValueError, RecursionError) as error:
    raise _refuse(file, f"its {what} is not JSON ({error})") from error
  if twice:
    raise _refuse(file, f"its {what} has the key {twice[0]!r} twice")
  if not isinstance(value, dict):
    raise _refuse(file, f"its {what} is JSON but no object")
  return value


def _read_index(file: pathlib.Path) -> dict[str, str]:
  size = file.stat().st_size
  if size > MAX_HEADER_BYTES:
    raise _refuse(
      file, f"it has {size} bytes, an index at most {MAX_HEADER_BYTES}"
    )
  weight_map = _load_json(file, file.read_bytes(), "text").get("weight_map")
  if not isinstance(weight_map, dict) or not weight_map:
    raise _refuse(file, "it has no weight_map of tensor names to shards")
  for name, shard in weight_map.items():
    # Shards may be links to anywhere, as in download caches; names may not.
    if (
      not isinstance(shard, str)
      or not shard.endswith(".safetensors")
      or set(shard) & set("/\\\0")
    ):
      raise _refuse(
        file,
        f"it places tensor {name!r} in {shard!r}",
        "shards are .safetensors files named without a folder",
      )
  return weight_map


def _read_header(file: pathlib.Path) -> tuple[dict[str, str], list[_Entry]]:
  size = file.stat().st_size
  with file.open("rb") as opened:
    prefix = opened.read(8)
    if len(prefix) < 8:
      raise _refuse(file, f"it has {size} bytes, too few for a header")
    length = int.from_bytes(prefix, "little")
    if length > MAX_HEADER_BYTES:
      raise _refuse(
        file,
        f"it gives its header {length} bytes, allowed are {MAX_HEADER_BYTES}",
      )
    if 8 + length > size:
      raise _refuse(
        file, f"it gives its header {length} bytes but has {size} in all"
      )
    header = _load_json(file, opened.read(length), "header")
  metadata = header.pop("__metadata__", {})
  _check_metadata(file, metadata)
  start = 8 + length
  entries = [
    _entry(file, name, fields, start) for name, fields in header.items()
  ]
  entries.sort(key=lambda entry: (entry.begin, entry.end))
  end = start
  for entry in entries:
    if entry.begin != end:
      kind = "overlaps" if entry.begin < end else "leaves a gap to"
      raise _refuse(
        file,
        f"tensor {entry.info.name!r} begins at data byte "
        f"{entry.begin - start} and so {kind} the one before it, which ends "
        f"at {end - start}",
      )
    end = entry.end
  if end != size:
    kind = "is truncated" if size < end else "has bytes behind its tensors"
    raise _refuse(
      file, f"it {kind}: its header asks for {end} bytes, it has {size}"
    )
  return metadata, entries


def _check_metadata(file: pathlib.Path, metadata) -> None:
  if not isinstance(metadata, dict) or not all(
    isinstance(value, str) for value in metadata.values()
  ):
    raise _refuse(file, "its __metadata__ is not an object of strings")


def _entry(file: pathlib.Path, name: str, fields, start: int) -> _Entry:
  if not isinstance(fields, dict):
    raise _refuse(file, f"tensor {name!r} has the header {fields!r:.80}")
  kind, shape = fields.get("dtype"), fields.get("shape")
  offsets = fields.get("data_offsets")
  if not isinstance(kind, str) or kind not in DTYPES:
    raise _refuse(
      file,
      f"tensor {name!r} has the unknown dtype {kind!r:.80}",
      f"store it as one of {', '.join(DTYPES)}",
    )
  dtype = DTYPES[kind]
  # numpy takes 64 axes and 63 bits, an empty array's other axes included.
  if (
    not _are_sizes(shape)
    or len(shape) > 64
    or math.prod(max(n, 1) for n in shape) * dtype.itemsize >= 2**63
  ):
    raise _refuse(file, f"tensor {name!r} has the shape {shape!r:.80}")
  if not _are_sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
    raise _refuse(file, f"tensor {name!r} has data_offsets {offsets!r:.80}")
  begin, end = offsets
  wanted = math.prod(shape) * dtype.itemsize
  if end - begin != wanted:
    raise _refuse(
      file,
      f"tensor {name!r} has data_offsets {offsets}, {end - begin} bytes, but "
      f"{kind} of shape {shape} takes {wanted}",
    )
  info = TensorInfo(name, tuple(shape), dtype)
  return _Entry(info, start + begin, start + end)


def _are_sizes(value) -> bool:
  return isinstance(value, list) and all(
    type(n) is int and n >= 0 for n in value
  )


def _num_bytes(info: TensorInfo) -> int:
  return math.prod(info.shape) * info.dtype.itemsize


def _plan(tensors: list[_Item], max_shard_bytes: int) -> list[list[_Item]]:
  """Fills shards in the given order."""
  shards: list[list[_Item]] = [[]]
  names: set[str] = set()
  room = max_shard_bytes
  for info, value in tensors:
    if info.name in names or info.name == "__metadata__":
      raise ValueError(
        f"tensor name {info.name!r} is taken: every tensor needs its own"
      )
    names.add(info.name)
    if info.dtype not in _DTYPE_NAMES:
      raise ValueError(
        f"tensor {info.name!r} has dtype {info.dtype}: convert it to one of "
        f"{', '.join(str(dtype) for dtype in _DTYPE_NAMES)}"
      )
    size = _num_bytes(info)
    if size > room and shards[-1]:
      shards.append([])
      room = max_shard_bytes
    shards[-1].append((info, value))
    room -= size
  # Wide types first keep every tensor aligned to its own item size.
  return [
    sorted(shard, key=lambda item: -item[0].dtype.itemsize) for shard in shards
  ]


def _write_shard(
  file: pathlib.Path, shard: list[_Item], metadata: dict[str, str]
) -> None:
  header: dict = {"__metadata__": metadata} if metadata else {}
  end = 0
  for info, _ in shard:
    begin, end = end, end + _num_bytes(info)
    header[info.name] = {
      "dtype": _DTYPE_NAMES[info.dtype],
      "shape": [int(n) for n in info.shape],
      "data_offsets": [begin, end],
    }
  text = json.dumps(header, separators=(",", ":")).encode("utf-8")
  text += b" " * (-len(text) % 8)
  if len(text) > MAX_HEADER_BYTES:
    raise ValueError(
      f"the header of {file.name!r} takes {len(text)} bytes, allowed are "
      f"{MAX_HEADER_BYTES}: lower max_shard_bytes"
    )
  with file.open("xb") as opened:
    opened.write(len(text).to_bytes(8, "little") + text)
    for info, value in shard:
      array = np.asarray(value() if callable(value) else value)
      # Data is little-endian; dtypes compare unequal in another byte order.
      if array.shape != tuple(info.shape) or array.dtype != info.dtype:
        raise ValueError(
          f"tensor {info.name!r} came as {array.dtype} of shape "
          f"{array.shape}, announced was {info.dtype} of shape {info.shape}"
        )
      flat = np.ascontiguousarray(array).reshape(-1)
      opened.write(flat.view(np.uint8).data)
    opened.flush()
    os.fsync(opened.fileno())


def _write_index(
  file: pathlib.Path, names: list[str], shards: list[list[_Item]]
) -> None:
  placed = [
    (info, name)
    for name, shard in zip(names, shards, strict=True)
    for info, _ in shard
  ]
  index = {
    "metadata": {"total_size": sum(_num_bytes(info) for info, _ in placed)},
    "weight_map": {info.name: name for info, name in placed},
  }
  with file.open("x") as opened:
    json.dump(index, opened, indent=2)
    opened.flush()
    os.fsync(opened.fileno())
