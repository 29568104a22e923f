"""Checks of one mixer called by itself, with segments and carries."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np

from longstraw_jax.models.contract import State
from longstraw_jax.ops.pages import Segment
from longstraw_jax.ops.precision import wide_dtype
from longstraw_jax.testing.compare import (
  leaves,
  quick_jit,
  require,
  require_equal,
  require_shapes,
)
from longstraw_jax.testing.mixer_subject import (
  GARBAGE,
  TOKENS,
  Subject,
  make_segment,
  make_span,
  random_like,
)

CHUNKS = (1, 4, 5, 12)  # one, a divisor, a non-divisor, the whole
PAGE_ROWS = (4096, 16384)  # capacities of the memory check


def _walk(subject: Subject, chunk: int, prompt: int):
  """All tokens in padded chunks, with two segments before every call.

  The first `prompt` rows come to lie in one segment, the others in the next.
  Returns outputs, rows [..., TOKENS, H] and carry.
  """
  rows = jax.tree.map(lambda x: np.zeros(x.shape), subject.shapes[0])
  room = lambda tokens: max(tokens + -tokens % chunk, 1)
  outputs, carry = [], subject.zero_carry
  for first, end in ((0, prompt), (prompt, TOKENS)):
    for start in range(first, end, chunk):
      length = min(chunk, end - start)
      x = np.full((chunk, subject.config.embed_dim), GARBAGE)
      x[:length] = subject.inputs[start : start + length]
      border = min(prompt, start)
      segments = (
        _stored(subject, rows, 0, border, room(prompt)),
        _stored(subject, rows, border, start, room(TOKENS - prompt)),
      )
      y, update = subject.call(x, length, start, segments, carry)
      outputs.append(y[:length])
      carry = update.carry
      for name, new in update.rows.items():
        rows[name][..., start : start + length, :] = new[..., :length, :]
  return np.concatenate(outputs), rows, carry


def _stored(subject, rows, first: int, last: int, capacity: int) -> Segment:
  """Rows [first, last) as a segment."""
  segment = subject.pages(capacity)
  for name, buffer in segment.rows.items():
    buffer[1, ..., : last - first, :] = rows[name][..., first:last, :]
  return make_segment(segment.rows, segment.tap, last - first, first, layer=1)


def check_shapes(subject: Subject) -> None:
  """Declared shapes and dtypes are those returned; taps are handed on."""
  for dtype in ("float64", "float32", "bfloat16"):
    mixer = subject.mixer(dtype)
    rows, carry = mixer.state_shapes(TOKENS, dtype)
    for path, x in leaves(rows).items():
      require(
        x.shape[-2] == TOKENS and x.dtype == jnp.dtype(dtype),
        "shapes",
        f"rows{path} of {TOKENS} tokens are declared {x.dtype}{x.shape}: the "
        f"token axis is the last but one and rows are in the model's {dtype}",
      )
    for path, x in leaves(carry).items():
      narrow = path.strip(".[]'") in subject.narrow_carries
      require(
        narrow or x.dtype == wide_dtype(x.dtype),
        "shapes",
        f"carry{path} is declared {x.dtype}: what sums over the context is "
        "float32 or wider; name it in narrow_carries if it only copies inputs",
      )
    for number in range(3):
      _check_call_shapes(subject, mixer, dtype, number, rows, carry)


def _check_call_shapes(subject, mixer, dtype, number, rows, carry) -> None:
  x_TD = jax.ShapeDtypeStruct((TOKENS, subject.config.embed_dim), dtype)
  pages = jax.eval_shape(lambda: subject.pages(2 * TOKENS, dtype))
  span = make_span()
  shared = subject.shared(span.positions)
  state = State(pages=(pages,) * number, carry=carry, shared=shared)
  call = lambda key, x, state: mixer.init_with_output(key, x, span, state)
  key = jax.eval_shape(lambda: jax.random.key(0))
  (y, update), _ = jax.eval_shape(call, key, x_TD, state)
  case = f"with {number} segments in {dtype}"
  require_shapes("shapes", y, x_TD, f"outputs {case}")
  require_shapes("shapes", update.rows, rows, f"rows {case}")
  require_shapes("shapes", update.carry, carry, f"carries {case}")
  require(
    isinstance(update.taps, tuple) and len(update.taps) == number,
    "taps",
    f"{number} segments were given, {len(update.taps)} taps handed on",
  )
  for i, tap in enumerate(update.taps):
    require_shapes("taps", tap, pages.tap, f"leaves of tap {i} {case}")
  untapped = (pages.replace(tap=None),) * number
  state = state.replace(pages=untapped)
  (_, update), _ = jax.eval_shape(call, key, x_TD, state)
  require(
    update.taps == (None,) * number,
    "taps",
    f"segments without a tap must hand on None, not {update.taps}",
  )


def check_splits(subject: Subject) -> None:
  """Outputs, rows and carry do not depend on how the tokens are cut."""
  y, update = subject.whole
  for chunk, prompt in itertools.product(CHUNKS, (0, 7)):
    got = _walk(subject, chunk, prompt)
    case = f"chunks of {chunk}, {prompt} tokens in the first segment, "
    wanted = (y, update.rows, update.carry)
    for what, a, b in zip(
      ("outputs", "rows", "carry"), got, wanted, strict=True
    ):
      require_equal("splits", a, b, case + what)


def check_padding(subject: Subject) -> None:
  """Padding changes nothing; a call of no tokens leaves the carry as it is."""
  carry = subject.whole[1].carry
  real = 7
  x = subject.inputs.copy()
  x[real:] = GARBAGE
  segments = (subject.pages(TOKENS),)
  y, update = subject.call(x, real, 0, segments, carry)
  alone, wanted = subject.call(x[:real], real, 0, segments, carry)
  cut = lambda rows: jax.tree.map(lambda x: x[..., :real, :], rows)
  case = f"{real} of {TOKENS} tokens real, "
  require_equal("padding", y[:real], alone, case + "outputs")
  require_equal("padding", cut(update.rows), wanted.rows, case + "rows")
  require_equal("padding", update.carry, wanted.carry, case + "carry")
  _, update = subject.call(x, 0, 0, segments, carry)
  same = jax.tree.map(np.array_equal, update.carry, carry)
  require(
    all(jax.tree.leaves(same)),
    "padding",
    f"a call with length 0 changed the carry; leaves untouched: {same}",
  )


def check_causality(subject: Subject) -> None:
  """No output or row depends on a later token, no carry on padding."""
  params, real = subject.params, 7
  _, carry = subject.shapes
  carry, segments = random_like(carry, seed=3), (subject.pages(TOKENS),)

  def influence(x):
    """|d token t / d x_s| for rows, and |d carry / d x_s| as the last row."""

    def scalars(x):
      y, update = subject.apply(params, x, real, 0, segments, carry)
      rows = [
        jnp.moveaxis(row, -2, 0).reshape(TOKENS, -1)
        for row in jax.tree.leaves(update.rows)
      ]
      per_token = jnp.concatenate([y, *rows], axis=-1)
      weights = jnp.sin(1.0 + jnp.arange(per_token.shape[-1]))
      total = sum(
        (x * jnp.sin(1.0 + jnp.arange(x.size)).reshape(x.shape)).sum()
        for x in jax.tree.leaves(update.carry)
      )
      return jnp.append(per_token @ weights, total)

    return jnp.abs(jax.jacrev(scalars)(x)).sum(-1)

  strength = np.asarray(quick_jit(influence)(subject.inputs))
  tokens = strength[:TOKENS]
  later = np.argwhere(np.triu(tokens, 1) != 0)
  require(
    len(later) == 0,
    "causality",
    f"token {later[0] if len(later) else ''}: its output or row depends on a "
    "later token ([token, later token])",
  )
  require(
    bool((np.diag(tokens) > 0)[:real].all()),
    "causality",
    "an output does not depend on its own token",
  )
  require(
    bool((strength[TOKENS, real:] == 0).all()),
    "causality",
    f"the carry depends on padding: {strength[TOKENS]}",
  )


def check_memory(subject: Subject) -> None:
  """A gradient holds no copies of the pages.

  Temporaries of one call's gradient are compiled for two capacities of the
  segment. Pages and accumulator are arguments, the accumulator is updated in
  place: what grows with capacity is a copy.
  """
  mixer = subject.mixer()
  if not subject.shapes[0]:
    return  # nothing is stored, so nothing can be copied
  tokens = 4 * subject.config.query_block
  temporaries = [
    _gradient_temporaries(subject, mixer, rows, tokens) for rows in PAGE_ROWS
  ]
  growth = temporaries[1] - temporaries[0]
  per_row = sum(
    x.dtype.itemsize * x.size // TOKENS
    for x in jax.tree.leaves(subject.shapes[0])
  )
  buffer = per_row * (PAGE_ROWS[1] - PAGE_ROWS[0])
  require(
    growth <= buffer / 2,
    "memory",
    f"pages growing by {buffer / 2**20:.2f} MiB make the gradient of "
    f"{tokens} tokens hold {growth / 2**20:.2f} MiB more, so pages are copied; "
    "hand on the tap of every read to the next, and no segment through a scan",
  )


def _gradient_temporaries(subject, mixer, capacity: int, tokens: int) -> int:
  """Bytes of temporaries of the gradient of one call over large pages."""
  rows, carry = mixer.state_shapes(capacity, "float64")
  rows = jax.tree.map(
    lambda x: jax.ShapeDtypeStruct((1, *x.shape), x.dtype), rows
  )
  x_TD = jax.ShapeDtypeStruct((tokens, subject.config.embed_dim), "float64")

  def gradient(accumulator, params, x, carry, rows, length):
    def call(params, x, carry, tap):
      segments = (make_segment(rows, tap, length, 0),)
      y, update = subject.apply(params, x, tokens, length, segments, carry)
      return (y, update.rows, update.carry), update.taps

    outputs, pull_back = jax.vjp(call, params, x, carry, accumulator)
    return pull_back((outputs[0], (accumulator,)))

  compiled = (
    quick_jit(gradient, donate_argnums=0)
    .lower(rows, subject.params, x_TD, carry, rows, jnp.int32(capacity))
    .compile()
  )
  return compiled.memory_analysis().temp_size_in_bytes
