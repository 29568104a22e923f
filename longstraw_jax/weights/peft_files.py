"""Adapters in PEFT's files: adapter_model.safetensors, adapter_config.json.

A stacked adapter [L, D, r], [L, r, F] is 2 L tensors there, transposed:

  base_model.model.model.layers.{n}.self_attn.q_proj.lora_A.weight  [r, D]
  base_model.model.model.layers.{n}.self_attn.q_proj.lora_B.weight  [F, r]

What stands between base_model.model and lora_A is the name of the map in the
transformers library (peft_names.py); of experts, see peft_experts.py. Layout
and keys as of PEFT 0.21.
"""

from collections.abc import Iterable, Iterator
import json
import os
import pathlib
import re
import tempfile
from typing import Any

from flax import traverse_util
import jax.numpy as jnp
import numpy as np

from longstraw_jax.config import check_dtype
from longstraw_jax.lora import (
  EXPERTS,
  LEAVES,
  LinearMap,
  linear_maps,
  place_adapters,
)
from longstraw_jax.models.model import Model, Params
from longstraw_jax.ops.precision import wide_dtype
from longstraw_jax.weights.names import TRUNKS
from longstraw_jax.weights.peft_config import (
  adapter_rank,
  adapter_scale,
  read_adapter_config,
)
from longstraw_jax.weights.peft_experts import (
  EACH,
  FUSED,
  INNER,
  LAYOUTS,
  Pair,
  check_orientation,
  from_fused,
  to_fused,
)
from longstraw_jax.weights.peft_names import (
  called,
  is_outer,
  map_modules,
  places,
  projections,
  targets,
)
from longstraw_jax.weights.safetensors_files import (
  SafetensorsSource,
  write_safetensors,
)
from longstraw_jax.weights.source import TensorInfo

WEIGHTS_NAME = "adapter_model.safetensors"
CONFIG_NAME = "adapter_config.json"

_PREFIX = "base_model.model."


def _pairs(
  one: LinearMap, name: str, a, b, nested: bool, apart: bool | None
) -> Iterator[tuple[str, Pair]]:
  """(what stands before .lora_A, the two tensors) of one repeat of a map.

  Args:
    one: the map.
    name: the library's for it.
    a: [D, r] of the repeat, of experts [E, D, r].
    b: the same.
    nested: whether both parameters of these experts are adapted.
    apart: whether projections of an expert have adapters of their own; None
      writes all experts in one tensor.
  """
  if one.kind != EXPERTS:
    yield name, (a.T, b.T)
    return
  holder = name.rpartition(".")[0]
  if apart is None:
    yield holder + INNER * (nested and not is_outer(one)), to_fused(a, b)
    return
  for expert in range(len(a)):
    pairs = projections(one).split(a[expert], b[expert], apart)
    for projection, pair in pairs:
      yield f"{holder}.{expert}.{projection}", pair


