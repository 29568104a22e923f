"""Signals: what a first and a second one do, and to whom."""

import os
import signal
import subprocess
import sys

from absl.testing import absltest

from longstraw_jax import interrupts

# A child that a reward forks, then a run that does not end at a first signal.
SCRIPT = """
import multiprocessing, os, signal, sys, time, warnings
from longstraw_jax import interrupts
warnings.simplefilter("ignore")

with interrupts.listen():
  make = multiprocessing.get_context("fork").Process
  child = make(target=time.sleep, args=(60,))
  child.start()
  time.sleep(0.2)
  child.terminate()
  child.join()
  interrupts.check()  # the child's signal is not the parent's
  print(child.exitcode, flush=True)
  for pause in (0, 0.1, 0.6):  # the second comes with the first, as of timeout
    time.sleep(pause)
    os.kill(os.getpid(), signal.SIGTERM)
  time.sleep(60)
"""


class InterruptsTest(absltest.TestCase):
  def test_a_second_signal_ends_at_once(self):
    done = subprocess.run(
      [sys.executable, "-c", SCRIPT],
      capture_output=True,
      text=True,
      timeout=50,
      check=False,
    )
    self.assertEqual(done.returncode, 128 + signal.SIGTERM, done.stderr)
    self.assertEqual(done.stdout.split(), [str(-signal.SIGTERM)])
    self.assertLen(done.stderr.strip().splitlines(), 1)
    self.assertIn("SIGTERM: saving", done.stderr)

  def test_what_is_ignored_stays_so(self):
    """As under nohup."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    self.addCleanup(signal.signal, signal.SIGHUP, before)
    with interrupts.listen():
      os.kill(os.getpid(), signal.SIGHUP)
      interrupts.check()
    self.assertEqual(signal.getsignal(signal.SIGHUP), signal.SIG_IGN)

  def test_nothing_is_heard_outside(self):
    interrupts.check()
    with interrupts.breakable():
      pass
    with self.assertRaises(interrupts.Interrupted):
      with interrupts.listen():
        os.kill(os.getpid(), signal.SIGTERM)
        with interrupts.breakable():
          self.fail("began after the signal")
    interrupts.check()
    self.assertEqual(signal.getsignal(signal.SIGTERM), signal.SIG_DFL)

  def test_an_error_that_a_signal_caused_is_the_signal(self):
    """As of a child process that the same signal ended."""

    def reward():
      try:
        os.kill(os.getpid(), signal.SIGINT)
      except BaseException as error:
        raise ValueError("the child died") from error

    with self.assertRaises(interrupts.Interrupted):
      with interrupts.listen(), interrupts.breakable():
        reward()
