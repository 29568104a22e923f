"""Families of checkpoints: what config.json says, what tensors are called."""

from longstraw_jax.weights.families.hf_config import (
  FAMILIES,
  config_from_hf,
  config_to_hf,
)

__all__ = ["FAMILIES", "config_from_hf", "config_to_hf"]
