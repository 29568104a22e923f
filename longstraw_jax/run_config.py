"""Frozen configurations of a run's length, reports and warm start."""

import dataclasses
from typing import Any

from longstraw_jax.train_config import OptimizerConfig


def _at_least_one(config: Any, *names: str) -> None:
  for name in names:
    value = getattr(config, name)
    if value < 1:
      raise ValueError(f"{name} is {value}: give at least 1")


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

  def __post_init__(self):
    """Refuses intervals and numbers below 1.

    Raises:
      ValueError: naming the field and the value.
    """
    _at_least_one(self, "prompt_tokens", "prompts_per_step", "eval_every")


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
    max_bad_steps: the run stops after so many steps in a row of which an
      update was skipped, because its loss or gradient was not finite.
    wandb_project: also log there.
    warm_start: the supervised phase.
  """

  steps: int
  eval_every: int = 25
  eval_prompts: int = 512
  eval_at_once: int = 64
  checkpoint_every: int = 50
  keep_checkpoints: int = 3
  max_bad_steps: int = 3
  wandb_project: str | None = None
  warm_start: WarmStartConfig = WarmStartConfig()

  def __post_init__(self):
    """Refuses intervals and numbers below 1.

    Raises:
      ValueError: naming the field and the value.
    """
    names = "eval_every eval_prompts eval_at_once checkpoint_every"
    _at_least_one(self, *names.split(), "keep_checkpoints", "max_bad_steps")
