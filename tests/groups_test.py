"""What a group must have, and what is refused where it has something else."""

import dataclasses
import functools
import tempfile

from absl.testing import parameterized
import jax
import jax.numpy as jnp
import numpy as np

from longstraw_jax import (
  PRESETS,
  Group,
  LayerSpec,
  Model,
  PolicyObjective,
  Stage,
  branch_gradient,
  capture,
  extend,
  group_gradient,
  load_state,
  replay,
  replay_scores,
  reverse_chunks,
  rollout,
  save_state,
)
from longstraw_jax.group_checks import UNKNOWN_PROMPT
from longstraw_jax.objectives import LikelihoodObjective
from longstraw_jax.steps import make_learner, score_groups, update
from longstraw_jax.testing.compare import assert_gradients_close
from longstraw_jax.train_config import EngineConfig, OptimizerConfig

CONFIG = dataclasses.replace(
  PRESETS["tiny-hybrid"],
  dtype="float64",
  param_dtype="float64",
  saved="everything",
  stages=(Stage(pattern=(LayerSpec(mixer="attention"),), repeats=1),),
)
MODEL = Model(CONFIG)
PARAMS = jax.jit(MODEL.init)(jax.random.key(0))
PROMPT = np.arange(10, dtype=np.int32)
OTHER = PROMPT + 20
LENGTHS = (4, 2, 3)
SHAPE = (3, 5)
INSIDE = np.arange(SHAPE[1]) < np.array(LENGTHS)[:, None]
RANDOM = np.random.default_rng(0)
RESPONSES = RANDOM.integers(0, 61, SHAPE).astype(np.int32)
SCORES = {
  name: RANDOM.normal(size=SHAPE) - 4
  for name in ("old_logprobs", "sampling_logprobs", "ref_logprobs")
}
ADVANTAGES = np.array([1.0, -0.7, 0.4])
REWARDS = np.array([1.0, 0.0, 0.5])
EVERYTHING = SCORES | {"advantages": ADVANTAGES, "rewards": REWARDS}
ALL_TERMS = PolicyObjective(
  kl_coef=0.1, entropy_coef=0.05, clip_low=0.9, sampler_correction_cap=2.0
)
SIZES = {"chunk_size": 4, "grad_scope": "response_only"}


def make_group(**known) -> Group:
  return Group.create(RESPONSES, LENGTHS, **(EVERYTHING | known))


def gradient(group, objective=ALL_TERMS, **options):
  return group_gradient(
    MODEL, PARAMS, PROMPT, group, objective, **(SIZES | options)
  )


@functools.cache
def state_of(prompt_id=None, scope: str = "response_only"):
  sizes = {"chunk_size": 4, "grad_scope": scope}
  return capture(MODEL, PARAMS, PROMPT, prompt_id=prompt_id, **sizes)


@functools.cache
def present_scores():
  return replay_scores(MODEL, PARAMS, state_of(), RESPONSES, LENGTHS)


@functools.partial(jax.jit, static_argnums=0)
def loss_and_slope(objective, scores, group):
  """Loss and metrics of an objective, and its gradient by everything."""
  call = lambda scores, group: objective(*scores, group)
  out = jax.value_and_grad(call, argnums=(0, 1), has_aux=True, allow_int=True)
  return out(scores, group)


def assert_same(a, b):
  jax.tree.map(np.testing.assert_array_equal, a, b)


