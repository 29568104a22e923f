"""Policy-gradient objectives: functions of arrays, and one that composes them.

A step's loss is a sum over its prompts, over the members of each group and over
the tokens of each member. What the sum is divided by is known before the first
replay (`loss_denominator`), so the loss and its gradient do not depend on how
members are batched, in which order they come, or how far they are padded.

Computation is in the dtype of the inputs, float32 at least. Whatever stands at
a masked token, -inf and NaN included, is replaced by 0 before any arithmetic,
so neither the value nor the gradient can see it.
"""

from collections.abc import Sequence
import dataclasses
import math

import jax
from jax import lax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float
import numpy as np

from longstraw_jax.group_checks import (
  PER_TOKEN,
  as_mask,
  check_fields,
  token_mask,
)
from longstraw_jax.types import Group

ADVANTAGE_MODES = ("std", "none", "leave_one_out")
RATIO_LEVELS = ("token", "sequence")
NORMALIZATIONS = ("member", "token", "constant")

# exp(20) = 4.9e8 is finite in float32 with room for a sum over tokens. From
# there an exponential goes on as its tangent: a constant would have no slope,
# and what is furthest off would be let go of.
MAX_LOG_RATIO = 20.0


def group_advantages(
  rewards_G: Float[Array, "G"], mode: str = "std", eps: float = 1e-6
) -> Float[Array, "G"]:
  """Turns the rewards of one group into advantages.

  With m the mean reward and s the sample standard deviation (over G - 1), as
  TRL, verl and Tunix take it:

    std            (r - m) / (s + eps)      GRPO, arXiv:2402.03300
    none           r - m                    Dr. GRPO, arXiv:2503.20783
    leave_one_out  (r - m) G / (G - 1)      RLOO, arXiv:2402.14740; the same as
                                            r minus the others' mean

  A group whose rewards are all equal gets exact zeros in every mode: in float32
  the mean of equal numbers need not equal them, and dividing what is left by a
  spread of the same origin would make advantages of order one out of rounding.

  Args:
    rewards_G: one finite scalar a member, any unit.
    mode: one of `ADVANTAGE_MODES`.
    eps: added to the spread, in the unit of the rewards; keeps differences of
      the size of rounding from being blown up.

  Returns:
    [G] advantages, float32 at least; those of "std" within
    +-(G - 1) / sqrt(G), and 0 for a group of one.

  Raises:
    ValueError: for an unknown mode, and for "leave_one_out" with one member,
      which leaves nobody to compare with.
  """
  _require_one_of("mode", mode, ADVANTAGE_MODES)
  rewards_G = rewards_G.astype(_at_least_float32(rewards_G))
  size = rewards_G.shape[0]
  centred_G = rewards_G - rewards_G.mean()
  if mode == "std":
    ddof = min(size - 1, 1)  # one member's spread would be 0 / 0
    advantages_G = centred_G / (rewards_G.std(ddof=ddof) + eps)
  elif mode == "none":
    advantages_G = centred_G
  else:
    if size < 2:
      raise ValueError(
        f"mode='leave_one_out' got a group of {size}: sample at least 2"
        " members a prompt, or use mode='none'"
      )
    advantages_G = centred_G * (size / (size - 1))
  return jnp.where(rewards_G.max() == rewards_G.min(), 0.0, advantages_G)


