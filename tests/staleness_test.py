"""States of other weights: refused, warned of, or no number at all."""

from absl.testing import absltest, parameterized
import jax
import jax.numpy as jnp
import numpy as np

from longstraw_jax import (
  LoraConfig,
  StaleStateWarning,
  add_lora,
  branch_gradient,
  capture,
  extend,
  group_gradient,
  make_mesh,
  place_at_rest,
  replay,
  rollout,
)
from longstraw_jax.staleness import fingerprint
from tests.small_models import OBJECTIVE, build, make_group, make_prompt

MODEL, PARAMS = build("tiny-hybrid")
PROMPT, GROUP = (
  make_prompt(21),
  make_group(4, (2,)).replace(advantages=jnp.array([1.0, -1.0])),
)
KEY = jax.random.key(0)


def nudged(params, by=1e-9):
  """As an optimizer step of a tiny learning rate leaves them: one leaf."""
  leaves, structure = jax.tree.flatten(params)
  leaves[3] = leaves[3].at[(0,) * leaves[3].ndim].add(by)
  return jax.tree.unflatten(structure, leaves)


OTHER = nudged(PARAMS)


def captured(scope, params=PARAMS):
  return capture(
    MODEL,
    params,
    PROMPT,
    chunk_size=8,
    grad_scope=scope,
    tail_chunks=1 if scope == "tail" else None,
  )


def gradient(params, state, **options):
  return group_gradient(
    MODEL,
    params,
    PROMPT,
    GROUP,
    OBJECTIVE,
    chunk_size=8,
    grad_scope=state.grad_scope,
    state=state,
    **options,
  )


def scores(params, state, **options):
  return replay(MODEL, params, state, GROUP.responses, GROUP.lengths, **options)


def branch(params, state):
  return branch_gradient(MODEL, params, GROUP, OBJECTIVE, state, block_size=4)


def sampled(params, state, **options):
  return rollout(
    MODEL, params, state, KEY, group_size=2, max_tokens=2, **options
  )


def extended(params, state, **options):
  return extend(MODEL, params, state, PROMPT[:3], **options)


class StaleStateTest(parameterized.TestCase):
  @parameterized.product(use=(gradient, scores, branch), scope=("full", "tail"))
  def test_refused_where_a_gradient_goes_through_the_prompt(self, use, scope):
    with self.assertRaisesRegex(ValueError, "other weights.*capture it again"):
      use(OTHER, captured(scope))

  @parameterized.parameters(gradient, scores, sampled)
  def test_said_loudly_elsewhere(self, use):
    state = captured("response_only")
    with self.assertWarnsRegex(StaleStateWarning, "allow_stale=True"):
      use(OTHER, state)
    use(OTHER, state, allow_stale=True)  # a warning would be an error
    use(PARAMS, state)

  def test_sampling_asks_for_no_gradient(self):
    with self.assertWarns(StaleStateWarning):
      sampled(OTHER, captured("full"))

  def test_extending(self):
    for scope in ("full", "response_only"):
      state = captured(scope)
      self.assertEqual(extended(PARAMS, state).fingerprint, state.fingerprint)
    with self.assertRaisesRegex(ValueError, "other weights"):
      extended(OTHER, captured("full"))
    with self.assertWarns(StaleStateWarning):
      extended(OTHER, captured("response_only"))

  @parameterized.parameters(gradient, scores, branch)
  def test_no_number_under_jit(self, use):
    """There nothing can be refused; a wrong gradient is not given either."""

    def finite(params, made_with):
      state = captured("full", made_with)
      if use is scores:
        call = lambda tree: use(params.replace(trainable=tree), state).sum()
        out = jax.value_and_grad(call)(params.trainable)
      else:
        out = use(params, state)[:2]
      return [jnp.isfinite(x).all() for x in jax.tree.leaves(out)]

    run = jax.jit(finite)
    self.assertTrue(all(run(PARAMS, PARAMS)))
    found = run(OTHER, PARAMS)
    self.assertFalse(found[0])
    self.assertLess(sum(map(bool, found)), len(found) / 2)

  def test_frozen_prefixes_never_go_stale(self):
    params = add_lora(MODEL, PARAMS, KEY, LoraConfig(rank=2))
    learnt = params.replace(
      trainable=jax.tree.map(lambda x: x + 1.0, params.trainable)
    )
    state = captured("prefix_frozen", params)
    scores(learnt, state)
    with self.assertWarns(StaleStateWarning):
      scores(learnt.replace(frozen=nudged(learnt.frozen)), state)


class FingerprintTest(parameterized.TestCase):
  def test_of_the_values_alone(self):
    """Not of which weights learn, nor of the devices that hold them."""
    plain = fingerprint(PARAMS, "full")
    split = MODEL.split(PARAMS.merged(), lambda path: "mixer" in path)
    self.assertEqual(fingerprint(split, "full"), plain)
    for shape in ((4, 1), (2, 2)):
      mesh = make_mesh(*shape)
      with jax.set_mesh(mesh):
        placed = place_at_rest(PARAMS, mesh)
        self.assertEqual(fingerprint(placed, "full"), plain)

  @parameterized.parameters(
    "float64", "float32", "bfloat16", "float8_e4m3fn", "int8", "bool"
  )
  def test_every_entry_counts_where_it_stands(self, dtype):
    values = np.arange(12).reshape(3, 4) % 5
    seen = set()
    for i in range(12):
      for change in (1, 2):
        one = values.copy()
        one.flat[i] += change
        leaves = {"w": jnp.asarray(one != 0 if dtype == "bool" else one, dtype)}
        seen.add(int(fingerprint(split_all(leaves), "full")))
    distinct = 3 if dtype == "bool" else 24
    self.assertGreaterEqual(len(seen), distinct)
    swapped = {"w": jnp.asarray(values[::-1].copy(), dtype)}
    self.assertNotEqual(
      fingerprint(split_all(swapped), "full"),
      fingerprint(split_all({"w": jnp.asarray(values, dtype)}), "full"),
    )

  def test_no_more_than_one_leaf_is_at_hand(self):
    shape = jax.ShapeDtypeStruct((1024, 256), jnp.bfloat16)
    names = [f"w{i}" for i in range(8)]

    def call(leaves):
      return fingerprint(
        split_all(dict(zip(names, leaves, strict=True))), "full"
      )

    compiled = jax.jit(call).lower([shape] * 8).compile()
    found = compiled.memory_analysis().temp_size_in_bytes
    self.assertLess(found, 1.1 * 4 * shape.size)


def split_all(tree):
  return MODEL.split(tree)


if __name__ == "__main__":
  absltest.main()
