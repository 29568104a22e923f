"""Sampling a group of responses from one prompt's state."""

import functools
import operator

from flax import struct
import jax
from jax import lax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from longstraw_jax.checks import (
  check_chunk_size,
  check_one_prompt,
  check_weights,
)
from longstraw_jax.models.model import Model, Params
from longstraw_jax.ops.pages import Striping
from longstraw_jax.ops.precision import wide_dtype
from longstraw_jax.replay import prompt_pages
from longstraw_jax.sharding import member_vmap, num_shards
from longstraw_jax.staleness import check_fresh
from longstraw_jax.state import Pages, PromptState, append_row
from longstraw_jax.types import Group, Span, Tree


@struct.dataclass
class _Decoding:
  """Members decoded so far; G leads everywhere but in `token`."""

  token: Int[Array, ""]
  responses: Int[Array, "G R"]
  logprobs: Float[Array, "G R"]
  sampling_logprobs: Float[Array, "G R"]
  lengths: Int[Array, "G"]
  done: Bool[Array, "G"]
  rows: Tree
  carry: Tree
  choices: Tree | None


def sampling_logits(
  logits_V: Float[Array, "V"], temperature: float, top_k: int, top_p: float
) -> Float[Array, "V"]:
  """Logits of the sampling distribution, -inf where it has no mass.

  Temperature first, then the top_k largest (0: all), then the smallest set of
  the most likely ids whose mass reaches top_p (nucleus sampling, Holtzman et
  al., 1904.09751). temperature 0 leaves the first largest logit alone.
  """
  if temperature == 0:
    best = jnp.arange(logits_V.shape[-1]) == jnp.argmax(logits_V)
    return jnp.where(best, 0.0, -jnp.inf)
  logits_V = logits_V / temperature
  if 0 < top_k < logits_V.shape[-1]:
    cut = lax.top_k(logits_V, top_k)[0][-1]
    logits_V = jnp.where(logits_V >= cut, logits_V, -jnp.inf)
  if top_p < 1:
    order = jnp.argsort(-logits_V)
    mass = jax.nn.softmax(logits_V[order])
    kept = jnp.cumsum(mass) - mass < top_p
    kept = jnp.zeros_like(kept).at[order].set(kept)
    logits_V = jnp.where(kept, logits_V, -jnp.inf)
  return logits_V