def importance_ratio(
  logprobs_GR: Float[Array, "G R"],
  old_logprobs_GR: Float[Array, "G R"],
  mask_GR: Bool[Array, "G R"],
  level: str = "token",
) -> Float[Array, "G R"]:
  """Probability of what was sampled, now over then.

  With d the log-probability now minus the old one, which is a constant:

    token     exp(d_t)                                      PPO, GRPO
    sequence  exp(mean of d over the member's masked-in tokens), the same number
              at every token of the member                  GSPO, section 4 of
                                                            arXiv:2507.18071

  The gradient of "sequence" reaches every token of the member through the mean,
  1 / length each, as GSPO derives it. Its clip range is in another unit than
  that of "token": GSPO uses 3e-4 and 4e-4.

  We depart from both in that the exponential goes on as its tangent beyond
  `MAX_LOG_RATIO`: the ratio stays finite and keeps a slope, so a token with a
  negative advantage that has become too likely is still pushed down.

  Args:
    logprobs_GR: log-probabilities of the sampled tokens under the weights that
      are trained.
    old_logprobs_GR: the same under the weights the trust region is centred on.
    mask_GR: True at the tokens that count.
    level: one of `RATIO_LEVELS`.

  Returns:
    [G, R] ratios, exactly 1 where the two agree and 0 at masked tokens.

  Raises:
    ValueError: for an unknown level.
  """
  _require_one_of("level", level, RATIO_LEVELS)
  dtype = _at_least_float32(logprobs_GR, old_logprobs_GR)
  now_GR = _clean(logprobs_GR, mask_GR, dtype)
  old_GR = lax.stop_gradient(_clean(old_logprobs_GR, mask_GR, dtype))
  log_ratio_GR = now_GR - old_GR
  if level == "sequence":
    mean_G = log_ratio_GR.sum(axis=1) / _token_counts(mask_GR, dtype)
    log_ratio_GR = jnp.broadcast_to(mean_G[:, None], log_ratio_GR.shape)
  return jnp.where(mask_GR, _bounded_exp(log_ratio_GR), 0.0)


def clipped_loss(
  ratio_GR: Float[Array, "G R"],
  advantages_G: Float[Array, "G"],
  mask_GR: Bool[Array, "G R"],
  clip_low: float,
  clip_high: float | None = None,
) -> Float[Array, "G R"]:
  """PPO's clipped surrogate, as a loss, per token.

    -min(ratio A, clip(ratio, 1 - clip_low, 1 + clip_high) A)

  Eq. 7 of arXiv:1707.06347; with `clip_high` above `clip_low` it is the
  "clip-higher" of DAPO, section 3.1 of arXiv:2503.14476. The gradient is zero
  where the advantage asks for more of a change that has already left the range.

  Args:
    ratio_GR: importance ratios.
    advantages_G: one a member, shared by its tokens.
    mask_GR: True at the tokens that count.
    clip_low: how far below 1 the ratio may be pushed.
    clip_high: how far above 1; None means `clip_low`.

  Returns:
    [G, R] losses, 0 at masked tokens.
  """
  clip_high = clip_low if clip_high is None else clip_high
  advantages_G1 = advantages_G[:, None]
  ratio_GR = jnp.where(mask_GR, ratio_GR, 1.0)
  clipped_GR = jnp.clip(ratio_GR, 1.0 - clip_low, 1.0 + clip_high)
  gain_GR = jnp.minimum(ratio_GR * advantages_G1, clipped_GR * advantages_G1)
  return jnp.where(mask_GR, -gain_GR, 0.0)


def k3_kl(
  logprobs: Float[Array, "..."], ref_logprobs: Float[Array, "..."]
) -> Float[Array, "..."]:
  """Schulman's k3 estimate of KL(policy || reference), per sampled token.

    exp(d) - 1 - d,  d = ref_logprobs - logprobs

  Never negative, and unbiased when the tokens were sampled from the policy
  (http://joschu.net/blog/kl-approx.html). Its derivative is what GRPO uses as
  the penalty's gradient, eq. 4 of arXiv:2402.03300, and is not an unbiased
  gradient of the divergence. The exponential alone is bounded: beyond d =
  `MAX_LOG_RATIO` it goes on as its tangent. Where d is very negative nothing is
  bounded, and the slope by `logprobs` is 1 as it should be.

  Args:
    logprobs: log-probabilities of sampled tokens under the policy, nats.
    ref_logprobs: the same under the reference, a constant.

  Returns:
    Nats, in the shape of the inputs.
  """
  dtype = _at_least_float32(logprobs, ref_logprobs)
  ref_logprobs = lax.stop_gradient(ref_logprobs.astype(dtype))
  return _k3(ref_logprobs - logprobs.astype(dtype))


