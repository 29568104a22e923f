"""Loading: the reference's logits, every layout, and what is refused."""

import dataclasses
import gc
import json
import pathlib
import re
import tempfile
from unittest import mock
import weakref

from absl.testing import absltest, parameterized
from flax import traverse_util
import gguf
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from longstraw_jax import capture, replay
from longstraw_jax.config import RopeConfig
from longstraw_jax.ops.rotary import rotary_frequencies
from longstraw_jax.state import tree_zeros
from longstraw_jax.types import Span
from longstraw_jax.weights import load
from longstraw_jax.weights.load import load_pretrained
from longstraw_jax.weights.safetensors_files import (
  SafetensorsSource,
  write_safetensors,
)
from tests.golden import files

LOGITS_ATOL = 1e-4  # float32, logits of unit scale


def make_folder(test):
  folder = tempfile.TemporaryDirectory()
  test.addCleanup(folder.cleanup)
  return pathlib.Path(folder.name)


def write_checkpoint(folder, name, change=None, **config_changes):
  """A golden checkpoint with other tensors or another config.json."""
  config = json.loads((files.FOLDER / name / "config.json").read_text())
  arrays = dict(files.tensors(files.FOLDER / name))
  if change is not None:
    arrays = change(arrays)
  (folder / "config.json").write_text(json.dumps(config | config_changes))
  write_safetensors(folder, files.items(arrays))
  return folder


def stacked(arrays):
  """Experts of a layer in one tensor each."""
  out, experts = {}, {}
  for name, array in arrays.items():
    match = re.fullmatch(r"(.*\.experts)\.(\d+)\.(\w+)\.weight", name)
    if match:
      prefix, expert, part = match.groups()
      experts.setdefault(prefix, {})[int(expert), part] = array
    else:
      out[name] = array
  for prefix, parts in experts.items():
    join = lambda part, parts=parts: np.stack(
      [x for (_, p), x in sorted(parts.items()) if p == part]
    )
    gate_up = np.concatenate([join("gate_proj"), join("up_proj")], axis=1)
    out[f"{prefix}.gate_up_proj"] = gate_up
    out[f"{prefix}.down_proj"] = join("down_proj")
  return out


def assert_same(a, b):
  assert jax.tree.structure(a) == jax.tree.structure(b)
  for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
    assert x.dtype == y.dtype, (x.dtype, y.dtype)
    np.testing.assert_array_equal(x, y)


class GoldenTest(parameterized.TestCase):
  @parameterized.parameters(*files.NAMES)
  def test_the_reference_logits(self, name):
    """In one pass; and by capture and replay, as their log-probabilities."""
    model, params = load_pretrained(
      files.FOLDER / name, read_block=16, query_block=8, delta_block=16
    )
    ids, want = files.reference(name)

    @jax.jit
    def logits(params, ids):
      positions = jnp.arange(ids.size, dtype=jnp.int32)
      span = Span(positions=positions, length=jnp.int32(ids.size))
      carry = tree_zeros(model.state_shapes(1)[1])
      out = model.hidden(params, ids, span, (), carry)
      return model.logits(params, out.x_TD)

    got = logits(params, ids)
    self.assertEqual(got.dtype, jnp.float32)
    np.testing.assert_allclose(got, want, rtol=0, atol=LOGITS_ATOL)

    prompt = 70  # four chunks and a bit; the response, a block and a bit
    state = capture(model, params, ids[:prompt], chunk_size=16)
    responses, lengths = ids[None, prompt:], np.array([ids.size - prompt])
    got = replay(model, params, state, responses, lengths, block_size=13)
    every = jax.nn.log_softmax(want.astype(np.float64))
    want = every[np.arange(prompt - 1, ids.size - 1), ids[prompt:]]
    np.testing.assert_allclose(got[0], want, rtol=0, atol=LOGITS_ATOL)


