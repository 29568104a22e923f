"""Softmax attention over all filled rows of a segment."""

import functools

import jax
from jax import lax
from jax.ad_checkpoint import checkpoint_name
import jax.numpy as jnp
from jaxtyping import Array, Float

from longstraw_jax.ops.members import (
  fold_members,
  one_gradient_for_members,
  unfold_members,
)
from longstraw_jax.ops.pages.own import normalise
from longstraw_jax.ops.pages.segment import (
  EMPTY_LSE,
  PAGE_ATTENTION,
  Place,
  Segment,
  add_block,
  block_trips,
  hand_on,
  read_slots,
)
from longstraw_jax.ops.pages.striping import (
  join_owners,
  on_owners,
  row_specs,
  sum_owners,
)
from longstraw_jax.ops.precision import wide_einsum, widen
from longstraw_jax.ops.token_sharding import (
  member_specs,
  members_divide,
  reduce_scatter_tokens,
  sum_members,
  token_specs,
)
from longstraw_jax.sharding import WHOLE


def _split_heads(q_TNH, num_kv_heads: int):
  """[T, N, H] -> [K, G T, H]: the query heads of one kv head side by side."""
  tokens, num_heads, width = q_TNH.shape
  q = q_TNH.reshape(tokens, num_kv_heads, num_heads // num_kv_heads, width)
  return q.transpose(1, 2, 0, 3).reshape(num_kv_heads, -1, width)


def _join_heads(x, tokens: int):
  """[K, G T, ...] -> [T, N, ...], the inverse of _split_heads."""
  kv_heads, rows = x.shape[:2]
  x = x.reshape(kv_heads, rows // tokens, tokens, *x.shape[2:])
  x = jnp.moveaxis(x, 2, 0)
  return x.reshape(tokens, kv_heads * (rows // tokens), *x.shape[3:])


def _attend_forward(size, dtype, q_TNH, rows, place):
  q_TNH = q_TNH.astype(dtype)
  specs = (WHOLE, row_specs(rows), WHOLE)
  call = functools.partial(_attend_part, size)
  dealt = token_specs(q_TNH.shape[0])
  return on_owners(place.striping, call, specs, dealt)(q_TNH, rows, place)


def _attend_part(size, q_TNH, rows, place):
  """All of the rows, or an owner's part of them and what the others add."""
  tokens, num_heads, width = q_TNH.shape
  kv_heads, value_width = rows["v"].shape[1], rows["v"].shape[-1]
  q = _split_heads(q_TNH, kv_heads)

  def body(index, carry):
    o, top, total = carry
    block, _, filled, _ = read_slots(rows, place, index, size)
    scores = wide_einsum("kth,ksh->kts", q, block["k"]) * width**-0.5
    scores = jnp.where(filled, scores, EMPTY_LSE)
    new_top = jnp.maximum(top, scores.max(-1))
    weights = jnp.where(filled, jnp.exp(scores - new_top[..., None]), 0.0)
    shrink = jnp.exp(top - new_top)
    narrow = weights.astype(block["v"].dtype)
    values = wide_einsum("kts,ksh->kth", narrow, block["v"])
    o = o * shrink[..., None] + values
    # Of the rounded weights: what all values have in common is then exact.
    return o, new_top, total * shrink + widen(narrow).sum(-1)

  wide = widen(q).dtype
  shape = (kv_heads, tokens * (num_heads // kv_heads))
  carry = (
    jnp.zeros((*shape, value_width), wide),
    jnp.full(shape, EMPTY_LSE, wide),
    jnp.zeros(shape, wide),
  )
  o, top, total = lax.fori_loop(0, block_trips(place, size), body, carry)
  o, top, total = (_join_heads(x, tokens) for x in (o, top, total))
  if place.striping is not None:
    o, top, total = join_owners(o, top, total)
  return normalise(o, top, total)


def _attend_backward(size, folded, saved, cotangents, rows, place, tap):
  q_TNH, o_TNH, lse_TN = saved
  do_TNH, dlse_TN = cotangents
  do_TNH = do_TNH.astype(q_TNH.dtype)
  # Before owners get all queries: the wide o stays where it is.
  delta_TN = (widen(do_TNH) * o_TNH).sum(-1) - dlse_TN
  queries = (q_TNH, do_TNH, lse_TN, delta_TN, dlse_TN)
  call = functools.partial(_attend_backward_part, size, folded)
  return on_owners(
    place.striping,
    call,
    (member_specs(folded), row_specs(rows), WHOLE, row_specs(tap)),
    (token_specs(q_TNH.shape[0], folded), row_specs(tap)),
  )(queries, rows, place, tap)


def _attend_backward_part(size, folded, queries, rows, place, tap):
  """FlashAttention's backward pass (Dao, 2307.08691, algorithm 2).

  Cotangents of a query's scores sum to that of its log-sum-exp, so a vector
  common to all keys adds nothing to dq. Rounded ones do not, and such a vector
  may be far longer than what tells keys apart: what the sum has too much is
  taken back, times the query's mean key, at the price of one more product.
  """
  q_TNH, do_TNH, lse_TN, delta_TN, dlse_TN = queries
  tokens, _, width = q_TNH.shape
  kv_heads = rows["v"].shape[1]
  scale = width**-0.5
  q = _split_heads(q_TNH, kv_heads)
  do = _split_heads(do_TNH, kv_heads)
  lse = _split_heads(lse_TN[..., None], kv_heads)
  delta = _split_heads(delta_TN[..., None], kv_heads)
  rounds = q.dtype != widen(q).dtype

  def body(index, carry):
    dq, tap, mean_key, excess = carry
    block, _, filled, offset = read_slots(rows, place, index, size)
    scores = wide_einsum("kth,ksh->kts", q, block["k"]) * scale
    weights = jnp.where(filled, jnp.exp(scores - lse), 0.0)
    dweights = wide_einsum("kth,ksh->kts", do, block["v"])
    dscores = (weights * (dweights - delta) * scale).astype(q.dtype)
    dq = dq + wide_einsum("kts,ksh->kth", dscores, block["k"])
    narrow = weights.astype(q.dtype)
    if rounds:
      mean_key = mean_key + wide_einsum("kts,ksh->kth", narrow, block["k"])
      excess = excess + widen(dscores).sum(-1)
    if tap is not None:
      # XLA:CPU multiplies into [H, S] several times faster than into [S, H].
      dk = wide_einsum("kth,kts->khs", q, dscores).swapaxes(1, 2)
      dv = wide_einsum("kth,kts->khs", do, narrow).swapaxes(1, 2)
      if folded and place.striping is not None:
        dk, dv = sum_members((dk, dv))
      tap = tap | {
        "k": add_block(tap["k"], place.layer, offset, dk),
        "v": add_block(tap["v"], place.layer, offset, dv),
      }
    return dq, tap, mean_key, excess

  dq = jnp.zeros(q.shape, widen(q).dtype)
  carry = (dq, tap, dq if rounds else None, dq[..., 0] if rounds else None)
  carry = lax.fori_loop(0, block_trips(place, size), body, carry)
  dq, tap, mean_key, excess = carry
  if rounds:
    if place.striping is not None:
      excess = sum_owners(excess)
    excess = _join_heads(excess, tokens) - scale * dlse_TN
    mean_key = _join_heads(mean_key, tokens)
  dq = _join_heads(dq, tokens)
  if rounds:
    dq = dq - excess[..., None] * mean_key
  if place.striping is not None:
    dq = reduce_scatter_tokens(dq)
  return dq, tap


@functools.cache
def _attend_backward_members(size: int, folded: bool = False):
  """The backward pass, in which members that share the rows share the tap."""

  def apart(own, shared):
    return _attend_backward(size, folded, *own, *shared)

  def together(members, own, shared):
    # Members that share the rows are only more queries over them.
    call = _attend_backward_members(size, members_divide(members))
    dq, tap = call(None, fold_members(own), shared)
    return unfold_members(dq, members), tap

  return one_gradient_for_members(apart, together)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _attend(size, dtype, q_TNH, rows, place, tap):
  tap = hand_on(place, (q_TNH, rows), tap)
  return _attend_forward(size, dtype, q_TNH, rows, place), tap


def _attend_fwd(size, dtype, q_TNH, rows, place, tap):
  o, lse = _attend_forward(size, dtype, q_TNH, rows, place)
  o, lse = checkpoint_name((o, lse), PAGE_ATTENTION)
  tap = hand_on(place, (q_TNH, rows), tap)
  return ((o, lse), tap), (q_TNH.astype(dtype), o, lse, rows, place)


def _attend_bwd(size, dtype, residuals, cotangents):
  del dtype
  q_TNH, o, lse, rows, place = residuals
  (do, dlse), dtap = cotangents
  own = (q_TNH, o, lse), (do, dlse)
  dq, dtap = _attend_backward_members(size)(
    place.member, own, (rows, place.unnumbered, dtap)
  )
  return dq, None, None, dtap


_attend.defvjp(_attend_fwd, _attend_bwd)


def attend(
  q_TNH: Float[Array, "T N H"],
  segment: Segment,
  size: int,
  dtype: str | None = None,
) -> tuple[tuple[Float[Array, "T N H"], Float[Array, "T N"]], dict | None]:
  """Softmax attention of T queries over every filled row of a segment.

  Reads rows "k" [L, K, S, H] and "v" [L, K, S, Hv] in blocks of `size` with a
  dynamic trip count: one program serves every filled length. All filled rows
  are visible, so the segment must lie before the queries.

  Where devices share the rows, these stay where they are: every device attends
  to its own. An all-reduce of T N maxima and a reduce-scatter of T N (Hv + 1)
  outputs with their normalisers join the parts forward, a reduce-scatter of
  T N H cotangents of the queries backward, all in float32 or wider: each device
  then has its share of the tokens. Where the devices do not divide T, they are
  all-reduces.

  Args:
    q_TNH: queries, unscaled; N is a multiple of the K key/value heads.
    segment: the rows to attend to.
    size: rows read at once.
    dtype: what queries are rounded to for products; their own by default.
      Queries that several segments read are best given in float32, so that
      their gradients are summed before they are rounded.

  Returns:
    ((o, lse), tap): outputs [T, N, Hv] and log-sum-exp [T, N] in float32 or
    wider, and the tap as handed on. An empty segment gives o = 0 and
    lse = EMPTY_LSE.
  """
  rows = {"k": segment.rows["k"], "v": segment.rows["v"]}
  size = segment.block_size(size)
  dtype = jnp.dtype(dtype or q_TNH.dtype)
  place, tap = Place.of(segment), segment.tap
  return _attend(size, dtype, widen(q_TNH), rows, place, tap)
