"""What a step scores, under which weights, and how it weighs its groups."""

import dataclasses
from unittest import mock

from absl.testing import absltest, parameterized
import jax
import jax.numpy as jnp
import numpy as np

from longstraw_jax import (
  LoraConfig,
  PolicyObjective,
  add_lora,
  capture,
  replay,
  steps,
  trainer,
)
from longstraw_jax.steps import make_learner, score_reference
from longstraw_jax.types import Group
from tests.trainer_test import BASE, MODEL, PARAMS, TASK, ByteTokenizer

CHUNK = BASE.engine.chunk_size


def run_step(reward, reference=None, rollout_groups=None, step=0, **changes):
  """A step's row, and what its updates were given."""
  config = dataclasses.replace(BASE, **changes)
  loop = trainer.Trainer(MODEL, config, TASK, ByteTokenizer(), reward)
  learner = make_learner(PARAMS, config.optimizer)
  seen = []

  def update(*args):
    seen.append(args)
    return steps.update(*args)

  sampler = rollout_groups or steps.rollout_groups
  with (
    mock.patch.object(trainer, "update", update),
    mock.patch.object(trainer, "rollout_groups", sampler),
  ):
    _, row = loop.step(learner, step, reference)
  return row, seen


def groups_of(update_args) -> Group:
  """Of the arguments of steps.update."""
  return next(x for x in update_args if isinstance(x, Group))


class Rewards:
  """One to three points for the members of the first prompt, 10 more later."""

  def __init__(self):
    """Nothing has been judged."""
    self.calls = 0

  def __call__(self, prompt_text, response_text, info):
    """The next reward."""
    del prompt_text, response_text, info
    group, member = divmod(self.calls, BASE.sampling.group_size)
    self.calls += 1
    return float(10 * group + member**2)


class ScoringTest(parameterized.TestCase):
  def test_old_scores_are_those_of_the_trainer(self):
    """Whatever the sampler reports: its arithmetic is another one."""

    def sampler(*args):
      states, groups = steps.rollout_groups(*args)
      return states, groups.replace(old_logprobs=groups.old_logprobs - 1)

    row, _ = run_step(Rewards(), rollout_groups=sampler)
    self.assertLess(row["ratio_deviation_max"], 1e-6)

  @parameterized.parameters((1.0, 0, True), (1.0, 5, True), (0.0, 5, False))
  def test_a_sampler_of_other_weights_raises_an_alarm(self, old, top_k, alarm):
    """The ratio says nothing of it; a cut distribution is no such thing."""

    def nudged(x):
      wave = jnp.cos(jnp.arange(x.size)).reshape(x.shape)
      return (x + old * 0.1 * wave).astype(x.dtype)

    def sampler(model, engine, sampling, stop_ids, keep, learner, *args):
      params = learner.params.replace(
        trainable=jax.tree.map(
          nudged,
          learner.params.trainable,
        )
      )
      _, groups = steps.rollout_groups(
        *(model, engine, sampling, stop_ids, keep),
        learner.replace(params=params),
        *args,
      )
      states, _ = steps.rollout_groups(
        model, engine, sampling, stop_ids, keep, learner, *args
      )
      return states, groups

    sampling = dataclasses.replace(BASE.sampling, top_k=top_k)
    run = lambda: run_step(
      Rewards(), rollout_groups=sampler, sampling=sampling
    )[0]
    if alarm:
      with self.assertLogs("longstraw_jax.trainer", "WARNING") as log:
        row = run()
      self.assertIn("mismatch_alarm is 0.1", log.output[0])
      self.assertGreater(row["sampler_gap"], 0.1)
    else:
      with self.assertNoLogs("longstraw_jax.trainer", "WARNING"):
        row = run()
      self.assertLess(row["sampler_gap"], 1e-4)
    self.assertEqual(row["mismatch_alarm"], alarm)
    self.assertLess(row["ratio_deviation_max"], 1e-6)

  def test_old_scores_stay_while_weights_move(self):
    """Every update of a rollout is measured from where it began."""
    _, seen = run_step(Rewards(), updates_per_rollout=2)
    first, second = (groups_of(args).old_logprobs for args in seen)
    np.testing.assert_array_equal(first, second)

  def test_advantages_are_a_group_s_own(self):
    """Not normalised over all groups of the step."""
    _, ((*args,),) = run_step(Rewards())
    groups = groups_of(args)
    self.assertGreater(np.ptp(groups.rewards.mean(1)), 5)
    np.testing.assert_allclose(groups.advantages.mean(1), 0, atol=1e-6)
    np.testing.assert_allclose(groups.advantages[0], groups.advantages[1], 1e-5)

  def test_denominators_are_the_whole_step_s(self):
    """Of all groups together, so that long ones weigh as the loss says."""
    objective = PolicyObjective(normalization="token")
    _, ((*args,),) = run_step(Rewards(), objective=objective)
    groups = groups_of(args)
    np.testing.assert_array_equal(
      groups.loss_denominator, [float(groups.loss_mask.sum())] * 2
    )

  def test_every_step_has_randomness_of_its_own(self):
    """And the same one when it is run again."""
    used = []

    def sampler(*args):
      used.append(jax.random.key_data(args[-1]).tolist())
      return steps.rollout_groups(*args)

    for step in (0, 1, 0):
      run_step(Rewards(), rollout_groups=sampler, step=step)
    self.assertEqual(used[0], used[2])
    several = [tuple(key) for keys in used[:2] for key in keys]
    self.assertLen(set(several), 4)

  def test_held_out_prompts_are_those_of_the_task(self):
    """None of them is ever trained on."""
    loop = trainer.Trainer(
      MODEL, BASE, TASK, ByteTokenizer(), lambda *unused: 0.0
    )
    seen = []

    def sampler(*args):
      seen.extend(np.asarray(args[-2]).tolist())
      return steps.rollout_groups(*args)

    with mock.patch.object(trainer, "rollout_groups", sampler):
      loop.evaluate(make_learner(PARAMS, BASE.optimizer), 4, 4)
    self.assertEqual(
      seen, [TASK.sample(i, "heldout").prompt_id for i in range(4)]
    )
    trained = {e.prompt_id for step in range(50) for e in loop.examples(step)}
    self.assertFalse(trained & set(seen))


class ReferenceTest(parameterized.TestCase):
  @parameterized.parameters("prefix_frozen", "response_only", "full")
  def test_adapters_are_where_the_policy_has_them(self, scope):
    """A reference with adapters is captured as its policy is."""
    params = add_lora(MODEL, PARAMS, jax.random.key(1), LoraConfig(rank=2))
    params = params.replace(
      trainable=jax.tree.map(lambda x: x + 0.1, params.trainable)
    )
    engine = dataclasses.replace(BASE.engine, grad_scope=scope)
    prompt = jnp.asarray(TASK.sample(0, "train").prompt_ids)
    responses, lengths = jnp.array([[5, 6, 7], [8, 9, 1]]), jnp.array([3, 2])
    group = Group.create(responses, lengths)

    def scores(grad_scope):
      state = capture(
        MODEL, params, prompt, chunk_size=CHUNK, grad_scope=grad_scope
      )
      return replay(MODEL, params, state, responses, lengths)

    groups = jax.tree.map(lambda x: x[None], group)
    (found,) = score_reference(MODEL, engine, params, groups, prompt[None])
    off, on = scores("prefix_frozen"), scores("response_only")
    self.assertGreater(float(jnp.abs(off - on).max()), 1e-2)
    wanted = off if scope == "prefix_frozen" else on
    np.testing.assert_allclose(found, wanted, atol=1e-5)


if __name__ == "__main__":
  absltest.main()
