"""The main job as a user runs it: killed, resumed, refused."""

import functools
import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import tempfile

from absl.testing import absltest
import pytest

ROOT = pathlib.Path(__file__).parent.parent
TINY = (
  "--prompt_tokens=72 --chunk_size=16 --prompts_per_step=2 --prompts_at_once=1"
  " --group_size=3 --members_at_once=3 --max_tokens=3 --steps=5 --eval_every=2"
  " --eval_prompts=4 --checkpoint_every=2 --warm_start_max_steps=2"
  " --warm_start_prompts_per_step=2 --warm_start_prompt_tokens=64"
  " --warm_start_until=9"
).split()
# What a clock, a rate or a restart changes.
VOLATILE = re.compile(r"seconds_|tokens_per_second_|compile_count|peak_memory")


class TrainGrpoTest(absltest.TestCase):
  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    cls.cache = tempfile.mkdtemp()
    cls.addClassCleanup(shutil.rmtree, cls.cache)

  def setUp(self):
    super().setUp()
    self.work = pathlib.Path(tempfile.mkdtemp())
    self.addCleanup(shutil.rmtree, self.work)

  def _run(self, out: str, *extra: str, **environment):
    """One process; all share compiled programs through a cache on disk."""
    environment = (
      os.environ
      | environment
      | {
        "PYTHONPATH": str(ROOT),
        # The compiler as users have it: the suite's own flags choose another
        # code generator, whose ratios are off by a last bit.
        "XLA_FLAGS": "--xla_backend_optimization_level=0",
        "JAX_COMPILATION_CACHE_DIR": self.cache,
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.1",
      }
    )
    command = [
      sys.executable,
      "-m",
      "experiments.train_grpo",
      *TINY,
      f"--out={self.work / out}",
      "--reward=tests.fixture_rewards:scripted",
      *extra,
    ]
    return subprocess.run(
      command, cwd=ROOT, env=environment, capture_output=True, text=True
    )

  def _rows(self, out: str) -> list[dict]:
    path = self.work / out / "rows.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()]

  def _steady(self, out: str) -> list[dict]:
    return [
      {k: v for k, v in row.items() if not VOLATILE.match(k)}
      for row in self._rows(out)
    ]

  @functools.cached_property
  def whole(self) -> list[dict]:
    """Rows of a run that nothing disturbed."""
    done = self._run("whole")
    self.assertIn("the claim", done.stdout, done.stderr)
    return self._steady("whole")

  def _saved(self, out: str) -> int:
    names = (self.work / out / "checkpoints").iterdir()
    return max(int(path.name) for path in names)

  def _kill(self, call: int):
    """Calls of the reward: 4 a held-out evaluation, 6 a step."""
    killed = self._run("killed", KILL_AT_CALL=str(call))
    self.assertEqual(killed.returncode, -signal.SIGKILL, killed.stderr)
    self.assertLess(len(self._rows("killed")), 8)

  def test_life_of_a_run(self):
    """Whole, killed and resumed, refused, damaged: one sequence, one cache."""
    rows = self.whole
    self.assertEqual([r["step"] for r in rows], list(range(8)))
    phases = [r["phase"] for r in rows]
    self.assertEqual(phases, ["warm_start"] * 2 + ["grpo"] * 5 + ["final"])
    for name in (
      "reward_mean reward_std zero_spread_share grad_norm kl_old ratio_mean"
      " ratio_deviation_max mismatch_mean clip_share entropy loss"
      " response_length_mean tokens_per_second_rollout"
      " tokens_per_second_score tokens_per_second_update compile_count"
      " peak_memory_bytes"
    ).split():
      self.assertIsNotNone(self._rows("whole")[3][name], name)
    self.assertTrue((self.work / "whole" / "curve.png").exists())
    # The first step is on policy: ratio 1, loss 0 by construction, and the
    # log shows that it learns all the same.
    self.assertLess(rows[2]["ratio_deviation_max"], 1e-6)
    self.assertLess(abs(rows[2]["loss"]), 1e-6)
    self.assertGreater(rows[2]["grad_norm"], 0)

    with self.subTest("kill -9, run again"):
      self._kill(21)
      self._run("killed")
      self.assertEqual(self._steady("killed"), rows)

    with self.subTest("a checkpoint of another config is refused"):
      other = self._run("whole", "--learning_rate=0.5")
      self.assertEqual(other.returncode, 2)
      self.assertRegex(other.stderr, r"learning_rate is 0.001 there and 0.5")
      self.assertEqual(self._steady("whole"), rows)

    with self.subTest("a half-written checkpoint names itself"):
      checkpoints = self.work / "whole" / "checkpoints"
      newest = max(
        (p for p in checkpoints.iterdir() if p.name.isdigit()),
        key=lambda p: int(p.name),
      )
      data = [p for p in (newest / "tree").rglob("*") if p.is_file()]
      for path in data:
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
      damaged = self._run("whole")
      self.assertEqual(damaged.returncode, 2)
      self.assertRegex(
        damaged.stderr, r"checkpoint 7 .*is damaged.*Checkpoint 6 is whole"
      )
      self.assertLen(damaged.stderr.strip().splitlines(), 1)
      shutil.rmtree(newest)
      self._run("whole")
      self.assertEqual(self._steady("whole"), rows)

  @pytest.mark.slow
  def test_more_of_it(self):
    """Killed twice, prolonged, out of rewards, out of disk."""
    rows = self.whole
    with self.subTest("kill -9 twice, run again"):
      for call in (21, 34):
        self._kill(call)
      self._run("killed")
      self.assertEqual(self._steady("killed"), rows)

    with self.subTest("a finished run is left as it is"):
      self._run("killed")
      self.assertEqual(self._steady("killed"), rows)

    with self.subTest("a run can be prolonged"):
      self._run("killed", "--steps=6")
      longer = self._steady("killed")
      self.assertEqual(longer[:7], rows[:7])
      self.assertLen(longer, 9)

    with self.subTest("a reward that raises loses nothing"):
      broken = self._run("broken", FAIL_AT_CALL="21")
      self.assertEqual(broken.returncode, 2)
      self.assertRegex(broken.stderr, "member .*the verifier broke")
      self.assertLen(self._rows("broken"), self._saved("broken"))
      stopped = self._run("broken", TERM_AT_CALL="9")
      self.assertEqual(stopped.returncode, 75, stopped.stderr)
      self.assertLen(self._rows("broken"), self._saved("broken"))
      self._run("broken")
      self.assertEqual(self._steady("broken"), rows)

    with self.subTest("what it learned is looked at"):
      for script in ("evaluate", "generate"):
        shown = subprocess.run(
          [
            *(sys.executable, "-m", f"experiments.{script}"),
            *(f"--run={self.work / 'broken'}", "--prompts=2"),
            *(["--out", str(self.work)] if script == "evaluate" else []),
          ],
          cwd=ROOT,
          capture_output=True,
          text=True,
        )
        self.assertEqual(shown.returncode, 0, shown.stderr)
        self.assertIn(
          "heldout_reward" if "--out" in shown.args else "answer", shown.stdout
        )

    with self.subTest("a full disk ends the run and keeps what there was"):
      self._run("full", "--steps=1")
      limited = self._run("full", DISK_FULL="1")
      self.assertEqual(limited.returncode, 2, limited.stderr)
      self.assertRegex(limited.stderr, "could not be written .*Free space")
      self._run("full")
      self.assertEqual(self._steady("full"), rows)


if __name__ == "__main__":
  absltest.main()
