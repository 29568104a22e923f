"""Loads a checkpoint: a folder of the transformers library, or a GGUF file."""

from collections.abc import Callable, Iterable, Mapping
import dataclasses
import functools
import math
import os
import pathlib
import re
from typing import Any

from flax import traverse_util
import jax
from jax import Array, lax
import jax.numpy as jnp
import numpy as np

from longstraw_jax.checks import listed
from longstraw_jax.config import ModelConfig, check_dtype
from longstraw_jax.json_files import read_object
from longstraw_jax.models.model import Model, Params
from longstraw_jax.weights.dtypes import parameter_dtypes
from longstraw_jax.weights.families import config_from_hf
from longstraw_jax.weights.families.gguf import ROPE_FACTORS, gguf_config
from longstraw_jax.weights.families.hf_config import family_of, stored_dtype
from longstraw_jax.weights.gguf_files import GgufSource
from longstraw_jax.weights.names import (
  EMBEDDING,
  TRUNKS,
  gguf_naming,
  hf_naming,
)
from longstraw_jax.weights.safetensors_files import SafetensorsSource
from longstraw_jax.weights.slots import (
  Form,
  Naming,
  Shape,
  Slot,
  parameter_shapes,
  tensor_slots,
)
from longstraw_jax.weights.source import TensorSource
from longstraw_jax.weights.unknown_keys import check_ignored

CONFIG_NAME = "config.json"
MOST_LISTED = 50  # tensors of one kind of trouble in an error message

# From a parameter's path a/b/c and shape to where it belongs.
Placement = Callable[[str, Shape], jax.sharding.Sharding]


@dataclasses.dataclass(frozen=True)
class Checkpoint:
  """An open checkpoint and what it says of its model.

  Attributes:
    source: its tensors.
    settings: the keys of its config.json; those of a GGUF file translated.
    dtype: of its weights and activations, where it says so.
    ignored: regular expressions of tensors that are not asked for.
    make_naming: what its tensors are called, given the model.
  """

  source: TensorSource
  settings: Mapping[str, Any]
  dtype: str | None
  ignored: tuple[str, ...]
  make_naming: Callable[[ModelConfig], Naming]


def read_config(path: str | os.PathLike[str]) -> dict[str, Any]:
  """The keys of a config.json.

  Args:
    path: the file, or the folder that holds it.

  Raises:
    FileNotFoundError: if there is none.
    ValueError: if it holds no JSON object.
  """
  file = pathlib.Path(path)
  if file.is_dir():
    file = file / CONFIG_NAME
  if not file.is_file():
    raise FileNotFoundError(
      f"no {CONFIG_NAME} at {str(path)!r}: give the folder of a downloaded "
      "checkpoint"
    )
  return read_object(file)


def open_checkpoint(
  path: str | os.PathLike[str], ignore_keys: Iterable[str] = ()
) -> Checkpoint:
  """Opens a checkpoint without reading a weight.

  Args:
    path: a folder with config.json and safetensors, or a .gguf file.
    ignore_keys: unknown keys of a .gguf file's metadata to pass over.

  Raises:
    FileNotFoundError: if there is no such checkpoint, or a part is missing.
    ValueError: if a file is malformed, or the model is of no known family.
  """
  path = pathlib.Path(path)
  if path.suffix == ".gguf":
    source = GgufSource(path)
    return Checkpoint(
      source=source,
      settings=gguf_config(source, ignore_keys),
      dtype=None,
      ignored=(re.escape(ROPE_FACTORS),),
      make_naming=functools.partial(
        gguf_naming, source.metadata["general.architecture"]
      ),
    )
  if not path.is_dir():
    raise FileNotFoundError(
      f"{str(path)!r} is no folder and no .gguf file: give the folder of a "
      "downloaded checkpoint"
    )
  values = read_config(path)
  family, settings = family_of(values)
  source = SafetensorsSource(path)
  found = [trunk for trunk in TRUNKS if trunk + EMBEDDING in source.tensors]
  naming = hf_naming(*found[:1])
  return Checkpoint(
    source=source,
    settings=values,
    dtype=stored_dtype(settings),
    ignored=family.ignored(settings),
    make_naming=lambda config: naming,
  )


