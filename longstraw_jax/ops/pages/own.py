"""Rows of a call itself as a segment, and joining attention over parts."""

import jax
from jax import lax
import jax.numpy as jnp
from jaxtyping import Array, Float

from longstraw_jax.ops.pages.segment import EMPTY_LSE, Segment
from longstraw_jax.ops.precision import widen


@jax.custom_vjp
def _open_tap(rows):
  # Never read, so any values do; but made from the rows, so that jax.vmap
  # gives every member a tap of its own instead of summing over members.
  return jax.tree.map(widen, rows)


def _open_tap_fwd(rows):
  return _open_tap(rows), jax.tree.map(lambda x: jnp.zeros((), x.dtype), rows)


def _open_tap_bwd(dtypes, dtap):
  return (jax.tree.map(lambda x, like: x.astype(like.dtype), dtap, dtypes),)


_open_tap.defvjp(_open_tap_fwd, _open_tap_bwd)


def open_rows(rows: dict[str, Array], length, start) -> Segment:
  """This call's own rows [..., T, H] as a one-layer segment.

  What the primitives add to its tap comes back as the cotangent of the rows.
  """
  stacked = {name: x[None] for name, x in rows.items()}
  return Segment(
    rows=lax.stop_gradient(stacked),
    tap=_open_tap(stacked),
    layer=jnp.int32(0),
    length=jnp.asarray(length, jnp.int32),
    start=jnp.asarray(start, jnp.int32),
  )


def normalise(o, top, total):
  """Sums over rows as attention: (outputs, log-sum-exp).

  Args:
    o: values weighted by exp(score - top), [..., H].
    top: the highest score, [...].
    total: the sum of the weights, [...]; 0 where there were no rows, which
      gives o = 0 and EMPTY_LSE.
  """
  empty = total == 0
  total = jnp.where(empty, 1.0, total)
  lse = jnp.where(empty, EMPTY_LSE, top + jnp.log(total))
  return o / total[..., None], lse


def merge(parts: list[tuple[Array, Array]]) -> Float[Array, "T N H"]:
  """Joins attention over disjoint rows by their log-sum-exp.

  Args:
    parts: (o [T, N, H], lse [T, N]) of each. A part with lse = EMPTY_LSE
      weighs exactly 0; if all are empty the result is 0.
  """
  # A softmax: where one part has all the weight, the cotangents of the
  # log-sum-exps cancel exactly instead of to rounding.
  weights = jax.nn.softmax(jnp.stack([lse for _, lse in parts]), axis=0)
  return sum(
    weight[..., None] * o for weight, (o, _) in zip(weights, parts, strict=True)
  )
