"""Capacity plans: what every phase of a step needs on GPUs that are not here.

Claim: the phases of one GRPO step over a shared prompt fit the devices named,
  by the plan of XLA's own compiler for them.
Command: python -m experiments.plan --preset=qwen3.6-27b --device=h20-3e
  --prompt=2088960 --response=8192 --group=8 --grad_scope=full --train=lora:16
Cost: 10 to 60 seconds a phase on 2 CPU cores, under 3 GiB of memory; needs the
  extra "plan" (182 MB of wheels), no GPU and no driver.
Expected result: a table of bytes of one device by phase, in units of 1e9, with
  what dominates, counted operations and a floor on the seconds; with
  --max_prompt also the longest prompt that fits. With --pages=host pages, their
  gradients and saved carries are no bytes of the device but of pinned_host, a
  column apart that nothing bounds.
"""

import dataclasses
import os
import time

from absl import app, flags
import jax

from experiments import common_flags, config_flags
from experiments.report import RowWriter, exit_code, print_table
from longstraw_jax import LoraConfig, Model
from longstraw_jax.gpu_targets import GPU_TARGETS, GpuTarget
from longstraw_jax.plan import (
  NO_PLUGIN,
  NOT_COUNTED,
  PARTS,
  PHASES,
  PhasePlan,
  PlanConfig,
  gpu_mesh,
  longest_prompt,
  plan,
  scope_phases,
)
from longstraw_jax.train_config import OptimizerConfig

FLAGS = flags.FLAGS
GB, MB = 1e9, 1e6
CUSTOM = "custom"
# The card that --device=custom starts from; every field has a flag.
TARGET = GPU_TARGETS["h100"]
SIZES = PlanConfig(target=TARGET, prompt=2_088_960, response=8192)
SHARED = frozenset({"nf4"})  # --base says it
OPTIMIZERS = ("adamw",)
BASES = ("bf16", "nf4")
COLUMNS = (
  "phase P weights master optimizer gradients pages page_gradients carries "
  "saved_carries temporaries total memory fits dominant pinned_host"
)
WORK_COLUMNS = "phase P teraflops seconds_floor largest_collective compiled"


def parse_train(text: str, exclude=()) -> LoraConfig | None:
  """None for "all", adapters for "lora:<rank>" but on what is excluded."""
  if text == "all":
    return None
  kind, _, rank = text.partition(":")
  common_flags.require(
    kind == "lora" and rank.isdigit() and int(rank) > 0,
    "train",
    text,
    "use all, or lora:<rank> such as lora:16",
  )
  return LoraConfig(rank=int(rank), exclude=tuple(exclude))


def parse_device(values: dict) -> GpuTarget:
  """A card of the table, with the fields that flags change."""
  name = values["device"]
  known = [*GPU_TARGETS, CUSTOM]
  common_flags.require(name in known, "device", name, f"use one of {known}")
  start = GPU_TARGETS.get(name, TARGET)
  given = {
    field.name: values[f"device_{field.name}"]
    for field in dataclasses.fields(GpuTarget)
    if values[f"device_{field.name}"] is not None
  }
  try:
    return dataclasses.replace(start, **given)
  except ValueError as error:
    raise ValueError(f"--device_{error}") from None


def parse_config(values: dict) -> PlanConfig:
  """The plan that flag values describe.

  Raises:
    ValueError: a value is refused.
  """
  common_flags.positive(values, "response", "group", "chunk_size", "hosts")
  dtypes = ("float32", "bfloat16")
  dtype = values["page_grad_dtype"]
  common_flags.require(
    dtype in dtypes, "page_grad_dtype", dtype, f"use one of {dtypes}"
  )
  base = values["base"]
  common_flags.require(base in BASES, "base", base, f"use one of {BASES}")
  common_flags.require(
    base == "bf16" or values["train"] != "all",
    "base",
    base,
    "it stores weights that do not learn: give --train=lora:<rank>",
  )
  optimizer = values["optimizer"]
  common_flags.require(
    optimizer in OPTIMIZERS, "optimizer", optimizer, f"use one of {OPTIMIZERS}"
  )
  return config_flags.parse(
    SIZES,
    values,
    skip=SHARED,
    target=parse_device(values),
    lora=parse_train(values["train"], values["lora_exclude"]),
    nf4=base == "nf4",
    optimizer=OptimizerConfig(master_dtype=values["master_dtype"]),
  )


def row_of(phase: PhasePlan, config: PlanConfig, mfu: float) -> dict:
  """One row; bytes as they are."""
  return {
    "device": config.target.name,
    "phase": phase.name,
    "P": config.prompt,
    **phase.parts,
    "temporaries": phase.temporaries,
    "total": phase.total,
    "memory": phase.memory,
    "pinned_host": phase.pinned,
    "fits": phase.fits,
    "dominant": phase.dominant,
    "flops": phase.flops,
    "seconds_floor": phase.seconds(config, mfu),
    "arguments": phase.arguments,
    "outputs": phase.outputs,
    "aliased": phase.aliased,
    "largest_collective": phase.largest_collective,
    "compile_seconds": phase.compile_seconds,
  }


def readable(row: dict, unit: float) -> dict:
  """A row for the table: bytes in `unit`, operations in 1e12."""
  sizes = (*PARTS, "temporaries", "total", "memory", "pinned_host")
  sizes += ("largest_collective",)
  shown = {
    name: None if row[name] is None else round(row[name] / unit, 2)
    for name in sizes
  }
  flops, seconds = row["flops"], row["compile_seconds"]
  return row | {
    **shown,
    "teraflops": None if flops is None else float(flops / 1e12),
    "compiled": None if seconds is None else f"{seconds:.0f}s",
  }


