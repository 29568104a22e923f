"""Two processes against one, and what is left when one of them dies."""

import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import tempfile
import time

from absl.testing import absltest, parameterized
import jax
import numpy as np
import pytest

from longstraw_jax import distributed, load_state
from tests.fixture_states import captured

ROOT = pathlib.Path(__file__).parent.parent
TINY = (
  "experiments.train_grpo --prompt_tokens=72 --chunk_size=16"
  " --prompts_per_step=2 --prompts_at_once=2 --group_size=3"
  " --members_at_once=3 --max_tokens=3 --steps=4 --eval_every=2"
  " --eval_prompts=4 --checkpoint_every=2 --warm_start_max_steps=0"
  " --mesh_context=4 --mesh_member=2 --peer_timeout=20"
  " --reward=tests.fixture_rewards:scripted"
).split()
FIGURES = "loss grad_norm reward_mean entropy heldout_reward".split()


@pytest.mark.slow
class TwoProcessesTest(absltest.TestCase):
  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    cls.work = pathlib.Path(tempfile.mkdtemp())
    cls.addClassCleanup(shutil.rmtree, cls.work)

  def run_in(self, processes: int, out: str, **environment):
    """The main job in so many processes, of eight devices together."""
    environment = (
      os.environ
      | environment
      | {
        "PYTHONPATH": str(ROOT),
        "XLA_FLAGS": "--xla_backend_optimization_level=0",
        "JAX_NUM_CPU_DEVICES": "8",
        "JAX_COMPILATION_CACHE_DIR": str(self.work / f"cache{processes}"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.1",
      }
    )
    command = [*TINY, f"--out={self.work / out}"]
    if processes > 1:
      several = f"experiments.launch --processes={processes}"
      several += f" --devices={8 // processes} --"
      command = [*several.split(), *command]
    return subprocess.run(
      [sys.executable, "-m", *command],
      cwd=ROOT,
      env=environment,
      capture_output=True,
      text=True,
      check=False,
    )

  def rows(self, out: str) -> list[dict]:
    text = (self.work / out / "rows.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines()]

  def assert_same_curve(self, rows, wanted):
    self.assertEqual([r["step"] for r in rows], [r["step"] for r in wanted])
    for row, expected in zip(rows, wanted, strict=True):
      for name in FIGURES:
        a, b = row.get(name), expected.get(name)
        if b is None:
          self.assertIsNone(a)
        else:
          self.assertAlmostEqual(a, b, delta=1e-6 * max(1, abs(b)), msg=name)

  def test_the_same_curve_a_death_and_a_resumption(self):
    one = self.run_in(1, "one")
    self.assertIn("the claim", one.stdout, one.stderr)
    two = self.run_in(2, "two")
    self.assertIn("the claim", two.stdout, two.stderr)
    self.assert_same_curve(self.rows("two"), self.rows("one"))

    with self.subTest("a killed process ends the other"):
      begin = time.monotonic()
      # Calls: 4 an evaluation, 6 a step: process 0 dies in step 3.
      killed = self.run_in(2, "killed", KILL_AT_CALL="28")
      self.assertEqual(killed.returncode, signal.SIGKILL, killed.stderr)
      self.assertRegex(killed.stderr, "another task died|Connection reset")
      self.assertLess(time.monotonic() - begin, 600)
      self.assertLess(len(self.rows("killed")), 5)

    with self.subTest("one process continues where two stopped"):
      resumed = self.run_in(1, "killed")
      self.assertIn("the claim", resumed.stdout, resumed.stderr)
      self.assert_same_curve(self.rows("killed"), self.rows("one"))

    with self.subTest("a reward that raises: all of them save together"):
      broken = self.run_in(2, "broken", FAIL_AT_CALL="28")
      self.assertEqual(broken.returncode, 2, broken.stderr)
      self.assertIn("the verifier broke", broken.stderr)
      self.assertIn("process 0 stopped", broken.stderr)
      self.assertEqual(self.saved("broken"), 3)

    with self.subTest("a signal to one of them stops both"):
      stopped = self.run_in(2, "stopped", TERM_AT_CALL="28")
      self.assertEqual(stopped.returncode, 75, stopped.stderr)
      self.assertEqual(stopped.stderr.count("run again to continue"), 2)
      self.assertEqual(self.saved("stopped"), 3)

    with self.subTest("both continue"):
      for out in ("broken", "stopped"):
        resumed = self.run_in(2, out)
        self.assertIn("the claim", resumed.stdout, resumed.stderr)
        self.assert_same_curve(self.rows(out), self.rows("one"))

  def saved(self, out: str) -> int:
    """Steps of the last checkpoint; every 2 are saved undisturbed."""
    names = (self.work / out / "checkpoints").iterdir()
    return max(int(path.name) for path in names)


@pytest.mark.slow
class StatesTest(absltest.TestCase):
  def test_two_processes_save_and_load(self):
    """What they wrote is what one process captures, and all of them read it."""
    out = tempfile.mkdtemp()
    self.addCleanup(shutil.rmtree, out)
    command = "experiments.launch --processes=2 --devices=4 --"
    command += f" tests.fixture_states --out={out}"
    environment = os.environ | {"JAX_ENABLE_X64": "1"}
    subprocess.run(
      [sys.executable, "-m", *command.split()],
      cwd=ROOT,
      env=environment,
      check=True,
    )
    model, params, state = captured("device")
    for pages in ("device", "host"):
      path = f"{out}/{pages}.safetensors"
      loaded = load_state(path, model, params)
      for a, b in zip(
        jax.tree.leaves(loaded), jax.tree.leaves(state), strict=True
      ):
        np.testing.assert_allclose(a, b, atol=1e-12)


class RefusalTest(parameterized.TestCase):
  @parameterized.parameters(
    ("host:1", None, None), ("host:1", 2, None), (None, 2, 0)
  )
  def test_half_an_address(self, *given):
    with self.assertRaisesRegex(ValueError, "give all three"):
      distributed.initialize(*given)
