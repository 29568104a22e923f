"""Capacity plans: a step's phases, compiled for GPUs that are not there.

XLA's compiler for GPUs needs no GPU, only a description of one. Every phase is
the function that training calls, lowered for the real shapes on the mesh that
training would use, and the compiler says what it would allocate:

  config = PlanConfig(target=GPU_TARGETS["h200"], prompt=2**21, ...)
  for phase in plan(Model(PRESETS["qwen3.6-27b"]), config):
    print(phase.name, phase.total, phase.dominant)

It takes the wheels jax-cuda12-plugin and jax-cuda12-pjrt of jax's own version
(the extra "plan"); without a GPU, JAX_PLATFORMS=cpu must be set. Where they
are absent a plan has what arithmetic knows: all but the temporaries.

Bytes are those of one device; see NOT_COUNTED for what is not among them. With
pages="host" what is then in host memory (HOST_PARTS) is counted apart: `pinned`
is what one device keeps there, and the temporaries hold what a phase stages of
it. A device that is not there has no memory spaces that arguments could be in:
a planned phase takes them as device arguments, moves them to the host at its
entry and is compiled from there on as on a GPU; the reverse walk makes its
accumulator itself, as group_gradient does.
"""

from collections.abc import Callable, Iterator, Sequence
import dataclasses
import functools
import importlib
import math
import re
import time

import jax
from jax.experimental import topologies
import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding

from longstraw_jax.capture import capture, reverse_chunks
from longstraw_jax.checks import (
  CONSTANT_SCOPES,
  check_chunk_size,
  check_scope,
)
from longstraw_jax.config import check_dtype
from longstraw_jax.flops import phase_flops
from longstraw_jax.gpu_targets import GpuTarget
from longstraw_jax.lora import LoraConfig, add_lora
from longstraw_jax.models.model import Model, Params
from longstraw_jax.nf4 import quantize_base
from longstraw_jax.ops.pages import (
  check_place,
  row_specs,
  to_host,
  wide_zeros,
)
from longstraw_jax.replay import replay_members, replay_scores, zero_sums
from longstraw_jax.rollout import rollout
from longstraw_jax.sharding import (
  CONTEXT,
  MEMBER,
  WHOLE,
  carry_specs,
  make_mesh,
  rest_specs,
)
from longstraw_jax.state import PromptState, state_specs
from longstraw_jax.steps import apply_gradient, make_learner
from longstraw_jax.train_config import OptimizerConfig
from longstraw_jax.types import Tree

