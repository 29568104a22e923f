"""A tokenizer.json together with the files that stand beside it.

tokenizer_config.json, special_tokens_map.json and added_tokens.json may name
tokens that tokenizer.json lacks; the transformers library adds them when it
loads a folder, and so does this. Where they contradict tokenizer.json, or each
other, no tokenizer is made.
"""

from collections.abc import Iterable, Mapping
import dataclasses
import itertools
import json
import pathlib
from typing import Any

from longstraw_jax.json_files import read_object, read_text

MAX_ID = 1 << 24  # published vocabularies end below 2^19

_CONFIG, _SPECIAL, _ADDED = (
  "tokenizer_config.json",
  "special_tokens_map.json",
  "added_tokens.json",
)
_NAMED = "bos_token eos_token unk_token sep_token pad_token cls_token".split()
_NAMED.append("mask_token")
_LISTS = ("additional_special_tokens", "extra_special_tokens")


@dataclasses.dataclass(frozen=True)
class Token:
  """An added token, with the flags of the library's `AddedToken`."""

  content: str
  single_word: bool = False
  lstrip: bool = False
  rstrip: bool = False
  normalized: bool = False
  special: bool = False


_FLAGS = tuple(f.name for f in dataclasses.fields(Token))[1:]


@dataclasses.dataclass(frozen=True)
class SideFiles:
  """What stands beside a tokenizer.json.

  Attributes:
    numbered: added tokens that have an id, by it, and which file says so.
    named: special tokens without one.
    roles: names of such as "eos_token".
  """

  numbered: Mapping[int, tuple[Token, pathlib.Path]]
  named: tuple[Token, ...]
  roles: Mapping[str, str]


def token_name(value: Any) -> str | None:
  """The name of a token in such a file: text, or an object with its flags."""
  if isinstance(value, Mapping):
    value = value.get("content")
  return value if isinstance(value, str) and value else None


def read_side_files(folder: pathlib.Path) -> SideFiles:
  """Reads the files beside a tokenizer.json, none of which must exist.

  Raises:
    ValueError: naming the file and the entry that is malformed, or the token
      that two of them give different ids.
  """
  read = {
    name: read_object(folder / name)
    for name in (_CONFIG, _SPECIAL, _ADDED)
    if (folder / name).is_file()
  }
  named: dict[str, Token] = {}
  roles: dict[str, str] = {}
  for name in (_SPECIAL, _CONFIG):  # what the configuration says wins
    for role, value in _special_values(read.get(name, {})):
      token = _added(folder / name, role, value, special=True)
      if token is not None:
        named[token.content] = token
        if role in _NAMED:
          roles[role] = token.content
  numbered: dict[int, tuple[Token, pathlib.Path]] = {}
  ids: dict[str, int] = {}
  entries = [
    (folder / _CONFIG, number, value)
    for number, value in _decoder(folder / _CONFIG, read.get(_CONFIG, {}))
  ] + [
    (folder / _ADDED, number, name)
    for name, number in read.get(_ADDED, {}).items()
  ]
  for file, number, value in entries:
    i = _id(file, number)
    token = _added(file, f"token {i}", value)
    if token is None:
      raise ValueError(f"{str(file)!r}: token {i} has no content: add it")
    if token.content in roles.values():
      token = dataclasses.replace(token, special=True)
    other = numbered.setdefault(i, (token, file))[0].content
    if other != token.content or ids.setdefault(token.content, i) != i:
      raise ValueError(
        f"{str(file)!r} gives {token.content!r} the id {i}, where the id "
        f"{ids.get(token.content, i)} is {other!r}'s: make the files agree"
      )
  return SideFiles(
    numbered=numbered,
    named=tuple(t for name, t in named.items() if name not in ids),
    roles=roles,
  )


