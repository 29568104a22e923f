"""Adapters on mixtures: gradients, targets, coverage, and what they reach."""

import contextlib
import functools
import io
from unittest import mock

from absl.testing import absltest, parameterized
from flax import traverse_util
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments import training
from longstraw_jax import (
  PRESETS,
  Model,
  Params,
  group_gradient,
  make_mesh,
  place_at_rest,
  quantize_base,
  sequence_logprobs,
)
from longstraw_jax.lora import (
  LoraConfig,
  adapted_paths,
  add_lora,
  drop_lora,
  frozen_base,
  has_lora,
  lora_coverage,
  merge_lora,
)
from longstraw_jax.nf4 import Nf4
from longstraw_jax.ops.experts import Shared, StackedLayer, dense_expert_mlp
from longstraw_jax.steps import apply_gradient, make_learner
from longstraw_jax.testing.baselines import bounded_scores, constant_tokens
from longstraw_jax.testing.compare import assert_gradients_close, quick_jit
from longstraw_jax.train_config import OptimizerConfig
from tests.small_models import OBJECTIVE, build, make_group, make_prompt

LENGTH, CHUNK = 21, 8
PROMPT = make_prompt(LENGTH)
GROUP = make_group(5)
EVERYTHING = LoraConfig(rank=2, alpha=3.0, targets=("all-linear", "router"))
TINY_MOE, TINY_GLM = Model(PRESETS["tiny-moe"]), Model(PRESETS["tiny-glm"])


def flatten(tree) -> dict:
  return traverse_util.flatten_dict(tree, sep="/")


@functools.cache
def adapted(name: str) -> tuple[Model, Params]:
  """Adapters on every map, as after some steps; B is away from zero."""
  model, base = build(name)
  params = add_lora(model, base, jax.random.key(3), EVERYTHING)
  random = np.random.default_rng(2)
  noise = lambda x: x + 0.1 * random.normal(size=x.shape)
  return model, params.replace(trainable=jax.tree.map(noise, params.trainable))


def with_base(model: Model, params: Params) -> Params:
  """The same with everything learning, but for what never does."""
  return model.split(
    params.merged(), lambda path: not path.endswith("lora_scale")
  )


def dense(x_TD, gate_up, down, experts_TA, weights_TA, *, row_block):
  """All experts on all tokens, in the place of expert_mlp."""
  del row_block
  plain = lambda x: x.matrices if isinstance(x, Shared) else x
  layer = lambda x: x.stack[x.layer] if isinstance(x, StackedLayer) else x
  matrices = (layer(plain(x)) for x in (gate_up, down))
  return dense_expert_mlp(x_TD, *matrices, experts_TA, weights_TA)


@functools.cache
def oracle(name: str, scope: str, learns_base: bool = False):
  """Plain autodiff of conventional rows by W + scale A B, dense experts."""
  program = _oracle(name, learns_base)
  boundary = constant_tokens(scope, LENGTH, CHUNK, 1)
  return jax.device_get(program(jnp.int32(boundary)))


@functools.cache
def _oracle(name: str, learns_base: bool):
  model, params = adapted(name)
  params = with_base(model, params) if learns_base else params

  def loss_of(trainable, boundary):
    merged = merge_lora(params.replace(trainable=trainable))
    scores = bounded_scores(
      model, merged, jnp.asarray(PROMPT), jnp.int32(LENGTH), boundary, GROUP
    )
    return OBJECTIVE(*scores, GROUP)[0]

  gradient = quick_jit(jax.value_and_grad(loss_of))

  def run(boundary):
    with mock.patch("longstraw_jax.models.moe.expert_mlp", dense):
      return gradient(params.trainable, boundary)

  return run


def check(name, scope, members, shape=None, learns_base=False) -> None:
  """Loss and every leaf against the oracle's."""
  expected_loss, expected = oracle(name, scope, learns_base)
  model, params = adapted(name)
  params = with_base(model, params) if learns_base else params

  def ours(params):
    return group_gradient(
      model,
      params,
      PROMPT,
      GROUP,
      OBJECTIVE,
      chunk_size=CHUNK,
      grad_scope=scope,
      tail_chunks=1 if scope == "tail" else None,
      members_at_once=members,
    )[:2]

  if shape is None:
    loss, grads = ours(params)
  else:
    mesh = make_mesh(*shape)
    with jax.set_mesh(mesh):
      loss, grads = ours(place_at_rest(params, mesh))
  np.testing.assert_allclose(loss, expected_loss, rtol=1e-12)
  assert_gradients_close(jax.device_get(grads), expected, 1e-12, scope)
  for path, leaf in flatten(expected).items():
    if "experts" in path:
      assert np.abs(leaf).max() > 1e-6, path


