"""Llama, Qwen2 and Qwen3: full attention and dense feed-forwards throughout."""

from longstraw_jax.config import AttentionConfig, LayerSpec, ModelConfig
from longstraw_jax.weights.families.family import (
  Family,
  Fields,
  describe_trunk,
  layer_parts,
  translate_trunk,
)
from longstraw_jax.weights.families.rope import read_rope, write_rope
from longstraw_jax.weights.families.settings import REQUIRED, Settings
from longstraw_jax.weights.families.stages import group_layers

THETA = 1e4  # the library's, where a file has none
NORM_EPS = 1e-6
QWEN3_HEAD_DIM = 128
_NO_WINDOW = {"use_sliding_window": False, "sliding_window": None}
WINDOW_KEYS = frozenset(("use_sliding_window", "max_window_layers"))


def _refuse_windows(settings: Settings, num_layers: int) -> None:
  kinds = settings.names("layer_types", num_layers)
  if kinds is not None and set(kinds) != {"full_attention"}:
    raise settings.refuse("layer_types", "only full_attention is implemented")
  settings.refuse_windows(settings.get("model_type") == "llama", num_layers)


def _translate(
  settings: Settings, *, head_dim: int | None, qk_norm: bool, bias: bool | None
) -> Fields:
  """Fields of a model of full attention.

  Args:
    settings: the keys.
    head_dim: where the file has none; None divides the width by the heads.
    qk_norm: whether queries and keys are normalised.
    bias: of q, k and v alone, or None where attention_bias says it of all four.
  """
  num_layers = settings.size("num_hidden_layers")
  _refuse_windows(settings, num_layers)
  num_heads = settings.size("num_attention_heads")
  llama = settings.get("model_type") == "llama"
  num_kv_heads = settings.size(
    "num_key_value_heads", num_heads if llama else REQUIRED
  )
  embed_dim = settings.size("hidden_size")
  width = settings.size("head_dim", head_dim or embed_dim // num_heads)
  rope = read_rope(settings, width, theta=THETA)
  if rope.dim != width:
    raise ValueError(
      f"config.json: partial_rotary_factor rotates {rope.dim} of {width} dims: "
      f"{settings.get('model_type')} rotates whole heads; use 1"
    )
  attention_bias = settings.flag("attention_bias") if bias is None else False
  return translate_trunk(settings, NORM_EPS) | {
    "hidden_dim": settings.size("intermediate_size"),
    "norm": "plain",
    "stages": group_layers([LayerSpec(mixer="attention")] * num_layers),
    "attention": AttentionConfig(
      num_heads=num_heads,
      num_kv_heads=num_kv_heads,
      head_dim=width,
      rope=rope,
      qk_norm=qk_norm,
      qkv_bias=attention_bias or bool(bias),
      o_bias=attention_bias,
    ),
  }


def _describe(config: ModelConfig) -> Fields:
  sizes = config.attention
  return (
    describe_trunk(config)
    | {
      "intermediate_size": config.hidden_dim,
      "num_attention_heads": sizes.num_heads,
      "num_key_value_heads": sizes.num_kv_heads,
      "head_dim": sizes.head_dim,
      "attention_bias": sizes.o_bias,
    }
    | write_rope(sizes.rope, sizes.head_dim)
  )


def _is_dense(config: ModelConfig) -> bool:
  return (
    layer_parts(config) == ({"attention"}, {"swiglu"})
    and config.norm == "plain"
    and not config.attention.output_gate
    and config.attention.rope.dim == config.attention.head_dim
  )


def _is_llama(config: ModelConfig) -> bool:
  if not _is_dense(config):
    return False
  sizes = config.attention
  return not sizes.qk_norm and sizes.qkv_bias == sizes.o_bias


def _is_qwen2(config: ModelConfig) -> bool:
  if not _is_dense(config):
    return False
  sizes = config.attention
  return not sizes.qk_norm and sizes.qkv_bias and not sizes.o_bias


def _is_qwen3(config: ModelConfig) -> bool:
  if not _is_dense(config):
    return False
  sizes = config.attention
  return sizes.qk_norm and sizes.qkv_bias == sizes.o_bias


LLAMA = Family(
  model_type="llama",
  architecture="LlamaForCausalLM",
  translate=lambda settings: _translate(
    settings, head_dim=None, qk_norm=False, bias=None
  ),
  describe=_describe,
  describe_more=lambda config: {"mlp_bias": False, "pretraining_tp": 1},
  fits=_is_llama,
  harmless=WINDOW_KEYS,
  # Buffers that early versions of the library stored.
  ignored=lambda settings: (r"model\.layers\.\d+\.self_attn\.rotary_emb\..*",),
)

QWEN2 = Family(
  model_type="qwen2",
  architecture="Qwen2ForCausalLM",
  translate=lambda settings: _translate(
    settings, head_dim=None, qk_norm=False, bias=True
  ),
  describe=_describe,
  describe_more=lambda config: _NO_WINDOW,
  fits=_is_qwen2,
  harmless=WINDOW_KEYS,
)

QWEN3 = Family(
  model_type="qwen3",
  architecture="Qwen3ForCausalLM",
  translate=lambda settings: _translate(
    settings, head_dim=QWEN3_HEAD_DIM, qk_norm=True, bias=None
  ),
  describe=_describe,
  describe_more=lambda config: _NO_WINDOW,
  fits=_is_qwen3,
  harmless=WINDOW_KEYS,
)
