"""Objectives against hand-computed numbers and a loop over tokens."""

import functools
import itertools
import math

from absl.testing import absltest, parameterized
import jax
import jax.numpy as jnp
import numpy as np

from longstraw_jax import objectives
from longstraw_jax.types import Group

COMBINATIONS = tuple(
  itertools.product(objectives.NORMALIZATIONS, objectives.RATIO_LEVELS)
)
LENGTHS = (1, 7, 300)
CONSTANT_LENGTH = 64


def make_group(mask_GR, dtype=np.float32, seed=0, **fields):
  """A group of random numbers behind a given mask."""
  rng = np.random.default_rng(seed)
  mask_GR = np.asarray(mask_GR, bool)
  G, R = mask_GR.shape
  old_GR = -rng.uniform(0.1, 3.0, (G, R))
  values = {
    "rewards": rng.uniform(size=G),
    "advantages": rng.normal(size=G),
    "old_logprobs": old_GR,
    "sampling_logprobs": old_GR + rng.normal(scale=0.3, size=(G, R)),
    "ref_logprobs": old_GR + rng.normal(scale=0.3, size=(G, R)),
    "loss_denominator": 1.0,
  } | fields
  return Group(
    responses=jnp.zeros((G, R), jnp.int32),
    lengths=jnp.full(G, R, jnp.int32),
    loss_mask=jnp.asarray(mask_GR),
    prompt_id=jnp.asarray(0, jnp.int32),
    **{name: jnp.asarray(value, dtype) for name, value in values.items()},
  )


def make_policy(group, seed=2):
  """Log-probabilities near the old ones, and entropies."""
  rng = np.random.default_rng(seed)
  old_GR = group.old_logprobs
  shift_GR = rng.normal(scale=0.4, size=old_GR.shape)
  entropy_GR = rng.uniform(0.1, 2.0, old_GR.shape)
  return (
    jnp.asarray(np.asarray(old_GR) + shift_GR, old_GR.dtype),
    jnp.asarray(entropy_GR, old_GR.dtype),
  )


def full_objective(normalization, ratio_level):
  """Every term on; one for all tests, so that it is compiled once a shape."""
  return objectives.PolicyObjective(
    clip_low=0.02,
    clip_high=0.03,
    ratio_level=ratio_level,
    normalization=normalization,
    kl_coef=0.3,
    entropy_coef=0.2,
    sampler_correction_cap=1.2,
  )


def length_mask(lengths, width=None):
  width = width or max(lengths)
  return np.arange(width)[None, :] < np.asarray(lengths)[:, None]


def take(group, members, width):
  """Some members of a group, cut to a width."""

  def cut(x):
    x = np.asarray(x)
    if x.ndim:
      x = x[list(members)]
    return jnp.asarray(x[:, :width] if x.ndim == 2 else x)

  return jax.tree.map(cut, group)


@functools.partial(jax.jit, static_argnums=0)
def evaluate(objective, logprobs_GR, entropy_GR, group):
  """Loss, its gradient by the log-probabilities, and the metrics."""
  function = lambda logprobs_GR: objective(logprobs_GR, entropy_GR, group)
  (loss, metrics), grad_GR = jax.value_and_grad(function, has_aux=True)(
    logprobs_GR
  )
  return loss, grad_GR, metrics


def loop_loss(objective, logprobs_GR, entropy_GR, group):
  """The objective as a loop over members and tokens, in Python floats."""
  total = 0.0
  for g, mask_R in enumerate(np.asarray(group.loss_mask)):
    tokens = np.flatnonzero(mask_R)
    advantage = float(group.advantages[g])
    gaps = [
      float(logprobs_GR[g, t]) - float(group.old_logprobs[g, t]) for t in tokens
    ]
    member = 0.0
    for t, gap in zip(tokens, gaps, strict=True):
      if objective.ratio_level == "sequence":
        gap = sum(gaps) / len(gaps)
      ratio = math.exp(gap)
      low, high = 1 - objective.clip_low, 1 + objective.clip_high
      clipped = min(max(ratio, low), high)
      policy = -min(ratio * advantage, clipped * advantage)
      if objective.sampler_correction_cap is not None:
        mismatch = float(group.old_logprobs[g, t]) - float(
          group.sampling_logprobs[g, t]
        )
        policy *= min(math.exp(mismatch), objective.sampler_correction_cap)
      d = float(group.ref_logprobs[g, t]) - float(logprobs_GR[g, t])
      kl = math.exp(d) - 1 - d
      member += policy + objective.kl_coef * kl
      member -= objective.entropy_coef * float(entropy_GR[g, t])
    if objective.normalization == "member" and len(tokens):
      member /= len(tokens)
    total += member
  return total / float(group.loss_denominator)


