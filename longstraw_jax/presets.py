"""Named configurations."""

from longstraw_jax.config import (
  AttentionConfig,
  DeltaConfig,
  LayerSpec,
  ModelConfig,
  RopeConfig,
  Stage,
)


def gated_attention(
  num_heads: int,
  num_kv_heads: int,
  head_dim: int,
  *,
  rotary_dim: int,
  theta: float = 1e7,
) -> AttentionConfig:
  """Attention as Qwen3.5/3.6 have it: gated, with query and key norms."""
  return AttentionConfig(
    num_heads=num_heads,
    num_kv_heads=num_kv_heads,
    head_dim=head_dim,
    rope=RopeConfig(dim=rotary_dim, theta=theta),
    output_gate=True,
    qk_norm=True,
  )


DELTA = LayerSpec(mixer="gated_delta")
ATTENTION = LayerSpec(mixer="attention")
BARE_DELTA = LayerSpec(mixer="gated_delta", ffn=None)

PRESETS: dict[str, ModelConfig] = {
  config.name: config
  for config in (
    ModelConfig(
      name="tiny-hybrid",
      vocab_size=61,
      embed_dim=24,
      hidden_dim=40,
      stages=(Stage(pattern=(DELTA, ATTENTION), repeats=2),),
      attention=gated_attention(4, 2, 8, rotary_dim=4, theta=1e4),
      delta=DeltaConfig(
        num_key_heads=2, num_value_heads=4, key_dim=6, value_dim=8
      ),
      read_block=16,
      query_block=16,
      delta_block=8,
      logprob_block=4,
    ),
    ModelConfig(
      name="bench-hybrid",
      vocab_size=512,
      embed_dim=128,
      hidden_dim=384,
      stages=(Stage(pattern=(BARE_DELTA, ATTENTION), repeats=4),),
      attention=gated_attention(4, 2, 32, rotary_dim=8),
      delta=DeltaConfig(
        num_key_heads=4, num_value_heads=4, key_dim=32, value_dim=32
      ),
    ),
    ModelConfig(
      name="small-hybrid",
      vocab_size=258,
      embed_dim=64,
      hidden_dim=128,
      stages=(Stage(pattern=(DELTA, ATTENTION), repeats=1),),
      attention=gated_attention(2, 1, 64, rotary_dim=8, theta=1e4),
      delta=DeltaConfig(
        num_key_heads=2, num_value_heads=2, key_dim=32, value_dim=32
      ),
      saved="everything",
    ),
    ModelConfig(
      name="qwen3.6-27b",
      vocab_size=248320,
      embed_dim=5120,
      hidden_dim=17408,
      stages=(Stage(pattern=(DELTA, DELTA, DELTA, ATTENTION), repeats=16),),
      attention=gated_attention(24, 4, 256, rotary_dim=64),
      delta=DeltaConfig(
        num_key_heads=16, num_value_heads=48, key_dim=128, value_dim=128
      ),
      dtype="bfloat16",
      param_dtype="bfloat16",
    ),
  )
}
