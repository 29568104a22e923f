"""The form that rows are stored in, where it is narrower than they are.

A buffer is an array of any floating dtype, or ScaledRows: 8-bit integers with
one scale a row. Reads expand a block to the dtype that is computed in; the
gradient passes a rounding by as if it were not there.
"""

from flax import struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int8

from longstraw_jax.ops.pages.memory import host_zeros, on_host
from longstraw_jax.ops.precision import wide_dtype, widen
from longstraw_jax.types import Tree

_STEPS = 127  # of an int8 on either side of zero


@struct.dataclass
class ScaledRows:
  """values * scale, the largest of a row being 127 steps."""

  values: Int8[Array, "... S H"]
  scale: Float[Array, "... S 1"]

  @property
  def shape(self) -> tuple[int, ...]:
    """That of the rows."""
    return self.values.shape

  @property
  def ndim(self) -> int:
    """That of the rows."""
    return self.values.ndim

  @property
  def dtype(self):
    """Of what the rows expand to, if nobody says otherwise."""
    return self.scale.dtype


def _is_stored(x) -> bool:
  return isinstance(x, ScaledRows)


def stored_struct(row: jax.ShapeDtypeStruct, page_dtype: str | None):
  """The shapes of a buffer that stores such rows."""
  if page_dtype is None:
    return row
  if page_dtype != "int8":
    return jax.ShapeDtypeStruct(row.shape, jnp.dtype(page_dtype))
  scale = jax.ShapeDtypeStruct((*row.shape[:-1], 1), jnp.float32)
  return ScaledRows(jax.ShapeDtypeStruct(row.shape, jnp.int8), scale)


def store(rows: Tree, buffers: Tree) -> Tree:
  """Rows in the form that their buffers have; stored ones stay as they are."""

  def one(buffer, row):
    if _is_stored(row):
      return row
    if not _is_stored(buffer):
      return row.astype(buffer.dtype)
    row = widen(row)
    scale = jnp.abs(row).max(-1, keepdims=True) / _STEPS
    steps = row / jnp.where(scale == 0, 1.0, scale)
    return ScaledRows(
      jnp.round(steps).astype(jnp.int8), scale.astype(buffer.scale.dtype)
    )

  return jax.tree.map(one, buffers, rows, is_leaf=_is_stored)


def expand(block, dtype: str | None):
  """A stored block as an array of `dtype`; None leaves an array as it is."""
  if _is_stored(block):
    block = widen(block.values) * block.scale
  return block if dtype is None else block.astype(dtype)


def wide_zeros(rows: Tree, dtype=None) -> Tree:
  """Accumulators for the gradients of rows, where these are.

  Args:
    rows: as stored.
    dtype: of the accumulators; float32 or wider by default.
  """
  zeros = host_zeros if on_host(rows) else jnp.zeros
  return jax.tree.map(
    lambda x: zeros(x.shape, dtype or wide_dtype(x.dtype)),
    rows,
    is_leaf=_is_stored,
  )
