"""The life of a run: what ends it early, and what is left then."""

import contextlib
import dataclasses
import gc
import json
import os
import pathlib
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from unittest import mock
import warnings

from absl.testing import parameterized
import jax
import numpy as np

from longstraw_jax import (
  PRESETS,
  LayerSpec,
  Model,
  PolicyObjective,
  Stage,
  trainer,
)
from longstraw_jax.checkpoint import CheckpointError, Checkpoints
from longstraw_jax.disk import DiskError, write_whole
from longstraw_jax.interrupts import Interrupted
from longstraw_jax.metrics import read_rows
from longstraw_jax.rewards import RewardError
from longstraw_jax.run import Run
from longstraw_jax.run_config import RunConfig, WarmStartConfig
from longstraw_jax.tasks import Corpus, TaskConfig, make_task
from longstraw_jax.tokenizer import ByteTokenizer
from longstraw_jax.train_config import (
  EngineConfig,
  OptimizerConfig,
  SamplingConfig,
  TrainConfig,
)
from longstraw_jax.trainer import Trainer

MODEL = Model(
  dataclasses.replace(
    PRESETS["tiny-hybrid"],
    vocab_size=258,
    stages=(Stage(pattern=(LayerSpec(mixer="attention"),), repeats=1),),
  )
)
INIT = jax.jit(MODEL.init)
TASK = make_task(
  TaskConfig(prompt_tokens=72, num_facts=1),
  Corpus.standard_library(),
  ByteTokenizer(),
)
TRAIN = TrainConfig(
  prompts_per_step=2,
  sampling=SamplingConfig(group_size=3, max_tokens=3),
  engine=EngineConfig(chunk_size=24, prompts_at_once=2, members_at_once=3),
  optimizer=OptimizerConfig(learning_rate=1e-2, warmup_steps=0),
  objective=PolicyObjective(kl_coef=0.1),
)
STEPS, WARM_STEPS, EVAL_PROMPTS = 8, 2, 2
# What a clock, a rate or a restart changes.
VOLATILE = ("seconds_", "tokens_per_second_", "compile_count", "peak_memory")


def length_reward(prompt_text, response_text, info):
  """Something that varies within a group of random responses."""
  del prompt_text, info
  return sum(response_text.encode()) % 7 / 7


def make_run(out, reward=length_reward, settings=None, **schedule) -> Run:
  """A run of a few steps; all runs of the same settings are the same one."""
  schedule = {"checkpoint_every": 100, "eval_every": 4} | schedule
  return Run(
    initial_params=lambda seed: INIT(jax.random.key(seed)),
    trainer=Trainer(MODEL, TRAIN, TASK, ByteTokenizer(), reward),
    config=RunConfig(
      steps=STEPS,
      eval_prompts=EVAL_PROMPTS,
      warm_start=WarmStartConfig(
        max_steps=WARM_STEPS, until=2, prompts_per_step=2, prompt_tokens=72
      ),
      **schedule,
    ),
    out=pathlib.Path(out),
    warm_task=TASK,
    settings=settings or {"lr": 0.01},
  )


def steady_rows(out) -> list[dict]:
  """Rows but for what changes from one machine's hour to the next."""
  lines = (pathlib.Path(out) / "rows.jsonl").read_text().splitlines()
  return [
    {k: v for k, v in json.loads(x).items() if not k.startswith(VOLATILE)}
    for x in lines
  ]


def final_state(run: Run):
  """What the run's last checkpoint holds."""
  checkpoints = Checkpoints(run.out / "checkpoints")
  like = run.initial_state(run.initial_params(0))
  state = checkpoints.restore(checkpoints.latest(), like, run.settings)
  checkpoints.close()
  return state


class Accident:
  """A reward function to which something happens in one step of GRPO."""

  def __init__(self, step: int, act):
    # EVAL_PROMPTS calls an evaluation, of which the warm start has two; six a
    # step.
    evaluations = 3 + (step >= 4)
    self.call = EVAL_PROMPTS * evaluations + 6 * step + 3
    self.act, self.calls = act, 0

  def __call__(self, prompt_text, response_text, info):
    self.calls += 1
    if self.calls == self.call:
      self.act()
    return length_reward(prompt_text, response_text, info)


def snapshot(folder: pathlib.Path) -> dict:
  """Every file's bytes and time of change."""
  files = (path for path in folder.rglob("*") if path.is_file())
  return {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in files}


@contextlib.contextmanager
def file_limit(size: int):
  """No file of the process may grow beyond so many bytes."""
  before = resource.getrlimit(resource.RLIMIT_FSIZE)
  resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
  try:
    yield
  finally:
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def forget_failed_saves() -> None:
  """Orbax never awaits what is left of a save that failed."""
  with warnings.catch_warnings():
    warnings.simplefilter("ignore", RuntimeWarning)
    gc.collect()