def run(values: dict) -> int:
  """Plans; 0 where every phase fits."""
  preset = common_flags.config_of(values["preset"])
  sizes = {
    name: values[name] for name in ("read_block", "query_block") if values[name]
  }
  if values["page_dtype"]:
    sizes["page_dtype"] = values["page_dtype"]
  model = Model(dataclasses.replace(preset, saved=values["saved"], **sizes))
  config = parse_config(values)
  phases = values["phases"] or scope_phases(config.grad_scope)
  for phase in phases:
    common_flags.require(
      phase in PHASES, "phases", phase, f"use some of {PHASES}"
    )
  common_flags.require(
    0 < values["mfu"] <= 1, "mfu", values["mfu"], "use a share in (0, 1]"
  )
  writer = RowWriter(
    values["out"],
    preset=values["preset"],
    seed=values["seed"],
    dtype=preset.dtype,
    page_dtype=model.config.page_dtype or preset.dtype,
    page_grad_dtype=config.page_grad_dtype,
    page_memory=config.pages,
    grad_scope=config.grad_scope,
    G=config.group,
    R=config.response,
    train=values["train"],
    base=values["base"],
    optimizer_name=values["optimizer"],
    master_dtype=values["master_dtype"],
    hosts=config.hosts,
    devices=config.devices,
    member=config.member,
    chunk_size=config.chunk_size,
    block_size=config.block_size,
    members_at_once=config.members_at_once,
    saved=model.config.saved,
    mfu=values["mfu"],
  )
  if gpu_mesh(config) is None:
    print(NO_PLUGIN)
  for phase in common_flags.progress(
    plan(model, config, phases=phases), len(phases)
  ):
    writer.write(**row_of(phase, config, values["mfu"]))
  if values["max_prompt"]:
    _search(model, config, phases, values, writer)
  _print(writer.rows, config)
  held = all(row["fits"] for row in writer.rows)
  known = all(row["temporaries"] is not None for row in writer.rows)
  claim = "every phase fits" + ("" if known else ", temporaries apart")
  print(f"{claim}: {'holds' if held else 'FAILED'}")
  return 0 if held else 1


def _search(model, config, phases, values, writer) -> None:
  """The longest prompt, with its rows."""
  start = time.perf_counter()
  found, rows = longest_prompt(
    model, config, phases=phases, tolerance=values["tolerance"]
  )
  seconds = time.perf_counter() - start
  if found is None:
    print("no prompt fits, however short")
    return
  longest = dataclasses.replace(config, prompt=found)
  for phase in rows:
    writer.write(**row_of(phase, longest, values["mfu"]))
  print(
    f"longest prompt: {found} tokens, within {values['tolerance']:.0%} "
    f"({seconds:.0f} s)"
  )


def _print(rows: list[dict], config: PlanConfig) -> None:
  shared = rows[0]
  unit = GB if max(row["total"] for row in rows) >= GB else MB
  print(
    f"\n{config.devices} x {config.target.name}, {shared['preset']}, train "
    f"{shared['train']}, base {shared['base']}, grad_scope "
    f"{shared['grad_scope']}, "
    f"G {config.group}, R {config.response}, chunk {config.chunk_size}; pages "
    f"{shared['page_dtype']}, their gradients {shared['page_grad_dtype']}, "
    f"in {shared['page_memory']} memory\n"
    f"One device, {unit:.0e} bytes:"
  )
  table = [readable(row, unit) for row in rows]
  print_table(table, COLUMNS.split())
  print(f"\nAll devices, floor at an MFU of {shared['mfu']}:")
  print_table(table, WORK_COLUMNS.split())
  print(NOT_COUNTED)


def main(argv: list[str]) -> int:
  """Reads the flags."""
  if len(argv) > 1:
    raise ValueError(f"{argv[1]}: this script takes flags only")
  jax.config.update("jax_platforms", "cpu")  # whatever wheels are there
  os.environ["TF_CPP_MIN_LOG_LEVEL"] = "2"  # the partitioner's remarks
  return run(FLAGS.flag_values_dict())


def define_flags() -> None:
  """Defines all flags."""
  common_flags.define("qwen3.6-27b", "plan")
  flags.DEFINE_string(
    "device", "h20-3e", f"One of {', '.join(GPU_TARGETS)}, {CUSTOM}."
  )
  config_flags.define_optional(TARGET, "device_")
  config_flags.define(SIZES, skip=SHARED)
  flags.DEFINE_string("train", "all", "all, or lora:<rank>.")
  flags.DEFINE_list(
    "lora_exclude", [], "Maps without an adapter, such as experts."
  )
  flags.DEFINE_string("base", "bf16", "How frozen weights are stored.")
  flags.DEFINE_string("optimizer", "adamw", "Of the trained weights.")
  flags.DEFINE_string(
    "master_dtype",
    OptimizerConfig().master_dtype,
    "Of the optimizer's copies of narrower weights that learn; none for none.",
  )
  flags.DEFINE_string(
    "page_dtype", "", "As in ModelConfig; the model's by default."
  )
  flags.DEFINE_string("saved", "projections", "As in ModelConfig.")
  flags.DEFINE_integer("read_block", 0, "As in ModelConfig; 0 is the preset's.")
  flags.DEFINE_integer("query_block", 0, "The same.")
  flags.DEFINE_list("phases", [], f"Of {', '.join(PHASES)}; all by default.")
  flags.DEFINE_float("mfu", 0.4, "Share of the peak that the floor assumes.")
  flags.DEFINE_bool("max_prompt", False, "Search the longest prompt that fits.")
  flags.DEFINE_float("tolerance", 0.02, "Of the longest prompt.")


if __name__ == "__main__":
  define_flags()
  app.run(exit_code(main), flags_parser=common_flags.parse)
