"""Gradients under jax.vmap, jax.jacrev and both: each call's own, every leaf.

Members of one loss share one gradient of what they share; that is said by a
mark (ops/members.py) and holds for nobody else. Expected values are those of
single calls.
"""

import functools

from absl.testing import absltest, parameterized
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from longstraw_jax import (
  capture,
  group_gradient,
  make_mesh,
  place_at_rest,
  replay,
)
from longstraw_jax.ops.attention import masked_attention
from longstraw_jax.ops.pages import (
  Segment,
  Striping,
  attend,
  attend_blocks,
  attend_chosen,
  gather_rows,
  read_block,
)
from longstraw_jax.ops.rowwise import rowwise_product
from longstraw_jax.testing.compare import assert_gradients_close
from tests.small_models import OBJECTIVE, build, make_group, make_prompt

TOLERANCE = 1e-12
B, M = 3, 2  # calls side by side, members of one loss
T, N, H, S, LENGTH, CHUNK = 4, 2, 6, 16, 11, 8
KEYS = np.tile(np.arange(5, 12), (T, 1))


# --- Readers of pages ------------------------------------------------------


def softmax_part(q, rows, positions, filled):
  del positions
  mask = jnp.broadcast_to(filled, (q.shape[0], filled.shape[0]))
  return masked_attention(q, rows["k"], rows["v"], mask)


def read(name, q, segment):
  """(outputs of T queries, tap) by one of the primitives."""
  if name == "attend":
    (o, _), tap = attend(q, segment, 8)
  elif name == "attend_blocks":
    (o, _), tap = attend_blocks(softmax_part, q, segment, 8)
  elif name == "attend_chosen":
    o, (tap,) = attend_chosen(
      q, KEYS, (segment,), name="x", value_dim=H, query_block=4
    )
  elif name == "read_block":
    (rows, _, filled), tap = read_block(segment, jnp.int32(0), 8)
    o = softmax_part(q, rows, None, filled)[0]
  else:
    (rows, inside), tap = gather_rows(segment, KEYS, ("x",))
    scores = jnp.einsum("tnh,tah->tna", q, rows["x"])
    weights = jax.nn.softmax(jnp.where(inside[:, None], scores, -1e30))
    o = jnp.einsum("tna,tah->tnh", weights, rows["x"])
  return o, tap


READERS = "attend attend_blocks attend_chosen read_block gather_rows".split()
FLAT = ("attend_chosen", "gather_rows")  # of rows without heads
MESHES = ((1, 1), (2, 2))


def rows_of(name):
  shape = {"x": (2, S, H)}
  if name not in FLAT:
    shape = {"k": (2, N, S, H), "v": (2, N, S, H)}
  normal = np.random.default_rng(7).normal
  return {key: normal(size=one) for key, one in shape.items()}


def arrays(*lead):
  normal = np.random.default_rng(3).normal
  return normal(size=(*lead, T, N, H)), normal(size=(*lead, T, N, H))


