"""Blockwise attention of any making over a segment."""

from collections.abc import Callable
import dataclasses
import functools

import jax
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name
import jax.numpy as jnp

from longstraw_jax.ops.members import one_gradient_for_members
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
  max_owners,
  on_owners,
  row_specs,
  sum_owners,
)
from longstraw_jax.ops.precision import widen
from longstraw_jax.ops.token_sharding import (
  member_specs,
  members_divide,
  sum_members,
)
from longstraw_jax.sharding import WHOLE
from longstraw_jax.types import Tree

# (operands, rows, positions [B], filled [B]) -> (o [T, N, H], lse [T, N])
Part = Callable[[Tree, dict, Array, Array], tuple[Array, Array]]


@dataclasses.dataclass(frozen=True)
class _Members:
  """A part for a batch of members: operands carry the axis, rows do not."""

  part: Part

  def __call__(self, operands, rows, positions, filled):
    axes = (0, None, None, None)
    return jax.vmap(self.part, axes)(operands, rows, positions, filled)


def _blocks_forward(part, size, operands, rows, place):
  call = functools.partial(_blocks_part, part, size)
  specs = (WHOLE, row_specs(rows), WHOLE)
  return on_owners(place.striping, call, specs, WHOLE)(operands, rows, place)


def _blocks_part(part, size, operands, rows, place):
  def block_of(index):
    block, positions, filled, _ = read_slots(rows, place, index, size)
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
  o, lse = lax.fori_loop(0, block_trips(place, size), body, carry)
  if place.striping is None:
    return o, lse
  top = max_owners(lse)
  # An empty part weighs nothing beside a filled one; all empty, they are 0.
  weight = jnp.where(lse <= EMPTY_LSE, 0.0, jnp.exp(lse - top))
  o, total = sum_owners((weight[..., None] * o, weight))
  empty = total == 0
  total = jnp.where(empty, 1.0, total)
  return o / total[..., None], jnp.where(empty, EMPTY_LSE, top + jnp.log(total))


def _blocks_backward(part, size, folded, saved, cotangents, rows, place, tap):
  tokens = member_specs(folded)
  call = functools.partial(_blocks_backward_part, part, size, folded)
  return on_owners(
    place.striping,
    call,
    (tokens, tokens, row_specs(rows), WHOLE, row_specs(tap)),
    (tokens, row_specs(tap)),
  )(saved, cotangents, rows, place, tap)


def _blocks_backward_part(
  part, size, folded, saved, cotangents, rows, place, tap
):
  """Pulls back one block at a time; nothing was saved for any block.

  With the final (o, lse), block b entered with weight w = exp(lse_b - lse):
  its output's cotangent is w do and its log-sum-exp's is
  w (do . (o_b - o) + dlse).
  """
  operands, o, lse = saved
  do, dlse = cotangents

  def body(index, carry):
    doperands, tap = carry
    block, positions, filled, offset = read_slots(rows, place, index, size)
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
      if folded and place.striping is not None:
        drows = sum_members(jax.tree.map(widen, drows))
      tap = {
        name: add_block(buffer, place.layer, offset, drows[name])
        for name, buffer in tap.items()
      }
    return doperands, tap

  carry = (jax.tree.map(jnp.zeros_like, operands), tap)
  grads, tap = lax.fori_loop(0, block_trips(place, size), body, carry)
  return (grads if place.striping is None else sum_owners(grads)), tap


@functools.cache
def _blocks_backward_members(part: Part, size: int, folded: bool = False):
  """The backward pass, in which members that share the rows share the tap."""

  def apart(own, shared):
    return _blocks_backward(part, size, folded, *own, *shared)

  def together(members, own, shared):
    call = _blocks_backward_members(
      _Members(part), size, members_divide(members)
    )
    return call(None, own, shared)

  return one_gradient_for_members(apart, together)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _attend_blocks(part, size, operands, rows, place, tap):
  tap = hand_on(place, (operands, rows), tap)
  return _blocks_forward(part, size, operands, rows, place), tap


def _attend_blocks_fwd(part, size, operands, rows, place, tap):
  o, lse = _blocks_forward(part, size, operands, rows, place)
  o, lse = checkpoint_name((o, lse), PAGE_ATTENTION)
  tap = hand_on(place, (operands, rows), tap)
  return ((o, lse), tap), (operands, o, lse, rows, place)


def _attend_blocks_bwd(part, size, residuals, cotangents):
  operands, o, lse, rows, place = residuals
  (do, dlse), dtap = cotangents
  own = (operands, o, lse), (do, dlse)
  doperands, dtap = _blocks_backward_members(part, size)(
    place.member, own, (rows, place.unnumbered, dtap)
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
    operands: floating-point arrays, differentiated. The part gets them in
      float32 or wider: its gradients are summed over blocks.
    segment: the rows to attend to.
    size: rows read at once.

  Returns:
    ((o, lse), tap) merged over all filled blocks, float32 or wider, and the
    tap as handed on.
  """
  size = segment.block_size(size)
  place = Place.of(segment)
  operands = jax.tree.map(widen, operands)
  return _attend_blocks(part, size, operands, segment.rows, place, segment.tap)
