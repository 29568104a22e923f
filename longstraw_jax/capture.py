"""The prompt pass: run the prompt once, keep only what later tokens need.

`capture` begins a state, `extend` goes on with one as a history grows.
"""

import functools

import jax
from jax import lax
import jax.numpy as jnp
from jaxtyping import Array, Int
import numpy as np

from longstraw_jax.checks import (
  CONSTANT_SCOPES,
  check_capacity,
  check_chunk_size,
  check_one_prompt,
  check_prompt_of,
  check_scope,
  check_step,
  check_tokens,
  check_weights,
  concrete,
)
from longstraw_jax.choices import check_same_layers, prompt_choices
from longstraw_jax.group_checks import prompt_stamp
from longstraw_jax.lora import frozen_base
from longstraw_jax.models.model import Model, Params
from longstraw_jax.ops.pages import (
  Striping,
  check_place,
  refuse_host_cotangent,
)
from longstraw_jax.sharding import num_shards
from longstraw_jax.staleness import check_fresh, fingerprint
from longstraw_jax.state import (
  PromptState,
  grow_rows,
  grow_saved,
  tree_grown,
  tree_zeros,
)
from longstraw_jax.types import Tree
from longstraw_jax.walk import (
  Begun,
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
  prompt_id: Int[Array, ""] | int | None = None,
  pages: str = "device",
  choices: Tree | None = None,
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
    prompt_id: id of the prompt, stamped on the state; None is unknown. A group
      of another one is refused.
    pages: where they are kept. "host" is pinned host memory: whoever reads
      the state fetches them layer by layer, and their gradients and the saved
      carries are there too, so that the device holds those of one layer and of
      one chunk. `full` and `tail` gradients then come from group_gradient;
      jax.vmap over prompts is not possible, as JAX cannot slice a batch of
      host arrays.
    choices: recorded choices (experts, keys) of the captured tokens, which are
      followed instead of the live ones here and in every gradient: stage ->
      layer -> name -> [L, P - 1, A], padded like `prompt` where that is. What
      is missing is chosen afresh. The last prompt token's are row 0 of
      Group.choices. Under jax.jit, where values cannot be refused, what is out
      of range adds nothing.

  Raises:
    ValueError: bad sizes or scope, empty prompt, ids outside the vocabulary,
      `prefix_frozen` where not exactly adapters learn, no such place, choices
      that this model cannot have made.
  """
  check_place(pages)
  check_weights(model.config, params.merged())
  check_chunk_size("chunk_size", chunk_size)
  check_scope(grad_scope, tail_chunks)
  check_tokens("prompt", prompt, length, model.config.vocab_size)
  real = np.shape(prompt)[0] if length is None else length
  check_capacity(capacity, real - 1)
  made_by = fingerprint(params, grad_scope)
  if grad_scope == "prefix_frozen":
    params = frozen_base(params)
  prompt = jnp.asarray(prompt, jnp.int32)
  wanted = prompt.shape[0] - 1 if capacity is None else capacity
  wanted = max(wanted, 1)
  chunk_size = min(chunk_size, wanted + -wanted % num_shards("rows"))
  striping = Striping.of_mesh(chunk_size)
  captured = jnp.asarray(real, jnp.int32) - 1
  tokens = padded(prompt, wanted + -wanted % chunk_size)
  choices = prompt_choices(
    model,
    choices,
    prompt.shape[0] - 1,
    captured,
    tokens.shape[0],
    padding=length is not None,
  )
  first = _first_chunk(captured, chunk_size, grad_scope, tail_chunks)
  arrays = (params, tokens, captured, first, choices)
  rows, carry, saved = _capture(model, chunk_size, grad_scope, pages, *arrays)
  return PromptState(
    pages=rows,
    carry=carry,
    saved_carries=saved,
    last_token=prompt[captured],
    length=captured,
    first_chunk=first,
    step=jnp.asarray(step, jnp.int32),
    prompt_id=prompt_stamp(prompt_id),
    grad_scope=grad_scope,
    chunk_size=chunk_size,
    striping=striping,
    choices=choices,
    fingerprint=made_by,
  )


def extend(
  model: Model,
  params: Params,
  state: PromptState,
  tokens: Int[Array, "T"],
  *,
  tail_chunks: int | None = None,
  chunk_size: int | None = None,
  capacity: int | None = None,
  length: Int[Array, ""] | int | None = None,
  step: Int[Array, ""] | int = 0,
  allow_stale: bool = False,
  prompt_id: Int[Array, ""] | int | None = None,
  choices: Tree | None = None,
) -> PromptState:
  """Goes on with a state: that of its prompt with `tokens` behind it.

  The state equals capture(prompt ++ tokens) of its chunk_size and grad_scope,
  up to rounding. Only the last prompt token and all new ones but the last are
  run: first what fills up the last chunk, from the carry inside it, then chunk
  after chunk. No token before them is needed. One compiled program serves
  every length of a state and every number of new tokens for one capacity and
  one padded size of `tokens`. The given state stays as it was and its pages are
  copied once; donate it to a jax.jit of your own to go on in its memory.

  What replay and group_gradient do with a captured state they do with this
  one, given the whole prompt; so `full` and `tail` gradients come from
  group_gradient. jax.grad straight through extend is refused under these
  scopes: a state does not hold the tokens that the reverse walk reads. Under
  `response_only` and `prefix_frozen` the state is a constant, as in capture.

  Args:
    model: the model.
    params: its parameters; under `prefix_frozen` their adapters are off.
    state: of the prompt so far; one prompt's, without a batch axis.
    tokens: token ids [T], padded behind `length`.
    tail_chunks: as in capture, of the longer prompt; for `tail` alone.
    chunk_size: the state's by default. A state of a single chunk, which
      capture may have cut down to a short prompt, can go on in larger ones
      where no mesh shares its pages.
    capacity: tokens there is room for, rounded up to whole chunks. By default
      the state's, or what is needed where that is more: under jax.jit, where
      its length is unknown, T more than the state's.
    length: real new tokens where `tokens` is padded; may be traced.
    step: optimizer step of these weights, which the state must carry.
    allow_stale: goes on with a state of other weights, whose step and
      fingerprint stay on it; under `response_only` alone.
    prompt_id: id of the longer prompt; the state's by default.
    choices: as in capture, of the tokens that are run: [L, T, A], row 0 the
      last prompt token's. For a state with `choices` of the same layers, and
      for no other.

  Raises:
    ValueError: no tokens, ids outside the vocabulary, a capacity that does not
      hold the longer prompt, a state of another step, bad sizes, choices that
      this model cannot have made or for a state without.
  """
  check_one_prompt(state)
  check_weights(model.config, params.merged())
  check_tokens("tokens", tokens, length, model.config.vocab_size)
  check_scope(state.grad_scope, tail_chunks)
  if not allow_stale or state.differentiated:
    check_step(state, step)
  check_fresh(params, state, allow_stale)
  if state.grad_scope == "prefix_frozen":
    params = frozen_base(params)
  tokens = jnp.asarray(tokens, jnp.int32)
  chunk_size = _next_chunk_size(state, chunk_size)
  if Striping.of_mesh(chunk_size) != state.striping:
    raise ValueError(
      f"the state's pages are dealt as {state.striping}, this mesh deals them "
      f"as {Striping.of_mesh(chunk_size)}: use the mesh it was captured on"
    )
  added = tokens.shape[0] if length is None else length
  check_capacity(capacity, state.length + added)
  room = _next_room(state, tokens.shape[0], length, capacity, chunk_size)
  choices = prompt_choices(
    model, choices, tokens.shape[0], added, tokens.shape[0], state.length
  )
  check_same_layers(state.choices, choices)
  added = jnp.asarray(added, jnp.int32)
  rows, carry, saved, choices = _extend(
    model, chunk_size, room, params, state, tokens, added, choices
  )
  captured = state.length + added
  scope = state.grad_scope
  prompt_id = state.prompt_id if prompt_id is None else prompt_id
  return state.replace(
    pages=rows,
    carry=carry,
    saved_carries=saved,
    last_token=tokens[added - 1],
    length=captured,
    first_chunk=_first_chunk(captured, chunk_size, scope, tail_chunks),
    prompt_id=prompt_stamp(prompt_id),
    chunk_size=chunk_size,
    choices=choices,
  )


def _next_chunk_size(state: PromptState, chunk_size: int | None) -> int:
  """The chunk size to go on with: borders of chunks must stay where they are.

  Raises:
    ValueError: another one, and the state has borders or its chunk is larger.
  """
  own = state.chunk_size
  if chunk_size is None:
    return own
  check_chunk_size("chunk_size", chunk_size)
  one_chunk = state.capacity in (own, None) and state.striping is None
  if chunk_size != own and not (one_chunk and chunk_size > own):
    raise ValueError(
      f"chunk_size is {chunk_size} but the state has chunks of {own}: leave it "
      "out, or capture the whole prompt again"
    )
  return chunk_size


def _next_room(
  state: PromptState, size: int, length, capacity: int | None, chunk_size: int
) -> int:
  """Tokens that an extended state has room for, in whole chunks.

  Raises:
    ValueError: nothing tells how many.
  """
  own = state.capacity
  if capacity is None:
    captured, added = concrete(state.length), concrete(length)
    captured = own if captured is None else int(captured)
    if captured is None:
      raise ValueError(
        "capacity is None, but the state has no pages and its length is "
        "traced: give a capacity"
      )
    capacity = captured + (size if added is None else int(added))
  wanted = max(capacity, own or 1)
  return wanted + -wanted % chunk_size


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


def _prompt_job(
  tokens, captured, choices, chunk_size: int, pages: str = "device"
) -> Job:
  """The walk over a prompt: nothing is scored."""
  return Job(
    tokens=tokens,
    targets=None,
    length=captured,
    start=jnp.int32(0),
    block=chunk_size,
    striping=Striping.of_mesh(chunk_size),
    choices=choices,
    pages=pages,
  )


def _run(
  model: Model,
  chunk_size,
  save_carries,
  pages,
  params,
  tokens,
  captured,
  choices,
):
  job = _prompt_job(tokens, captured, choices, chunk_size, pages)
  carry = tree_zeros(model.state_shapes(1)[1])
  walked = walk_forward(
    model, params, (), carry, job, save_carries=save_carries
  )
  return walked.rows, walked.carry, walked.saved_carries


def _run_on(
  model: Model, chunk_size, room, params, state, tokens, added, choices
):
  """_run of the longer prompt, gone on with behind the state's tokens."""
  fed = jnp.concatenate([state.last_token[None], tokens[:-1]])
  places = state.length + jnp.arange(fed.shape[0], dtype=jnp.int32)
  # Tokens before the state's length are never read; a chunk more, see Begun.
  whole = jnp.zeros(room + chunk_size, jnp.int32)
  whole = whole.at[places].set(fed, mode="drop")
  begun = Begun(
    length=state.length,
    rows=grow_rows(state.pages, room, state.striping),
    saved_carries=grow_saved(
      state.saved_carries, room // chunk_size, state.striping
    ),
  )
  walked = walk_forward(
    model,
    params,
    (),
    state.carry,
    _prompt_job(whole, state.length + added, choices, chunk_size),
    save_carries=state.differentiated,
    begun=begun,
  )
  return walked.rows, walked.carry, walked.saved_carries


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _extend(model, chunk_size, room, params, state, tokens, added, choices):
  choices = _longer_choices(state, choices, room + chunk_size)
  arrays = (params, state, tokens, added, choices)
  if state.differentiated:
    out = _not_differentiated(model, chunk_size, room, *arrays)
  else:
    out = _run_on(model, chunk_size, room, *lax.stop_gradient(arrays))
  return *out, jax.tree.map(lambda x: x[..., :room, :], choices)


def _longer_choices(state, choices, room: int):
  """The state's recorded choices with those of new tokens behind them."""

  def join(old, new):
    places = state.length + jnp.arange(new.shape[-2], dtype=jnp.int32)
    whole = tree_grown(old, -2, max(room, old.shape[-2]))[..., :room, :]
    return whole.at[..., places, :].set(new, mode="drop")

  return jax.tree.map(join, state.choices, choices)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1, 2))
