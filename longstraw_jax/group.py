"""One group as one transaction: score, objective, replay, reverse walk."""

from collections.abc import Callable
import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int
import numpy as np

from longstraw_jax.capture import capture, reverse_walk
from longstraw_jax.checks import check_one_prompt, check_state, check_weights
from longstraw_jax.choices import response_choices
from longstraw_jax.config import check_dtype
from longstraw_jax.group_checks import check_group, token_mask
from longstraw_jax.models.model import Model, Params
from longstraw_jax.replay import (
  check_replay_sizes,
  replay_members,
  score_members,
)
from longstraw_jax.staleness import check_fresh, if_fresh
from longstraw_jax.state import PromptState
from longstraw_jax.types import Group, Tree
from longstraw_jax.walk import Gradients

Objective = Callable[[Array, Array, Group], tuple[Array, dict]]


def group_gradient(
  model: Model,
  params: Params,
  prompt: Int[Array, "P"],
  group: Group,
  objective: Objective,
  *,
  chunk_size: int,
  grad_scope: str = "full",
  tail_chunks: int | None = None,
  block_size: int | None = None,
  members_at_once: int = 1,
  capacity: int | None = None,
  length: Int[Array, ""] | int | None = None,
  page_grad_dtype: str | None = None,
  state: PromptState | None = None,
  prompt_id: Int[Array, ""] | int | None = None,
  step: Int[Array, ""] | int | None = None,
  pages: str = "device",
  allow_stale: bool = False,
  prompt_choices: Tree | None = None,
) -> tuple[Float[Array, ""], dict, dict]:
  """Loss, gradient and metrics of one group at the memory of one branch.

  Captures the prompt, scores every member without a graph, takes the
  objective's cotangent on [G, R] once (so it may couple members), replays each
  member with its row of it, then walks back over the prompt. The gradient
  equals jax.grad of objective(replay(capture(...))).

  Args:
    model: the model.
    params: its parameters.
    prompt: token ids [P], padded where `length` is given.
    group: the responses; `group.prompt_id` must be this prompt's.
    objective: hashable, (logprobs [G, R], entropy [G, R], group) ->
      (loss, metrics).
    chunk_size: prompt tokens processed at once.
    grad_scope: "response_only", "full", "tail" or "prefix_frozen".
    tail_chunks: as in capture.
    block_size: response tokens processed at once; R by default.
    members_at_once: members replayed together; memory grows with it.
    capacity: as in capture.
    length: as in capture.
    page_grad_dtype: of the accumulator of page cotangents; float32 or wider
      by default.
    state: a state captured from this prompt with these parameters and this
      scope; saves the capture.
    prompt_id: the id of the prompt, which `group` and `state` must carry where
      they carry one; theirs must be the same in any case.
    step: the optimizer step of `params`, which `state` must carry unless it
      is `prefix_frozen`; unchecked if None.
    pages: as in capture; a `state` has its own where it was put.
    allow_stale: as in replay.
    prompt_choices: capture's `choices`; a `state` has its own.

  Returns:
    The loss, gradients like params.trainable in float32 or wider, and the
    objective's metrics; where the group's recorded choices are followed also
    "choices_changed_share": of layers, over trained tokens, that would have
    chosen otherwise.

  Raises:
    ValueError: bad sizes, ids, responses, a group or a state of another
      prompt, a group without what the objective asks for.
  """
  if page_grad_dtype is not None:
    check_dtype("page_grad_dtype", page_grad_dtype)
  check_weights(model.config, params.merged())
  check_group(group, model.config.vocab_size, prompt_id, state)
  check_replay_sizes(block_size, members_at_once)
  real = np.shape(prompt)[0] if length is None else length
  start = real - 1 if state is None else state.length
  group = _with_checked_choices(model, group, start)
  seen = True
  if state is None:
    state = capture(
      model,
      jax.lax.stop_gradient(params),
      prompt,
      chunk_size=chunk_size,
      grad_scope=grad_scope,
      tail_chunks=tail_chunks,
      capacity=capacity,
      length=length,
      prompt_id=prompt_id,
      pages=pages,
      choices=prompt_choices,
    )
  elif prompt_choices is not None:
    raise ValueError(
      "prompt_choices are given with a state, which has its own: give them to "
      "the capture that makes it"
    )
  else:
    check_state(state, prompt, length, grad_scope, chunk_size, step)
    seen = check_fresh(params, state, allow_stale)
  room = group.responses.shape[1]
  if seen:
    state = state.replace(fingerprint=None)
  return _group_gradient(
    model,
    objective,
    min(block_size or room, room),
    members_at_once,
    page_grad_dtype,
    params,
    jnp.asarray(prompt, jnp.int32),
    group,
    state,
  )


