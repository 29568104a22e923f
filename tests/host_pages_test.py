"""Pages in pinned host memory: the same numbers as on the device."""

import dataclasses
import functools
import pathlib
import tempfile

from absl.testing import parameterized
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from longstraw_jax import (
  Model,
  capture,
  extend,
  group_gradient,
  load_state,
  make_mesh,
  place_at_rest,
  replay,
  rollout,
  save_state,
)
from longstraw_jax.ops.pages import wide_zeros
from longstraw_jax.steps import (
  make_learner,
  rollout_groups,
  score_groups,
  update,
)
from longstraw_jax.train_config import (
  EngineConfig,
  OptimizerConfig,
  SamplingConfig,
)
from tests.small_models import OBJECTIVE, build, make_group, make_prompt

PROMPT, GROUP = make_prompt(41), make_group(6)
CHUNK = 8
PLACES = ("device", "host")


def kinds(tree) -> set[str]:
  return {x.sharding.memory_kind for x in jax.tree.leaves(tree)}


@functools.cache
def stacked(name: str, dtype: str = "float64", repeats: int = 2, **options):
  """`build` with several layers in a scan: rows of one are not all rows."""
  config = build(name, dtype, **options)[0].config
  stages = tuple(
    dataclasses.replace(stage, repeats=repeats) for stage in config.stages
  )
  model = Model(dataclasses.replace(config, stages=stages))
  random = np.random.default_rng(1)
  params = jax.tree.map(
    lambda x: (x + 0.1 * random.normal(size=x.shape)).astype(x.dtype),
    jax.jit(model.init)(jax.random.key(0)),
  )
  return model, params


def refused_under_vmap(over):
  """Gradients of several groups over one state in host memory."""
  model, params = stacked("tiny-hybrid")
  state = capture(
    model, params, PROMPT, chunk_size=CHUNK, grad_scope="full", pages="host"
  )

  def one(advantages, responses):
    group = GROUP.replace(advantages=advantages, responses=responses)
    return group_gradient(
      model,
      params,
      PROMPT,
      group,
      OBJECTIVE,
      chunk_size=CHUNK,
      members_at_once=2,
      state=state,
    )[1]

  args = {"advantages": GROUP.advantages, "responses": GROUP.responses}
  axes = tuple(0 if name == over else None for name in args)
  args |= {over: jnp.stack([args[over], args[over][::-1]])}
  return jax.vmap(one, axes)(*args.values())


def objective(logprobs, entropy, group):
  """The scores as well, so that one program gives everything."""
  loss, metrics = OBJECTIVE(logprobs, entropy, group)
  return loss, metrics | {"logprobs": logprobs, "entropy": entropy}


def everything(model, params, scope: str, pages: str):
  """A state, and scores and gradient of a group over it."""
  state = capture(
    model, params, PROMPT, chunk_size=CHUNK, grad_scope=scope, pages=pages
  )
  wanted = {"pinned_host" if pages == "host" else "device"}
  assert kinds(state.pages) == wanted
  assert kinds(state.saved_carries) in (wanted, set())
  assert kinds(state.carry) <= {"device"}
  gradient = group_gradient(
    model,
    params,
    PROMPT,
    GROUP,
    objective,
    chunk_size=CHUNK,
    grad_scope=scope,
    block_size=4,
    members_at_once=2,
    state=state,
  )
  assert kinds(gradient) == {"device"}
  return state, gradient


def assert_same(found, wanted, tolerance: float = 0.0):
  """Equal to the bit, or every entry near it."""
  found, wanted = jax.device_get((found, wanted))
  for a, b in zip(*map(jax.tree.leaves, (found, wanted)), strict=True):
    assert a.dtype == b.dtype
    np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance)


