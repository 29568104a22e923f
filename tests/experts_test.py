"""Experts in sorted row blocks against all experts on all tokens."""

import functools

from absl.testing import absltest, parameterized
import jax
from jax import lax
import jax.numpy as jnp
import numpy as np

from longstraw_jax.ops.experts import (
  Shared,
  StackedLayer,
  dense_expert_mlp,
  expert_mlp,
)
from longstraw_jax.ops.rowwise import rowwise_product

TOLERANCE = {"float64": 1e-12, "float32": 1e-5}

D, F = 6, 5
M = 3  # members


def arrays(tokens, choices, experts, members=(), dtype="float64", seed=0):
  """(x, gate_up, down, weights), ids distinct within a token, and dy."""
  rng = np.random.default_rng(seed)
  normal = lambda *shape: rng.normal(size=shape).astype(dtype)
  ids = np.argsort(rng.random((*members, tokens, experts)), axis=-1)
  operands = (
    normal(*members, tokens, D),
    normal(experts, D, 2 * F),
    normal(experts, F, D),
    normal(*members, tokens, choices),
  )
  dy = normal(*members, tokens, D)
  return operands, ids[..., :choices].astype("int32"), dy


def blocks(row_block):
  """expert_mlp with its differentiable arguments first."""

  def call(x, gate_up, down, weights, ids):
    return expert_mlp(x, gate_up, down, ids, weights, row_block=row_block)

  return call


def shared_blocks(row_block):
  """blocks of several members of one loss."""

  def call(member, x, gate_up, down, weights, ids):
    matrices = Shared(gate_up, member), Shared(down, member)
    return blocks(row_block)(x, *matrices, weights, ids)

  def over_members(x, gate_up, down, weights, ids):
    axes = (0, 0, None, None, 0, 0)
    return jax.vmap(call, axes)(
      jnp.arange(x.shape[0]), x, gate_up, down, weights, ids
    )

  return over_members


def dense(x, gate_up, down, weights, ids):
  return dense_expert_mlp(x, gate_up, down, ids, weights)


def with_gradients(call):
  """(operands, ids, dy) -> value and gradients of all four operands."""

  def run(operands, ids, dy):
    y, pull_back = jax.vjp(lambda *args: call(*args, ids), *operands)
    return y, pull_back(dy)

  return run


def equations(function, *args):
  """Everything a function computes, loops and calls included."""

  def walk(jaxpr):
    for eqn in jaxpr.eqns:
      yield eqn
      for x in jax.tree.leaves(eqn.params, is_leaf=is_jaxpr):
        if is_jaxpr(x):
          yield from walk(getattr(x, "jaxpr", x))

  is_jaxpr = lambda x: hasattr(x, "eqns")
  return list(walk(jax.make_jaxpr(function)(*args).jaxpr))


def made_shapes(function, *args):
  """Shapes of all that a function computes."""
  eqns = equations(function, *args)
  return {v.aval.shape for eqn in eqns for v in eqn.outvars}


def temporaries(function, *args):
  """Bytes beyond arguments and results."""
  compiled = jax.jit(function).lower(*args).compile()
  return compiled.memory_analysis().temp_size_in_bytes


