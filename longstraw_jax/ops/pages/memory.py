"""Memory spaces: pages may live in pinned host memory.

Where an array is belongs to its type, inside jax.jit too, so whoever reads
rows asks them instead of being told.
"""

import jax
from jax import lax
import jax.numpy as jnp

from longstraw_jax.types import Tree

PLACES = ("device", "host")
HOST, DEVICE = jax.memory.Space.Host, jax.memory.Space.Device


def check_place(pages: str) -> None:
  """Refuses places that there are not."""
  if pages not in PLACES:
    raise ValueError(f"pages is {pages!r}: use one of {PLACES}")


def refuse_host_cotangent() -> None:
  """Raises: autodiff would add up page gradients where nothing can add."""
  raise ValueError(
    "pages='host' cannot carry a cotangent from replay to capture: use "
    "group_gradient, which fetches their gradient layer by layer"
  )


def on_host(tree: Tree) -> bool:
  """Whether arrays, traced or not, are in host memory."""
  return any(jax.typeof(x).memory_space == HOST for x in jax.tree.leaves(tree))


def to_host(tree: Tree) -> Tree:
  """Arrays moved to pinned host memory."""
  return jax.device_put(tree, HOST)


def to_device(tree: Tree) -> Tree:
  """Arrays moved to device memory."""
  return jax.device_put(tree, DEVICE)


def put_beside(tree: Tree, other: Tree) -> Tree:
  """Arrays moved to where those of `other` are."""
  return to_host(tree) if on_host(other) else tree


def host_zeros(shape: tuple[int, ...], dtype) -> jax.Array:
  """Zeros that are never on the device but for one of them."""
  return lax.broadcast(to_host(jnp.zeros((), dtype)), shape)


def _corner(buffer: jax.Array, layer, offset) -> list[jax.Array]:
  """Where rows from `offset` on begin in one layer of [L, ..., S, H]."""
  starts = [0] * buffer.ndim
  starts[0], starts[-2] = layer, offset
  return [jnp.asarray(start, jnp.int32) for start in starts]


def take_layer(buffers: Tree, layer, offset=0, size: int | None = None) -> Tree:
  """Rows of one layer of host buffers [L, ..., S, H], on the device.

  Args:
    buffers: in host memory.
    layer: which of the L.
    offset: of the first row.
    size: how many rows; all S by default.

  Returns:
    [1, ..., size, H].
  """

  def cut(x):
    sizes = (1, *x.shape[1:-2], size or x.shape[-2], x.shape[-1])
    return lax.dynamic_slice(x, _corner(x, layer, offset), sizes)

  return to_device(jax.tree.map(cut, buffers))


def put_layer(buffers: Tree, layer, rows: Tree, offset=0) -> Tree:
  """Host buffers with rows [1, ..., T, H], on the device, in one layer."""

  def put(buffer, x):
    corner = _corner(buffer, layer, offset)
    return lax.dynamic_update_slice(buffer, to_host(x), corner)

  return jax.tree.map(put, buffers, rows)
