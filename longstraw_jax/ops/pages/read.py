"""Reading rows of a segment: a block of them, or some chosen by index."""

import functools

import jax
from jax import lax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from longstraw_jax.ops.members import fold_members, one_gradient_for_members
from longstraw_jax.ops.pages.segment import (
  Place,
  Segment,
  add_block,
  hand_on,
  read_slots,
)
from longstraw_jax.ops.pages.stored import expand
from longstraw_jax.ops.pages.striping import on_owners, row_specs, sum_owners
from longstraw_jax.sharding import WHOLE


def _add_block(own, shared):
  """Adds a block of rows to one layer of the tap."""
  (offset, drows), (place, tap) = own, shared
  return (), {
    name: add_block(buffer, place.layer, offset, drows[name])
    for name, buffer in tap.items()
  }


def _add_blocks(members, own, shared):
  """The same of several members, one after the other."""
  del members
  place, tap = shared
  add = lambda tap, own: (_add_block(own, (place, tap))[1], None)
  return (), lax.scan(add, tap, own)[0]


_add_rows = one_gradient_for_members(_add_block, _add_blocks)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _read_block(size, index, rows, place, tap):
  return _read_block_fwd(size, index, rows, place, tap)[0]


def _read_block_fwd(size, index, rows, place, tap):
  block, positions, filled, offset = read_slots(rows, place, index, size)
  tap = hand_on(place, (index, rows), tap)
  return ((block, positions, filled), tap), (place, offset)


def _read_block_bwd(size, residuals, cotangents):
  place, offset = residuals
  (drows, _, _), dtap = cotangents
  if dtap is not None:
    shared = place.unnumbered, dtap
    _, dtap = _add_rows(place.member, (offset, drows), shared)
  return None, None, None, dtap


_read_block.defvjp(_read_block_fwd, _read_block_bwd)


def read_block(
  segment: Segment, index: Int[Array, ""], size: int
) -> tuple[tuple[dict, Int[Array, "B"], Bool[Array, "B"]], dict | None]:
  """Rows [index * size, (index + 1) * size) of a segment, for few reads.

  Of pages that devices share, every device gets the block.

  Returns:
    ((rows, positions, filled), tap). Rows that are not filled hold anything:
    mask them.
  """
  size = min(size, segment.capacity)
  place = Place.of(segment)
  if place.striping is not None:
    return _read_shared_block(segment, index, size)
  return _read_block(size, index, segment.rows, place, segment.tap)


def _read_shared_block(segment: Segment, index, size: int):
  """read_block by position, of pages that devices share."""
  wanted = jnp.asarray(index, jnp.int32) * size
  offset = jnp.minimum(wanted, segment.capacity - size)
  offsets = offset + jnp.arange(size, dtype=jnp.int32)
  positions = segment.start + offsets
  (block, inside), tap = gather_rows(segment, positions, tuple(segment.rows))
  block = jax.tree.map(lambda x: jnp.moveaxis(x, 0, -2), block)
  return (block, positions, inside & (offsets >= wanted)), tap


# --- Chosen rows -----------------------------------------------------------


def _rows_at(buffer: Array, layer, slots):
  """The index of rows `slots` of one layer, whatever axes lie between."""
  # A constant under jax.jit has no `at`.
  return jnp.asarray(buffer).at[layer, ..., slots, :]


def _scatter_part(tap, place, positions, drows):
  slots, _ = place.slot_of(positions - place.start)
  return {
    name: _rows_at(buffer, place.layer, slots).add(
      drows[name].astype(buffer.dtype), mode="drop"
    )
    for name, buffer in tap.items()
  }


def _scatter(own, shared):
  """Adds rows [Q, A, H] at their positions; what lies outside is dropped."""
  (positions, drows), (place, tap) = own, shared
  specs = row_specs(tap)
  call = on_owners(
    place.striping, _scatter_part, (specs, WHOLE, WHOLE, WHOLE), specs
  )
  return (), call(tap, place, positions, drows)


def _scatter_members(members, own, shared):
  """The same of several members, whose rows are only more rows."""
  del members
  return _scatter_rows(None, fold_members(own), shared)


_scatter_rows = one_gradient_for_members(_scatter, _scatter_members)


def _gather_part(names, rows, place, positions):
  slots, inside = place.slot_of(positions - place.start)
  take = lambda x: _rows_at(x, place.layer, slots).get(
    mode="fill", fill_value=0
  )
  taken = {
    name: expand(jax.tree.map(take, rows[name]), place.dtype) for name in names
  }
  if place.striping is None:
    return taken, inside
  return sum_owners((taken, inside.astype(jnp.int8)))


def _gather(names, rows, place, positions):
  rows = {name: rows[name] for name in names}
  call = functools.partial(_gather_part, names)
  specs = (row_specs(rows), WHOLE, WHOLE)
  taken, inside = on_owners(place.striping, call, specs, WHOLE)(
    rows, place, positions
  )
  return taken, inside.astype(bool)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _gather_rows(names, positions, rows, place, tap):
  return _gather_rows_fwd(names, positions, rows, place, tap)[0]


def _gather_rows_fwd(names, positions, rows, place, tap):
  out = _gather(names, rows, place, positions)
  tap = hand_on(place, (positions, rows), tap)
  return (out, tap), (place, positions)


def _gather_rows_bwd(names, residuals, cotangents):
  place, positions = residuals
  (drows, _), dtap = cotangents
  if dtap is not None:
    shared = place.unnumbered, {name: dtap[name] for name in names}
    _, part = _scatter_rows(place.member, (positions, drows), shared)
    dtap = dtap | part
  return None, None, None, dtap


_gather_rows.defvjp(_gather_rows_fwd, _gather_rows_bwd)


def gather_rows(
  segment: Segment, positions: Int[Array, "Q A"], names: tuple[str, ...]
) -> tuple[tuple[dict, Bool[Array, "Q A"]], dict | None]:
  """Rows of a segment by absolute position.

  Their cotangents are scattered into the
  tap; on a GPU that adds in no fixed order.

  Args:
    segment: the rows.
    positions: wanted ones; those outside the segment give zeros.
    names: of the rows that are read.

  Returns:
    ((name -> [Q, A, H], inside), tap): the rows, which of the positions lie in
    the segment, and the tap as handed on.
  """
  return _gather_rows(
    tuple(names), positions, segment.rows, Place.of(segment), segment.tap
  )