def save_adapter(
  folder: str | os.PathLike[str],
  model: Model,
  params: Params,
  *,
  base: str | None = None,
  trunk: str = TRUNKS[0],
  experts: str = FUSED,
) -> None:
  """Writes the adapters of `params` so that PEFT loads them.

  Both files appear when both are complete. One thing PEFT 0.21 cannot load: of
  GLM-5 it takes any gate_proj, up_proj or down_proj for those of the experts,
  so there adapt maps of attention, experts and routers only.

  Args:
    folder: made if absent; may hold no adapter yet.
    model: the model.
    params: with adapters of one scale alpha / rank.
    base: name or path of the base model, for the configuration.
    trunk: what names in the base begin with, one of `names.TRUNKS`.
    experts: the layout of experts' adapters: "fused" for PEFT 0.19 or later,
      "each" for tools that have a module for every expert, as vLLM has.

  Raises:
    FileExistsError: the folder holds an adapter.
    ValueError: no adapters, or of several scales; an unknown layout.
  """
  if experts not in LAYOUTS:
    raise ValueError(f"experts is {experts!r}: use one of {LAYOUTS}")
  flat = traverse_util.flatten_dict(params.merged(), sep="/")
  modules = map_modules(model, trunk)
  adapted = {
    one.path: one
    for one in linear_maps(model)
    if f"{one.adapter}/lora_a" in flat
  }
  if not adapted:
    raise ValueError("the parameters have no adapters: nothing to save")
  holders = [
    name.rpartition(".")[0]
    for path, one in adapted.items()
    for name in modules[path]
    if one.kind == EXPERTS
  ]
  tensors, scales, ranks = [], set(), {}
  for path, one in adapted.items():
    a, b, scale = (np.asarray(flat[f"{one.adapter}/{x}"]) for x in LEAVES)
    scales |= set(scale.ravel().tolist())
    apart = None
    if one.kind == EXPERTS and experts == EACH:
      apart = projections(one).apart(a, b)
    for repeat, name in enumerate(modules[path]):
      nested = holders.count(name.rpartition(".")[0]) == 2
      pairs = _pairs(one, name, a[repeat], b[repeat], nested, apart)
      for module, pair in pairs:
        for letter, x in zip("AB", pair, strict=True):
          key = f"{_PREFIX}{module}.lora_{letter}.weight"
          tensors.append((TensorInfo(key, x.shape, x.dtype), x))
      rank = a.shape[-1] // (len(projections(one).names) if apart else 1)
      ranks |= dict.fromkeys(called(model, one, name, experts), rank)
  if len(scales) > 1:
    raise ValueError(
      f"the adapters have scales {sorted(scales)}: one file holds one"
    )
  (scale,) = scales
  config = {
    "peft_type": "LORA",
    "task_type": "CAUSAL_LM",
    "base_model_name_or_path": base,
    **_ranks(ranks, scale),
    **targets(model, modules, set(adapted), experts),
    "lora_dropout": 0.0,
    "bias": "none",
    "fan_in_fan_out": False,
    "init_lora_weights": True,
    "inference_mode": True,
  }
  _write(pathlib.Path(folder), tensors, config)


def _ranks(ranks: dict[str, int], scale: float) -> dict[str, Any]:
  """r and lora_alpha of most adapters' rank, patterns for the others."""
  rank = max(ranks.values())
  sizes: dict[str, Any] = {"r": rank, "lora_alpha": _alpha(scale, rank)}
  others = {name: x for name, x in ranks.items() if x != rank}
  if others:
    sizes["rank_pattern"] = {re.escape(x): n for x, n in others.items()}
    sizes["alpha_pattern"] = {
      re.escape(x): _alpha(scale, n) for x, n in others.items()
    }
  return sizes


def _alpha(scale: float, rank: int) -> float | int:
  """scale * rank, free of a float32 scale's rounding where alpha is whole."""
  alpha = scale * rank
  whole = round(alpha)
  return whole if np.float32(whole / rank) == np.float32(scale) else alpha


def _write(folder: pathlib.Path, tensors: list, config: dict) -> None:
  """Both files, each under its name when both are complete."""
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


# --- In ----------------------------------------------------------------------


