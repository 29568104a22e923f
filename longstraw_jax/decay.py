"""Which parameters weight decay shrinks.

Matrices: what multiplies a vector of features, or is looked up. A gain, a bias
or a rate has no size that decay would keep small: it has a value, and at zero a
norm is off and a decay rate is one.
"""

import re

import jax

from longstraw_jax.types import Tree

# Whatever their shape, in mixers of one's own too.
_NEVER = re.compile(r"(norm|bias|A_log)(/|$)")


def decayed(tree: Tree, pattern: str | None = None) -> Tree:
  """True for every leaf that decays.

  Args:
    tree: trainable parameters, nested dicts. Those of stage_i are stacked over
      its repeats, an axis that is none of the parameter's own.
    pattern: regular expression, searched in the leaves' paths a/b/c; None takes
      leaves of two axes or more that are no norm, bias or A_log.
  """

  def one(keys, leaf) -> bool:
    path = jax.tree_util.keystr(keys, simple=True, separator="/")
    if pattern is not None:
      return re.search(pattern, path) is not None
    axes = leaf.ndim - path.startswith("stage_")
    return axes >= 2 and not _NEVER.search(path)

  return jax.tree_util.tree_map_with_path(one, tree)
