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
from longstraw_jax.choices import response_choices
from longstraw_jax.state import tree_zeros
from longstraw_jax.steps import score_reference
from longstraw_jax.testing.baselines import group_scores
from longstraw_jax.testing.compare import assert_gradients_close
from longstraw_jax.train_config import EngineConfig
from longstraw_jax.types import Span

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
    idle = group.replace(loss_mask=jnp.zeros_like(group.loss_mask))
    _, grads, metrics = gradient(name, idle)
    self.assertEqual(metrics["choices_changed_share"], 0.0)
    jax.tree.map(lambda x: self.assertFalse(x.any()), grads)

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

  def test_a_reference_makes_its_own_choices(self):
    """Those recorded are the policy's."""
    model, params, _ = build("tiny-moe")
    group = sampled("tiny-moe")
    group = group.replace(choices=other_choices(group.choices))
    batch = lambda tree: jax.tree.map(lambda x: jnp.asarray(x)[None], tree)
    engine = EngineConfig(chunk_size=8, replay_choices=True)
    found = score_reference(
      model, engine, params, batch(group), batch(jnp.asarray(PROMPT))
    )
    wanted, _ = jax.jit(functools.partial(group_scores, model))(
      params, PROMPT, group
    )
    np.testing.assert_allclose(found[0], wanted, 1e-12)


def one_expert(value):
  """Writes it for the second member's fifth token, as its second expert."""

  def change(x):
    x[1, 0, 4, 1] = value
    return x

  return change


def twice(x):
  x[2, 0, 3, 1] = x[2, 0, 3, 0]
  return x


def padded_rows(number):
  return lambda x: np.pad(x, ((0, 0), (0, 0), (number, 0), (0, 0)))


EXPERTS = r"choices\['stage_0'\]\['layer_1'\]\['experts'\]"
SPLIT = r"give rows \[29, 35\) here and \[0, 29\) to capture"


