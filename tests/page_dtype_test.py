"""Pages stored narrower than they are computed with: exact but for rounding."""

from absl.testing import parameterized
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from longstraw_jax import (
  Group,
  capture,
  group_gradient,
  make_mesh,
  place_at_rest,
  replay,
)
from longstraw_jax.config import PAGE_DTYPES
from longstraw_jax.objectives import LikelihoodObjective
from longstraw_jax.ops.pages.stored import ScaledRows, expand, store
from longstraw_jax.replay import branch_job, prompt_pages, zero_sums
from longstraw_jax.testing.compare import assert_gradients_close
from longstraw_jax.walk import walk_backward, walk_forward
from tests.small_models import build, make_prompt

PROMPT = make_prompt(41)
RESPONSES = np.random.default_rng(1).integers(0, 61, (2, 4))
# Errors of the whole gradient, about twice what was measured.
GAPS = {
  "bfloat16": 1e-3,
  "float8_e4m3fn": 2.5e-2,
  "float8_e5m2": 2.5e-2,
  "int8": 2e-3,
}


PARAMS = build("tiny-hybrid")[1]


def model_of(page_dtype: str | None):
  return build("tiny-hybrid", page_dtype=page_dtype)[0]


def gradient(model, params=PARAMS, **options):
  group = Group.create(RESPONSES, [4, 3], rewards=[1, 0], advantages=[1, -1])
  return group_gradient(
    model,
    params,
    PROMPT,
    group,
    LikelihoodObjective(),
    chunk_size=8,
    **options,
  )[1]


def gap(found, wanted) -> float:
  square = lambda tree: sum((x**2).sum() for x in jax.tree.leaves(tree))
  return float(
    jnp.sqrt(square(jax.tree.map(jnp.subtract, found, wanted)) / square(wanted))
  )


class StoreTest(parameterized.TestCase):
  @parameterized.parameters(1.0, 1e-3, 0.0)
  def test_int8_rounds_to_half_a_step_of_its_row(self, scale):
    rows = scale * np.random.default_rng(2).normal(size=(3, 5, 16))
    rows = rows * 10.0 ** np.arange(5)[:, None]  # every row has its own scale
    buffer = ScaledRows(
      jnp.zeros(rows.shape, jnp.int8), jnp.zeros((3, 5, 1), jnp.float32)
    )
    found = expand(store({"k": rows}, {"k": buffer})["k"], "float64")
    step = np.abs(rows).max(-1, keepdims=True) / 127
    self.assertLessEqual(float((abs(found - rows) - 0.51 * step).max()), 1e-9)


class WidthTest(parameterized.TestCase):
  def test_page_gradients_of_narrow_models_are_wide(self):
    """What 40 chunks add to a row must not be rounded 40 times."""
    model, params = build("tiny-hybrid", "bfloat16")
    asked, default, narrow = (
      gradient(model, params, page_grad_dtype=dtype)
      for dtype in ("float32", None, "bfloat16")
    )
    jax.tree.map(np.testing.assert_array_equal, default, asked)
    self.assertGreater(gap(narrow, asked), 1e-4)

  @parameterized.parameters("bfloat16", "float32", "float64")
  def test_every_sum_of_a_walk_is_wide(self, dtype):
    """Of the parameters, of prior pages and of a member's own rows."""
    model, params = build("tiny-hybrid", dtype)
    group = Group.create(RESPONSES, [4, 3])

    def sums(params):
      state = capture(model, params, PROMPT, chunk_size=8, grad_scope="full")
      totals = zero_sums(model, params, state)
      job = branch_job(state, group.responses[0], group.lengths[0], None, 2)
      priors, carry = prompt_pages(state, None), state.carry
      walked = walk_forward(
        model, params, priors, carry, job, save_carries=True
      )
      rows, saved = walked.rows, walked.saved_carries
      dscores = walked.logprobs, walked.entropy
      return walk_backward(
        model, params, priors, job, rows, saved, dscores, None, totals
      )

    totals, own = jax.eval_shape(sums, params)
    for leaf in jax.tree.leaves((totals.params, totals.priors, own)):
      self.assertEqual(leaf.dtype, jnp.promote_types(dtype, "float32"))


class PageDtypeTest(parameterized.TestCase):
  @parameterized.parameters(*PAGE_DTYPES)
  def test_state_bytes(self, page_dtype):
    rows, _ = model_of(page_dtype).state_shapes(64)
    leaves = jax.tree.leaves(rows)
    size = sum(x.size * x.dtype.itemsize for x in leaves)
    values = sum(x.size for x in leaves if x.shape[-1] > 1)
    scales = sum(4 * x.size for x in leaves if x.shape[-1] == 1)
    item = 1 if page_dtype == "int8" else jnp.dtype(page_dtype).itemsize
    self.assertEqual(size, item * values + scales)

  def test_gradient_is_near_that_over_whole_pages(self):
    self.check_gradient("int8")

  @parameterized.parameters(*(x for x in PAGE_DTYPES if x != "int8"))
  @pytest.mark.slow
  def test_other_dtypes(self, page_dtype):
    self.check_gradient(page_dtype)

  def check_gradient(self, page_dtype):
    found = gradient(model_of(page_dtype))
    error = gap(found, gradient(model_of(None)))
    print(f"\n{page_dtype}: {error:.1e} of the gradient")
    self.assertLess(error, GAPS[page_dtype])
    self.assertGreater(error, 1e-6)  # something was rounded

  @pytest.mark.slow
  def test_the_same_on_a_mesh(self):
    model, mesh = model_of("int8"), make_mesh(2)
    with jax.set_mesh(mesh):
      found = gradient(model, place_at_rest(PARAMS, mesh))
    assert_gradients_close(jax.device_get(found), gradient(model), 1e-12)

  def test_the_gradient_is_that_of_rounding_passed_by(self):
    """Plain autodiff of replay over a state that was rounded, state fixed."""
    model = model_of("int8")
    whole = model_of(None)

    def loss(trainable):
      params = PARAMS.replace(trainable=trainable)
      state = capture(model, PARAMS, PROMPT, chunk_size=8)
      pages = jax.tree.map(
        lambda x: expand(x, "float64"),
        state.pages,
        is_leaf=lambda x: isinstance(x, ScaledRows),
      )
      state = state.replace(pages=pages)
      scores = replay(whole, params, state, RESPONSES, jnp.array([4, 3]))
      return -scores.sum() / len(RESPONSES)

    expected = jax.grad(loss)(PARAMS.trainable)
    found = gradient(model, grad_scope="response_only")
    assert_gradients_close(found, expected, 1e-12)

  def test_the_composed_form_is_refused(self):
    model = model_of("int8")

    def loss(trainable):
      params = PARAMS.replace(trainable=trainable)
      state = capture(model, params, PROMPT, chunk_size=8, grad_scope="full")
      return replay(model, params, state, RESPONSES, jnp.array([4, 3])).sum()

    with self.assertRaisesRegex(ValueError, "int8.*group_gradient"):
      jax.grad(loss)(PARAMS.trainable)

  def test_an_unknown_dtype(self):
    with self.assertRaisesRegex(ValueError, "page_dtype.*int4"):
      model_of("int4")