def truncated_importance_weight(
  old_logprobs: Float[Array, "..."],
  sampling_logprobs: Float[Array, "..."],
  cap: float,
) -> Float[Array, "..."]:
  """Corrects a loss for tokens sampled from another distribution.

    min(exp(old_logprobs - sampling_logprobs), cap),  a constant

  Truncated importance sampling as in Ionides (2008), applied per token: it
  covers temperature, top-k, top-p and a sampler with arithmetic of its own. The
  cap trades variance for bias.

  Args:
    old_logprobs: under the policy the trust region is centred on.
    sampling_logprobs: under the distribution that was sampled from.
    cap: largest weight, above 0.

  Returns:
    Weights in the shape of the inputs, without a gradient.
  """
  dtype = _at_least_float32(old_logprobs, sampling_logprobs)
  gap = old_logprobs.astype(dtype) - sampling_logprobs.astype(dtype)
  return lax.stop_gradient(jnp.minimum(_bounded_exp(gap), cap))


def loss_denominator(
  mode: str,
  loss_masks: Sequence[Bool[Array | np.ndarray, "_ _"]]
  | Bool[Array | np.ndarray, "B _ _"],
  constant_length: int | None = None,
) -> Float[Array, "B"]:
  """What each group's summed loss is divided by, for a whole step.

  Let B groups have N members in all, and member i have n_i masked-in tokens:

    mode      weight of a token  denominator          the step's loss
    member    1 / n_i            N                    mean over members of the
                                                      mean over their tokens
                                                      (GRPO)
    token     1                  sum of n_i           mean over tokens (DAPO)
    constant  1                  constant_length x N  no length in it (Dr. GRPO)

  The weight of a token is `token_weights`; the sum over groups of (weighted sum
  over the group) / denominator is the loss in the last column. The denominators
  of one step are all equal: they come one a group because that is how they are
  stored (`Group.loss_denominator`). A member without a token in the loss adds 0
  to every sum and counts in N. If no member has one, "token" divides 0 by 1.

  Args:
    mode: one of `NORMALIZATIONS`.
    loss_masks: the loss mask [G, R] of every group of the step, as a list (G
      and R may differ) or stacked.
    constant_length: tokens; needed by "constant" alone, and the same for the
      whole run.

  Returns:
    [B] denominators, float32, or float64 where that is jax's default.

  Raises:
    ValueError: for an unknown mode, a step without groups, a mask that is not
      of bools, and "constant" without a positive length.
  """
  _require_one_of("mode", mode, NORMALIZATIONS)
  if not len(loss_masks):
    raise ValueError("loss_masks is empty: a step needs at least one group")
  members = sum(mask.shape[0] for mask in loss_masks)
  if mode == "member":
    total = members
  elif mode == "token":
    counts = [as_mask(mask).sum() for mask in loss_masks]
    total = jnp.maximum(sum(counts), 1)
  else:
    if constant_length is None or constant_length <= 0:
      raise ValueError(
        f"constant_length={constant_length!r} cannot divide a loss: give a"
        " positive number of tokens, such as the longest response allowed"
      )
    total = constant_length * members
  return jnp.full((len(loss_masks),), total, jnp.result_type(float))


def token_weights(
  mode: str, mask_GR: Bool[Array, "G R"], dtype: jnp.dtype = jnp.float32
) -> Float[Array, "G R"]:
  """Weight of each token in its group's summed loss; see `loss_denominator`.

  Args:
    mode: one of `NORMALIZATIONS`.
    mask_GR: True at the tokens that count.
    dtype: of the result.

  Returns:
    [G, R]: 1 / (masked-in tokens of the member) for "member", else 1; 0 at
    masked tokens.

  Raises:
    ValueError: for an unknown mode.
  """
  _require_one_of("mode", mode, NORMALIZATIONS)
  weights_GR = mask_GR.astype(dtype)
  if mode == "member":
    weights_GR /= _token_counts(mask_GR, dtype)[:, None]
  return weights_GR


