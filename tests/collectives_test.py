"""What attention over shared pages moves, read from the compiled program."""

import functools
import math
import re

from absl.testing import absltest
import jax
import jax.numpy as jnp

from longstraw_jax import (
  Segment,
  attend,
  capture,
  make_mesh,
  place_at_rest,
  rollout,
)
from longstraw_jax.ops.pages import Striping, attend_chosen
from longstraw_jax.plan import largest_collective
from tests.small_models import build, make_prompt

DEVICES, CHUNK, ROOM, LENGTH = 8, 64, 1024, 1000
TOKENS, HEADS, WIDTH, VALUE, CHOSEN = 16, 4, 8, 6, 24


def compiled(read, row_shapes, *operands) -> str:
  """A read's forward and backward pass as the compiler leaves them."""
  mesh = make_mesh(DEVICES)

  def gradient(operands, rows, tap):
    q, *others = operands

    def call(q, tap):
      segment = Segment(
        rows=rows,
        tap=tap,
        layer=jnp.int32(0),
        length=jnp.int32(LENGTH),
        start=jnp.int32(0),
        striping=Striping(chunk=CHUNK, shards=DEVICES),
      )
      return read(q, *others, segment)

    out, pull_back = jax.vjp(call, q, tap)
    return pull_back((out[0], tap))

  def dealt(shape):
    axes = (None,) * (len(shape) - 2) + ("context", None)
    pages = jax.NamedSharding(mesh, jax.P(*axes))
    return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=pages)

  rows = {name: dealt(shape) for name, shape in row_shapes.items()}
  with jax.set_mesh(mesh):
    step = jax.jit(gradient, donate_argnums=2).lower(operands, rows, rows)
  return step.compile().as_text()


def moved(text: str, name: str) -> list[int]:
  """Entries of what each collective of a kind gives a device."""
  found = re.findall(rf"= \w+\[([\d,]+)\]\S* {name}\(", text)
  return sorted(math.prod(map(int, shape.split(","))) for shape in found)


class CollectivesTest(absltest.TestCase):
  def check(self, text, value, keys=0):
    """What the docstrings state; a page's rows of one layer are far more."""
    for name in ("all-reduce", "reduce-scatter", "all-gather"):
      print(f"{name} of a chunk: {4 * sum(moved(text, name))} bytes a device")
    per_query, share = TOKENS * HEADS, TOKENS * HEADS // DEVICES
    self.assertEqual(moved(text, "all-reduce"), [per_query])
    self.assertEqual(
      moved(text, "reduce-scatter"),
      sorted([share * (value + 1), share * WIDTH]),
    )
    # Every owner gets all queries, do, delta, log-sum-exp and lists of keys.
    gathered = moved(text, "all-gather")
    self.assertLessEqual(max(gathered), max(per_query * WIDTH, keys))
    self.assertLessEqual(sum(gathered), per_query * (WIDTH + value + 2) + keys)
    for name in ("all-to-all", "collective-permute"):
      self.assertNotIn(f" {name}", text)

  def test_attention_moves_queries_and_outputs_only(self):
    shapes = {"k": (2, 2, ROOM, WIDTH), "v": (2, 2, ROOM, VALUE)}
    q = jax.ShapeDtypeStruct((TOKENS, HEADS, WIDTH), jnp.float32)
    read = functools.partial(attend, size=32)
    self.check(compiled(read, shapes, q), VALUE)

  def test_sparse_attention_moves_no_selected_row(self):
    shapes = {"latent": (2, ROOM, WIDTH)}
    q = jax.ShapeDtypeStruct((TOKENS, HEADS, WIDTH), jnp.float32)
    keys = jax.ShapeDtypeStruct((TOKENS, CHOSEN), jnp.int32)

    def read(q, keys, segment):
      sizes = {"value_dim": VALUE, "query_block": 4}
      o, (tap,) = attend_chosen(q, keys, (segment,), name="latent", **sizes)
      return o, tap

    self.check(compiled(read, shapes, q, keys), VALUE, TOKENS * CHOSEN)

  def test_decoding_moves_no_member_s_rows(self):
    """Not even the narrowest, a layer's index keys of one member."""
    model, params = build("tiny-glm", "float32")
    room, prompt = 2**14, make_prompt(DEVICES)

    def decode(params, state, key):
      return rollout(model, params, state, key, group_size=2, max_tokens=room)

    mesh = make_mesh(DEVICES)
    params = place_at_rest(params, mesh)
    with jax.set_mesh(mesh):
      take = lambda p: capture(model, p, prompt, chunk_size=DEVICES)
      state = jax.eval_shape(take, params)
      step = jax.jit(decode).lower(params, state, jax.random.key(0))
      text = step.compile().as_text()
    self.assertLess(largest_collective(text), room)


if __name__ == "__main__":
  absltest.main()
