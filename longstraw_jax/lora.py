"""Low-rank adapters beside linear maps: LoRA, Hu et al., 2106.09685.

  y = x W + (alpha / r) (x A) B

An adapter is three leaves beside its kernel [L, D, F]: lora_a [L, D, r] and
lora_b [L, r, F], which learn, and lora_scale [L], alpha / r, which does not.
Every expert of a mixture has one of its own, [L, E, D, r], [L, E, r, F] and
[L, E]; gate and up, which are one matrix [L, E, D, 2 F], have one together, as
in PEFT. The maps read them where they are (models/layers.py, models/moe.py);
nothing else knows. A starts uniform in +-1/sqrt(D) (Kaiming uniform with a =
sqrt(5)) and B at zero, as in PEFT, so that a new adapter changes nothing.
"""

import dataclasses
import functools
import math
import re

from flax import traverse_util
import flax.linen as nn
import jax
import jax.numpy as jnp

from longstraw_jax.config import check_dtype
from longstraw_jax.models.layers import Linear, beside, expanded
from longstraw_jax.models.model import Model, Params
from longstraw_jax.models.moe import Router
from longstraw_jax.ops.precision import wide_dtype, widen

ALL_LINEAR = "all-linear"
LINEAR, EXPERTS, ROUTER = "linear", "experts", "router"
LEARNED = ("lora_a", "lora_b")
LEAVES = (*LEARNED, "lora_scale")


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoraConfig:
  """Which maps get an adapter, and of what size.

  Attributes:
    rank: r, the width of the adapter.
    alpha: the adapter is multiplied by alpha / rank.
    targets: what a map's path stage_i/layer_j/mixer/q_proj ends in ("q_proj",
      "mixer/q_proj", "experts_down") or a regular expression for all of it.
      "all-linear" is every linear map of the layers, those of experts among
      them, but no router; "experts" is those of experts alone.
    exclude: maps that get none after all, named in the same way.
  """

  rank: int = 16
  alpha: float = 32.0
  targets: tuple[str, ...] = (ALL_LINEAR,)
  exclude: tuple[str, ...] = ()

  def __post_init__(self):
    if isinstance(self.rank, bool) or self.rank < 1:
      raise ValueError(f"rank is {self.rank!r}: use at least 1")
    if not self.alpha > 0:
      raise ValueError(f"alpha is {self.alpha!r}: use a positive number")
    for name in ("targets", "exclude"):
      names = getattr(self, name)
      names = (names,) if isinstance(names, str) else tuple(names)
      object.__setattr__(self, name, names)
    if not self.targets:
      raise ValueError("targets is empty: name a map, or use 'all-linear'")


@dataclasses.dataclass(frozen=True)
class LinearMap:
  """A map, or those of all experts, that an adapter can stand beside.

  Attributes:
    path: what targets know it by.
    matrix: the path of its parameter.
    kind: LINEAR, EXPERTS or ROUTER.
  """

  path: str
  matrix: str
  kind: str

  @property
  def adapter(self) -> str:
    """The path of the adapter's leaves."""
    return adapter_path(self.matrix)


def adapter_path(matrix: str) -> str:
  """Where the adapter of the parameter at a path has its leaves."""
  node, _, name = matrix.rpartition("/")
  return node if name == "kernel" else f"{node}/{beside(name)}"


@functools.cache
def linear_maps(model: Model) -> tuple[LinearMap, ...]:
  """All maps that could have an adapter, sorted by path.

  Found by running the model abstractly, so that a newcomer's are among them.
  """
  kinds = {}

  def note(call, args, kwargs, context):
    module = context.module
    if isinstance(module, Linear):
      kind = ROUTER if isinstance(module, Router) else LINEAR
      kinds["/".join((*module.path, "kernel"))] = kind
    return call(*args, **kwargs)

  with nn.intercept_methods(note):
    shapes = jax.eval_shape(lambda key: model.init(key), jax.random.key(0))
  learning = traverse_util.flatten_dict(shapes.trainable, sep="/")
  maps = []
  for stage, layer, block, _ in model.layers():
    # Modules know their path within a layer: what follows stage_i/layer_j.
    experts = {"/".join(path): EXPERTS for path in block.stacked()}
    for inner, kind in (kinds | experts).items():
      matrix = f"{stage}/{layer}/{inner}"
      if matrix in learning:
        path = matrix.removesuffix("/kernel")
        maps.append(LinearMap(path=path, matrix=matrix, kind=kind))
  return tuple(sorted(maps, key=lambda one: one.path))


def linear_paths(model: Model) -> tuple[str, ...]:
  """Paths stage_i/layer_j/... of the maps that "all-linear" names, sorted."""
  maps = linear_maps(model)
  return tuple(one.path for one in maps if one.kind != ROUTER)


