"""Mixers: conformance, that the kit catches bad ones, and golden formulas."""

import dataclasses

from absl.testing import absltest, parameterized
import jax
from jax import lax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments import sliding_window
from longstraw_jax import MIXERS, PRESETS, Segment, Span, State, merge
from longstraw_jax.models.attention import Attention
from longstraw_jax.models.gated_delta import DeltaCarry, GatedDelta
from longstraw_jax.models.layers import GatedRMSNorm, ZeroCentredRMSNorm
from longstraw_jax.ops.attention import masked_attention
from longstraw_jax.state import tree_zeros
from longstraw_jax.testing import CHECKS, check_mixer

TOLERANCE = {"float64": 1e-12}

TINY = dataclasses.replace(
  PRESETS["tiny-hybrid"], dtype="float64", param_dtype="float64"
)
EPS = 1e-6


class CarriesSegment(sliding_window.SlidingWindowAttention):
  """Right in value, ruinous in memory: its scan carries the segment."""

  def _read(self, q_TNH, span, segment):
    tokens = q_TNH.shape[0]
    size = 8 if tokens % 8 == 0 else tokens
    read = super()._read

    @jax.checkpoint
    def block(segment, inputs):
      q, positions = inputs
      parts, tap = read(q, span.replace(positions=positions), segment)
      return segment.replace(tap=tap), parts

    blocks = lambda x: x.reshape(-1, size, *x.shape[1:])
    segment, parts = lax.scan(
      block, segment, (blocks(q_TNH), blocks(span.positions))
    )
    flat = lambda x: x.reshape(tokens, *x.shape[2:])
    return jax.tree.map(flat, parts), segment.tap


class DropsTap(sliding_window.SlidingWindowAttention):
  """Hands on the tap as it was before the reads.

  Autodiff still adds up the right gradient, in an accumulator of its own.
  """

  def _read(self, q_TNH, span, segment):
    return super()._read(q_TNH, span, segment)[0], segment.tap


class ReadsWithoutTap(sliding_window.SlidingWindowAttention):
  """Right in value, but no gradient flows into the pages."""

  def _read(self, q_TNH, span, segment):
    parts, _ = super()._read(q_TNH, span, segment.replace(tap=None))
    return parts, segment.tap


class ForgetsSecondRead(sliding_window.SlidingWindowAttention):
  """A window that takes its rows from one block only."""

  def _read(self, q_TNH, span, segment):
    parts, tap = super()._read(q_TNH, span, segment)
    return parts[1:], tap


class RelativePositions(Attention):
  """Counts positions from the start of the call."""

  def __call__(self, x_TD, span, state):
    positions = span.positions - span.positions[0]
    return super().__call__(x_TD, span.replace(positions=positions), state)


class SeesTheFuture(sliding_window.SlidingWindowAttention):
  """Off by one at the upper end of the window."""

  def _part(self, q_TNH, span, rows, positions, filled):
    late = span.replace(positions=span.positions + 1)
    return super()._part(q_TNH, late, rows, positions, filled)


class IgnoresPadding(GatedDelta):
  """Takes padding for real tokens."""

  def __call__(self, x_TD, span, state):
    span = span.replace(length=jnp.int32(x_TD.shape[0]))
    return super().__call__(x_TD, span, state)


class NarrowCarry(GatedDelta):
  """Sums over the context in the model's dtype."""

  def __call__(self, x_TD, span, state):
    y_TD, update = super().__call__(x_TD, span, state)
    cast = lambda x: x.astype(x_TD.dtype)
    return y_TD, update.replace(carry=jax.tree.map(cast, update.carry))

  def state_shapes(self, tokens, dtype):
    rows, carry = super().state_shapes(tokens, dtype)
    cast = lambda x: jax.ShapeDtypeStruct(x.shape, jnp.dtype(dtype))
    return rows, jax.tree.map(cast, carry)


class WrongDeclaration(Attention):
  """Declares rows token-major."""

  def state_shapes(self, tokens, dtype):
    rows, carry = super().state_shapes(tokens, dtype)
    swap = lambda x: jax.ShapeDtypeStruct(
      (x.shape[1], x.shape[0], x.shape[2]), x.dtype
    )
    return jax.tree.map(swap, rows), carry


class StopsCarry(GatedDelta):
  """Right in value, but no gradient flows through its carry."""

  def __call__(self, x_TD, span, state):
    carry = jax.tree.map(lax.stop_gradient, state.carry)
    return super().__call__(x_TD, span, state.replace(carry=carry))


