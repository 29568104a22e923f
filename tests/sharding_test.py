"""Gradients on meshes of virtual devices against one device, every leaf."""

import dataclasses
import functools
import os
import pathlib
import subprocess
import sys
from unittest import mock

from absl.testing import absltest, parameterized
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from longstraw_jax import (
  Model,
  capture,
  group_gradient,
  make_mesh,
  place_at_rest,
  replay,
  rollout,
  split_params,
)
from longstraw_jax.ops.pages import Striping
from longstraw_jax.ops.selection import best_of_all
from longstraw_jax.sharding import num_shards, rest_specs
from longstraw_jax.steps import apply_gradient, make_learner
from longstraw_jax.testing.baselines import bounded_gradient, constant_tokens
from longstraw_jax.testing.compare import assert_gradients_close, leaf_errors
from longstraw_jax.train_config import OptimizerConfig
from tests.small_models import OBJECTIVE, build, make_group, make_prompt

# Divided by no number of devices: the last chunk is partly filled, and the
# borders between devices lie inside the response.
LENGTH, CHUNK, ROOM = 45, 16, 5
PROMPT = make_prompt(LENGTH)
PAGES = "longstraw_jax.ops.pages"


@functools.cache
def oracle(name: str, scope: str, chunk: int):
  """Conventional autodiff on one device."""
  model, params = build(name)
  boundary = constant_tokens(scope, LENGTH, chunk, 2)
  return jax.device_get(
    bounded_gradient(
      model,
      params,
      jnp.asarray(PROMPT),
      make_group(ROOM),
      OBJECTIVE,
      jnp.int32(LENGTH),
      jnp.int32(boundary),
    )[:2]
  )


def on_mesh(
  name,
  scope,
  context,
  member,
  chunk=CHUNK,
  query_block=16,
  trainable=lambda path: True,
  **options,
):
  model, params = build(name, query_block=query_block)
  params = model.split(params.merged(), trainable)
  mesh = make_mesh(context, member)
  with jax.set_mesh(mesh):
    return group_gradient(
      model,
      place_at_rest(params, mesh),
      PROMPT,
      make_group(ROOM),
      OBJECTIVE,
      chunk_size=chunk,
      grad_scope=scope,
      tail_chunks=2 if scope == "tail" else None,
      **options,
    )[:2]


def check(name, scope, context, member, chunk=CHUNK, **options) -> None:
  expected_loss, expected = oracle(name, scope, chunk)
  loss, grads = on_mesh(name, scope, context, member, chunk, **options)
  np.testing.assert_allclose(loss, expected_loss, 1e-12)
  if "trainable" in options:
    expected = split_params(expected, options["trainable"]).trainable
  assert_gradients_close(jax.device_get(grads), expected, 1e-12)


def without_experts(path: str) -> bool:
  """Whether a parameter is none of an expert."""
  return "experts_" not in path


BLOCKS = {"block_size": 4, "query_block": 1, "trainable": without_experts}
SHAPES = ((1, 1), (2, 1), (4, 2), (8, 1), (2, 4))
FAMILIES = ("tiny-hybrid", "tiny-moe", "tiny-glm")


