"""Adding a mixer from outside: attention over the last W tokens.

Claim: a Flax module on the public page primitives and one registry line are
  a conforming mixer; capture, replay and every gradient scope follow.
Command: python -m experiments.sliding_window
Cost: about a minute on one CPU core, no accelerator.
Expected result: one line "sliding_window conforms" a window, exit code 0; a
  mixer that does not conform ends in the failed check and exit code 1.
"""

from absl import app, flags
import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from experiments import common_flags
from experiments.report import exit_code
from longstraw_jax import (
  MIXERS,
  ModelConfig,
  Segment,
  Span,
  State,
  Update,
  merge,
  read_block,
)
from longstraw_jax.config import AttentionConfig
from longstraw_jax.models.contract import Shapes
from longstraw_jax.ops.attention import masked_attention
from longstraw_jax.ops.precision import widen
from longstraw_jax.ops.rotary import rotary_tables, rotate_half
from longstraw_jax.testing import check_mixer

NAME = "sliding_window"

_WINDOW = flags.DEFINE_multi_integer(
  "window", [5], "Tokens a query sees, itself included; may be repeated.", 1
)


class SlidingWindowAttention(nn.Module):
  """Grouped-query attention of each token over itself and W - 1 before it.

  Rows: keys after rotation and values, [K, T, H] each. No carry.
  """

  sizes: AttentionConfig
  window: int
  dtype: str
  param_dtype: str

  @nn.compact
  def __call__(
    self, x_TD: Float[Array, "T D"], span: Span, state: State
  ) -> tuple[Float[Array, "T D"], Update]:
    sizes, tokens = self.sizes, x_TD.shape[0]
    linear = lambda width, name: nn.Dense(
      width,
      use_bias=False,
      dtype=self.dtype,
      param_dtype=self.param_dtype,
      name=name,
    )
    heads = lambda number, name: linear(number * sizes.head_dim, name)(
      x_TD
    ).reshape(tokens, number, sizes.head_dim)
    tables = rotary_tables(span.positions, sizes.rope, x_TD.dtype)
    # Wide, so that the gradients of all its reads are summed before rounding.
    q_TNH = widen(rotate_half(heads(sizes.num_heads, "q_proj"), *tables))
    k_TKH = rotate_half(heads(sizes.num_kv_heads, "k_proj"), *tables)
    v_TKH = heads(sizes.num_kv_heads, "v_proj")
    rows = {"k": k_TKH.swapaxes(0, 1), "v": v_TKH.swapaxes(0, 1)}

    real = jnp.ones(tokens, bool)  # padding is behind: causality hides it
    parts = [self._part(q_TNH, span, rows, span.positions, real)]
    taps = []
    for segment in state.pages:
      new, tap = self._read(q_TNH, span, segment)
      parts += new
      taps.append(tap)
    o_TNH = merge(parts).astype(x_TD.dtype)
    y_TD = linear(x_TD.shape[-1], "o_proj")(o_TNH.reshape(tokens, -1))
    return y_TD, Update(rows=rows, carry={}, taps=tuple(taps))

  def _part(self, q_TNH, span, rows, positions, filled):
    """Attention over some rows, wherever they come from."""
    distance = span.positions[:, None] - positions
    visible = (distance >= 0) & (distance < self.window) & filled
    k, v = rows["k"], rows["v"]
    return masked_attention(q_TNH, k, v, visible, k.dtype)

  def _read(self, q_TNH, span, segment: Segment):
    """The rows of a segment that the first token's window still reaches.

    They are at most W - 1 in a row, so they touch at most two blocks of that
    many. The tap goes from the first read into the second.
    """
    size = min(max(self.window - 1, 1), segment.capacity)
    oldest = span.positions[0] - (self.window - 1) - segment.start
    first = jnp.maximum(oldest, 0) // size
    parts = []
    for index in (first, first + 1):
      block, tap = read_block(segment, index, size)
      segment = segment.replace(tap=tap)
      parts.append(self._part(q_TNH, span, *block))
    return parts, segment.tap

  @nn.nowrap
  def state_shapes(self, tokens: int, dtype: str) -> Shapes:
    """Keys and values of `tokens` tokens; nothing of fixed size."""
    shape = (self.sizes.num_kv_heads, tokens, self.sizes.head_dim)
    row = jax.ShapeDtypeStruct(shape, dtype)
    return {"k": row, "v": row}, {}


def register(window: int) -> None:
  """Makes `sliding_window` a name that LayerSpec understands."""

  def build(config: ModelConfig) -> nn.Module:
    return SlidingWindowAttention(
      sizes=config.attention,
      window=window,
      dtype=config.dtype,
      param_dtype=config.param_dtype,
    )

  MIXERS[NAME] = build


def main(argv):
  """Checks the mixer at every window that was asked for."""
  if len(argv) > 1:
    raise app.UsageError(f"unexpected arguments {argv[1:]}")
  for window in _WINDOW.value:
    register(window)
    check_mixer(NAME)
    print(f"{NAME} conforms, window {window}", flush=True)


if __name__ == "__main__":
  app.run(exit_code(main), flags_parser=common_flags.parse)
