"""Reading pages: the primitives that own the gradient into stored rows.

Pages are far larger than one call's work, so their cotangent must never be
materialised per read. Every primitive here takes the rows as constants and,
beside them, a tap of the same shape that passes through unread. The cotangent
of the tap is the accumulator: the backward pass adds its blocks into it in
place and hands it on. A reader threads the tap through its reads,

  (o, lse), tap = attend(q, segment, size)
  segment = segment.replace(tap=tap)            # only if it is read again
  ... Update(rows, carry, taps=(tap,))

and must hand on the tap, never the segment, through a scan of its own: a scan
saves what it carries, and a segment holds the whole buffer.

Without a tap (None) nothing flows into the pages. Forward-mode
differentiation is refused, as for every jax.custom_vjp.

Under jax.vmap over members that share a segment the accumulator stays one
buffer: the backward passes sum over the members before they add.
"""

from collections.abc import Callable
import dataclasses
import functools

from flax import struct
import jax
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.custom_batching import custom_vmap
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from longstraw_jax.ops.precision import wide_einsum, widen
from longstraw_jax.types import Tree

EMPTY_LSE = -1e30  # log-sum-exp of nothing; its weight in a merge is exactly 0

# Name of attention outputs for checkpoint policies: small to keep, and the
# only part whose recomputation costs as much as reading every page again.
PAGE_ATTENTION = "page_attention"

# (operands, rows, positions [B], filled [B]) -> (o [T, N, H], lse [T, N])
Part = Callable[[Tree, dict, Array, Array], tuple[Array, Array]]


@struct.dataclass
class Segment:
  """One layer's view of a run of stored rows.

  Attributes:
    rows: name -> [L, ..., S, H] of all L repeats of the layer's stage; the
      token axis is always the last but one.
    tap: the accumulator's stand-in, shaped like rows, or None.
    layer: which repeat is meant.
    length: how many of the S rows are filled.
    start: position of row 0; row i stands at start + i.
  """

  rows: dict[str, Array]
  tap: dict[str, Array] | None
  layer: Int[Array, ""]
  length: Int[Array, ""]
  start: Int[Array, ""]

  @property
  def capacity(self) -> int:
    """S, the rows there is room for."""
    return next(iter(self.rows.values())).shape[-2]


@struct.dataclass
class _Place:
  """Where a read looks: integers only, so never differentiated."""

  layer: Int[Array, ""]
  length: Int[Array, ""]
  start: Int[Array, ""]

  @classmethod
  def of(cls, segment: Segment) -> "_Place":
    return cls(layer=segment.layer, length=segment.length, start=segment.start)


def _block_slice(buffer: Array, layer, offset, size: int) -> Array:
  """Rows [offset, offset + size) of one layer, without the layer axis."""
  starts = [0] * buffer.ndim
  starts[0], starts[-2] = layer, offset
  sizes = (1, *buffer.shape[1:-2], size, buffer.shape[-1])
  starts = [jnp.asarray(start, jnp.int32) for start in starts]
  return lax.dynamic_slice(buffer, starts, sizes)[0]


def _block_add(buffer: Array, layer, offset, block: Array) -> Array:
  """Adds a block to rows [offset, ...) of one layer, in place under jit."""
  starts = [0] * buffer.ndim
  starts[0], starts[-2] = layer, offset
  starts = [jnp.asarray(start, jnp.int32) for start in starts]
  old = lax.dynamic_slice(buffer, starts, (1, *block.shape))
  block = old + block[None].astype(buffer.dtype)
  return lax.dynamic_update_slice(buffer, block, starts)


def _read(rows: dict, place: _Place, index, size: int):
  """Block `index`: its rows, positions, which are filled, and its offset.

  The last block of a capacity that `size` does not divide is moved back
  instead of clamped silently; rows that belong to the block before it are
  marked as not filled.
  """
  capacity = next(iter(rows.values())).shape[-2]
  wanted = jnp.asarray(index, jnp.int32) * size
  offset = jnp.minimum(wanted, capacity - size)
  block = {
    name: _block_slice(buffer, place.layer, offset, size)
    for name, buffer in rows.items()
  }
  slots = offset + jnp.arange(size, dtype=jnp.int32)
  filled = (slots >= wanted) & (slots < place.length)
  return block, place.start + slots, filled, offset


