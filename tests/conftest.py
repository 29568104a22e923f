"""Settings of the whole suite, before jax starts its backend."""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Tests compile much and run little.
os.environ["XLA_FLAGS"] = (
  os.environ.get("XLA_FLAGS", "") + " --xla_backend_optimization_level=0"
)

import jax  # noqa: E402  (after the environment is set)

jax.config.update("jax_enable_x64", True)
