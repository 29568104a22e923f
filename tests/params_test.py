"""Trainable against frozen leaves, and narrow dtypes."""

import dataclasses

from absl.testing import parameterized
from flax import traverse_util
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from longstraw_jax import (
  PRESETS,
  Group,
  Model,
  PolicyObjective,
  capture,
  group_gradient,
  replay,
  split_params,
)
from longstraw_jax.objectives import LikelihoodObjective
from longstraw_jax.steps import make_learner
from longstraw_jax.testing.baselines import conventional_gradient
from longstraw_jax.testing.compare import assert_gradients_close
from longstraw_jax.train_config import OptimizerConfig

PROMPT = jnp.arange(23) * 7 % 61
GROUP = Group.create(
  [[3, 9, 27, 20, 60], [5, 25, 3, 0, 0]],
  [5, 3],
  rewards=[1.0, 0.0],
  advantages=[1.0, -1.0],
)


def _trainable(path: str) -> bool:
  return "mixer/" in path and "proj" in path


def _model(dtype: str) -> Model:
  config = PRESETS["tiny-hybrid"]
  return Model(dataclasses.replace(config, dtype=dtype, param_dtype=dtype))


def _gap(a, b) -> float:
  """Norm of the difference over the norm of b, all leaves together."""
  flat = lambda tree: np.concatenate(
    [np.asarray(x, np.float64).ravel() for x in jax.tree.leaves(tree)]
  )
  return np.linalg.norm(flat(a) - flat(b)) / np.linalg.norm(flat(b))


class FrozenTest(parameterized.TestCase):
  @pytest.mark.slow
  def test_gradients_and_optimizer_exist_for_trainable_leaves_only(self):
    model = _model("float64")
    params = model.init(jax.random.key(0), _trainable)
    everything = model.init(jax.random.key(0))
    self.assertFalse(everything.frozen)
    jax.tree.map(
      np.testing.assert_array_equal, params.merged(), everything.trainable
    )
    paths = traverse_util.flatten_dict(params.trainable, sep="/")
    self.assertTrue(all(map(_trainable, paths)))
    self.assertGreater(len(paths), 5)

    objective = PolicyObjective()
    _, grads, _ = group_gradient(
      model, params, PROMPT, GROUP, objective, chunk_size=8, block_size=2
    )
    _, oracle, _ = conventional_gradient(
      model, params, PROMPT, GROUP, objective
    )
    self.assertEqual(
      jax.tree.structure(grads), jax.tree.structure(params.trainable)
    )
    assert_gradients_close(grads, oracle, 1e-12)
    learner = make_learner(params, OptimizerConfig())
    moments = [x for x in jax.tree.leaves(learner.opt_state) if x.ndim]
    self.assertLen(moments, 2 * len(paths))

  @pytest.mark.slow
  def test_frozen_leaves_have_no_gradient_in_the_composed_form(self):
    model = _model("float64")
    params = model.init(jax.random.key(0), _trainable)

    def loss_of(params):
      state = capture(model, params, PROMPT, chunk_size=8, grad_scope="full")
      return replay(model, params, state, GROUP.responses, GROUP.lengths).sum()

    grads = jax.grad(loss_of)(params)
    self.assertEqual(
      jax.tree.structure(grads.frozen), jax.tree.structure(params.frozen)
    )
    for leaf in jax.tree.leaves(grads.frozen):
      np.testing.assert_array_equal(leaf, 0)
    for leaf in jax.tree.leaves(grads.trainable):
      self.assertGreater(float(jnp.abs(leaf).max()), 0)

  def test_splitting_keeps_every_leaf_once(self):
    tree = _model("float32").init(jax.random.key(0)).trainable
    params = split_params(tree, lambda path: path.startswith("stage_0"))
    self.assertEqual(set(params.frozen), {"embed", "head", "final_norm"})
    self.assertEqual(
      jax.tree.structure(params.merged()), jax.tree.structure(tree)
    )


class NarrowTest(parameterized.TestCase):
  @pytest.mark.slow
  def test_bfloat16_is_as_near_to_float32_as_plain_autodiff_is(self):
    narrow, wide = _model("bfloat16"), _model("float32")
    params = narrow.init(jax.random.key(0))
    rounded = jax.tree.map(lambda x: x.astype(jnp.float32), params)
    # Linear in the log-probabilities: a ratio would magnify their rounding.
    objective = LikelihoodObjective()
    ours = lambda model, params: group_gradient(
      model, params, PROMPT, GROUP, objective, chunk_size=8
    )[:2]
    loss, grads = ours(narrow, params)
    exact_loss, exact = ours(wide, rounded)
    _, plain, _ = conventional_gradient(
      narrow, params, PROMPT, GROUP, objective
    )
    for leaf in jax.tree.leaves(grads):
      self.assertEqual(leaf.dtype, jnp.float32)
    self.assertLess(abs(float(loss / exact_loss) - 1), 0.01)
    self.assertLess(_gap(grads, exact), 2 * _gap(plain, exact))

  def test_recurrent_carry_stays_wide(self):
    model = _model("bfloat16")
    params = model.init(jax.random.key(0))
    state = capture(model, params, PROMPT, chunk_size=8)
    carry = state.carry["stage_0"]["layer_0"]
    self.assertEqual(carry.matrix.dtype, jnp.float32)
    self.assertEqual(state.pages["stage_0"]["layer_1"]["k"].dtype, jnp.bfloat16)
