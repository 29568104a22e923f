"""What "float32" means throughout the package."""

import jax.numpy as jnp


def wide_dtype(dtype) -> jnp.dtype:
  """float32, or the dtype itself where it is wider."""
  return jnp.promote_types(dtype, jnp.float32)


def widen(x):
  """Casts an array to float32 or wider."""
  return x.astype(wide_dtype(x.dtype))
