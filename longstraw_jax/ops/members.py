"""Rules of jax.vmap for functions that bring their own, and members of a loss.

Calls that jax.vmap batches have gradients of their own: that is what
jax.vmap(jax.grad(loss)) asks for. Members of one loss are another matter: the
walk over a batch of them differentiates their sum, and what they share, pages
and experts, has one gradient, which must not exist once a member. Which of the
two a jax.vmap is cannot be seen from which arrays it batches, so the walk says
it: it gives every member its number, an int32 [] that has the axis of that
jax.vmap and of no other, and hands the number on to whatever is shared
(Segment.member, Shared.member).

`batched` trees say which leaves have the axis of the jax.vmap at hand.
"""

from collections.abc import Callable
import functools

import jax
from jax import lax
from jax.custom_batching import custom_vmap
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


def _split(function: Callable, batched: list, args: tuple):
  """`function` of the leaves that have the axis alone, and those leaves."""
  leaves, structure = jax.tree.flatten(args)
  leaves = [jnp.asarray(x) for x in leaves]  # constants of numpy have no `at`
  has_axis = jax.tree.leaves(batched)
  own = [x for x, has in zip(leaves, has_axis, strict=True) if has]

  def call(own):
    rest = iter(own)
    both = zip(leaves, has_axis, strict=True)
    merged = [next(rest) if has else x for x, has in both]
    return function(*jax.tree.unflatten(structure, merged))

  return call, own


def side_by_side(
  function: Callable, batched: list, args: tuple
) -> tuple[Tree, Tree]:
  """The rule that gives every call results of its own, all calls at once.

  What calls share is not copied for each.
  """
  call, own = _split(function, batched, args)
  out = jax.vmap(call)(own)
  return out, every_leaf(out, True)


def one_by_one(
  function: Callable, batched: list, args: tuple
) -> tuple[Tree, Tree]:
  """side_by_side, one call after the other."""
  call, own = _split(function, batched, args)
  out = lax.map(call, own)
  return out, every_leaf(out, True)


def one_gradient_for_members(
  apart: Callable,
  together: Callable,
  *,
  several: Callable = side_by_side,
  shared_learns: bool = True,
) -> Callable:
  """A backward pass with one gradient of what members of a loss share.

  Args:
    apart: (own, shared) -> (gradient of own, gradient of shared), of one call.
    together: (members, own, shared) -> the same of a batch of members, whose
      `own` has a leading axis; the gradient of `shared` is their sum.
    several: how other batches of calls are run, each with gradients of its own.
    shared_learns: whether there is a gradient of `shared`; where there is none
      every batch may run together.

  Returns:
    (member, own, shared) -> (gradient of own, gradient of shared), with the
    member's number or None.
  """

  @custom_vmap
  def backward(member, own, shared):
    del member
    return apart(own, shared)

  @backward.def_vmap
  def rule(axis_size, batched, member, own, shared):
    numbered, has_own, has_shared = batched
    if any_leaf(has_shared) or not (numbered or not shared_learns):
      batched, args = [has_own, has_shared], (own, shared)
      if member is not None and not numbered:
        # Calls inside a member: each must meet the rule for members again.
        return one_by_one(functools.partial(backward, member), batched, args)
      return several(apart, batched, args)
    member = None if numbered else member
    if not any_leaf(has_own):
      # Nothing that the members read differs, so what came out was one for all
      # and its cotangent is their sum already.
      out = backward(member, own, shared)
      return out, every_leaf(out, False)
    (own,) = give_member_axis(axis_size, [has_own], (own,))
    out = together(axis_size, own, shared)
    return out, (every_leaf(out[0], True), every_leaf(out[1], False))

  return backward
