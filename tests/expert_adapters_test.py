"""Adapters in the routed loop against W + A B of all experts on all tokens."""

from absl.testing import absltest, parameterized
import jax
from jax import lax
import jax.numpy as jnp
import numpy as np

from longstraw_jax.nf4 import quantize_nf4
from longstraw_jax.ops.experts import (
  Adapted,
  Shared,
  StackedLayer,
  expert_mlp,
)
from tests import experts_test
from tests.experts_test import (
  D,
  F,
  M,
  arrays,
  dense,
  made_shapes,
  temporaries,
  with_gradients,
)

R = 2  # rank


def adapters(experts, members=(), dtype="float64", seed=5):
  """A and B of gate_up and of down."""
  rng = np.random.default_rng(seed)
  shapes = (D, R), (R, 2 * F), (F, R), (R, D)
  return tuple(
    rng.normal(size=(*members, experts, *shape)).astype(dtype)
    for shape in shapes
  )


def adapted_blocks(row_block, member=None):
  """expert_mlp with adapters, what is differentiable first.

  Args:
    row_block: as in expert_mlp.
    member: the number of a member of one loss.
  """

  def call(x, gate_up, down, weights, a_up, b_up, a_down, b_down, ids):
    both = Adapted(gate_up, a_up, b_up), Adapted(down, a_down, b_down)
    if member is not None:
      both = tuple(Shared(one, member) for one in both)
    return expert_mlp(x, *both, ids, weights, row_block=row_block)

  return call


AXES = (0, None, None, 0, None, None, None, None, 0)  # of members


def shared_blocks(row_block):
  """adapted_blocks of several members of one loss."""
  one = lambda member, *args: adapted_blocks(row_block, member)(*args)
  over = jax.vmap(one, (0, *AXES))
  return lambda x, *args: over(jnp.arange(x.shape[0]), x, *args)


def merged_dense(x, gate_up, down, weights, a_up, b_up, a_down, b_down, ids):
  """The form to test against: W + A B in the place of W."""
  return dense(x, gate_up + a_up @ b_up, down + a_down @ b_down, weights, ids)


