"""Settings of the whole suite, before jax starts its backend."""

import gc
import importlib.metadata
import os
import pathlib

os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Tests compile much and run little.
_FLAGS = ["--xla_backend_optimization_level=0"]
if importlib.metadata.version("jaxlib").startswith("0.10."):
  # Halves the time to compile again; later versions refuse the flag.
  _FLAGS.append("--xla_cpu_use_fusion_emitters=false")
os.environ["XLA_FLAGS"] = " ".join([os.environ.get("XLA_FLAGS", ""), *_FLAGS])

import jax  # noqa: E402  (after the environment is set)
import pytest  # noqa: E402

# Tracing makes many objects and few cycles: a tenth of the suite's time.
gc.set_threshold(100_000, 50, 100)
jax.config.update("jax_enable_x64", True)
jax.config.update("jax_num_cpu_devices", 8)  # meshes; the rest uses the first


@pytest.fixture(autouse=True, scope="module")
def _free_programs_of_a_module():
  yield
  jax.clear_caches()


MAPPINGS = pathlib.Path("/proc/self/maps")
MOST_MAPPINGS = 30_000  # Linux allows a process 65,530


@pytest.fixture(autouse=True)
def _free_programs_in_time():
  """Every compiled program maps memory; XLA crashes when no more can be."""
  yield
  if MAPPINGS.exists() and MAPPINGS.read_bytes().count(b"\n") > MOST_MAPPINGS:
    jax.clear_caches()


def pytest_collection_modifyitems(items):
  """The one long test first, so that the other worker takes the rest."""
  items.sort(key=lambda item: "train_grpo_test" not in item.nodeid)