def builder(cls, window=5):
  """A registry entry for one of the above."""

  def build(config):
    dtypes = {"dtype": config.dtype, "param_dtype": config.param_dtype}
    if issubclass(cls, GatedDelta):
      return cls(
        sizes=config.delta,
        norm_eps=config.norm_eps,
        delta_block=config.delta_block,
        **dtypes,
      )
    if issubclass(cls, Attention):
      return cls(
        sizes=config.attention,
        norm=config.norm,
        norm_eps=config.norm_eps,
        query_block=config.query_block,
        read_block=config.read_block,
        **dtypes,
      )
    return cls(sizes=config.attention, window=window, **dtypes)

  return build


@pytest.mark.slow  # by default other tests hold their gradients or formulas
class MoreConformanceTest(parameterized.TestCase):
  def test_attention_conforms(self):
    check_mixer("attention")

  def test_gated_delta_conforms(self):
    check_mixer("gated_delta")

  def test_latent_attention_conforms(self):
    check_mixer("latent_attention", PRESETS["tiny-glm"])

  def test_sliding_window_conforms(self):
    self.addCleanup(MIXERS.pop, sliding_window.NAME)
    sliding_window.register(5)
    check_mixer(sliding_window.NAME)

  def test_shared_latent_attention_conforms(self):
    some = jnp.array([0, 2, 3, 5, 9])
    check_mixer(
      "shared_latent_attention",
      PRESETS["tiny-glm"],
      below=("latent_attention",),
      shared=lambda positions: {"keys": positions[:, None] - some},
    )


class ConformanceTest(parameterized.TestCase):
  def register(self, name, build):
    self.assertNotIn(name, MIXERS)
    self.addCleanup(MIXERS.pop, name)
    MIXERS[name] = build

  def test_gated_delta_conforms(self):
    """Its gradients are gradients_test's."""
    checks = [check for check in CHECKS if check != "gradients"]
    check_mixer("gated_delta", checks=checks)

  @parameterized.parameters(
    (CarriesSegment, "memory"),
    (DropsTap, "memory"),
    (ReadsWithoutTap, "gradients"),
    (ForgetsSecondRead, "splits"),
    (RelativePositions, "splits"),
    (SeesTheFuture, "causality"),
    (IgnoresPadding, "padding"),
    (NarrowCarry, "shapes"),
    (WrongDeclaration, "shapes"),
    (StopsCarry, "gradients"),
  )
  def test_catches(self, cls, check):
    self.register("bad", builder(cls))
    with self.assertRaisesRegex(AssertionError, f"^{check}: "):
      check_mixer("bad", checks=(check,))

  @pytest.mark.slow
  def test_values_alone_would_not_catch(self):
    self.register("bad", builder(ReadsWithoutTap))
    check_mixer("bad", checks=("shapes", "splits", "padding", "causality"))

  def test_unknown_names_are_refused(self):
    with self.assertRaisesRegex(ValueError, "speed"):
      check_mixer("gated_delta", checks=("speed",))
    with self.assertRaisesRegex(KeyError, "'nothing' is not registered"):
      check_mixer("nothing", checks=CHECKS[:1])


class SlidingWindowTest(parameterized.TestCase):
  @parameterized.product(window=(1, 2, 4, 5, 12, 40), chunk=(1, 3, 12))
  def test_equals_dense_attention_under_a_band(self, window, chunk):
    """Rows in two segments; windows shorter and longer than everything."""
    tokens, prompt = 12, 4
    rng = np.random.default_rng(0)
    normal = lambda *shape: jnp.asarray(rng.normal(size=shape))
    q, k, v = normal(tokens, 4, 8), normal(2, tokens, 8), normal(2, tokens, 8)
    mixer = builder(sliding_window.SlidingWindowAttention, window)(TINY)
    at = np.arange(tokens)
    distance = at[:, None] - at
    band = jnp.asarray((distance >= 0) & (distance < window))
    wanted, _ = masked_attention(q, k, v, band)
    pages = jax.tree.map(lambda x: x[None], {"k": k, "v": v})

    @jax.jit
    def chunk_of(start):
      place = start + jnp.arange(chunk)
      span = Span(positions=place, length=jnp.int32(chunk))
      own = {"k": k[:, place], "v": v[:, place]}
      parts = [mixer._part(q[place], span, own, place, jnp.ones(chunk, bool))]
      for first, last in ((0, prompt), (prompt, start)):
        rows = jax.tree.map(lambda x, f=first: x[..., f:, :], pages)
        length = jnp.clip(jnp.minimum(last, start) - first, 0)
        segment = segment_of(rows, length, first)
        parts += mixer._read(q[place], span, segment)[0]
      return merge(parts)

    got = [chunk_of(start) for start in range(0, tokens, chunk)]
    np.testing.assert_allclose(
      np.concatenate(got), wanted, atol=TOLERANCE["float64"]
    )


