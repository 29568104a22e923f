"""Families: config.json to ModelConfig and back, stages, published sizes."""

import dataclasses
import itertools
import json
import math

from absl.testing import absltest, parameterized
import jax
import numpy as np

from longstraw_jax import PRESETS, LayerSpec, Model, ModelConfig, Stage
from longstraw_jax.config import RopeConfig
from longstraw_jax.weights.families import config_from_hf, config_to_hf
from longstraw_jax.weights.families.stages import group_layers
from longstraw_jax.weights.names import hf_naming
from longstraw_jax.weights.published import PUBLISHED
from longstraw_jax.weights.slots import parameter_shapes, tensor_slots
from tests.golden import files
from tests.published_configs import CONFIGS

PARAMETERS = {
  "qwen3.6-27b": 26_895_998_464,
  "qwen3.6-35b-a3b": 34_660_610_688,
  "glm-5.2": 743_377_019_904,
}
BYTES_PER_TOKEN = {
  "qwen3.6-27b": 65_536,
  "qwen3.6-35b-a3b": 20_480,
  "glm-5.2": 95_232,
}
# The paper's lengths: tokens, ranks, bytes of state on each.
PER_RANK = {
  "qwen3.6-27b": (255 * 8192, 8, 17_112_760_320),
  "glm-5.2": (2_097_152, 32, 5.8125 * 2**30),
}

FULL_DENSE = LayerSpec(mixer="latent_attention")
FULL_MOE = LayerSpec(mixer="latent_attention", ffn="sigmoid_moe")
SHARED_MOE = LayerSpec(mixer="shared_latent_attention", ffn="sigmoid_moe")


def golden(name, **changes):
  text = (files.FOLDER / name / "config.json").read_text()
  return json.loads(text) | changes


def spelled(text):
  """Layers by one letter each: F and S follow GLM, the rest is itself."""
  known = {"F": FULL_MOE, "S": SHARED_MOE}
  return [known.get(letter, LayerSpec(mixer=letter)) for letter in text]


def layers_of(stages):
  return [
    spec
    for stage in stages
    for _ in range(stage.repeats)
    for spec in stage.pattern
  ]


class StagesTest(parameterized.TestCase):
  @parameterized.parameters(
    ("a", [("a", 1)]),
    ("aaaa", [("a", 4)]),
    ("aab", [("a", 2), ("b", 1)]),
    ("aaabaaab", [("aaab", 2)]),
    ("abababc", [("ab", 3), ("c", 1)]),
    ("FSSFSS", [("FSS", 2)]),
    ("FFSFS", [("F", 1), ("FS", 2)]),
    ("FSSSFS", [("FSSSFS", 1)]),
  )
  def test_known(self, text, want):
    got = group_layers(spelled(text))
    want = [
      Stage(pattern=tuple(spelled(pattern)), repeats=repeats)
      for pattern, repeats in want
    ]
    self.assertEqual(list(got), want)

  def test_every_short_order_is_kept_and_no_follower_begins(self):
    for length in range(1, 8):
      for text in itertools.product("aFS", repeat=length):
        if text[0] == "S":
          continue
        layers = spelled(text)
        stages = group_layers(layers)
        self.assertEqual(layers_of(stages), layers)
        for stage in stages:
          self.assertNotEqual(stage.pattern[0], SHARED_MOE)

  def test_refused(self):
    with self.assertRaisesRegex(ValueError, "layer 0 is 'shared_latent"):
      group_layers(spelled("SF"))
    with self.assertRaisesRegex(ValueError, "no layer"):
      group_layers([])


