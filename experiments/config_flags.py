"""Flags made from config dataclasses, one a field, and back."""

from collections.abc import Mapping
import dataclasses
import inspect
import re
import types
import typing
from typing import Any

from absl import flags

_DEFINERS = {
  bool: flags.DEFINE_boolean,
  int: flags.DEFINE_integer,
  float: flags.DEFINE_float,
  str: flags.DEFINE_string,
}


def _scalar_type(hint: Any) -> type | None:
  """The scalar a field holds, None apart; None for nested configs."""
  if isinstance(hint, types.UnionType):
    (hint,) = set(typing.get_args(hint)) - {types.NoneType}
  return hint if hint in _DEFINERS else None


def _help_of(config: Any, field: str) -> str:
  """What the class's docstring says of an attribute."""
  text = inspect.getdoc(type(config)) or ""
  found = re.search(rf"^  {field}: (.*(?:\n    .*)*)", text, re.MULTILINE)
  return re.sub(r"\s+", " ", found.group(1)) if found else "See the README."


def _scalars(config: Any, skip: frozenset[str]):
  """Yields (field, type, default) of a config's own scalar fields."""
  hints = typing.get_type_hints(type(config))
  for field in dataclasses.fields(config):
    kind = _scalar_type(hints[field.name])
    if kind is not None and field.name not in skip:
      yield field.name, kind, getattr(config, field.name)


def define(config: Any, prefix: str = "", skip: frozenset[str] = frozenset()):
  """Defines --<prefix><field> for every scalar field of a config value.

  Args:
    config: a dataclass value; its fields are the defaults.
    prefix: of the flags' names.
    skip: fields that have no flag.
  """
  for name, kind, default in _scalars(config, skip):
    _DEFINERS[kind](prefix + name, default, _help_of(config, name))


def define_optional(config: Any, prefix: str) -> None:
  """The same flags without values, for what is kept unless it is given."""
  for name, kind, _ in _scalars(config, frozenset()):
    _DEFINERS[kind](prefix + name, None, _help_of(config, name))


def parse(
  config: Any,
  values: Mapping[str, Any],
  prefix: str = "",
  skip: frozenset[str] = frozenset(),
  **others: Any,
) -> Any:
  """The config with its flags' values.

  Args:
    config: as given to `define`.
    values: flag name -> value.
    prefix: as given to `define`.
    skip: as given to `define`.
    **others: values of fields without a flag.

  Raises:
    ValueError: the config refused a value; the message names it.
  """
  found = {name: values[prefix + name] for name, _, _ in _scalars(config, skip)}
  return dataclasses.replace(config, **found, **others)


def scalar_names(config: Any, skip: frozenset[str] = frozenset()) -> list[str]:
  """The fields of a config that have a flag."""
  return [name for name, _, _ in _scalars(config, skip)]
