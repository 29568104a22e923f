"""Attention of every query to the few keys that were selected for it."""

import functools

import jax
from jax import lax
from jax.ad_checkpoint import checkpoint_name
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from longstraw_jax.ops.pages import PAGE_ATTENTION, Segment, gather_rows
from longstraw_jax.ops.precision import wide_einsum


def sparse_attention(
  q_TNH: Float[Array, "T N H"],
  rows_TH: Float[Array, "T H"],
  positions_T: Int[Array, "T"],
  keys_TA: Int[Array, "T A"],
  segments: tuple[Segment, ...],
  *,
  name: str,
  value_dim: int,
  query_block: int,
) -> tuple[Float[Array, "T N Hv"], tuple[dict | None, ...]]:
  """Softmax attention to selected rows, which are keys and values at once.

  A row is a key over its whole width and a value over its first `value_dim`
  dims. The selected rows are gathered for `query_block` queries at a time,
  from the call itself and from every segment.

  Args:
    q_TNH: queries, scaled.
    rows_TH: this call's own rows.
    positions_T: consecutive positions of this call.
    keys_TA: positions that each query attends to, its own or earlier ones;
      negative ones are left out.
    segments: pages before the call.
    name: of the rows that are read, [L, S, H].
    value_dim: width of a value.
    query_block: queries handled at once.

  Returns:
    Outputs in float32 or wider, and the tap of every segment as handed on.
  """
  tokens = q_TNH.shape[0]
  start = positions_T[0]
  size = min(query_block, tokens)
  padding = -tokens % size
  blocks = lambda x, fill: jnp.pad(
    x, ((0, padding),) + ((0, 0),) * (x.ndim - 1), constant_values=fill
  ).reshape(-1, size, *x.shape[1:])

  policy = jax.checkpoint_policies.save_only_these_names(PAGE_ATTENTION)

  @functools.partial(jax.checkpoint, policy=policy, prevent_cse=False)
  def block(taps, inputs):
    q, keys = inputs
    slots = keys - start
    visible = (slots >= 0) & (slots < tokens)
    slots = jnp.where(visible, slots, tokens)
    rows = rows_TH.at[slots].get(mode="fill", fill_value=0)
    out = []
    for segment, tap in zip(segments, taps, strict=True):
      (taken, inside), tap = gather_rows(
        segment.replace(tap=tap), keys, (name,)
      )
      # A position lies in one place only; elsewhere it gives zeros.
      rows, visible = rows + taken[name], visible | inside
      out.append(tap)
    scores = wide_einsum("qnh,qah->qna", q, rows)
    scores = jnp.where(visible[:, None], scores, -jnp.inf)
    # A padding query sees nothing; softmax would be NaN, in gradients too.
    seen = visible.any(1)[:, None, None]
    weights = jax.nn.softmax(jnp.where(seen, scores, 0.0))
    weights = jnp.where(visible[:, None], weights, 0.0).astype(rows.dtype)
    o = wide_einsum("qna,qah->qnh", weights, rows[..., :value_dim])
    return tuple(out), checkpoint_name(o, PAGE_ATTENTION)

  taps = tuple(segment.tap for segment in segments)
  taps, o = lax.scan(block, taps, (blocks(q_TNH, 0), blocks(keys_TA, -1)))
  return o.reshape(-1, *o.shape[2:])[:tokens], taps
