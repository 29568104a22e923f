"""Capacity plans by arithmetic: no compiler needed. See plan_compile_test."""

import dataclasses
import functools
from unittest import mock

from absl.testing import parameterized

from longstraw_jax import PRESETS, LoraConfig, Model
from longstraw_jax import plan as plans
from longstraw_jax.gpu_targets import GPU_TARGETS, GpuTarget
from longstraw_jax.plan import PlanConfig, largest_collective
from longstraw_jax.train_config import OptimizerConfig

SIZES = PlanConfig(
  target=GPU_TARGETS["h20-3e"],
  prompt=2_088_960,
  response=8192,
  lora=LoraConfig(rank=16),
)
PARAMETERS = {"qwen3.6-27b": 26_895_998_464, "glm-5.2": 743_377_019_904}


@functools.cache
def parts(preset: str, phase: str, config: PlanConfig) -> dict[str, int]:
  """Bytes of a phase, as on a machine without the wheels."""
  with mock.patch.object(plans, "gpu_mesh", lambda config: None):
    (row,) = plans.plan(Model(PRESETS[preset]), config, phases=[phase])
  assert row.temporaries is None
  return row.parts


class ArithmeticTest(parameterized.TestCase):
  def test_pages_are_dealt_to_the_devices(self):
    """16 layers, keys and values, 4 heads of 256 in bfloat16."""
    expected = 2_088_960 // 8 * 16 * 2 * 4 * 256 * 2
    found = parts("qwen3.6-27b", "branch", SIZES)
    self.assertEqual(found["pages"], expected)
    self.assertEqual(found["page_gradients"], 2 * expected)
    narrow = dataclasses.replace(SIZES, page_grad_dtype="bfloat16")
    found = parts("qwen3.6-27b", "branch", narrow)
    self.assertEqual(found["page_gradients"], expected)

  def test_response_only_has_no_page_gradients(self):
    config = dataclasses.replace(SIZES, grad_scope="response_only")
    found = parts("qwen3.6-27b", "branch", config)
    self.assertEqual(found["page_gradients"], 0)

  @parameterized.parameters(("qwen3.6-27b", 1), ("glm-5.2", 4))
  def test_weights_are_dealt_to_the_devices(self, preset, hosts):
    config = dataclasses.replace(SIZES, hosts=hosts, lora=None)
    found = parts(preset, "capture", config)
    share = 2 * PARAMETERS[preset] / config.devices
    self.assertBetween(found["weights"], share, 1.01 * share)

  def test_a_base_in_4_bits_is_dealt_too(self):
    config = dataclasses.replace(SIZES, nf4=True)
    found = parts("qwen3.6-27b", "capture", config)
    # 4.127 bits a parameter of the layers, 16 of embedding and head.
    outside = 2 * 5120 * 248320
    inside = PARAMETERS["qwen3.6-27b"] - outside
    share = (4.127 / 8 * inside + 2 * outside) / 8
    adapters = 116_727_808 * 4
    self.assertBetween(found["weights"], share, share + adapters)

  def test_optimizer_and_gradients_are_float32(self):
    config = dataclasses.replace(SIZES, lora=None)
    found = parts("qwen3.6-27b", "optimizer", config)
    self.assertBetween(found["gradients"] / found["weights"], 1.99, 2.0)
    self.assertBetween(found["optimizer"] / found["gradients"], 2.0, 2.01)

  @parameterized.parameters(
    ({}, 4),
    ({"optimizer": OptimizerConfig(master_dtype="none")}, 0),
    ({"lora": LoraConfig(rank=16)}, 0),
  )
  def test_copies_of_what_learns_in_bfloat16(self, changes, size):
    """13.4 GB a device; frozen weights and float32 adapters have none."""
    config = dataclasses.replace(SIZES, **({"lora": None} | changes))
    share = size * PARAMETERS["qwen3.6-27b"] / 8
    for phase in ("capture", "optimizer"):
      found = parts("qwen3.6-27b", phase, config)
      self.assertBetween(found["master"], share, 1.01 * share)
    if size:
      self.assertBetween(found["master"], 13.4e9, 13.5e9)

  def test_members_on_their_own_devices_hold_the_prompt_again(self):
    dealt = dataclasses.replace(SIZES, member=2)
    wide, narrow = (
      parts("qwen3.6-27b", "branch", config)["pages"]
      for config in (dealt, SIZES)
    )
    self.assertEqual(wide, 2 * narrow)

  def test_longest_prompt(self):
    """Without temporaries the border is where the parts fill the memory."""
    with mock.patch.object(plans, "gpu_mesh", lambda config: None):
      found, rows = plans.longest_prompt(
        Model(PRESETS["tiny-hybrid"]),
        dataclasses.replace(
          SIZES,
          target=dataclasses.replace(SIZES.target, memory=2**20),
          prompt=1024,
          response=8,
          chunk_size=64,
          lora=None,
        ),
        tolerance=0.001,
      )
    most = max(row.total for row in rows)
    self.assertBetween(most / 2**20, 0.97, 1.0)
    self.assertEqual((found - 1) % 64, 0)

  @parameterized.parameters(
    {"prompt": 1}, {"member": 3}, {"nf4": True, "lora": None}, {"hosts": 0}
  )
  def test_bad_configurations(self, **changes):
    with self.assertRaisesRegex(ValueError, next(iter(changes))):
      dataclasses.replace(SIZES, **changes)

  def test_unknown_phases(self):
    with self.assertRaisesRegex(ValueError, "phase 'prefill'"):
      next(plans.plan(Model(PRESETS["tiny-hybrid"]), SIZES, phases=["prefill"]))


class TextTest(parameterized.TestCase):
  @parameterized.parameters(
    ("%a = f32[2,3]{1,0} all-reduce(%b), channel_id=1", 24),
    ("%a = (bf16[8]{0}, pred[3]{0}) all-gather-start(f32[100]{0} %b)", 16),
    ("%a = f32[9]{0} add(%all-reduce.1, %b)", 0),
  )
  def test_largest_collective(self, line, expected):
    self.assertEqual(largest_collective(line), expected)

  def test_a_card_of_ones_own(self):
    card = GpuTarget(
      name="mine",
      memory=5,
      bandwidth=6,
      tflops=7,
      core_count=8,
      capability="12.1",
    )
    text = card.text()
    self.assertIn("cuda_compute_capability { major: 12 minor: 1 }", text)
    self.assertIn("device_memory_size: 5\n", text)

  @parameterized.parameters(
    ("memory", 0), ("capability", "9"), ("capability", "x.y")
  )
  def test_bad_cards(self, name, value):
    with self.assertRaisesRegex(ValueError, f"{name} is"):
      dataclasses.replace(GPU_TARGETS["h100"], **{name: value})
