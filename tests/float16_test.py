"""float16 is refused with a remedy wherever a dtype comes in."""

import dataclasses
import json
import pathlib
import tempfile

from absl.testing import absltest, parameterized
import jax
import jax.numpy as jnp
import numpy as np

from experiments import policies
from longstraw_jax import (
  PRESETS,
  Group,
  Model,
  PolicyObjective,
  capture,
  group_gradient,
  load_pretrained,
  replay,
)
from longstraw_jax.config import ModelConfig, check_dtype
from longstraw_jax.gpu_targets import GPU_TARGETS
from longstraw_jax.group import branch_gradient
from longstraw_jax.lora import LoraConfig, add_lora
from longstraw_jax.plan import PlanConfig
from longstraw_jax.train_config import OptimizerConfig
from longstraw_jax.weights.export import save_pretrained
from longstraw_jax.weights.families.hf_config import config_from_hf
from longstraw_jax.weights.gguf_files import GgufSource
from longstraw_jax.weights.peft_files import (
  WEIGHTS_NAME,
  load_adapter,
  save_adapter,
)
from longstraw_jax.weights.safetensors_files import write_safetensors
from tests.golden import files
from tests.load_test import write_checkpoint, write_gguf
from tests.policies_test import VALUES

REMEDY = "float16.*use|float16.*pass"
MODEL = Model(PRESETS["tiny-hybrid"])
PARAMS = jax.jit(MODEL.init)(jax.random.key(0))
PROMPT = jnp.arange(9) % 61
GROUP = Group.create(
  [[1, 2], [3, 4]], [2, 2], rewards=[0.0, 1.0], advantages=[-1.0, 1.0]
)


def gradient(params=PARAMS, **options):
  sizes = {"chunk_size": 4, "grad_scope": "full"} | options
  return group_gradient(
    MODEL, params, PROMPT, GROUP, PolicyObjective(), **sizes
  )


def half(tree):
  return jax.tree.map(lambda x: x.astype("float16"), tree)


def replayed_gradient():
  def loss(params):
    state = capture(MODEL, params, PROMPT, chunk_size=4, grad_scope="full")
    return replay(MODEL, params, state, GROUP.responses, GROUP.lengths).sum()

  return jax.grad(loss)(half(PARAMS))


def branch(dtype):
  state = capture(MODEL, PARAMS, PROMPT, chunk_size=4)
  return branch_gradient(
    MODEL,
    PARAMS,
    GROUP,
    PolicyObjective(),
    state,
    block_size=2,
    page_grad_dtype=dtype,
  )


def config(**changes) -> ModelConfig:
  return dataclasses.replace(MODEL.config, **changes)


def narrow_config(key):
  values = json.loads((files.FOLDER / "qwen2" / "config.json").read_text())
  values.pop("torch_dtype", None)
  values.pop("dtype", None)
  return config_from_hf(values | {key: "float16"})


def planned(dtype):
  return PlanConfig(
    target=next(iter(GPU_TARGETS.values())),
    prompt=64,
    response=8,
    page_grad_dtype=dtype,
  )


def load(dtype=None, **options):
  return load_pretrained(files.FOLDER / "qwen2", dtype=dtype, **options)


# What is called with float16, in whatever form its callers write a dtype.
DOORS = {
  "dtype": lambda: config(dtype="float16"),
  "param_dtype": lambda: config(param_dtype="float16"),
  "page_dtype": lambda: config(page_dtype="float16"),
  "a type": lambda: config(dtype=jnp.float16),
  "half": lambda: config(dtype="half"),
  "page_grad_dtype": lambda: gradient(page_grad_dtype="float16"),
  "page_grad_dtype of a branch": lambda: branch(jnp.float16),
  "page_grad_dtype of a plan": lambda: planned("float16"),
  "parameters": lambda: gradient(half(PARAMS)),
  "parameters under jax.grad": replayed_gradient,
  "dtype of config.json": lambda: narrow_config("dtype"),
  "torch_dtype of config.json": lambda: narrow_config("torch_dtype"),
  "dtype to load": lambda: load("float16"),
  "param_dtype to load": lambda: load(param_dtype=np.float16),
  "some param_dtype to load": lambda: load(param_dtype={"embed": "float16"}),
  "an override to load": lambda: load(page_dtype="float16"),
  "adapters": lambda: add_lora(
    MODEL, PARAMS, jax.random.key(1), LoraConfig(rank=2), "float16"
  ),
  "adapters of a file": lambda: load_adapter(
    "absent", MODEL, PARAMS, dtype="float16"
  ),
  "master copies": lambda: OptimizerConfig(master_dtype="float16"),
  "export": lambda: save_pretrained(
    "absent", MODEL, PARAMS, param_dtype="float16"
  ),
}


