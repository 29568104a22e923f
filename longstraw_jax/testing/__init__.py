"""Oracles, and the conformance kit for mixers."""

from longstraw_jax.testing.mixer_checks import CHECKS, check_mixer

__all__ = ["CHECKS", "check_mixer"]
