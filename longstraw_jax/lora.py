"""Low-rank adapters beside linear maps: LoRA, Hu et al., 2106.09685.

  y = x W + (alpha / r) (x A) B

An adapter is three leaves beside its kernel [L, D, F]: lora_a [L, D, r] and
lora_b [L, r, F], which learn, and lora_scale [L], alpha / r, which does not.
The maps read them where they are (models/layers.py); nothing else knows. As in
PEFT, A starts uniform in +-1/sqrt(D) (Kaiming uniform with a = sqrt(5)) and B
at zero, so that a new adapter changes nothing.
"""

import dataclasses
import functools
import re

from flax import traverse_util
import flax.linen as nn
import jax
import jax.numpy as jnp

from longstraw_jax.config import check_dtype
from longstraw_jax.models.layers import Linear, expanded
from longstraw_jax.models.model import Model, Params
from longstraw_jax.ops.precision import wide_dtype, widen

ALL_LINEAR = "all-linear"
LEARNED = ("lora_a", "lora_b")
LEAVES = (*LEARNED, "lora_scale")


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoraConfig:
  """Which maps get an adapter, and of what size.

  Attributes:
    rank: r, the width of the adapter.
    alpha: the adapter is multiplied by alpha / rank.
    targets: what a map's path stage_i/layer_j/mixer/q_proj ends in ("q_proj",
      "mixer/q_proj") or a regular expression for all of it; "all-linear" is
      every linear map of the layers.
  """

  rank: int = 16
  alpha: float = 32.0
  targets: tuple[str, ...] = (ALL_LINEAR,)

  def __post_init__(self):
    if isinstance(self.rank, bool) or self.rank < 1:
      raise ValueError(f"rank is {self.rank!r}: use at least 1")
    if not self.alpha > 0:
      raise ValueError(f"alpha is {self.alpha!r}: use a positive number")
    targets = self.targets
    targets = (targets,) if isinstance(targets, str) else tuple(targets)
    if not targets:
      raise ValueError("targets is empty: name a map, or use 'all-linear'")
    object.__setattr__(self, "targets", targets)


@functools.cache
def linear_paths(model: Model) -> tuple[str, ...]:
  """Paths stage_i/layer_j/... of all linear maps that could learn, sorted.

  Found by running the model abstractly, so that a newcomer's are among them.
  """
  found = set()

  def note(call, args, kwargs, context):
    if isinstance(context.module, Linear):
      found.add("/".join(context.module.path))
    return call(*args, **kwargs)

  with nn.intercept_methods(note):
    shapes = jax.eval_shape(lambda key: model.init(key), jax.random.key(0))
  flat = traverse_util.flatten_dict(shapes.trainable, sep="/")
  suffix = "/kernel"
  maps = {path.removesuffix(suffix) for path in flat if path.endswith(suffix)}
  # Modules know their path within a layer: what follows stage_i/layer_j.
  return tuple(sorted(m for m in maps if m.split("/", 2)[-1] in found))


def adapted_paths(model: Model, config: LoraConfig) -> tuple[str, ...]:
  """Paths of the maps that `config.targets` names, sorted.

  Raises:
    ValueError: a target names no map; lists what could be named.
  """
  paths = linear_paths(model)

  def named(target):
    if target == ALL_LINEAR:
      return set(paths)
    ends = {p for p in paths if f"/{p}".endswith(f"/{target}")}
    return ends or {p for p in paths if re.fullmatch(target, p)}

  chosen = {target: named(target) for target in config.targets}
  missing = [target for target, found in chosen.items() if not found]
  if missing:
    names = sorted({path.split("/", 2)[-1] for path in paths})
    raise ValueError(
      f"targets {missing} name no linear map of {model.config.name}: use "
      f"{ALL_LINEAR!r}, one of {names}, its last part, or a regular "
      f"expression for a whole path such as {paths[0]!r}"
    )
  return tuple(sorted(set().union(*chosen.values())))


def _is_adapter(path: str) -> bool:
  return path.rpartition("/")[2] in LEAVES


def _select(tree: dict, keep) -> dict:
  flat = traverse_util.flatten_dict(tree, sep="/")
  kept = {path: x for path, x in flat.items() if keep(path)}
  return traverse_util.unflatten_dict(kept, sep="/")


def has_lora(params: Params) -> bool:
  """Whether any map carries an adapter."""
  flat = traverse_util.flatten_dict(params.merged(), sep="/")
  return any(map(_is_adapter, flat))


