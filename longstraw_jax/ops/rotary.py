"""Rotary position embedding on part of each head (Su et al., 2104.09864)."""

import math

import jax.numpy as jnp
from jaxtyping import Array, Float, Int
import numpy as np

from longstraw_jax.config import RopeConfig


def _linear(base: np.ndarray, rope: RopeConfig) -> np.ndarray:
  """Positions divided by the factor (Chen et al., 2306.15595)."""
  return base / np.float32(rope.factor)


def _llama3(base: np.ndarray, rope: RopeConfig) -> np.ndarray:
  """Long wavelengths divided, short ones kept, a ramp between (Llama 3.1)."""
  turns = np.float32(rope.original_length) * base / np.float32(2 * math.pi)
  low, high = rope.low_freq_factor, rope.high_freq_factor
  kept = np.clip((turns - low) / (high - low), 0, 1).astype(np.float32)
  return (1 - kept) * base / np.float32(rope.factor) + kept * base


def _yarn(base: np.ndarray, rope: RopeConfig) -> np.ndarray:
  """Interpolation by parts (Peng et al., 2309.00071, section 3.2)."""

  def pair_of(turns: float) -> float:
    """The pair that turns so often over the original length."""
    ratio = rope.original_length / (2 * math.pi * turns)
    return rope.dim * math.log(ratio) / (2 * math.log(rope.theta))

  low = max(math.floor(pair_of(rope.beta_fast)), 0)
  high = min(math.ceil(pair_of(rope.beta_slow)), rope.dim - 1)
  span = high - low if high != low else 1e-3
  ramp = np.clip((np.arange(base.size, dtype=np.float32) - low) / span, 0, 1)
  return base / np.float32(rope.factor) * ramp + base * (1 - ramp)


_SCALINGS = {
  "none": lambda base, rope: base,
  "linear": _linear,
  "llama3": _llama3,
  "yarn": _yarn,
}


def rotary_frequencies(rope: RopeConfig) -> np.ndarray:
  """[dim / 2] float32 radians per position, theta^(-2j / dim) scaled.

  Computed in float32 as the reference implementations do: at 2^20 positions
  another rounding of a frequency is another angle.
  """
  pairs = np.arange(0, rope.dim, 2, dtype=np.float32)
  base = np.float32(1) / np.float32(rope.theta) ** (
    pairs / np.float32(rope.dim)
  )
  return _SCALINGS[rope.scaling](base, rope).astype(np.float32)


# Integers that float32 holds exactly; beyond, the reference turns by the angle
# of a neighbouring position.
_EXACT = 2**24


def _turn(angles: np.ndarray) -> np.ndarray:
  """Angles modulo a full turn, of which uint32 counts 2^-32 parts."""
  parts = np.rint(np.mod(angles / (2 * math.pi), 1) * 2**32)
  return (parts.astype(np.uint64) % 2**32).astype(np.uint32)


def _split_product(
  positions: Int[Array, "T"], frequencies: np.ndarray
) -> Float[Array, "T half"]:
  """Position times frequency modulo a full turn, in float32 radians.

  With p = 2^12 a + b the products of a with 2^12 turns and of b with one wrap
  as the angle does. Off by at most (a + b) 2^-33 turns: 1e-5 radians at 2^25.
  """
  frequencies = frequencies.astype(np.float64)
  high, low = _turn(2**12 * frequencies), _turn(frequencies)
  a, b = positions >> 12, positions & (2**12 - 1)
  unsigned = lambda x: x.astype(jnp.uint32)[:, None]
  turns = (unsigned(a) * high + unsigned(b) * low).astype(jnp.int32)
  return turns.astype(jnp.float32) * np.float32(2 * math.pi / 2**32)


def rotary_tables(
  positions: Int[Array, "T"], rope: RopeConfig, dtype
) -> tuple[Float[Array, "T half"], Float[Array, "T half"]]:
  """Cosine and sine of position times frequency, times rope.magnitude.

  Angles are float32 products whatever the dtype, as in the reference
  implementations; only then are the tables cast to `dtype`. Above position
  2^24, where float32 skips integers, the product is split (_split_product).
  """
  frequencies = rotary_frequencies(rope)
  angles = positions.astype(jnp.float32)[:, None] * frequencies
  far = _split_product(positions, frequencies)
  angles = jnp.where(positions[:, None] > _EXACT, far, angles)
  scale = jnp.float32(rope.magnitude)
  return (
    (jnp.cos(angles) * scale).astype(dtype),
    (jnp.sin(angles) * scale).astype(dtype),
  )


def _rotate(a, b, rest, cos, sin):
  cos, sin = cos[:, None], sin[:, None]
  return jnp.concatenate([a * cos - b * sin, b * cos + a * sin, rest], axis=-1)


def rotate_half(
  x_TNH: Float[Array, "T N H"],
  cos: Float[Array, "T half"],
  sin: Float[Array, "T half"],
) -> Float[Array, "T N H"]:
  """Rotates the first 2 half dims of each head; dim j pairs with j + half."""
  half = cos.shape[-1]
  a, b, rest = jnp.split(x_TNH, (half, 2 * half), axis=-1)
  return _rotate(a, b, rest, cos, sin)


def rotate_interleaved(
  x_TNH: Float[Array, "T N H"],
  cos: Float[Array, "T half"],
  sin: Float[Array, "T half"],
) -> Float[Array, "T N H"]:
  """Rotates the first 2 half dims of each head; dim 2j pairs with 2j + 1.

  The result is stored de-interleaved, all first components before all second
  ones, as GLM's cache holds it; products of two such heads do not depend on
  the order.
  """
  half = cos.shape[-1]
  turned, rest = x_TNH[..., : 2 * half], x_TNH[..., 2 * half :]
  return _rotate(turned[..., 0::2], turned[..., 1::2], rest, cos, sin)
