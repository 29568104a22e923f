"""One step of the loop against what it is made of."""

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
  PRESETS,
  Group,
  LayerSpec,
  LoraConfig,
  Model,
  PolicyObjective,
  Stage,
  add_lora,
  capture,
)
from longstraw_jax.replay import replay_scores
from longstraw_jax.rewards import RewardError
from longstraw_jax.steps import make_learner, rollout_groups, score_reference
from longstraw_jax.stop_ids import StopId
from longstraw_jax.tasks import Corpus, TaskConfig, make_task
from longstraw_jax.testing.baselines import group_scores
from longstraw_jax.tokenizer import ByteTokenizer, JsonTokenizer
from longstraw_jax.train_config import (
  EngineConfig,
  OptimizerConfig,
  SamplingConfig,
  TrainConfig,
)
from longstraw_jax.trainer import Trainer, combine_metrics
from tests.tokenizer_test import write_tokenizer

CONFIG = dataclasses.replace(
  PRESETS["tiny-hybrid"],
  vocab_size=258,
  saved="everything",
  stages=(dataclasses.replace(PRESETS["tiny-hybrid"].stages[0], repeats=1),),
)
MODEL = Model(CONFIG)
PARAMS = MODEL.init(jax.random.key(0))
TASK = make_task(
  TaskConfig(prompt_tokens=72, num_facts=1),
  Corpus.standard_library(),
  ByteTokenizer(),
)
BASE = TrainConfig(
  prompts_per_step=2,
  sampling=SamplingConfig(group_size=3, max_tokens=3),
  engine=EngineConfig(chunk_size=24, prompts_at_once=2, members_at_once=3),
  optimizer=OptimizerConfig(learning_rate=1e-2, warmup_steps=0),
)


def _length_reward(prompt_text, response_text, info):
  """Something that varies within a group of random responses."""
  del prompt_text, info
  return sum(response_text.encode()) % 7 / 7


def _trainer(reward=_length_reward, **changes):
  config = dataclasses.replace(BASE, **changes)
  return Trainer(MODEL, config, TASK, ByteTokenizer(), reward)


def _step(trainer, reference=None):
  learner = make_learner(PARAMS, trainer.config.optimizer)
  return trainer.step(learner, 0, reference)


def _distance(a, b):
  pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
  return max(float(jnp.abs(x - y).max()) for x, y in pairs)


