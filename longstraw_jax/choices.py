"""Recorded choices (experts, keys) at the door: checked by name, then padded.

Row t belongs to the token that is fed at place t. Of responses that is the
prompt's last token, then the response's own but its last one; of a prompt its
P - 1 captured tokens. Shapes and dtypes are checked always, values where they
are concrete. What jax.jit hides adds nothing where it is out of range.
"""

from collections.abc import Iterator, Mapping

import jax
import jax.numpy as jnp
import numpy as np

from longstraw_jax.checks import concrete
from longstraw_jax.models.contract import Choice
from longstraw_jax.models.model import Model
from longstraw_jax.ops.selection import NO_KEY
from longstraw_jax.types import Tree

_MOST = np.iinfo(np.int32).max


def response_choices(
  model: Model, choices: Tree | None, shape: tuple[int, int], lengths, start
) -> Tree | None:
  """Those of a group, checked, [G, L, R, A] int32; zero at padding.

  Args:
    model: the model.
    choices: stage -> layer -> name -> [G, L, R, A]; what is missing is chosen
      afresh.
    shape: (G, R).
    lengths: real tokens of each member.
    start: position of row 0, the prompt's last token.
  """
  size, room = shape
  first = concrete(start)

  def split(rows: int) -> str:
    if rows <= room:
      return ""
    if first is None or rows not in (first + room, first + room + 1):
      return ". Rows of the prompt's other tokens go to capture(choices=...)"
    return (
      f". These are rows of prompt and response: give rows [{first}, "
      f"{first + room}) here and [0, {first}) to capture(choices=...)"
    )

  found = {}
  for path, x, kind, repeats in _leaves(model, choices):
    name = _name(path)
    _check_layout(
      name, x, (size, repeats, room, kind), "members", "response tokens", split
    )
    real = concrete(lengths)
    if real is not None:
      real = (np.arange(room) < real[:, None])[:, None, :, None]
      _check_values(name, x, kind, real, first)
    real = jnp.arange(room) < jnp.asarray(lengths)[:, None]
    found[path] = _padded(x, kind, real[:, None, :, None], room)
  return _nested(found)


def prompt_choices(
  model: Model,
  choices: Tree | None,
  tokens: int,
  length,
  room: int,
  start=0,
  *,
  padding: bool = False,
) -> Tree | None:
  """Those of a run of captured tokens, checked, [L, room, A]; zero at padding.

  Args:
    model: the model.
    choices: stage -> layer -> name -> [L, tokens, A]; what is missing is chosen
      afresh.
    tokens: rows that are wanted.
    length: real ones of them; may be traced.
    room: rows of the result.
    start: position of row 0.
    padding: whether one row more is welcome, as padded prompts have it.
  """

  def split(rows: int) -> str:
    if rows <= tokens:
      return ""
    return (
      f". Row {tokens} belongs to the prompt's last token, which is replayed: "
      "it and what is behind it go to the group's choices (row 0 there)"
    )

  found = {}
  for path, x, kind, repeats in _leaves(model, choices):
    name = _name(path)
    if padding and x.ndim == 3 and x.shape[1] == tokens + 1:
      x = x[:, :tokens]
    _check_layout(
      name, x, (repeats, tokens, kind), None, "captured tokens", split
    )
    real = concrete(length)
    if real is not None:
      real = (np.arange(tokens) < real)[:, None]
      _check_values(name, x, kind, real, concrete(start))
    real = jnp.arange(tokens) < length
    found[path] = _padded(x, kind, real[:, None], room)
  return _nested(found)


def check_same_layers(state: Tree | None, given: Tree | None) -> None:
  """Refuses to go on with other recorded layers than a state was made with."""
  flat = lambda tree: {
    _name([key.key for key in path])
    for path, _ in jax.tree_util.tree_leaves_with_path(tree)
  }
  before, now = flat(state), flat(given)
  if before != now:
    some = lambda names: ", ".join(sorted(names)) or "none"
    raise ValueError(
      f"the state's tokens follow recorded choices of {some(before)}, the new "
      f"ones of {some(now)}: give both the same, or capture the whole prompt "
      "again"
    )


def _leaves(model: Model, choices: Tree | None) -> Iterator[tuple]:
  """(path, array, what the layer declares, repeats) of all that is recorded."""
  known = model.declared_choices()
  for path, x in _walk(choices, known):
    kind, repeats = known[path[0]][path[1]][path[2]]
    yield path, x if hasattr(x, "dtype") else np.asarray(x), kind, repeats