class MissingTest(parameterized.TestCase):
  def test_what_is_not_given_is_none(self):
    group = Group.create(RESPONSES, LENGTHS, ref_logprobs=None)
    for name in (*EVERYTHING, "loss_denominator", "choices"):
      self.assertIsNone(getattr(group, name), name)
    self.assertEqual(int(group.prompt_id), UNKNOWN_PROMPT)
    np.testing.assert_array_equal(group.loss_mask, INSIDE)

  @parameterized.parameters(
    ("advantages", PolicyObjective(), "reward is missing"),
    ("advantages", ALL_TERMS, "policy gradient needs"),
    ("ref_logprobs", PolicyObjective(kl_coef=0.1), "kl_coef=0.1 needs"),
    ("ref_logprobs", ALL_TERMS, "reference's scores"),
    (
      "sampling_logprobs",
      PolicyObjective(sampler_correction_cap=2.0),
      "sampler_correction_cap=2.0 needs",
    ),
    ("sampling_logprobs", ALL_TERMS, "the sampler recorded"),
  )
  def test_refused_by_an_objective_that_asks_for_it(
    self, name, objective, message
  ):
    group = make_group(**{name: None})
    pattern = f"the group has no {name}.*{message}"
    calls = (
      lambda: objective(*present_scores(), group),
      lambda: gradient(group, objective),
      lambda: jax.jit(lambda group: gradient(group, objective))(group),
      lambda: jax.jit(jax.vmap(lambda group: gradient(group, objective)))(
        jax.tree.map(lambda x: jnp.stack([x, x]), group)
      ),
    )
    for call in calls:
      with self.assertRaisesRegex(ValueError, pattern):
        call()

  @parameterized.parameters("token", "sequence")
  def test_the_present_scores_are_the_old_ones(self, level):
    """Exactly: the loss, its slope and every metric, for any other term."""
    objective = dataclasses.replace(ALL_TERMS, ratio_level=level)
    scores = present_scores()
    given = make_group(old_logprobs=scores[0])
    (loss, metrics), (slope, _) = loss_and_slope(objective, scores, given)
    found = loss_and_slope(objective, scores, make_group(old_logprobs=None))
    assert_same(found[0], (loss, metrics))
    assert_same(found[1][0], slope)
    self.assertEqual(metrics["ratio_mean"], 1)
    self.assertEqual(metrics["ratio_deviation_max"], 0)
    self.assertGreater(metrics["mismatch_max"], 0.1)

  def test_the_first_update_is_the_plain_policy_gradient(self):
    """A of each token over its member's length and the group's size."""
    group = Group.create(RESPONSES, LENGTHS, advantages=ADVANTAGES)
    _, (slope, _) = loss_and_slope(PolicyObjective(), present_scores(), group)
    weights = INSIDE / (3 * np.array(LENGTHS)[:, None])
    expected = -ADVANTAGES[:, None] * weights
    np.testing.assert_allclose(slope[0], expected, 1e-14)
    loss, grads, metrics = gradient(group, PolicyObjective())
    self.assertEqual(metrics["ratio_deviation_max"], 0)
    np.testing.assert_allclose(loss, -ADVANTAGES.mean(), 1e-14)
    given = make_group(old_logprobs=present_scores()[0])
    expected = gradient(given, PolicyObjective())[1]
    assert_gradients_close(grads, expected, 1e-13)

  @parameterized.parameters(
    ("ref_logprobs", ["kl_ref"]),
    ("sampling_logprobs", ["mismatch_max", "mismatch_mean"]),
    ("rewards", ["reward_mean", "zero_spread"]),
    ("old_logprobs", []),
  )
  def test_metrics_of_what_is_missing_are_left_out(self, name, gone):
    run = lambda group: loss_and_slope(
      PolicyObjective(), present_scores(), group
    )[0][1]
    whole, found = run(make_group()), run(make_group(**{name: None}))
    self.assertEqual(sorted(set(whole) - set(found)), gone)

  def test_likelihood_asks_for_nothing(self):
    group = Group.create(RESPONSES, LENGTHS)
    loss, _, metrics = gradient(group, LikelihoodObjective())
    logprobs = present_scores()[0]
    np.testing.assert_allclose(loss, -logprobs.sum() / 3, 1e-13)
    self.assertEqual(metrics["num_tokens"], sum(LENGTHS))

  @parameterized.parameters("token", "sequence")
  def test_no_gradient_through_recorded_scores(self, level):
    objective = dataclasses.replace(ALL_TERMS, ratio_level=level)
    _, (_, slope) = loss_and_slope(objective, present_scores(), make_group())
    for name in SCORES:
      np.testing.assert_array_equal(getattr(slope, name), 0)

  @parameterized.parameters(*SCORES)
  def test_scores_of_the_same_weights_are_constants(self, name):
    """Whatever a caller passes: here functions of what is differentiated."""
    group, scores = make_group(), present_scores()
    constant = group.replace(**{name: scores[0] - 0.1})

    def loss(moved, live):
      made = group.replace(**{name: moved - 0.1}) if live else constant
      return ALL_TERMS(moved, scores[1], made)[0]

    slope = jax.jit(jax.grad(loss), static_argnums=1)
    assert_same(slope(scores[0], True), slope(scores[0], False))


