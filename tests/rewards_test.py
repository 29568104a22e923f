"""Reward functions: found by name, and never trusted."""

import fractions
import functools
import math
import pathlib
import sys
import tempfile
import types
from unittest import mock

from absl.testing import absltest, parameterized
import jax.numpy as jnp
import numpy as np

from longstraw_jax import rewards

TEXTS = ("a", "b", "c")


def returns(values):
  """A reward function that gives each response its own value."""
  by_text = dict(zip(TEXTS, values, strict=True))
  return lambda prompt_text, response_text, info: by_text[response_text]


class LoadRewardTest(parameterized.TestCase):
  def test_finds_a_function(self):
    found = rewards.load_reward("longstraw_jax.rewards:exact_match")
    self.assertIs(found, rewards.exact_match)

  @parameterized.parameters(
    ("exact_match", "form 'package.module:function'"),
    ("longstraw_jax.rewards:", "form 'package.module:function'"),
    (":exact_match", "form 'package.module:function'"),
    ("no_such_package.rewards:f", "ModuleNotFoundError.*no_such_package"),
    ("longstraw_jax.rewards:nothing", "no such name.*'nothing'"),
    ("math:pi", "float.*'pi'"),
  )
  def test_refusals(self, spec, message):
    with self.assertRaisesRegex(rewards.RewardError, message) as caught:
      rewards.load_reward(spec)
    self.assertIn(repr(spec), str(caught.exception))

  @parameterized.parameters("sys.exit(3)", "raise GeneratorExit", "1 / 0")
  def test_a_module_that_ends_while_it_loads(self, line):
    with tempfile.TemporaryDirectory() as folder:
      path = pathlib.Path(folder, "reward_that_ends.py")
      path.write_text(f"import sys\n{line}\n")
      with mock.patch.object(sys, "path", [folder, *sys.path]):
        with self.assertRaisesRegex(rewards.RewardError, "importing .* failed"):
          rewards.load_reward("reward_that_ends:f")


class ScoreResponsesTest(parameterized.TestCase):
  def test_scores_in_order(self):
    values = [0.25, True, np.float64(3)]
    got = rewards.score_responses(returns(values), "p", TEXTS, {})
    np.testing.assert_array_equal(got, [0.25, 1.0, 3.0])
    self.assertEqual(got.dtype, np.float32)

  @parameterized.parameters(
    2, np.int32(2), np.bool_(True), fractions.Fraction(1, 4)
  )
  def test_takes_numbers_of_every_kind(self, value):
    values = [0.0, value, 0.0]
    got = rewards.score_responses(returns(values), "p", TEXTS, {})
    np.testing.assert_array_equal(got, [0.0, float(value), 0.0])

  def test_takes_scalars_of_arrays(self):
    values = [jnp.float32(0.5), np.asarray(2.0), 0.0]
    got = rewards.score_responses(returns(values), "p", TEXTS, {})
    np.testing.assert_array_equal(got, [0.5, 2.0, 0.0])

  @parameterized.parameters(
    (math.nan,),
    (math.inf,),
    (-math.inf,),
    (None,),
    ("0.5",),
    ([0.5],),
    ([0.1, 0.2, 0.3],),
    ([[0.1], [0.2, 0.3]],),
    (np.ones(1),),
    (1j,),
    (1e39,),  # finite, but not in float32
    (10**400,),
    ({},),
  )
  def test_names_the_member_of_a_bad_reward(self, value):
    for member in range(3):
      values = [0.5] * 3
      values[member] = value
      with self.assertRaisesRegex(
        rewards.RewardError, f"member {member} of prompt 17 .*finite number"
      ):
        rewards.score_responses(returns(values), "p", TEXTS, {}, prompt_id=17)

  def test_names_the_member_it_raised_for(self):
    def broken(prompt_text, response_text, info):
      return {"a": 1.0, "c": 2.0}[response_text]

    with self.assertRaisesRegex(
      rewards.RewardError, "raised KeyError for member 1: 'b'"
    ) as caught:
      rewards.score_responses(broken, "p", TEXTS, {})
    self.assertIsInstance(caught.exception.__cause__, KeyError)

  def test_checks_the_count(self):
    good = returns([0.0, 0.0, 0.0])
    with self.assertRaisesRegex(
      rewards.RewardError, "3 responses of prompt 5, expected 4"
    ):
      rewards.score_responses(good, "p", TEXTS, {}, group_size=4, prompt_id=5)
    with self.assertRaisesRegex(rewards.RewardError, "at least 1"):
      rewards.score_responses(good, "p", (), {})

  def test_members_cannot_talk_through_info(self):
    def counting(prompt_text, response_text, info):
      info["calls"] = info.get("calls", 0) + 1
      return info["calls"]

    info = {"answer": "7"}
    got = rewards.score_responses(counting, "p", TEXTS, info)
    np.testing.assert_array_equal(got, [1, 1, 1])
    self.assertEqual(info, {"answer": "7"})

  def test_passes_everything_on(self):
    seen = []

    def recording(*args):
      seen.append(args)
      return 0.0

    rewards.score_responses(recording, "prompt", ("x", "y"), {"answer": "7"})
    self.assertEqual(
      seen,
      [("prompt", "x", {"answer": "7"}), ("prompt", "y", {"answer": "7"})],
    )


