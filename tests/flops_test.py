"""Counted operations against sums written out."""

from absl.testing import absltest, parameterized

from longstraw_jax import PRESETS
from longstraw_jax.flops import (
  backward_flops,
  forward_flops,
  group_gradient_flops,
  model_flops,
  phase_flops,
  selected_pairs,
)


class FlopsTest(parameterized.TestCase):
  @parameterized.parameters((0, 7, 3), (2, 5, 4), (9, 4, 3), (0, 4, 9))
  def test_selected_pairs(self, start, tokens, number):
    by_hand = sum(min(start + i + 1, number) for i in range(tokens))
    self.assertEqual(selected_pairs(start, tokens, number), by_hand)

  def test_a_forward_pass_is_two_operations_a_parameter(self):
    """Qwen3.6-27B: 26.9e9 parameters, 1.27e9 of them the embedding."""
    linear = model_flops(PRESETS["qwen3.6-27b"]).linear
    embedding = 5120 * 248320
    share = linear / (2 * (26_895_998_464 - 2 * embedding))
    self.assertAlmostEqual(share, 1.0, delta=1e-3)

  def test_glm_uses_40e9_of_its_parameters(self):
    linear = model_flops(PRESETS["glm-5.2"]).linear / 2
    self.assertBetween(linear, 36e9, 44e9)

  @parameterized.parameters("tiny-hybrid", "tiny-moe", "tiny-glm")
  def test_frozen_weights_have_no_gradient(self, name):
    config = PRESETS[name]
    sizes = (config, 0, 50, 0)
    saved = backward_flops(*sizes) - backward_flops(*sizes, frozen=True)
    self.assertEqual(saved, 50 * model_flops(config).linear)

  def test_an_index_has_no_backward_pass(self):
    config = PRESETS["tiny-glm"]
    longer = lambda count: count(config, 10**6, 10, 0) - count(config, 0, 10, 0)
    index = 10 * 10**6 * model_flops(config).index
    self.assertLess(longer(backward_flops), 0.1 * index)
    self.assertGreaterEqual(longer(forward_flops), index)

  @parameterized.parameters("full", "response_only")
  def test_phases_add_up(self, scope):
    sizes = {"chunk_size": 16, "grad_scope": scope, "block_size": 4}
    phases = phase_flops(PRESETS["tiny-hybrid"], 100, 3, 8, **sizes)
    whole = group_gradient_flops(PRESETS["tiny-hybrid"], 100, 3, 8, **sizes)
    self.assertEqual(sum(phases.values()), whole)
    self.assertEqual(phases["reverse"] == 0, scope == "response_only")


if __name__ == "__main__":
  absltest.main()
