"""A model of few layers and a group for it, as several tests take them."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from longstraw_jax import PRESETS, Group, Model, Params, PolicyObjective

VOCABULARY = 61  # of the tiny presets
OBJECTIVE = PolicyObjective(kl_coef=0.1, entropy_coef=0.05, clip_low=0.9)


def make_prompt(length: int) -> np.ndarray:
  """Token ids."""
  ids = np.random.default_rng(0).integers(0, VOCABULARY, length)
  return ids.astype(np.int32)


@functools.cache
def build(
  name: str, dtype: str = "float64", repeats: int = 1, **options
) -> tuple[Model, Params]:
  """Parameters away from their first values.

  Args:
    name: of a preset.
    dtype: of everything.
    repeats: of each pattern.
    **options: other fields of its configuration.
  """
  config = dataclasses.replace(
    PRESETS[name],
    dtype=dtype,
    param_dtype=dtype,
    norm_eps=1e-3,
    stages=tuple(
      dataclasses.replace(stage, repeats=repeats)
      for stage in PRESETS[name].stages
    ),
    **options,
  )
  model, random = Model(config), np.random.default_rng(1)
  wide = Model(
    dataclasses.replace(config, dtype="float64", param_dtype="float64")
  )
  params = jax.tree.map(
    lambda x: x + 0.1 * random.normal(size=x.shape),
    jax.jit(wide.init)(jax.random.key(0)),
  )
  return model, jax.tree.map(lambda x: x.astype(dtype), params)


def make_group(room: int, lengths: tuple[int, ...] = (4, 2), **known) -> Group:
  """A member that fills the room and others, off policy."""
  random, number = np.random.default_rng(2), 1 + len(lengths)
  near = lambda: jnp.asarray(-4 + random.normal(size=(number, room)))
  return Group.create(
    random.integers(0, VOCABULARY, (number, room)),
    [room, *lengths],
    rewards=jnp.ones(number),
    advantages=jnp.array([1.0, -0.7, 0.4])[:number],
    old_logprobs=near(),
    ref_logprobs=near(),
    sampling_logprobs=near(),
    **known,
  )
