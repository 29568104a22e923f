"""Keys from outside: known, harmless, or refused by name."""

import json
import pathlib
import tempfile

from absl.testing import absltest, parameterized

from longstraw_jax.tokenizer import load_tokenizer
from longstraw_jax.weights.families import config_from_hf
from longstraw_jax.weights.families.gguf import gguf_config
from longstraw_jax.weights.gguf_files import GgufSource
from longstraw_jax.weights.load import load_pretrained
from longstraw_jax.weights.peft_config import read_adapter_config
from tests import gguf_tokenizer_test
from tests.gguf_files_test import write_gguf
from tests.golden import files
from tests.published_configs import CONFIGS, PLAIN_4, PLAIN_5

# What some model of the field has and none of ours, with a value in use.
CHANGES = {
  "dual_chunk_attention_config": {"chunk_size": 262144, "local_size": 8192},
  "attention_sinks": 4,
  "use_sinks": True,
  "attention_chunk_size": 8192,
  "sliding_window": 4096,
  "clip_qkv": 8.0,
  "use_qk_norm": True,
  "rope_local_base_freq": 10000.0,
  "no_rope_layers": [1, 1, 0],
  "logit_softcapping": 30.0,
  "attn_logit_softcapping": 50.0,
  "final_logit_softcapping": 30.0,
  "logit_scale": 0.0625,
  "logits_scaling": 8.0,
  "embedding_multiplier": 12.0,
  "residual_multiplier": 0.22,
  "attention_multiplier": 0.015625,
  "lm_head_multiplier": 0.5,
  "mlp_bias": True,
  "pretraining_tp": 2,
  "quantization_config": {"quant_method": "fp8"},
  "is_encoder_decoder": True,
  "pruned_heads": {"0": [1]},
  "hidden_act": "gelu",
}
UNKNOWN = {
  "hidden_activation_clamp": 10.0,
  "qk_rope_scale_in_layers": [1, 2],
  "use_gated_residual": True,
  "router_jitter_noise": 0,
  "post_norm": "rms",
  "auto_map": {"AutoModelForCausalLM": "modeling_other.OtherForCausalLM"},
}
HARMLESS = {
  "_name_or_path": "some/where",
  "attention_dropout": 0.1,
  "use_cache": False,
  "transformers_version": "4.31.0",
  "auto_map": {"AutoTokenizer": ["tokenization_other.Other", None]},
  "logits_scaling": 1,
  "mlp_bias": False,
  "some_switch": False,
  "some_list": [],
  "some_table": {},
  "some_name": "",
  "some_null": None,
}


def flat(name):
  """The keys of a text model."""
  return CONFIGS[name].get("text_config", CONFIGS[name])


FAMILIES = ("llama-2", "qwen2.5", "qwen3", "qwen3.6-27b", "glm-5.2")


