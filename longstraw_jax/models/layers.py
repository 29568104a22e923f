"""Token-wise modules: norms and feed-forward."""

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from longstraw_jax.ops.precision import widen


def dense(features: int, dtype: str, param_dtype: str, name: str) -> nn.Dense:
  """A linear map without bias; weights normal with variance 1 / fan-in."""
  return nn.Dense(
    features,
    use_bias=False,
    dtype=dtype,
    param_dtype=param_dtype,
    kernel_init=nn.initializers.lecun_normal(),
    name=name,
  )


def rms_normalize(
  x: Float[Array, "... D"], eps: float
) -> Float[Array, "... D"]:
  """x / sqrt(mean(x^2) + eps) in float32 or wider, not cast back."""
  x = widen(x)
  return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + eps)


class ZeroCentredRMSNorm(nn.Module):
  """RMSNorm whose weight is stored around 0: y = rms(x) (1 + w).

  Qwen3.5/3.6 use it for layer, final, query and key norms; everything is
  float32 or wider until one cast at the end.
  """

  eps: float
  param_dtype: str

  @nn.compact
  def __call__(self, x: Float[Array, "... D"]) -> Float[Array, "... D"]:
    weight = self.param(
      "weight", nn.initializers.zeros, (x.shape[-1],), self.param_dtype
    )
    return (rms_normalize(x, self.eps) * (1.0 + widen(weight))).astype(x.dtype)


class GatedRMSNorm(nn.Module):
  """RMSNorm with a plain weight, then a SiLU gate: y = (rms(x) w) silu(z).

  The output norm of the gated delta mixer; normalised in float32, cast,
  weighted, gated in float32 and cast again, as the reference does.
  """

  eps: float
  param_dtype: str

  @nn.compact
  def __call__(
    self, x: Float[Array, "... H"], z: Float[Array, "... H"]
  ) -> Float[Array, "... H"]:
    weight = self.param(
      "weight", nn.initializers.ones, (x.shape[-1],), self.param_dtype
    )
    y = rms_normalize(x, self.eps).astype(z.dtype) * weight.astype(z.dtype)
    gate = jax.nn.silu(widen(z))
    return (y * gate).astype(z.dtype)


class SwiGLU(nn.Module):
  """down(silu(gate(x)) * up(x))."""

  hidden_dim: int
  dtype: str
  param_dtype: str

  @nn.compact
  def __call__(self, x_TD: Float[Array, "T D"]) -> Float[Array, "T D"]:
    linear = lambda width, name: dense(
      width, self.dtype, self.param_dtype, name
    )
    gate = linear(self.hidden_dim, "gate_proj")(x_TD)
    up = linear(self.hidden_dim, "up_proj")(x_TD)
    return linear(x_TD.shape[-1], "down_proj")(jax.nn.silu(gate) * up)