class DoorTest(parameterized.TestCase):
  """What no sampler of this model can have recorded is refused by name."""

  @parameterized.parameters(
    (one_expert(6), r"\[1, 0, 4, 1\] is 6: ids are 0 to 5"),
    (one_expert(-1), r"\[1, 0, 4, 1\] is -1: ids are 0 to 5"),
    (one_expert(2**31 - 1), "is 2147483647: ids are 0 to 5"),
    (twice, r"\[2, 0, 3, 1\] is . a second time"),
    (padded_rows(29), rf"shape \[3, 1, 35, 2\], wanted .*{SPLIT}"),
    (padded_rows(30), rf"shape \[3, 1, 36, 2\], wanted .*{SPLIT}"),
    (padded_rows(7), r"tokens go to capture\(choices"),
    (lambda x: x[:, :, :5], r"has shape \[3, 1, 5, 2\], wanted is \[3, 1, 6"),
    (lambda x: x[:, :, :, :1], r"has shape \[3, 1, 6, 1\]"),
    (lambda x: x[:2], r"has shape \[2, 1, 6, 2\]"),
    (lambda x: x.swapaxes(1, 2), "changed places"),
    (lambda x: x[0], r"has shape \[1, 6, 2\]"),
    (lambda x: x.astype(np.float32), "dtype float32: give integers"),
    (lambda x: x > 0, "dtype bool: give integers"),
  )
  def test_another_array(self, change, message):
    tree = jax.tree.map(np.array, sampled("tiny-moe").choices)
    leaf = tree["stage_0"]["layer_1"]
    leaf["experts"] = change(leaf["experts"])
    self.refused(tree, f"{EXPERTS}.*{message}")

  @parameterized.parameters(
    ({"stage_1": {}}, r"choices\['stage_1'\].*no such stage .*'stage_0'"),
    ({"stage_0": {"layer_2": {}}}, r"\['layer_2'\].*no such layer"),
    ({"stage_0": {"layer_1": {"keys": 0}}}, r"\['keys'\].*no such choice"),
    ({"stage_0": np.zeros(3)}, r"choices\['stage_0'\] is of type ndarray"),
    ([1], "choices is of type list"),
  )
  def test_another_tree(self, tree, message):
    self.refused(tree, message)

  def refused(self, tree, message):
    """By every door, and before anything is computed."""
    model, params, state = build("tiny-moe")
    group = sampled("tiny-moe")
    replayed = lambda tree: replay_scores(
      model, params, state, group.responses, group.lengths, choices=tree
    )
    doors = (
      replayed,
      lambda tree: gradient("tiny-moe", group.replace(choices=tree)),
    )
    for door in doors:
      with self.assertRaisesRegex(ValueError, message):
        door(tree)

  def test_shapes_and_dtypes_under_jit(self):
    model, params, state = build("tiny-moe")
    group = sampled("tiny-moe")
    call = lambda choices: replay_scores(
      model, params, state, group.responses, group.lengths, choices=choices
    )
    for change, message in (
      (lambda x: x[:, :, 1:], "wanted is"),
      (lambda x: x.astype(float), "give integers"),
    ):
      with self.assertRaisesRegex(ValueError, message):
        jax.eval_shape(call, jax.tree.map(change, group.choices))

  @parameterized.parameters(
    (9, "the position of a later token"), (-2, "give a position, or -1")
  )
  def test_keys(self, value, message):
    """Position 8 is the second token's own."""
    model = Model(PRESETS["tiny-glm"])
    keys = np.array([[[[3, 1, 0, 7, -1], [8, 1, 0, 2, 4]]]], np.int64)
    tree = lambda x: {"stage_0": {"layer_0": {"keys": x}}}
    call = lambda x: response_choices(model, tree(x), (1, 2), [2], 7)
    found = call(keys)["stage_0"]["layer_0"]["keys"]
    np.testing.assert_array_equal(found, keys)
    self.assertEqual(found.dtype, np.int32)
    found = call(keys[..., :3])["stage_0"]["layer_0"]["keys"]
    wanted = np.where(np.arange(5) < 3, keys, -1)
    np.testing.assert_array_equal(found, wanted)
    changed = keys.copy()
    changed[0, 0, 1, 0] = value
    with self.assertRaisesRegex(ValueError, rf"\[0, 0, 1, 0\].*{message}"):
      call(changed)
    with self.assertRaisesRegex(ValueError, "it needs a key"):
      call(np.full_like(keys, -1))
    with self.assertRaisesRegex(ValueError, "a second time"):
      call(np.zeros_like(keys))

  def test_padding_is_not_looked_at(self):
    """An engine leaves there what it likes."""
    model = Model(PRESETS["tiny-moe"])
    ids = np.array([[[[1, 0], [4, 5], [-7, 99]]] * 2])
    tree = {"stage_0": {"layer_0": {"experts": ids}}}
    found = response_choices(model, tree, (1, 3), [2], 7)
    found = found["stage_0"]["layer_0"]["experts"]
    self.assertEqual(found[0, 0].tolist(), [[1, 0], [4, 5], [0, 0]])

  def test_what_is_missing_is_chosen_afresh(self):
    model = Model(PRESETS["tiny-glm"])
    for tree in (None, {}, {"stage_1": {}}, {"stage_1": {"layer_0": {}}}):
      self.assertIsNone(response_choices(model, tree, (1, 3), [2], 7))
    params = jax.eval_shape(model.init, jax.random.key(0))
    span = Span(positions=jnp.arange(4), length=jnp.int32(4))
    carry = tree_zeros(model.state_shapes(1)[1])
    tree = {"stage_1": {"layer_1": {"experts": jnp.zeros((2, 4, 2), int)}}}
    hidden = lambda params: model.hidden(
      params, jnp.zeros(4, jnp.int32), span, (), carry, tree
    )
    self.assertEqual(jax.eval_shape(hidden, params).x_TD.shape, (4, 24))

  def test_what_jit_hides_adds_nothing(self):
    """As if the expert, or the key, were not there."""
    model, params, _ = build("tiny-glm")
    tokens = jnp.arange(4, dtype=jnp.int32)
    span = Span(positions=tokens, length=jnp.int32(4))
    keys = np.full((1, 4, 5), -1)
    keys[..., 0] = 0
    experts = np.array([[[1, 4], [4, 2], [3, 4], [4, 0]]])

    @jax.jit
    @jax.value_and_grad
    def run(trainable, keys, experts):
      tree = params.replace(trainable=trainable)
      choices = {
        "stage_0": {
          "layer_0": {"experts": experts, "keys": keys},
          "layer_1": {"experts": experts},
        }
      }
      out = model.hidden(
        tree,
        tokens,
        span,
        (),
        {"stage_0": {"layer_0": {}, "layer_1": {}}},
        choices,
      )
      return jnp.tanh(out.x_TD).sum()

    trainable = params.trainable
    for far, instead in ((99, 5), (-3, 0)):
      # The expert whose score stands in has no output.
      without = jax.tree_util.tree_map_with_path(
        lambda path, x, e=instead: (
          x.at[:, e].set(0.0) if path[-1].key == "experts_down" else x
        ),
        trainable,
      )
      others = np.where(experts == instead, 1, experts)
      lost = np.where(others == 4, far, others)
      kept = np.where(others == 4, instead, others)
      found, grads = run(without, keys, lost)
      wanted, expected = run(without, keys, kept)
      np.testing.assert_allclose(found, wanted, 1e-12)
      for grad in jax.tree.leaves(grads):
        self.assertTrue(jnp.isfinite(grad).all())
    wanted, expected = run(trainable, keys, experts)
    for bad in (3, 50, -9):
      changed = keys.copy()
      changed[:, :3, 1] = bad  # of tokens before it
      found, grads = run(trainable, changed, experts)
      self.assertEqual(found, wanted)
      jax.tree.map(np.testing.assert_array_equal, grads, expected)


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
