"""Softmax attention of every query to rows that were chosen for it alone."""

import functools
from typing import NamedTuple

import jax
from jax import lax
from jax.ad_checkpoint import checkpoint_name
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from longstraw_jax.ops.members import (
  fold_members,
  one_gradient_for_members,
  unfold_members,
)
from longstraw_jax.ops.pages.own import merge, normalise
from longstraw_jax.ops.pages.segment import (
  EMPTY_LSE,
  NO_SLOT,
  PAGE_ATTENTION,
  Place,
  Segment,
  add_block,
  hand_on,
)
from longstraw_jax.ops.pages.stored import expand
from longstraw_jax.ops.pages.striping import (
  join_owners,
  num_owners,
  on_owners,
  row_specs,
  sum_owners,
)
from longstraw_jax.ops.precision import wide_einsum, widen
from longstraw_jax.ops.token_sharding import (
  all_gather_tokens,
  reduce_scatter_tokens,
  token_specs,
)
from longstraw_jax.sharding import WHOLE, num_shards, per_device
from longstraw_jax.types import Tree

# A query's list of rows is read in at least so many pieces: who holds few of
# them, as one of several owners does, then reads few pieces.
_PIECES = 8
# Queries of all devices that owners of rows have at once.
_TOGETHER = 512


class _Sizes(NamedTuple):
  """Static: width of a value, and queries at once."""

  value_dim: int
  queries: int


def _blocks(queries: tuple, size: int) -> tuple:
  """(..., keys), [T, ...] each, as [blocks, size, ...].

  They are padded with queries that attend to nothing.
  """

  def split(x, fill=0):
    padding = ((0, -x.shape[0] % size),) + ((0, 0),) * (x.ndim - 1)
    x = jnp.pad(x, padding, constant_values=fill)
    return x.reshape(-1, size, *x.shape[1:])

  *arrays, keys_TA = queries
  return (*map(split, arrays), split(keys_TA, -1))


def _joined(tree: Tree, tokens: int) -> Tree:
  """[blocks, size, ...] as [tokens, ...]."""
  return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:])[:tokens], tree)


