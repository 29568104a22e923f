"""One NaN in a step: skipped, counted, told; never in a checkpoint."""

import dataclasses
import functools
import logging
import pathlib
import tempfile

from absl.testing import absltest, parameterized
import jax
import jax.numpy as jnp
import numpy as np

from longstraw_jax import Group, PolicyObjective
from longstraw_jax.checkpoint import Checkpoints
from longstraw_jax.finite import NonFiniteError, nonfinite_leaves
from longstraw_jax.metrics import read_rows
from longstraw_jax.run import Run
from longstraw_jax.run_config import RunConfig, WarmStartConfig
from longstraw_jax.steps import apply_gradient, make_learner, update
from longstraw_jax.tokenizer import ByteTokenizer
from longstraw_jax.train_config import (
  EngineConfig,
  OptimizerConfig,
  SamplingConfig,
  TrainConfig,
)
from longstraw_jax.trainer import Trainer
from tests.trainer_test import MODEL, PARAMS, TASK

OPTIMIZER = OptimizerConfig(learning_rate=1e-2, warmup_steps=4)
ENGINE = EngineConfig(chunk_size=71, grad_scope="response_only")
PROMPTS = jnp.arange(2 * 72).reshape(2, 72) % 250


def assert_equal(a, b):
  """The same leaves to the bit."""
  for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
    np.testing.assert_array_equal(x, y)


@dataclasses.dataclass(frozen=True)
class Poisoned(PolicyObjective):
  """NaN in the loss or in its gradient alone, for some prompts.

  Attributes:
    prompts: their ids.
    kind: "loss", or "gradient", where the loss stays finite.
  """

  prompts: tuple[int, ...] = ()
  kind: str = "loss"

  def __call__(self, logprobs_GR, entropy_GR, group):
    loss, metrics = super().__call__(logprobs_GR, entropy_GR, group)
    bad = jnp.isin(group.prompt_id, jnp.array(self.prompts, jnp.int32))
    zero = jnp.sum(0 * logprobs_GR)
    if self.kind == "loss":
      return jnp.where(bad, jnp.nan, loss), metrics
    # The slope of a root at 0 is infinite, and 0 times that is NaN.
    return loss + jnp.sqrt(jnp.where(bad, zero, 1.0)) - 1.0, metrics


class ApplyTest(parameterized.TestCase):
  """The optimizer's step alone."""

  @functools.cached_property
  def step(self):
    return jax.jit(functools.partial(apply_gradient, OPTIMIZER))

  def setUp(self):
    super().setUp()
    ones = jax.tree.map(jnp.ones_like, PARAMS.trainable)
    self.grads = ones
    self.learner = self.step(make_learner(PARAMS, OPTIMIZER), ones)

  def test_one_number_in_any_leaf(self):
    leaves, structure = jax.tree.flatten(self.grads)
    values = (jnp.nan, jnp.inf, -jnp.inf)
    for i, leaf in enumerate(leaves):
      bad = leaf.at[(-1,) * leaf.ndim].set(values[i % 3])
      grads = structure.unflatten([*leaves[:i], bad, *leaves[i + 1 :]])
      assert_equal(self.step(self.learner, grads), self.learner)

  def test_a_norm_beyond_the_range(self):
    """Every entry is finite; clipped by an infinite norm they would be 0."""
    huge = jax.tree.map(lambda x: jnp.full_like(x, 1e30), self.grads)
    assert_equal(self.step(self.learner, huge), self.learner)

  def test_a_loss_that_is_not_finite(self):
    skipped = self.step(self.learner, self.grads, jnp.bool_(False))
    assert_equal(skipped, self.learner)

  def test_the_schedule_goes_on_where_it_was(self):
    """Its count is among what stays: the next step is the one it would be."""
    bad = jax.tree.map(lambda x: x * jnp.nan, self.grads)
    after = self.step(self.step(self.learner, bad), self.grads)
    assert_equal(after, self.step(self.learner, self.grads))
    self.assertEqual(int(after.step), 2)
    moved = jnp.abs(after.params.trainable["embed"] - PARAMS.trainable["embed"])
    self.assertGreater(float(moved.min()), 1e-3)

  def test_a_learner_that_is_given_up_is_written_in_place(self):
    """Neither weights nor moments exist twice."""
    step = functools.partial(apply_gradient, OPTIMIZER)
    grads, learner = self.grads, self.learner
    compiled = jax.jit(step, donate_argnums=0).lower(learner, grads).compile()
    stats = compiled.memory_analysis()
    size = sum(x.nbytes for x in jax.tree.leaves(learner))
    self.assertEqual(stats.alias_size_in_bytes, size)
    # A clipped gradient and its update; a learner would be three of them.
    gradient = sum(x.nbytes for x in jax.tree.leaves(grads))
    self.assertLess(stats.temp_size_in_bytes, 2 * gradient)


