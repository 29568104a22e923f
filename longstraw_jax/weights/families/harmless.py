"""Keys of a config.json that change nothing of what a text model computes."""

from collections.abc import Mapping
from typing import Any

# Of every configuration of the transformers library, versions 4 and 5: what a
# model is called, how it is run, how it samples, how it was trained.
_NAMES = """
  _attn_implementation _attn_implementation_autoset _commit_hash
  _flash_attn_2_enabled _name_or_path _pre_quantization_dtype architectures
  attn_implementation dtype finetuning_task id2label is_decoder is_llama_config
  label2id model_type name_or_path num_labels prefix problem_type
  task_specific_params tokenizer_class torch_dtype transformers.js_config
  transformers_version trust_remote_code unsloth_fixed unsloth_version
"""
_RUNNING = """
  cache_implementation chunk_size_feed_forward gradient_checkpointing
  max_position_embeddings model_max_length max_sequence_length
  original_max_position_embeddings output_attentions output_hidden_states
  output_router_logits output_scores return_dict return_dict_in_generate
  tf_legacy_loss torchscript use_bfloat16 use_cache
"""
_TOKENS = """
  bos_token_id cls_token_id decoder_start_token_id eos_token_id mask_token_id
  pad_token_id sep_token_id unk_token_id
"""
_SAMPLING = """
  bad_words_ids begin_suppress_tokens diversity_penalty do_sample early_stopping
  encoder_no_repeat_ngram_size exponential_decay_length_penalty
  forced_bos_token_id forced_eos_token_id length_penalty max_length
  max_new_tokens min_length no_repeat_ngram_size num_beam_groups num_beams
  num_return_sequences remove_invalid_values repetition_penalty suppress_tokens
  temperature top_k top_p typical_p
"""
_TRAINING = """
  attention_dropout attn_pdrop aux_loss_alpha embd_pdrop embedding_dropout
  ep_size hidden_dropout hidden_dropout_prob initializer_factor
  initializer_range resid_pdrop router_aux_loss_coef seq_aux
  tie_encoder_decoder
"""
_EVERYWHERE = frozenset(
  (_NAMES + _RUNNING + _TOKENS + _SAMPLING + _TRAINING).split()
)

# Of a model that wraps a text model: the parts that this package does not run.
_OTHER_PARTS = frozenset(
  "audio_config image_token_id text_config video_token_id vision_config "
  "vision_end_token_id vision_start_token_id".split()
)

# Of rotary embeddings, whatever their type: the library reads those of the type
# and no others. KEPT ones say how the axes of images share the frequencies.
ROPE = frozenset(
  "rope_type type rope_theta partial_rotary_factor factor truncate beta_fast "
  "beta_slow low_freq_factor high_freq_factor attention_factor mscale "
  "mscale_all_dim original_max_position_embeddings mrope_section "
  "mrope_interleaved finetuned".split()
)


def of_text(values: Mapping[str, Any]) -> frozenset[str]:
  """Keys of any text model that change nothing."""
  code = values.get("auto_map")
  # Code of its own for a tokenizer or a configuration is not run here; code
  # for the model would compute something else.
  if isinstance(code, Mapping):
    if not any(str(key).startswith("AutoModel") for key in code):
      return _EVERYWHERE | {"auto_map"}
  return _EVERYWHERE


def of_wrapper(values: Mapping[str, Any]) -> frozenset[str]:
  """Keys of a model that wraps a text model which change nothing in it."""
  return of_text(values) | _OTHER_PARTS
