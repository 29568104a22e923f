"""Where a run's figures go: rows.jsonl, TensorBoard, Weights & Biases."""

from collections.abc import Mapping
import contextlib
import importlib.metadata
import importlib.util
import json
import math
import pathlib
import resource
import socket
import sys
import time
from typing import Any

import jax
import numpy as np
from tensorboardX.proto.event_pb2 import Event, SessionLog
from tensorboardX.record_writer import RecordWriter
from tensorboardX.summary import scalar

from longstraw_jax.disk import write_whole, writing

ROWS = "rows.jsonl"  # in a run's directory
PACKAGES = ("jax", "jaxlib", "flax", "optax", "longstraw_jax")

_COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"
_compiles = 0


def _count_compiles(event: str, duration: float, **unused) -> None:
  global _compiles
  del duration, unused
  _compiles += event == _COMPILE_EVENT


jax.monitoring.register_event_duration_secs_listener(_count_compiles)


def compile_count() -> int:
  """Programs compiled by this process so far."""
  return _compiles


def peak_memory_bytes() -> int:
  """Peak bytes of the first device, or of the process where it keeps none."""
  stats = jax.local_devices()[0].memory_stats() or {}
  if "peak_bytes_in_use" in stats:
    return int(stats["peak_bytes_in_use"])
  unit = 1 if sys.platform == "darwin" else 1024
  return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def versions() -> dict[str, str]:
  """Versions of the packages a figure depends on."""
  found = {"python": ".".join(map(str, sys.version_info[:3]))}
  return found | {name: importlib.metadata.version(name) for name in PACKAGES}


def device_name() -> str:
  """Kind of the first device."""
  return jax.local_devices()[0].device_kind


def plain(value: Any) -> Any:
  """A JSON value of a scalar; None for what is not finite."""
  if isinstance(value, (str, bool, int)) or value is None:
    return value
  if isinstance(value, list):
    return [plain(x) for x in value]
  value = np.asarray(value).item()
  if isinstance(value, float) and not math.isfinite(value):
    return None
  return value


class MetricLog:
  """Appends one row a step; continues where a checkpoint left off."""

  def __init__(
    self,
    directory: str | pathlib.Path,
    first_step: int = 0,
    wandb_project: str | None = None,
  ):
    """Opens the log, dropping rows of steps that will be done again.

    Args:
      directory: of the run; rows.jsonl and tensorboard/ are kept in it.
      first_step: the first step that this process will write.
      wandb_project: also log to this Weights & Biases project.

    Raises:
      DiskError: a file could not be written; the rows are as they were.
    """
    self.path = pathlib.Path(directory) / ROWS
    kept = [row for row in read_rows(self.path) if row["step"] < first_step]
    lines = "".join(json.dumps(row) + "\n" for row in kept)
    write_whole(self.path, lines.encode())
    self._board = _Board(self.path.parent / "tensorboard", first_step)
    with writing(self.path):
      self._file = self.path.open("a")
    self._wandb = None
    if wandb_project:
      import wandb  # optional: only who asks for it needs it

      self._wandb = wandb.init(project=wandb_project, dir=str(directory))

  def write(self, row: Mapping[str, Any]) -> None:
    """Writes one row; `step` says where it stands.

    Raises:
      DiskError: the disk is full.
    """
    row = {name: plain(value) for name, value in row.items()}
    with writing(self.path):
      self._file.write(json.dumps(row) + "\n")
      self._file.flush()
    numbers = {
      name: value
      for name, value in row.items()
      if isinstance(value, (int, float)) and not isinstance(value, bool)
    }
    self._board.write(numbers, row["step"])
    if self._wandb is not None:
      self._wandb.log(numbers, step=row["step"])

  def close(self) -> None:
    """Lets go of everything; each row was flushed when it was written."""
    for file in (self._file, self._board):
      # What is still buffered is of a write that failed and was told of.
      with contextlib.suppress(OSError):
        file.close()
    if self._wandb is not None:
      self._wandb.finish()


class _Board:
  """A TensorBoard file that is written where errors are seen.

  tensorboardX's own SummaryWriter writes in a thread, which dies of a full disk
  and leaves the program waiting for it.
  """

  def __init__(self, directory: pathlib.Path, first_step: int):
    now = time.time()
    name = f"events.out.tfevents.{now:.3f}.{socket.gethostname()}"
    self._path = directory / name
    with writing(self._path):
      directory.mkdir(exist_ok=True)
      self._records = RecordWriter(str(self._path))
      # What an earlier process wrote of these steps and later is not shown.
      start = SessionLog(status=SessionLog.START)
      self._add(Event(file_version="brain.Event:2", wall_time=now))
      self._add(Event(step=first_step, session_log=start, wall_time=now))

  def write(self, numbers: Mapping[str, float], step: int) -> None:
    now = time.time()
    with writing(self._path):
      for name, value in numbers.items():
        self._add(Event(step=step, summary=scalar(name, value), wall_time=now))
      self._records.flush()

  def _add(self, event: Event) -> None:
    self._records.write(event.SerializeToString())

  def close(self) -> None:
    self._records.close()


def check_wandb(project: str | None) -> None:
  """Refuses a Weights & Biases project where its package is not installed."""
  if project and importlib.util.find_spec("wandb") is None:
    raise ValueError(
      f"wandb_project={project!r} needs a package: pip install wandb"
    )


def read_rows(path: str | pathlib.Path) -> list[dict[str, Any]]:
  """The rows of a JSONL file; lines that are none are dropped with a warning.

  A last line without its end was cut short by a kill: dropped in silence.
  """
  path = pathlib.Path(path)
  if not path.exists():
    return []
  *lines, last = path.read_bytes().split(b"\n")
  rows = []
  for number, line in enumerate([*lines, last], 1):
    row = _row(line)
    if row is not None:
      rows.append(row)
    elif number <= len(lines):
      print(
        f"warning: line {number} of {path} is no row and left out: "
        f"{line[:60]!r}",
        file=sys.stderr,
      )
  return rows


def _row(line: bytes) -> dict[str, Any] | None:
  try:
    row = json.loads(line)
  except ValueError:
    return None
  whole = isinstance(row, dict) and isinstance(row.get("step"), int)
  return row if whole else None
