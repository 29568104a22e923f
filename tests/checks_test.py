"""Bad input ends in one clear error that names the value and the remedy."""

import dataclasses

from absl.testing import parameterized
import jax
import jax.numpy as jnp

from longstraw_jax import (
  PRESETS,
  Group,
  LayerSpec,
  Model,
  PolicyObjective,
  Stage,
  capture,
  group_gradient,
  replay,
)
from longstraw_jax.train_config import (
  EngineConfig,
  OptimizerConfig,
  TrainConfig,
)

CONFIG = dataclasses.replace(
  PRESETS["tiny-hybrid"],
  dtype="float64",
  param_dtype="float64",
  saved="everything",
)
MODEL = Model(CONFIG)
PARAMS = MODEL.init(jax.random.key(0))
PROMPT = jnp.arange(10) % CONFIG.vocab_size


def _group(**known):
  known = {"rewards": [1.0, 0.0], "advantages": [1.0, -1.0]} | known
  return Group.create([[1, 2, 3], [4, 5, 6]], [3, 2], **known)


class CaptureChecksTest(parameterized.TestCase):
  @parameterized.parameters(
    (jnp.zeros(0, jnp.int32), {}, r"prompt has shape \(0,\)"),
    (jnp.zeros((2, 3), jnp.int32), {}, r"prompt has shape \(2, 3\)"),
    (PROMPT, {"chunk_size": 0}, "chunk_size is 0"),
    (PROMPT, {"chunk_size": 2.5}, "chunk_size is 2.5"),
    (PROMPT.at[3].set(61), {}, r"prompt\[3\] is 61, outside the vocabulary"),
    (PROMPT.at[3].set(-1), {}, r"prompt\[3\] is -1"),
    (PROMPT, {"length": 0}, "length is 0"),
    (PROMPT, {"length": 11}, "length is 11"),
    (PROMPT, {"capacity": 5}, "need a capacity of 9, which is 5"),
    (PROMPT, {"grad_scope": "most"}, "grad_scope is 'most'"),
    (PROMPT, {"grad_scope": "tail"}, "tail_chunks is None"),
    (PROMPT, {"tail_chunks": 2}, "tail_chunks is 2"),
  )
  def test_refused(self, prompt, sizes, message):
    with self.assertRaisesRegex(ValueError, message):
      capture(MODEL, PARAMS, prompt, **({"chunk_size": 4} | sizes))

  def test_ids_behind_the_length_are_not_looked_at(self):
    padded = jnp.append(PROMPT, 999)
    state = capture(MODEL, PARAMS, padded, chunk_size=4, length=10)
    self.assertEqual(int(state.length), 9)
    self.assertEqual(int(state.last_token), int(PROMPT[9]))


class ReplayChecksTest(parameterized.TestCase):
  @parameterized.parameters(
    ([[1, 2]], [0], {}, r"member 0 has an empty response"),
    ([[1, 2], [1, 2]], [1, 3], {}, r"member 1 has an over-long response"),
    ([[1, 2]], [1, 1], {}, r"lengths have shape \(2,\)"),
    ([[1, 99]], [2], {}, r"responses\[0, 1\] is 99"),
    ([[]], [0], {}, r"responses have shape \(1, 0\)"),
    ([[1, 2]], [2], {"block_size": 0}, "block_size is 0"),
    ([[1, 2]], [2], {"members_at_once": 0}, "members_at_once is 0"),
  )
  def test_refused(self, responses, lengths, sizes, message):
    state = capture(MODEL, PARAMS, PROMPT, chunk_size=4)
    with self.assertRaisesRegex(ValueError, message):
      replay(
        MODEL,
        PARAMS,
        state,
        jnp.asarray(responses),
        jnp.asarray(lengths),
        **sizes,
      )

  def test_ids_behind_a_response_are_not_looked_at(self):
    state = capture(MODEL, PARAMS, PROMPT, chunk_size=4)
    clean = replay(MODEL, PARAMS, state, jnp.array([[1, 0]]), jnp.array([1]))
    dirty = replay(MODEL, PARAMS, state, jnp.array([[1, 99]]), jnp.array([1]))
    self.assertEqual(clean.tolist(), dirty.tolist())