def _trips(place: _Place, size: int):
  return lax.div(place.length + (size - 1), jnp.int32(size))


def _any_batched(tree: Tree) -> bool:
  return any(jax.tree.leaves(tree))


def _broadcast(axis_size: int, batched: list, trees: tuple) -> tuple:
  """Gives every leaf that vmap left alone the member axis."""
  return jax.tree.map(
    lambda is_batched, x: (
      x if is_batched else jnp.broadcast_to(x, (axis_size, *jnp.shape(x)))
    ),
    tuple(batched),
    trees,
  )


# --- Softmax attention over all filled rows -------------------------------


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


def _attend_forward(size, q_TNH, rows, place):
  tokens, num_heads, width = q_TNH.shape
  kv_heads, value_width = rows["v"].shape[1], rows["v"].shape[-1]
  q = _split_heads(q_TNH, kv_heads) * width**-0.5

  def body(index, carry):
    o, top, total = carry
    block, _, filled, _ = _read(rows, place, index, size)
    scores = wide_einsum("kth,ksh->kts", q, block["k"])
    scores = jnp.where(filled, scores, EMPTY_LSE)
    new_top = jnp.maximum(top, scores.max(-1))
    weights = jnp.where(filled, jnp.exp(scores - new_top[..., None]), 0.0)
    shrink = jnp.exp(top - new_top)
    narrow = weights.astype(block["v"].dtype)
    values = wide_einsum("kts,ksh->kth", narrow, block["v"])
    o = o * shrink[..., None] + values
    return o, new_top, total * shrink + weights.sum(-1)

  wide = widen(q).dtype
  shape = (kv_heads, tokens * (num_heads // kv_heads))
  carry = (
    jnp.zeros((*shape, value_width), wide),
    jnp.full(shape, EMPTY_LSE, wide),
    jnp.zeros(shape, wide),
  )
  o, top, total = lax.fori_loop(0, _trips(place, size), body, carry)
  empty = total == 0
  total = jnp.where(empty, 1.0, total)
  lse = jnp.where(empty, EMPTY_LSE, top + jnp.log(total))
  return _join_heads(o / total[..., None], tokens), _join_heads(lse, tokens)


def _attend_backward(size, saved, cotangents, rows, place, tap):
  """FlashAttention's backward pass (Dao, 2307.08691, algorithm 2)."""
  q_TNH, o_TNH, lse_TN = saved
  do_TNH, dlse_TN = cotangents
  tokens, _, width = q_TNH.shape
  kv_heads = rows["v"].shape[1]
  scale = width**-0.5
  q = _split_heads(q_TNH, kv_heads)
  do = _split_heads(do_TNH.astype(q.dtype), kv_heads)
  lse = _split_heads(lse_TN[..., None], kv_heads)
  delta = (do_TNH * o_TNH).sum(-1) - dlse_TN
  delta = _split_heads(delta[..., None], kv_heads)

  def body(index, carry):
    dq, tap = carry
    block, _, filled, offset = _read(rows, place, index, size)
    scores = wide_einsum("kth,ksh->kts", q, block["k"]) * scale
    weights = jnp.where(filled, jnp.exp(scores - lse), 0.0)
    dweights = wide_einsum("kth,ksh->kts", do, block["v"])
    dscores = (weights * (dweights - delta) * scale).astype(q.dtype)
    dq = dq + wide_einsum("kts,ksh->kth", dscores, block["k"])
    if tap is not None:
      # XLA:CPU multiplies into [H, S] several times faster than into [S, H].
      dk = wide_einsum("kth,kts->khs", q, dscores).swapaxes(1, 2)
      narrow = weights.astype(q.dtype)
      dv = wide_einsum("kth,kts->khs", do, narrow).swapaxes(1, 2)
      tap = tap | {
        "k": _block_add(tap["k"], place.layer, offset, dk),
        "v": _block_add(tap["v"], place.layer, offset, dv),
      }
    return dq, tap

  carry = (jnp.zeros(q.shape, widen(q).dtype), tap)
  dq, tap = lax.fori_loop(0, _trips(place, size), body, carry)
  return _join_heads(dq, tokens).astype(q_TNH.dtype), tap


@functools.cache
def _attend_backward_members(size: int):
  """The backward pass with its own rule for a batch of members."""

  @custom_vmap
  def backward(saved, cotangents, rows, place, tap):
    return _attend_backward(size, saved, cotangents, rows, place, tap)

  @backward.def_vmap
  def rule(axis_size, batched, saved, cotangents, rows, place, tap):
    saved, cotangents = _broadcast(axis_size, batched[:2], (saved, cotangents))
    if _any_batched(batched[2:]):
      pages = _broadcast(axis_size, batched[2:], (rows, place, tap))
      dq, tap = jax.vmap(functools.partial(_attend_backward, size))(
        saved, cotangents, *pages
      )
      return (dq, tap), (True, jax.tree.map(lambda _: True, tap))
    # Members that share the rows are only more queries over them.
    fold = lambda x: x.reshape(-1, *x.shape[2:])
    q = saved[0]
    saved, cotangents = jax.tree.map(fold, (saved, cotangents))
    dq, tap = backward(saved, cotangents, rows, place, tap)
    return (dq.reshape(q.shape), tap), (
      True,
      jax.tree.map(lambda _: False, tap),
    )

  return backward


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(size, q_TNH, rows, place, tap):
  return _attend_forward(size, q_TNH, rows, place), tap


def _attend_fwd(size, q_TNH, rows, place, tap):
  o, lse = _attend_forward(size, q_TNH, rows, place)
  o, lse = checkpoint_name((o, lse), PAGE_ATTENTION)
  return ((o, lse), tap), (q_TNH, o, lse, rows, place)


def _attend_bwd(size, residuals, cotangents):
  q_TNH, o, lse, rows, place = residuals
  (do, dlse), dtap = cotangents
  dq, dtap = _attend_backward_members(size)(
    (q_TNH, o, lse), (do, dlse), rows, place, dtap
  )
  return dq, None, None, dtap


_attend.defvjp(_attend_fwd, _attend_bwd)


def attend(
  q_TNH: Float[Array, "T N H"], segment: Segment, size: int
) -> tuple[tuple[Float[Array, "T N H"], Float[Array, "T N"]], dict | None]:
  """Softmax attention of T queries over every filled row of a segment.

  Reads rows "k" [L, K, S, H] and "v" [L, K, S, Hv] in blocks of `size` with a
  dynamic trip count: one program serves every filled length. All filled rows
  are visible, so the segment must lie before the queries.

  Args:
    q_TNH: queries, unscaled; N is a multiple of the K key/value heads.
    segment: the rows to attend to.
    size: rows read at once.

  Returns:
    ((o, lse), tap): outputs [T, N, Hv] and log-sum-exp [T, N] in float32 or
    wider, and the tap as handed on. An empty segment gives o = 0 and
    lse = EMPTY_LSE.
  """
  rows = {"k": segment.rows["k"], "v": segment.rows["v"]}
  size = min(size, segment.capacity)
  return _attend(size, q_TNH, rows, _Place.of(segment), segment.tap)


# --- Any blockwise attention ----------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Members:
  """A part for a batch of members: operands carry the axis, rows do not."""

  part: Part

  def __call__(self, operands, rows, positions, filled):
    axes = (0, None, None, None)
    return jax.vmap(self.part, axes)(operands, rows, positions, filled)


def _blocks_forward(part, size, operands, rows, place):
  def block_of(index):
    block, positions, filled, _ = _read(rows, place, index, size)
    o, lse = part(operands, block, positions, filled)
    return widen(o), widen(lse)

  def body(index, carry):
    o, lse = carry
    block_o, block_lse = block_of(index)
    top = jnp.maximum(lse, block_lse)
    old, new = jnp.exp(lse - top), jnp.exp(block_lse - top)
    total = old + new
    o = (old[..., None] * o + new[..., None] * block_o) / total[..., None]
    # Two empty parts weigh 1 each; their sum must stay empty.
    empty = top <= EMPTY_LSE
    return o, jnp.where(empty, EMPTY_LSE, top + jnp.log(total))

  shapes = jax.eval_shape(block_of, jnp.int32(0))
  carry = (
    jnp.zeros(shapes[0].shape, shapes[0].dtype),
    jnp.full(shapes[1].shape, EMPTY_LSE, shapes[1].dtype),
  )
  return lax.fori_loop(0, _trips(place, size), body, carry)


def _blocks_backward(part, size, saved, cotangents, rows, place, tap):
  """Pulls back one block at a time; nothing was saved for any block.

  With the final (o, lse), block b entered with weight w = exp(lse_b - lse):
  its output's cotangent is w do and its log-sum-exp's is
  w (do . (o_b - o) + dlse).
  """
  operands, o, lse = saved
  do, dlse = cotangents

  def body(index, carry):
    doperands, tap = carry
    block, positions, filled, offset = _read(rows, place, index, size)
    call = lambda operands, block: part(operands, block, positions, filled)
    (block_o, block_lse), pull_back = jax.vjp(call, operands, block)
    empty = lse <= EMPTY_LSE
    weight = jnp.where(empty, 0.0, jnp.exp(block_lse - lse))
    dblock_o = weight[..., None] * do
    dblock_lse = weight * ((do * (block_o - o)).sum(-1) + dlse)
    grads, drows = pull_back(
      (dblock_o.astype(block_o.dtype), dblock_lse.astype(block_lse.dtype))
    )
    doperands = jax.tree.map(jnp.add, doperands, grads)
    if tap is not None:
      tap = {
        name: _block_add(buffer, place.layer, offset, drows[name])
        for name, buffer in tap.items()
      }
    return doperands, tap

  carry = (jax.tree.map(jnp.zeros_like, operands), tap)
  return lax.fori_loop(0, _trips(place, size), body, carry)


@functools.cache
def _blocks_backward_members(part: Part, size: int):
  @custom_vmap
  def backward(saved, cotangents, rows, place, tap):
    return _blocks_backward(part, size, saved, cotangents, rows, place, tap)

  @backward.def_vmap
  def rule(axis_size, batched, saved, cotangents, rows, place, tap):
    saved, cotangents = _broadcast(axis_size, batched[:2], (saved, cotangents))
    every = lambda tree, value: jax.tree.map(lambda _: value, tree)
    if _any_batched(batched[2:]):
      pages = _broadcast(axis_size, batched[2:], (rows, place, tap))
      out = jax.vmap(functools.partial(_blocks_backward, part, size))(
        saved, cotangents, *pages
      )
      return out, every(out, True)
    shared = _blocks_backward_members(_Members(part), size)
    doperands, tap = shared(saved, cotangents, rows, place, tap)
    return (doperands, tap), (every(doperands, True), every(tap, False))

  return backward


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _attend_blocks(part, size, operands, rows, place, tap):
  return _blocks_forward(part, size, operands, rows, place), tap


def _attend_blocks_fwd(part, size, operands, rows, place, tap):
  o, lse = _blocks_forward(part, size, operands, rows, place)
  o, lse = checkpoint_name((o, lse), PAGE_ATTENTION)
  return ((o, lse), tap), (operands, o, lse, rows, place)


def _attend_blocks_bwd(part, size, residuals, cotangents):
  operands, o, lse, rows, place = residuals
  (do, dlse), dtap = cotangents
  doperands, dtap = _blocks_backward_members(part, size)(
    (operands, o, lse), (do, dlse), rows, place, dtap
  )
  return doperands, None, None, dtap


_attend_blocks.defvjp(_attend_blocks_fwd, _attend_blocks_bwd)


def attend_blocks(
  part: Part, operands: Tree, segment: Segment, size: int
) -> tuple[tuple[Array, Array], dict | None]:
  """Blockwise attention of the author's own making over a segment.

  Args:
    part: a pure, hashable function (operands, rows, positions, filled) ->
      (o [T, N, H], lse [T, N]) of one block: normalised outputs and
      log-sum-exp of the rows it lets a query see, EMPTY_LSE where none. It
      may close over no traced value.
    operands: floating-point arrays, differentiated.
    segment: the rows to attend to.
    size: rows read at once.

  Returns:
    ((o, lse), tap) merged over all filled blocks, float32 or wider, and the
    tap as handed on.
  """
  size = min(size, segment.capacity)
  place = _Place.of(segment)
  return _attend_blocks(part, size, operands, segment.rows, place, segment.tap)


# --- Reading a block ------------------------------------------------------


@custom_vmap
def _add_rows(tap, layer, offset, drows):
  return {
    name: _block_add(buffer, layer, offset, drows[name])
    for name, buffer in tap.items()
  }


@_add_rows.def_vmap
def _add_rows_members(axis_size, batched, tap, layer, offset, drows):
  if _any_batched(batched[0]):
    args = _broadcast(axis_size, batched, (tap, layer, offset, drows))
    tap = jax.vmap(_add_rows.fun)(*args)
    return tap, jax.tree.map(lambda _: True, tap)
  members = _broadcast(axis_size, batched[1:], (layer, offset, drows))
  add = lambda tap, member: (_add_rows(tap, *member), None)
  tap, _ = lax.scan(add, tap, members)
  return tap, jax.tree.map(lambda _: False, tap)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _read_block(size, index, rows, place, tap):
  block, positions, filled, _ = _read(rows, place, index, size)
  return (block, positions, filled), tap


def _read_block_fwd(size, index, rows, place, tap):
  block, positions, filled, offset = _read(rows, place, index, size)
  return ((block, positions, filled), tap), (place.layer, offset)


def _read_block_bwd(size, residuals, cotangents):
  layer, offset = residuals
  (drows, _, _), dtap = cotangents
  if dtap is not None:
    dtap = _add_rows(dtap, layer, offset, drows)
  return None, None, None, dtap


_read_block.defvjp(_read_block_fwd, _read_block_bwd)


def read_block(
  segment: Segment, index: Int[Array, ""], size: int
) -> tuple[tuple[dict, Int[Array, "B"], Bool[Array, "B"]], dict | None]:
  """Rows [index * size, (index + 1) * size) of a segment, for few reads.

  Returns:
    ((rows, positions, filled), tap). Rows that are not filled hold anything:
    mask them.
  """
  size = min(size, segment.capacity)
  place = _Place.of(segment)
  return _read_block(size, index, segment.rows, place, segment.tap)


# --- Rows of this call as a segment ---------------------------------------


@jax.custom_vjp
def _open_tap(rows):
  # Never read, so any values do; but made from the rows, so that jax.vmap
  # gives every member a tap of its own instead of summing over members.
  return jax.tree.map(widen, rows)


def _open_tap_fwd(rows):
  return _open_tap(rows), jax.tree.map(lambda x: jnp.zeros((), x.dtype), rows)


def _open_tap_bwd(dtypes, dtap):
  return (jax.tree.map(lambda x, like: x.astype(like.dtype), dtap, dtypes),)


_open_tap.defvjp(_open_tap_fwd, _open_tap_bwd)


def open_rows(rows: dict[str, Array], length, start) -> Segment:
  """This call's own rows [..., T, H] as a one-layer segment.

  What the primitives add to its tap comes back as the cotangent of the rows.
  """
  stacked = {name: x[None] for name, x in rows.items()}
  return Segment(
    rows=lax.stop_gradient(stacked),
    tap=_open_tap(stacked),
    layer=jnp.int32(0),
    length=jnp.asarray(length, jnp.int32),
    start=jnp.asarray(start, jnp.int32),
  )


def merge(parts: list[tuple[Array, Array]]) -> Float[Array, "T N H"]:
  """Joins attention over disjoint rows by their log-sum-exp.

  Args:
    parts: (o [T, N, H], lse [T, N]) of each. A part with lse = EMPTY_LSE
      weighs exactly 0; if all are empty the result is 0.
  """
  # A softmax: where one part has all the weight, the cotangents of the
  # log-sum-exps cancel exactly instead of to rounding.
  weights = jax.nn.softmax(jnp.stack([lse for _, lse in parts]), axis=0)
  return sum(
    weight[..., None] * o for weight, (o, _) in zip(weights, parts, strict=True)
  )
