"""Whether a captured state is of the weights that are about to use it.

A state is a function of the prompt and of every weight. After an optimizer step
it is another policy's: the scores are a little off, and a gradient through the
prompt is wrong without a sign of it. So capture leaves a checksum of its
weights on the state, and whoever reads the state compares it with theirs.
"""

import warnings

from flax import traverse_util
import jax
from jax import lax
import jax.numpy as jnp
from jaxtyping import Array, UInt32
import numpy as np

from longstraw_jax.checks import concrete
from longstraw_jax.lora import frozen_base
from longstraw_jax.models.model import Params
from longstraw_jax.state import PromptState
from longstraw_jax.types import Tree

_ODD = np.uint32(0x9E3779B1)  # 2^32 over the golden ratio


class StaleStateWarning(UserWarning):
  """A state of other weights is used where it changes scores alone."""


def _words(x: Array) -> UInt32[Array, "..."]:
  """The bits of an array in words of 32."""
  if x.dtype == bool or jnp.issubdtype(x.dtype, jnp.integer):
    return x.astype(jnp.uint32)
  size = x.dtype.itemsize
  kind = {1: jnp.uint8, 2: jnp.uint16}.get(size, jnp.uint32)
  return lax.bitcast_convert_type(x, kind).astype(jnp.uint32)


def _mixed(words: UInt32[Array, "..."]) -> UInt32[Array, "..."]:
  """Every word as another one that depends on all of its bits.

  The last steps of MurmurHash3 (Appleby, public domain), which lose nothing.
  """
  words = (words ^ (words >> 16)) * np.uint32(0x85EBCA6B)
  words = (words ^ (words >> 13)) * np.uint32(0xC2B2AE35)
  return words ^ (words >> 16)


def _checksum(x: Array, seed: UInt32[Array, ""]) -> UInt32[Array, ""]:
  """A sum over an array's words and where they stand; any one word changes it.

  Of integers, so that it is the same however devices share the array.
  """
  words = _words(x)
  place = jnp.zeros(words.shape, jnp.uint32)
  for axis, size in enumerate(words.shape):
    index = lax.broadcasted_iota(jnp.uint32, words.shape, axis)
    place = place * np.uint32(size % 2**32) + index
  words = _mixed(words + place * _ODD + seed)
  return seed * _ODD + words.sum(dtype=jnp.uint32)


@jax.jit
def _fingerprint(leaves: list[Array]) -> UInt32[Array, ""]:
  total = jnp.uint32(0)
  for leaf in leaves:
    # Each begins with the sum so far: the words of one leaf exist at a time.
    total = _checksum(leaf, total)
  return total


def fingerprint(params: Params, grad_scope: str) -> UInt32[Array, ""]:
  """A checksum of all weights that a state of this scope depends on.

  Of their values alone: not of which learn, nor of the devices that hold them.
  Under `prefix_frozen` those of the base, without adapters. One pass over the
  weights; XLA for CPUs keeps 4 bytes an entry of one leaf meanwhile.
  """
  if grad_scope == "prefix_frozen":
    params = frozen_base(params)
  flat = traverse_util.flatten_dict(params.merged(), sep="/")
  leaves = jax.tree.leaves([flat[path] for path in sorted(flat)])
  return _fingerprint(lax.stop_gradient(leaves))


def check_fresh(
  params: Params,
  state: PromptState,
  allow_stale: bool = False,
  *,
  scores_only: bool = False,
) -> bool:
  """Refuses a state of other weights where a gradient goes through it.

  Elsewhere it is said by a warning.

  Args:
    params: that are about to use it.
    state: of a prompt.
    allow_stale: no warning.
    scores_only: no gradient is asked for, whatever the state's scope.

  Returns:
    Whether it could be seen; values under jax.jit cannot, see `if_fresh`.

  Raises:
    ValueError: a state of other weights, under `full` and `tail`.
  """
  refuse = state.differentiated and not scores_only
  if state.fingerprint is None or (allow_stale and not refuse):
    return True
  made = concrete(state.fingerprint)
  now = concrete(fingerprint(params, state.grad_scope))
  if made is None or now is None:
    return not refuse
  if np.array_equal(made, now):
    return True
  text = (
    "the state was captured with other weights than those given (it is stamped "
    f"with step {concrete(state.step)}): capture it again"
  )
  if refuse:
    raise ValueError(text)
  text += ", or pass allow_stale=True if that is meant"
  warnings.warn(text, StaleStateWarning, stacklevel=3)
  return True


def if_fresh(params: Params, state: PromptState, tree: Tree) -> Tree:
  """The tree, and NaN in value and gradient if the state is of other weights.

  For traced values, of which none can be refused: what comes out is then no
  number at all, never one that is wrong.
  """
  fresh = state.fingerprint == fingerprint(params, state.grad_scope)
  # A factor, as jnp.where of the values would give gradients of zero.
  factor = jnp.where(fresh, 1.0, jnp.nan)
  return jax.tree.map(lambda x: x * factor.astype(x.dtype), tree)