class DenominatorTest(parameterized.TestCase):
  @parameterized.parameters(
    (PolicyObjective(), 3),
    (PolicyObjective(normalization="token"), 9),
    (PolicyObjective(normalization="constant", constant_length=50), 150),
    (LikelihoodObjective(), 3),
  )
  def test_follows_the_objective_unless_given(self, objective, expected):
    group = make_group()
    run = functools.partial(loss_and_slope, objective, present_scores())
    loss, slope = run(group)[0][0], run(group)[1][0]
    for factor in (1, 7.0):
      denominator = jnp.asarray(factor * expected, jnp.float64)
      given = group.replace(loss_denominator=denominator)
      (found, _), (found_slope, _) = run(given)
      np.testing.assert_allclose(found * factor, loss, 1e-14)
      np.testing.assert_allclose(found_slope[0] * factor, slope[0], 1e-14)
    sampled = rollout(
      MODEL, PARAMS, state_of(), jax.random.key(0), group_size=3, max_tokens=3
    )
    sampled = sampled.replace(advantages=jnp.asarray(ADVANTAGES))
    want = {"token": 9, "constant": 150}
    want = want.get(getattr(objective, "normalization", None), 3)
    self.assertEqual(objective.denominator(sampled), want)

  def test_long_responses_do_not_weigh_more(self):
    """One member of 1,000 tokens, advantage 1: the token mean has slope 1."""
    group = Group.create(np.ones((1, 1000), int), [1000], advantages=[1.0])
    scores = (jnp.full((1, 1000), -1.0, float), jnp.ones((1, 1000)))
    for normalization in ("member", "token", "constant"):
      objective = PolicyObjective(
        normalization=normalization, constant_length=1000
      )
      (loss, _), (slope, _) = loss_and_slope(objective, scores, group)
      np.testing.assert_allclose(slope[0].sum(), -1, 1e-12)
      np.testing.assert_allclose(loss, -1, 1e-12)

  @parameterized.parameters(0.0, -2.0, float("nan"), float("inf"))
  def test_refused(self, value):
    with self.assertRaisesRegex(ValueError, f"loss_denominator is {value}"):
      make_group(loss_denominator=value)
    group = make_group().replace(loss_denominator=jnp.asarray(value))
    for objective in (ALL_TERMS, LikelihoodObjective()):
      with self.assertRaisesRegex(ValueError, f"loss_denominator is {value}"):
        gradient(group, objective)

  def test_constant_without_a_length(self):
    objective = PolicyObjective(normalization="constant")
    with self.assertRaisesRegex(ValueError, "constant_length=None"):
      gradient(make_group(), objective)
    gradient(make_group(loss_denominator=8.0), objective)


