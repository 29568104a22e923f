"""Gated DeltaNet mixer of Qwen3.5/3.6: short convolution, delta rule, gate."""

from typing import ClassVar

from flax import struct
import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from longstraw_jax.config import DeltaConfig
from longstraw_jax.models.contract import Shapes, State, Update
from longstraw_jax.models.layers import GatedRMSNorm, Linear
from longstraw_jax.ops.delta_rule import delta_rule_chunked
from longstraw_jax.ops.precision import wide_dtype, widen
from longstraw_jax.ops.short_conv import short_conv
from longstraw_jax.sharding import constrain
from longstraw_jax.types import Span

L2_EPS = 1e-6
MAX_A_LOG = 80.0  # an infinite rate has no gradient, and times 0 no value


@struct.dataclass
class DeltaCarry:
  """Fixed-size state of one gated delta mixer."""

  matrix: Float[Array, "N J H"]  # float32 or wider: sums over the whole context
  conv_tail: Float[Array, "W-1 U"]  # last raw inputs of the short convolution


def _log_uniform_decay(key, shape, dtype):
  """A_log with decay rates uniform in [1, 16], as Mamba 2 starts."""
  return jnp.log(jax.random.uniform(key, shape, dtype, 1.0, 16.0))


def _inverse_softplus_step(key, shape, dtype):
  """dt_bias with softplus(dt_bias) log-uniform in [1e-3, 1e-1]."""
  low, high = jnp.log(1e-3), jnp.log(1e-1)
  step = jnp.exp(jax.random.uniform(key, shape, jnp.float32, low, high))
  return (step + jnp.log(-jnp.expm1(-step))).astype(dtype)


def _unit_length(x_TNJ):
  """x / sqrt(|x|^2 + eps) over the head width, in float32 or wider."""
  x = widen(x_TNJ)
  return x * jax.lax.rsqrt((x * x).sum(-1, keepdims=True) + L2_EPS)


