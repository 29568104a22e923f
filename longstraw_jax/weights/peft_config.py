"""PEFT's adapter_config.json: of plain LoRA, or refused."""

from collections.abc import Iterable
import math
import pathlib
import re
from typing import Any

from longstraw_jax.json_files import read_object
from longstraw_jax.weights.unknown_keys import (
  check_ignored,
  is_set,
  refuse_unknown,
)

# What else PEFT can start from is subtracted from the base, which differs then.
_HARMLESS_STARTS = (True, False, None, "gaussian", "orthogonal", "eva")

# What adapters are; values under which they are plain LoRA of one scale. No
# caller can have them ignored.
_PLAIN: dict[str, tuple] = {
  "peft_type": ("LORA",),
  "use_dora": (),
  "use_qalora": (),
  "use_bdlora": (),
  "kasa_config": (),
  "monteclora_config": (),
  "velora_config": (),
  "alora_invocation_tokens": (),
  "arrow_config": (),
  "bias": ("none",),
  "lora_bias": (),
  "modules_to_save": (),
  "trainable_token_indices": (),
  "layer_replication": (),
  "init_lora_weights": _HARMLESS_STARTS,
}

# Read, or of how an adapter was made: which maps have one, the tensors say.
_KNOWN = frozenset(
  """
  alpha_pattern auto_mapping base_model_name_or_path corda_config
  ensure_weight_tying eva_config exclude_modules fan_in_fan_out inference_mode
  layers_pattern
  layers_to_transform loftq_config lora_alpha lora_dropout lora_ga_config
  megatron_config megatron_core peft_version qalora_group_size r rank_pattern
  revision runtime_config target_modules target_parameters task_type use_rslora
  """.split()
)


def read_adapter_config(
  file: pathlib.Path, ignore_keys: Iterable[str] = ()
) -> dict[str, Any]:
  """The settings of an adapter, of a kind that three leaves can stand for.

  Args:
    file: adapter_config.json.
    ignore_keys: names of unknown keys to pass over.

  Raises:
    FileNotFoundError: the file is missing.
    ValueError: the adapter is of another kind, or a key is unknown.
  """
  if not file.is_file():
    raise FileNotFoundError(f"{str(file)!r} is missing: it holds lora_alpha")
  config = read_object(file)
  for name, allowed in _PLAIN.items():
    value = config.get(name)
    if value in allowed or (name != "peft_type" and not is_set(value)):
      continue
    raise ValueError(
      f"{name} is {value!r:.200} in {str(file)!r}: only plain LoRA of one "
      f"scale is supported, where it is {allowed[0] if allowed else None!r}"
    )
  if type(config.get("lora_alpha")) not in (int, float):
    raise ValueError(
      f"lora_alpha is {config.get('lora_alpha')!r} in {str(file)!r}: it must "
      "be a number"
    )
  _check_patterns(file, config)
  refuse_unknown(
    repr(str(file)), config, {*_PLAIN, *_KNOWN}, check_ignored(ignore_keys)
  )
  return config


def _pattern(config: dict[str, Any], name: str) -> dict[str, Any]:
  return config.get(name) or {}


def _check_patterns(file: pathlib.Path, config: dict[str, Any]) -> None:
  """Refuses patterns that give some maps another scale than the rest.

  PEFT writes both, of one scale, where it has joined two maps: those of
  experts' gate and up.
  """
  ranks = _pattern(config, "rank_pattern")
  alphas = _pattern(config, "alpha_pattern")
  if not ranks and not alphas:
    return
  if not isinstance(config.get("r"), int):
    raise ValueError(f"r is {config.get('r')!r} in {str(file)!r}: give a rank")
  scale = adapter_scale(config, config["r"])
  for key in (*ranks, *alphas):
    rank = ranks.get(key, config.get("r"))
    alpha = alphas.get(key, config["lora_alpha"])
    if not math.isclose(_scale(config, alpha, rank), scale, rel_tol=1e-6):
      name = "rank_pattern" if key in ranks else "alpha_pattern"
      raise ValueError(
        f"{name} is {config[name]!r:.200} in {str(file)!r}: it gives {key!r} a "
        f"scale of its own; only plain LoRA of one scale is supported"
      )


def _scale(config: dict[str, Any], alpha: float, rank: int) -> float:
  return alpha / (rank**0.5 if config.get("use_rslora") else rank)


def adapter_scale(config: dict[str, Any], rank: int) -> float:
  """What multiplies x A B: alpha / r, of all maps alike.

  Args:
    config: as read_adapter_config gives it.
    rank: of an adapter, where the configuration has no r.
  """
  return _scale(config, config["lora_alpha"], config.get("r") or rank)


def adapter_rank(config: dict[str, Any], names: Iterable[str]) -> int | None:
  """The rank that a configuration gives a map; None where it has none.

  Args:
    config: as read_adapter_config gives it.
    names: of the map in the library.
  """
  for key, rank in _pattern(config, "rank_pattern").items():
    if any(re.match(rf"(.*\.)?({key})$", name) for name in names):
      return rank
  return config.get("r")