class LayoutTest(parameterized.TestCase):
  def setUp(self):
    super().setUp()
    self.folder = make_folder(self)

  @parameterized.parameters(*files.WITH_EXPERTS)
  def test_stacked_experts(self, name):
    write_checkpoint(self.folder, name, stacked)
    _, got = load_pretrained(self.folder)
    _, want = load_pretrained(files.FOLDER / name)
    assert_same(got, want)

  def test_wrapped_with_parts_that_are_not_run(self):
    config = json.loads(
      (files.FOLDER / "qwen_dense" / "config.json").read_text()
    )
    arrays = {
      name.replace("model.", "model.language_model.", 1): array
      for name, array in files.tensors(files.FOLDER / "qwen_dense").items()
    }
    for name in ("mtp.fc.weight", "model.visual.patch_embed.proj.weight"):
      arrays[name] = np.zeros((2, 2), np.float32)
    wrapped = {"model_type": "qwen3_5", "text_config": config}
    (self.folder / "config.json").write_text(json.dumps(wrapped))
    write_safetensors(self.folder, files.items(arrays), max_shard_bytes=100_000)
    model, got = load_pretrained(self.folder, name="x")
    plain, want = load_pretrained(files.FOLDER / "qwen_dense", name="x")
    self.assertEqual(model, plain)
    assert_same(got, want)

  def test_glm_prediction_layers_are_left_out_where_announced(self):
    add = lambda arrays: (
      arrays | {"model.layers.8.enorm.weight": np.zeros(32, np.float32)}
    )
    write_checkpoint(self.folder, "glm_dsa", add, num_nextn_predict_layers=1)
    _, got = load_pretrained(self.folder)
    _, want = load_pretrained(files.FOLDER / "glm_dsa")
    assert_same(got, want)
    other = make_folder(self)
    write_checkpoint(other, "glm_dsa", add, num_nextn_predict_layers=0)
    with self.assertRaisesRegex(ValueError, "left over: model.layers.8.enorm"):
      load_pretrained(other)

  def test_tied_head(self):
    with_head = lambda head: (
      lambda arrays: (
        arrays | {"lm_head.weight": head(arrays["model.embed_tokens.weight"])}
      )
    )
    write_checkpoint(self.folder, "qwen2", with_head(lambda x: x))
    _, got = load_pretrained(self.folder)
    _, want = load_pretrained(files.FOLDER / "qwen2")
    assert_same(got, want)
    other = make_folder(self)
    write_checkpoint(other, "qwen2", with_head(lambda x: 2 * x))
    with self.assertRaisesRegex(ValueError, "tie_embeddings=False"):
      load_pretrained(other)
    _, untied = load_pretrained(other, tie_embeddings=False)
    tree = untied.merged()
    np.testing.assert_array_equal(tree["head"], 2 * tree["embed"].T)


