"""A config.json, read key by key: what is missing or unknown is refused."""

from collections.abc import Collection, Mapping
from typing import Any

from longstraw_jax.weights.unknown_keys import is_set, refuse_unknown

REQUIRED: Any = object()

# Features no model here has: key -> values that switch it off. No caller can
# have them ignored.
_OFF: dict[str, tuple] = {
  "quantization_config": (),
  "compression_config": (),
  # What is attended to.
  "dual_chunk_attention_config": (),
  "attention_chunk_size": (),
  "attention_sinks": (),
  "use_attention_sinks": (False,),
  "use_sinks": (False,),
  "clip_qkv": (),
  "use_qk_norm": (False,),
  "qk_layernorm": (False,),
  "attn_temperature_tuning": (False,),
  "no_rope_layers": (),
  "no_rope_layer_interval": (),
  "rope_interleaved": (False,),
  "rope_local_base_freq": (),
  "swa_rope_parameters": (),
  # What is multiplied, capped or added to.
  "attn_logit_softcapping": (),
  "final_logit_softcapping": (),
  "logit_softcapping": (),
  "logit_scale": (1,),
  "logits_scaling": (1,),
  "lm_head_multiplier": (1,),
  "embedding_multiplier": (1,),
  "residual_multiplier": (1,),
  "attention_multiplier": (),
  "scale_emb": (1,),
  "mlp_bias": (False,),
  "use_parallel_residual": (False,),
  # What the model is.
  "is_encoder_decoder": (False,),
  "add_cross_attention": (False,),
  "cross_attention_hidden_size": (),
  "pruned_heads": (),
  "pretraining_tp": (1,),
}
_REMEDIES = {
  "quantization_config": "give the checkpoint in bfloat16 or float32",
  "compression_config": "give the checkpoint in bfloat16 or float32",
  "dual_chunk_attention_config": "only full attention is implemented; remove "
  "it where no prompt is longer than its chunk_size",
  "pretraining_tp": "it splits sums, which is not implemented; use 1, which "
  "differs by rounding",
}


class Settings:
  """The keys of one config.json, with errors that name key and remedy.

  A key whose value is null counts as absent, as in the transformers library.

  Attributes:
    values: the keys.
    ignored: names of unknown keys that the caller wants passed over.
    outer: of the model that wraps this one, or None.
  """

  def __init__(
    self,
    values: Mapping[str, Any],
    ignored: Collection[str] = (),
    outer: "Settings | None" = None,
  ):
    """Wraps the object that config.json holds.

    Args:
      values: its keys.
      ignored: names of unknown keys that `refuse_unknown` passes over.
      outer: of the model that wraps this one.
    """
    self.values = values
    self.ignored = ignored
    self.outer = outer
    self._read: set[str] = set()

  def refuse(self, key: str, remedy: str) -> ValueError:
    """The error about a key's value."""
    value = self.values.get(key)
    return ValueError(f"config.json: {key} is {value!r:.200}: {remedy}")

  def get(self, key: str, default: Any = None) -> Any:
    """The value as it is, or the default.

    Raises:
      ValueError: if it is absent and the default is REQUIRED.
    """
    self._read.add(key)
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
    self._read.add(key)
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
      if is_set(self.get(key)):
        self.only(key, *off, remedy=_REMEDIES.get(key, ""))
    self.only("hidden_act", "silu", "swish")

  def refuse_windows(self, default: bool, num_layers: int = 0) -> None:
    """Refuses sliding windows that are in use.

    Args:
      default: whether a file that gives a window and no more uses it.
      num_layers: layers from max_window_layers on slide; 0 where the model type
        knows no such key.
    """
    if self.get("sliding_window") is None:
      return
    first = self.get("max_window_layers", 0) if num_layers else -1
    if self.flag("use_sliding_window", default) and first < num_layers:
      raise self.refuse(
        "sliding_window",
        "it is not implemented; where full attention is meant, set "
        "use_sliding_window to false",
      )

  def refuse_unknown(self, harmless: Collection[str], part: str = "") -> None:
    """Refuses keys that are set and were neither read nor are harmless.

    Args:
      harmless: those that change nothing.
      part: of the file, where it is not the whole.

    Raises:
      ValueError: naming all of them, and the way around.
    """
    where = f"config.json, {part}" if part else "config.json"
    known = {*self._read, *harmless}
    refuse_unknown(where, self.values, known, self.ignored)