class PublishedTest(parameterized.TestCase):
  @parameterized.parameters(*PUBLISHED)
  def test_parameters_and_state(self, name):
    model = Model(config_from_hf(PUBLISHED[name]))
    shapes = parameter_shapes(model)
    self.assertEqual(
      sum(math.prod(shape.shape) for shape in shapes.values()),
      PARAMETERS[name],
    )
    stored = lambda tokens: sum(
      math.prod(x.shape) * x.dtype.itemsize
      for x in jax.tree.leaves(model.state_shapes(tokens)[0])
    )
    self.assertEqual(stored(2) - stored(1), BYTES_PER_TOKEN[name])
    if name in PER_RANK:
      tokens, ranks, wanted = PER_RANK[name]
      self.assertEqual(stored(tokens) / ranks, wanted)

  @parameterized.parameters(
    ("qwen3.6-27b", 851),
    ("glm-5.2", 58_794),  # 59,585 are published, 791 of the prediction layer
  )
  def test_number_of_tensors(self, name, count):
    config = config_from_hf(PUBLISHED[name])
    shapes = parameter_shapes(Model(config))
    slots = tensor_slots(config, shapes, hf_naming(), lambda name: False)
    self.assertLen({slot.tensor for slot in slots}, count)
    self.assertLen(slots, count)
    elements = sum(math.prod(slot.shape) for slot in slots)
    self.assertEqual(elements, PARAMETERS[name])

  def test_names_and_shapes(self):
    config = config_from_hf(PUBLISHED["glm-5.2"])
    shapes = parameter_shapes(Model(config))
    slots = tensor_slots(config, shapes, hf_naming(), lambda name: False)
    stored = {slot.tensor: slot for slot in slots}
    layer = "model.layers.{}.".format
    for name, shape in (
      (layer(77) + "self_attn.kv_a_proj_with_mqa.weight", (576, 6144)),
      (layer(74) + "self_attn.indexer.wq_b.weight", (4096, 2048)),
      (layer(74) + "self_attn.indexer.k_norm.bias", (128,)),
      (layer(3) + "mlp.gate.e_score_correction_bias", (256,)),
      (layer(3) + "mlp.experts.255.down_proj.weight", (6144, 2048)),
      (layer(2) + "mlp.down_proj.weight", (6144, 12288)),
      ("lm_head.weight", (154880, 6144)),
    ):
      self.assertEqual(stored[name].shape, shape)
    self.assertNotIn(layer(75) + "self_attn.indexer.wq_b.weight", stored)
    # Layer 3 is the second of the second stage, 77 the last of the third.
    slot = stored[layer(3) + "mlp.experts.7.up_proj.weight"]
    self.assertEqual(slot.leaf, "stage_1/layer_1/ffn/experts_gate_up")
    self.assertEqual(slot.start, (0, 7, 0, 2048))
    self.assertEqual(slot.size, (1, 1, 6144, 2048))
    slot = stored[layer(77) + "self_attn.o_proj.weight"]
    self.assertEqual(slot.leaf, "stage_2/layer_3/mixer/o_proj/kernel")
    self.assertEqual(slot.start, (17, 0, 0))

  def test_glm_stages(self):
    config = config_from_hf(PUBLISHED["glm-5.2"])
    self.assertEqual(
      config.stages,
      (
        Stage(pattern=(FULL_DENSE,), repeats=2),
        Stage(pattern=(FULL_DENSE, *[SHARED_MOE] * 3), repeats=1),
        Stage(pattern=(FULL_MOE, *[SHARED_MOE] * 3), repeats=18),
      ),
    )
    self.assertEqual(config.layer_types.count("latent_attention"), 21)

  @parameterized.parameters(*(name for name in PUBLISHED if name in PRESETS))
  def test_the_preset_is_the_published_model(self, name):
    self.assertEqual(config_from_hf(PUBLISHED[name], name=name), PRESETS[name])

  @parameterized.parameters(*PUBLISHED)
  def test_written_again_it_is_the_same_but_for_prediction_layers(self, name):
    source = PUBLISHED[name]
    config = config_from_hf(source)
    got = config_to_hf(config, source)
    text = source.get("text_config", source)
    changed = {key for key in text if got.get(key) != text[key]}
    predicted = {"mtp_num_hidden_layers", "num_nextn_predict_layers"}
    self.assertLessEqual(changed, predicted | {"head_dim"})
    self.assertEqual(config_from_hf(got), config)
    if "text_config" in source:
      wrapped = config_to_hf(config, source, wrapped=True)
      self.assertEqual(wrapped["text_config"], got)
      self.assertEqual(config_from_hf(wrapped), config)