@dataclasses.dataclass(frozen=True, kw_only=True)
class PolicyObjective:
  """Clipped policy gradient with optional KL penalty and entropy bonus.

  Hashable, so that it can be a static argument of a jitted function. Its
  metrics are float32 scalars without a gradient, of one group each. What the
  group lacks is left out:

    policy_loss           its share of the loss: sum over groups
    num_tokens            masked-in tokens, T below: sum over groups
    clip_share            mean over T of "the clip took the gradient away"
    ratio_mean            mean over T of the ratio
    ratio_deviation_max   largest |ratio - 1|
    kl_old                mean over T of k3 for KL(old || policy), nats
    kl_ref                mean over T of k3 for KL(policy || ref), nats; needs
                          ref_logprobs
    entropy               mean over T, nats
    mismatch_mean, _max   over T, of |old - sampling| log-probability, nats;
                          need sampling_logprobs
    reward_mean           mean over members; needs rewards
    zero_spread           1 if all rewards are equal, else 0; needs rewards

  A mean over no token is 0; so is a maximum.

  Without old_logprobs the trust region is centred on the policy itself, as TRL
  has it with num_iterations = 1: the present log-probabilities, as constants,
  are the old ones, and every ratio is 1 to the bit. That is right for the first
  update of a rollout. Later ones need the scores of the weights that sampled.

  Attributes:
    clip_low: how far below 1 the ratio may be pushed, in (0, 1]; 1 turns the
      lower bound off.
    clip_high: how far above 1, positive; inf turns the upper bound off.
    ratio_level: one of `RATIO_LEVELS`.
    normalization: one of `NORMALIZATIONS`. Groups of one step that carry
      denominators have them from `loss_denominator` in the same mode; one that
      carries none is divided by its own, as a step of this group alone.
    constant_length: tokens that normalization "constant" divides by, such as
      the longest response allowed.
    kl_coef: factor of the penalty on KL(policy || reference); 0 keeps the
      reference out of the loss.
    entropy_coef: factor of the entropy bonus.
    sampler_correction_cap: cap of `truncated_importance_weight`; None applies
      no correction for the sampler's distribution.
  """

  clip_low: float = 0.2
  clip_high: float = 0.2
  ratio_level: str = "token"
  normalization: str = "member"
  constant_length: int | None = None
  kl_coef: float = 0.0
  entropy_coef: float = 0.0
  sampler_correction_cap: float | None = None

  def __post_init__(self):
    """Refuses values that no run can mean.

    Raises:
      ValueError: naming the field, the value and a value that would do.
    """
    _require_one_of("ratio_level", self.ratio_level, RATIO_LEVELS)
    _require_one_of("normalization", self.normalization, NORMALIZATIONS)
    cap, tokens = self.sampler_correction_cap, self.constant_length
    checks = (
      ("clip_low", 0 < self.clip_low <= 1, "a number in (0, 1], such as 0.2"),
      ("clip_high", self.clip_high > 0, "a positive number, such as 0.2"),
      (
        "constant_length",
        tokens is None or tokens >= 1,
        "None or a number of tokens, such as 8192",
      ),
      ("kl_coef", 0 <= self.kl_coef < math.inf, "0 or a positive number"),
      (
        "entropy_coef",
        0 <= self.entropy_coef < math.inf,
        "0 or a positive number",
      ),
      (
        "sampler_correction_cap",
        cap is None or cap > 0,
        "None or a positive number, such as 2.0",
      ),
    )
    for name, ok, remedy in checks:
      if not ok:
        raise ValueError(
          f"{name}={getattr(self, name)!r} is out of range: give {remedy}"
        )

  def __call__(
    self,
    logprobs_GR: Float[Array, "G R"],
    entropy_GR: Float[Array, "G R"],
    group: Group,
  ) -> tuple[Float[Array, ""], dict[str, Float[Array, ""]]]:
    """One group's share of the step's loss.

      sum over g, t of weight (correction clipped_loss + kl_coef KL
                               - entropy_coef entropy) / loss_denominator

    The correction multiplies the policy term alone.

    Args:
      logprobs_GR: log-probabilities of the responses, nats, with gradient.
      entropy_GR: entropy of the policy at each response token, nats.
      group: what the responses are scored with.

    Returns:
      The loss, in the dtype of `logprobs_GR` and float32 at least, to be summed
      over the groups of the step; and the metrics.

    Raises:
      ValueError: if the [G, R] arrays differ in shape, and if the group lacks
        what these settings ask for.
    """
    self._require_known(group)
    check_fields(group)
    _require_equal_shapes(
      logprobs=logprobs_GR, entropy=entropy_GR, loss_mask=group.loss_mask
    )
    mask_GR = token_mask(group)
    dtype = _at_least_float32(logprobs_GR)
    denominator = self.denominator(group).astype(dtype)
    clean = lambda x_GR: _clean(jnp.asarray(x_GR), mask_GR, dtype)
    now_GR, entropy_GR = clean(logprobs_GR), clean(entropy_GR)
    known = {name: getattr(group, name) for name in PER_TOKEN}
    if group.old_logprobs is None:
      known["old_logprobs"] = now_GR
    group = group.replace(
      loss_mask=mask_GR,
      advantages=jnp.asarray(group.advantages, dtype),
      **{
        name: lax.stop_gradient(clean(x_GR))
        for name, x_GR in known.items()
        if x_GR is not None
      },
    )
    weights_GR = token_weights(self.normalization, mask_GR, dtype)
    share = lambda x_GR: (weights_GR * x_GR).sum() / denominator

    ratio_GR = importance_ratio(
      now_GR, group.old_logprobs, mask_GR, self.ratio_level
    )
    policy_loss = share(self._policy_loss(ratio_GR, group))
    loss = policy_loss
    if self.kl_coef:
      loss += self.kl_coef * share(k3_kl(now_GR, group.ref_logprobs))
    if self.entropy_coef:
      loss -= self.entropy_coef * share(entropy_GR)
    metrics = self._token_metrics(now_GR, entropy_GR, ratio_GR, group) | {
      "policy_loss": policy_loss,
      "num_tokens": mask_GR.sum(),
    }
    if group.rewards is not None:
      rewards_G = jnp.asarray(group.rewards)
      metrics["reward_mean"] = rewards_G.mean()
      metrics["zero_spread"] = rewards_G.max() == rewards_G.min()
    return loss, _as_metrics(metrics)

  def denominator(self, group: Group) -> Float[Array, ""]:
    """What the group's summed loss is divided by: given, or its own.

    Raises:
      ValueError: there is none, and normalization "constant" has no length.
    """
    if group.loss_denominator is not None:
      return jnp.asarray(group.loss_denominator)
    (own,) = loss_denominator(
      self.normalization, [token_mask(group)], self.constant_length
    )
    return own

  def _require_known(self, group: Group) -> None:
    """Refuses a group without what the settings ask for."""
    needs = [("advantages", "a policy gradient", "group_advantages(rewards)")]
    if self.kl_coef:
      needs.append(
        ("ref_logprobs", f"kl_coef={self.kl_coef}", "the reference's scores")
      )
    if self.sampler_correction_cap is not None:
      cap = f"sampler_correction_cap={self.sampler_correction_cap}"
      needs.append(("sampling_logprobs", cap, "what the sampler recorded"))
    for name, why, remedy in needs:
      if getattr(group, name) is None:
        missing = "; its reward is missing?" if name == "advantages" else ""
        raise ValueError(
          f"the group has no {name}, which {why} needs: give {remedy}{missing}"
        )

  def _policy_loss(self, ratio_GR: Array, group: Group) -> Array:
    """[G, R] clipped losses, corrected for the sampler if asked to."""
    loss_GR = clipped_loss(
      ratio_GR,
      group.advantages,
      group.loss_mask,
      self.clip_low,
      self.clip_high,
    )
    if self.sampler_correction_cap is None:
      return loss_GR
    return loss_GR * truncated_importance_weight(
      group.old_logprobs, group.sampling_logprobs, self.sampler_correction_cap
    )

  def _token_metrics(
    self, now_GR: Array, entropy_GR: Array, ratio_GR: Array, group: Group
  ) -> dict[str, Array]:
    """Means and maxima over masked-in tokens, of arrays already clean."""
    mask_GR, old_GR = group.loss_mask, group.old_logprobs
    mean = lambda x_GR: _masked_mean(x_GR, mask_GR)
    deviation_GR = jnp.where(mask_GR, jnp.abs(ratio_GR - 1.0), 0.0)
    metrics = {
      "clip_share": mean(self._clip_binds(ratio_GR, group.advantages)),
      "ratio_mean": mean(ratio_GR),
      "ratio_deviation_max": deviation_GR.max(),
      "kl_old": mean(_k3(now_GR - old_GR)),
      "entropy": mean(entropy_GR),
    }
    if group.ref_logprobs is not None:
      metrics["kl_ref"] = mean(_k3(group.ref_logprobs - now_GR))
    if group.sampling_logprobs is not None:
      mismatch_GR = jnp.abs(old_GR - group.sampling_logprobs)
      metrics["mismatch_mean"] = mean(mismatch_GR)
      metrics["mismatch_max"] = mismatch_GR.max()
    return metrics

  def _clip_binds(self, ratio_GR: Array, advantages_G: Array) -> Array:
    """[G, R] bool: True where the clip, and not the ratio, decides."""
    advantages_G1 = advantages_G[:, None]
    rises_GR = (advantages_G1 > 0) & (ratio_GR > 1.0 + self.clip_high)
    falls_GR = (advantages_G1 < 0) & (ratio_GR < 1.0 - self.clip_low)
    return rises_GR | falls_GR