class ExpertsTest(parameterized.TestCase):
  def assert_close(self, got, wanted, dtype="float64"):
    def check(a, b):
      self.assertEqual((a.shape, a.dtype), (b.shape, b.dtype))
      limit = TOLERANCE[dtype] * max(1.0, np.abs(b).max(initial=0.0))
      np.testing.assert_allclose(a, b, rtol=0, atol=limit)

    jax.tree.map(check, got, wanted)

  @parameterized.parameters(
    # tokens, choices, experts, row block
    (13, 2, 5, 4, "float64"),
    (13, 2, 5, 4, "float32"),
    (12, 3, 7, 64, "float64"),
    (9, 1, 6, 2, "float64"),
    (8, 4, 4, 1, "float64"),
    (1, 2, 3, 4, "float64"),
    (1, 1, 1, 1, "float64"),
  )
  def test_values_and_gradients_equal_dense(self, t, a, e, row_block, dtype):
    case = arrays(t, a, e, dtype=dtype)
    got = jax.jit(with_gradients(blocks(row_block)))(*case)
    self.assert_close(got, jax.jit(with_gradients(dense))(*case), dtype)

  def test_any_routing_in_one_program(self):
    operands, ids, dy = arrays(13, 2, 5)
    run = jax.jit(with_gradients(blocks(4)))
    wanted = jax.jit(with_gradients(dense))
    for routing in (ids, ids * 0 + [3, 1], ids * 0 + [0, 4], ids[:, ::-1]):
      routing = routing.astype("int32")
      y, grads = run(operands, routing, dy)
      self.assert_close((y, grads), wanted(operands, routing, dy))
      for expert in set(range(5)) - set(routing.ravel()):
        np.testing.assert_array_equal(grads[1][expert], 0)
        np.testing.assert_array_equal(grads[2][expert], 0)
    self.assertEqual(run._cache_size(), 1)

  @parameterized.parameters("scan", "map", "vmap", "vmap of vmap", "eager")
  def test_members_in_every_context(self, context):
    """Members share the matrices, whose gradients add up."""
    operands, ids, dy = arrays(7, 2, 4, members=(2, M))

    def over_members(call, *args):
      x, gate_up, down, weights, ids = args
      one = lambda x, w, ids: call(x, gate_up, down, w, ids)
      if context == "scan":
        body = jax.checkpoint(lambda _, args: (None, one(*args)))
        fold = lambda x: x.reshape(2 * M, *x.shape[2:])
        y = lax.scan(body, None, jax.tree.map(fold, (x, weights, ids)))[1]
        return y.reshape(x.shape)
      mapped = lambda *args: lax.map(lambda args: one(*args), args)
      inner = jax.vmap(one) if context != "map" else mapped
      if context == "vmap":
        return jnp.stack([inner(*a) for a in zip(x, weights, ids, strict=True)])
      return jax.vmap(inner)(x, weights, ids)

    plain = functools.partial(over_members, dense)
    wanted = jax.jit(with_gradients(plain))(operands, ids, dy)
    run = with_gradients(functools.partial(over_members, blocks(4)))
    got = (run if context == "eager" else jax.jit(run))(operands, ids, dy)
    self.assert_close(got, wanted)

  def test_members_of_one_loss_have_one_gradient(self):
    operands, ids, dy = arrays(7, 2, 4, members=(M,))
    run = with_gradients(shared_blocks(4))
    shapes = made_shapes(run, operands, ids, dy)
    for x in operands[1:3]:
      self.assertIn(x.shape, shapes)
      self.assertNotIn((M, *x.shape), shapes)

  @parameterized.parameters(
    # which operands, and whether ids, differ by member
    ((True, True, True, True), True),
    ((False, True, False, False), False),
    ((False, False, False, True), False),
    ((False, False, False, False), True),
  )
  def test_members_that_share_other_things(self, own, own_ids):
    members = [arrays(7, 2, 4, seed=seed) for seed in range(M)]
    stack = lambda *x: np.stack(x)
    operands, ids, dy = jax.tree.map(stack, *members)
    axis = lambda is_own: 0 if is_own else None
    pick = lambda is_own, x: x if is_own else x[0]
    operands = tuple(map(pick, own, operands))
    ids = pick(own_ids, ids)
    axes = (*map(axis, own), axis(own_ids))
    over = lambda call: jax.jit(with_gradients(jax.vmap(call, axes)))
    got, wanted = (over(f)(operands, ids, dy) for f in (blocks(4), dense))
    self.assert_close(got, wanted)

  def test_many_pullbacks_of_one_call(self):
    (x, *rest), ids, _ = arrays(3, 2, 4)
    jacobian = lambda call: jax.jacrev(
      lambda gate_up: call(x, gate_up, *rest[1:], ids)
    )
    got, wanted = (jax.jit(jacobian(f))(rest[0]) for f in (blocks(2), dense))
    self.assert_close(got, wanted)

  @parameterized.parameters(None, 0)
  def test_every_loss_has_a_gradient_of_its_own(self, axis):
    """jax.vmap of jax.grad, whether matrices are shared or each loss's own."""
    (x, gate_up, down, w), ids, dy = arrays(7, 2, 4, members=(M,))
    if axis == 0:
      gate_up, down = (jnp.stack([m, -m, 2 * m]) for m in (gate_up, down))
    axes = ((0, axis, axis, 0), 0, 0)
    got, wanted = (
      jax.jit(jax.vmap(with_gradients(f), axes))((x, gate_up, down, w), ids, dy)
      for f in (blocks(4), dense)
    )
    self.assert_close(got, wanted)

  def test_every_loss_of_several_members(self):
    """Members share within a loss, losses do not."""
    operands, ids, dy = arrays(7, 2, 4, members=(2, M))

    def losses(over_members):
      run = jax.vmap(with_gradients(over_members), ((0, None, None, 0), 0, 0))
      return jax.jit(run)(operands, ids, dy)

    members_of = lambda call: jax.vmap(call, (0, None, None, 0, 0))
    wanted = losses(members_of(dense))
    self.assert_close(losses(shared_blocks(4)), wanted)
    self.assert_close(losses(members_of(blocks(4))), wanted)

  @parameterized.parameters((), (M,))
  def test_frozen_matrices_cost_neither_product_nor_buffer(self, *members):
    (x, gate_up, down, weights), ids, dy = arrays(7, 2, 9, members)
    call = blocks(4)
    if members:
      call = jax.vmap(call, (0, None, None, 0, 0))

    def loss(x, weights, gate_up, down):
      return (call(x, gate_up, down, weights, ids) * dy).sum()

    args = x, weights, gate_up, down
    frozen, only_down, trained = (
      jax.grad(loss, argnums) for argnums in ((0, 1), (0, 1, 3), (0, 1, 2, 3))
    )
    made = lambda function: made_shapes(function, *args)
    self.assertNotIn(gate_up.shape, made(frozen) | made(only_down))
    self.assertNotIn(down.shape, made(frozen))
    self.assertIn(down.shape, made(only_down))
    self.assertContainsSubset({gate_up.shape, down.shape}, made(trained))
    products = lambda function: sum(
      eqn.primitive.name == "dot_general" for eqn in equations(function, *args)
    )
    self.assertEqual(
      list(map(products, (frozen, only_down, trained))), [5, 6, 7]
    )
    wanted = jax.jit(trained)(*args)
    jax.tree.map(
      np.testing.assert_array_equal, jax.jit(frozen)(*args), wanted[:2]
    )

  def test_frozen_layers_keep_their_learning_neighbours_only(self):
    """In a scan over checkpointed layers, by what XLA sets aside."""
    layers, tokens, experts, f32 = 3, 16, 512, jnp.float32
    shape = jax.ShapeDtypeStruct
    x = shape((tokens, D), f32)
    weights, ids = (shape((tokens, 2), dtype) for dtype in ("float32", "int32"))
    gate_up = shape((layers, experts, D, 2 * F), f32)
    down = shape((layers, experts, F, D), f32)

    def loss(x, gate_up, down, weights, ids):
      call = lambda x, m: blocks(8)(x, *m, weights, ids)
      body = jax.checkpoint(lambda x, m: (x + call(x, m), None))
      return (lax.scan(body, x, (gate_up, down))[0] ** 2).sum()

    args = x, gate_up, down, weights, ids
    forward = temporaries(loss, *args)
    frozen = temporaries(jax.grad(loss, (0, 3)), *args)
    one_layer = 4 * gate_up.size // layers
    self.assertLess(frozen - forward, one_layer / 4)
    trained = temporaries(jax.grad(loss, (0, 1, 3)), *args)
    self.assertGreater(trained - forward, one_layer / 2)

  @parameterized.parameters((), (M,))
  def test_a_layer_is_read_in_the_stack(self, *members):
    (x, gate_up, down, weights), ids, dy = arrays(7, 2, 5, members)
    stack = lambda matrix: jnp.stack([-matrix, matrix, 2 * matrix])

    def run(x, weights, gate_up, down):
      call = lambda x, w, ids: blocks(4)(x, gate_up, down, w, ids)
      call = jax.vmap(call) if members else call
      y, pull_back = jax.vjp(lambda x, w: call(x, w, ids), x, weights)
      return y, pull_back(dy)

    layer = lambda matrix: StackedLayer(stack(matrix), jnp.int32(1))
    got = jax.jit(run)(x, weights, layer(gate_up), layer(down))
    wanted = jax.jit(run)(x, weights, gate_up, down)
    jax.tree.map(np.testing.assert_array_equal, got, wanted)

    def loss(stacked):
      one = StackedLayer(stacked, jnp.int32(1))
      return blocks(4)(x, one, down, weights, ids).sum()

    if not members:
      with self.assertRaisesRegex(ValueError, "frozen experts.*Model.split"):
        jax.grad(loss)(stack(gate_up))

  def test_a_layer_in_the_stack_is_not_copied(self):
    layers, tokens, experts, f32 = 3, 16, 512, jnp.float32
    shape = jax.ShapeDtypeStruct
    x, weights = shape((tokens, D), f32), shape((tokens, 2), f32)
    gate_up = shape((layers, experts, D, 2 * F), f32)
    down = shape((layers, experts, F, D), f32)

    def loss(x, gate_up, down, weights, ids):
      def body(x, index):
        matrices = (StackedLayer(m, index) for m in (gate_up, down))
        return x + blocks(8)(x, *matrices, weights, ids), None

      layers_of = jnp.arange(layers, dtype=jnp.int32)
      return (lax.scan(jax.checkpoint(body), x, layers_of)[0] ** 2).sum()

    args = x, gate_up, down, weights, shape((tokens, 2), jnp.int32)
    used = temporaries(jax.grad(loss, (0, 3)), *args)
    self.assertLess(used, 4 * gate_up.size // layers / 4)

  def test_memory_does_not_grow_with_choices_or_experts(self):
    """The program is one for all routings, so its plan is the worst case."""

    def plan(tokens, choices, experts, function):
      shape = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)
      args = (
        shape(tokens, 64),
        shape(experts, 64, 64),
        shape(experts, 32, 64),
        shape(tokens, choices),
        jax.ShapeDtypeStruct((tokens, choices), jnp.int32),
      )
      return temporaries(function, *args)

    forward = blocks(8)
    frozen = jax.grad(lambda *args: (forward(*args) ** 2).sum(), (0, 3))
    tokens, row = 512, 4 * 64
    for function, copies in (forward, 1), (frozen, 4):
      base = plan(tokens, 2, 4, function)
      self.assertLess(base, copies * tokens * row)
      for choices, experts in (8, 16), (8, 128):
        more = plan(tokens, choices, experts, function) - base
        # Indices and weights of the pairs; nothing as wide as a row of them.
        self.assertLess(more, tokens * choices * row / 4)

  @parameterized.parameters(
    ("float32", 8), ("float64", 8), ("bfloat16", 8), ("float32", 1)
  )
  def test_a_token_has_its_bits_in_any_batch(self, dtype, row_block):
    (x, gate_up, down, weights), ids, dy = arrays(24, 2, 5)
    x, gate_up, down, dy = (
      jnp.asarray(m, dtype) for m in (x, gate_up, down, dy)
    )
    weights = jnp.asarray(weights, jnp.promote_types(dtype, "float32"))

    @jax.jit
    def run(x, weights, ids, dy):
      call = lambda x, w: blocks(row_block)(x, gate_up, down, w, ids)
      y, pull_back = jax.vjp(call, x, weights)
      return y, pull_back(dy), rowwise_product(x, down[0].T, row_block)

    tokens = x, weights, ids, dy
    wanted = run(*tokens)
    cut = lambda tree, at: jax.tree.map(lambda x: x[at], tree)
    order = np.random.default_rng(1).permutation(24)
    for at in (slice(0, 1), slice(23, 24), slice(5, 18), order):
      got = run(*cut(tokens, at))
      jax.tree.map(np.testing.assert_array_equal, got, cut(wanted, at))
    members = jax.tree.map(lambda x: x.reshape(M, 8, -1), tokens)
    got = jax.tree.map(lambda x: x.reshape(24, -1), jax.vmap(run)(*members))
    jax.tree.map(np.testing.assert_array_equal, got, wanted)

  def test_padding_changes_nothing_for_the_others(self):
    operands, ids, dy = arrays(13, 2, 5)
    real = 9
    (x, gate_up, down, weights), spoilt_dy = operands, dy.copy()
    spoilt_dy[real:] = 0
    cut = (x[:real], gate_up, down, weights[:real]), ids[:real], dy[:real]
    x = x.copy()
    x[real:] = 1e6
    run = jax.jit(with_gradients(blocks(4)))
    y, grads = run((x, gate_up, down, weights), ids, spoilt_dy)
    np.testing.assert_array_equal(grads[0][real:], 0)
    np.testing.assert_array_equal(grads[3][real:], 0)
    grads = (grads[0][:real], *grads[1:3], grads[3][:real])
    self.assert_close((y[:real], grads), run(*cut))

  def test_ids_of_other_devices_add_nothing(self):
    operands, ids, dy = arrays(13, 3, 6)
    x, gate_up, down, weights = operands
    total = 0
    for start, size in (0, 2), (2, 4):
      part = slice(start, start + size)
      share = blocks(4)(x, gate_up[part], down[part], weights, ids - start)
      total = total + share
    self.assert_close(total, dense(*operands, ids))

  @parameterized.parameters((2048, 2, 3), (3, 256, 256))
  def test_narrow_inputs_are_summed_wide(self, tokens, choices, experts):
    """Many rows, or choices, add alike: a bfloat16 sum would stop growing."""
    operands, ids, dy = arrays(tokens, choices, experts)
    narrow = lambda x: jnp.asarray(np.abs(x) + 1, jnp.bfloat16)
    *operands, weights = map(narrow, operands)
    operands, dy = (*operands, weights.astype("float32")), narrow(dy)
    y, grads = jax.jit(with_gradients(blocks(2)))(operands, ids, dy)
    dtypes = [x.dtype for x in (dy, *operands)]
    self.assertEqual([x.dtype for x in (y, *grads)], dtypes)

    wide = lambda tree: jax.tree.map(lambda x: x.astype("float64"), tree)
    exact = jax.jit(with_gradients(dense))(wide(operands), ids, wide(dy))
    for got, wanted in zip((y, *grads), (exact[0], *exact[1]), strict=True):
      error = np.linalg.norm(got.astype("float64") - wanted)
      self.assertLess(error, 2**-7 * np.linalg.norm(wanted))

  def test_rowwise_product_is_a_product(self):
    rng = np.random.default_rng(0)
    x, w, dy = (rng.normal(size=s) for s in ((M, 7, D), (D, 5), (M, 7, 5)))
    product = jax.vmap(lambda x, w: rowwise_product(x, w, 4), (0, None))
    plain = lambda x, w: jnp.einsum("mtd,de->mte", x, w)
    got, wanted = (
      (y, pull_back(dy))
      for y, pull_back in (jax.vjp(f, x, w) for f in (product, plain))
    )
    self.assert_close(got, wanted)
    each = np.stack([w, w[::-1], -w])
    got = jax.vmap(lambda x, w: rowwise_product(x, w, 4))(x, each)
    self.assert_close(got, np.einsum("mtd,mde->mte", x, each))


if __name__ == "__main__":
  absltest.main()
