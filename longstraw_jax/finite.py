"""Numbers that stopped being finite: what is not applied, what is not saved."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool
import numpy as np

from longstraw_jax.checks import listed
from longstraw_jax.state import named_leaves
from longstraw_jax.types import Tree

MOST_LISTED = 5  # leaves named in an error message


class NonFiniteError(RuntimeError):
  """A run whose gradients, or whose weights, stopped being finite."""


@jax.jit
def _finite(leaves: Sequence[Array]) -> Bool[Array, "N"]:
  return jnp.stack([jnp.isfinite(x).all() for x in leaves])


def nonfinite_leaves(tree: Tree) -> list[str]:
  """Paths of the leaves in which a NaN or an infinity stands.

  On a mesh every process must ask, and all get the same answer.
  """
  inexact = {
    name: leaf
    for name, leaf in named_leaves(tree).items()
    if jnp.issubdtype(leaf.dtype, jnp.inexact)
  }
  if not inexact:
    return []
  finite = np.asarray(_finite(list(inexact.values())))
  return [name for name, ok in zip(inexact, finite, strict=True) if not ok]


def check_finite(tree: Tree, what: str, remedy: str) -> None:
  """Refuses a tree in which a number is not finite.

  Args:
    tree: weights, moments and whatever else a run must have whole.
    what: it is, for the message.
    remedy: what to do about it.

  Raises:
    NonFiniteError: naming the leaves.
  """
  bad = nonfinite_leaves(tree)
  if bad:
    raise NonFiniteError(
      f"{what} holds numbers that are not finite, in {len(bad)} leaves: "
      f"{listed(bad, MOST_LISTED)}. {remedy}"
    )
