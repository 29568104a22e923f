"""The online loop: rollout, rewards, scores, gradient, optimizer step."""

from collections.abc import Sequence
import dataclasses
import functools
import logging
import time
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array
import numpy as np

from longstraw_jax.checks import check_tokens, listed
from longstraw_jax.distributed import from_leader
from longstraw_jax.group_checks import (
  UNKNOWN_PROMPT,
  check_group,
  token_mask,
)
from longstraw_jax.interrupts import breakable, check
from longstraw_jax.models.model import Model, Params
from longstraw_jax.objectives import (
  LikelihoodObjective,
  group_advantages,
  loss_denominator,
)
from longstraw_jax.rewards import RewardFn, score_responses
from longstraw_jax.steps import (
  Learner,
  rollout_groups,
  score_groups,
  score_reference,
  update,
)
from longstraw_jax.stop_ids import StopId
from longstraw_jax.tasks import Example, Task
from longstraw_jax.tokenizer import Tokenizer
from longstraw_jax.train_config import (
  OptimizerConfig,
  SamplingConfig,
  TrainConfig,
)
from longstraw_jax.types import Group

MOST_LISTED = 5  # prompts of one length in an error message


@dataclasses.dataclass(frozen=True)
class Trainer:
  """The loop's steps as functions of a learner; holds no state of its own.

  Attributes:
    model: the policy's model.
    config: of the run.
    task: makes prompts.
    tokenizer: decodes responses for the reward.
    reward_fn: (prompt_text, response_text, info) -> float; see rewards.py.
    stops: what ends a response besides the tokenizer's end token, as
      `find_stop_ids` gives it.
  """

  model: Model
  config: TrainConfig
  task: Task
  tokenizer: Tokenizer
  reward_fn: RewardFn
  stops: tuple[StopId, ...] = ()

  @property
  def stop_ids(self) -> tuple[int, ...]:
    """Ids that end a response, the tokenizer's own first."""
    ids = [self.tokenizer.eos_id, *(stop.id for stop in self.stops)]
    return tuple(dict.fromkeys(ids))

  def examples(self, step: int) -> list[Example]:
    """The prompts of a step; a pure function of it, so resuming is exact."""
    first = step * self.config.prompts_per_step
    return [
      self.task.sample(first + i, "train")
      for i in range(self.config.prompts_per_step)
    ]

  def _prompts(self, examples) -> tuple[Array, Array]:
    for example in examples:
      check_tokens(
        "prompt", example.prompt_ids, None, self.model.config.vocab_size
      )
    _check_lengths(examples)
    prompts = np.stack([e.prompt_ids for e in examples])
    ids = np.asarray([e.prompt_id for e in examples], np.int32)
    return jnp.asarray(prompts), jnp.asarray(ids)

  def rewards(self, examples: list[Example], groups: Group) -> np.ndarray:
    """[B, G] rewards of decoded responses.

    Their text holds all that was sampled but the stop id that ended it.

    Process 0 calls the reward function, once a response.
    """
    ids = jax.device_get((groups.responses, groups.lengths))
    compute = functools.partial(self._rewards, examples, *ids)
    return from_leader(compute, ids[1].shape)

  def _rewards(self, examples, responses, lengths) -> np.ndarray:
    rows = []
    for example, ids, real in zip(examples, responses, lengths, strict=True):
      sampled = [x[:n] for x, n in zip(ids, real, strict=True)]
      ended = [len(x) > 0 and int(x[-1]) in self.stop_ids for x in sampled]
      texts = [
        self.tokenizer.decode(x[: len(x) - end], special=True)
        for x, end in zip(sampled, ended, strict=True)
      ]
      with breakable():
        scores = score_responses(
          self.reward_fn,
          example.prompt_text,
          texts,
          example.info,
          group_size=len(ids),
          prompt_id=example.prompt_id,
          prompt_ids=example.prompt_ids,
          response_ids=sampled,
          truncated=[not end for end in ended],
        )
      rows.append(scores)
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
      The learner and the step's figures. An update whose loss or gradient is
      not finite is skipped, see `skipped_updates`.

    Raises:
      RewardError: the reward function failed or gave no finite number.
      ValueError: prompts of several lengths.
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
      True,
      learner,
      prompts,
      prompt_ids,
      jax.random.split(key, config.prompts_per_step),
    )
    jax.block_until_ready(groups)
    check()
    clock.lap("rollout")
    groups = self._finish(groups, self.rewards(examples, groups))
    clock.lap("reward")
    old = score_groups(self.model, engine, learner.params, groups, states)
    gap = sampler_gap(groups, old)
    groups = groups.replace(old_logprobs=old)
    if reference is not None:
      ref = score_reference(self.model, engine, reference, groups, prompts)
      groups = groups.replace(ref_logprobs=ref)
    jax.block_until_ready(groups)
    check()
    clock.lap("score")
    figures = []
    for _ in range(config.updates_per_rollout):
      if states is not None and engine.grad_scope != "prefix_frozen":
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
      check()
    clock.lap("update")
    tokens = prompts.size + int(np.sum(jax.device_get(groups.lengths)))
    row = summarize_groups(groups) | combine_metrics(figures)
    row |= skipped_updates(examples, figures) | self._alarm(step, gap)
    return learner, row | clock.rates(tokens)

  def _alarm(self, step: int, gap: float) -> dict[str, Any]:
    """What a step's row says of a sampler that is not the trained policy.

    The ratio cannot show it: it is taken between the trainer's own scores.
    """
    most = self.config.mismatch_alarm
    alarm = most is not None and not gap <= most
    if alarm:
      logging.getLogger(__name__).warning(
        "step %d: the sampler scores its own tokens %.3g nats off the trainer "
        "(mismatch_alarm is %g): it samples from other weights, or its "
        "arithmetic is another; publish the weights anew, or correct for it "
        "(sampler_correction_cap)",
        step,
        gap,
        most,
      )
    return {"sampler_gap": gap, "mismatch_alarm": alarm}

  def _finish(self, groups: Group, rewards: np.ndarray) -> Group:
    """Adds rewards, advantages and the step's denominators."""
    config = self.config
    denominators = loss_denominator(
      config.objective.normalization,
      token_mask(groups),
      config.objective.constant_length,
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
    # Scores are the policy's own: one that is not finite makes a bad step.
    given = groups.replace(
      old_logprobs=None, sampling_logprobs=None, ref_logprobs=None
    )
    for i in range(config.prompts_per_step):
      check_group(jax.tree.map(lambda x, i=i: x[i], given), vocab_size)
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
    answers = [np.append(e.answer_ids, self.tokenizer.eos_id) for e in examples]
    room = max(map(len, answers))
    groups = [
      Group.create(
        np.pad(answer, (0, room - len(answer)))[None],
        [len(answer)],
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
    figures = [jax.device_get(metrics)]
    row = combine_metrics(figures) | skipped_updates(examples, figures)
    clock.lap("update")
    return learner, row | clock.rates(int(prompts.size))

  def evaluate(
    self, learner: Learner, num_prompts: int, at_once: int = 64
  ) -> np.ndarray:
    """Rewards of one sampled response to each of the first held-out prompts.

    Prompts and randomness are the same at every call. So many prompts are one
    call of the device, after which a signal is obeyed; with pages in host
    memory it is one.
    """
    sampling = dataclasses.replace(self.config.sampling, group_size=1)
    key = jax.random.fold_in(jax.random.key(self.config.seed), 2**31 - 1)
    keys = jax.random.split(key, num_prompts)
    if self.config.engine.pages == "host":
      at_once = 1
    rewards = []
    for first in range(0, num_prompts, at_once):
      some = range(num_prompts)[first : first + at_once]
      examples = [self.task.sample(i, "heldout") for i in some]
      groups = self._sample(
        learner, *self._prompts(examples), keys[np.array(some)], sampling
      )
      jax.block_until_ready(groups)
      check()
      rewards.append(self.rewards(examples, groups)[:, 0])
    return np.concatenate(rewards)

  def sample(
    self,
    learner: Learner,
    prompt: np.ndarray,
    key: Array,
    sampling: SamplingConfig,
  ) -> Group:
    """A group of responses to a prompt of any length, by the run's policy.

    Args:
      learner: the weights.
      prompt: [P] ids.
      key: of the randomness.
      sampling: how; the run's own settings do not matter.
    """
    check_tokens("prompt", prompt, None, self.model.config.vocab_size)
    prompt_ids = jnp.full(1, UNKNOWN_PROMPT, jnp.int32)
    one = (jnp.asarray(prompt)[None], prompt_ids, key[None])
    groups = self._sample(learner, *one, sampling)
    return jax.tree.map(lambda x: x[0], groups)

  def _sample(self, learner, prompts, prompt_ids, keys, sampling) -> Group:
    """Groups of the policy that training rolls out, all together."""
    engine = self.config.engine.without_gradient()
    _, groups = rollout_groups(
      self.model,
      dataclasses.replace(engine, prompts_at_once=len(prompts)),
      sampling,
      self.stop_ids,
      False,
      learner,
      prompts,
      prompt_ids,
      keys,
    )
    return groups


def _check_lengths(examples: Sequence[Example]) -> None:
  """Refuses prompts that cannot be one array.

  Raises:
    ValueError: naming the prompts of every length.
  """
  lengths: dict[int, list[int]] = {}
  for example in examples:
    ids = lengths.setdefault(len(example.prompt_ids), [])
    ids.append(int(example.prompt_id))
  if len(lengths) > 1:
    found = "; ".join(
      f"{length} tokens: {listed([f'prompt {i}' for i in ids], MOST_LISTED)}"
      for length, ids in sorted(lengths.items())
    )
    raise ValueError(
      f"the prompts of one step have {len(lengths)} lengths ({found}): they "
      "are one array, so let the task cut or fill them to the same number of "
      "tokens, or put prompts of one length into a step"
    )


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


def sampler_gap(groups: Group, scored: Array) -> float:
  """Mean |log-probability by the sampler - by the trainer|, nats a token.

  Of the same policy, over all of its vocabulary: a sampler that cuts its
  distribution (top_k, top_p) has no gap by that.

  Args:
    groups: with the sampler's own `old_logprobs`.
    scored: the trainer's, [B, G, R].
  """
  gap = jnp.where(groups.loss_mask, jnp.abs(groups.old_logprobs - scored), 0.0)
  return float(gap.sum() / jnp.maximum(groups.loss_mask.sum(), 1))


def skipped_updates(
  examples: Sequence[Example], updates: list[dict[str, np.ndarray]]
) -> dict[str, Any]:
  """What a step's row says of updates that were not finite.

  Args:
    examples: the step's prompts.
    updates: the metrics of every update of the step.

  Returns:
    bad_step, whether any update was skipped; skipped_updates, how many; and
    bad_prompts, the ids of those whose own loss or gradient was not finite.
    There are none where finite gradients have a sum beyond the dtype's range.
  """
  skipped = sum(not metrics["applied"] for metrics in updates)
  finite = np.all([metrics["finite"] for metrics in updates], axis=0)
  return {
    "bad_step": skipped > 0,
    "skipped_updates": int(skipped),
    "bad_prompts": [
      int(example.prompt_id)
      for example, ok in zip(examples, finite, strict=True)
      if not ok
    ],
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
      elif name not in ("reward_mean", "zero_spread", "finite", "applied"):
        row[name] = (weights * value).sum()
    rows.append(row)
  peak = lambda name: max if name.endswith("_max") else np.mean
  return {
    name: float(peak(name)([row[name] for row in rows])) for name in rows[0]
  }