class GroupAdvantagesTest(parameterized.TestCase):
  @parameterized.parameters(
    # The sample's spread, over G - 1: sqrt(4 x 0.25 / 3) = 1 / sqrt(3).
    ("std", [1.0, 0.0, 0.0, 1.0], [k * 0.75**0.5 for k in (1, -1, -1, 1)]),
    ("std", [0.0, 2.0], [-(0.5**0.5), 0.5**0.5]),
    ("std", [1.0, 2.0, 6.0], [k / 7**0.5 for k in (-2, -1, 3)]),
    ("std", [3.0], [0.0]),
    ("none", [3.0], [0.0]),
    ("none", [1.0, 0.0, 0.0, 1.0], [0.5, -0.5, -0.5, 0.5]),
    ("none", [1.0, 2.0, 6.0], [-2.0, -1.0, 3.0]),
    ("leave_one_out", [1.0, 2.0, 6.0], [-3.0, -1.5, 4.5]),
    # Spread 0.6 / sqrt(8): the outlier gets 7 / sqrt(8), its bound.
    ("std", [0.35] * 7 + [0.95], [-1 / 8**0.5] * 7 + [7 / 8**0.5]),
  )
  def test_by_hand(self, mode, rewards, expected):
    got = objectives.group_advantages(jnp.asarray(rewards), mode)
    np.testing.assert_allclose(got, expected, rtol=1e-5)

  @parameterized.product(mode=objectives.ADVANTAGE_MODES, size=(2, 3, 7, 100))
  def test_equal_rewards_give_exact_zeros(self, mode, size):
    function = jax.jit(lambda r_G: objectives.group_advantages(r_G, mode))
    for value in (
      0.1,
      0.7,
      -1e6,
      0.0,
      *np.random.default_rng(0).normal(size=9),
    ):
      got = function(jnp.asarray(np.full(size, value), jnp.float32))
      np.testing.assert_array_equal(got, np.zeros(size))

  @parameterized.parameters(2, 8)
  def test_bounded_by_the_others_over_a_root(self, size):
    rewards = np.full(size, 0.1, np.float32)
    for top in (np.nextafter(np.float32(0.1), np.float32(1)), 0.2, 1e6):
      rewards[0] = top
      got = objectives.group_advantages(jnp.asarray(rewards))
      bound = (size - 1) / size**0.5
      self.assertLessEqual(np.abs(got).max(), bound * 1.0001)
      self.assertGreater(np.abs(got).max(), 0)

  def test_member_order_does_not_matter(self):
    rewards = np.random.default_rng(0).uniform(size=9).astype(np.float32)
    order = np.random.default_rng(1).permutation(9)
    for mode in objectives.ADVANTAGE_MODES:
      one = objectives.group_advantages(jnp.asarray(rewards), mode)
      other = objectives.group_advantages(jnp.asarray(rewards[order]), mode)
      np.testing.assert_allclose(one[order], other, rtol=1e-5, atol=1e-6)

  def test_refusals(self):
    with self.assertRaisesRegex(ValueError, "mode='mean'.*leave_one_out"):
      objectives.group_advantages(jnp.ones(2), "mean")
    with self.assertRaisesRegex(ValueError, "group of 1"):
      objectives.group_advantages(jnp.ones(1), "leave_one_out")


