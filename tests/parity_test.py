"""Live against the transformers library: make test-parity.

Random tiny models of every family, several seeds and shapes. Their logits by
the library and by this package agree; and what this package saves, the library
loads with no difference at all.
"""

import json
import pathlib
import tempfile

from absl.testing import absltest, parameterized
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from longstraw_jax import capture, replay
from longstraw_jax.state import tree_zeros
from longstraw_jax.types import Span
from longstraw_jax.weights.export import save_pretrained
from longstraw_jax.weights.load import load_pretrained

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from tests.golden import make_tiny_checkpoints as tiny  # noqa: E402

pytestmark = [pytest.mark.parity, pytest.mark.filterwarnings("default")]

TRANSFORMERS = "5.24.0"  # what the figures in BUILD_NOTES.md were made with
LOGITS_ATOL = 1e-4  # float32, logits of unit scale
SEEDS = (1, 1001, 2001)

YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}
OTHER_SHAPES = {
  "qwen_dense": {
    "num_hidden_layers": 5,
    "layer_types": ["full_attention"] + ["linear_attention"] * 4,
    "num_attention_heads": 4,
    "linear_num_key_heads": 3,
    "linear_num_value_heads": 3,
    "linear_value_head_dim": 12,
    "linear_conv_kernel_dim": 3,
    "attention_bias": True,
    "rope_parameters": YARN
    | {
      "original_max_position_embeddings": 32,
      "partial_rotary_factor": 0.25,
      "mrope_section": [1, 1, 0],
    },
  },
  "qwen_moe": {
    "num_hidden_layers": 3,
    "layer_types": None,
    "full_attention_interval": 3,
    "num_experts": 9,
    "num_experts_per_tok": 4,
    "tie_word_embeddings": True,
  },
  "glm_dsa": {
    "num_hidden_layers": 7,
    "first_k_dense_replace": 1,
    "index_topk": 5,
    "index_topk_freq": 3,
    "index_skip_topk_offset": 2,
    "n_group": 1,
    "topk_group": 1,
    "n_routed_experts": 5,
    "n_shared_experts": 2,
    "norm_topk_prob": False,
    "rope_parameters": YARN
    | {
      "original_max_position_embeddings": 32,
      "mscale": 0.8,
      "mscale_all_dim": 0.7,
    },
  },
  "llama": {"attention_bias": False, "tie_word_embeddings": True},
  "qwen2": {"num_key_value_heads": 4, "rope_parameters": YARN},
  "qwen3": {
    "attention_bias": True,
    "num_key_value_heads": 1,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
  },
}
WITH_EXPERTS = ("qwen_moe", "glm_dsa")
WRAPPED = ("qwen_dense", "qwen_moe")


def make_folder(test):
  folder = tempfile.TemporaryDirectory()
  test.addCleanup(folder.cleanup)
  return pathlib.Path(folder.name)


def shapes_of(name):
  return ({}, OTHER_SHAPES[name])


def store(model, folder):
  """The library's own checkpoint of a model."""
  model.save_pretrained(folder)
  return folder


def one_pass(model, params, ids):
  """Our logits [T, V]."""

  @jax.jit
  def logits(params, ids):
    positions = jnp.arange(ids.size, dtype=jnp.int32)
    span = Span(positions=positions, length=jnp.int32(ids.size))
    carry = tree_zeros(model.state_shapes(1)[1])
    out = model.hidden(params, ids, span, (), carry)
    return model.logits(params, out.x_TD)

  return np.asarray(logits(params, jnp.asarray(ids, jnp.int32)))


CASES = [
  (name, seed, other)
  for name in tiny.FAMILIES
  for other in (0, 1)
  for seed in SEEDS[: 2 - other]
]