class RopeTest(parameterized.TestCase):
  def _rope(self, **changes):
    config = golden("qwen2")
    del config["rope_parameters"]
    return config_from_hf(config | changes).attention.rope

  def test_both_spellings(self):
    new = self._rope(
      rope_parameters={"rope_type": "linear", "rope_theta": 5e5, "factor": 4}
    )
    for key in ("rope_type", "type"):
      old = self._rope(
        rope_theta=5e5, rope_scaling={key: "linear", "factor": 4.0}
      )
      self.assertEqual(old, new)
    want = RopeConfig(dim=8, theta=5e5, scaling="linear", factor=4.0)
    self.assertEqual(new, want)
    self.assertEqual(
      self._rope(rope_scaling=None), RopeConfig(dim=8, theta=1e4)
    )

  def test_yarn(self):
    yarn = {"rope_type": "yarn", "factor": 8.0}
    length = "original_max_position_embeddings"
    rope = self._rope(rope_scaling=yarn | {length: 64, "beta_fast": 16})
    self.assertEqual((rope.original_length, rope.beta_fast), (64, 16.0))
    self.assertIsNone(rope.attention_factor)
    # Where a file gives it twice, the library takes the outer one.
    rope = self._rope(rope_scaling=yarn | {length: 64}, **{length: 32})
    self.assertEqual(rope.original_length, 32)
    rope = self._rope(rope_scaling=yarn)
    self.assertEqual(rope.original_length, 4096)
    rope = self._rope(rope_scaling=yarn | {"factor": None, length: 512})
    self.assertEqual(rope.factor, 8.0)
    rope = self._rope(
      rope_scaling=yarn | {"mscale": 0.5, "mscale_all_dim": 1.0}
    )
    ratio = (0.05 * math.log(8) + 1) / (0.1 * math.log(8) + 1)
    self.assertAlmostEqual(rope.magnitude, ratio, places=12)
    rope = self._rope(rope_scaling=yarn | {"attention_factor": 1.25})
    self.assertEqual(rope.magnitude, 1.25)

  def test_llama3(self):
    rope = config_from_hf(golden("llama")).attention.rope
    self.assertEqual(
      rope,
      RopeConfig(
        dim=16,
        theta=1e4,
        scaling="llama3",
        factor=8.0,
        original_length=32,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
      ),
    )

  def test_glm_softmax_factor(self):
    yarn = {"rope_type": "yarn", "rope_theta": 8e6, "factor": 4.0}
    latent = config_from_hf(golden("glm_dsa", rope_parameters=yarn)).latent
    self.assertEqual(latent.softmax_factor, 1.0)
    yarn["mscale_all_dim"] = 0.7
    latent = config_from_hf(golden("glm_dsa", rope_parameters=yarn)).latent
    want = (0.07 * math.log(4) + 1) ** 2
    self.assertAlmostEqual(latent.softmax_factor, want, places=12)
    self.assertAlmostEqual(latent.rope.magnitude, 0.1 * math.log(4) + 1)

  def test_partial(self):
    config = config_from_hf(golden("qwen_dense"))
    self.assertEqual(config.attention.rope.dim, 8)
    plain = {"rope_theta": 1e4, "rope_type": "default"}
    config = config_from_hf(golden("qwen_dense", rope_parameters=plain))
    self.assertEqual(config.attention.rope.dim, 4)  # a quarter of 16


