"""A state that goes on equals the state of the whole prompt."""

import dataclasses
import functools

from absl.testing import absltest, parameterized
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from longstraw_jax import (
  PRESETS,
  Group,
  LoraConfig,
  Model,
  PolicyObjective,
  Stage,
  add_lora,
  capture,
  extend,
  group_gradient,
  make_mesh,
  replay,
)
from longstraw_jax.ops.pages import Striping
from longstraw_jax.presets import DELTA
from longstraw_jax.testing.baselines import bounded_gradient, constant_tokens
from longstraw_jax.testing.compare import (
  assert_gradients_close,
  require_equal,
  require_shapes,
)

CHUNK, CAPACITY, BUCKET = 16, 64, 60
PROMPT = np.random.default_rng(0).integers(0, 61, 90).astype(np.int32)
TAIL = 2
OBJECTIVE = PolicyObjective(kl_coef=0.1, entropy_coef=0.05, clip_low=0.9)

# Tokens of the prompt and of the longer one; a chunk's border is at 1 + 16 n.
LENGTHS = (
  (1, 2),  # nothing captured yet
  (1, 40),
  (17, 33),  # from border to border
  (17, 18),
  (20, 30),  # inside a chunk
  (20, 33),  # up to a border
  (21, 62),  # over borders
  (56, 65),  # inside the last chunk: a whole chunk does not fit behind it
)


@functools.cache
def build(name: str):
  """Two layers in float64, parameters away from their first values."""
  config = dataclasses.replace(
    PRESETS[name],
    dtype="float64",
    param_dtype="float64",
    norm_eps=1e-3,
    stages=(dataclasses.replace(PRESETS[name].stages[-1], repeats=1),),
  )
  model, random = Model(config), np.random.default_rng(1)
  params = jax.tree.map(
    lambda x: x + 0.1 * random.normal(size=x.shape),
    jax.jit(model.init)(jax.random.key(0)),
  )
  return model, params


@functools.cache
def adapted():
  """Adapters on the hybrid, B away from zero."""
  model, params = build("tiny-hybrid")
  config = LoraConfig(rank=2, targets=("in_proj_qkv", "q_proj", "down_proj"))
  params = add_lora(model, params, jax.random.key(2), config)
  random = np.random.default_rng(3)
  moved = lambda x: x + 0.1 * random.normal(size=x.shape)
  return params.replace(trainable=jax.tree.map(moved, params.trainable))


def scoped(name: str, scope: str):
  """Model, parameters and tail_chunks of a scope."""
  model, params = build(name)
  params = adapted() if scope == "prefix_frozen" else params
  return model, params, TAIL if scope == "tail" else None


def captured(name: str, scope: str, length: int, **options):
  model, params, tail_chunks = scoped(name, scope)
  return capture(
    model,
    params,
    PROMPT,
    length=length,
    grad_scope=scope,
    tail_chunks=tail_chunks,
    **{"chunk_size": CHUNK, "capacity": CAPACITY} | options,
  )


def extended(name: str, state, first: int, last: int, **options):
  """`state` of PROMPT[:first] gone on with to PROMPT[:last]."""
  model, params, tail_chunks = scoped(name, state.grad_scope)
  tokens = np.full(BUCKET, 7, np.int32)  # what is behind counts for nothing
  tokens[: last - first] = PROMPT[first:last]
  return extend(
    model,
    params,
    state,
    tokens,
    length=last - first,
    tail_chunks=tail_chunks,
    **options,
  )


def assert_same_state(state, expected, what: str = "") -> None:
  """All that is filled, to rounding; sizes, stamps and scope exactly."""
  filled = int(expected.length)
  cut = lambda state: state.replace(
    pages=jax.tree.map(lambda x: x[..., :filled, :], state.pages)
  )
  require_shapes("extend", state, expected, what)
  require_equal("extend", cut(state), cut(expected), what)


def make_group() -> Group:
  random = np.random.default_rng(2)
  near = lambda: jnp.asarray(-4 + random.normal(size=(3, 5)))
  return Group.create(
    random.integers(0, 61, (3, 5)),
    [5, 3, 1],
    rewards=jnp.ones(3),
    advantages=jnp.array([1.0, -0.7, 0.4]),
    old_logprobs=near(),
    ref_logprobs=near(),
    sampling_logprobs=near(),
  )


