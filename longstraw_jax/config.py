"""Frozen configurations: sizes of a model and how it is computed."""

import dataclasses
import math

import jax.numpy as jnp

SAVED = ("inputs", "projections", "everything")
NORMS = ("zero_centred", "plain")
PAGE_DTYPES = ("bfloat16", "float8_e4m3fn", "float8_e5m2", "int8")
ROPE_SCALINGS = ("none", "linear", "llama3", "yarn")


def _require(condition: bool, name: str, value, remedy: str) -> None:
  if not condition:
    raise ValueError(f"{name} is {value!r}: {remedy}")


def check_dtype(name: str, value) -> jnp.dtype:
  """Refuses a dtype that nothing is computed, trained or kept in.

  float16 ends at 65,504, beyond which a state is infinite, and at 6e-8, below
  which a gradient is 0; it needs a scaling of the loss that nobody here does.
  Floats of 8 bits are for pages alone.
  """
  try:
    dtype = jnp.dtype(value)
  except TypeError:
    dtype = None
  floating = dtype is not None and jnp.issubdtype(dtype, jnp.floating)
  wide = floating and dtype.itemsize >= 2 and dtype != jnp.float16
  why = ""
  if dtype == jnp.float16:
    why = "its range is too narrow for states and gradients, "
  shown = value if dtype is None else dtype.name
  _require(wide, name, shown, why + "use 'bfloat16' or 'float32'")
  return dtype