def _with_checked_choices(
  model: Model, group: Group, start: Int[Array, ""] | int
) -> Group:
  shape = np.shape(group.responses)
  choices = response_choices(model, group.choices, shape, group.lengths, start)
  return group.replace(choices=choices)


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3, 4))
def _group_gradient(
  model,
  objective,
  block,
  members_at_once,
  page_grad_dtype,
  params,
  prompt,
  group,
  state,
):
  loss, sums, metrics = branch_gradient(
    model,
    params,
    group,
    objective,
    state,
    block_size=block,
    members_at_once=members_at_once,
    page_grad_dtype=page_grad_dtype,
  )
  if state.differentiated:
    (page_grads,) = sums.priors
    sums = reverse_walk(
      model, params, prompt, state, page_grads, sums.replace(priors=())
    )
  return loss, sums.params, metrics


def branch_gradient(
  model: Model,
  params: Params,
  group: Group,
  objective: Objective,
  state: PromptState,
  *,
  block_size: int,
  members_at_once: int = 1,
  page_grad_dtype: str | None = None,
) -> tuple[Float[Array, ""], Gradients, dict]:
  """group_gradient up to the prompt, for who walks back over it in parts.

  Args:
    model: the model.
    params: its parameters.
    group: the responses.
    objective: as in group_gradient.
    state: of the prompt.
    block_size: response tokens processed at once.
    members_at_once: members replayed together.
    page_grad_dtype: as in group_gradient.

  Returns:
    The loss; the sums so far: of the parameters and, where the state is
    differentiated, of its pages (`priors[0]`) and carry, which reverse_walk
    or reverse_chunks take; the objective's metrics.
  """
  check_one_prompt(state)
  check_weights(model.config, params.merged())
  check_group(group, model.config.vocab_size, None, state)
  seen = check_fresh(params, state)
  if page_grad_dtype is not None:
    check_dtype("page_grad_dtype", page_grad_dtype)
  # Whatever the objective: padding is not trained on, nor counted.
  group = group.replace(loss_mask=token_mask(group))
  group = _with_checked_choices(model, group, state.length)
  responses = jnp.asarray(group.responses, jnp.int32)
  lengths = jnp.asarray(group.lengths, jnp.int32)
  members = (responses, lengths, group.choices, group.temperature)
  scores, changed = score_members(
    model, block_size, members_at_once, params, state, *members
  )
  call = lambda logprobs, entropy: objective(logprobs, entropy, group)
  loss, pull_back, metrics = jax.vjp(call, *scores, has_aux=True)
  dscores = pull_back(jnp.ones_like(loss))
  if not seen:
    loss, dscores = if_fresh(params, state, (loss, dscores))
  if changed is not None:
    counted = jnp.maximum(group.loss_mask.sum(), 1)
    share = jnp.where(group.loss_mask, changed, 0.0).sum() / counted
    metrics = metrics | {"choices_changed_share": share}
  sums = replay_members(
    model,
    block_size,
    members_at_once,
    params,
    state,
    *members,
    dscores,
    page_grad_dtype,
  )
  return loss, sums, metrics