class MaskTest(parameterized.TestCase):
  @parameterized.parameters((0, 4), (1, 2), (2, 3))
  def test_padding_is_refused_where_known(self, member, token):
    mask = INSIDE.copy()
    mask[member, token] = True
    message = f"token {token} of member {member}.*has {LENGTHS[member]} tokens"
    group = make_group().replace(loss_mask=jnp.asarray(mask))
    calls = (
      lambda: make_group(loss_mask=mask),
      lambda: gradient(group),
      lambda: gradient(group, LikelihoodObjective()),
      lambda: ALL_TERMS(*present_scores(), group),
      lambda: LikelihoodObjective()(*present_scores(), group),
      lambda: branch_gradient(
        MODEL, PARAMS, group, ALL_TERMS, state_of(), block_size=5
      ),
    )
    for call in calls:
      with self.assertRaisesRegex(ValueError, message):
        call()

  @parameterized.parameters(ALL_TERMS, LikelihoodObjective())
  def test_cut_to_the_lengths_under_jit(self, objective):
    run = jax.jit(lambda group: gradient(group, objective))
    group = make_group()
    wide = group.replace(loss_mask=jnp.ones(SHAPE, bool))
    expected, found = run(group), run(wide)
    assert_same(found, expected)
    self.assertEqual(found[2]["num_tokens"], sum(LENGTHS))
    assert_same(expected[0], gradient(group, objective)[0])
    direct = loss_and_slope(objective, present_scores(), wide)
    assert_same(direct[0][0], expected[0])

  def test_an_objective_of_ones_own_sees_the_cut_mask(self):
    def total(logprobs, entropy, group):
      del entropy
      return jnp.where(group.loss_mask, 1.0 + logprobs, 0).sum(), {}

    run = jax.jit(lambda group: gradient(group, total)[0])
    wide = make_group().replace(loss_mask=jnp.ones(SHAPE, bool))
    expected = present_scores()[0].sum() + sum(LENGTHS)
    np.testing.assert_allclose(run(wide), expected, 1e-13)

  @parameterized.parameters(
    (INSIDE.astype(np.float32), "dtype float32"),
    (INSIDE * 0.5, "dtype float64"),
    (INSIDE * 2, "dtype int64"),
    (-1 * INSIDE, "dtype int64"),
  )
  def test_no_mask(self, mask, message):
    group = make_group().replace(loss_mask=jnp.asarray(mask))
    for call in (lambda: make_group(loss_mask=mask), lambda: gradient(group)):
      with self.assertRaisesRegex(ValueError, f"loss_mask is of {message}"):
        call()

  def test_numbers_of_0_and_1_are_a_mask(self):
    loss, grads, _ = gradient(make_group(), LikelihoodObjective())
    for mask in (INSIDE.astype(np.int32), INSIDE.astype(np.uint8)):
      created = make_group(loss_mask=mask)
      self.assertEqual(created.loss_mask.dtype, bool)
      np.testing.assert_array_equal(created.loss_mask, INSIDE)
    put = make_group().replace(loss_mask=jnp.asarray(mask))
    found = gradient(put, LikelihoodObjective())
    np.testing.assert_allclose(found[0], loss, 1e-14)
    assert_gradients_close(found[1], grads, 1e-13)
    twice = make_group().replace(loss_mask=jnp.asarray(2 * INSIDE))
    for objective in (LikelihoodObjective(), ALL_TERMS):
      (loss, metrics), _ = loss_and_slope(objective, present_scores(), twice)
      self.assertEqual(metrics["num_tokens"], sum(LENGTHS))
      (expected, _), _ = loss_and_slope(
        objective, present_scores(), make_group()
      )
      np.testing.assert_allclose(loss, expected, 1e-14)

  @parameterized.parameters(*SCORES)
  def test_scores_that_are_not_finite(self, name):
    for value in (np.nan, -np.inf):
      scores = SCORES[name].copy()
      scores[1, 1] = value
      message = f"{name} of member 1 at token 1 is {value}"
      with self.assertRaisesRegex(ValueError, message):
        make_group(**{name: scores})
      group = make_group().replace(**{name: jnp.asarray(scores)})
      with self.assertRaisesRegex(ValueError, message):
        gradient(group)
      mask = INSIDE.copy()
      mask[1, 1] = False  # not trained on: nobody looks
      make_group(**{name: scores}, loss_mask=mask)