class ConfigTest(parameterized.TestCase):
  @parameterized.product(name=list(CONFIGS), plain=[{}, PLAIN_4, PLAIN_5])
  def test_published_files_are_read(self, name, plain):
    config = config_from_hf(plain | CONFIGS[name])
    self.assertEqual(config, config_from_hf(CONFIGS[name]))
    if "text_config" in CONFIGS[name]:
      text = plain | CONFIGS[name]["text_config"]
      self.assertEqual(
        config_from_hf(CONFIGS[name] | {"text_config": text}), config
      )

  @parameterized.product(name=FAMILIES, key=list(CHANGES))
  def test_what_changes_the_computation_is_refused(self, name, key):
    values = flat(name) | {key: CHANGES[key]}
    if key == "sliding_window":
      values["use_sliding_window"] = True
      values["max_window_layers"] = 0
    with self.assertRaisesRegex(ValueError, f"{key} is|use_sliding_window is"):
      config_from_hf(values)
    # Known, and not to be ignored.
    with self.assertRaisesRegex(ValueError, f"{key} is|use_sliding_window is"):
      config_from_hf(values, ignore_keys=[key])

  @parameterized.product(name=FAMILIES, key=list(UNKNOWN))
  def test_what_is_unknown_is_refused_by_name(self, name, key):
    values = flat(name) | {key: UNKNOWN[key]}
    with self.assertRaisesRegex(ValueError, f"{key} is") as raised:
      config_from_hf(values)
    self.assertIn(f"ignore_keys=('{key}',)", str(raised.exception))
    self.assertEqual(
      config_from_hf(values, ignore_keys=[key]), config_from_hf(flat(name))
    )

  @parameterized.product(name=FAMILIES, key=list(HARMLESS))
  def test_what_is_harmless_is_read(self, name, key):
    values = flat(name) | {key: HARMLESS[key]}
    self.assertEqual(config_from_hf(values), config_from_hf(flat(name)))

  def test_all_unknown_keys_at_once(self):
    with self.assertRaisesRegex(ValueError, "a_key is 1, b_key is 'x'"):
      config_from_hf(CONFIGS["qwen3"] | {"b_key": "x", "a_key": 1})
    with self.assertRaisesRegex(ValueError, "ignore_keys is 'a_key': give"):
      config_from_hf(CONFIGS["qwen3"], ignore_keys="a_key")

  @parameterized.parameters(
    ("final_logit_softcapping", 30.0, "softcapping is 30.0"),
    ("quantization_config", {"bits": 4}, "quantization_config is"),
    ("text_scale", 2.0, "config.json: text_scale is 2.0: unknown"),
    ("auto_map", {"AutoModel": "x.Y"}, "auto_map is"),
  )
  def test_wrappers(self, key, value, message):
    wrapped = CONFIGS["qwen3.6-27b"]
    with self.assertRaisesRegex(ValueError, message):
      config_from_hf(wrapped | {key: value})
    text = wrapped["text_config"] | {key: value}
    with self.assertRaisesRegex(ValueError, f"{key} is"):
      config_from_hf(wrapped | {"text_config": text})

  def test_a_wrapper_may_repeat_its_text_model(self):
    wrapped = CONFIGS["qwen3.6-27b"]
    again = config_from_hf(wrapped | {"hidden_size": 5120})
    self.assertEqual(again, config_from_hf(wrapped))
    with self.assertRaisesRegex(ValueError, "hidden_size is 4096: unknown"):
      config_from_hf(wrapped | {"hidden_size": 4096})

  @parameterized.parameters(
    {"short_factor": [1.0, 2.0]},
    {"alpha": 1000.0},
    {"rope_percent": 0.5},
  )
  def test_rope(self, **more):
    (key,) = more
    rope = {"rope_theta": 1e6, "rope_type": "default"} | more
    values = CONFIGS["qwen3-as-5"] | {"rope_parameters": rope}
    with self.assertRaisesRegex(ValueError, f"rope_parameters: {key} is"):
      config_from_hf(values)
    config_from_hf(values, ignore_keys=[key])

  @parameterized.parameters(
    ("glm-5.2", {"moe_router_dtype": "bfloat16"}, "moe_router_dtype is"),
    ("glm-5.2", {"qk_head_dim": 192}, "qk_head_dim is 192: only 256"),
    ("glm-5.2", {"layer_types": ["full_attention"] * 78}, "layer_types is"),
    ("glm-5.2", {"sliding_window": 128}, "sliding_window is 128"),
    ("qwen3.6-27b", {"sliding_window": 128}, "sliding_window is 128"),
    ("qwen2.5", {"attention_bias": True}, "attention_bias is True: unknown"),
    ("qwen3", {"num_experts": 8}, "num_experts is 8: unknown"),
  )
  def test_of_one_family(self, name, changes, message):
    with self.assertRaisesRegex(ValueError, message):
      config_from_hf(flat(name) | changes)

  def test_load(self):
    with tempfile.TemporaryDirectory() as name:
      folder = pathlib.Path(name)
      values = json.loads((files.FOLDER / "qwen2/config.json").read_text())
      for file in (files.FOLDER / "qwen2").iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
      text = json.dumps(values | {"some_scale": 3})
      (folder / "config.json").write_text(text)
      with self.assertRaisesRegex(ValueError, "some_scale is 3"):
        load_pretrained(folder)
      load_pretrained(folder, ignore_keys=("some_scale",))


