"""Multi-head latent attention with a sparse index: GLM-5 and GLM-5.2.

Latent attention of DeepSeek-V2 (2405.04434) in absorbed form over stored
latents; the keys each query attends to are the best of a light-weight index
(DeepSeek-V3.2's sparse attention). Under IndexShare only some layers have an
index; the layers above reuse its choice for the same tokens.
"""

from typing import ClassVar

import flax.linen as nn
import jax
from jax import lax
import jax.numpy as jnp
from jaxtyping import Array, Float

from longstraw_jax.config import LatentConfig
from longstraw_jax.models.contract import Choice, Shapes, State, Update
from longstraw_jax.models.layers import Linear, RMSNorm
from longstraw_jax.ops.pages import attend_chosen, open_rows
from longstraw_jax.ops.precision import widen
from longstraw_jax.ops.rotary import rotary_tables, rotate_interleaved
from longstraw_jax.ops.selection import NO_KEY, select_keys
from longstraw_jax.types import Span

KEY_NORM_EPS = 1e-6


class LayerNorm(nn.Module):
  """(x - mean) / sqrt(var + eps) w + b, in float32 or wider, cast once."""

  eps: float
  param_dtype: str

  @nn.compact
  def __call__(self, x: Float[Array, "... D"]) -> Float[Array, "... D"]:
    shape = (x.shape[-1],)
    weight = self.param("weight", nn.initializers.ones, shape, self.param_dtype)
    bias = self.param("bias", nn.initializers.zeros, shape, self.param_dtype)
    wide = widen(x)
    wide = wide - wide.mean(-1, keepdims=True)
    scale = lax.rsqrt((wide * wide).mean(-1, keepdims=True) + self.eps)
    return (wide * scale * widen(weight) + widen(bias)).astype(x.dtype)


class Indexer(nn.Module):
  """Scores keys by few narrow heads: queries, head weights and one shared key.

  q = rope(c_q W_q), k = rope(LayerNorm(x W_k)), w = x W_w N^-0.5. It is not
  differentiated: a choice has no gradient.
  """

  sizes: LatentConfig
  dtype: str
  param_dtype: str

  @nn.compact
  def __call__(
    self,
    x_TD: Float[Array, "T D"],
    query_latent: Float[Array, "T Q"],
    tables: tuple[Array, Array],
  ) -> tuple[Float[Array, "T N J"], Float[Array, "T N"], Float[Array, "T J"]]:
    """Scaled queries, head weights and keys."""
    sizes, tokens = self.sizes, x_TD.shape[0]
    x_TD, query_latent = lax.stop_gradient((x_TD, query_latent))
    linear = lambda width, name: Linear(
      width, self.dtype, self.param_dtype, name=name
    )
    q = linear(sizes.index_heads * sizes.index_dim, "q_b_proj")(query_latent)
    q_TNJ = q.reshape(tokens, sizes.index_heads, sizes.index_dim)
    q_TNJ = rotate_interleaved(q_TNJ, *tables) * sizes.index_dim**-0.5
    norm = LayerNorm(KEY_NORM_EPS, self.param_dtype, name="k_norm")
    k_TJ = norm(linear(sizes.index_dim, "k_proj")(x_TD))
    k_TJ = rotate_interleaved(k_TJ[:, None], *tables)[:, 0]
    w_TN = linear(sizes.index_heads, "weights_proj")(x_TD)
    w_TN = w_TN * sizes.index_heads**-0.5
    return lax.stop_gradient((q_TNJ, w_TN, k_TJ))


