"""Attention of a call's tokens over themselves and what stands before."""

from absl.testing import absltest, parameterized
import jax
import jax.numpy as jnp
import numpy as np

from longstraw_jax.ops.attention import causal_attention, masked_attention
from longstraw_jax.ops.pages import EMPTY_LSE, Segment

TOLERANCE = {"float64": 1e-12}

N, K, H = 4, 2, 8


def arrays(tokens, stored=0, seed=0, members=()):
  """q of the last `tokens`, k and v of all."""
  rng = np.random.default_rng(seed)
  rows = (*members, K, stored + tokens, H)
  q = rng.normal(size=(*members, tokens, N, H))
  return q, rng.normal(size=rows), rng.normal(size=rows)


def assert_close(got, wanted):
  tolerance = TOLERANCE["float64"]
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(
      a, b, rtol=tolerance, atol=tolerance
    ),
    got,
    wanted,
  )


def dense_loop(q, k, v):
  """Query t of the last T sees every row up to its own, one at a time."""
  tokens, stored = q.shape[0], k.shape[1] - q.shape[0]
  o = np.zeros(q.shape)
  for t in range(tokens):
    for n in range(N):
      keys = k[n // (N // K), : stored + t + 1]
      values = v[n // (N // K), : stored + t + 1]
      weights = np.exp(keys @ q[t, n] * H**-0.5)
      o[t, n] = weights @ values / weights.sum()
  return o


def bottom_right(tokens, stored):
  return jnp.tril(jnp.ones((tokens, stored + tokens), bool), stored)


class MaskedAttentionTest(parameterized.TestCase):
  @parameterized.parameters((1, 0), (5, 0), (1, 6), (5, 6))
  def test_equals_a_loop(self, tokens, stored):
    q, k, v = arrays(tokens, stored)
    o, lse = masked_attention(q, k, v, bottom_right(tokens, stored))
    assert_close(o, dense_loop(q, k, v))
    scores = k[0] @ q[0, 0] * H**-0.5
    wanted = np.log(np.exp(scores[: stored + 1]).sum())
    assert_close(lse[0, 0], wanted)

  def test_a_row_that_sees_nothing(self):
    """Fault 4: zero, not NaN, and no NaN in any gradient."""
    q, k, v = arrays(3)
    mask = bottom_right(3, 0).at[1].set(False)

    def both(q, k, v):
      return masked_attention(q, k, v, mask)

    (o, lse), pull_back = jax.vjp(both, q, k, v)
    np.testing.assert_array_equal(o[1], 0.0)
    np.testing.assert_array_equal(lse[1], EMPTY_LSE)
    dq, dk, dv = pull_back((jnp.ones_like(o), jnp.ones_like(lse)))
    for x in (dq, dk, dv):
      self.assertTrue(np.isfinite(x).all())
    np.testing.assert_array_equal(dq[1], 0.0)
    self.assertGreater(np.abs(dk).max(), 0)

  @parameterized.parameters("q", "k", "both")
  def test_zero_queries_and_keys_average_the_values(self, zero):
    """Fault 11."""
    q, k, v = arrays(4)
    q = q if zero == "k" else 0 * q
    k = k if zero == "q" else 0 * k
    mask = bottom_right(4, 0)
    loss = lambda *args: (masked_attention(*args, mask)[0] ** 2).sum()
    grads = jax.grad(loss, (0, 1, 2))(q, k, v)
    self.assertTrue(all(np.isfinite(x).all() for x in grads))
    o = masked_attention(q, k, v, mask)[0]
    for n in range(N):
      assert_close(o[3, n], v[n // (N // K)].mean(0))


class CausalAttentionTest(parameterized.TestCase):
  def gradients(self, q, k, v, used, stored, query_block):
    """Outputs and gradients with `stored` rows in a segment before."""
    room = lambda x: jnp.pad(x, ((0, 0), (0, 5), (0, 0)))[None]

    def call(q, k, v, tap):
      stop = jax.lax.stop_gradient
      segment = Segment(
        rows={"k": room(stop(k[:, :stored])), "v": room(stop(v[:, :stored]))},
        tap=tap,
        layer=jnp.int32(0),
        length=jnp.int32(stored),
        start=jnp.int32(0),
      )
      return causal_attention(
        q,
        k[:, stored:],
        v[:, stored:],
        (segment,),
        query_block=query_block,
        read_block_size=4,
      )

    tap = {"k": jnp.zeros_like(room(k[:, :stored]))}
    tap["v"] = tap["k"]
    (o, _), pull_back = jax.vjp(call, q, k, v, tap)
    dq, dk, dv, (tap) = pull_back((used, (tap,)))
    add = lambda x, tap: x.at[:, :stored].add(tap[0, :, :stored])
    return o, (dq, add(dk, tap["k"]), add(dv, tap["v"]))

  def dense(self, q, k, v, do):
    mask = bottom_right(q.shape[0], k.shape[1] - q.shape[0])
    o, pull_back = jax.vjp(lambda *a: masked_attention(*a, mask)[0], q, k, v)
    return o, pull_back(do)

  @parameterized.product(query_block=(1, 4, 5, 16), stored=(1, 6))
  def test_query_blocks_equal_dense(self, query_block, stored):
    tokens = 12
    q, k, v = arrays(tokens, stored)
    do = np.random.default_rng(1).normal(size=q.shape)
    run = jax.jit(self.gradients, static_argnums=(4, 5))
    got = run(q, k, v, do, stored, query_block)
    wanted = jax.jit(self.dense)(q, k, v, do)
    assert_close(got, wanted)
    assert_close(got[0], dense_loop(q, k, v))

  @parameterized.parameters(4, 16)
  def test_members_under_vmap_equal_one_by_one(self, query_block):
    """Members that share nothing get gradients of their own."""
    q, k, v = arrays(12, 3, members=(2,))
    do = np.random.default_rng(1).normal(size=q.shape)
    run = lambda *args: self.gradients(*args, 3, query_block)
    got = jax.jit(jax.vmap(run))(q, k, v, do)
    for i in range(2):
      mine = jax.tree.map(lambda x, i=i: x[i], got)
      assert_close(mine, jax.jit(self.dense)(q[i], k[i], v[i], do[i]))

  @parameterized.parameters(4, 16)
  def test_no_segments_and_padding_behind(self, query_block):
    q, k, v = arrays(12)

    def run(q, k, v):
      sizes = {"query_block": query_block, "read_block_size": 4}
      return causal_attention(q, k, v, (), **sizes)

    o, taps = jax.jit(run)(q, k, v)
    self.assertEqual(taps, ())
    spoilt = [np.copy(x) for x in (q, k, v)]
    spoilt[0][7:] = spoilt[1][:, 7:] = spoilt[2][:, 7:] = 1e3
    again, _ = jax.jit(run)(*spoilt)
    np.testing.assert_array_equal(again[:7], o[:7])
    assert_close(o, dense_loop(q, k, v))


if __name__ == "__main__":
  absltest.main()