def _held_slots(place: Place, keys_QA):
  """Where the buffer at hand holds the keys: in order, the others behind them.

  Returns:
    [Q, pieces * size] slots, how many pieces hold one of any query, and their
    size.
  """
  shards = place.striping.shards if place.striping else 1
  size = -(-keys_QA.shape[1] // max(_PIECES, shards))
  slots, inside = place.slot_of(keys_QA - place.start)
  padding = ((0, 0), (0, -slots.shape[1] % size))
  slots = jnp.sort(jnp.pad(slots, padding, constant_values=NO_SLOT), axis=1)
  longest = inside.sum(1, dtype=jnp.int32).max()
  return slots, lax.div(longest + (size - 1), jnp.int32(size)), size


def _read_piece(place: Place, rows: Tree, slots, index, size: int):
  """Piece `index` of the rows, [Q, B, H], and its slots."""
  at = lax.dynamic_slice_in_dim(slots, index * size, size, 1)
  take = lambda x: x.at[place.layer, at].get(mode="fill", fill_value=0)
  return expand(jax.tree.map(take, rows), place.dtype), at


def _scores(q_QNH, rows_QBH, slots_QB):
  """[Q, N, B], EMPTY_LSE where there is no row, and where there is one."""
  held = (slots_QB < NO_SLOT)[:, None]
  scores = wide_einsum("qnh,qbh->qnb", q_QNH, rows_QBH)
  return jnp.where(held, scores, EMPTY_LSE), held


def _alone(place: Place) -> bool:
  """Whether there are no other devices to share the work with."""
  return place.striping is None and num_shards("tokens") == 1


def _one_layer(rows: Tree, place: Place) -> tuple[Tree, Place]:
  """The rows of the layer alone, so that no others go to every device."""
  cut = lambda x: lax.dynamic_slice_in_dim(x, place.layer, 1)
  return jax.tree.map(cut, rows), place.replace(layer=jnp.int32(0))


def _forward(sizes: _Sizes, queries, rows, place):
  """Of (q, keys): outputs and log-sum-exp."""
  if _alone(place):
    return normalise(*_forward_part(sizes, queries, rows, place))
  tokens = token_specs(queries[0].shape[0])
  call = functools.partial(_forward_dealt, sizes, tokens != WHOLE)
  if place.striping is None:
    rows, place = _one_layer(rows, place)
    call = per_device(call, (tokens, WHOLE, WHOLE), tokens)
  else:
    specs = (tokens, row_specs(rows), WHOLE)
    call = on_owners(place.striping, call, specs, tokens)
  return call(queries, rows, place)


def _forward_dealt(sizes: _Sizes, dealt: bool, queries, rows, place):
  """Of a device's share of the queries; owners of rows work on all of them."""

  def together(queries):
    if dealt:
      queries = all_gather_tokens(queries)
    return join_owners(*_forward_part(sizes, queries, rows, place))

  if place.striping is None:
    parts = _forward_part(sizes, queries, rows, place)
  elif dealt:
    blocks = _blocks(queries, _share_together(queries))
    parts = _joined(lax.map(together, blocks), queries[0].shape[0])
  else:
    parts = together(queries)
  return normalise(*parts)


def _share_together(queries: tuple) -> int:
  """Queries of its share that a device hands to the owners at once."""
  return min(-(-_TOGETHER // num_owners()), queries[0].shape[0])


def _forward_part(sizes: _Sizes, queries, rows, place):
  """Sums over the rows at hand: outputs, highest scores and normalisers."""

  def block(queries):
    q, keys = queries
    slots, trips, size = _held_slots(place, keys)

    def body(index, carry):
      o, top, total = carry
      row, at = _read_piece(place, rows, slots, index, size)
      scores, held = _scores(q, row, at)
      new_top = jnp.maximum(top, scores.max(-1))
      weights = jnp.where(held, jnp.exp(scores - new_top[..., None]), 0.0)
      shrink = jnp.exp(top - new_top)
      narrow = weights.astype(row.dtype)
      value = row[..., : sizes.value_dim]
      o = o * shrink[..., None] + wide_einsum("qnb,qbh->qnh", narrow, value)
      # Of the rounded weights, as in attend.
      return o, new_top, total * shrink + widen(narrow).sum(-1)

    wide, shape = widen(q).dtype, q.shape[:2]
    carry = (
      jnp.zeros((*shape, sizes.value_dim), wide),
      jnp.full(shape, EMPTY_LSE, wide),
      jnp.zeros(shape, wide),
    )
    return lax.fori_loop(0, trips, body, carry)

  parts = lax.map(block, _blocks(queries, sizes.queries))
  return _joined(parts, queries[0].shape[0])


def _backward(sizes: _Sizes, queries, rows, place, tap):
  """Of (q, do, log-sum-exp, do . o, keys): _backward_part's sums, the tap."""
  call = _backward_part
  if not _alone(place):
    call = _backward_dealt if place.striping is None else _backward_owners
  return call(sizes, queries, rows, place, tap)


def _backward_owners(sizes: _Sizes, queries, rows, place, tap):
  """Of rows with owners, who get the queries of all devices."""
  tokens = token_specs(queries[0].shape[0])

  def part(queries, rows, place, tap):
    def together(tap, queries):
      if tokens != WHOLE:
        queries = all_gather_tokens(queries)
      dq, tap = _backward_part(sizes, queries, rows, place, tap)
      return tap, reduce_scatter_tokens(dq)

    if tokens == WHOLE:
      tap, dq = together(tap, queries)
      return dq, tap
    blocks = _blocks(queries, _share_together(queries))
    tap, dq = lax.scan(together, tap, blocks)
    return _joined(dq, queries[0].shape[0]), tap

  specs = (tokens, row_specs(rows), WHOLE, row_specs(tap))
  call = on_owners(place.striping, part, specs, (tokens, row_specs(tap)))
  return call(queries, rows, place, tap)


def _backward_dealt(sizes: _Sizes, queries, rows, place, tap):
  """Of rows that every device holds: each has its queries, and one layer."""
  tokens, layer = token_specs(queries[0].shape[0]), place.layer

  def part(queries, rows, place):
    own = None
    if tap is not None:
      own = jnp.zeros((1, *tap.shape[1:]), tap.dtype)
    dq_TNH, own = _backward_part(sizes, queries, rows, place, own)
    return dq_TNH, own if tokens == WHOLE else sum_owners(own)

  call = per_device(part, (tokens, WHOLE, WHOLE), (tokens, WHOLE))
  dq_TNH, own = call(queries, *_one_layer(rows, place))
  if tap is not None:
    tap = add_block(tap, layer, 0, own[0])
  return dq_TNH, tap


def _backward_part(sizes: _Sizes, queries, rows, place, tap):
  """FlashAttention's backward pass (Dao, 2307.08691, algorithm 2).

  Returns:
    Sums over the rows at hand, [T, N, ...], and the tap: the gradient of q, and
    where scores' cotangents are rounded behind it what _centred needs, the mean
    key beyond a value's dims and the sum of the cotangents.
  """
  rounds = _rounds(queries[0])

  def block(tap, queries):
    q, do, lse, delta, keys = queries
    slots, trips, size = _held_slots(place, keys)

    def body(index, carry):
      sums, tap = carry
      row, at = _read_piece(place, rows, slots, index, size)
      scores, held = _scores(q, row, at)
      weights = jnp.where(held, jnp.exp(scores - lse[..., None]), 0.0)
      narrow = weights.astype(q.dtype)
      value = row[..., : sizes.value_dim]
      dweights = wide_einsum("qnh,qbh->qnb", do, value)
      dscores = (weights * (dweights - delta[..., None])).astype(q.dtype)
      new = [wide_einsum("qnb,qbh->qnh", dscores, row)]
      if rounds:
        beyond = row[..., sizes.value_dim :]
        new.append(wide_einsum("qnb,qbh->qnh", narrow, beyond))
        new.append(widen(dscores).sum(-1, keepdims=True))
      sums = jax.tree.map(jnp.add, sums, new)
      if tap is not None:
        # A row is a key over its whole width and a value over a part of it.
        drow = wide_einsum("qnb,qnh->qbh", dscores, q)
        dvalue = wide_einsum("qnb,qnh->qbh", narrow, do)
        drow = drow.at[..., : sizes.value_dim].add(dvalue)
        add = tap.at[place.layer, at].add
        tap = add(drow.astype(tap.dtype), mode="drop")
      return sums, tap

    widths = [q.shape[-1]]
    if rounds:
      widths += [q.shape[-1] - sizes.value_dim, 1]
    zeros = [jnp.zeros((*q.shape[:2], n), widen(q).dtype) for n in widths]
    sums, tap = lax.fori_loop(0, trips, body, (zeros, tap))
    return tap, jnp.concatenate(sums, axis=-1)

  tap, sums = lax.scan(block, tap, _blocks(queries, sizes.queries))
  return _joined(sums, queries[0].shape[0]), tap


def _rounds(q_TNH) -> bool:
  """Whether cotangents of scores are rounded, to the dtype of the queries."""
  return q_TNH.dtype != widen(q_TNH).dtype


def _centred(sums, q_TNH, o_TNH):
  """The gradient of q, of sums over all rows.

  As in attend: cotangents of a query's scores sum to 0, rounded ones do not,
  and what the sum has too much is taken back, times the query's mean key. In a
  value's dims that is the output.
  """
  width = q_TNH.shape[-1]
  dq, beyond, excess = sums[..., :width], sums[..., width:-1], sums[..., -1:]
  return dq - excess * jnp.concatenate([widen(o_TNH), beyond], axis=-1)


@functools.cache
def _backward_members(sizes: _Sizes):
  """The backward pass, in which members that share the rows share the tap."""

  def apart(queries, shared):
    return _backward(sizes, queries, *shared)

  def together(members, queries, shared):
    # Members that share the rows are only more queries over them.
    call = _backward_members(sizes)
    dq, tap = call(None, fold_members(queries), shared)
    return unfold_members(dq, members), tap

  return one_gradient_for_members(apart, together)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(sizes: _Sizes, q_TNH, keys_TA, segments, taps):
  return _attend_fwd(sizes, q_TNH, keys_TA, segments, taps)[0]


def _attend_fwd(sizes: _Sizes, q_TNH, keys_TA, segments, taps):
  queries = (q_TNH, keys_TA)
  parts = [_forward(sizes, queries, *segment) for segment in segments]
  o, lse = (
    merge(parts),
    jax.nn.logsumexp(jnp.stack([lse for _, lse in parts]), axis=0),
  )
  # As later layers take it: what is kept is half as wide.
  o, lse = checkpoint_name((o.astype(q_TNH.dtype), lse), PAGE_ATTENTION)
  taps = tuple(
    hand_on(place, (*queries, rows), tap)
    for (rows, place), tap in zip(segments, taps, strict=True)
  )
  return (o, taps), (q_TNH, keys_TA, o, lse, segments)


def _attend_bwd(sizes: _Sizes, residuals, cotangents):
  q_TNH, keys_TA, o_TNH, lse_TN, segments = residuals
  do_TNH, dtaps = cotangents
  delta_TN = (widen(do_TNH) * o_TNH).sum(-1)
  queries = (q_TNH, do_TNH, lse_TN, delta_TN, keys_TA)
  backward = _backward_members(sizes)
  grads = [
    backward(place.member, queries, (rows, place.unnumbered, tap))
    for (rows, place), tap in zip(segments, dtaps, strict=True)
  ]
  dq_TNH = sum(sums for sums, _ in grads)
  if _rounds(q_TNH):
    dq_TNH = _centred(dq_TNH, q_TNH, o_TNH)
  return dq_TNH.astype(q_TNH.dtype), None, None, tuple(t for _, t in grads)


_attend.defvjp(_attend_fwd, _attend_bwd)


def attend_chosen(
  q_TNH: Float[Array, "T N H"],
  keys_TA: Int[Array, "T A"],
  segments: tuple[Segment, ...],
  *,
  name: str,
  value_dim: int,
  query_block: int,
) -> tuple[Float[Array, "T N Hv"], tuple[dict | None, ...]]:
  """Softmax attention of T queries to chosen rows of several segments.

  A row is a key over its whole width and a value over its first `value_dim`
  dims, shared by all heads. The rows of `query_block` queries are gathered
  from one segment after the other, piece by piece and as far as it holds any.

  On a mesh every device has its share of the queries, or all where there are
  too few or the devices do not divide them. Where devices share the rows, too,
  these stay where they are: owners attend to what they hold for all queries,
  some hundred at a time, which are gathered and whose parts are joined as
  attend states.

  Args:
    q_TNH: queries, scaled.
    keys_TA: positions that each query attends to, none of them twice; those
      that no segment holds are left out.
    segments: the rows; a position lies in one of them.
    name: of the rows that are read, [L, S, H].
    value_dim: Hv, width of a value.
    query_block: queries handled at once.

  Returns:
    Outputs in the dtype of the queries, 0 where there is no key, and the tap of
    every segment as handed on.
  """
  sizes = _Sizes(value_dim, min(query_block, q_TNH.shape[0]))
  # A constant under jax.jit has no `at`.
  rows = [jax.tree.map(jnp.asarray, x.rows[name]) for x in segments]
  places = [Place.of(segment) for segment in segments]
  read = tuple(zip(rows, places, strict=True))
  taps = tuple(segment.tap and segment.tap[name] for segment in segments)
  o_TNH, taps = _attend(sizes, q_TNH, keys_TA, read, taps)
  return o_TNH, tuple(
    segment.tap and segment.tap | {name: tap}
    for segment, tap in zip(segments, taps, strict=True)
  )
