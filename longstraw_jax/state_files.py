"""Captured states on disk, each stamped with the weights it belongs to.

A state is one safetensors file: every array of the PromptState by its path,
and as metadata a stamp of JSON with the model's configuration and a digest of
every leaf of the weights. A state read under other weights would be silently
wrong, so loading compares both. Rows are in the order of the sequence, however
many devices share them on the mesh that wrote the file or reads it, and however
many processes: the first writes, all of them read, from a disk that they share.
"""

from collections.abc import Iterator
import dataclasses
import functools
import hashlib
import json
import os
import pathlib

from flax import traverse_util
import jax
from jax import Array
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
import numpy as np

from longstraw_jax.checks import (
  check_one_prompt,
  differences,
  listed,
)
from longstraw_jax.distributed import fetch, from_leader, is_leader
from longstraw_jax.lora import frozen_base
from longstraw_jax.models.model import Model, Params
from longstraw_jax.ops.pages import (
  Striping,
  check_place,
  on_host,
  on_owners,
  row_specs,
  take_layer,
  to_host,
)
from longstraw_jax.sharding import WHOLE
from longstraw_jax.staleness import fingerprint
from longstraw_jax.state import (
  PromptState,
  named_leaves,
  saved_carry,
  state_specs,
  tree_zeros,
)
from longstraw_jax.types import Tree
from longstraw_jax.weights.safetensors_files import (
  SafetensorsSource,
  write_safetensors_file,
)
from longstraw_jax.weights.source import TensorInfo

FORMAT = "longstraw_jax state 1"
# What the names of stored rows and of chunks' entry carries begin with.
PAGES, SAVED = "pages.", "saved_carries."
STAMP = {
  "grad_scope": str,
  "chunk_size": int,
  "capacity": int,
  "config": dict,
  "weights": dict,
  "choices": list,
}
MOST_LISTED = 5  # differing leaves in an error message


def save_state(
  path: str | os.PathLike[str],
  model: Model,
  params: Params,
  state: PromptState,
) -> None:
  """Writes a captured state, one array on the host at a time.

  The file appears when it is complete, in place of an older one of its name.
  With several processes all of them call this, and it is there when it returns.

  Args:
    path: of the file; its folder is made if absent.
    model: the model.
    params: the parameters that captured the state; that they are is the
      caller's word. Every leaf is read once and hashed, and under
      `prefix_frozen` the base alone, whose state it is.
    state: one prompt's, from capture or extend.

  Raises:
    ValueError: a state with a batch axis or of another model.
    PeerError: process 0 could not write it; its own message says why.
  """
  check_one_prompt(state)
  stamp = {
    "grad_scope": state.grad_scope,
    "chunk_size": state.chunk_size,
    "capacity": state.capacity or 0,
    "config": _settings(model),
    "weights": weight_digests(params, state.grad_scope),
    "choices": sorted(named_leaves(state.choices)),
  }
  # Of the weights the stamp has a digest a leaf.
  leaves = named_leaves(state.replace(fingerprint=None))
  describe = lambda name, x: TensorInfo(name, x.shape, np.dtype(x.dtype))
  tensors = {name: describe(name, x) for name, x in leaves.items()}
  lines = _misfits(tensors, _blank(model, stamp))
  if lines:
    raise ValueError("the state is not of this model: " + "; ".join(lines))
  left = list(leaves)  # a process that does not write reads along

  def read(name: str) -> np.ndarray:
    left.remove(name)
    return _collected(state.striping, name, leaves[name])

  def read_along() -> None:
    while left and jax.process_count() > 1:
      read(left[0])

  def write() -> np.ndarray:
    items = [(tensors[name], functools.partial(read, name)) for name in leaves]
    metadata = {"format": FORMAT, "stamp": json.dumps(stamp)}
    try:
      write_safetensors_file(path, items, metadata)
    finally:
      read_along()
    return np.zeros(())

  if not is_leader():
    read_along()
  from_leader(write, ())


