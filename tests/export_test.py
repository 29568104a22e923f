"""Saving: what was loaded comes out bit for bit, in either layout."""

import dataclasses
import json
import pathlib
import tempfile

from absl.testing import absltest, parameterized
from flax import traverse_util
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from longstraw_jax import PRESETS, Model, Params
from longstraw_jax.weights.export import save_pretrained
from longstraw_jax.weights.load import load_pretrained
from longstraw_jax.weights.safetensors_files import (
  SafetensorsSource,
  write_safetensors,
)
from longstraw_jax.weights.slots import parameter_shapes
from tests.golden import files


def make_folder(test):
  folder = tempfile.TemporaryDirectory()
  test.addCleanup(folder.cleanup)
  return pathlib.Path(folder.name)


def assert_same(a, b):
  assert jax.tree.structure(a) == jax.tree.structure(b)
  for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
    assert x.dtype == y.dtype, (x.dtype, y.dtype)
    np.testing.assert_array_equal(x, y)


def assert_same_tensors(folder, source):
  """Names, shapes, dtypes and bytes."""
  ours, theirs = SafetensorsSource(folder), SafetensorsSource(source)
  assert set(ours.tensors) == set(theirs.tensors)
  for name, info in theirs.tensors.items():
    assert ours.tensors[name] == info, (ours.tensors[name], info)
    assert ours.read(name).tobytes() == theirs.read(name).tobytes(), name


class RoundTripTest(parameterized.TestCase):
  @parameterized.parameters(*files.NAMES)
  def test_files_equal_the_source(self, name):
    folder = make_folder(self)
    source = files.FOLDER / name
    model, params = load_pretrained(source)
    (path,) = save_pretrained(folder, model, params, source_config=source)
    self.assertEqual(path.name, "model.safetensors")
    self.assertEqual(
      {path.name for path in folder.iterdir()},
      {"model.safetensors", "config.json"},
    )
    assert_same_tensors(folder, source)
    again, got = load_pretrained(folder, name=name)
    self.assertEqual(again, model)
    assert_same(got, params)

  @parameterized.product(name=files.WITH_EXPERTS, wrapped=[False, True])
  def test_stacked_layout(self, name, wrapped):
    if wrapped and name != "qwen_moe":
      return  # only Qwen3.5/3.6 is ever wrapped
    folder = make_folder(self)
    model, params = load_pretrained(files.FOLDER / name)
    save_pretrained(folder, model, params, layout="stacked", wrapped=wrapped)
    source = SafetensorsSource(folder)
    trunk = "model.language_model." if wrapped else "model."
    stored = source.read(f"{trunk}layers.3.mlp.experts.gate_up_proj")
    tensors = files.tensors(files.FOLDER / name)
    for part, rows in (("gate", slice(0, 8)), ("up", slice(8, 16))):
      one = tensors[f"model.layers.3.mlp.experts.5.{part}_proj.weight"]
      np.testing.assert_array_equal(stored[5, rows], one)
    self.assertFalse([x for x in source.tensors if ".experts.0." in x])
    _, got = load_pretrained(folder)
    assert_same(got, params)

  def test_mixed_dtypes_and_many_shards(self):
    start, folder = make_folder(self), make_folder(self)
    wide = ("A_log", "linear_attn.norm.weight")
    arrays = {
      name: x if name.endswith(wide) else x.astype(ml_dtypes.bfloat16)
      for name, x in files.tensors(files.FOLDER / "qwen_dense").items()
    }
    write_safetensors(start, files.items(arrays))
    config = (files.FOLDER / "qwen_dense" / "config.json").read_text()
    config = json.loads(config) | {"dtype": "bfloat16"}
    (start / "config.json").write_text(json.dumps(config))
    model, params = load_pretrained(start)
    paths = save_pretrained(
      folder, model, params, source_config=config, max_shard_bytes=50_000
    )
    self.assertGreater(len(paths), 3)
    assert_same_tensors(folder, start)
    self.assertEqual(json.loads((folder / "config.json").read_text()), config)

  def test_frozen_parameters_are_saved_too(self):
    folder = make_folder(self)
    source = files.FOLDER / "qwen2"
    model, params = load_pretrained(
      source, trainable=lambda path: "ffn" in path
    )
    save_pretrained(folder, model, params)
    assert_same_tensors(folder, source)

  def test_a_model_of_our_own(self):
    folder = make_folder(self)
    model = Model(PRESETS["tiny-hybrid"])
    rng = np.random.default_rng(0)
    leaves = {
      path: jnp.asarray(rng.normal(size=shape.shape), shape.dtype)
      for path, shape in parameter_shapes(model).items()
    }
    params = model.split(traverse_util.unflatten_dict(leaves, sep="/"))
    save_pretrained(folder, model, params)
    again, got = load_pretrained(folder, name=model.config.name)
    self.assertEqual(again.config.stages, model.config.stages)
    assert_same(got, params)

  def test_narrower(self):
    folder = make_folder(self)
    model, params = load_pretrained(files.FOLDER / "glm_dsa")
    save_pretrained(folder, model, params, param_dtype="bfloat16")
    config = json.loads((folder / "config.json").read_text())
    self.assertEqual(config["dtype"], "bfloat16")
    tensors = SafetensorsSource(folder).tensors
    moe = "model.layers.3.mlp."
    self.assertEqual(tensors[f"{moe}gate.weight"].dtype, np.float32)
    bias = tensors[f"{moe}gate.e_score_correction_bias"]
    self.assertEqual(bias.dtype, np.float32)
    down = tensors[f"{moe}experts.0.down_proj.weight"]
    self.assertEqual(down.dtype, jnp.bfloat16)

  @parameterized.product(
    name=["qwen_dense", "qwen_moe"], dtype=[jnp.float32, jnp.float64]
  )
  def test_precise_parameters_are_not_rounded(self, name, dtype):
    """Into a narrow file and out of it, and again: the same bits."""
    source, first, second = files.FOLDER / name, *map(make_folder, [self] * 2)
    model, params = load_pretrained(source)
    params = jax.tree.map(lambda x: x.astype(dtype), params)
    save_pretrained(first, model, params, param_dtype="bfloat16")
    theirs, ours = SafetensorsSource(source), SafetensorsSource(first)
    found = set()
    for tensor, info in ours.tensors.items():
      wanted = theirs.read(tensor)
      end = tensor.partition("linear_attn.")[2]
      if end in ("A_log", "dt_bias", "norm.weight"):
        found.add(end)
      else:
        wanted = wanted.astype(ml_dtypes.bfloat16)
      self.assertEqual(info.dtype, wanted.dtype, tensor)
      self.assertEqual(ours.read(tensor).tobytes(), wanted.tobytes(), tensor)
    self.assertLen(found, 3)
    model, params = load_pretrained(first, param_dtype="bfloat16")
    save_pretrained(second, model, params, param_dtype="bfloat16")
    assert_same_tensors(second, first)

  def test_precise_parameters_that_are_named(self):
    folder = make_folder(self)
    model, params = load_pretrained(files.FOLDER / "qwen_dense")
    named = {"": "bfloat16", "A_log": "bfloat16", "norm/weight": "float64"}
    save_pretrained(folder, model, params, param_dtype=named)
    dtypes = {
      name.partition("layers.0.linear_attn.")[2]: info.dtype
      for name, info in SafetensorsSource(folder).tensors.items()
    }
    self.assertEqual(dtypes["A_log"], jnp.bfloat16)
    self.assertEqual(dtypes["dt_bias"], jnp.float32)
    self.assertEqual(dtypes["norm.weight"], jnp.float64)
    config = json.loads((folder / "config.json").read_text())
    self.assertEqual(config["dtype"], "bfloat16")

  def test_a_file_in_bfloat16_throughout(self):
    """Nothing is widened that was published narrow."""
    start, folder = make_folder(self), make_folder(self)
    arrays = {
      name: x.astype(ml_dtypes.bfloat16)
      for name, x in files.tensors(files.FOLDER / "qwen_dense").items()
    }
    write_safetensors(start, files.items(arrays))
    config = (files.FOLDER / "qwen_dense" / "config.json").read_text()
    config = json.loads(config) | {"dtype": "bfloat16"}
    (start / "config.json").write_text(json.dumps(config))
    save_pretrained(folder, *load_pretrained(start))
    assert_same_tensors(folder, start)