class GradientTest(parameterized.TestCase):
  @parameterized.parameters(
    ("tiny-moe", "full", 2), ("tiny-glm", "response_only", 1)
  )
  def test_every_leaf(self, name, scope, members):
    check(name, scope, members)

  def test_every_leaf_on_a_mesh(self):
    check("tiny-moe", "full", 2, (2, 2))

  @parameterized.product(
    name=("tiny-moe", "tiny-glm"),
    scope=("full", "tail", "response_only"),
    members=(1, 2),
    shape=(None, (2, 2)),
  )
  @pytest.mark.slow
  def test_every_product(self, name, scope, members, shape):
    check(name, scope, members, shape)

  @parameterized.parameters(
    ("tiny-moe", "full", 2, None),
    ("tiny-moe", "response_only", 1, (2, 2)),
    ("tiny-glm", "full", 2, None),
  )
  @pytest.mark.slow
  def test_base_and_adapters_together(self, name, scope, members, shape):
    check(name, scope, members, shape, learns_base=True)

  @parameterized.product(name=("tiny-moe", "tiny-glm"), members=(1, 2))
  @pytest.mark.slow
  def test_every_loss_of_a_vmap_has_gradients_of_its_own(self, name, members):
    model, params = adapted(name)
    many = jnp.stack([GROUP.advantages, -2 * GROUP.advantages[::-1]])

    def gradient(advantages):
      return group_gradient(
        model,
        params,
        PROMPT,
        GROUP.replace(advantages=advantages),
        OBJECTIVE,
        chunk_size=CHUNK,
        members_at_once=members,
      )[1]

    together = jax.vmap(gradient)(many)
    for n, advantages in enumerate(many):
      own = jax.tree.map(lambda x, n=n: x[n], together)
      assert_gradients_close(own, gradient(advantages), 1e-12)


