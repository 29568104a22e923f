"""The byte-level BPE inside a GGUF file, built for the `tokenizers` library.

Which pre-tokenizer splits the text follows from the file's `tokenizer.ggml.pre`
as in llama.cpp (src/llama-vocab.cpp, commit 00ad355), whose expressions these
are. Like llama.cpp, and unlike the models' own tokenizer.json, nothing is
normalized first: for Qwen, text that is not in Unicode's form C may get other
ids here.
"""

from collections.abc import Collection, Iterable

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from longstraw_jax.weights.gguf_files import GgufSource
from longstraw_jax.weights.unknown_keys import check_ignored, refuse_unknown

# Token types of the format; the rest (normal, unused, byte) are plain entries.
UNKNOWN, CONTROL, USER_DEFINED = 2, 3, 4

_CONTRACTIONS = "(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT2 = (
  r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
)
_WORDS = (
  _CONTRACTIONS
  + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*|"
  + _SPACES
)
_QWEN35 = (
  _CONTRACTIONS
  + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}"
  + r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|"
  + _SPACES
)
_DEFAULT = (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]")

# A piece that is a token stays whole even where no merges lead to it.
_WHOLE_FIRST = (
  "llama3",
  "llama-v3",
  "llama-bpe",
  "falcon3",
  "pixtral",
  "lfm2",
)
# Each expression splits the pieces that the one before it left.
_FAMILIES = (
  (("default",), _DEFAULT),
  (("gpt-2", "phi-2", "mpt", "olmo", "exaone4", "a.x-4.0"), (_GPT2,)),
  (
    ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone"),
    (r"\p{N}", _GPT2),
  ),
  (_WHOLE_FIRST, (_WORDS % "{1,3}",)),
  (("glm4", "chatglm-bpe", "dbrx", "smaug-bpe"), (_WORDS % "{1,3}",)),
  (
    ("qwen2", "deepseek-r1-qwen", "stablelm2", "hunyuan", "megrez"),
    (_WORDS % "",),
  ),
  (("qwen35",), (_QWEN35,)),
)
PATTERNS = {name: split for names, split in _FAMILIES for name in names}


# Read here or by others, or of no effect on byte-level BPE in llama.cpp.
_KNOWN = frozenset(
  [
    f"tokenizer.ggml.{key}"
    for key in (
      "model pre tokens token_type merges scores token_type_count"
      " add_bos_token add_eos_token add_sep_token add_space_prefix"
      " remove_extra_whitespaces precompiled_charsmap"
    ).split()
  ]
  + [
    f"tokenizer.ggml.{key}_token_id"
    for key in (
      "bos eos eot eom unknown seperator separator padding mask cls prefix"
      " suffix middle fim_pre fim_suf fim_mid fim_pad fim_rep fim_sep"
    ).split()
  ]
)


def build_tokenizer(
  source: GgufSource,
  control: Collection[str] = (),
  ignore_keys: Iterable[str] = (),
) -> tokenizers.Tokenizer:
  """Builds the tokenizer of a GGUF file.

  Args:
    source: a file whose `tokenizer.ggml.model` is "gpt2".
    control: names that are special tokens whatever type the file gives them,
      as are the ones it ends or begins texts with.
    ignore_keys: names of unknown tokenizer.ggml keys to pass over.

  Returns:
    The tokenizer, ids as in the file. Control and unknown tokens are special
    added tokens, user-defined ones plain added tokens.

  Raises:
    ValueError: if the file has no tokenizer, one of another kind or
      pre-tokenizer, a malformed one, or one with an unknown key.
  """
  data = source.metadata
  refuse_unknown(
    f"{str(source.path)!r}",
    {k: v for k, v in data.items() if k.startswith("tokenizer.ggml.")},
    _KNOWN,
    check_ignored(ignore_keys),
  )
  model = data.get("tokenizer.ggml.model")
  if model != "gpt2":
    raise _refuse(
      source,
      f"its tokenizer.ggml.model is {model!r:.80}",
      "only byte-level BPE, 'gpt2', is read",
    )
  pre = data.get("tokenizer.ggml.pre", "default")
  if not isinstance(pre, str) or pre not in PATTERNS:
    raise _refuse(
      source,
      f"its tokenizer.ggml.pre is {pre!r:.80}",
      f"known are {', '.join(PATTERNS)}",
    )
  names = _strings(source, "tokenizer.ggml.tokens")
  names = [name or f"[EMPTY_{i}]" for i, name in enumerate(names)]
  vocab = {name: i for i, name in enumerate(names)}
  if len(vocab) < len(names):
    twice = next(name for i, name in enumerate(names) if vocab[name] != i)
    raise _refuse(source, f"its vocabulary has {twice!r} twice")
  merges = [
    _pair(source, merge) for merge in _strings(source, "tokenizer.ggml.merges")
  ]
  try:
    bpe = models.BPE(vocab, merges, ignore_merges=pre in _WHOLE_FIRST)
  except Exception as error:  # the library raises bare Exception
    raise _refuse(source, f"its merges do not fit ({error})") from error
  tokenizer = tokenizers.Tokenizer(bpe)
  tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
    [
      pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated")
      for pattern in PATTERNS[pre]
    ]
    + [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
  )
  tokenizer.decoder = decoders.ByteLevel()
  _add_tokens(tokenizer, source, names, control)
  return tokenizer


