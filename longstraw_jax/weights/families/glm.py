"""GLM-5, 5.1 and 5.2: latent attention with a sparse index, experts."""

from longstraw_jax.config import (
  LatentConfig,
  LayerSpec,
  ModelConfig,
  MoEConfig,
)
from longstraw_jax.weights.families.family import (
  Family,
  Fields,
  describe_trunk,
  layer_parts,
  translate_trunk,
)
from longstraw_jax.weights.families.rope import (
  read_rope,
  read_softmax_factor,
  write_rope,
)
from longstraw_jax.weights.families.settings import Settings
from longstraw_jax.weights.families.stages import group_layers

# The norms of both latents have the library's default whatever rms_norm_eps is.
LATENT_EPS = 1e-6
INDEX_FREQ, INDEX_OFFSET = 1, 2  # the library's, where a file has none

_MIXERS = {"full": "latent_attention", "shared": "shared_latent_attention"}
_FFNS = {"dense": "swiglu", "sparse": "sigmoid_moe"}
_LETTERS = {"F": "full", "S": "shared"}


def _index_kinds(settings: Settings, num_layers: int) -> list[str]:
  """Which layers choose: a list wins over a pattern, that over a frequency."""
  key = "indexer_types"
  kinds = settings.names(key, num_layers)
  pattern = settings.get("index_topk_pattern")
  if kinds is None and pattern is not None:
    key = "index_topk_pattern"
    kinds = [_LETTERS.get(kind, kind) for kind in pattern]
  if kinds is None:
    freq = settings.size("index_topk_freq", INDEX_FREQ)
    offset = settings.get("index_skip_topk_offset", INDEX_OFFSET)
    return [
      "shared" if max(i - offset + 1, 0) % freq else "full"
      for i in range(num_layers)
    ]
  if not set(kinds) <= set(_MIXERS) or len(kinds) != num_layers:
    raise settings.refuse(
      key, f"use {' or '.join(_MIXERS)} for each of {num_layers} layers"
    )
  return kinds


def _layers(settings: Settings) -> list[LayerSpec]:
  num_layers = settings.size("num_hidden_layers")
  settings.only("moe_layer_freq", 1)
  kinds = settings.names("mlp_layer_types", num_layers)
  if kinds is None:
    dense = settings.get("first_k_dense_replace", 3)
    kinds = ["dense" if i < dense else "sparse" for i in range(num_layers)]
  if not set(kinds) <= set(_FFNS):
    raise settings.refuse("mlp_layer_types", f"use {' or '.join(_FFNS)}")
  indexers = _index_kinds(settings, num_layers)
  return [
    LayerSpec(mixer=_MIXERS[index], ffn=_FFNS[kind])
    for index, kind in zip(indexers, kinds, strict=True)
  ]


def _translate_moe(settings: Settings) -> MoEConfig:
  settings.only("scoring_func", "sigmoid")
  settings.only("topk_method", "noaux_tc")
  hidden_dim = settings.size("moe_intermediate_size")
  experts = settings.size("num_experts", None)  # an older name, which wins
  return MoEConfig(
    num_experts=experts or settings.size("n_routed_experts"),
    experts_per_token=settings.size("num_experts_per_tok"),
    expert_hidden_dim=hidden_dim,
    shared_hidden_dim=hidden_dim * settings.size("n_shared_experts"),
    num_groups=settings.size("n_group", 1),
    groups_per_token=settings.size("topk_group", 1),
    scaling=settings.number("routed_scaling_factor"),
    normalize=settings.flag("norm_topk_prob", True),
  )


def _translate(settings: Settings) -> Fields:
  for key in ("rope_interleave", "indexer_rope_interleave"):
    settings.only(key, True)
  settings.only("attention_bias", False)
  settings.only("use_sliding_window", False)
  settings.refuse_windows(default=True)
  settings.only("moe_router_dtype", "float32")
  num_heads = settings.size("num_attention_heads")
  settings.only("num_key_value_heads", num_heads)
  # Not head_dim: published files hold a stale one.
  width = settings.size("qk_rope_head_dim")
  nope_dim = settings.size("qk_nope_head_dim")
  settings.only("qk_head_dim", nope_dim + width)
  kinds = settings.get("layer_types", [])
  if set(kinds) - {"indexed_attention"}:
    raise settings.refuse("layer_types", "only indexed_attention is known")
  rope = read_rope(settings, width)
  if rope.dim != width:
    raise ValueError(
      f"config.json: partial_rotary_factor rotates {rope.dim} of {width} dims: "
      "qk_rope_head_dim alone says how many; use 1"
    )
  return translate_trunk(settings) | {
    "hidden_dim": settings.size("intermediate_size"),
    "norm": "plain",
    "stages": group_layers(_layers(settings)),
    "latent": LatentConfig(
      num_heads=num_heads,
      query_rank=settings.size("q_lora_rank"),
      latent_rank=settings.size("kv_lora_rank"),
      nope_dim=nope_dim,
      value_dim=settings.size("v_head_dim"),
      rope=rope,
      index_heads=settings.size("index_n_heads"),
      index_dim=settings.size("index_head_dim"),
      index_topk=settings.size("index_topk"),
      latent_eps=LATENT_EPS,
      softmax_factor=read_softmax_factor(settings),
    ),
    "moe": _translate_moe(settings),
  }