class OnAndOffTest(parameterized.TestCase):
  def test_a_new_adapter_changes_nothing(self):
    model, base = build("tiny-moe")
    params = add_lora(model, base, jax.random.key(0), EVERYTHING)
    score = quick_jit(lambda p: sequence_logprobs(model, p, PROMPT))
    plain = score(base)
    np.testing.assert_allclose(score(params), plain, rtol=1e-13)
    node = params.trainable["stage_0"]["layer_0"]["ffn"]["experts_down_lora"]
    self.assertEqual(node["lora_a"].shape, (1, 6, 12, 2))
    self.assertEqual(node["lora_b"].shape, (1, 6, 2, 24))
    bound = 12**-0.5
    self.assertLessEqual(float(jnp.abs(node["lora_a"]).max()), bound)
    self.assertGreater(float(jnp.abs(node["lora_a"]).max()), 0.8 * bound)
    node = params.frozen["stage_0"]["layer_0"]["ffn"]["experts_down_lora"]
    np.testing.assert_array_equal(node["lora_scale"], np.full((1, 6), 1.5))

    _, trained = adapted("tiny-moe")
    ours = score(trained)
    self.assertGreater(float(jnp.abs(ours - plain).max()), 0.01)
    merged = merge_lora(trained)
    self.assertFalse(has_lora(merged))
    np.testing.assert_allclose(score(merged), ours, rtol=1e-12)
    dropped = drop_lora(trained)
    self.assertFalse(dropped.trainable)
    jax.tree.map(np.testing.assert_array_equal, dropped.frozen, base.trainable)

  def test_merged_experts_by_hand(self):
    _, params = adapted("tiny-glm")
    tree, merged = (
      flatten(params.merged()),
      flatten(merge_lora(params).merged()),
    )
    for name in ("experts_gate_up", "experts_down", "router"):
      path = f"stage_1/layer_0/ffn/{name}"
      matrix = f"{path}/kernel" if name == "router" else path
      node = path if name == "router" else f"{path}_lora"
      a, b = (np.asarray(tree[f"{node}/lora_{x}"]) for x in "ab")
      product = np.einsum("...ir,...ro->...io", a, b)
      wanted = np.asarray(tree[matrix]) + 1.5 * product
      np.testing.assert_allclose(merged[matrix], wanted, rtol=1e-12)
      self.assertGreater(np.abs(product).max(), 0.01)

  def test_a_base_in_4_bits(self):
    """Adapters stay as they are; the gradient is that of the expanded base."""
    model, params = adapted("tiny-moe")
    params = quantize_base(params)
    node = params.frozen["stage_0"]["layer_0"]["ffn"]
    self.assertIsInstance(node["experts_down"], Nf4)
    self.assertNotIsInstance(node["experts_down_lora"]["lora_scale"], Nf4)
    expand = lambda x: x.expand() if isinstance(x, Nf4) else x
    is_stored = lambda x: isinstance(x, Nf4)
    plain = params.replace(
      frozen=jax.tree.map(expand, params.frozen, is_leaf=is_stored)
    )

    def run(params):
      loss = lambda trainable: sequence_logprobs(
        model, params.replace(trainable=trainable), PROMPT
      ).sum()
      return quick_jit(jax.grad(loss))(params.trainable)

    assert_gradients_close(run(params), run(plain), 1e-12)

  def test_prefix_frozen_takes_them_off(self):
    _, params = adapted("tiny-moe")
    self.assertFalse(has_lora(frozen_base(params)))
    both = Params(trainable=params.merged(), frozen={})
    with self.assertRaisesRegex(ValueError, "learns"):
      frozen_base(both)

  def test_weight_decay_shrinks_them_as_matrices(self):
    _, params = adapted("tiny-moe")
    config = OptimizerConfig(
      learning_rate=0.1, warmup_steps=0, weight_decay=0.5
    )
    learner = make_learner(params, config)
    zeros = jax.tree.map(jnp.zeros_like, params.trainable)
    moved = apply_gradient(config, learner, zeros).params.trainable
    for path, leaf in flatten(moved).items():
      old = flatten(params.trainable)[path]
      np.testing.assert_allclose(leaf, 0.95 * old, rtol=1e-6, err_msg=path)


# --- Targets and coverage ----------------------------------------------------


class TargetsTest(parameterized.TestCase):
  def paths(self, *targets, exclude=(), model=TINY_MOE):
    config = LoraConfig(targets=targets, exclude=exclude)
    found = adapted_paths(model, config)
    return sorted({path.split("/", 2)[-1] for path in found})

  def test_names(self):
    both = ["ffn/experts_down", "ffn/experts_gate_up"]
    self.assertEqual(self.paths("experts"), both)
    self.assertEqual(self.paths("experts_down"), both[:1])
    self.assertEqual(self.paths("ffn/experts_gate_up"), both[1:])
    self.assertEqual(self.paths(r".*/experts_\w+"), both)
    self.assertEqual(self.paths("router"), ["ffn/router"])
    self.assertEqual(self.paths("experts", model=TINY_GLM), both)
    every = self.paths("all-linear")
    self.assertContainsSubset(both, every)
    self.assertNotIn("ffn/router", every)
    self.assertEqual(
      self.paths("all-linear", "router"), sorted([*every, "ffn/router"])
    )
    left = self.paths("all-linear", exclude="experts")
    self.assertEqual(left, [path for path in every if path not in both])
    left = self.paths("experts", exclude=("experts_down",))
    self.assertEqual(left, both[1:])
    # Maps of the index never learn, so they have no name.
    self.assertFalse(
      [p for p in self.paths("all-linear", model=TINY_GLM) if "indexer" in p]
    )

  @parameterized.parameters(
    (
      {"targets": "expert"},
      r"targets \['expert'\] name no .*'ffn/experts_down'",
    ),
    ({"exclude": "head"}, r"exclude \['head'\] name no linear map"),
    ({"targets": "experts", "exclude": "experts"}, "leaves none"),
  )
  def test_refused(self, changes, message):
    with self.assertRaisesRegex(ValueError, message):
      adapted_paths(TINY_MOE, LoraConfig(**changes))

  def test_a_dense_model_has_no_experts(self):
    model = Model(PRESETS["tiny-hybrid"])
    for target in ("experts", "router"):
      with self.assertRaisesRegex(ValueError, f"{target}'. name no linear map"):
        adapted_paths(model, LoraConfig(targets=target))


