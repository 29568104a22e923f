"""Latent attention against its formulas, un-absorbed and dense."""

import dataclasses

from absl.testing import absltest, parameterized
import jax
import jax.numpy as jnp
import numpy as np

from longstraw_jax import MIXERS, PRESETS, Span, State
from longstraw_jax.models.latent_attention import LayerNorm
from longstraw_jax.models.layers import RMSNorm

CONFIG = dataclasses.replace(
  PRESETS["tiny-glm"], dtype="float64", param_dtype="float64"
)
SIZES = CONFIG.latent
TOKENS = 30


def rms(x, weight, eps):
  return weight * x / np.sqrt((x**2).mean(-1, keepdims=True) + eps)


def interleaved(x, positions):
  """Turns pairs (2j, 2j + 1) of the first rope.dim dims, as complex ones."""
  dim = SIZES.rope.dim
  frequencies = SIZES.rope.theta ** (-np.arange(0, dim, 2) / dim)
  turn = np.exp(1j * positions[:, None] * frequencies)[:, None]
  z = (x[..., 0:dim:2] + 1j * x[..., 1:dim:2]) * turn
  return np.concatenate([z.real, z.imag, x[..., dim:]], -1)


def by_formula(params, x):
  """Per-head keys and values, every pair's score, a mask from sorting."""
  kernel = lambda *path: np.asarray(
    jax.tree_util.tree_reduce(lambda a, b: b, _at(params, path))
  )
  positions = np.arange(TOKENS)
  heads, nope = SIZES.num_heads, SIZES.nope_dim
  weight = lambda name: np.asarray(params[name]["weight"])
  c_q = rms(x @ kernel("q_a_proj"), weight("q_a_norm"), 1e-6)
  q = (c_q @ kernel("q_b_proj")).reshape(TOKENS, heads, -1)
  q_nope, q_rope = q[..., :nope], interleaved(q[..., nope:], positions)
  compressed = x @ kernel("kv_a_proj")
  latent = rms(compressed[:, : SIZES.latent_rank], weight("kv_a_norm"), 1e-6)
  k_rope = interleaved(compressed[:, None, SIZES.latent_rank :], positions)
  kv = (latent @ kernel("kv_b_proj")).reshape(TOKENS, heads, -1)
  k_nope, v = kv[..., :nope], kv[..., nope:]

  index = params["indexer"]
  index_kernel = lambda name: np.asarray(index[name]["kernel"])
  q_index = (c_q @ index_kernel("q_b_proj")).reshape(
    TOKENS, SIZES.index_heads, SIZES.index_dim
  )
  q_index = interleaved(q_index, positions)
  k_index = x @ index_kernel("k_proj")
  k_index = k_index - k_index.mean(-1, keepdims=True)
  k_index = k_index / np.sqrt((k_index**2).mean(-1, keepdims=True) + 1e-6)
  k_index = k_index * np.asarray(index["k_norm"]["weight"]) + np.asarray(
    index["k_norm"]["bias"]
  )
  k_index = interleaved(k_index[:, None], positions)[:, 0]
  w = x @ index_kernel("weights_proj") * SIZES.index_heads**-0.5
  dots = np.einsum("tnj,sj->tns", q_index, k_index) * SIZES.index_dim**-0.5
  scores = np.einsum("tn,tns->ts", w, np.maximum(dots, 0))

  out = np.zeros((TOKENS, heads, SIZES.value_dim))
  for t in range(TOKENS):
    order = np.argsort(-scores[t, : t + 1], kind="stable")
    ranked = scores[t, order]
    if t >= SIZES.index_topk:
      cut = ranked[SIZES.index_topk - 1] - ranked[SIZES.index_topk]
      assert cut > 1e-6, "no gap at the cut: the test would prove nothing"
    chosen = order[: SIZES.index_topk]
    for n in range(heads):
      products = k_nope[chosen, n] @ q_nope[t, n]
      products = products + k_rope[chosen, 0] @ q_rope[t, n]
      weights = np.exp(products * (nope + SIZES.rope.dim) ** -0.5)
      out[t, n] = weights @ v[chosen, n] / weights.sum()
  return out.reshape(TOKENS, -1) @ kernel("o_proj")


def _at(params, path):
  for name in path:
    params = params[name]
  return params


class LatentAttentionTest(absltest.TestCase):
  def test_equals_expanded_keys_and_a_sorted_index(self):
    """Fault 17: fewer keys than tokens, both rotary conventions."""
    random = np.random.default_rng(0)
    mixer = MIXERS["latent_attention"](CONFIG)
    x = random.normal(size=(TOKENS, CONFIG.embed_dim))
    span = Span(positions=jnp.arange(TOKENS), length=jnp.int32(TOKENS))
    state = State(pages=(), carry={})
    params = jax.jit(mixer.init)(jax.random.key(0), x, span, state)["params"]
    params = jax.tree.map(
      lambda x: x + 0.1 * random.normal(size=x.shape), params
    )
    y, _ = jax.jit(mixer.apply)({"params": params}, x, span, state)
    # Rotary angles are float32 products.
    np.testing.assert_allclose(y, by_formula(params, x), atol=2e-6)

  def test_a_shared_layer_alone_is_refused(self):
    mixer = MIXERS["shared_latent_attention"](CONFIG)
    x = jnp.zeros((2, CONFIG.embed_dim))
    span = Span(positions=jnp.arange(2), length=jnp.int32(2))
    state = State(pages=(), carry={})
    params = mixer.init(jax.random.key(0), x, span, state)
    with self.assertRaisesRegex(ValueError, "no layer with one below it"):
      mixer.apply(params, x, span, state)


class NormTest(parameterized.TestCase):
  """Inputs of 1e-3 have a mean square of eps: where eps stands, shows."""

  @parameterized.parameters(1e-6, 1e-5)
  def test_plain(self, eps):
    x = 1e-3 * np.random.default_rng(0).normal(size=(3, 8))
    weight = np.linspace(0.5, 1.5, 8)
    norm = RMSNorm(eps, "float64")
    found = norm.apply({"params": {"weight": weight}}, x)
    np.testing.assert_allclose(found, rms(x, weight, eps), rtol=1e-12)

  def test_layer_norm(self):
    x = 1e-3 * np.random.default_rng(0).normal(size=(3, 8)) + 0.1
    weight, bias = np.linspace(0.5, 1.5, 8), np.linspace(-1, 1, 8)
    norm = LayerNorm(1e-6, "float64")
    found = norm.apply({"params": {"weight": weight, "bias": bias}}, x)
    centred = x - x.mean(-1, keepdims=True)
    scale = np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-6)
    wanted = centred / scale * weight + bias
    np.testing.assert_allclose(found, wanted, rtol=1e-12)

  def test_latents_have_an_eps_of_their_own(self):
    """1e-6 where the other norms of GLM have 1e-5."""
    self.assertEqual((SIZES.latent_eps, CONFIG.norm_eps), (1e-6, 1e-5))


if __name__ == "__main__":
  absltest.main()
