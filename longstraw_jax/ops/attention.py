"""Causal attention of a call's tokens over themselves and over pages."""

import functools

import jax
from jax import lax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from longstraw_jax.ops.pages import (
  EMPTY_LSE,
  PAGE_ATTENTION,
  Segment,
  attend,
  merge,
  open_rows,
  read_block,
)
from longstraw_jax.ops.precision import rounded_einsum, widen
from longstraw_jax.sharding import (
  MESH_AXES,
  WHOLE,
  num_shards,
  per_device,
  spec,
)


def masked_attention(
  q_TNH: Float[Array, "T N H"],
  k_KSH: Float[Array, "K S H"],
  v_KSH: Float[Array, "K S Hv"],
  attn_mask: Bool[Array, "T S"],
  dtype: str | None = None,
) -> tuple[Float[Array, "T N Hv"], Float[Array, "T N"]]:
  """Softmax attention under an explicit mask, all scores at once.

  Query head n reads key/value head n // (N / K), scale H^-0.5, softmax in
  float32 or wider. A row that may attend to nothing gives o = 0 and
  lse = EMPTY_LSE, and no NaN in its gradient. dtype is as in attend.

  Returns:
    Normalised outputs and log-sum-exp, float32 or wider.
  """
  tokens, num_heads, width = q_TNH.shape
  kv_heads = k_KSH.shape[0]
  dtype = dtype or q_TNH.dtype
  q = widen(q_TNH).reshape(tokens, kv_heads, num_heads // kv_heads, width)
  scores = rounded_einsum("tkgh,ksh->tkgs", dtype, q, k_KSH) * width**-0.5
  mask = attn_mask[:, None, None, :]
  scores = jnp.where(mask, scores, EMPTY_LSE)
  top = lax.stop_gradient(scores.max(-1, keepdims=True))
  weights = jnp.where(mask, jnp.exp(scores - top), 0.0)
  total = weights.sum(-1)
  empty = total == 0
  total = jnp.where(empty, 1.0, total)
  # Normalised before the product: a lone key's cotangent is then exactly 0.
  weights = weights / total[..., None]
  o = rounded_einsum("tkgs,ksh->tkgh", v_KSH.dtype, weights, v_KSH)
  lse = jnp.where(empty, EMPTY_LSE, top[..., 0] + jnp.log(total))
  return (
    o.reshape(tokens, num_heads, -1),
    lse.reshape(tokens, num_heads),
  )


def causal_attention(
  q_TNH: Float[Array, "T N H"],
  k_KTH: Float[Array, "K T H"],
  v_KTH: Float[Array, "K T Hv"],
  segments: tuple[Segment, ...],
  *,
  query_block: int,
  read_block_size: int,
) -> tuple[Float[Array, "T N Hv"], tuple[dict | None, ...]]:
  """Attention of T consecutive tokens over segments before them and themselves.

  Scores exist for `query_block` queries at a time and blocks above the
  diagonal are skipped. Padding stands behind the real tokens, where causality
  already hides it.

  Returns:
    Outputs in float32 or wider, and the tap of every segment as handed on.
  """
  # Wide, so that what common parts of the keys add to one part's gradient and
  # take from another's is not rounded before it cancels.
  dtype, q_TNH = q_TNH.dtype, widen(q_TNH)
  parts, taps = [], []
  for segment in segments:
    part, tap = attend(q_TNH, segment, read_block_size, dtype)
    parts.append(part)
    taps.append(tap)
  tokens = q_TNH.shape[0]
  if tokens <= query_block:
    mask = jnp.tril(jnp.ones((tokens, tokens), bool))
    own = masked_attention(q_TNH, k_KTH, v_KTH, mask, dtype)
  else:
    sizes = (query_block, read_block_size)
    own = _own_attention(q_TNH, k_KTH, v_KTH, *sizes, dtype)
  return merge([*parts, own]), tuple(taps)


def _own_attention(q_TNH, k_KTH, v_KTH, query_block, read_block_size, dtype):
  """Causal attention within a call; on a mesh every device has its queries."""
  tokens = q_TNH.shape[0]
  shards = num_shards("tokens")
  share = tokens // shards
  size = min(query_block, share)
  if shards == 1 or tokens % shards or share % size:
    sizes = (query_block, read_block_size)
    return _own_part(0, q_TNH, k_KTH, v_KTH, *sizes, dtype)

  def part(q_TNH, k_KTH, v_KTH):
    first = lax.axis_index(MESH_AXES["tokens"]) * share
    return _own_part(first, q_TNH, k_KTH, v_KTH, size, read_block_size, dtype)

  dealt = spec("tokens")
  call = per_device(part, (dealt, WHOLE, WHOLE), (dealt, dealt))
  return call(q_TNH, k_KTH, v_KTH)


def _own_part(first, q_TNH, k_KTH, v_KTH, query_block, read_block_size, dtype):
  """Blocks of queries over the rows before them and over their own block.

  The queries are those from token `first` on, a multiple of query_block.
  """
  tokens, num_heads, width = q_TNH.shape
  padding = -tokens % query_block
  pad = lambda x, axis: jnp.pad(
    x, [(0, padding if i == axis else 0) for i in range(x.ndim)]
  )
  q = pad(q_TNH, 0).reshape(-1, query_block, num_heads, width)
  rows = {"k": pad(k_KTH, 1), "v": pad(v_KTH, 1)}
  segment = open_rows(rows, length=rows["k"].shape[1], start=0)
  mask = jnp.tril(jnp.ones((query_block, query_block), bool))

  policy = jax.checkpoint_policies.save_only_these_names(PAGE_ATTENTION)

  @functools.partial(jax.checkpoint, policy=policy, prevent_cse=False)
  def block(tap, inputs):
    index, q = inputs
    (diagonal, _, _), tap = read_block(
      segment.replace(tap=tap), index, query_block
    )
    before = segment.replace(tap=tap, length=index * query_block)
    prefix, tap = attend(q, before, read_block_size, dtype)
    own = masked_attention(q, diagonal["k"], diagonal["v"], mask, dtype)
    top = jnp.maximum(prefix[1], own[1])
    lse = top + jnp.log(jnp.exp(prefix[1] - top) + jnp.exp(own[1] - top))
    return tap, (merge([prefix, own]), lse)

  indices = first // query_block + jnp.arange(q.shape[0], dtype=jnp.int32)
  _, (o, lse) = lax.scan(block, segment.tap, (indices, q))
  flat = lambda x: x.reshape(-1, *x.shape[2:])[:tokens]
  return flat(o), flat(lse)
