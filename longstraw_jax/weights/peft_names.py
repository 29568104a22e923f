"""What PEFT calls the maps beside adapters, and how it is told which."""

from typing import Any

from longstraw_jax.lora import EXPERTS, ROUTER, LinearMap, linear_maps
from longstraw_jax.models.model import Model
from longstraw_jax.weights.names import TRUNKS, hf_naming
from longstraw_jax.weights.peft_experts import (
  EACH,
  FUSED,
  INNER,
  Projections,
  only_parameter,
)
from longstraw_jax.weights.slots import (
  EXPERT_PROJECTIONS,
  parameter_shapes,
  tensor_slots,
)

# The version whose layout of experts this is, which their readers look at.
PEFT_VERSION = "0.21.2"


def map_modules(model: Model, trunk: str = TRUNKS[0]) -> dict[str, list[str]]:
  """Every map's names in the transformers library, by repeat.

  Those of experts are the names of the parameter that holds them all.

  Args:
    model: the model.
    trunk: what the names begin with, one of `names.TRUNKS`.
  """
  maps = {one.matrix: one.path for one in linear_maps(model)}
  modules: dict[str, list[str]] = {path: [] for path in maps.values()}
  slots = tensor_slots(
    model.config,
    parameter_shapes(model),
    hf_naming(trunk),
    stacked=lambda name: True,
  )
  for slot in slots:  # in the order of layers
    if slot.leaf in maps:
      modules[maps[slot.leaf]].append(slot.tensor.removesuffix(".weight"))
  return modules


def projections(one: LinearMap) -> Projections:
  """What files call the parts of experts' matrices."""
  return Projections(EXPERT_PROJECTIONS[one.path.split("/", 2)[-1]])


def is_outer(one: LinearMap) -> bool:
  """Whether PEFT wraps this parameter of a layer's experts last."""
  return len(projections(one).names) == 1


def _is_parameter(one: LinearMap, experts: str) -> bool:
  """Whether PEFT finds it among target_parameters: it is no nn.Linear there."""
  return experts == FUSED and one.kind in (EXPERTS, ROUTER)


def called(model: Model, one: LinearMap, name: str, experts: str) -> list[str]:
  """What targets call a map that the library calls `name`."""
  if one.kind == EXPERTS and experts == EACH:
    holder, numbers = (
      name.rpartition(".")[0],
      range(model.config.moe.num_experts),
    )
    names = projections(one).names
    return [f"{holder}.{e}.{x}" for e in numbers for x in names]
  if one.kind == ROUTER and experts == FUSED:
    return [f"{name}.weight"]
  return [name]


def _shortest(
  everything: set[str], wanted: set[str], parts: tuple[int, ...]
) -> list[str]:
  """Shortest ends of names by which PEFT finds exactly the wanted ones."""
  for number in parts:
    end = lambda name, n=number: ".".join(name.split(".")[-n:])
    ends = {end(name) for name in wanted}
    if {name for name in everything if end(name) in ends} == wanted:
      return sorted(ends)
  return sorted(wanted)


def targets(
  model: Model, modules: dict, adapted: set[str], experts: str
) -> dict[str, Any]:
  """target_modules and target_parameters that name exactly what is adapted."""
  every: dict[bool, set] = {False: set(), True: set()}
  chosen: dict[bool, set] = {False: set(), True: set()}
  for one in linear_maps(model):
    kind = _is_parameter(one, experts)
    for name in modules[one.path]:
      names = called(model, one, name, experts)
      every[kind].update(names)
      if one.path in adapted:
        chosen[kind].update(names)
  if experts == FUSED:
    # Some versions of the library have maps of this name in every expert.
    every[False] |= {f".experts.{x}_proj" for x in ("gate", "up", "down")}
  # q_proj, self_attn.q_proj; mlp.experts.0.up_proj
  parts = (1, 2) if experts == FUSED else (1, 4)
  found: dict[str, Any] = {
    "target_modules": _shortest(every[False], chosen[False], parts)
  }
  if chosen[True]:
    parameters = _shortest(every[True], chosen[True], (3,))
    found |= {"target_parameters": parameters, "peft_version": PEFT_VERSION}
  return found


# Where the two tensors of a module belong: the path of a map; its repeat and,
# of experts one by one, the expert and the projection; names by which patterns
# know it.
Place = tuple[str, tuple, tuple[str, ...]]


def places(
  model: Model, config: dict[str, Any], modules: set[str]
) -> dict[str, Place]:
  """Where the modules of a file belong, in any layout and under any trunk.

  Args:
    model: the model.
    config: adapter_config.json.
    modules: what stands before lora_A in the file.
  """
  found: dict[str, Place] = {}
  for trunk in TRUNKS:
    library = map_modules(model, trunk)
    for one in linear_maps(model):
      for repeat, name in enumerate(library[one.path]):
        if one.kind != EXPERTS:
          found[name] = one.path, (repeat,), (name, f"{name}.weight")
          continue
        holder, _, parameter = name.rpartition(".")
        for each in called(model, one, name, EACH):
          _, expert, projection = each.rsplit(".", 2)
          part = repeat, int(expert), projection
          found[each] = one.path, part, (each,)
        if holder + INNER in modules:
          module = holder if is_outer(one) else holder + INNER
          found[module] = one.path, (repeat,), (name,)
        elif holder in modules and parameter == only_parameter(config, holder):
          found[holder] = one.path, (repeat,), (name,)
  return found
