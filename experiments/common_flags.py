"""Flags that every measuring script has, and progress it prints."""

from collections.abc import Iterable, Iterator
import sys
from typing import TypeVar

from absl import flags
import tqdm

from longstraw_jax import PRESETS, ModelConfig

Item = TypeVar("Item")


def define(preset: str, name: str) -> None:
  """Defines --preset, --seed and --out.

  Args:
    preset: the default preset.
    name: of the script; --out is runs/<name>.
  """
  flags.DEFINE_string("preset", preset, f"One of {', '.join(sorted(PRESETS))}.")
  flags.DEFINE_integer("seed", 0, "Of weights and token ids.")
  flags.DEFINE_string("out", f"runs/{name}", "Directory for rows.jsonl.")


def parse(argv: list[str]) -> list[str]:
  """Parses flags; a bad one ends in one line, not in three."""
  try:
    return flags.FLAGS(argv)
  except flags.Error as error:
    print("error: " + " ".join(str(error).split()), file=sys.stderr)
    sys.exit(2)


def config_of(preset: str) -> ModelConfig:
  """The preset's configuration.

  Raises:
    ValueError: there is none of that name.
  """
  if preset not in PRESETS:
    raise ValueError(f"--preset={preset}: use one of {sorted(PRESETS)}")
  return PRESETS[preset]


def require(condition: bool, name: str, value, remedy: str) -> None:
  """Refuses a flag's value in one line.

  Raises:
    ValueError: naming the flag, the value and what would do.
  """
  if not condition:
    raise ValueError(f"--{name}={value}: {remedy}")


def positive(values: dict, *names: str) -> None:
  """Refuses numbers below 1, alone or in a list.

  Raises:
    ValueError: naming the flag and the value.
  """
  for name in names:
    value = values[name]
    several = value if isinstance(value, (list, tuple)) else [value]
    require(bool(several), name, value, "give at least one number")
    for number in several:
      require(int(number) >= 1, name, number, "give numbers of at least 1")


def integers(values: dict, name: str) -> list[int]:
  """The numbers of a comma-separated flag.

  Raises:
    ValueError: naming the flag and the value.
  """
  try:
    return [int(item) for item in values[name]]
  except ValueError:
    text = ",".join(values[name])
    raise ValueError(f"--{name}={text}: give numbers such as 1,64") from None


def progress(items: Iterable[Item], total: int) -> Iterator[Item]:
  """A bar with rate and time left on a terminal, plain lines otherwise."""
  if sys.stdout.isatty():
    yield from tqdm.tqdm(items, total=total)
    return
  for number, item in enumerate(items, 1):
    print(f"{number}/{total}", flush=True)
    yield item