class MembersApartTest(parameterized.TestCase):
  @parameterized.parameters(
    ({"seen": []}, lambda info: info["seen"]),
    ({"a": {"b": {"seen": [1]}}}, lambda info: info["a"]["b"]["seen"]),
    ({"t": ([], 7)}, lambda info: info["t"][0]),
    ({"n": np.zeros(3)}, lambda info: info["n"]),
  )
  def test_nothing_nested_leaks(self, info, place):
    """Fault class: a list in info that all members write into."""
    before = repr(info)

    def growing(prompt_text, response_text, info):
      found = place(info)
      if isinstance(found, list):
        found.append(response_text)
        return len(found)
      found += 1
      return found.sum()

    got = rewards.score_responses(growing, "p", TEXTS, info)
    np.testing.assert_array_equal(got, [got[0]] * 3)
    self.assertEqual(repr(info), before)

  def test_ids_are_copies_too(self):
    prompt, sampled = np.arange(4), [np.arange(3)] * 3

    def spoiling(prompt, response, info, *, prompt_ids, response_ids):
      total = prompt_ids.sum() + response_ids.sum()
      prompt_ids[:], response_ids[:] = 99, 99
      return total

    got = rewards.score_responses(
      spoiling, "p", TEXTS, {}, prompt_ids=prompt, response_ids=sampled
    )
    np.testing.assert_array_equal(got, [9, 9, 9])
    np.testing.assert_array_equal(prompt, np.arange(4))


class _Verifier:
  def __call__(self, prompt, response, info, truncated=None):
    return float(truncated)


class KeywordsTest(parameterized.TestCase):
  GIVEN = dict(
    prompt_ids=np.array([5, 6]),
    response_ids=[np.array([1]), np.array([2, 3]), np.array([4])],
    truncated=[False, True, False],
  )

  @parameterized.parameters(
    (lambda p, r, i, *, truncated: truncated, [0, 1, 0]),
    (lambda p, r, i, response_ids: len(response_ids), [1, 2, 1]),
    (lambda p, r, i, strict=2, **kw: kw["prompt_ids"][1] + strict, [8, 8, 8]),
    (lambda *args: len(args), [3, 3, 3]),
    # Three arguments stand in their places, whatever they are called.
    (lambda response_ids, truncated, info: len(truncated), [1, 1, 1]),
    (_Verifier(), [0, 1, 0]),
    (functools.partial(_Verifier().__call__, truncated=True), [0, 1, 0]),
  )
  def test_declared_ones_are_given(self, function, expected):
    got = rewards.score_responses(function, "p", TEXTS, {}, **self.GIVEN)
    np.testing.assert_array_equal(got, expected)

  def test_what_nobody_gave_is_named(self):
    with self.assertRaisesRegex(rewards.RewardError, "asks for .*truncated"):
      rewards.score_responses(_Verifier(), "p", TEXTS, {})

  @parameterized.parameters(
    (lambda prompt, response: 0.0,),
    (lambda p, r, i, *, tokenizer: 0.0,),
    (lambda p, r, i, extra: 0.0,),
    (lambda prompt, response, info, truncated, /: 0.0,),
  )
  def test_other_signatures_are_refused_when_loaded(self, function):
    module = types.ModuleType("some_rewards")
    module.score = function
    with mock.patch.dict("sys.modules", some_rewards=module):
      with self.assertRaisesRegex(
        rewards.RewardError, "some_rewards:score.*signature.*by keyword"
      ):
        rewards.load_reward("some_rewards:score")


class ExactMatchTest(parameterized.TestCase):
  @parameterized.parameters(
    ("7", "7", 1.0),
    (" 7\n", "7", 1.0),
    ("7", 7, 1.0),
    ("77", "7", 0.0),
    ("", "7", 0.0),
    ("7,3", "7,3", 1.0),
    ("3,7", "7,3", 0.0),
  )
  def test_by_hand(self, response, answer, expected):
    got = rewards.exact_match("p", response, {"answer": answer})
    self.assertEqual(got, expected)

  def test_needs_an_answer(self):
    with self.assertRaisesRegex(rewards.RewardError, "member 0.*answer"):
      rewards.score_responses(rewards.exact_match, "p", ("7",), {"label": 1})


if __name__ == "__main__":
  absltest.main()
