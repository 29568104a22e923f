"""Signals that end a run: heard at once, obeyed between device calls.

A pre-empted job gets SIGTERM and some seconds. What runs on the device then
cannot be stopped, and nothing may be torn out of a half-written file: the
signal is remembered, `check` raises at the next place where the run can be
saved, and only a caller's own code, inside `breakable`, is left at once.
"""

from collections.abc import Iterator
import contextlib
import os
import signal
import socket
import threading
import time
from typing import Any

import jax
from jax.experimental import multihost_utils
import numpy as np

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# What sends a signal to a process and to its group, as GNU timeout does, means
# one: a second signal is one that comes later.
SAME_SECONDS = 0.5


class Interrupted(BaseException):
  """A signal ended the run; no `except Exception` of a reward stops it."""

  def __init__(self, number: int):
    """Remembers the signal's number."""
    super().__init__(f"stopped by {signal.Signals(number).name}")
    self.number = number


class _Listener:
  """The first signal that came, and whether it may raise where it comes."""

  def __init__(self):
    self.received = 0
    self.breakable = False
    self.installed: dict[int, Any] = {}  # the handlers that were there before

  def handle(self, number, frame) -> None:
    """Runs in the main thread, between two of its instructions."""
    del frame
    self.received = self.received or number
    if self.breakable:
      self.breakable = False
      raise Interrupted(self.received)

  def watch(self, pipe: socket.socket) -> None:
    """Ends the process at a second signal, whatever the main thread is in."""
    first = None
    while data := pipe.recv(1):
      if data[0] not in SIGNALS:
        continue
      now = time.monotonic()
      if first is None:
        first = now
        name = signal.Signals(data[0]).name
        text = f"{name}: saving after the running device call; again ends now\n"
        with contextlib.suppress(OSError):
          os.write(2, text.encode())  # no lock that the main thread may hold
      elif now - first > SAME_SECONDS:
        os._exit(128 + data[0])


_listener: _Listener | None = None


def _forget_in_child() -> None:
  """A child that a reward forks dies of signals, and tells nobody of them."""
  global _listener
  if _listener is not None and _listener.installed:
    signal.set_wakeup_fd(-1)
    for number in _listener.installed:
      signal.signal(number, signal.SIG_DFL)
  _listener = None


os.register_at_fork(after_in_child=_forget_in_child)


@contextlib.contextmanager
def listen() -> Iterator[None]:
  """Within, the first of SIGNALS is remembered and a second ends the process.

  Outside of the main thread, where Python takes no signals, and for those that
  the process ignores, nothing changes.
  """
  global _listener
  before, _listener = _listener, _Listener()
  try:
    if threading.current_thread() is threading.main_thread():
      with _handlers(_listener):
        yield
    else:
      yield
  finally:
    _listener = before


@contextlib.contextmanager
def _handlers(listener: _Listener) -> Iterator[None]:
  read, write = socket.socketpair()
  write.setblocking(False)
  watcher = threading.Thread(target=listener.watch, args=(read,), daemon=True)
  watcher.start()
  wakeup = signal.set_wakeup_fd(write.fileno(), warn_on_full_buffer=False)
  for number in SIGNALS:
    old = signal.getsignal(number)
    if old is not signal.SIG_IGN:
      listener.installed[number] = old or signal.SIG_DFL
      signal.signal(number, listener.handle)
  try:
    yield
  finally:
    for number, old in listener.installed.items():
      signal.signal(number, old)
    signal.set_wakeup_fd(wakeup)
    write.close()
    watcher.join()
    read.close()


def check() -> None:
  """Raises where a signal came, in all processes if it came to one of them.

  Raises:
    Interrupted: naming the signal.
  """
  if _listener is None:
    return
  received = _listener.received
  if jax.process_count() > 1:
    everyone = multihost_utils.process_allgather(np.int32(received))
    received = int(np.max(everyone))
  if received:
    raise Interrupted(received)


@contextlib.contextmanager
def breakable() -> Iterator[None]:
  """Around a caller's own code, which a signal leaves where it is.

  Raises:
    Interrupted: a signal came, also if the code hid it or failed by it.
  """
  if _listener is None:
    yield
    return
  listener, failure = _listener, None
  listener.breakable = True
  try:
    if listener.received:
      raise Interrupted(listener.received)
    yield
  except Exception as error:
    failure = error
  finally:
    listener.breakable = False
  if listener.received:
    raise Interrupted(listener.received) from failure
  if failure is not None:
    raise failure