class StateTest(parameterized.TestCase):
  @parameterized.parameters(
    ("tiny-hybrid", "response_only"),
    ("tiny-hybrid", "full"),
    ("tiny-hybrid", "tail"),
    ("tiny-glm", "response_only"),
    ("tiny-glm", "full"),
  )
  def test_equals_a_fresh_capture(self, name, scope):
    for first, last in LENGTHS:
      state = extended(name, captured(name, scope, first), first, last)
      expected = captured(name, scope, last)
      assert_same_state(state, expected, f"{first} to {last}: ")

  def test_adapters_are_off_under_prefix_frozen(self):
    state = captured("tiny-hybrid", "prefix_frozen", 20)
    state = extended("tiny-hybrid", state, 20, 40, step=9)
    expected = captured("tiny-hybrid", "prefix_frozen", 40)
    assert_same_state(state, expected)

  def test_growth_in_many_steps(self):
    """Known fault 1 of chunks: every split equals one pass."""
    state = captured("tiny-hybrid", "full", 1)
    for first in range(1, 60, 7):
      state = extended("tiny-hybrid", state, first, first + 7)
    assert_same_state(state, captured("tiny-hybrid", "full", 64))

  def test_the_given_state_stays(self):
    state = captured("tiny-hybrid", "full", 20)
    before = jax.tree.map(np.array, state)
    extended("tiny-hybrid", state, 20, 50)
    jax.tree.map(np.testing.assert_array_equal, state, before)

  def test_one_trace_serves_every_length(self):
    model, params, _ = scoped("tiny-hybrid", "full")
    traces = []

    @jax.jit
    def call(state, tokens, length):
      traces.append(length)
      return extend(
        model, params, state, tokens, length=length, capacity=CAPACITY
      )

    for first, last in LENGTHS:
      tokens = np.pad(PROMPT[first:last], (0, BUCKET - last + first))
      state = captured("tiny-hybrid", "full", first)
      state = call(state, tokens, jnp.int32(last - first))
      assert_same_state(state, captured("tiny-hybrid", "full", last))
    self.assertLen(traces, 1)

  def test_under_vmap_over_prompts(self):
    model, params, _ = scoped("tiny-hybrid", "full")
    pairs = ((17, 40), (20, 33))
    states = [captured("tiny-hybrid", "full", first) for first, _ in pairs]
    states = jax.tree.map(lambda *x: jnp.stack(x), *states)
    tokens = np.stack([PROMPT[first : first + 23] for first, _ in pairs])
    call = lambda state, tokens, length: extend(
      model, params, state, tokens, length=length, capacity=CAPACITY
    )
    lengths = jnp.array([last - first for first, last in pairs])
    found = jax.vmap(call)(states, tokens, lengths)
    for i, (_, last) in enumerate(pairs):
      one = jax.tree.map(lambda x, i=i: x[i], found)
      assert_same_state(one, captured("tiny-hybrid", "full", last))


