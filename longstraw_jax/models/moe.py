"""Mixture-of-experts feed-forwards: Qwen3.5/3.6 (softmax), GLM-5 (sigmoid).

  y_TD, chosen = ffn(x_TD, choices)

`chosen` is {"experts": [T, A]}, what the router would choose from x_TD: the A
best in descending order, the lowest id first where scores are equal.
`choices` is empty, to go by it, or such a dict recorded earlier, to go by that
instead: the ids are forced, the mixture weights are the router's own of now.
With the ids that it would choose anyway, the result has the same bits. Forced
ids out of range add nothing.

A choice is a function of the token alone, whatever batch it stands in: see
ops/rowwise.py. Padding tokens are routed like the rest.
"""

import math
from typing import ClassVar

import flax.linen as nn
import jax
from jax import lax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from longstraw_jax.config import MoEConfig
from longstraw_jax.models.contract import Choice
from longstraw_jax.models.layers import Linear, SwiGLU, beside, weight
from longstraw_jax.ops.expert_maps import adapted
from longstraw_jax.ops.experts import expert_mlp
from longstraw_jax.ops.precision import wide_dtype, widen
from longstraw_jax.ops.rowwise import rowwise_product

SUM_EPS = 1e-20  # GLM-5's, beneath the sum of the chosen scores


def top_experts(
  scores_TE: Float[Array, "T E"], sizes: MoEConfig
) -> Int[Array, "T A"]:
  """The best experts in descending order, the lowest id first on ties.

  With groups, first the best groups by the sum of their best two scores, then
  the best experts in those.
  """
  # top_k ranks -0.0 below 0.0; XLA deletes x + 0.0, so this is spelt out.
  scores_TE = jnp.where(scores_TE == 0, 0.0, scores_TE)
  if sizes.num_groups > 1:
    grouped = scores_TE.reshape(scores_TE.shape[0], sizes.num_groups, -1)
    group_scores = lax.top_k(grouped, 2)[0].sum(-1)
    _, groups = lax.top_k(group_scores, sizes.groups_per_token)
    kept = jax.nn.one_hot(groups, sizes.num_groups, dtype=bool).any(1)
    grouped = jnp.where(kept[..., None], grouped, -jnp.inf)
    scores_TE = grouped.reshape(scores_TE.shape)
  return lax.top_k(scores_TE, sizes.experts_per_token)[1]


def _round_to(x: Float[Array, "..."], dtype) -> Float[Array, "..."]:
  """Rounds to a dtype's values, not to the dtype.

  Unlike a pair of casts this is never optimised away in one program and kept
  in another.
  """
  narrow = jnp.finfo(dtype)
  if narrow.nmant >= jnp.finfo(x.dtype).nmant:
    return x
  return lax.reduce_precision(x, narrow.nexp, narrow.nmant)


class Router(Linear):
  """Logits x W in float32 or wider, each row's bits its own."""

  row_block: int = 256

  def __call__(self, x_TD: Float[Array, "T D"]) -> Float[Array, "T E"]:
    kernel = self.matrix(x_TD.shape[-1])
    return rowwise_product(x_TD.astype(self.dtype), kernel, self.row_block)


class _MoE(nn.Module):
  """The chosen experts' mixture beside a shared expert.

  A kind of mixture says how it scores, weighs and adds the shared expert.
  """

  sizes: MoEConfig
  dtype: str
  param_dtype: str

  chooses: ClassVar[bool] = True
  stacked: ClassVar[tuple[str, ...]] = ("experts_gate_up", "experts_down")

  @nn.compact
  def __call__(
    self,
    x_TD: Float[Array, "T D"],
    choices: dict[str, Int[Array, "T A"]],
  ) -> tuple[Float[Array, "T D"], dict[str, Int[Array, "T A"]]]:
    sizes, embed_dim = self.sizes, x_TD.shape[-1]
    x_TD = x_TD.astype(self.dtype)
    logits_TE, ranking_TE = self._scores(x_TD)
    chosen = {"experts": top_experts(ranking_TE, sizes)}
    forced_TA = choices.get("experts")
    experts_TA = chosen["experts"]
    if forced_TA is not None:
      experts_TA = jnp.clip(forced_TA, 0, sizes.num_experts - 1)
    logits_TA = jnp.take_along_axis(logits_TE, experts_TA, axis=-1)
    weights_TA = self._weights(logits_TA, logits_TE)
    if forced_TA is not None:
      weights_TA = jnp.where(experts_TA == forced_TA, weights_TA, 0)

    hidden = sizes.expert_hidden_dim
    y_TD = expert_mlp(
      x_TD,
      self._experts("experts_gate_up", embed_dim, 2 * hidden),
      self._experts("experts_down", hidden, embed_dim),
      experts_TA,
      weights_TA,
      row_block=sizes.row_block,
    )
    return (y_TD + self._shared(x_TD)).astype(x_TD.dtype), chosen

  @nn.nowrap
  def declared_choices(self) -> dict[str, Choice]:
    """The experts of every token."""
    sizes = self.sizes
    return {
      "experts": Choice(number=sizes.experts_per_token, ids=sizes.num_experts)
    }

  def _experts(self, name: str, inputs: int, outputs: int):
    """Matrices of all experts, with an adapter where its leaves exist.

    Those leaves, [E, I, r], [E, r, O] and [E], are in a dict of their own
    beside the matrices (see longstraw_jax.lora).
    """
    matrix = nn.initializers.lecun_normal(batch_axis=0)
    shape = (self.sizes.num_experts, inputs, outputs)
    stored = weight(self, name, matrix, shape, self.param_dtype)
    if not self.has_variable("params", beside(name)):
      return stored
    leaves = self.get_variable("params", beside(name))
    a, b, scale = (leaves[f"lora_{part}"] for part in ("a", "b", "scale"))
    return adapted(stored, a, scale[:, None, None] * widen(b))

  def _router(self, dtype: str, param_dtype: str) -> Router:
    sizes = self.sizes
    return Router(
      sizes.num_experts,
      dtype,
      param_dtype,
      row_block=sizes.row_block,
      name="router",
    )

  def _scores(self, x_TD):
    """Logits, and the scores that decide, both [T, E]."""
    raise NotImplementedError

  def _weights(self, logits_TA, logits_TE):
    """Mixture weights [T, A] of the experts gone by."""
    raise NotImplementedError

  def _shared(self, x_TD):
    """What the shared expert adds; a kind may gate it."""
    return SwiGLU(
      self.sizes.shared_hidden_dim,
      self.dtype,
      self.param_dtype,
      name="shared_expert",
    )(x_TD)


