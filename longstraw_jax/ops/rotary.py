"""Rotary position embedding on part of each head (Su et al., 2104.09864)."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def rotary_tables(
  positions: Int[Array, "T"], rotary_dim: int, theta: float, dtype
) -> tuple[Float[Array, "T half"], Float[Array, "T half"]]:
  """Cosine and sine of position times frequency theta^(-2j / rotary_dim).

  Angles are float32 products whatever the dtype, as in the reference
  implementations of Qwen and GLM; only then are the tables cast to `dtype`.
  """
  pairs = jnp.arange(0, rotary_dim, 2, dtype=jnp.float32)
  frequencies = jnp.float32(theta) ** (-pairs / rotary_dim)
  angles = positions.astype(jnp.float32)[:, None] * frequencies
  return jnp.cos(angles).astype(dtype), jnp.sin(angles).astype(dtype)


def rotate_half(
  x_TNH: Float[Array, "T N H"],
  cos: Float[Array, "T half"],
  sin: Float[Array, "T half"],
) -> Float[Array, "T N H"]:
  """Rotates the first 2 half dims of each head; dim j pairs with j + half."""
  half = cos.shape[-1]
  cos, sin = cos[:, None], sin[:, None]
  a, b, rest = jnp.split(x_TNH, (half, 2 * half), axis=-1)
  return jnp.concatenate([a * cos - b * sin, b * cos + a * sin, rest], axis=-1)
