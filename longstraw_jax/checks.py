"""Refusals of bad input; each error names the value and the remedy.

Values are checked where they are concrete; under jax.jit a traced array has
none and passes.
"""

from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from longstraw_jax.ops.precision import wide_dtype

GRAD_SCOPES = ("response_only", "full", "tail", "prefix_frozen")
CONSTANT_SCOPES = ("response_only", "prefix_frozen")  # no gradient to prompts


def concrete(x):
  """The value as a numpy array, or None where it is traced or absent.

  Absent is also what only other processes hold.
  """
  if x is None or isinstance(x, (jax.core.Tracer, jax.ShapeDtypeStruct)):
    return None
  if isinstance(x, jax.Array) and not (
    x.is_fully_addressable or x.is_fully_replicated
  ):
    return None
  return np.asarray(x)


def dtype_of(x) -> np.dtype:
  """Of an array, also of a traced one, or of what numpy makes of nested lists.

  Raises:
    ValueError: lists of unequal lengths.
  """
  return np.dtype(getattr(x, "dtype", None) or np.asarray(x).dtype)


def differences(found: Mapping, wanted: Mapping, path: str = "") -> list[str]:
  """Leaves in which two nested settings differ, as readable lines."""
  lines = []
  for name in sorted(set(found) | set(wanted)):
    a, b = found.get(name), wanted.get(name)
    where = f"{path}{name}"
    if isinstance(a, Mapping) and isinstance(b, Mapping):
      lines += differences(a, b, where + ".")
    elif a != b:
      lines.append(f"{where} is {a!r} there and {b!r} here")
  return lines


def listed(names: Sequence[str], most: int) -> str:
  """Names in one line, those beyond the first `most` as their number."""
  more = len(names) - most
  text = ", ".join(names[:most])
  return f"{text} and {more} more" if more > 0 else text


def check_weights(config, tree: Mapping, path: str = "") -> None:
  """Refuses weights that are wider than what the model computes in.

  float32 is never too wide, as adapters, norms and gates are kept in it beside
  bfloat16, and narrower weights are widened where they are used.

  Args:
    config: of the model.
    tree: nested dicts of its weights.
    path: where in them this is.
  """
  for name, leaf in tree.items():
    if isinstance(leaf, Mapping):
      check_weights(config, leaf, f"{path}{name}/")
      continue
    dtype, widest = jnp.dtype(leaf.dtype), wide_dtype(config.dtype)
    if not jnp.issubdtype(dtype, jnp.floating):
      raise ValueError(
        f"the weights' {path}{name} are of dtype {dtype}: give floating numbers"
      )
    if dtype.itemsize > widest.itemsize:
      raise ValueError(
        f"the weights' {path}{name} are of dtype {dtype}, the model computes "
        f"in {config.dtype} and its param_dtype is {config.param_dtype}: cast "
        "them to it, or take a model of theirs"
      )


def check_chunk_size(name: str, value: int) -> None:
  """Refuses sizes below 1."""
  if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
    raise ValueError(f"{name} is {value!r}: give a positive integer")
  if value < 1:
    raise ValueError(f"{name} is {value}: give at least 1 token")


def check_scope(grad_scope: str, tail_chunks: int | None) -> None:
  """Refuses unknown scopes and tail without its number of chunks."""
  if grad_scope not in GRAD_SCOPES:
    raise ValueError(f"grad_scope is {grad_scope!r}: use one of {GRAD_SCOPES}")
  if grad_scope == "tail":
    if tail_chunks is None or tail_chunks < 0:
      raise ValueError(
        f"tail_chunks is {tail_chunks!r}: grad_scope 'tail' needs the number "
        "of chunks to walk back over, 0 or more"
      )
  elif tail_chunks is not None:
    raise ValueError(
      f"tail_chunks is {tail_chunks!r} but grad_scope is {grad_scope!r}: only "
      "grad_scope='tail' takes it"
    )


def check_ids(name: str, ids, vocab_size: int) -> None:
  """Refuses token ids outside [0, vocab_size)."""
  values = concrete(ids)
  if values is None:
    return
  bad = np.argwhere((values < 0) | (values >= vocab_size))
  if len(bad):
    place = tuple(int(i) for i in bad[0])
    raise ValueError(
      f"{name}{list(place)} is {int(values[place])}, outside the vocabulary "
      f"of {vocab_size}: tokenize with the model's own tokenizer"
    )


def check_tokens(name: str, tokens, length, vocab_size: int) -> None:
  """Refuses no tokens, wrong lengths and ids outside the vocabulary."""
  shape = np.shape(tokens)
  if len(shape) != 1 or shape[0] == 0:
    axis = name[0].upper()
    raise ValueError(
      f"{name} has shape {shape}: give at least one token id, as [{axis}]"
    )
  room = shape[0]
  real = room if length is None else concrete(length)
  if real is None:
    return
  if not 1 <= int(real) <= room:
    raise ValueError(
      f"length is {int(real)} but {name} holds {room} tokens: give 1 to {room}"
    )
  values = concrete(tokens)
  if values is not None:
    check_ids(name, values[: int(real)], vocab_size)


