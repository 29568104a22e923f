"""Whether an optimizer step moves what it should, and nothing else."""

import dataclasses
import functools
import tempfile

from absl.testing import absltest, parameterized
from flax import traverse_util
import jax
import jax.numpy as jnp
import numpy as np

from longstraw_jax import PRESETS, LoraConfig, Model, Params, add_lora
from longstraw_jax.checkpoint import Checkpoints
from longstraw_jax.decay import decayed
from longstraw_jax.run import Run
from longstraw_jax.run_config import RunConfig, WarmStartConfig
from longstraw_jax.sharding import make_mesh, place_at_rest
from longstraw_jax.steps import apply_gradient, make_learner
from longstraw_jax.tokenizer import ByteTokenizer
from longstraw_jax.train_config import OptimizerConfig, TrainConfig
from longstraw_jax.trainer import Trainer

RATE = 1e-6
CONSTANT = OptimizerConfig(learning_rate=RATE, warmup_steps=0)
STEPS = 200


def flat(tree) -> dict:
  return traverse_util.flatten_dict(tree, sep="/")


@functools.cache
def shapes(preset: str) -> Params:
  return jax.eval_shape(Model(PRESETS[preset]).init, jax.random.key(0))


@functools.cache
def steps(config: OptimizerConfig, number: int = STEPS):
  """So many steps of one gradient."""

  @jax.jit
  def run(learner, grads):
    step = lambda i, learner: apply_gradient(config, learner, grads)
    return jax.lax.fori_loop(0, number, step, learner)

  return run