def _not_differentiated(model, chunk_size, room, *arrays):
  return _run_on(model, chunk_size, room, *arrays)


@_not_differentiated.defjvp
def _refuse_to_differentiate(model, chunk_size, room, primals, tangents):
  del model, chunk_size, room, tangents
  _, state, *_ = primals
  raise ValueError(
    f"extend is not differentiated under grad_scope {state.grad_scope!r}: take "
    "the gradient by group_gradient(..., the whole prompt, state=extended), "
    "or capture the whole prompt inside the loss"
  )


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3))
def _capture(
  model, chunk_size, grad_scope, pages, params, tokens, captured, first, choices
):
  sizes = (model, chunk_size)
  if grad_scope in CONSTANT_SCOPES:
    arrays = (lax.stop_gradient(params), tokens, captured, choices)
    return _run(*sizes, False, pages, *arrays)
  return _differentiated(
    *sizes, pages, params, tokens, captured, first, choices
  )


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _differentiated(
  model, chunk_size, pages, params, tokens, captured, first, choices
):
  del first
  arrays = (params, tokens, captured, choices)
  return _run(model, chunk_size, True, pages, *arrays)


def _differentiated_fwd(
  model, chunk_size, pages, params, tokens, captured, first, choices
):
  if pages == "host":
    refuse_host_cotangent()
  arrays = (params, tokens, captured, choices)
  out = _run(model, chunk_size, True, pages, *arrays)
  rows, _, saved = out
  return out, (*arrays, first, rows, saved)