class GgufTest(parameterized.TestCase):
  def setUp(self):
    super().setUp()
    folder = tempfile.TemporaryDirectory()
    self.addCleanup(folder.cleanup)
    self.file = pathlib.Path(folder.name) / "model.gguf"

  def _source(self, *pairs):
    return GgufSource(write_gguf(self.file, pairs))

  @parameterized.parameters(
    ("add_float32", "llama.some_scale", 2.0),
    ("add_uint32", "llama.attention.some_window", 0),
    ("add_string", "llama.some_kind", "x"),
  )
  def test_unknown(self, method, key, value):
    source = self._source((method, key, value))
    with self.assertRaisesRegex(ValueError, f"{key} is.*ignore_keys="):
      gguf_config(source)
    self.assertEqual(
      gguf_config(source, ignore_keys=[key]), gguf_config(self._source())
    )

  @parameterized.parameters(
    ("add_uint32", "llama.attention.sliding_window", 4096),
    ("add_uint32", "llama.expert_count", 8),
    ("add_float32", "llama.attn_logit_softcapping", 50.0),
    ("add_float32", "llama.residual_scale", 0.5),
  )
  def test_known_and_not_implemented(self, method, key, value):
    source = self._source((method, key, value))
    for ignored in ((), (key,)):
      with self.assertRaisesRegex(ValueError, f"{key} is {value}"):
        gguf_config(source, ignored)

  @parameterized.parameters(
    ("add_uint32", "llama.expert_count", 0),
    ("add_float32", "llama.residual_scale", 1.0),
    ("add_bool", "llama.some_switch", False),
    ("add_string", "quantize.imatrix.file", "x.dat"),
    ("add_string", "general.license", "mit"),
  )
  def test_harmless(self, *pair):
    self.assertEqual(
      gguf_config(self._source(pair)), gguf_config(self._source())
    )

  def test_adapters_are_no_models(self):
    with self.assertRaisesRegex(ValueError, "general.type is 'adapter'"):
      gguf_config(self._source(("add_type", "adapter")))

  def test_tokenizers(self):
    key = "tokenizer.ggml.normalizer.lowercase"
    gguf_tokenizer_test.write_tokenizer(
      self.file, more=[("add_bool", key, True)]
    )
    with self.assertRaisesRegex(ValueError, f"{key} is True.*ignore_keys="):
      load_tokenizer(str(self.file))
    load_tokenizer(str(self.file), ignore_keys=[key])


# What PEFT 0.21 writes of a plain adapter, every default given.
ADAPTER = {
  "alora_invocation_tokens": None,
  "alpha_pattern": {},
  "arrow_config": None,
  "auto_mapping": None,
  "base_model_name_or_path": "some/where",
  "bias": "none",
  "corda_config": None,
  "ensure_weight_tying": False,
  "eva_config": None,
  "exclude_modules": None,
  "fan_in_fan_out": False,
  "inference_mode": True,
  "init_lora_weights": True,
  "kasa_config": None,
  "layer_replication": None,
  "layers_pattern": None,
  "layers_to_transform": None,
  "loftq_config": {},
  "lora_alpha": 32,
  "lora_bias": False,
  "lora_dropout": 0.05,
  "lora_ga_config": None,
  "megatron_config": None,
  "megatron_core": "megatron.core",
  "modules_to_save": None,
  "peft_type": "LORA",
  "peft_version": "0.21.2",
  "qalora_group_size": 16,
  "r": 16,
  "rank_pattern": {},
  "revision": None,
  "target_modules": ["q_proj", "v_proj"],
  "target_parameters": None,
  "task_type": "CAUSAL_LM",
  "trainable_token_indices": None,
  "use_bdlora": None,
  "use_dora": False,
  "use_qalora": False,
  "use_rslora": False,
}


class AdapterTest(parameterized.TestCase):
  def setUp(self):
    super().setUp()
    folder = tempfile.TemporaryDirectory()
    self.addCleanup(folder.cleanup)
    self.file = pathlib.Path(folder.name) / "adapter_config.json"

  def _read(self, ignore_keys=(), **changes):
    self.file.write_text(json.dumps(ADAPTER | changes))
    return read_adapter_config(self.file, ignore_keys)

  def test_plain_adapters_are_read(self):
    self.assertEqual(self._read(), ADAPTER)

  @parameterized.parameters(
    {"alora_invocation_tokens": [151644, 77091]},
    {"use_dora": True},
    {"lora_bias": True},
    {"bias": "lora_only"},
    {"trainable_token_indices": [5, 7]},
    {"alpha_pattern": {"q_proj": 8}},
    {"layer_replication": [[0, 2], [1, 3]]},
    {"use_qalora": True},
    {"use_bdlora": {"nblocks": 2}},
    {"kasa_config": {"beta": 1.0}},
    {"peft_type": None},
  )
  def test_other_kinds_are_refused(self, **changes):
    (key,) = changes
    for ignored in ((), (key,)):
      with self.assertRaisesRegex(ValueError, f"{key} is .*adapter_config"):
        self._read(ignored, **changes)

  @parameterized.parameters(
    {"use_other_lora": True}, {"gate_config": {"a": 1}}, {"scale_by": 0.5}
  )
  def test_unknown_keys_are_refused_by_name(self, **changes):
    (key,) = changes
    with self.assertRaisesRegex(ValueError, f"{key} is.*ignore_keys="):
      self._read(**changes)
    self._read((key,), **changes)


if __name__ == "__main__":
  absltest.main()
