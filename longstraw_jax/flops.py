"""Floating-point operations counted from a configuration, by token and layer.

A forward pass counts 1, its backward pass 2, a recomputed forward 1.
Attention is counted by its causal (query, key) pairs, 4 N H each: masked
blocks cost nothing on any side, and what a diagonal block wastes is not
counted as work. Only matrix products and the convolution are counted.
"""

import dataclasses

from longstraw_jax.checks import CONSTANT_SCOPES
from longstraw_jax.config import DeltaConfig, ModelConfig

# Forward passes that one training step is worth.
FORWARD, BACKWARD = 1, 2


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerFlops:
  """Forward operations of one layer.

  Attributes:
    linear: its maps with weights, per token.
    core: what has no weights and is linear in tokens (delta rule, taps).
    pair: attention, per (query, key) pair.
  """

  linear: float = 0.0
  core: float = 0.0
  pair: float = 0.0

  def __add__(self, other: "LayerFlops") -> "LayerFlops":
    return LayerFlops(
      linear=self.linear + other.linear,
      core=self.core + other.core,
      pair=self.pair + other.pair,
    )


def _inverse_flops(size: int) -> float:
  """Of ops.delta_rule.unit_lower_inverse for one block of `size` tokens."""
  size = 1 << (size - 1).bit_length()
  if size <= 8:
    steps = max((size - 1).bit_length() - 1, 0)
    return (1 + 2 * steps) * 2 * size**3
  half = size // 2
  return 2 * _inverse_flops(half) + 2 * 2 * half**3


def delta_rule_flops(sizes: DeltaConfig, block: int) -> float:
  """The chunk form of the delta rule, per token, over all value heads."""
  c, j, h = block, sizes.key_dim, sizes.value_dim
  inside = 2 * (2 * c * c * j) + _inverse_flops(c) + 2 * c * c * (h + j)
  between = 3 * (2 * c * j * h) + 2 * c * c * h
  return sizes.num_value_heads * (inside + between) / c


def gated_delta_flops(config: ModelConfig) -> LayerFlops:
  """The gated delta mixer: projections; taps and delta rule."""
  sizes, width = config.delta, config.embed_dim
  values = sizes.num_value_heads * sizes.value_dim
  outputs = sizes.conv_channels + 2 * values + 2 * sizes.num_value_heads
  taps = 2 * sizes.conv_width * sizes.conv_channels
  return LayerFlops(
    linear=2 * width * outputs,
    core=taps + delta_rule_flops(sizes, config.delta_block),
  )


def attention_flops(config: ModelConfig) -> LayerFlops:
  """Attention with grouped queries: projections; pairs."""
  sizes = config.attention
  query = sizes.num_heads * sizes.head_dim
  kv = sizes.num_kv_heads * sizes.head_dim
  outputs = (2 + sizes.output_gate) * query + 2 * kv
  return LayerFlops(linear=2 * config.embed_dim * outputs, pair=4 * query)


def swiglu_flops(config: ModelConfig) -> LayerFlops:
  """The feed-forward's three maps."""
  return LayerFlops(linear=6 * config.embed_dim * config.hidden_dim)


LAYER_FLOPS = {
  "gated_delta": gated_delta_flops,
  "attention": attention_flops,
  "swiglu": swiglu_flops,
  None: lambda config: LayerFlops(),
}


def model_flops(config: ModelConfig) -> LayerFlops:
  """All layers together; embedding and head are not in it."""
  total = LayerFlops()
  for stage in config.stages:
    for spec in stage.pattern:
      for name in (spec.mixer, spec.ffn):
        if name not in LAYER_FLOPS:
          raise KeyError(
            f"layer {name!r} has no count: add it to longstraw_jax.flops."
            "LAYER_FLOPS"
          )
        layer = LAYER_FLOPS[name](config)
        for _ in range(stage.repeats):
          total = total + layer
  return total


def head_flops(config: ModelConfig) -> float:
  """The head, per scored token."""
  return 2 * config.embed_dim * config.vocab_size


