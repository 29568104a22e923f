"""Full attention with grouped queries, gated as in Qwen3.5/3.6 or plain."""

import flax.linen as nn
import jax
from jaxtyping import Array, Float

from longstraw_jax.config import AttentionConfig
from longstraw_jax.models.contract import Shapes, State, Update
from longstraw_jax.models.layers import NORMS, Linear
from longstraw_jax.ops.attention import causal_attention
from longstraw_jax.ops.precision import widen
from longstraw_jax.ops.rotary import rotary_tables, rotate_half
from longstraw_jax.types import Span


class Attention(nn.Module):
  """Causal attention; norms, biases and the output gate by configuration.

  With a gate q_proj yields, per head, the query and then the gate, and the
  output is o_proj(attention * sigmoid(gate)). Queries and keys are normalised
  over H, where they are, before rotation.
  Rows: keys after norm and rotation and values, [K, T, H] each. No carry.
  """

  sizes: AttentionConfig
  norm: str
  norm_eps: float
  query_block: int
  read_block: int
  dtype: str
  param_dtype: str

  @nn.compact
  def __call__(
    self, x_TD: Float[Array, "T D"], span: Span, state: State
  ) -> tuple[Float[Array, "T D"], Update]:
    sizes = self.sizes
    tokens, width = x_TD.shape[0], sizes.head_dim
    linear = lambda features, name, bias: Linear(
      features, self.dtype, self.param_dtype, bias, name=name
    )
    heads = lambda number, name: linear(number * width, name, sizes.qkv_bias)(
      x_TD
    ).reshape(tokens, -1, width)

    gate = None
    q_TNH = heads(sizes.num_heads * (1 + sizes.output_gate), "q_proj")
    if sizes.output_gate:
      q_TNH = q_TNH.reshape(tokens, sizes.num_heads, 2 * width)
      q_TNH, gate = q_TNH[..., :width], q_TNH[..., width:]
    k_TKH = heads(sizes.num_kv_heads, "k_proj")
    v_TKH = heads(sizes.num_kv_heads, "v_proj")
    if sizes.qk_norm:
      norm = NORMS[self.norm]
      q_TNH = norm(self.norm_eps, self.param_dtype, name="q_norm")(q_TNH)
      k_TKH = norm(self.norm_eps, self.param_dtype, name="k_norm")(k_TKH)
    tables = rotary_tables(span.positions, sizes.rope, x_TD.dtype)
    q_TNH, k_TKH = rotate_half(q_TNH, *tables), rotate_half(k_TKH, *tables)
    rows = {"k": k_TKH.swapaxes(0, 1), "v": v_TKH.swapaxes(0, 1)}

    o_TNH, taps = causal_attention(
      q_TNH,
      rows["k"],
      rows["v"],
      state.pages,
      query_block=self.query_block,
      read_block_size=self.read_block,
    )
    if gate is not None:
      o_TNH = o_TNH * jax.nn.sigmoid(widen(gate))
    o_proj = linear(x_TD.shape[-1], "o_proj", sizes.o_bias)
    y_TD = o_proj(o_TNH.astype(x_TD.dtype).reshape(tokens, -1))
    return y_TD, Update(rows=rows, carry={}, taps=taps)

  @nn.nowrap
  def state_shapes(self, tokens: int, dtype: str) -> Shapes:
    """Keys and values of `tokens` tokens; nothing of fixed size."""
    shape = (self.sizes.num_kv_heads, tokens, self.sizes.head_dim)
    row = jax.ShapeDtypeStruct(shape, dtype)
    return {"k": row, "v": row}, {}
