"""Chat templates: from messages to the text a model was trained on.

A template comes with a checkpoint and is a program; see `chat_sandbox` for how
it is kept from doing harm. What it renders holds special tokens by name, so
encode it with `special=True`; the begin token stands there once, whether or not
the template wrote it. That goes for names inside the messages too: of
messages from a stranger, refuse those that hold any.
"""

from collections.abc import Mapping, Sequence
import numbers
import os
import pathlib

import jinja2

from longstraw_jax import chat_sandbox
from longstraw_jax.json_files import read_object, read_text
from longstraw_jax.token_files import read_side_files
from longstraw_jax.weights.gguf_files import GgufSource

MAX_SOURCE = 1 << 17  # characters of a template; the longest known have 3e4
MAX_DEPTH = 64  # of lists in lists
BASE_CHARS = 1 << 24  # that a rendering may make, however little it is given


class ChatTemplate:
  """A jinja2 chat template.

  A rendering is bounded: it makes at most `BASE_CHARS` characters, and
  `max_growth` for every one of its input, intermediate strings included (a list
  element counts as 16); it ends at the deadline, save for the single operation
  it is in; it reaches nothing but its input. Not bounded is what the caller
  gives in.
  """

  def __init__(
    self,
    source: str,
    bos_token: str | None = None,
    eos_token: str | None = None,
    *,
    name: str = "chat template",
    timeout_s: float = 10.0,
    max_growth: int = 32,
  ):
    """Compiles the template.

    Args:
      source: its text.
      bos_token: what the template sees by this name; None leaves it undefined.
      eos_token: likewise.
      name: for errors.
      timeout_s: seconds that a rendering may take.
      max_growth: characters that a rendering may make for one of its input.

    Raises:
      ValueError: if the template is too long or cannot be compiled.
    """
    if len(source) > MAX_SOURCE:
      raise ValueError(
        f"{name} has {len(source)} characters, allowed are {MAX_SOURCE}"
      )
    self.source = source
    self._name = name
    self._timeout_s = timeout_s
    self._max_growth = max_growth
    tokens = {"bos_token": bos_token, "eos_token": eos_token}
    self._tokens = {key: v for key, v in tokens.items() if v is not None}
    try:
      self._template = chat_sandbox.MeteredEnvironment().guarded(source)
    except jinja2.TemplateSyntaxError as error:
      raise ValueError(
        f"{name} is malformed in line {error.lineno}: {error.message}"
      ) from error
    except Exception as error:  # Python's own compiler raises several kinds
      raise ValueError(f"{name} is malformed: {_first_line(error)}") from error

  def render(
    self,
    messages: Sequence[Mapping],
    add_generation_prompt: bool = True,
    **extra,
  ) -> str:
    """Renders messages.

    Args:
      messages: such as [{"role": "user", "content": "Hello"}].
      add_generation_prompt: whether the text ends with the beginning of the
        model's turn.
      **extra: further variables, such as `tools` or `enable_thinking`.

    Returns:
      The text; encode it with `special=True`.

    Raises:
      ValueError: if the messages are not plain data, or the template refuses
        them, fails, or exceeds its bounds.
    """
    given = {
      # Templates compare these two with none, as transformers sets them.
      "tools": None,
      "documents": None,
      **self._tokens,
      **extra,
      "messages": messages,
      "add_generation_prompt": add_generation_prompt,
    }
    given = {key: _plain(key, value, 0) for key, value in given.items()}
    if not isinstance(given["messages"], list):
      raise ValueError(
        f"messages are a {type(messages).__name__}: give a list of mappings"
      )
    token = None
    try:
      chars = BASE_CHARS + self._max_growth * chat_sandbox.size_of(given)
      meter = chat_sandbox.Meter(chars, self._timeout_s)
      token = chat_sandbox.METER.set(meter)
      return self._template.render(given)
    except chat_sandbox.Refusal as error:
      raise ValueError(
        f"{self._name} refuses the messages: {_first_line(error)}"
      ) from error
    except Exception as error:  # a template may raise anything
      raise ValueError(f"{self._name} failed: {_first_line(error)}") from error
    finally:
      if token is not None:
        chat_sandbox.METER.reset(token)


def load_chat_template(path: str | os.PathLike[str]) -> ChatTemplate:
  """Reads the chat template of a checkpoint.

  Args:
    path: a folder with chat_template.jinja, or with a tokenizer_config.json
      that has one; or a .gguf file.

  Returns:
    The template, with the checkpoint's begin and end tokens.

  Raises:
    FileNotFoundError: if there is no such folder or file.
    ValueError: if it has no template, or one that cannot be compiled.
  """
  path = pathlib.Path(path)
  if path.is_dir():
    source, tokens = _read_folder(path)
  else:
    source, tokens = _read_gguf(path)
  if not isinstance(source, str):
    raise ValueError(
      f"{str(path)!r} has no chat template: give the folder of a model that "
      "was trained to chat"
    )
  return ChatTemplate(source, **tokens, name=f"chat template of {str(path)!r}")


def _read_folder(folder: pathlib.Path) -> tuple[object, dict]:
  file = folder / "tokenizer_config.json"
  config = read_object(file) if file.is_file() else {}
  source = config.get("chat_template")
  if isinstance(source, list):  # several, by name
    named = [item for item in source if isinstance(item, dict)]
    source = next(
      (item.get("template") for item in named if item.get("name") == "default"),
      None,
    )
  file = folder / "chat_template.jinja"
  if file.is_file():
    source = read_text(file)
  roles = read_side_files(folder).roles
  return source, {key: roles.get(key) for key in ("bos_token", "eos_token")}


def _read_gguf(path: pathlib.Path) -> tuple[object, dict]:
  metadata = GgufSource(path).metadata
  names = metadata.get("tokenizer.ggml.tokens", [])
  tokens = {}
  for kind in ("bos", "eos"):
    i = metadata.get(f"tokenizer.ggml.{kind}_token_id")
    known = type(i) is int and isinstance(names, list) and 0 <= i < len(names)
    tokens[f"{kind}_token"] = names[i] if known else None
  return metadata.get("tokenizer.chat_template"), tokens


def _plain(place: str, value, depth: int):
  """A copy in Python's own types, so that a template meets no other."""
  if depth > MAX_DEPTH:
    raise ValueError(f"{place} is nested deeper than {MAX_DEPTH} levels")
  if value is None or isinstance(value, bool):
    return value
  if isinstance(value, str):
    return str.__str__(value)
  if isinstance(value, numbers.Integral):
    return int(value)
  if isinstance(value, numbers.Real):
    return float(value)
  if isinstance(value, Mapping):
    return {
      _plain(f"a key of {place}", key, depth + 1): _plain(
        f"{place}[{key!r}]", item, depth + 1
      )
      for key, item in value.items()
    }
  if isinstance(value, (list, tuple)):
    return [
      _plain(f"{place}[{i}]", item, depth + 1) for i, item in enumerate(value)
    ]
  raise ValueError(
    f"{place} is a {type(value).__name__}: give text, numbers, lists and "
    "mappings"
  )


def _first_line(error: Exception) -> str:
  text = " ".join(str(error).split())[:500]
  if isinstance(error, jinja2.TemplateError):
    return text
  return f"{type(error).__name__}: {text}" if text else type(error).__name__
