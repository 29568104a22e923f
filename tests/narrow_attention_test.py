"""Attention in bfloat16 against XLA's own autodiff of the plain softmax.

What all keys have in common changes no output and no gradient, however long it
is beside what tells them apart; learned biases of keys make it long. Errors are
of the norm, against float32 gradients of the same inputs.
"""

import functools

from absl.testing import absltest, parameterized
import jax
import jax.numpy as jnp
import numpy as np

from longstraw_jax import make_mesh
from longstraw_jax.ops.attention import causal_attention, masked_attention
from longstraw_jax.ops.pages import (
  Segment,
  Striping,
  attend,
  attend_blocks,
  attend_chosen,
)

T, N, K, S = 16, 4, 2, 256
CHOSEN, VALUE = 200, 48  # keys of a query, and a value's dims of a row
# Draws of roundings differ, and where parts are joined their cotangents are
# rounded once more: 1.28 at worst, where 10 to 90 stood before.
BEYOND_XLA = 1.35


def common_keys(kind, width):
  """q, k, v and the cotangent of o; mean logits are about -120, or 120."""
  rng = np.random.default_rng(0)
  q, do = rng.normal(size=(2, T, N, width))
  k, v = rng.normal(size=(2, K, S, width))
  common = rng.normal(size=(K, 1, width))
  common /= np.linalg.norm(common, axis=-1, keepdims=True)
  toward = np.repeat(common, N // K, axis=0).swapaxes(0, 1)
  logit = 120 * np.sqrt(width)
  key = {"none": 0.0, "long": 240.0, "turning": 60.0}.get(kind, 31.0)
  if kind == "turning":  # as rotary embedding turns a bias over positions
    pairs = width // 2
    angles = np.arange(S)[:, None] * np.exp(-8 * np.arange(pairs) / pairs)
    z = (common[..., :pairs] + 1j * common[..., pairs:]) * np.exp(1j * angles)
    common = np.concatenate([z.real, z.imag], axis=-1)
    toward = -np.repeat(common[:, -T:], N // K, axis=0).swapaxes(0, 1)
  sign = 1 if kind == "positive" else -1
  if key:
    q += sign * logit / key * toward
  k += key * common
  if kind == "values":
    v += 31 * common
  return tuple(jnp.asarray(x, jnp.bfloat16) for x in (q, k, v, do))


def plain(q, k, v, causal):
  """Softmax attention by one einsum after the other, scores in float32."""
  k, v = (jnp.repeat(x, N // K, axis=0) for x in (k, v))
  product = functools.partial(
    jnp.einsum, preferred_element_type=jnp.promote_types(q.dtype, "float32")
  )
  scores = product("tnh,nsh->nts", q, k) * q.shape[-1] ** -0.5
  tokens, rows = scores.shape[1:]
  seen = jnp.tril(jnp.ones((tokens, rows), bool), rows - tokens)
  scores = jnp.where(seen | (not causal), scores, -1e30)
  weights = jax.nn.softmax(scores).astype(v.dtype)
  return product("nts,nsh->tnh", weights, v)


@functools.partial(jax.jit, static_argnums=0)
def autodiff(causal, q, k, v, do):
  o, pull_back = jax.vjp(lambda *x: plain(*x, causal), q, k, v)
  return o, *pull_back(do.astype(o.dtype))


def softmax_part(q, rows, positions, filled):
  del positions
  mask = jnp.broadcast_to(filled, (q.shape[0], filled.shape[0]))
  return masked_attention(q, rows["k"], rows["v"], mask)


def segment_of(rows, tap, start=0, striping=None):
  length = next(iter(rows.values())).shape[-2]
  layer, length, start = map(jnp.int32, (0, length, start))
  return Segment(
    rows=rows,
    tap=tap,
    layer=layer,
    length=length,
    start=start,
    striping=striping,
  )


def gradients(read, q, rows, do):
  """(o, dq, gradients of rows) of read(q, tap) -> (o, tap)."""
  zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, "float32"), rows)
  (o, _), pull_back = jax.vjp(read, q, zeros)
  dq, tap = pull_back((do.astype(o.dtype), zeros))
  return o, dq, tap


def read_all(reader, q, k, v, do, striping=None):
  deal = striping.deal if striping else lambda x: x
  collect = striping.collect if striping else lambda x: x
  rows = {"k": deal(k[None]), "v": deal(v[None])}

  def read(q, tap):
    (o, _), tap = reader(q, segment_of(rows, tap, striping=striping), 64)
    return o, tap

  o, dq, tap = gradients(read, q, rows, do)
  return o, dq, collect(tap["k"])[0], collect(tap["v"])[0]


def read_by_owners(q, k, v, do):
  return read_all(attend, q, k, v, do, Striping(chunk=32, shards=4))


def read_causally(segments, query_block, q, k, v, do):
  """The last T rows are the call's own, the others lie in segments."""
  own = k.shape[1] - q.shape[0]
  size = own // max(segments, 1)
  bounds = [(i * size, (i + 1) * size) for i in range(segments)]
  rows = [{"k": k[None, :, a:b], "v": v[None, :, a:b]} for a, b in bounds]

  def read(q, tap):
    own_rows, taps = tap
    # The own rows' gradient is autodiff's; a zero of it stands for them.
    k_own, v_own = k[:, own:] + own_rows["k"], v[:, own:] + own_rows["v"]
    parts = tuple(map(segment_of, rows, taps, [a for a, _ in bounds]))
    o, taps = causal_attention(
      q, k_own, v_own, parts, query_block=query_block, read_block_size=64
    )
    return o, (own_rows, list(taps))

  zeros = {"k": jnp.zeros_like(k[:, own:]), "v": jnp.zeros_like(v[:, own:])}
  taps = [
    jax.tree.map(lambda x: jnp.zeros(x.shape, "float32"), x) for x in rows
  ]
  (o, _), pull_back = jax.vjp(read, q, (zeros, taps))
  none = jax.tree.map(jnp.zeros_like, zeros)
  dq, (down, taps) = pull_back((do.astype(o.dtype), (none, taps)))
  join = lambda name: jnp.concatenate(
    [*(tap[name][0] for tap in taps), down[name].astype("float32")], axis=1
  )
  return o, dq, join("k"), join("v")


READERS = {
  "attend": (False, functools.partial(read_all, attend)),
  "attend_blocks": (
    False,
    functools.partial(read_all, functools.partial(attend_blocks, softmax_part)),
  ),
  "owners": (False, read_by_owners),
  "pages_and_own": (True, functools.partial(read_causally, 1, 512)),
  "two_segments": (True, functools.partial(read_causally, 2, 4)),
}
KINDS = ("none", "common", "long", "positive", "turning", "values")


def error(got, wanted):
  got, wanted = (np.asarray(x, "float64") for x in (got, wanted))
  return np.linalg.norm(got - wanted) / np.linalg.norm(wanted)


class NarrowAttentionTest(parameterized.TestCase):
  def assert_no_worse(self, names, got, xla, wanted, note):
    for name, *arrays in zip(names, got, xla, wanted, strict=True):
      mine, theirs = (error(x, arrays[2]) for x in arrays[:2])
      self.assertLess(mine, BEYOND_XLA * theirs, f"{name}, {note}")

  @parameterized.product(reader=tuple(READERS), width=(64, 128))
  def test_no_worse_than_autodiff(self, reader, width):
    """128^-1/2 is no power of two: a scale that is rounded into q shows."""
    causal, read = READERS[reader]
    run = jax.jit(read)
    with jax.set_mesh(make_mesh(4 if reader == "owners" else 1)):
      for kind in KINDS:
        inputs = common_keys(kind, width)
        wide = [x.astype("float32") for x in inputs]
        wanted = autodiff(causal, *wide)
        xla = autodiff(causal, *inputs)
        names = ("o", "dq", "dk", "dv")
        self.assert_no_worse(names, run(*inputs), xla, wanted, kind)

  @parameterized.parameters(64, 128)
  def test_own_rows_in_blocks_of_queries(self, width):
    """All of S tokens, some blocks of queries over those before them."""
    run = jax.jit(functools.partial(read_causally, 0, 64))
    for kind in KINDS:
      q, k, v, do = common_keys(kind, width)
      q, do = (jnp.tile(x, (S // T, 1, 1)) for x in (q, do))
      inputs = (q, k, v, do)
      wanted = autodiff(True, *(x.astype("float32") for x in inputs))
      xla = autodiff(True, *inputs)
      names = ("o", "dq", "dk", "dv")
      self.assert_no_worse(names, run(*inputs), xla, wanted, kind)

  @parameterized.parameters(((0, S),), ((0, 100, S),))
  def test_chosen_rows(self, bounds):
    """Rows are keys and values: what keys have in common, values have too."""
    rng = np.random.default_rng(1)
    keys = np.stack([rng.permutation(S)[:CHOSEN] for _ in range(T)])
    parts = list(zip(bounds, bounds[1:], strict=False))

    @jax.jit
    def run(q, cut, do):
      def read(q, taps):
        segments = tuple(map(segment_of, cut, taps, [a for a, _ in parts]))
        return attend_chosen(
          q, keys, segments, name="x", value_dim=VALUE, query_block=8
        )

      return gradients(read, q, tuple(cut), do)

    @jax.jit
    def dense(q, row, do):
      def call(q, row):
        wide = jnp.promote_types(q.dtype, "float32")
        product = functools.partial(jnp.einsum, preferred_element_type=wide)
        chosen = row[keys]
        weights = jax.nn.softmax(product("tnh,tah->tna", q, chosen))
        weights = weights.astype(row.dtype)
        return product("tna,tah->tnh", weights, chosen[..., :VALUE])

      o, pull_back = jax.vjp(call, q, row)
      return o, *pull_back(do.astype(o.dtype))

    for kind in ("none", "common", "long", "beyond"):
      q, k, _, do = common_keys("none", 64)
      common = rng.normal(size=64)
      if kind == "beyond":  # in the dims that are no value's
        common[:VALUE] = 0
      common *= {"none": 0, "long": 240}.get(kind, 31) / np.linalg.norm(common)
      toward = -120 * common / max(common @ common, 1)
      q = jnp.asarray(q / 8 + toward, jnp.bfloat16)
      row = jnp.asarray(k[0] + common, jnp.bfloat16)
      do = do[..., :VALUE]
      cut = [{"x": row[None, a:b]} for a, b in parts]
      wanted = dense(*(x.astype("float32") for x in (q, row, do)))
      o, *xla = dense(q, row, do)
      xla = (o.astype(q.dtype), *xla)  # attend_chosen's are as narrow
      o, dq, taps = run(q, cut, do)
      drow = np.concatenate([tap["x"][0] for tap in taps])
      names = ("o", "dq", "drow")
      self.assert_no_worse(names, (o, dq, drow), xla, wanted, kind)


if __name__ == "__main__":
  absltest.main()
