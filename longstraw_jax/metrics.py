"""Where a run's figures go: rows.jsonl, TensorBoard, Weights & Biases."""

from collections.abc import Mapping
import importlib.metadata
import json
import math
import pathlib
import resource
import sys
from typing import Any

import jax
import numpy as np
import tensorboardX

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
    """
    self.path = pathlib.Path(directory) / "rows.jsonl"
    self.path.parent.mkdir(parents=True, exist_ok=True)
    kept = [row for row in read_rows(self.path) if row["step"] < first_step]
    temporary = self.path.with_suffix(".tmp")
    temporary.write_text("".join(json.dumps(row) + "\n" for row in kept))
    temporary.replace(self.path)
    self._file = self.path.open("a")
    self._board = tensorboardX.SummaryWriter(
      str(self.path.parent / "tensorboard"), purge_step=first_step
    )
    self._wandb = None
    if wandb_project:
      import wandb  # optional: only who asks for it needs it

      self._wandb = wandb.init(project=wandb_project, dir=str(directory))

  def write(self, row: Mapping[str, Any]) -> None:
    """Writes one row; `step` says where it stands."""
    row = {name: plain(value) for name, value in row.items()}
    self._file.write(json.dumps(row) + "\n")
    self._file.flush()
    numbers = {
      name: value
      for name, value in row.items()
      if isinstance(value, (int, float)) and not isinstance(value, bool)
    }
    for name, value in numbers.items():
      self._board.add_scalar(name, value, row["step"])
    if self._wandb is not None:
      self._wandb.log(numbers, step=row["step"])

  def close(self) -> None:
    """Flushes everything."""
    self._file.close()
    self._board.close()
    if self._wandb is not None:
      self._wandb.finish()


class NoLog:
  """The log of a process that leaves writing to another."""

  def __init__(self, directory: str | pathlib.Path):
    """Opens nothing; `path` is where the other one writes."""
    self.path = pathlib.Path(directory) / "rows.jsonl"

  def write(self, row: Mapping[str, Any]) -> None:
    """Writes nothing."""

  def close(self) -> None:
    """There is nothing to close."""


def read_rows(path: str | pathlib.Path) -> list[dict[str, Any]]:
  """The rows of a JSONL file; a last line cut short by a kill is dropped."""
  path = pathlib.Path(path)
  if not path.exists():
    return []
  rows = []
  for line in path.read_text().splitlines():
    try:
      rows.append(json.loads(line))
    except json.JSONDecodeError:
      break
  return rows