class LogitsTest(parameterized.TestCase):
  def setUp(self):
    super().setUp()
    if transformers.__version__ != TRANSFORMERS:
      self.skipTest(f"needs transformers {TRANSFORMERS}")
    torch.set_num_threads(1)

  @parameterized.parameters(*CASES)
  def test_agree(self, name, seed, other):
    changes = shapes_of(name)[other]
    theirs, ids, want = tiny.build_clear(
      tiny.FAMILIES[name], seed, 75 + 13 * other, **changes
    )
    if name == "glm_dsa":
      # Below, every row past the first few leaves most keys out.
      self.assertLess(8 * theirs.config.index_topk, ids.shape[1])
      self.assertGreaterEqual(tiny.logits_of(theirs, ids)[1], tiny.MIN_GAP)
    folder = store(theirs, make_folder(self))
    model, params = load_pretrained(
      folder, read_block=16, query_block=8, delta_block=32
    )
    ids = ids[0].numpy()
    got = one_pass(model, params, ids)
    with self.subTest("one pass"):
      print(f"\n{name} {seed} {other}: {np.abs(got - want).max():.1e}")
      np.testing.assert_allclose(got, want, rtol=0, atol=LOGITS_ATOL)
    with self.subTest("chunks"):
      prompt = 60
      state = capture(model, params, ids[:prompt], chunk_size=17)
      got = replay(
        model,
        params,
        state,
        ids[None, prompt:],
        np.array([ids.size - prompt]),
        block_size=6,
      )[0]
      every = jax.nn.log_softmax(want.astype(np.float64))
      want = every[np.arange(prompt - 1, ids.size - 1), ids[prompt:]]
      np.testing.assert_allclose(got, want, rtol=0, atol=LOGITS_ATOL)


def layouts_of(name):
  """Every way to save a model of a family: (layout, wrapped)."""
  layouts = ("per_expert", "stacked") if name in WITH_EXPERTS else ("stacked",)
  wraps = (False, True) if name in WRAPPED else (False,)
  return [(layout, wrapped) for layout in layouts for wrapped in wraps]


SAVES = [
  (name, other, layout, wrapped, with_source)
  for name in tiny.FAMILIES
  for other in (0, 1)
  for layout, wrapped in layouts_of(name)
  for with_source in (True, False)
]


class SavedTest(parameterized.TestCase):
  def setUp(self):
    super().setUp()
    if transformers.__version__ != TRANSFORMERS:
      self.skipTest(f"needs transformers {TRANSFORMERS}")
    torch.set_num_threads(1)

  @parameterized.parameters(*SAVES)
  def test_the_library_loads_it_without_a_difference(
    self, name, other, layout, wrapped, with_source
  ):
    model_class, config = tiny.FAMILIES[name](**shapes_of(name)[other])
    theirs = tiny.build(model_class, config, SEEDS[0])
    ids = tiny.random_ids(config, SEEDS[0], 40)
    source = store(theirs, make_folder(self))
    model, params = load_pretrained(source)
    folder = make_folder(self)
    save_pretrained(
      folder,
      model,
      params,
      layout=layout,
      wrapped=wrapped,
      source_config=source if with_source else None,
    )
    again, info = model_class.from_pretrained(
      folder, output_loading_info=True, attn_implementation="eager"
    )
    self.assertFalse(info["missing_keys"])
    self.assertFalse(info["unexpected_keys"])
    self.assertFalse(info["mismatched_keys"])
    self.assertEqual(again.dtype, torch.float32)
    stored = theirs.state_dict()
    for key, value in again.eval().state_dict().items():
      self.assertTrue(torch.equal(value, stored[key]), key)
    want, _ = tiny.logits_of(theirs, ids)
    got, _ = tiny.logits_of(again, ids)
    np.testing.assert_array_equal(got, want)

  @parameterized.parameters(*tiny.FAMILIES)
  def test_auto_class(self, name):
    model_class, config = tiny.FAMILIES[name]()
    source = store(tiny.build(model_class, config, SEEDS[0]), make_folder(self))
    folder = make_folder(self)
    save_pretrained(folder, *load_pretrained(source))
    again = transformers.AutoModelForCausalLM.from_pretrained(folder)
    self.assertIs(type(again), model_class)
    architectures = json.loads((folder / "config.json").read_text())
    self.assertEqual(architectures["architectures"], [model_class.__name__])

  @parameterized.parameters(*WRAPPED)
  def test_wrapped_as_a_whole(self, name):
    """The class with a vision tower finds all of the text model."""
    model_class, config = tiny.FAMILIES[name]()
    source = store(tiny.build(model_class, config, SEEDS[0]), make_folder(self))
    folder = make_folder(self)
    save_pretrained(folder, *load_pretrained(source), wrapped=True)
    values = json.loads((folder / "config.json").read_text())
    values["vision_config"] = {
      "depth": 1,
      "hidden_size": 32,
      "num_heads": 2,
      "intermediate_size": 32,
      "out_hidden_size": 32,
    }
    (folder / "config.json").write_text(json.dumps(values))
    whole = getattr(transformers, values["architectures"][0])
    _, info = whole.from_pretrained(folder, output_loading_info=True)
    self.assertFalse(info["unexpected_keys"])
    for key in info["missing_keys"]:
      self.assertStartsWith(key, "model.visual.")


if __name__ == "__main__":
  absltest.main()
