"""Attention to chosen rows of a segment, against dense attention by a mask."""

import functools

from absl.testing import absltest, parameterized
import jax
import jax.numpy as jnp
import numpy as np

from longstraw_jax import make_mesh
from longstraw_jax.ops.pages import (
  Segment,
  Striping,
  attend_chosen,
  open_rows,
)

L, T, N, H, V = 2, 8, 3, 6, 4  # V: width of the values
CAPACITY, LENGTH, START, LAYER = 32, 27, 5, 1
CHOSEN = 9
KEYS = np.random.default_rng(1).permuted(
  np.tile(np.arange(START - 3, START + LENGTH + 3), (T, 1)), axis=1
)[:, :CHOSEN]
KEYS[2] = -1  # a query that attends to nothing
KEYS[3, :-1] = -1  # and one with a lone key, in the segment
KEYS[3, -1] = START + 11


def arrays(seed=0):
  """Queries, rows, an accumulator in use, and a cotangent of the outputs."""
  normal = np.random.default_rng(seed).normal
  rows, used = (normal(size=(L, CAPACITY, H)) for _ in range(2))
  q = normal(size=(T, N, H))
  return q, rows, used, normal(size=(T, N, V))


def segment_of(rows, tap, striping=None, member=None):
  """A tap is {"x": accumulator}."""
  layer, length, start = map(jnp.int32, (LAYER, LENGTH, START))
  return Segment(
    rows={"x": rows},
    tap=tap,
    layer=layer,
    length=length,
    start=start,
    member=member,
    striping=striping,
  )


def chosen(q, keys, rows, tap, striping=None, member=None):
  segment = segment_of(rows, tap, striping, member)
  o, (tap,) = attend_chosen(
    q, keys, (segment,), name="x", value_dim=V, query_block=4
  )
  return o, tap


def dense(q, keys, rows):
  """Attention over all rows of the layer, those not chosen masked."""
  places = START + np.arange(LENGTH)
  seen = (keys[:, :, None] == places).any(1)[:, None]
  rows = rows[LAYER, :LENGTH]
  scores = jnp.where(seen, jnp.einsum("tnh,sh->tns", q, rows), -1e30)
  weights = jnp.where(seen, jax.nn.softmax(scores), 0.0)
  return jnp.einsum("tns,sv->tnv", weights, rows[:, :V])


@jax.jit
def dense_gradients(q, keys, rows, do):
  o, pull_back = jax.vjp(lambda q, rows: dense(q, keys, rows), q, rows)
  return o, pull_back(do)


def assert_close(got, wanted):
  close = functools.partial(np.testing.assert_allclose, rtol=1e-12, atol=1e-12)
  jax.tree.map(close, got, wanted)


