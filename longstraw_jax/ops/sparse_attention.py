"""Attention of every query to the few keys that were selected for it."""

from jaxtyping import Array, Float, Int

from longstraw_jax.ops.pages import (
  Segment,
  attend_chosen,
  open_rows,
)


def sparse_attention(
  q_TNH: Float[Array, "T N H"],
  rows_TH: Float[Array, "T H"],
  positions_T: Int[Array, "T"],
  keys_TA: Int[Array, "T A"],
  segments: tuple[Segment, ...],
  *,
  name: str,
  value_dim: int,
  query_block: int,
) -> tuple[Float[Array, "T N Hv"], tuple[dict | None, ...]]:
  """Softmax attention to selected rows, which are keys and values at once.

  A row is a key over its whole width and a value over its first `value_dim`
  dims. Keys of one query may lie in the call itself and in any segment.

  Args:
    q_TNH: queries, scaled.
    rows_TH: this call's own rows.
    positions_T: consecutive positions of this call.
    keys_TA: positions that each query attends to, its own or earlier ones,
      none twice; negative ones are left out.
    segments: pages before the call.
    name: of the rows that are read, [L, S, H].
    value_dim: width of a value.
    query_block: queries handled at once.

  Returns:
    Outputs in the dtype of the queries, and the tap of every segment as handed
    on.
  """
  own = open_rows({name: rows_TH}, rows_TH.shape[0], positions_T[0])
  o_TNH, (*taps, _) = attend_chosen(
    q_TNH,
    keys_TA,
    (*segments, own),
    name=name,
    value_dim=value_dim,
    query_block=query_block,
  )
  return o_TNH, tuple(taps)
