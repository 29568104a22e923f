"""Files of a run: written whole or not at all, by one run at a time."""

from collections.abc import Iterator
import contextlib
import errno
import fcntl
import os
import pathlib
import sys

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
    raise ValueError(
      f"out={str(directory)!r} cannot be written to: "
      f"{error.strerror or error}. Give a directory that can, or a new one"
    ) from error
  with file:
    try:
      fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
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
    with writing(directory / LOCK):
      file.truncate(0)
      file.write(f"{os.getpid()}\n")
      file.flush()
    yield
