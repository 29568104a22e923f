"""A whole run: warm start, GRPO, evaluation, checkpoints, rows, curve."""

from collections.abc import Callable, Iterator, Mapping
import contextlib
import dataclasses
import logging
import pathlib
from typing import Any

from flax import struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from longstraw_jax.checkpoint import CheckpointError, Checkpoints
from longstraw_jax.curve import plot_curve
from longstraw_jax.disk import DiskError, check_writer, sole_writer
from longstraw_jax.distributed import PeerError, is_leader, on_leader
from longstraw_jax.finite import NonFiniteError, check_finite
from longstraw_jax.interrupts import Interrupted, check, listen
from longstraw_jax.metrics import (
  ROWS,
  MetricLog,
  check_wandb,
  compile_count,
  device_name,
  peak_memory_bytes,
  read_rows,
  versions,
)
from longstraw_jax.models.model import Params
from longstraw_jax.rewards import RewardError
from longstraw_jax.run_config import RunConfig
from longstraw_jax.sharding import place_at_rest
from longstraw_jax.steps import Learner, make_learner, restarted
from longstraw_jax.tasks import Task
from longstraw_jax.trainer import Trainer

WARM_START, GRPO, FINAL = "warm_start", "grpo", "final"
# What ends all processes of a run together, so that they can still save.
TOLD = (
  RewardError,
  DiskError,
  PeerError,
  NonFiniteError,
  Interrupted,
  KeyboardInterrupt,
)


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
    bad_steps: the last steps in a row of which an update was skipped.
  """

  learner: Learner
  reference: Params | None
  step: Int[Array, ""]
  warm_steps: Int[Array, ""]
  grpo_steps: Int[Array, ""]
  warm: Int[Array, ""]
  bad_steps: Int[Array, ""]


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
    accepted: called before the first change in `out`, which it is the first to
      write to; a launch that is refused before changes nothing.
    mesh: of all devices that share the work; None takes the first alone.
  """

  initial_params: Callable[[int], Params]
  trainer: Trainer
  config: RunConfig
  out: pathlib.Path
  warm_task: Task
  settings: Mapping[str, Any]
  report: Callable[[dict], None] = lambda row: None
  accepted: Callable[[], None] = lambda: None
  mesh: jax.sharding.Mesh | None = None

  def initial_state(self, params: Params) -> RunState:
    """The state of a run that has not begun."""
    warm = self.config.warm_start
    optimizer = self.trainer.config.optimizer
    if warm.max_steps:
      if warm.optimizer.master_dtype != optimizer.master_dtype:
        raise ValueError(
          f"master_dtype is {warm.optimizer.master_dtype!r} in the warm start "
          f"and {optimizer.master_dtype!r} after it: give both the same, as "
          "one checkpoint has the form of the other"
        )
      optimizer = warm.optimizer
    zero = jnp.int32(0)
    return RunState(
      learner=make_learner(params, optimizer),
      reference=params if self.trainer.config.objective.kl_coef else None,
      step=zero,
      warm_steps=zero,
      grpo_steps=zero,
      warm=jnp.int32(warm.max_steps > 0),
      bad_steps=zero,
    )

  def execute(self) -> list[dict[str, Any]]:
    """Runs to the end, from the last checkpoint where there is one.

    A checkpoint may be of another mesh, or of another number of processes.
    Whatever ends a run early, the steps that were done are saved before it
    ends, if the disk and the other processes allow it.

    Returns:
      All rows of the run, those before a restart included.

    Raises:
      ValueError: another run is writing to the directory, or nobody can.
      CheckpointError: a checkpoint is damaged, of other settings, or cannot
        be written.
      DiskError: another file cannot be written.
      RewardError: the reward function failed.
      PeerError: another process stopped.
      Interrupted: a signal came.
      NonFiniteError: too many bad steps in a row, or weights, moments or a
        reference that are not finite; these are in no checkpoint.
    """
    checkpoints = Checkpoints(
      self.out / "checkpoints", self.config.keep_checkpoints
    )
    self._check(checkpoints)
    found = checkpoints.latest()
    state = self._first_state(checkpoints, found)
    with sole_writer(self.out), listen():
      if checkpoints.latest() != found:
        raise ValueError(f"another run wrote to {self.out} just now: run again")
      on_leader(self.accepted)
      log = self._open_log(int(state.step))
      try:
        self._loop(state, checkpoints, log)
      finally:
        if log is not None:
          log.close()
      rows = read_rows(self.out / ROWS)
      plot = lambda: plot_curve(rows, self.out / "curve.png", WARM_START)
      on_leader(plot)
    return rows

  def _check(self, checkpoints: Checkpoints) -> None:
    """Refuses the launch before anything is written."""
    check_wandb(self.config.wandb_project)
    check_writer(self.out)
    found = checkpoints.latest()
    if found is not None:
      checkpoints.check(found, self.settings)

  def _first_state(
    self, checkpoints: Checkpoints, found: int | None
  ) -> RunState:
    state = self.initial_state(self.initial_params(self.trainer.config.seed))
    if self.mesh is not None:
      state = place_at_rest(state, self.mesh)
    if found is not None:
      state = checkpoints.restore(found, state, self.settings)
    check_finite(
      state,
      "the first weights" if found is None else f"checkpoint {found}",
      "Give other weights, or remove that checkpoint",
    )
    return state

  def _loop(self, state: RunState, checkpoints: Checkpoints, log) -> None:
    """All steps; `state` is always that of the rows that are written."""
    use_mesh = contextlib.nullcontext()
    if self.mesh is not None:
      use_mesh = jax.set_mesh(self.mesh)
    try:
      with use_mesh:
        for state in self._states(state, log):  # noqa: B020
          due = int(state.step) % self.config.checkpoint_every == 0
          if due or self._failed(checkpoints):
            self._save(checkpoints, state)
        self._save(checkpoints, state)
        self._finish(state, log)
        checkpoints.wait()
    except BaseException as error:
      self._rescue(checkpoints, state, error)
      raise
    checkpoints.close()

  def _failed(self, checkpoints: Checkpoints) -> bool:
    """Whether a save failed meanwhile; several processes ask when they save."""
    return jax.process_count() == 1 and checkpoints.failed()

  def _rescue(
    self, checkpoints: Checkpoints, state: RunState, error: BaseException
  ) -> None:
    """Saves what was done before an error, where all processes know of it."""
    if jax.process_count() > 1 and not isinstance(error, TOLD):
      if isinstance(error, jax.errors.JaxRuntimeError):
        raise PeerError(
          "a device call failed, as when another process is lost: "
          f"{str(error).splitlines()[0]}. Run again: the run continues from "
          f"step {checkpoints.latest() or 0}"
        ) from error
      return
    if isinstance(error, CheckpointError):
      return
    try:
      self._save(checkpoints, state)
      checkpoints.close()
    except CheckpointError as second:
      if isinstance(error, DiskError):
        raise error from second  # one full disk is one error
      raise CheckpointError(f"{error}; then {second}") from error

  def _open_log(self, step: int) -> MetricLog | None:
    """The log; None in a process that leaves writing to another."""
    opened: list[MetricLog] = []
    on_leader(
      lambda: opened.append(
        MetricLog(self.out, step, self.config.wandb_project)
      )
    )
    return opened[0] if opened else None

  def _save(self, checkpoints: Checkpoints, state: RunState) -> None:
    checkpoints.wait()  # after which all processes see the same ones
    if checkpoints.latest() != int(state.step):
      checkpoints.save(int(state.step), state, self.settings)

  def _states(self, state: RunState, log) -> Iterator[RunState]:
    """The state after every step whose row is written."""
    config = self.config
    while True:
      check()
      warm = bool(state.warm)
      done = int(state.warm_steps if warm else state.grpo_steps)
      if not warm and done >= config.steps:
        return
      every = config.warm_start.eval_every if warm else config.eval_every
      row = {}
      if done % every == 0:
        row |= self._evaluate(state)
      if warm and self._warm_enough(done, row):
        state = self._begin_grpo(state)
        continue
      new, row = self._step(state, row)
      self._write(log, row)
      if row["bad_step"]:
        self._warn(new, row)
      state = new
      yield state
      self._check_bad_steps(state)

  def _finish(self, state: RunState, log) -> None:
    row = {"phase": FINAL, "step": int(state.step)}
    self._write(log, row | self._evaluate(state))

  def _warn(self, state: RunState, row: dict) -> None:
    logging.getLogger(__name__).warning(
      "step %d: %d updates were skipped, their loss or gradient is not finite; "
      "prompts %s; %d such steps in a row",
      row["step"],
      row["skipped_updates"],
      row["bad_prompts"],
      int(state.bad_steps),
    )

  def _check_bad_steps(self, state: RunState) -> None:
    """Stops the run after too many in a row."""
    bad, most = int(state.bad_steps), self.config.max_bad_steps
    if bad >= most:
      raise NonFiniteError(
        f"the last {bad} steps were skipped, up to step {int(state.step) - 1}: "
        f"their loss or gradient is not finite and max_bad_steps is {most}. "
        "The weights are those before them: look at the prompts that the rows "
        "name, or lower the learning rate, and run again"
      )

  def _warm_enough(self, done: int, row: dict) -> bool:
    warm = self.config.warm_start
    return done >= warm.max_steps or row.get("heldout_reward", 0) >= warm.until

  def _begin_grpo(self, state: RunState) -> RunState:
    trainer = self.trainer
    params = state.learner.params
    return state.replace(
      learner=restarted(state.learner, trainer.config.optimizer),
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
    new = new.replace(
      learner=learner,
      step=state.step + 1,
      bad_steps=(state.bad_steps + 1) * int(figures["bad_step"]),
    )
    return new, head | row | figures

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
    on_leader(lambda: log.write(row))
    if is_leader():
      self.report(row)

  def _prompt_tokens(self) -> int:
    return len(self.trainer.task.sample(0, "train").prompt_ids)
