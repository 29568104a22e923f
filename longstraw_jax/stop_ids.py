"""Which ids end a response: all that a tokenizer or its checkpoint names."""

from collections.abc import Iterable, Mapping
import dataclasses
import os
import pathlib
from typing import Any

import numpy as np

from longstraw_jax.json_files import read_object
from longstraw_jax.tokenizer import Tokenizer
from longstraw_jax.weights.gguf_files import GgufSource

_KEY = "eos_token_id"
_GGUF_KEYS = tuple(
  f"tokenizer.ggml.{k}_token_id" for k in ("eos", "eot", "eom")
)


@dataclasses.dataclass(frozen=True)
class StopId:
  """An id that ends a response.

  Attributes:
    id: the id.
    name: its token.
    sources: who says so.
  """

  id: int
  name: str
  sources: tuple[str, ...]

  def __str__(self) -> str:
    """For the line that a run begins with."""
    return f"{self.id} {self.name!r} ({', '.join(self.sources)})"


def find_stop_ids(
  tokenizer: Tokenizer,
  checkpoint: str | os.PathLike[str] | None = None,
  given: Iterable[int] = (),
  *,
  vocab_size: int | None = None,
) -> tuple[StopId, ...]:
  """The union of all that is said of it, the tokenizer's own end first.

  Args:
    tokenizer: of the model.
    checkpoint: folder whose config.json (and its text_config) and
      generation_config.json are read, or a .gguf file.
    given: further ids.
    vocab_size: of the model; None takes the tokenizer's.

  Raises:
    ValueError: naming the file, the key and the value that is no id of the
      vocabulary.
  """
  size = tokenizer.vocab_size if vocab_size is None else vocab_size
  found: dict[int, list[str]] = {}
  said = [("tokenizer", "the tokenizer's end token", tokenizer.eos_id)]
  if checkpoint is not None:
    said += _said_by(pathlib.Path(checkpoint))
  said.append(("stop_token_ids", "stop_token_ids", list(given)))
  for source, key, value in said:
    for i in value if isinstance(value, list) else [value]:
      whole = isinstance(i, (int, np.integer)) and not isinstance(i, bool)
      if not whole or not 0 <= i < size:
        raise ValueError(
          f"{key} is {value!r:.200}: {i!r:.40} is no id of a vocabulary of "
          f"{size}; use whole numbers below it"
        )
      if source not in found.setdefault(int(i), []):
        found[int(i)].append(source)
  return tuple(
    StopId(i, tokenizer.decode([i], special=True), tuple(names))
    for i, names in found.items()
  )


def _said_by(path: pathlib.Path) -> list[tuple[str, str, Any]]:
  """(file's name, key in the file, value) of all ends a checkpoint names."""
  if path.is_file():
    metadata = GgufSource(path).metadata
    return _set(path, {key: metadata.get(key) for key in _GGUF_KEYS})
  said = []
  for name in ("config.json", "generation_config.json"):
    if (path / name).is_file():
      values = read_object(path / name)
      said += _set(path / name, {_KEY: values.get(_KEY)})
      text = values.get("text_config")
      if isinstance(text, Mapping):
        said += _set(path / name, {f"text_config.{_KEY}": text.get(_KEY)})
  return said


def _set(file: pathlib.Path, values: Mapping[str, Any]):
  return [
    (file.name, f"{str(file)!r}: {key}", value)
    for key, value in values.items()
    if value is not None
  ]
