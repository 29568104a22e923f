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


def tempered_logits(
  hidden_TD: Float[Array, "T D"],
  head_DV: Float[Array, "D V"],
  temperature: Float[Array, ""] | None,
) -> Float[Array, "T V"]:
  """Logits divided by a temperature, where there is one."""
  logits_TV = constrain(logits_of(hidden_TD, head_DV), None, "vocab")
  if temperature is None:
    return logits_TV
  return logits_TV / temperature.astype(logits_TV.dtype)


def token_logprobs_reference(
  hidden_TD: Float[Array, "T D"],
  head_DV: Float[Array, "D V"],
  targets_T: Int[Array, "T"],
  temperature: Float[Array, ""] | None = None,
) -> tuple[Float[Array, "T"], Float[Array, "T"]]:
  """log softmax(h W / temperature)[target] and its entropy, all at once."""
  logits_TV = tempered_logits(hidden_TD, head_DV, temperature)
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
def _blocked_logprobs(block, hidden_TD, head_DV, targets_T, temperature):
  tokens = hidden_TD.shape[0]
  one = lambda xs: token_logprobs_reference(xs[0], head_DV, xs[1], temperature)
  out = lax.map(one, _blocked(block, hidden_TD, targets_T))
  return jax.tree.map(lambda x: x.reshape(-1)[:tokens], out)


def _blocked_fwd(block, hidden_TD, head_DV, targets_T, temperature):
  out = _blocked_logprobs(block, hidden_TD, head_DV, targets_T, temperature)
  return out, (hidden_TD, head_DV, targets_T, temperature)


def _block_cotangents(
  hidden_TD, head_DV, targets_T, temperature, dlogprobs, dentropy
):
  """Cotangents of one block's hidden states and of the head, both wide.

  With p the distribution, l its logarithm and H its entropy, that of logit v
  is dlogprob (1[v = target] - p_v) - dentropy p_v (l_v + H), over the
  temperature. It is rounded to the inputs' dtype: no product is of wide
  matrices where the head is narrow.
  """
  logits_TV = tempered_logits(hidden_TD, head_DV, temperature)
  logp_TV = jax.nn.log_softmax(logits_TV)
  p_TV = jnp.exp(logp_TV)
  surprise_TV = logp_TV - (p_TV * logp_TV).sum(-1, keepdims=True)
  is_target = targets_T[:, None] == jnp.arange(head_DV.shape[1])
  dlogits_TV = dlogprobs[:, None] * (is_target - p_TV)
  dlogits_TV -= dentropy[:, None] * p_TV * surprise_TV
  if temperature is not None:
    dlogits_TV /= temperature.astype(dlogits_TV.dtype)
  dlogits_TV = constrain(dlogits_TV.astype(hidden_TD.dtype), None, "vocab")
  dhidden_TD = wide_einsum("tv,dv->td", dlogits_TV, head_DV)
  return dhidden_TD, wide_einsum("td,tv->dv", hidden_TD, dlogits_TV)


def _blocked_bwd(block, residuals, cotangents):
  hidden_TD, head_DV, targets_T, temperature = residuals
  tokens = hidden_TD.shape[0]

  def one(dhead, inputs):
    hidden, targets, *cotangent = inputs
    dhidden, new = _block_cotangents(
      hidden, head_DV, targets, temperature, *cotangent
    )
    return dhead + new, dhidden.astype(hidden.dtype)

  inputs = _blocked(block, hidden_TD, targets_T, *cotangents)
  dhead, dhidden = lax.scan(one, jnp.zeros_like(widen(head_DV)), inputs)
  dhidden = dhidden.reshape(-1, hidden_TD.shape[1])[:tokens]
  return dhidden, dhead.astype(head_DV.dtype), None, None


_blocked_logprobs.defvjp(_blocked_fwd, _blocked_bwd)


def token_logprobs(
  hidden_TD: Float[Array, "T D"],
  head_DV: Float[Array, "D V"],
  targets_T: Int[Array, "T"],
  block: int,
  temperature: Float[Array, ""] | None = None,
) -> tuple[Float[Array, "T"], Float[Array, "T"]]:
  """token_logprobs_reference with the logits of `block` tokens at a time.

  Forward and backward recompute a block's logits; the head's gradient is
  summed over blocks in float32 or wider and rounded once. The temperature is a
  constant.
  """
  block = min(block, hidden_TD.shape[0])
  return _blocked_logprobs(block, hidden_TD, head_DV, targets_T, temperature)
