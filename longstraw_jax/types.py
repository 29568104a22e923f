"""Axis letters, array aliases and the pytrees that cross module borders.

Axis letters, used as suffixes of array names wherever three or more axes meet:

  T query tokens         S stored tokens        C chunk
  D embedding            F hidden of the ffn    V vocabulary
  N heads                K key/value heads      H head width
  J key width of the recurrent matrix           W taps, U channels of a conv
  L repeats of a stage   P prompt tokens        G members of a group
  R response tokens      M members replayed at once
"""

from typing import Any

from flax import struct
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

Tree = Any  # a pytree of arrays


@struct.dataclass
class Span:
  """The tokens of one call: real ones first, padding behind them.

  Attributes:
    positions: absolute position of every token, padding included.
    length: how many of the T tokens are real.
  """

  positions: Int[Array, "T"]
  length: Int[Array, ""]

  @property
  def mask(self) -> Bool[Array, "T"]:
    """True at real tokens."""
    return jnp.arange(self.positions.shape[0]) < self.length


@struct.dataclass
class Group:
  """Responses that share one prompt, and everything an objective needs.

  Attributes:
    responses: token ids, [G, R] int32; ids at t >= lengths[g] are ignored.
    lengths: real tokens of each member, at least 1.
    loss_mask: True where the policy wrote the token and is trained on it.
    rewards: one scalar a member.
    advantages: baseline-corrected rewards.
    old_logprobs: log-probabilities under the policy that the trust region is
      centred on, tempered, over the full vocabulary.
    sampling_logprobs: log-probabilities under the distribution that was
      sampled from (temperature, top-k and top-p applied).
    ref_logprobs: log-probabilities under the frozen reference policy.
    prompt_id: the id of the prompt these responses were made for.
    loss_denominator: what this group's summed loss is divided by; fixed for
      the whole step before any replay.
    choices: discrete choices (experts, keys) that the sampler made for each
      token it fed, stage -> layer -> name -> [G, L, R, A], to be followed by
      scoring and replay; None lets these choose afresh.
    temperature: the responses were sampled with. The policy that is scored and
      trained, with its ratio, KL and entropy, is the tempered one: its logits
      are divided by this. None for 1, and for greedy responses, of which the
      untempered policy is scored.
  """

  responses: Int[Array, "G R"]
  lengths: Int[Array, "G"]
  loss_mask: Bool[Array, "G R"]
  rewards: Float[Array, "G"]
  advantages: Float[Array, "G"]
  old_logprobs: Float[Array, "G R"]
  sampling_logprobs: Float[Array, "G R"]
  ref_logprobs: Float[Array, "G R"]
  prompt_id: Int[Array, ""]
  loss_denominator: Float[Array, ""]
  choices: Tree | None = None
  temperature: Float[Array, ""] | None = None

  @classmethod
  def create(cls, responses, lengths, **known) -> "Group":
    """A group with the other fields filled in.

    Without them every real token is trained on, rewards and advantages are
    NaN (missing: group_gradient refuses them), log-probabilities are zero and
    loss_denominator is the number of members.

    Args:
      responses: token ids [G, R].
      lengths: real tokens of each member, [G].
      **known: fields that are known.
    """
    responses = jnp.asarray(responses, jnp.int32)
    lengths = jnp.asarray(lengths, jnp.int32)
    group_size, room = responses.shape
    missing = jnp.full((group_size,), jnp.nan)
    unknown = jnp.zeros((group_size, room))
    fields = {
      "responses": responses,
      "lengths": lengths,
      "loss_mask": jnp.arange(room) < lengths[:, None],
      "rewards": missing,
      "advantages": missing,
      "old_logprobs": unknown,
      "sampling_logprobs": unknown,
      "ref_logprobs": unknown,
      "prompt_id": 0,
      "loss_denominator": float(group_size),
    }
    fields |= known
    fields["prompt_id"] = jnp.asarray(fields["prompt_id"], jnp.int32)
    wide = unknown.dtype
    fields["loss_denominator"] = jnp.asarray(fields["loss_denominator"], wide)
    choices = fields.pop("choices", None)
    temperature = fields.pop("temperature", None)
    if temperature is not None:
      temperature = jnp.asarray(temperature, wide)
    fields = {name: jnp.asarray(x) for name, x in fields.items()}
    return cls(**fields, choices=choices, temperature=temperature)