class RoomTest(parameterized.TestCase):
  @parameterized.parameters(
    (None, 64), (64, 64), (65, 80), (20, None), (39, 48), (79, 80)
  )
  def test_capacity(self, capacity, room):
    """39 tokens are captured in the end; room for 32 was there."""
    state = captured("tiny-hybrid", "full", 20, capacity=32)
    call = functools.partial(extended, "tiny-hybrid", state, 20, 40)
    if room is None:
      with self.assertRaisesRegex(ValueError, "need a capacity of 39, which"):
        call(capacity=capacity)
      return
    room = 48 if capacity is None else room
    state = call(capacity=capacity)
    self.assertEqual(state.capacity, room)
    expected = captured("tiny-hybrid", "full", 40, capacity=room)
    assert_same_state(state, expected)

  def test_room_stays_where_it_suffices(self):
    state = captured("tiny-hybrid", "response_only", 20)
    for capacity in (None, 40):
      state = extended("tiny-hybrid", state, 20, 30, capacity=capacity)
      self.assertEqual(state.capacity, CAPACITY)
      state = captured("tiny-hybrid", "response_only", 20)

  def test_room_under_jit_is_enough_for_every_length(self):
    model, params, _ = scoped("tiny-hybrid", "response_only")
    state = captured("tiny-hybrid", "response_only", 60)
    tokens = PROMPT[60:90]
    state = jax.jit(lambda state: extend(model, params, state, tokens))(state)
    self.assertEqual(state.capacity, 96)  # 64 + 30 in chunks of 16
    expected = captured("tiny-hybrid", "response_only", 90, capacity=96)
    assert_same_state(state, expected)

  @parameterized.parameters("full", "response_only")
  def test_a_chunk_cut_down_to_a_short_prompt_grows_again(self, scope):
    state = captured("tiny-hybrid", scope, 10, capacity=None)
    model, params, _ = scoped("tiny-hybrid", scope)
    state = capture(
      model, params, PROMPT[:10], chunk_size=CHUNK, grad_scope=scope
    )
    self.assertEqual(state.chunk_size, 9)
    grown = extended("tiny-hybrid", state, 10, 50, chunk_size=CHUNK)
    expected = captured("tiny-hybrid", scope, 50, capacity=49)
    assert_same_state(grown, expected)
    kept = extended("tiny-hybrid", state, 10, 50)
    self.assertEqual(kept.chunk_size, 9)
    for wrong in (8, 0):
      with self.assertRaisesRegex(ValueError, f"chunk_size is {wrong}"):
        extended("tiny-hybrid", state, 10, 50, chunk_size=wrong)
    with self.assertRaisesRegex(ValueError, "state has chunks of 16"):
      extended("tiny-hybrid", grown, 50, 51, chunk_size=32)

  def test_a_model_without_rows(self):
    config = dataclasses.replace(
      build("tiny-hybrid")[0].config,
      stages=(Stage(pattern=(DELTA,), repeats=1),),
    )
    model = Model(config)
    params = jax.jit(model.init)(jax.random.key(0))
    for scope in ("response_only", "full"):
      options = {"chunk_size": CHUNK, "grad_scope": scope}
      state = capture(model, params, PROMPT[:20], **options)
      state = extend(model, params, state, PROMPT[20:60])
      expected = capture(model, params, PROMPT[:60], **options)
      require_equal("extend", state, expected, scope)
    state = capture(model, params, PROMPT[:20], chunk_size=CHUNK)
    call = jax.jit(lambda state: extend(model, params, state, PROMPT[20:40]))
    with self.assertRaisesRegex(ValueError, "give a capacity"):
      call(state)


def check_gradient(name: str, scope: str) -> None:
  """Against a fresh capture and jax.grad; two extensions end inside chunks."""
  length, group = 60, make_group()
  model, params, tail_chunks = scoped(name, scope)
  state = captured(name, scope, 20)
  state = extended(name, state, 20, 40)
  state = extended(name, state, 40, length)
  call = lambda state: group_gradient(
    model,
    params,
    PROMPT[:length],
    group,
    OBJECTIVE,
    chunk_size=CHUNK,
    grad_scope=scope,
    state=state,
    step=0,
  )[:2]
  loss, grads = call(state)
  fresh_loss, fresh = call(captured(name, scope, length))
  np.testing.assert_allclose(loss, fresh_loss, 1e-12)
  assert_gradients_close(grads, fresh, 1e-12, "against a fresh capture")
  for path, leaf in jax.tree_util.tree_leaves_with_path(grads):
    assert jnp.abs(leaf).max() > 0, jax.tree_util.keystr(path)
  boundary = constant_tokens(scope, length, CHUNK, tail_chunks)
  wanted_loss, wanted, _ = bounded_gradient(
    model,
    params,
    PROMPT,
    group,
    OBJECTIVE,
    jnp.int32(length),
    jnp.int32(boundary),
  )
  np.testing.assert_allclose(loss, wanted_loss, 1e-12)
  assert_gradients_close(grads, wanted, 1e-12, "against plain autodiff")


@pytest.mark.slow
class IndexedGradientTest(parameterized.TestCase):
  @parameterized.parameters("full", "tail", "response_only")
  def test_equals_a_fresh_capture_and_plain_autodiff(self, scope):
    check_gradient("tiny-glm", scope)


