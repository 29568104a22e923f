"""The page primitives against dense attention written out here."""

import functools

from absl.testing import absltest, parameterized
import jax
from jax import lax
import jax.numpy as jnp
import numpy as np
import pytest

from longstraw_jax.ops.attention import masked_attention
from longstraw_jax.ops.pages import (
  EMPTY_LSE,
  Segment,
  attend,
  attend_blocks,
  gather_rows,
  merge,
  open_rows,
  read_block,
)

TOLERANCE = {"float64": 1e-12, "float32": 1e-5}

L, T, N, K, H, V = 2, 3, 4, 2, 8, 6  # V: width of the values
CAPACITY = 37  # no block size used here divides it
LAYER = 1
LENGTHS = (0, 1, 5, 16, 37)


def dense(q, k, v):
  """(o, lse) over all rows, as the formula says."""
  k, v = (jnp.repeat(x, N // K, axis=0) for x in (k, v))
  scores = jnp.einsum("tnh,nsh->tns", q, k) * H**-0.5
  lse = jax.nn.logsumexp(scores, axis=-1)
  return jnp.einsum("tns,nsv->tnv", jnp.exp(scores - lse[..., None]), v), lse


def arrays(seed=0, dtype="float64", members=()):
  """Queries, rows, an accumulator in use, and cotangents of (o, lse)."""
  rng = np.random.default_rng(seed)
  normal = lambda *shape: rng.normal(size=shape).astype(dtype)
  rows = {"k": normal(L, K, CAPACITY, H), "v": normal(L, K, CAPACITY, V)}
  used = {name: normal(*x.shape) for name, x in rows.items()}
  cotangents = normal(*members, T, N, V), normal(*members, T, N)
  return normal(*members, T, N, H), rows, used, cotangents


def segment_of(rows, tap, length, start=0, member=None):
  layer, length, start = map(jnp.int32, (LAYER, length, start))
  return Segment(
    rows=rows, tap=tap, layer=layer, length=length, start=start, member=member
  )


def dense_gradients(q, rows, cotangents, length):
  """Of q and of the rows, by plain autodiff of the dense form."""

  def call(q, rows):
    cut = {name: x[LAYER, :, :length] for name, x in rows.items()}
    return dense(q, cut["k"], cut["v"])

  return jax.vjp(call, q, rows)[1](cotangents)


def member_of(tree, index):
  return jax.tree.map(lambda x: x[index], tree)


def softmax_part(q, rows, positions, filled):
  del positions
  mask = jnp.broadcast_to(filled, (q.shape[0], filled.shape[0]))
  return masked_attention(q, rows["k"], rows["v"], mask)


READERS = {
  "attend": attend,
  "attend_blocks": functools.partial(attend_blocks, softmax_part),
}


def read_sixteen(reader, rows, q, tap, member=None):
  """((o, lse), tap) of the first 16 rows, by any of the primitives."""
  segment = segment_of(rows, tap, 16, member=member)
  if reader != "read_block":
    return READERS[reader](q, segment, 8)
  (block, _, filled), tap = read_block(segment, jnp.int32(0), 16)
  return softmax_part(q, block, None, filled), tap


@functools.cache
def program(reader, size):
  """(o, lse) and the gradients of q and of the accumulator, compiled."""

  def call(q, rows, used, cotangents, length):
    def read(q, tap):
      return READERS[reader](q, segment_of(rows, tap, length), size)

    (out, _), pull_back = jax.vjp(read, q, used)
    return out, pull_back((cotangents, used))

  return jax.jit(call)


class PagesTest(parameterized.TestCase):
  def assert_close(self, got, wanted, dtype="float64"):
    tolerance = TOLERANCE[dtype]
    jax.tree.map(
      lambda a, b: np.testing.assert_allclose(
        a, b, rtol=tolerance, atol=tolerance
      ),
      got,
      wanted,
    )

  @parameterized.product(
    reader=("attend", "attend_blocks"),
    size_dtype=((8, "float64"), (64, "float64"), (16, "float32")),
  )
  def test_values_and_gradients_equal_dense(self, reader, size_dtype):
    size, dtype = size_dtype
    q, rows, used, cotangents = arrays(dtype=dtype)
    for length in LENGTHS:
      (o, lse), (dq, total) = program(reader, size)(
        q, rows, used, cotangents, length
      )
      self.assertEqual(o.dtype, jnp.dtype(dtype))
      if length == 0:
        np.testing.assert_array_equal(o, 0.0)
        np.testing.assert_array_equal(lse, np.asarray(EMPTY_LSE, dtype))
        np.testing.assert_array_equal(dq, 0.0)
        jax.tree.map(np.testing.assert_array_equal, total, used)
        continue
      layer = {name: x[LAYER, :, :length] for name, x in rows.items()}
      self.assert_close((o, lse), dense(q, layer["k"], layer["v"]), dtype)
      wanted, drows = dense_gradients(q, rows, cotangents, length)
      self.assert_close(dq, wanted, dtype)
      self.assert_close(total, jax.tree.map(np.add, used, drows), dtype)

  def test_rows_behind_length_and_other_layers_are_not_read(self):
    q, rows, used, cotangents = arrays()
    spoilt = jax.tree.map(np.copy, rows)
    for x in spoilt.values():
      x[:LAYER] = np.nan
      x[LAYER, :, 16:] = 1e6
    wanted = program("attend", 8)(q, rows, used, cotangents, 16)
    got = program("attend", 8)(q, spoilt, used, cotangents, 16)
    jax.tree.map(np.testing.assert_array_equal, got, wanted)

  @parameterized.parameters("eager", "jit", "scan")
  def test_reads_thread_one_tap_in_every_context(self, context):
    """Two query blocks read one segment; their row gradients add up."""
    q, rows, used, (do, dlse) = arrays(members=(2,))

    def both(q, tap):
      def block(tap, q):
        out, tap = attend(q, segment_of(rows, tap, 16), 8)
        return tap, out

      if context == "scan":
        tap, out = lax.scan(jax.checkpoint(block), tap, q)
        return out, tap
      tap, first = block(tap, q[0])
      tap, second = block(tap, q[1])
      return jax.tree.map(lambda *x: jnp.stack(x), first, second), tap

    run = lambda q, tap: jax.vjp(both, q, tap)[1](((do, dlse), used))
    dq, total = (jax.jit(run) if context == "jit" else run)(q, used)
    for i in range(2):
      wanted, drows = dense_gradients(q[i], rows, (do[i], dlse[i]), 16)
      self.assert_close(dq[i], wanted)
      used = jax.tree.map(np.add, used, drows)
    self.assert_close(total, used)

  @parameterized.parameters("attend", "attend_blocks", "read_block")
  def test_members_share_one_accumulator(self, reader):
    members = 3
    q, rows, used, cotangents = arrays(members=(members,))

    read = functools.partial(read_sixteen, reader, rows)

    def gradients(q, tap, cotangents, used):
      number = jnp.arange(members)
      call = jax.vmap(read, in_axes=(0, None, 0), out_axes=(0, None))
      out, pull_back = jax.vjp(lambda q, tap: call(q, tap, number), q, tap)
      return out[0], pull_back((cotangents, used))

    args = (q, used, cotangents, used)
    out, (dq, total) = jax.jit(gradients)(*args)
    for i in range(members):
      member = member_of(cotangents, i)
      wanted, drows = dense_gradients(q[i], rows, member, 16)
      layer = {name: x[LAYER, :, :16] for name, x in rows.items()}
      self.assert_close((out[0][i], out[1][i]), dense(q[i], **layer))
      self.assert_close(dq[i], wanted)
      used = jax.tree.map(np.add, used, drows)
    self.assert_close(total, used)
    shapes = str(jax.make_jaxpr(gradients)(*args))
    for x in rows.values():
      shape = ",".join(map(str, x.shape))
      self.assertIn(f"[{shape}]", shapes)
      self.assertNotIn(f"[{members},{shape}]", shapes)

  @parameterized.parameters("attend", "attend_blocks", "read_block")
  def test_one_call_pulled_back_for_a_batch_of_cotangents(self, reader):
    """As jax.jacrev does: nothing is shared, unlike by members."""
    q, rows, used, _ = arrays()
    cotangents = arrays(seed=1, members=(2,))[3]

    read = functools.partial(read_sixteen, reader, rows)

    @jax.jit
    def gradients(q, tap, cotangents):
      pull_back = jax.vjp(read, q, tap)[1]
      return jax.vmap(lambda c: pull_back((c, tap)))(cotangents)

    dq, total = gradients(q, used, cotangents)
    for i in range(2):
      member = member_of(cotangents, i)
      wanted, drows = dense_gradients(q, rows, member, 16)
      self.assert_close(dq[i], wanted)
      added = jax.tree.map(np.add, used, drows)
      self.assert_close(member_of(total, i), added)

  @parameterized.parameters("attend", "attend_blocks")
  def test_members_with_pages_of_their_own(self, reader):
    members = [arrays(seed) for seed in range(2)]
    q, rows, used, cotangents = jax.tree.map(lambda *x: np.stack(x), *members)

    def one(q, rows, used, cotangents):
      return program(reader, 8)(q, rows, used, cotangents, 16)

    got = jax.vmap(one)(q, rows, used, cotangents)
    for i, member in enumerate(members):
      self.assert_close(member_of(got, i), one(*member))

  def test_read_block_marks_rows_and_adds_to_the_tap(self):
    _, rows, used, _ = arrays()
    size, seen = 16, []
    for index in range(3):  # the last block would end at 48: it is moved back
      segment = segment_of(rows, used, 35, start=100)
      (block, positions, filled), _ = read_block(segment, index, size)
      places = np.asarray(positions) - 100
      for name in rows:
        np.testing.assert_array_equal(block[name], rows[name][LAYER][:, places])
      seen += list(places[np.asarray(filled)])
    self.assertEqual(seen, list(range(35)))  # each filled row exactly once

    def read(tap):
      segment = segment_of(rows, tap, 35)
      (block, _, filled), tap = read_block(segment, jnp.int32(2), size)
      masked = {n: jnp.where(filled[:, None], x, 0) for n, x in block.items()}
      return masked, tap

    ones = {n: np.ones((K, size, x.shape[-1])) for n, x in rows.items()}
    (total,) = jax.vjp(read, used)[1]((ones, used))
    for name, x in used.items():
      wanted = x.copy()
      wanted[LAYER, :, 32:35] += 1
      self.assert_close(total[name], wanted)

  def test_read_block_beyond_capacity_holds_nothing(self):
    _, rows, _, _ = arrays()
    (_, _, filled), tap = read_block(segment_of(rows, None, CAPACITY), 3, 16)
    self.assertFalse(np.any(filled))
    self.assertIsNone(tap)

  def test_without_a_tap_only_queries_learn(self):
    q, rows, _, cotangents = arrays()
    loss = lambda q, rows: sum(
      (x * c).sum()
      for x, c in zip(
        attend(q, segment_of(rows, None, 16), 8)[0], cotangents, strict=True
      )
    )
    dq, drows = jax.grad(loss, (0, 1))(q, rows)
    self.assert_close(dq, dense_gradients(q, rows, cotangents, 16)[0])
    for x in drows.values():
      np.testing.assert_array_equal(x, 0.0)

  def test_forward_mode_is_refused(self):
    q, rows, used, _ = arrays()
    call = lambda q: attend(q, segment_of(rows, used, 16), 8)[0]
    with self.assertRaises(TypeError):
      jax.jvp(call, (q,), (q,))

  def test_merge_of_disjoint_rows_equals_dense(self):
    q, rows, _, (do, _) = arrays()
    k, v = rows["k"][LAYER], rows["v"][LAYER]
    empty = jnp.zeros((T, N, V)), jnp.full((T, N), EMPTY_LSE)

    def merged(q, k, v):
      parts = [dense(q, k[:, a:b], v[:, a:b]) for a, b in ((0, 5), (5, 37))]
      return merge([empty, parts[0], empty, parts[1]])

    @functools.partial(jax.jit, static_argnums=0)
    def run(call, *args):
      out, pull_back = jax.vjp(call, *args)
      return out, pull_back(do)

    got = run(merged, q, k, v)
    self.assert_close(got, run(lambda *args: dense(*args)[0], q, k, v))
    np.testing.assert_array_equal(merge([empty, empty]), 0.0)

  def test_rows_of_this_call_get_their_gradient_under_vmap(self):
    """A tap that is opened inside vmap belongs to one member."""
    q, rows, _, cotangents = arrays(members=(2,))
    stored = {n: np.stack([x[LAYER], x[0]]) for n, x in rows.items()}

    def own(q, rows):
      return attend(q, open_rows(rows, length=16, start=0), 8)[0]

    gradients = lambda q, rows, cotangents: jax.vjp(own, q, rows)[1](cotangents)
    got = jax.jit(jax.vmap(gradients))(q, stored, cotangents)
    for i in range(2):
      padded = {n: np.stack([0 * x[i], x[i]]) for n, x in stored.items()}
      dq, drows = dense_gradients(q[i], padded, member_of(cotangents, i), 16)
      own_dq, own_drows = member_of(got, i)
      self.assert_close(own_dq, dq)
      self.assert_close(own_drows, {n: x[LAYER] for n, x in drows.items()})


if __name__ == "__main__":
  absltest.main()


@pytest.mark.slow  # 4.3 GB
class LargeTest(absltest.TestCase):
  def test_beyond_two_to_the_31_elements(self):
    """The last rows are read and added to as the first ones are."""
    width, dtype = 64, jnp.float8_e4m3fn
    capacity = 2**31 // width + 256
    values = np.arange(1, 6, dtype=np.float32)[:, None] * np.ones(width)
    rows = jnp.zeros((1, capacity, width), dtype)
    rows = jax.jit(
      lambda x: x.at[0, -5:].set(values.astype(dtype)), donate_argnums=0
    )(rows)
    tap = jnp.zeros((1, capacity, width), dtype)
    number = lambda x: jnp.asarray(x, jnp.int32)
    segment = Segment(
      rows={"x": rows},
      tap={"x": tap},
      layer=number(0),
      length=number(capacity),
      start=number(0),
      dtype="float32",
    )
    positions = number([[capacity - 1, 7, capacity - 4]])

    @functools.partial(jax.jit, donate_argnums=0)
    def run(tap, rows):
      def call(tap):
        at = segment.replace(rows={"x": rows}, tap=tap)
        (block, where, filled), tap = read_block(
          at, number(capacity // 256 - 1), 256
        )
        (taken, _), tap = gather_rows(at.replace(tap=tap), positions, ("x",))
        return ((block["x"], taken["x"]), tap), (where, filled)

      read, pull_back, found = jax.vjp(call, tap, has_aux=True)
      ones = jax.tree.map(jnp.ones_like, read[0])
      (dtap,) = pull_back((ones, tap))
      return *read[0], *found, dtap

    block, taken, where, filled, dtap = run(segment.tap, rows)
    np.testing.assert_array_equal(block[filled][-5:], values)
    self.assertEqual(int(where[-1]), capacity - 1)
    np.testing.assert_array_equal(taken[0, :, 0], [5, 0, 2])
    added = np.asarray(dtap["x"][0, -6:, 0], np.float32)
    np.testing.assert_array_equal(added, [1, 1, 2, 1, 1, 2])
    self.assertEqual(float(dtap["x"][0, 7, 0]), 1)
    self.assertEqual(float(jnp.abs(dtap["x"][0, 8:-256]).max()), 0)