def _at_least_float32(*arrays: Array) -> jnp.dtype:
  """The common dtype of the arrays, no narrower than float32."""
  return jnp.result_type(*arrays, jnp.float32)


def _clean(x_GR: Array, mask_GR: Array, dtype: jnp.dtype) -> Array:
  """Zero at masked tokens, whatever stood there, in value and gradient."""
  return jnp.where(mask_GR, x_GR, 0.0).astype(dtype)


def _bounded_exp(x: Array) -> Array:
  """exp(x), and beyond MAX_LOG_RATIO its tangent there."""
  return jnp.exp(jnp.minimum(x, MAX_LOG_RATIO)) + _tail(x, 0.0)


def _k3(d: Array) -> Array:
  """exp(d) - 1 - d with a bounded exponential; expm1, as d is mostly near 0."""
  near = jnp.minimum(d, MAX_LOG_RATIO)
  return jnp.expm1(near) - near + _tail(d, 1.0)


def _tail(x: Array, less: float) -> Array:
  """(exp(MAX_LOG_RATIO) - less) (x - MAX_LOG_RATIO) beyond it, 0 before."""
  slope = math.exp(MAX_LOG_RATIO) - less
  return slope * jnp.maximum(x - MAX_LOG_RATIO, 0.0)


def _token_counts(mask_GR: Array, dtype: jnp.dtype) -> Array:
  """Masked-in tokens of each member, 1 where there is none."""
  return jnp.maximum(mask_GR.sum(axis=1), 1).astype(dtype)