class PiecesTest(parameterized.TestCase):
  @parameterized.parameters("token", "sequence")
  def test_old_scores_are_constants_of_the_ratio(self, level):
    """Also where they are functions of what is differentiated."""
    scores = jnp.asarray([[-1.0, -2.0, -0.5], [-0.1, -3.0, -1.0]])
    mask = jnp.asarray([[True, True, False], [True, True, True]])
    ratio = lambda x: objectives.importance_ratio(x, x, mask, level).sum()
    np.testing.assert_allclose(jax.grad(ratio)(scores), mask, rtol=1e-6)

  def test_ratio_by_hand(self):
    mask_GR = jnp.asarray([[True, True, False], [True, False, False]])
    old_GR = jnp.full((2, 3), -1.0)
    gap_GR = jnp.log(jnp.asarray([[2.0, 8.0, 5.0], [0.5, 5.0, 5.0]]))
    token = objectives.importance_ratio(old_GR + gap_GR, old_GR, mask_GR)
    np.testing.assert_allclose(token, [[2, 8, 0], [0.5, 0, 0]], rtol=1e-6)
    sequence = objectives.importance_ratio(
      old_GR + gap_GR, old_GR, mask_GR, "sequence"
    )
    np.testing.assert_allclose(sequence, [[4, 4, 0], [0.5, 0, 0]], rtol=1e-6)

  @parameterized.parameters(("token", [2.0, 8.0]), ("sequence", [4.0, 4.0]))
  def test_ratio_gradient(self, level, expected):
    """The gradient of the tokens' mean: exp(d_t) / n against s / n each."""
    old_GR = jnp.full((1, 3), -1.0)
    mask_GR = jnp.asarray([[True, True, False]])
    mean = lambda now_GR: (
      objectives.importance_ratio(now_GR, old_GR, mask_GR, level).sum() / 2
    )
    now_GR = old_GR + jnp.log(jnp.asarray([[2.0, 8.0, 1.0]]))
    got = jax.grad(mean)(now_GR)
    np.testing.assert_allclose(got, [[*np.divide(expected, 2), 0]], rtol=1e-6)

  @parameterized.parameters(*objectives.RATIO_LEVELS)
  def test_ratio_does_not_see_masked_entries(self, level):
    """Outside of jit, where XLA cannot turn a product into a selection."""
    mask_GR = jnp.asarray([[True, False, False], [False, False, False]])
    ratio = functools.partial(
      objectives.importance_ratio, mask_GR=mask_GR, level=level
    )
    total = lambda now_GR, old_GR: ratio(now_GR, old_GR).sum()
    for junk in (jnp.nan, -jnp.inf):
      now_GR = jnp.where(mask_GR, -1.0, junk)
      for old_GR in (now_GR, jnp.full((2, 3), -1.0)):
        np.testing.assert_array_equal(ratio(now_GR, old_GR), mask_GR)
        grad_GR = jax.grad(total)(now_GR, old_GR)
        np.testing.assert_array_equal(grad_GR, mask_GR)

  @parameterized.parameters(
    # ratio, advantage, clip_low, clip_high, loss, derivative by the ratio
    (1.0, 2.0, 0.2, None, -2.0, -2.0),
    (1.0, -2.0, 0.2, None, 2.0, 2.0),
    (1.5, 2.0, 0.2, None, -2.4, 0.0),
    (1.5, -2.0, 0.2, None, 3.0, 2.0),
    (0.5, 2.0, 0.2, None, -1.0, -2.0),
    (0.5, -2.0, 0.2, None, 1.6, 0.0),
    (1.25, 2.0, 0.2, 0.3, -2.5, -2.0),
    (1.25, 2.0, 0.3, 0.2, -2.4, 0.0),
    (0.75, -2.0, 0.3, 0.2, 1.5, 2.0),
    (1.5, 0.0, 0.2, None, 0.0, 0.0),
    (9.0, 2.0, 0.2, math.inf, -18.0, -2.0),
    (0.01, -2.0, 1.0, 0.2, 0.02, 2.0),
  )
  def test_clipped_loss_by_hand(
    self, ratio, advantage, clip_low, clip_high, loss, derivative
  ):
    function = lambda ratio_GR: objectives.clipped_loss(
      ratio_GR,
      jnp.asarray([advantage]),
      jnp.asarray([[True, False]]),
      clip_low,
      clip_high,
    )
    ratio_GR = jnp.asarray([[ratio, math.nan]])
    np.testing.assert_allclose(function(ratio_GR), [[loss, 0.0]], rtol=1e-6)
    got = jax.grad(lambda ratio_GR: function(ratio_GR).sum())(ratio_GR)
    np.testing.assert_allclose(got, [[derivative, 0.0]], rtol=1e-6)

  def test_k3_by_hand(self):
    half, quarter = jnp.log(0.5), jnp.log(0.25)
    got = objectives.k3_kl(half, quarter)
    np.testing.assert_allclose(got, 0.5 - 1 + math.log(2), rtol=1e-6)
    slope = jax.grad(objectives.k3_kl, argnums=(0, 1))(half, quarter)
    np.testing.assert_allclose(slope, (1 - 0.5, 0.0), rtol=1e-6)

  def test_k3_is_unbiased_and_never_negative(self):
    rng = np.random.default_rng(0)
    policy, reference = rng.dirichlet(np.ones(6), size=2)
    k3 = objectives.k3_kl(jnp.log(policy), jnp.log(reference))
    kl = (policy * np.log(policy / reference)).sum()
    np.testing.assert_allclose((policy * k3).sum(), kl, rtol=1e-5)
    self.assertGreaterEqual(k3.min(), 0)

  def test_k3_keeps_small_differences(self):
    """exp(d) - 1 - d in float32 would round d^2 / 2 = 5e-9 to 0 or 1e-7."""
    got = objectives.k3_kl(jnp.float32(0.0), jnp.float32(1e-4))
    np.testing.assert_allclose(got, 5e-9, rtol=0.01)

  @parameterized.product(
    gap=(-1e4, -60.0, -21.0, -5.0, 19.0, 21.0, 60.0, 1e4),
    dtype=("float32", "float64"),
  )
  def test_far_gaps_keep_their_slope(self, gap, dtype):
    """The exponential alone is bounded, by its tangent at 20."""
    with jax.enable_x64(True):
      zero, far = jnp.zeros((1, 1), dtype), jnp.asarray(gap, dtype)
      power = math.exp(min(gap, 20))
      beyond = math.exp(20) * max(gap - 20, 0)
      kl = power + beyond - 1 - gap
      slope = 1 - power  # by the policy's log-probability, which is -gap here
      close = functools.partial(
        np.testing.assert_allclose,
        rtol=1e-6 if dtype == "float32" else 1e-13,
      )
      call = lambda now: objectives.k3_kl(now, zero[0, 0])
      close(jax.value_and_grad(call)(-far), (kl, slope))
      ones = jnp.ones((1, 1), bool)
      for level in objectives.RATIO_LEVELS:
        call = lambda now, level=level: objectives.importance_ratio(
          zero + now, zero, ones, level
        )[0, 0]
        close(jax.value_and_grad(call)(far), (power + beyond, power))

  @parameterized.parameters(*objectives.RATIO_LEVELS)
  def test_nothing_is_let_go_of_however_far(self, level):
    """A token that became too likely is pushed down, a lost one pulled back."""
    mask_GR = np.ones((2, 3), bool)
    group = make_group(mask_GR, advantages=[-1.0, -2.0])
    objective = objectives.PolicyObjective(ratio_level=level, kl_coef=0.1)
    entropy_GR = jnp.ones((2, 3))
    for gap in (25.0, 300.0):
      far = group.old_logprobs + gap
      near_reference = group.replace(ref_logprobs=far)
      loss, grad_GR, metrics = evaluate(
        objective, far, entropy_GR, near_reference
      )
      self.assertTrue(np.isfinite(loss))
      self.assertGreater(grad_GR.min(), 0)  # descent lowers them
      np.testing.assert_allclose(metrics["kl_ref"], 0.0)
      on_policy = group.replace(
        old_logprobs=far, advantages=jnp.zeros(2), ref_logprobs=far - 2 * gap
      )
      loss, grad_GR, metrics = evaluate(objective, far, entropy_GR, on_policy)
      np.testing.assert_allclose(grad_GR, 0.1 / 3, rtol=1e-6)
      np.testing.assert_allclose(metrics["kl_ref"], 2 * gap - 1, rtol=1e-6)
      lost = on_policy.replace(ref_logprobs=far + gap)
      _, grad_GR, _ = evaluate(objective, far, entropy_GR, lost)
      self.assertLess(grad_GR.max(), 0)  # descent raises them

  def test_truncated_weight_of_policies_far_apart(self):
    for cap in (3.0, math.inf):
      got = objectives.truncated_importance_weight(
        jnp.asarray([0.0, -1e4], jnp.float32),
        jnp.asarray([-1e4, 0.0], jnp.float32),
        cap,
      )
      self.assertTrue(np.isfinite(got).all())
      self.assertEqual(got[1], 0)

  def test_truncated_weight_by_hand(self):
    old = jnp.log(jnp.asarray([0.5, 0.5, 0.5]))
    sampling = jnp.log(jnp.asarray([0.25, 0.5, 0.01]))
    weight = lambda old: objectives.truncated_importance_weight(
      old, sampling, 3.0
    )
    np.testing.assert_allclose(weight(old), [2.0, 1.0, 3.0], rtol=1e-6)
    slope = jax.grad(lambda old: weight(old).sum())(old)
    np.testing.assert_array_equal(slope, np.zeros(3))

  @parameterized.parameters(("member", 5), ("token", 7), ("constant", 50))
  def test_denominators_by_hand(self, mode, expected):
    masks = [length_mask([1, 3]), length_mask([2, 0, 1], width=9)]
    got = objectives.loss_denominator(mode, masks, constant_length=10)
    np.testing.assert_array_equal(got, [expected] * 2)

  def test_denominators_of_stacked_masks_under_jit(self):
    masks_BGR = jnp.asarray([length_mask([1, 3]), length_mask([2, 3])])
    for mode, expected in (("member", 4), ("token", 9), ("constant", 40)):
      function = lambda masks_BGR, mode=mode: objectives.loss_denominator(
        mode, masks_BGR, 10
      )
      np.testing.assert_array_equal(
        jax.jit(function)(masks_BGR), [expected] * 2
      )

  def test_denominator_of_nothing_is_not_zero(self):
    got = objectives.loss_denominator("token", [np.zeros((2, 3), bool)])
    np.testing.assert_array_equal(got, [1])

  def test_denominator_refusals(self):
    masks = [length_mask([1])]
    for length in (None, 0, -3):
      with self.assertRaisesRegex(ValueError, f"constant_length={length}"):
        objectives.loss_denominator("constant", masks, length)
    with self.assertRaisesRegex(ValueError, "mode='sum'"):
      objectives.loss_denominator("sum", masks)
    with self.assertRaisesRegex(ValueError, "at least one group"):
      objectives.loss_denominator("member", [])


