"""A whole run: warm start, GRPO, evaluation, checkpoints, rows, curve."""

from collections.abc import Callable, Mapping
import contextlib
import dataclasses
import pathlib
from typing import Any

from flax import struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Int
import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from longstraw_jax.checkpoint import Checkpoints
from longstraw_jax.distributed import PeerError, is_leader
from longstraw_jax.metrics import (
  MetricLog,
  NoLog,
  compile_count,
  device_name,
  peak_memory_bytes,
  read_rows,
  versions,
)
from longstraw_jax.models.model import Params
from longstraw_jax.rewards import RewardError
from longstraw_jax.sharding import place_at_rest
from longstraw_jax.steps import Learner, make_learner
from longstraw_jax.tasks import Task
from longstraw_jax.train_config import OptimizerConfig
from longstraw_jax.trainer import Trainer

WARM_START, GRPO, FINAL = "warm_start", "grpo", "final"


@dataclasses.dataclass(frozen=True, kw_only=True)
class WarmStartConfig:
  """Supervised steps on the task's answers before GRPO.

  Attributes:
    max_steps: steps at most; 0 for none.
    until: it ends at the first evaluation with this held-out reward.
    prompt_tokens: length of its prompts, usually short.
    prompts_per_step: prompts of one step.
    eval_every: steps between evaluations.
    optimizer: its optimizer; GRPO starts with a fresh one.
  """

  max_steps: int = 0
  until: float = 0.15
  prompt_tokens: int = 128
  prompts_per_step: int = 64
  eval_every: int = 5
  optimizer: OptimizerConfig = OptimizerConfig(learning_rate=3e-3)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunConfig:
  """How long a run is and how often it reports.

  Attributes:
    steps: GRPO rollouts.
    eval_every: steps between evaluations on held-out prompts.
    eval_prompts: how many of them.
    eval_at_once: how many of them are worked on together.
    checkpoint_every: steps between checkpoints.
    keep_checkpoints: how many of the last ones stay.
    wandb_project: also log there.
    warm_start: the supervised phase.
  """

  steps: int
  eval_every: int = 25
  eval_prompts: int = 512
  eval_at_once: int = 64
  checkpoint_every: int = 50
  keep_checkpoints: int = 3
  wandb_project: str | None = None
  warm_start: WarmStartConfig = WarmStartConfig()


@struct.dataclass
class RunState:
  """Everything that a step changes, as one tree for checkpoints.

  Attributes:
    learner: the weights and the optimizer's state.
    reference: the weights at the start of GRPO, where a KL term needs them.
    step: rows written so far.
    warm_steps: supervised steps taken.
    grpo_steps: GRPO steps taken.
    warm: 1 while the warm start goes on.
  """

  learner: Learner
  reference: Params | None
  step: Int[Array, ""]
  warm_steps: Int[Array, ""]
  grpo_steps: Int[Array, ""]
  warm: Int[Array, ""]


