"""A run of stored rows, where a read looks in it, its tap under jax.vmap."""

from flax import struct
import jax
from jax import lax
from jax.custom_batching import custom_vmap
import jax.numpy as jnp
from jaxtyping import Array, Int

from longstraw_jax.ops.members import (
  every_leaf,
  give_member_axis,
)
from longstraw_jax.ops.pages.stored import expand
from longstraw_jax.ops.pages.striping import Striping
from longstraw_jax.types import Tree

EMPTY_LSE = -1e30  # log-sum-exp of nothing; its weight in a merge is exactly 0
NO_SLOT = 2**30  # behind the end of every buffer

# Name of attention outputs for checkpoint policies: small to keep, and the
# only part whose recomputation costs as much as reading every page again.
PAGE_ATTENTION = "page_attention"


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
    striping: how devices share the rows; None where each holds them all.
    dtype: what a read gives, where rows are stored in another form.
    member: the number of the member that reads, under the jax.vmap over
      members of one loss, whose gradient into rows that they share is one (see
      ops/members.py); None elsewhere: every call has its own.
  """

  rows: dict[str, Array]
  tap: dict[str, Array] | None
  layer: Int[Array, ""]
  length: Int[Array, ""]
  start: Int[Array, ""]
  member: Int[Array, ""] | None = None
  striping: Striping | None = struct.field(pytree_node=False, default=None)
  dtype: str | None = struct.field(pytree_node=False, default=None)

  @property
  def shards(self) -> int:
    """Devices that share the rows."""
    return self.striping.shards if self.striping else 1

  def block_size(self, wanted: int) -> int:
    """Rows that a device can read at once, at most `wanted`."""
    return min(wanted, self.capacity // self.shards)

  @property
  def capacity(self) -> int:
    """S, the rows there is room for."""
    return next(iter(self.rows.values())).shape[-2]


@struct.dataclass
class Place:
  """Where a read looks: integers only, so never differentiated."""

  layer: Int[Array, ""]
  length: Int[Array, ""]
  start: Int[Array, ""]
  member: Int[Array, ""] | None = None
  striping: Striping | None = struct.field(pytree_node=False, default=None)
  dtype: str | None = struct.field(pytree_node=False, default=None)

  @classmethod
  def of(cls, segment: Segment) -> "Place":
    return cls(
      layer=segment.layer,
      length=segment.length,
      start=segment.start,
      member=segment.member,
      striping=segment.striping,
      dtype=segment.dtype,
    )

  @property
  def unnumbered(self) -> "Place":
    """Without the member's number."""
    return self.replace(member=None)

  def offset_of(self, slots):
    """Where slots of the buffer at hand stand in the sequence."""
    return slots if self.striping is None else self.striping.offset_of(slots)

  def slot_of(self, offsets):
    """Slots, in the buffer at hand, of filled places in the sequence.

    Returns:
      (slots, inside): those not inside are NO_SLOT.
    """
    inside = (offsets >= 0) & (offsets < self.length)
    if self.striping is not None:
      offsets, mine = self.striping.slot_of(offsets)
      inside = inside & mine
    # Behind the end, not -1: that would wrap to the last row.
    return jnp.where(inside, offsets, NO_SLOT), inside


def slice_rows(buffer: Tree, layer, offset, size: int) -> Tree:
  """Rows [offset, offset + size) of one layer, without the layer axis."""

  def one(x):
    starts = [0] * x.ndim
    starts[0], starts[-2] = layer, offset
    sizes = (1, *x.shape[1:-2], size, x.shape[-1])
    starts = [jnp.asarray(start, jnp.int32) for start in starts]
    return lax.dynamic_slice(x, starts, sizes)[0]

  return jax.tree.map(one, buffer)


def add_block(buffer: Array, layer, offset, block: Array) -> Array:
  """Adds a block to rows [offset, ...) of one layer, in place under jit."""
  starts = [0] * buffer.ndim
  starts[0], starts[-2] = layer, offset
  starts = [jnp.asarray(start, jnp.int32) for start in starts]
  old = lax.dynamic_slice(buffer, starts, (1, *block.shape))
  block = old + block[None].astype(buffer.dtype)
  return lax.dynamic_update_slice(buffer, block, starts)


def read_slots(rows: dict, place: Place, index, size: int):
  """Block `index`: its rows, positions, which are filled, and its offset.

  Blocks count slots of the buffer at hand, an owner's own where it is shared.

  The last block of a capacity that `size` does not divide is moved back
  instead of clamped silently; rows that belong to the block before it are
  marked as not filled.
  """
  capacity = next(iter(rows.values())).shape[-2]
  wanted = jnp.asarray(index, jnp.int32) * size
  offset = jnp.minimum(wanted, capacity - size)
  block = {
    name: expand(slice_rows(buffer, place.layer, offset, size), place.dtype)
    for name, buffer in rows.items()
  }
  slots = offset + jnp.arange(size, dtype=jnp.int32)
  offsets = place.offset_of(slots)
  filled = (slots >= wanted) & (offsets < place.length)
  return block, place.start + offsets, filled, offset


def block_trips(place: Place, size: int) -> Int[Array, ""]:
  """Blocks of `size` slots that hold a filled one."""
  filled = place.length
  if place.striping is not None:
    filled = place.striping.filled_slots(place.length)
  return lax.div(filled + (size - 1), jnp.int32(size))


@custom_vmap
def _hand_on(place: Place, read: Tree, tap: Tree):
  del place, read
  return tap


@_hand_on.def_vmap
def _hand_on_rule(axis_size, batched, place, read, tap):
  where, _, own_tap = batched
  if where.member:
    place = place.unnumbered
  else:
    tap = give_member_axis(axis_size, own_tap, tap)
    own_tap = every_leaf(own_tap, True)
  return _hand_on(place, read, tap), own_tap


def hand_on(place: Place, read: Tree, tap: Tree | None) -> Tree | None:
  """The tap as a read returns it; under jax.vmap one for every call.

  The cotangent of what this returns is the accumulator that the read's backward
  pass adds to. A tap without the batch axis would have one accumulator for all
  calls, and JAX would sum it over them once for every read that follows
  another. Members of one loss do share one.

  Args:
    place: where the read looks.
    read: whatever else it depends on.
    tap: as it came.
  """
  return None if tap is None else _hand_on(place, read, tap)
