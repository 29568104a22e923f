"""Frozen matrices in 4 bits: NF4 with double quantization (QLoRA).

Dettmers et al., 2305.14314: a value is one of 16 quantiles of the normal
distribution times the largest magnitude of its block of 64; those magnitudes
are themselves quantized to 8 bits, in groups of 256 with one float32 scale
each and one float32 offset a matrix:

  x = NF4_VALUES[code] m,   m = offset + scale_group code_block

4 + 8/64 + 32/(64 256) = 4.127 bits a parameter.

Departure: the 8-bit code is linear above the smallest m of the matrix, where
the paper has an 8-bit float about the mean. It is nearer to m, and expanding
and quantizing again gives the same bits.

A quantized matrix stands in the parameters in the place of its kernel, and is
expanded by who multiplies by it: layer by layer inside the scan over layers
(models/layers.py), expert by expert in their loop (ops/experts.py). It never
learns: adapters beside it do.
"""

from collections.abc import Callable
import functools
import math
import re

from flax import struct, traverse_util
import jax
from jax import lax
import jax.numpy as jnp
from jaxtyping import Array, Float, UInt8
import numpy as np

from longstraw_jax.models.model import Params

BLOCK = 64  # values that share a magnitude
GROUP = 256  # magnitudes that share a scale

# 2305.14314, appendix E.
NF4_VALUES = (
  -1.0,
  -0.6961928009986877,
  -0.5250730514526367,
  -0.39491748809814453,
  -0.28444138169288635,
  -0.18477343022823334,
  -0.09105003625154495,
  0.0,
  0.07958029955625534,
  0.16093020141124725,
  0.24611230194568634,
  0.33791524171829224,
  0.44070982933044434,
  0.5626170039176941,
  0.7229568362236023,
  1.0,
)
_VALUES = np.array(NF4_VALUES, np.float32)
_BETWEEN = (_VALUES[1:] + _VALUES[:-1]) / 2


@struct.dataclass
class Nf4:
  """A matrix in 4 bits, or a stack of them.

  The axes before those of the matrix (the repeats of a stage, experts) are
  axes of every array, so that a scan or an index takes one matrix out. B is
  its number of blocks, its values taken row by row and padded with zeros.

  Attributes:
    codes: two values a byte, the first in the high half.
    blocks: 8-bit magnitudes of the blocks.
    scales: of the groups of 256 blocks.
    offset: the smallest magnitude.
    matrix_shape: of one matrix.
    dtype: that it expands to.
  """

  codes: UInt8[Array, "*stack 32*B"]
  blocks: UInt8[Array, "*stack B"]
  scales: Float[Array, "*stack groups"]
  offset: Float[Array, "*stack"]
  matrix_shape: tuple[int, ...] = struct.field(pytree_node=False)
  dtype: jnp.dtype = struct.field(pytree_node=False)

  @property
  def shape(self) -> tuple[int, ...]:
    """What it expands to, the stack's axes first."""
    return (*self.codes.shape[:-1], *self.matrix_shape)

  @property
  def ndim(self) -> int:
    """Axes of what it expands to."""
    return len(self.shape)

  @property
  def size(self) -> int:
    """Parameters that it stands for."""
    return math.prod(self.shape)

  @property
  def nbytes(self) -> int:
    """Bytes that it takes."""
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(self))

  def expand(self) -> Float[Array, "*stack D F"]:
    """The values, in float32 until one cast at the end."""
    halves = jnp.stack([self.codes >> 4, self.codes & 15], axis=-1)
    stack = self.codes.shape[:-1]
    codes = halves.reshape(*stack, -1, BLOCK)
    values = jnp.asarray(_VALUES).at[codes].get(mode="promise_in_bounds")
    magnitudes = _magnitudes(self.blocks, self.scales, self.offset)
    values = (values * magnitudes[..., None]).reshape(*stack, -1)
    values = values[..., : math.prod(self.matrix_shape)]
    return values.reshape(self.shape).astype(self.dtype)


