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
from longstraw_jax.types import Group

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
  """
  config = dataclasses.replace(model.config, saved="inputs")

  def one(sums, member):
    alone = jax.tree.map(lambda x: x[None], member)
    alone = alone.replace(
      prompt_id=group.prompt_id, loss_denominator=group.loss_denominator
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
