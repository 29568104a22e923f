"""Conformance of a mixer with the contract that everything else relies on.

A mixer is right when no caller can tell how a sequence was cut, padded, shared
or replayed, neither by values nor by gradients, and when it keeps its hands
off the pages' memory. Everything runs in float64 on a tiny model, so that a
wrong term cannot hide behind rounding.
"""

from collections.abc import Callable, Sequence
import dataclasses
import functools
import itertools

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Int
import numpy as np

from longstraw_jax.capture import capture
from longstraw_jax.config import PRESETS, LayerSpec, ModelConfig, Stage
from longstraw_jax.group import group_gradient
from longstraw_jax.models.contract import State
from longstraw_jax.models.model import Model, Params
from longstraw_jax.models.registry import MIXERS, build
from longstraw_jax.ops.pages import Segment
from longstraw_jax.ops.precision import wide_dtype
from longstraw_jax.replay import replay_scores
from longstraw_jax.state import Pages, tree_zeros
from longstraw_jax.testing.baselines import conventional_gradient
from longstraw_jax.types import Group, Span, Tree

TOLERANCE = 1e-12  # float64, of values and of every gradient leaf
SMALL_LEAF = 1e-3  # leaves below this share of the whole are measured by it

TOKENS = 12  # of one sequence of the module's checks
CHUNKS = (1, 4, 5, 12)  # one, a divisor, a non-divisor, the whole
GARBAGE = 100.0  # in rows that are not filled and in layers not asked for

CAPACITY = 12  # prompt tokens that the models' checks capture at most
PROMPTS = (1, 2, 8, 13)
LENGTHS = (7, 1, 4)  # of the members of a group
BLOCK = 3  # response tokens at once, where a response spans blocks

PAGE_ROWS = (4096, 16384)  # capacities of the memory check

# Every program runs once or twice on tiny arrays: XLA should not polish it.
QUICK = {
  "xla_backend_optimization_level": 0,
  "xla_cpu_use_fusion_emitters": False,
}


# --- Comparing -------------------------------------------------------------


def _require(holds: bool, check: str, message: str) -> None:
  if not holds:
    raise AssertionError(f"{check}: {message}")


def _leaves(tree: Tree) -> dict[str, np.ndarray]:
  """Path -> leaf."""
  flat, _ = jax.tree_util.tree_flatten_with_path(tree)
  return {jax.tree_util.keystr(path): np.asarray(x) for path, x in flat}


def _require_equal(check: str, got: Tree, wanted: Tree, what: str) -> None:
  """Values agree to TOLERANCE of the leaf's largest magnitude, at least 1."""
  got, wanted = _leaves(got), _leaves(wanted)
  _require(got.keys() == wanted.keys(), check, f"{what}: leaves differ")
  for path, b in wanted.items():
    error = np.abs(got[path] - b).max(initial=0.0)
    limit = TOLERANCE * max(1.0, np.abs(b).max(initial=0.0))
    _require(  # a comparison with NaN is False, so NaN fails too
      bool(error <= limit),
      check,
      f"{what}{path} differs by {error:.3g}, allowed {limit:.3g}",
    )


def require_close_gradients(
  check: str, got: Tree, wanted: Tree, what: str = ""
) -> None:
  """Every leaf: |a - b| <= tol max(|b|, 1e-3 |all leaves of b|), in norms.

  Args:
    check: named in the message.
    got: gradients under test.
    wanted: gradients to agree with.
    what: the case, named in the message.

  Raises:
    AssertionError: a leaf is missing or differs; names it and the figures.
  """
  got, wanted = _leaves(got), _leaves(wanted)
  _require(got.keys() == wanted.keys(), check, f"{what}: leaves differ")
  norm = np.linalg.norm
  whole = norm([norm(b) for b in wanted.values()])
  for path, b in wanted.items():
    error = norm(got[path] - b)
    limit = TOLERANCE * max(norm(b), SMALL_LEAF * whole)
    _require(
      bool(error <= limit),
      check,
      f"{what}, leaf {path}: off by {error:.3g}, allowed {limit:.3g} "
      f"(norm {norm(b):.3g})",
    )


def _require_shapes(check: str, got: Tree, wanted: Tree, what: str) -> None:
  """Same structure, shapes and dtypes."""
  describe = lambda tree: {
    jax.tree_util.keystr(path): f"{x.dtype}{list(x.shape)}"
    for path, x in jax.tree_util.tree_flatten_with_path(tree)[0]
  }
  got, wanted = describe(got), describe(wanted)
  _require(got == wanted, check, f"{what} are {got}, declared {wanted}")