class MeshTest(parameterized.TestCase):
  def test_pages_that_devices_share(self):
    """Chunks filled up over the borders between devices, and room grown."""
    model, params, _ = scoped("tiny-hybrid", "full")
    with jax.set_mesh(make_mesh(4)):
      state = captured("tiny-hybrid", "full", 22, capacity=32)
      state = extended("tiny-hybrid", state, 22, 28)
      state = extended("tiny-hybrid", state, 28, 60)
    self.assertEqual(state.striping, Striping(chunk=CHUNK, shards=4))
    shard = state.pages["stage_0"]["layer_1"]["k"].addressable_shards[0].data
    self.assertEqual(shard.shape[-2], 64 // 4)
    rows = jax.tree.map(state.striping.collect, jax.device_get(state.pages))
    state = jax.device_get(state).replace(pages=rows, striping=None)
    assert_same_state(state, captured("tiny-hybrid", "full", 60))

  def test_another_mesh_is_refused(self):
    model, params, _ = scoped("tiny-hybrid", "full")
    state = captured("tiny-hybrid", "full", 20)
    with jax.set_mesh(make_mesh(4)):
      with self.assertRaisesRegex(ValueError, "dealt as None, this mesh"):
        extended("tiny-hybrid", state, 20, 30)


class GradientTest(parameterized.TestCase):
  @parameterized.parameters("full", "tail", "response_only")
  def test_equals_a_fresh_capture_and_plain_autodiff(self, scope):
    check_gradient("tiny-hybrid", scope)

  def _gradient_through(self, scope: str):
    """jax.grad through extend, and through a capture of the whole prompt."""
    model, params, _ = scoped("tiny-hybrid", scope)
    options = {"chunk_size": CHUNK, "grad_scope": scope, "capacity": CAPACITY}
    group = make_group()

    def loss(make, trainable):
      tree = params.replace(trainable=trainable)
      state = make(tree)
      logprobs = replay(model, tree, state, group.responses, group.lengths)
      kept = jax.tree.leaves((state.pages, state.carry))
      return jnp.tanh(logprobs).sum() + sum(x.sum() for x in kept)

    def in_parts(tree):
      state = capture(model, tree, PROMPT[:20], **options)
      return extend(model, tree, state, PROMPT[20:40])

    whole = lambda tree: capture(model, tree, PROMPT[:40], **options)
    gradient = lambda make: jax.grad(functools.partial(loss, make))
    return gradient(in_parts)(params.trainable), lambda: gradient(whole)(
      params.trainable
    )

  def test_jax_grad_takes_the_state_as_a_constant(self):
    found, expected = self._gradient_through("response_only")
    assert_gradients_close(found, expected(), 1e-12)

  def test_jax_grad_through_a_differentiated_state_is_refused(self):
    with self.assertRaisesRegex(ValueError, "not differentiated under .*full"):
      self._gradient_through("full")


class RefusalTest(parameterized.TestCase):
  @parameterized.parameters(
    (np.zeros(0, np.int32), {}, r"tokens has shape \(0,\)"),
    (np.zeros((1, 2), np.int32), {}, r"tokens has shape \(1, 2\)"),
    ([1, 61], {}, r"tokens\[1\] is 61, outside the vocabulary"),
    ([1, 2], {"length": 0}, "length is 0 but tokens holds 2"),
    ([1, 2], {"length": 3}, "length is 3 but tokens holds 2"),
    ([1, 2], {"capacity": 0}, "capacity is 0"),
    ([1, 2], {"tail_chunks": 1}, "tail_chunks is 1"),
    ([1, 2], {"step": 4}, "weights of step 3, these are of step 4"),
    ([1, 2], {"step": 0}, "weights of step 3, these are of step 0"),
    ([1, 2], {"step": 4, "allow_stale": True}, "weights of step 3"),
  )
  def test_refused(self, tokens, options, message):
    model, params = build("tiny-hybrid")
    state = captured("tiny-hybrid", "full", 20, step=3)
    with self.assertRaisesRegex(ValueError, message):
      extend(model, params, state, np.asarray(tokens), **{"step": 3} | options)

  def test_tail_needs_its_number_of_chunks(self):
    model, params = build("tiny-hybrid")
    state = captured("tiny-hybrid", "tail", 20)
    with self.assertRaisesRegex(ValueError, "tail_chunks is None"):
      extend(model, params, state, PROMPT[20:30])

  def test_a_batch_of_states(self):
    model, params = build("tiny-hybrid")
    state = captured("tiny-hybrid", "full", 20)
    states = jax.tree.map(lambda x: x[None], state)
    with self.assertRaisesRegex(ValueError, r"batch axis, \[1\]"):
      extend(model, params, states, PROMPT[20:30])

  def test_a_stale_constant_state_where_allowed(self):
    """It keeps the step of its oldest weights."""
    state = captured("tiny-hybrid", "response_only", 20, step=3)
    with self.assertRaisesRegex(ValueError, "weights of step 3"):
      extended("tiny-hybrid", state, 20, 30, step=4)
    longer = extended(
      "tiny-hybrid", state, 20, 30, step=4, allow_stale=True, prompt_id=5
    )
    self.assertEqual(int(longer.step), 3)
    self.assertEqual(int(longer.prompt_id), 5)
    self.assertEqual(int(state.prompt_id), -1)  # unknown


if __name__ == "__main__":
  absltest.main()
