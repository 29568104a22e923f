"""Experts' adapters in PEFT's files, in both layouts, by hand-made tensors."""

import functools
import json
import pathlib
import tempfile

from absl.testing import absltest, parameterized
from flax import traverse_util
import jax
import jax.numpy as jnp
import numpy as np

from longstraw_jax import PRESETS, Model, Params
from longstraw_jax.lora import LoraConfig, add_lora, merge_lora
from longstraw_jax.weights.peft_files import (
  CONFIG_NAME,
  WEIGHTS_NAME,
  load_adapter,
  save_adapter,
)
from longstraw_jax.weights.safetensors_files import (
  SafetensorsSource,
  write_safetensors,
)
from longstraw_jax.weights.source import TensorInfo

# Layers 0 and 2 are delta, 1 and 3 attention; all have 6 experts, 24 -> 12.
MODEL = Model(PRESETS["tiny-moe"])
E, D, F, R = 6, 24, 12, 2
PREFIX = "base_model.model.model.layers"
CONFIG = {"peft_type": "LORA", "r": R, "lora_alpha": 3}
BOTH = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]


def values(shapes, seed: int):
  """Any numbers, without a program that makes them."""
  random = np.random.default_rng(seed)
  make = lambda x: jnp.asarray(random.normal(size=x.shape), x.dtype)
  return jax.tree.map(make, shapes)


@functools.cache
def base() -> Params:
  return values(jax.eval_shape(MODEL.init, jax.random.key(1)), 1)


def adapted(targets=("experts",)) -> Params:
  """Adapters of scale 1.5 whose B is away from zero."""
  config = LoraConfig(rank=R, alpha=3.0, targets=targets)
  plain = base()
  make = lambda key: add_lora(MODEL, plain, key, config)
  shapes = jax.eval_shape(make, jax.random.key(2))
  flat = traverse_util.flatten_dict(plain.merged())
  scale = lambda x: jnp.full(x.shape, 1.5, x.dtype)
  frozen = traverse_util.flatten_dict(shapes.frozen)
  frozen = {k: flat[k] if k in flat else scale(x) for k, x in frozen.items()}
  return Params(
    trainable=values(shapes.trainable, 2),
    frozen=traverse_util.unflatten_dict(frozen),
  )