def loss_of(name, shards, rows, member=None, heads=None):
  """(q, w, tap) -> weighed outputs of a read that follows another one."""
  striping = Striping(CHUNK, shards) if shards > 1 else None

  def segment(tap):
    layer, length, start = map(jnp.int32, (1, LENGTH, 0))
    return Segment(rows, tap, layer, length, start, member, striping)

  def loss(q, w, tap):
    if heads:
      # A mixer may batch its own reads; these are not members.
      halves = q.reshape(2, T, N // 2, H)
      if name not in FLAT:
        halves = jnp.repeat(halves, 2, axis=2)
      one = lambda q, tap: read(name, q, segment(tap))
      if heads == "vmap":
        o, taps = jax.vmap(one, (0, None))(halves, tap)
        tap = jax.tree.map(lambda x: x[0], taps)
      else:
        first, tap = one(halves[0], tap)
        second, tap = one(halves[1], tap)
        o = jnp.stack([first, second])
      o = o[:, :, : N // 2].reshape(T, N, H)
    else:
      o, tap = read(name, q, segment(tap))
    second, tap = read(name, jnp.sin(q + o), segment(tap))
    return ((o + second) * w).sum(), tap

  return lambda q, w, tap: loss(q, w, tap)[0]


def on_mesh(shape, rows, run, *args):
  context, member = shape
  striping = Striping(CHUNK, context) if context > 1 else None
  if striping is not None:
    rows = jax.tree.map(striping.deal, rows)
  with jax.set_mesh(make_mesh(context, member)):
    out = jax.jit(functools.partial(run, rows))(*args)
  if striping is None:
    return jax.device_get(out)
  collect = lambda x: striping.collect(x) if x.shape[-2] == S else x
  return jax.device_get(jax.tree.map(collect, out))


def assert_close(got, wanted):
  close = functools.partial(
    np.testing.assert_allclose, rtol=TOLERANCE, atol=TOLERANCE
  )
  jax.tree.map(close, got, wanted)


def stack(trees):
  return jax.tree.map(lambda *x: np.stack(x), *trees)


class ReadersTest(parameterized.TestCase):
  def singles(self, name, shape, q, w, heads=None):
    """(gradient of q, of the rows) of each call alone."""

    def one(rows, q, w):
      loss = loss_of(name, shape[0], rows, heads=heads)
      return jax.grad(loss, (0, 2))(q, w, jax.tree.map(jnp.asarray, rows))

    run = lambda rows, q, w: jax.lax.map(lambda x: one(rows, *x), (q, w))
    return on_mesh(shape, rows_of(name), run, q, w)

  @parameterized.product(name=READERS, shape=MESHES)
  def test_every_transform(self, name, shape):
    rows, shards = rows_of(name), shape[0]
    q, w = arrays(B)
    wanted = self.singles(name, shape, q, w)
    total = (wanted[0], jax.tree.map(lambda x: x.sum(0), wanted[1]))

    def run(rows, q, w):
      tap = jax.tree.map(jnp.asarray, rows)
      alone, loss = (
        loss_of(name, shards, rows),
        functools.partial(loss_of, name, shards, rows),
      )
      gradient = jax.grad(alone, (0, 2))

      def members(q, w, tap, heads=None):
        one = lambda i, q, w, tap: loss(i, heads)(q, w, tap)
        values = jax.vmap(one, (0, 0, 0, None))(jnp.arange(B), q, w, tap)
        return values.sum()

      unmarked = lambda q, w, tap: jax.vmap(alone, (0, 0, None))(
        q, w, tap
      ).sum()
      both = lambda x, y: jax.tree.map(lambda *z: jnp.stack(z), x, y)
      twice = lambda call: jax.vmap(jax.grad(call, (0, 2)), (0, 0, None))
      weights = lambda q, w, tap: jax.jacrev(
        lambda q, tap: jax.vmap(lambda w: alone(q, w, tap))(w), (0, 1)
      )(q, tap)
      return {
        "losses": jax.vmap(gradient, (0, 0, None))(q, w, tap),
        "sum": jax.grad(unmarked, (0, 2))(q, w, tap),
        "members": jax.grad(members, (0, 2))(q, w, tap),
        "heads": jax.grad(functools.partial(members, heads="vmap"), (0, 2))(
          q, w, tap
        ),
        "losses of members": twice(members)(both(q, -q), both(w, 2 * w), tap),
        "jacrev": weights(q[0], w, tap),
        "sum of losses": jax.vmap(
          jax.vmap(gradient, (0, None, None)), (None, 0, None)
        )(q, w, tap),
      }

    got = on_mesh(shape, rows, run, q, w)
    assert_close(got["losses"], wanted)
    for form in ("sum", "members"):
      assert_close(got[form], total)
    apart = self.singles(name, shape, q, w, "loop")
    of_all = (apart[0], jax.tree.map(lambda x: x.sum(0), apart[1]))
    assert_close(got["heads"], of_all)
    assert_close(jax.tree.map(lambda x: x[0], got["losses of members"]), total)
    turned = self.singles(name, shape, -q, 2 * w)
    turned = (turned[0], jax.tree.map(lambda x: x.sum(0), turned[1]))
    assert_close(jax.tree.map(lambda x: x[1], got["losses of members"]), turned)
    pairs = [self.singles(name, shape, q, np.stack([x] * B)) for x in w]
    assert_close(got["sum of losses"], stack(pairs))
    first = jax.tree.map(lambda x: x[0], stack([stack(pairs)]))
    assert_close(got["jacrev"], jax.tree.map(lambda x: x[:, 0], first))

  def test_products_row_by_row(self):
    """Of rows or matrices that a batch shares, or not."""
    normal = np.random.default_rng(5).normal
    x, w, dy = normal(size=(B, 5, 4)), normal(size=(B, 4, 3)), normal(size=3)
    product = lambda x, w: (rowwise_product(x, w, 2) @ dy).sum()
    plain = lambda x, w: (x @ w @ dy).sum()
    for axes in ((0, 0), (0, None), (None, 0)):
      args = [
        a if axis == 0 else a[0] for a, axis in zip((x, w), axes, strict=True)
      ]
      each = lambda call, axes=axes: jax.vmap(jax.grad(call, (0, 1)), axes)
      total = lambda call, axes=axes: jax.grad(
        lambda x, w: jax.vmap(call, axes)(x, w).sum(), (0, 1)
      )
      for form in (each, total):
        assert_close(form(product)(*args), form(plain)(*args))


# --- The whole model -------------------------------------------------------

LENGTH_P, CHUNK_P, ROOM = 21, 8, 3
CASES = tuple(
  (name, scope, members, shape)
  for name in ("tiny-hybrid", "tiny-moe", "tiny-glm")
  for scope in ("full", "tail")
  for members in (1, 2)
  for shape in MESHES
)
DEFAULT = (
  ("tiny-hybrid", "full", 2, (1, 1)),
  ("tiny-moe", "tail", 2, (2, 2)),
)


def batch_of(over):
  """Arguments (params scale, prompt, responses, advantages), B in one."""
  random, group = np.random.default_rng(4), make_group(ROOM, (2,))
  prompt, responses = make_prompt(LENGTH_P), np.asarray(group.responses)
  args = {
    "scale": np.float64(1.0),
    "prompt": prompt,
    "responses": responses,
    "advantages": np.asarray([1.0, -0.7]),
  }
  several = {
    "scale": np.asarray([1.0, 0.9, 1.1]),
    "prompt": np.stack([prompt, prompt[::-1], (prompt + 1) % 61]),
    "responses": random.integers(0, 61, (B, *responses.shape)),
    "advantages": random.normal(size=(B, 2)),
  }
  args |= {over: several[over]}
  return tuple(args.values()), tuple(0 if k == over else None for k in args)


def gradient_of(name, scope, members, params):
  """(scale, prompt, responses, advantages) -> gradients, by both roads."""
  model, _ = build(name, query_block=8)
  options = {
    "chunk_size": CHUNK_P,
    "grad_scope": scope,
    "tail_chunks": 2 if scope == "tail" else None,
  }

  def scaled(params, scale):
    return jax.tree.map(lambda x: x * scale.astype(x.dtype), params)

  def composed(scale, prompt, responses, advantages):
    def loss(trainable):
      tree = scaled(params.replace(trainable=trainable), scale)
      state = capture(model, tree, prompt, **options)
      lengths = jnp.asarray([ROOM, 2])
      logprobs = replay(
        model, tree, state, responses, lengths, members_at_once=members
      )
      return (jnp.sin(logprobs) * advantages[:, None]).sum()

    return jax.grad(loss)(params.trainable)

  def transaction(scale, prompt, responses, advantages):
    group = make_group(ROOM, (2,)).replace(
      responses=responses, advantages=advantages
    )
    return group_gradient(
      model,
      scaled(params, scale),
      prompt,
      group,
      OBJECTIVE,
      members_at_once=members,
      **options,
    )[1]

  return {"composed": composed, "transaction": transaction}


def check_model(name, scope, members, shape, over, road):
  """vmap of one road's gradient against calls of it one by one."""
  args, axes = batch_of(over)
  _, params = build(name, query_block=8)
  mesh = make_mesh(*shape)
  with jax.set_mesh(mesh):
    placed = place_at_rest(params, mesh)
    one = gradient_of(name, scope, members, placed)[road]
    got = jax.device_get(jax.jit(jax.vmap(one, axes))(*args))
    single = jax.jit(one)
    for i in range(B):
      pick = [x if a is None else x[i] for x, a in zip(args, axes, strict=True)]
      wanted = jax.device_get(single(*pick))
      of_one = jax.tree.map(lambda x, i=i: x[i], got)
      assert_gradients_close(of_one, wanted, TOLERANCE, f"{over} {road} {i}")


class ModelTest(parameterized.TestCase):
  @parameterized.parameters(*DEFAULT)
  def test_every_response_has_its_own(self, *case):
    check_model(*case, "responses", "composed")

  @parameterized.parameters("advantages", "scale")
  def test_every_other_thing(self, over):
    check_model("tiny-hybrid", "full", 2, (1, 1), over, "composed")


@pytest.mark.slow
class EveryModelTest(parameterized.TestCase):
  @parameterized.product(
    case=CASES,
    form=(
      ("responses", "composed"),
      ("prompt", "transaction"),
      ("advantages", "composed"),
    ),
  )
  def test_every_leaf(self, case, form):
    check_model(*case, *form)

  @parameterized.product(
    name=("tiny-moe", "tiny-glm"),
    over=("responses", "advantages", "scale"),
  )
  def test_every_leaf_of_the_transaction(self, name, over):
    check_model(name, "full", 2, (1, 1), over, "transaction")


if __name__ == "__main__":
  absltest.main()
