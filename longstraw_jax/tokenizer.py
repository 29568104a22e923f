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

from longstraw_jax.token_files import (
  MAX_ID,
  build_tokenizer,
  ids_in_front,
  read_side_files,
)

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
    begin_ids: what every text begins with; often nothing.
  """

  eos_id: int
  pad_id: int
  vocab_size: int
  begin_ids: tuple[int, ...]

  def encode(
    self, text: str, *, special: bool = False, begin: bool = True
  ) -> np.ndarray:
    """[T] int32 ids of the text, behind the ids that texts begin with.

    Args:
      text: what to encode.
      special: False where the text is content, of a user, a document or a tool:
        the names of special tokens in it are text like any other, so that
        content cannot end a turn or begin one. True where a chat template
        rendered it: the names become the tokens. A template that wrote the
        begin tokens itself gets no others.
      begin: False for a piece that follows other ids.
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
  begin_ids = ()

  def encode(
    self, text: str, *, special: bool = False, begin: bool = True
  ) -> np.ndarray:
    """Returns the bytes of the text as [T] int32.

    Args:
      text: what to encode.
      special: of no effect, as the special ids have no names.
      begin: of no effect, as no text begins with any.
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
    begin_ids: what every text begins with.
  """

  def __init__(
    self,
    tokenizer,
    eos_id: int,
    pad_id: int | None = None,
    begin_ids: Sequence[int] | None = None,
  ):
    """Wraps a `tokenizers.Tokenizer`, which becomes this object's own.

    Args:
      tokenizer: truncation and padding, meant for another use, are turned off.
      eos_id: ends a response.
      pad_id: fills rows behind their last token; None takes `eos_id`.
      begin_ids: what every text begins with; None takes what the tokenizer's
        post-processor puts in front of one. What it puts behind is left off,
        as a prompt is to be continued.

    Raises:
      ValueError: if an id is too large for any vocabulary, or texts begin with
        an id that has no token.
    """
    tokenizer.no_truncation()
    tokenizer.no_padding()
    tokenizer.encode_special_tokens = True
    self._tokenizer = tokenizer
    vocab = tokenizer.get_vocab()
    ids = np.fromiter(vocab.values(), np.int64)
    self.vocab_size = int(ids.max(initial=-1)) + 1
    if self.vocab_size > MAX_ID:
      name = max(vocab, key=vocab.get)
      raise ValueError(
        f"the tokenizer gives {name!r:.80} the id {vocab[name]}, ids are below "
        f"{MAX_ID}: fetch it again"
      )
    self._has_token = np.zeros(self.vocab_size, bool)
    self._has_token[ids] = True
    self.eos_id = eos_id
    self.pad_id = eos_id if pad_id is None else pad_id
    if begin_ids is None:
      begin_ids = ids_in_front(tokenizer)
    self.begin_ids = tuple(begin_ids)
    names = [tokenizer.id_to_token(i) for i in self.begin_ids]
    if None in names:
      raise ValueError(
        f"the tokenizer begins texts with the ids {self.begin_ids}, of which "
        "not all have a token: fetch it again"
      )
    self._begin_text = "".join(names)

  def encode(
    self, text: str, *, special: bool = False, begin: bool = True
  ) -> np.ndarray:
    """Returns the [T] int32 ids of the text, behind the begin tokens.

    Args:
      text: what to encode. Bytes that a byte-level vocabulary lacks get no ids.
      special: whether the names of special tokens in the text become the tokens
        (a rendered chat template) or stay text (anybody's content). A rendered
        text that begins with the begin tokens gets no others.
      begin: False for a piece that follows other ids.
    """
    tokenizer = self._with_special if special else self._tokenizer
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    written = special and text.lstrip().startswith(self._begin_text)
    if begin and not written:
      ids = [*self.begin_ids, *ids]
    return np.asarray(ids, np.int32)

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
  """A tokenizer.json, with the files that stand beside it.

  Tokens that tokenizer_config.json, special_tokens_map.json or
  added_tokens.json add are tokens here too. Texts begin with what the
  post-processor says; `add_bos_token` in tokenizer_config.json is for folders
  without a tokenizer.json, and does nothing here, as in transformers 5. The
  padding token is the file's own, or tokenizer_config.json's, or one of
  `PAD_CANDIDATES`.
  """

  def __init__(
    self,
    path: str | os.PathLike[str],
    eos_token: str | None = None,
    *,
    begin: bool = True,
  ):
    """Reads the files.

    Args:
      path: a tokenizer.json.
      eos_token: the token that ends a response; None takes the one that
        tokenizer_config.json names, or else the first of `EOS_CANDIDATES` that
        the vocabulary has, which prefers the end of a chat turn to the end of a
        document.
      begin: False leaves off what texts begin with.

    Raises:
      ImportError: if the `tokenizers` library is not installed.
      FileNotFoundError: if there is no such file.
      ValueError: if the file cannot be read as a tokenizer, contradicts those
        beside it or has no such end token.
    """
    _import_tokenizers()
    path = pathlib.Path(path)
    if not path.is_file():
      raise FileNotFoundError(f"no tokenizer file at {str(path)!r}")
    beside = read_side_files(path.parent)
    tokenizer = build_tokenizer(path, beside)
    padding = tokenizer.padding
    pad_names = [padding["pad_token"]] if padding else []
    if "pad_token" in beside.roles:
      pad_names.append(beside.roles["pad_token"])
    super().__init__(
      tokenizer,
      _end_id(tokenizer, path, eos_token or beside.roles.get("eos_token")),
      _first_id(tokenizer, (*pad_names, *PAD_CANDIDATES)),
      None if begin else (),
    )