class DtypeTest(parameterized.TestCase):
  def test_the_file_decides_leaf_by_leaf(self):
    folder = make_folder(self)
    wide = ("A_log", "linear_attn.norm.weight")
    narrow = lambda arrays: {
      name: x if name.endswith(wide) else x.astype(ml_dtypes.bfloat16)
      for name, x in arrays.items()
    }
    write_checkpoint(folder, "qwen_dense", narrow, dtype="bfloat16")
    model, params = load_pretrained(folder)
    self.assertEqual(model.config.dtype, "bfloat16")
    self.assertEqual(model.config.param_dtype, "bfloat16")
    mixer = params.merged()["stage_0"]["layer_0"]["mixer"]
    self.assertEqual(mixer["A_log"].dtype, jnp.float32)
    self.assertEqual(mixer["norm"]["weight"].dtype, jnp.float32)
    self.assertEqual(mixer["in_proj_z"]["kernel"].dtype, jnp.bfloat16)

  @parameterized.parameters(
    ("bfloat16", jnp.float32),
    ("float32", jnp.float32),
    ("float64", jnp.float64),
  )
  def test_arguments_cast_but_for_the_router_of_glm(self, dtype, router):
    model, params = load_pretrained(
      files.FOLDER / "glm_dsa", dtype="float32", param_dtype=dtype
    )
    self.assertEqual(model.config.dtype, "float32")
    self.assertEqual(model.config.param_dtype, dtype)
    ffn = params.merged()["stage_2"]["layer_0"]["ffn"]
    self.assertEqual(ffn["router"]["kernel"].dtype, router)
    self.assertEqual(ffn["correction_bias"].dtype, router)
    self.assertEqual(ffn["experts_down"].dtype, jnp.dtype(dtype))

  @parameterized.parameters("qwen_dense", "qwen_moe")
  def test_precise_parameters_are_not_rounded(self, name):
    """Decay rates and the gated norm, which the file has in float32."""
    _, want = load_pretrained(files.FOLDER / name)
    model, params = load_pretrained(
      files.FOLDER / name, dtype="float32", param_dtype="bfloat16"
    )
    self.assertEqual(model.config.param_dtype, "bfloat16")
    got = traverse_util.flatten_dict(params.merged(), sep="/")
    precise = ("mixer/A_log", "mixer/dt_bias", "mixer/norm/weight")
    found = set()
    for path, leaf in traverse_util.flatten_dict(
      want.merged(), sep="/"
    ).items():
      if path.endswith(precise):
        found.add(path.partition("mixer")[2])
        leaf = np.asarray(leaf, np.float32)
      else:
        leaf = np.asarray(leaf.astype(jnp.bfloat16))
      self.assertEqual(got[path].dtype, leaf.dtype, path)
      np.testing.assert_array_equal(got[path], leaf, err_msg=path)
    self.assertLen(found, 3)

  def test_precise_parameters_that_are_named(self):
    """Or that a file has rounded already, as Qwen3.6's."""
    source = files.FOLDER / "qwen_dense"
    load = lambda named, source=source: load_pretrained(
      source, dtype="float32", param_dtype=named
    )[1].merged()["stage_0"]["layer_0"]["mixer"]
    mixer = load({"": "bfloat16", "mixer/A_log": "bfloat16"})
    self.assertEqual(mixer["A_log"].dtype, jnp.bfloat16)
    self.assertEqual(mixer["dt_bias"].dtype, jnp.float32)
    self.assertEqual(mixer["conv"].dtype, jnp.bfloat16)
    mixer = load({"A_log": "bfloat16"})
    self.assertEqual(mixer["A_log"].dtype, jnp.bfloat16)
    self.assertEqual(mixer["conv"].dtype, jnp.float32)
    with self.assertRaisesRegex(ValueError, "param_dtype names 'A_lag'"):
      load({"": "bfloat16", "A_lag": "bfloat16"})
    narrow = lambda arrays: {
      name: x.astype(ml_dtypes.bfloat16) for name, x in arrays.items()
    }
    folder = write_checkpoint(
      make_folder(self), "qwen_dense", narrow, dtype="bfloat16"
    )
    for named in (None, "bfloat16"):
      self.assertEqual(load(named, folder)["A_log"].dtype, jnp.bfloat16)
    self.assertEqual(load("float32", folder)["A_log"].dtype, jnp.float32)

  def test_a_narrow_router_is_widened(self):
    folder = make_folder(self)
    narrow = lambda arrays: {
      name: x.astype(ml_dtypes.bfloat16) for name, x in arrays.items()
    }
    write_checkpoint(folder, "glm_dsa", narrow, dtype="bfloat16")
    _, params = load_pretrained(folder)
    ffn = params.merged()["stage_2"]["layer_0"]["ffn"]
    self.assertEqual(ffn["router"]["kernel"].dtype, jnp.float32)
    self.assertEqual(ffn["experts_down"].dtype, jnp.bfloat16)

  def test_float64_needs_jax_to_have_it(self):
    with (
      jax.enable_x64(False),
      self.assertRaisesRegex(ValueError, "enable_x64"),
    ):
      load_pretrained(files.FOLDER / "qwen2", param_dtype="float64")


class PlacementTest(parameterized.TestCase):
  def test_one_tensor_is_on_the_host_at_a_time(self):
    live, peak = set(), []

    def read(source, name, read=SafetensorsSource.read):
      array = read(source, name).copy()
      key = (name, array.nbytes)
      live.add(key)
      peak.append(sum(nbytes for _, nbytes in live))
      weakref.finalize(array, live.discard, key)
      return array

    gc.collect()
    with mock.patch.object(SafetensorsSource, "read", read):
      load_pretrained(files.FOLDER / "glm_dsa")
    largest = max(
      array.nbytes for array in files.tensors(files.FOLDER / "glm_dsa").values()
    )
    self.assertLen(peak, len(files.tensors(files.FOLDER / "glm_dsa")))
    self.assertLessEqual(max(peak), largest)

  def test_a_leaf_is_filled_where_it_is(self):
    pointers = {}

    def fill(leaf, source, slot, fill=load._fill):
      pointers.setdefault(slot.leaf, set()).add(leaf.unsafe_buffer_pointer())
      leaf = fill(leaf, source, slot)
      pointers[slot.leaf].add(leaf.unsafe_buffer_pointer())
      return leaf

    with mock.patch.object(load, "_fill", fill):
      load_pretrained(files.FOLDER / "glm_dsa")
    self.assertEqual({len(at) for at in pointers.values()}, {1})

  def test_sharding_is_asked_for_every_leaf(self):
    mesh = jax.make_mesh((1,), ("x",))
    asked = {}

    def sharding(path, shape):
      asked[path] = shape
      spec = jax.sharding.PartitionSpec(*(None,) * (len(shape) - 1), "x")
      return jax.sharding.NamedSharding(mesh, spec)

    _, params = load_pretrained(files.FOLDER / "qwen2", sharding=sharding)
    tree = params.merged()
    self.assertEqual(asked["embed"], tree["embed"].shape)
    self.assertIn("stage_0/layer_0/mixer/q_proj/bias", asked)
    self.assertLen(asked, len(jax.tree.leaves(tree)))
    for leaf in jax.tree.leaves(tree):
      self.assertEqual(leaf.sharding.spec[leaf.ndim - 1], "x")
    _, want = load_pretrained(files.FOLDER / "qwen2")
    assert_same(params, want)

  def test_trainable_and_constants(self):
    _, params = load_pretrained(
      files.FOLDER / "glm_dsa", trainable=lambda path: "stage_2" in path
    )
    self.assertEqual(set(params.trainable), {"stage_2"})
    layer = params.trainable["stage_2"]["layer_0"]
    self.assertNotIn("correction_bias", layer["ffn"])
    self.assertIn("correction_bias", params.frozen["stage_2"]["layer_0"]["ffn"])
    self.assertNotIn("indexer", layer["mixer"])

  def test_name_and_overrides(self):
    model, _ = load_pretrained(files.FOLDER / "qwen2", saved="inputs")
    self.assertEqual(model.config.name, "qwen2")
    self.assertEqual(model.config.saved, "inputs")
    with self.assertRaisesRegex(TypeError, "colour"):
      load_pretrained(files.FOLDER / "qwen2", colour="red")