class LatentAttention(nn.Module):
  """Attention over compressed rows, to the keys that an index selects.

  c_q = rms(x W_qa); [q_n; q_r] = c_q W_qb per head; [c; k_r] = x W_kva with
  c = rms(c); q_r and k_r are rotated. Per head W_kvb = [W_k; W_v], and
    score = (W_k^T q_n) . c + q_r . k_r,   o = W_v (sum of weights c)
  Rows: "latent" [T, rank + rope], c then k_r; with an index "index_key"
  [T, J]. No carry. Choices: "keys" [T, A], positions.
  """

  sizes: LatentConfig
  indexed: bool
  dtype: str
  param_dtype: str

  constants: ClassVar[tuple[str, ...]] = ("indexer",)
  constant_rows: ClassVar[tuple[str, ...]] = ("index_key",)

  @nn.compact
  def __call__(
    self, x_TD: Float[Array, "T D"], span: Span, state: State
  ) -> tuple[Float[Array, "T D"], Update]:
    sizes, tokens = self.sizes, x_TD.shape[0]
    linear = lambda width, name: Linear(
      width, self.dtype, self.param_dtype, name=name
    )
    norm = lambda name: RMSNorm(sizes.latent_eps, self.param_dtype, name=name)
    tables = rotary_tables(span.positions, sizes.rope, x_TD.dtype)

    c_q = norm("q_a_norm")(linear(sizes.query_rank, "q_a_proj")(x_TD))
    head_dim = sizes.nope_dim + sizes.rope.dim
    q = linear(sizes.num_heads * head_dim, "q_b_proj")(c_q)
    q_nope, q_rope = jnp.split(
      q.reshape(tokens, sizes.num_heads, head_dim), (sizes.nope_dim,), axis=-1
    )
    compressed = linear(sizes.row_dim, "kv_a_proj")(x_TD)
    latent, k_rope = jnp.split(compressed, (sizes.latent_rank,), axis=-1)
    k_rope = rotate_interleaved(k_rope[:, None], *tables)[:, 0]
    rows = {"latent": jnp.concatenate([norm("kv_a_norm")(latent), k_rope], -1)}

    width = sizes.nope_dim + sizes.value_dim
    kv_b = linear(sizes.num_heads * width, "kv_b_proj").matrix(
      sizes.latent_rank
    )
    kv_b = kv_b.reshape(sizes.latent_rank, sizes.num_heads, width)
    to_key, to_value = jnp.split(kv_b, (sizes.nope_dim,), axis=-1)
    absorbed = jnp.einsum("tnh,rnh->tnr", q_nope, to_key)
    q_TNH = jnp.concatenate(
      [absorbed, rotate_interleaved(q_rope, *tables)], axis=-1
    )
    scale = sizes.softmax_factor * head_dim**-0.5

    if self.indexed:
      indexer = Indexer(sizes, self.dtype, self.param_dtype, name="indexer")
      q_index, weights, rows["index_key"] = indexer(x_TD, c_q, tables)
      live = select_keys(
        q_index,
        weights,
        rows["index_key"],
        span.positions,
        state.pages,
        name="index_key",
        number=sizes.index_topk,
        query_tile=sizes.index_query_tile,
        key_tile=sizes.index_key_tile,
      )
    elif self.is_initializing():
      live = span.positions[:, None]
    elif "keys" in state.shared:
      live = state.shared["keys"]
    else:
      raise ValueError(
        "a latent attention layer without an index has no layer with one "
        "below it in its pattern: put both into one Stage"
      )
    keys = live
    if "keys" in state.choices:
      forced = state.choices["keys"]
      seen = (forced >= 0) & (forced <= span.positions[:, None])
      keys = jnp.where(seen, forced, NO_KEY)
    own = open_rows({"latent": rows["latent"]}, tokens, span.positions[0])
    o_TNR, (*taps, _) = attend_chosen(
      q_TNH * scale,
      keys,
      (*state.pages, own),
      name="latent",
      value_dim=sizes.latent_rank,
      query_block=sizes.query_block,
    )
    o_TNH = jnp.einsum("tnr,rnh->tnh", o_TNR, to_value)
    y_TD = linear(x_TD.shape[-1], "o_proj")(o_TNH.reshape(tokens, -1))
    choices = {"keys": live} if self.indexed else {}
    return y_TD, Update(
      rows=rows,
      carry={},
      taps=tuple(taps),
      shared={"keys": keys},
      choices=choices,
    )

  @nn.nowrap
  def declared_choices(self) -> dict[str, Choice]:
    """The keys of every query, where the layer has an index of its own."""
    if not self.indexed:
      return {}
    return {"keys": Choice(number=self.sizes.index_topk, ids=None)}

  @nn.nowrap
  def state_shapes(self, tokens: int, dtype: str) -> Shapes:
    """Latents with their rotated keys, and index keys where there are any."""
    struct = lambda width: jax.ShapeDtypeStruct((tokens, width), dtype)
    rows = {"latent": struct(self.sizes.row_dim)}
    if self.indexed:
      rows["index_key"] = struct(self.sizes.index_dim)
    return rows, {}
