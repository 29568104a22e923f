"""Floating-point operations counted from a configuration, by token and layer.

A forward pass counts 1, its backward pass 2, a recomputed forward 1. Where
adapters alone learn, a frozen map's backward pass counts 1: no gradient of its
weights.
Attention is counted by its causal (query, key) pairs, 4 N H each: masked
blocks cost nothing on any side, and what a diagonal block wastes is not
counted as work. Sparse attention counts the pairs it selects, and the index
that selects them every causal pair, forward only. Only matrix products and the
convolution are counted.
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
    index: scores of an index, per pair; they have no backward pass.
    chosen: attention to selected keys, per (query, selected key) pair.
    again: of `linear`, what every backward pass computes again.
    chosen_again: the same of `chosen`.
  """

  linear: float = 0.0
  core: float = 0.0
  pair: float = 0.0
  index: float = 0.0
  chosen: float = 0.0
  again: float = 0.0
  chosen_again: float = 0.0

  def __add__(self, other: "LayerFlops") -> "LayerFlops":
    return LayerFlops(
      **{
        field.name: getattr(self, field.name) + getattr(other, field.name)
        for field in dataclasses.fields(self)
      }
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


def shared_latent_flops(config: ModelConfig) -> LayerFlops:
  """Latent attention, absorbed, to keys that a layer below has selected."""
  sizes, width = config.latent, config.embed_dim
  head = sizes.nope_dim + sizes.rope.dim
  weights = (
    width * (sizes.query_rank + sizes.row_dim)
    + sizes.query_rank * sizes.num_heads * head
    + sizes.num_heads * sizes.latent_rank * (sizes.nope_dim + sizes.value_dim)
    + sizes.num_heads * sizes.value_dim * width
  )
  scores = 2 * sizes.num_heads * sizes.row_dim
  return LayerFlops(
    linear=2 * weights,
    chosen=scores + 2 * sizes.num_heads * sizes.latent_rank,
    chosen_again=scores,
  )


def latent_flops(config: ModelConfig) -> LayerFlops:
  """The same with the index that selects: its maps; a score for every pair."""
  sizes, width = config.latent, config.embed_dim
  queries = sizes.index_heads * sizes.index_dim
  maps = sizes.query_rank * queries
  maps += width * (sizes.index_dim + sizes.index_heads)
  # No gradient reaches the maps, and they have no adapters.
  own = LayerFlops(core=2 * maps, index=2 * queries)
  return shared_latent_flops(config) + own


def moe_flops(config: ModelConfig) -> LayerFlops:
  """A mixture: the router, the chosen experts and the shared one."""
  sizes, width = config.moe, config.embed_dim
  routed = sizes.experts_per_token * sizes.expert_hidden_dim
  return LayerFlops(
    linear=width
    * (2 * sizes.num_experts + 6 * (routed + sizes.shared_hidden_dim)),
    again=4 * width * routed,
  )


LAYER_FLOPS = {
  "gated_delta": gated_delta_flops,
  "attention": attention_flops,
  "latent_attention": latent_flops,
  "shared_latent_attention": shared_latent_flops,
  "swiglu": swiglu_flops,
  "softmax_moe": moe_flops,
  "sigmoid_moe": moe_flops,
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


def selected_pairs(start: int, tokens: int, number: int) -> int:
  """The same where a query sees at most `number` of its keys."""
  below = min(max(number - start, 0), tokens)  # queries that see them all
  return causal_pairs(start, below) + (tokens - below) * number


def forward_flops(
  config: ModelConfig, start: int, tokens: int, scored: int
) -> float:
  """One forward pass of tokens [start, start + tokens), `scored` of them."""
  model = model_flops(config)
  per_token = tokens * (model.linear + model.core)
  pairs = causal_pairs(start, tokens) * (model.pair + model.index)
  if config.latent is not None:
    number = config.latent.index_topk
    pairs += selected_pairs(start, tokens, number) * model.chosen
  return per_token + pairs + scored * head_flops(config)


def backward_flops(
  config: ModelConfig,
  start: int,
  tokens: int,
  scored: int,
  *,
  frozen: bool = False,
) -> float:
  """The backward pass of `forward_flops`, without what it computes again.

  Args:
    config: the model.
    start: position of the first token.
    tokens: tokens of the pass.
    scored: tokens whose logits have a cotangent.
    frozen: whether the weights, head included, have no gradient.
  """
  model = model_flops(config)
  own = model.index * causal_pairs(start, tokens)
  total = BACKWARD * (forward_flops(config, start, tokens, scored) - own)
  if frozen:
    total -= tokens * model.linear + scored * head_flops(config)
  return total


def recomputed_flops(
  config: ModelConfig, tokens: int, block: int, start: int = 0
) -> float:
  """What the backward pass runs again under config.saved, without the head.

  Attention over earlier blocks is always kept ("page_attention"), so of the
  pairs only those inside a block come twice. "projections" keeps linear maps.

  Args:
    config: the model.
    tokens: tokens of the pass.
    block: tokens whose pairs are computed at once without pages: a chunk or a
      response block, and at most config.query_block.
    start: position of the first token; an index selects again from all keys.
  """
  model = model_flops(config)
  always = tokens * model.again
  if config.latent is not None:
    number = config.latent.index_topk
    always += selected_pairs(start, tokens, number) * model.chosen_again
  if config.saved == "everything":
    return always
  inside = block_pairs(tokens, min(block, config.query_block)) * model.pair
  inside += causal_pairs(start, tokens) * model.index
  linear = model.linear - model.again if config.saved == "inputs" else 0.0
  return always + tokens * (linear + model.core) + inside


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


def phase_flops(
  config: ModelConfig,
  prompt: int,
  group: int,
  response: int,
  *,
  chunk_size: int,
  grad_scope: str,
  block_size: int | None = None,
  frozen: bool = False,
) -> dict[str, float]:
  """Operations of group_gradient by phase; scopes "full" or constant ones.

  config.saved says what the walks recompute. An adapter's own products are not
  counted: r (1 / inputs + 1 / outputs) of its map's, at rank 16 under 1 % for
  the 27B and 2 to 4 % for experts of the 35B.

  Args:
    config: the model.
    prompt: prompt tokens.
    group: members.
    response: response tokens.
    chunk_size: prompt tokens processed at once.
    grad_scope: as in group_gradient; "tail" is counted as "full".
    block_size: response tokens processed at once.
    frozen: whether only adapters learn.
  """
  block = min(block_size or response, response)
  captured = prompt - 1
  capture = forward_flops(config, 0, captured, 0)
  branch = forward_flops(config, captured, response, response)
  # Several blocks need one more pass to leave the rows of the blocks before.
  passes = FORWARD + (block < response)
  replay = (
    passes * branch
    + backward_flops(config, captured, response, response, frozen=frozen)
    + recomputed_flops(config, response, block, captured)
    + _head_again(config, response, block)
  )
  reverse = 0.0
  if grad_scope not in CONSTANT_SCOPES:
    reverse = (
      capture
      + backward_flops(config, 0, captured, 0, frozen=frozen)
      + recomputed_flops(config, captured, chunk_size)
    )
  return {
    "capture": capture,
    "score": group * branch,
    "branch": group * replay,
    "reverse": reverse,
  }


def group_gradient_flops(
  config: ModelConfig,
  prompt: int,
  group: int,
  response: int,
  *,
  chunk_size: int,
  grad_scope: str,
  block_size: int | None = None,
  frozen: bool = False,
) -> float:
  """group_gradient: capture, score, replay and, for full, the reverse walk.

  config.saved says what the walks recompute; "everything" is the count
  without any: capture 1, score 1, replay 1 + 2, walk 1 + 2. The arguments are
  those of phase_flops.
  """
  phases = phase_flops(
    config,
    prompt,
    group,
    response,
    chunk_size=chunk_size,
    grad_scope=grad_scope,
    block_size=block_size,
    frozen=frozen,
  )
  return sum(phases.values())