def load_state(
  path: str | os.PathLike[str],
  model: Model,
  params: Params,
  *,
  pages: str = "device",
) -> PromptState:
  """Reads a state that save_state wrote, equal to the bit.

  On a mesh its pages are dealt to the devices as capture deals them.

  Args:
    path: of the file.
    model: the model, of the same configuration; its name does not matter.
    params: the parameters, of the same numbers; which of them learn does not
      matter. Under `prefix_frozen` only the base must be the same.
    pages: where they go, as in capture, wherever they were.

  Raises:
    FileNotFoundError: there is no such file.
    ValueError: it is no whole file of a state, or belongs to another
      configuration or other weights; names what differs.
  """
  check_place(pages)
  path = pathlib.Path(path)
  if not path.is_file():
    raise FileNotFoundError(f"there is no state in {str(path)!r}")
  try:
    source = SafetensorsSource(path)
  except ValueError as error:
    message = f"no whole state: {error}, or capture the prompt again"
    raise ValueError(message) from error
  stamp = _read_stamp(path, source.metadata)
  _check_config(path, stamp["config"], model)
  like = _blank(model, stamp)
  lines = _misfits(source.tensors, like)
  if lines:
    raise _refuse(path, "; ".join(lines))
  _check_weights(path, stamp["weights"], params, stamp["grad_scope"])
  specs = named_leaves(state_specs(like))
  arrays = [
    _dealt(like.striping, name, source.read(name), specs[name], pages)
    for name in named_leaves(like)
  ]
  state = jax.tree.unflatten(jax.tree.structure(like), arrays)
  return state.replace(fingerprint=fingerprint(params, state.grad_scope))


def _collected(striping: Striping | None, name: str, x: Array) -> np.ndarray:
  """An array on the host, rows in the order of the sequence."""
  dealt = striping is not None and name.startswith(PAGES)
  values = _fetched(striping, name, x)
  return striping.collect(values) if dealt else values


def _fetched(striping: Striping | None, name: str, x: Array) -> np.ndarray:
  """An array on the host; of other processes, a layer or a chunk at a time."""
  if x.is_fully_addressable or x.ndim == 0:
    return fetch(x)
  take = lambda x, i: x[i]
  if on_host(x) and name.startswith(PAGES):
    specs = row_specs(x)
    cut = on_owners(striping, take_layer, (specs, WHOLE), specs)
    take = lambda x, i: cut(x, i)[0]
  elif on_host(x):
    take = functools.partial(saved_carry, striping=striping)
  take = jax.jit(take)
  values = np.empty(x.shape, x.dtype)
  for i in range(x.shape[0]):
    values[i] = fetch(take(x, jnp.int32(i)))
  return values


def _dealt(
  striping: Striping | None,
  name: str,
  x: np.ndarray,
  spec: PartitionSpec,
  pages: str,
) -> Array:
  """The inverse of _collected, on the current mesh's devices or their host."""
  x = x.copy()  # the file may change
  host = pages == "host" and name.startswith((PAGES, SAVED))
  mesh = jax.sharding.get_mesh()
  if mesh.empty:
    return to_host(x) if host else jnp.asarray(x)
  if striping is not None and name.startswith(PAGES):
    x = striping.deal(x)
  kind = "pinned_host" if host else None
  return jax.device_put(x, NamedSharding(mesh, spec, memory_kind=kind))


def weight_digests(params: Params, grad_scope: str) -> dict[str, str]:
  """SHA-256 of every leaf that a state depends on, by its path a/b/c.

  Of dtype, shape and bytes. Whether a leaf learns is not part of it.

  Args:
    params: the parameters; one leaf is on the host at a time.
    grad_scope: of the state; `prefix_frozen` depends on the base alone.
  """
  if grad_scope == "prefix_frozen":
    params = frozen_base(params)
  leaves = traverse_util.flatten_dict(params.merged(), sep="/")
  return {path: _digest(leaves[path]) for path in sorted(leaves)}


def _digest(leaf: Array) -> str:
  """Of an array, or of a stored form such as Nf4, which is several."""
  kind = f"{jnp.dtype(leaf.dtype).name} {list(leaf.shape)}"
  found = hashlib.sha256(kind.encode())
  for part in jax.tree.leaves(leaf):
    for values in _in_order(part):
      found.update(np.ascontiguousarray(values).reshape(-1).view(np.uint8))
  return found.hexdigest()


