"""Recorded routes of the prompt are followed, and gradients are of them."""

import functools
import pathlib
import tempfile

from absl.testing import parameterized
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from longstraw_jax import (
  Group,
  capture,
  extend,
  group_gradient,
  load_state,
  make_mesh,
  replay_scores,
  save_state,
)
from longstraw_jax.ops.selection import NO_KEY
from longstraw_jax.state import Pages, tree_zeros
from longstraw_jax.testing.baselines import constant_tokens
from longstraw_jax.testing.compare import (
  assert_gradients_close,
  require_equal,
)
from longstraw_jax.types import Span
from tests.choices_test import Weighted, build
from tests.state_files_test import assert_bitwise

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


def cut(tree, first: int, last: int | None):
  """Rows [first, last) of every leaf."""
  return jax.tree.map(lambda x: x[..., first:last, :], tree)


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
      before = cut(forced, 0, bound)
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
      cut(forced, bound, None),
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

  @pytest.mark.slow
  def test_by_jax_grad(self):
    check_gradient("tiny-moe", "tail", composed=True)


class StateTest(parameterized.TestCase):
  def state(self, last=PROMPT_LENGTH, scope="full", rows=None):
    """Of the prompt's first tokens and their recorded choices."""
    model, params, _ = build("tiny-moe")
    if rows is None:
      rows = cut(recorded("tiny-moe")[0], 0, last - 1)
    return capture(
      model,
      params,
      PROMPT[:last],
      chunk_size=CHUNK,
      grad_scope=scope,
      capacity=12,
      choices=rows,
    )

  def extended(self, state, first, last=PROMPT_LENGTH, rows=None):
    if rows is None:
      rows = cut(recorded("tiny-moe")[0], first - 1, last - 1)
    model, params, _ = build("tiny-moe")
    return extend(model, params, state, PROMPT[first:last], choices=rows)

  @parameterized.parameters(6, 9)
  def test_extended(self, first):
    """The state is that of the whole prompt and its choices."""
    found = self.extended(self.state(first), first)
    expected = self.state()
    filled = lambda state: state.replace(
      pages=cut(state.pages, 0, PROMPT_LENGTH - 1)
    )
    require_equal("extend", filled(found), filled(expected), "")
    self.assertEqual(
      expected.choices["stage_0"]["layer_1"]["experts"].shape, (1, 12, 2)
    )
    jax.tree.map(np.testing.assert_array_equal, found.choices, expected.choices)

  def test_a_mixture_is_refused(self):
    state = self.state(6)
    rows = cut(recorded("tiny-moe")[0], 5, PROMPT_LENGTH - 1)
    with self.assertRaisesRegex(ValueError, "recorded .* the new ones of none"):
      self.extended(state, 6, rows={})
    with self.assertRaisesRegex(ValueError, "choices of none, the new ones"):
      self.extended(state.replace(choices=None), 6)
    rows["stage_0"]["layer_0"] = {}
    with self.assertRaisesRegex(ValueError, "recorded choices of .*layer_0"):
      self.extended(state, 6, rows=rows)

  @parameterized.parameters(
    (lambda x: x[:, :9], r"has shape \[1, 9, 2\], wanted is \[1, 10, 2\]"),
    (lambda x: np.pad(x, ((0, 0), (1, 0), (0, 0))), "the prompt's last token"),
    (lambda x: np.pad(x, ((0, 0), (3, 0), (0, 0))), "the group's choices"),
    (lambda x: x + 0.0, "give integers"),
    (lambda x: x + 4, r"\[0, \d, \d\] is \d: ids are 0 to 5"),
    (lambda x: x - 4, r"\[0, \d, \d\] is -\d: ids are 0 to 5"),
    (lambda x: 0 * x, "is 0 a second time"),
  )
  def test_refused(self, change, message):
    rows = jax.tree.map(change, recorded("tiny-moe")[0])
    with self.assertRaisesRegex(ValueError, f"choices.*experts.*{message}"):
      self.state(rows=rows)
    if "last token" not in message and "shape" not in message:
      with self.assertRaisesRegex(ValueError, f"choices.*{message}"):
        self.extended(self.state(1, rows={}), 1, rows=rows)

  def test_padded_like_the_prompt(self):
    model, params, _ = build("tiny-moe")
    rows = cut(recorded("tiny-moe")[0], 0, 5)
    more = lambda n: jax.tree.map(
      lambda x: np.pad(x, ((0, 0), (0, n), (0, 0)), constant_values=-9), rows
    )
    states = [
      capture(
        model,
        params,
        np.pad(PROMPT[:6], (0, 7)),
        chunk_size=CHUNK,
        length=6,
        choices=more(extra),
      )
      for extra in (7, 8)
    ]
    assert_bitwise(*states)
    assert_bitwise(states[0].choices, self.state(6).choices)

  @parameterized.parameters(("full", False), ("response_only", True))
  def test_on_disk(self, scope, some):
    """Saved and loaded to the bit, all of them and one layer's."""
    model, params, _ = build("tiny-moe")
    rows = recorded("tiny-moe")[0]
    if some:
      rows = {"stage_0": {"layer_1": rows["stage_0"]["layer_1"]}}
    state = self.state(scope=scope, rows=rows)
    with tempfile.TemporaryDirectory() as folder:
      path = pathlib.Path(folder) / "prompt.state"
      save_state(path, model, params, state)
      assert_bitwise(load_state(path, model, params), state)
    self.assertLen(jax.tree.leaves(state.choices), 1 if some else 2)


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

  @parameterized.parameters("tiny-moe", "tiny-glm")
  def test_on_a_mesh(self, name):
    with jax.set_mesh(make_mesh(2)):
      check_gradient(name, "full")

  def test_without_a_state(self):
    """group_gradient hands the prompt's choices on to its own capture."""
    rows, _ = recorded("tiny-moe")
    check_gradient("tiny-moe", "full", state=None, prompt_choices=rows)

  def test_of_an_extended_state(self):
    model, params, _ = build("tiny-moe")
    rows, _ = recorded("tiny-moe")
    state = capture(
      *(model, params, PROMPT[:6]),
      chunk_size=CHUNK,
      grad_scope="full",
      choices=cut(rows, 0, 5),
    )
    state = extend(model, params, state, PROMPT[6:], choices=cut(rows, 5, None))
    check_gradient("tiny-moe", "full", state=state)

  def test_several_prompts_at_once(self):
    model, params, _ = build("tiny-moe")
    rows, _ = recorded("tiny-moe")
    prompts = np.stack([PROMPT, PROMPT[::-1]])
    both = jax.tree.map(lambda x: np.stack([x, x[:, ::-1]]), rows)
    call = lambda prompt, choices: capture(
      model, params, prompt, chunk_size=CHUNK, choices=choices
    )
    states = jax.vmap(call)(prompts, both)
    for i in range(2):
      at = lambda tree, i=i: jax.tree.map(lambda x: x[i], tree)
      alone = call(prompts[i], at(both))
      require_equal("capture", at(states), alone, "")
