"""Exact top keys: ties, signed zeros, any split, any order of tiles."""

import functools

from absl.testing import absltest, parameterized
import jax
import jax.numpy as jnp
import numpy as np

from longstraw_jax import Segment, make_mesh
from longstraw_jax.ops.pages import Striping
from longstraw_jax.ops.selection import (
  NO_KEY,
  index_scores,
  merge_top,
  select_keys,
)

N, J, TOKENS, NUMBER = 4, 8, 40, 6
TILES = {"query_tile": 8, "key_tile": 16}


def scores_of(kind: str, queries: int, keys: int) -> np.ndarray:
  """Adversarial scores, [queries, keys]."""
  random = np.random.default_rng(0)
  x = random.normal(size=(queries, keys)).astype("float32")
  if kind == "mostly zero":
    return np.where(random.random(x.shape) < 0.9, 0, x).astype("float32")
  if kind == "all equal":
    return np.ones_like(x)
  if kind == "signed zeros":
    return np.where(random.random(x.shape) < 0.5, -0.0, 0.0).astype("float32")
  if kind == "three levels":
    return random.integers(0, 3, x.shape).astype("float32")
  if kind == "an ulp apart":
    return np.nextafter(1, 2, dtype="float32") ** random.integers(
      0, 4, x.shape
    ).astype("float32")
  return x


def best_by_sorting(scores, visible) -> np.ndarray:
  """Positions by descending score, then ascending position."""
  scores = np.where(scores == 0, 0.0, scores)
  scores = np.where(visible, scores, -np.inf)
  order = np.argsort(-scores, axis=1, kind="stable")[:, :NUMBER]
  kept = np.take_along_axis(visible, order, axis=1)
  return np.where(kept, order, NO_KEY)


class MergeTest(parameterized.TestCase):
  @parameterized.parameters(
    "normal",
    "mostly zero",
    "all equal",
    "signed zeros",
    "three levels",
    "an ulp apart",
  )
  def test_running_merge_equals_a_stable_sort(self, kind):
    queries, keys = 12, 64
    scores = scores_of(kind, queries, keys)
    visible = np.arange(keys) <= 5 * np.arange(queries)[:, None]
    wanted = best_by_sorting(scores, visible)
    for tile in (8, 16, 64):
      best = (
        jnp.full((queries, NUMBER), -jnp.inf, jnp.float32),
        jnp.full((queries, NUMBER), NO_KEY, jnp.int32),
      )
      for first in range(0, keys, tile):
        part = slice(first, first + tile)
        # As index_scores leaves them.
        canonical = jnp.where(scores[:, part] == 0, 0.0, scores[:, part])
        positions = jnp.arange(first, first + tile, dtype=jnp.int32)
        best = merge_top(best, canonical, positions, visible[:, part])
      np.testing.assert_array_equal(best[1], wanted)


def inputs(seed=0, zeros=False):
  """Index queries, weights and keys; with `zeros` most scores are exactly 0."""
  random = np.random.default_rng(seed)
  q = random.normal(size=(TOKENS, N, J)).astype("float32")
  w = random.normal(size=(TOKENS, N)).astype("float32")
  k = random.normal(size=(TOKENS, J)).astype("float32")
  if zeros:
    q, k = np.abs(q), np.where(random.random((TOKENS, 1)) < 0.8, -1, 1) * k
    k = np.where(k[:, :1] < 0, -np.abs(k), k).astype("float32")
  return q, w, k


def whole(q, w, k):
  positions = jnp.arange(TOKENS, dtype=jnp.int32)
  return select_keys(q, w, k, positions, (), name="key", number=NUMBER, **TILES)


@functools.partial(jax.jit, static_argnames=("capacity",))
def call(q, w, k, start, border, stored, *, capacity):
  """Some tokens whose earlier keys lie in two segments."""
  segment = lambda first, length: Segment(
    rows={"key": jnp.roll(stored, -first, 0)[None, :capacity]},
    tap=None,
    layer=jnp.int32(0),
    length=length,
    start=first,
  )
  segments = (
    segment(jnp.int32(0), border),
    segment(border, start - border),
  )
  positions = start + jnp.arange(q.shape[0], dtype=jnp.int32)
  return select_keys(
    q, w, k, positions, segments, name="key", number=NUMBER, **TILES
  )


