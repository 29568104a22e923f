"""Refusals of malformed groups, where they are made and where they are used.

As in checks.py values are checked where they are concrete, shapes and dtypes
always.
"""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int
import numpy as np

from longstraw_jax.checks import (
  check_responses,
  check_temperature,
  concrete,
  dtype_of,
)

UNKNOWN_PROMPT = -1  # the id of a prompt that nobody named
PER_MEMBER = ("advantages", "rewards")
PER_TOKEN = ("old_logprobs", "sampling_logprobs", "ref_logprobs")
INT32 = np.iinfo(np.int32)


def prompt_stamp(prompt_id) -> Int[Array, ""]:
  """An id as arrays carry it; None is UNKNOWN_PROMPT.

  Raises:
    ValueError: no integer from 0 on that int32 holds.
  """
  if prompt_id is None:
    prompt_id = UNKNOWN_PROMPT
  value = concrete(prompt_id)
  whole = jnp.issubdtype(dtype_of(prompt_id), jnp.integer)
  if not whole or (
    value is not None and ((value < UNKNOWN_PROMPT) | (value > INT32.max)).any()
  ):
    raise ValueError(
      f"prompt_id is {prompt_id}: give an integer from 0 to {INT32.max}, or "
      "None where it is unknown"
    )
  return jnp.asarray(prompt_id, jnp.int32)


def check_same_prompt(**ids) -> None:
  """Refuses ids of one prompt that differ, wherever two are known.

  Args:
    **ids: who carries it -> an id, or [B] of them; None, UNKNOWN_PROMPT and
      traced ones are not known.
  """
  found = {name: concrete(x) for name, x in ids.items()}
  found = [(name, x) for name, x in found.items() if x is not None]
  for i, (name, a) in enumerate(found):
    for other, b in found[i + 1 :]:
      known = (a != UNKNOWN_PROMPT) & (b != UNKNOWN_PROMPT)
      wrong = np.argwhere(known & (a != b))
      if len(wrong):
        place = tuple(wrong[0])
        a, b = (np.broadcast_to(x, known.shape)[place] for x in (a, b))
        where = f" (entry {int(place[0])})" if place else ""
        raise ValueError(
          f"the {name}{where} belongs to prompt {a}, not to prompt {b} like "
          f"the {other}: replay a group over the state of the prompt that it "
          "was sampled from"
        )


def token_mask(group) -> Bool[Array, "G R"]:
  """The group's loss mask as bools, false at padding."""
  return as_mask(group.loss_mask, group.lengths)


def as_mask(loss_mask, lengths=None) -> Bool[Array, "G R"]:
  """A loss mask as bools, false at padding where lengths are given.

  Raises:
    ValueError: it is neither of bools nor of 0 and 1.
  """
  dtype, values = dtype_of(loss_mask), concrete(loss_mask)
  whole = dtype.kind in "biu"
  if not whole or (values is not None and not np.isin(values, (0, 1)).all()):
    raise ValueError(
      f"loss_mask is of dtype {dtype} and not of bools, or of 0 and 1, alone: "
      "give True where the policy wrote the token and is trained on it"
    )
  mask = jnp.asarray(loss_mask) != 0
  if lengths is None:
    return mask
  return mask & (jnp.arange(mask.shape[-1]) < jnp.asarray(lengths)[..., None])


def check_fields(group, vocab_size: int | None = None) -> None:
  """Refuses a group whose fields do not fit each other.

  Args:
    group: with fields as in types.Group; None is a missing one.
    vocab_size: of the model; None leaves the ids alone.
  """
  check_responses(group.responses, group.lengths, group.loss_mask, vocab_size)
  shape = np.shape(group.responses)
  for name in PER_MEMBER:
    check_numbers(name, getattr(group, name), shape[:1], "one a member")
  for name in PER_TOKEN:
    check_numbers(name, getattr(group, name), shape, "one a token")
  check_numbers("loss_denominator", group.loss_denominator, (), "one number")
  check_temperature(group.temperature)
  _check_finite(group)
  _check_mask(group)


def check_numbers(name: str, x, shape: tuple[int, ...], remedy: str) -> None:
  """Refuses an array of another shape, or of anything but real numbers."""
  if x is None:
    return
  if np.shape(x) != shape:
    raise ValueError(
      f"group.{name} has shape {np.shape(x)} and not {list(shape)}: give "
      f"{remedy}"
    )
  dtype = dtype_of(x)
  real = dtype.kind in "biu" or jnp.issubdtype(dtype, jnp.floating)
  if not real:
    raise ValueError(f"group.{name} is of dtype {dtype}: give real numbers")


def _check_finite(group) -> None:
  """Refuses NaN and infinities where something would be made of them."""
  for name in PER_MEMBER:
    values = concrete(getattr(group, name))
    if values is not None and not np.isfinite(values).all():
      member = int(np.argmin(np.isfinite(values)))
      raise ValueError(
        f"member {member} has {name[:-1]} {values[member]}: its reward is "
        "missing or not finite"
      )
  value = concrete(group.loss_denominator)
  if value is not None and not 0 < value < np.inf:
    raise ValueError(
      f"loss_denominator is {value}: give a positive number, or None for the "
      "objective's own"
    )


def _check_mask(group) -> None:
  """Refuses a mask that counts padding, and scores of NaN where it counts."""
  trained = concrete(as_mask(group.loss_mask, group.lengths))
  mask = concrete(group.loss_mask)
  if trained is None:
    return
  wrong = np.argwhere((mask != 0) & ~trained) if mask is not None else ()
  if len(wrong):
    member, token = map(int, wrong[0])
    raise ValueError(
      f"loss_mask counts token {token} of member {member}, whose response has "
      f"{int(concrete(group.lengths)[member])} tokens: padding is not trained "
      "on, so let the mask be false from lengths on"
    )
  for name in PER_TOKEN:
    values = concrete(getattr(group, name))
    if values is None:
      continue
    wrong = np.argwhere(trained & ~np.isfinite(values.astype(np.float64)))
    if len(wrong):
      member, token = map(int, wrong[0])
      raise ValueError(
        f"{name} of member {member} at token {token} is "
        f"{values[member, token]}, and the token is trained on: score it, mask "
        f"it, or leave {name} out"
      )


def check_group(group, vocab_size: int, prompt_id=None, state=None) -> None:
  """Refuses malformed groups and groups made for another prompt.

  Args:
    group: one prompt's.
    vocab_size: of the model.
    prompt_id: the id that the group must carry, or None.
    state: of the prompt, or None.
  """
  check_fields(group, vocab_size)
  check_same_prompt(
    group=group.prompt_id,
    state=None if state is None else state.prompt_id,
    prompt_id=prompt_id,
  )