class StepTest(parameterized.TestCase):
  def test_the_first_update_is_on_policy(self):
    learner, row = _step(_trainer())
    self.assertLess(row["ratio_deviation_max"], 1e-6)
    self.assertEqual(row["clip_share"], 0)
    self.assertLess(abs(row["loss"]), 1e-6)
    self.assertGreater(row["grad_norm"], 0.01)
    self.assertLess(row["mismatch_max"], 1e-4)
    self.assertEqual(int(learner.step), 1)
    self.assertGreater(_distance(learner.params, PARAMS), 1e-3)

  @parameterized.parameters(0.5, 2.0)
  def test_the_first_update_is_on_policy_at_any_temperature(self, temperature):
    """Sampler, old scores, replay and reference: one tempered policy."""
    sampling = dataclasses.replace(BASE.sampling, temperature=temperature)
    _, row = _step(
      _trainer(sampling=sampling, objective=PolicyObjective(kl_coef=0.1)),
      PARAMS,
    )
    # Rounding of the logits is divided by the temperature, too.
    self.assertLess(row["ratio_deviation_max"], 1e-6 / min(temperature, 1))
    self.assertLess(row["mismatch_max"], 1e-4)
    self.assertLess(row["kl_ref"], 1e-6)

  def test_later_updates_leave_the_trust_region(self):
    learner, row = _step(_trainer(updates_per_rollout=4))
    self.assertGreater(row["clip_share"], 0)
    self.assertGreater(row["ratio_deviation_max"], 0.2)
    self.assertEqual(int(learner.step), 4)

  @pytest.mark.slow
  def test_refresh_policy(self):
    """Updates over a stale state differ from those over a fresh one."""
    changes = {
      "engine": dataclasses.replace(BASE.engine, grad_scope="response_only"),
      # Small steps: what is clipped would have no gradient over either.
      "optimizer": OptimizerConfig(learning_rate=1e-4, warmup_steps=0),
      "updates_per_rollout": 2,
    }
    fresh, stale = (
      _step(_trainer(refresh_every=n, **changes))[0] for n in (1, 2)
    )
    self.assertGreater(_distance(fresh.params, stale.params), 1e-7)

  @pytest.mark.slow
  def test_nothing_depends_on_how_prompts_and_members_are_batched(self):
    objective = PolicyObjective(normalization="token")
    alone = EngineConfig(chunk_size=24)
    together, apart = (
      _step(_trainer(engine=e, objective=objective))
      for e in (BASE.engine, alone)
    )
    self.assertLess(abs(together[1]["loss"] - apart[1]["loss"]), 1e-6)
    np.testing.assert_allclose(
      together[1]["grad_norm"], apart[1]["grad_norm"], rtol=1e-4
    )

  @pytest.mark.slow
  def test_the_reference_has_a_state_of_its_own(self):
    objective = PolicyObjective(kl_coef=0.1)
    trainer = _trainer(objective=objective)
    self.assertLess(_step(trainer, PARAMS)[1]["kl_ref"], 1e-6)
    other = MODEL.init(jax.random.key(1))
    self.assertGreater(_step(trainer, other)[1]["kl_ref"], 1e-2)

  def test_reference_scores_equal_a_conventional_pass(self):
    trainer = _trainer()
    examples = trainer.examples(0)
    prompts = jnp.stack([jnp.asarray(e.prompt_ids) for e in examples])
    responses = jax.random.randint(jax.random.key(3), (2, 3, 3), 0, 258)
    lengths = jnp.array([3, 1, 2])
    groups = jax.vmap(lambda ids: Group.create(ids, lengths))(responses)
    scores = score_reference(MODEL, BASE.engine, PARAMS, groups, prompts)
    for i in range(2):
      group = jax.tree.map(lambda x, i=i: x[i], groups)
      expected, _ = group_scores(MODEL, PARAMS, prompts[i], group)
      np.testing.assert_allclose(scores[i], expected, atol=1e-5)

  @parameterized.parameters(float("nan"), float("inf"), None, "three")
  def test_a_bad_reward_names_its_member(self, value):
    trainer = _trainer(reward=lambda *unused: value)
    with self.assertRaisesRegex(RewardError, "member 0"):
      _step(trainer)

  def test_evaluation_repeats_itself(self):
    trainer = _trainer()
    learner = make_learner(PARAMS, BASE.optimizer)
    first, again = (trainer.evaluate(learner, 5, 4) for _ in range(2))
    self.assertEqual(first.shape, (5,))
    np.testing.assert_array_equal(first, again)
    np.testing.assert_array_equal(trainer.evaluate(learner, 4, 4), first[:4])

  def test_evaluation_keeps_no_state(self):
    """128 prompts of 4,096 tokens would be 24 GB with SmolLM2."""
    trainer = _trainer()
    learner = make_learner(PARAMS, BASE.optimizer)
    prompts = jnp.stack(
      [jnp.asarray(e.prompt_ids) for e in trainer.examples(0)]
    )
    static = (MODEL, BASE.engine, BASE.sampling, trainer.stop_ids)

    def outputs(keep_states):
      call = functools.partial(rollout_groups, *static, keep_states)
      keys = jax.random.split(jax.random.key(0), 2)
      return jax.eval_shape(call, learner, prompts, jnp.arange(2), keys)[0]

    self.assertIsNone(outputs(False))
    self.assertIsNotNone(outputs(True))

  def test_supervised_steps_learn_the_answers(self):
    trainer = _trainer()
    learner = make_learner(PARAMS, BASE.optimizer)
    losses = []
    for step in range(8):
      learner, row = trainer.supervised_step(
        learner, step, TASK, 2, BASE.optimizer
      )
      losses.append(row["nll"])
    self.assertLess(losses[-1], losses[0] - 1)

  @parameterized.parameters("step", "supervised_step", "evaluate")
  def test_prompts_of_several_lengths(self, entry):
    """One error that names them; numpy's names nothing."""

    class Uneven:
      chance_level = 0.0

      def sample(self, index, split):
        example = TASK.sample(index, split)
        ids = example.prompt_ids[: len(example.prompt_ids) - index % 2]
        return dataclasses.replace(example, prompt_ids=ids)

    trainer = dataclasses.replace(_trainer(), task=Uneven())
    learner = make_learner(PARAMS, BASE.optimizer)
    arguments = {
      "step": (learner, 3, None),
      "supervised_step": (learner, 0, Uneven(), 2, BASE.optimizer),
      "evaluate": (learner, 2),
    }[entry]
    first = {"step": 6, "supervised_step": 2**29, "evaluate": 0}[entry]
    split = "heldout" if entry == "evaluate" else "train"
    even, odd = (TASK.sample(first + i, split).prompt_id for i in range(2))
    message = f"2 lengths .71 tokens: prompt {odd}; 72 tokens: prompt {even}"
    with self.assertRaisesRegex(ValueError, message):
      getattr(trainer, entry)(*arguments)

  def test_steps_draw_different_prompts(self):
    trainer = _trainer()
    ids = [e.prompt_id for step in range(3) for e in trainer.examples(step)]
    self.assertLen(set(ids), 6)


