"""PEFT's adapter_config.json: of plain LoRA, or refused."""

from collections.abc import Iterable
import pathlib
from typing import Any

from longstraw_jax.json_files import read_object
from longstraw_jax.weights.unknown_keys import (
  check_ignored,
  is_set,
  refuse_unknown,
)

# What else PEFT can start from is subtracted from the base, which differs then.
_HARMLESS_STARTS = (True, False, None, "gaussian", "orthogonal", "eva")

# What adapters are; values under which they are plain LoRA of one rank. No
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
  "rank_pattern": (),
  "alpha_pattern": (),
  "layer_replication": (),
  "init_lora_weights": _HARMLESS_STARTS,
}

# Read, or of how an adapter was made: which maps have one, the tensors say.
_KNOWN = frozenset(
  """
  auto_mapping base_model_name_or_path corda_config ensure_weight_tying
  eva_config exclude_modules fan_in_fan_out inference_mode layers_pattern
  layers_to_transform loftq_config lora_alpha lora_dropout lora_ga_config
  megatron_config megatron_core peft_version qalora_group_size r revision
  runtime_config target_modules target_parameters task_type use_rslora
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
      f"{name} is {value!r:.200} in {str(file)!r}: only plain LoRA of one rank "
      f"is supported, where it is {allowed[0] if allowed else None!r}"
    )
  if type(config.get("lora_alpha")) not in (int, float):
    raise ValueError(
      f"lora_alpha is {config.get('lora_alpha')!r} in {str(file)!r}: it must "
      "be a number"
    )
  refuse_unknown(
    repr(str(file)), config, {*_PLAIN, *_KNOWN}, check_ignored(ignore_keys)
  )
  return config
