"""The gradients that everything is compared with, by plain jax.grad.

Built from the model's own operations, over full rows of prompt and response:
nothing is captured, shared or replayed.
"""

from collections.abc import Callable
import dataclasses
import functools

import jax
from jax import lax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from longstraw_jax.models.model import Model, Params, sequence_scores
from longstraw_jax.state import Pages, tree_zeros
from longstraw_jax.types import Group, Span

Objective = Callable[[Array, Array, Group], tuple[Array, dict]]


def member_scores(
  model: Model,
  params: Params,
  prompt: Int[Array, "P"],
  response: Int[Array, "R"],
  length: Int[Array, ""],
) -> tuple[Float[Array, "R"], Float[Array, "R"]]:
  """Log-probabilities and entropy of one response in one full row."""
  scores = sequence_scores(model, params, jnp.concatenate([prompt, response]))
  mask = jnp.arange(response.shape[0]) < length
  cut = lambda x: jnp.where(mask, x[prompt.shape[0] - 1 :], 0.0)
  return jax.tree.map(cut, scores)


def group_scores(model: Model, params: Params, prompt, group: Group):
  """member_scores of every member, all rows at once."""
  score = functools.partial(member_scores, model, params, prompt)
  return jax.vmap(score)(group.responses, group.lengths)


@functools.partial(jax.jit, static_argnums=(0, 4))
def conventional_gradient(
  model: Model, params: Params, prompt, group: Group, objective: Objective
):
  """Loss, gradient of the trainable leaves and metrics over G full rows.

  All G graphs are alive at once and nothing is recomputed.
  """
  config = dataclasses.replace(model.config, saved="everything")

  def loss_of(trainable):
    tree = params.replace(trainable=trainable)
    scores = group_scores(Model(config), tree, prompt, group)
    return objective(*scores, group)

  (loss, metrics), grads = jax.value_and_grad(loss_of, has_aux=True)(
    params.trainable
  )
  return loss, grads, metrics


@functools.partial(jax.jit, static_argnums=(0, 4))
def serial_remat_gradient(
  model: Model, params: Params, prompt, group: Group, objective: Objective
):
  """The same one full row at a time, with per-layer checkpointing.

  The objective must be a sum over members: it is called with groups of one.
  Its `denominator` is that of the whole group.
  """
  denominator = objective.denominator(group)
  config = dataclasses.replace(model.config, saved="inputs")

  def one(sums, member):
    alone = jax.tree.map(lambda x: x[None], member)
    alone = alone.replace(
      prompt_id=group.prompt_id, loss_denominator=denominator
    )

    def loss_of(trainable):
      tree = params.replace(trainable=trainable)
      scores = group_scores(Model(config), tree, prompt, alone)
      return objective(*scores, alone)[0]

    new = jax.value_and_grad(loss_of)(params.trainable)
    return jax.tree.map(jnp.add, sums, new), None

  members = group.replace(prompt_id=None, loss_denominator=None)
  dtype = jnp.promote_types(model.config.dtype, jnp.float32)
  zeros = (
    jnp.zeros((), dtype),
    jax.tree.map(jnp.zeros_like, params.trainable),
  )
  return lax.scan(one, zeros, members)[0]


# --- What a gradient needs of memory, without running it -------------------


def compile_gradient(
  gradient: Callable, model: Model, prompt: int, group: int, response: int
) -> jax.stages.Compiled:
  """Compiles a gradient from shapes alone; nothing is allocated or run.

  Args:
    gradient: (params, prompt, group) -> anything.
    model: the model.
    prompt: prompt tokens P.
    group: members G.
    response: response tokens R.
  """
  ids = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.int32)
  params = jax.eval_shape(model.init, jax.random.key(0))
  numbers = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)
  make = lambda ids, lengths, rewards, scores: Group.create(
    ids,
    lengths,
    rewards=rewards,
    advantages=rewards,
    old_logprobs=scores,
    sampling_logprobs=scores,
    ref_logprobs=scores,
  )
  members = jax.eval_shape(
    make,
    ids(group, response),
    ids(group),
    numbers(group),
    numbers(group, response),
  )
  return jax.jit(gradient).lower(params, ids(prompt), members).compile()


def planned_bytes(compiled: jax.stages.Compiled) -> int:
  """Temporaries and outputs that a compiled program needs."""
  plan = compiled.memory_analysis()
  return plan.temp_size_in_bytes + plan.output_size_in_bytes


