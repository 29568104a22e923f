"""What "float32" means throughout the package."""

import functools

import jax
from jax import lax
import jax.numpy as jnp


def wide_dtype(dtype) -> jnp.dtype:
  """float32, or the dtype itself where it is wider."""
  dtype = jnp.dtype(dtype)
  if dtype.itemsize == 1 and jnp.issubdtype(dtype, jnp.floating):
    return jnp.dtype(jnp.float32)  # 8-bit floats promote to nothing
  return jnp.promote_types(dtype, jnp.float32)


def widen(x):
  """Casts an array to float32 or wider."""
  return x.astype(wide_dtype(x.dtype))


def wide_einsum(spec: str, a, b):
  """An einsum of two arrays as they are, summed in float32 or wider.

  XLA:CPU has no product of bfloat16 with a float32 result; there the inputs
  are cast first.
  """
  wide = wide_dtype(jnp.promote_types(a.dtype, b.dtype))
  mixed = functools.partial(jnp.einsum, spec, preferred_element_type=wide)
  if a.dtype == b.dtype == wide:
    return mixed(a, b)
  cast = lambda a, b: jnp.einsum(spec, a.astype(wide), b.astype(wide))
  return lax.platform_dependent(a, b, cpu=cast, default=mixed)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _rounded_einsum(spec, dtype, a, b):
  return wide_einsum(spec, a.astype(dtype), b)


def _rounded_einsum_fwd(spec, dtype, a, b):
  a = a.astype(dtype)
  return wide_einsum(spec, a, b), (a, b)


def _rounded_einsum_bwd(spec, dtype, saved, cotangent):
  a, b = saved
  inputs, output = spec.split("->")
  left, right = inputs.split(",")
  da = wide_einsum(f"{output},{right}->{left}", cotangent, b)
  db = wide_einsum(f"{left},{output}->{right}", a, cotangent)
  return da, db.astype(b.dtype)


_rounded_einsum.defvjp(_rounded_einsum_fwd, _rounded_einsum_bwd)


def rounded_einsum(spec: str, dtype, a, b):
  """wide_einsum of a wide `a`, rounded for it, whose gradient stays wide.

  Every letter of the spec stands in two of its three terms.
  """
  if jnp.dtype(dtype) == a.dtype:
    return wide_einsum(spec, a, b)
  return _rounded_einsum(spec, dtype, a, b)
