"""Settings from outside that no reader knows: refused, or ignored by name."""

from collections.abc import Collection, Iterable, Mapping
from typing import Any


def is_set(value: Any) -> bool:
  """Whether a key's value says anything: not null, false or empty."""
  return not (value is None or value is False or value in ("", [], {}))


def check_ignored(ignore_keys: Iterable[str]) -> frozenset[str]:
  """The names as a set.

  Raises:
    ValueError: one string was given where several are meant.
  """
  if isinstance(ignore_keys, str):
    raise ValueError(
      f"ignore_keys is {ignore_keys!r}: give a sequence of names, such as "
      f"({ignore_keys!r},)"
    )
  return frozenset(ignore_keys)


def refuse_unknown(
  where: str,
  values: Mapping[str, Any],
  known: Collection[str],
  ignored: Collection[str],
) -> None:
  """Refuses keys that are set and that nothing accounts for.

  Args:
    where: the file, for the message.
    values: its keys.
    known: those that are read, or known to change nothing.
    ignored: those that the caller takes on himself.

  Raises:
    ValueError: naming all such keys, their values and the way around.
  """
  unknown = {
    key: value
    for key, value in values.items()
    if is_set(value) and key not in known and key not in ignored
  }
  if unknown:
    said = ", ".join(f"{k} is {v!r:.200}" for k, v in sorted(unknown.items()))
    raise ValueError(
      f"{where}: {said}: unknown here, and may change what is computed; if it "
      f"does not, pass ignore_keys={tuple(sorted(unknown))} "
      f"(--ignore_keys={','.join(sorted(unknown))})"
    )
