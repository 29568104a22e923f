"""From the config.json of a checkpoint to a ModelConfig, and back."""

from collections.abc import Iterable, Mapping
import dataclasses
import math
from typing import Any

import jax.numpy as jnp

from longstraw_jax.config import ModelConfig
from longstraw_jax.weights.families import harmless, rope
from longstraw_jax.weights.families.dense import LLAMA, QWEN2, QWEN3
from longstraw_jax.weights.families.family import Family, Fields, layer_parts
from longstraw_jax.weights.families.glm import GLM
from longstraw_jax.weights.families.qwen3_5 import QWEN3_5, QWEN3_5_MOE
from longstraw_jax.weights.families.settings import Settings
from longstraw_jax.weights.unknown_keys import check_ignored

FAMILIES: tuple[Family, ...] = (
  QWEN3_5,
  QWEN3_5_MOE,
  GLM,
  LLAMA,
  QWEN2,
  QWEN3,
)

# How a model is computed; no config.json says it.
_COMPUTED = {
  "name": None,
  "dtype": None,
  "param_dtype": None,
  "saved": None,
  "read_block": None,
  "query_block": None,
  "delta_block": None,
  "logprob_block": None,
  "latent": {
    "index_query_tile": None,
    "index_key_tile": None,
    "query_block": None,
  },
  "moe": {"row_block": None},
}
# Parts of a source that an exported text model has not.
_DROPPED = ("quantization_config", "compression_config", "torch_dtype")
FORMAT_VERSION = "5.24.0"  # of the library whose layout is written
_EXTRA_LAYERS = ("mtp_num_hidden_layers", "num_nextn_predict_layers")


def family_of(
  values: Mapping[str, Any], ignore_keys: Iterable[str] = ()
) -> tuple[Family, Settings]:
  """The family of a config.json and the keys of its text model.

  Args:
    values: its keys.
    ignore_keys: unknown ones to pass over.

  Raises:
    ValueError: if the model type is unknown, or the file says two things.
  """
  settings = Settings(values, check_ignored(ignore_keys))
  kind = settings.get("model_type")
  for family in FAMILIES:
    if kind == family.model_type:
      return family, settings
    if kind is not None and kind == family.wrapper_type:
      return family, _text_settings(settings)
  known = [family.model_type for family in FAMILIES]
  known += [f.wrapper_type for f in FAMILIES if f.wrapper_type is not None]
  raise settings.refuse(
    "model_type", f"use a checkpoint of one of {', '.join(sorted(known))}"
  )


def _text_settings(outer: Settings) -> Settings:
  text = outer.get("text_config")
  if not isinstance(text, Mapping):
    raise outer.refuse("text_config", "give the text model's keys there")
  text = dict(text)
  for key in ("tie_word_embeddings", *_DROPPED, "dtype"):
    above = outer.get(key)
    if above is not None and text.get(key) is None:
      text[key] = above
  if text.get("tie_word_embeddings") != outer.get(
    "tie_word_embeddings", text.get("tie_word_embeddings")
  ):
    raise outer.refuse(
      "tie_word_embeddings",
      "text_config says otherwise; make both say what the checkpoint has",
    )
  return Settings(text, outer.ignored, outer)


def _refuse_unknown(family: Family, settings: Settings) -> None:
  """Refuses what is set and was not read, once all is read that is known."""
  outer, part = settings.outer, ""
  if outer is not None:
    part = "text_config"
    outer.refuse_unsupported()
    text = settings.values
    same = {k for k, v in outer.values.items() if k in text and text[k] == v}
    outer.refuse_unknown(harmless.of_wrapper(outer.values) | same)
  settings.refuse_unknown(
    harmless.of_text(settings.values) | family.harmless, part
  )


def stored_dtype(settings: Settings) -> str | None:
  """The dtype that a config.json gives its weights, or None."""
  value = settings.get("dtype", settings.get("torch_dtype"))
  if value is None or value == "auto":
    return None
  try:
    dtype = jnp.dtype(str(value).removeprefix("torch."))
  except TypeError:
    dtype = None
  if dtype is None or not jnp.issubdtype(dtype, jnp.floating):
    key = "dtype" if settings.get("dtype") is not None else "torch_dtype"
    raise settings.refuse(key, "use float32 or bfloat16")
  return dtype.name


def config_from_hf(
  values: Mapping[str, Any],
  *,
  ignore_keys: Iterable[str] = (),
  **overrides: Any,
) -> ModelConfig:
  """Translates the config.json of a checkpoint.

  Args:
    values: its keys, those of a text model or of a model that wraps one.
    ignore_keys: names of unknown keys to pass over, which are refused
      otherwise. Keys known to change what a model computes are not ignored.
    **overrides: fields of ModelConfig to set otherwise, such as `saved`.

  Returns:
    The configuration, named for the model type, in the file's dtype or else
    float32.

  Raises:
    ValueError: if the model type is unknown, a key is missing or wrong, or a
      feature is not implemented; the message names the key and a remedy.
    TypeError: if ModelConfig has no such field.
  """
  family, settings = family_of(values, ignore_keys)
  settings.refuse_unsupported()
  dtype = stored_dtype(settings) or "float32"
  fields = {"name": family.model_type, "dtype": dtype, "param_dtype": dtype}
  fields |= family.translate(settings)
  _refuse_unknown(family, settings)
  return ModelConfig(**(fields | overrides))