# --- Oracles of the scopes that stop the gradient inside the prompt -------


def constant_tokens(
  grad_scope: str,
  length: int,
  chunk_size: int,
  tail_chunks: int | None = None,
) -> int:
  """Prompt tokens whose rows and carry are constants under a scope.

  Chunks start at multiples of chunk_size over the length - 1 captured tokens;
  a short last one counts.

  Args:
    grad_scope: "full", "tail" or "response_only".
    length: prompt tokens P.
    chunk_size: as given to capture.
    tail_chunks: chunks at the end that are differentiated, for "tail".
  """
  captured = length - 1
  if grad_scope == "full":
    return 0
  if grad_scope == "response_only" or tail_chunks == 0:
    return captured
  starts = range(0, captured, chunk_size)
  return starts[-tail_chunks] if tail_chunks <= len(starts) else 0


def bounded_scores(
  model: Model,
  params: Params,
  prompt: Int[Array, "P"],
  length: Int[Array, ""],
  boundary: Int[Array, ""] | None,
  group: Group,
) -> tuple[Float[Array, "G R"], Float[Array, "G R"]]:
  """Scores of every member; tokens before `boundary` are run as constants.

  They are run once, in one call, by stopped parameters. Their rows and carry
  are what everything later reads, and that is one single call of model.hidden
  over the rest of the prompt and the response: nothing inside it is cut, so
  plain autodiff differentiates it, and the rows before it need no tap because
  they are constants, which is what a read without a tap takes them for.

  Args:
    model: the model.
    params: its parameters.
    prompt: token ids, padded behind `length`.
    length: real prompt tokens, may be traced.
    boundary: constant tokens, at most length - 1, may be traced; None runs
      whole rows in one call that reads no pages at all.
    group: the responses.
  """
  room, response_room = prompt.shape[0], group.responses.shape[1]
  size = room + response_room
  carry = tree_zeros(model.state_shapes(1)[1])
  first, segments = jnp.int32(0), ()
  if boundary is not None:
    first = jnp.asarray(boundary, jnp.int32)
    span = Span(positions=jnp.arange(room, dtype=jnp.int32), length=first)
    stopped = lax.stop_gradient(params)
    out = model.hidden(stopped, prompt, span, (), carry)
    carry = out.carry
    start = jnp.int32(0)
    segments = (Pages(rows=out.rows, taps=None, length=first, start=start),)

  def one(response, response_length):
    slots = jnp.arange(size, dtype=jnp.int32)
    later = response[jnp.clip(slots - length, 0, response_room - 1)]
    row = jnp.where(slots < length, prompt[jnp.minimum(slots, room - 1)], later)
    row = jnp.pad(row, (0, size))
    rest = lax.dynamic_slice_in_dim(row, first, size)
    targets = lax.dynamic_slice_in_dim(row, first + 1, size)
    real = length + response_length - 1 - first
    span = Span(positions=first + slots, length=real)
    out = model.hidden(params, rest, span, segments, carry)
    scores = model.logprobs(params, out.x_TD, targets, group.temperature)
    mask = jnp.arange(response_room) < response_length
    cut = lambda x: lax.dynamic_slice_in_dim(
      x, length - 1 - first, response_room
    )
    return jax.tree.map(lambda x: jnp.where(mask, cut(x), 0.0), scores)

  return jax.vmap(one)(group.responses, group.lengths)


@functools.partial(jax.jit, static_argnums=(0, 4))
def bounded_gradient(
  model: Model,
  params: Params,
  prompt: Int[Array, "P"],
  group: Group,
  objective: Objective,
  length: Int[Array, ""],
  boundary: Int[Array, ""] | None = None,
):
  """The oracle of every scope: jax.grad of the objective of bounded_scores.

  `boundary` comes from constant_tokens: length - 1 for response_only, the
  tokens before the walked chunks for tail. None is the conventional gradient
  over padded rows. One compiled program serves every length and boundary.

  Returns:
    Loss, gradient of the trainable leaves and metrics.
  """
  config = dataclasses.replace(model.config, saved="everything")

  def loss_of(trainable):
    tree = params.replace(trainable=trainable)
    scores = bounded_scores(
      Model(config), tree, prompt, length, boundary, group
    )
    return objective(*scores, group)

  (loss, metrics), grads = jax.value_and_grad(loss_of, has_aux=True)(
    params.trainable
  )
  return loss, grads, metrics