def merged(params: Params, layer: int, name: str) -> np.ndarray:
  """W + scale A B of one layer."""
  tree = merge_lora(params).merged()["stage_0"][f"layer_{layer % 2}"]["ffn"]
  return np.asarray(tree[name][layer // 2])


def assert_same(a, b) -> None:
  """Structure, dtypes and bits."""
  assert jax.tree.structure(a) == jax.tree.structure(b)
  for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
    assert x.dtype == y.dtype
    np.testing.assert_array_equal(x, y)


class Files(parameterized.TestCase):
  def setUp(self):
    super().setUp()
    made = tempfile.TemporaryDirectory()
    self.addCleanup(made.cleanup)
    self.folder = pathlib.Path(made.name)

  def write(self, tensors: dict[str, np.ndarray], **changes) -> None:
    """A folder as another tool leaves it."""
    listed = [(TensorInfo(k, x.shape, x.dtype), x) for k, x in tensors.items()]
    (file,) = write_safetensors(self.folder, listed, max_shard_bytes=2**62)
    pathlib.Path(file).rename(self.folder / WEIGHTS_NAME)
    text = json.dumps(CONFIG | changes)
    (self.folder / CONFIG_NAME).write_text(text)

  def load(self) -> Params:
    return load_adapter(self.folder, MODEL, base())

  def settings(self) -> dict:
    return json.loads((self.folder / CONFIG_NAME).read_text())

  def tensors(self) -> dict[str, np.ndarray]:
    source = SafetensorsSource(self.folder / WEIGHTS_NAME)
    return {key: np.asarray(source.read(key)) for key in source.tensors}


def fused(inputs: int, outputs: int, seed: int, rank: int = R):
  """lora_A and lora_B of one parameter, as PEFT flattens them."""
  random = np.random.default_rng(seed)
  normal = lambda *shape: random.normal(size=shape).astype("float32")
  return normal(E * rank, inputs), normal(outputs, rank * E)


def fused_tensors(rank_up: int = R) -> dict[str, np.ndarray]:
  """Of every layer, gate_up_proj inside and down_proj around it."""
  tensors = {}
  for n in range(4):
    at = f"{PREFIX}.{n}.mlp.experts"
    for module, pair in (
      (f"{at}.base_layer", fused(D, 2 * F, n, rank_up)),
      (at, fused(F, D, 10 + n)),
    ):
      for letter, x in zip("AB", pair, strict=True):
        tensors[f"{module}.lora_{letter}.weight"] = x
  return tensors


def delta(lora_a, lora_b) -> np.ndarray:
  """PEFT's formula for what is added to [E, out, in], transposed to ours."""
  a = lora_a.reshape(E, -1, lora_a.shape[1])
  b = lora_b.reshape(lora_b.shape[0], -1, E)
  return np.einsum("ore,eri->eio", b, a)


def each_tensors(same_a: bool) -> dict[str, np.ndarray]:
  """Of every layer, expert and projection."""
  random, tensors = np.random.default_rng(5), {}
  normal = lambda *shape: random.normal(size=shape).astype("float32")
  for n in range(4):
    for e in range(E):
      at = f"{PREFIX}.{n}.mlp.experts.{e}"
      gate_a = normal(R, D)
      up_a = gate_a if same_a else normal(R, D)
      for name, a, b in (
        ("gate_proj", gate_a, normal(F, R)),
        ("up_proj", up_a, normal(F, R)),
        ("down_proj", normal(R, F), normal(D, R)),
      ):
        tensors[f"{at}.{name}.lora_A.weight"] = a
        tensors[f"{at}.{name}.lora_B.weight"] = b
  return tensors


class FusedTest(Files):
  def test_peft_s_files_are_read(self):
    tensors = fused_tensors()
    self.write(tensors, target_parameters=BOTH, peft_version="0.21.2")
    params = self.load()
    for n in range(4):
      at = f"{PREFIX}.{n}.mlp.experts"
      for module, name in (
        (f"{at}.base_layer", "experts_gate_up"),
        (at, "experts_down"),
      ):
        a, b = (tensors[f"{module}.lora_{x}.weight"] for x in "AB")
        wanted = merged(base(), n, name) + 1.5 * delta(a, b)
        np.testing.assert_allclose(
          merged(params, n, name), wanted, rtol=1e-5, atol=1e-5
        )
    # And come out as they went in.
    for name in (WEIGHTS_NAME, CONFIG_NAME):
      (self.folder / name).unlink()
    save_adapter(self.folder, MODEL, params)
    again = self.tensors()
    self.assertEqual(again.keys(), tensors.keys())
    for key, x in tensors.items():
      np.testing.assert_array_equal(again[key], x)

  def test_gate_and_up_of_twice_the_rank(self):
    """What PEFT makes of separate gate and up: one scale, two ranks."""
    patterns = {
      "rank_pattern": {r".*\.gate_up_proj": 2 * R},
      "alpha_pattern": {r".*\.gate_up_proj": 6},
    }
    self.write(fused_tensors(2 * R), target_parameters=BOTH, **patterns)
    params = self.load()
    ffn = params.trainable["stage_0"]["layer_1"]["ffn"]
    shapes = [
      ffn[f"experts_{x}_lora"]["lora_a"].shape for x in ("gate_up", "down")
    ]
    self.assertEqual(shapes, [(2, E, D, 2 * R), (2, E, F, R)])
    for scale in jax.tree.leaves(params.frozen["stage_0"]["layer_1"]["ffn"]):
      if scale.shape == (2, E):
        np.testing.assert_array_equal(scale, np.float32(1.5))
    out = self.folder / "again"
    save_adapter(out, MODEL, params)
    assert_same(load_adapter(out, MODEL, base()), params)
    settings = json.loads((out / CONFIG_NAME).read_text())
    self.assertEqual((settings["r"], settings["lora_alpha"]), (2 * R, 6))
    self.assertEqual(set(settings["rank_pattern"].values()), {R})
    self.assertEqual(set(settings["alpha_pattern"].values()), {3})
    self.assertLen(settings["rank_pattern"], 4)

  @parameterized.parameters(
    (("experts_down",), ["mlp.experts.down_proj"], F, D),
    (("experts_gate_up",), ["mlp.experts.gate_up_proj"], D, 2 * F),
  )
  def test_one_parameter_alone(self, targets, parameters, inputs, outputs):
    params = adapted(targets)
    save_adapter(self.folder, MODEL, params)
    self.assertEqual(self.settings()["target_parameters"], parameters)
    self.assertEqual(self.settings()["target_modules"], [])
    key = f"{PREFIX}.3.mlp.experts.lora_A.weight"
    self.assertEqual(self.tensors()[key].shape, (E * R, inputs))
    key = f"{PREFIX}.3.mlp.experts.lora_B.weight"
    self.assertEqual(self.tensors()[key].shape, (outputs, E * R))
    assert_same(self.load(), params)

  def test_everything_with_the_router(self):
    params = adapted(("all-linear", "router"))
    save_adapter(self.folder, MODEL, params, trunk="model.language_model.")
    assert_same(self.load(), params)
    settings = self.settings()
    self.assertEqual(
      settings["target_parameters"],
      sorted([*BOTH, "mlp.gate.weight"]),
    )
    self.assertIn("shared_expert.gate_proj", settings["target_modules"])
    self.assertIn(
      "q_proj", [x.split(".")[-1] for x in settings["target_modules"]]
    )

  def test_experts_of_some_layers(self):
    params = adapted((".*layer_1/ffn/experts_down",))
    save_adapter(self.folder, MODEL, params)
    self.assertEqual(
      self.settings()["target_parameters"],
      [f"model.layers.{n}.mlp.experts.down_proj" for n in (1, 3)],
    )
    assert_same(self.load(), params)


class EachTest(Files):
  @parameterized.parameters(True, False)
  def test_files_of_modules_are_read(self, same_a):
    """With one A for gate and up, and with one for each of them."""
    tensors = each_tensors(same_a)
    self.write(tensors)
    params = self.load()
    for n in range(4):
      for e in range(E):
        at = f"{PREFIX}.{n}.mlp.experts.{e}"

        def product(name, at=at):
          a, b = (tensors[f"{at}.{name}.lora_{x}.weight"] for x in "AB")
          return 1.5 * (b @ a).T

        sides = [product("gate_proj"), product("up_proj")]
        for name, added in (
          ("experts_gate_up", np.concatenate(sides, axis=1)),
          ("experts_down", product("down_proj")),
        ):
          wanted = merged(base(), n, name)[e] + added
          np.testing.assert_allclose(
            merged(params, n, name)[e], wanted, rtol=1e-5, atol=1e-5
          )
    ffn = params.trainable["stage_0"]["layer_0"]["ffn"]
    rank = R if same_a else 2 * R
    shape = ffn["experts_gate_up_lora"]["lora_a"].shape
    self.assertEqual(shape, (2, E, D, rank))
    # And come out as they went in, of the rank that they had.
    out = self.folder / "again"
    save_adapter(out, MODEL, params, experts="each")
    source = SafetensorsSource(out / WEIGHTS_NAME)
    self.assertEqual(source.tensors.keys(), tensors.keys())
    for key, x in tensors.items():
      np.testing.assert_array_equal(source.read(key), x)
    settings = json.loads((out / CONFIG_NAME).read_text())
    self.assertEqual((settings["r"], settings["lora_alpha"]), (R, 3))
    self.assertNotIn("rank_pattern", settings)

  def test_layouts_mean_the_same(self):
    params = adapted()
    save_adapter(self.folder, MODEL, params, experts="each")
    assert_same(self.load(), params)
    self.assertNotIn("target_parameters", self.settings())
    self.assertIn("mlp.experts.0.gate_proj", self.settings()["target_modules"])
    key = f"{PREFIX}.0.mlp.experts.5.up_proj.lora_B.weight"
    self.assertEqual(self.tensors()[key].shape, (F, R))

  def test_without_peft_s_prefix(self):
    tensors = each_tensors(True)
    short = lambda key: key.removeprefix("base_model.model.")
    self.write({short(key): x for key, x in tensors.items()})
    first = self.load()
    self.write(tensors)
    assert_same(self.load(), first)

  def test_new_adapters_keep_their_rank(self):
    """B is zero throughout: nothing says that gate and up were apart."""
    params = adapted()
    zero = lambda path, x: 0 * x if "lora_b" in str(path) else x
    params = params.replace(
      trainable=jax.tree_util.tree_map_with_path(zero, params.trainable)
    )
    save_adapter(self.folder, MODEL, params, experts="each")
    assert_same(self.load(), params)


class RefusedTest(Files):
  def test_another_orientation(self):
    """PEFT before 0.19 took [E, out, in] for [E, in, out]."""
    swap = lambda pair: (
      pair[1].reshape(-1, R, E).transpose(2, 1, 0).reshape(E * R, -1),
      pair[0].reshape(E, R, -1).transpose(2, 1, 0).reshape(-1, R * E),
    )
    tensors = {}
    for n in range(4):
      at = f"{PREFIX}.{n}.mlp.experts"
      for letter, x in zip("AB", swap(fused(F, D, n)), strict=True):
        tensors[f"{at}.lora_{letter}.weight"] = x
    self.write(tensors, target_parameters=["mlp.experts.down_proj"])
    with self.assertRaisesRegex(ValueError, "experts_down.*orientation.*0.19"):
      self.load()

  @parameterized.parameters("0.17.1", "0.18.0", "0.18.2.dev0@abc")
  def test_equal_sizes_go_by_the_version(self, version):
    """gate_up of this model is 24 -> 24."""
    tensors = fused_tensors()
    up = {k: x for k, x in tensors.items() if "base_layer" in k}
    up = {k.replace(".base_layer", ""): x for k, x in up.items()}
    options = {"target_parameters": BOTH[:1]}
    self.write(up, peft_version=version, **options)
    with self.assertRaisesRegex(ValueError, "experts_gate_up.*orientation"):
      self.load()
    for version in ("0.19.0", "1.0.1", None):
      self.write(up, peft_version=version, **options)
      self.load()

  @parameterized.parameters(
    ({"target_parameters": None}, "target_parameters is None"),
    ({"target_parameters": BOTH}, "must name the one parameter"),
    (
      {"target_parameters": BOTH[1:], "r": 3, "lora_alpha": 3},
      "r is 3 .*experts_down has rank 2",
    ),
    (
      {"target_parameters": BOTH[1:], "rank_pattern": {"down_proj": 4}},
      "rank_pattern is",
    ),
  )
  def test_a_configuration_that_does_not_fit(self, changes, message):
    tensors = fused_tensors()
    down = {k: x for k, x in tensors.items() if "base_layer" not in k}
    self.write(down, **changes)
    with self.assertRaisesRegex(ValueError, message):
      self.load()

  def test_what_is_missing_is_named(self):
    tensors = each_tensors(True)
    del tensors[f"{PREFIX}.3.mlp.experts.4.up_proj.lora_B.weight"]
    self.write(tensors)
    with self.assertRaisesRegex(
      ValueError, "no lora_B of expert 4, up_proj, in repeat 1 of 2"
    ):
      self.load()
    tensors = fused_tensors()
    key = f"{PREFIX}.2.mlp.experts.lora_A.weight"
    tensors[key] = tensors[key][:-R]
    self.write(tensors, target_parameters=BOTH, peft_version="0.21.2")
    with self.assertRaisesRegex(ValueError, "has rank|has shape"):
      self.load()

  def test_other_experts_and_layouts(self):
    tensors = each_tensors(True)
    key = f"{PREFIX}.0.mlp.experts.6.up_proj.lora_A.weight"
    self.write(tensors | {key: np.zeros((R, D), "float32")})
    with self.assertRaisesRegex(ValueError, "experts.6.*no linear map"):
      self.load()
    self.write(
      tensors | fused_tensors(), target_parameters=BOTH, peft_version="0.21.2"
    )
    with self.assertRaisesRegex(ValueError, "keep one of the two layouts"):
      self.load()
    with self.assertRaisesRegex(ValueError, "experts is 'all'"):
      save_adapter(self.folder / "new", MODEL, adapted(), experts="all")


if __name__ == "__main__":
  absltest.main()