def build_tokenizer(path: pathlib.Path, beside: SideFiles):
  """The `tokenizers.Tokenizer` of a tokenizer.json, an added token one id.

  Args:
    path: the file.
    beside: of the files in its folder.

  Raises:
    ValueError: if it is no tokenizer, or a token has another id there than
      beside it.
  """
  text = read_text(path)
  made = _parsed(path, text)
  data = json.loads(text)
  own = {t["content"]: t["id"] for t in data.get("added_tokens") or ()}
  places = made.get_vocab(with_added_tokens=False) | own
  names = {i: name for name, i in places.items()}
  for i, (token, file) in beside.numbered.items():
    there = places.get(token.content, i), names.get(i, token.content)
    if there != (i, token.content):
      raise ValueError(
        f"{str(file)!r} gives {token.content!r} the id {i}, where "
        f"{str(path)!r} has {there[1]!r} and the id {there[0]}: fetch both"
      )
  tokens = {i: token for i, (token, _) in sorted(beside.numbered.items())}
  numbers = own | {token.content: i for i, token in tokens.items()}
  _add(made, tokens.values())
  # The library counts on from the last id, whatever a file says: where that is
  # another one, the model's own vocabulary has to hold the token.
  if any(made.token_to_id(name) != i for name, i in numbers.items()):
    made = _parsed(path, json.dumps(_pinned(path, data, numbers)))
    _add(made, tokens.values())
  for name, i in numbers.items():
    if made.token_to_id(name) != i or made.id_to_token(i) != name:
      raise ValueError(
        f"{str(path)!r} has {made.id_to_token(i)!r} at id {i}, where "
        f"{name!r} should be: fetch it and the files beside it again"
      )
  known = {t.content for t in made.get_added_tokens_decoder().values()}
  _add(made, [t for t in beside.named if t.content not in known])
  return made


def ids_in_front(tokenizer) -> list[int]:
  """The ids that a tokenizer's post-processor puts in front of every text."""
  if tokenizer.post_processor is None:
    return []
  # Some text that has ids: not every vocabulary has every letter.
  for text in itertools.chain("a0.", tokenizer.get_vocab()):
    plain = tokenizer.encode(text, add_special_tokens=False)
    if plain.ids:
      break
  else:
    return []
  whole = tokenizer.post_process(plain)
  front = itertools.takewhile(
    lambda pair: pair[1],
    zip(whole.ids, whole.special_tokens_mask, strict=True),
  )
  return [i for i, _ in front]


def _parsed(path: pathlib.Path, text: str):
  from tokenizers import Tokenizer  # only users of a tokenizer file need it

  try:
    return Tokenizer.from_str(text)
  except Exception as error:  # the library raises bare Exception
    raise ValueError(f"{str(path)!r} is no tokenizer.json: {error}") from error


def _add(tokenizer, tokens: Iterable[Token]) -> None:
  from tokenizers import AddedToken

  tokenizer.add_tokens([AddedToken(**dataclasses.asdict(t)) for t in tokens])


def _pinned(path: pathlib.Path, data: dict, numbers: Mapping[str, int]) -> dict:
  """The file with its added tokens in the vocabulary of its model."""
  vocab = data["model"].get("vocab")
  if not isinstance(vocab, dict):
    raise ValueError(
      f"{str(path)!r} has added tokens whose ids do not follow each other, "
      f"which a {data['model'].get('type')} model cannot have: number them on"
    )
  return data | {"model": data["model"] | {"vocab": dict(numbers) | vocab}}


def _special_values(values: Mapping):
  """(role, value) of the special tokens that a file names."""
  for role in _NAMED:
    yield role, values.get(role)
  for key in _LISTS:
    several = values.get(key) or ()
    if isinstance(several, Mapping):  # by a name of their own
      several = several.values()
    for value in several:
      yield key, value


def _decoder(file: pathlib.Path, values: Mapping):
  value = values.get("added_tokens_decoder") or {}
  if not isinstance(value, Mapping):
    raise ValueError(
      f"{str(file)!r}: added_tokens_decoder is {value!r:.80}: use an object of "
      "ids and tokens"
    )
  return value.items()


def _id(file: pathlib.Path, number: Any) -> int:
  """An id as JSON has it: a number, or text that is one as a key."""
  if isinstance(number, str) and number.isascii() and number.isdigit():
    number = int(number[:20])
  if type(number) is not int or not 0 <= number < MAX_ID:
    raise ValueError(
      f"{str(file)!r}: a token's id is {number!r:.40}: use a whole number "
      f"below {MAX_ID}"
    )
  return number


def _added(
  file: pathlib.Path, role: str, value: Any, **flags: bool
) -> Token | None:
  """The token of an entry; None where it is null or empty."""
  content = value
  if isinstance(value, Mapping):
    content = value.get("content")
    flags |= {k: value[k] for k in _FLAGS if value.get(k) is not None}
  if content is None or content == "":
    return None
  if not isinstance(content, str):
    raise ValueError(f"{str(file)!r}: {role} is {value!r:.80}: use its name")
  if wrong := [k for k, v in flags.items() if not isinstance(v, bool)]:
    raise ValueError(
      f"{str(file)!r}: {wrong[0]} of {content!r} is {flags[wrong[0]]!r:.40}: "
      "use true or false"
    )
  return Token(content, **flags)
