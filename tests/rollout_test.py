"""Sampling from a prompt's state."""

import dataclasses

from absl.testing import parameterized
import jax
import jax.numpy as jnp
import numpy as np

from longstraw_jax import (
  PRESETS,
  Model,
  capture,
  replay,
  rollout,
  sequence_logprobs,
)
from longstraw_jax.rollout import sampling_logits


def _setup(prompt_tokens=21):
  config = dataclasses.replace(
    PRESETS["tiny-hybrid"], dtype="float64", param_dtype="float64"
  )
  model = Model(config)
  params = model.init(jax.random.key(0))
  prompt = jax.random.randint(
    jax.random.key(1), (prompt_tokens,), 0, config.vocab_size
  )
  state = capture(model, params, prompt, chunk_size=8, prompt_id=7)
  return model, params, prompt, state


MODEL, PARAMS, PROMPT, STATE = _setup()


def _rollout(seed=2, **sampling):
  sampling = {"group_size": 3, "max_tokens": 6} | sampling
  return rollout(MODEL, PARAMS, STATE, jax.random.key(seed), **sampling)


class SamplingLogitsTest(parameterized.TestCase):
  LOGITS = jnp.log(jnp.array([0.1, 0.4, 0.2, 0.25, 0.05]))

  @parameterized.parameters(
    (1.0, 0, 1.0, [0.1, 0.4, 0.2, 0.25, 0.05]),
    (1.0, 2, 1.0, [0, 0.4 / 0.65, 0, 0.25 / 0.65, 0]),
    (1.0, 0, 0.6, [0, 0.4 / 0.65, 0, 0.25 / 0.65, 0]),
    (1.0, 0, 0.66, [0, 0.4 / 0.85, 0.2 / 0.85, 0.25 / 0.85, 0]),
    (1.0, 1, 0.9, [0, 1, 0, 0, 0]),
    (0.0, 0, 1.0, [0, 1, 0, 0, 0]),
    (0.5, 2, 1.0, [0, 0.16 / 0.2225, 0, 0.0625 / 0.2225, 0]),
  )
  def test_hand_computed(self, temperature, top_k, top_p, expected):
    logits = sampling_logits(self.LOGITS, temperature, top_k, top_p)
    np.testing.assert_allclose(jax.nn.softmax(logits), expected, atol=1e-12)


