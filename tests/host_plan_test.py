"""Plans with pages in host memory, compiled for a GPU: make test-plan.

As plan_compile_test, in a process of its own.
"""

import functools
import json

from absl.testing import parameterized
import pytest

from tests.child import run_json

pytest.importorskip("jax_plugins.xla_cuda12")

pytestmark = pytest.mark.plan

# Rows of 4 layers far above everything else, so that one of them is told from
# all of them.
LAYERS, CHUNK, RESPONSE = 4, 512, 64
SHORT, LONG = 2**15, 2**16
LAYER = 2 * 2 * 8 * 4  # bytes of a token: keys and values, 2 heads of 8 floats

_SCRIPT = """
import dataclasses, json, sys
import jax
jax.config.update("jax_platforms", "cpu")
from longstraw_jax import PRESETS, Model
from longstraw_jax.gpu_targets import GPU_TARGETS
from longstraw_jax.plan import PlanConfig, plan

rows = []
(stage,) = PRESETS["tiny-hybrid"].stages
stages = (dataclasses.replace(stage, repeats=LAYERS),)
sizes = dataclasses.replace(
  PRESETS["tiny-hybrid"], embed_dim=32, hidden_dim=64, stages=stages
)
for phase, prompt in json.loads(sys.argv[1]):
  config = PlanConfig(
    target=GPU_TARGETS["h20-3e"],
    devices_per_host=1,
    prompt=prompt + 1,
    group=2,
    response=RESPONSE,
    chunk_size=CHUNK,
    pages="host",
  )
  (row,) = plan(Model(sizes), config, phases=[phase])
  rows.append({
    "parts": row.parts,
    "pinned": row.pinned,
    "temporaries": row.temporaries,
    "outputs": row.outputs,
  })
print(json.dumps(rows))
"""

# Phase -> buffers of one layer's rows that it holds at once, in float32.
STAGED = {"capture": 1, "score": 1, "branch": 2, "reverse": 2, "decode": 1}
CASES = tuple((phase, prompt) for phase in STAGED for prompt in (SHORT, LONG))


@functools.cache
def planned() -> dict[tuple, dict]:
  script = _SCRIPT
  for name in ("LAYERS", "CHUNK", "RESPONSE"):
    script = script.replace(name, str(globals()[name]))
  rows = run_json(script, json.dumps(CASES), XLA_FLAGS="")
  return dict(zip(CASES, rows, strict=True))


class HostPlanTest(parameterized.TestCase):
  @parameterized.parameters(*STAGED)
  def test_the_device_grows_by_one_layers_rows(self, phase):
    short, long = (planned()[phase, prompt] for prompt in (SHORT, LONG))
    grown = long["temporaries"] - short["temporaries"]
    layer = LAYER * (LONG - SHORT)
    print(f"\n{phase}: {grown / layer:.3f} layers' rows")
    wanted = STAGED[phase] * layer
    self.assertBetween(grown, 0.9 * wanted, 1.15 * wanted)
    self.assertLess(grown, LAYERS * layer)

  @parameterized.parameters(*STAGED)
  def test_what_is_on_the_host_is_counted_apart(self, phase):
    row = planned()[phase, LONG]
    copies = 2 if phase in ("branch", "reverse") else 1
    saved = row["parts"]["carries"] * (LONG // CHUNK)
    self.assertEqual(row["pinned"], copies * LAYERS * LAYER * LONG + saved)
    for part in ("pages", "page_gradients", "saved_carries"):
      self.assertEqual(row["parts"][part], 0)
    # What a phase hands back on the device has no pages either.
    self.assertLess(row["outputs"], LAYER * LONG)
