"""Plans compiled for GPUs that are not there: make test-plan.

The compiles run in one process of their own, in 32 bits and without the
suite's flags, as experiments/plan.py would run them.
"""

import functools
import json
import os
import subprocess
import sys

from absl.testing import parameterized
import pytest

pytest.importorskip("jax_plugins.xla_cuda12")

pytestmark = pytest.mark.plan

# Long against the chunk: page buffers are far larger than anything else.
PROMPT, CHUNK, RESPONSE = 2**16 + 1, 512, 64

_SCRIPT = """
import dataclasses, json, sys
import jax
jax.config.update("jax_platforms", "cpu")
from longstraw_jax import PRESETS, Model
from longstraw_jax.gpu_targets import GPU_TARGETS
from longstraw_jax.plan import PlanConfig, plan

rows = []
for preset, device, phase, group in json.loads(sys.argv[1]):
  config = PlanConfig(
    target=GPU_TARGETS[device],
    prompt=PROMPT,
    group=group,
    response=RESPONSE,
    chunk_size=CHUNK,
  )
  # Round widths: for odd ones the compiler has another path of products.
  sizes = dataclasses.replace(PRESETS[preset], embed_dim=32, hidden_dim=64)
  (row,) = plan(Model(sizes), config, phases=[phase])
  rows.append({
    "parts": row.parts,
    "temporaries": row.temporaries,
    "arguments": row.arguments,
    "outputs": row.outputs,
    "aliased": row.aliased,
    "largest_collective": row.largest_collective,
  })
print(json.dumps(rows))
"""

PHASES = ("capture", "score", "branch", "reverse", "optimizer", "decode")
CASES = (
  *(("tiny-hybrid", "h20-3e", phase, 2) for phase in PHASES),
  ("tiny-hybrid", "h20-3e", "branch", 8),
  *(("tiny-glm", "h20-3e", phase, 2) for phase in PHASES[:4]),
  *(("tiny-hybrid", card, "optimizer", 2) for card in ("a100", "b200")),
)


@functools.cache
def _output() -> tuple[str, str]:
  script = _SCRIPT
  for name in ("PROMPT", "CHUNK", "RESPONSE"):
    script = script.replace(name, str(globals()[name]))
  environment = os.environ | {"JAX_ENABLE_X64": "0", "XLA_FLAGS": ""}
  done = subprocess.run(
    [sys.executable, "-c", script, json.dumps(CASES)],
    env=environment,
    capture_output=True,
    text=True,
    check=False,
  )
  return done.stdout, done.stderr


def planned() -> dict[tuple, dict]:
  output, errors = _output()
  if not output:
    raise RuntimeError(errors)
  rows = json.loads(output.splitlines()[-1])
  return dict(zip(CASES, rows, strict=True))


def page_bytes(preset: str) -> int:
  """A device's pages in float32, by formula."""
  tokens = (PROMPT - 1) // 8
  widths = {
    "tiny-hybrid": 2 * 2 * 2 * 8,  # layers, keys and values, heads, width
    "tiny-glm": 5 * 16 + 3 * 8,  # latents of 5 layers, index keys of 3
  }
  return tokens * widths[preset] * 4


class CompiledTest(parameterized.TestCase):
  @parameterized.parameters(*CASES)
  def test_compiles_and_keeps_pages_where_they_are(self, *case):
    preset, _, phase, _ = case
    row = planned()[case]
    self.assertEqual(row["parts"]["pages"], page_bytes(preset))
    self.assertGreater(row["temporaries"], 0)
    # A device's keys, or its latents of one layer.
    buffers = {"tiny-hybrid": page_bytes(preset) // 2, "tiny-glm": 2**13 * 64}
    self.assertLess(row["largest_collective"], buffers[preset])

  @parameterized.parameters(*CASES)
  def test_the_compiler_agrees_with_arithmetic(self, *case):
    """Arguments, outputs and what is aliased, within what is not sharded."""
    phase = case[2]
    row = planned()[case]
    parts = row["parts"]
    seen = row["arguments"] + row["outputs"] - row["aliased"]
    beside = (
      "master",
      "optimizer",
      "tokens",
    )  # not, or not all, in the program
    if phase == "optimizer":
      beside = ("pages", "carries", "saved_carries", "tokens")
    inside = sum(size for name, size in parts.items() if name not in beside)
    self.assertBetween(seen, inside, inside + parts["tokens"] + 2**14)

  def test_temporaries_do_not_grow_with_the_group(self):
    few, many = (
      planned()["tiny-hybrid", "h20-3e", "branch", group]["temporaries"]
      for group in (2, 8)
    )
    self.assertLessEqual(many, 1.01 * few)

  @parameterized.parameters("tiny-hybrid", "tiny-glm")
  def test_accumulators_are_updated_in_place(self, preset):
    for phase in ("branch", "reverse"):
      row = planned()[preset, "h20-3e", phase, 2]
      self.assertLess(row["temporaries"], row["parts"]["pages"], phase)