def load_pretrained(
  path: str | os.PathLike[str],
  *,
  dtype: Any = None,
  param_dtype: Any = None,
  trainable: Callable[[str], bool] = lambda path: True,
  sharding: Placement | None = None,
  ignore_keys: Iterable[str] = (),
  **config_overrides: Any,
) -> tuple[Model, Params]:
  """Loads a checkpoint's weights into the model that it describes.

  One tensor after another goes to its place on the device, so that the host
  holds no more than one besides what the file system caches.

  Args:
    path: a folder with config.json and safetensors files, as the transformers
      library writes and the model hubs publish them, or a .gguf file of
      architecture llama, qwen2 or qwen3, which is dequantized.
    dtype: of activations and pages; None takes the checkpoint's.
    param_dtype: of the parameters; None keeps each tensor's own, but float16,
      in which nothing is computed or trained: then it must be given here, and
      is that of activations too if dtype is not given. Parameters
      that a model holds in float32 whatever the rest is are that or wider, and
      those that its modules call precise (decay rates and the gated norm of
      the delta rule) are not rounded where the file has them in float32. A
      mapping from ends of paths to dtypes rounds these too, if it names them:
      {"": "bfloat16", "A_log": "bfloat16"}.
    trainable: which parameters learn, as in `Model.split`.
    sharding: where a parameter of a path a/b/c and shape is put; None leaves
      it to JAX.
    ignore_keys: names of unknown keys in config.json, or in the metadata of a
      .gguf file, to pass over; a key that is set and unknown is refused
      otherwise, as it may change what the model computes.
    **config_overrides: fields of ModelConfig, such as saved="inputs".

  Returns:
    The model, named for the folder or file, and its parameters.

  Raises:
    FileNotFoundError: if there is no such checkpoint, or a part is missing.
    ValueError: if a file is malformed; if the model is of no known family or
      has a feature that is not implemented; if tensors are missing, left over
      or of another shape, all of them in one message.
    TypeError: if an override is no field of ModelConfig.
  """
  ignore_keys = check_ignored(ignore_keys)
  checkpoint = open_checkpoint(path, ignore_keys)
  source = checkpoint.source
  name = pathlib.Path(path).resolve().name.removesuffix(".gguf")
  if dtype is not None:
    check_dtype("dtype", dtype)
  # In bfloat16 whatever is wider must be; see _leaf_dtypes.
  narrow = {"dtype": "bfloat16", "param_dtype": "bfloat16"}
  config = config_from_hf(
    checkpoint.settings,
    ignore_keys=ignore_keys,
    **{"name": name} | config_overrides | narrow,
  )
  shapes = parameter_shapes(Model(config))
  naming = checkpoint.make_naming(config)
  slots = tensor_slots(config, shapes, naming, source.tensors.__contains__)
  _check(source, slots, checkpoint.ignored, naming, config.tie_embeddings)
  dtypes = _leaf_dtypes(Model(config), source, slots, shapes, param_dtype)
  stored = _most_common(dtypes, shapes)
  if dtype is None:
    own = checkpoint.dtype
    dtype = stored if own in (None, "float16") else own
  config = dataclasses.replace(
    config, param_dtype=stored, dtype=jnp.dtype(dtype).name
  )
  leaves = _load(source, slots, shapes, dtypes, sharding)
  model, tree = Model(config), traverse_util.unflatten_dict(leaves, sep="/")
  return model, model.split(tree, trainable)


def _load(
  source: TensorSource,
  slots: list[Slot],
  shapes: Mapping[str, jax.ShapeDtypeStruct],
  dtypes: Mapping[str, np.dtype],
  sharding: Placement | None,
) -> dict[str, Array]:
  """Every parameter by its path, filled tensor by tensor."""
  leaves: dict[str, Array] = {}
  places: dict[str, jax.sharding.Sharding] = {}
  for slot in slots:
    path = slot.leaf
    leaf = leaves.pop(path, None)
    if leaf is None:
      shape, where = shapes[path].shape, None
      if sharding is not None:
        places[path] = sharding(path, shape)
        where = _automatic(places[path])
      leaf = jnp.zeros(shape, dtypes[path], device=where)
    leaves[path] = _fill(leaf, source, slot)
  for path, where in places.items():
    leaves[path] = jax.device_put(leaves[path], where)  # the same buffers
  return leaves


def _leaf_dtypes(
  model: Model,
  source: TensorSource,
  slots: list[Slot],
  shapes: Mapping[str, jax.ShapeDtypeStruct],
  wanted: Any,
) -> dict[str, np.dtype]:
  """The dtype of every parameter; its own is the widest of its tensors."""
  own: dict[str, np.dtype] = {}
  for slot in slots:
    dtype = source.tensors[slot.tensor].dtype
    own[slot.leaf] = jnp.promote_types(dtype, own.get(slot.leaf, dtype))
  dtypes = parameter_dtypes(model, shapes, own, wanted)
  for path, dtype in dtypes.items():
    if jax.dtypes.canonicalize_dtype(dtype) != dtype:
      raise ValueError(
        f"parameter {path!r} would be {dtype}, which JAX has switched off: set "
        "jax_enable_x64, or pass param_dtype='float32'"
      )
  return dtypes


