"""What a training step does on the device, over many prompts at once."""

from collections.abc import Callable
import dataclasses
import functools

from flax import struct
import jax
from jax import lax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int
import optax

from longstraw_jax.capture import capture
from longstraw_jax.group import group_gradient
from longstraw_jax.group_checks import check_same_prompt
from longstraw_jax.lora import has_lora
from longstraw_jax.models.model import Model, Params
from longstraw_jax.ops.precision import wide_dtype
from longstraw_jax.optimizer import (
  OptimizerState,
  init_optimizer,
  optimizer_step,
)
from longstraw_jax.replay import replay_scores
from longstraw_jax.rollout import rollout
from longstraw_jax.sharding import constrain_at_rest, replicate
from longstraw_jax.state import PromptState
from longstraw_jax.train_config import (
  EngineConfig,
  OptimizerConfig,
  SamplingConfig,
)
from longstraw_jax.types import Group, Tree


@struct.dataclass
class Learner:
  """What an optimizer step replaces.

  Attributes:
    params: the policy.
    opt_state: of the optimizer; it knows the trainable leaves only, and holds
      wide copies of those that are narrow.
    step: optimizer steps taken; one that was skipped because its gradient was
      not finite is none, as the weights are still those of the step before.
  """

  params: Params
  opt_state: OptimizerState
  step: Int[Array, ""]


def make_learner(params: Params, optimizer: OptimizerConfig) -> Learner:
  """A learner that has taken no step."""
  opt_state = init_optimizer(optimizer, params.trainable)
  return Learner(params=params, opt_state=opt_state, step=jnp.int32(0))


def restarted(learner: Learner, optimizer: OptimizerConfig) -> Learner:
  """The same weights, to the digits of their copies, with a fresh optimizer."""
  new = make_learner(learner.params, optimizer)
  copies = learner.opt_state.master
  return new.replace(opt_state=new.opt_state.replace(master=copies))


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
    pages=engine.pages,
  )


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3, 4))
def rollout_groups(
  model: Model,
  engine: EngineConfig,
  sampling: SamplingConfig,
  stop_ids: tuple[int, ...],
  keep_states: bool,
  learner: Learner,
  prompts: Int[Array, "B P"],
  prompt_ids: Int[Array, "B"],
  keys: jax.Array,
) -> tuple[PromptState | None, Group]:
  """Captures every prompt and samples its group; a leading axis B on both.

  States are the size of their prompts: without `keep_states` only those of
  `prompts_at_once` prompts exist together, and None is returned for them.
  """

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
      record_choices=engine.replay_choices,
    )
    return (state if keep_states else None), group

  states, groups = per_prompt(
    one, engine.prompts_at_once, prompts, prompt_ids, keys
  )
  return states, replicate(groups)


