"""A reward function that the tests name on command lines."""

import os
import resource
import signal

from longstraw_jax.rewards import exact_match


def scripted(prompt_text, response_text, info):
  """Exact match, and at the call that the environment names, an accident.

  KILL_AT_CALL kills the process, TERM_AT_CALL asks it to end, FAIL_AT_CALL
  raises, DISK_FULL lets no file grow beyond 64 KiB from the first call on.
  """
  scripted.calls += 1
  if scripted.calls == int(os.environ.get("KILL_AT_CALL", "0")):
    os.kill(os.getpid(), signal.SIGKILL)
  if scripted.calls == int(os.environ.get("TERM_AT_CALL", "0")):
    os.kill(os.getpid(), signal.SIGTERM)
  if scripted.calls == int(os.environ.get("FAIL_AT_CALL", "0")):
    raise RuntimeError("the verifier broke")
  if "DISK_FULL" in os.environ:
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**16, resource.RLIM_INFINITY))
  # Not all zero, so that weights move and a wrong resume would show.
  return exact_match(prompt_text, response_text, info) + len(response_text) / 7


scripted.calls = 0
