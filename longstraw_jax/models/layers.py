"""Token-wise modules: norms and feed-forward."""

import flax.linen as nn
import jax
from jax.ad_checkpoint import checkpoint_name
import jax.numpy as jnp
from jaxtyping import Array, Float

from longstraw_jax.ops.precision import widen
from longstraw_jax.sharding import constrain

# Name of linear maps' outputs for checkpoint policies: the sum with an
# adapter's, which is all that follows needs.
PROJECTION = "projection"


def weight(module: nn.Module, name: str, init, shape, dtype: str):
  """A parameter of a module, taken as it is where it exists.

  So a stored form with other leaves (see longstraw_jax.nf4) may stand in the
  array's place. Who multiplies by it expands it, see `expanded`: layer by
  layer inside the scan over layers, expert by expert in their loop.
  """
  if not module.has_variable("params", name):
    return module.param(name, init, shape, dtype)
  return module.get_variable("params", name)


def beside(name: str) -> str:
  """The dict with the adapter of a parameter that is no map's kernel."""
  return f"{name}_lora"


def expanded(stored) -> Array:
  """A parameter as an array, however it is stored."""
  return stored.expand() if hasattr(stored, "expand") else stored


class Linear(nn.Module):
  """x W + b, and beside it a low-rank adapter where its leaves exist.

  The leaves lora_a [D, r], lora_b [r, F] and lora_scale [] add
  lora_scale (x A) B (Hu et al., 2106.09685). They are put into the parameters
  by longstraw_jax.lora; the module only reads them.
  """

  features: int
  dtype: str
  param_dtype: str
  bias: bool = False

  def _kernel(self, inputs: int):
    """W as it is stored."""
    init = nn.initializers.lecun_normal()
    shape = (inputs, self.features)
    return weight(self, "kernel", init, shape, self.param_dtype)

  def _adapter(self):
    """A and B in the module's dtype and the scale as it is, or None."""
    if not self.has_variable("params", "lora_a"):
      return None
    a, b, scale = (
      self.get_variable("params", f"lora_{part}")
      for part in ("a", "b", "scale")
    )
    return a.astype(self.dtype), b.astype(self.dtype), scale

  @nn.compact
  def __call__(self, x: Float[Array, "... D"]) -> Float[Array, "... F"]:
    # On a mesh tokens stay where they are, and the kernel is gathered.
    stay = lambda x: constrain(x, "tokens", None) if x.ndim == 2 else x
    x = stay(x.astype(self.dtype))
    kernel = self._kernel(x.shape[-1])
    product = lambda x, kernel: x @ expanded(kernel).astype(self.dtype)
    if hasattr(kernel, "expand"):
      # The backward pass expands it again: kept, it would undo the saving.
      product = jax.checkpoint(product)
    y = product(x, kernel)
    adapter = self._adapter()
    if adapter is not None:
      a, b, scale = adapter
      y = y + (scale * widen(x @ a)).astype(self.dtype) @ b
    if self.bias:
      zeros = nn.initializers.zeros
      bias = self.param("bias", zeros, (self.features,), self.param_dtype)
      y = y + bias.astype(self.dtype)
    return checkpoint_name(stay(y), PROJECTION)

  @nn.compact
  def matrix(self, inputs: int) -> Float[Array, "D F"]:
    """W with the adapter added, for maps that are not applied as they stand."""
    kernel = expanded(self._kernel(inputs)).astype(self.dtype)
    adapter = self._adapter()
    if adapter is None:
      return kernel
    a, b, scale = adapter
    return kernel + (scale * widen(a @ b)).astype(self.dtype)


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


class RMSNorm(nn.Module):
  """RMSNorm with a plain weight: y = w cast(rms(x)).

  Llama, Qwen2/3 and GLM use it: normalised in float32 or wider, cast to the
  input's dtype, then weighted.
  """

  eps: float
  param_dtype: str

  @nn.compact
  def __call__(self, x: Float[Array, "... D"]) -> Float[Array, "... D"]:
    weight = self.param(
      "weight", nn.initializers.ones, (x.shape[-1],), self.param_dtype
    )
    y = rms_normalize(x, self.eps).astype(x.dtype)
    return weight.astype(x.dtype) * y


# By ModelConfig.norm.
NORMS = {"zero_centred": ZeroCentredRMSNorm, "plain": RMSNorm}


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
    linear = lambda width, name: Linear(
      width, self.dtype, self.param_dtype, name=name
    )
    gate = linear(self.hidden_dim, "gate_proj")(x_TD)
    up = linear(self.hidden_dim, "up_proj")(x_TD)
    return linear(x_TD.shape[-1], "down_proj")(jax.nn.silu(gate) * up)