class Float16Test(parameterized.TestCase):
  def folder(self):
    folder = tempfile.TemporaryDirectory()
    self.addCleanup(folder.cleanup)
    return pathlib.Path(folder.name)

  @parameterized.parameters(*DOORS)
  def test_refused(self, door):
    with self.assertRaisesRegex(ValueError, REMEDY):
      DOORS[door]()
    self.assertFalse(pathlib.Path("absent").exists())

  @parameterized.parameters(
    ("int8", "'int8'"), ("float8_e5m2", "float8"), ("tall", "'tall'")
  )
  def test_no_other_dtype_is_computed_in(self, dtype, message):
    with self.assertRaisesRegex(ValueError, f"x is .*{message}.*: use"):
      check_dtype("x", dtype)

  @parameterized.product(name=("qwen2", "qwen_dense"), told=(True, False))
  def test_stored_weights(self, name, told):
    """Of whatever config.json says: loaded where the caller says as what."""
    settings = {"dtype": "float16"} if told else {}
    folder = write_checkpoint(self.folder(), name, half, **settings)
    with self.assertRaisesRegex(ValueError, "is stored in float16.*--param_dt"):
      load_pretrained(folder)
    with self.assertRaisesRegex(ValueError, "param_dtype"):
      load_pretrained(folder, param_dtype={"norm": "float32"})
    model, params = load_pretrained(folder, param_dtype="float32")
    self.assertEqual(model.config.param_dtype, "float32")
    if told:
      self.assertEqual(model.config.dtype, "float32")
    _, wanted = load_pretrained(files.FOLDER / name)
    close = lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-6)
    jax.tree.map(close, params.merged(), wanted.merged())
    model, params = load_pretrained(
      folder, dtype="float32", param_dtype="bfloat16"
    )
    dtypes = {x.dtype.name for x in jax.tree.leaves(params.merged())}
    self.assertEqual(model.config.dtype, "float32")
    self.assertIn("bfloat16", dtypes)
    self.assertNotIn("float16", dtypes)

  def test_one_tensor_is_named(self):
    def one(arrays):
      return arrays | {"model.norm.weight": half(arrays["model.norm.weight"])}

    folder = write_checkpoint(self.folder(), "qwen2", one)
    with self.assertRaisesRegex(ValueError, "'final_norm.*' is stored in"):
      load_pretrained(folder)

  def test_gguf_is_read_as_float32(self):
    """Its float16 is a form of storage, as are its quantized ones."""
    file = write_gguf(self.folder() / "some.gguf", "qwen2", dtype="float16")
    self.assertIn("F16", GgufSource(file).types.values())
    model, params = load_pretrained(file)
    self.assertEqual(model.config.dtype, "float32")
    for leaf in jax.tree.leaves(params.merged()):
      self.assertEqual(leaf.dtype, jnp.float32)

  def test_an_adapter_is_trained_in_float32(self):
    folder = self.folder()
    key, sizes = jax.random.key(1), LoraConfig(rank=2)
    adapted = add_lora(MODEL, PARAMS, key, sizes)
    save_adapter(folder, MODEL, adapted, base="some")
    narrow = half(files.tensors(folder / WEIGHTS_NAME))
    (folder / WEIGHTS_NAME).unlink()
    (file,) = write_safetensors(folder, files.items(narrow))
    pathlib.Path(file).rename(folder / WEIGHTS_NAME)
    loaded = load_adapter(folder, MODEL, PARAMS)
    for leaf in jax.tree.leaves(loaded.trainable):
      self.assertEqual(leaf.dtype, jnp.float32)

  def test_flags(self):
    folder = write_checkpoint(self.folder(), "qwen2", half)
    build = lambda **flags: policies.build_policy(
      VALUES | {"preset": str(folder), "tokenizer": "byte"} | flags
    )
    with self.assertRaisesRegex(ValueError, "--param_dtype"):
      build()
    policy = build(param_dtype="bfloat16")
    self.assertEqual(policy.model.config.param_dtype, "bfloat16")
    with self.assertRaisesRegex(ValueError, "param_dtype='float32' is for"):
      build(preset="tiny-hybrid", param_dtype="float32")


if __name__ == "__main__":
  absltest.main()