class RolloutTest(parameterized.TestCase):
  def test_old_logprobs_equal_replay_and_the_conventional_pass(self):
    group = _rollout(top_k=20, top_p=0.9)
    replayed = replay(MODEL, PARAMS, STATE, group.responses, group.lengths)
    np.testing.assert_allclose(group.old_logprobs, replayed, atol=1e-12)
    row = jnp.concatenate([PROMPT, group.responses[1]])
    conventional = sequence_logprobs(MODEL, PARAMS, row)[len(PROMPT) - 1 :]
    np.testing.assert_allclose(group.old_logprobs[1], conventional, atol=1e-12)

  @parameterized.parameters(0.6, 1.7)
  def test_the_tempered_policy_is_what_is_scored(self, temperature):
    """Nothing but the top_k and top_p cut tells it from what was sampled."""
    group = _rollout(temperature=temperature)
    self.assertAlmostEqual(float(group.temperature), temperature)
    np.testing.assert_array_equal(group.old_logprobs, group.sampling_logprobs)
    args = (MODEL, PARAMS, STATE, group.responses, group.lengths)
    replayed = replay(*args, temperature=group.temperature)
    np.testing.assert_allclose(group.old_logprobs, replayed, atol=1e-12)
    plain = replay(*args)
    self.assertGreater(float(jnp.abs(plain - replayed).max()), 0.1)

  @parameterized.parameters(0.0, 1.0)
  def test_greedy_and_plain_responses_have_no_temperature(self, temperature):
    group = _rollout(temperature=temperature)
    self.assertIsNone(group.temperature)
    args = (MODEL, PARAMS, STATE, group.responses, group.lengths)
    np.testing.assert_allclose(group.old_logprobs, replay(*args), atol=1e-12)

  @parameterized.parameters(0.0, -1.0, float("nan"), float("inf"))
  def test_temperatures_that_divide_nothing(self, temperature):
    group = _rollout()
    args = (MODEL, PARAMS, STATE, group.responses, group.lengths)
    with self.assertRaisesRegex(ValueError, "temperature is"):
      replay(*args, temperature=temperature)

  def test_labels_differ_where_the_distribution_was_cut(self):
    plain = _rollout()
    np.testing.assert_allclose(plain.old_logprobs, plain.sampling_logprobs)
    cold = _rollout(temperature=0.6, top_p=0.9, top_k=20)
    self.assertGreater(
      float(jnp.abs(cold.old_logprobs - cold.sampling_logprobs).max()), 0.1
    )

  def test_greedy_takes_the_most_likely_token(self):
    group = _rollout(temperature=0.0, group_size=2)
    np.testing.assert_array_equal(group.responses[0], group.responses[1])
    np.testing.assert_array_equal(group.sampling_logprobs, 0.0)
    row = PROMPT
    for token in group.responses[0]:
      # The last of the candidates' scores is that of the next token.
      score = lambda t, row=row: sequence_logprobs(
        MODEL, PARAMS, jnp.append(row, t)
      )[-1]
      scores = jax.vmap(score)(jnp.arange(MODEL.config.vocab_size))
      self.assertEqual(int(token), int(jnp.argmax(scores)))
      row = jnp.append(row, token)
      if len(row) > len(PROMPT) + 2:
        break

  def test_stop_ids_end_a_response_and_belong_to_it(self):
    stops = tuple(range(0, 61, 4))
    group = _rollout(group_size=16, stop_ids=stops)
    lengths, responses = np.asarray(group.lengths), np.asarray(group.responses)
    self.assertGreater(len(set(lengths.tolist())), 1)
    for length, ids in zip(lengths, responses, strict=True):
      self.assertFalse(set(ids[: length - 1].tolist()) & set(stops))
      if length < 6:
        self.assertIn(int(ids[length - 1]), stops)
      np.testing.assert_array_equal(ids[length:], 0)
    mask = np.arange(6) < lengths[:, None]
    np.testing.assert_array_equal(group.loss_mask, mask)
    np.testing.assert_array_equal(np.where(mask, 0, group.old_logprobs), 0)

  def test_members_do_not_depend_on_the_group_size(self):
    few, many = _rollout(group_size=2), _rollout(group_size=5)
    np.testing.assert_array_equal(few.responses, many.responses[:2])

  def test_samples_follow_the_distribution(self):
    group = _rollout(group_size=4000, max_tokens=1, top_k=3)
    ids, counts = np.unique(group.responses, return_counts=True)
    first = {
      int(i): float(s)
      for i, s in zip(
        np.asarray(group.responses)[:, 0],
        np.asarray(group.sampling_logprobs)[:, 0],
        strict=True,
      )
    }
    self.assertLen(ids, 3)
    for token, count in zip(ids, counts, strict=True):
      share = np.exp(first[int(token)])
      spread = 4 * np.sqrt(share * (1 - share) / 4000)
      self.assertAlmostEqual(count / 4000, share, delta=spread)

  def test_group_carries_the_prompt_id_and_no_reward(self):
    group = _rollout()
    self.assertEqual(int(group.prompt_id), 7)
    for name in ("rewards", "advantages", "ref_logprobs", "loss_denominator"):
      self.assertIsNone(getattr(group, name))

  @parameterized.parameters(
    ({"group_size": 0}, "group_size is 0"),
    ({"max_tokens": 0}, "max_tokens is 0"),
    ({"temperature": -1.0}, "temperature is -1"),
    ({"top_p": 0.0}, "top_p is 0"),
    ({"top_k": -2}, "top_k is -2"),
    ({"stop_ids": (3, 9999)}, "9999 is no id of a vocabulary of"),
    ({"stop_ids": (-1,)}, "-1 is no id"),
  )
  def test_bad_input_names_the_value(self, sampling, message):
    with self.assertRaisesRegex(ValueError, message):
      _rollout(**sampling)