def _magnitudes(blocks, scales, offset):
  """offset + scale code of every block, [*stack, B]."""
  scales = jnp.repeat(scales, GROUP, axis=-1)[..., : blocks.shape[-1]]
  return offset[..., None] + scales * blocks.astype(jnp.float32)


def _in_rows(x, width: int):
  """[n] -> [rows, width], padded with zeros."""
  return jnp.pad(x, (0, -x.shape[0] % width)).reshape(-1, width)


def _quantize_one(matrix):
  """Arrays of one matrix."""
  values = _in_rows(matrix.reshape(-1).astype(jnp.float32), BLOCK)
  exact = jnp.abs(values).max(-1)
  offset = exact.min()
  above = _in_rows(exact - offset, GROUP)
  # With 16 bits in the scale, scale * code is exact: the sum in _magnitudes
  # is rounded once, whether or not a program fuses it, and so always alike.
  scales = lax.reduce_precision(above.max(-1) / 255, 8, 15)
  steps = jnp.where(scales > 0, scales, 1.0)[:, None]
  blocks = jnp.round(above / steps).astype(jnp.uint8)
  blocks = blocks.reshape(-1)[: exact.shape[0]]
  magnitudes = _magnitudes(blocks, scales, offset)
  shares = values / jnp.where(magnitudes > 0, magnitudes, 1.0)[:, None]
  codes = (shares[..., None] > _BETWEEN).sum(-1, dtype=jnp.uint8)
  codes = codes.reshape(-1, 2)
  return (codes[:, 0] << 4) | codes[:, 1], blocks, scales, offset


@functools.partial(jax.jit, static_argnums=1)
def quantize_nf4(x: Float[Array, "*stack D F"], axes: int = 2) -> Nf4:
  """Nearest NF4 matrix, one matrix of a stack at a time.

  What `expand` gave in float32 is quantized to the same bits. Otherwise a
  value is off by at most 0.152 of the largest magnitude of its block, half
  the widest gap between NF4_VALUES, and by half a step of that magnitude.

  Args:
    x: values, finite.
    axes: trailing axes that make one matrix; those before are the stack's.

  Returns:
    The matrix, which expands to the dtype of x.
  """
  stack, matrix = x.shape[: x.ndim - axes], x.shape[x.ndim - axes :]
  parts = lax.map(_quantize_one, x.reshape(-1, *matrix))
  parts = [part.reshape(*stack, *part.shape[1:]) for part in parts]
  return Nf4(*parts, matrix_shape=matrix, dtype=x.dtype)


# Leaves that their modules read through models/layers.py, which expands them.
_MATRIX = re.compile(r"stage_\d+/.*(?<!router)/(kernel|experts_\w+)")


def is_matrix(path: str) -> bool:
  """Whether a path names a layer's matrix, routers excepted."""
  return _MATRIX.fullmatch(path) is not None


def quantize_base(
  params: Params, predicate: Callable[[str], bool] = is_matrix
) -> Params:
  """Puts frozen matrices into 4 bits.

  Args:
    params: with a frozen base, as add_lora returns it.
    predicate: which frozen leaves, by their path a/b/c. Stacked over repeats
      as [L, D, F] or, of experts, [L, E, D, F].

  Raises:
    ValueError: no frozen leaf is chosen, or one is no matrix.
  """
  flat = traverse_util.flatten_dict(params.frozen, sep="/")
  chosen = [
    path
    for path, x in flat.items()
    if predicate(path) and not isinstance(x, Nf4)
  ]
  if not chosen:
    raise ValueError(
      f"none of the {len(flat)} frozen leaves is a matrix to quantize: freeze "
      "the base first, as add_lora does"
    )
  for path in chosen:
    if flat[path].ndim < 2:
      raise ValueError(
        f"{path} has shape {flat[path].shape}: only matrices are quantized"
      )
  quantized = {path: quantize_nf4(flat[path]) for path in chosen}
  return params.replace(
    frozen=traverse_util.unflatten_dict(flat | quantized, sep="/")
  )
