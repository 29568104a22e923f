"""Tokens and members that the devices of a mesh deal among themselves.

Specs are for per_device; the other functions are called inside it. The devices
that share a call's tokens are those that share rows of pages and experts: one
mesh axis, see sharding.MESH_AXES.
"""

from jax import lax
from jax.sharding import PartitionSpec
from jaxtyping import Array

from longstraw_jax.sharding import MESH_AXES, WHOLE, num_shards, spec
from longstraw_jax.types import Tree

_TOKENS, _MEMBERS = MESH_AXES["tokens"], MESH_AXES["members"]


def members_divide(number: int) -> bool:
  """Whether the mesh deals so many members to its devices evenly."""
  return number % num_shards("members") == 0


def member_specs(folded: bool) -> PartitionSpec:
  """Specs of what has a row a token, of several members where folded."""
  return spec("members") if folded else WHOLE


def token_specs(tokens: int, folded: bool = False) -> PartitionSpec:
  """Specs of what reduce_scatter_tokens leaves of [T, ...].

  Args:
    tokens: T, of all members together.
    folded: whether they are those of members dealt to the devices.
  """
  members = num_shards("members") if folded else 1
  axes = [_MEMBERS] if folded else []
  if tokens // members % num_shards("tokens") == 0:
    axes.append(_TOKENS)
  return PartitionSpec(tuple(axes)) if axes else WHOLE


def local_tokens(x: Array) -> Array:
  """This device's share of [T, ...] that all have.

  All of it where the devices do not divide T.
  """
  share, rest = divmod(x.shape[0], lax.axis_size(_TOKENS))
  if rest:
    return x
  first = lax.axis_index(_TOKENS) * share
  return lax.dynamic_slice_in_dim(x, first, share)


def reduce_scatter_tokens(x: Array) -> Array:
  """The devices' sum, after which each has its share of the tokens [T, ...].

  All of them where the devices do not divide T.
  """
  if x.shape[0] % lax.axis_size(_TOKENS):
    return lax.psum(x, _TOKENS)
  return lax.psum_scatter(x, _TOKENS, scatter_dimension=0, tiled=True)


def all_gather_tokens(tree: Tree) -> Tree:
  """The devices' shares [T / n, ...] as [T, ...] on all of them."""
  return lax.all_gather(tree, _TOKENS, axis=0, tiled=True)


def sum_members(tree: Tree) -> Tree:
  """Sums over members on other devices."""
  return lax.psum(tree, _MEMBERS)
