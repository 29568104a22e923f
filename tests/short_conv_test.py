"""The short convolution: any split equals one pass, gradients included."""

from absl.testing import absltest, parameterized
import jax
import jax.numpy as jnp
import numpy as np

from longstraw_jax.ops.short_conv import short_conv

TOLERANCE = {"float64": 1e-12}

W, U, TOKENS = 4, 5, 9


def arrays():
  rng = np.random.default_rng(0)
  normal = lambda *shape: rng.normal(size=shape)
  return normal(TOKENS, U), normal(W, U), normal(W - 1, U)


def assert_close(got, wanted):
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, atol=TOLERANCE["float64"]),
    got,
    wanted,
  )


class ShortConvTest(parameterized.TestCase):
  def test_equals_numpy(self):
    x, taps, tail = arrays()
    y, new_tail = short_conv(x, taps, tail, TOKENS)
    row = np.concatenate([tail, x])
    for channel in range(U):
      wanted = np.convolve(row[:, channel], taps[::-1, channel], "valid")
      assert_close(y[:, channel], wanted)
    np.testing.assert_array_equal(new_tail, x[-(W - 1) :])

  @parameterized.parameters((1,), (2,), (3,), (1, 2, 3), (3, 1, 1))
  def test_splits_equal_one_pass(self, *sizes):
    """Fault 5: calls shorter than the taps, and their gradients."""
    sizes = (*sizes, TOKENS - sum(sizes))
    rng = np.random.default_rng(1)
    dy, dtail = rng.normal(size=(TOKENS, U)), rng.normal(size=(W - 1, U))

    def pieces(x, taps, tail):
      outputs, start = [], 0
      for size in sizes:
        y, tail = short_conv(x[start : start + size], taps, tail, size)
        outputs.append(y)
        start += size
      return jnp.concatenate(outputs), tail

    def plain(x, taps, tail):
      row = jnp.concatenate([tail, x])
      y = [(row[t : t + W] * taps).sum(0) for t in range(TOKENS)]
      return jnp.stack(y), row[TOKENS:]

    def run(call):
      out, pull_back = jax.vjp(call, *arrays())
      return out, pull_back((dy, dtail))

    compiled = jax.jit(run, static_argnums=0)
    assert_close(compiled(pieces), compiled(plain))

  @parameterized.parameters(0, 1, 2, 3, 5)
  def test_tail_ends_at_the_last_real_token(self, length):
    x, taps, tail = arrays()
    x[length:] = np.nan  # padding
    y, new_tail = short_conv(x, taps, tail, length)
    row = np.concatenate([tail, x[:length]])
    np.testing.assert_array_equal(new_tail, row[len(row) - (W - 1) :])
    self.assertTrue(np.isfinite(y[:length]).all())


if __name__ == "__main__":
  absltest.main()
