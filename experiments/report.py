"""What every experiment script prints and how it ends."""

from collections.abc import Callable, Iterable, Mapping, Sequence
import gc
import json
import pathlib
import sys
from typing import Any

from absl import logging

from longstraw_jax.checkpoint import CheckpointError
from longstraw_jax.disk import DiskError, writing
from longstraw_jax.distributed import PeerError
from longstraw_jax.finite import NonFiniteError
from longstraw_jax.interrupts import Interrupted
from longstraw_jax.metrics import device_name, plain, versions
from longstraw_jax.rewards import RewardError

BAD_INPUT = 2
INTERRUPTED = 75  # EX_TEMPFAIL of sysexits.h: nothing is wrong, run it again
# What the message of is enough: it names the value or file and the remedy.
ENDS = (
  *(ValueError, OSError, CheckpointError, DiskError, RewardError, PeerError),
  NonFiniteError,
)


class RowWriter:
  """Writes <out>/rows.jsonl anew, one JSON object a line."""

  def __init__(self, out: str | pathlib.Path, **common: Any):
    """Opens the file.

    Args:
      out: directory of the experiment.
      **common: what stands in every row, such as preset and dtype.

    Raises:
      ValueError: a training run lives there, whose rows these would replace.
      DiskError: it could not be written.
    """
    out = pathlib.Path(out)
    if (out / "checkpoints").exists():
      raise ValueError(
        f"out={str(out)!r} holds a training run: give another directory"
      )
    self._path = out / "rows.jsonl"
    with writing(self._path):
      out.mkdir(parents=True, exist_ok=True)
      self._file = self._path.open("w")
    self._common = (
      common
      | {"device": device_name()}
      | {"versions": " ".join(f"{k}={v}" for k, v in versions().items())}
    )
    self.rows: list[dict[str, Any]] = []

  def write(self, **row: Any) -> dict[str, Any]:
    """Adds one row and returns it."""
    row = {k: plain(v) for k, v in (self._common | row).items()}
    with writing(self._path):
      self._file.write(json.dumps(row) + "\n")
      self._file.flush()
    self.rows.append(row)
    return row


def print_table(
  rows: Iterable[Mapping[str, Any]], columns: Sequence[str]
) -> None:
  """Prints rows as an aligned table; a missing value is a dash."""

  def cell(value: Any) -> str:
    if value is None:
      return "-"
    return f"{value:.4g}" if isinstance(value, float) else str(value)

  table = [list(columns)]
  table += [[cell(row.get(name)) for name in columns] for row in rows]
  widths = [max(map(len, column)) for column in zip(*table, strict=True)]
  for line in table:
    print("  ".join(x.rjust(n) for x, n in zip(line, widths, strict=True)))


def exit_code(main: Callable[[list[str]], int]) -> Callable[[list[str]], None]:
  """Ends a script with main's code, bad input with one line and BAD_INPUT.

  What a signal ended, and what was saved for its continuation, ends with
  INTERRUPTED.
  """

  def run(argv: list[str]) -> None:
    # Tracing makes objects by the million and few cycles: of its time, an
    # eighth goes into looking for them at Python's own threshold of 700.
    gc.set_threshold(10_000)
    logging.set_verbosity(logging.WARNING)  # jax tells of absent backends
    try:
      code = main(argv)
    except ENDS as error:
      print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
      code = BAD_INPUT
    except (Interrupted, KeyboardInterrupt) as error:
      why = str(error) or "stopped by SIGINT"
      print(f"{why}: run again to continue", file=sys.stderr)
      code = INTERRUPTED
    sys.exit(code)

  return run
