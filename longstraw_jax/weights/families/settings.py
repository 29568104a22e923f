"""A config.json, read key by key: what is missing or unknown is refused."""

from collections.abc import Mapping
from typing import Any

REQUIRED: Any = object()

# Features no model here has: key -> values that switch it off.
_OFF: dict[str, tuple] = {
  "quantization_config": (),
  "compression_config": (),
  "attn_logit_softcapping": (),
  "final_logit_softcapping": (),
  "logit_scale": (1,),
  "logits_scaling": (1,),
  "embedding_multiplier": (1,),
  "residual_multiplier": (1,),
  "attention_multiplier": (),
  "mlp_bias": (False,),
}
_REMEDIES = {
  "quantization_config": "give the checkpoint in bfloat16 or float32",
  "compression_config": "give the checkpoint in bfloat16 or float32",
}


class Settings:
  """The keys of one config.json, with errors that name key and remedy.

  A key whose value is null counts as absent, as in the transformers library.
  """

  def __init__(self, values: Mapping[str, Any]):
    """Wraps the object that config.json holds.

    Args:
      values: its keys.
    """
    self.values = values

  def refuse(self, key: str, remedy: str) -> ValueError:
    """The error about a key's value."""
    value = self.values.get(key)
    return ValueError(f"config.json: {key} is {value!r:.200}: {remedy}")

  def get(self, key: str, default: Any = None) -> Any:
    """The value as it is, or the default.

    Raises:
      ValueError: if it is absent and the default is REQUIRED.
    """
    value = self.values.get(key)
    if value is not None:
      return value
    if default is REQUIRED:
      raise ValueError(f"config.json lacks {key}: add it")
    return default

  def size(self, key: str, default: Any = REQUIRED) -> int:
    """A whole number of 1 or more."""
    value = self.get(key, default)
    if value is default:
      return value
    if type(value) is not int or value < 1:
      raise self.refuse(key, "use a whole number of 1 or more")
    return value

  def number(self, key: str, default: Any = REQUIRED) -> float:
    """A number."""
    value = self.get(key, default)
    if value is default:
      return value
    if type(value) not in (int, float):
      raise self.refuse(key, "use a number")
    return float(value)

  def flag(self, key: str, default: Any = False) -> bool:
    """True or false."""
    value = self.get(key, default)
    if not isinstance(value, bool):
      raise self.refuse(key, "use true or false")
    return value

  def names(self, key: str, length: int) -> list[str] | None:
    """A list of so many strings, or None where the key is absent."""
    value = self.get(key)
    if value is None:
      return None
    if not isinstance(value, list) or not all(
      isinstance(name, str) for name in value
    ):
      raise self.refuse(key, "use a list of names")
    if len(value) != length:
      raise self.refuse(
        key, f"it has {len(value)} entries, the model {length} layers"
      )
    return value

  def only(self, key: str, *allowed: Any, remedy: str = "") -> None:
    """Refuses a value other than these; absent is allowed."""
    value = self.values.get(key)
    # 0 == False, but a switch is no number.
    if value is None or any(
      value == one and isinstance(value, bool) == isinstance(one, bool)
      for one in allowed
    ):
      return
    what = f"only {' or '.join(map(repr, allowed))} is implemented"
    if not allowed:
      what = "it is not implemented; remove it if the model does not need it"
    raise self.refuse(key, remedy or what)

  def refuse_unsupported(self) -> None:
    """Refuses features that no model here has.

    Raises:
      ValueError: by the name of the first one that is switched on.
    """
    for key, off in _OFF.items():
      self.only(key, *off, remedy=_REMEDIES.get(key, ""))
    self.only("hidden_act", "silu", "swish")