class JudgedTextTest(parameterized.TestCase):
  """Rewards see all that was sampled but the stop id that ended it."""

  def _seen(self, tokenizer, responses, lengths, stops=()):
    """(text, ids, truncated) of each member, as a reward function gets them."""
    seen = []

    def reward(prompt_text, response_text, info, *, response_ids, truncated):
      seen.append((response_text, response_ids.tolist(), truncated))
      return 0.0

    trainer = Trainer(MODEL, BASE, TASK, tokenizer, reward, stops)
    groups = jax.vmap(Group.create)(
      jnp.asarray([responses]), jnp.asarray([lengths])
    )
    got = trainer.rewards(trainer.examples(0)[:1], groups)
    self.assertEqual(got.shape, (1, len(lengths)))
    return seen

  @parameterized.parameters(
    ("4<|im_start|>2<|im_end|>", "4<|im_start|>2", False),
    ("<think>ab</think>42<|im_end|>", "<think>ab</think>42", False),
    ("42<|im_end|>", "42", False),
    ("42", "42", True),
    ("4<pad>2<pad>", "4<pad>2<pad>", True),
    ("<|im_end|>", "", False),
    ("42<|im_end|><|im_end|>", "42<|im_end|>", False),
  )
  def test_special_tokens_stay(self, sampled, text, truncated):
    names = ["<|endoftext|>", "<|im_end|>", "<pad>", "<|im_start|>"]
    with tempfile.TemporaryDirectory() as folder:
      path = write_tokenizer(
        pathlib.Path(folder), special=[*names, "<think>", "</think>"]
      )
      tokenizer = JsonTokenizer(path)
    ids = tokenizer.encode(sampled, special=True, begin=False).tolist()
    behind = [1, 3]  # what stands behind the length is nobody's
    ((*seen, cut),) = self._seen(tokenizer, [ids + behind], [len(ids)])
    self.assertEqual((*seen, cut), (text, ids, truncated))

  def test_every_stop_id_ends_a_response(self):
    stops = tuple(StopId(i, "", ()) for i in (10, 256))
    trainer = dataclasses.replace(_trainer(), stops=stops)
    self.assertEqual(trainer.stop_ids, (256, 10))
    seen = self._seen(ByteTokenizer(), [[52, 50, 10]], [3], stops)
    self.assertEqual(seen, [("42", [52, 50, 10], False)])

  def test_bytes(self):
    end, pad = ByteTokenizer.eos_id, ByteTokenizer.pad_id
    seen = self._seen(
      ByteTokenizer(),
      [[52, pad, 50, end], [52, 50, end, 9], [52, 50, 10, 10]],
      [4, 3, 4],
    )
    self.assertEqual(
      [(text, cut) for text, _, cut in seen],
      [("4\ufffd2", False), ("42", False), ("42\n\n", True)],
    )


