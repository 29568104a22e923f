"""Scores of responses: how to name a reward function and how to call it.

`reward_fn(prompt_text, response_text, info)` returns one number. A function
that declares parameters of these names, or takes **kwargs, gets them by keyword
as well:

  prompt_ids    [P] int32, the ids that the policy read
  response_ids  [R] int32, all that it sampled, the stop id included
  truncated     True where no stop id came within the room of a response

The response's text holds everything that was sampled but the stop id that ended
it, special tokens by their names. Nothing that a function does wrong gets as
far as an advantage.
"""

from collections.abc import Callable, Sequence
import copy
import importlib
import inspect
import numbers
from typing import Any

import numpy as np

from longstraw_jax.interrupts import Interrupted

RewardFn = Callable[..., float]
KEYWORDS = ("prompt_ids", "response_ids", "truncated")


class RewardError(ValueError):
  """A reward function that cannot be found, or gave something unusable."""


def load_reward(spec: str) -> RewardFn:
  """Finds a reward function by name.

  Args:
    spec: "package.module:function".

  Returns:
    The function.

  Raises:
    RewardError: if the spec has another form, the module cannot be imported,
      or it has no callable of that name that takes what rewards are given.
  """
  module_name, _, function_name = spec.partition(":")
  if not module_name or not function_name:
    raise RewardError(
      f"reward {spec!r} has not the form 'package.module:function', such as"
      " 'longstraw_jax.rewards:exact_match'"
    )
  try:
    module = importlib.import_module(module_name)
  except KeyboardInterrupt:
    raise
  except BaseException as error:  # anything, sys.exit too, while it loads
    raise RewardError(
      f"reward {spec!r}: importing {module_name!r} failed with"
      f" {type(error).__name__}: {error}"
    ) from error
  function = getattr(module, function_name, None)
  if not callable(function):
    found = "no such name" if function is None else f"a {type(function)}"
    raise RewardError(
      f"reward {spec!r}: {module_name!r} has {found} where a function"
      f" {function_name!r} should be"
    )
  try:
    declared_keywords(function)
  except RewardError as error:
    raise RewardError(f"reward {spec!r}: {error}") from error
  return function


def declared_keywords(reward_fn: RewardFn) -> tuple[str, ...]:
  """Which of `KEYWORDS` a reward function declares.

  Args:
    reward_fn: any callable; one without a signature declares none.

  Raises:
    RewardError: if it cannot be called with the three arguments, or demands a
      further one that no reward is given.
  """
  try:
    signature = inspect.signature(reward_fn)
  except (TypeError, ValueError):  # some callables written in C
    return ()
  parameters = list(signature.parameters.values())
  kinds = inspect.Parameter
  if any(p.kind is kinds.VAR_KEYWORD for p in parameters):
    names = KEYWORDS
  else:
    by_name = (kinds.POSITIONAL_OR_KEYWORD, kinds.KEYWORD_ONLY)
    places = (kinds.POSITIONAL_ONLY, kinds.POSITIONAL_OR_KEYWORD)
    taken = [p.name for p in parameters if p.kind in places][:3]
    declared = {p.name for p in parameters if p.kind in by_name}
    names = tuple(n for n in KEYWORDS if n in declared and n not in taken)
  try:
    signature.bind("", "", {}, **dict.fromkeys(names))
  except TypeError as error:
    raise RewardError(
      f"the function's signature is {signature} ({error}): it is called as"
      " reward(prompt_text, response_text, info), with"
      f" {', '.join(KEYWORDS)} by keyword where it declares them"
    ) from error
  return names


def exact_match(prompt_text: str, response_text: str, info: dict) -> float:
  """1 if the response is the answer but for surrounding space, else 0.

  Args:
    prompt_text: not looked at.
    response_text: what the policy wrote.
    info: holds the expected text under "answer".

  Returns:
    1.0 or 0.0.

  Raises:
    KeyError: if `info` has no "answer".
  """
  del prompt_text
  if "answer" not in info:
    raise KeyError(f"exact_match needs info['answer'], got keys {list(info)}")
  return float(response_text.strip() == str(info["answer"]).strip())


