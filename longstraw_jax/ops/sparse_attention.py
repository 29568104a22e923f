"""Attention of every query to the few keys that were selected for it."""

from jaxtyping import Array, Float, Int

from longstraw_jax.ops.pages import (
  Segment,
  attend_chosen,
  attend_chosen_own,
  merge,
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
  dims. The call itself and every segment give their part of the softmax.

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
    Outputs in float32 or wider, and the tap of every segment as handed on.
  """
  sizes = {"value_dim": value_dim, "query_block": query_block}
  parts, taps = [], []
  for segment in segments:
    part, tap = attend_chosen(q_TNH, keys_TA, segment, name=name, **sizes)
    parts.append(part)
    taps.append(tap)
  own = attend_chosen_own(q_TNH, keys_TA, rows_TH, positions_T[0], **sizes)
  return merge([*parts, own]), tuple(taps)
