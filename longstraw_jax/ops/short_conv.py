"""Causal depthwise convolution over a few taps, with the carry it needs."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def short_conv(
  x_TU: Float[Array, "T U"],
  taps_WU: Float[Array, "W U"],
  tail: Float[Array, "W-1 U"],
  length: Int[Array, ""],
) -> tuple[Float[Array, "T U"], Float[Array, "W-1 U"]]:
  """y_t = sum_j taps[j] * x[t - W + 1 + j]; the last tap sees the token itself.

  Args:
    x_TU: raw inputs; the first `length` are real.
    taps_WU: one column of taps per channel.
    tail: the raw inputs before this call, oldest first.
    length: real tokens of this call, 0 to T.

  Returns:
    The outputs and the tail after `length` tokens. The tail is cut out of the
    old tail and the new inputs together, so a call may be shorter than the
    taps.
  """
  width = taps_WU.shape[0]
  tokens = x_TU.shape[0]
  inputs = jnp.concatenate([tail.astype(x_TU.dtype), x_TU])
  y_TU = sum(taps_WU[j] * inputs[j : j + tokens] for j in range(width))
  tail = jax.lax.dynamic_slice_in_dim(inputs, length, width - 1)
  return y_TU, tail