def segment_of(rows, length, start):
  """A one-layer segment without a tap."""
  length, start = (jnp.asarray(x, jnp.int32) for x in (length, start))
  return Segment(
    rows=rows, tap=None, layer=jnp.int32(0), length=length, start=start
  )


def sigmoid(x):
  return 1 / (1 + np.exp(-x))


def numpy_gated_delta(params, x, carry, sizes):
  """The formulas of Qwen3.5's gated delta net, one token and head at a time."""
  kernel = lambda name: np.asarray(params[name]["kernel"])
  qkv = x @ kernel("in_proj_qkv")
  row = np.concatenate([carry.conv_tail, qkv])
  width, keys = sizes.conv_width, sizes.num_key_heads * sizes.key_dim
  repeats = sizes.num_value_heads // sizes.num_key_heads
  matrix = np.array(carry.matrix)
  outputs = []
  for t in range(x.shape[0]):
    u = (row[t : t + width] * np.asarray(params["conv"])).sum(0)
    u = u * sigmoid(u)
    q = u[:keys].reshape(sizes.num_key_heads, -1)
    k = u[keys : 2 * keys].reshape(sizes.num_key_heads, -1)
    v = u[2 * keys :].reshape(sizes.num_value_heads, -1)
    z = (x[t] @ kernel("in_proj_z")).reshape(v.shape)
    beta = sigmoid(x[t] @ kernel("in_proj_b"))
    a = x[t] @ kernel("in_proj_a") + np.asarray(params["dt_bias"])
    decay = np.exp(-np.exp(np.asarray(params["A_log"])) * np.log1p(np.exp(a)))
    heads = []
    for n in range(sizes.num_value_heads):
      qn, kn = q[n // repeats], k[n // repeats]
      qn = qn / np.sqrt((qn**2).sum() + EPS) / np.sqrt(sizes.key_dim)
      kn = kn / np.sqrt((kn**2).sum() + EPS)
      matrix[n] *= decay[n]
      matrix[n] += np.outer(kn, beta[n] * (v[n] - kn @ matrix[n]))
      o = qn @ matrix[n]
      o = o / np.sqrt((o**2).mean() + EPS)
      o = o * np.asarray(params["norm"]["weight"])
      heads.append(o * z[n] * sigmoid(z[n]))
    outputs.append(np.concatenate(heads) @ kernel("out_proj"))
  return np.stack(outputs), matrix, row[len(row) - width + 1 :]


class GatedDeltaTest(parameterized.TestCase):
  @parameterized.parameters(1.0, 1e-3)
  def test_equals_numpy(self, scale):
    """At 1e-3 every eps decides: of q and k, and of the output norm."""
    mixer = MIXERS["gated_delta"](TINY)
    rng = np.random.default_rng(0)
    x = scale * rng.normal(size=(11, TINY.embed_dim))
    span = Span(positions=jnp.arange(11), length=jnp.int32(11))
    carry = tree_zeros(mixer.state_shapes(1, "float64")[1])
    state = State(pages=(), carry=carry)
    params = jax.jit(mixer.init)(jax.random.key(0), x, span, state)["params"]
    draw = lambda x: scale * rng.normal(size=x.shape)
    carry = DeltaCarry(draw(carry.matrix), draw(carry.conv_tail))
    params["norm"]["weight"] = 1.0 + rng.normal(size=TINY.delta.value_dim)
    y, update = jax.jit(mixer.apply)(
      {"params": params}, x, span, State(pages=(), carry=carry)
    )
    got = y, update.carry.matrix, update.carry.conv_tail
    wanted = numpy_gated_delta(params, x, carry, TINY.delta)
    for a, b in zip(got, wanted, strict=True):
      limit = TOLERANCE["float64"] * np.abs(b).max()
      np.testing.assert_allclose(a, b, rtol=0, atol=limit)

  @parameterized.parameters((90.0, 0.0), (90.0, -1e4), (200.0, 3.0))
  def test_a_decay_rate_beyond_float32(self, a_log, dt_bias):
    """A head that forgets at once, or not at all: finite, and no gradient."""
    mixer = MIXERS["gated_delta"](PRESETS["tiny-hybrid"])
    x = jax.random.normal(jax.random.key(1), (5, TINY.embed_dim))
    span = Span(positions=jnp.arange(5), length=jnp.int32(4))
    carry = tree_zeros(mixer.state_shapes(1, "float32")[1])
    state = State(pages=(), carry=carry)
    params = jax.jit(mixer.init)(jax.random.key(0), x, span, state)["params"]
    params["A_log"] = jnp.full_like(params["A_log"], a_log)
    params["dt_bias"] = jnp.full_like(params["dt_bias"], dt_bias)

    @jax.jit
    def run(params, matrix):
      def call(params):
        now = state.replace(carry=carry.replace(matrix=matrix))
        y, update = mixer.apply({"params": params}, x, span, now)
        return y, update.carry.matrix

      out, pull_back = jax.vjp(call, params)
      return out, pull_back(jax.tree.map(jnp.ones_like, out))[0]

    out, grads = run(params, jnp.ones_like(carry.matrix))
    for leaf in jax.tree.leaves((out, grads)):
      self.assertTrue(np.isfinite(leaf).all())
    np.testing.assert_array_equal(grads["A_log"], 0.0)
    from_zero = run(params, carry.matrix)[0]
    forgets = all(map(np.array_equal, out, from_zero))
    self.assertEqual(forgets, dt_bias > -1e3)


class NormTest(parameterized.TestCase):
  """Inputs of 1e-3 have a mean square of eps: where eps stands, shows."""

  def test_zero_centred(self):
    x = 1e-3 * np.random.default_rng(0).normal(size=(3, 8))
    weight = np.linspace(-0.5, 0.5, 8)
    norm = ZeroCentredRMSNorm(EPS, "float64")
    got = norm.apply({"params": {"weight": weight}}, x)
    wanted = x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) * (1 + weight)
    np.testing.assert_allclose(got, wanted, atol=TOLERANCE["float64"])

  def test_gated(self):
    x, z = 1e-3 * np.random.default_rng(0).normal(size=(2, 3, 8))
    z = 1e3 * z
    weight = np.linspace(0.5, 1.5, 8)
    norm = GatedRMSNorm(EPS, "float64")
    got = norm.apply({"params": {"weight": weight}}, x, z)
    wanted = x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) * weight
    wanted = wanted * z * sigmoid(z)
    np.testing.assert_allclose(got, wanted, atol=TOLERANCE["float64"])