@pytest.mark.slow
class EveryMeshTest(parameterized.TestCase):
  @parameterized.product(
    name=FAMILIES,
    scope=("full", "response_only", "tail"),
    shape=SHAPES,
  )
  def test_every_leaf(self, name, scope, shape):
    block = 2 if sum(shape) % 2 else None
    check(name, scope, *shape, block_size=block)

  @parameterized.parameters(*FAMILIES)
  def test_members_keep_their_scores(self, name):
    """Replay and rollout on a mesh give what one device gives."""
    model, params = build(name)
    group = make_group(ROOM)

    def run(params):
      state = capture(model, params, PROMPT, chunk_size=CHUNK)
      scores = replay(model, params, state, group.responses, group.lengths)
      sampled = rollout(
        model, params, state, jax.random.key(5), group_size=4, max_tokens=6
      )
      return scores, sampled.responses, sampled.old_logprobs

    expected = run(params)
    mesh = make_mesh(4, 2)
    with jax.set_mesh(mesh):
      found = run(place_at_rest(params, mesh))
    np.testing.assert_array_equal(found[1], expected[1])
    for a, b in zip(found[::2], expected[::2], strict=True):
      np.testing.assert_allclose(a, b, atol=1e-12)

  @parameterized.parameters((2, 1), (4, 1), (1, 4))
  def test_frozen_experts(self, *shape):
    check("tiny-moe", "full", *shape, trainable=without_experts)

  def test_thirty_two_devices(self):
    """The number of devices is a process's own: another one is started."""
    call = "check('tiny-glm', 'full', 32, 1, chunk=32)"
    environment = os.environ | {
      "JAX_NUM_CPU_DEVICES": "32",
      "JAX_ENABLE_X64": "1",
    }
    script = f"from tests.sharding_test import check; {call}"
    command = [sys.executable, "-c", script]
    root = pathlib.Path(__file__).parent.parent
    subprocess.run(command, cwd=root, env=environment, check=True)