def adapted_maps(model: Model, config: LoraConfig) -> tuple[LinearMap, ...]:
  """The maps that `config` gives an adapter, sorted by path.

  Raises:
    ValueError: a target names no map, lists what could be named; or all that
      are named are excluded.
  """
  maps = linear_maps(model)

  def named(target):
    if target == ALL_LINEAR:
      return {one for one in maps if one.kind != ROUTER}
    if target == EXPERTS:
      return {one for one in maps if one.kind == EXPERTS}
    ends = {one for one in maps if f"/{one.path}".endswith(f"/{target}")}
    return ends or {one for one in maps if re.fullmatch(target, one.path)}

  def union(field, targets):
    chosen = {target: named(target) for target in targets}
    missing = [target for target, found in chosen.items() if not found]
    if missing:
      names = sorted({one.path.split("/", 2)[-1] for one in maps})
      raise ValueError(
        f"{field} {missing} name no linear map of {model.config.name}: use "
        f"{ALL_LINEAR!r}, {EXPERTS!r} where there are any, one of {names}, its "
        "last part, or a regular expression for a whole path such as "
        f"{maps[0].path!r}"
      )
    return set().union(*chosen.values())

  left = union("targets", config.targets) - union("exclude", config.exclude)
  if not left:
    raise ValueError(
      f"exclude {list(config.exclude)} leaves none of the maps that targets "
      f"{list(config.targets)} name: exclude less"
    )
  return tuple(sorted(left, key=lambda one: one.path))


def adapted_paths(model: Model, config: LoraConfig) -> tuple[str, ...]:
  """Paths of adapted_maps."""
  return tuple(one.path for one in adapted_maps(model, config))


# --- How far adapters reach --------------------------------------------------


@dataclasses.dataclass(frozen=True)
class LoraCoverage:
  """What adapters cost and how much of a model they reach.

  Attributes:
    maps: adapted maps, counted in every layer and of every expert.
    parameters: that adapters have.
    reached: parameters of the matrices that they stand beside.
    matrices: parameters of all matrices of the layers, embedding and head not
      among them.
    left_out: of matrices without one, name in the layer -> parameters.
  """

  maps: int
  parameters: int
  reached: int
  matrices: int
  left_out: dict[str, int]

  @property
  def share(self) -> float:
    """Of the layers' matrix parameters, what adapters reach."""
    return self.reached / self.matrices

  def __str__(self) -> str:
    left = ", ".join(f"{name} ({n:,})" for name, n in self.left_out.items())
    return (
      f"adapters on {self.maps:,} maps: {self.parameters:,} parameters; they "
      f"reach {self.share:.2%} of the layers' matrix parameters "
      f"({self.reached:,} of {self.matrices:,}); left out: "
      f"{left + ', ' if left else ''}embedding and head"
    )


def lora_coverage(model: Model, adapters: Params | LoraConfig) -> LoraCoverage:
  """How far adapters reach, from parameters or from a configuration alone.

  Args:
    model: the model.
    adapters: parameters with adapters (arrays or shapes), or what add_lora
      would be given.
  """
  if isinstance(adapters, LoraConfig):
    make = lambda key: add_lora(model, model.init(key), key, adapters)
    adapters = jax.eval_shape(make, jax.random.key(0))
  tree = traverse_util.flatten_dict(adapters.merged(), sep="/")
  experts = {one.matrix for one in linear_maps(model) if one.kind == EXPERTS}
  maps = parameters = reached = matrices = 0
  left_out: dict[str, int] = {}
  for path, matrix in tree.items():
    if not path.endswith("/kernel") and path not in experts:
      continue
    size = math.prod(matrix.shape)
    matrices += size
    node = adapter_path(path)
    if f"{node}/lora_a" in tree:
      maps += math.prod(matrix.shape[:-2])
      reached += size
      parameters += sum(tree[f"{node}/{leaf}"].size for leaf in LEARNED)
    else:
      name = path.split("/", 2)[-1].removesuffix("/kernel")
      left_out[name] = left_out.get(name, 0) + size
  return LoraCoverage(
    maps=maps,
    parameters=parameters,
    reached=reached,
    matrices=matrices,
    left_out=dict(sorted(left_out.items())),
  )


# --- On and off --------------------------------------------------------------


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
  maps = adapted_maps(model, config)
  keys = jax.random.split(key, len(maps))
  adapters = {}
  tree = traverse_util.flatten_dict(params.merged(), sep="/")
  for one, own in zip(maps, keys, strict=True):
    kernel = tree[one.matrix]
    *repeats, inputs, outputs = kernel.shape
    made = wide_dtype(kernel.dtype) if dtype is None else jnp.dtype(dtype)
    bound = inputs**-0.5
    shape = (*repeats, inputs, config.rank)
    adapters[one.adapter] = (
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
    adapters: path of an adapter -> (lora_a, lora_b, lora_scale).

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
    leaf, node = expanded(leaf), adapter_path(path)
    if f"{node}/lora_a" not in tree:
      return leaf
    a, b, scale = (tree[f"{node}/{part}"] for part in LEAVES)
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
