"""Gradients of mixtures and latent attention, every leaf against jax.grad."""

import dataclasses
import functools

from absl.testing import parameterized
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from longstraw_jax import (
  Model,
  group_gradient,
  sequence_logprobs,
)
from longstraw_jax.models.model import split_params
from longstraw_jax.testing.baselines import bounded_gradient, constant_tokens
from longstraw_jax.testing.compare import assert_gradients_close
from tests.small_models import OBJECTIVE, build, make_group, make_prompt

TOLERANCE = {"float64": 1e-12, "float32": 1e-5}
LENGTH, CHUNK, ROOM = 50, 16, 7
PROMPT = make_prompt(LENGTH)

# One repeat of each pattern: IndexShare groups span chunks, the selection is
# far below the prompt, both routers choose.
DEFAULT = (
  ("tiny-moe", "full", {"temperature": 0.6}),
  ("tiny-glm", "full", {}),
  ("tiny-glm", "tail", {"members_at_once": 2, "block_size": 3}),
)
SLOW = tuple(
  (name, scope, options)
  for name in ("tiny-moe", "tiny-glm")
  for scope in ("full", "tail", "response_only")
  for options in ({}, {"members_at_once": 2, "block_size": 3})
  if (name, scope, options) not in DEFAULT
)


@functools.cache
def oracle(name: str, scope: str, temperature: float | None = None):
  model, params = build(name)
  boundary = constant_tokens(scope, LENGTH, CHUNK, 2)
  return bounded_gradient(
    model,
    params,
    jnp.asarray(PROMPT),
    make_group(ROOM, temperature=temperature),
    OBJECTIVE,
    jnp.int32(LENGTH),
    jnp.int32(boundary),
  )[:2]


def ours(name, scope, dtype, temperature=None, **options):
  model, params = build(name, dtype)
  return group_gradient(
    model,
    params,
    PROMPT,
    make_group(ROOM, temperature=temperature),
    OBJECTIVE,
    chunk_size=CHUNK,
    grad_scope=scope,
    tail_chunks=2 if scope == "tail" else None,
    **options,
  )[:2]


def check(name, scope, options, dtype="float64") -> None:
  """One gradient against its oracle; no leaf is zero."""
  expected_loss, expected = oracle(name, scope, options.get("temperature"))
  loss, grads = ours(name, scope, dtype, **options)
  tolerance = TOLERANCE[dtype]
  np.testing.assert_allclose(loss, expected_loss, tolerance, tolerance)
  assert_gradients_close(grads, expected, tolerance)
  for path, leaf in jax.tree_util.tree_leaves_with_path(grads):
    assert jnp.abs(leaf).max() > 0, jax.tree_util.keystr(path)


@pytest.mark.slow
class EveryFormTest(parameterized.TestCase):
  @parameterized.parameters(*SLOW)
  def test_every_leaf_of_every_form(self, name, scope, options):
    check(name, scope, options)

  @parameterized.parameters("tiny-moe", "tiny-glm")
  def test_every_leaf_in_float32(self, name):
    check(name, "full", {}, "float32")


class ArchitecturesTest(parameterized.TestCase):
  @parameterized.parameters(*DEFAULT)
  def test_every_leaf(self, name, scope, options):
    check(name, scope, options)

  def test_prompts_side_by_side_have_gradients_of_their_own(self):
    """As a step over several prompts at once sums them."""
    model, params = build("tiny-moe")
    prompts = jnp.stack([PROMPT, PROMPT[::-1]])

    def one(prompt):
      return group_gradient(
        model,
        params,
        prompt,
        make_group(ROOM),
        OBJECTIVE,
        chunk_size=CHUNK,
        members_at_once=2,
      )[:2]

    loss, grads = jax.vmap(one)(prompts)
    for i in range(2):
      expected_loss, expected = one(prompts[i])
      np.testing.assert_allclose(loss[i], expected_loss, 1e-12)
      of_one = jax.tree.map(lambda x, i=i: x[i], grads)
      assert_gradients_close(of_one, expected, 1e-12)

  def test_frozen_experts_of_every_repeat(self):
    """They are read in the stack of all layers."""
    model, params = build("tiny-moe", repeats=2)
    learns = lambda path: "experts_" not in path
    frozen = model.split(params.merged(), learns)

    def gradient(params):
      def loss(trainable):
        tree = params.replace(trainable=trainable)
        return sequence_logprobs(model, tree, jnp.asarray(PROMPT)).sum()

      return jax.jit(jax.grad(loss))(params.trainable)

    wanted = split_params(gradient(params), learns).trainable
    assert_gradients_close(gradient(frozen), wanted, 1e-12)

  def test_constants_never_learn_and_have_no_gradient(self):
    """The index and the router's correction bias, even if trained by force."""
    model, params = build("tiny-glm")
    model = Model(dataclasses.replace(model.config, saved="everything"))
    paths = []
    split_params(params.frozen, lambda path: paths.append(path) or True)
    self.assertTrue(paths)
    for path in paths:
      self.assertTrue("/indexer/" in path or "correction_bias" in path, path)
    forced = params.replace(trainable=params.merged(), frozen={})

    def loss(trainable):
      tree = forced.replace(trainable=trainable)
      logprobs = sequence_logprobs(model, tree, jnp.asarray(PROMPT))
      return jnp.tanh(logprobs).sum()

    grads = jax.jit(jax.grad(loss))(forced.trainable)
    zero = split_params(grads, lambda path: path in paths).trainable
    for path, leaf in jax.tree_util.tree_leaves_with_path(zero):
      np.testing.assert_array_equal(leaf, 0, jax.tree_util.keystr(path))
