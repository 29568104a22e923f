"""Routing replay: score and replay follow recorded experts and keys."""

import dataclasses
import functools

from absl.testing import parameterized
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from longstraw_jax import (
  PRESETS,
  Group,
  Model,
  capture,
  group_gradient,
  replay_scores,
  rollout,
)
from longstraw_jax.testing.compare import assert_gradients_close

TOLERANCE = {"float64": 1e-12}
PROMPT = np.random.default_rng(0).integers(0, 61, 30).astype(np.int32)
ROOM, GROUP_SIZE = 6, 3


@functools.cache
def build(name: str):
  """A model, parameters away from their first values, and a state."""
  config = PRESETS[name]
  config = dataclasses.replace(
    config,
    dtype="float64",
    param_dtype="float64",
    saved="everything",
    stages=(dataclasses.replace(config.stages[-1], repeats=1),),
  )
  model, random = Model(config), np.random.default_rng(1)
  params = jax.tree.map(
    lambda x: x + 0.1 * random.normal(size=x.shape),
    jax.jit(model.init)(jax.random.key(0)),
  )
  return model, params, capture(model, params, PROMPT, chunk_size=8)


@functools.cache
def sampled(name: str) -> Group:
  """A rollout with its choices."""
  model, params, state = build(name)
  return rollout(
    model,
    params,
    state,
    jax.random.key(2),
    group_size=GROUP_SIZE,
    max_tokens=ROOM,
    record_choices=True,
  )


def other_choices(choices, seed=3):
  """Random ones in their place: experts, or positions anywhere before."""
  random = np.random.default_rng(seed)

  def draw(path, x):
    name = path[-1].key
    if name == "experts":
      ids = random.permuted(np.tile(np.arange(6), (*x.shape[:-1], 1)), axis=-1)
      return jnp.asarray(ids[..., : x.shape[-1]], jnp.int32)
    first = random.permuted(np.tile(np.arange(25), (*x.shape[:-1], 1)), axis=-1)
    return jnp.asarray(first[..., : x.shape[-1]], jnp.int32)

  return jax.tree_util.tree_map_with_path(draw, choices)


@dataclasses.dataclass(frozen=True)
class Weighted:
  """A loss that reads every score."""

  def __call__(self, logprobs, entropy, group):
    scores = jnp.tanh(logprobs) + 0.1 * entropy
    return (scores * group.loss_mask).sum(), {}


def gradient(name, group, **options):
  model, params, _ = build(name)
  return group_gradient(
    model,
    params,
    PROMPT,
    group.replace(
      rewards=jnp.ones(GROUP_SIZE), advantages=jnp.ones(GROUP_SIZE)
    ),
    Weighted(),
    chunk_size=8,
    grad_scope="full",
    **options,
  )


class ChoicesTest(parameterized.TestCase):
  def test_recorded_choices_are_those_of_the_live_weights(self):
    self.check_recorded("tiny-moe")

  def check_recorded(self, name):
    group = sampled(name)
    _, wanted, _ = gradient(name, group.replace(choices=None))
    _, grads, metrics = gradient(name, group)
    self.assertEqual(metrics["choices_changed_share"], 0.0)
    jax.tree.map(np.testing.assert_array_equal, grads, wanted)

  @pytest.mark.slow
  def test_other_choices_are_followed_and_counted(self):
    self.follow("tiny-moe")

  def follow(self, name):
    model, params, _ = build(name)
    group = sampled(name)
    group = group.replace(choices=other_choices(group.choices))
    loss, grads, metrics = gradient(name, group)
    plain, _, _ = gradient(name, group.replace(choices=None))
    self.assertGreater(abs(loss - plain), 1e-3)
    self.assertGreater(metrics["choices_changed_share"], 0.3)
    return model, params, group, loss, grads, metrics

  def follow_in_every_form(self, name):
    """Replay in blocks and batches, and both forms of the gradient."""
    model, params, group, loss, grads, metrics = self.follow(name)
    _, found, again = gradient(name, group, block_size=2, members_at_once=2)
    assert_gradients_close(found, grads, TOLERANCE["float64"])
    np.testing.assert_allclose(
      again["choices_changed_share"], metrics["choices_changed_share"]
    )

    def composed(trainable):
      tree = params.replace(trainable=trainable)
      state = capture(model, tree, PROMPT, chunk_size=8, grad_scope="full")
      scores = replay_scores(
        model,
        tree,
        state,
        group.responses,
        group.lengths,
        choices=group.choices,
      )
      return Weighted()(*scores, group)[0]

    found, grads_again = jax.value_and_grad(composed)(params.trainable)
    np.testing.assert_allclose(found, loss, TOLERANCE["float64"])
    assert_gradients_close(grads_again, grads, TOLERANCE["float64"])


@pytest.mark.slow
class MoreChoicesTest(parameterized.TestCase):
  def test_recorded_choices_are_those_of_the_live_weights(self):
    ChoicesTest().check_recorded("tiny-glm")

  @parameterized.parameters("tiny-moe", "tiny-glm")
  def test_other_choices_in_every_form(self, name):
    ChoicesTest().follow_in_every_form(name)

  def test_gradient_with_forced_choices_equals_finite_differences(self):
    """The slope with experts held: nothing jumps."""
    model, params, _ = build("tiny-moe")
    group = sampled("tiny-moe")
    group = group.replace(choices=other_choices(group.choices))
    random = np.random.default_rng(4)
    direction = jax.tree.map(
      lambda x: random.normal(size=x.shape), params.trainable
    )

    def loss(step):
      moved = jax.tree.map(
        lambda x, d: x + step * d, params.trainable, direction
      )
      tree = params.replace(trainable=moved)
      state = capture(model, tree, PROMPT, chunk_size=8)
      scores = replay_scores(
        model,
        tree,
        state,
        group.responses,
        group.lengths,
        choices=group.choices,
      )
      return Weighted()(*scores, group)[0]

    slope = (loss(1e-6) - loss(-1e-6)) / 2e-6
    _, grads, _ = gradient("tiny-moe", group)
    products = jax.tree.map(lambda g, d: (g * d).sum(), grads, direction)
    np.testing.assert_allclose(sum(jax.tree.leaves(products)), slope, 1e-4)
