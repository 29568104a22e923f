"""The gated delta rule, token by token and in chunks.

Yang et al., "Gated Delta Networks" (2412.06464), section 3. With a state S of
shape [J, H] per head, log decay g <= 0 and write strength beta:

  S <- exp(g_t) S
  S <- S + k_t beta_t (v_t - S^T k_t)^T
  o_t = S^T q_t

Both forms work in float32 or wider and leave S untouched where q, k, v, beta
and g are all zero, which is how padding is written.
"""

import math

import jax
from jax import lax
import jax.numpy as jnp
from jaxtyping import Array, Float

from longstraw_jax.ops.precision import widen


def delta_rule_recurrent(
  q_TNJ: Float[Array, "T N J"],
  k_TNJ: Float[Array, "T N J"],
  v_TNH: Float[Array, "T N H"],
  beta_TN: Float[Array, "T N"],
  g_TN: Float[Array, "T N"],
  state_NJH: Float[Array, "N J H"],
) -> tuple[Float[Array, "T N H"], Float[Array, "N J H"]]:
  """The recurrence as it is defined: the form to read and to test against."""

  def token(state, inputs):
    q, k, v, beta, g = inputs
    state = jnp.exp(g)[:, None, None] * state
    delta = beta[:, None] * (v - jnp.einsum("njh,nj->nh", state, k))
    state = state + jnp.einsum("nj,nh->njh", k, delta)
    return state, jnp.einsum("njh,nj->nh", state, q)

  inputs = jax.tree.map(widen, (q_TNJ, k_TNJ, v_TNH, beta_TN, g_TN))
  state_NJH, o_TNH = jax.lax.scan(token, widen(state_NJH), inputs)
  return o_TNH, state_NJH


def _inverse(a: Float[Array, "... C C"]) -> Float[Array, "... C C"]:
  """(I + A)^-1 of strictly lower A; C is a power of two.

  Halves: [[X, 0], [-Y A_21 X, Y]] with X, Y the inverses of the diagonal
  blocks, which is as stable as forward substitution. Blocks of 8 use
  (I - A)(I + A^2)(I + A^4), exact because A^8 = 0; for a whole chunk that
  product would cancel catastrophically when keys repeat.
  """
  size = a.shape[-1]
  if size <= 8:
    inverse, power, reach = jnp.eye(size, dtype=a.dtype) - a, a @ a, 2
    while reach < size:
      inverse, power = inverse + inverse @ power, power @ power
      reach *= 2
    return inverse
  half = size // 2
  x, y = _inverse(jnp.stack([a[..., :half, :half], a[..., half:, half:]]))
  corner = -y @ (a[..., half:, :half] @ x)
  top = jnp.concatenate([x, jnp.zeros_like(x)], axis=-1)
  return jnp.concatenate([top, jnp.concatenate([corner, y], axis=-1)], axis=-2)


@jax.custom_vjp
def unit_lower_inverse(
  a: Float[Array, "... C C"],
) -> Float[Array, "... C C"]:
  """(I + A)^-1 of a strictly lower triangular A of any size, by products.

  LAPACK's triangular solve gives the same, but its threads stall for
  milliseconds on a busy machine and its gradient takes two more solves.
  """
  size = a.shape[-1]
  padding = (1 << (size - 1).bit_length()) - size
  padded = jnp.pad(a, [(0, 0)] * (a.ndim - 2) + [(0, padding)] * 2)
  return _inverse(padded)[..., :size, :size]


def _unit_lower_inverse_fwd(a):
  inverse = unit_lower_inverse(a)
  return inverse, inverse


def _unit_lower_inverse_bwd(inverse, cotangent):
  transposed = jnp.swapaxes(inverse, -1, -2)
  return (-jnp.tril(transposed @ (cotangent @ transposed), -1),)


unit_lower_inverse.defvjp(_unit_lower_inverse_fwd, _unit_lower_inverse_bwd)


def _chunk_decays(g):
  """Decay from entry to each token, [..., C], and between two, [..., C, C].

  A sum over a part of a chunk is the difference of two sums from its start,
  whose digits a strong gate would take. So gates stop where exp is 0 anyway
  and are split: multiples of a power of two that sum without rounding, and
  remainders too small to lose anything.
  """
  size, kind = g.shape[-1], jnp.finfo(g.dtype)
  floor = math.floor(math.log(float(kind.smallest_subnormal))) - 1
  step = 2.0 ** math.ceil(math.log2(-floor * size)) * float(kind.eps)
  g = jnp.maximum(g, floor)
  coarse = jnp.round(g / step) * step
  sums = jnp.cumsum(coarse, axis=-1), jnp.cumsum(g - coarse, axis=-1)
  gaps = sum(x[..., :, None] - x[..., None, :] for x in sums)
  lower = jnp.tril(jnp.ones((size, size), bool))
  # Masked before the exponential: above the diagonal it would overflow.
  between = jnp.where(lower, jnp.exp(jnp.where(lower, gaps, 0.0)), 0.0)
  return jnp.exp(sum(sums)), between