def _random_like(shapes: Tree, seed: int) -> Tree:
  """Normal numbers in the shapes and dtypes of a tree."""
  rng = np.random.default_rng(seed)
  return jax.tree.map(
    lambda x: rng.normal(size=x.shape).astype(x.dtype), shapes
  )


@functools.cache
def _options() -> dict | None:
  """QUICK, unless this version of XLA does not know all of it."""
  try:
    jax.jit(lambda x: x, compiler_options=QUICK)(0.0)
  except Exception:  # noqa: BLE001  (the error's type differs by backend)
    return None
  return QUICK


def _jit(function: Callable, **kwargs) -> Callable:
  """jax.jit for programs that compile long and run briefly."""
  return jax.jit(function, compiler_options=_options(), **kwargs)


# --- One mixer, called by itself -------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Subject:
  """What the checks look at."""

  name: str
  config: ModelConfig
  trainable: Callable[[str], bool]
  narrow_carries: tuple[str, ...]

  def mixer(self, dtype: str = "float64") -> nn.Module:
    """The unbound module, with activations and parameters of a dtype."""
    config = dataclasses.replace(self.config, dtype=dtype, param_dtype=dtype)
    return build(MIXERS, self.name, config)

  @functools.cached_property
  def shapes(self) -> tuple[Tree, Tree]:
    """Rows and carry of TOKENS tokens in float64."""
    return self.mixer().state_shapes(TOKENS, "float64")

  @functools.cached_property
  def inputs(self) -> np.ndarray:
    """[TOKENS, D]."""
    shape = (TOKENS, self.config.embed_dim)
    return np.random.default_rng(1).normal(size=shape)

  @functools.cached_property
  def params(self) -> Tree:
    """Parameters away from their initial values, so that none is special."""
    state = State(pages=(), carry=tree_zeros(self.shapes[1]))
    start = _jit(self.mixer().init)(
      jax.random.key(0), self.inputs, _span(), state
    )
    return _nudged(start["params"])

  @functools.cached_property
  def whole(self):
    """(y, update) of all tokens in one call without a state."""
    return self.call(self.inputs, TOKENS, 0, (), self.zero_carry)

  @functools.cached_property
  def zero_carry(self) -> Tree:
    """The carry before the first token."""
    return jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), self.shapes[1])

  @functools.cached_property
  def call(self) -> Callable:
    """(x, length, start, segments, carry) -> (y, update), compiled."""
    mixer, params = self.mixer(), self.params
    return _jit(functools.partial(_apply, mixer, params))

  def pages(self, tokens: int, dtype="float64") -> Segment:
    """An empty segment: layer 1 of 2, with garbage wherever nothing is."""
    rows = jax.tree.map(
      lambda x: np.full((2, *x.shape), GARBAGE, x.dtype),
      self.mixer(dtype).state_shapes(tokens, dtype)[0],
    )
    tap = jax.tree.map(lambda x: np.zeros(x.shape, wide_dtype(x.dtype)), rows)
    return _segment(rows, tap, 0, 0, layer=1)

  @functools.cached_property
  def alone(self) -> "_Case":
    """A model of nothing else."""
    return self._case(self.name)

  @functools.cached_property
  def chained(self) -> "_Case":
    """A model in which gradients come down from attention."""
    return self._case(self.name, "gated_attention")

  def _case(self, *mixers: str) -> "_Case":
    pattern = tuple(LayerSpec(mixer=mixer, ffn=None) for mixer in mixers)
    config = dataclasses.replace(
      self.config,
      dtype="float64",
      param_dtype="float64",
      stages=(Stage(pattern=pattern, repeats=2),),
    )
    init = functools.partial(Model(config).init, trainable=self.trainable)
    return _Case.create(Model(config), _nudged(_jit(init)(jax.random.key(1))))


def _nudged(params: Tree) -> Tree:
  noise = _random_like(params, seed=2)
  return jax.tree.map(lambda x, n: np.asarray(x) + 0.1 * n, params, noise)


def _span(tokens: int = TOKENS, length=TOKENS, start=0) -> Span:
  positions = jnp.asarray(start, jnp.int32) + np.arange(tokens, dtype=np.int32)
  return Span(positions=positions, length=jnp.asarray(length, jnp.int32))