class RunTest(parameterized.TestCase):
  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    cls.work = pathlib.Path(tempfile.mkdtemp())
    cls.addClassCleanup(shutil.rmtree, cls.work)
    run = make_run(cls.work / "whole")
    run.execute()
    cls.rows, cls.state = steady_rows(run.out), final_state(run)

  def setUp(self):
    super().setUp()
    self.out = self.work / self._testMethodName
    # Another step in each test, the same one in each session.
    random = np.random.default_rng(sum(self.id().encode()))
    self.step = int(random.integers(1, STEPS))

  def assert_continues(self):
    """The same command ends as the undisturbed run did, to the bit."""
    run = make_run(self.out)
    run.execute()
    jax.tree.map(np.testing.assert_array_equal, final_state(run), self.state)
    self.assertEqual(steady_rows(run.out), self.rows)

  def hit(self, error, act, message="", **schedule):
    """Runs into an accident; every step that was done before is saved."""
    run = make_run(self.out, Accident(self.step, act), **schedule)
    with self.assertRaisesRegex(error, message):
      run.execute()
    checkpoints = Checkpoints(run.out / "checkpoints")
    self.assertEqual(checkpoints.latest(), WARM_STEPS + self.step)
    self.assertLen(steady_rows(run.out), WARM_STEPS + self.step)

  @parameterized.parameters(ZeroDivisionError, SystemExit, GeneratorExit)
  def test_a_reward_that_raises(self, kind):
    def act():
      raise kind

    self.hit(RewardError, act, f"raised {kind.__name__} for member")
    self.assert_continues()

  def test_a_reward_that_is_interrupted(self):
    def act():
      raise KeyboardInterrupt

    self.hit(KeyboardInterrupt, act)
    self.assert_continues()

  @parameterized.parameters("SIGTERM", "SIGINT", "SIGHUP")
  def test_a_signal(self, name):
    number = signal.Signals[name]
    self.hit(Interrupted, lambda: os.kill(os.getpid(), number), name)
    self.assertEqual(signal.getsignal(signal.SIGTERM), signal.SIG_DFL)
    self.assert_continues()

  def test_a_signal_ends_a_long_reward(self):
    """Left where it is, also if the reward hides it."""

    def act():
      timer = threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGTERM))
      timer.start()
      with contextlib.suppress(BaseException):
        time.sleep(60)
      timer.join()

    begin = time.monotonic()
    self.hit(Interrupted, act)
    self.assertLess(time.monotonic() - begin, 50)

  def test_a_signal_between_device_calls(self):
    """What is not finished is not in the checkpoint, and is done again."""
    run = make_run(self.out)
    step, update = run.trainer.step, trainer.update

    def signalled(*args):
      os.kill(os.getpid(), signal.SIGTERM)
      return update(*args)

    def hit(self, learner, number, reference):
      fake = signalled if number == STEPS // 2 else update
      with mock.patch.object(trainer, "update", fake):
        return step(learner, number, reference)

    with mock.patch.object(Trainer, "step", hit):
      with self.assertRaises(Interrupted):
        run.execute()
    latest = Checkpoints(run.out / "checkpoints").latest()
    self.assertEqual(latest, WARM_STEPS + STEPS // 2)
    self.assert_continues()

  @parameterized.parameters("rows.jsonl", "tensorboard", "checkpoints")
  def test_a_full_disk(self, name):
    """One error that names what failed; nothing half-written is believed."""
    limits = contextlib.ExitStack()
    self.addCleanup(forget_failed_saves)
    self.addCleanup(limits.close)
    done = WARM_STEPS + self.step

    def act():
      if name == "checkpoints":
        saved = self.out / name / str(done)
        while not saved.exists():
          time.sleep(0.01)
        # The next one's largest file is too large, which rows never are.
        files = (path for path in saved.rglob("*") if path.is_file())
        size = max(path.stat().st_size for path in files) * 3 // 4
      if name == "rows.jsonl":
        size = (self.out / name).stat().st_size + 100
      if name == "tensorboard":
        # Rows are shorter than what TensorBoard makes of them.
        size = max(x.stat().st_size for x in (self.out / name).iterdir()) + 100
      limits.enter_context(file_limit(size))

    every = 1 if name == "checkpoints" else 100
    run = make_run(self.out, Accident(self.step, act), checkpoint_every=every)
    with self.assertRaisesRegex(
      (DiskError, CheckpointError), f"{name}.*File too large.*Free space"
    ):
      run.execute()
    # A save that fails is noticed when it has failed, between later steps.
    late = 1 if every == 100 else STEPS
    rows = len(read_rows(self.out / "rows.jsonl"))
    self.assertBetween(rows, done, done + late)
    latest = Checkpoints(self.out / "checkpoints").latest()
    self.assertEqual(latest, done if every == 1 else None)
    limits.close()
    self.assert_continues()

  def test_a_disk_of_two_megabytes(self):
    """The whole run on a disk that something else fills."""
    self.out.mkdir()
    command = f"mount -t tmpfs -o size=2m tmpfs {self.out}".split()
    if subprocess.run(command, capture_output=True, check=False).returncode:
      self.skipTest("nothing may be mounted here")
    command = ["umount", "-l", self.out]
    self.addCleanup(subprocess.run, command, check=True)
    self.addCleanup(forget_failed_saves)
    filler = self.out / "filler"

    def act():
      while list((self.out / "checkpoints").glob("*.partial")):
        time.sleep(0.01)
      with contextlib.suppress(OSError):
        filler.write_bytes(bytes(2**21))

    run = make_run(self.out, Accident(self.step, act), checkpoint_every=2)
    with self.assertRaisesRegex(
      (DiskError, CheckpointError), f"{self.out}.*No space left.*Free space"
    ):
      run.execute()
    latest = Checkpoints(self.out / "checkpoints").latest()
    self.assertBetween(WARM_STEPS + self.step - latest, 0, 1)
    names = [path.name for path in (self.out / "checkpoints").iterdir()]
    self.assertEqual([x for x in names if not x.isdecimal()], [])
    filler.unlink()
    self.assert_continues()

  @parameterized.parameters("flags.json", "rows.jsonl", "curve.png")
  def test_a_full_disk_at_the_ends(self, name):
    full, replace = OSError(28, "No space left on device"), pathlib.Path.replace

    def fail(path, target):
      if target.name == name:
        raise full
      return replace(path, target)

    accepted = lambda: write_whole(self.out / "flags.json", b"{}")
    run = dataclasses.replace(make_run(self.out), accepted=accepted)
    with mock.patch.object(pathlib.Path, "replace", fail):
      with self.assertRaisesRegex(DiskError, f"{name}.*No space left"):
        run.execute()
    self.assertEmpty(list(self.out.glob("*.tmp")))
    self.assertFalse((self.out / name).exists())
    self.assert_continues()

  def test_a_second_launch_is_refused(self):
    """Before it changes anything; the first one goes on as if alone."""
    seen = []

    def act():
      before = snapshot(self.out)
      with self.assertRaisesRegex(ValueError, "another run, process [0-9]+"):
        make_run(self.out).execute()
      seen.append(before == snapshot(self.out))

    make_run(self.out, Accident(self.step, act)).execute()
    self.assertEqual(seen, [True])
    self.assert_continues()

  def test_a_refused_launch_changes_nothing(self):
    make_run(self.out).execute()
    before = snapshot(self.out)
    accepted = mock.Mock()
    run = make_run(self.out, settings={"lr": 0.5})
    run = dataclasses.replace(run, accepted=accepted)
    with self.assertRaisesRegex(CheckpointError, "lr is 0.01 there and 0.5"):
      run.execute()
    accepted.assert_not_called()
    self.assertEqual(snapshot(self.out), before)

  def test_a_damaged_checkpoint_changes_nothing(self):
    make_run(self.out, checkpoint_every=4).execute()
    latest = str(WARM_STEPS + STEPS)
    path = next((self.out / "checkpoints" / latest / "tree").rglob("d/*"))
    path.write_bytes(path.read_bytes()[:-1])
    before = snapshot(self.out)
    message = f"checkpoint {latest} .*is damaged.*Checkpoint 8 is whole"
    with self.assertRaisesRegex(CheckpointError, message):
      make_run(self.out).execute()
    self.assertEqual(snapshot(self.out), before)
    path.parents[2].rename(self.out / "damaged")
    self.assert_continues()

  def test_first_weights_that_are_refused_change_nothing(self):
    def refuse(seed):
      raise ValueError("lora_targets name nothing")

    run = dataclasses.replace(make_run(self.out), initial_params=refuse)
    with self.assertRaisesRegex(ValueError, "lora_targets"):
      run.execute()
    self.assertFalse(self.out.exists())

  @parameterized.parameters("", "below")
  def test_a_file_in_place_of_the_directory(self, name):
    self.out.write_text("a file")
    with self.assertRaisesRegex(ValueError, "out='.*cannot be written to"):
      make_run(self.out / name).execute()
    self.assertEqual(self.out.read_text(), "a file")

  def test_a_read_only_directory(self):
    """Also where the first look cannot tell, as for root."""
    denied = PermissionError(13, "Permission denied")
    with mock.patch.object(pathlib.Path, "mkdir", side_effect=denied):
      with self.assertRaisesRegex(ValueError, "to: Permission denied"):
        make_run(self.out).execute()
    with mock.patch.object(os, "access", return_value=False):
      with self.assertRaisesRegex(ValueError, "is read-only"):
        make_run(self.out).execute()

  def test_a_log_that_is_not_installed(self):
    with mock.patch.dict(sys.modules, {"wandb": None}):
      with self.assertRaisesRegex(ValueError, "wandb_project='x' needs"):
        make_run(self.out, wandb_project="x").execute()
    self.assertFalse(self.out.exists())

  @parameterized.parameters(
    "eval_every", "eval_prompts", "checkpoint_every", "keep_checkpoints"
  )
  def test_intervals_below_one(self, name):
    with self.assertRaisesRegex(ValueError, f"{name} is 0"):
      RunConfig(steps=1, **{name: 0})
