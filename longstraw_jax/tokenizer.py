"""Text to token ids and back.

Ids travel end to end. Text is for tasks, reward functions and people: what was
decoded is never encoded again, because many id sequences share one text.
"""

from collections.abc import Iterable, Sequence
import copy
import functools
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

  def encode(self, text: str, *, special: bool = False) -> np.ndarray:
    """[T] int32 ids of the text, without special tokens added.

    Args:
      text: what to encode.
      special: False where the text is content, of a user, a document or a tool:
        the names of special tokens in it are text like any other, so that
        content cannot end a turn or begin one. True where a chat template
        rendered it: the names become the tokens.
    """

  def decode(self, ids: Ids, *, special: bool = False) -> str:
    """Text of the ids.

    Args:
      ids: [T].
      special: True where the text is to be judged: special tokens stand in it
        by their names, so that none vanishes from between two others. False
        where it is to be read: they are left out.
    """


class ByteTokenizer:
  """One token a byte of UTF-8, and two special ids behind them."""

  eos_id = 256
  pad_id = 257
  vocab_size = 258

  def encode(self, text: str, *, special: bool = False) -> np.ndarray:
    """Returns the bytes of the text as [T] int32.

    Args:
      text: what to encode.
      special: of no effect, as the special ids have no names.
    """
    return np.frombuffer(text.encode("utf-8"), np.uint8).astype(np.int32)

  def decode(self, ids: Ids, *, special: bool = False) -> str:
    """Returns the text of the bytes among `ids`.

    Args:
      ids: [T]. An id of 258 or more, which a model with a wider vocabulary may
        sample, reads as U+FFFD, as invalid UTF-8 does: it must not vanish from
        a response that is to be judged.
      special: whether end and padding ids read as U+FFFD too, or are left out.

    Returns:
      The text.

    Raises:
      ValueError: if an id is negative.
    """
    ids = _as_ids(ids)
    if not special:
      ids = ids[(ids != self.eos_id) & (ids != self.pad_id)]
    # 0xFF occurs nowhere in UTF-8, so it decodes to the replacement character.
    ids = np.where(ids > 255, 0xFF, ids)
    return ids.astype(np.uint8).tobytes().decode("utf-8", errors="replace")


class LibraryTokenizer:
  """A tokenizer of the `tokenizers` library.

  Attributes:
    eos_id: id of the end token.
    pad_id: id of the padding token, or else of the end token.
    vocab_size: largest id plus one, added tokens included.
  """

  def __init__(self, tokenizer, eos_id: int, pad_id: int | None = None):
    """Wraps a `tokenizers.Tokenizer`, which becomes this object's own.

    Args:
      tokenizer: truncation and padding, meant for another use, are turned off.
      eos_id: ends a response.
      pad_id: fills rows behind their last token; None takes `eos_id`.
    """
    tokenizer.no_truncation()
    tokenizer.no_padding()
    tokenizer.encode_special_tokens = True
    self._tokenizer = tokenizer
    ids = np.fromiter(tokenizer.get_vocab().values(), np.int64)
    self.vocab_size = int(ids.max(initial=-1)) + 1
    self._has_token = np.zeros(self.vocab_size, bool)
    self._has_token[ids] = True
    self.eos_id = eos_id
    self.pad_id = eos_id if pad_id is None else pad_id

  def encode(self, text: str, *, special: bool = False) -> np.ndarray:
    """Returns the [T] int32 ids of the text, nothing added.

    Args:
      text: what to encode. Bytes that a byte-level vocabulary lacks get no ids.
      special: whether the names of special tokens in the text become the tokens
        (a rendered chat template) or stay text (anybody's content).
    """
    tokenizer = self._with_special if special else self._tokenizer
    encoding = tokenizer.encode(text, add_special_tokens=False)
    return np.asarray(encoding.ids, np.int32)

  def decode(self, ids: Ids, *, special: bool = False) -> str:
    """Returns the text of the ids.

    Args:
      ids: [T].
      special: whether special tokens read as their names, or are left out.

    Returns:
      The text; invalid UTF-8 and ids without a token read as U+FFFD.

    Raises:
      ValueError: if an id is negative.
    """
    ids = _as_ids(ids)
    if not special:
      ids = ids[(ids != self.eos_id) & (ids != self.pad_id)]
    known = ids < self.vocab_size
    known[known] = self._has_token[ids[known]]
    runs = np.split(ids, np.flatnonzero(~known))
    # Every run but the first begins with the unknown id it was split at.
    runs = [runs[0]] + [run[1:] for run in runs[1:]]
    return "\ufffd".join(
      self._tokenizer.decode(run.tolist(), skip_special_tokens=not special)
      for run in runs
    )

  @functools.cached_property
  def _with_special(self):
    # A second object, as switching one back and forth is unsafe in threads.
    tokenizer = copy.deepcopy(self._tokenizer)
    tokenizer.encode_special_tokens = False
    return tokenizer

  def __getstate__(self):
    state = self.__dict__.copy()
    state.pop("_with_special", None)
    return state

  def __setstate__(self, state):
    self.__dict__.update(state)
    self._tokenizer.encode_special_tokens = True  # the library drops it


