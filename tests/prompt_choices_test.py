"""Recorded routes of the prompt are followed, and gradients are of them."""

import functools

from absl.testing import parameterized
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from longstraw_jax import (
  Group,
  capture,
  group_gradient,
  replay_scores,
)
from longstraw_jax.ops.selection import NO_KEY
from longstraw_jax.state import Pages, tree_zeros
from longstraw_jax.testing.baselines import constant_tokens
from longstraw_jax.testing.compare import assert_gradients_close
from longstraw_jax.types import Span
from tests.choices_test import Weighted, build

CHUNK, PROMPT_LENGTH, ROOM, MEMBERS, TAIL = 4, 11, 3, 2, 1
PROMPT = np.random.default_rng(5).integers(0, 61, PROMPT_LENGTH)
RESPONSES = np.random.default_rng(6).integers(0, 61, (MEMBERS, ROOM))


def drawn_choices(name: str, first: int, last: int, seed: int, lead=()):
  """Random choices of the tokens at [first, last), [*lead, L, T, A] each."""
  random = np.random.default_rng(seed)

  def draw(kind, repeats):
    out = np.full((*lead, repeats, last - first, kind.number), NO_KEY, np.int32)
    for at in np.ndindex(out.shape[:-1]):
      limit = kind.ids or first + at[-1] + 1
      ids = random.permutation(limit)[: kind.number]
      out[at][: len(ids)] = ids
    return out

  return {
    stage: {
      layer: {name: draw(*known) for name, known in names.items()}
      for layer, names in layers.items()
    }
    for stage, layers in build(name)[0].declared_choices().items()
  }


@functools.cache
def recorded(name: str):
  """Choices of the captured tokens, and a group with its own."""
  captured = PROMPT_LENGTH - 1
  group = Group.create(
    RESPONSES,
    [ROOM] * MEMBERS,
    rewards=jnp.ones(MEMBERS),
    advantages=jnp.ones(MEMBERS),
    choices=drawn_choices(name, captured, captured + ROOM, 8, (MEMBERS,)),
  )
  return drawn_choices(name, 0, captured, 7), group


def captured_state(name, params, scope, **options):
  return capture(
    build(name)[0],
    params,
    PROMPT,
    grad_scope=scope,
    tail_chunks=TAIL if scope == "tail" else None,
    **{"chunk_size": CHUNK, "choices": recorded(name)[0]} | options,
  )


def conventional(name: str, scope: str):
  """Loss and gradient by plain jax.grad, every token's choices forced."""
  model, params, _ = build(name)
  prompt, group = recorded(name)
  bound = constant_tokens(scope, PROMPT_LENGTH, CHUNK, TAIL)
  cut = lambda tree, part: jax.tree.map(lambda x: x[..., part, :], tree)

  def span(first, last):
    positions = jnp.arange(first, last, dtype=jnp.int32)
    return Span(positions=positions, length=jnp.int32(last - first))

  def member(params, response, choices):
    row = jnp.concatenate([PROMPT, response])
    forced = jax.tree.map(
      lambda a, b: jnp.concatenate([a, b], -2), prompt, choices
    )
    carry, segments = tree_zeros(model.state_shapes(1)[1]), ()
    if bound:
      stopped = jax.lax.stop_gradient(params)
      before = cut(forced, slice(0, bound))
      out = model.hidden(
        stopped, row[:bound], span(0, bound), (), carry, before
      )
      carry = out.carry
      segments = (Pages(out.rows, None, jnp.int32(bound), jnp.int32(0)),)
    out = model.hidden(
      params,
      row[bound:-1],
      span(bound, len(row) - 1),
      segments,
      carry,
      cut(forced, slice(bound, None)),
    )
    scores = model.logprobs(params, out.x_TD, row[bound + 1 :])
    return jax.tree.map(lambda x: x[-ROOM:], scores)

  @jax.jit
  @jax.value_and_grad
  def loss(trainable):
    tree = params.replace(trainable=trainable)
    scores = [
      member(tree, response, jax.tree.map(lambda x, i=i: x[i], group.choices))
      for i, response in enumerate(RESPONSES)
    ]
    scores = jax.tree.map(lambda *x: jnp.stack(x), *scores)
    return Weighted()(*scores, group)[0]

  return loss(params.trainable)


def check_gradient(name, scope, composed=False, **options):
  """One group's loss and gradient are those of the conventional pass."""
  model, params, _ = build(name)
  _, group = recorded(name)
  if composed:

    @jax.value_and_grad
    def through(trainable):
      tree = params.replace(trainable=trainable)
      state = captured_state(name, tree, scope)
      scores = replay_scores(
        *(model, tree, state, group.responses, group.lengths),
        choices=group.choices,
      )
      return Weighted()(*scores, group)[0]

    loss, grads = through(params.trainable)
  else:
    loss, grads, _ = group_gradient(
      model,
      params,
      PROMPT,
      group,
      Weighted(),
      chunk_size=CHUNK,
      grad_scope=scope,
      **{"state": captured_state(name, params, scope)} | options,
    )
  wanted, expected = conventional(name, scope)
  np.testing.assert_allclose(loss, wanted, 1e-12)
  assert_gradients_close(grads, expected, 1e-12)


class GradientTest(parameterized.TestCase):
  def test_equals_a_conventional_pass(self):
    check_gradient("tiny-moe", "full")

  def test_by_jax_grad(self):
    check_gradient("tiny-moe", "tail", composed=True)


@pytest.mark.slow
class MoreGradientTest(parameterized.TestCase):
  @parameterized.parameters("tail", "response_only")
  def test_equals_a_conventional_pass(self, scope):
    check_gradient("tiny-moe", scope)

  @parameterized.parameters(
    ("tiny-moe", "full"), ("tiny-moe", "response_only"), ("tiny-glm", "full")
  )
  def test_by_jax_grad(self, name, scope):
    check_gradient(name, scope, composed=True)

  @parameterized.parameters("full", "tail")
  def test_keys_and_experts(self, scope):
    check_gradient("tiny-glm", scope, members_at_once=2, block_size=2)