def score_groups(
  model: Model,
  engine: EngineConfig,
  params: Params,
  groups: Group,
  states: PromptState,
) -> Float[Array, "B G R"]:
  """Log-probabilities of every response over the states given."""
  check_same_prompt(group=groups.prompt_id, state=states.prompt_id)
  return _score_groups(model, engine, params, groups, states)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _score_groups(model, engine, params, groups, states):
  def one(group, state):
    return replay_scores(
      model,
      params,
      state,
      group.responses,
      group.lengths,
      block_size=engine.block_size,
      members_at_once=engine.members_at_once,
      choices=group.choices,
      temperature=group.temperature,
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
  """Log-probabilities under frozen weights, over states of their own.

  With `prefix_frozen` a reference's adapters, where it has any, are off at
  prompt positions like the policy's.
  """
  frozen = engine.without_gradient()
  if not has_lora(params):
    frozen = dataclasses.replace(frozen, grad_scope="response_only")

  def one(group, prompt):
    state = _capture(model, frozen, params, prompt, group.prompt_id, 0)
    group = group.replace(choices=None)  # those were another policy's
    one_prompt = jax.tree.map(lambda x: x[None], (group, state))
    return score_groups(model, frozen, params, *one_prompt)[0]

  return per_prompt(one, engine.prompts_at_once, groups, prompts)


def apply_gradient(
  optimizer: OptimizerConfig,
  learner: Learner,
  grads: Tree,
  finite: Bool[Array, ""] | bool = True,
) -> Learner:
  """The learner one optimizer step on, or the same learner.

  One NaN or infinity in a gradient would reach every weight and moment through
  the clipped norm. Such a step is not taken: weights, moments, the schedule's
  count and `step` stay as they are, to the bit.

  Args:
    optimizer: its settings.
    learner: the weights and the optimizer's state.
    grads: the gradient; not applied where its norm is not finite.
    finite: whether all else that the step comes from is finite.
  """
  trainable = learner.params.trainable
  old = (trainable, learner.opt_state, learner.step)
  # Of the moments' dtype, which another one would change.
  cast = lambda g, x: g.astype(wide_dtype(x.dtype))
  grads = jax.tree.map(cast, grads, trainable)
  trainable, opt_state = optimizer_step(
    optimizer, trainable, learner.opt_state, grads
  )
  finite &= jnp.isfinite(optax.tree.norm(grads))
  # Element by element, so that a buffer that is given up is written in place.
  trainable, opt_state, step = jax.tree.map(
    lambda new, old: jnp.where(finite, new, old),
    (trainable, opt_state, learner.step + 1),
    old,
  )
  return Learner(
    params=learner.params.replace(trainable=constrain_at_rest(trainable)),
    opt_state=constrain_at_rest(opt_state),
    step=step,
  )


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
    groups: with what the objective asks for, and the step's denominators; a
      group that carries none is divided by its own.
    states: captured with these weights (or stale by policy); None captures.

  Returns:
    The learner one step on, or as it was where the loss or the gradient is not
    finite; the metrics of every group, [B] each, with `finite`, whether its
    own loss and gradient are; and the summed loss, the gradient's norm and
    `applied`, whether the step was taken.
  """
  if states is not None:
    check_same_prompt(group=groups.prompt_id, state=states.prompt_id)
  return _update(
    model, engine, optimizer, objective, learner, prompts, groups, states
  )


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3))
def _update(
  model, engine, optimizer, objective, learner, prompts, groups, states
):
  def one(prompt, group, state):
    loss, grads, metrics = group_gradient(
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
      pages=engine.pages,
    )
    finite = jnp.isfinite(loss) & jnp.isfinite(optax.tree.norm(grads))
    return loss, grads, metrics | {"finite": finite}

  at_once = engine.prompts_at_once
  together = jax.vmap(one)
  if at_once == 1:
    # As per_prompt runs it: a batch of one multiplies in another order, and
    # the first update's ratio would not be 1 to the last bits.
    first = lambda tree: jax.tree.map(lambda x: x[0], tree)
    together = lambda *trees: jax.tree.map(
      lambda x: x[None], one(*map(first, trees))
    )

  def batch(total, inputs):
    loss, grads, metrics = together(*inputs)
    add = lambda total, x: total + x.sum(0)
    return jax.tree.map(add, total, (loss, grads)), metrics

  batches = jax.tree.map(
    lambda x: x.reshape(-1, at_once, *x.shape[1:]), (prompts, groups, states)
  )
  shapes = jax.eval_shape(together, *jax.tree.map(lambda x: x[0], batches))
  zeros = jax.tree.map(lambda x: jnp.zeros(x.shape[1:], x.dtype), shapes[:2])
  (loss, grads), metrics = lax.scan(batch, zeros, batches)
  metrics = jax.tree.map(lambda x: x.reshape(-1), metrics)
  finite = jnp.isfinite(loss) & metrics["finite"].all()
  new = apply_gradient(optimizer, learner, grads, finite)
  metrics |= {
    "loss": loss,
    "grad_norm": optax.tree.norm(grads),
    "applied": new.step != learner.step,
  }
  return new, replicate(metrics)
