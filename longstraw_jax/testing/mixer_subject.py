"""One mixer under test: its inputs, its parameters and ways to call it."""

from collections.abc import Callable
import dataclasses
import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from longstraw_jax.config import LayerSpec, ModelConfig, Stage
from longstraw_jax.models.contract import State
from longstraw_jax.models.model import Model
from longstraw_jax.models.registry import MIXERS, build
from longstraw_jax.ops.pages import Segment
from longstraw_jax.ops.precision import wide_dtype
from longstraw_jax.state import tree_zeros
from longstraw_jax.testing.compare import quick_jit
from longstraw_jax.testing.mixer_case import Case
from longstraw_jax.types import Span, Tree

TOKENS = 12  # of one sequence
# Positions [T] -> what a layer below would hand on for them.
Shared = Callable[[jax.Array], dict[str, jax.Array]]
GARBAGE = 100.0  # in rows that are not filled and in layers not asked for


@dataclasses.dataclass(frozen=True)
class Subject:
  """What the checks look at."""

  name: str
  config: ModelConfig
  trainable: Callable[[str], bool]
  narrow_carries: tuple[str, ...]
  below: tuple[str, ...]
  shared: Shared

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
    span = make_span()
    state = State(
      pages=(),
      carry=tree_zeros(self.shapes[1]),
      shared=self.shared(span.positions),
    )
    start = quick_jit(self.mixer().init)(
      jax.random.key(0), self.inputs, span, state
    )
    return nudged(start["params"])

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
    return quick_jit(functools.partial(self.apply, self.params))

  def apply(self, params, x_TD, length, start, segments, carry):
    """(y, update) of a call at position `start`, `length` tokens real."""
    span = make_span(x_TD.shape[0], length, start)
    shared = self.shared(span.positions)
    state = State(pages=segments, carry=carry, shared=shared)
    return self.mixer().apply({"params": params}, x_TD, span, state)

  def pages(self, tokens: int, dtype="float64") -> Segment:
    """An empty segment: layer 1 of 2, with garbage wherever nothing is."""
    rows = jax.tree.map(
      lambda x: np.full((2, *x.shape), GARBAGE, x.dtype),
      self.mixer(dtype).state_shapes(tokens, dtype)[0],
    )
    tap = jax.tree.map(lambda x: np.zeros(x.shape, wide_dtype(x.dtype)), rows)
    return make_segment(rows, tap, 0, 0, layer=1)

  @functools.cached_property
  def case(self) -> Case:
    """A model in which gradients come down from attention."""
    pattern = tuple(
      LayerSpec(mixer=mixer, ffn=None)
      for mixer in (*self.below, self.name, "attention")
    )
    config = dataclasses.replace(
      self.config,
      dtype="float64",
      param_dtype="float64",
      saved="everything",
      stages=(Stage(pattern=pattern, repeats=2),),
    )
    model = Model(config)
    init = functools.partial(model.init, trainable=self.trainable)
    return Case.create(model, nudged(quick_jit(init)(jax.random.key(1))))

  @functools.cached_property
  def lean_case(self) -> Case:
    """The same, recomputing in the backward pass all that it can."""
    config = dataclasses.replace(self.case.model.config, saved="inputs")
    return dataclasses.replace(self.case, model=Model(config))


def random_like(shapes: Tree, seed: int) -> Tree:
  """Normal numbers in the shapes and dtypes of a tree."""
  rng = np.random.default_rng(seed)
  return jax.tree.map(
    lambda x: rng.normal(size=x.shape).astype(x.dtype), shapes
  )


def nudged(params: Tree) -> Tree:
  """Parameters moved a little, each by noise of its own."""
  noise = random_like(params, seed=2)
  return jax.tree.map(lambda x, n: np.asarray(x) + 0.1 * n, params, noise)


def make_span(tokens: int = TOKENS, length=TOKENS, start=0) -> Span:
  """Tokens from `start` on, `length` of them real."""
  positions = jnp.asarray(start, jnp.int32) + np.arange(tokens, dtype=np.int32)
  return Span(positions=positions, length=jnp.asarray(length, jnp.int32))


def make_segment(rows, tap, length, start, layer=0) -> Segment:
  """A segment whose numbers are int32 arrays."""
  layer, length, start = (
    jnp.asarray(x, jnp.int32) for x in (layer, length, start)
  )
  return Segment(rows=rows, tap=tap, layer=layer, length=length, start=start)
