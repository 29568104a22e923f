"""The measuring scripts run, write rows and refuse bad flags in one line."""

import json
import pathlib
import subprocess
import sys
import tempfile

from absl.testing import parameterized
import numpy as np
import pytest

from experiments import train_grpo, training

ROOT = pathlib.Path(__file__).parents[1]

TINY = {
  "gradient_parity": (
    "--prompts=3 --chunks=2 --responses=2 --dtypes=float64 --group_size=2"
    " --scopes=tail"
  ),
  "group_memory": (
    "--preset=tiny-hybrid --prompt=64 --time_prompt=64 --response=4"
    " --memory_groups=2 --time_groups=2 --chunk_size=32 --repeats=1"
  ),
  # Where the compiler is not installed, by arithmetic alone.
  "plan": (
    "--preset=tiny-hybrid --prompt=65 --response=4 --group=2 --chunk_size=32"
    " --phases=capture,optimizer --device=custom --device_memory=1000000"
  ),
}


def run_script(name: str, *flags: str) -> subprocess.CompletedProcess:
  return subprocess.run(
    [sys.executable, "-m", f"experiments.{name}", *flags],
    cwd=ROOT,
    capture_output=True,
    text=True,
    check=False,
  )


class ValuesTest(parameterized.TestCase):
  def test_a_run_of_many_devices_is_evaluated_on_one(self):
    values = {"mesh_context": 4, "mesh_member": 2, "steps": 7}
    with tempfile.TemporaryDirectory() as out:
      training.save_values(values, pathlib.Path(out))
      found = training.load_values(out)
    self.assertEqual(
      found, {"mesh_context": 1, "mesh_member": 1, "steps": 7, "out": out}
    )


class ClaimTest(parameterized.TestCase):
  """What train_grpo says of a run that began with a checkpoint."""

  def claim(self, start, end):
    row = lambda x: {"heldout_reward": np.mean(x), "heldout_rewards": list(x)}
    return train_grpo.pretrained_claim(row(start), row(end))

  def test_a_gain_over_enough_pairs(self):
    start = np.arange(128) % 2.0
    end = np.maximum(start, np.arange(128) % 4 == 0)  # 32 of 64 misses gained
    text, held = self.claim(start, end)
    self.assertTrue(held, text)
    # Mean 0.25, standard deviation sqrt(0.25 0.75 128 / 127).
    self.assertIn("gain 0.250 with a lower 95 % bound of 0.175", text)

  def test_pairs_decide(self):
    """The same means, but half of the gains are undone elsewhere."""
    start = np.repeat([1.0, 0.0], 64)
    self.assertFalse(self.claim(start, start[::-1])[1])

  def test_too_few_prompts(self):
    self.assertFalse(self.claim(np.zeros(64), np.ones(64))[1])

  def test_too_small_a_gain(self):
    end = (np.arange(1280) % 10 == 0) * 1.0
    self.assertFalse(self.claim(np.zeros(1280), end)[1])


class ScriptTest(parameterized.TestCase):
  def test_rows_of_a_plan(self):
    self.check_rows("plan")

  @parameterized.parameters("gradient_parity", "group_memory")
  @pytest.mark.slow
  def test_rows_parse_and_say_what_they_are(self, name):
    self.check_rows(name)

  def check_rows(self, name):
    with tempfile.TemporaryDirectory() as out:
      done = run_script(name, f"--out={out}", *TINY[name].split())
      text = (pathlib.Path(out) / "rows.jsonl").read_text()
    rows = [json.loads(line) for line in text.splitlines()]
    self.assertNotEmpty(rows, done.stderr)
    for row in rows:
      for key in "grad_scope preset seed P G R dtype device versions".split():
        self.assertIn(key, row)
    self.assertIn("grad_scope", done.stdout)
    if name == "gradient_parity":
      self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
      self.assertLen(rows, 2)
      self.assertLess(max(row["error"] for row in rows), 1e-12)
    else:
      # Times of milliseconds prove nothing; the code says what was printed.
      self.assertIn(done.returncode, (0, 1), done.stderr)
      self.assertEqual(done.returncode == 1, "FAILED" in done.stdout)

  @parameterized.parameters(
    ("gradient_parity", "--preset=huge"),
    ("gradient_parity", "--chunks=0"),
    ("gradient_parity", "--responses=one"),
    ("gradient_parity", "--dtypes=float8"),
    ("gradient_parity", "--scopes=half"),
    ("gradient_parity", "--seed=x"),
    ("group_memory", "--preset=huge"),
    ("group_memory", "--repeats=0"),
    ("group_memory", "--saved=some"),
    ("plan", "--preset=huge"),
    ("plan", "--device=h900"),
    ("plan", "--device_memory=0"),
    ("plan", "--train=lora"),
    ("plan", "--base=nf4"),
    ("plan", "--member=3"),
    ("plan", "--phases=prefill"),
    ("plan", "--page_grad_dtype=int8"),
  )
  def test_bad_flags_end_in_one_line(self, name, flag):
    with tempfile.TemporaryDirectory() as out:
      done = run_script(name, f"--out={out}", flag)
    self.assertNotEqual(done.returncode, 0)
    lines = done.stderr.strip().splitlines()
    self.assertLen(lines, 1, done.stderr)
    key, value = flag.lstrip("-").split("=")
    self.assertIn(key, lines[0])
    self.assertIn(value, lines[0])

  @parameterized.parameters(*TINY)
  def test_help_states_the_claim(self, name):
    text = run_script(name, "--help").stdout
    for word in ("Claim:", "Command:", "Cost:", "Expected result:"):
      self.assertIn(word, text)