def weights(dtype, size: int = 4096) -> Params:
  """A matrix of the sizes that a published one has, and a vector."""
  random = np.random.default_rng(0)
  rounded = lambda x: jnp.asarray(x, jnp.bfloat16).astype(dtype)
  kernel = random.normal(size=(2, size // 64, 32)) / 64
  tree = {
    "stage_0": {"layer_0": {"kernel": rounded(kernel)}},
    "final_norm": rounded(1 + random.normal(size=64) / 64),
  }
  return Params(trainable=tree, frozen={"embed": rounded(kernel[0])})


def signs(params: Params):
  """A constant gradient, not the same everywhere."""
  return jax.tree.map(
    lambda x: jnp.where(jnp.arange(x.size) % 3 > 0, 1e-3, -2e-3).reshape(
      x.shape
    ),
    params.trainable,
  )


def movement(after, before) -> float:
  """Mean absolute movement over all entries."""
  moved = jax.tree.map(
    lambda a, b: np.abs(np.asarray(a, np.float64) - np.asarray(b, np.float64)),
    after,
    before,
  )
  return float(
    np.concatenate([x.ravel() for x in jax.tree.leaves(moved)]).mean()
  )


class MasterTest(parameterized.TestCase):
  def run_of(self, params, config=CONSTANT, number=STEPS):
    learner = make_learner(params, config)
    return steps(config, number)(learner, signs(params))

  def test_a_constant_gradient_at_a_small_rate(self):
    """200 steps of 1e-6 are 2e-4, whatever the weights are stored in."""
    narrow, wide = weights(jnp.bfloat16), weights(jnp.float32)
    moved = self.run_of(narrow)
    exact = movement(self.run_of(wide).params.trainable, wide.trainable)
    self.assertAlmostEqual(exact, STEPS * RATE, delta=0.01 * STEPS * RATE)
    found = movement(moved.opt_state.master, narrow.trainable)
    self.assertAlmostEqual(found, exact, delta=0.01 * exact)
    # What the model sees is that, rounded once.
    for leaf, copy in zip(
      jax.tree.leaves(moved.params.trainable),
      jax.tree.leaves(moved.opt_state.master),
      strict=True,
    ):
      self.assertEqual(leaf.dtype, jnp.bfloat16)
      self.assertEqual(copy.dtype, jnp.float32)
      np.testing.assert_array_equal(leaf, copy.astype(jnp.bfloat16))

  def test_the_weights_that_the_model_sees_move_too(self):
    """Ten times as far, which is a few of their own steps."""
    config = dataclasses.replace(CONSTANT, learning_rate=1e-5)
    narrow, wide = weights(jnp.bfloat16), weights(jnp.float32)
    exact, found = (
      movement(
        self.run_of(x, config).params.trainable["stage_0"],
        x.trainable["stage_0"],
      )
      for x in (wide, narrow)
    )
    self.assertAlmostEqual(found, exact, delta=0.01 * exact)
    without = dataclasses.replace(config, master_dtype="none")
    found = movement(
      self.run_of(narrow, without).params.trainable, narrow.trainable
    )
    self.assertLess(found, 0.25 * exact)

  def test_steps_are_those_of_wide_weights(self):
    """Every copy and moment, to the bit."""
    config = dataclasses.replace(CONSTANT, learning_rate=1e-3, weight_decay=0.1)
    narrow = self.run_of(weights(jnp.bfloat16), config, 5)
    wide = self.run_of(weights(jnp.float32), config, 5)
    pairs = (
      (narrow.opt_state.master, wide.params.trainable),
      (narrow.opt_state.adamw, wide.opt_state.adamw),
    )
    for a, b in pairs:
      jax.tree.map(np.testing.assert_array_equal, a, b)

  @parameterized.parameters(
    ("bfloat16", "float32", 1),
    ("bfloat16", "none", 0),
    ("bfloat16", None, 0),
    ("float16", "float32", 1),
    ("float8_e4m3fn", "float32", 1),
    ("float32", "float32", 0),
    ("float64", "float32", 0),
  )
  def test_who_has_a_copy(self, dtype, master_dtype, copies):
    """Leaves that learn and are narrow; never frozen ones."""
    config = dataclasses.replace(CONSTANT, master_dtype=master_dtype)
    params = weights(jnp.dtype(dtype))
    learner = make_learner(params, config)
    count = len(jax.tree.leaves(params.trainable))
    copied = jax.tree.leaves(learner.opt_state.master)
    self.assertLen(copied, copies * count)
    for copy, leaf in zip(
      copied, copies * jax.tree.leaves(params.trainable), strict=True
    ):
      self.assertEqual((copy.dtype, copy.shape), (jnp.float32, leaf.shape))
    moments = [x for x in jax.tree.leaves(learner.opt_state.adamw) if x.ndim]
    self.assertLen(moments, 2 * count)
    wide = jnp.float64 if dtype == "float64" else jnp.float32
    self.assertEqual({x.dtype for x in moments}, {jnp.dtype(wide)})

  def test_adapters_of_a_narrow_base(self):
    """Wide by default, and where they are narrow, with copies."""
    config = dataclasses.replace(
      PRESETS["tiny-hybrid"], dtype="bfloat16", param_dtype="bfloat16"
    )
    model, lora = Model(config), LoraConfig(rank=2)
    for dtype in (None, "bfloat16"):
      params = jax.eval_shape(
        lambda key, dtype=dtype: add_lora(
          model, model.init(key), key, lora, dtype
        ),
        jax.random.key(0),
      )
      made = jax.eval_shape(lambda p: make_learner(p, CONSTANT), params)
      copies = jax.tree.leaves(made.opt_state.master)
      self.assertEqual(bool(copies), dtype is not None)
      dtypes = {x.dtype for x in jax.tree.leaves(params.trainable)}
      self.assertEqual(dtypes, {jnp.dtype(dtype or "float32")})

  def test_copies_are_dealt_like_the_weights(self):
    mesh = make_mesh(context=4, member=2)
    with jax.set_mesh(mesh):
      learner = place_at_rest(
        make_learner(weights(jnp.bfloat16), CONSTANT), mesh
      )
      for state in (
        learner,
        steps(CONSTANT, 1)(learner, signs(learner.params)),
      ):
        kernel = state.opt_state.master["stage_0"]["layer_0"]["kernel"]
        weight = state.params.trainable["stage_0"]["layer_0"]["kernel"]
        self.assertFalse(kernel.sharding.is_fully_replicated)
        self.assertTrue(
          kernel.sharding.is_equivalent_to(weight.sharding, kernel.ndim)
        )

  def test_copies_are_in_checkpoints(self):
    """Continued from one, steps are those of a run that never stopped."""
    params = weights(jnp.bfloat16)
    grads = signs(params)
    half = steps(CONSTANT, 100)
    first = half(make_learner(params, CONSTANT), grads)
    with tempfile.TemporaryDirectory() as folder:
      checkpoints = Checkpoints(folder)
      checkpoints.save(1, first, {})
      checkpoints.wait()
      again = checkpoints.restore(1, make_learner(params, CONSTANT), {})
      checkpoints.close()
    jax.tree.map(
      np.testing.assert_array_equal, half(again, grads), half(first, grads)
    )

  def run_with(self, warm_optimizer):
    warm = WarmStartConfig(max_steps=1, optimizer=warm_optimizer)
    trainer = Trainer(
      Model(PRESETS["tiny-hybrid"]), TrainConfig(), None, ByteTokenizer(), None
    )
    return Run(
      initial_params=None,
      trainer=trainer,
      config=RunConfig(steps=1, warm_start=warm),
      out=None,
      warm_task=None,
      settings={},
    )

  def test_grpo_goes_on_from_the_copies_of_the_warm_start(self):
    run, params = self.run_with(CONSTANT), weights(jnp.bfloat16)
    state = run.initial_state(params)
    warm = steps(CONSTANT, 3)(state.learner, signs(params))
    learner = run._begin_grpo(state.replace(learner=warm)).learner
    fresh = make_learner(warm.params, TrainConfig().optimizer)
    wanted = (warm.opt_state.master, fresh.opt_state.adamw, warm.params)
    found = (learner.opt_state.master, learner.opt_state.adamw, learner.params)
    jax.tree.map(np.testing.assert_array_equal, found, wanted)
    self.assertGreater(
      movement(learner.opt_state.master, fresh.opt_state.master), RATE
    )

  def test_one_form_for_a_whole_run(self):
    run = self.run_with(OptimizerConfig(master_dtype="none"))
    with self.assertRaisesRegex(
      ValueError, "master_dtype is 'none' in the warm"
    ):
      run.initial_state(weights(jnp.bfloat16))

  @parameterized.parameters(
    {"master_dtype": "bfloat16"}, {"decay_pattern": "(kernel"}
  )
  def test_settings(self, **changes):
    ((name, value),) = changes.items()
    with self.assertRaisesRegex(
      ValueError, f"{name} is {value!r}".replace("(", r"\(")
    ):
      OptimizerConfig(**changes)


class DecayTest(parameterized.TestCase):
  # Of every architecture: gated delta, attention with norms and biases,
  # mixtures with both routers, latent attention with its index.
  PRESETS = ("tiny-hybrid", "tiny-moe", "tiny-glm")

  @parameterized.parameters(*PRESETS)
  def test_matrices_alone(self, preset):
    """By their own axes: a norm stacked over layers is none."""
    leaves = flat(shapes(preset).trainable)
    chosen = {
      x for x, on in flat(decayed(shapes(preset).trainable)).items() if on
    }
    matrices = ("kernel", "embed", "head", "experts_gate_up", "experts_down")
    matrices += ("conv",)
    self.assertEqual(
      chosen, {x for x in leaves if x.rpartition("/")[2] in matrices}
    )
    self.assertNotEqual(chosen, set(leaves))

  @parameterized.parameters("tiny-moe", "tiny-glm")
  def test_zero_gradients(self, preset):
    """200 steps shrink matrices by their factor and touch nothing else."""
    config = OptimizerConfig(
      learning_rate=1e-2, warmup_steps=0, weight_decay=0.1
    )
    random = np.random.default_rng(0)
    fill = lambda x: jnp.asarray(random.normal(size=x.shape), x.dtype)
    params = jax.tree.map(fill, shapes(preset))
    grads = jax.tree.map(jnp.zeros_like, params.trainable)
    after = steps(config)(make_learner(params, config), grads).params
    jax.tree.map(np.testing.assert_array_equal, after.frozen, params.frozen)
    moved = flat(decayed(params.trainable))
    factor = (1 - 1e-3) ** STEPS
    for path, x in flat(params.trainable).items():
      y = flat(after.trainable)[path]
      if moved[path]:
        np.testing.assert_allclose(y, factor * x, rtol=1e-4, err_msg=path)
      else:
        np.testing.assert_array_equal(y, x, err_msg=path)

  def test_adapters_and_mixers_of_ones_own(self):
    """Low-rank factors are matrices; gains and rates of any shape are not."""
    ones = lambda *shape: jnp.ones(shape)
    mixer = {
      "q_proj": {"lora_a": ones(3, 8, 2), "lora_b": ones(3, 2, 8)},
      "head_norm": {"weight": ones(3, 4, 8)},
      "A_log": ones(3, 8, 16),
      "dt_bias": ones(3, 4, 4),
      "gain": ones(3, 8),
    }
    tree = {"stage_0": {"layer_0": {"mixer": mixer}}, "bias": ones(4, 4)}
    chosen = {x for x, on in flat(decayed(tree)).items() if on}
    prefix = "stage_0/layer_0/mixer/q_proj/lora_"
    self.assertEqual(chosen, {f"{prefix}a", f"{prefix}b"})

  def test_a_pattern(self):
    """What the caller names, vectors too."""
    tree = flat(shapes("tiny-hybrid").trainable)
    chosen = flat(decayed(shapes("tiny-hybrid").trainable, "ffn/|final_norm$"))
    for path in tree:
      wanted = "ffn/" in path or path == "final_norm"
      self.assertEqual(chosen[path], wanted, path)


if __name__ == "__main__":
  absltest.main()