def _segment(rows, tap, length, start, layer=0) -> Segment:
  layer, length, start = (
    jnp.asarray(x, jnp.int32) for x in (layer, length, start)
  )
  return Segment(rows=rows, tap=tap, layer=layer, length=length, start=start)


def _apply(mixer, params, x_TD, length, start, segments, carry):
  span = _span(x_TD.shape[0], length, start)
  state = State(pages=segments, carry=carry)
  return mixer.apply({"params": params}, x_TD, span, state)


def _walk(subject: _Subject, chunk: int, prompt: int):
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
  return _segment(segment.rows, segment.tap, last - first, first, layer=1)


def _check_shapes(subject: _Subject) -> None:
  """Declared shapes and dtypes are those returned; taps are handed on."""
  for dtype in ("float64", "float32", "bfloat16"):
    mixer = subject.mixer(dtype)
    rows, carry = mixer.state_shapes(TOKENS, dtype)
    for path, x in _struct_leaves(rows):
      _require(
        x.shape[-2] == TOKENS and x.dtype == jnp.dtype(dtype),
        "shapes",
        f"rows{path} of {TOKENS} tokens are declared {x.dtype}{x.shape}: the "
        f"token axis is the last but one and rows are in the model's {dtype}",
      )
    for path, x in _struct_leaves(carry):
      narrow = path.strip(".[]'") in subject.narrow_carries
      _require(
        narrow or x.dtype == wide_dtype(x.dtype),
        "shapes",
        f"carry{path} is declared {x.dtype}: what sums over the context is "
        "float32 or wider; name it in narrow_carries if it only copies inputs",
      )
    for number in range(3):
      _check_call_shapes(subject, mixer, dtype, number, rows, carry)


def _struct_leaves(tree: Tree):
  flat, _ = jax.tree_util.tree_flatten_with_path(tree)
  return [(jax.tree_util.keystr(path), x) for path, x in flat]


def _check_call_shapes(subject, mixer, dtype, number, rows, carry) -> None:
  x_TD = jax.ShapeDtypeStruct((TOKENS, subject.config.embed_dim), dtype)
  pages = jax.eval_shape(lambda: subject.pages(2 * TOKENS, dtype))
  state = State(pages=(pages,) * number, carry=carry)
  call = lambda key, x, state: mixer.init_with_output(key, x, _span(), state)
  key = jax.eval_shape(lambda: jax.random.key(0))
  (y, update), _ = jax.eval_shape(call, key, x_TD, state)
  case = f"with {number} segments in {dtype}"
  _require_shapes("shapes", y, x_TD, f"outputs {case}")
  _require_shapes("shapes", update.rows, rows, f"rows {case}")
  _require_shapes("shapes", update.carry, carry, f"carries {case}")
  _require(
    isinstance(update.taps, tuple) and len(update.taps) == number,
    "taps",
    f"{number} segments were given, {len(update.taps)} taps handed on",
  )
  for i, tap in enumerate(update.taps):
    _require_shapes("taps", tap, pages.tap, f"leaves of tap {i} {case}")
  untapped = (pages.replace(tap=None),) * number
  state = state.replace(pages=untapped)
  (_, update), _ = jax.eval_shape(call, key, x_TD, state)
  _require(
    update.taps == (None,) * number,
    "taps",
    f"segments without a tap must hand on None, not {update.taps}",
  )


def _check_splits(subject: _Subject) -> None:
  """Outputs, rows and carry do not depend on how the tokens are cut."""
  y, update = subject.whole
  for chunk, prompt in itertools.product(CHUNKS, (0, 7)):
    got = _walk(subject, chunk, prompt)
    case = f"chunks of {chunk}, {prompt} tokens in the first segment, "
    wanted = (y, update.rows, update.carry)
    for what, a, b in zip(
      ("outputs", "rows", "carry"), got, wanted, strict=True
    ):
      _require_equal("splits", a, b, case + what)


def _check_padding(subject: _Subject) -> None:
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
  _require_equal("padding", y[:real], alone, case + "outputs")
  _require_equal("padding", cut(update.rows), wanted.rows, case + "rows")
  _require_equal("padding", update.carry, wanted.carry, case + "carry")
  _, update = subject.call(x, 0, 0, segments, carry)
  same = jax.tree.map(np.array_equal, update.carry, carry)
  _require(
    all(jax.tree.leaves(same)),
    "padding",
    f"a call with length 0 changed the carry; leaves untouched: {same}",
  )