def _masked_mean(x_GR: Array, mask_GR: Array) -> Array:
  """Mean over the masked-in tokens of the group, 0 over none."""
  total = jnp.where(mask_GR, x_GR, 0.0).sum()
  return total / jnp.maximum(mask_GR.sum(), 1)


def _as_metrics(values: dict[str, Array]) -> dict[str, Array]:
  """Float32 scalars without a gradient."""
  return jax.tree.map(
    lambda x: lax.stop_gradient(x.astype(jnp.float32)), values
  )


def _require_one_of(name: str, value: str, allowed: tuple[str, ...]) -> None:
  if value not in allowed:
    raise ValueError(f"{name}={value!r} is unknown: use one of {allowed}")


def _require_equal_shapes(**arrays: Array) -> None:
  shapes = {name: array.shape for name, array in arrays.items()}
  if len(set(shapes.values())) > 1:
    raise ValueError(f"arrays of one group must have one shape, got {shapes}")


@dataclasses.dataclass(frozen=True)
class LikelihoodObjective:
  """Supervised learning through the same capture and replay.

  loss = -sum over masked tokens of log-probability / loss_denominator,

  the number of members where the group carries none.
  """

  def denominator(self, group: Group) -> Float[Array, ""]:
    """What the group's summed loss is divided by: given, or its own."""
    if group.loss_denominator is not None:
      return jnp.asarray(group.loss_denominator)
    return loss_denominator("member", [group.loss_mask])[0]

  def __call__(
    self,
    logprobs_GR: Float[Array, "G R"],
    entropy_GR: Float[Array, "G R"],
    group: Group,
  ) -> tuple[Float[Array, ""], dict[str, Float[Array, ""]]]:
    """Negative log-likelihood of the responses and its token mean."""
    check_fields(group)
    mask_GR = token_mask(group)
    dtype = _at_least_float32(logprobs_GR)
    total = -_clean(logprobs_GR, mask_GR, dtype).sum()
    metrics = {
      "nll": -_masked_mean(logprobs_GR, mask_GR),
      "entropy": _masked_mean(entropy_GR, mask_GR),
      "num_tokens": mask_GR.sum(),
    }
    loss = total / self.denominator(group).astype(dtype)
    return loss, _as_metrics(metrics)