PHASES = ("capture", "score", "branch", "reverse", "optimizer", "decode")
PARTS = (
  "weights",
  "master",
  "optimizer",
  "gradients",
  "pages",
  "page_gradients",
  "carries",
  "saved_carries",
  "tokens",
)
# That are in host memory with pages="host".
HOST_PARTS = ("pages", "page_gradients", "saved_carries")
NOT_COUNTED = (
  "Not counted: workspaces of cuBLAS, cuDNN and NCCL, fragmentation, the "
  "runtime's own context; with several prompts a step, the second sum of "
  "parameter gradients."
)
PLUGIN = "jax_plugins.xla_cuda12"
NO_PLUGIN = (
  "no compiler for GPUs: arguments and outputs only, without temporaries. "
  "Install jax-cuda12-plugin and jax-cuda12-pjrt of jax's version (pip install "
  "'.[plan]') and set JAX_PLATFORMS=cpu"
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlanConfig:
  """What is to be trained on which machines.

  Attributes:
    target: the kind of GPU.
    hosts, devices_per_host: how many.
    member: groups of devices that replay members of their own; the rest of
      the devices share one prompt.
    prompt, group, response: P, G and R.
    grad_scope, tail_chunks, chunk_size, block_size, members_at_once,
      page_grad_dtype: as in group_gradient.
    pages: where pages, their gradients and saved carries are, "device" or
      "host".
    lora: adapters that alone learn; None trains everything.
    nf4: whether the frozen base is stored in 4 bits.
    optimizer: its settings.
  """

  target: GpuTarget
  hosts: int = 1
  devices_per_host: int = 8
  member: int = 1
  prompt: int
  group: int = 8
  response: int
  grad_scope: str = "full"
  tail_chunks: int | None = None
  chunk_size: int = 8192
  block_size: int | None = None
  members_at_once: int = 1
  page_grad_dtype: str = "float32"
  pages: str = "device"
  lora: LoraConfig | None = None
  nf4: bool = False
  optimizer: OptimizerConfig = OptimizerConfig()

  def __post_init__(self):
    check_place(self.pages)
    check_scope(self.grad_scope, self.tail_chunks)
    check_dtype("page_grad_dtype", self.page_grad_dtype)
    sizes = "hosts devices_per_host member group response chunk_size"
    for name in (sizes + " members_at_once").split():
      check_chunk_size(name, getattr(self, name))
    if self.prompt < 2:
      raise ValueError(f"prompt is {self.prompt}: give at least 2 tokens")
    if self.devices % self.member:
      raise ValueError(
        f"member is {self.member}: it must divide {self.devices} devices"
      )
    if self.nf4 and self.lora is None:
      raise ValueError("nf4 stores weights that do not learn: give a lora")

  @property
  def devices(self) -> int:
    """In all."""
    return self.hosts * self.devices_per_host

  @property
  def context(self) -> int:
    """Devices that share one prompt."""
    return self.devices // self.member


@dataclasses.dataclass(frozen=True, kw_only=True)
class PhasePlan:
  """One phase on one device; bytes and seconds.

  Attributes:
    name: of the phase.
    parts: what is on the device while it runs, part -> bytes.
    temporaries: the compiler's, beside the parts; None without a compiler.
    memory: of the device.
    flops: counted operations of all devices together; None where not counted.
    bytes_read: a bound from below on what a device must read.
    pinned: bytes of HOST_PARTS in pinned host memory.
    arguments, outputs, aliased: as the compiler sees them; None without one.
    largest_collective: bytes of the largest array of one collective.
    compile_seconds: what compiling took.
    text: the compiled program.
  """

  name: str
  parts: dict[str, int]
  memory: int
  flops: float | None
  bytes_read: int
  pinned: int = 0
  temporaries: int | None = None
  arguments: int | None = None
  outputs: int | None = None
  aliased: int | None = None
  largest_collective: int | None = None
  compile_seconds: float | None = None
  text: str | None = dataclasses.field(default=None, repr=False)

  @property
  def total(self) -> int:
    """All that is counted."""
    return sum(self.parts.values()) + (self.temporaries or 0)

  @property
  def fits(self) -> bool:
    """Whether the total is within the device's memory."""
    return self.total <= self.memory

  @property
  def dominant(self) -> str:
    """The largest part."""
    shares = self.parts | {"temporaries": self.temporaries or 0}
    return max(shares, key=shares.get)

  def seconds(self, config: PlanConfig, mfu: float) -> float:
    """A floor on the wall time: operations at `mfu`, or memory bandwidth."""
    peak = config.devices * config.target.tflops * 1e12 * mfu
    return max(
      (self.flops or 0.0) / peak, self.bytes_read / config.target.bandwidth
    )


# --- Shapes with shardings ---------------------------------------------------


def gpu_mesh(config: PlanConfig) -> Mesh | None:
  """The mesh on devices of the target; None where nothing compiles for it."""
  try:
    importlib.import_module(PLUGIN)
    topology = topologies.get_topology_desc(
      platform="cuda",
      target_config=config.target.text(),
      topology=f"1x{config.hosts}x{config.devices_per_host}",
    )
  except (ImportError, NotImplementedError):
    return None
  return make_mesh(config.context, config.member, topology.devices)


def shape_mesh(config: PlanConfig) -> AbstractMesh:
  """The mesh's shape alone, enough to know who holds what."""
  sizes, names = (config.member, config.context), (MEMBER, CONTEXT)
  return AbstractMesh(sizes, names, axis_types=(AxisType.Auto,) * 2)


def placed(tree: Tree, specs: Tree, mesh: Mesh | AbstractMesh) -> Tree:
  """Shapes with their shardings."""
  return jax.tree.map(
    lambda x, s: jax.ShapeDtypeStruct(
      x.shape, x.dtype, sharding=NamedSharding(mesh, s)
    ),
    tree,
    specs,
  )


def device_bytes(tree: Tree) -> int:
  """Bytes that one device holds of shapes with shardings."""
  return sum(
    math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize
    for x in jax.tree.leaves(tree)
    if not jnp.issubdtype(x.dtype, jax.dtypes.extended)
  )


def abstract_params(model: Model, config: PlanConfig) -> Params:
  """Shapes of the parameters that the plan trains."""

  def make(key):
    params = model.init(key)
    if config.lora is not None:
      params = add_lora(model, params, key, config.lora)
    return quantize_base(params) if config.nf4 else params

  return jax.eval_shape(make, jax.random.key(0))


def _everywhere(tree: Tree) -> Tree:
  return jax.tree.map(lambda _: WHOLE, tree)


class _Shapes:
  """Everything a step holds, as shapes with shardings on one mesh."""

  def __init__(self, model: Model, config: PlanConfig, mesh, params: Params):
    ids = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.int32)
    wide = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)
    put = lambda tree, specs: placed(tree, specs, mesh)
    here = lambda tree: put(tree, _everywhere(tree))
    group = (config.group, config.response)
    self.model, self.config = model, config
    self.prompt = here(ids(config.prompt))
    self.responses, self.lengths = here((ids(*group), ids(config.group)))
    self.dscores = here((wide(*group),) * 2)
    self.key = here(jax.eval_shape(jax.random.key, 0))
    state = jax.eval_shape(self.capture, params, self.prompt)
    self.state = put(state, state_specs(state))
    sums = jax.eval_shape(
      lambda params, state: zero_sums(
        model, params, state, config.page_grad_dtype
      ),
      params,
      state,
    )
    (page_grads,) = sums.priors
    self.page_grads = put(page_grads, row_specs(page_grads))
    self.sums = sums.replace(
      params=put(sums.params, rest_specs(sums.params)),
      priors=(),
      carry=put(sums.carry, carry_specs(sums.carry)),
    )
    learner = jax.eval_shape(
      functools.partial(make_learner, optimizer=config.optimizer), params
    )
    self.learner = put(learner, rest_specs(learner))
    self.params = self.learner.params

  def capture(self, params, prompt):
    config = self.config
    return capture(
      self.model,
      params,
      prompt,
      chunk_size=config.chunk_size,
      grad_scope=config.grad_scope,
      tail_chunks=config.tail_chunks,
      pages=config.pages,
    )

  def held(self, phase: str) -> dict[str, int]:
    """What a device and its share of the host hold while a phase runs."""
    trees = {
      "weights": self.params,
      "master": self.learner.opt_state.master,
      "optimizer": (self.learner.opt_state.adamw, self.learner.step),
      "pages": self.state.pages,
      "carries": self.state.carry,
      "saved_carries": self.state.saved_carries,
      "tokens": (self.prompt, self.responses, self.lengths, self.dscores),
    }
    if phase in ("branch", "reverse"):
      trees["page_gradients"] = self.page_grads
      trees["gradients"] = self.sums
    if phase == "optimizer":
      trees["gradients"] = self.sums.params
    return {part: device_bytes(trees.get(part)) for part in PARTS}

  def placed(self, state: PromptState) -> PromptState:
    """A phase's state, pages and saved carries where they are planned to be."""
    if self.config.pages == "device":
      return state
    pages, saved = to_host((state.pages, state.saved_carries))
    return state.replace(pages=pages, saved_carries=saved)

  def program(self, phase: str) -> tuple[Callable, tuple, tuple[int, ...]]:
    """A phase as (function, its arguments, which of them are given up)."""
    model, config = self.model, self.config
    members = (self.responses, self.lengths)
    sizes = {
      "block_size": config.block_size,
      "members_at_once": config.members_at_once,
    }
    block = min(config.block_size or config.response, config.response)
    # In host memory the walk makes its own; see the module's docstring.
    accumulator = None if config.pages == "host" else self.page_grads

    def score(params, state, *members):
      state = self.placed(state)
      return replay_scores(model, params, state, *members, **sizes)

    def branch(params, state, responses, lengths, dscores):
      return replay_members(
        model,
        block,
        config.members_at_once,
        params,
        self.placed(state),
        responses,
        lengths,
        None,
        None,
        dscores,
        config.page_grad_dtype,
      )

    def reverse(params, prompt, state, page_grads, sums):
      # All chunks; what reverse_walk does and hands back the accumulator too,
      # so that it is updated where it is.
      state = self.placed(state)
      if config.pages == "host":
        rows = model.gradient_rows(state.pages)
        page_grads = wide_zeros(rows, config.page_grad_dtype)
      return reverse_chunks(
        model,
        params,
        prompt,
        state,
        page_grads,
        sums,
        first=state.first_chunk,
        stop=state.capacity // state.chunk_size,
      )

    def optimizer(learner, grads):
      return apply_gradient(config.optimizer, learner, grads)

    def decode(params, state, key):
      return rollout(
        model,
        params,
        self.placed(state),
        key,
        group_size=config.group,
        max_tokens=config.response,
      )

    return {
      "capture": (self.capture, (self.params, self.prompt), ()),
      "score": (score, (self.params, self.state, *members), ()),
      "branch": (
        branch,
        (self.params, self.state, *members, self.dscores),
        (),
      ),
      "reverse": (
        reverse,
        (self.params, self.prompt, self.state, accumulator, self.sums),
        (3, 4),
      ),
      "optimizer": (optimizer, (self.learner, self.sums.params), (0, 1)),
      "decode": (decode, (self.params, self.state, self.key), ()),
    }[phase]