class SoftmaxMoE(_MoE):
  """Qwen3.5/3.6: softmax over the experts, a shared expert behind a gate.

    p = softmax(x W_r);  w_a = p_a / sum of the chosen p
    y = sum_a w_a expert_a(x) + sigmoid(x w_s) shared(x)

  As in the reference, logits and weights are rounded to the activations'
  dtype and the softmax between them is float32. Unlike there, the choice
  looks at the logits, whose order rounding in the softmax cannot blur, and
  the renormalised weights are the softmax over the chosen logits: the same
  numbers, but safe where a forced expert's probability is 0 in float32.
  """

  def __post_init__(self):
    super().__post_init__()
    if self.sizes.num_groups != 1:
      raise ValueError(
        f"num_groups is {self.sizes.num_groups}: only SigmoidMoE chooses in "
        "groups; use 1"
      )

  def _scores(self, x_TD):
    logits_TE = self._router(self.dtype, self.param_dtype)(x_TD)
    logits_TE = _round_to(logits_TE, self.dtype)
    return logits_TE, logits_TE

  def _weights(self, logits_TA, logits_TE):
    if self.sizes.normalize:
      weights_TA = jax.nn.softmax(logits_TA)
    else:
      top = jax.nn.logsumexp(logits_TE, axis=-1, keepdims=True)
      weights_TA = jnp.exp(logits_TA - top)
    return _round_to(weights_TA, self.dtype) * self.sizes.scaling

  def _shared(self, x_TD):
    gate = Linear(1, self.dtype, self.param_dtype, name="shared_expert_gate")(
      x_TD
    )
    return jax.nn.sigmoid(widen(gate)) * widen(super()._shared(x_TD))


class SigmoidMoE(_MoE):
  """GLM-5 and DeepSeek-V3: a sigmoid per expert, a bias for the choice alone.

    s = sigmoid(x W_r);  chosen by s + b, within the best groups
    w_a = scaling s_a / (sum of the chosen s + 1e-20)
    y = sum_a w_a expert_a(x) + shared(x)

  The router's kernel and b are float32 whatever the other parameters are. b
  has no gradient: it is moved from outside to even out the load.
  """

  constants: ClassVar[tuple[str, ...]] = ("correction_bias",)

  def _scores(self, x_TD):
    float32 = wide_dtype(self.param_dtype)
    logits_TE = self._router(wide_dtype(self.dtype), float32)(x_TD)
    bias_E = self.param(
      "correction_bias",
      nn.initializers.zeros,
      (self.sizes.num_experts,),
      float32,
    )
    ranking_TE = jax.nn.sigmoid(logits_TE) + lax.stop_gradient(bias_E)
    return logits_TE, ranking_TE

  def _weights(self, logits_TA, logits_TE):
    del logits_TE
    if not self.sizes.normalize:
      return jax.nn.sigmoid(logits_TA) * self.sizes.scaling
    # s_a / (sum of s + eps) as a softmax, whose gradient cannot overflow
    # where forced experts have almost no score: eps is one more, unused.
    logs = jax.nn.log_sigmoid(logits_TA)
    eps = jnp.full_like(logs[:, :1], math.log(SUM_EPS))
    weights_TA = jax.nn.softmax(jnp.concatenate([logs, eps], axis=-1))
    return weights_TA[:, :-1] * self.sizes.scaling
