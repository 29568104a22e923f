"""Frozen configurations of a training run."""

import dataclasses
import functools
import math
import re

from jax import Array
import optax

from longstraw_jax.checks import CONSTANT_SCOPES, check_scope
from longstraw_jax.decay import decayed
from longstraw_jax.objectives import ADVANTAGE_MODES, PolicyObjective
from longstraw_jax.ops.pages import check_place
from longstraw_jax.ops.precision import wide_dtype

MASTER_DTYPES = ("float32", "none", None)


def _require(ok: bool, name: str, value, remedy: str) -> None:
  if not ok:
    raise ValueError(f"{name} is {value!r}: {remedy}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplingConfig:
  """How responses are sampled; the fields are those of `rollout`."""

  group_size: int = 16
  max_tokens: int = 2
  temperature: float = 1.0
  top_k: int = 0
  top_p: float = 1.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineConfig:
  """How gradients are computed.

  Attributes:
    grad_scope: "full", "tail", "response_only" or "prefix_frozen".
    tail_chunks: chunks a `tail` gradient walks back over.
    chunk_size: prompt tokens processed at once.
    block_size: response tokens processed at once; None takes all.
    members_at_once: members replayed together.
    prompts_at_once: prompts worked on together.
    replay_choices: scoring and replay follow the experts and keys that the
      sampler chose for each response token (routing replay).
    pages: where prompts' pages and their gradients are, "device" or "host";
      on the host for one prompt at a time.
  """

  grad_scope: str = "full"
  tail_chunks: int | None = None
  chunk_size: int = 128
  block_size: int | None = None
  members_at_once: int = 1
  prompts_at_once: int = 1
  replay_choices: bool = False
  pages: str = "device"

  def __post_init__(self):
    check_place(self.pages)
    check_scope(self.grad_scope, self.tail_chunks)
    for name in ("chunk_size", "members_at_once", "prompts_at_once"):
      value = getattr(self, name)
      _require(value >= 1, name, value, "use at least 1")
    _require(
      self.pages == "device" or self.prompts_at_once == 1,
      "prompts_at_once",
      self.prompts_at_once,
      "pages='host' takes one prompt at a time; use 1",
    )

  def without_gradient(self) -> "EngineConfig":
    """How the same policy is captured where nothing is differentiated.

    Of all scopes `prefix_frozen` alone is another policy, not only another
    gradient: its adapters are off at prompt positions.
    """
    frozen = self.grad_scope == "prefix_frozen"
    scope = "prefix_frozen" if frozen else "response_only"
    return dataclasses.replace(self, grad_scope=scope, tail_chunks=None)


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
  """AdamW with a clipped global norm and a linear warm-up.

  Attributes:
    learning_rate: after the warm-up.
    warmup_steps: over which it rises.
    b1, b2: of the moments.
    weight_decay: what decays shrinks by learning_rate times this a step.
    decay_pattern: regular expression, searched in parameters' paths a/b/c, of
      what decays; matrices alone by default, never norms, biases, decay rates.
    max_grad_norm: what a longer gradient is shortened to.
    master_dtype: of the copies that the optimizer keeps of narrower weights
      that learn, and takes its steps on; "none" for no copies.
  """

  learning_rate: float = 1e-3
  warmup_steps: int = 10
  b1: float = 0.9
  b2: float = 0.95
  weight_decay: float = 0.0
  decay_pattern: str | None = None
  max_grad_norm: float = 1.0
  master_dtype: str | None = "float32"

  def __post_init__(self):
    _require(
      self.master_dtype in MASTER_DTYPES,
      "master_dtype",
      self.master_dtype,
      f"use one of {MASTER_DTYPES}",
    )
    try:
      re.compile(self.decay_pattern or "")
    except re.error as error:
      raise ValueError(
        f"decay_pattern is {self.decay_pattern!r}: {error}; give a regular "
        "expression such as 'kernel|embed'"
      ) from None
    for name in ("learning_rate", "max_grad_norm"):
      value = getattr(self, name)
      _require(0 < value < math.inf, name, value, "use a positive number")

  def build(self) -> optax.GradientTransformation:
    """The optax transformation."""
    schedule = optax.linear_schedule(
      self.learning_rate / max(self.warmup_steps, 1),
      self.learning_rate,
      self.warmup_steps,
    )
    return optax.chain(
      optax.clip_by_global_norm(self.max_grad_norm),
      optax.adamw(
        schedule,
        self.b1,
        self.b2,
        weight_decay=self.weight_decay,
        mask=functools.partial(decayed, pattern=self.decay_pattern),
      ),
    )

  def master_copy(self, leaf: Array) -> Array | None:
    """The wide copy that a step is taken on; None where it needs none."""
    wide = wide_dtype(leaf.dtype)
    if self.master_dtype in (None, "none") or leaf.dtype == wide:
      return None
    return leaf.astype(wide)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainConfig:
  """One GRPO run.

  Attributes:
    prompts_per_step: groups whose gradients one optimizer step sums.
    updates_per_rollout: optimizer steps on the same groups.
    refresh_every: updates that may share one captured state. Above 1 the
      state goes stale, which only `response_only` allows; a `prefix_frozen`
      state never does and is always shared.
    advantages: "std", "none" or "leave_one_out".
    mismatch_alarm: nats by which the sampler's scores of what it sampled may
      differ from the trainer's, on the mean of a step's tokens, before a step
      raises an alarm: the sampler has other weights or other arithmetic. None
      for no alarm.
    seed: of sampling and of the order of prompts.
  """

  prompts_per_step: int = 16
  updates_per_rollout: int = 1
  refresh_every: int = 1
  advantages: str = "std"
  mismatch_alarm: float | None = 0.1
  seed: int = 0
  sampling: SamplingConfig = SamplingConfig()
  engine: EngineConfig = EngineConfig()
  optimizer: OptimizerConfig = OptimizerConfig()
  objective: PolicyObjective = PolicyObjective()

  def __post_init__(self):
    for name in ("prompts_per_step", "updates_per_rollout", "refresh_every"):
      value = getattr(self, name)
      _require(value >= 1, name, value, "use at least 1")
    _require(
      self.prompts_per_step % self.engine.prompts_at_once == 0,
      "prompts_at_once",
      self.engine.prompts_at_once,
      f"it must divide prompts_per_step = {self.prompts_per_step}",
    )
    _require(
      self.advantages in ADVANTAGE_MODES,
      "advantages",
      self.advantages,
      f"use one of {ADVANTAGE_MODES}",
    )
    _require(
      self.sampling.group_size >= 2,
      "group_size",
      self.sampling.group_size,
      "an advantage compares the members of a group; of a single one it is "
      "always 0: use at least 2",
    )
    _require(
      self.mismatch_alarm is None or self.mismatch_alarm > 0,
      "mismatch_alarm",
      self.mismatch_alarm,
      "use a positive number of nats, or None",
    )
    if self.objective.normalization == "constant":
      _require(
        self.objective.constant_length is not None,
        "constant_length",
        self.objective.constant_length,
        "normalization 'constant' needs a number of tokens",
      )
    _require(
      self.refresh_every == 1 or self.engine.grad_scope in CONSTANT_SCOPES,
      "refresh_every",
      self.refresh_every,
      "a stale state has no gradient through its prompt; use 1, or "
      "grad_scope 'response_only'",
    )