class GgufTokenizer(LibraryTokenizer):
  """The byte-level BPE inside a GGUF file.

  The padding token is the file's own if it is a special token, or one of
  `PAD_CANDIDATES`. Texts begin as llama.cpp has them begin.
  """

  def __init__(
    self,
    path: str | os.PathLike[str],
    eos_token: str | None = None,
    *,
    begin: bool = True,
    ignore_keys: Iterable[str] = (),
  ):
    """Reads the file's header.

    Args:
      path: a GGUF file.
      eos_token: the token that ends a response; None takes the file's end of
        turn, or else its end of sequence, or else the first of `EOS_CANDIDATES`
        that the vocabulary has.
      begin: False leaves off what texts begin with.
      ignore_keys: names of unknown tokenizer.ggml keys to pass over.

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
    tokenizer = gguf_tokenizer.build_tokenizer(
      source, EOS_CANDIDATES, ignore_keys
    )
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
    begin_ids = gguf_tokenizer.begin_ids(source) if begin else ()
    super().__init__(tokenizer, eos_id, pad_id, begin_ids)


def load_tokenizer(
  spec: str,
  eos_token: str | None = None,
  *,
  begin: bool = True,
  ignore_keys: Iterable[str] = (),
) -> Tokenizer:
  """Makes a tokenizer from what a flag says.

  Args:
    spec: "byte", or the path of a tokenizer.json, of a folder that holds one,
      or of a .gguf file.
    eos_token: passed on to `JsonTokenizer` or `GgufTokenizer`.
    begin: likewise.
    ignore_keys: passed on to `GgufTokenizer`.

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
    return GgufTokenizer(path, eos_token, begin=begin, ignore_keys=ignore_keys)
  return JsonTokenizer(path, eos_token, begin=begin)


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
  ids = np.asarray(ids).reshape(-1)
  if ids.size and ids.dtype.kind not in "iu":
    raise ValueError(f"token ids are {ids.dtype}: give whole numbers")
  ids = ids.astype(np.int64)
  if ids.size and ids.min() < 0:
    raise ValueError(f"token id {ids.min()} is negative")
  return ids