class MalformedTest(parameterized.TestCase):
  @parameterized.parameters(
    ({"reward": REWARDS}, r"no \['reward'\].*rewards"),
    ({"advantages": ADVANTAGES[:2]}, r"advantages has shape \(2,\)"),
    ({"rewards": REWARDS[:, None]}, r"rewards has shape \(3, 1\)"),
    ({"ref_logprobs": np.ones(3)}, r"ref_logprobs has shape \(3,\)"),
    ({"old_logprobs": np.ones((3, 4))}, r"old_logprobs has shape \(3, 4\)"),
    ({"rewards": ["a", "b", "c"]}, "rewards is of dtype"),
    ({"advantages": [1.0, None, 0.0]}, "advantages is of dtype object"),
    ({"rewards": [1.0, np.nan, 0.0]}, "member 1 has reward nan"),
    ({"advantages": [1.0, 0.0, np.inf]}, "member 2 has advantage inf"),
    ({"loss_denominator": [3.0]}, r"loss_denominator has shape \(1,\)"),
    ({"loss_mask": INSIDE[:2]}, r"loss_mask has shape \(2, 5\)"),
    ({"prompt_id": -2}, "prompt_id is -2"),
    ({"prompt_id": 2**31}, "prompt_id is 2147483648"),
    ({"prompt_id": 1.0}, "prompt_id is 1.0"),
  )
  def test_fields(self, known, message):
    with self.assertRaisesRegex(ValueError, message):
      make_group(**known)

  @parameterized.parameters(
    (RESPONSES * 1.0, LENGTHS, "responses are of dtype float64"),
    (RESPONSES, np.array(LENGTHS) * 1.0, "lengths are of dtype float64"),
    (RESPONSES > 1, LENGTHS, "responses are of dtype bool"),
    (RESPONSES, LENGTHS[:2], r"lengths have shape \(2,\)"),
    (RESPONSES, (4, 2, 6), "member 2 has an over-long response"),
    (RESPONSES, (4, 0, 3), "member 1 has an empty response"),
    (RESPONSES + np.int64(2**32), LENGTHS, "outside the vocabulary"),
    (RESPONSES[None], LENGTHS, r"responses have shape \(1, 3, 5\)"),
    ([[1, 2], [1]], (2, 1), "unequal lengths"),
  )
  def test_responses(self, responses, lengths, message):
    calls = (
      lambda: Group.create(responses, lengths),
      lambda: replay(MODEL, PARAMS, state_of(), responses, lengths),
    )
    for call in calls:
      with self.assertRaisesRegex(ValueError, message):
        call()

  @parameterized.parameters(
    ({"responses": RESPONSES * 1.0}, "responses are of dtype float64"),
    ({"lengths": np.array(LENGTHS) * 1.0}, "lengths are of dtype float64"),
    ({"ref_logprobs": SCORES["ref_logprobs"][:2]}, "ref_logprobs has shape"),
    ({"advantages": ADVANTAGES * 1j}, "advantages is of dtype complex128"),
  )
  def test_replaced_fields(self, fields, message):
    group = make_group().replace(**jax.tree.map(jnp.asarray, fields))
    calls = (
      lambda: gradient(group),
      lambda: jax.jit(gradient)(group),
      lambda: ALL_TERMS(*present_scores(), group),
    )
    for call in calls:
      with self.assertRaisesRegex(ValueError, message):
        call()


