"""The prompt pass: run the prompt once, keep only what later tokens need."""

import functools

import jax
from jax import lax
import jax.numpy as jnp
from jaxtyping import Array, Int

from longstraw_jax.checks import (
  CONSTANT_SCOPES,
  check_chunk_size,
  check_prompt,
  check_scope,
)
from longstraw_jax.lora import frozen_base
from longstraw_jax.models.model import Model, Params
from longstraw_jax.ops.pages import Striping
from longstraw_jax.sharding import num_shards
from longstraw_jax.state import PromptState, tree_zeros
from longstraw_jax.types import Tree
from longstraw_jax.walk import (
  Gradients,
  Job,
  walk_backward,
  walk_forward,
  zero_gradients,
)


def capture(
  model: Model,
  params: Params,
  prompt: Int[Array, "P"],
  *,
  chunk_size: int,
  grad_scope: str = "response_only",
  tail_chunks: int | None = None,
  capacity: int | None = None,
  length: Int[Array, ""] | int | None = None,
  step: Int[Array, ""] | int = 0,
  prompt_id: Int[Array, ""] | int = 0,
) -> PromptState:
  """Runs a prompt chunk by chunk without autograd and keeps its state.

  A function of the state can be differentiated: with `response_only` the
  state is constant, with `full` a reverse walk over the chunks returns the
  exact gradient through the prompt, with `tail` the walk stops before the
  last `tail_chunks` chunks. Chunks start at multiples of chunk_size over the
  P - 1 captured tokens. With `prefix_frozen` the adapters of `params` are off
  for those tokens and on from the last prompt token, which is replayed: the
  state is constant and, as adapters alone learn, good for every later step.
  Forward-mode differentiation is refused.

  Args:
    model: the model.
    params: its parameters.
    prompt: token ids [P], or [capacity + 1] padded behind `length`.
    chunk_size: tokens processed at once.
    grad_scope: "response_only", "full", "tail" or "prefix_frozen".
    tail_chunks: chunks that `tail` walks back over; 0 is response_only.
    capacity: tokens there is room for, rounded up to whole chunks; P - 1 by
      default. One compiled program serves every length up to it.
    length: real prompt tokens where `prompt` is padded; may be traced.
    step: optimizer step of these weights, stamped on the state.
    prompt_id: id of the prompt, stamped on the state.

  Raises:
    ValueError: bad sizes or scope, empty prompt, ids outside the vocabulary,
      `prefix_frozen` where not exactly adapters learn.
  """
  check_chunk_size("chunk_size", chunk_size)
  check_scope(grad_scope, tail_chunks)
  check_prompt(prompt, length, capacity, model.config.vocab_size)
  if grad_scope == "prefix_frozen":
    params = frozen_base(params)
  prompt = jnp.asarray(prompt, jnp.int32)
  wanted = prompt.shape[0] - 1 if capacity is None else capacity
  wanted = max(wanted, 1)
  chunk_size = min(chunk_size, wanted + -wanted % num_shards("rows"))
  striping = Striping.of_mesh(chunk_size)
  real = prompt.shape[0] if length is None else length
  captured = jnp.asarray(real, jnp.int32) - 1
  tokens = padded(prompt, wanted + -wanted % chunk_size)
  first = _first_chunk(captured, chunk_size, grad_scope, tail_chunks)
  rows, carry, saved = _capture(
    model, chunk_size, grad_scope, params, tokens, captured, first
  )
  return PromptState(
    pages=rows,
    carry=carry,
    saved_carries=saved,
    last_token=prompt[captured],
    length=captured,
    first_chunk=first,
    step=jnp.asarray(step, jnp.int32),
    prompt_id=jnp.asarray(prompt_id, jnp.int32),
    grad_scope=grad_scope,
    chunk_size=chunk_size,
    striping=striping,
  )


