"""Named configurations."""

from longstraw_jax.config import (
  AttentionConfig,
  DeltaConfig,
  LatentConfig,
  LayerSpec,
  ModelConfig,
  MoEConfig,
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
DELTA_MOE = LayerSpec(mixer="gated_delta", ffn="softmax_moe")
ATTENTION_MOE = LayerSpec(mixer="attention", ffn="softmax_moe")
INDEXED = LayerSpec(mixer="latent_attention")
INDEXED_MOE = LayerSpec(mixer="latent_attention", ffn="sigmoid_moe")
SHARED_MOE = LayerSpec(mixer="shared_latent_attention", ffn="sigmoid_moe")

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
      name="tiny-moe",
      vocab_size=61,
      embed_dim=24,
      hidden_dim=40,
      stages=(Stage(pattern=(DELTA_MOE, ATTENTION_MOE), repeats=2),),
      attention=gated_attention(4, 2, 8, rotary_dim=4, theta=1e4),
      delta=DeltaConfig(
        num_key_heads=2, num_value_heads=4, key_dim=6, value_dim=8
      ),
      moe=MoEConfig(
        num_experts=6,
        experts_per_token=2,
        expert_hidden_dim=12,
        shared_hidden_dim=10,
        row_block=8,
      ),
      read_block=16,
      query_block=16,
      delta_block=8,
      logprob_block=4,
    ),
    ModelConfig(
      name="tiny-glm",
      vocab_size=61,
      embed_dim=24,
      hidden_dim=40,
      stages=(
        Stage(pattern=(INDEXED,), repeats=1),
        Stage(pattern=(INDEXED_MOE, SHARED_MOE), repeats=2),
      ),
      # No layer of its own: the conformance kit stacks it on a mixer.
      attention=gated_attention(4, 2, 8, rotary_dim=4, theta=1e4),
      latent=LatentConfig(
        num_heads=4,
        query_rank=16,
        latent_rank=12,
        nope_dim=6,
        value_dim=8,
        rope=RopeConfig(dim=4, theta=1e4),
        index_heads=16,
        index_dim=8,
        index_topk=5,
        index_query_tile=8,
        index_key_tile=16,
        query_block=4,
      ),
      moe=MoEConfig(
        num_experts=6,
        experts_per_token=2,
        expert_hidden_dim=12,
        shared_hidden_dim=12,
        scaling=2.5,
        row_block=8,
      ),
      norm="plain",
      norm_eps=1e-5,
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
      name="million-hybrid",
      vocab_size=258,
      embed_dim=64,
      hidden_dim=128,
      stages=(Stage(pattern=(DELTA, DELTA, DELTA, ATTENTION), repeats=1),),
      attention=gated_attention(2, 1, 16, rotary_dim=8),
      delta=DeltaConfig(
        num_key_heads=2, num_value_heads=2, key_dim=32, value_dim=32
      ),
      page_dtype="int8",
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
    ModelConfig(
      name="qwen3.6-35b-a3b",
      vocab_size=248320,
      embed_dim=2048,
      hidden_dim=512,
      stages=(
        Stage(
          pattern=(DELTA_MOE, DELTA_MOE, DELTA_MOE, ATTENTION_MOE), repeats=10
        ),
      ),
      attention=gated_attention(16, 2, 256, rotary_dim=64),
      delta=DeltaConfig(
        num_key_heads=16, num_value_heads=32, key_dim=128, value_dim=128
      ),
      moe=MoEConfig(
        num_experts=256,
        experts_per_token=8,
        expert_hidden_dim=512,
        shared_hidden_dim=512,
      ),
      dtype="bfloat16",
      param_dtype="bfloat16",
    ),
    ModelConfig(
      name="glm-5.2",
      vocab_size=154880,
      embed_dim=6144,
      hidden_dim=12288,
      stages=(
        Stage(pattern=(INDEXED,), repeats=2),
        Stage(pattern=(INDEXED, SHARED_MOE, SHARED_MOE, SHARED_MOE), repeats=1),
        Stage(
          pattern=(INDEXED_MOE, SHARED_MOE, SHARED_MOE, SHARED_MOE), repeats=18
        ),
      ),
      latent=LatentConfig(
        num_heads=64,
        query_rank=2048,
        latent_rank=512,
        nope_dim=192,
        value_dim=256,
        rope=RopeConfig(dim=64, theta=8e6),
        index_heads=32,
        index_dim=128,
        index_topk=2048,
      ),
      moe=MoEConfig(
        num_experts=256,
        experts_per_token=8,
        expert_hidden_dim=2048,
        shared_hidden_dim=2048,
        scaling=2.5,
      ),
      norm="plain",
      norm_eps=1e-5,
      dtype="bfloat16",
      param_dtype="bfloat16",
    ),
  )
}
