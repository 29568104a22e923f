"""An optimizer step, and the wide copies of narrow weights that it is taken on.

A bfloat16 weight has 8 bits: a step of less than 1/512 of its size is rounded
away, and so is each of the hundred after it. Such leaves have a copy in float32
here, which takes the step; the weight itself is always that copy, rounded once.
"""

from flax import struct
import jax
import jax.numpy as jnp
import optax

from longstraw_jax.ops.precision import widen
from longstraw_jax.train_config import OptimizerConfig
from longstraw_jax.types import Tree


@struct.dataclass
class OptimizerState:
  """What the optimizer keeps of the trainable leaves.

  Attributes:
    master: wide copies of the leaves that are narrower; None in the place of
      the others.
    adamw: moments, float32 or wider, and counts.
  """

  master: Tree
  adamw: Tree


def init_optimizer(config: OptimizerConfig, trainable: Tree) -> OptimizerState:
  """The state before the first step."""
  master = jax.tree.map(config.master_copy, trainable)
  adamw = config.build().init(_learning(trainable, master))
  # As gradients are: moments in bfloat16 would turn float32 at the first step.
  wide = lambda x: widen(x) if jnp.issubdtype(x.dtype, jnp.floating) else x
  return OptimizerState(master=master, adamw=jax.tree.map(wide, adamw))


def _learning(trainable: Tree, master: Tree) -> Tree:
  """The copies, and the leaves that have none."""
  return jax.tree.map(
    lambda leaf, copy: leaf if copy is None else copy, trainable, master
  )


def optimizer_step(
  config: OptimizerConfig, trainable: Tree, state: OptimizerState, grads: Tree
) -> tuple[Tree, OptimizerState]:
  """The leaves and the state one step on."""
  learning = _learning(trainable, state.master)
  updates, adamw = config.build().update(grads, state.adamw, learning)
  learning = optax.apply_updates(learning, updates)
  master = jax.tree.map(
    lambda new, copy: None if copy is None else new, learning, state.master
  )
  rounded = jax.tree.map(
    lambda new, leaf: new.astype(leaf.dtype), learning, trainable
  )
  return rounded, OptimizerState(master=master, adamw=adamw)
