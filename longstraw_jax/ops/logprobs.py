"""Log-probabilities and entropy of a token block, never holding [R, V]."""

import functools

import jax
from jax import lax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from longstraw_jax.ops.precision import wide_einsum, widen
from longstraw_jax.sharding import constrain


def logits_of(
  hidden_TD: Float[Array, "T D"], head_DV: Float[Array, "D V"]
) -> Float[Array, "T V"]:
  """Logits in float32 or wider; the product keeps its inputs' dtype."""
  return wide_einsum("td,dv->tv", hidden_TD, head_DV)


def token_logprobs_reference(
  hidden_TD: Float[Array, "T D"],
  head_DV: Float[Array, "D V"],
  targets_T: Int[Array, "T"],
) -> tuple[Float[Array, "T"], Float[Array, "T"]]:
  """log softmax(h W)[target] and the entropy of softmax(h W), all at once."""
  logits_TV = constrain(logits_of(hidden_TD, head_DV), None, "vocab")
  logp_TV = jax.nn.log_softmax(logits_TV)
  logprobs = jnp.take_along_axis(logp_TV, targets_T[:, None], -1)[:, 0]
  entropy = -(jnp.exp(logp_TV) * logp_TV).sum(-1)
  return logprobs, entropy


def _blocked(block: int, *arrays):
  """Pads the token axis to a multiple of block and splits it."""
  tokens = arrays[0].shape[0]
  padding = -tokens % block

  def split(x):
    x = jnp.pad(x, ((0, padding),) + ((0, 0),) * (x.ndim - 1))
    return x.reshape(-1, block, *x.shape[1:])

  return tuple(map(split, arrays))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _blocked_logprobs(block, hidden_TD, head_DV, targets_T):
  tokens = hidden_TD.shape[0]
  one = lambda xs: token_logprobs_reference(xs[0], head_DV, xs[1])
  out = lax.map(one, _blocked(block, hidden_TD, targets_T))
  return jax.tree.map(lambda x: x.reshape(-1)[:tokens], out)


def _blocked_fwd(block, hidden_TD, head_DV, targets_T):
  out = _blocked_logprobs(block, hidden_TD, head_DV, targets_T)
  return out, (hidden_TD, head_DV, targets_T)


def _blocked_bwd(block, residuals, cotangents):
  hidden_TD, head_DV, targets_T = residuals
  tokens = hidden_TD.shape[0]

  def one(dhead, inputs):
    hidden, targets, *cotangent = inputs
    call = lambda h, w: token_logprobs_reference(h, w, targets)
    _, pull_back = jax.vjp(call, hidden, head_DV)
    dhidden, dhead_block = pull_back(tuple(cotangent))
    return dhead + dhead_block.astype(dhead.dtype), dhidden

  inputs = _blocked(block, hidden_TD, targets_T, *cotangents)
  dhead, dhidden = lax.scan(one, jnp.zeros_like(widen(head_DV)), inputs)
  dhidden = dhidden.reshape(-1, hidden_TD.shape[1])[:tokens]
  return dhidden, dhead.astype(head_DV.dtype), None


_blocked_logprobs.defvjp(_blocked_fwd, _blocked_bwd)


def token_logprobs(
  hidden_TD: Float[Array, "T D"],
  head_DV: Float[Array, "D V"],
  targets_T: Int[Array, "T"],
  block: int,
) -> tuple[Float[Array, "T"], Float[Array, "T"]]:
  """token_logprobs_reference with the logits of `block` tokens at a time.

  Forward and backward recompute a block's logits; the head's gradient is
  summed over blocks in float32 or wider and rounded once.
  """
  if hidden_TD.shape[0] <= block:
    return token_logprobs_reference(hidden_TD, head_DV, targets_T)
  return _blocked_logprobs(block, hidden_TD, head_DV, targets_T)
