"""What the config.json of published checkpoints says, for planning without one.

  Model(config_from_hf(PUBLISHED["qwen3.6-27b"]))

Only what a model's sizes and results depend on, and the ids of its tokens.
"""

from typing import Any

_QWEN3_6: dict[str, Any] = {
  "attention_bias": False,
  "attn_output_gate": True,
  "bos_token_id": 248044,
  "dtype": "bfloat16",
  "eos_token_id": 248044,
  "full_attention_interval": 4,
  "head_dim": 256,
  "hidden_act": "silu",
  "linear_conv_kernel_dim": 4,
  "linear_key_head_dim": 128,
  "linear_num_key_heads": 16,
  "linear_value_head_dim": 128,
  "mamba_ssm_dtype": "float32",
  "max_position_embeddings": 262144,
  "mtp_num_hidden_layers": 1,
  "mtp_use_dedicated_embeddings": False,
  "rms_norm_eps": 1e-6,
  "rope_parameters": {
    "mrope_interleaved": True,
    "mrope_section": [11, 11, 10],
    "partial_rotary_factor": 0.25,
    "rope_theta": 10000000,
    "rope_type": "default",
  },
  "tie_word_embeddings": False,
  "vocab_size": 248320,
}


def _layer_types(num_layers: int) -> list[str]:
  return [
    "linear_attention" if (i + 1) % 4 else "full_attention"
    for i in range(num_layers)
  ]


PUBLISHED: dict[str, dict[str, Any]] = {
  "qwen3.6-27b": {
    "architectures": ["Qwen3_5ForConditionalGeneration"],
    "model_type": "qwen3_5",
    "text_config": _QWEN3_6
    | {
      "hidden_size": 5120,
      "intermediate_size": 17408,
      "layer_types": _layer_types(64),
      "linear_num_value_heads": 48,
      "model_type": "qwen3_5_text",
      "num_attention_heads": 24,
      "num_hidden_layers": 64,
      "num_key_value_heads": 4,
      "output_gate_type": "swish",
    },
    "tie_word_embeddings": False,
  },
  "qwen3.6-35b-a3b": {
    "architectures": ["Qwen3_5MoeForConditionalGeneration"],
    "model_type": "qwen3_5_moe",
    "text_config": _QWEN3_6
    | {
      "hidden_size": 2048,
      "layer_types": _layer_types(40),
      "linear_num_value_heads": 32,
      "model_type": "qwen3_5_moe_text",
      "moe_intermediate_size": 512,
      "num_attention_heads": 16,
      "num_experts": 256,
      "num_experts_per_tok": 8,
      "num_hidden_layers": 40,
      "num_key_value_heads": 2,
      "shared_expert_intermediate_size": 512,
    },
    "tie_word_embeddings": False,
  },
  "glm-5.2": {
    "architectures": ["GlmMoeDsaForCausalLM"],
    "attention_bias": False,
    "dtype": "bfloat16",
    "eos_token_id": [154820, 154827, 154829],
    "first_k_dense_replace": 3,
    "head_dim": 192,  # stale: qk_rope_head_dim rotates
    "hidden_act": "silu",
    "hidden_size": 6144,
    "index_head_dim": 128,
    "index_n_heads": 32,
    "index_share_for_mtp_iteration": True,
    "index_skip_topk_offset": 3,
    "index_topk": 2048,
    "index_topk_freq": 4,
    "index_topk_pattern": None,
    "indexer_rope_interleave": True,
    "indexer_types": [
      "shared" if max(i - 2, 0) % 4 else "full" for i in range(78)
    ],
    "intermediate_size": 12288,
    "kv_lora_rank": 512,
    "max_position_embeddings": 1048576,
    "mlp_bias": False,
    "mlp_layer_types": ["dense"] * 3 + ["sparse"] * 75,
    "model_type": "glm_moe_dsa",
    "moe_intermediate_size": 2048,
    "moe_router_dtype": "float32",
    "n_group": 1,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 64,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 78,
    "num_key_value_heads": 64,
    "num_nextn_predict_layers": 1,
    "pad_token_id": 154820,
    "q_lora_rank": 2048,
    "qk_head_dim": 256,
    "qk_nope_head_dim": 192,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-5,
    "rope_interleave": True,
    "rope_parameters": {"rope_theta": 8000000, "rope_type": "default"},
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "tie_word_embeddings": False,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "v_head_dim": 256,
    "vocab_size": 154880,
  },
}
