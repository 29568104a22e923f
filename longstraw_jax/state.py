"""State of the whole model: pages of every layer, carries, the prompt's."""

import functools
from typing import Any

from flax import struct
import jax
from jax import lax
import jax.numpy as jnp
from jaxtyping import Array, Int, UInt32

from longstraw_jax.checks import CONSTANT_SCOPES
from longstraw_jax.ops.pages import (
  Striping,
  host_zeros,
  on_host,
  on_owners,
  put_beside,
  put_layer,
  row_specs,
  store,
  take_layer,
  to_device,
)
from longstraw_jax.sharding import WHOLE, carry_specs
from longstraw_jax.types import Tree


@struct.dataclass
class Pages:
  """Rows of every layer for one run of tokens.

  Attributes:
    rows: stage -> layer of the pattern -> name -> [L, ..., S, H].
    taps: the accumulators' stand-ins, shaped like rows, or None where no
      gradient is wanted.
    length: filled rows.
    start: position of row 0.
    striping: how devices share the rows; None where each holds them all.
  """

  rows: Tree
  taps: Tree | None
  length: Int[Array, ""]
  start: Int[Array, ""]
  striping: Striping | None = struct.field(pytree_node=False, default=None)


@struct.dataclass
class PromptState:
  """What later tokens need of a prompt, after its first P - 1 tokens.

  The last prompt token predicts the first response token, so every replay
  begins by feeding it, with gradient.

  Attributes:
    pages: stage -> layer of the pattern -> name -> [L, ..., S, H]; the first
      P - 1 rows are filled.
    carry: stage -> layer of the pattern -> fixed-size arrays, [L, ...] each.
    saved_carries: the carry at the entry of every chunk, [chunks, L, ...];
      empty where no reverse walk needs it.
    last_token: the prompt's last token id.
    length: P - 1.
    first_chunk: the first chunk that a reverse walk visits.
    step: the optimizer step of the weights that made this state.
    prompt_id: the id of the prompt; UNKNOWN_PROMPT, -1, where nobody named it.
    grad_scope: which gradient the state passes on.
    chunk_size: tokens of one chunk.
    striping: how devices share the pages, on a mesh.
    choices: recorded choices that the captured tokens followed, stage ->
      layer -> name -> [L, S, A], zero behind them; None where they chose
      afresh.
    fingerprint: a checksum of the weights that made this state (see
      staleness.py); None where nobody knows them.
  """

  pages: Tree
  carry: Tree
  saved_carries: Tree
  last_token: Int[Array, ""]
  length: Int[Array, ""]
  first_chunk: Int[Array, ""]
  step: Int[Array, ""]
  prompt_id: Int[Array, ""]
  grad_scope: str = struct.field(pytree_node=False)
  chunk_size: int = struct.field(pytree_node=False)
  striping: Striping | None = struct.field(pytree_node=False, default=None)
  choices: Tree | None = None
  fingerprint: UInt32[Array, ""] | None = None

  @property
  def differentiated(self) -> bool:
    """Whether a gradient flows through the prompt."""
    return self.grad_scope not in CONSTANT_SCOPES

  @property
  def capacity(self) -> int | None:
    """Tokens there is room for; None where nothing grows with tokens."""
    for rows in jax.tree.leaves(self.pages):
      return rows.shape[-2]
    for carries in jax.tree.leaves(self.saved_carries):
      return carries.shape[0] * self.chunk_size
    for chosen in jax.tree.leaves(self.choices):
      return chosen.shape[-2]
    return None


def state_specs(state: PromptState) -> PromptState:
  """Where a state's arrays are: rows with their owners, carries by head."""
  specs = jax.tree.map(lambda _: WHOLE, state)
  return specs.replace(
    pages=row_specs(state.pages) if state.striping else specs.pages,
    carry=carry_specs(state.carry),
    saved_carries=carry_specs(state.saved_carries, lead=2),
  )


