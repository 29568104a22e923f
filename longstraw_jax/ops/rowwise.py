"""Products whose rows do not depend on the batch that they stand in.

A product's bits depend on its shape. Scores that decide something must not: a
token scored alone, in a group or under jax.vmap has to be decided alike.
"""

import functools

import jax
from jax import lax
from jax.custom_batching import custom_vmap
import jax.numpy as jnp
from jaxtyping import Array, Float

from longstraw_jax.ops.members import fold_members, one_by_one, unfold_members
from longstraw_jax.ops.precision import wide_einsum
from longstraw_jax.ops.token_sharding import members_divide, token_specs
from longstraw_jax.sharding import WHOLE, num_shards, per_device


def _product_in_blocks(row_block: int, x_TD, w_DE):
  """x w, as many products of one shape as it takes."""
  tokens = x_TD.shape[0]
  x_TD = jnp.pad(x_TD, ((0, -tokens % row_block), (0, 0)))
  x_BD = x_TD.reshape(-1, row_block, x_TD.shape[1])
  with jax.default_matmul_precision("highest"):
    y_BE = lax.map(lambda x: wide_einsum("bd,de->be", x, w_DE), x_BD)
  return y_BE.reshape(-1, w_DE.shape[1])[:tokens]


def _product(row_block: int, folded: bool, x_TD, w_DE):
  """Every device has its share of the tokens, where they divide."""
  call = functools.partial(_product_in_blocks, row_block)
  tokens = token_specs(x_TD.shape[0], folded)
  if tokens == WHOLE or num_shards("tokens") * num_shards("members") == 1:
    return call(x_TD, w_DE)
  return per_device(call, (tokens, WHOLE), tokens)(x_TD, w_DE)


@functools.cache
def _product_members(row_block: int, folded: bool = False):
  @custom_vmap
  def product(x_TD, w_DE):
    return _product(row_block, folded, x_TD, w_DE)

  @product.def_vmap
  def rule(axis_size, batched, x_TD, w_DE):
    if batched[1]:
      return one_by_one(product, batched, (x_TD, w_DE))
    together = _product_members(row_block, members_divide(axis_size))
    return unfold_members(together(fold_members(x_TD), w_DE), axis_size), True

  return product


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def rowwise_product(
  x_TD: Float[Array, "T D"], w_DE: Float[Array, "D E"], row_block: int
) -> Float[Array, "T E"]:
  """x w in float32 or wider, where a row's bits depend on the row alone.

  A product's bits depend on its shape. Scores that decide something must not:
  a token scored alone, in a group or under vmap has to be decided alike.
  """
  return _product_members(row_block)(x_TD, w_DE)


def _rowwise_product_fwd(x_TD, w_DE, row_block):
  return rowwise_product(x_TD, w_DE, row_block), (x_TD, w_DE)


def _rowwise_product_bwd(row_block, residuals, dy_TE):
  del row_block  # gradients decide nothing
  x_TD, w_DE = residuals
  dx_TD = wide_einsum("te,de->td", dy_TE, w_DE)
  dw_DE = wide_einsum("td,te->de", x_TD, dy_TE)
  return dx_TD.astype(x_TD.dtype), dw_DE.astype(w_DE.dtype)


rowwise_product.defvjp(_rowwise_product_fwd, _rowwise_product_bwd)
