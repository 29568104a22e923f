"""Files of a run: written whole or not at all, by one run at a time."""

from collections.abc import Iterator
import contextlib
import errno
import fcntl
import os
import pathlib
import sys
from typing import TextIO

from longstraw_jax.distributed import on_leader

LOCK = "lock"  # the file in a run's directory that its writer holds
BUSY = (errno.EAGAIN, errno.EACCES)


class DiskError(RuntimeError):
  """A file that could not be written."""


@contextlib.contextmanager
def writing(path: pathlib.Path) -> Iterator[None]:
  """Names the file in errors of what writes it.

  Raises:
    DiskError: an OSError came up.
  """
  try:
    yield
  except OSError as error:
    raise DiskError(
      f"{path} could not be written: {error.strerror or error}. Free space or "
      "choose another directory and run again: a run continues from its last "
      "checkpoint"
    ) from error


def write_whole(path: pathlib.Path, content: bytes) -> None:
  """Writes a file that appears when it is complete, in place of an older one.

  Raises:
    DiskError: the disk is full or the directory is not writable; the older one
      is as it was.
  """
  temporary = path.with_name(path.name + ".tmp")
  with writing(path):
    try:
      with temporary.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
      temporary.replace(path)
    except OSError:
      temporary.unlink(missing_ok=True)
      raise


def check_writer(directory: pathlib.Path) -> None:
  """Refuses early what sole_writer would refuse, and changes nothing.

  Raises:
    ValueError: as there.
    PeerError: as there.
  """

  def check() -> None:
    place = directory.absolute()
    while not place.exists():
      place = place.parent
    if not place.is_dir():
      raise _unusable(directory, f"{place} is a file")
    if not os.access(place, os.W_OK | os.X_OK):
      raise _unusable(directory, f"{place} is read-only")
    if (directory / LOCK).exists():
      with (directory / LOCK).open() as file:
        _lock(directory, file, fcntl.LOCK_SH)

  on_leader(check)


@contextlib.contextmanager
def sole_writer(directory: pathlib.Path) -> Iterator[None]:
  """Holds a run's directory, made if absent; a crash lets go of it as well.

  With several processes the first holds it for all of them.

  Raises:
    ValueError: another run holds it, or it cannot be written to.
    PeerError: process 0 did not get it; its own message says why.
  """
  with contextlib.ExitStack() as stack:
    on_leader(lambda: stack.enter_context(_held(directory)))
    yield


@contextlib.contextmanager
def _held(directory: pathlib.Path) -> Iterator[None]:
  try:
    directory.mkdir(parents=True, exist_ok=True)
    file = (directory / LOCK).open("a+")
  except OSError as error:
    raise _unusable(directory, error.strerror) from error
  with file:
    _lock(directory, file, fcntl.LOCK_EX)
    with writing(directory / LOCK):
      file.truncate(0)
      file.write(f"{os.getpid()}\n")
      file.flush()
    yield


def _lock(directory: pathlib.Path, file: TextIO, kind: int) -> None:
  try:
    fcntl.flock(file, kind | fcntl.LOCK_NB)
  except OSError as error:
    if error.errno in BUSY:
      file.seek(0)
      raise ValueError(
        f"out={str(directory)!r} is written to by another run, process "
        f"{file.read().strip() or 'unknown'}: wait for its end or give "
        "another directory"
      ) from error
    # Some network disks have no locks: a run is worth more than its guard.
    print(
      f"warning: {directory / LOCK} cannot be locked ({error.strerror}): a "
      "second run on this directory would not be noticed",
      file=sys.stderr,
    )


def _unusable(directory: pathlib.Path, why: str | None) -> ValueError:
  return ValueError(
    f"out={str(directory)!r} cannot be written to: {why}. Give a directory "
    "that can, or a new one"
  )