class PolicyTest(parameterized.TestCase):
  """Every place that samples a run's policy samples the one that learns."""

  @parameterized.parameters("prefix_frozen", "full")
  def test_a_sample_is_of_the_policy_that_learns(self, scope):
    stage = Stage(pattern=(LayerSpec(mixer="attention"),), repeats=1)
    model = Model(dataclasses.replace(CONFIG, stages=(stage,)))
    plain = model.init(jax.random.key(0))
    lora = LoraConfig(rank=2, alpha=64.0)
    params = add_lora(model, plain, jax.random.key(1), lora)
    trained = lambda path, x: x + 0.3 * ("lora_b" in jax.tree_util.keystr(path))
    params = jax.tree_util.tree_map_with_path(trained, params)
    learner = make_learner(params, BASE.optimizer)
    heard = []

    def reward(prompt_text, response_text, info):
      heard.append(response_text)
      return 0.0

    engine = dataclasses.replace(BASE.engine, grad_scope=scope)
    config = dataclasses.replace(BASE, engine=engine)
    trainer = Trainer(model, config, TASK, ByteTokenizer(), reward)
    trainer.evaluate(learner, 2)
    keys = jax.random.split(
      jax.random.fold_in(jax.random.key(config.seed), 2**31 - 1), 2
    )
    one = dataclasses.replace(config.sampling, group_size=1)
    for i, key in enumerate(keys):
      prompt = TASK.sample(i, "heldout").prompt_ids
      group = trainer.sample(learner, prompt, key, one)
      with self.subTest("as training scores it"):
        state = capture(
          model,
          params,
          jnp.asarray(prompt),
          chunk_size=engine.chunk_size,
          grad_scope=scope,
        )
        scored = functools.partial(replay_scores, model, params)
        ids = (group.responses, group.lengths)
        wanted = scored(state, *ids)[0]
        np.testing.assert_allclose(group.old_logprobs, wanted, atol=1e-5)
      with self.subTest("which is another policy in the one scope alone"):
        other = capture(model, params, jnp.asarray(prompt), chunk_size=24)
        distance = jnp.abs(scored(other, *ids)[0] - wanted).max()
        self.assertEqual(float(distance) > 0.01, scope == "prefix_frozen")
      with self.subTest("as the evaluation samples it"):
        ids = group.responses[0, : int(group.lengths[0])]
        ended = int(ids[-1]) == ByteTokenizer.eos_id
        text = ByteTokenizer().decode(ids[: len(ids) - ended])
        self.assertEqual(heard[i], text)


class CombineMetricsTest(parameterized.TestCase):
  def test_sums_weighted_means_and_maxima(self):
    metrics = {
      "loss": np.float32(3.0),
      "num_tokens": np.array([1.0, 3.0]),
      "entropy": np.array([4.0, 8.0]),
      "mismatch_max": np.array([0.1, 0.7]),
      "policy_loss": np.array([1.0, 2.0]),
      "zero_spread": np.array([1.0, 0.0]),
    }
    second = metrics | {"entropy": np.array([0.0, 0.0])}
    self.assertEqual(
      combine_metrics([metrics, second]),
      {
        "loss": 3.0,
        "num_tokens": 4.0,
        "entropy": 3.5,
        "mismatch_max": 0.7,
        "policy_loss": 3.0,
      },
    )