# --- Plans -------------------------------------------------------------------

_COLLECTIVE = re.compile(
  r"= (.*?) (?:all-gather|all-reduce|all-to-all|reduce-scatter|"
  r"collective-permute|collective-broadcast)(?:-start)?\("
)
_ARRAY = re.compile(r"\b(pred|[a-z]+\d+\w*)\[([\d,]*)\]")
_BITS = re.compile(r"\d+")


def largest_collective(text: str) -> int:
  """Bytes of the largest array that a collective takes or gives."""
  largest = 0
  for found in _COLLECTIVE.finditer(text):
    for kind, shape in _ARRAY.findall(found.group(1)):
      bits = 8 if kind == "pred" else int(_BITS.search(kind).group())
      size = math.prod(int(n) for n in shape.split(",") if n)
      largest = max(largest, size * bits // 8)
  return largest


def scope_phases(grad_scope: str) -> tuple[str, ...]:
  """The phases that a step of this scope has."""
  constant = grad_scope in CONSTANT_SCOPES
  return tuple(p for p in PHASES if not (constant and p == "reverse"))


def plan(
  model: Model,
  config: PlanConfig,
  *,
  phases: Sequence[str] | None = None,
  params: Params | None = None,
  keep_text: bool = False,
) -> Iterator[PhasePlan]:
  """Plans phase after phase.

  Args:
    model: the model, one of your own too.
    config: what is to be trained on which machines.
    phases: of PHASES; by default all that the scope has.
    params: shapes of the parameters, where they are not those of `model.init`
      with the adapters and the base that `config` asks for.
    keep_text: keep the compiled programs' text.

  Yields:
    One PhasePlan a phase.

  Raises:
    ValueError: an unknown phase.
  """
  phases = scope_phases(config.grad_scope) if phases is None else phases
  for phase in phases:
    if phase not in PHASES:
      raise ValueError(f"phase {phase!r}: use one of {PHASES}")
  if params is None:
    params = abstract_params(model, config)
  mesh = gpu_mesh(config)
  shape = shape_mesh(config)
  with jax.sharding.use_abstract_mesh(shape):
    shapes = _Shapes(model, config, mesh or shape, params)
  flops = phase_flops(
    model.config,
    config.prompt,
    config.group,
    config.response,
    chunk_size=config.chunk_size,
    grad_scope=config.grad_scope,
    block_size=config.block_size,
    frozen=config.lora is not None,
  )
  flops["decode"] = flops["score"]
  for phase in phases:
    parts = held = shapes.held(phase)
    if config.pages == "host":
      parts = parts | dict.fromkeys(HOST_PARTS, 0)
    row = PhasePlan(
      name=phase,
      parts=parts,
      memory=config.target.memory,
      flops=flops.get(phase),
      bytes_read=_bytes_read(phase, held, config),
      pinned=sum(held.values()) - sum(parts.values()),
    )
    if mesh is not None:
      row = _compiled(row, shapes, mesh, keep_text)
    yield row


def _bytes_read(phase: str, parts: dict[str, int], config: PlanConfig) -> int:
  """What a device reads at least: weights once, for decoding once a token."""
  if phase == "optimizer":
    names = ("weights", "master", "optimizer", "gradients")
    return sum(parts[name] for name in names)
  if phase == "decode":
    return config.response * (parts["weights"] + parts["pages"])
  return parts["weights"]


def _compile(lowered: jax.stages.Lowered) -> jax.stages.Compiled:
  # Without a GPU there is nothing to time candidates on.
  options = {"xla_gpu_autotune_level": 0}
  try:
    return lowered.compile(compiler_options=options)
  except jax.errors.JaxRuntimeError:
    # Untimed, Triton's products find no tiles for some tiny odd shapes.
    options["xla_gpu_enable_triton_gemm"] = False
    return lowered.compile(compiler_options=options)


def _compiled(row: PhasePlan, shapes: _Shapes, mesh: Mesh, keep_text: bool):
  """The row with what the compiler says."""
  function, arguments, donated = shapes.program(row.name)
  start = time.perf_counter()
  with jax.set_mesh(mesh):
    lowered = jax.jit(function, donate_argnums=donated, keep_unused=True).lower(
      *arguments
    )
    compiled = _compile(lowered)
  stats, text = compiled.memory_analysis(), compiled.as_text()
  return dataclasses.replace(
    row,
    temporaries=stats.temp_size_in_bytes,
    arguments=stats.argument_size_in_bytes,
    outputs=stats.output_size_in_bytes,
    aliased=stats.alias_size_in_bytes,
    largest_collective=largest_collective(text),
    compile_seconds=time.perf_counter() - start,
    text=text if keep_text else None,
  )


def longest_prompt(
  model: Model,
  config: PlanConfig,
  *,
  phases: Sequence[str] | None = None,
  params: Params | None = None,
  tolerance: float = 0.02,
) -> tuple[int | None, list[PhasePlan]]:
  """The longest prompt whose phases all fit, in whole chunks.

  Bytes grow almost linearly with the prompt, so that a line through the last
  two plans finds the border in a few compiles; between a prompt that fits and
  one that does not the search halves where the line misses.

  Args:
    model: as in plan.
    config: as in plan; its prompt is where the search begins.
    phases: as in plan; the others are not looked at.
    params: as in plan.
    tolerance: how near to the border the search stops, relative to the prompt.

  Returns:
    The prompt's tokens and its plans; (None, []) where not even one chunk fits.
  """
  chunk = config.chunk_size
  if params is None:
    params = abstract_params(model, config)

  def margin(chunks: int) -> tuple[int, list[PhasePlan]]:
    sized = dataclasses.replace(config, prompt=chunks * chunk + 1)
    rows = list(plan(model, sized, phases=phases, params=params))
    return min(row.memory - row.total for row in rows), rows

  low, low_margin, best = 0, 0, []
  high, high_margin = None, 0
  at = max((config.prompt - 1) // chunk, 1)
  while high is None or high - low > max(1, int(tolerance * high)):
    left, rows = margin(at)
    if left >= 0:
      low, low_margin, best = at, left, rows
    else:
      high, high_margin = at, left
    if high is None:
      at = 2 * low
    elif low == 0:
      at = high // 2
    else:
      share = low_margin / (low_margin - high_margin)
      step = max(1, int(tolerance * high) // 2)
      line = low + int(share * (high - low))
      at = min(max(line, low + step), high - 1)
    if at == 0:
      break
  return (low * chunk + 1, best) if low else (None, [])