def _in_order(x: Array) -> Iterator[np.ndarray]:
  """The values of an array; of other processes, and stacked, one by one."""
  if getattr(x, "is_fully_addressable", True) or x.ndim < 3:
    yield fetch(x)
  else:
    yield from (fetch(x[i]) for i in range(x.shape[0]))


def _settings(model: Model) -> dict:
  """The configuration as JSON gives it back, but for its name."""
  fields = dataclasses.asdict(model.config)
  del fields["name"]
  return json.loads(json.dumps(fields))


def _blank(model: Model, stamp: dict) -> PromptState:
  """A state of a stamp's sizes and this session's dtypes, as shapes."""
  scope, chunk_size = stamp["grad_scope"], stamp["chunk_size"]
  capacity, number = stamp["capacity"], jnp.int32(0)

  def make():
    carry = tree_zeros(model.state_shapes(1)[1])
    state = PromptState(
      pages=tree_zeros(model.state_shapes(capacity)[0]),
      carry=carry,
      saved_carries={},
      last_token=number,
      length=number,
      first_chunk=number,
      step=number,
      prompt_id=number,
      grad_scope=scope,
      chunk_size=chunk_size,
      striping=Striping.of_mesh(chunk_size),
    )
    state = state.replace(choices=_blank_choices(model, stamp))
    if not state.differentiated:
      return state
    chunks = (capacity // chunk_size,)
    each = lambda x: jnp.broadcast_to(x, chunks + x.shape)
    return state.replace(saved_carries=jax.tree.map(each, carry))

  return jax.eval_shape(make)


def _blank_choices(model: Model, stamp: dict) -> Tree | None:
  """Those that the stamp names and the model makes."""
  tree: dict = {}
  for stage, layers in model.declared_choices().items():
    for layer, names in layers.items():
      for name, (kind, repeats) in names.items():
        if f"{stage}.{layer}.{name}" in stamp["choices"]:
          shape = (repeats, stamp["capacity"], kind.number)
          zeros = jnp.zeros(shape, jnp.int32)
          tree.setdefault(stage, {}).setdefault(layer, {})[name] = zeros
  return tree or None


def _misfits(tensors: dict[str, TensorInfo], like: PromptState) -> list[str]:
  """Arrays that are missing, left over or of another shape or dtype."""
  describe = lambda x: f"{np.dtype(x.dtype).name}{list(x.shape)}"
  found = {name: describe(x) for name, x in tensors.items()}
  wanted = {name: describe(x) for name, x in named_leaves(like).items()}
  return differences(found, wanted)


def _read_stamp(path: pathlib.Path, metadata: dict[str, str]) -> dict:
  found = metadata.get("format")
  if found != FORMAT:
    raise _refuse(path, f"its format is {found!r}, not {FORMAT!r}")
  try:
    stamp = json.loads(metadata.get("stamp", ""))
    stamp = {"choices": []} | stamp  # files without any need not say so
    whole = all(isinstance(stamp[name], kind) for name, kind in STAMP.items())
  except (ValueError, KeyError, TypeError):
    whole = False
  if not whole:
    raise _refuse(path, f"its stamp does not hold {', '.join(STAMP)}")
  return stamp


def _refuse(path: pathlib.Path, wrong: str) -> ValueError:
  return ValueError(
    f"no whole state: {str(path)!r} cannot be read: {wrong}; fetch it again, "
    "or capture the prompt again"
  )


def _check_config(path: pathlib.Path, found: dict, model: Model) -> None:
  other = differences(found, _settings(model))
  if other:
    raise ValueError(
      f"the state in {str(path)!r} is of another configuration: "
      + "; ".join(other)
      + ". Load it with that model, or capture the prompt again"
    )


def _check_weights(
  path: pathlib.Path, found: dict, params: Params, grad_scope: str
) -> None:
  wanted = weight_digests(params, grad_scope)
  names = sorted(set(found) | set(wanted))
  other = [name for name in names if found.get(name) != wanted.get(name)]
  if other:
    raise ValueError(
      f"the state in {str(path)!r} is of other weights: {len(other)} of "
      f"{len(names)} leaves differ ({listed(other, MOST_LISTED)}). Load it "
      "with the weights that made it, or capture the prompt again"
    )