def _check_causality(subject: _Subject) -> None:
  """No output or row depends on a later token, no carry on padding."""
  mixer, params, real = subject.mixer(), subject.params, 7
  _, carry = subject.shapes
  carry, segments = _random_like(carry, seed=3), (subject.pages(TOKENS),)

  def influence(x):
    """|d token t / d x_s| for rows, and |d carry / d x_s| as the last row."""

    def scalars(x):
      y, update = _apply(mixer, params, x, real, 0, segments, carry)
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

  strength = np.asarray(_jit(influence)(subject.inputs))
  tokens = strength[:TOKENS]
  later = np.argwhere(np.triu(tokens, 1) != 0)
  _require(
    len(later) == 0,
    "causality",
    f"token {later[0] if len(later) else ''}: its output or row depends on a "
    "later token ([token, later token])",
  )
  _require(
    bool((np.diag(tokens) > 0)[:real].all()),
    "causality",
    "an output does not depend on its own token",
  )
  _require(
    bool((strength[TOKENS, real:] == 0).all()),
    "causality",
    f"the carry depends on padding: {strength[TOKENS]}",
  )


def _check_memory(subject: _Subject) -> None:
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
  _require(
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
      segments = (_segment(rows, tap, length, 0),)
      y, update = _apply(mixer, params, x, tokens, length, segments, carry)
      return (y, update.rows, update.carry), update.taps

    outputs, pull_back = jax.vjp(call, params, x, carry, accumulator)
    return pull_back((outputs[0], (accumulator,)))

  compiled = (
    _jit(gradient, donate_argnums=0)
    .lower(rows, subject.params, x_TD, carry, rows, jnp.int32(capacity))
    .compile()
  )
  return compiled.memory_analysis().temp_size_in_bytes


# --- The mixer in a model --------------------------------------------------


def weighted_scores(logprobs, entropy, group: Group):
  """A loss whose cotangents are the group's old_logprobs and ref_logprobs.

  Any objective reaches the model through its cotangents of the two scores, so
  random ones stand for all of them. The scores come back as metrics.
  """
  loss = (group.old_logprobs * logprobs + group.ref_logprobs * entropy).sum()
  return loss, {"logprobs": logprobs, "entropy": entropy}


@dataclasses.dataclass(frozen=True, eq=False)
class _Case:
  """A padded prompt and a group; every program takes the prompt's length."""

  model: Model
  params: Params
  prompt: np.ndarray
  group: Group

  @classmethod
  def create(cls, model: Model, params: Params) -> "_Case":
    """Random ids, and random cotangents of every score."""
    rng = np.random.default_rng(4)
    shape = (len(LENGTHS), max(LENGTHS))
    ids = lambda *shape: rng.integers(0, model.config.vocab_size, shape)
    prompt = ids(CAPACITY + 1).astype(np.int32)
    group = Group.create(
      ids(*shape),
      LENGTHS,
      old_logprobs=rng.normal(size=shape),
      ref_logprobs=rng.normal(size=shape),
      advantages=np.ones(shape[0]),
    )
    return cls(model, params, prompt, group)

  def capture(self, params: Params, length, chunk: int, scope: str):
    """The prompt's state."""
    return capture(
      self.model,
      params,
      self.prompt,
      chunk_size=chunk,
      grad_scope=scope,
      capacity=CAPACITY,
      length=length,
    )

  @functools.cached_property
  def _conventional(self) -> Callable:
    gradient = lambda params, prompt, group: conventional_gradient(
      self.model, params, prompt, group, weighted_scores
    )
    return _jit(gradient)

  @functools.cache  # noqa: B019  (a case lives as long as one check)
  def full_rows(self, length: int):
    """Gradient and scores by conventional_gradient over full rows.

    All but the first prompt token count as response without a cotangent, so
    that one compiled program serves every prompt length.
    """
    members, room = self.group.responses.shape
    before = np.broadcast_to(self.prompt[1:length], (members, length - 1))

    def whole(head, x):
      row = np.concatenate([head, np.asarray(x)], axis=1)
      return np.pad(row, ((0, 0), (0, CAPACITY + room - row.shape[1])))

    none = np.zeros(before.shape)
    group = Group.create(
      whole(before, self.group.responses),
      length - 1 + self.group.lengths,
      old_logprobs=whole(none, self.group.old_logprobs),
      ref_logprobs=whole(none, self.group.ref_logprobs),
    )
    _, grads, scores = self._conventional(self.params, self.prompt[:1], group)
    cut = lambda x: np.asarray(x)[:, length - 1 : length - 1 + room]
    return grads, jax.tree.map(cut, scores)

  def stopped_state(self) -> Callable:
    """length -> gradient with the state behind the prompt held constant."""
    gradient = _jit(functools.partial(stopped_state_gradient, self.model))
    return lambda length: gradient(
      self.params, self.prompt, jnp.int32(length), self.group
    )

  def replay(self, chunk: int, **sizes) -> Callable:
    """(length, order) -> scores of the members in some order."""

    def score(params, length, group):
      state = self.capture(params, length, chunk, "response_only")
      logprobs, entropy = replay_scores(
        self.model, params, state, group.responses, group.lengths, **sizes
      )
      return {"logprobs": logprobs, "entropy": entropy}

    score = _jit(score)

    def call(length, order):
      group = self.group.replace(
        responses=self.group.responses[np.array(order)],
        lengths=self.group.lengths[np.array(order)],
      )
      return score(self.params, jnp.int32(length), group)

    return call

  def transaction(self, chunk: int, scope: str, **sizes) -> Callable:
    """length -> gradient and scores by group_gradient."""

    def gradient(params, length):
      _, grads, scores = group_gradient(
        self.model,
        params,
        self.prompt,
        self.group,
        weighted_scores,
        chunk_size=chunk,
        grad_scope=scope,
        capacity=CAPACITY,
        length=length,
        **sizes,
      )
      return grads, scores

    gradient = _jit(gradient)
    return lambda length: gradient(self.params, jnp.int32(length))

  def composed(self, chunk: int, scope: str, **sizes) -> Callable:
    """length -> gradient and scores by jax.grad of replay(capture)."""

    def loss_of(trainable, length):
      params = self.params.replace(trainable=trainable)
      state = self.capture(params, length, chunk, scope)
      group = self.group
      scores = replay_scores(
        self.model, params, state, group.responses, group.lengths, **sizes
      )
      return weighted_scores(*scores, group)

    gradient = _jit(jax.grad(loss_of, has_aux=True))
    return lambda length: gradient(self.params.trainable, jnp.int32(length))


def stopped_state_gradient(
  model: Model,
  params: Params,
  prompt: Int[Array, "P"],
  length: Int[Array, ""],
  group: Group,
) -> dict:
  """The response_only gradient by two plain passes and jax.grad of the second.

  Args:
    model: the model.
    params: its parameters.
    prompt: token ids, padded behind `length`.
    length: real prompt tokens.
    group: responses, and the scores' cotangents as in weighted_scores.
  """
  config = dataclasses.replace(model.config, saved="everything")
  model = Model(config)
  captured = length - 1
  span = _span(prompt.shape[0] - 1, captured)
  carry = tree_zeros(model.state_shapes(1)[1])
  _, rows, carry, _ = model.hidden(params, prompt[:-1], span, (), carry)
  pages = Pages(rows=rows, taps=None, length=captured, start=jnp.int32(0))

  def loss_of(trainable):
    learner = params.replace(trainable=trainable)

    def score(response, real):
      tokens = jnp.append(prompt[captured], response[:-1])
      span = _span(response.shape[0], real, captured)
      hidden, *_ = model.hidden(learner, tokens, span, (pages,), carry)
      scores = model.logprobs(learner, hidden, response)
      return tuple(jnp.where(span.mask, x, 0.0) for x in scores)

    scores = jax.vmap(score)(group.responses, group.lengths)
    return weighted_scores(*scores, group)[0]

  return jax.grad(loss_of)(params.trainable)


def _check_replay(subject: _Subject) -> None:
  """Scores over a captured prompt equal full rows; a member's own are the
  same, bitwise, whoever was replayed before it."""
  case = subject.chained
  replay = case.replay(5, block_size=BLOCK)
  members = tuple(range(len(LENGTHS)))
  for length in PROMPTS:
    _require_equal(
      "replay",
      replay(length, members),
      case.full_rows(length)[1],
      f"prompt of {length}, response blocks of {BLOCK}, ",
    )
  wanted = _stacked(replay(PROMPTS[-1], members))
  for order in itertools.permutations(members):
    got = _stacked(replay(PROMPTS[-1], order))
    for place, member in enumerate(order):
      error = np.abs(got[place] - wanted[member]).max()
      _require(
        bool(error == 0),
        "replay",
        f"member {member} scores otherwise when members run as {order}, by "
        f"{error:.3g}",
      )


def _stacked(scores: dict) -> np.ndarray:
  return np.stack(jax.tree.leaves(scores), axis=-1)


def _check_gradients(subject: _Subject) -> None:
  """Every leaf of every form of the gradient equals plain jax.grad."""
  case = subject.alone
  _compare_gradients(
    case,
    {"full": lambda length: case.full_rows(length)[0]},
    {("full", "group_gradient"): case.transaction(4, "full")},
  )
  case = subject.chained
  oracles = {
    "full": lambda length: case.full_rows(length)[0],
    "response_only": case.stopped_state(),
  }
  forms = {
    ("full", "group_gradient"): case.transaction(5, "full", block_size=BLOCK),
    ("full", "grad of replay(capture)"): case.composed(
      4, "full", members_at_once=2
    ),
    ("response_only", "group_gradient"): case.transaction(5, "response_only"),
    ("response_only", "grad of replay(capture)"): case.composed(
      CAPACITY, "response_only", block_size=BLOCK
    ),
  }
  _compare_gradients(case, oracles, forms)


def _compare_gradients(case: _Case, oracles: dict, forms: dict) -> None:
  """Gradients and scores of every form, for every prompt length."""
  layers = "+".join(case.model.config.layer_types)
  for (scope, form), gradient in forms.items():
    for length in PROMPTS:
      what = f"{layers}, {scope} scope, prompt of {length}, {form}"
      grads, scores = gradient(length)
      require_close_gradients("gradients", grads, oracles[scope](length), what)
      _require_equal("gradients", scores, case.full_rows(length)[1], what)
  whole = _leaves(case.full_rows(PROMPTS[-1])[0])
  dead = [path for path, x in whole.items() if not np.any(x)]
  _require(
    not dead,
    "gradients",
    f"leaves {dead} have no gradient at all: freeze them by `trainable`",
  )


# --- All of it -------------------------------------------------------------

_CHECKS = {
  "shapes": _check_shapes,
  "splits": _check_splits,
  "padding": _check_padding,
  "causality": _check_causality,
  "memory": _check_memory,
  "replay": _check_replay,
  "gradients": _check_gradients,
}
CHECKS = tuple(_CHECKS)


def check_mixer(
  name: str,
  config: ModelConfig | None = None,
  *,
  trainable: Callable[[str], bool] = lambda path: True,
  narrow_carries: Sequence[str] = ("conv_tail",),
  checks: Sequence[str] = CHECKS,
) -> None:
  """Runs a registered mixer through everything the package relies on.

  By itself, called with segments and carries: declared shapes and dtypes are
  those returned, and every segment's tap is handed on ("shapes"); any split
  equals one pass ("splits"); padding changes nothing ("padding"); causality,
  by gradient ("causality"); no copies of the pages in a gradient's compiled
  temporaries ("memory").

  In models of two repeats, alone and under gated attention: replay equals
  full rows, and members in any order, bitwise ("replay"); the full and the
  response_only gradient, by group_gradient and by jax.grad of
  replay(capture), every leaf against plain jax.grad ("gradients").

  Args:
    name: its key in longstraw_jax.MIXERS.
    config: sizes to test with; float64 replaces its dtypes and small stages
      its stages. "tiny-hybrid" by default.
    trainable: which parameters, by path a/b/c, are expected to learn; each
      must have a gradient.
    narrow_carries: carry fields that may stay in the model's dtype because
      they copy inputs; all others must be float32 or wider.
    checks: which of CHECKS to run.

  Raises:
    AssertionError: names the check, the leaf and the figures.
  """
  unknown = [check for check in checks if check not in CHECKS]
  if unknown:
    raise ValueError(f"checks {unknown} are unknown: use some of {CHECKS}")
  config = config or PRESETS["tiny-hybrid"]
  with jax.enable_x64(True):
    subject = _Subject(name, config, trainable, tuple(narrow_carries))
    for check in checks:
      _CHECKS[check](subject)