def rollout(
  model: Model,
  params: Params,
  state: PromptState,
  key: jax.Array,
  *,
  group_size: int,
  max_tokens: int,
  temperature: float = 1.0,
  top_k: int = 0,
  top_p: float = 1.0,
  stop_ids: tuple[int, ...] = (),
  record_choices: bool = False,
  allow_stale: bool = False,
) -> Group:
  """Samples `group_size` responses, all members decoding together.

  The prompt's pages exist once. A response ends with the first stop id, which
  belongs to it, or after max_tokens. Member g's randomness depends on key and
  g alone.

  Args:
    model: the model.
    params: the parameters that made the state.
    state: of the prompt.
    key: a typed key.
    group_size: members.
    max_tokens: room of every response.
    temperature: 0 is greedy.
    top_k: sample among so many ids; 0 means all.
    top_p: sample from the smallest set with this mass.
    stop_ids: ids that end a response.
    record_choices: keep the experts and keys chosen for every token, as the
      group's `choices`.
    allow_stale: no warning of a constant state of other weights.

  Returns:
    A group whose rewards and advantages are missing (None). `old_logprobs` are
    those of the tempered policy over the whole vocabulary, which is the one
    that is trained (Group.temperature); `sampling_logprobs` those of the
    distribution sampled from. They differ where top_k or top_p cut it, and for
    greedy responses.

  Raises:
    ValueError: sizes below 1, temperature below 0, top_p outside (0, 1], a stop
      id outside the vocabulary, a state of other weights that passes a gradient
      on.
  """
  check_one_prompt(state)
  check_weights(model.config, params.merged())
  check_fresh(params, state, allow_stale, scores_only=True)
  check_chunk_size("group_size", group_size)
  check_chunk_size("max_tokens", max_tokens)
  if not 0 <= temperature < float("inf"):
    raise ValueError(f"temperature is {temperature}: use 0 or more")
  if not 0 < top_p <= 1:
    raise ValueError(f"top_p is {top_p}: use a share in (0, 1]")
  if top_k < 0:
    raise ValueError(f"top_k is {top_k}: use 0 (all ids) or more")
  stop_ids = tuple(operator.index(i) for i in stop_ids)
  for i in stop_ids:
    if not 0 <= i < model.config.vocab_size:
      raise ValueError(
        f"stop_ids are {stop_ids}: {i} is no id of a vocabulary of "
        f"{model.config.vocab_size}"
      )
  sampling = (float(temperature), int(top_k), float(top_p))
  return _rollout(
    model,
    group_size,
    max_tokens,
    sampling,
    stop_ids,
    record_choices,
    params,
    state,
    key,
  )


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3, 4, 5))
def _rollout(
  model,
  group_size,
  max_tokens,
  sampling,
  stop_ids,
  record_choices,
  params,
  state,
  key,
):
  priors = prompt_pages(state, None)
  # Token t of every member has its rows on device t mod shards.
  shards = num_shards("rows")
  striping = Striping.of_mesh(chunk=shards)
  temperature = sampling[0]
  scored_temperature = None if temperature in (0, 1) else temperature
  keys = jax.vmap(functools.partial(jax.random.fold_in, key))(
    jnp.arange(group_size)
  )

  def member(key, token, input_id, rows, carry):
    span = Span(positions=(state.length + token)[None], length=jnp.int32(1))
    own = Pages(
      rows=rows,
      taps=None,
      length=token,
      start=state.length,
      striping=striping,
    )
    out = model.hidden(params, input_id[None], span, (*priors, own), carry)
    logits = model.logits(params, out.x_TD)[0]
    tempered = sampling_logits(logits, *sampling)
    sampled = jax.random.categorical(jax.random.fold_in(key, token), tempered)
    policy = logits
    if scored_temperature is not None:
      policy = logits / scored_temperature
    scores = (jax.nn.log_softmax(x)[sampled] for x in (policy, tempered))
    rows = append_row(rows, out.rows, token, striping)
    choices = out.choices if record_choices else None
    return sampled, *scores, rows, out.carry, choices

  decode = member_vmap(member, group_size, in_axes=(0, None, 0, 0, 0))

  def body(d: _Decoding) -> _Decoding:
    before = d.responses[:, jnp.maximum(d.token - 1, 0)]
    inputs = jnp.where(d.token == 0, state.last_token, before)
    sampled, logprob, sampling_logprob, rows, carry, choices = decode(
      keys, d.token, inputs, d.rows, d.carry
    )
    put = lambda x, new: x.at[:, d.token].set(
      jnp.where(d.done, 0, new.astype(x.dtype))
    )
    stops = jnp.isin(sampled, jnp.asarray(stop_ids, jnp.int32))
    return _Decoding(
      token=d.token + 1,
      responses=put(d.responses, sampled),
      logprobs=put(d.logprobs, logprob),
      sampling_logprobs=put(d.sampling_logprobs, sampling_logprob),
      lengths=d.lengths + ~d.done,
      done=d.done | stops,
      rows=rows,
      carry=carry,
      choices=jax.tree.map(
        lambda x, new: lax.dynamic_update_slice_in_dim(x, new, d.token, 2),
        d.choices,
        choices,
      ),
    )

  spread = lambda x: jnp.broadcast_to(x, (group_size, *x.shape))
  blank = jnp.zeros((group_size, max_tokens), wide_dtype(model.config.dtype))
  row_shapes, _ = model.state_shapes(max_tokens + -max_tokens % shards)
  rows = jax.tree.map(
    lambda x: jnp.zeros((group_size, *x.shape), x.dtype), row_shapes
  )
  carry = jax.tree.map(spread, lax.stop_gradient(state.carry))
  token = jnp.int32(0)
  inputs = spread(state.last_token)
  chosen = jax.eval_shape(decode, keys, token, inputs, rows, carry)[-1]
  start = _Decoding(
    token=token,
    responses=jnp.zeros((group_size, max_tokens), jnp.int32),
    logprobs=blank,
    sampling_logprobs=blank,
    lengths=jnp.zeros(group_size, jnp.int32),
    done=jnp.zeros(group_size, bool),
    rows=rows,
    carry=carry,
    choices=jax.tree.map(
      lambda x: jnp.zeros((*x.shape[:2], max_tokens, *x.shape[3:]), x.dtype),
      chosen,
    ),
  )
  going = lambda d: (d.token < max_tokens) & ~d.done.all()
  out = lax.while_loop(going, body, start)
  return Group.create(
    out.responses,
    out.lengths,
    old_logprobs=out.logprobs,
    sampling_logprobs=out.sampling_logprobs,
    prompt_id=state.prompt_id,
    choices=out.choices,
    temperature=scored_temperature,
  )
