"""GRPO over very long shared prompts, with exact gradients through them."""

from longstraw_jax.capture import capture, extend, reverse_chunks
from longstraw_jax.config import (
  AttentionConfig,
  DeltaConfig,
  LatentConfig,
  LayerSpec,
  ModelConfig,
  MoEConfig,
  RopeConfig,
  Stage,
)
from longstraw_jax.group import branch_gradient, group_gradient
from longstraw_jax.lora import (
  LoraConfig,
  LoraCoverage,
  add_lora,
  drop_lora,
  has_lora,
  lora_coverage,
  merge_lora,
)
from longstraw_jax.models.contract import State, Update
from longstraw_jax.models.model import (
  Model,
  Params,
  sequence_logprobs,
  split_params,
)
from longstraw_jax.models.registry import FFNS, MIXERS
from longstraw_jax.nf4 import Nf4, quantize_base
from longstraw_jax.objectives import PolicyObjective, group_advantages
from longstraw_jax.ops.pages import (
  Segment,
  attend,
  attend_blocks,
  attend_chosen,
  gather_rows,
  merge,
  read_block,
)
from longstraw_jax.presets import PRESETS
from longstraw_jax.replay import replay, replay_scores
from longstraw_jax.rollout import rollout
from longstraw_jax.sharding import constrain, make_mesh, place_at_rest
from longstraw_jax.staleness import StaleStateWarning
from longstraw_jax.state import PromptState
from longstraw_jax.state_files import load_state, save_state
from longstraw_jax.types import Group, Span
from longstraw_jax.weights.export import save_pretrained
from longstraw_jax.weights.load import load_pretrained

__all__ = [
  "FFNS",
  "MIXERS",
  "PRESETS",
  "AttentionConfig",
  "DeltaConfig",
  "Group",
  "LatentConfig",
  "LayerSpec",
  "LoraConfig",
  "LoraCoverage",
  "MoEConfig",
  "Model",
  "ModelConfig",
  "Nf4",
  "Params",
  "PolicyObjective",
  "PromptState",
  "RopeConfig",
  "Segment",
  "Span",
  "Stage",
  "StaleStateWarning",
  "State",
  "Update",
  "add_lora",
  "attend",
  "attend_blocks",
  "attend_chosen",
  "branch_gradient",
  "capture",
  "constrain",
  "drop_lora",
  "extend",
  "gather_rows",
  "group_advantages",
  "group_gradient",
  "has_lora",
  "load_pretrained",
  "load_state",
  "lora_coverage",
  "make_mesh",
  "merge",
  "merge_lora",
  "place_at_rest",
  "quantize_base",
  "read_block",
  "replay",
  "replay_scores",
  "rollout",
  "reverse_chunks",
  "save_pretrained",
  "save_state",
  "sequence_logprobs",
  "split_params",
]
