"""The online loop: rollout, rewards, scores, gradient, optimizer step."""

from collections.abc import Callable
import dataclasses
import functools
import time
from typing import Any

from flax import struct
import jax
from jax import lax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int
import numpy as np
import optax

from longstraw_jax.capture import capture
from longstraw_jax.checks import check_group, check_prompt, check_scope
from longstraw_jax.group import group_gradient
from longstraw_jax.models.model import Model, Params
from longstraw_jax.objectives import (
  ADVANTAGE_MODES,
  LikelihoodObjective,
  PolicyObjective,
  group_advantages,
  loss_denominator,
)
from longstraw_jax.replay import replay_scores
from longstraw_jax.rewards import RewardFn, score_responses
from longstraw_jax.rollout import rollout
from longstraw_jax.state import PromptState
from longstraw_jax.tasks import Example, Task
from longstraw_jax.tokenizer import Tokenizer
from longstraw_jax.types import Group, Tree


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
    grad_scope: "full", "tail" or "response_only".
    tail_chunks: chunks a `tail` gradient walks back over.
    chunk_size: prompt tokens processed at once.
    block_size: response tokens processed at once; None takes all.
    members_at_once: members replayed together.
    prompts_at_once: prompts worked on together.
  """

  grad_scope: str = "full"
  tail_chunks: int | None = None
  chunk_size: int = 128
  block_size: int | None = None
  members_at_once: int = 1
  prompts_at_once: int = 1

  def __post_init__(self):
    check_scope(self.grad_scope, self.tail_chunks)
    for name in ("chunk_size", "members_at_once", "prompts_at_once"):
      value = getattr(self, name)
      _require(value >= 1, name, value, "use at least 1")


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
  """AdamW with a clipped global norm and a linear warm-up."""

  learning_rate: float = 1e-3
  warmup_steps: int = 10
  b1: float = 0.9
  b2: float = 0.95
  weight_decay: float = 0.0
  max_grad_norm: float = 1.0

  def __post_init__(self):
    for name in ("learning_rate", "max_grad_norm"):
      value = getattr(self, name)
      _require(value > 0, name, value, "use a positive number")

  def build(self) -> optax.GradientTransformation:
    """The optax transformation."""
    schedule = optax.linear_schedule(
      self.learning_rate / max(self.warmup_steps, 1),
      self.learning_rate,
      self.warmup_steps,
    )
    return optax.chain(
      optax.clip_by_global_norm(self.max_grad_norm),
      optax.adamw(schedule, self.b1, self.b2, weight_decay=self.weight_decay),
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainConfig:
  """One GRPO run.

  Attributes:
    prompts_per_step: groups whose gradients one optimizer step sums.
    updates_per_rollout: optimizer steps on the same groups.
    refresh_every: updates that may share one captured state. Above 1 the
      state goes stale, which only `response_only` allows.
    advantages: "std", "none" or "leave_one_out".
    constant_length: tokens that normalization "constant" divides by.
    seed: of sampling and of the order of prompts.
  """

  prompts_per_step: int = 16
  updates_per_rollout: int = 1
  refresh_every: int = 1
  advantages: str = "std"
  constant_length: int | None = None
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
    if self.objective.normalization == "constant":
      _require(
        self.constant_length is not None and self.constant_length >= 1,
        "constant_length",
        self.constant_length,
        "normalization 'constant' needs a number of tokens",
      )
    _require(
      self.refresh_every == 1 or self.engine.grad_scope == "response_only",
      "refresh_every",
      self.refresh_every,
      "a stale state has no gradient through its prompt; use 1, or "
      "grad_scope 'response_only'",
    )


@struct.dataclass
class Learner:
  """What an optimizer step replaces.

  Attributes:
    params: the policy.
    opt_state: of the optimizer; it knows the trainable leaves only.
    step: optimizer steps taken.
  """

  params: Params
  opt_state: Tree
  step: Int[Array, ""]


def make_learner(params: Params, optimizer: OptimizerConfig) -> Learner:
  """A learner that has taken no step."""
  opt_state = optimizer.build().init(params.trainable)
  return Learner(params=params, opt_state=opt_state, step=jnp.int32(0))


def per_prompt(fn: Callable, prompts_at_once: int, *trees: Tree) -> Tree:
  """Maps `fn` over the leading axis, so many entries of it at a time."""
  call = lambda args: fn(*args)
  if prompts_at_once == 1:
    return lax.map(call, trees)
  return lax.map(call, trees, batch_size=prompts_at_once)


def _capture(model, engine: EngineConfig, params, prompt, prompt_id, step):
  return capture(
    model,
    params,
    prompt,
    chunk_size=engine.chunk_size,
    grad_scope=engine.grad_scope,
    tail_chunks=engine.tail_chunks,
    step=step,
    prompt_id=prompt_id,
  )


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3))
def rollout_groups(
  model: Model,
  engine: EngineConfig,
  sampling: SamplingConfig,
  stop_ids: tuple[int, ...],
  learner: Learner,
  prompts: Int[Array, "B P"],
  prompt_ids: Int[Array, "B"],
  keys: jax.Array,
) -> tuple[PromptState, Group]:
  """Captures every prompt and samples its group; a leading axis B on both."""

  def one(prompt, prompt_id, key):
    state = _capture(
      model, engine, learner.params, prompt, prompt_id, learner.step
    )
    group = rollout(
      model,
      learner.params,
      state,
      key,
      **dataclasses.asdict(sampling),
      stop_ids=stop_ids,
    )
    return state, group

  return per_prompt(one, engine.prompts_at_once, prompts, prompt_ids, keys)


@functools.partial(jax.jit, static_argnums=(0, 1))
def score_groups(
  model: Model,
  engine: EngineConfig,
  params: Params,
  groups: Group,
  states: PromptState,
) -> Float[Array, "B G R"]:
  """Log-probabilities of every response over the states given."""

  def one(group, state):
    return replay_scores(
      model,
      params,
      state,
      group.responses,
      group.lengths,
      block_size=engine.block_size,
      members_at_once=engine.members_at_once,
    )[0]

  return per_prompt(one, engine.prompts_at_once, groups, states)


@functools.partial(jax.jit, static_argnums=(0, 1))
def score_reference(
  model: Model,
  engine: EngineConfig,
  params: Params,
  groups: Group,
  prompts: Int[Array, "B P"],
) -> Float[Array, "B G R"]:
  """Log-probabilities under frozen weights, over states of their own."""

  def one(group, prompt):
    frozen = dataclasses.replace(
      engine, grad_scope="response_only", tail_chunks=None
    )
    state = _capture(model, frozen, params, prompt, group.prompt_id, 0)
    one_prompt = jax.tree.map(lambda x: x[None], (group, state))
    return score_groups(model, frozen, params, *one_prompt)[0]

  return per_prompt(one, engine.prompts_at_once, groups, prompts)


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3))
def update(
  model: Model,
  engine: EngineConfig,
  optimizer: OptimizerConfig,
  objective: Callable,
  learner: Learner,
  prompts: Int[Array, "B P"],
  groups: Group,
  states: PromptState | None,
) -> tuple[Learner, dict[str, Array]]:
  """One optimizer step on the summed gradient of a step's groups.

  Args:
    model: the model.
    engine: how gradients are computed.
    optimizer: its settings.
    objective: of one group.
    learner: the weights and the optimizer's state.
    prompts: of the groups.
    groups: with advantages and denominators.
    states: captured with these weights (or stale by policy); None captures.

  Returns:
    The learner one step on; the metrics of every group, [B] each, with the
    summed loss and the gradient's norm.
  """

  def one(prompt, group, state):
    return group_gradient(
      model,
      learner.params,
      prompt,
      group,
      objective,
      chunk_size=engine.chunk_size,
      grad_scope=engine.grad_scope,
      tail_chunks=engine.tail_chunks,
      block_size=engine.block_size,
      members_at_once=engine.members_at_once,
      state=state,
    )

  def batch(total, inputs):
    loss, grads, metrics = jax.vmap(one)(*inputs)
    add = lambda total, x: total + x.sum(0)
    return jax.tree.map(add, total, (loss, grads)), metrics

  at_once = engine.prompts_at_once
  batches = jax.tree.map(
    lambda x: x.reshape(-1, at_once, *x.shape[1:]), (prompts, groups, states)
  )
  shapes = jax.eval_shape(jax.vmap(one), *jax.tree.map(lambda x: x[0], batches))
  zeros = jax.tree.map(lambda x: jnp.zeros(x.shape[1:], x.dtype), shapes[:2])
  (loss, grads), metrics = lax.scan(batch, zeros, batches)
  updates, opt_state = optimizer.build().update(
    grads, learner.opt_state, learner.params.trainable
  )
  trainable = optax.apply_updates(learner.params.trainable, updates)
  learner = Learner(
    params=learner.params.replace(trainable=trainable),
    opt_state=opt_state,
    step=learner.step + 1,
  )
  metrics = jax.tree.map(lambda x: x.reshape(-1), metrics)
  return learner, metrics | {
    "loss": loss,
    "grad_norm": optax.tree.norm(grads),
  }


@dataclasses.dataclass(frozen=True)
class Trainer:
  """The loop's steps as functions of a learner; holds no state of its own.

  Attributes:
    model: the policy's model.
    config: of the run.
    task: makes prompts.
    tokenizer: decodes responses for the reward.
    reward_fn: (prompt_text, response_text, info) -> float.
  """

  model: Model
  config: TrainConfig
  task: Task
  tokenizer: Tokenizer
  reward_fn: RewardFn

  @property
  def stop_ids(self) -> tuple[int, ...]:
    """Ids that end a response."""
    return (self.tokenizer.eos_id,)

  def examples(self, step: int) -> list[Example]:
    """The prompts of a step; a pure function of it, so resuming is exact."""
    first = step * self.config.prompts_per_step
    return [
      self.task.sample(first + i, "train")
      for i in range(self.config.prompts_per_step)
    ]

  def _prompts(self, examples) -> tuple[Array, Array]:
    prompts = np.stack([e.prompt_ids for e in examples])
    for prompt in prompts:
      check_prompt(prompt, None, None, self.model.config.vocab_size)
    ids = np.asarray([e.prompt_id for e in examples], np.int32)
    return jnp.asarray(prompts), jnp.asarray(ids)

  def rewards(self, examples: list[Example], groups: Group) -> np.ndarray:
    """[B, G] rewards of decoded responses, the end token left out."""
    responses, lengths = jax.device_get((groups.responses, groups.lengths))
    rows = []
    for example, ids, real in zip(examples, responses, lengths, strict=True):
      texts = [
        self.tokenizer.decode(x[:n]) for x, n in zip(ids, real, strict=True)
      ]
      rows.append(
        score_responses(
          self.reward_fn,
          example.prompt_text,
          texts,
          example.info,
          group_size=len(ids),
          prompt_id=example.prompt_id,
        )
      )
    return np.stack(rows)

  def step(
    self, learner: Learner, step: int, reference: Params | None
  ) -> tuple[Learner, dict[str, Any]]:
    """One rollout and its updates.

    Args:
      learner: the weights and the optimizer's state.
      step: which rollout this is; decides prompts and randomness.
      reference: frozen weights for the KL term, or None.

    Returns:
      The learner and the step's figures.

    Raises:
      RewardError: the reward function failed or gave no finite number.
    """
    config, engine = self.config, self.config.engine
    clock = _Clock()
    examples = self.examples(step)
    prompts, prompt_ids = self._prompts(examples)
    key = jax.random.fold_in(jax.random.key(config.seed), step)
    states, groups = rollout_groups(
      self.model,
      engine,
      config.sampling,
      self.stop_ids,
      learner,
      prompts,
      prompt_ids,
      jax.random.split(key, config.prompts_per_step),
    )
    jax.block_until_ready(groups)
    clock.lap("rollout")
    groups = self._finish(groups, self.rewards(examples, groups))
    clock.lap("reward")
    old = score_groups(self.model, engine, learner.params, groups, states)
    groups = groups.replace(old_logprobs=old)
    if reference is not None:
      ref = score_reference(self.model, engine, reference, groups, prompts)
      groups = groups.replace(ref_logprobs=ref)
    jax.block_until_ready(groups)
    clock.lap("score")
    figures = []
    for _ in range(config.updates_per_rollout):
      if states is not None:
        age = int(learner.step) - int(states.step[0])
        if age >= config.refresh_every:
          states = None  # too old: every later update captures anew
      learner, metrics = update(
        self.model,
        engine,
        config.optimizer,
        config.objective,
        learner,
        prompts,
        groups,
        states,
      )
      figures.append(jax.device_get(metrics))
    clock.lap("update")
    tokens = prompts.size + int(np.sum(jax.device_get(groups.lengths)))
    row = summarize_groups(groups) | combine_metrics(figures)
    return learner, row | clock.rates(tokens)

  def _finish(self, groups: Group, rewards: np.ndarray) -> Group:
    """Adds rewards, advantages and the step's denominators."""
    config = self.config
    denominators = loss_denominator(
      config.objective.normalization,
      groups.loss_mask,
      config.constant_length,
    )
    rewards = jnp.asarray(rewards)
    advantages = jax.vmap(
      functools.partial(group_advantages, mode=config.advantages)
    )(rewards)
    groups = groups.replace(
      rewards=rewards,
      advantages=advantages,
      loss_denominator=denominators,
    )
    vocab_size = self.model.config.vocab_size
    for i in range(config.prompts_per_step):
      check_group(jax.tree.map(lambda x, i=i: x[i], groups), vocab_size, None)
    return groups

  def supervised_step(
    self,
    learner: Learner,
    step: int,
    task: Task,
    prompts_per_step: int,
    optimizer: OptimizerConfig,
  ) -> tuple[Learner, dict[str, Any]]:
    """A warm-up step on the task's own answers, by the same machinery.

    Args:
      learner: the weights and the optimizer's state.
      step: decides the prompts.
      task: makes prompts and answers.
      prompts_per_step: prompts of the step, a multiple of prompts_at_once.
      optimizer: its settings.
    """
    clock = _Clock()
    first = step * prompts_per_step
    # Other prompts than any GRPO step's: those count up from 0.
    examples = [
      task.sample(2**29 + first + i, "train") for i in range(prompts_per_step)
    ]
    prompts, prompt_ids = self._prompts(examples)
    answers = [np.append(e.answer_ids, self.stop_ids) for e in examples]
    room = max(map(len, answers))
    groups = [
      Group.create(
        np.pad(answer, (0, room - len(answer)))[None],
        [len(answer)],
        rewards=[1.0],
        advantages=[1.0],
        prompt_id=prompt_id,
        loss_denominator=float(prompts_per_step),
      )
      for answer, prompt_id in zip(answers, prompt_ids, strict=True)
    ]
    learner, metrics = update(
      self.model,
      self.config.engine,
      optimizer,
      LikelihoodObjective(),
      learner,
      prompts,
      jax.tree.map(lambda *x: jnp.stack(x), *groups),
      None,
    )
    row = combine_metrics([jax.device_get(metrics)])
    clock.lap("update")
    return learner, row | clock.rates(int(prompts.size))

  def evaluate(
    self, learner: Learner, num_prompts: int, at_once: int = 64
  ) -> np.ndarray:
    """Rewards of one sampled response to each of the first held-out prompts.

    Prompts and randomness are the same at every call.
    """
    sampling = dataclasses.replace(self.config.sampling, group_size=1)
    engine = dataclasses.replace(
      self.config.engine,
      grad_scope="response_only",
      tail_chunks=None,
      prompts_at_once=min(at_once, num_prompts),
    )
    examples = [self.task.sample(i, "heldout") for i in range(num_prompts)]
    prompts, prompt_ids = self._prompts(examples)
    key = jax.random.fold_in(jax.random.key(self.config.seed), 2**31 - 1)
    _, groups = rollout_groups(
      self.model,
      engine,
      sampling,
      self.stop_ids,
      learner,
      prompts,
      prompt_ids,
      jax.random.split(key, num_prompts),
    )
    return self.rewards(examples, groups)[:, 0]


