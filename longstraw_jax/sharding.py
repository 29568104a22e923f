"""Meshes: one table of logical axes, and placing arrays by it.

Everything runs on the mesh that `jax.set_mesh` makes current, with the same
calls as without one:

  mesh = make_mesh(context=4, member=2)
  with jax.set_mesh(mesh):
    params = place_at_rest(params, mesh)
    loss, grads, metrics = group_gradient(model, params, prompt, group, ...)

Arrays keep their global shapes. A module says what its axes are, by name,

  q_TNH = constrain(q_TNH, None, "heads", None)

and the table says which mesh axis that is. XLA's partitioner moves what the
constraints leave open and reduces gradients, which it derives from the
forward; only what must never be moved, reads of pages and the experts'
products, is written per device (ops/pages, ops/experts).
"""

from collections.abc import Callable, Sequence

import jax
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
import numpy as np

from longstraw_jax.types import Tree

CONTEXT, MEMBER = "context", "member"
WHOLE = PartitionSpec()  # every device holds all of it

# Logical axis -> mesh axis. A new mixer names its axes by the left column.
MESH_AXES = {
  "tokens": CONTEXT,  # of one call
  "rows": CONTEXT,  # of pages, chunk-striped
  "heads": CONTEXT,
  "experts": CONTEXT,
  "vocab": CONTEXT,
  "weights": CONTEXT,  # of a matrix at rest
  "members": MEMBER,
}


def make_mesh(
  context: int = 1, member: int = 1, devices: Sequence | None = None
) -> Mesh:
  """A mesh of `context` x `member` devices.

  Args:
    context: devices that share one prompt's pages, weights and experts.
    member: groups of devices that replay members of their own.
    devices: all of the process's backend by default.

  Raises:
    ValueError: sizes below 1, or not that many devices.
  """
  for name, size in ((CONTEXT, context), (MEMBER, member)):
    if size < 1:
      raise ValueError(f"{name}={size}: give at least 1 device")
  devices = jax.devices() if devices is None else list(devices)
  if context * member > len(devices):
    raise ValueError(
      f"context={context} x member={member} needs {context * member} devices, "
      f"but there are {len(devices)}: make either smaller"
    )
  # Member outermost, so that the context axis, which talks most, is near.
  grid = np.array(devices[: context * member]).reshape(member, context)
  return Mesh(grid, (MEMBER, CONTEXT), axis_types=(AxisType.Auto,) * 2)


def num_shards(axis: str) -> int:
  """Devices that the current mesh gives a logical axis; 1 without a mesh."""
  mesh = jax.sharding.get_abstract_mesh()
  if mesh.empty or mesh.manual_axes:
    return 1
  return mesh.shape.get(MESH_AXES[axis], 1)


def spec(*axes: str | None) -> PartitionSpec:
  """The mesh axes of logical ones; None is not sharded."""
  return PartitionSpec(*(axis and MESH_AXES[axis] for axis in axes))


def per_device(fn: Callable, in_specs: Tree, out_specs: Tree) -> Callable:
  """`fn` as every device of the current mesh runs it on its parts.

  What `fn` gives whole it must have made equal everywhere, by sums over the
  devices: nothing checks that.
  """
  return jax.shard_map(
    fn, in_specs=in_specs, out_specs=out_specs, check_vma=False
  )


def constrain(x: jax.Array, *axes: str | None) -> jax.Array:
  """Shards an intermediate array by its logical axes.

  Where an axis is one that its devices do not divide, the array is left to the
  partitioner; without a mesh nothing happens.

  Args:
    x: the array.
    *axes: one logical name a dimension, or None for not sharded.
  """
  mesh = jax.sharding.get_abstract_mesh()
  if mesh.empty or mesh.manual_axes or mesh.size == 1:
    return x
  if len(axes) != x.ndim:
    raise ValueError(f"{len(axes)} axes {axes} for an array of shape {x.shape}")
  if all(
    axis is None or size % num_shards(axis) == 0
    for axis, size in zip(axes, x.shape, strict=True)
  ):
    return lax.with_sharding_constraint(x, spec(*axes))
  return x


