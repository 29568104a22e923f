"""Names of tensors in the transformers library's checkpoints and in GGUF."""

from longstraw_jax.config import ModelConfig
from longstraw_jax.weights.slots import (
  SAME,
  TAPS,
  TRANSPOSED,
  Names,
  Naming,
  Paired,
)


def _kernels(*paths: str, **renamed: str) -> Names:
  """x_proj/kernel -> x_proj.weight under a prefix, transposed."""
  return {
    f"{path.rpartition('.')[2]}/kernel": (f"{path}.weight", TRANSPOSED)
    for path in paths
  } | {
    f"{ours}/kernel": (f"{theirs}.weight", TRANSPOSED)
    for ours, theirs in renamed.items()
  }


_ATTENTION: Names = (
  _kernels(*(f"self_attn.{x}_proj" for x in "qkvo"))
  | {f"{x}_proj/bias": (f"self_attn.{x}_proj.bias", SAME) for x in "qkvo"}
  | {f"{x}_norm/weight": (f"self_attn.{x}_norm.weight", SAME) for x in "qk"}
)
_GATED_DELTA: Names = _kernels(
  *(f"linear_attn.in_proj_{x}" for x in ("qkv", "z", "b", "a")),
  "linear_attn.out_proj",
) | {
  "conv": ("linear_attn.conv1d.weight", TAPS),
  "A_log": ("linear_attn.A_log", SAME),
  "dt_bias": ("linear_attn.dt_bias", SAME),
  "norm/weight": ("linear_attn.norm.weight", SAME),
}
_SHARED_LATENT: Names = _kernels(
  *(f"self_attn.{x}" for x in ("q_a_proj", "q_b_proj", "kv_b_proj", "o_proj")),
  kv_a_proj="self_attn.kv_a_proj_with_mqa",
) | {
  f"{x}_norm/weight": (f"self_attn.{x}_layernorm.weight", SAME)
  for x in ("q_a", "kv_a")
}
_INDEXER = "self_attn.indexer."
_LATENT: Names = (
  _SHARED_LATENT
  | {
    f"indexer/{ours}/kernel": (f"{_INDEXER}{theirs}.weight", TRANSPOSED)
    for ours, theirs in (
      ("q_b_proj", "wq_b"),
      ("k_proj", "wk"),
      ("weights_proj", "weights_proj"),
    )
  }
  | {
    f"indexer/k_norm/{x}": (f"{_INDEXER}k_norm.{x}", SAME)
    for x in ("weight", "bias")
  }
)

_PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
_SWIGLU: Names = _kernels(*(f"mlp.{x}" for x in _PROJECTIONS))
_EXPERTS: Names = {
  "router/kernel": ("mlp.gate.weight", TRANSPOSED),
  # The names of a layer's experts in one tensor; see slots.py for the other.
  "experts_gate_up": ("mlp.experts.gate_up_proj", TRANSPOSED),
  "experts_down": ("mlp.experts.down_proj", TRANSPOSED),
}


def _shared_expert(name: str) -> Names:
  return {
    f"shared_expert/{x}/kernel": (f"mlp.{name}.{x}.weight", TRANSPOSED)
    for x in _PROJECTIONS
  }


_SOFTMAX_MOE: Names = (
  _EXPERTS
  | _shared_expert("shared_expert")
  | _kernels(shared_expert_gate="mlp.shared_expert_gate")
)
_SIGMOID_MOE: Names = (
  _EXPERTS
  | _shared_expert("shared_experts")
  | {"correction_bias": ("mlp.gate.e_score_correction_bias", SAME)}
)

# Where a checkpoint may have the trunk: the text model alone, or wrapped.
TRUNKS = ("model.", "model.language_model.")
EMBEDDING = "embed_tokens.weight"


def hf_naming(trunk: str = "model.") -> Naming:
  """Names of the transformers library.

  Args:
    trunk: what all but the head begin with, one of `TRUNKS`.
  """
  return Naming(
    top={
      "embed": (trunk + EMBEDDING, SAME),
      "final_norm": (f"{trunk}norm.weight", SAME),
      "head": ("lm_head.weight", TRANSPOSED),
    },
    layer=f"{trunk}layers.{{}}.",
    norms={
      "mixer_norm/weight": ("input_layernorm.weight", SAME),
      "ffn_norm/weight": ("post_attention_layernorm.weight", SAME),
    },
    mixers={
      "attention": _ATTENTION,
      "gated_delta": _GATED_DELTA,
      "latent_attention": _LATENT,
      "shared_latent_attention": _SHARED_LATENT,
    },
    ffns={
      "swiglu": _SWIGLU,
      "softmax_moe": _SOFTMAX_MOE,
      "sigmoid_moe": _SIGMOID_MOE,
    },
  )


def gguf_naming(architecture: str, config: ModelConfig) -> Naming:
  """Names of llama.cpp, for models of full attention.

  Args:
    architecture: general.architecture; "llama" orders the rows of q and k in
      its own way.
    config: the model.
  """
  attention = {}
  heads = {
    "q": config.attention.num_heads,
    "k": config.attention.num_kv_heads,
  }
  for ours, theirs in zip("qkvo", ("q", "k", "v", "output"), strict=True):
    kernel, bias = TRANSPOSED, SAME
    if architecture == "llama" and ours in heads:
      kernel, bias = (Paired(heads[ours], form) for form in (kernel, bias))
    attention[f"{ours}_proj/kernel"] = (f"attn_{theirs}.weight", kernel)
    attention[f"{ours}_proj/bias"] = (f"attn_{theirs}.bias", bias)
  for x in "qk":
    attention[f"{x}_norm/weight"] = (f"attn_{x}_norm.weight", SAME)
  return Naming(
    top={
      "embed": ("token_embd.weight", SAME),
      "final_norm": ("output_norm.weight", SAME),
      "head": ("output.weight", TRANSPOSED),
    },
    layer="blk.{}.",
    norms={
      "mixer_norm/weight": ("attn_norm.weight", SAME),
      "ffn_norm/weight": ("ffn_norm.weight", SAME),
    },
    mixers={"attention": attention},
    ffns={
      "swiglu": {
        f"{x}_proj/kernel": (f"ffn_{x}.weight", TRANSPOSED)
        for x in ("gate", "up", "down")
      }
    },
  )