class UpdateTest(parameterized.TestCase):
  """A whole update, its groups' own flags included."""

  def groups(self, **changes):
    """Two groups, the second with other numbers than are let in."""

    def one(i):
      known = {
        "rewards": [1.0, 0.0],
        "advantages": [1.0, -1.0],
        "old_logprobs": jnp.full((2, 3), -5.0),
        "ref_logprobs": jnp.full((2, 3), -5.0),
        "sampling_logprobs": jnp.full((2, 3), -5.0),
        "prompt_id": i,
      }
      group = Group.create([[1, 2, 3], [4, 5, 6]], [3, 2], **known)
      return group.replace(**changes) if i else group

    return jax.tree.map(lambda *x: jnp.stack(x), one(0), one(1))

  @parameterized.parameters(
    ({"old_logprobs": jnp.full((2, 3), jnp.nan)}, {}),
    ({"advantages": jnp.array([jnp.inf, 0.0])}, {}),
    ({"ref_logprobs": jnp.full((2, 3), jnp.nan)}, {"kl_coef": 0.1}),
    ({}, {"kind": "gradient", "prompts": (1,)}),
  )
  def test_one_group(self, changes, settings):
    learner = make_learner(PARAMS, OPTIMIZER)
    new, metrics = update(
      MODEL,
      ENGINE,
      OPTIMIZER,
      Poisoned(**settings),
      learner,
      PROMPTS,
      self.groups(**changes),
      None,
    )
    assert_equal(new, learner)
    self.assertFalse(metrics["applied"])
    np.testing.assert_array_equal(metrics["finite"], [True, False])
    self.assertEqual(bool(jnp.isfinite(metrics["loss"])), "kind" in settings)
    self.assertFalse(jnp.isfinite(metrics["grad_norm"]))