class SelectKeysTest(parameterized.TestCase):
  @parameterized.parameters(False, True)
  def test_equals_scores_sorted_at_once(self, zeros):
    q, w, k = inputs(zeros=zeros)
    scores = np.asarray(index_scores(q, w, k))
    if zeros:
      self.assertGreater((scores == 0).mean(), 0.5)
    visible = np.tril(np.ones((TOKENS, TOKENS), bool))
    found = np.asarray(whole(q, w, k))
    for t in range(TOKENS):
      kept = found[t][found[t] != NO_KEY]
      self.assertLen(set(kept), min(t + 1, NUMBER))
      wanted = best_by_sorting(scores, visible)[t]
      if zeros:
        # Exact ties: the very same keys, the lowest position first.
        np.testing.assert_array_equal(found[t], wanted)
      else:
        self.assertEqual(set(found[t]), set(wanted))

  @parameterized.product(zeros=(False, True), chunk=(1, 7, 40))
  def test_any_split_chooses_the_same_keys(self, zeros, chunk):
    """Fault 16: more than A exact zeros, every chunk size, bit for bit."""
    q, w, k = inputs(zeros=zeros)
    wanted = whole(q, w, k)
    for start in range(0, TOKENS, chunk):
      part = slice(start, start + chunk)
      border = min(start, 13)
      found = call(
        q[part],
        w[part],
        k[part],
        jnp.int32(start),
        jnp.int32(border),
        k,
        capacity=TOKENS,
      )
      np.testing.assert_array_equal(found, wanted[part])

  @parameterized.product(kind=("zeros", "all equal"), shards=(2, 4))
  def test_ties_across_devices_go_to_the_lowest_position(self, kind, shards):
    """Not to an owner: each holds a part of every chunk."""
    q, w, k = inputs(zeros=True)
    if kind == "all equal":
      k = np.ones_like(k)
    wanted = whole(q, w, k)
    start, striping = 32, Striping(chunk=8, shards=shards)
    mesh = make_mesh(shards)

    @jax.jit
    def found(q, w, k, stored):
      segment = Segment(
        rows={"key": stored[None]},
        tap=None,
        layer=jnp.int32(0),
        length=jnp.int32(start),
        start=jnp.int32(0),
        striping=striping,
      )
      positions = start + jnp.arange(q.shape[0], dtype=jnp.int32)
      return select_keys(
        q, w, k, positions, (segment,), name="key", number=NUMBER, **TILES
      )

    with jax.set_mesh(mesh):
      stored = striping.deal(jnp.asarray(k[:start]))
      got = found(q[start:], w[start:], k[start:], stored)
    np.testing.assert_array_equal(got, wanted[start:])

  def test_members_together_choose_like_one(self):
    q, w, k = inputs()
    members = lambda x, n=3: np.stack([np.roll(x, i, 0) for i in range(n)])
    found = jax.jit(jax.vmap(whole))(members(q), members(w), members(k))
    for i in range(3):
      wanted = whole(*(np.roll(x, i, 0) for x in (q, w, k)))
      np.testing.assert_array_equal(found[i], wanted)

  def test_scores_never_hold_all_heads_of_all_keys(self):
    """Temporaries do not grow with queries times heads times keys."""

    def temporaries(capacity):
      shape = lambda *xs: jax.ShapeDtypeStruct(xs, jnp.float32)
      compiled = (
        call.lower(
          shape(TOKENS, N, J),
          shape(TOKENS, N),
          shape(TOKENS, J),
          jnp.int32(capacity),
          jnp.int32(capacity),
          shape(capacity, J),
          capacity=capacity,
        )
      ).compile()
      return compiled.memory_analysis().temp_size_in_bytes

    grown = temporaries(2**16) - temporaries(2**12)
    # The test's own rolled copies of the keys, and no score beside them.
    self.assertLess(grown, 2.1 * (2**16 - 2**12) * J * 4)


if __name__ == "__main__":
  absltest.main()
