"""Compiled memory of one group's gradient; nothing is allocated or run.

The compiles run in one process of their own, in 32 bits and with what makes
them fast; the plans are those of the default settings within 0.2 %.
"""

import functools
import json
import os

from absl.testing import absltest, parameterized
import pytest

from tests.child import run_json

PROMPT, RESPONSE, CHUNK = 32768, 128, 256
MIB = 2**20

_SCRIPT = """
import functools, json, sys
import jax.numpy as jnp
from longstraw_jax import PRESETS, Model, PolicyObjective, group_gradient
from longstraw_jax.testing import baselines

model, objective = Model(PRESETS["bench-hybrid"]), PolicyObjective()


def measure(kind, prompt, group):
  if kind == "conventional":
    call = lambda *xs: baselines.conventional_gradient(model, *xs, objective)
  elif kind == "serial_remat":
    call = lambda *xs: baselines.serial_remat_gradient(model, *xs, objective)
  else:
    call = lambda *xs: group_gradient(
      model, *xs, objective, chunk_size=CHUNK, grad_scope=kind
    )
  return baselines.planned_bytes(
    baselines.compile_gradient(call, model, prompt, group, RESPONSE)
  )


cases = json.loads(sys.argv[1])
print(json.dumps([measure(*case) for case in cases]))
"""

CASES = (
  ("full", PROMPT, 2),
  ("full", PROMPT, 64),
  ("full", PROMPT // 2, 64),
  ("response_only", PROMPT, 64),
  ("response_only", PROMPT // 2, 64),
)
MORE_CASES = (
  ("full", PROMPT, 8),
  ("response_only", PROMPT, 2),
  ("response_only", PROMPT, 8),
  ("conventional", PROMPT, 8),
  ("serial_remat", PROMPT, 8),
)


@functools.cache
def planned(cases: tuple = CASES) -> dict[tuple, int]:
  """Temporaries and outputs of every case, in bytes."""
  script = _SCRIPT.replace("CHUNK", str(CHUNK)).replace(
    "RESPONSE", str(RESPONSE)
  )
  sizes = run_json(script, json.dumps(cases))
  return dict(zip(cases, sizes, strict=True))


_RUN_SCRIPT = """
import json
import pathlib
import jax, jax.numpy as jnp
from longstraw_jax import PRESETS, Group, Model, PolicyObjective, group_gradient

model = Model(PRESETS["bench-hybrid"])
params = jax.jit(model.init)(jax.random.key(0))
room, filled = 2**19, 3000  # pages are as large as their capacity
prompt = jnp.zeros(room + 1, jnp.int32)
group = Group.create(
  jnp.ones((2, 16), jnp.int32), [16, 9], rewards=[1, 0], advantages=[1, -1]
)


def gradient(params, prompt, group, length):
  return group_gradient(
    model, params, prompt, group, PolicyObjective(), chunk_size=2048,
    capacity=room, length=length,
  )


def resident(name):
  for line in pathlib.Path("/proc/self/status").read_text().splitlines():
    if line.startswith(name):
      return 1024 * int(line.split()[1])


args = params, prompt, group, jnp.int32(filled)
call = jax.jit(gradient).lower(*args).compile()
plan = call.memory_analysis()
pathlib.Path("/proc/self/clear_refs").write_text("5")  # forget the peak
before = resident("VmRSS")
jax.block_until_ready(call(*args))
grown = resident("VmHWM") - before
planned = plan.temp_size_in_bytes + plan.output_size_in_bytes
print(json.dumps([planned, grown]))
"""

# Four attention layers, keys and values, two heads of 32 floats.
PAGES = PROMPT * 4 * 2 * 2 * 32 * 4


@pytest.mark.slow
@pytest.mark.skipif(
  not os.path.exists("/proc/self/clear_refs"), reason="Linux counts for us"
)
class RealityTest(absltest.TestCase):
  def test_a_plan_against_resident_memory(self):
    """Of a program of more than 2 GiB, compiled before and then run."""
    planned, grown = run_json(_RUN_SCRIPT)
    print(f"\nplanned {planned / MIB:.0f} MiB, grown {grown / MIB:.0f} MiB")
    self.assertGreaterEqual(planned, 2048 * MIB)
    self.assertLess(abs(grown / planned - 1), 0.1)


class MemoryTest(parameterized.TestCase):
  def test_full_fits_in_pages_and_one_accumulator(self):
    """And does not grow with the group."""
    sizes = [planned()["full", PROMPT, group] for group in (2, 64)]
    self.assertLessEqual(max(sizes), 183 * MIB)
    self.assertLessEqual(max(sizes), 1.01 * min(sizes), sizes)

  def test_response_only_needs_no_accumulator(self):
    full, constant = (
      planned()[scope, PROMPT, 64] for scope in ("full", "response_only")
    )
    self.assertGreaterEqual(full - constant, PAGES)
    self.assertLess(constant, 1.5 * PAGES)

  @parameterized.parameters(("full", 2.5), ("response_only", 1.25))
  def test_pages_are_updated_in_place(self, scope, copies):
    """Per token of the prompt: pages and, for full, the accumulator."""
    long, short = (planned()[scope, p, 64] for p in (PROMPT, PROMPT // 2))
    # The rest of the slope is the carries saved at every chunk.
    self.assertLess(long - short, copies * PAGES / 2)


@pytest.mark.slow
class MoreMemoryTest(parameterized.TestCase):
  @parameterized.parameters("full", "response_only")
  def test_memory_does_not_grow_with_the_group(self, scope):
    every = planned() | planned(MORE_CASES)
    sizes = [every[scope, PROMPT, group] for group in (2, 8, 64)]
    self.assertLessEqual(max(sizes), 1.01 * min(sizes), sizes)

  def test_far_below_the_conventional_gradient(self):
    every = planned(MORE_CASES)
    full = every["full", PROMPT, 8]
    conventional = every["conventional", PROMPT, 8]
    remat = every["serial_remat", PROMPT, 8]
    print(
      f"\nfull {full / MIB:.1f} MiB, serial_remat {remat / MIB:.1f}, "
      f"conventional {conventional / MIB:.1f}"
    )
    self.assertGreaterEqual(conventional, 300 * full)
    self.assertGreater(remat, full)
