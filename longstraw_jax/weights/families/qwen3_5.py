"""Qwen3.5 and 3.6: gated delta mixers, a gated attention every few layers."""

from longstraw_jax.config import (
  AttentionConfig,
  DeltaConfig,
  LayerSpec,
  ModelConfig,
  MoEConfig,
)
from longstraw_jax.weights.families.family import (
  Family,
  Fields,
  describe_trunk,
  layer_parts,
  translate_trunk,
)
from longstraw_jax.weights.families.rope import read_rope, write_rope
from longstraw_jax.weights.families.settings import Settings
from longstraw_jax.weights.families.stages import group_layers

NORM_EPS = 1e-6
PARTIAL_ROTARY_FACTOR = 0.25  # the library's, where a file has none
INTERVAL = 4

_MIXERS = {"linear_attention": "gated_delta", "full_attention": "attention"}


def _layers(settings: Settings, ffn: str) -> list[LayerSpec]:
  num_layers = settings.size("num_hidden_layers")
  kinds = settings.names("layer_types", num_layers)
  if kinds is None:
    every = settings.size("full_attention_interval", INTERVAL)
    kinds = [
      "linear_attention" if (i + 1) % every else "full_attention"
      for i in range(num_layers)
    ]
  if not set(kinds) <= set(_MIXERS):
    raise settings.refuse("layer_types", f"use {' or '.join(_MIXERS)}")
  return [LayerSpec(mixer=_MIXERS[kind], ffn=ffn) for kind in kinds]


def _translate(settings: Settings, ffn: str) -> Fields:
  # The library reads neither key. The 27B's "swish" is the gate of the delta
  # mixer's output, which has it anyway; attention's is a sigmoid.
  settings.only("attn_output_gate", True)
  settings.only("output_gate_type", "swish", "silu")
  settings.only("use_sliding_window", False)
  settings.refuse_windows(default=True)
  settings.only("mamba_ssm_dtype", "float32")
  bias = settings.flag("attention_bias")
  head_dim = settings.size("head_dim")
  return translate_trunk(settings, NORM_EPS) | {
    "norm": "zero_centred",
    "stages": group_layers(_layers(settings, ffn)),
    "attention": AttentionConfig(
      num_heads=settings.size("num_attention_heads"),
      num_kv_heads=settings.size("num_key_value_heads"),
      head_dim=head_dim,
      rope=read_rope(settings, head_dim, partial=PARTIAL_ROTARY_FACTOR),
      output_gate=True,
      qk_norm=True,
      qkv_bias=bias,
      o_bias=bias,
    ),
    "delta": DeltaConfig(
      num_key_heads=settings.size("linear_num_key_heads"),
      num_value_heads=settings.size("linear_num_value_heads"),
      key_dim=settings.size("linear_key_head_dim"),
      value_dim=settings.size("linear_value_head_dim"),
      conv_width=settings.size("linear_conv_kernel_dim"),
    ),
  }


def _translate_dense(settings: Settings) -> Fields:
  hidden_dim = settings.size("intermediate_size")
  return _translate(settings, "swiglu") | {"hidden_dim": hidden_dim}


def _translate_moe(settings: Settings) -> Fields:
  settings.only("norm_topk_prob", True)
  settings.only("mlp_only_layers", [])
  settings.only("decoder_sparse_step", 1)
  hidden_dim = settings.size("moe_intermediate_size")
  moe = MoEConfig(
    num_experts=settings.size("num_experts"),
    experts_per_token=settings.size("num_experts_per_tok"),
    expert_hidden_dim=hidden_dim,
    shared_hidden_dim=settings.size("shared_expert_intermediate_size"),
  )
  fields = {"hidden_dim": hidden_dim, "moe": moe}  # no layer has the former
  return _translate(settings, "softmax_moe") | fields


def _describe(config: ModelConfig) -> Fields:
  sizes, delta = config.attention, config.delta
  kinds = {mixer: kind for kind, mixer in _MIXERS.items()}
  # The factor always, because the library's default is not 1.
  rope = write_rope(sizes.rope, sizes.head_dim, always_partial=True)
  return (
    describe_trunk(config)
    | {
      "num_attention_heads": sizes.num_heads,
      "num_key_value_heads": sizes.num_kv_heads,
      "head_dim": sizes.head_dim,
      "attention_bias": sizes.o_bias,
      "layer_types": [kinds[mixer] for mixer in config.layer_types],
      "linear_num_key_heads": delta.num_key_heads,
      "linear_num_value_heads": delta.num_value_heads,
      "linear_key_head_dim": delta.key_dim,
      "linear_value_head_dim": delta.value_dim,
      "linear_conv_kernel_dim": delta.conv_width,
    }
    | rope
  )


def _describe_dense(config: ModelConfig) -> Fields:
  return _describe(config) | {"intermediate_size": config.hidden_dim}


def _describe_moe(config: ModelConfig) -> Fields:
  moe = config.moe
  return _describe(config) | {
    "num_experts": moe.num_experts,
    "num_experts_per_tok": moe.experts_per_token,
    "moe_intermediate_size": moe.expert_hidden_dim,
    "shared_expert_intermediate_size": moe.shared_hidden_dim,
  }


def _describe_more(config: ModelConfig) -> Fields:
  return {
    "attn_output_gate": True,
    "mamba_ssm_dtype": "float32",  # of the recurrent matrix in vLLM
    "mtp_num_hidden_layers": 0,
  }


def _describe_more_moe(config: ModelConfig) -> Fields:
  experts = {"norm_topk_prob": True, "decoder_sparse_step": 1}
  return _describe_more(config) | experts | {"mlp_only_layers": []}


def _fits(config: ModelConfig, ffn: str) -> bool:
  mixers, ffns = layer_parts(config)
  sizes = config.attention
  return (
    mixers <= set(_MIXERS.values())
    and ffns == {ffn}
    and config.norm == "zero_centred"
    and None not in (sizes, config.delta)
    and sizes.output_gate
    and sizes.qk_norm
    and sizes.qkv_bias == sizes.o_bias
  )


# The multi-token prediction head and the vision tower.
_HARMLESS = frozenset(
  "full_attention_interval mtp_num_hidden_layers mtp_use_dedicated_embeddings "
  "max_window_layers".split()
)
_IGNORED = (r"mtp\..*", r"model\.mtp\..*", r"model\.visual\..*")

QWEN3_5 = Family(
  model_type="qwen3_5_text",
  architecture="Qwen3_5ForCausalLM",
  wrapper_type="qwen3_5",
  wrapper_architecture="Qwen3_5ForConditionalGeneration",
  translate=_translate_dense,
  describe=_describe_dense,
  describe_more=_describe_more,
  fits=lambda config: _fits(config, "swiglu"),
  ignored=lambda settings: _IGNORED,
  harmless=_HARMLESS,
)

QWEN3_5_MOE = Family(
  model_type="qwen3_5_moe_text",
  architecture="Qwen3_5MoeForCausalLM",
  wrapper_type="qwen3_5_moe",
  wrapper_architecture="Qwen3_5MoeForConditionalGeneration",
  translate=_translate_moe,
  describe=_describe_moe,
  describe_more=_describe_more_moe,
  fits=lambda config: _fits(config, "softmax_moe"),
  ignored=lambda settings: _IGNORED,
  harmless=_HARMLESS | {"intermediate_size"},  # no layer is dense
)