def score_responses(
  reward_fn: RewardFn,
  prompt_text: str,
  response_texts: Sequence[str],
  info: dict,
  *,
  group_size: int | None = None,
  prompt_id: int | None = None,
  prompt_ids: np.ndarray | None = None,
  response_ids: Sequence[np.ndarray] | None = None,
  truncated: Sequence[bool] | None = None,
) -> np.ndarray:
  """Scores the members of one group, one call each.

  Each call gets a deep copy of its own of `info` and of all ids, so that a
  function that writes into them cannot let one member see another.

  Args:
    reward_fn: called as `reward_fn(prompt_text, response_text, info)`, and with
      those of `KEYWORDS` that it declares.
    prompt_text: the prompt that all members answer.
    response_texts: one text a member.
    info: what the task knows about the prompt.
    group_size: the number of members there should be, if known.
    prompt_id: named in errors, if given.
    prompt_ids: ids of the prompt, for functions that declare them.
    response_ids: likewise, of each member.
    truncated: likewise, whether each member was cut off.

  Returns:
    [G] finite float32 rewards.

  Raises:
    RewardError: naming the member (and the prompt, if given) for which the
      function raised or returned anything but one finite number; or the counts,
      if there are not `group_size` responses or none at all; or the keyword
      that the function declares and nobody gave.
  """
  where = "" if prompt_id is None else f" of prompt {prompt_id}"
  expected = len(response_texts) if group_size is None else group_size
  if len(response_texts) != expected or not expected:
    raise RewardError(
      f"got {len(response_texts)} responses{where}, expected"
      f" {expected or 'at least 1'}"
    )
  per_member = {"response_ids": response_ids, "truncated": truncated}
  given = {k: v for k, v in per_member.items() if v is not None}
  if prompt_ids is not None:
    given["prompt_ids"] = [prompt_ids] * expected
  keywords = declared_keywords(reward_fn)
  if lacking := [name for name in keywords if name not in given]:
    raise RewardError(f"the reward function asks for {lacking}: give them")
  rewards_G = np.zeros(expected, np.float32)
  for member, response_text in enumerate(response_texts):
    try:
      own = copy.deepcopy(
        (info, {name: given[name][member] for name in keywords})
      )
      value = reward_fn(prompt_text, response_text, own[0], **own[1])
    except (KeyboardInterrupt, Interrupted):
      raise  # the run's own end
    except BaseException as error:  # sys.exit too would end it without a word
      raise RewardError(
        f"the reward function raised {type(error).__name__} for member"
        f" {member}{where}: {error}"
      ) from error
    try:
      rewards_G[member] = _finite_number(value)
    except (TypeError, ValueError, OverflowError) as error:
      raise RewardError(
        f"the reward of member {member}{where} is unusable: {error}; return"
        " one finite number"
      ) from error
  return rewards_G


def _finite_number(value: Any) -> np.float32:
  """One finite float32 out of what a reward function returned.

  Args:
    value: a real number or boolean, of Python, numpy or jax.

  Returns:
    Its float32 value.

  Raises:
    TypeError: if it is no single real number.
    OverflowError: if it is not finite in float32.
  """
  if not isinstance(value, numbers.Real | np.bool_):
    array = np.asarray(value)
    if array.shape != () or array.dtype.kind not in "biuf":
      shown = repr(value)
      shown = shown if len(shown) <= 80 else shown[:77] + "..."
      raise TypeError(f"got {shown} of type {type(value).__name__}")
    value = array[()]
  with np.errstate(over="ignore"):
    number = np.float32(float(value))
  if not np.isfinite(number):
    raise OverflowError(f"got {value!r}, not finite in float32")
  return number
