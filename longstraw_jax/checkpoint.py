"""Checkpoints of a run: asynchronous, atomic, checked byte by byte, the last n.

A checkpoint is a folder named by its number of finished steps:

    tree/          the arrays, as Orbax writes them
    header.json    the run's settings; the dtype and shape of every array
    manifest.json  size and SHA-256 of every other file

It is written under another name, which it loses when all of it is on disk: a
folder named by a number is whole, or was damaged since.
"""

from collections.abc import Mapping
from concurrent import futures
import errno
import functools
import hashlib
import json
import logging
import os
import pathlib
import re
import shutil
import sys
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from longstraw_jax.checks import differences, listed
from longstraw_jax.distributed import is_leader, on_leader
from longstraw_jax.finite import check_finite
from longstraw_jax.state import named_leaves
from longstraw_jax.types import Tree

HEADER, MANIFEST, TREE = "header.json", "manifest.json", "tree"
PARTIAL, REMOVED = ".partial", ".removed"
MOST_LISTED = 5  # differing arrays in an error message
HASHED_AT_ONCE = 8  # files


class CheckpointError(RuntimeError):
  """A checkpoint that cannot be written, read or continued."""


class Checkpoints:
  """The checkpoints of one run, named by their number of finished steps.

  Reading changes nothing in the directory; one process, or those of one mesh,
  may save.
  """

  def __init__(self, directory: str | pathlib.Path, keep: int = 3):
    """Names a directory of checkpoints, which need not exist.

    Args:
      directory: where they live.
      keep: how many of the last ones stay.
    """
    # Orbax logs every save, and its errors with the stacks of all its threads;
    # what it raises is told here, once.
    logging.getLogger("absl").setLevel(logging.CRITICAL)
    self.directory = pathlib.Path(directory).absolute()
    self._keep = keep
    self._thread = futures.ThreadPoolExecutor(1)
    self._pending: tuple[int, futures.Future] | None = None

  def steps(self) -> list[int]:
    """Finished steps of every checkpoint, in order."""
    if not self.directory.is_dir():
      return []
    names = [path.name for path in self.directory.iterdir()]
    return sorted(int(name) for name in names if name.isdecimal())

  def latest(self) -> int | None:
    """Finished steps of the newest checkpoint, or None."""
    return max(self.steps(), default=None)

  def save(self, step: int, tree: Tree, settings: Mapping[str, Any]) -> None:
    """Starts to save, once the save before is on disk.

    Raises:
      CheckpointError: that one failed, or this one could not begin.
      NonFiniteError: a number of the tree is not finite; nothing is written
        and no older checkpoint makes room.
    """
    self.wait()
    check_finite(
      tree,
      f"the state of step {step}",
      f"It is not saved; the last checkpoint is {self.latest()}",
    )
    leaves = named_leaves(tree)
    header = {"settings": dict(settings), "arrays": _described(leaves)}
    partial = self._folder(step, PARTIAL)

    def begin() -> None:
      self._clean()
      partial.mkdir(parents=True)
      needed = sum(x.nbytes for x in leaves.values())
      if shutil.disk_usage(partial).free < needed:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    _mute_closed_loops()
    # Anew for each: an error of one save would come up again in the next.
    orbax = ocp.StandardCheckpointer()
    try:
      on_leader(begin)
      orbax.save(partial / TREE, leaves)
    except (OSError, ValueError) as error:
      raise self._write_error(step, error) from error
    self._pending = step, self._thread.submit(self._finish, orbax, step, header)

  def _finish(
    self, orbax: ocp.StandardCheckpointer, step: int, header: Mapping[str, Any]
  ) -> None:
    orbax.wait_until_finished()
    orbax.close()
    if not is_leader():
      return
    partial = self._folder(step, PARTIAL)
    (partial / HEADER).write_text(json.dumps(header))
    files = _digests(partial)
    (partial / MANIFEST).write_text(json.dumps(files))
    partial.rename(self._folder(step))
    for old in self.steps()[: -self._keep]:
      self._folder(old).rename(self._folder(old, REMOVED))
      shutil.rmtree(self._folder(old, REMOVED))

  def _clean(self) -> None:
    """Removes what an interrupted save or removal left."""
    if self.directory.is_dir():
      for path in self.directory.iterdir():
        if path.suffix in (PARTIAL, REMOVED):
          shutil.rmtree(path)

  def failed(self) -> bool:
    """Whether a save has ended in an error that nobody has been told of."""
    if self._pending is None or not self._pending[1].done():
      return False
    return self._pending[1].exception() is not None

  def wait(self) -> None:
    """Returns when every started save is on disk.

    Raises:
      CheckpointError: a save failed; nothing of it is left.
    """
    if self._pending is None:
      return
    (step, future), self._pending = self._pending, None
    error = future.exception()

    def settle() -> None:
      if error is not None:
        raise self._write_error(step, error) from error

    on_leader(settle)
    settle()

  def _write_error(self, step: int, error: BaseException) -> CheckpointError:
    # Orbax leaves the futures of a failed save behind, which tell of it again.
    logging.getLogger("asyncio").setLevel(logging.CRITICAL)
    if is_leader():
      shutil.rmtree(self._folder(step, PARTIAL), ignore_errors=True)
    return CheckpointError(
      f"checkpoint {step} could not be written to {self.directory}: "
      f"{_first_line(error)}. Free space or choose another directory and run "
      f"again: the run continues from step {self.latest() or 0}"
    )

  def _folder(self, step: int, suffix: str = "") -> pathlib.Path:
    return self.directory / f"{step}{suffix}"

  def settings(self, step: int) -> dict[str, Any]:
    """The settings a checkpoint was made with.

    Raises:
      CheckpointError: it is damaged.
    """
    return self._header(step)["settings"]

  def _header(self, step: int) -> dict[str, Any]:
    folder = self._folder(step)
    damage = _damage(folder, [HEADER])
    if damage:
      raise self._damaged(step, damage)
    return json.loads((folder / HEADER).read_text())

  def restore(self, step: int, like: Tree, settings: Mapping[str, Any]) -> Tree:
    """The tree of a checkpoint, in the shardings of `like`.

    Raises:
      CheckpointError: it was made with other settings, holds other arrays than
        `like` (names, shapes, dtypes), or is damaged; the message says which.
    """
    leaves = named_leaves(like)
    self.check(step, settings)
    other = differences(self._header(step)["arrays"], _described(leaves))
    if other:
      raise CheckpointError(
        f"checkpoint {step} in {self.directory} is whole but holds another "
        f"model or optimizer: {listed(other, MOST_LISTED)}. Use the settings "
        "it was made with"
      )
    self._verify(step)
    abstract = jax.tree.map(ocp.utils.to_shape_dtype_struct, leaves)
    try:
      with ocp.StandardCheckpointer() as orbax:
        found = orbax.restore(self._folder(step) / TREE, abstract)
    except (OSError, ValueError) as error:
      raise CheckpointError(
        f"checkpoint {step} in {self.directory} is whole but could not be "
        f"read: {_first_line(error)}"
      ) from error
    return jax.tree.unflatten(
      jax.tree.structure(like), [found[name] for name in leaves]
    )

  def check(self, step: int, settings: Mapping[str, Any]) -> None:
    """Refuses a checkpoint of other settings.

    Raises:
      CheckpointError: it was made with others, which are named, or is damaged.
    """
    # As JSON gives them back.
    wanted = json.loads(json.dumps(dict(settings)))
    differing = differences(self.settings(step), wanted)
    if differing:
      raise CheckpointError(
        f"checkpoint {step} in {self.directory} belongs to another run: "
        + "; ".join(differing)
        + ". Use its settings or another --out"
      )

  def _verify(self, step: int) -> None:
    """Reads every file once; with several processes the first does."""

    def verify() -> None:
      damage = _damage(self._folder(step))
      if damage:
        raise self._damaged(step, damage)

    on_leader(verify)

  def _damaged(self, step: int, damage: str) -> CheckpointError:
    if not self._folder(step).exists():
      return CheckpointError(
        f"checkpoint {step} in {self.directory} was removed while it was read: "
        "a live run keeps only its last ones. Run again to read a newer one"
      )
    older = [n for n in self.steps() if n < step]
    whole = next(
      (n for n in reversed(older) if not _damage(self._folder(n))), None
    )
    remedy = "No older one is whole: bring it back from a copy, or begin anew"
    if whole is not None:
      remedy = f"Checkpoint {whole} is whole: move {self._folder(step)} away"
      remedy += " to continue from there"
    return CheckpointError(
      f"checkpoint {step} in {self.directory} is damaged: {damage}. {remedy}"
    )

  def close(self) -> None:
    """Waits for saves and lets go of threads.

    Raises:
      CheckpointError: a save failed.
    """
    try:
      self.wait()
    finally:
      self._thread.shutdown()