def _most_common(
  dtypes: Mapping[str, np.dtype], shapes: Mapping[str, jax.ShapeDtypeStruct]
) -> str:
  """The dtype that most parameters have."""
  sizes: dict[str, int] = {}
  for path, dtype in dtypes.items():
    name = jnp.dtype(dtype).name
    sizes[name] = sizes.get(name, 0) + math.prod(shapes[path].shape)
  return max(sizes, key=sizes.get)


def _automatic(
  sharding: jax.sharding.Sharding | None,
) -> jax.sharding.Sharding | None:
  """The same placement without axes that programs must be explicit about."""
  if not isinstance(sharding, jax.sharding.NamedSharding):
    return sharding
  mesh = jax.sharding.Mesh(sharding.mesh.devices, sharding.mesh.axis_names)
  return jax.sharding.NamedSharding(
    mesh, sharding.spec, memory_kind=sharding.memory_kind
  )


def _fill(leaf: Array, source: TensorSource, slot: Slot) -> Array:
  """The leaf, used up, with one tensor in its place."""
  where = leaf.sharding if len(leaf.sharding.device_set) > 1 else None
  # JAX lets go of the tensor before when it is called again: here, so that
  # the host never holds two.
  start = jax.device_put(np.array(slot.start, np.int32))
  leaf = _place(
    leaf,
    source.read(slot.tensor),
    start,
    form=slot.form,
    size=slot.size,
    where=where,
  )
  return leaf.block_until_ready()


@functools.partial(
  jax.jit, static_argnames=("form", "size", "where"), donate_argnums=0
)
def _place(
  leaf: Array, tensor: Array, start: Array, *, form: Form, size: Shape, where
) -> Array:
  region = form.to_leaf(tensor).astype(leaf.dtype).reshape(size)
  leaf = lax.dynamic_update_slice(leaf, region, tuple(start))
  if where is None:
    return leaf
  return lax.with_sharding_constraint(leaf, where)


def _check(
  source: TensorSource,
  slots: list[Slot],
  ignored: tuple[str, ...],
  naming: Naming,
  tied: bool,
) -> None:
  """Refuses a checkpoint whose tensors are not those of the model."""
  troubles: dict[str, list[str]] = {}
  report = lambda kind, line: troubles.setdefault(kind, []).append(line)
  wanted = set()
  for slot in slots:
    wanted.add(slot.tensor)
    info = source.tensors.get(slot.tensor)
    if info is None:
      report("missing", f"{slot.tensor} {list(slot.shape)}")
      continue
    if info.shape != slot.shape:
      shapes = f"{list(info.shape)} instead of {list(slot.shape)}"
      report("of another shape", f"{slot.tensor} {shapes}")
    if not jnp.issubdtype(info.dtype, jnp.floating) or info.dtype.itemsize < 2:
      report(
        "of a dtype that is no plain number", f"{slot.tensor} {info.dtype}"
      )
  skip = re.compile("|".join(ignored) or r"(?!)")
  head = naming.top["head"][0]
  for name in source.tensors:
    if name in wanted or skip.fullmatch(name):
      continue
    if name == head and tied:
      if not _equal(source, name, naming.top["embed"][0]):
        report(
          "not the embedding although tie_word_embeddings is true (pass "
          "tie_embeddings=False)",
          name,
        )
      continue
    report("left over", name)
  if troubles:
    lines = [
      f"{kind}: {listed(names, MOST_LISTED)}"
      for kind, names in troubles.items()
    ]
    where = getattr(source, "path", "the checkpoint")
    raise ValueError(
      f"the tensors of {str(where)!r} are not those of its model; "
      + "; ".join(lines)
      + "; fetch it again, or correct its config.json"
    )


def _equal(source: TensorSource, a: str, b: str) -> bool:
  """Whether two tensors have the same bytes."""
  if b not in source.tensors:
    return False
  x, y = source.tensors[a], source.tensors[b]
  if (x.shape, x.dtype) != (y.shape, y.dtype):
    return False
  # Row by row in blocks, because either may be most of the checkpoint.
  left, right = source.read(a), source.read(b)
  rows = max(1, (1 << 20) // max(1, math.prod(x.shape[1:])))
  return all(
    left[i : i + rows].tobytes() == right[i : i + rows].tobytes()
    for i in range(0, len(left), rows)
  )