def write_rows(
  buffers: Tree,
  rows: Tree,
  offset,
  striping: Striping | None = None,
) -> Tree:
  """Appends rows [L, ..., T, H] to buffers [L, ..., S, H], in place under jit.

  One dynamic_update_slice a buffer for all layers; the caller guarantees
  offset + T <= S, since XLA would clamp silently. Where devices share the
  buffers, the rows are one whole chunk and each writes its share of it.
  """

  def write(buffers, rows, offset):
    def one(buffer, new):
      starts = [jnp.int32(0)] * buffer.ndim
      starts[-2] = offset
      new = put_beside(new, buffer)
      return lax.dynamic_update_slice(buffer, new, starts)

    return jax.tree.map(one, buffers, rows)

  specs = row_specs(buffers)
  return on_owners(striping, write, (specs, specs, WHOLE), specs)(
    buffers, store(rows, buffers), _own_offset(striping, offset)
  )


def append_row(
  buffers: Tree, row: Tree, token, striping: Striping | None
) -> Tree:
  """Writes the rows [L, ..., 1, H] of one token behind those before it.

  Where devices share the buffers the token's owner writes.
  """

  def write(buffers, row, token):
    slot, mine = (token, True) if striping is None else striping.slot_of(token)

    def one(buffer, new):
      old = lax.dynamic_slice_in_dim(buffer, slot, 1, -2)
      new = jnp.where(mine, new, old)
      return lax.dynamic_update_slice_in_dim(buffer, new, slot, -2)

    return jax.tree.map(one, buffers, row)

  specs = row_specs(buffers)
  whole = jax.tree.map(lambda _: WHOLE, row)
  return on_owners(striping, write, (specs, whole, WHOLE), specs)(
    buffers, store(row, buffers), token
  )


def read_rows(
  buffers: Tree, offset, tokens: int, striping: Striping | None = None
) -> Tree:
  """Rows [offset, offset + tokens) of every layer; a whole chunk if striped.

  They are on the device, wherever the buffers are.
  """
  size = tokens // (striping.shards if striping else 1)

  def read(buffers, offset):
    cut = lambda x: lax.dynamic_slice_in_dim(x, offset, size, x.ndim - 2)
    rows = jax.tree.map(cut, buffers)
    return to_device(rows) if on_host(buffers) else rows

  specs = row_specs(buffers)
  return on_owners(striping, read, (specs, WHOLE), specs)(
    buffers, _own_offset(striping, offset)
  )


def _own_offset(striping: Striping | None, offset) -> Int[Array, ""]:
  """A chunk border, in the buffer that one device holds."""
  offset = jnp.asarray(offset, jnp.int32)
  return (
    offset if striping is None else lax.div(offset, jnp.int32(striping.shards))
  )


def fill_up_rows(
  buffers: Tree,
  rows: Tree,
  border,
  filled,
  tokens: int,
  striping: Striping | None = None,
) -> Tree:
  """Writes rows [L, ..., T, H] into a chunk of T behind its filled ones.

  Rows that do not fit are dropped: what is written is the whole chunk from its
  border on.
  """
  old = read_rows(buffers, border, tokens, striping)
  rows = _behind(old, rows, filled)
  return write_rows(buffers, rows, border, striping)


def _behind(old: Tree, rows: Tree, filled) -> Tree:
  """A chunk's stored rows with new ones behind its `filled` first."""

  def place(old, new):
    stays = jnp.arange(old.shape[-2])[:, None] < filled
    return jnp.where(stays, old, jnp.roll(new, filled, -2))

  return jax.tree.map(place, old, store(rows, old))


def write_layer_rows(
  buffers: Tree,
  rows: Tree,
  layer,
  border,
  striping: Striping | None = None,
  filled=None,
) -> Tree:
  """write_rows, or fill_up_rows, of one layer of buffers in host memory.

  Args:
    buffers: name -> [L, ..., S, H].
    rows: name -> [..., T, H] of that layer.
    layer: which of the L.
    border: of the chunk of T that is written.
    striping: how devices share the buffers.
    filled: the chunk's rows that stay; None writes all.
  """
  if not rows:
    return buffers
  rows = jax.tree.map(lambda x: x[None], rows)
  specs, offset = row_specs(buffers), _own_offset(striping, border)
  if filled is not None:
    tokens = next(iter(rows.values())).shape[-2]
    size = tokens // (striping.shards if striping else 1)
    take = functools.partial(take_layer, size=size)
    old = on_owners(striping, take, (specs, WHOLE, WHOLE), specs)(
      buffers, layer, offset
    )
    rows = _behind(old, rows, filled)
  return on_owners(striping, put_layer, (specs, WHOLE, specs, WHOLE), specs)(
    buffers, layer, store(rows, buffers), offset
  )


