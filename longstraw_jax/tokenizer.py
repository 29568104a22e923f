"""Text to token ids and back.

Ids travel end to end. Text is for tasks, reward functions and people: what was
decoded is never encoded again, because many id sequences share one text.
"""

from collections.abc import Iterable, Sequence
import os
import pathlib
from typing import Protocol, runtime_checkable

import jax
import numpy as np

Ids = Sequence[int] | np.ndarray | jax.Array

EOS_CANDIDATES = (
  "<|im_end|>",
  "<|endoftext|>",
  "<|eot_id|>",
  "<|end_of_text|>",
  "<eos>",
  "</s>",
)
PAD_CANDIDATES = ("<|pad|>", "<pad>", "[PAD]")


@runtime_checkable  # for run-time type checks of annotations
class Tokenizer(Protocol):
  """What the rest of the package asks of a tokenizer.

  Attributes:
    eos_id: ends a response.
    pad_id: fills rows behind their last token.
    vocab_size: all ids are below it.
  """

  eos_id: int
  pad_id: int
  vocab_size: int

  def encode(self, text: str) -> np.ndarray:
    """[T] int32 ids of the text, without special tokens added."""

  def decode(self, ids: Ids) -> str:
    """Text of the ids; end and padding ids have none."""


class ByteTokenizer:
  """One token a byte of UTF-8, and two special ids behind them."""

  eos_id = 256
  pad_id = 257
  vocab_size = 258

  def encode(self, text: str) -> np.ndarray:
    """Returns the bytes of the text as [T] int32."""
    return np.frombuffer(text.encode("utf-8"), np.uint8).astype(np.int32)

  def decode(self, ids: Ids) -> str:
    """Returns the text of the bytes among `ids`.

    Args:
      ids: [T]. End and padding ids are left out. An id of 258 or more, which a
        model with a wider vocabulary may sample, reads as U+FFFD, as invalid
        UTF-8 does: it must not vanish from a response that is to be judged.

    Returns:
      The text.

    Raises:
      ValueError: if an id is negative.
    """
    ids = _as_ids(ids)
    ids = ids[(ids != self.eos_id) & (ids != self.pad_id)]
    # 0xFF occurs nowhere in UTF-8, so it decodes to the replacement character.
    ids = np.where(ids > 255, 0xFF, ids)
    return ids.astype(np.uint8).tobytes().decode("utf-8", errors="replace")


class JsonTokenizer:
  """A tokenizer.json, read by the `tokenizers` library.

  Attributes:
    eos_id: id of the end token.
    pad_id: id of the padding token: the file's own, or one of
      `PAD_CANDIDATES`, or else the end token.
    vocab_size: largest id plus one, added tokens included.
  """

  def __init__(
    self, path: str | os.PathLike[str], eos_token: str | None = None
  ):
    """Reads the file.

    Args:
      path: a tokenizer.json.
      eos_token: the token that ends a response; None takes the first of
        `EOS_CANDIDATES` that the vocabulary has, which prefers the end of a
        chat turn to the end of a document.

    Raises:
      ImportError: if the `tokenizers` library is not installed.
      FileNotFoundError: if there is no such file.
      ValueError: if the file cannot be read as a tokenizer or has no such end
        token.
    """
    try:
      import tokenizers  # only users of a tokenizer.json need it
    except ImportError as error:
      raise ImportError(
        "reading a tokenizer.json needs: pip install tokenizers"
      ) from error
    path = pathlib.Path(path)
    if not path.is_file():
      raise FileNotFoundError(f"no tokenizer file at {str(path)!r}")
    try:
      self._tokenizer = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception
      raise ValueError(
        f"{str(path)!r} is no tokenizer.json: {error}"
      ) from error
    # A file may carry truncation and padding meant for another use.
    padding = self._tokenizer.padding
    self._tokenizer.no_truncation()
    self._tokenizer.no_padding()
    self.vocab_size = max(self._tokenizer.get_vocab().values(), default=-1) + 1
    candidates = EOS_CANDIDATES if eos_token is None else (eos_token,)
    eos_id = self._first_id(candidates)
    if eos_id is None:
      raise ValueError(
        f"{str(path)!r} has no end token among {candidates}: pass the name of"
        " one that it has as eos_token"
      )
    self.eos_id = eos_id
    pad_names = (padding["pad_token"],) if padding else ()
    pad_id = self._first_id(pad_names + PAD_CANDIDATES)
    self.pad_id = eos_id if pad_id is None else pad_id

  def encode(self, text: str) -> np.ndarray:
    """Returns the [T] int32 ids of the text, nothing added."""
    encoding = self._tokenizer.encode(text, add_special_tokens=False)
    return np.asarray(encoding.ids, np.int32)

  def decode(self, ids: Ids) -> str:
    """Returns the text of the ids.

    Args:
      ids: [T]. Special tokens are left out.

    Returns:
      The text; invalid UTF-8 and ids without a token read as U+FFFD.

    Raises:
      ValueError: if an id is negative.
    """
    ids = _as_ids(ids)
    ids = ids[(ids != self.eos_id) & (ids != self.pad_id)]
    unknown = np.flatnonzero(ids >= self.vocab_size)
    runs = np.split(ids, unknown)
    # Every run but the first begins with the unknown id it was split at.
    known = [runs[0]] + [run[1:] for run in runs[1:]]
    return "\ufffd".join(
      self._tokenizer.decode(run.tolist(), skip_special_tokens=True)
      for run in known
    )

  def _first_id(self, names: Iterable[str]) -> int | None:
    ids = (self._tokenizer.token_to_id(name) for name in names)
    return next((i for i in ids if i is not None), None)


def load_tokenizer(spec: str, eos_token: str | None = None) -> Tokenizer:
  """Makes a tokenizer from what a flag says.

  Args:
    spec: "byte", or the path of a tokenizer.json.
    eos_token: passed on to `JsonTokenizer`.

  Returns:
    The tokenizer.

  Raises:
    ValueError: if an end token is given for "byte", which has its own.
    FileNotFoundError: if the spec is neither "byte" nor a file.
  """
  if spec == "byte":
    if eos_token is not None:
      raise ValueError(
        f"eos_token={eos_token!r} has no meaning for 'byte': leave it out"
      )
    return ByteTokenizer()
  if not pathlib.Path(spec).is_file():
    raise FileNotFoundError(
      f"tokenizer {spec!r} is neither 'byte' nor the path of a tokenizer.json"
    )
  return JsonTokenizer(spec, eos_token)


def _as_ids(ids: Ids) -> np.ndarray:
  ids = np.asarray(ids, np.int64).reshape(-1)
  if ids.size and ids.min() < 0:
    raise ValueError(f"token id {ids.min()} is negative")
  return ids