class HostPagesTest(parameterized.TestCase):
  def test_gradients_of_several_losses_are_refused(self):
    with self.assertRaisesRegex(ValueError, "pages='device'"):
      refused_under_vmap("responses")

  @pytest.mark.slow
  def test_gradients_of_one_group_weighed_anew_are_refused(self):
    with self.assertRaisesRegex(ValueError, "pages='device'"):
      refused_under_vmap("advantages")

  def test_equal_to_the_bit(self):
    device, host = (
      everything(*build("tiny-hybrid"), "full", pages) for pages in PLACES
    )
    assert_same(host, device)

  @pytest.mark.slow
  def test_several_layers(self):
    """The suite's compiler flags round the two programs apart."""
    model, params = stacked("tiny-hybrid", saved="everything")
    device, host = (
      everything(model, params, "full", pages) for pages in PLACES
    )
    assert_same(host, device, 1e-12)

  def test_extended_saved_loaded_and_sampled_from(self):
    model, params = build("tiny-hybrid", page_dtype="int8")
    options = {"chunk_size": CHUNK, "grad_scope": "full"}
    extended = lambda pages: extend(
      model,
      params,
      capture(model, params, PROMPT[:20], pages=pages, **options),
      PROMPT[20:],
    )
    state = extended("host")
    one_chunk = capture(model, params, PROMPT[:4], pages="host", **options)
    for kept in (one_chunk, state):
      self.assertEqual(kinds(kept.pages), {"pinned_host"})
      self.assertEqual(kinds(kept.saved_carries), {"pinned_host"})
    assert_same(state, extended("device"))
    with tempfile.TemporaryDirectory() as folder:
      path = pathlib.Path(folder) / "state.safetensors"
      save_state(path, model, params, state)
      there = load_state(path, model, params, pages="host")
      here = load_state(path, model, params)
    far = (there.pages, there.saved_carries)
    self.assertEqual(kinds(far), {"pinned_host"})
    self.assertEqual(kinds(here), {"device"})
    assert_same(there, state)
    assert_same(here, state)
    sample = lambda state: rollout(
      model, params, state, jax.random.key(3), group_size=2, max_tokens=5
    )
    assert_same(sample(there), sample(here), 1e-12)

  def test_accumulators_are_beside_their_rows(self):
    rows = {"k": jnp.zeros((2, 4, 3), jnp.bfloat16)}
    for place, kind in (("Device", "device"), ("Host", "pinned_host")):
      there = jax.device_put(rows, getattr(jax.memory.Space, place))
      zeros = jax.jit(wide_zeros)(there)
      self.assertEqual(kinds(zeros), {kind})
      self.assertEqual(zeros["k"].dtype, jnp.float32)

  def test_refusals(self):
    model, params = build("tiny-hybrid")
    with self.assertRaisesRegex(ValueError, "pages is 'disk'.*'host'"):
      capture(model, params, PROMPT, chunk_size=CHUNK, pages="disk")
    with self.assertRaisesRegex(ValueError, "pages is 'disk'"):
      EngineConfig(pages="disk")
    with self.assertRaisesRegex(ValueError, "prompts_at_once.*'host'"):
      EngineConfig(pages="host", prompts_at_once=2)

    def loss(trainable, state=None):
      policy = params.replace(trainable=trainable)
      state = state or capture(
        model,
        policy,
        PROMPT,
        chunk_size=CHUNK,
        grad_scope="full",
        pages="host",
      )
      return replay(model, policy, state, GROUP.responses, GROUP.lengths).sum()

    with self.assertRaisesRegex(ValueError, "pages='host'.*group_gradient"):
      jax.grad(loss)(params.trainable)


@pytest.mark.slow
class SlowHostPagesTest(parameterized.TestCase):
  @parameterized.parameters(
    ("tiny-hybrid", "float32", "full"),
    ("tiny-hybrid", "float32", "response_only"),
    ("tiny-glm", "float64", "full"),
    ("tiny-glm", "float64", "response_only"),
    ("tiny-moe", "float64", "full"),
  )
  def test_equal_to_the_bit(self, name, dtype, scope):
    device, host = (
      everything(*build(name, dtype), scope, pages) for pages in PLACES
    )
    assert_same(host, device)

  def test_a_single_chunk(self):
    model, params = build("tiny-hybrid")
    found = [
      group_gradient(
        model,
        params,
        PROMPT[:6],
        GROUP,
        OBJECTIVE,
        chunk_size=CHUNK,
        pages=pages,
      )
      for pages in PLACES
    ]
    assert_same(found[1], found[0])

  def test_on_a_mesh(self):
    model, params = build("tiny-hybrid")
    expected = everything(model, params, "full", "device")[1]
    mesh = make_mesh(2, 2)
    with jax.set_mesh(mesh):
      weights = place_at_rest(params, mesh)
      state, found = everything(model, weights, "full", "host")
    self.assertEqual(state.striping.shards, 2)
    assert_same(found, expected, 1e-12)

  def test_a_training_step(self):
    """Rollout, scores and update over the states of several prompts."""
    model, params = build("tiny-hybrid")
    prompts = jnp.stack([PROMPT, PROMPT[::-1]])
    keys = jax.random.split(jax.random.key(0), 2)
    sampling = SamplingConfig(group_size=3, max_tokens=4)
    out = []
    for pages in PLACES:
      engine = EngineConfig(
        chunk_size=CHUNK,
        members_at_once=2,
        pages=pages,
      )
      learner = make_learner(params, OptimizerConfig())
      states, groups = rollout_groups(
        model, engine, sampling, (), True, learner, prompts, jnp.arange(2), keys
      )
      scores = score_groups(model, engine, params, groups, states)
      groups = groups.replace(
        old_logprobs=scores,
        rewards=jnp.ones((2, 3)),
        advantages=jnp.array([[1.0, -0.7, 0.4]] * 2),
        loss_denominator=jnp.full(2, 8.0),
      )
      for kept in (states, None):
        out.append(
          update(
            model,
            engine,
            OptimizerConfig(),
            OBJECTIVE,
            learner,
            prompts,
            groups,
            kept,
          )
        )
      out.append(scores)
    self.assertEqual(kinds(states.pages), {"pinned_host"})
    assert_same(out[3:], out[:3], 1e-9)