class _Clock:
  """Wall seconds of the phases of a step."""

  def __init__(self):
    self._last = time.perf_counter()
    self.seconds: dict[str, float] = {}

  def lap(self, phase: str) -> None:
    now = time.perf_counter()
    self.seconds[phase] = now - self._last
    self._last = now

  def rates(self, tokens: int) -> dict[str, float]:
    """Seconds and tokens a second of every phase, and of the step."""
    named = self.seconds | {"step": sum(self.seconds.values())}
    rows = {f"seconds_{name}": value for name, value in named.items()}
    return rows | {
      f"tokens_per_second_{name}": tokens / value
      for name, value in named.items()
      if name != "reward"
    }


def summarize_groups(groups: Group) -> dict[str, float]:
  """Reward and length statistics of a step's groups."""
  rewards, lengths = jax.device_get((groups.rewards, groups.lengths))
  equal = rewards.max(1) == rewards.min(1)
  return {
    "reward_mean": float(rewards.mean()),
    "reward_std": float(rewards.std()),
    "reward_spread_in_group": float(rewards.std(1).mean()),
    "zero_spread_share": float(equal.mean()),
    "response_length_mean": float(lengths.mean()),
    "response_length_max": int(lengths.max()),
  }


def combine_metrics(updates: list[dict[str, np.ndarray]]) -> dict[str, float]:
  """One figure a metric over the groups of all updates of a step.

  Sums stay sums, maxima maxima; means over tokens are weighted by num_tokens.
  """
  rows = []
  for metrics in updates:
    weights = metrics["num_tokens"] / max(metrics["num_tokens"].sum(), 1)
    row = {}
    for name, value in metrics.items():
      if name.endswith("_max"):
        row[name] = value.max()
      elif name in ("loss", "grad_norm"):
        row[name] = value
      elif name in ("policy_loss", "num_tokens"):
        row[name] = value.sum()
      elif name not in ("reward_mean", "zero_spread"):
        row[name] = (weights * value).sum()
    rows.append(row)
  peak = lambda name: max if name.endswith("_max") else np.mean
  return {
    name: float(peak(name)([row[name] for row in rows])) for name in rows[0]
  }
