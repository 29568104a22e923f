"""Checkpoints of a run through Orbax: asynchronous, atomic, the last n."""

from collections.abc import Mapping
import logging
import pathlib
from typing import Any

import jax
import orbax.checkpoint as ocp

from longstraw_jax.checks import differences
from longstraw_jax.state import named_leaves
from longstraw_jax.types import Tree


class CheckpointError(RuntimeError):
  """A checkpoint that cannot be written, read or continued."""


class Checkpoints:
  """The checkpoints of one run, named by their number of finished steps.

  Each holds a tree of arrays and the run's settings as JSON. A save is written
  beside the others and renamed when it is whole, so that an interrupted one is
  never seen.
  """

  def __init__(self, directory: str | pathlib.Path, keep: int = 3):
    """Opens or creates a directory of checkpoints.

    Args:
      directory: where they live.
      keep: how many of the last ones stay.
    """
    # Orbax logs every save through the root logger.
    logging.getLogger("absl").setLevel(logging.ERROR)
    self.directory = pathlib.Path(directory).absolute()
    options = ocp.CheckpointManagerOptions(
      max_to_keep=keep, create=True, enable_async_checkpointing=True
    )
    self._manager = ocp.CheckpointManager(self.directory, options=options)

  def latest(self) -> int | None:
    """Finished steps of the newest whole checkpoint, or None."""
    return self._manager.latest_step()

  def save(self, step: int, tree: Tree, settings: Mapping[str, Any]) -> None:
    """Starts to save; errors of the save before show here.

    Raises:
      CheckpointError: the disk is full or the directory is not writable.
    """
    args = ocp.args.Composite(
      tree=ocp.args.StandardSave(named_leaves(tree)),
      settings=ocp.args.JsonSave(dict(settings)),
    )
    try:
      self._manager.save(step, args=args)
    except (OSError, ValueError) as error:
      raise self._write_error(step, error) from error

  def wait(self) -> None:
    """Returns when every started save is on disk.

    Raises:
      CheckpointError: a save failed.
    """
    try:
      self._manager.wait_until_finished()
    except (OSError, ValueError) as error:
      raise self._write_error(None, error) from error

  def _write_error(self, step, error) -> CheckpointError:
    which = "a checkpoint" if step is None else f"checkpoint {step}"
    return CheckpointError(
      f"{which} could not be written to {self.directory}: {error}. Free space "
      f"or choose another directory and run again: the run continues from "
      f"step {self.latest() or 0}"
    )

  def settings(self, step: int) -> dict[str, Any]:
    """The settings a checkpoint was made with."""
    args = ocp.args.Composite(settings=ocp.args.JsonRestore())
    return self._read(step, args)["settings"]

  def restore(self, step: int, like: Tree, settings: Mapping[str, Any]) -> Tree:
    """The tree of a checkpoint, in the shapes, dtypes and shardings of `like`.

    Raises:
      CheckpointError: it was made with other settings, or is damaged.
    """
    found = self.settings(step)
    differing = differences(found, settings)
    if differing:
      raise CheckpointError(
        f"checkpoint {step} in {self.directory} belongs to another run: "
        + "; ".join(differing)
        + ". Use its settings or another --out"
      )
    abstract = jax.tree.map(ocp.utils.to_shape_dtype_struct, named_leaves(like))
    args = ocp.args.Composite(tree=ocp.args.StandardRestore(abstract))
    leaves = self._read(step, args)["tree"]
    names = named_leaves(like)
    return jax.tree.unflatten(
      jax.tree.structure(like), [leaves[name] for name in names]
    )

  def _read(self, step: int, args):
    try:
      return self._manager.restore(step, args=args)
    except Exception as error:  # Orbax raises many kinds for damaged files
      raise CheckpointError(
        f"checkpoint {step} in {self.directory} is damaged "
        f"({type(error).__name__}: {str(error).splitlines()[0][:200]}). Remove "
        f"{self.directory / str(step)} to continue from the one before"
      ) from error

  def close(self) -> None:
    """Waits for saves and releases the directory."""
    self.wait()
    self._manager.close()
