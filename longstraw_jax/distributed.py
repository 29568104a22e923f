"""Several processes as one program: who starts, who speaks, who decides.

Every process runs the same code on the same host data, and the mesh spans the
devices of all. What must happen once (a reward function's calls, rows, the
curve) is process 0's; the others take its results.
"""

from collections.abc import Callable
import signal

import jax
from jax.experimental import multihost_utils
import numpy as np

from longstraw_jax.interrupts import Interrupted

_FAILED = -1  # where a signal's number stands otherwise


class PeerError(RuntimeError):
  """Another process stopped; its own message says why."""


def initialize(
  coordinator: str | None = None,
  num_processes: int | None = None,
  process_id: int | None = None,
  timeout_s: int = 60,
) -> None:
  """Joins the other processes; call before anything touches a device.

  Args:
    coordinator: host:port of process 0. None, with the other two, leaves all
      three to jax, which reads them from SLURM, Open MPI or Kubernetes.
    num_processes: how many there are.
    process_id: which one this is.
    timeout_s: a process that is silent for so long counts as dead, and every
      other one ends with an error that says so.

  Raises:
    ValueError: only some of the three are given.
  """
  given = [coordinator, num_processes, process_id]
  if any(x is None for x in given) and any(x is not None for x in given):
    raise ValueError(
      f"coordinator={coordinator}, num_processes={num_processes}, "
      f"process_id={process_id}: give all three, or none under SLURM, MPI or "
      "Kubernetes"
    )
  jax.distributed.initialize(
    coordinator,
    num_processes,
    process_id,
    heartbeat_timeout_seconds=timeout_s,
  )


def is_leader() -> bool:
  """Whether this process writes and prints."""
  return jax.process_index() == 0


def from_leader(
  compute: Callable[[], np.ndarray], shape: tuple[int, ...]
) -> np.ndarray:
  """What process 0 computes, in every process.

  Args:
    compute: called in process 0 alone, so that nothing happens twice.
    shape: of its float32 result.

  Raises:
    PeerError: it raised in process 0, which ends with its own error.
    Interrupted: a signal ended it there.
  """
  if jax.process_count() == 1:
    return compute()
  error, value = None, np.zeros(shape, np.float32)
  if is_leader():
    try:
      value = np.asarray(compute(), np.float32)
    except BaseException as raised:  # told to the others first
      error = raised
  stop = _FAILED if error is not None else 0
  if isinstance(error, Interrupted):
    stop = error.number
  elif isinstance(error, KeyboardInterrupt):
    stop = int(signal.SIGINT)
  stop, value = multihost_utils.broadcast_one_to_all((np.int32(stop), value))
  if error is not None:
    raise error
  if stop == _FAILED:
    raise PeerError("process 0 stopped; its own message says why")
  if stop:
    raise Interrupted(int(stop))
  return np.asarray(value)


def on_leader(act: Callable[[], None]) -> None:
  """Does something in process 0 alone; the others wait for it.

  Raises:
    PeerError: it raised in process 0, which ends with its own error.
    Interrupted: a signal ended it there.
  """

  def compute() -> np.ndarray:
    act()
    return np.zeros(())

  from_leader(compute, ())


def fetch(x) -> np.ndarray:
  """An array's values, in every process, also where others hold parts of it.

  Every process must ask for the same arrays in the same order. The whole array
  is on every device for a moment: give parts of what is large.
  """
  if not isinstance(x, jax.Array) or x.is_fully_addressable:
    return np.asarray(x)
  return np.asarray(multihost_utils.process_allgather(x, tiled=True))
