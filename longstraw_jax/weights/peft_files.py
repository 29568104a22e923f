"""Adapters in PEFT's files: adapter_model.safetensors, adapter_config.json.

A stacked adapter [L, D, r], [L, r, F] is 2 L tensors there, transposed:

  base_model.model.model.layers.{n}.self_attn.q_proj.lora_A.weight  [r, D]
  base_model.model.model.layers.{n}.self_attn.q_proj.lora_B.weight  [F, r]

What stands between base_model.model and lora_A is the name of the map in the
transformers library (names.py). Layout and keys as of PEFT 0.21.
"""

from collections.abc import Iterable
import json
import os
import pathlib
import tempfile

from flax import traverse_util
import jax.numpy as jnp
import numpy as np

from longstraw_jax.config import check_dtype
from longstraw_jax.lora import LEAVES, linear_paths, place_adapters
from longstraw_jax.models.model import Model, Params
from longstraw_jax.ops.precision import wide_dtype
from longstraw_jax.weights.names import TRUNKS, hf_naming
from longstraw_jax.weights.peft_config import read_adapter_config
from longstraw_jax.weights.safetensors_files import (
  SafetensorsSource,
  write_safetensors,
)
from longstraw_jax.weights.slots import parameter_shapes, tensor_slots
from longstraw_jax.weights.source import TensorInfo

WEIGHTS_NAME = "adapter_model.safetensors"
CONFIG_NAME = "adapter_config.json"

_PREFIX = "base_model.model."


def map_modules(model: Model, trunk: str = TRUNKS[0]) -> dict[str, list[str]]:
  """Every linear map's names in the transformers library, by repeat.

  Args:
    model: the model.
    trunk: what the names begin with, one of `names.TRUNKS`.
  """
  modules: dict[str, list[str]] = {path: [] for path in linear_paths(model)}
  slots = tensor_slots(
    model.config,
    parameter_shapes(model),
    hf_naming(trunk),
    stacked=lambda name: True,
  )
  for slot in slots:  # in the order of layers
    path, _, leaf = slot.leaf.rpartition("/")
    if leaf == "kernel" and path in modules:
      modules[path].append(slot.tensor.removesuffix(".weight"))
  return modules


def _target_modules(modules: dict, adapted: list[str]) -> list[str]:
  """Shortest names that PEFT finds exactly the adapted maps by."""
  everything = {name for names in modules.values() for name in names}
  # Some versions of the library have maps of this name in every expert.
  everything |= {f".experts.{x}_proj" for x in ("gate", "up", "down")}
  wanted = {name for path in adapted for name in modules[path]}
  for parts in (1, 2):  # q_proj, self_attn.q_proj
    end = lambda name, parts=parts: ".".join(name.split(".")[-parts:])
    ends = {end(name) for name in wanted}
    if {name for name in everything if end(name) in ends} == wanted:
      return sorted(ends)
  return sorted(wanted)


def save_adapter(
  folder: str | os.PathLike[str],
  model: Model,
  params: Params,
  *,
  base: str | None = None,
  trunk: str = TRUNKS[0],
) -> None:
  """Writes the adapters of `params` so that PEFT loads them.

  Both files appear when both are complete. One thing PEFT 0.21 cannot load: of
  GLM-5 it takes any gate_proj, up_proj or down_proj for those of the experts,
  so there adapt maps of attention only.

  Args:
    folder: made if absent; may hold no adapter yet.
    model: the model.
    params: with adapters of one rank and one alpha.
    base: name or path of the base model, for the configuration.
    trunk: what names in the base begin with, one of `names.TRUNKS`.

  Raises:
    FileExistsError: the folder holds an adapter.
    ValueError: no adapters, or of several ranks or alphas.
  """
  flat = traverse_util.flatten_dict(params.merged(), sep="/")
  modules = map_modules(model, trunk)
  adapted = [path for path in modules if f"{path}/lora_a" in flat]
  if not adapted:
    raise ValueError("the parameters have no adapters: nothing to save")
  tensors, sizes = [], set()
  for path in adapted:
    a, b, scale = (np.asarray(flat[f"{path}/{leaf}"]) for leaf in LEAVES)
    for repeat, name in enumerate(modules[path]):
      for letter, x in (("A", a), ("B", b)):
        one = x[repeat].T
        key = f"{_PREFIX}{name}.lora_{letter}.weight"
        tensors.append((TensorInfo(key, one.shape, one.dtype), one))
    sizes |= {(a.shape[-1], s) for s in scale.ravel().tolist()}
  if len(sizes) > 1:
    raise ValueError(
      f"the adapters have (rank, scale) {sorted(sizes)}: one file holds one"
    )
  ((rank, scale),) = sizes
  config = {
    "peft_type": "LORA",
    "task_type": "CAUSAL_LM",
    "base_model_name_or_path": base,
    "r": rank,
    "lora_alpha": _alpha(scale, rank),
    "target_modules": _target_modules(modules, adapted),
    "lora_dropout": 0.0,
    "bias": "none",
    "fan_in_fan_out": False,
    "init_lora_weights": True,
    "inference_mode": True,
  }
  folder = pathlib.Path(folder)
  folder.mkdir(parents=True, exist_ok=True)
  for name in (WEIGHTS_NAME, CONFIG_NAME):
    if (folder / name).exists():
      raise FileExistsError(
        f"{str(folder)!r} already holds {name!r}: give another folder"
      )
  with tempfile.TemporaryDirectory(prefix=".partial-", dir=folder) as partial:
    (weights,) = write_safetensors(partial, tensors, max_shard_bytes=2**62)
    settings = pathlib.Path(partial, CONFIG_NAME)
    settings.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    os.replace(weights, folder / WEIGHTS_NAME)
    os.replace(settings, folder / CONFIG_NAME)


