"""Configurations as they are published: every key that such a file holds.

Sizes are those of the models but for the number of layers. PLAIN_4 and PLAIN_5
are what versions 4 and 5 of the transformers library add when every default is
written out (`to_dict` and not `to_diff_dict`).
"""

from longstraw_jax.weights.published import PUBLISHED

PLAIN_5 = {
  "_name_or_path": "",
  "chunk_size_feed_forward": 0,
  "id2label": {"0": "LABEL_0", "1": "LABEL_1"},
  "is_encoder_decoder": False,
  "label2id": {"LABEL_0": 0, "LABEL_1": 1},
  "output_attentions": False,
  "output_hidden_states": False,
  "problem_type": None,
  "return_dict": True,
}
PLAIN_4 = PLAIN_5 | {
  "_attn_implementation_autoset": True,
  "_commit_hash": "0" * 40,
  "add_cross_attention": False,
  "bad_words_ids": None,
  "begin_suppress_tokens": None,
  "cross_attention_hidden_size": None,
  "decoder_start_token_id": None,
  "diversity_penalty": 0.0,
  "do_sample": False,
  "early_stopping": False,
  "encoder_no_repeat_ngram_size": 0,
  "exponential_decay_length_penalty": None,
  "finetuning_task": None,
  "forced_bos_token_id": None,
  "forced_eos_token_id": None,
  "is_decoder": False,
  "length_penalty": 1.0,
  "max_length": 20,
  "min_length": 0,
  "no_repeat_ngram_size": 0,
  "num_beam_groups": 1,
  "num_beams": 1,
  "num_return_sequences": 1,
  "output_scores": False,
  "prefix": None,
  "pruned_heads": {},
  "remove_invalid_values": False,
  "repetition_penalty": 1.0,
  "return_dict_in_generate": False,
  "sep_token_id": None,
  "suppress_tokens": None,
  "task_specific_params": None,
  "temperature": 1.0,
  "tf_legacy_loss": False,
  "tie_encoder_decoder": False,
  "tokenizer_class": None,
  "top_k": 50,
  "top_p": 1.0,
  "torchscript": False,
  "typical_p": 1.0,
  "use_bfloat16": False,
}

