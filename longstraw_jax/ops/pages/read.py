"""Reading rows of a segment: a block of them, or some chosen by index."""

import functools

import jax
from jax import lax
from jax.custom_batching import custom_vmap
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from longstraw_jax.ops.members import fold_members, give_member_axis
from longstraw_jax.ops.pages.segment import (
  Place,
  Segment,
  add_block,
  adds_apart,
  read_slots,
)
from longstraw_jax.ops.pages.stored import expand
from longstraw_jax.ops.pages.striping import on_owners, row_specs, sum_owners
from longstraw_jax.sharding import WHOLE


@custom_vmap
def _add_rows(tap, layer, offset, drows):
  return {
    name: add_block(buffer, layer, offset, drows[name])
    for name, buffer in tap.items()
  }


@_add_rows.def_vmap
def _add_rows_members(axis_size, batched, tap, layer, offset, drows):
  if adds_apart(batched[1:3], batched[0]):
    args = give_member_axis(axis_size, batched, (tap, layer, offset, drows))
    tap = jax.vmap(_add_rows.fun)(*args)
    return tap, jax.tree.map(lambda _: True, tap)
  members = give_member_axis(axis_size, batched[1:], (layer, offset, drows))
  add = lambda tap, member: (_add_rows(tap, *member), None)
  tap, _ = lax.scan(add, tap, members)
  return tap, jax.tree.map(lambda _: False, tap)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _read_block(size, index, rows, place, tap):
  block, positions, filled, _ = read_slots(rows, place, index, size)
  return (block, positions, filled), tap


def _read_block_fwd(size, index, rows, place, tap):
  block, positions, filled, offset = read_slots(rows, place, index, size)
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
  return buffer.at[layer, ..., slots, :]


def _scatter_part(tap, place, positions, drows):
  slots, _ = place.slot_of(positions - place.start)
  return {
    name: _rows_at(buffer, place.layer, slots).add(
      drows[name].astype(buffer.dtype), mode="drop"
    )
    for name, buffer in tap.items()
  }


@custom_vmap
def _scatter_rows(tap, place, positions, drows):
  """Adds rows [Q, A, H] at their positions; what lies outside is dropped."""
  specs = row_specs(tap)
  return on_owners(
    place.striping, _scatter_part, (specs, WHOLE, WHOLE, WHOLE), specs
  )(tap, place, positions, drows)


@_scatter_rows.def_vmap
def _scatter_rows_members(axis_size, batched, tap, place, positions, drows):
  if adds_apart(batched[2], batched[:2]):
    args = give_member_axis(axis_size, batched, (tap, place, positions, drows))
    tap = jax.vmap(_scatter_rows.fun)(*args)
    return tap, jax.tree.map(lambda _: True, tap)
  positions, drows = give_member_axis(
    axis_size, batched[2:], (positions, drows)
  )
  tap = _scatter_rows(tap, place, *fold_members((positions, drows)))
  return tap, jax.tree.map(lambda _: False, tap)


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
  return _gather(names, rows, place, positions), tap


def _gather_rows_fwd(names, positions, rows, place, tap):
  out = _gather(names, rows, place, positions)
  return (out, tap), (place, positions)


def _gather_rows_bwd(names, residuals, cotangents):
  place, positions = residuals
  (drows, _), dtap = cotangents
  if dtap is not None:
    part = {name: dtap[name] for name in names}
    dtap = dtap | _scatter_rows(part, place, positions, drows)
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