def check_capacity(capacity: int | None, captured) -> None:
  """Refuses a capacity below the tokens that are captured, where known."""
  if capacity is None:
    return
  check_chunk_size("capacity", capacity)
  captured = concrete(captured)
  if captured is not None and int(captured) > capacity:
    raise ValueError(
      f"the prompt's {int(captured) + 1} tokens need a capacity of "
      f"{int(captured)}, which is {capacity}: raise capacity"
    )


def check_integers(name: str, x) -> None:
  """Refuses anything but integers, which a cast would make ids of."""
  dtype = dtype_of(x)
  if not jnp.issubdtype(dtype, jnp.integer):
    raise ValueError(f"{name} are of dtype {dtype}: give integers")


def check_responses(
  responses,
  lengths,
  loss_mask,
  vocab_size: int | None,
  max_tokens: int | None = None,
) -> None:
  """Refuses empty or over-long responses and ids outside the vocabulary.

  Args:
    responses: token ids.
    lengths: real tokens of each.
    loss_mask: of the same shape, or None.
    vocab_size: of the model; None is unknown.
    max_tokens: the longest response allowed; R by default.
  """
  try:
    shape = np.shape(responses)
  except ValueError:
    raise ValueError(
      "responses are lists of unequal lengths: pad them, and give the lengths"
    ) from None
  if len(shape) != 2 or 0 in shape:
    raise ValueError(
      f"responses have shape {shape}: give [G, R] ids with G, R at least 1"
    )
  group_size, room = shape
  room = room if max_tokens is None else min(room, max_tokens)
  if np.shape(lengths) != (group_size,):
    raise ValueError(
      f"lengths have shape {np.shape(lengths)} but responses have shape "
      f"{shape}: give one length a member"
    )
  if loss_mask is not None and np.shape(loss_mask) != shape:
    raise ValueError(
      f"loss_mask has shape {np.shape(loss_mask)} but responses have shape "
      f"{shape}: give one flag a token"
    )
  check_integers("responses", responses)
  check_integers("lengths", lengths)
  real = concrete(lengths)
  if real is None:
    return
  for member, value in enumerate(real.tolist()):
    if not 1 <= value <= room:
      kind = "empty" if value < 1 else "over-long"
      raise ValueError(
        f"member {member} has an {kind} response: lengths[{member}] is "
        f"{value}, allowed are 1 to {room}"
      )
  values = concrete(responses)
  if values is not None:
    inside = np.arange(shape[1]) < real[:, None]
    vocab_size = 2**31 if vocab_size is None else vocab_size  # of int32
    check_ids("responses", np.where(inside, values, 0), vocab_size)


def check_temperature(temperature) -> None:
  """Refuses temperatures that no policy can be divided by."""
  if temperature is None:
    return
  if np.shape(temperature) != ():
    raise ValueError(
      f"temperature has shape {np.shape(temperature)}: give one number a group"
    )
  value = concrete(temperature)
  if value is not None and not 0 < float(value) < np.inf:
    raise ValueError(
      f"temperature is {float(value)}: give a positive number, or None for 1 "
      "(greedy responses are scored under the untempered policy)"
    )


def check_one_prompt(state) -> None:
  """Refuses a state with a batch axis."""
  shape = np.shape(state.length)
  if shape:
    raise ValueError(
      f"the state has a batch axis, {list(shape)}: take one prompt's out of it"
    )


def check_step(state, step) -> None:
  """Refuses a state of another step's weights; None leaves it to the caller.

  A `prefix_frozen` state is of the base's weights, which no step changes.
  """
  made, wanted = concrete(state.step), concrete(step)
  frozen = state.grad_scope == "prefix_frozen"
  known = made is not None and wanted is not None and not frozen
  if known and int(made) != int(wanted):
    raise ValueError(
      f"the state was made by the weights of step {int(made)}, these are of "
      f"step {int(wanted)}: capture it again"
    )


def check_prompt_of(state, prompt) -> None:
  """Refuses another prompt than the state's, as far as the state knows it.

  That is the last token; where `prompt` stops before it nothing is known.
  """
  values, last = concrete(prompt), concrete(state.last_token)
  captured = concrete(state.length)
  if values is None or last is None or captured is None:
    return
  place = int(captured)
  if place < len(values) and int(values[place]) != int(last):
    raise ValueError(
      f"the state is of another prompt: its last token, prompt[{place}], is "
      f"{int(last)} there and {int(values[place])} here: capture it again"
    )


def check_state(state, prompt, length, grad_scope, chunk_size, step) -> None:
  """Refuses a state of other weights, prompt, scope or chunk size."""
  check_one_prompt(state)
  check_step(state, step)
  # One chunk is one chunk: capture cuts chunk_size down to a short prompt.
  room = max(np.shape(prompt)[0] - 1, 1)
  chunked = (min(size, room) for size in (state.chunk_size, chunk_size))
  if state.grad_scope != grad_scope or len(set(chunked)) > 1:
    raise ValueError(
      f"the state was captured with grad_scope {state.grad_scope!r} and "
      f"chunk_size {state.chunk_size}, wanted are {grad_scope!r} and "
      f"{chunk_size}: capture it again"
    )
  real = concrete(np.shape(prompt)[0] if length is None else length)
  captured = concrete(state.length)
  if real is not None and captured is not None and int(real) != captured + 1:
    raise ValueError(
      f"the state holds a prompt of {int(captured) + 1} tokens, this one has "
      f"{int(real)}: capture it again"
    )
  check_prompt_of(state, prompt)