class PolicyObjectiveTest(parameterized.TestCase):
  @parameterized.parameters(
    ("member", (1.0 - 3.0) / 2),
    ("token", (2 * 1.0 - 4 * 3.0) / 6),
    ("constant", (2 * 1.0 - 4 * 3.0) / (10 * 2)),
  )
  def test_normalizations_by_hand(self, mode, expected):
    """Members of 2 and 4 tokens, ratio 1, advantages -1 and 3."""
    mask_GR = length_mask([2, 4])
    (denominator,) = objectives.loss_denominator(mode, [mask_GR], 10)
    group = make_group(
      mask_GR, advantages=[-1.0, 3.0], loss_denominator=denominator
    )
    objective = objectives.PolicyObjective(normalization=mode)
    loss, _, metrics = evaluate(
      objective, group.old_logprobs, jnp.zeros(mask_GR.shape), group
    )
    np.testing.assert_allclose(loss, expected, rtol=1e-6)
    np.testing.assert_allclose(metrics["policy_loss"], expected, rtol=1e-6)

  @parameterized.parameters(*COMBINATIONS)
  def test_equals_a_loop_over_tokens(self, normalization, ratio_level):
    group = make_group(length_mask([1, 5, 9, 0]), loss_denominator=3.0)
    logprobs_GR, entropy_GR = make_policy(group)
    objective = full_objective(normalization, ratio_level)
    loss, _, metrics = evaluate(objective, logprobs_GR, entropy_GR, group)
    expected = loop_loss(objective, logprobs_GR, entropy_GR, group)
    np.testing.assert_allclose(loss, expected, rtol=1e-5)
    self.assertGreater(metrics["clip_share"], 0)

  @parameterized.parameters(*COMBINATIONS)
  def test_batching_of_members_changes_nothing(
    self, normalization, ratio_level
  ):
    """Fault class: a length divides by what happens to be batched with it."""
    mask_GR = length_mask(LENGTHS)
    (denominator,) = objectives.loss_denominator(
      normalization, [mask_GR], CONSTANT_LENGTH
    )
    objective = full_objective(normalization, ratio_level)
    whole = make_group(mask_GR, loss_denominator=denominator)
    logprobs_GR, entropy_GR = make_policy(whole)
    # Metrics would double the time to compile.
    run = jax.jit(lambda *args: evaluate(objective, *args)[:2])
    loss, grad_GR = run(logprobs_GR, entropy_GR, whole)
    logprobs_GR, entropy_GR = np.asarray(logprobs_GR), np.asarray(entropy_GR)
    for widths in ((1, 300, 300), (300, 300, 300)):  # the 7 is always padded
      parts, grads_GR = [], np.zeros(mask_GR.shape)
      for row, width in enumerate(widths):
        index = np.ix_([row], np.arange(width))
        part, grad = run(
          jnp.asarray(logprobs_GR[index]),
          jnp.asarray(entropy_GR[index]),
          take(whole, [row], width),
        )
        parts.append(float(part))
        grads_GR[index] = grad
      np.testing.assert_allclose(sum(parts), loss, rtol=1e-5, atol=1e-6)
      np.testing.assert_allclose(grads_GR, grad_GR, rtol=1e-5, atol=1e-9)
    for row in range(len(LENGTHS)):
      self.assertGreater(np.abs(grad_GR[row]).sum(), 0)

  @parameterized.parameters(*COMBINATIONS)
  def test_masked_entries_are_never_seen(self, normalization, ratio_level):
    mask_GR = length_mask([3, 0, 5, 9])
    mask_GR[2, 1] = False  # a hole, as tokens of a tool would make
    clean = make_group(mask_GR, loss_denominator=2.0)
    logprobs_GR, entropy_GR = make_policy(clean)
    objective = full_objective(normalization, ratio_level)
    loss, grad_GR, metrics = evaluate(objective, logprobs_GR, entropy_GR, clean)
    self.assertTrue(np.isfinite(loss))
    np.testing.assert_array_equal(grad_GR[~mask_GR], 0.0)
    for junk in (-jnp.inf, jnp.inf, jnp.nan, 1e30):
      spoil = lambda x_GR, junk=junk: jnp.where(mask_GR, x_GR, junk)
      spoiled = clean.replace(
        old_logprobs=spoil(clean.old_logprobs),
        sampling_logprobs=spoil(clean.sampling_logprobs),
        ref_logprobs=spoil(clean.ref_logprobs),
      )
      args = (spoil(logprobs_GR), spoil(entropy_GR), spoiled)
      got = evaluate(objective, *args)
      jax.tree.map(np.testing.assert_array_equal, got, (loss, grad_GR, metrics))

  @parameterized.parameters(*COMBINATIONS)
  def test_a_group_without_tokens_adds_zero(self, normalization, ratio_level):
    mask_GR = np.zeros((4, 9), bool)
    (denominator,) = objectives.loss_denominator(normalization, [mask_GR], 4)
    group = make_group(mask_GR, loss_denominator=denominator)
    logprobs_GR, entropy_GR = make_policy(group)
    objective = full_objective(normalization, ratio_level)
    loss, grad_GR, metrics = evaluate(objective, logprobs_GR, entropy_GR, group)
    self.assertEqual(loss, 0.0)
    np.testing.assert_array_equal(grad_GR, np.zeros((4, 9)))
    for value in metrics.values():
      self.assertTrue(np.isfinite(value))

  @parameterized.parameters(*objectives.RATIO_LEVELS)
  def test_first_step_does_not_look_broken(self, ratio_level):
    """On policy the loss is 0 by construction; the log has to say more."""
    rewards = jnp.asarray([0.0, 1.0, 1.0, 0.0])
    group = make_group(
      np.ones((4, 5), bool),
      rewards=rewards,
      advantages=objectives.group_advantages(rewards),
      loss_denominator=4.0,
    )
    objective = objectives.PolicyObjective(ratio_level=ratio_level)
    args = group.old_logprobs, jnp.ones((4, 5)), group
    loss, grad_GR, metrics = evaluate(objective, *args)
    np.testing.assert_allclose(loss, 0.0, atol=1e-7)
    np.testing.assert_allclose(
      grad_GR, -np.tile(group.advantages[:, None], 5) / (4 * 5), rtol=1e-6
    )
    self.assertEqual(metrics["ratio_mean"], 1.0)
    self.assertEqual(metrics["ratio_deviation_max"], 0.0)
    self.assertEqual(metrics["clip_share"], 0.0)
    self.assertEqual(metrics["kl_old"], 0.0)
    self.assertEqual(metrics["reward_mean"], 0.5)
    self.assertEqual(metrics["zero_spread"], 0.0)
    flat = group.replace(rewards=jnp.full(4, 0.1))
    _, _, metrics = evaluate(objective, *args[:2], flat)
    self.assertEqual(metrics["zero_spread"], 1.0)

  def test_metrics_by_hand(self):
    mask_GR = np.asarray([[True, True, False], [True, False, False]])
    ratio_GR = np.asarray([[2.0, 1.1, 9.0], [0.5, 9.0, 9.0]])
    old_GR = np.full((2, 3), -1.0)
    group = make_group(
      mask_GR,
      old_logprobs=old_GR,
      advantages=[1.0, 1.0],
      sampling_logprobs=old_GR + [[0.3, -0.6, 5.0], [0.0, 5.0, 5.0]],
      ref_logprobs=old_GR + np.log(ratio_GR) + np.log(2.0),
      rewards=[1.0, 0.5],
    )
    logprobs_GR = jnp.asarray(old_GR + np.log(ratio_GR), jnp.float32)
    entropy_GR = jnp.asarray([[1.0, 2.0, 9.0], [6.0, 9.0, 9.0]])
    _, _, metrics = evaluate(
      objectives.PolicyObjective(), logprobs_GR, entropy_GR, group
    )
    k3 = lambda ratio: ratio - 1 - math.log(ratio)
    expected = {
      "policy_loss": -((1.2 + 1.1) / 2 + 0.5),
      "num_tokens": 3,
      "clip_share": 1 / 3,  # 0.5 with a positive advantage is not clipped
      "ratio_mean": 3.6 / 3,
      "ratio_deviation_max": 1.0,
      "kl_old": (k3(2.0) + k3(1.1) + k3(0.5)) / 3,
      "kl_ref": k3(2.0),
      "entropy": 3.0,
      "mismatch_mean": 0.3,
      "mismatch_max": 0.6,
      "reward_mean": 0.75,
      "zero_spread": 0.0,
    }
    self.assertEqual(set(metrics), set(expected))
    for name, value in expected.items():
      np.testing.assert_allclose(
        metrics[name], value, rtol=1e-5, atol=1e-7, err_msg=name
      )

  def test_sampler_correction(self):
    """Sampled hotter than trained: corrected if asked, reported anyway."""
    group = make_group(np.ones((2, 3), bool))
    cold = group.replace(sampling_logprobs=group.old_logprobs)
    logprobs_GR, entropy_GR = make_policy(group)
    plain = objectives.PolicyObjective()
    corrected = objectives.PolicyObjective(sampler_correction_cap=2.0)
    run = lambda objective, group: float(
      evaluate(objective, logprobs_GR, entropy_GR, group)[0]
    )
    self.assertEqual(run(plain, group), run(plain, cold))
    self.assertEqual(run(corrected, cold), run(plain, cold))
    self.assertNotAlmostEqual(run(corrected, group), run(plain, group), 4)
    _, _, metrics = evaluate(plain, logprobs_GR, entropy_GR, group)
    gap = np.abs(group.old_logprobs - group.sampling_logprobs)
    np.testing.assert_allclose(metrics["mismatch_max"], gap.max(), rtol=1e-6)

  def test_reference_is_out_of_the_loss_without_a_coefficient(self):
    group = make_group(np.ones((2, 3), bool))
    logprobs_GR, entropy_GR = make_policy(group)
    broken = group.replace(ref_logprobs=group.ref_logprobs * jnp.nan)
    loss, grad_GR, _ = evaluate(
      objectives.PolicyObjective(), logprobs_GR, entropy_GR, broken
    )
    self.assertTrue(np.isfinite(loss))
    self.assertTrue(np.isfinite(grad_GR).all())

  @parameterized.product(
    gap=(-1e4, -200.0, 200.0, 1e4), ratio_level=objectives.RATIO_LEVELS
  )
  def test_policies_far_apart_stay_finite(self, gap, ratio_level):
    group = make_group(np.ones((4, 9), bool), advantages=[-1.0, 0.0, 1.0, 9.0])
    objective = full_objective("member", ratio_level)
    args = group.old_logprobs + gap, jnp.ones((4, 9)), group
    loss, grad_GR, metrics = evaluate(objective, *args)
    self.assertTrue(np.isfinite(loss))
    self.assertTrue(np.isfinite(grad_GR).all())
    for value in metrics.values():
      self.assertTrue(np.isfinite(value))

  @parameterized.parameters(
    ("bfloat16", "float32"), ("float32", "float32"), ("float64", "float64")
  )
  def test_dtypes(self, given, expected):
    with jax.enable_x64(True):
      group = make_group(np.ones((2, 3), bool), dtype=given)
      logprobs_GR, entropy_GR = make_policy(group)
      objective = objectives.PolicyObjective(
        kl_coef=0.1, entropy_coef=0.1, sampler_correction_cap=2.0
      )
      loss, metrics = jax.jit(objective)(logprobs_GR, entropy_GR, group)
      self.assertEqual(loss.dtype, expected)
      for name, value in metrics.items():
        self.assertEqual(value.dtype, "float32", name)
        self.assertEqual(value.shape, (), name)
      advantages_G = objectives.group_advantages(group.rewards)
      self.assertEqual(advantages_G.dtype, expected)

  def test_float64_is_not_narrowed(self):
    with jax.enable_x64(True):
      group = make_group(length_mask([2, 5]), dtype="float64")
      logprobs_GR, entropy_GR = make_policy(group)
      objective = objectives.PolicyObjective(kl_coef=0.3, entropy_coef=0.2)
      loss, _, _ = evaluate(objective, logprobs_GR, entropy_GR, group)
      expected = loop_loss(objective, logprobs_GR, entropy_GR, group)
      np.testing.assert_allclose(loss, expected, rtol=1e-13)

  def test_is_a_static_argument(self):
    group = make_group(np.ones((2, 3), bool))
    logprobs_GR, entropy_GR = make_policy(group)
    run = jax.jit(lambda o, *args: o(*args)[0], static_argnums=0)
    objective = objectives.PolicyObjective(kl_coef=0.2)
    same = objectives.PolicyObjective(kl_coef=0.2)
    other = objectives.PolicyObjective(kl_coef=0.4)
    args = logprobs_GR, entropy_GR, group
    self.assertEqual(run(same, *args), run(objective, *args))
    self.assertEqual(run._cache_size(), 1)
    self.assertGreater(run(other, *args), run(objective, *args))

  def test_metrics_carry_no_gradient(self):
    group = make_group(np.ones((2, 3), bool))
    logprobs_GR, entropy_GR = make_policy(group)
    objective = objectives.PolicyObjective()
    total = lambda logprobs_GR: sum(
      objective(logprobs_GR, entropy_GR, group)[1].values()
    )
    np.testing.assert_array_equal(jax.jit(jax.grad(total))(logprobs_GR), 0.0)

  @parameterized.parameters(
    ("clip_low", 0.0),
    ("clip_low", 1.5),
    ("clip_low", math.nan),
    ("clip_high", 0.0),
    ("clip_high", -0.2),
    ("kl_coef", -0.1),
    ("kl_coef", math.inf),
    ("entropy_coef", -0.1),
    ("entropy_coef", math.nan),
    ("sampler_correction_cap", 0.0),
    ("ratio_level", "word"),
    ("normalization", "batch"),
  )
  def test_refuses_nonsense(self, name, value):
    with self.assertRaisesRegex(ValueError, f"{name}={value!r}.*(give|use)"):
      objectives.PolicyObjective(**{name: value})

  def test_refuses_arrays_of_different_shapes(self):
    group = make_group(np.ones((2, 3), bool))
    # Where annotations are checked, that check comes first.
    with self.assertRaisesRegex((ValueError, TypeError), r"entropy.*1, ?3"):
      objectives.PolicyObjective()(group.old_logprobs, jnp.ones((1, 3)), group)


if __name__ == "__main__":
  absltest.main()
