"""Rotary embeddings as config.json writes them, in both of its spellings.

transformers 5 has one object, `rope_parameters`; earlier files have
`rope_theta` and beside it `rope_scaling`, with `rope_type` or `type`.
"""

from collections.abc import Mapping
import math
from typing import Any

from longstraw_jax.config import RopeConfig
from longstraw_jax.weights.families.harmless import ROPE
from longstraw_jax.weights.families.settings import REQUIRED, Settings

KEYS = (
  "rope_parameters",
  "rope_scaling",
  "rope_theta",
  "partial_rotary_factor",
  "original_max_position_embeddings",
)
# Of text models only the first axis of these counts: all three are equal.
KEPT = ("mrope_section", "mrope_interleaved")


def _parameters(settings: Settings, theta: Any) -> Settings:
  """One flat object of either spelling, with rope_theta and rope_type."""
  new = settings.get("rope_parameters", {})
  old = settings.get("rope_scaling", {})
  for key, value in (("rope_parameters", new), ("rope_scaling", old)):
    if not isinstance(value, Mapping):
      raise settings.refuse(key, "use an object")
    if any(isinstance(inner, Mapping) for inner in value.values()):
      raise settings.refuse(
        key, "an embedding per kind of layer is not implemented; give one"
      )
  given = old or new  # the library's order
  values = {key: value for key, value in given.items() if value is not None}
  for key in ("rope_theta", "partial_rotary_factor"):
    values.setdefault(key, settings.get(key, new.get(key)))
  if values["rope_theta"] is None:
    if theta is REQUIRED:
      raise ValueError("config.json lacks rope_theta: add it")
    values["rope_theta"] = theta
  values["rope_type"] = values.get("rope_type") or values.get("type")
  return Settings(values, settings.ignored)


def _mscale(factor: float, weight: float = 1.0) -> float:
  return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


def _attention_factor(rope: Settings, factor: float) -> float | None:
  """YaRN's magnitude where it is not the usual one."""
  given = rope.number("attention_factor", None)
  if given is not None:
    return given
  mscale = rope.number("mscale", None)
  all_dim = rope.number("mscale_all_dim", None)
  if mscale and all_dim:
    return _mscale(factor, mscale) / _mscale(factor, all_dim)
  return None


def read_rope(
  settings: Settings,
  head_dim: int,
  *,
  theta: Any = REQUIRED,
  partial: float = 1.0,
) -> RopeConfig:
  """The rotary embedding of a config.json.

  Args:
    settings: the text model's keys.
    head_dim: width of a head, of which partial_rotary_factor rotates.
    theta: base where the file has none.
    partial: partial_rotary_factor where the file has none.

  Raises:
    ValueError: if a key is missing, or names a form other than default,
      linear, llama3 and yarn.
  """
  rope = _parameters(settings, theta)
  rope.refuse_unknown(ROPE, "rope_parameters")
  rope.only(
    "rope_type",
    *("default", "linear", "llama3", "yarn"),
    remedy="use default, linear, llama3 or yarn",
  )
  kind = rope.get("rope_type", "default")
  fields: dict[str, Any] = {
    "dim": int(head_dim * rope.number("partial_rotary_factor", partial)),
    "theta": rope.number("rope_theta"),
  }
  if kind == "default":
    return RopeConfig(**fields)
  if kind == "linear":
    return RopeConfig(scaling=kind, factor=rope.number("factor"), **fields)
  key = "original_max_position_embeddings"
  length = settings.size(key, None) or rope.size(key, None)
  length = length or settings.size("max_position_embeddings")
  fields |= {"scaling": kind, "original_length": length}
  if kind == "llama3":
    for name in ("factor", "low_freq_factor", "high_freq_factor"):
      fields[name] = rope.number(name)
    return RopeConfig(**fields)
  rope.only("truncate", True)
  factor = rope.number("factor", None)
  if factor is None:
    factor = settings.size("max_position_embeddings") / length
  return RopeConfig(
    factor=factor,
    beta_fast=rope.number("beta_fast", None) or 32.0,
    beta_slow=rope.number("beta_slow", None) or 1.0,
    attention_factor=_attention_factor(rope, factor),
    **fields,
  )


def read_softmax_factor(settings: Settings) -> float:
  """What latent attention multiplies its scale by: mscale_all_dim, squared."""
  rope = _parameters(settings, 1.0)
  weight = rope.number("mscale_all_dim", None)
  if rope.get("rope_type", "default") == "default" or not weight:
    return 1.0
  return _mscale(rope.number("factor"), weight) ** 2


def write_rope(
  rope: RopeConfig,
  head_dim: int,
  softmax_factor: float = 1.0,
  *,
  always_partial: bool = False,
) -> dict[str, Any]:
  """Keys that `read_rope` reads as this embedding, in both spellings.

  Args:
    rope: the embedding.
    head_dim: width of a head.
    softmax_factor: as in LatentConfig.
    always_partial: whether partial_rotary_factor is given even if it is 1.

  Raises:
    ValueError: if the softmax factor needs a scaled embedding and has none.
  """
  new = _rope_parameters(rope, softmax_factor)
  out: dict[str, Any] = {"rope_theta": rope.theta, "rope_scaling": None}
  if rope.scaling != "none":
    # Files of before 2024 have `type`, and so have readers of then.
    old = {key: x for key, x in new.items() if key != "rope_theta"}
    out["rope_scaling"] = old | {"type": rope.scaling}
  if always_partial or rope.dim != head_dim:
    part = {"partial_rotary_factor": rope.dim / head_dim}
    new |= part
    out |= part
  return out | {"rope_parameters": new}


def _rope_parameters(rope: RopeConfig, softmax_factor: float) -> dict[str, Any]:
  out: dict[str, Any] = {
    "rope_type": "default" if rope.scaling == "none" else rope.scaling,
    "rope_theta": rope.theta,
  }
  if rope.scaling != "none":
    out["factor"] = rope.factor
  if rope.scaling in ("llama3", "yarn"):
    out["original_max_position_embeddings"] = rope.original_length
  if rope.scaling == "llama3":
    out["low_freq_factor"] = rope.low_freq_factor
    out["high_freq_factor"] = rope.high_freq_factor
  if rope.scaling == "yarn":
    out["beta_fast"], out["beta_slow"] = rope.beta_fast, rope.beta_slow
    if rope.attention_factor is not None:
      out["attention_factor"] = rope.attention_factor
  if softmax_factor != 1:
    if rope.factor <= 1:
      raise ValueError(
        f"softmax_factor is {softmax_factor}: without a rope.factor above 1 "
        "no config.json says so; use 1"
      )
    weight = (math.sqrt(softmax_factor) - 1) / (0.1 * math.log(rope.factor))
    out["mscale_all_dim"] = weight
  return out
