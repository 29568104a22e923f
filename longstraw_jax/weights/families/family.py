"""What a family of checkpoints says of itself, and what all of them share."""

from collections.abc import Callable
import dataclasses
from typing import Any

from longstraw_jax.config import ModelConfig
from longstraw_jax.weights.families.settings import REQUIRED, Settings

Fields = dict[str, Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Family:
  """How one model type of the transformers library describes a model.

  Attributes:
    model_type: of the text model's config.json.
    architecture: class of the text model.
    wrapper_type: model type of a config.json that holds this one as its
      text_config, or None.
    wrapper_architecture: class of that one, or None.
    translate: from a config.json to fields of ModelConfig.
    describe: from a ModelConfig that fits to a config.json.
    describe_more: what else other readers (vLLM, SGLang, older versions of the
      library) take from a config.json of this family; for one that is written
      without a source to keep it from.
    fits: whether a ModelConfig is of this family.
    ignored: from a config.json to regular expressions of tensors that belong
      to parts this package does not run.
    harmless: keys of a config.json that `translate` need not read, besides
      those of every family: others overrule them, or they are of such parts.
  """

  model_type: str
  architecture: str
  wrapper_type: str | None = None
  wrapper_architecture: str | None = None
  translate: Callable[[Settings], Fields]
  describe: Callable[[ModelConfig], Fields]
  describe_more: Callable[[ModelConfig], Fields]
  fits: Callable[[ModelConfig], bool]
  ignored: Callable[[Settings], tuple[str, ...]] = lambda settings: ()
  harmless: frozenset[str] = frozenset()


def translate_trunk(settings: Settings, norm_eps: Any = REQUIRED) -> Fields:
  """What every family says in the same words."""
  return {
    "vocab_size": settings.size("vocab_size"),
    "embed_dim": settings.size("hidden_size"),
    "norm_eps": settings.number("rms_norm_eps", norm_eps),
    "tie_embeddings": settings.flag("tie_word_embeddings"),
  }


def describe_trunk(config: ModelConfig) -> Fields:
  """The inverse of `translate_trunk`."""
  return {
    "vocab_size": config.vocab_size,
    "hidden_size": config.embed_dim,
    "num_hidden_layers": config.num_layers,
    "rms_norm_eps": config.norm_eps,
    "tie_word_embeddings": config.tie_embeddings,
    "hidden_act": "silu",
  }


def layer_parts(config: ModelConfig) -> tuple[set[str], set[str | None]]:
  """Names of the mixers and of the feed-forwards that a model has."""
  specs = [spec for stage in config.stages for spec in stage.pattern]
  return {spec.mixer for spec in specs}, {spec.ffn for spec in specs}
