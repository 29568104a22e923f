"""Blocked log-probabilities against the form that holds all logits."""

import re

from absl.testing import absltest, parameterized
import jax
import jax.numpy as jnp
import numpy as np

from longstraw_jax.ops.logprobs import (
  logits_of,
  token_logprobs,
  token_logprobs_reference,
)

TOLERANCE = {"float64": 1e-12, "float32": 1e-5}

D, V = 6, 17


def arrays(tokens, dtype="float64"):
  rng = np.random.default_rng(0)
  hidden = rng.normal(size=(tokens, D)).astype(dtype)
  head = rng.normal(size=(D, V)).astype(dtype)
  return hidden, head, rng.integers(0, V, tokens)


class LogprobsTest(parameterized.TestCase):
  def test_reference_equals_numpy(self):
    hidden, head, targets = arrays(5)
    p = np.exp(hidden @ head)
    p /= p.sum(-1, keepdims=True)
    logprobs, entropy = token_logprobs_reference(hidden, head, targets)
    tolerance = TOLERANCE["float64"]
    np.testing.assert_allclose(
      logprobs, np.log(p[np.arange(5), targets]), atol=tolerance
    )
    np.testing.assert_allclose(
      entropy, -(p * np.log(p)).sum(-1), atol=tolerance
    )

  @parameterized.parameters(0.6, 2.5)
  def test_a_temperature_divides_the_logits(self, temperature):
    """By plain autodiff of the formula, values and gradients."""
    hidden, head, targets = arrays(7)
    cotangents = tuple(np.random.default_rng(1).normal(size=(2, 7)))

    def formula(hidden, head):
      logp = jax.nn.log_softmax(hidden @ head / temperature)
      entropy = -(jnp.exp(logp) * logp).sum(-1)
      return logp[jnp.arange(7), targets], entropy

    def ours(hidden, head):
      given = jnp.asarray(temperature)
      return token_logprobs(hidden, head, targets, 4, given)

    for got, wanted in zip(
      *(
        jax.tree.leaves(
          (call(hidden, head), jax.vjp(call, hidden, head)[1](cotangents))
        )
        for call in (ours, formula)
      ),
      strict=True,
    ):
      np.testing.assert_allclose(got, wanted, rtol=1e-12, atol=1e-12)

  @parameterized.product(
    tokens=(1, 4, 7, 8, 9),  # fault 31: not a multiple of the block
    dtype=("float64", "float32"),
  )
  def test_blocked_equals_reference(self, tokens, dtype):
    hidden, head, targets = arrays(tokens, dtype)
    rng = np.random.default_rng(1)
    cotangents = tuple(rng.normal(size=(2, tokens)).astype(dtype))

    @jax.jit
    def run(hidden, head):
      blocked = lambda h, w: token_logprobs(h, w, targets, 4)
      plain = lambda h, w: token_logprobs_reference(h, w, targets)
      results = []
      for call in (blocked, plain):
        out, pull_back = jax.vjp(call, hidden, head)
        results.append((out, pull_back(cotangents)))
      return results

    got, wanted = run(hidden, head)
    jax.tree.map(
      lambda a, b: np.testing.assert_allclose(
        a, b, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype]
      ),
      got,
      wanted,
    )

  def test_narrow_inputs_are_multiplied_narrow_and_summed_wide(self):
    hidden, head, _ = (jnp.asarray(x) for x in arrays(3))
    hidden, head = hidden.astype(jnp.bfloat16), head.astype(jnp.bfloat16)
    self.assertEqual(logits_of(hidden, head).dtype, jnp.float32)
    traced = jax.jit(logits_of).trace(hidden, head)
    cuda = traced.lower(lowering_platforms=("cuda",)).as_text()
    product = f"(tensor<3x{D}xbf16>, tensor<{D}x{V}xbf16>) -> tensor<3x{V}xf32>"
    self.assertIn(product, cuda)
    # XLA:CPU has no such product: there the inputs are cast, and it runs.
    wide = hidden.astype(jnp.float32) @ head.astype(jnp.float32)
    np.testing.assert_allclose(logits_of(hidden, head), wide, rtol=1e-5)

  @parameterized.parameters("values", "gradient")
  def test_never_holds_all_logits(self, what):
    tokens, vocab_size, block = 512, 4096, 8
    shape = lambda *s: jax.ShapeDtypeStruct(s, jnp.float32)
    args = shape(tokens, D), shape(D, vocab_size)
    targets = jax.ShapeDtypeStruct((tokens,), jnp.int32)

    def temporaries(block):
      def loss(hidden, head, targets):
        scores = token_logprobs(hidden, head, targets, block)
        return scores[0].sum() + scores[1].sum()

      call = loss if what == "values" else jax.grad(loss, (0, 1))
      compiled = jax.jit(call).lower(*args, targets).compile()
      return compiled.memory_analysis().temp_size_in_bytes

    everything = 4 * tokens * vocab_size
    self.assertLess(temporaries(block), everything / 8)
    self.assertGreaterEqual(temporaries(tokens), everything)  # can fail

  def test_at_full_size(self):
    """Known fault 32: one block of logits, and products of bfloat16 only."""
    tokens, vocab_size, block, width = 65536, 248320, 256, 5120
    args = (
      jax.ShapeDtypeStruct((tokens, width), jnp.bfloat16),
      jax.ShapeDtypeStruct((width, vocab_size), jnp.bfloat16),
      jax.ShapeDtypeStruct((tokens,), jnp.int32),
    )

    def loss(hidden, head, targets):
      logprobs, entropy = token_logprobs(hidden, head, targets, block)
      return logprobs.sum() + entropy.sum()

    traced = jax.jit(jax.grad(loss, (0, 1))).trace(*args)
    program = traced.lower(lowering_platforms=("cuda",)).as_text()
    products = re.findall(r"dot_general.* : \((.*)\) -> (.*)", program)
    # Logits and, in the backward pass, what becomes of their cotangent.
    self.assertLen(products, 3)
    for inputs, output in products:
      self.assertEqual(inputs.count("xbf16>"), 2, inputs)
      self.assertIn("xf32>", output)
    rows = {int(n) for n in re.findall(rf"<(\d+)x{vocab_size}x", program)}
    self.assertEqual(rows, {1, block, width})  # one: the token ids


if __name__ == "__main__":
  absltest.main()
