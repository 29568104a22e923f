"""Saves a model as a checkpoint that the transformers library loads."""

from collections.abc import Callable, Iterator, Mapping
import dataclasses
import functools
import json
import os
import pathlib
from typing import Any

from flax import traverse_util
import jax
from jax import Array, lax
import jax.numpy as jnp
import numpy as np

from longstraw_jax.models.model import Model, Params
from longstraw_jax.weights.dtypes import parameter_dtypes
from longstraw_jax.weights.families import config_to_hf
from longstraw_jax.weights.load import CONFIG_NAME, read_config
from longstraw_jax.weights.names import TRUNKS, hf_naming
from longstraw_jax.weights.safetensors_files import write_safetensors
from longstraw_jax.weights.slots import (
  Form,
  Shape,
  Slot,
  parameter_shapes,
  tensor_slots,
)
from longstraw_jax.weights.source import TensorInfo

LAYOUTS = ("per_expert", "stacked")
_CHECKPOINTS = ("model*.safetensors*", "pytorch_model*.bin*", CONFIG_NAME)


def save_pretrained(
  folder: str | os.PathLike[str],
  model: Model,
  params: Params,
  *,
  layout: str = "per_expert",
  wrapped: bool = False,
  param_dtype: Any = None,
  source_config: Mapping[str, Any] | str | os.PathLike[str] | None = None,
  max_shard_bytes: int = 5_000_000_000,
) -> list[pathlib.Path]:
  """Writes config.json and safetensors, one tensor on the host at a time.

  Tokenizer files are not written: copy them from the source.

  Args:
    folder: made if absent; may hold no checkpoint yet.
    model: of a family in longstraw_jax.weights.families.
    params: its parameters.
    layout: of experts: "per_expert", one tensor for each matrix of each, as
      transformers writes them, or "stacked", a layer's in one tensor each.
    wrapped: whether config and names are those of a text model in a wrapper,
      as published Qwen3.5/3.6 files are (without their vision tower). A class
      of the whole then finds the text's weights; the text-only class loads
      either form.
    param_dtype: dtype to store, as in load_pretrained; None stores each
      parameter's own.
    source_config: the config.json of the checkpoint that the model came from,
      or its path or folder: other keys are taken from there.
    max_shard_bytes: most tensor data of a file.

  Returns:
    The paths of the safetensors files.

  Raises:
    FileExistsError: if the folder holds a checkpoint.
    ValueError: if no family has such a model, or the parameters are not plain
      arrays of the model's names and shapes.
  """
  if layout not in LAYOUTS:
    raise ValueError(f"layout is {layout!r}: use one of {LAYOUTS}")
  folder = pathlib.Path(folder)
  for pattern in _CHECKPOINTS:
    for old in sorted(folder.glob(pattern)):
      raise FileExistsError(
        f"{str(folder)!r} already holds {old.name!r}: give another folder"
      )
  if isinstance(source_config, str | os.PathLike):
    source_config = read_config(source_config)
  leaves = traverse_util.flatten_dict(params.merged(), sep="/")
  shapes = _checked_shapes(model, leaves)
  own = {path: leaf.dtype for path, leaf in leaves.items()}
  dtypes = parameter_dtypes(model, shapes, own, param_dtype)
  config = dataclasses.replace(
    model.config, param_dtype=jnp.dtype(dtypes["embed"]).name
  )
  values = config_to_hf(config, source_config, wrapped=wrapped)
  naming = hf_naming(TRUNKS[wrapped])
  slots = tensor_slots(config, shapes, naming, lambda _: layout == "stacked")
  files = write_safetensors(
    folder, _items(slots, leaves, dtypes), max_shard_bytes=max_shard_bytes
  )
  # Last, so that a stopped run leaves no folder that loads.
  partial = folder / f".{CONFIG_NAME}.partial"
  partial.write_text(json.dumps(values, indent=2) + "\n", "utf-8")
  os.replace(partial, folder / CONFIG_NAME)
  return files


def _checked_shapes(
  model: Model, leaves: Mapping[str, Any]
) -> dict[str, jax.ShapeDtypeStruct]:
  """What the model would have, in bfloat16, once the parameters are that."""
  narrow = dataclasses.replace(model.config, param_dtype="bfloat16")
  shapes = parameter_shapes(Model(narrow))
  lines = [f"{path} is missing" for path in sorted(set(shapes) - set(leaves))]
  for path, leaf in sorted(leaves.items()):
    if path not in shapes:
      lines.append(f"{path} has no place in a checkpoint")
    elif not isinstance(leaf, jax.Array | np.ndarray):
      lines.append(f"{path} is a {type(leaf).__name__} and no array")
    elif leaf.shape != shapes[path].shape:
      want = list(shapes[path].shape)
      lines.append(f"{path} has the shape {list(leaf.shape)}, not {want}")
  if lines:
    raise ValueError(
      "these parameters cannot be stored (merge adapters and expand quantized "
      "weights first): " + "; ".join(lines)
    )
  return shapes


def _items(
  slots: list[Slot],
  leaves: Mapping[str, Any],
  dtypes: Mapping[str, np.dtype],
) -> Iterator[tuple[TensorInfo, Callable[[], np.ndarray]]]:
  for slot in slots:
    dtype = dtypes[slot.leaf]
    info = TensorInfo(slot.tensor, slot.shape, dtype)
    yield info, functools.partial(_tensor, leaves[slot.leaf], slot, dtype)


def _tensor(leaf: Array, slot: Slot, dtype: np.dtype) -> np.ndarray:
  """A tensor as the checkpoint has it."""
  size, region = slot.size, slot.region
  cut = _cut(
    leaf, slot.start, form=slot.form, size=size, region=region, dtype=dtype
  )
  return np.asarray(cut)


@functools.partial(jax.jit, static_argnames=("form", "size", "region", "dtype"))
def _cut(
  leaf: Array, start: Shape, *, form: Form, size: Shape, region: Shape, dtype
) -> Array:
  part = lax.dynamic_slice(leaf, start, size).reshape(region)
  return form.to_file(part).astype(dtype)
