"""Adapters live against PEFT, in both directions: make test-parity."""

import json
import pathlib
import tempfile

from absl.testing import parameterized
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from longstraw_jax.lora import LoraConfig, add_lora, drop_lora
from longstraw_jax.state import tree_zeros
from longstraw_jax.types import Span
from longstraw_jax.weights.load import load_pretrained
from longstraw_jax.weights.peft_files import load_adapter, save_adapter
from tests.golden import files

peft = pytest.importorskip("peft")
torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

pytestmark = [pytest.mark.parity, pytest.mark.filterwarnings("default")]

ATOL = 1e-4  # float32, logits of unit scale
# PEFT takes every gate_proj of GLM-5 for those of its experts: it cannot adapt
# the others, of the shared expert and of dense layers.
ATTENTION_ONLY = ("glm_dsa",)
THEIR_TARGETS = {
  False: r".*\.(\w+_proj|in_proj_\w+|shared_expert_gate)",
  True: r".*\.self_attn\.(\w+_proj|kv_a_proj_with_mqa)",
}
MIXTURES = ("qwen_moe", "glm_dsa")
EXPERT_PARAMETERS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]


def our_logits(model, params, ids):
  ids = jnp.asarray(ids, jnp.int32)
  positions = jnp.arange(len(ids), dtype=jnp.int32)
  span = Span(positions=positions, length=jnp.int32(len(ids)))
  carry = tree_zeros(model.state_shapes(1)[1])
  out = model.hidden(params, ids, span, (), carry)
  return model.logits(params, out.x_TD)


def their_logits(model, ids):
  with torch.no_grad():
    return model(torch.tensor(ids)[None]).logits[0].numpy()


def trained(params):
  """B away from zero, large enough that it counts."""
  random = np.random.default_rng(3)

  def change(path, x):
    noise = 0.2 * random.normal(size=x.shape)
    return jnp.asarray(x + noise, x.dtype) if "lora_b" in str(path) else x

  return params.replace(
    trainable=jax.tree_util.tree_map_with_path(change, params.trainable)
  )


def their_model(name):
  return transformers.AutoModelForCausalLM.from_pretrained(
    files.FOLDER / name, dtype=torch.float32, attn_implementation="eager"
  ).eval()


class ParityTest(parameterized.TestCase):
  def setUp(self):
    super().setUp()
    made = tempfile.TemporaryDirectory()
    self.addCleanup(made.cleanup)
    self.folder = pathlib.Path(made.name, "adapter")

  @parameterized.parameters(*files.NAMES)
  def test_peft_reads_ours(self, name):
    self.check_ours(
      name, r".*/mixer/\w+" if name in ATTENTION_ONLY else "all-linear"
    )

  @parameterized.product(
    name=MIXTURES,
    targets=(
      ("experts",),
      ("experts_gate_up",),
      ("experts_down", "router"),
      (r".*/mixer/\w+", "experts", "router"),
    ),
  )
  def test_peft_reads_our_experts(self, name, targets):
    self.check_ours(name, targets)

  def check_ours(self, name, targets):
    """Logits of PEFT's model with our adapters, against ours."""
    ids, _ = files.reference(name)
    model, base = load_pretrained(files.FOLDER / name)
    config = LoraConfig(rank=4, alpha=10.0, targets=targets)
    params = trained(add_lora(model, base, jax.random.key(0), config))
    save_adapter(self.folder, model, params)
    theirs = peft.PeftModel.from_pretrained(their_model(name), self.folder)
    expected = their_logits(theirs, ids)
    ours = our_logits(model, params, ids)
    np.testing.assert_allclose(ours, expected, atol=ATOL, rtol=0)
    plain = our_logits(model, drop_lora(params), ids)
    self.assertGreater(float(jnp.abs(ours - plain).max()), 0.1)

  @parameterized.parameters(*files.NAMES)
  def test_we_read_theirs(self, name):
    targets = THEIR_TARGETS[name in ATTENTION_ONLY]
    self.check_theirs(name, target_modules=targets)

  @parameterized.product(
    name=MIXTURES,
    parameters=(
      EXPERT_PARAMETERS,
      EXPERT_PARAMETERS[:1],
      ["mlp.experts.down_proj", "mlp.gate.weight"],
    ),
  )
  def test_we_read_their_experts(self, name, parameters):
    self.check_theirs(
      name, target_modules=["o_proj"], target_parameters=parameters
    )

  def test_we_read_gate_and_up_that_peft_has_joined(self):
    """Of twice the rank, by rank_pattern and alpha_pattern."""
    targets = ["gate_proj", "up_proj", "down_proj"]
    self.check_theirs("glm_dsa", target_modules=targets)
    settings = json.loads((self.folder / "adapter_config.json").read_text())
    self.assertEqual(list(settings["rank_pattern"].values()), [8])

  def check_theirs(self, name, **targets):
    """Our logits with PEFT's adapters, against those of PEFT's model."""
    ids, _ = files.reference(name)
    model, base = load_pretrained(files.FOLDER / name)
    config = peft.LoraConfig(
      r=4,
      lora_alpha=10,
      **targets,
      init_lora_weights=False,  # B random
      task_type="CAUSAL_LM",
    )
    torch.manual_seed(0)
    theirs = peft.get_peft_model(their_model(name), config).eval()
    theirs.save_pretrained(self.folder)
    params = load_adapter(self.folder, model, base)
    ours = our_logits(model, params, ids)
    expected = their_logits(theirs, ids)
    np.testing.assert_allclose(ours, expected, atol=ATOL, rtol=0)
    plain = our_logits(model, drop_lora(params), ids)
    self.assertGreater(float(jnp.abs(ours - plain).max()), 0.1)