class CoverageTest(parameterized.TestCase):
  # tiny-moe: embed_dim 24; 2 delta and 2 attention layers; 6 experts of 12.
  EXPERTS = 4 * 6 * (24 * 24 + 12 * 24)
  SHARED = 4 * (3 * 24 * 10 + 24)
  DELTA = 2 * (24 * (56 + 32 + 4 + 4) + 32 * 24)
  ATTENTION = 2 * (24 * (64 + 16 + 16) + 32 * 24)
  ROUTER = 4 * 24 * 6

  def test_by_hand(self):
    everything = lora_coverage(TINY_MOE, LoraConfig(rank=3))
    maps = self.EXPERTS + self.SHARED + self.DELTA + self.ATTENTION
    self.assertEqual(everything.reached, maps)
    self.assertEqual(everything.matrices, maps + self.ROUTER)
    self.assertEqual(everything.left_out, {"ffn/router": self.ROUTER})
    self.assertEqual(everything.maps, 4 * (2 * 6 + 4) + 2 * 5 + 2 * 4)
    experts = lora_coverage(TINY_MOE, LoraConfig(rank=3, targets="experts"))
    self.assertEqual(experts.reached, self.EXPERTS)
    self.assertEqual(experts.maps, 4 * 2 * 6)
    # r (in + out) of gate and up together, and of down.
    self.assertEqual(experts.parameters, 4 * 6 * 3 * ((24 + 24) + (12 + 24)))
    rest = lora_coverage(TINY_MOE, LoraConfig(rank=3, exclude="experts"))
    self.assertEqual(rest.reached, maps - self.EXPERTS)
    self.assertEqual(
      rest.left_out["ffn/experts_gate_up"] + rest.left_out["ffn/experts_down"],
      self.EXPERTS,
    )
    self.assertEqual(
      rest.parameters, everything.parameters - experts.parameters
    )

  def test_parameters_say_the_same(self):
    model, params = adapted("tiny-glm")
    self.assertEqual(
      lora_coverage(model, params), lora_coverage(model, EVERYTHING)
    )
    none = lora_coverage(model, drop_lora(params))
    self.assertEqual((none.maps, none.reached, none.share), (0, 0, 0.0))

  def test_what_is_printed(self):
    text = str(lora_coverage(TINY_MOE, LoraConfig(rank=3, exclude="experts")))
    self.assertRegex(text, "adapters on 34 maps: 4,356 parameters")
    self.assertIn("reach 41.73% of the layers' matrix parameters", text)
    self.assertIn("(15,264 of 36,576)", text)
    self.assertIn("left out: ffn/experts_down (6,912), ffn/experts_gate", text)
    self.assertTrue(text.endswith("embedding and head"), text)

  def test_a_run_prints_it_at_its_start(self):
    config = LoraConfig(rank=3, targets="router")

    def start(seed, lora=config):
      key = jax.random.key(seed)
      params = TINY_MOE.init(key)
      return add_lora(TINY_MOE, params, key, lora) if lora else params

    out = io.StringIO()
    trainer = mock.Mock(model=TINY_MOE)
    with contextlib.redirect_stdout(out):
      training.print_coverage(mock.Mock(initial_params=start, trainer=trainer))
      all_learn = functools.partial(start, lora=None)
      training.print_coverage(
        mock.Mock(initial_params=all_learn, trainer=trainer)
      )
    self.assertEqual(out.getvalue(), f"{lora_coverage(TINY_MOE, config)}\n")

  def test_the_mixture_of_the_issue(self):
    """Without its experts 4.2 % of the 35B are reached, with them all."""
    model = Model(PRESETS["qwen3.6-35b-a3b"])
    rest = lora_coverage(model, LoraConfig(exclude="experts"))
    self.assertEqual(f"{rest.share:.1%}", "4.2%")
    full = lora_coverage(model, LoraConfig())
    self.assertEqual(full.matrices - full.reached, 40 * 2048 * 256)
    per_expert = 16 * ((2048 + 1024) + (512 + 2048))
    self.assertEqual(full.parameters - rest.parameters, 40 * 256 * per_expert)


if __name__ == "__main__":
  absltest.main()