class GlmTest(parameterized.TestCase):
  def _kinds(self, **changes):
    config = golden("glm_dsa")
    del config["indexer_types"]
    del config["index_topk_freq"], config["index_skip_topk_offset"]
    config = config_from_hf(config | changes)
    return "".join(
      "F" if mixer == "latent_attention" else "S"
      for mixer in config.layer_types
    )

  def test_a_list_wins_over_a_pattern_and_that_over_a_frequency(self):
    frequency = {"index_topk_freq": 4, "index_skip_topk_offset": 3}
    self.assertEqual(self._kinds(), "FFFFFFFF")
    self.assertEqual(self._kinds(**frequency), "FFFSSSFS")
    self.assertEqual(self._kinds(index_topk_freq=2), "FFSFSFSF")
    pattern = {"index_topk_pattern": "FSFSFSFS"}
    self.assertEqual(self._kinds(**frequency, **pattern), "FSFSFSFS")
    names = ["full"] * 7 + ["shared"]
    self.assertEqual(self._kinds(index_topk_pattern=names), "FFFFFFFS")
    self.assertEqual(
      self._kinds(**frequency, **pattern, indexer_types=names), "FFFFFFFS"
    )

  def test_traps(self):
    config = config_from_hf(golden("glm_dsa", head_dim=192, num_experts=4))
    self.assertEqual(config.latent.rope.dim, 4)
    self.assertEqual(config.latent.latent_eps, 1e-6)
    self.assertEqual(config.norm_eps, 1e-5)
    self.assertEqual(config.moe.num_experts, 4)
    config = golden("glm_dsa")
    del config["mlp_layer_types"]
    ffns = [spec.ffn for spec in layers_of(config_from_hf(config).stages)]
    self.assertEqual(ffns, ["swiglu"] * 3 + ["sigmoid_moe"] * 5)


class TranslatedTest(parameterized.TestCase):
  def test_interval_without_a_list(self):
    config = golden("qwen_dense", full_attention_interval=2)
    del config["layer_types"]
    self.assertEqual(
      config_from_hf(config).layer_types, ("gated_delta", "attention") * 4
    )

  def test_defaults_of_old_files(self):
    config = golden("llama")
    for key in ("num_key_value_heads", "head_dim", "rope_parameters", "dtype"):
      del config[key]
    sizes = config_from_hf(config).attention
    self.assertEqual((sizes.num_kv_heads, sizes.head_dim), (4, 8))
    self.assertEqual(sizes.rope, RopeConfig(dim=8, theta=1e4))
    bfloat16 = config_from_hf(config | {"torch_dtype": "torch.bfloat16"})
    self.assertEqual(bfloat16.dtype, "bfloat16")

  def test_biases(self):
    biases = lambda **changes: (lambda sizes: (sizes.qkv_bias, sizes.o_bias))(
      config_from_hf(golden(**changes)).attention
    )
    self.assertEqual(biases(name="llama"), (True, True))
    self.assertEqual(biases(name="llama", attention_bias=False), (False, False))
    self.assertEqual(biases(name="qwen2"), (True, False))
    self.assertEqual(biases(name="qwen3"), (False, False))

  def test_wrapped(self):
    config = golden("qwen_dense")
    want = config_from_hf(config)
    wrapped = {"model_type": "qwen3_5", "text_config": config}
    self.assertEqual(config_from_hf(wrapped), want)
    with self.assertRaisesRegex(ValueError, "tie_word_embeddings is True"):
      config_from_hf(wrapped | {"tie_word_embeddings": True})
    del config["tie_word_embeddings"]
    tied = config_from_hf(wrapped | {"tie_word_embeddings": True})
    self.assertTrue(tied.tie_embeddings)
    with self.assertRaisesRegex(ValueError, "text_config is None"):
      config_from_hf({"model_type": "qwen3_5"})
    with self.assertRaisesRegex(ValueError, "quantization_config is"):
      config_from_hf(wrapped | {"quantization_config": {"bits": 4}})