class GroupChecksTest(parameterized.TestCase):
  @parameterized.parameters(
    ({"rewards": [1.0], "advantages": [1.0]}, r"advantages has shape \(1,\)"),
    ({"advantages": [1.0, float("nan")]}, "member 1 has advantage nan"),
    ({"prompt_id": 8}, "belongs to prompt 8, not to prompt 7"),
    ({"loss_mask": jnp.ones((2, 2), bool)}, r"loss_mask has shape \(2, 2\)"),
  )
  def test_refused(self, known, message):
    with self.assertRaisesRegex(ValueError, message):
      self._gradient(_group(**({"prompt_id": 7} | known)))

  def test_missing_rewards_are_refused(self):
    group = Group.create([[1, 2]], [2], prompt_id=7)
    with self.assertRaisesRegex(ValueError, "reward is missing"):
      self._gradient(group)

  @parameterized.parameters(
    ({"grad_scope": "full"}, "captured with grad_scope 'response_only'"),
    ({"chunk_size": 5}, "chunk_size 4, wanted are"),
    ({"step": 3}, "made by the weights of step 0"),
  )
  def test_state_of_something_else(self, changes, message):
    state = capture(MODEL, PARAMS, PROMPT, chunk_size=4)
    sizes = {"chunk_size": 4, "grad_scope": "response_only"} | changes
    with self.assertRaisesRegex(ValueError, message):
      self._gradient(_group(prompt_id=7), state=state, **sizes)

  def test_state_of_a_prompt_shorter_than_a_chunk(self):
    sizes = {"chunk_size": 32, "grad_scope": "response_only"}
    state = capture(MODEL, PARAMS, PROMPT, **sizes)
    loss, _, _ = self._gradient(_group(prompt_id=7), state=state, **sizes)
    self.assertTrue(jnp.isfinite(loss))

  def test_state_of_a_prompt_of_another_length(self):
    state = capture(MODEL, PARAMS, PROMPT[:7], chunk_size=4)
    with self.assertRaisesRegex(ValueError, "prompt of 7 tokens"):
      self._gradient(
        _group(prompt_id=7), state=state, grad_scope="response_only"
      )

  def _gradient(self, group, **sizes):
    return group_gradient(
      MODEL,
      PARAMS,
      PROMPT,
      group,
      PolicyObjective(),
      prompt_id=7,
      **({"chunk_size": 4} | sizes),
    )


class ConfigChecksTest(parameterized.TestCase):
  @parameterized.parameters(
    (lambda: EngineConfig(chunk_size=0), "chunk_size is 0"),
    (lambda: EngineConfig(grad_scope="all"), "grad_scope is 'all'"),
    (lambda: EngineConfig(tail_chunks=2), "tail_chunks is 2"),
    (lambda: TrainConfig(prompts_per_step=0), "prompts_per_step is 0"),
    (
      lambda: TrainConfig(
        prompts_per_step=3, engine=EngineConfig(prompts_at_once=2)
      ),
      "prompts_at_once is 2",
    ),
    (lambda: TrainConfig(refresh_every=2), "refresh_every is 2"),
    (lambda: TrainConfig(advantages="mean"), "advantages is 'mean'"),
    (
      lambda: TrainConfig(objective=PolicyObjective(normalization="constant")),
      "constant_length is None",
    ),
    (lambda: OptimizerConfig(learning_rate=-1.0), "learning_rate is -1"),
    (
      lambda: dataclasses.replace(CONFIG, saved="some"),
      "saved is 'some'",
    ),
    (lambda: dataclasses.replace(CONFIG, dtype="int32"), "dtype is 'int32'"),
    (
      lambda: dataclasses.replace(CONFIG.attention, num_kv_heads=3),
      "num_kv_heads is 3",
    ),
  )
  def test_refused(self, make, message):
    with self.assertRaisesRegex(ValueError, message):
      make()

  def test_an_unknown_layer_lists_what_there_is(self):
    stage = Stage(pattern=(LayerSpec(mixer="mamba"),), repeats=1)
    config = dataclasses.replace(CONFIG, stages=(stage,))
    with self.assertRaisesRegex(KeyError, "'mamba' is not registered"):
      Model(config)
