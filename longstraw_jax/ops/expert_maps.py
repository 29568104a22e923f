"""Experts' matrices: the forms they come in, one expert's map, its gradient.

Axes beyond types.py: E experts, I inputs, O outputs, B rows of a block, r the
rank of an adapter.
"""

import dataclasses

from flax import struct
import jax
from jax import lax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from longstraw_jax.ops.precision import wide_dtype, wide_einsum
from longstraw_jax.types import Tree


@struct.dataclass
class StackedLayer:
  """One layer's matrices, read where those of all layers are.

  A constant: no copy of the layer is made, and no gradient.

  Attributes:
    stack: [L, E, I, O], an array or a stored form.
    layer: which of the L.
  """

  stack: Tree
  layer: Int[Array, ""]

  @property
  def shape(self) -> tuple[int, ...]:
    """Of the one layer."""
    return self.stack.shape[1:]


@struct.dataclass
class Adapted:
  """Matrices and a low-rank adapter beside each of them: W_e + A_e B_e.

  Either part may be what alone learns; a scale is multiplied into one factor
  before.

  Attributes:
    matrices: [E, I, O], in any form that expert_mlp takes.
    a: [E, I, r].
    b: [E, r, O].
  """

  matrices: Tree
  a: Float[Array, "E I r"]
  b: Float[Array, "E r O"]

  @property
  def shape(self) -> tuple[int, ...]:
    """Of the matrices."""
    return self.matrices.shape


@struct.dataclass
class Shared:
  """Matrices that the members of one loss share.

  The gradient of what learns of them is the members' sum, made in one buffer;
  without this mark every call of a jax.vmap has a gradient of its own (see
  ops/members.py).

  Attributes:
    matrices: [E, I, O], in any other form that expert_mlp takes.
    member: the number of the member, under the jax.vmap over members.
  """

  matrices: Tree
  member: Int[Array, ""]


def adapted(matrices: Tree, a, b) -> Adapted | Shared:
  """Matrices with adapters beside them, Shared where the matrices are."""
  if isinstance(matrices, Shared):
    return matrices.replace(matrices=Adapted(matrices.matrices, a, b))
  return Adapted(matrices, a, b)


def _matrix(matrices, expert, dtype):
  """One expert's matrix as the products take it.

  Matrices in a stored form (see longstraw_jax.nf4) are expanded one by one.
  """
  at = (expert,)
  if isinstance(matrices, StackedLayer):
    matrices, at = matrices.stack, (matrices.layer, expert)

  def take(x):
    rest = x.shape[len(at) :]
    starts = (*at, *(jnp.int32(0) for _ in rest))
    return lax.dynamic_slice(x, starts, (*(1 for _ in at), *rest)).reshape(rest)

  matrix = jax.tree.map(take, matrices)
  if hasattr(matrix, "expand"):
    matrix = matrix.expand()
  return matrix.astype(dtype)


@struct.dataclass
class ExpertMap:
  """One expert's map as the products take it: W, or W + A B."""

  matrix: Float[Array, "I O"]
  a: Float[Array, "I r"] | None = None
  b: Float[Array, "r O"] | None = None

  @classmethod
  def of(cls, matrices, expert, dtype) -> "ExpertMap":
    if not isinstance(matrices, Adapted):
      return cls(_matrix(matrices, expert, dtype))
    parts = matrices.matrices, matrices.a, matrices.b
    return cls(*(_matrix(part, expert, dtype) for part in parts))

  def inner(self, x_BI) -> Float[Array, "B r"]:
    """x A, as the product with B takes it."""
    return wide_einsum("bi,ir->br", x_BI, self.a).astype(x_BI.dtype)

  def __call__(self, x_BI) -> Float[Array, "B O"]:
    y_BO = wide_einsum("bi,io->bo", x_BI, self.matrix)
    if self.a is None:
      return y_BO
    return y_BO + wide_einsum("br,ro->bo", self.inner(x_BI), self.b)

  def pull(self, dy_BO):
    """Cotangents of x and of x A, the latter None without an adapter."""
    dx_BI = wide_einsum("bo,io->bi", dy_BO, self.matrix)
    if self.a is None:
      return dx_BI, None
    dinner_Br = wide_einsum("bo,ro->br", dy_BO, self.b).astype(dy_BO.dtype)
    return dx_BI + wide_einsum("br,ir->bi", dinner_Br, self.a), dinner_Br


@dataclasses.dataclass(frozen=True)
class Parts:
  """What of one kind of map has a gradient."""

  matrices: bool = False
  adapter: bool = False

  def pick(self, matrices) -> Tree:
    """Those parts, None in the place of the others and of nothing at all."""
    if not isinstance(matrices, Adapted):
      return matrices if self.matrices else None
    if not (self.matrices or self.adapter):
      return None
    return Adapted(
      matrices=matrices.matrices if self.matrices else None,
      a=matrices.a if self.adapter else None,
      b=matrices.b if self.adapter else None,
    )


@struct.dataclass
class _Sum:
  """The gradient of one array of matrices while the loop runs.

  Summed in float32 or wider for the expert at hand and stored in the
  matrices' dtype, so that narrow matrices need no second buffer of them all.
  """

  one: Float[Array, "I O"]
  everyone: Float[Array, "E I O"]

  @classmethod
  def zeros_like(cls, matrices) -> "_Sum":
    wide = wide_dtype(matrices.dtype)
    return cls(
      one=jnp.zeros(matrices.shape[1:], wide),
      everyone=jnp.zeros_like(matrices),
    )

  def add(self, expert, is_first, a_BI, b_BO) -> "_Sum":
    """Adds one block's a^T b; an expert's first block starts it anew."""
    one = jnp.where(is_first, 0.0, self.one)
    one = one + wide_einsum("bi,bo->io", a_BI, b_BO).astype(one.dtype)
    rounded = one.astype(self.everyone.dtype)
    everyone = lax.dynamic_update_index_in_dim(
      self.everyone, rounded, expert, 0
    )
    return _Sum(one=one, everyone=everyone)


@struct.dataclass
class MapSums:
  """The gradients of one kind of map; None for those that nobody wants."""

  matrices: _Sum | None = None
  a: _Sum | None = None
  b: _Sum | None = None

  @classmethod
  def zeros_like(cls, matrices, wanted: Parts) -> "MapSums":
    adapted = isinstance(matrices, Adapted)
    own = matrices.matrices if adapted else matrices
    return cls(
      matrices=_Sum.zeros_like(own) if wanted.matrices else None,
      a=_Sum.zeros_like(matrices.a) if wanted.adapter else None,
      b=_Sum.zeros_like(matrices.b) if wanted.adapter else None,
    )

  def add(
    self, expert, is_first, one: ExpertMap, x_BI, dy_BO, dinner_Br
  ) -> "MapSums":
    """Adds a block's dW = x^T dy, dA = x^T (dy B^T) and dB = (x A)^T dy."""
    added = {}
    if self.matrices is not None:
      added["matrices"] = self.matrices.add(expert, is_first, x_BI, dy_BO)
    if self.a is not None:
      added["a"] = self.a.add(expert, is_first, x_BI, dinner_Br)
      added["b"] = self.b.add(expert, is_first, one.inner(x_BI), dy_BO)
    return self.replace(**added)

  def like(self, picked: Tree, total) -> Tree:
    """The totals in the form of what `Parts.pick` has picked."""
    if not isinstance(picked, Adapted):
      return self.matrices and total(self.matrices.everyone)
    parts = (self.matrices, self.a, self.b)
    return Adapted(*(part and total(part.everyone) for part in parts))