class GatedDelta(nn.Module):
  """A gated delta rule per value head, fed by a short convolution.

  Projections: [q of all heads; k of all heads; v of all heads], z, b and a.
  beta = sigmoid(b), g = -exp(A_log) softplus(a + dt_bias); q and k are brought
  to unit length, q divided by sqrt(J); key head i serves N_value / N_key
  consecutive value heads. No positions, no rows; see DeltaCarry.
  """

  sizes: DeltaConfig
  norm_eps: float
  delta_block: int
  dtype: str
  param_dtype: str

  # Decay rates are exponentials of the first two: half a unit of bfloat16 at
  # A_log = 2.7 is 0.8 % of them.
  precise: ClassVar[tuple[str, ...]] = ("A_log", "dt_bias", "norm/")

  @nn.compact
  def __call__(
    self, x_TD: Float[Array, "T D"], span: Span, state: State
  ) -> tuple[Float[Array, "T D"], Update]:
    sizes = self.sizes
    tokens = x_TD.shape[0]
    value_width = sizes.num_value_heads * sizes.value_dim
    linear = lambda width, name: Linear(
      width, self.dtype, self.param_dtype, name=name
    )
    qkv_TU = linear(sizes.conv_channels, "in_proj_qkv")(x_TD)
    z = linear(value_width, "in_proj_z")(x_TD)
    beta_TN, g_TN = self._gates(x_TD, linear, span.mask[:, None])

    taps = self.param(
      "conv",
      nn.initializers.normal(sizes.conv_width**-0.5),
      (sizes.conv_width, sizes.conv_channels),
      self.param_dtype,
    )
    convolved, tail = self._convolve(
      qkv_TU, taps.astype(qkv_TU.dtype), state.carry.conv_tail, span.length
    )
    q, k, v = self._heads(convolved, span.mask[:, None, None])
    q, k, v = (constrain(x, None, "heads", None) for x in (q, k, v))
    beta_TN, g_TN = (constrain(x, None, "heads") for x in (beta_TN, g_TN))
    o_TNH, matrix = delta_rule_chunked(
      q, k, v, beta_TN, g_TN, state.carry.matrix, self.delta_block
    )
    o_TNH = constrain(o_TNH, None, "heads", None)
    o_TNH = constrain(o_TNH, "tokens", None, None)
    z_TNH = z.reshape(tokens, sizes.num_value_heads, sizes.value_dim)
    y_TNH = GatedRMSNorm(self.norm_eps, self.param_dtype, name="norm")(
      o_TNH, z_TNH
    )
    matrix = constrain(matrix, "heads", None, None)
    y_TD = linear(x_TD.shape[-1], "out_proj")(y_TNH.reshape(tokens, -1))
    carry = DeltaCarry(matrix=matrix, conv_tail=tail)
    taps = tuple(segment.tap for segment in state.pages)
    return y_TD, Update(rows={}, carry=carry, taps=taps)

  def _gates(self, x_TD, linear, mask):
    """Write strength and log decay per value head; padding gets zeros."""
    heads = (self.sizes.num_value_heads,)
    a_log = self.param("A_log", _log_uniform_decay, heads, self.param_dtype)
    dt_bias = self.param(
      "dt_bias", _inverse_softplus_step, heads, self.param_dtype
    )
    b = widen(linear(*heads, "in_proj_b")(x_TD))
    a = widen(linear(*heads, "in_proj_a")(x_TD))
    rate = jnp.exp(jnp.minimum(widen(a_log), MAX_A_LOG))
    g = -rate * jax.nn.softplus(a + widen(dt_bias))
    return jnp.where(mask, jax.nn.sigmoid(b), 0.0), jnp.where(mask, g, 0.0)

  def _convolve(self, qkv_TU, taps_WU, tail, length):
    """q, k and v [T, heads * width] after taps and SiLU, and the new tail."""
    sizes = self.sizes
    keys = sizes.num_key_heads * sizes.key_dim
    split = lambda x: jnp.split(x, (keys, 2 * keys), axis=-1)
    numbers = (sizes.num_key_heads, sizes.num_key_heads, sizes.num_value_heads)
    parts = zip(numbers, *map(split, (qkv_TU, taps_WU, tail)), strict=True)
    convolved, tails = [], []
    for number, x, taps, own in parts:
      # From tokens to heads: what follows runs whole on a head's device.
      x = constrain(x, "tokens", None)
      x_TNH = x.reshape(x.shape[0], number, -1)
      x_TNH = constrain(x_TNH, None, "heads", None)
      y, own = short_conv(x_TNH.reshape(x.shape), taps, own, length)
      convolved.append(jax.nn.silu(y))
      tails.append(own)
    return convolved, jnp.concatenate(tails, axis=-1)

  def _heads(self, convolved, mask):
    """Heads of q, k and v; key heads repeat for their value heads."""
    sizes = self.sizes
    heads = lambda x, number: x.reshape(x.shape[0], number, -1)
    q, k, v = convolved
    repeats = sizes.num_value_heads // sizes.num_key_heads
    repeat = lambda x: jnp.repeat(
      _unit_length(heads(x, sizes.num_key_heads)), repeats, axis=1
    )
    q, k = repeat(q) * sizes.key_dim**-0.5, repeat(k)
    v = widen(heads(v, sizes.num_value_heads))
    return tuple(jnp.where(mask, x, 0.0) for x in (q, k, v))

  @nn.nowrap
  def state_shapes(self, tokens: int, dtype: str) -> Shapes:
    """No rows; the recurrent matrix and the convolution's tail."""
    del tokens  # the state does not grow
    sizes = self.sizes
    matrix = (sizes.num_value_heads, sizes.key_dim, sizes.value_dim)
    tail = (sizes.conv_width - 1, sizes.conv_channels)
    carry = DeltaCarry(
      matrix=jax.ShapeDtypeStruct(matrix, wide_dtype(dtype)),
      conv_tail=jax.ShapeDtypeStruct(tail, jnp.dtype(dtype)),
    )
    return {}, carry
