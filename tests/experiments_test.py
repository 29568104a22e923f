"""The measuring scripts run, write rows and refuse bad flags in one line."""

import contextlib
import dataclasses
import io
import json
import pathlib
import shutil
import subprocess
import sys
import tempfile
from unittest import mock

from absl.testing import flagsaver, parameterized
import jax
import numpy as np
import pytest

from experiments import report, train_grpo, training
from longstraw_jax import PRESETS, LayerSpec, Stage
from longstraw_jax.checkpoint import CheckpointError
from longstraw_jax.disk import DiskError
from longstraw_jax.interrupts import Interrupted
from longstraw_jax.tasks import corpus

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


TINY_RUN = (
  "--preset=tiny-hybrid --lora_rank=2 --prompt_tokens=64 --chunk_size=64"
  " --prompts_per_step=1 --prompts_at_once=1 --group_size=2"
  " --members_at_once=2 --steps=0 --eval_prompts=1 --warm_start_max_steps=0"
).split()


def tiny_values(out, *more: str) -> dict:
  """Flag values of a run that takes no step."""
  with flagsaver.flagsaver():  # takes the flags themselves away again
    training.define_flags("")
    training.parse_flags(["train_grpo", *TINY_RUN, f"--out={out}", *more])
    return training.flag_values()


class ValuesTest(parameterized.TestCase):
  """What a script is told of an earlier run is what that run was."""

  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    # Of 258 ids, for bytes; one layer.
    tiny = PRESETS["tiny-hybrid"]
    stage = Stage(pattern=(LayerSpec(mixer="attention"),), repeats=1)
    tiny = dataclasses.replace(tiny, vocab_size=258, stages=(stage,))
    patch = mock.patch.dict(PRESETS, {"tiny-hybrid": tiny})
    patch.start()
    cls.addClassCleanup(patch.stop)
    cls.work = pathlib.Path(tempfile.mkdtemp())
    cls.addClassCleanup(shutil.rmtree, cls.work)
    cls.text = cls.work / "text"
    cls.text.mkdir()
    for i in range(8):
      line = f"line {i} of some text\n"
      (cls.text / f"{i}.txt").write_text(line * 40)
    cls.values = tiny_values(cls.work / "run", f"--corpus={cls.text}")
    training.build_run(cls.values).execute()

  def setUp(self):
    super().setUp()
    self.out = self.work / self._testMethodName
    shutil.copytree(self.work / "run", self.out)

  def edit_flags(self, **changes):
    path = self.out / "flags.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))

  def restore(self, **changes):
    run = training.build_run(training.load_values(str(self.out)) | changes)
    return training.restore_learner(run, changes)

  def test_a_run_is_read_back_on_one_device(self):
    self.edit_flags(mesh_context=4, mesh_member=2)
    found = training.load_values(str(self.out))
    self.assertEqual(found, self.values | {"out": str(self.out)})
    learner, step = self.restore(temperature=0.5, prompt_tokens=50)
    self.assertEqual(step, 0)
    wanted = training.build_run(self.values).initial_params(0)
    jax.tree.map(np.testing.assert_array_equal, learner.params, wanted)

  @parameterized.parameters(
    ({"task": "multi_key"}, "task is 'needle' there and 'multi_key' here"),
    ({"value_alphabet": "ab"}, "value_alphabet is '12345678' there"),
    ({"lora_rank": 4}, "lora_rank is 2 there and 4 here"),
    ({"seed": 1}, "seed is 0 there and 1 here"),
  )
  def test_flags_that_are_not_the_checkpoints(self, changes, message):
    self.edit_flags(**changes)
    with self.assertRaisesRegex(ValueError, f"flags.json .*{message}"):
      training.load_values(str(self.out))

  @parameterized.parameters("damaged", "missing", "[1]", "{}")
  def test_flags_that_are_none(self, text):
    path = self.out / "flags.json"
    path.unlink() if text == "missing" else path.write_text(text)
    with self.assertRaisesRegex(ValueError, "flags.json"):
      training.load_values(str(self.out))

  def test_a_launch_of_other_flags_keeps_those_of_the_run(self):
    before = (self.out / "flags.json").read_bytes()
    other = self.values | {"out": str(self.out), "task": "multi_key"}
    other["num_facts"] = 2
    with self.assertRaisesRegex(CheckpointError, "'needle' there"):
      training.build_run(other).execute()
    self.assertEqual((self.out / "flags.json").read_bytes(), before)
    self.restore()

  @parameterized.parameters("changed", "added", "gone")
  def test_other_text_is_another_run(self, kind):
    path = self.text / "3.txt"
    before = path.read_text()
    if kind == "changed":
      path.write_text(before.replace("some", "none", 1))
    elif kind == "added":
      path = self.text / "9.txt"
      path.write_text("more")
    else:
      path.unlink()
    with self.subTest("evaluated"):
      with self.assertRaisesRegex(CheckpointError, "SHA-256 of the corpus is"):
        self.restore()
    with self.subTest("continued"):
      run = training.build_run(self.values | {"out": str(self.out)})
      with self.assertRaisesRegex(CheckpointError, "SHA-256 of the corpus is"):
        run.execute()
    path.unlink() if kind == "added" else path.write_text(before)
    self.restore()

  def test_another_standard_library_is_another_run(self):
    values = tiny_values(self.out / "std")
    with mock.patch.object(
      corpus.sysconfig, "get_paths", return_value={"stdlib": str(self.code())}
    ):
      training.build_run(values).execute()
    with self.assertRaisesRegex(CheckpointError, "SHA-256 of the corpus is"):
      training.build_run(values).execute()

  def code(self) -> pathlib.Path:
    for i in range(8):
      (self.out / f"{i}.py").write_text(f"x = {i}\n" * 40)
    return self.out

  def test_another_model_is_another_run(self):
    other = dataclasses.replace(PRESETS["tiny-hybrid"], norm_eps=1e-3)
    with mock.patch.dict(PRESETS, {"tiny-hybrid": other}):
      with self.assertRaisesRegex(CheckpointError, "model.norm_eps is"):
        self.restore()

  def test_one_member_learns_nothing(self):
    for mode in ("std", "none", "leave_one_out"):
      with self.assertRaisesRegex(ValueError, "group_size is 1: .*at least 2"):
        training.build_run(self.values | {"group_size": 1, "advantages": mode})

  def test_figures_never_replace_the_rows_of_a_run(self):
    before = (self.out / "rows.jsonl").read_bytes()
    with self.assertRaisesRegex(ValueError, "holds a training run"):
      report.RowWriter(self.out)
    self.assertEqual((self.out / "rows.jsonl").read_bytes(), before)


class ExitCodeTest(parameterized.TestCase):
  @parameterized.parameters(
    (ValueError("bad\nvalue"), 2, "error: bad value"),
    (FileNotFoundError(2, "No such file", "x"), 2, "No such file: 'x'"),
    (OSError(28, "No space left on device"), 2, "No space left"),
    (DiskError("rows.jsonl"), 2, "error: rows.jsonl"),
    (Interrupted(15), 75, "stopped by SIGTERM: run again to continue"),
    (KeyboardInterrupt(), 75, "stopped by SIGINT: run again to continue"),
  )
  def test_one_line_and_a_code(self, error, code, line):
    def main(argv):
      raise error

    stderr = io.StringIO()
    with self.assertRaises(SystemExit) as caught:
      with contextlib.redirect_stderr(stderr):
        report.exit_code(main)([])
    self.assertEqual(caught.exception.code, code)
    self.assertLen(stderr.getvalue().splitlines(), 1)
    self.assertIn(line, stderr.getvalue())


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