LLAMA_3_1 = {
  "architectures": ["LlamaForCausalLM"],
  "attention_bias": False,
  "attention_dropout": 0.0,
  "bos_token_id": 128000,
  "eos_token_id": [128001, 128008, 128009],
  "hidden_act": "silu",
  "hidden_size": 4096,
  "initializer_range": 0.02,
  "intermediate_size": 14336,
  "max_position_embeddings": 131072,
  "mlp_bias": False,
  "model_type": "llama",
  "num_attention_heads": 32,
  "num_hidden_layers": 2,
  "num_key_value_heads": 8,
  "pretraining_tp": 1,
  "rms_norm_eps": 1e-05,
  "rope_scaling": {
    "factor": 8.0,
    "high_freq_factor": 4.0,
    "low_freq_factor": 1.0,
    "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
  },
  "rope_theta": 500000.0,
  "tie_word_embeddings": False,
  "torch_dtype": "bfloat16",
  "transformers_version": "4.42.3",
  "use_cache": True,
  "vocab_size": 128256,
}
LLAMA_2 = {
  "_name_or_path": "meta-llama/Llama-2-7b-hf",
  "architectures": ["LlamaForCausalLM"],
  "bos_token_id": 1,
  "eos_token_id": 2,
  "hidden_act": "silu",
  "hidden_size": 4096,
  "initializer_range": 0.02,
  "intermediate_size": 11008,
  "max_position_embeddings": 4096,
  "model_type": "llama",
  "num_attention_heads": 32,
  "num_hidden_layers": 2,
  "num_key_value_heads": 32,
  "pretraining_tp": 1,
  "rms_norm_eps": 1e-05,
  "rope_scaling": None,
  "tie_word_embeddings": False,
  "torch_dtype": "float32",
  "transformers_version": "4.31.0.dev0",
  "use_cache": True,
  "vocab_size": 32000,
}
SMOLLM2 = {
  "architectures": ["LlamaForCausalLM"],
  "attention_bias": False,
  "attention_dropout": 0.0,
  "bos_token_id": 1,
  "eos_token_id": 2,
  "hidden_act": "silu",
  "hidden_size": 576,
  "initializer_range": 0.041666666666666664,
  "intermediate_size": 1536,
  "is_llama_config": True,
  "max_position_embeddings": 8192,
  "mlp_bias": False,
  "model_type": "llama",
  "num_attention_heads": 9,
  "num_hidden_layers": 2,
  "num_key_value_heads": 3,
  "pad_token_id": 2,
  "pretraining_tp": 1,
  "rms_norm_eps": 1e-05,
  "rope_interleaved": False,
  "rope_scaling": None,
  "rope_theta": 100000,
  "tie_word_embeddings": True,
  "torch_dtype": "bfloat16",
  "transformers.js_config": {
    "dtype": "q4",
    "kv_cache_dtype": {"fp16": "float16", "q4f16": "float16"},
  },
  "transformers_version": "4.42.3",
  "use_cache": True,
  "vocab_size": 49152,
}
LLAMA_TUNED = LLAMA_3_1 | {
  "_attn_implementation_autoset": False,
  "max_sequence_length": 8192,
  "unsloth_fixed": True,
  "unsloth_version": "2025.1.5",
}
QWEN2_5 = {
  "architectures": ["Qwen2ForCausalLM"],
  "attention_dropout": 0.0,
  "bos_token_id": 151643,
  "eos_token_id": 151645,
  "hidden_act": "silu",
  "hidden_size": 3584,
  "initializer_range": 0.02,
  "intermediate_size": 18944,
  "max_position_embeddings": 32768,
  "max_window_layers": 28,
  "model_type": "qwen2",
  "num_attention_heads": 28,
  "num_hidden_layers": 2,
  "num_key_value_heads": 4,
  "rms_norm_eps": 1e-06,
  "rope_theta": 1000000.0,
  "sliding_window": 131072,
  "tie_word_embeddings": False,
  "torch_dtype": "bfloat16",
  "transformers_version": "4.43.1",
  "use_cache": True,
  "use_sliding_window": False,
  "vocab_size": 152064,
}
QWEN2_5_BASE = QWEN2_5 | {
  "eos_token_id": 151643,
  "use_mrope": False,
  "rope_scaling": {
    "factor": 4.0,
    "original_max_position_embeddings": 32768,
    "type": "yarn",
  },
}
QWEN3 = {
  "architectures": ["Qwen3ForCausalLM"],
  "attention_bias": False,
  "attention_dropout": 0.0,
  "bos_token_id": 151643,
  "eos_token_id": 151645,
  "head_dim": 128,
  "hidden_act": "silu",
  "hidden_size": 4096,
  "initializer_range": 0.02,
  "intermediate_size": 12288,
  "max_position_embeddings": 40960,
  "max_window_layers": 36,
  "model_type": "qwen3",
  "num_attention_heads": 32,
  "num_hidden_layers": 2,
  "num_key_value_heads": 8,
  "rms_norm_eps": 1e-06,
  "rope_scaling": None,
  "rope_theta": 1000000,
  "sliding_window": None,
  "tie_word_embeddings": False,
  "torch_dtype": "bfloat16",
  "transformers_version": "4.51.0",
  "use_cache": True,
  "use_sliding_window": False,
  "vocab_size": 151936,
}
QWEN3_5_AS_5 = {
  "dtype": "bfloat16",
  "layer_types": ["full_attention"] * 2,
  "rope_parameters": {"rope_theta": 1000000, "rope_type": "default"},
  "transformers_version": "5.24.0",
}

_TRAINED = {
  "attention_dropout": 0.0,
  "initializer_range": 0.02,
  "pad_token_id": None,
  "transformers_version": "5.24.0",
  "use_cache": True,
}


def _wrapped(name: str, **text) -> dict:
  """A published wrapper with the keys that PUBLISHED leaves out."""
  outer = dict(PUBLISHED[name])
  outer["text_config"] = outer["text_config"] | _TRAINED | text
  return outer | {
    "image_token_id": 248056,
    "language_model_only": False,
    "transformers_version": "4.57.0.dev0",
    "video_token_id": 248057,
    "vision_config": {
      "deepstack_visual_indexes": [],
      "depth": 27,
      "hidden_size": 1152,
      "model_type": name,
      "patch_size": 16,
    },
    "vision_end_token_id": 248054,
    "vision_start_token_id": 248053,
  }


CONFIGS = {
  "llama-3.1": LLAMA_3_1,
  "llama-2": LLAMA_2,
  "llama-tuned": LLAMA_TUNED,
  "smollm2": SMOLLM2,
  "qwen2.5": QWEN2_5,
  "qwen2.5-yarn": QWEN2_5_BASE,
  "qwen3": QWEN3,
  "qwen3-as-5": {
    key: value
    for key, value in (QWEN3 | QWEN3_5_AS_5).items()
    if key not in ("rope_theta", "rope_scaling", "torch_dtype")
  },
  "qwen3.6-27b": _wrapped("qwen3.6-27b", mlp_only_layers=[]),
  "qwen3.6-35b-a3b": _wrapped(
    "qwen3.6-35b-a3b",
    intermediate_size=512,
    mlp_only_layers=[],
    output_router_logits=False,
    router_aux_loss_coef=0.001,
  ),
  "glm-5.2": PUBLISHED["glm-5.2"]
  | _TRAINED
  | {
    "ep_size": 1,
    "index_topk_pattern": None,
    "layer_types": ["indexed_attention"] * 78,
    "pad_token_id": 154820,
    "pretraining_tp": 1,
  },
}