class RefusedTest(parameterized.TestCase):
  @parameterized.parameters(
    ("llama", {"model_type": "mamba"}, "model_type is 'mamba'.*qwen3_5_moe"),
    ("llama", {"hidden_act": "gelu"}, "hidden_act is 'gelu': only 'silu'"),
    ("llama", {"mlp_bias": True}, "mlp_bias is True: only False"),
    ("llama", {"quantization_config": {"bits": 4}}, "bfloat16 or float32"),
    ("llama", {"final_logit_softcapping": 30.0}, "softcapping is 30.0"),
    ("llama", {"attn_logit_softcapping": 50.0}, "softcapping is 50.0"),
    ("llama", {"logit_scale": 0.5}, "logit_scale is 0.5"),
    ("llama", {"sliding_window": 64}, "use_sliding_window to false"),
    ("llama", {"hidden_size": None}, "lacks hidden_size"),
    ("llama", {"num_hidden_layers": 0}, "num_hidden_layers is 0"),
    ("llama", {"rms_norm_eps": "small"}, "rms_norm_eps is 'small'"),
    ("llama", {"dtype": "int8"}, "dtype is 'int8': use float32"),
    ("qwen2", {"tie_word_embeddings": 1}, "tie_word_embeddings is 1"),
    (
      "qwen2",
      {
        "layer_types": None,
        "use_sliding_window": True,
        "sliding_window": 8,
        "max_window_layers": 2,
      },
      "sliding_window is 8",
    ),
    (
      "qwen3",
      {
        "layer_types": ["full_attention", "full_attention", "sliding_attention"]
      },
      "layer_types is",
    ),
    ("qwen3", {"layer_types": ["full_attention"]}, "1 entries, the model 3"),
    ("qwen_dense", {"attn_output_gate": False}, "attn_output_gate is False"),
    ("qwen_dense", {"output_gate_type": "sigmoid"}, "only 'swish'"),
    ("qwen_dense", {"layer_types": ["mamba"] * 8}, "use linear_attention"),
    ("qwen_dense", {"rope_parameters": None}, "lacks rope_theta"),
    ("qwen_moe", {"norm_topk_prob": False}, "norm_topk_prob is False"),
    ("qwen_moe", {"mlp_only_layers": [0]}, r"mlp_only_layers is \[0\]"),
    ("glm_dsa", {"attention_bias": True}, "attention_bias is True"),
    ("glm_dsa", {"rope_interleave": False}, "rope_interleave is False"),
    ("glm_dsa", {"scoring_func": "softmax"}, "only 'sigmoid'"),
    ("glm_dsa", {"topk_method": "greedy"}, "only 'noaux_tc'"),
    ("glm_dsa", {"num_key_value_heads": 2}, "num_key_value_heads is 2"),
    ("glm_dsa", {"q_lora_rank": None}, "lacks q_lora_rank"),
    ("glm_dsa", {"indexer_types": ["none"] * 8}, "use full or shared"),
    ("glm_dsa", {"mlp_layer_types": ["moe"] * 8}, "use dense or sparse"),
  )
  def test_by_key_and_remedy(self, name, changes, message):
    with self.assertRaisesRegex(ValueError, message):
      config_from_hf(golden(name, **changes))

  @parameterized.parameters(
    ({"rope_type": "dynamic", "factor": 2.0}, "rope_type is 'dynamic': use"),
    ({"type": "longrope"}, "rope_type is 'longrope': use default, linear"),
    ({"rope_type": "yarn", "factor": 2.0, "truncate": False}, "truncate"),
    ({"rope_type": "linear"}, "lacks factor"),
    ({"rope_type": "linear", "factor": 0.5}, "rope.factor is 0.5"),
    ({"full_attention": {"rope_theta": 1e4}}, "an embedding per kind of layer"),
    ({"partial_rotary_factor": 0.5}, "rotates 8 of 16 dims"),
  )
  def test_rope(self, rope, message):
    with self.assertRaisesRegex(ValueError, message):
      config_from_hf(golden("qwen3", rope_parameters=rope))

  def test_what_does_not_matter_is_not_refused(self):
    config = config_from_hf(
      golden(
        "qwen3",
        attention_dropout=0.1,
        use_sliding_window=False,
        sliding_window=64,
        max_window_layers=1,
      )
    )
    self.assertEqual(config, config_from_hf(golden("qwen3")))

  def test_unknown_field(self):
    with self.assertRaisesRegex(TypeError, "colour"):
      config_from_hf(golden("qwen3"), colour="red")