def causal_pairs(start: int, tokens: int) -> int:
  """Pairs of `tokens` consecutive queries, the first seeing start + 1 keys."""
  return tokens * start + tokens * (tokens + 1) // 2


def block_pairs(tokens: int, block: int) -> int:
  """Pairs within blocks of `block` tokens, the last one short."""
  whole, rest = divmod(tokens, block)
  return whole * causal_pairs(0, block) + causal_pairs(0, rest)


def forward_flops(
  config: ModelConfig, start: int, tokens: int, scored: int
) -> float:
  """One forward pass of tokens [start, start + tokens), `scored` of them."""
  model = model_flops(config)
  per_token = tokens * (model.linear + model.core)
  pairs = causal_pairs(start, tokens) * model.pair
  return per_token + pairs + scored * head_flops(config)


def recomputed_flops(config: ModelConfig, tokens: int, block: int) -> float:
  """What the backward pass runs again under config.saved, without the head.

  Attention over earlier blocks is always kept ("page_attention"), so of the
  pairs only those inside a block come twice. "projections" keeps linear maps.

  Args:
    config: the model.
    tokens: tokens of the pass.
    block: tokens whose pairs are computed at once without pages: a chunk or a
      response block, and at most config.query_block.
  """
  if config.saved == "everything":
    return 0.0
  model = model_flops(config)
  inside = block_pairs(tokens, min(block, config.query_block)) * model.pair
  kept = model.linear if config.saved == "projections" else 0.0
  return tokens * (model.linear - kept + model.core) + inside


def _head_again(config: ModelConfig, scored: int, block: int) -> float:
  """Blocked logits are computed again in the backward pass."""
  again = block > config.logprob_block
  return scored * head_flops(config) if again else 0.0


def conventional_flops(
  config: ModelConfig, prompt: int, group: int, response: int
) -> float:
  """conventional_gradient: G full rows, forward and backward."""
  tokens = prompt + response - 1
  once = forward_flops(config, 0, tokens, tokens)
  again = _head_again(config, tokens, tokens)
  return group * ((FORWARD + BACKWARD) * once + again)


def serial_remat_flops(
  config: ModelConfig,
  prompt: int,
  group: int,
  response: int,
  *,
  keeps_attention: bool = True,
) -> float:
  """serial_remat_gradient: the same with every layer's forward twice.

  Args:
    config: the model.
    prompt: prompt tokens.
    group: members.
    response: response tokens.
    keeps_attention: count what ours really does: its checkpoints keep the
      output of attention over earlier blocks. False counts a whole forward.
  """
  tokens = prompt + response - 1
  config = dataclasses.replace(config, saved="inputs")
  if keeps_attention:
    again = recomputed_flops(config, tokens, tokens)
  else:
    again = forward_flops(config, 0, tokens, 0)
  conventional = conventional_flops(config, prompt, group, response)
  return conventional + group * again


def group_gradient_flops(
  config: ModelConfig,
  prompt: int,
  group: int,
  response: int,
  *,
  chunk_size: int,
  grad_scope: str,
  block_size: int | None = None,
) -> float:
  """group_gradient: capture, score, replay and, for full, the reverse walk.

  config.saved says what the walks recompute; "everything" is the count
  without any: capture 1, score 1, replay 1 + 2, walk 1 + 2.
  """
  block = min(block_size or response, response)
  captured = prompt - 1
  branch = forward_flops(config, captured, response, response)
  # Several blocks need one more pass to leave the rows of the blocks before.
  passes = 1 + (FORWARD + BACKWARD) + (block < response)
  total = group * (
    passes * branch
    + recomputed_flops(config, response, block)
    + _head_again(config, response, block)
  )
  capture = forward_flops(config, 0, captured, 0)
  if grad_scope in CONSTANT_SCOPES:
    return total + capture
  walk = (FORWARD + BACKWARD) * capture
  return total + capture + walk + recomputed_flops(config, captured, chunk_size)