class RefusedTest(parameterized.TestCase):
  def setUp(self):
    super().setUp()
    self.folder = make_folder(self)

  def test_every_trouble_in_one_message_and_nothing_read(self):
    def change(arrays):
      del arrays["model.norm.weight"]
      del arrays["model.layers.1.mlp.up_proj.weight"]
      arrays["model.layers.3.mlp.up_proj.weight"] = np.zeros(2, np.float32)
      name = "model.layers.0.self_attn.q_proj.weight"
      arrays[name] = arrays[name][:-1]
      name = "model.layers.0.self_attn.o_proj.weight"
      arrays[name] = arrays[name].astype(ml_dtypes.float8_e4m3fn)
      return arrays

    write_checkpoint(self.folder, "llama", change)
    with (
      mock.patch.object(SafetensorsSource, "read", side_effect=AssertionError),
      self.assertRaises(ValueError) as caught,
    ):
      load_pretrained(self.folder)
    message = str(caught.exception)
    self.assertIn(
      "missing: model.norm.weight [32], model.layers.1.mlp.up_proj.weight "
      "[48, 32]",
      message,
    )
    self.assertIn("left over: model.layers.3.mlp.up_proj.weight", message)
    self.assertIn(
      "self_attn.q_proj.weight [63, 32] instead of [64, 32]", message
    )
    self.assertIn("self_attn.o_proj.weight float8_e4m3fn", message)

  def test_a_long_list_is_cut(self):
    write_checkpoint(self.folder, "glm_dsa", lambda arrays: {})
    with self.assertRaisesRegex(ValueError, r"missing: .* and \d\d\d more"):
      load_pretrained(self.folder)

  def test_paths(self):
    with self.assertRaisesRegex(FileNotFoundError, "no folder"):
      load_pretrained(self.folder / "absent")
    with self.assertRaisesRegex(FileNotFoundError, "no config.json"):
      load_pretrained(self.folder)
    (self.folder / "config.json").write_text("{")
    with self.assertRaisesRegex(ValueError, "is no JSON"):
      load_pretrained(self.folder)
    (self.folder / "config.json").write_text('{"model_type": "mamba"}')
    with self.assertRaisesRegex(ValueError, "model_type is 'mamba'.*llama"):
      load_pretrained(self.folder)
    (self.folder / "config.json").write_text('{"model_type": "llama"}')
    with self.assertRaisesRegex(FileNotFoundError, "safetensors"):
      load_pretrained(self.folder)


HF_TO_GGUF = (
  (r"model\.embed_tokens\.", "token_embd."),
  (r"model\.norm\.", "output_norm."),
  (r"lm_head\.", "output."),
  (r"model\.layers\.(\d+)\.", r"blk.\1."),
  (r"input_layernorm", "attn_norm"),
  (r"post_attention_layernorm", "ffn_norm"),
  (r"self_attn\.([qkv])_(proj|norm)", r"attn_\1_\2"),
  (r"self_attn\.o_proj", "attn_output"),
  (r"(attn_[qkv])_proj", r"\1"),
  (r"mlp\.(\w+)_proj", r"ffn_\1"),
)


