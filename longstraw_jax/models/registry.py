"""Names of mixers and feed-forwards, for LayerSpec.

A newcomer registers a builder and names it in a config:

  MIXERS["window"] = lambda config: SlidingWindow(window=64, ...)
"""

from collections.abc import Callable

import flax.linen as nn

from longstraw_jax.config import ModelConfig
from longstraw_jax.models.attention import Attention
from longstraw_jax.models.gated_delta import GatedDelta
from longstraw_jax.models.latent_attention import LatentAttention
from longstraw_jax.models.layers import SwiGLU
from longstraw_jax.models.moe import SigmoidMoE, SoftmaxMoE

Builder = Callable[[ModelConfig], nn.Module]


def _latent_attention(config: ModelConfig, indexed: bool) -> nn.Module:
  return LatentAttention(
    sizes=config.latent,
    indexed=indexed,
    dtype=config.dtype,
    param_dtype=config.param_dtype,
  )


MIXERS: dict[str, Builder] = {
  "latent_attention": lambda config: _latent_attention(config, indexed=True),
  "shared_latent_attention": lambda config: _latent_attention(
    config, indexed=False
  ),
  "attention": lambda config: Attention(
    sizes=config.attention,
    norm=config.norm,
    norm_eps=config.norm_eps,
    query_block=config.query_block,
    read_block=config.read_block,
    dtype=config.dtype,
    param_dtype=config.param_dtype,
  ),
  "gated_delta": lambda config: GatedDelta(
    sizes=config.delta,
    norm_eps=config.norm_eps,
    delta_block=config.delta_block,
    dtype=config.dtype,
    param_dtype=config.param_dtype,
  ),
}

FFNS: dict[str, Builder] = {
  "swiglu": lambda config: SwiGLU(
    hidden_dim=config.hidden_dim,
    dtype=config.dtype,
    param_dtype=config.param_dtype,
  ),
  "softmax_moe": lambda config: SoftmaxMoE(
    sizes=config.moe, dtype=config.dtype, param_dtype=config.param_dtype
  ),
  "sigmoid_moe": lambda config: SigmoidMoE(
    sizes=config.moe, dtype=config.dtype, param_dtype=config.param_dtype
  ),
}


def build(registry: dict[str, Builder], name: str, config: ModelConfig):
  """The module that `name` stands for; KeyError lists what there is."""
  if name not in registry:
    raise KeyError(
      f"layer {name!r} is not registered: use one of {sorted(registry)} or "
      "add a builder to longstraw_jax.MIXERS or longstraw_jax.FFNS"
    )
  return registry[name](config)