class AttendChosenTest(parameterized.TestCase):
  @parameterized.parameters((1, T), (4, T), (8, T), (8, T - 1))
  def test_values_and_gradients_equal_dense(self, shards, tokens):
    """Also of rows that are dealt to several devices, and of queries."""
    q, rows, used, do = arrays()
    q, keys, do = q[:tokens], KEYS[:tokens], do[:tokens]
    striping = None if shards == 1 else Striping(chunk=8, shards=shards)
    deal = striping.deal if striping else lambda x: x
    collect = striping.collect if striping else lambda x: x

    @jax.jit
    def run(q, rows, used):
      call = lambda q, tap: chosen(q, keys, rows, tap, striping)
      (o, _), pull_back = jax.vjp(call, q, {"x": used})
      return o, pull_back((do, {"x": used}))

    with jax.set_mesh(make_mesh(shards)):
      o, (dq, total) = run(q, deal(rows), deal(used))
    wanted, (wanted_dq, drows) = dense_gradients(q, keys, rows, do)
    assert_close(o, wanted)
    assert_close(dq, wanted_dq)
    assert_close(collect(total["x"]), used + drows)
    np.testing.assert_array_equal(o[2], 0.0)

  @parameterized.parameters(1, 2)
  def test_members_share_one_accumulator(self, context):
    """Also where other devices hold other members, and other rows."""
    q, do = (
      np.stack(x) for x in zip(*(arrays(i)[::3] for i in range(2)), strict=True)
    )
    keys = np.stack([KEYS, KEYS[::-1]])
    _, rows, used, _ = arrays()
    striping = None if context == 1 else Striping(chunk=8, shards=context)
    deal = striping.deal if striping else lambda x: x
    collect = striping.collect if striping else lambda x: x
    name = None if context == 1 else "member"

    @jax.jit
    def run(q, rows, used):
      def call(q, tap):
        one = lambda *args: chosen(*args[:2], rows, tap, striping, args[2])
        over_members = jax.vmap(one, out_axes=(0, None), spmd_axis_name=name)
        return over_members(q, keys, jnp.arange(2))

      (o, _), pull_back = jax.vjp(call, q, {"x": used})
      return o, pull_back((do, {"x": used}))

    mesh = make_mesh(context, 1 if context == 1 else 2)
    with jax.set_mesh(mesh):
      o, (dq, total) = run(q, deal(rows), deal(used))
    wanted_total = used
    for i in range(2):
      wanted, (wanted_dq, drows) = dense_gradients(q[i], keys[i], rows, do[i])
      assert_close(o[i], wanted)
      assert_close(dq[i], wanted_dq)
      wanted_total = wanted_total + drows
    assert_close(collect(total["x"]), wanted_total)

  def test_one_call_pulled_back_for_a_batch_of_cotangents(self):
    """As jax.jacrev does: nothing is shared, unlike by members."""
    q, rows, used, _ = arrays()
    each = [arrays(seed)[3] for seed in range(2)]

    @jax.jit
    def run(q, rows, tap):
      call = lambda q, tap: chosen(q, KEYS, rows, tap)
      pull_back = jax.vjp(call, q, tap)[1]
      return jax.vmap(lambda do: pull_back((do, tap)))(jnp.stack(each))

    dq, total = run(q, rows, {"x": used})
    for i, do in enumerate(each):
      _, (wanted, drows) = dense_gradients(q, KEYS, rows, do)
      assert_close((dq[i], total["x"][i]), (wanted, used + drows))

  def test_keys_of_a_query_lie_in_several_segments(self):
    """In pages and in the call's own rows; both get gradients."""
    q, rows, used, do = arrays()
    own = np.random.default_rng(3).normal(size=(T, H))
    start = START + LENGTH
    positions = start + np.arange(T)
    before = positions[:, None] - [0, 1]
    keys = [np.where(KEYS < start, KEYS, -1), np.maximum(before, start - 1)]
    keys = np.concatenate(keys, axis=1)
    keys[:1, -1] = -1  # the last row of the pages, which KEYS may hold

    def sparse(q, own, tap):
      pages = segment_of(jnp.asarray(rows), tap)
      segments = (pages, open_rows({"x": own}, T, start))
      o, (tap, _) = attend_chosen(
        q, keys, segments, name="x", value_dim=V, query_block=4
      )
      return o, tap

    def plain(q, own, rows):
      every = jnp.concatenate([rows[LAYER, :LENGTH], own])
      places = START + np.arange(LENGTH + T)
      seen = (keys[:, :, None] == places).any(1)[:, None]
      scores = jnp.where(seen, jnp.einsum("tnh,sh->tns", q, every), -jnp.inf)
      return jnp.einsum("tns,sv->tnv", jax.nn.softmax(scores), every[:, :V])

    @jax.jit
    def run(q, own, used):
      o, pull_back = jax.vjp(sparse, q, own, {"x": used})
      return o[0], pull_back((do, {"x": used}))

    @jax.jit
    def run_plain(q, own, rows):
      o, pull_back = jax.vjp(plain, q, own, rows)
      return o, pull_back(do)

    o, (dq, down, total) = run(q, own, used)
    wanted, (wanted_dq, wanted_down, drows) = run_plain(q, own, rows)
    assert_close((o, dq, down), (wanted, wanted_dq, wanted_down))
    assert_close(total["x"], used + drows)


if __name__ == "__main__":
  absltest.main()