def load_adapter(
  folder: str | os.PathLike[str],
  model: Model,
  params: Params,
  dtype: str | None = None,
  ignore_keys: Iterable[str] = (),
) -> Params:
  """A base with the adapters of a folder, ready to train further.

  Experts' adapters are read in either layout (see peft_experts.py).

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
  found = _read(folder, model, config)
  flat = traverse_util.flatten_dict(params.merged(), sep="/")
  adapters = {}
  for one in linear_maps(model):
    if one.path not in found:
      continue
    shape = flat[one.matrix].shape
    a, b = _stacked(one, found[one.path], shape, config)
    made = wide_dtype(a.dtype) if dtype is None else jnp.dtype(dtype)
    scale = adapter_scale(config, a.shape[-1])
    adapters[one.adapter] = (
      jnp.asarray(a, made),
      jnp.asarray(b, made),
      jnp.asarray(np.full(shape[:-2], scale, wide_dtype(made))),
    )
  return place_adapters(params, adapters)


def _read(
  folder: pathlib.Path, model: Model, config: dict[str, Any]
) -> dict[str, dict]:
  """Path of a map -> (part, "A" or "B") -> tensor; see peft_names.Place."""
  source = SafetensorsSource(folder / WEIGHTS_NAME)
  split = lambda key: key.removeprefix(_PREFIX).rpartition(".lora_")
  homes = places(model, config, {split(key)[0] for key in source.tensors})
  maps = {one.path: one for one in linear_maps(model)}
  found: dict[str, dict] = {}
  for key in source.tensors:
    module, _, end = split(key)
    if module not in homes or end not in ("A.weight", "B.weight"):
      raise ValueError(
        f"tensor {key!r} of {str(folder)!r} belongs to no linear map of "
        f"{model.config.name}: load it into the model it was trained with"
      )
    path, part, names = homes[module]
    x = found.setdefault(path, {})[part, end[0]] = source.read(key)
    rank = x.shape[0 if end[0] == "A" else 1]
    if maps[path].kind == EXPERTS and len(part) == 1:
      rank //= model.config.moe.num_experts
    wanted = adapter_rank(config, names)
    if wanted not in (None, rank):
      raise ValueError(
        f"r is {wanted!r} in {CONFIG_NAME} of {str(folder)!r}, the adapter of "
        f"{path} has rank {rank}: fetch both files again"
      )
  return found


def _stacked(
  one: LinearMap, tensors: dict, shape: tuple[int, ...], config: dict[str, Any]
) -> Pair:
  """[*repeats, D, r] and [*repeats, r, F] of one map."""
  repeats, *_, inputs, outputs = shape
  lengths = {len(part) for part, _ in tensors}
  if len(lengths) > 1:
    raise ValueError(
      f"{one.path} has adapters of all experts in one tensor and of each "
      "in its own: keep one of the two layouts"
    )
  rows = [(n,) for n in range(repeats)]
  if one.kind != EXPERTS:
    return _stack(one.path, tensors, rows, (inputs, outputs))
  experts = shape[1]
  if lengths == {1}:
    check_orientation(one.path, tensors, (inputs, outputs), config)
    a, b = _stack(one.path, tensors, rows, (inputs, outputs))
    layers = [from_fused(a[n].T, b[n].T, experts) for n in range(repeats)]
    return tuple(np.stack(x) for x in zip(*layers, strict=True))
  parts = projections(one)
  stacks = []
  for name in parts.names:
    each = [(n, e, name) for n in range(repeats) for e in range(experts)]
    width = outputs // len(parts.names)
    a, b = _stack(one.path, tensors, each, (inputs, width))
    lead = repeats, experts
    stacks.append(
      (a.reshape(*lead, *a.shape[1:]), b.reshape(*lead, *b.shape[1:]))
    )
  return parts.join(stacks)


def _stack(
  path: str, tensors: dict, parts: list[tuple], sizes: tuple[int, int]
) -> Pair:
  """[n, D, r] and [n, r, F] of n pairs of tensors."""
  inputs, outputs = sizes

  def label(part):
    n, *rest = part
    expert = " of expert {}, {},".format(*rest) if rest else ""
    return f"{expert} in repeat {n}"

  repeats = 1 + parts[-1][0]
  for part in parts:
    for letter in "AB":
      if (part, letter) not in tensors:
        raise ValueError(
          f"{path} has no lora_{letter}{label(part)} of {repeats}: adapters of "
          "only some of the layers of a stage, or of its experts, cannot be "
          "loaded"
        )
  rank = tensors[parts[0], "A"].shape[0]
  for part in parts:
    for letter, fits in (("A", (rank, inputs)), ("B", (outputs, rank))):
      x = tensors[part, letter]
      if x.shape != fits:
        raise ValueError(
          f"lora_{letter} of {path}{label(part)} has shape {x.shape}, wanted "
          f"is {fits}"
        )
  stack = lambda letter: np.stack([tensors[part, letter].T for part in parts])
  return stack("A"), stack("B")