def _describe(config: ModelConfig) -> Fields:
  sizes, moe = config.latent, config.moe
  indexers = {mixer: kind for kind, mixer in _MIXERS.items()}
  ffns = {ffn: kind for kind, ffn in _FFNS.items()}
  layers = [
    spec
    for stage in config.stages
    for _ in range(stage.repeats)
    for spec in stage.pattern
  ]
  kinds = [ffns[spec.ffn] for spec in layers]
  return (
    describe_trunk(config)
    | {
      "intermediate_size": config.hidden_dim,
      "num_attention_heads": sizes.num_heads,
      "num_key_value_heads": sizes.num_heads,
      "q_lora_rank": sizes.query_rank,
      "kv_lora_rank": sizes.latent_rank,
      "qk_nope_head_dim": sizes.nope_dim,
      "qk_rope_head_dim": sizes.rope.dim,
      "v_head_dim": sizes.value_dim,
      "head_dim": sizes.rope.dim,
      "attention_bias": False,
      "index_n_heads": sizes.index_heads,
      "index_head_dim": sizes.index_dim,
      "index_topk": sizes.index_topk,
      "indexer_types": [indexers[spec.mixer] for spec in layers],
      "mlp_layer_types": kinds,
      "first_k_dense_replace": (kinds + ["sparse"]).index("sparse"),
      "n_routed_experts": moe.num_experts,
      "n_shared_experts": moe.shared_hidden_dim // moe.expert_hidden_dim,
      "num_experts_per_tok": moe.experts_per_token,
      "moe_intermediate_size": moe.expert_hidden_dim,
      "n_group": moe.num_groups,
      "topk_group": moe.groups_per_token,
      "routed_scaling_factor": moe.scaling,
      "norm_topk_prob": moe.normalize,
    }
    | write_rope(sizes.rope, sizes.rope.dim, sizes.softmax_factor)
  )


def _describe_more(config: ModelConfig) -> Fields:
  """vLLM and SGLang take a rule, a softmax or a half-split from absent keys."""
  sizes = config.latent
  letters = {_MIXERS[kind]: letter for letter, kind in _LETTERS.items()}
  return {
    "index_topk_pattern": "".join(letters[m] for m in config.layer_types),
    "indexer_rope_interleave": True,
    "mlp_bias": False,
    "moe_layer_freq": 1,
    "moe_router_dtype": "float32",
    "num_nextn_predict_layers": 0,
    "qk_head_dim": sizes.nope_dim + sizes.rope.dim,
    "rope_interleave": True,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
  }


def _fits(config: ModelConfig) -> bool:
  mixers, ffns = layer_parts(config)
  return (
    mixers <= set(_MIXERS.values())
    and ffns <= set(_FFNS.values())
    and config.norm == "plain"
    and None not in (config.latent, config.moe)
  )


def _ignored(settings: Settings) -> tuple[str, ...]:
  """The multi-token prediction layers, stored behind the last one."""
  first = settings.size("num_hidden_layers")
  extra = settings.get("num_nextn_predict_layers", 0)
  return tuple(rf"model\.layers\.{i}\..*" for i in range(first, first + extra))


# Lists overrule the rules that others come from, num_experts n_routed_experts;
# head_dim is stale.
_HARMLESS = frozenset(
  "first_k_dense_replace head_dim index_share_for_mtp_iteration "
  "index_skip_topk_offset index_topk_freq index_topk_pattern "
  "max_window_layers n_routed_experts num_nextn_predict_layers".split()
)

GLM = Family(
  model_type="glm_moe_dsa",
  architecture="GlmMoeDsaForCausalLM",
  translate=_translate,
  describe=_describe,
  describe_more=_describe_more,
  fits=_fits,
  ignored=_ignored,
  harmless=_HARMLESS,
)
