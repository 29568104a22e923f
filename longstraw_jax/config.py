"""Frozen configurations and the presets that name them."""

import dataclasses

import jax.numpy as jnp

SAVED = ("inputs", "projections", "everything")


def _require(condition: bool, name: str, value, remedy: str) -> None:
  if not condition:
    raise ValueError(f"{name} is {value!r}: {remedy}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionConfig:
  """Sizes of gated full attention (grouped queries, partial rotary)."""

  num_heads: int
  num_kv_heads: int
  head_dim: int
  rotary_dim: int
  rope_theta: float = 1e7

  def __post_init__(self):
    _require(
      self.num_heads % self.num_kv_heads == 0,
      "num_kv_heads",
      self.num_kv_heads,
      f"it must divide num_heads = {self.num_heads}",
    )
    _require(
      self.rotary_dim % 2 == 0 and 0 <= self.rotary_dim <= self.head_dim,
      "rotary_dim",
      self.rotary_dim,
      f"it must be even and at most head_dim = {self.head_dim}",
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
    dtype: of activations and pages.
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
  attention: AttentionConfig
  delta: DeltaConfig
  norm_eps: float = 1e-6
  dtype: str = "float32"
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
    for name in ("dtype", "param_dtype"):
      value = getattr(self, name)
      _require(
        jnp.issubdtype(jnp.dtype(value), jnp.floating),
        name,
        value,
        "use a floating-point dtype such as 'float32' or 'bfloat16'",
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


DELTA = LayerSpec(mixer="gated_delta")
ATTENTION = LayerSpec(mixer="gated_attention")
BARE_DELTA = LayerSpec(mixer="gated_delta", ffn=None)

PRESETS: dict[str, ModelConfig] = {
  config.name: config
  for config in (
    ModelConfig(
      name="tiny-hybrid",
      vocab_size=61,
      embed_dim=24,
      hidden_dim=40,
      stages=(Stage(pattern=(DELTA, ATTENTION), repeats=2),),
      attention=AttentionConfig(
        num_heads=4, num_kv_heads=2, head_dim=8, rotary_dim=4, rope_theta=1e4
      ),
      delta=DeltaConfig(
        num_key_heads=2, num_value_heads=4, key_dim=6, value_dim=8
      ),
      read_block=16,
      query_block=16,
      delta_block=8,
      logprob_block=4,
    ),
    ModelConfig(
      name="bench-hybrid",
      vocab_size=512,
      embed_dim=128,
      hidden_dim=384,
      stages=(Stage(pattern=(BARE_DELTA, ATTENTION), repeats=4),),
      attention=AttentionConfig(
        num_heads=4, num_kv_heads=2, head_dim=32, rotary_dim=8
      ),
      delta=DeltaConfig(
        num_key_heads=4, num_value_heads=4, key_dim=32, value_dim=32
      ),
    ),
    ModelConfig(
      name="small-hybrid",
      vocab_size=258,
      embed_dim=64,
      hidden_dim=128,
      stages=(Stage(pattern=(DELTA, ATTENTION), repeats=1),),
      attention=AttentionConfig(
        num_heads=2, num_kv_heads=1, head_dim=64, rotary_dim=8, rope_theta=1e4
      ),
      delta=DeltaConfig(
        num_key_heads=2, num_value_heads=2, key_dim=32, value_dim=32
      ),
      saved="everything",
    ),
    ModelConfig(
      name="qwen3.6-27b",
      vocab_size=248320,
      embed_dim=5120,
      hidden_dim=17408,
      stages=(Stage(pattern=(DELTA, DELTA, DELTA, ATTENTION), repeats=16),),
      attention=AttentionConfig(
        num_heads=24, num_kv_heads=4, head_dim=256, rotary_dim=64
      ),
      delta=DeltaConfig(
        num_key_heads=16, num_value_heads=48, key_dim=128, value_dim=128
      ),
      dtype="bfloat16",
      param_dtype="bfloat16",
    ),
  )
}
