"""Gated full attention of Qwen3.5/3.6: grouped queries, partial rotary."""

import flax.linen as nn
import jax
from jaxtyping import Array, Float

from longstraw_jax.config import AttentionConfig
from longstraw_jax.models.contract import Shapes, State, Update
from longstraw_jax.models.layers import ZeroCentredRMSNorm, dense
from longstraw_jax.ops.attention import causal_attention
from longstraw_jax.ops.precision import widen
from longstraw_jax.ops.rotary import rotary_tables, rotate_half
from longstraw_jax.types import Span


class GatedAttention(nn.Module):
  """Causal attention whose output is gated per channel before o_proj.

  q_proj yields, per head, the query and then the gate; queries and keys are
  normalised over H before rotation; out = o_proj(attention * sigmoid(gate)).
  Rows: keys after norm and rotation and values, [K, T, H] each. No carry.
  """

  sizes: AttentionConfig
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
    tokens = x_TD.shape[0]
    linear = lambda width, name: dense(
      width, self.dtype, self.param_dtype, name
    )
    norm = lambda name: ZeroCentredRMSNorm(
      self.norm_eps, self.param_dtype, name=name
    )
    width = sizes.head_dim
    query_width = sizes.num_heads * width
    heads = lambda x, number: x.reshape(tokens, number, -1)

    q_gate = heads(linear(2 * query_width, "q_proj")(x_TD), sizes.num_heads)
    q_TNH, gate = q_gate[..., :width], q_gate[..., width:]
    kv_width = sizes.num_kv_heads * width
    k_TKH = heads(linear(kv_width, "k_proj")(x_TD), sizes.num_kv_heads)
    v_TKH = heads(linear(kv_width, "v_proj")(x_TD), sizes.num_kv_heads)
    tables = rotary_tables(
      span.positions, sizes.rotary_dim, sizes.rope_theta, x_TD.dtype
    )
    q_TNH = rotate_half(norm("q_norm")(q_TNH), *tables)
    k_TKH = rotate_half(norm("k_norm")(k_TKH), *tables)
    rows = {"k": k_TKH.swapaxes(0, 1), "v": v_TKH.swapaxes(0, 1)}

    o_TNH, taps = causal_attention(
      q_TNH,
      rows["k"],
      rows["v"],
      state.pages,
      query_block=self.query_block,
      read_block_size=self.read_block,
    )
    o_TNH = o_TNH * jax.nn.sigmoid(widen(gate))
    y_TD = linear(x_TD.shape[-1], "o_proj")(
      o_TNH.astype(x_TD.dtype).reshape(tokens, query_width)
    )
    return y_TD, Update(rows=rows, carry={}, taps=taps)

  @nn.nowrap
  def state_shapes(self, tokens: int, dtype: str) -> Shapes:
    """Keys and values of `tokens` tokens; nothing of fixed size."""
    shape = (self.sizes.num_kv_heads, tokens, self.sizes.head_dim)
    row = jax.ShapeDtypeStruct(shape, dtype)
    return {"k": row, "v": row}, {}