class LifeTest(parameterized.TestCase):
  """A run that meets them."""

  def setUp(self):
    super().setUp()
    folder = tempfile.TemporaryDirectory()
    self.addCleanup(folder.cleanup)
    self.out = pathlib.Path(folder.name)

  def trainer(self, *prompts, **changes):
    config = TrainConfig(
      prompts_per_step=2,
      sampling=SamplingConfig(group_size=2, max_tokens=2),
      engine=ENGINE,
      optimizer=OPTIMIZER,
      objective=Poisoned(prompts=tuple(prompts)),
    )
    config = dataclasses.replace(config, **changes)
    reward = lambda prompt, response, info: sum(response.encode()) % 7 / 7
    return Trainer(MODEL, config, TASK, ByteTokenizer(), reward)

  def run_of(self, trainer, **schedule):
    schedule = {
      "eval_every": 100,
      "eval_prompts": 1,
      "checkpoint_every": 1,
      "keep_checkpoints": 2,
    } | schedule
    return Run(
      initial_params=lambda seed: PARAMS,
      trainer=trainer,
      config=RunConfig(**schedule),
      out=self.out,
      warm_task=TASK,
      settings={},
    )

  def saved(self, run):
    checkpoints = Checkpoints(self.out / "checkpoints")
    step = checkpoints.latest()
    like = run.initial_state(run.initial_params(0))
    state = checkpoints.restore(step, like, {})
    checkpoints.close()
    return step, state

  def test_a_bad_step_is_as_if_its_update_had_not_been(self):
    """Bad are the second prompt of step 1 and both of step 3, of five."""
    run = self.run_of(self.trainer(6, 12, 14), steps=5, max_bad_steps=2)
    logger = logging.getLogger("longstraw_jax.run")
    with self.assertLogs(logger, logging.WARNING) as told:
      run.execute()
    rows = read_rows(self.out / "rows.jsonl")[:5]
    bad = [(row["step"], row["bad_prompts"]) for row in rows if row["bad_step"]]
    self.assertEqual(bad, [(1, [6]), (3, [12, 14])])
    self.assertEqual([row["skipped_updates"] for row in rows], [0, 1, 0, 1, 0])
    self.assertIsNone(rows[1]["loss"])
    self.assertIn("step 1: 1 updates were skipped", told.output[0])
    self.assertIn("prompts [6]", told.output[0])

    learner = make_learner(PARAMS, OPTIMIZER)
    for step in (0, 2, 4):
      learner, _ = run.trainer.step(learner, step, None)
    step, state = self.saved(run)
    self.assertEqual(step, 5)
    self.assertEqual(int(state.learner.step), 3)
    assert_equal(state.learner, learner)

  def test_too_many_in_a_row(self):
    """Over a restart too; what is saved are the weights before them."""
    trainer = self.trainer(*range(4, 200))
    with self.assertRaisesRegex(
      NonFiniteError, r"last 2 steps .*max_bad_steps is 2"
    ):
      self.run_of(trainer, steps=9, max_bad_steps=2).execute()
    run = self.run_of(trainer, steps=9, max_bad_steps=4)
    with self.assertRaisesRegex(
      NonFiniteError, r"last 4 steps .* up to step 4:"
    ):
      run.execute()
    learner, _ = trainer.step(make_learner(PARAMS, OPTIMIZER), 0, None)
    step, state = self.saved(run)
    self.assertEqual((step, int(state.grpo_steps)), (5, 5))
    assert_equal(state.learner, learner)
    rows = read_rows(self.out / "rows.jsonl")
    self.assertEqual([row["step"] for row in rows], list(range(5)))

  def test_a_warm_start_too(self):
    """Its weights are beyond what its first loss can be."""
    params = jax.tree.map(lambda x: 1e30 * x, PARAMS)
    warm = WarmStartConfig(max_steps=9, prompts_per_step=2, until=9)
    run = self.run_of(self.trainer(), steps=1, warm_start=warm)
    run = dataclasses.replace(run, initial_params=lambda seed: params)
    with self.assertRaisesRegex(
      NonFiniteError, "last 3 steps .*max_bad_steps is 3"
    ):
      run.execute()
    step, state = self.saved(run)
    self.assertEqual((step, int(state.warm_steps)), (3, 3))
    assert_equal(state.learner.params, params)

  def test_weights_that_are_not_finite_are_in_no_checkpoint(self):
    """However they came; the last finite checkpoint stays."""

    class Careless(Trainer):
      def step(self, learner, step, reference):
        learner, row = super().step(learner, step, reference)
        if step == 2:
          embed = learner.params.trainable["embed"].at[0, 0].set(jnp.nan)
          trainable = learner.params.trainable | {"embed": embed}
          params = learner.params.replace(trainable=trainable)
          learner = learner.replace(params=params)
        return learner, row

    trainer = Careless(**vars(self.trainer()))
    run = self.run_of(trainer, steps=9)
    with self.assertRaisesRegex(
      NonFiniteError, r"state of step 3 .*trainable.embed.* checkpoint is 2"
    ):
      run.execute()
    step, state = self.saved(run)
    self.assertEqual(step, 2)
    self.assertEmpty(nonfinite_leaves(state))

  def test_first_weights(self):
    """As read from a file that someone else wrote."""
    trainable = PARAMS.trainable | {"head": PARAMS.trainable["head"] * jnp.inf}
    params = PARAMS.replace(trainable=trainable)
    run = dataclasses.replace(
      self.run_of(self.trainer(), steps=1), initial_params=lambda seed: params
    )
    with self.assertRaisesRegex(NonFiniteError, "first weights .*head"):
      run.execute()
    self.assertIsNone(Checkpoints(self.out / "checkpoints").latest())

  def test_a_policy_whose_own_scores_are_not_finite(self):
    """What it sampled with NaN is a bad step, not a malformed group."""
    trainer = self.trainer()
    params = jax.tree.map(lambda x: 1e18 * x, PARAMS)
    learner = make_learner(params, OPTIMIZER)
    new, row = trainer.step(learner, 0, None)
    self.assertEqual((row["bad_step"], row["bad_prompts"]), (True, [0, 2]))
    self.assertFalse(np.isfinite(row["sampler_gap"]))
    assert_equal(new, learner)

  def test_a_reference(self):
    """Nothing but the KL term reads it: every step is bad."""
    trainer = self.trainer(objective=Poisoned(kl_coef=0.1))
    learner = make_learner(PARAMS, OPTIMIZER)
    reference = jax.tree.map(lambda x: x * jnp.nan, PARAMS)
    new, row = trainer.step(learner, 0, reference)
    self.assertTrue(row["bad_step"])
    self.assertEqual(row["bad_prompts"], [0, 2])
    assert_equal(new, learner)

  def test_settings(self):
    with self.assertRaisesRegex(ValueError, "max_bad_steps is 0"):
      RunConfig(steps=1, max_bad_steps=0)
    with self.assertRaisesRegex(ValueError, "learning_rate is inf"):
      OptimizerConfig(learning_rate=float("inf"))


if __name__ == "__main__":
  absltest.main()