def _differentiated_bwd(model, chunk_size, pages, residuals, cotangents):
  del pages
  params, tokens, captured, choices, first, rows, saved = residuals
  page_grads, carry_grads, _ = cotangents
  sums, _ = walk_backward(
    model,
    params,
    (),
    _prompt_job(tokens, captured, choices, chunk_size),
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
  return Params(trainable=trainable, frozen=None), None, None, None, None


_differentiated.defvjp(_differentiated_fwd, _differentiated_bwd)


def reverse_walk(
  model: Model,
  params: Params,
  prompt: Int[Array, "P"],
  state: PromptState,
  page_grads: Tree,
  sums: Gradients,
) -> Gradients:
  """Pulls the cotangents of a prompt's pages and carry back to the weights.

  Args:
    model: the model.
    params: its parameters.
    prompt: the prompt that the state was captured from.
    state: captured with a differentiated scope.
    page_grads: accumulator of the pages, used up in place.
    sums: parameter gradients so far and the exit carry's cotangent.
  """
  number = state.capacity // state.chunk_size
  walked = reverse_chunks(
    model,
    params,
    prompt,
    state,
    page_grads,
    sums,
    first=state.first_chunk,
    stop=number,
  )
  return walked[0]


def reverse_chunks(
  model: Model,
  params: Params,
  prompt: Int[Array, "P"],
  state: PromptState,
  page_grads: Tree,
  sums: Gradients,
  *,
  first: Int[Array, ""] | int,
  stop: Int[Array, ""] | int,
) -> tuple[Gradients, Tree]:
  """reverse_walk over the chunks [first, stop), for walks in several parts.

  The parts are walked from the last to the first, each with what the one
  before returned; together they are reverse_walk, bit by bit.

  Args:
    model: the model.
    params: its parameters.
    prompt: as in reverse_walk.
    state: as in reverse_walk.
    page_grads: accumulator of the pages, used up in place.
    sums: parameter gradients so far and the cotangent of the carry behind
      chunk `stop` - 1.
    first: the first chunk to walk; may be traced.
    stop: the first chunk that has been walked; may be traced.

  Returns:
    The sums, with the cotangent of the carry before chunk `first`, and the
    accumulator.
  """
  check_prompt_of(state, prompt)
  tokens = padded(prompt, state.capacity)
  until = jnp.asarray(stop, jnp.int32) * state.chunk_size
  length = jnp.minimum(state.length, until)
  return walk_backward(
    model,
    params,
    (),
    _prompt_job(tokens, length, state.choices, state.chunk_size),
    state.pages,
    state.saved_carries,
    None,
    page_grads,
    sums,
    first_block=first,
  )