@jax.custom_vjp
def chunk_decays(
  g: Float[Array, "... C"],
) -> tuple[Float[Array, "... C"], Float[Array, "... C C"]]:
  """exp(g_1 + ... + g_i), and exp(g_{j+1} + ... + g_i) for j <= i, else 0.

  For any log decay down to -inf, where its gradient is 0.
  """
  return _chunk_decays(g)


def _chunk_decays_fwd(g):
  decays = _chunk_decays(g)
  return decays, decays


def _chunk_decays_bwd(decays, cotangents):
  """A gate's gradient sums over the pairs that it lies between, and no others.

  As the difference of sums over all pairs it would be lost in those where no
  decay stands between.
  """
  entry, between = (x * dx for x, dx in zip(decays, cotangents, strict=True))
  upper = jnp.triu(jnp.ones(between.shape[-2:], between.dtype), 1)
  # [i, l]: of the pairs (i, j) with j < l.
  before = jnp.matmul(between, upper, precision=lax.Precision.HIGHEST)
  dg = jnp.tril(before).sum(-2) + lax.cumsum(entry, entry.ndim - 1, True)
  return (dg,)


chunk_decays.defvjp(_chunk_decays_fwd, _chunk_decays_bwd)


def delta_rule_chunked(
  q_TNJ: Float[Array, "T N J"],
  k_TNJ: Float[Array, "T N J"],
  v_TNH: Float[Array, "T N H"],
  beta_TN: Float[Array, "T N"],
  g_TN: Float[Array, "T N"],
  state_NJH: Float[Array, "N J H"],
  block: int = 64,
) -> tuple[Float[Array, "T N H"], Float[Array, "N J H"]]:
  """The same in matrix products: the WY form over chunks of `block` tokens.

  Inside a chunk the writes u_t = beta_t (v_t - S^T k_t) solve a unit lower
  triangular system; between chunks only S is handed on. Written here for one
  chunk with entry state S and G_i = g_1 + ... + g_i:

    A_ij = beta_i (k_i . k_j) exp(G_i - G_j)          for j < i
    (I + A) [U W] = [diag(beta) V, diag(beta exp(G)) K]
    D = U - W S
    O_i = exp(G_i) S^T q_i + sum_{j <= i} exp(G_i - G_j) (q_i . k_j) D_j
    S' = exp(G_C) S + sum_j exp(G_C - G_j) k_j D_j^T
  """
  tokens = q_TNJ.shape[0]
  block = min(block, tokens)
  padding = -tokens % block

  def chunks(x):
    x = jnp.pad(widen(x), ((0, padding),) + ((0, 0),) * (x.ndim - 1))
    x = x.reshape(-1, block, *x.shape[1:])
    return jnp.swapaxes(x, 1, 2)  # [chunks, N, C, ...]

  q, k, v, beta, g = map(chunks, (q_TNJ, k_TNJ, v_TNH, beta_TN, g_TN))
  entry, decay = chunk_decays(g)
  beta, entry = beta[..., None], entry[..., None]
  keys = jnp.einsum("cnij,cnkj->cnik", k, k)
  system = jnp.tril(beta * keys * decay, -1)
  right = jnp.concatenate([beta * v, beta * entry * k], axis=-1)
  solved = unit_lower_inverse(system) @ right
  u, w = jnp.split(solved, (v.shape[-1],), axis=-1)
  scores = jnp.einsum("cnij,cnkj->cnik", q, k) * decay
  exit_keys = decay[..., -1, :, None] * k

  def chunk(state, inputs):
    u, w, scores, q_in, k_out, last = inputs
    delta = u - w @ state
    o = q_in @ state + scores @ delta
    state = last[..., None] * state + jnp.swapaxes(k_out, 1, 2) @ delta
    return state, o

  inputs = (u, w, scores, entry * q, exit_keys, entry[..., -1, :])
  state_NJH, o = jax.lax.scan(chunk, widen(state_NJH), inputs)
  o_TNH = jnp.swapaxes(o, 1, 2).reshape(tokens + padding, *v_TNH.shape[1:])
  return o_TNH[:tokens], state_NJH
