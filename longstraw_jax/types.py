"""Axis letters, array aliases and the pytrees that cross module borders.

Axis letters, used as suffixes of array names wherever three or more axes meet:

  T query tokens         S stored tokens        C chunk
  D embedding            F hidden of the ffn    V vocabulary
  N heads                K key/value heads      H head width
  J key width of the recurrent matrix           W taps, U channels of a conv
  L repeats of a stage   P prompt tokens        G members of a group
  R response tokens      M members replayed at once
"""

import dataclasses
from typing import Any

from flax import struct
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int
import numpy as np

from longstraw_jax.checks import check_responses
from longstraw_jax.group_checks import as_mask, check_fields, prompt_stamp

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

  What is missing is None, and is refused by an objective that asks for it.

  Attributes:
    responses: token ids, [G, R] int32; ids at t >= lengths[g] are ignored.
    lengths: real tokens of each member, at least 1.
    loss_mask: True where the policy wrote the token and is trained on it;
      never at padding.
    rewards: one scalar a member; for metrics alone.
    advantages: baseline-corrected rewards; None for objectives without any.
    old_logprobs: log-probabilities under the policy that the trust region is
      centred on, tempered, over the full vocabulary; None takes the present
      scores, so that the ratio is exactly 1: right for the first update of a
      rollout.
    sampling_logprobs: log-probabilities under the distribution that was
      sampled from (temperature, top-k and top-p applied); None leaves out the
      correction and the metrics of the sampler.
    ref_logprobs: log-probabilities under the frozen reference policy; None
      where the objective has no such penalty.
    prompt_id: the id of the prompt these responses were made for;
      UNKNOWN_PROMPT, -1, where nobody named it.
    loss_denominator: what this group's summed loss is divided by; fixed for
      the whole step before any replay. None takes the objective's own, of this
      group alone.
    choices: discrete choices (experts, keys) that the sampler made for each
      token it fed, stage -> layer -> name -> [G, L, R, A], to be followed by
      scoring and replay; None lets these choose afresh. Row t belongs to the
      token that is fed to predict response token t, row 0 to the prompt's last
      token; those of the tokens before it are capture's.
    temperature: the responses were sampled with. The policy that is scored and
      trained, with its ratio, KL and entropy, is the tempered one: its logits
      are divided by this. None for 1, and for greedy responses, of which the
      untempered policy is scored.
  """

  responses: Int[Array, "G R"]
  lengths: Int[Array, "G"]
  loss_mask: Bool[Array, "G R"]
  prompt_id: Int[Array, ""]
  rewards: Float[Array, "G"] | None = None
  advantages: Float[Array, "G"] | None = None
  old_logprobs: Float[Array, "G R"] | None = None
  sampling_logprobs: Float[Array, "G R"] | None = None
  ref_logprobs: Float[Array, "G R"] | None = None
  loss_denominator: Float[Array, ""] | None = None
  choices: Tree | None = None
  temperature: Float[Array, ""] | None = None

  @classmethod
  def create(cls, responses, lengths, **known) -> "Group":
    """A group of what is known; every other field is missing.

    Without a loss_mask every real token is trained on.

    Args:
      responses: token ids [G, R].
      lengths: real tokens of each member, [G].
      **known: fields that are known; None is missing.

    Raises:
      ValueError: a field that no group has, of another shape or dtype, a mask
        that counts padding, scores that are not finite where it counts.
    """
    names = [field.name for field in dataclasses.fields(cls)]
    unknown = sorted(set(known) - set(names))
    if unknown:
      raise ValueError(f"a group has no {unknown}: its fields are {names}")
    given = {name: x for name, x in known.items() if x is not None}
    given["prompt_id"] = prompt_stamp(given.get("prompt_id"))
    check_responses(responses, lengths, given.get("loss_mask"), None)
    if "loss_mask" not in given:
      room = np.shape(responses)[1]
      given["loss_mask"] = jnp.arange(room) < jnp.asarray(lengths)[:, None]
    group = cls(responses=responses, lengths=lengths, **given)
    check_fields(group)
    array = lambda name: jnp.asarray(getattr(group, name))
    arrays = {name: array(name) for name in given if name != "choices"}
    arrays["loss_mask"] = as_mask(group.loss_mask, lengths)
    for name in {"loss_denominator", "temperature"} & set(given):
      arrays[name] = arrays[name].astype(jnp.result_type(float))
    return group.replace(
      responses=jnp.asarray(responses, jnp.int32),
      lengths=jnp.asarray(lengths, jnp.int32),
      **arrays,
    )