@dataclasses.dataclass(frozen=True)
class Run:
  """A trainer with its directory and schedule.

  Attributes:
    initial_params: seed -> the weights it begins with.
    trainer: the loop's steps.
    config: the schedule.
    out: directory of rows, checkpoints, TensorBoard files and the curve.
    warm_task: the task at the warm start's prompt length.
    settings: what identifies the run; a checkpoint of others is refused.
    report: called with every row, for a progress bar.
    mesh: of all devices that share the work; None takes the first alone.
  """

  initial_params: Callable[[int], Params]
  trainer: Trainer
  config: RunConfig
  out: pathlib.Path
  warm_task: Task
  settings: Mapping[str, Any]
  report: Callable[[dict], None] = lambda row: None
  mesh: jax.sharding.Mesh | None = None

  def initial_state(self, params: Params) -> RunState:
    """The state of a run that has not begun."""
    warm = self.config.warm_start
    optimizer = self.trainer.config.optimizer
    if warm.max_steps:
      optimizer = warm.optimizer
    zero = jnp.int32(0)
    return RunState(
      learner=make_learner(params, optimizer),
      reference=params if self.trainer.config.objective.kl_coef else None,
      step=zero,
      warm_steps=zero,
      grpo_steps=zero,
      warm=jnp.int32(warm.max_steps > 0),
    )

  def execute(self) -> list[dict[str, Any]]:
    """Runs to the end, from the last checkpoint where there is one.

    A checkpoint may be of another mesh, or of another number of processes.

    Returns:
      All rows of the run, those before a restart included.

    Raises:
      CheckpointError: a checkpoint is damaged, of other settings, or cannot
        be written.
      RewardError: the reward function failed; the run can be continued from
        the step it failed at.
    """
    checkpoints = Checkpoints(
      self.out / "checkpoints", self.config.keep_checkpoints
    )
    state = self.initial_state(self.initial_params(self.trainer.config.seed))
    use_mesh = contextlib.nullcontext()
    if self.mesh is not None:
      state = place_at_rest(state, self.mesh)
      use_mesh = jax.set_mesh(self.mesh)
    found = checkpoints.latest()
    if found is not None:
      state = checkpoints.restore(found, state, self.settings)
    log = self._open_log(int(state.step))
    try:
      with use_mesh:
        state = self._loop(state, checkpoints, log)
    except (RewardError, PeerError):
      self._save(checkpoints, state)  # all processes take part
      raise
    finally:
      checkpoints.close()
      log.close()
    rows = read_rows(log.path)
    if is_leader():
      plot_curve(rows, self.out / "curve.png")
    return rows

  def _open_log(self, step: int) -> MetricLog | NoLog:
    if not is_leader():
      return NoLog(self.out)
    return MetricLog(self.out, step, self.config.wandb_project)

  def _save(self, checkpoints: Checkpoints, state: RunState) -> None:
    if checkpoints.latest() != int(state.step):
      checkpoints.save(int(state.step), state, self.settings)

  def _loop(self, state: RunState, checkpoints, log) -> RunState:
    config = self.config
    while True:
      warm = bool(state.warm)
      done = int(state.warm_steps if warm else state.grpo_steps)
      every = config.warm_start.eval_every if warm else config.eval_every
      row = {}
      if done % every == 0:
        row |= self._evaluate(state)
      if warm and self._warm_enough(done, row):
        state = self._begin_grpo(state)
        continue
      if not warm and done >= config.steps:
        break
      state, row = self._step(state, row)
      self._write(log, row)
      if int(state.step) % config.checkpoint_every == 0:
        self._save(checkpoints, state)
    self._save(checkpoints, state)
    if "heldout_reward" not in row:
      row |= self._evaluate(state)
    self._write(log, {"phase": FINAL, "step": int(state.step)} | row)
    return state

  def _warm_enough(self, done: int, row: dict) -> bool:
    warm = self.config.warm_start
    return done >= warm.max_steps or row.get("heldout_reward", 0) >= warm.until

  def _begin_grpo(self, state: RunState) -> RunState:
    trainer = self.trainer
    params = state.learner.params
    return state.replace(
      learner=make_learner(params, trainer.config.optimizer),
      reference=params if trainer.config.objective.kl_coef else None,
      warm=jnp.int32(0),
    )

  def _evaluate(self, state: RunState) -> dict[str, Any]:
    """The mean reward on held-out prompts, and that of each, in their order."""
    rewards = self.trainer.evaluate(
      state.learner, self.config.eval_prompts, self.config.eval_at_once
    )
    return {
      "heldout_reward": float(rewards.mean()),
      "heldout_rewards": rewards.tolist(),
    }

  def _step(self, state: RunState, row: dict) -> tuple[RunState, dict]:
    """One step of the phase the run is in."""
    trainer = self.trainer
    if state.warm:
      warm, done = self.config.warm_start, int(state.warm_steps)
      learner, figures = trainer.supervised_step(
        state.learner,
        done,
        self.warm_task,
        warm.prompts_per_step,
        warm.optimizer,
      )
      new = state.replace(warm_steps=state.warm_steps + 1)
      head = {"phase": WARM_START, "prompt_tokens": warm.prompt_tokens}
    else:
      done = int(state.grpo_steps)
      learner, figures = trainer.step(state.learner, done, state.reference)
      new = state.replace(grpo_steps=state.grpo_steps + 1)
      head = {"phase": GRPO}
    head |= {"step": int(state.step), "phase_step": done}
    return new.replace(learner=learner, step=state.step + 1), (
      head | row | figures
    )

  def _write(self, log: MetricLog, row: dict) -> None:
    engine, sampling = self.trainer.config.engine, self.trainer.config.sampling
    row = {
      "preset": self.trainer.model.config.name,
      "grad_scope": engine.grad_scope,
      "G": sampling.group_size,
      "R": sampling.max_tokens,
      "dtype": self.trainer.model.config.dtype,
      "seed": self.trainer.config.seed,
      "chance_level": self.trainer.task.chance_level,
      "device": device_name(),
      **row,
      "compile_count": compile_count(),
      "peak_memory_bytes": peak_memory_bytes(),
      "versions": " ".join(f"{k}={v}" for k, v in versions().items()),
    }
    row["P"] = row.pop("prompt_tokens", self._prompt_tokens())
    log.write(row)
    if is_leader():
      self.report(row)

  def _prompt_tokens(self) -> int:
    return len(self.trainer.task.sample(0, "train").prompt_ids)


def plot_curve(rows: list[dict[str, Any]], path: pathlib.Path) -> None:
  """Reward of the training groups and on held-out prompts, against steps."""
  figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
  for name, label, style in (
    ("reward_mean", "training groups", {"alpha": 0.4}),
    ("heldout_reward", "held-out prompts", {"marker": "o", "markersize": 3}),
  ):
    points = [(r["step"], r[name]) for r in rows if r.get(name) is not None]
    if points:
      axes.plot(*zip(*points, strict=True), label=label, **style)
  warm = [r["step"] for r in rows if r["phase"] == WARM_START]
  if warm:
    axes.axvspan(0, max(warm) + 1, alpha=0.1, label="supervised warm start")
  chance = rows[0].get("chance_level") if rows else None
  if chance is not None:
    axes.axhline(chance, linestyle=":", color="grey", label="chance")
  axes.set(xlabel="step", ylabel="mean reward", ylim=(0, 1.02))
  axes.legend(loc="best")
  figure.savefig(path, dpi=120)
  plt.close(figure)