def write_gguf(file, name, scaling=None, factors=None, dtype=None):
  """A golden checkpoint as llama.cpp's converter would write it."""
  config = json.loads((files.FOLDER / name / "config.json").read_text())
  kind = config["model_type"]
  heads = {
    "attn_q": config["num_attention_heads"],
    "attn_k": config["num_key_value_heads"],
  }
  width = config.get("head_dim") or config["hidden_size"] // heads["attn_q"]
  writer = gguf.GGUFWriter(file, kind)
  writer.add_block_count(config["num_hidden_layers"])
  writer.add_context_length(config["max_position_embeddings"])
  writer.add_embedding_length(config["hidden_size"])
  writer.add_feed_forward_length(config["intermediate_size"])
  writer.add_head_count(heads["attn_q"])
  writer.add_head_count_kv(heads["attn_k"])
  writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
  writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
  writer.add_key_length(width)
  writer.add_value_length(width)
  if kind == "llama":
    writer.add_rope_dimension_count(width)
  if scaling is not None:
    writer.add_rope_scaling_type(gguf.RopeScalingType(scaling["rope_type"]))
    writer.add_rope_scaling_factor(scaling["factor"])
    if "original_max_position_embeddings" in scaling:
      writer.add_rope_scaling_orig_ctx_len(
        scaling["original_max_position_embeddings"]
      )
  if factors is not None:
    writer.add_tensor("rope_freqs.weight", factors)
  for tensor, array in files.tensors(files.FOLDER / name).items():
    for pattern, new in HF_TO_GGUF:
      tensor = re.sub(pattern, new, tensor)
    number = heads.get(".".join(tensor.split(".")[2:3]))
    if kind == "llama" and number:
      rows = array.reshape(number, 2, -1, *array.shape[1:])
      array = rows.swapaxes(1, 2).reshape(array.shape)
    array = array.astype(dtype or array.dtype)
    writer.add_tensor(tensor, np.ascontiguousarray(array))
  writer.write_header_to_file()
  writer.write_kv_data_to_file()
  writer.write_tensors_to_file()
  writer.close()
  return file


class GgufTest(parameterized.TestCase):
  def _rope(self, name):
    config = json.loads((files.FOLDER / name / "config.json").read_text())
    return config["rope_parameters"]

  @parameterized.parameters("qwen2", "qwen3")
  def test_equals_the_folder(self, name):
    file = write_gguf(
      make_folder(self) / "some.gguf", name, scaling=self._rope(name)
    )
    model, got = load_pretrained(file)
    plain, want = load_pretrained(files.FOLDER / name, name="some")
    self.assertEqual(model.config, plain.config)
    assert_same(got, want)

  def test_llama_has_its_rows_back_in_order(self):
    rope = RopeConfig(
      dim=16, theta=1e4, scaling="llama3", factor=8.0, original_length=8192
    )
    plain = dataclasses.replace(rope, scaling="none")
    factors = rotary_frequencies(plain) / rotary_frequencies(rope)
    file = write_gguf(make_folder(self) / "some.gguf", "llama", factors=factors)
    model, got = load_pretrained(file)
    other, want = load_pretrained(files.FOLDER / "llama", name="some")
    assert_same(got, want)
    attention = dataclasses.replace(other.config.attention, rope=rope)
    self.assertEqual(
      model.config, dataclasses.replace(other.config, attention=attention)
    )

  def test_unknown_factors(self):
    file = write_gguf(
      make_folder(self) / "some.gguf",
      "llama",
      factors=np.linspace(1, 8, 8, dtype=np.float32),
    )
    with self.assertRaisesRegex(ValueError, "rope_freqs.weight is not that of"):
      load_pretrained(file)

  @parameterized.parameters(
    (lambda w: w.add_expert_count(8), "llama.expert_count is 8"),
    (
      lambda w: w.add_sliding_window(64),
      "llama.attention.sliding_window is 64",
    ),
    (lambda w: w.add_logit_scale(0.5), "llama.logit_scale is 0.5"),
    (lambda w: w.add_rope_dimension_count(8), "rope.dimension_count is 8"),
    (
      lambda w: w.add_rope_scaling_type(gguf.RopeScalingType.LONGROPE),
      "scaling.type is 'longrope'",
    ),
  )
  def test_what_is_not_implemented(self, add, message):
    file = make_folder(self) / "some.gguf"
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_head_count(2)
    writer.add_embedding_length(32)
    add(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with self.assertRaisesRegex(ValueError, message):
      load_pretrained(file)

  def test_architecture(self):
    file = make_folder(self) / "some.gguf"
    writer = gguf.GGUFWriter(file, "gpt2")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with self.assertRaisesRegex(ValueError, "general.architecture is 'gpt2'"):
      load_pretrained(file)


if __name__ == "__main__":
  absltest.main()