@functools.cache
def _mute_closed_loops() -> None:
  """Keeps a failed save from telling of itself once a file.

  Of the writes of a save one error ends Orbax's event loop; tensorstore tells
  the loop of every further one, which Python prints with its stack.
  """
  before = sys.unraisablehook

  def hook(args) -> None:
    if str(args.exc_value) != "Event loop is closed":
      before(args)

  sys.unraisablehook = hook


def _described(leaves: Mapping[str, Any]) -> dict[str, str]:
  """Dtype and shape of every array, as in float32[3, 4]."""
  describe = lambda x: f"{np.dtype(x.dtype).name}{list(np.shape(x))}"
  return {name: describe(x) for name, x in leaves.items()}


def _first_line(error: BaseException) -> str:
  """What went wrong, in a line; of the system's errors in its own words."""
  number = getattr(error, "errno", None)
  if found := re.search(r"os_error_code='(\d+)'", str(error)):  # tensorstore's
    number = int(found.group(1))
  if number is not None:
    return os.strerror(number)
  lines = str(error).splitlines() or [""]
  return f"{type(error).__name__}: {lines[0][:200]}"


def _digest(path: pathlib.Path) -> str:
  with path.open("rb") as file:
    return hashlib.file_digest(file, "sha256").hexdigest()


