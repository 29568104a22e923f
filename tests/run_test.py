"""The life of a run: what ends it early, and what is left then."""

import dataclasses
import json
import os
import pathlib
import shutil
import signal
import tempfile

from absl.testing import parameterized
import jax
import numpy as np

from longstraw_jax import PRESETS, Model
from longstraw_jax.checkpoint import Checkpoints
from longstraw_jax.interrupts import Interrupted
from longstraw_jax.rewards import RewardError
from longstraw_jax.run import Run, RunConfig, WarmStartConfig
from longstraw_jax.tasks import Corpus, TaskConfig, make_task
from longstraw_jax.tokenizer import ByteTokenizer
from longstraw_jax.train_config import (
  EngineConfig,
  OptimizerConfig,
  SamplingConfig,
  TrainConfig,
)
from longstraw_jax.trainer import Trainer

PRESET = PRESETS["tiny-hybrid"]
MODEL = Model(
  dataclasses.replace(
    PRESET,
    vocab_size=258,
    saved="everything",
    stages=(dataclasses.replace(PRESET.stages[0], repeats=1),),
  )
)
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
    initial_params=lambda seed: MODEL.init(jax.random.key(seed)),
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
  """A reward function to which something happens at one of its calls."""

  def __init__(self, step: int, act):
    # Calls: EVAL_PROMPTS an evaluation, 6 a step of GRPO.
    evaluations = 1 + 1 + (step > 0) * 0 + (step >= 4)
    self.call = EVAL_PROMPTS * evaluations + 6 * step + 3
    self.act, self.calls = act, 0

  def __call__(self, prompt_text, response_text, info):
    self.calls += 1
    if self.calls == self.call:
      self.act()
    return length_reward(prompt_text, response_text, info)


class RunTest(parameterized.TestCase):
  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    cls.work = pathlib.Path(tempfile.mkdtemp())
    cls.addClassCleanup(shutil.rmtree, cls.work)
    run = make_run(cls.work / "whole")
    run.execute()
    cls.rows, cls.state = steady_rows(run.out), final_state(run)

  def assert_the_same(self, run: Run):
    """Every leaf of the final state and every row, to the bit."""
    jax.tree.map(np.testing.assert_array_equal, final_state(run), self.state)
    self.assertEqual(steady_rows(run.out), self.rows)

  def step(self) -> int:
    """A step of GRPO, another in each test and the same in each session."""
    seed = sum(self.id().encode())
    return int(np.random.default_rng(seed).integers(1, STEPS))

  def hit(self, error, act, **schedule) -> Run:
    """Runs into an accident; what was done before is saved."""
    step = self.step()
    run = make_run(self.work / self.id(), Accident(step, act), **schedule)
    with self.assertRaises(error):
      run.execute()
    checkpoints = Checkpoints(run.out / "checkpoints")
    self.assertEqual(checkpoints.latest(), WARM_STEPS + step)
    self.assertLen(steady_rows(run.out), WARM_STEPS + step)
    return run

  def kill(self, number):
    return lambda: os.kill(os.getpid(), number)

  def test_a_reward_that_raises(self):
    run = self.hit(RewardError, lambda: 1 / 0)
    make_run(run.out).execute()
    self.assert_the_same(run)

  @parameterized.parameters(signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
  def test_a_signal(self, number):
    run = self.hit(Interrupted, self.kill(number))
    make_run(run.out).execute()
    self.assert_the_same(run)