class PromptTest(parameterized.TestCase):
  def test_another_prompt_is_refused_wherever_both_are_known(self):
    state, group = state_of(1), make_group(prompt_id=2)
    message = "belongs to prompt [12], not to prompt [12]"
    calls = (
      lambda: gradient(group, state=state),
      lambda: gradient(group, prompt_id=1),
      lambda: gradient(make_group(), state=state, prompt_id=2),
      lambda: branch_gradient(
        MODEL, PARAMS, group, ALL_TERMS, state, block_size=5
      ),
      lambda: replay(MODEL, PARAMS, state, RESPONSES, LENGTHS, prompt_id=2),
      lambda: replay_scores(
        MODEL,
        PARAMS,
        state,
        RESPONSES,
        LENGTHS,
        prompt_id=group.prompt_id,
      ),
      lambda: gradient(
        group, state=extend(MODEL, PARAMS, state_of(1), PROMPT[-1:])
      ),
      lambda: gradient(
        make_group(prompt_id=1),
        state=extend(MODEL, PARAMS, state_of(), PROMPT[-1:], prompt_id=2),
      ),
    )
    for number, call in enumerate(calls):
      with self.subTest(number), self.assertRaisesRegex(ValueError, message):
        call()

  def test_an_unknown_id_goes_with_every_prompt(self):
    """And is not 0, which is a prompt's id as any other."""
    expected = gradient(make_group())
    for known in (0, 7):
      assert_same(gradient(make_group(), state=state_of(known)), expected)
      group = make_group(prompt_id=known)
      assert_same(gradient(group, state=state_of()), expected)
      assert_same(gradient(group, state=state_of(known)), expected)
    with self.assertRaisesRegex(ValueError, "prompt 0, not to prompt 7"):
      gradient(make_group(prompt_id=0), state=state_of(7))
    self.assertEqual(int(state_of().prompt_id), UNKNOWN_PROMPT)
    longer = extend(MODEL, PARAMS, state_of(), PROMPT[-1:])
    self.assertEqual(int(longer.prompt_id), UNKNOWN_PROMPT)

  @parameterized.parameters(0, 5, None)
  def test_files_keep_the_id(self, prompt_id):
    with tempfile.TemporaryDirectory() as folder:
      path = f"{folder}/state.safetensors"
      save_state(path, MODEL, PARAMS, state_of(prompt_id))
      state = load_state(path, MODEL, PARAMS)
    assert_same(state.prompt_id, state_of(prompt_id).prompt_id)
    if prompt_id is None:
      gradient(make_group(prompt_id=3), state=state)
    else:
      with self.assertRaisesRegex(ValueError, f"not to prompt {prompt_id}"):
        gradient(make_group(prompt_id=3), state=state)

  def test_prompts_of_a_batch(self):
    stack = lambda *trees: jax.tree.map(lambda *x: jnp.stack(x), *trees)
    states = stack(state_of(1), state_of(2))
    groups = stack(make_group(prompt_id=1), make_group(prompt_id=2))
    crossed = stack(make_group(prompt_id=1), make_group(prompt_id=3))
    engine = EngineConfig(chunk_size=4, grad_scope="response_only")
    prompts = jnp.stack([PROMPT, PROMPT])
    learner = make_learner(PARAMS, OptimizerConfig())
    message = r"group \(entry 1\) belongs to prompt 3, not to prompt 2"
    with self.assertRaisesRegex(ValueError, message):
      score_groups(MODEL, engine, PARAMS, crossed, states)
    with self.assertRaisesRegex(ValueError, message):
      update(
        MODEL,
        engine,
        OptimizerConfig(),
        ALL_TERMS,
        learner,
        prompts,
        crossed,
        states,
      )
    scores = score_groups(MODEL, engine, PARAMS, groups, states)
    np.testing.assert_allclose(scores[0], present_scores()[0], 1e-13)

  @parameterized.parameters("response_only", "full")
  def test_a_prompt_that_is_not_the_states(self, scope):
    state, group = state_of(scope=scope), make_group()
    other = np.append(PROMPT[:-1], 33)
    run = lambda prompt, **options: group_gradient(
      MODEL,
      PARAMS,
      prompt,
      group,
      ALL_TERMS,
      state=state,
      chunk_size=4,
      grad_scope=scope,
      **options,
    )
    message = r"last token, prompt\[9\], is 9 there and 33 here"
    with self.assertRaisesRegex(ValueError, message):
      run(other)
    with self.assertRaisesRegex(ValueError, message):
      run(np.append(other, 0), length=10)
    with self.assertRaisesRegex(ValueError, "prompt of 10 tokens"):
      run(np.append(PROMPT, 9))

  def test_a_reverse_walk_over_another_prompt(self):
    state = state_of(scope="full")
    _, sums, _ = branch_gradient(
      MODEL, PARAMS, make_group(), ALL_TERMS, state, block_size=5
    )
    with self.assertRaisesRegex(ValueError, "is 9 there and 29 here"):
      reverse_chunks(
        MODEL,
        PARAMS,
        OTHER,
        state,
        sums.priors[0],
        sums.replace(priors=()),
        first=0,
        stop=3,
      )

  def test_a_batch_of_states_is_no_state(self):
    state = jax.tree.map(lambda x: x[None], state_of())
    calls = (
      lambda: gradient(make_group(), state=state),
      lambda: replay(MODEL, PARAMS, state, RESPONSES, LENGTHS),
      lambda: rollout(
        MODEL, PARAMS, state, jax.random.key(0), group_size=2, max_tokens=2
      ),
      lambda: branch_gradient(
        MODEL, PARAMS, make_group(), ALL_TERMS, state, block_size=5
      ),
    )
    for call in calls:
      with self.assertRaisesRegex(ValueError, "has a batch axis"):
        call()