class RefusedTest(parameterized.TestCase):
  def setUp(self):
    super().setUp()
    self.folder = make_folder(self)
    self.model, self.params = load_pretrained(files.FOLDER / "qwen2")

  @parameterized.parameters(
    "config.json", "model-00001-of-00002.safetensors", "pytorch_model.bin"
  )
  def test_a_folder_with_a_checkpoint(self, name):
    (self.folder / name).write_text("")
    with self.assertRaisesRegex(FileExistsError, name):
      save_pretrained(self.folder, self.model, self.params)
    self.assertLen(list(self.folder.iterdir()), 1)

  def test_parameters_that_no_checkpoint_has(self):
    tree = self.params.merged()
    mixer = tree["stage_0"]["layer_0"]["mixer"]
    mixer["q_proj"]["lora_a"] = jnp.zeros((3, 32, 2))
    mixer["k_proj"]["kernel"] = mixer["k_proj"]["kernel"][:, :-1]
    mixer["v_proj"]["kernel"] = "packed"
    del tree["final_norm"]
    with self.assertRaises(ValueError) as caught:
      save_pretrained(
        self.folder, self.model, Params(trainable=tree, frozen={})
      )
    message = str(caught.exception)
    for part in (
      "merge adapters",
      "final_norm is missing",
      "q_proj/lora_a has no place",
      "k_proj/kernel has the shape [3, 31, 16], not [3, 32, 16]",
      "v_proj/kernel is a str",
    ):
      self.assertIn(part, message)
    self.assertFalse(list(self.folder.iterdir()))

  def test_models_and_arguments(self):
    save = lambda **kwargs: save_pretrained(
      self.folder, self.model, self.params, **kwargs
    )
    with self.assertRaisesRegex(ValueError, "layout is 'flat'"):
      save(layout="flat")
    with self.assertRaisesRegex(ValueError, "no wrapped form"):
      save(wrapped=True)
    with self.assertRaisesRegex(ValueError, "the source's llama"):
      save(source_config=files.FOLDER / "llama")
    self.assertFalse(list(self.folder.iterdir()))

  def test_a_stopped_run_leaves_nothing_that_loads(self):
    leaf = self.params.trainable["embed"]
    broken = dataclasses.replace(
      self.params, trainable=self.params.trainable | {"embed": leaf}
    )
    leaf.delete()
    with self.assertRaises(RuntimeError):
      save_pretrained(self.folder, self.model, broken)
    with self.assertRaises(FileNotFoundError):
      load_pretrained(self.folder)


if __name__ == "__main__":
  absltest.main()
