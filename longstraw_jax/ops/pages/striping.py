"""Pages that several devices share: who holds which row, and reads per owner.

A sequence is stored chunk by chunk. Each of n devices holds C / n consecutive
tokens of every chunk of C, so that all have the same work at every length and
a new chunk is written where it was computed. The global array keeps the shape
[..., S, H]: device d holds its slots [d S / n, (d + 1) S / n), in the order
of positions, which is not the order of the whole array.
"""

from collections.abc import Callable
import dataclasses
import functools

import jax
from jax import lax
import jax.numpy as jnp
from jaxtyping import Array, Int

from longstraw_jax.ops.token_sharding import local_tokens, reduce_scatter_tokens
from longstraw_jax.sharding import MESH_AXES, num_shards, per_device, spec
from longstraw_jax.types import Tree

_ROWS = MESH_AXES["rows"]


@dataclasses.dataclass(frozen=True)
class Striping:
  """Chunks of `chunk` tokens, dealt to `shards` devices in equal shares."""

  chunk: int
  shards: int

  @classmethod
  def of_mesh(cls, chunk: int) -> "Striping | None":
    """What the current mesh makes of chunks of this size.

    Raises:
      ValueError: the devices do not divide a chunk.
    """
    shards = num_shards("rows")
    if shards == 1:
      return None
    if chunk % shards:
      raise ValueError(
        f"chunk_size={chunk} cannot be dealt to {shards} devices: give a "
        f"multiple of {shards}"
      )
    return cls(chunk=chunk, shards=shards)

  @property
  def share(self) -> int:
    """Tokens of one chunk on one device."""
    return self.chunk // self.shards

  def offset_of(self, slots: Int[Array, "..."]) -> Int[Array, "..."]:
    """Where this device's slots stand in the sequence; inside on_owners."""
    within = lax.axis_index(_ROWS) * self.share + slots % self.share
    return slots // self.share * self.chunk + within

  def slot_of(self, offsets: Int[Array, "..."]):
    """This device's slots of places in the sequence, and which it owns."""
    within = offsets % self.chunk
    mine = within // self.share == lax.axis_index(_ROWS)
    return offsets // self.chunk * self.share + within % self.share, mine

  def deal(self, rows: Array) -> Array:
    """Rows [..., S, H] in the order of the sequence, as devices store them."""
    split = rows.reshape(
      *rows.shape[:-2], -1, self.shards, self.share, rows.shape[-1]
    )
    return split.swapaxes(-4, -3).reshape(rows.shape)

  def collect(self, rows: Array) -> Array:
    """The inverse of deal."""
    split = rows.reshape(
      *rows.shape[:-2], self.shards, -1, self.share, rows.shape[-1]
    )
    return split.swapaxes(-4, -3).reshape(rows.shape)

  def filled_slots(self, length) -> Int[Array, ""]:
    """A bound on the filled slots of any device."""
    chunks = lax.div(length + (self.chunk - 1), jnp.int32(self.chunk))
    return chunks * self.share


def row_specs(tree: Tree) -> Tree:
  """Specs of buffers [..., S, H] with their token axis over the devices."""
  axes = lambda x: (None,) * (x.ndim - 2) + ("rows", None)
  return jax.tree.map(lambda x: spec(*axes(x)), tree)


def on_owners(
  striping: Striping | None, fn: Callable, in_specs: tuple, out_specs: Tree
) -> Callable:
  """`fn` as every owner of rows runs it on its part; as is without owners."""
  if striping is None:
    return fn
  shards = num_shards("rows")
  if shards != striping.shards:
    raise ValueError(
      f"these pages are dealt to {striping.shards} devices, but the current "
      f"mesh has {shards} for them: use the mesh they were captured on"
    )
  return per_device(fn, in_specs, out_specs)


def num_owners() -> int:
  """How many there are; inside on_owners."""
  return lax.axis_size(_ROWS)


def sum_owners(tree: Tree) -> Tree:
  """Sums what the owners computed; inside on_owners."""
  return lax.psum(tree, _ROWS)


def join_owners(o: Array, top: Array, total: Array):
  """Owners' parts of a softmax, each then with its share of the tokens.

  Args:
    o: values weighted by exp(score - top), [T, ..., H].
    top: the highest score, [T, ...].
    total: the sum of the weights, [T, ...].

  Returns:
    The same of all rows; inside on_owners.
  """
  highest = max_owners(top)
  part = jnp.concatenate([o, total[..., None]], axis=-1)
  part = reduce_scatter_tokens(part * jnp.exp(top - highest)[..., None])
  return part[..., :-1], local_tokens(highest), part[..., -1]


def max_owners(x: Array) -> Array:
  """The largest of what the owners computed; inside on_owners."""
  return lax.pmax(x, _ROWS)


def lists_by_query(tree: Tree) -> Tree:
  """Lists [Q, A] of owners, for each its share of the queries: [Q / n, n A].

  Q is a multiple of the n owners; inside on_owners.
  """
  send = functools.partial(
    lax.all_to_all, axis_name=_ROWS, split_axis=0, concat_axis=1, tiled=True
  )
  return jax.tree.map(send, tree)