# What an older reader (version 4 of the library, vLLM, SGLang) takes from a
# file and would have otherwise, silently, from its own defaults.
OLDER = {
  "llama": {
    "rope_theta": 1e4,
    "rope_scaling": {
      "rope_type": "llama3",
      "type": "llama3",
      "factor": 8.0,
      "low_freq_factor": 1.0,
      "high_freq_factor": 4.0,
      "original_max_position_embeddings": 32,
    },
    "max_position_embeddings": 256,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "attention_bias": True,
    "mlp_bias": False,
  },
  "qwen2": {
    "rope_theta": 1e4,
    "rope_scaling": {"rope_type": "linear", "type": "linear", "factor": 2.0},
    "use_sliding_window": False,
  },
  "qwen3": {
    "rope_theta": 1e4,
    "max_position_embeddings": 32,
    "head_dim": 16,
  },
  "qwen_dense": {
    "rope_theta": 1e4,
    "rope_scaling": None,
    "partial_rotary_factor": 0.5,
    "mamba_ssm_dtype": "float32",
    "attn_output_gate": True,
  },
  "qwen_moe": {
    "rope_theta": 1e4,
    "partial_rotary_factor": 0.5,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
  },
  "glm_dsa": {
    "rope_theta": 8e6,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "index_topk_pattern": "FFFSFSFS",
    "indexer_rope_interleave": True,
    "rope_interleave": True,
    "qk_head_dim": 12,
    "moe_layer_freq": 1,
    "first_k_dense_replace": 3,
    "num_nextn_predict_layers": 0,
  },
}