class AdaptersTest(parameterized.TestCase):
  assert_close = experts_test.ExpertsTest.assert_close

  @parameterized.parameters(
    (13, 2, 5, 4, "float64"),
    (13, 2, 5, 4, "float32"),
    (12, 3, 7, 64, "float64"),
    (1, 1, 1, 1, "float64"),
  )
  def test_values_and_every_gradient_equal_dense(self, t, a, e, rows, dtype):
    """Of the base, of the adapters, of the tokens and of the weights."""
    operands, ids, dy = arrays(t, a, e, dtype=dtype)
    case = (*operands, *adapters(e, dtype=dtype)), ids, dy
    got = jax.jit(with_gradients(adapted_blocks(rows)))(*case)
    wanted = jax.jit(with_gradients(merged_dense))(*case)
    self.assert_close(got, wanted, dtype)
    idle = set(range(e)) - set(ids.ravel())
    for expert in idle:
      for grad in got[1][4:]:
        np.testing.assert_array_equal(grad[expert], 0)

  def test_one_kind_of_map_alone(self):
    (x, gate_up, down, w), ids, dy = arrays(13, 2, 5)
    a_up, b_up, a_down, b_down = adapters(5)

    def only_down(x, gate_up, down, w, a, b, ids):
      down = Adapted(down, a, b)
      return expert_mlp(x, gate_up, down, ids, w, row_block=4)

    def only_up(x, gate_up, down, w, a, b, ids):
      gate_up = Adapted(gate_up, a, b)
      return expert_mlp(x, gate_up, down, ids, w, row_block=4)

    zero = jnp.zeros_like
    down_dense = lambda x, gu, d, w, a, b, ids: merged_dense(
      x, gu, d, w, zero(a_up), zero(b_up), a, b, ids
    )
    up_dense = lambda x, gu, d, w, a, b, ids: merged_dense(
      x, gu, d, w, a, b, zero(a_down), zero(b_down), ids
    )
    for ours, formula, pair in (
      (only_down, down_dense, (a_down, b_down)),
      (only_up, up_dense, (a_up, b_up)),
    ):
      operands = (x, gate_up, down, w, *pair)
      got, wanted = (
        jax.jit(with_gradients(f))(operands, ids, dy) for f in (ours, formula)
      )
      self.assert_close(got, wanted)

  def test_members_share_adapters(self):
    """One gradient in one buffer where marked, the same sum where not."""
    operands, ids, dy = arrays(7, 2, 4, members=(M,))
    operands = (*operands, *adapters(4))
    members_of = lambda call: with_gradients(jax.vmap(call, AXES))
    wanted = jax.jit(members_of(merged_dense))(operands, ids, dy)
    marked = with_gradients(shared_blocks(4))
    for run in (members_of(adapted_blocks(4)), marked):
      self.assert_close(jax.jit(run)(operands, ids, dy), wanted)
    shapes = made_shapes(marked, operands, ids, dy)
    for x in operands[4:]:
      self.assertIn(x.shape, shapes)
      self.assertNotIn((M, *x.shape), shapes)

  @parameterized.parameters(None, 0)
  def test_every_loss_has_a_gradient_of_its_own(self, axis):
    """jax.vmap of jax.grad, adapters shared or each loss's own."""
    operands, ids, dy = arrays(7, 2, 4, members=(M,))
    members = () if axis is None else (M,)
    operands = (*operands, *adapters(4, members))
    axes = ((0, None, None, 0, *(axis,) * 4), 0, 0)
    got, wanted = (
      jax.jit(jax.vmap(with_gradients(f), axes))(operands, ids, dy)
      for f in (adapted_blocks(4), merged_dense)
    )
    self.assert_close(got, wanted)

  def test_every_loss_over_a_frozen_base(self):
    """What alone learns must not be summed over losses either."""
    (x, gate_up, down, w), ids, dy = arrays(7, 2, 4, members=(M,))
    pairs = adapters(4)

    def gradients(call):
      def one(x, w, ids, dy):
        value = lambda pairs: (
          call(x, gate_up, down, w, *pairs, ids) * dy
        ).sum()
        return jax.grad(value)(pairs)

      return jax.jit(jax.vmap(one))(x, w, ids, dy)

    wanted = gradients(merged_dense)
    self.assert_close(gradients(adapted_blocks(4)), wanted)

  def test_every_loss_of_several_members(self):
    operands, ids, dy = arrays(7, 2, 4, members=(2, M))
    operands = (*operands, *adapters(4))

    def losses(over_members):
      axes = ((0, None, None, 0, None, None, None, None), 0, 0)
      run = jax.vmap(with_gradients(over_members), axes)
      return jax.jit(run)(operands, ids, dy)

    wanted = losses(jax.vmap(merged_dense, AXES))
    self.assert_close(losses(shared_blocks(4)), wanted)
    self.assert_close(losses(jax.vmap(adapted_blocks(4), AXES)), wanted)

  def test_a_frozen_base_costs_neither_product_nor_buffer(self):
    (x, *matrices, w), ids, dy = arrays(7, 2, 9)
    pairs = adapters(9)

    def loss(pairs, x, gate_up, down, w):
      args = x, gate_up, down, w, *pairs, ids
      return (adapted_blocks(4)(*args) * dy).sum()

    args = pairs, x, *matrices, w
    frozen, both = jax.grad(loss), jax.grad(loss, (0, 2, 3))
    shapes = [x.shape for x in matrices]
    self.assertEmpty(set(shapes) & made_shapes(frozen, *args))
    self.assertContainsSubset(shapes, made_shapes(both, *args))
    jax.tree.map(
      np.testing.assert_array_equal,
      jax.jit(frozen)(*args),
      jax.jit(both)(*args)[0],
    )

  @parameterized.parameters((), (M,))
  def test_stored_forms_beneath(self, *members):
    """A layer in the stack of all, in 4 bits too: the bits of an array."""
    (x, gate_up, down, w), ids, dy = arrays(7, 2, 5, members)
    pairs = adapters(5)
    quantize = lambda x: quantize_nf4(jnp.stack([-x, x, 2 * x]))
    layer = lambda stack: StackedLayer(stack, jnp.int32(1))

    def run(gate_up, down):
      def loss(pairs, x, w):
        call = shared_blocks(4) if members else adapted_blocks(4)
        y = call(x, gate_up, down, w, *pairs, ids)
        return (y * dy).sum()

      return jax.jit(jax.value_and_grad(loss, (0, 1, 2)))(pairs, x, w)

    stacks = [quantize(m) for m in (gate_up, down)]
    wanted = run(*(stack.expand()[1] for stack in stacks))
    got = run(*map(layer, stacks))
    jax.tree.map(np.testing.assert_array_equal, got, wanted)

  def test_memory_is_that_of_the_adapters(self):
    """In a scan over checkpointed layers whose base is frozen."""
    layers, tokens, experts, f32 = 3, 16, 512, jnp.float32
    shape = jax.ShapeDtypeStruct
    x, weights = shape((tokens, D), f32), shape((tokens, 2), f32)
    gate_up = shape((layers, experts, D, 2 * F), f32)
    down = shape((layers, experts, F, D), f32)
    pairs = [shape((layers, *x.shape), f32) for x in adapters(experts)]

    def loss(pairs, x, gate_up, down, weights, ids):
      def body(x, inputs):
        index, (a_up, b_up, a_down, b_down) = inputs
        matrices = (StackedLayer(m, index) for m in (gate_up, down))
        args = (x, *matrices, weights, a_up, b_up, a_down, b_down, ids)
        return x + adapted_blocks(8)(*args), None

      inputs = jnp.arange(layers, dtype=jnp.int32), pairs
      return (lax.scan(jax.checkpoint(body), x, inputs)[0] ** 2).sum()

    ids = shape((tokens, 2), jnp.int32)
    args = pairs, x, gate_up, down, weights, ids
    used = temporaries(jax.grad(loss), *args)
    one_layer = sum(4 * x.size // layers for x in pairs)
    self.assertLess(used, 3 * one_layer)

  def test_narrow_products_are_summed_wide(self):
    operands, ids, dy = arrays(2048, 2, 3)
    case = [*operands, *adapters(3)]
    narrow = lambda x: jnp.asarray(np.abs(x) + 1, jnp.bfloat16)
    case = [x if x is case[3] else narrow(x) for x in case]
    case[3], dy = np.abs(operands[3]).astype("float32"), narrow(dy)
    y, grads = jax.jit(with_gradients(adapted_blocks(2)))(case, ids, dy)
    self.assertEqual([x.dtype for x in grads], [x.dtype for x in case])
    wide = lambda tree: jax.tree.map(lambda x: x.astype("float64"), tree)
    exact = jax.jit(with_gradients(merged_dense))(wide(case), ids, wide(dy))
    for got, wanted in zip((y, *grads), (exact[0], *exact[1]), strict=True):
      error = np.linalg.norm(got.astype("float64") - wanted)
      self.assertLess(error, 2**-7 * np.linalg.norm(wanted))


if __name__ == "__main__":
  absltest.main()
