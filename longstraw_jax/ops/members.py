"""Rules of jax.vmap over members, for functions that bring their own.

`batched` trees say which leaves have the member axis.
"""

from collections.abc import Callable

import jax
from jax import lax
import jax.numpy as jnp

from longstraw_jax.types import Tree


def any_leaf(tree: Tree) -> bool:
  """Whether any leaf of a tree of booleans is true."""
  return any(jax.tree.leaves(tree))


def every_leaf(tree: Tree, value: bool) -> Tree:
  """The tree with one value at every leaf."""
  return jax.tree.map(lambda _: value, tree)


def give_member_axis(axis_size: int, batched: Tree, tree: Tree) -> Tree:
  """Gives every leaf that vmap left alone the member axis."""
  leaves, structure = jax.tree.flatten(tree)
  given = [
    x if is_batched else jnp.broadcast_to(x, (axis_size, *jnp.shape(x)))
    for is_batched, x in zip(jax.tree.leaves(batched), leaves, strict=True)
  ]
  return jax.tree.unflatten(structure, given)


def fold_members(tree: Tree) -> Tree:
  """[M, T, ...] -> [M T, ...]: members are only more tokens."""
  return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), tree)


def unfold_members(tree: Tree, axis_size: int) -> Tree:
  """The inverse of fold_members."""
  return jax.tree.map(lambda x: x.reshape(axis_size, -1, *x.shape[1:]), tree)


def one_by_one(
  function: Callable, axis_size: int, batched: list, args: tuple
) -> tuple[Tree, Tree]:
  """The rule where members share too little to be folded."""
  args = give_member_axis(axis_size, batched, args)
  out = lax.map(lambda args: function(*args), args)
  return out, every_leaf(out, True)
