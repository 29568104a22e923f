"""The metadata of a GGUF file as the config.json it would have had.

Architectures llama, qwen2 and qwen3. Keys of the format:
https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from collections.abc import Iterable
from typing import Any

import numpy as np

from longstraw_jax.config import RopeConfig
from longstraw_jax.ops.rotary import rotary_frequencies
from longstraw_jax.weights.gguf_files import GgufSource
from longstraw_jax.weights.unknown_keys import (
  check_ignored,
  is_set,
  refuse_unknown,
)

ARCHITECTURES = ("llama", "qwen2", "qwen3")
ROPE_FACTORS = "rope_freqs.weight"

# What is read, by what config.json calls it; behind the architecture's name.
_KEYS = {
  "vocab_size": "vocab_size",
  "context_length": "max_position_embeddings",
  "embedding_length": "hidden_size",
  "block_count": "num_hidden_layers",
  "feed_forward_length": "intermediate_size",
  "attention.head_count": "num_attention_heads",
  "attention.head_count_kv": "num_key_value_heads",
  "attention.key_length": "head_dim",
  "attention.layer_norm_rms_epsilon": "rms_norm_eps",
  "rope.freq_base": "rope_theta",
}
# Read below, or of no effect on the results.
_OTHER_KEYS = (
  "attention.value_length",
  "rope.dimension_count",
  "rope.scaling.type",
  "rope.scaling.factor",
  "rope.scaling.original_context_length",
  "rope.scaling.finetuned",
  "tensor_data_layout",
)
# Known, and not implemented: what switches them off.
_OFF: dict[str, tuple] = {
  "attention.causal": (True,),
  "attention.clamp_kqv": (0,),
  "attention.max_alibi_bias": (0,),
  "attention.output_scale": (0, 1),
  "attention.scale": (0,),
  "attention.sliding_window": (0,),
  "attn_logit_softcapping": (0,),
  "embedding_scale": (0, 1),
  "expert_count": (0,),
  "expert_used_count": (0,),
  "final_logit_softcapping": (0,),
  "logit_scale": (0, 1),
  "pooling_type": (0,),
  "residual_scale": (0, 1),
  "rope.scaling.attn_factor": (1,),
  "use_parallel_residual": (False,),
}


def _refuse(source: GgufSource, what: str, remedy: str) -> ValueError:
  return ValueError(f"{str(source.path)!r} cannot be loaded: {what}; {remedy}")


def gguf_config(
  source: GgufSource, ignore_keys: Iterable[str] = ()
) -> dict[str, Any]:
  """The config.json that says what the metadata say.

  Args:
    source: an open GGUF file.
    ignore_keys: names of unknown keys to pass over.

  Raises:
    ValueError: if the architecture is another one, or a key is unknown or says
      something that is not implemented.
  """
  if source.metadata.get("general.type", "model") != "model":
    raise _refuse(
      source,
      f"general.type is {source.metadata['general.type']!r:.80}",
      "give the file of a model",
    )
  kind = source.metadata.get("general.architecture")
  if kind not in ARCHITECTURES:
    raise _refuse(
      source,
      f"general.architecture is {kind!r:.80}",
      f"use one of {', '.join(ARCHITECTURES)}, or the safetensors files",
    )
  given = {
    key.removeprefix(f"{kind}."): value
    for key, value in source.metadata.items()
    if key.startswith(f"{kind}.")
  }
  for key, off in _OFF.items():
    if is_set(given.get(key)) and given[key] not in off:
      raise _refuse(
        source,
        f"{kind}.{key} is {given[key]!r:.80}, which is not implemented",
        "use the safetensors files",
      )
  refuse_unknown(
    f"{str(source.path)!r}",
    {f"{kind}.{key}": value for key, value in given.items()},
    {f"{kind}.{key}" for key in (*_KEYS, *_OTHER_KEYS, *_OFF)},
    check_ignored(ignore_keys),
  )
  out: dict[str, Any] = {"model_type": kind}
  out |= {
    theirs: _exact(given[ours])
    for ours, theirs in _KEYS.items()
    if ours in given
  }
  if "token_embd.weight" in source.tensors:
    out["vocab_size"] = source.tensors["token_embd.weight"].shape[0]
  out["tie_word_embeddings"] = "output.weight" not in source.tensors
  out["attention_bias"] = "blk.0.attn_output.bias" in source.tensors
  heads, width = out.get("num_attention_heads"), out.get("hidden_size")
  if "head_dim" not in out and type(heads) is type(width) is int and heads:
    out["head_dim"] = width // heads
  for key in ("attention.value_length", "rope.dimension_count"):
    if given.get(key, out.get("head_dim")) != out.get("head_dim"):
      raise _refuse(
        source,
        f"{kind}.{key} is {given[key]!r:.80} and heads are "
        f"{out.get('head_dim')} wide",
        "only equal widths are implemented",
      )
  scaling = _scaling(source, kind, given, out)
  return out if scaling is None else out | {"rope_scaling": scaling}


def _exact(value: Any) -> Any:
  """The decimal number that a stored float32 was written for."""
  return float(str(np.float32(value))) if type(value) is float else value


def _scaling(source, kind, given, out) -> dict[str, Any] | None:
  """`rope_scaling`, or None."""
  stretch = given.get("rope.scaling.type", "none")
  if ROPE_FACTORS in source.tensors:
    return _llama3(source, out)
  if stretch == "none":
    return None
  if stretch not in ("linear", "yarn"):
    raise _refuse(
      source,
      f"{kind}.rope.scaling.type is {stretch!r:.80}",
      "only none, linear and yarn are implemented",
    )
  scaling = {"rope_type": stretch}
  for ours, theirs in (
    ("rope.scaling.factor", "factor"),
    (
      "rope.scaling.original_context_length",
      "original_max_position_embeddings",
    ),
  ):
    if ours in given:
      scaling[theirs] = _exact(given[ours])
  return scaling


def _llama3(source, out) -> dict[str, Any]:
  """The scaling of Llama 3.1 to 3.3, which GGUF files store as its result.

  A tensor holds what every frequency is divided by. All published models ramp
  between 1 and 4 turns in 8,192 tokens and differ in the factor, which is the
  largest divisor.
  """
  stored = source.read(ROPE_FACTORS)
  plain = RopeConfig(dim=2 * stored.size, theta=out.get("rope_theta", 1e4))
  scaling = {
    "rope_type": "llama3",
    "factor": round(float(stored.max()), 3),
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
  }
  if scaling["factor"] >= 1:
    scaled = RopeConfig(
      dim=plain.dim,
      theta=plain.theta,
      scaling="llama3",
      factor=scaling["factor"],
      original_length=8192,
    )
    factors = rotary_frequencies(plain) / rotary_frequencies(scaled)
    if np.allclose(factors, stored, rtol=1e-5):
      return scaling
  raise _refuse(
    source,
    f"its {ROPE_FACTORS} is not that of Llama 3.1 to 3.3",
    "use the safetensors files",
  )
