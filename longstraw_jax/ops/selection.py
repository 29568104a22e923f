"""Which keys a query attends to: the exact top of the index scores.

DeepSeek sparse attention's indexer, as GLM-5 has it:

  I[t, s] = sum_n w[t, n] relu(q[t, n] . k[s])

and query t attends to the A keys of the highest I among those at or before it,
the lowest position where scores are equal. Scores exist for one tile of
queries and keys at a time.

The bits of a score depend on the shape of the product, and two programs that
disagree in a bit may choose different keys. So every score anywhere comes from
one tile shape, padded where there is less to score.
"""

import functools

import jax
from jax import lax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from longstraw_jax.ops.pages import Segment, on_owners, row_specs
from longstraw_jax.ops.pages.segment import Place, block_trips, read_slots
from longstraw_jax.ops.pages.striping import (
  lists_by_query,
  num_owners,
)
from longstraw_jax.ops.precision import wide_dtype, wide_einsum, widen
from longstraw_jax.ops.token_sharding import (
  all_gather_tokens,
  local_tokens,
)
from longstraw_jax.sharding import WHOLE

NO_KEY = -1  # position of a slot that holds no key


def index_scores(
  q_QNJ: Float[Array, "Q N J"],
  w_QN: Float[Array, "Q N"],
  k_BJ: Float[Array, "B J"],
) -> Float[Array, "Q B"]:
  """Scores of one tile in float32 or wider; -0.0 is made 0.0."""
  dots = jax.nn.relu(wide_einsum("qnj,bj->nqb", q_QNJ, k_BJ))
  scores = (widen(w_QN).T[..., None] * dots).sum(0)
  # top_k ranks -0.0 below 0.0; XLA deletes x + 0.0, so this is spelt out.
  return jnp.where(scores == 0, 0.0, scores)


def merge_top(best, scores_QB, positions_B, visible_QB: Bool[Array, "Q B"]):
  """The best so far, ([Q, A] scores, [Q, A] positions), and a tile's.

  Kept keys stand first and come from lower positions, so that equal scores
  keep the lower one.
  """
  scores, positions = best
  scores_QB = jnp.where(visible_QB, scores_QB, -jnp.inf)
  positions_QB = jnp.where(visible_QB, positions_B, NO_KEY)
  scores = jnp.concatenate([scores, scores_QB], axis=1)
  positions = jnp.concatenate([positions, positions_QB], axis=1)
  scores, order = lax.top_k(scores, best[0].shape[1])
  return scores, jnp.take_along_axis(positions, order, axis=1)


def best_of_all(best, others):
  """The best of lists in any order, ([Q, A], [Q, A]) and ([Q, B], [Q, B])."""
  scores, positions = (
    jnp.concatenate(pair, axis=1) for pair in zip(best, others, strict=True)
  )
  order = (-scores, positions)
  scores, positions = lax.sort(order, dimension=1, num_keys=2)
  number = best[0].shape[1]
  return -scores[:, :number], positions[:, :number]


def best_of_owners(best, part):
  """The best of what all have and of lists that owners made, on all of them.

  Each owner gets the lists of its share of the queries, Q n A values in all,
  and what it finds goes to the others; inside on_owners.
  """
  queries = best[0].shape[0]
  even = queries + -queries % num_owners()
  even_up = lambda tree: jax.tree.map(lambda x: _padded(x, even), tree)
  own = jax.tree.map(local_tokens, even_up(best))
  merged = best_of_all(own, lists_by_query(even_up(part)))
  return jax.tree.map(lambda x: x[:queries], all_gather_tokens(merged))


def _padded(x: Array, size: int) -> Array:
  """Rows padded with zeros to `size`."""
  return jnp.pad(x, ((0, size - x.shape[0]),) + ((0, 0),) * (x.ndim - 1))


def _tiles(x: Array, size: int) -> Array:
  """[T, ...] as [tiles, size, ...], padded with zeros."""
  x = _padded(x, x.shape[0] + -x.shape[0] % size)
  return x.reshape(-1, size, *x.shape[1:])


def select_keys(
  q_TNJ: Float[Array, "T N J"],
  w_TN: Float[Array, "T N"],
  k_TJ: Float[Array, "T J"],
  positions_T: Int[Array, "T"],
  segments: tuple[Segment, ...],
  *,
  name: str,
  number: int,
  query_tile: int,
  key_tile: int,
) -> Int[Array, "T A"]:
  """Positions of the best keys of every query, best first.

  Args:
    q_TNJ: index queries, scaled.
    w_TN: weights of the heads.
    k_TJ: this call's own index keys.
    positions_T: consecutive positions of this call.
    segments: pages before the call, oldest first.
    name: of the rows that hold index keys, [L, S, J].
    number: A, keys a query attends to.
    query_tile: queries of one tile.
    key_tile: keys of one tile.

  Returns:
    [T, A] int32; NO_KEY where fewer than A keys are visible. Not
    differentiable.
  """
  q_TNJ, w_TN, k_TJ = lax.stop_gradient((q_TNJ, w_TN, k_TJ))
  own_tiles = _tiles(k_TJ, key_tile)
  start = positions_T[0].astype(jnp.int32)
  wide = wide_dtype(jnp.result_type(q_TNJ, w_TN, k_TJ))
  places = [Place.of(segment) for segment in segments]
  nothing = (
    jnp.full((query_tile, number), -jnp.inf, wide),
    jnp.full((query_tile, number), NO_KEY, jnp.int32),
  )

  def one_tile(inputs):
    q, w, first = inputs
    queries = start + first + jnp.arange(query_tile, dtype=jnp.int32)

    def take(best, keys, positions, filled):
      visible = filled & (positions <= queries[:, None])
      return merge_top(best, index_scores(q, w, keys), positions, visible)

    def best_stored(size, rows, place, best, q, w, queries):
      def body(index, best):
        block, positions, filled, _ = read_slots(rows, place, index, size)
        pad = functools.partial(_padded, size=key_tile)
        keys, positions = pad(block[name]), pad(positions)
        visible = pad(filled) & (positions <= queries[:, None])
        return merge_top(best, index_scores(q, w, keys), positions, visible)

      trips = block_trips(place, size)
      if place.striping is None:
        return lax.fori_loop(0, trips, body, best)
      part = lax.fori_loop(0, trips, body, nothing)
      return best_of_owners(best, part)

    def take_own(index, best):
      slots = index * key_tile + jnp.arange(key_tile, dtype=jnp.int32)
      keys = lax.dynamic_index_in_dim(own_tiles, index, keepdims=False)
      return take(best, keys, start + slots, slots < k_TJ.shape[0])

    best = nothing
    for segment, place in zip(segments, places, strict=True):
      rows = {name: segment.rows[name]}
      call = functools.partial(best_stored, segment.block_size(key_tile))
      best = on_owners(
        segment.striping, call, (row_specs(rows),) + (WHOLE,) * 5, WHOLE
      )(rows, place, best, q, w, queries)
    trips = lax.div(first + query_tile - 1, jnp.int32(key_tile)) + 1
    trips = jnp.minimum(trips, own_tiles.shape[0])
    return lax.fori_loop(0, trips, take_own, best)[1]

  q, w = _tiles(q_TNJ, query_tile), _tiles(w_TN, query_tile)
  first = query_tile * jnp.arange(q.shape[0], dtype=jnp.int32)
  chosen = lax.map(one_tile, (q, w, first))
  return chosen.reshape(-1, number)[: q_TNJ.shape[0]]