def config_to_hf(
  config: ModelConfig,
  source: Mapping[str, Any] | None = None,
  *,
  wrapped: bool = False,
) -> dict[str, Any]:
  """Writes a config.json that `config_from_hf` reads as this model.

  Args:
    config: the model.
    source: the config.json of the checkpoint it came from, whose other keys
      are kept: token ids, maximum length and so on. Its quantization and its
      multi-token prediction layers are not: exported files have none.
    wrapped: whether the text model's keys go into `text_config`, as published
      Qwen3.5/3.6 files have them, and the tensors' names with them.

  Returns:
    The keys.

  Raises:
    ValueError: if no family, or not that of the source, has such a model.
  """
  old: Mapping[str, Any] = {}
  if source is None:
    family = _family_that_fits(config)
  else:
    family, settings = family_of(source)
    old = settings.values
    if not family.fits(config):
      raise _misfit(config, f"the source's {family.model_type}")
  if wrapped and family.wrapper_type is None:
    raise ValueError(
      f"wrapped is True: {family.model_type} has no wrapped form; use False"
    )
  text = _text_keys(config, family, old)
  _check_round_trip(config, family, text)
  if not wrapped:
    return text
  outer = dict(source or {})
  if outer.get("model_type") != family.wrapper_type:
    outer = {}
  spelled = (
    {"torch_dtype": config.param_dtype} if "torch_dtype" in outer else {}
  )
  for key in _DROPPED:
    outer.pop(key, None)
  if not outer:
    outer["transformers_version"] = FORMAT_VERSION
  return (
    outer
    | spelled
    | {
      "architectures": [family.wrapper_architecture],
      "model_type": family.wrapper_type,
      "text_config": text,
      "tie_word_embeddings": config.tie_embeddings,
      "dtype": config.param_dtype,
    }
  )


def _text_keys(
  config: ModelConfig, family: Family, old: Mapping[str, Any]
) -> dict[str, Any]:
  """The source's keys where there is one, ours in place of theirs."""
  ours = family.describe(config) | {"dtype": config.param_dtype}
  if "torch_dtype" in old:  # as files of before version 4.56 have it
    ours["torch_dtype"] = config.param_dtype
  old = {key: value for key, value in old.items() if key not in _DROPPED}
  if not old:
    ours |= family.describe_more(config) | _without_source(config)
  elif _embedding(family.translate(Settings(old))) == _embedding(vars(config)):
    # Theirs say the same, in their own spelling.
    ours = {key: value for key, value in ours.items() if key not in rope.KEYS}
  else:
    theirs = old.get("rope_scaling") or old.get("rope_parameters") or {}
    kept = {key: theirs[key] for key in rope.KEPT if key in theirs}
    for key in ("rope_parameters", "rope_scaling"):
      if ours[key] is not None:
        ours[key] = ours[key] | kept
    old = {key: old[key] for key in old if key not in rope.KEYS}
  old |= {key: 0 for key in _EXTRA_LAYERS if old.get(key)}
  return (
    old
    | ours
    | {
      "architectures": [family.architecture],
      "model_type": family.model_type,
    }
  )


def _without_source(config: ModelConfig) -> Fields:
  """What a file says of itself that no source says.

  Absent ids of tokens would be the library's defaults, which are another
  model's.
  """
  sizes = config.latent or config.attention
  out: Fields = {
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
    "torch_dtype": config.param_dtype,
    "transformers_version": FORMAT_VERSION,
  }
  # YaRN's is the length before, from which version 4 computes the ramp.
  length = sizes.rope.original_length
  if sizes.rope.scaling == "yarn":
    out["max_position_embeddings"] = length
  elif sizes.rope.scaling == "llama3":
    out["max_position_embeddings"] = round(length * sizes.rope.factor)
  return out


def _embedding(fields: Mapping[str, Any]) -> tuple:
  """What rope_parameters say of a model."""
  latent = fields.get("latent")
  if latent is not None:
    return latent.rope, latent.softmax_factor
  return fields["attention"].rope, 1.0


def _family_that_fits(config: ModelConfig) -> Family:
  for family in FAMILIES:
    if family.fits(config):
      return family
  raise _misfit(config, "any of " + ", ".join(f.model_type for f in FAMILIES))


def _misfit(config: ModelConfig, family: str) -> ValueError:
  return ValueError(
    f"model {config.name!r} is not of {family}: its layers, norm or biases "
    "differ; only models of those families have a config.json"
  )


def _check_round_trip(
  config: ModelConfig, family: Family, text: Mapping[str, Any]
) -> None:
  read = ModelConfig(name="read", **family.translate(Settings(text)))
  left_out: dict[str, Any] = _COMPUTED | {"stages": None}  # grouped anyhow
  if "swiglu" not in layer_parts(config)[1]:
    left_out["hidden_dim"] = None
  lines = _differences(
    dataclasses.asdict(config), dataclasses.asdict(read), left_out
  )
  if lines:
    raise ValueError(
      f"model {config.name!r} cannot be written as {family.model_type}: "
      + "; ".join(lines)
    )


def _differences(
  ours: Mapping, theirs: Mapping, left_out: Mapping, path: str = ""
) -> list[str]:
  """Fields that config.json would change, as readable lines."""
  lines = []
  for name, value in ours.items():
    other, inner = theirs[name], left_out.get(name)
    if name in left_out and inner is None:
      continue
    if isinstance(value, Mapping) and isinstance(other, Mapping):
      lines += _differences(value, other, inner or {}, f"{path}{name}.")
    elif isinstance(value, float) and isinstance(other, float):
      if not math.isclose(value, other, rel_tol=1e-12):
        lines.append(f"{path}{name} is {value!r}, it would read {other!r}")
    elif value != other:
      lines.append(f"{path}{name} is {value!r}, it would read {other!r}")
  return lines