def add_lora(
  model: Model,
  params: Params,
  key: jax.Array,
  config: LoraConfig,
  dtype: str | None = None,
) -> Params:
  """New adapters beside a base, which they leave as it was.

  Args:
    model: the model.
    params: the base, without adapters; quantized or not.
    key: a typed key.
    config: which maps, and of what size.
    dtype: of the adapters; by default float32, or a kernel's where wider.

  Returns:
    Adapters as the only trainable leaves; the whole base is frozen.

  Raises:
    ValueError: a target names no map, or there are adapters already.
  """
  if dtype is not None:
    check_dtype("dtype", dtype)
  paths = adapted_paths(model, config)
  keys = jax.random.split(key, len(paths))
  adapters = {}
  tree = traverse_util.flatten_dict(params.merged(), sep="/")
  for path, own in zip(paths, keys, strict=True):
    kernel = tree[f"{path}/kernel"]
    *repeats, inputs, outputs = kernel.shape
    made = wide_dtype(kernel.dtype) if dtype is None else jnp.dtype(dtype)
    bound = inputs**-0.5
    shape = (*repeats, inputs, config.rank)
    adapters[path] = (
      jax.random.uniform(own, shape, made, -bound, bound),
      jnp.zeros((*repeats, config.rank, outputs), made),
      jnp.full(repeats, config.alpha / config.rank, wide_dtype(made)),
    )
  return place_adapters(params, adapters)


def place_adapters(
  params: Params, adapters: dict[str, tuple[jax.Array, jax.Array, jax.Array]]
) -> Params:
  """Adapters as the only trainable leaves beside a frozen base.

  Args:
    params: the base.
    adapters: path of a map -> (lora_a, lora_b, lora_scale).

  Raises:
    ValueError: there are adapters already.
  """
  if has_lora(params):
    raise ValueError(
      "the parameters have adapters already: take them off by drop_lora or "
      "into the base by merge_lora first"
    )
  trainable = {}
  frozen = traverse_util.flatten_dict(params.merged(), sep="/")
  for path, (a, b, scale) in adapters.items():
    trainable |= {f"{path}/lora_a": a, f"{path}/lora_b": b}
    frozen[f"{path}/lora_scale"] = scale
  unflatten = lambda flat: traverse_util.unflatten_dict(flat, sep="/")
  return Params(trainable=unflatten(trainable), frozen=unflatten(frozen))


def drop_lora(params: Params) -> Params:
  """The base alone, arrays shared: the reference policy of a KL term."""
  base = lambda path: not _is_adapter(path)
  return Params(
    trainable=_select(params.trainable, base),
    frozen=_select(params.frozen, base),
  )


def frozen_base(params: Params) -> Params:
  """drop_lora for what must not change from step to step.

  Raises:
    ValueError: there are no adapters, or something beside them learns.
  """
  flat = traverse_util.flatten_dict(params.trainable, sep="/")
  learning = [path for path in flat if not _is_adapter(path)]
  if learning or not flat:
    found = f"{learning[0]!r} learns" if learning else "nothing learns"
    raise ValueError(
      f"grad_scope is 'prefix_frozen' but {found}: it needs parameters of "
      "which exactly the adapters learn, as add_lora returns them"
    )
  return drop_lora(params)


def merge_lora(params: Params) -> Params:
  """The base with W + scale A B in the place of W, for export.

  Summed in float32 or wider and rounded once to the kernel's dtype. Quantized
  matrices are expanded, whether or not they have an adapter.
  """
  tree = traverse_util.flatten_dict(params.merged(), sep="/")

  def merged(path, leaf):
    leaf = expanded(leaf)
    map_path, _, name = path.rpartition("/")
    if name != "kernel" or f"{map_path}/lora_a" not in tree:
      return leaf
    a, b, scale = (tree[f"{map_path}/{part}"] for part in LEAVES)
    product = widen(a) @ widen(b) * scale[..., None, None]
    return (widen(leaf) + product).astype(leaf.dtype)

  def merged_tree(tree):
    flat = traverse_util.flatten_dict(tree, sep="/")
    flat = {path: merged(path, leaf) for path, leaf in flat.items()}
    return traverse_util.unflatten_dict(flat, sep="/")

  base = drop_lora(params)
  return Params(
    trainable=merged_tree(base.trainable), frozen=merged_tree(base.frozen)
  )