def _digests(folder: pathlib.Path) -> dict[str, list]:
  """Size and SHA-256 of every file below a folder, by its path there."""
  files = sorted(path for path in folder.rglob("*") if path.is_file())
  names = [path.relative_to(folder).as_posix() for path in files]
  with futures.ThreadPoolExecutor(HASHED_AT_ONCE) as pool:
    found = list(pool.map(_digest, files))
  sizes = [os.path.getsize(path) for path in files]
  rows = zip(names, sizes, found, strict=True)
  return {name: [size, digest] for name, size, digest in rows}


def _damage(folder: pathlib.Path, only: list[str] | None = None) -> str | None:
  """What is wrong with a checkpoint's files, or None.

  Args:
    folder: of the checkpoint.
    only: names of files to look at; None looks at all.
  """
  if not (folder / MANIFEST).exists():
    return f"it has no {MANIFEST}, which earlier versions did not write"
  try:
    manifest = json.loads((folder / MANIFEST).read_bytes())
    wanted = {name: list(manifest[name]) for name in only or manifest}
    if HEADER not in manifest:
      return f"{MANIFEST} lists no {HEADER}"
  except (OSError, ValueError, TypeError, KeyError) as error:
    return f"{MANIFEST} cannot be read ({_first_line(error)})"
  for name, (size, _) in wanted.items():
    path = folder / name
    found = path.stat().st_size if path.is_file() else None
    if found != size:
      return f"{name} has {found or 'no'} bytes, not {size}"
  paths = [folder / name for name in wanted]
  with futures.ThreadPoolExecutor(HASHED_AT_ONCE) as pool:
    digests = list(pool.map(_digest, paths))
  for (name, (_, digest)), found in zip(wanted.items(), digests, strict=True):
    if found != digest:
      return f"the bytes of {name} are not those that were written"
  return None