def member_vmap(fn: Callable, number: int, **axes) -> Callable:
  """jax.vmap over members, dealt to the mesh's devices where they divide."""
  shards = num_shards("members")
  dealt = shards > 1 and number % shards == 0
  name = MESH_AXES["members"] if dealt else None
  return jax.vmap(fn, spmd_axis_name=name, **axes)


# --- Arrays at rest --------------------------------------------------------


SMALL = 2**16  # entries of a layer's vector that are not worth sharing out


def rest_axes(path: tuple[str, ...], shape: tuple[int, ...]) -> tuple:
  """Logical axes of a parameter at rest: its first axis that divides.

  Stacked leaves have their repeats first, which the layer scan cuts: it stays
  whole. Vectors stay whole too, unless they are a matrix in a stored form.
  """
  first = 1 if path[0].startswith("stage_") else 0
  axes: list[str | None] = [None] * len(shape)
  if len(shape) - first >= 2 or shape and shape[-1] >= SMALL:
    for i in range(first, len(shape)):
      if shape[i] % num_shards("weights") == 0:
        axes[i] = "weights"
        break
  return tuple(axes)


def rest_specs(tree: Tree) -> Tree:
  """Partition specs of parameters, gradients or optimizer state at rest.

  Args:
    tree: nested dicts like the parameters', of arrays or shapes; whatever
      stands above or below the parameters' own names may be there too.
  """

  def one(path, x):
    names = [getattr(key, "key", getattr(key, "name", None)) for key in path]
    names = [name for name in names if isinstance(name, str)]
    known = [name for name in names if name not in ("trainable", "frozen")]
    starts = [i for i, name in enumerate(known) if name.startswith("stage_")]
    known = known[starts[0] :] if starts else known
    return spec(*rest_axes(tuple(known) or ("",), x.shape))

  return jax.tree_util.tree_map_with_path(one, tree)


def carry_specs(tree: Tree, lead: int = 1) -> Tree:
  """Specs of carries: the first axis that divides, for most that of heads.

  Args:
    tree: stacked carries [L, ...].
    lead: axes before those of one layer's carry.
  """
  shards = num_shards("heads")

  def one(x):
    axes: list[str | None] = [None] * x.ndim
    for i in range(lead, x.ndim):
      if x.shape[i] % shards == 0:
        axes[i] = "heads"
        break
    return spec(*axes)

  return jax.tree.map(one, tree)


def constrain_tree(tree: Tree, specs: Tree) -> Tree:
  """Shards a tree of intermediate arrays by specs; nothing without a mesh."""
  mesh = jax.sharding.get_abstract_mesh()
  if mesh.empty or mesh.manual_axes or mesh.size == 1:
    return tree
  return jax.tree.map(lax.with_sharding_constraint, tree, specs)


def constrain_at_rest(tree: Tree) -> Tree:
  """Gives parameters, or sums of their gradients, their sharding at rest."""
  if num_shards("weights") == 1:
    return tree
  return constrain_tree(tree, rest_specs(tree))


def place_at_rest(tree: Tree, mesh: Mesh) -> Tree:
  """Puts parameters or optimizer state on a mesh, sharded at rest.

  With several processes every one of them gives the same values and keeps the
  parts of its own devices.
  """
  with jax.set_mesh(mesh):
    specs = rest_specs(tree)

  def put(x, spec):
    if jax.process_count() > 1:
      x = np.asarray(x)  # an array of this process's own devices may not move
    return jax.device_put(x, NamedSharding(mesh, spec))

  return jax.tree.map(put, tree, specs)


def replicate(tree: Tree) -> Tree:
  """Gives every device all of what a host is about to read."""
  return jax.tree.map(lambda x: constrain(x, *(None,) * x.ndim), tree)