def special_id(source: GgufSource, kind: str) -> int | None:
  """Returns the id of a special token, None if the file names none.

  Args:
    source: a file with a tokenizer.
    kind: "bos", "eos", "eot" (end of turn) or "padding".

  Raises:
    ValueError: if the id is outside the vocabulary.
  """
  key = f"tokenizer.ggml.{kind}_token_id"
  value = source.metadata.get(key)
  size = len(_strings(source, "tokenizer.ggml.tokens"))
  if value is not None and (type(value) is not int or not 0 <= value < size):
    raise _refuse(
      source, f"its {key} is {value!r:.80}, the vocabulary has {size} tokens"
    )
  return value


def begin_ids(source: GgufSource) -> tuple[int, ...]:
  """What texts begin with: the bos token, where the file says so.

  Args:
    source: a file with a tokenizer.

  Raises:
    ValueError: if it says so and names none, or says neither yes nor no.
  """
  key = "tokenizer.ggml.add_bos_token"
  said = source.metadata.get(key)
  if said is not None and not isinstance(said, bool):
    raise _refuse(source, f"its {key} is {said!r:.80} and no boolean")
  bos = special_id(source, "bos")
  if said and bos is None:
    raise _refuse(source, f"its {key} is true and it names no bos_token_id")
  # llama.cpp adds it for these where the file says nothing.
  usual = source.metadata.get("tokenizer.ggml.pre") in _WHOLE_FIRST
  adds = usual if said is None else said
  return (bos,) if adds and bos is not None else ()


def _add_tokens(tokenizer, source, names, control) -> None:
  types = source.metadata.get("tokenizer.ggml.token_type", [1] * len(names))
  if not isinstance(types, list) or len(types) < len(names):
    raise _refuse(
      source, f"its tokenizer.ggml.token_type is no list of {len(names)}"
    )
  ends = {special_id(source, kind) for kind in ("bos", "eos", "eot")}
  special, plain = [], []
  for i, (name, kind) in enumerate(zip(names, types, strict=False)):
    if kind in (UNKNOWN, CONTROL) or i in ends or name in control:
      special.append(name)
    elif kind == USER_DEFINED:
      plain.append(name)
  make = lambda name, is_special: tokenizers.AddedToken(
    name, normalized=False, special=is_special
  )
  tokenizer.add_special_tokens([make(name, True) for name in special])
  tokenizer.add_tokens([make(name, False) for name in plain])


def _refuse(source, wrong: str, remedy: str = "convert it again") -> ValueError:
  return ValueError(
    f"no tokenizer can be made of {str(source.path)!r}: {wrong}; {remedy}"
  )


def _strings(source, key: str) -> list[str]:
  value = source.metadata.get(key)
  if (
    not isinstance(value, list)
    or not value
    or not all(isinstance(item, str) for item in value)
  ):
    raise _refuse(source, f"its {key} is no list of strings")
  return value


def _pair(source, merge: str) -> tuple[str, str]:
  at = merge.find(" ", 1)  # a token may begin with a space, none holds one
  if at < 0:
    raise _refuse(source, f"its merge {merge!r:.80} has no two parts")
  return merge[:at], merge[at + 1 :]