class WrittenTest(parameterized.TestCase):
  @parameterized.parameters(*OLDER)
  def test_without_a_source_older_readers_lack_nothing(self, name):
    config = config_from_hf(golden(name))
    values = config_to_hf(config)
    for key, value in OLDER[name].items():
      self.assertEqual(values[key], value, key)
    self.assertRegex(values["transformers_version"], r"^5\.")
    self.assertEqual(values["torch_dtype"], "float32")
    for kind in ("bos", "eos", "pad"):  # or it would be another model's
      self.assertIsNone(values[f"{kind}_token_id"])
    # Either spelling alone reads as the model.
    old = {k: v for k, v in values.items() if k != "rope_parameters"}
    new = {
      k: v
      for k, v in values.items()
      if k not in ("rope_theta", "rope_scaling", "partial_rotary_factor")
    }
    self.assertEqual(config_from_hf(old), config)
    self.assertEqual(config_from_hf(new), config)

  @parameterized.parameters("qwen2.5", "qwen3", "llama-3.1", "smollm2")
  def test_published_files_come_back(self, name):
    """In the spelling they have, with the dtype that is stored."""
    source = CONFIGS[name]
    config = config_from_hf(source, param_dtype="float32")
    values = config_to_hf(config, source)
    differing = {k for k in source if values.get(k) != source[k]}
    self.assertEqual(differing, {"torch_dtype"})
    self.assertEqual(values["torch_dtype"], "float32")

  def test_wrapped_without_a_source(self):
    values = config_to_hf(config_from_hf(golden("qwen_moe")), wrapped=True)
    self.assertRegex(values["transformers_version"], r"^5\.")
    self.assertEqual(values["text_config"]["rope_theta"], 1e4)

  @parameterized.parameters(*files.NAMES)
  def test_without_a_source(self, name):
    config = config_from_hf(golden(name))
    values = config_to_hf(config)
    self.assertEqual(values["model_type"], golden(name)["model_type"])
    self.assertEqual(config_from_hf(values), config)

  @parameterized.parameters(*files.NAMES)
  def test_the_source_is_kept(self, name):
    source = golden(name, eos_token_id=7, some_key=[1])
    config = config_from_hf(source, ignore_keys=["some_key"])
    values = config_to_hf(config, source)
    added = {key: values[key] for key in values if key not in source}
    self.assertLessEqual(set(added), {"head_dim", "attention_bias"})
    self.assertEqual({key: values[key] for key in source}, source)

  @parameterized.parameters("glm_dsa", "qwen_moe")
  def test_a_longer_context(self, name):
    source = golden(name)
    config = config_from_hf(source)
    part = "latent" if name == "glm_dsa" else "attention"
    sizes = getattr(config, part)
    rope = dataclasses.replace(
      sizes.rope, scaling="yarn", factor=4.0, original_length=128
    )
    changes = {"rope": rope}
    if name == "glm_dsa":
      changes["softmax_factor"] = 1.21
    sizes = dataclasses.replace(sizes, **changes)
    config = dataclasses.replace(config, **{part: sizes})
    values = config_to_hf(config, source)
    self.assertEqual(values["rope_parameters"]["factor"], 4.0)
    read = getattr(config_from_hf(values), part)
    self.assertEqual(read.rope, rope)
    if name == "glm_dsa":
      self.assertAlmostEqual(read.softmax_factor, 1.21, places=12)
    else:
      self.assertEqual(values["rope_parameters"]["mrope_section"], [2, 1, 1])

  def test_old_spelling_is_replaced_where_it_no_longer_holds(self):
    source = golden("qwen2", rope_theta=1e4, rope_scaling=None)
    del source["rope_parameters"]
    config = config_from_hf(source)
    self.assertEqual(config_to_hf(config, source)["rope_theta"], 1e4)
    rope = dataclasses.replace(config.attention.rope, theta=1e6)
    attention = dataclasses.replace(config.attention, rope=rope)
    config = dataclasses.replace(config, attention=attention)
    values = config_to_hf(config, source)
    self.assertEqual(values["rope_theta"], 1e6)
    self.assertEqual(values["rope_parameters"]["rope_theta"], 1e6)

  def test_quantization_and_prediction_layers_are_dropped(self):
    source = golden(
      "glm_dsa", num_nextn_predict_layers=1, torch_dtype="float16"
    )
    config = config_from_hf(source)
    source["quantization_config"] = {"quant_method": "fp8"}
    values = config_to_hf(config, source)
    self.assertNotIn("quantization_config", values)
    self.assertEqual(values["torch_dtype"], config.param_dtype)
    self.assertEqual(values["dtype"], config.param_dtype)
    self.assertEqual(values["num_nextn_predict_layers"], 0)

  def test_no_family(self):
    with self.assertRaisesRegex(ValueError, "'bench-hybrid' is not of any of"):
      config_to_hf(PRESETS["bench-hybrid"])
    config = config_from_hf(golden("qwen3"))
    with self.assertRaisesRegex(ValueError, "the source's llama"):
      config_to_hf(config, golden("llama"))
    with self.assertRaisesRegex(ValueError, "qwen3 has no wrapped form"):
      config_to_hf(config, wrapped=True)
    config = config_from_hf(golden("glm_dsa"))
    latent = dataclasses.replace(config.latent, latent_eps=1e-5)
    config = dataclasses.replace(config, latent=latent)
    with self.assertRaisesRegex(ValueError, "latent.latent_eps is 1e-05"):
      config_to_hf(config)

  def test_presets_that_fit(self):
    config = PRESETS["tiny-hybrid"]
    read = config_from_hf(config_to_hf(config))
    self.assertIsInstance(read, ModelConfig)
    for field in ("stages", "attention", "delta", "norm_eps", "vocab_size"):
      self.assertEqual(getattr(read, field), getattr(config, field))
    np.testing.assert_equal(read.dtype, config.dtype)


if __name__ == "__main__":
  absltest.main()