class MeshTest(parameterized.TestCase):
  def test_every_leaf(self):
    """Several blocks of own queries on a device, of chunks and of members.

    Experts and members are dealt to the devices, too.
    """
    check("tiny-moe", "full", 2, 2, **BLOCKS)

  def test_weights_and_gradients_are_shared_out(self):
    model, params = build("tiny-hybrid")
    mesh = make_mesh(2, 2)
    placed = place_at_rest(params, mesh)
    kernel = placed.trainable["stage_0"]["layer_1"]["mixer"]["q_proj"]["kernel"]
    shard = kernel.addressable_shards[0].data
    self.assertEqual(2 * shard.shape[1], kernel.shape[1])
    _, grads = on_mesh("tiny-moe", "full", 2, 2, **BLOCKS)
    with jax.set_mesh(mesh):
      specs = rest_specs(grads)
    wanted = jax.tree.map(lambda s: jax.NamedSharding(mesh, s), specs)
    for leaf, sharding in zip(
      jax.tree.leaves(grads), jax.tree.leaves(wanted), strict=True
    ):
      self.assertTrue(leaf.sharding.is_equivalent_to(sharding, leaf.ndim))
    self.assert_replicas_equal(grads)

  @pytest.mark.slow
  def test_a_step_and_the_forward_after_it(self):
    """The same weights, on every device to the bit, and the same scores."""
    model, params = build("tiny-hybrid")
    group, optimizer = make_group(ROOM), OptimizerConfig(warmup_steps=0)

    def step(params):
      learner = make_learner(params, optimizer)
      _, grads, _ = group_gradient(
        model, params, PROMPT, group, OBJECTIVE, chunk_size=CHUNK
      )
      learner = jax.jit(functools.partial(apply_gradient, optimizer))(
        learner, grads
      )
      state = capture(model, learner.params, PROMPT, chunk_size=CHUNK)
      args = (learner.params, state, group.responses, group.lengths)
      return learner, replay(model, *args)

    wanted, wanted_scores = step(params)
    mesh = make_mesh(2, 2)
    with jax.set_mesh(mesh):
      learner, scores = step(place_at_rest(params, mesh))
    np.testing.assert_allclose(scores, wanted_scores, rtol=0, atol=1e-9)
    delta = lambda learner: jax.tree.map(
      np.subtract, jax.device_get(learner.params.trainable), params.trainable
    )
    moved, wanted_delta = delta(learner), delta(wanted)
    jax.tree.map(
      # AdamW divides by the gradient's size: noise where that is nothing.
      lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-11),
      moved,
      wanted_delta,
    )
    self.assertGreater(max(abs(x).max() for x in jax.tree.leaves(moved)), 1e-4)
    self.assert_replicas_equal(learner)

  def assert_replicas_equal(self, tree):
    """Devices that hold the same part hold the same bits."""
    for leaf in jax.tree.leaves(tree):
      parts = {}
      for shard in leaf.addressable_shards:
        same = parts.setdefault(str(shard.index), np.asarray(shard.data))
        np.testing.assert_array_equal(np.asarray(shard.data), same)

  def test_pages_are_dealt_chunk_by_chunk(self):
    model, params = build("tiny-hybrid")
    plain = capture(model, params, PROMPT, chunk_size=CHUNK)
    mesh = make_mesh(4)
    with jax.set_mesh(mesh):
      state = capture(
        model, place_at_rest(params, mesh), PROMPT, chunk_size=CHUNK
      )
    self.assertEqual(state.striping, Striping(chunk=CHUNK, shards=4))
    k = state.pages["stage_0"]["layer_1"]["k"]
    whole = np.asarray(plain.pages["stage_0"]["layer_1"]["k"])
    share = CHUNK // 4
    for shard in k.addressable_shards:
      device = shard.index[-2].start // shard.data.shape[-2]
      for chunk in range(shard.data.shape[-2] // share):
        held = np.asarray(shard.data)[..., chunk * share :, :][..., :share, :]
        first = chunk * CHUNK + device * share
        filled = max(0, min(share, LENGTH - 1 - first))
        np.testing.assert_allclose(
          held[..., :filled, :],
          whole[..., first : first + filled, :],
          atol=1e-12,
        )


@pytest.mark.slow
class MistakeTest(absltest.TestCase):
  """What sharded code gets wrong is seen by these comparisons."""

  def gap(self, name, context, member) -> float:
    """Worst leaf error of a gradient that is traced anew."""
    model, params = build(name)
    model = Model(dataclasses.replace(model.config, name="mistaken"))
    mesh = make_mesh(context, member)
    with jax.set_mesh(mesh):
      _, grads, _ = group_gradient(
        model,
        place_at_rest(params, mesh),
        PROMPT,
        make_group(ROOM),
        OBJECTIVE,
        chunk_size=CHUNK,
      )
    _, expected = oracle(name, "full", CHUNK)
    return max(leaf_errors(jax.device_get(grads), expected).values())

  def test_keys_and_values_not_reduced_over_members(self):
    with mock.patch(f"{PAGES}.attend.sum_members", lambda tree: tree):
      self.assertGreater(self.gap("tiny-hybrid", 2, 2), 1e-3)

  def test_top_keys_of_one_device(self):
    place = "longstraw_jax.ops.selection.best_of_owners"
    with mock.patch(place, best_of_all):
      self.assertGreater(self.gap("tiny-glm", 2, 1), 1e-3)


class RefusalTest(parameterized.TestCase):
  def test_a_chunk_that_devices_do_not_divide(self):
    model, params = build("tiny-hybrid")
    with jax.set_mesh(make_mesh(4)):
      with self.assertRaisesRegex(ValueError, "chunk_size=6.*multiple of 4"):
        capture(model, params, PROMPT, chunk_size=6)

  def test_pages_of_another_mesh(self):
    model, params = build("tiny-hybrid")
    group = make_group(ROOM)
    with jax.set_mesh(make_mesh(2)):
      state = capture(model, params, PROMPT, chunk_size=CHUNK)
    with jax.set_mesh(make_mesh(4)):
      with self.assertRaisesRegex(ValueError, "dealt to 2 devices"):
        replay(model, params, state, group.responses, group.lengths)

  @parameterized.parameters((0, 1), (1, 0), (64, 1))
  def test_sizes_of_a_mesh(self, context, member):
    with self.assertRaisesRegex(ValueError, "context=.*|member="):
      make_mesh(context, member)

  def test_without_a_mesh_nothing_is_sharded(self):
    self.assertEqual(num_shards("rows"), 1)
    self.assertIsNone(Striping.of_mesh(7))