@dataclasses.dataclass(frozen=True, kw_only=True)
class RopeConfig:
  """Rotary position embedding: how far a position turns each pair of dims.

  Attributes:
    dim: rotated dims of a head, an even number.
    theta: base of the wavelengths.
    scaling: how frequencies are stretched beyond original_length.
    factor: by how much.
    original_length: tokens the unscaled embedding was trained for.
    low_freq_factor, high_freq_factor: turns within original_length between
      which llama3 ramps.
    beta_fast, beta_slow: the same of YaRN.
    attention_factor: YaRN's magnitude; None takes 0.1 ln(factor) + 1.
  """

  dim: int
  theta: float = 1e7
  scaling: str = "none"
  factor: float = 1.0
  original_length: int = 0
  low_freq_factor: float = 1.0
  high_freq_factor: float = 4.0
  beta_fast: float = 32.0
  beta_slow: float = 1.0
  attention_factor: float | None = None

  def __post_init__(self):
    _require(
      self.dim % 2 == 0 and self.dim >= 0,
      "rope.dim",
      self.dim,
      "use an even number of dims",
    )
    _require(
      self.scaling in ROPE_SCALINGS,
      "rope.scaling",
      self.scaling,
      f"use one of {ROPE_SCALINGS}",
    )
    _require(self.factor >= 1, "rope.factor", self.factor, "use 1 or more")
    _require(
      self.scaling in ("none", "linear") or self.original_length > 0,
      "rope.original_length",
      self.original_length,
      f"{self.scaling} needs the length it starts from",
    )

  @property
  def magnitude(self) -> float:
    """What cosine and sine are multiplied by."""
    if self.scaling != "yarn":
      return 1.0
    if self.attention_factor is not None:
      return self.attention_factor
    return 0.1 * math.log(self.factor) + 1.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionConfig:
  """Sizes of attention with grouped queries.

  Attributes:
    num_heads, num_kv_heads, head_dim: the latter divides the former.
    rope: rotary embedding of the first rope.dim dims of a head.
    output_gate: whether q_proj also yields a sigmoid gate per channel.
    qk_norm: whether queries and keys are normalised per head.
    qkv_bias, o_bias: whether these projections have one.
  """

  num_heads: int
  num_kv_heads: int
  head_dim: int
  rope: RopeConfig
  output_gate: bool = False
  qk_norm: bool = False
  qkv_bias: bool = False
  o_bias: bool = False

  def __post_init__(self):
    _require(
      self.num_heads % self.num_kv_heads == 0,
      "num_kv_heads",
      self.num_kv_heads,
      f"it must divide num_heads = {self.num_heads}",
    )
    _require(
      self.rope.dim <= self.head_dim,
      "rope.dim",
      self.rope.dim,
      f"use at most head_dim = {self.head_dim}",
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeltaConfig:
  """Sizes of a gated delta mixer."""

  num_key_heads: int
  num_value_heads: int
  key_dim: int
  value_dim: int
  conv_width: int = 4

  def __post_init__(self):
    _require(
      self.num_value_heads % self.num_key_heads == 0,
      "num_key_heads",
      self.num_key_heads,
      f"it must divide num_value_heads = {self.num_value_heads}",
    )
    _require(
      self.conv_width >= 2, "conv_width", self.conv_width, "use at least 2 taps"
    )

  @property
  def conv_channels(self) -> int:
    """Width of the convolved q, k and v together."""
    keys = 2 * self.num_key_heads * self.key_dim
    return keys + self.num_value_heads * self.value_dim


@dataclasses.dataclass(frozen=True, kw_only=True)
class LatentConfig:
  """Sizes of multi-head latent attention with a sparse index (DSA).

  Attributes:
    num_heads: query heads; the latent is shared by all.
    query_rank, latent_rank: widths of the compressed query and key/value.
    nope_dim, value_dim: per head, without position.
    rope: rotary embedding of a query head's last dims and of the shared key.
    index_heads, index_dim: of the scoring heads; rope.dim of them rotate.
    index_topk: keys each query attends to.
    latent_eps: of the norms of both latents.
    softmax_factor: multiplies the scale (nope_dim + rope.dim)^-0.5.
    index_query_tile, index_key_tile: the one shape in which index scores are
      computed everywhere, because their bits depend on it.
    query_block: queries whose selected rows are gathered at once.
  """

  num_heads: int
  query_rank: int
  latent_rank: int
  nope_dim: int
  value_dim: int
  rope: RopeConfig
  index_heads: int
  index_dim: int
  index_topk: int
  latent_eps: float = 1e-6
  softmax_factor: float = 1.0
  index_query_tile: int = 64
  index_key_tile: int = 4096
  query_block: int = 16

  def __post_init__(self):
    _require(
      self.rope.dim <= self.index_dim,
      "rope.dim",
      self.rope.dim,
      f"use at most index_dim = {self.index_dim}",
    )
    sizes = "index_topk index_query_tile index_key_tile query_block"
    for name in sizes.split():
      value = getattr(self, name)
      _require(value >= 1, name, value, "use a positive number")

  @property
  def row_dim(self) -> int:
    """Width of a stored row: the latent and the rotated key."""
    return self.latent_rank + self.rope.dim


@dataclasses.dataclass(frozen=True, kw_only=True)
class MoEConfig:
  """Sizes of a mixture of experts.

  Attributes:
    num_experts: routed ones, E.
    experts_per_token: chosen ones, A.
    expert_hidden_dim: F of a routed expert.
    shared_hidden_dim: F of the shared expert, all shared ones together.
    num_groups: runs of experts of equal length; one switches groups off.
    groups_per_token: groups in which a token may choose.
    scaling: multiplies the mixture weights.
    normalize: whether the weights of the chosen are divided by their sum.
    row_block: rows of one product, of the experts and of the router.
  """

  num_experts: int
  experts_per_token: int
  expert_hidden_dim: int
  shared_hidden_dim: int
  num_groups: int = 1
  groups_per_token: int = 1
  scaling: float = 1.0
  normalize: bool = True
  row_block: int = 256

  def __post_init__(self):
    for name in ("expert_hidden_dim", "shared_hidden_dim", "row_block"):
      value = getattr(self, name)
      _require(value >= 1, name, value, "use a positive size")
    _require(
      self.num_groups >= 1 and self.num_experts % self.num_groups == 0,
      "num_groups",
      self.num_groups,
      f"it must divide num_experts = {self.num_experts}",
    )
    group_size = self.num_experts // self.num_groups
    _require(
      self.num_groups == 1 or group_size >= 2,
      "num_groups",
      self.num_groups,
      "a group is judged by its best two experts, so it needs two",
    )
    _require(
      1 <= self.groups_per_token <= self.num_groups,
      "groups_per_token",
      self.groups_per_token,
      f"use 1 to num_groups = {self.num_groups}",
    )
    eligible = self.groups_per_token * group_size
    _require(
      1 <= self.experts_per_token <= eligible,
      "experts_per_token",
      self.experts_per_token,
      f"use 1 to {eligible}, the experts in a token's groups",
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerSpec:
  """One layer by the registry names of its mixer and its ffn."""

  mixer: str
  ffn: str | None = "swiglu"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stage:
  """A pattern of layers, repeated; one scan over stacked parameters."""

  pattern: tuple[LayerSpec, ...]
  repeats: int

  def __post_init__(self):
    _require(self.repeats >= 1, "repeats", self.repeats, "use at least 1")
    _require(len(self.pattern) >= 1, "pattern", self.pattern, "name a layer")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig:
  """A language model as stages of layers, and how it is computed.

  Attributes:
    name: what rows and error messages call it.
    attention, delta, latent, moe: sizes of the layers that `stages` names;
      None where it names none.
    norm: how layer, final, query and key norms store their weight:
      "zero_centred" around 0, "plain" around 1.
    tie_embeddings: whether the head is the embedding transposed.
    dtype: of activations, and of pages unless they have one of their own.
    page_dtype: of stored rows that have a gradient, narrower than `dtype`;
      "int8" with a scale a row. A read expands them; their gradient passes
      the rounding by. None stores them as they are.
    param_dtype: of the stored parameters.
    saved: what the backward pass of one block keeps of every layer; the rest
      is recomputed. "inputs": the layer's input and what attention over pages
      gave (smallest). "projections": also the outputs of linear maps, so that
      only cheap parts run twice. "everything": no recomputation.
    read_block: stored rows read at once by attention over pages.
    query_block: a call's own queries handled at once by attention.
    delta_block: tokens of one chunk of the delta rule's WY form.
    logprob_block: tokens whose logits exist at once.
  """

  name: str
  vocab_size: int
  embed_dim: int
  hidden_dim: int
  stages: tuple[Stage, ...]
  attention: AttentionConfig | None = None
  delta: DeltaConfig | None = None
  latent: LatentConfig | None = None
  moe: MoEConfig | None = None
  norm: str = "zero_centred"
  norm_eps: float = 1e-6
  tie_embeddings: bool = False
  dtype: str = "float32"
  page_dtype: str | None = None
  param_dtype: str = "float32"
  saved: str = "projections"
  read_block: int = 512
  query_block: int = 512
  delta_block: int = 64
  logprob_block: int = 256

  def __post_init__(self):
    sizes = "vocab_size embed_dim hidden_dim read_block query_block"
    for name in (sizes + " delta_block logprob_block").split():
      value = getattr(self, name)
      _require(value >= 1, name, value, "use a positive size")
    _require(self.saved in SAVED, "saved", self.saved, f"use one of {SAVED}")
    _require(self.norm in NORMS, "norm", self.norm, f"use one of {NORMS}")
    for name in ("dtype", "param_dtype"):
      check_dtype(name, getattr(self, name))
    _require(
      self.page_dtype in (None, *PAGE_DTYPES),
      "page_dtype",
      self.page_dtype,
      f"use one of {PAGE_DTYPES}, or None for dtype",
    )

  @property
  def num_layers(self) -> int:
    """Layers in all, over stages and repeats."""
    return sum(len(stage.pattern) * stage.repeats for stage in self.stages)

  @property
  def layer_types(self) -> tuple[str, ...]:
    """The mixer of every layer, bottom to top."""
    return tuple(
      spec.mixer
      for stage in self.stages
      for _ in range(stage.repeats)
      for spec in stage.pattern
    )