def grow_rows(buffers: Tree, room: int, striping: Striping | None) -> Tree:
  """Buffers [L, ..., S, H] with room for so many rows, whole chunks of them."""
  size = room // (striping.shards if striping else 1)
  specs = row_specs(buffers)
  grow = lambda buffers: tree_grown(buffers, -2, size)
  if on_host(buffers):
    copy = functools.partial(_grown_on_host, size=size)
    grow = lambda buffers: jax.tree.map(copy, buffers)
  return on_owners(striping, grow, (specs,), specs)(buffers)


def _grown_on_host(buffer: Array, size: int) -> Array:
  """A larger copy of one buffer, which passes the device layer by layer."""
  grown = host_zeros((*buffer.shape[:-2], size, buffer.shape[-1]), buffer.dtype)
  copy = lambda i, grown: put_layer(grown, i, take_layer(buffer, i))
  return lax.fori_loop(0, buffer.shape[0], copy, grown)


def grow_saved(saved: Tree, chunks: int, striping: Striping | None) -> Tree:
  """Saved carries [chunks, L, ...] with room for so many chunks."""
  if not on_host(saved):
    return tree_grown(saved, 0, chunks)

  def grow(saved):
    room = lambda x: host_zeros((chunks, *x.shape[1:]), x.dtype)
    copy = lambda i, grown: _put_carry(grown, i, _take_carry(saved, i))
    number = jax.tree.leaves(saved)[0].shape[0]
    return lax.fori_loop(0, number, copy, jax.tree.map(room, saved))

  specs = carry_specs(saved, lead=2)
  return on_owners(striping, grow, (specs,), specs)(saved)


def _take_carry(saved: Tree, index) -> Tree:
  take = lambda x: lax.dynamic_index_in_dim(x, index, keepdims=False)
  carry = jax.tree.map(take, saved)
  return to_device(carry) if on_host(saved) else carry


def _put_carry(saved: Tree, index, carry: Tree) -> Tree:
  put = lambda x, new: lax.dynamic_update_index_in_dim(x, new, index, 0)
  return jax.tree.map(put, saved, put_beside(carry, saved))


def saved_carry(saved: Tree, index, striping: Striping | None = None) -> Tree:
  """A chunk's entry carry, on the device, of those saved [chunks, L, ...].

  As with rows, what is in host memory is read and written by its owners.
  """
  if not on_host(saved):
    return _take_carry(saved, index)
  one = lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype)
  carry = carry_specs(jax.tree.map(one, saved))
  specs = (carry_specs(saved, lead=2), WHOLE)
  return on_owners(striping, _take_carry, specs, carry)(saved, index)


def save_carry(
  saved: Tree, index, carry: Tree, striping: Striping | None = None
) -> Tree:
  """Writes a chunk's entry carry among the saved ones."""
  if not on_host(saved):
    return _put_carry(saved, index, carry)
  specs = carry_specs(saved, lead=2)
  call = on_owners(
    striping, _put_carry, (specs, WHOLE, carry_specs(carry)), specs
  )
  return call(saved, index, carry)


def fill_rows(rows: Tree, known: Tree) -> Tree:
  """`rows` with the leaves that `known` has, in the dtypes of `rows`."""
  return {
    stage: {
      layer: leaves
      | {
        name: x.astype(leaves[name].dtype)
        for name, x in known[stage][layer].items()
      }
      for layer, leaves in layers.items()
    }
    for stage, layers in rows.items()
  }


def tree_zeros(shapes: Tree) -> Tree:
  """Zeros in the shapes and dtypes of a tree of arrays or structs."""
  return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)


def tree_grown(tree: Tree, axis: int, size: int) -> Tree:
  """Every leaf padded with zeros to `size` along an axis."""

  def grow(x):
    padding = [(0, 0)] * x.ndim
    padding[axis] = (0, size - x.shape[axis])
    return jnp.pad(x, padding)

  return jax.tree.map(grow, tree)


def named_leaves(tree: Tree) -> dict[str, Any]:
  """Every leaf by its path, in the tree's own order."""
  leaves, _ = jax.tree.flatten_with_path(tree)
  name = lambda path: jax.tree_util.keystr(path, simple=True, separator=".")
  return {name(path): leaf for path, leaf in leaves}