class JsonTokenizer(LibraryTokenizer):
  """A tokenizer.json.

  The padding token is the file's own, or one of `PAD_CANDIDATES`.
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
    tokenizers = _import_tokenizers()
    path = pathlib.Path(path)
    if not path.is_file():
      raise FileNotFoundError(f"no tokenizer file at {str(path)!r}")
    try:
      tokenizer = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception
      raise ValueError(
        f"{str(path)!r} is no tokenizer.json: {error}"
      ) from error
    padding = tokenizer.padding
    pad_names = (padding["pad_token"],) if padding else ()
    super().__init__(
      tokenizer,
      _end_id(tokenizer, path, eos_token),
      _first_id(tokenizer, pad_names + PAD_CANDIDATES),
    )


class GgufTokenizer(LibraryTokenizer):
  """The byte-level BPE inside a GGUF file.

  The padding token is the file's own if it is a special token, or one of
  `PAD_CANDIDATES`.
  """

  def __init__(
    self, path: str | os.PathLike[str], eos_token: str | None = None
  ):
    """Reads the file's header.

    Args:
      path: a GGUF file.
      eos_token: the token that ends a response; None takes the file's end of
        turn, or else its end of sequence, or else the first of `EOS_CANDIDATES`
        that the vocabulary has.

    Raises:
      ImportError: if the `tokenizers` library is not installed.
      FileNotFoundError: if there is no such file.
      ValueError: if the file is no GGUF, or has no tokenizer that can be read,
        or no such end token.
    """
    _import_tokenizers()
    # Here, because the module needs the library.
    from longstraw_jax import gguf_tokenizer
    from longstraw_jax.weights.gguf_files import GgufSource

    source = GgufSource(path)
    tokenizer = gguf_tokenizer.build_tokenizer(source, EOS_CANDIDATES)
    eos_id = None
    if eos_token is None:
      eos_id = gguf_tokenizer.special_id(source, "eot")
      if eos_id is None:
        eos_id = gguf_tokenizer.special_id(source, "eos")
    if eos_id is None:
      eos_id = _end_id(tokenizer, source.path, eos_token)
    pad_id = gguf_tokenizer.special_id(source, "padding")
    added = tokenizer.get_added_tokens_decoder()
    if pad_id not in added or not added[pad_id].special:
      pad_id = _first_id(tokenizer, PAD_CANDIDATES)
    super().__init__(tokenizer, eos_id, pad_id)


def load_tokenizer(spec: str, eos_token: str | None = None) -> Tokenizer:
  """Makes a tokenizer from what a flag says.

  Args:
    spec: "byte", or the path of a tokenizer.json, of a folder that holds one,
      or of a .gguf file.
    eos_token: passed on to `JsonTokenizer` or `GgufTokenizer`.

  Returns:
    The tokenizer.

  Raises:
    ValueError: if an end token is given for "byte", which has its own.
    FileNotFoundError: if the spec is none of these.
  """
  if spec == "byte":
    if eos_token is not None:
      raise ValueError(
        f"eos_token={eos_token!r} has no meaning for 'byte': leave it out"
      )
    return ByteTokenizer()
  path = pathlib.Path(spec)
  if path.is_dir():
    path = path / "tokenizer.json"
  if not path.is_file():
    raise FileNotFoundError(
      f"tokenizer {spec!r} is neither 'byte' nor the path of a tokenizer.json, "
      "of a folder with one or of a .gguf file"
    )
  if path.suffix == ".gguf":
    return GgufTokenizer(path, eos_token)
  return JsonTokenizer(path, eos_token)


def _import_tokenizers():
  try:
    import tokenizers  # only users of a tokenizer file need it
  except ImportError as error:
    raise ImportError(
      "reading a tokenizer file needs: pip install tokenizers"
    ) from error
  return tokenizers


def _first_id(tokenizer, names: Iterable[str]) -> int | None:
  ids = (tokenizer.token_to_id(name) for name in names)
  return next((i for i in ids if i is not None), None)


def _end_id(tokenizer, path: pathlib.Path, eos_token: str | None) -> int:
  candidates = EOS_CANDIDATES if eos_token is None else (eos_token,)
  eos_id = _first_id(tokenizer, candidates)
  if eos_id is None:
    raise ValueError(
      f"{str(path)!r} has no end token among {candidates}: pass the name of"
      " one that it has as eos_token"
    )
  return eos_id


def _as_ids(ids: Ids) -> np.ndarray:
  ids = np.asarray(ids, np.int64).reshape(-1)
  if ids.size and ids.min() < 0:
    raise ValueError(f"token id {ids.min()} is negative")
  return ids