def _alpha(scale: float, rank: int) -> float | int:
  """scale * rank, free of a float32 scale's rounding where alpha is whole."""
  alpha = scale * rank
  whole = round(alpha)
  return whole if np.float32(whole / rank) == np.float32(scale) else alpha


def load_adapter(
  folder: str | os.PathLike[str],
  model: Model,
  params: Params,
  dtype: str | None = None,
  ignore_keys: Iterable[str] = (),
) -> Params:
  """A base with the adapters of a folder, ready to train further.

  Args:
    folder: with adapter_model.safetensors and adapter_config.json.
    model: the model.
    params: the base, without adapters; quantized or not.
    dtype: of the adapters; by default float32, or wider if so stored: they
      are what learns.
    ignore_keys: names of unknown keys in adapter_config.json to pass over.

  Returns:
    Adapters as the only trainable leaves; the whole base is frozen.

  Raises:
    FileNotFoundError: a file is missing.
    ValueError: the adapter is of another kind or another model.
  """
  if dtype is not None:
    check_dtype("dtype", dtype)
  folder = pathlib.Path(folder)
  config = read_adapter_config(folder / CONFIG_NAME, ignore_keys)
  source = SafetensorsSource(folder / WEIGHTS_NAME)
  places = {
    f"{_PREFIX}{name}.lora_{letter}.weight": (path, letter, repeat)
    for trunk in TRUNKS
    for path, names in map_modules(model, trunk).items()
    for repeat, name in enumerate(names)
    for letter in "AB"
  }
  found: dict[str, dict] = {}
  for key in source.tensors:
    if key not in places:
      raise ValueError(
        f"tensor {key!r} of {str(folder)!r} belongs to no linear map of "
        f"{model.config.name}: load it into the model it was trained with"
      )
    path, letter, repeat = places[key]
    found.setdefault(path, {})[letter, repeat] = source.read(key)
  flat = traverse_util.flatten_dict(params.merged(), sep="/")
  adapters = {}
  for path, tensors in found.items():
    a, b = _stacked(path, tensors, flat[f"{path}/kernel"].shape)
    rank = a.shape[-1]
    if config.get("r", rank) != rank:
      raise ValueError(
        f"r is {config['r']!r} in {CONFIG_NAME} of {str(folder)!r}, the "
        f"adapter of {path} has rank {rank}: fetch both files again"
      )
    root = rank**0.5 if config.get("use_rslora") else rank
    made = wide_dtype(a.dtype) if dtype is None else jnp.dtype(dtype)
    scale = np.full(len(a), config["lora_alpha"] / root, wide_dtype(made))
    adapters[path] = (
      jnp.asarray(a, made),
      jnp.asarray(b, made),
      jnp.asarray(scale),
    )
  return place_adapters(params, adapters)


def _stacked(path: str, tensors: dict, shape: tuple[int, ...]):
  """[L, D, r] and [L, r, F] of one map."""
  repeats, inputs, outputs = shape
  wanted = {(letter, n) for letter in "AB" for n in range(repeats)}
  if missing := sorted(wanted - set(tensors)):
    letter, n = missing[0]
    raise ValueError(
      f"{path} has no lora_{letter} in repeat {n} of {repeats}: adapters of "
      "only some of the layers of a stage cannot be loaded"
    )
  rank = tensors["A", 0].shape[0]
  for (letter, n), x in tensors.items():
    fits = (rank, inputs) if letter == "A" else (outputs, rank)
    if x.shape != fits:
      raise ValueError(
        f"lora_{letter} of {path} in repeat {n} has shape {x.shape}, wanted "
        f"is {fits}"
      )
  stack = lambda letter: np.stack(
    [tensors[letter, n].T for n in range(repeats)]
  )
  return stack("A"), stack("B")