def _walk(tree: Tree | None, known: Mapping, path=()) -> Iterator[tuple]:
  """(path, leaf); refuses what the model does not declare."""
  if tree is None:
    return
  levels = ("stage", "layer", "choice")
  if not isinstance(tree, Mapping):
    raise ValueError(
      f"{_name(path)} is of type {type(tree).__name__}: give a dict by "
      f"{levels[len(path)]}"
    )
  for key, below in tree.items():
    here = (*path, key)
    if key not in known:
      raise ValueError(
        f"{_name(here)}: the model has no such {levels[len(path)]} that "
        f"chooses there, only {list(known) or 'none'}"
      )
    if len(here) < len(levels):
      yield from _walk(below, known[key], here)
    elif below is not None:
      yield here, below


def _name(path) -> str:
  return "choices" + "".join(f"[{key!r}]" for key in path)


def _check_layout(name: str, x, wanted: tuple, lead, tokens: str, split):
  """Refuses other dtypes than integers and other shapes."""
  if not jnp.issubdtype(x.dtype, jnp.integer):
    raise ValueError(f"{name} has dtype {x.dtype}: give integers")
  *before, rows, kind = wanted
  what = [*([lead] if lead else []), "repeats of the stage", tokens]
  shape, like = tuple(x.shape), (*before, rows, kind.number)
  number = shape[-1] if shape else 0
  few = kind.ids is None and 1 <= number < kind.number
  if shape == like or (few and shape[:-1] == like[:-1]):
    return
  end = ""
  if len(shape) == len(like):
    end = split(shape[-2])
    if shape == (*like[:-3], like[-2], like[-3], like[-1]):
      end = ". Tokens and layers have changed places: swap these axes"
  raise ValueError(
    f"{name} has shape {list(shape)}, wanted is {list(like)}: "
    f"{', '.join(what)}, chosen of a token. Row t belongs to the token that is "
    f"fed at place t{', row 0 to the last of the prompt' if lead else ''}{end}"
  )


def _check_values(name: str, x, kind: Choice, real, start) -> None:
  """Refuses ids out of range or twice, and keys of later tokens."""
  values = concrete(x)
  if values is None or not values.size:
    return
  values = values.astype(np.int64)

  def refuse(bad, why):
    bad = np.argwhere(bad & real)
    if len(bad):
      at = [int(i) for i in bad[0]]
      raise ValueError(f"{name}{at} is {int(values[tuple(at)])}{why}")

  if kind.ids is not None:
    outside = (values < 0) | (values >= kind.ids)
    refuse(outside, f": ids are 0 to {kind.ids - 1}")
  else:
    refuse(values < NO_KEY, f": give a position, or {NO_KEY} for no key")
    if start is not None:
      own = int(start) + np.arange(values.shape[-2])[:, None]
      refuse(values > own, ", the position of a later token: none can be seen")
    none = np.zeros_like(values, bool)
    none[..., 0] = (values == NO_KEY).all(-1)
    refuse(none, " like all others of this token: it needs a key")
  order = np.argsort(values, axis=-1, kind="stable")
  ranked = np.take_along_axis(values, order, -1)
  again = np.zeros_like(values, bool)
  same = (ranked[..., 1:] == ranked[..., :-1]) & (ranked[..., 1:] >= 0)
  np.put_along_axis(again, order[..., 1:], same, -1)
  refuse(again, " a second time: a token chooses each once")


def _padded(x, kind: Choice, real, room: int) -> jax.Array:
  """int32 with `room` rows, zero where no token is real."""
  if not isinstance(x, jax.Array):
    x = np.asarray(x).astype(np.int64).clip(-1, _MOST).astype(np.int32)
  x = jnp.clip(x.astype(jnp.result_type(int)), -1, _MOST).astype(jnp.int32)
  lead = ((0, 0),) * (x.ndim - 2)
  if x.shape[-1] < kind.number:
    wider = (*lead, (0, 0), (0, kind.number - x.shape[-1]))
    x = jnp.pad(x, wider, constant_values=NO_KEY)
  x = jnp.where(real, x, 0)[..., :room, :]
  return jnp.pad(x, (*lead, (0, room - x.shape[-2]), (0, 0)))


def _nested(found: dict) -> Tree | None:
  """The leaves by path as a tree; None where there are none."""
  tree: dict = {}
  for (stage, layer, name), x in found.items():
    tree.setdefault(stage, {}).setdefault(layer, {})[name] = x
  return tree or None