class GatedAttentionTest(absltest.TestCase):
  def test_equals_numpy(self):
    mixer = MIXERS["attention"](TINY)
    sizes = TINY.attention
    rng = np.random.default_rng(0)
    tokens, width = 6, sizes.head_dim
    x = rng.normal(size=(tokens, TINY.embed_dim))
    span = Span(positions=jnp.arange(tokens), length=jnp.int32(tokens))
    state = State(pages=(), carry={})
    params = jax.jit(mixer.init)(jax.random.key(0), x, span, state)["params"]
    for name in ("q_norm", "k_norm"):
      params[name]["weight"] = rng.normal(size=width)
    y, _ = jax.jit(mixer.apply)({"params": params}, x, span, state)

    kernel = lambda name: np.asarray(params[name]["kernel"])
    heads = lambda x, number: x.reshape(tokens, number, -1)
    q_gate = heads(x @ kernel("q_proj"), sizes.num_heads)
    q, gate = q_gate[..., :width], q_gate[..., width:]
    k = heads(x @ kernel("k_proj"), sizes.num_kv_heads)
    v = heads(x @ kernel("v_proj"), sizes.num_kv_heads)

    def placed(x, weight):
      x = x / np.sqrt((x**2).mean(-1, keepdims=True) + EPS) * (1 + weight)
      half = sizes.rope.dim // 2
      exponents = np.arange(half) * 2 / sizes.rope.dim
      angles = np.arange(tokens)[:, None] * sizes.rope.theta**-exponents
      z = x[..., :half] + 1j * x[..., half : 2 * half]
      z = z * np.exp(1j * angles)[:, None]
      return np.concatenate([z.real, z.imag, x[..., 2 * half :]], -1)

    q = placed(q, params["q_norm"]["weight"])
    k = placed(k, params["k_norm"]["weight"])
    out = np.zeros(q.shape)
    for t in range(tokens):
      for n in range(sizes.num_heads):
        own = n // (sizes.num_heads // sizes.num_kv_heads)
        weights = np.exp(k[: t + 1, own] @ q[t, n] / np.sqrt(width))
        out[t, n] = weights @ v[: t + 1, own] / weights.sum()
    wanted = (out * sigmoid(gate)).reshape(tokens, -1) @ kernel("o_proj")
    # Rotary angles are float32 products: a ulp of the angle, not of the sum.
    np.testing.assert_allclose(y, wanted, atol=1e-6)


if __name__ == "__main__":
  absltest.main()