def padded(tokens: Int[Array, "P"], size: int) -> Int[Array, "size"]:
  """Cut or padded with zeros to `size` tokens."""
  tokens = jnp.asarray(tokens, jnp.int32)[:size]
  return jnp.pad(tokens, (0, size - tokens.shape[0]))


def _first_chunk(captured, chunk_size: int, grad_scope: str, tail_chunks):
  """The first chunk that a reverse walk visits."""
  chunks = lax.div(captured + (chunk_size - 1), jnp.int32(chunk_size))
  if grad_scope == "full":
    return jnp.zeros_like(chunks)
  kept = tail_chunks if grad_scope == "tail" else 0
  return jnp.maximum(chunks - kept, 0)


def _prompt_job(tokens, captured, chunk_size: int) -> Job:
  """The walk over a prompt: nothing is scored."""
  return Job(
    tokens=tokens,
    targets=None,
    length=captured,
    start=jnp.int32(0),
    block=chunk_size,
    striping=Striping.of_mesh(chunk_size),
  )


def _run(model: Model, chunk_size, save_carries, params, tokens, captured):
  job = _prompt_job(tokens, captured, chunk_size)
  carry = tree_zeros(model.state_shapes(1)[1])
  walked = walk_forward(
    model, params, (), carry, job, save_carries=save_carries
  )
  return walked.rows, walked.carry, walked.saved_carries


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _capture(model, chunk_size, grad_scope, params, tokens, captured, first):
  if grad_scope in CONSTANT_SCOPES:
    params = lax.stop_gradient(params)
    return _run(model, chunk_size, False, params, tokens, captured)
  return _differentiated(model, chunk_size, params, tokens, captured, first)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _differentiated(model, chunk_size, params, tokens, captured, first):
  del first
  return _run(model, chunk_size, True, params, tokens, captured)


def _differentiated_fwd(model, chunk_size, params, tokens, captured, first):
  out = _run(model, chunk_size, True, params, tokens, captured)
  rows, _, saved = out
  return out, (params, tokens, captured, first, rows, saved)


def _differentiated_bwd(model, chunk_size, residuals, cotangents):
  params, tokens, captured, first, rows, saved = residuals
  page_grads, carry_grads, _ = cotangents
  sums, _ = walk_backward(
    model,
    params,
    (),
    _prompt_job(tokens, captured, chunk_size),
    rows,
    saved,
    None,
    model.gradient_rows(page_grads),
    Gradients(params=zero_gradients(params), priors=(), carry=carry_grads),
    first_block=first,
  )
  trainable = jax.tree.map(
    lambda x, like: x.astype(like.dtype), sums.params, params.trainable
  )
  return Params(trainable=trainable, frozen=None), None, None, None


_differentiated.defvjp(_differentiated_fwd, _differentiated_bwd)


def reverse_walk(
  model: Model,
  params: Params,
  prompt: Int[Array, "P"],
  state: PromptState,
  page_grads: Tree,
  sums: Gradients,
) -> tuple[Gradients, Tree]:
  """Pulls the cotangents of a prompt's pages and carry back to the weights.

  Args:
    model: the model.
    params: its parameters.
    prompt: the prompt that the state was captured from.
    state: captured with a differentiated scope.
    page_grads: accumulator of the pages, used up in place.
    sums: parameter gradients so far and the exit carry's cotangent.

  Returns:
    The sums, and the accumulator, which is of no more use than its memory.
  """
  rows = jax.tree.leaves(state.pages)  # a model may have no rows or no carry
  carries = jax.tree.leaves(state.saved_carries)
  room = rows[0].shape[-2] if rows else carries[0].shape[0] * state.chunk_size
  tokens = padded(prompt, room)
  return walk_backward(
    model,
    params,
    (),
    _prompt_job(tokens, state.length, state.chunk_size),
    state.pages,
    state.saved_carries,
    None,
    page_grads,
    sums,
    first_block=state.first_chunk,
  )
