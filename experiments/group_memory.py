"""Memory and time of one group's gradient against the conventional ways.

Claim: with G 2, 8 and 64 the full gradient needs the same memory within 1 %,
  at most 183 MiB at P 32,768 (pages and their accumulator are 128), at least
  300 times less than the conventional gradient at G 8; and in wall time it
  reaches at least 90 % of the advantage over the conventional gradient and
  over serial rematerialization that counted operations promise.
Command: python -m experiments.group_memory
Cost: 12 minutes on 2 CPU cores; up to 20 GiB, or
  what --memory_limit_gib allows (what does not fit is skipped and said so).
Expected result: a table of planned bytes, and one of seconds and of ratios
  measured and counted. All gradients are built from the same operations.
"""

import dataclasses
import functools
import time

from absl import app, flags
import jax
import jax.numpy as jnp
import numpy as np

from experiments import common_flags
from experiments.report import RowWriter, exit_code, print_table
from longstraw_jax import Group, Model, PolicyObjective, group_gradient
from longstraw_jax.flops import (
  conventional_flops,
  group_gradient_flops,
  serial_remat_flops,
)
from longstraw_jax.testing.baselines import (
  compile_gradient,
  conventional_gradient,
  planned_bytes,
  serial_remat_gradient,
)

FLAGS = flags.FLAGS
OBJECTIVE = PolicyObjective()
OURS = ("full", "response_only")
BASELINES = ("conventional", "serial_remat")
MIB, GIB = 2**20, 2**30
MOST_MIB, LEAST_FACTOR, FLATNESS, SHARE = 183, 300, 1.01, 0.9
MEMORY_COLUMNS = "grad_scope P G R MiB"
TIME_COLUMNS = "grad_scope P G R seconds gigaflops skipped"
RATIO_COLUMNS = "grad_scope against G measured counted counted_lean share"


@functools.cache
def compiled_gradient(kind: str, model: Model, chunk_size: int, *sizes: int):
  """(params, prompt, group) -> loss, gradient, ... of one way.

  Args:
    kind: a grad scope, or one of BASELINES.
    model: whose gradient it is.
    chunk_size: prompt tokens at once, for the scopes.
    *sizes: P, G and R.
  """
  if kind == "conventional":
    gradient = lambda *xs: conventional_gradient(model, *xs, OBJECTIVE)
  elif kind == "serial_remat":
    gradient = lambda *xs: serial_remat_gradient(model, *xs, OBJECTIVE)
  else:
    gradient = lambda *xs: group_gradient(
      model, *xs, OBJECTIVE, chunk_size=chunk_size, grad_scope=kind
    )
  return compile_gradient(gradient, model, *sizes)


def count(kind: str, config, prompt, group, response, chunk_size) -> float:
  """Operations of one way, as it is configured."""
  if kind == "conventional":
    return conventional_flops(config, prompt, group, response)
  if kind == "serial_remat":
    return serial_remat_flops(config, prompt, group, response)
  return group_gradient_flops(
    config, prompt, group, response, chunk_size=chunk_size, grad_scope=kind
  )


def memory_rows(values: dict, model: Model, writer: RowWriter) -> bool:
  """Planned bytes at --prompt; whether their claims hold."""
  prompt, response = values["prompt"], values["response"]
  cases = [(kind, g) for kind in OURS for g in values["memory_groups"]]
  cases += [(kind, values["memory_groups"][0]) for kind in BASELINES]
  largest = 8 if 8 in values["memory_groups"] else values["memory_groups"][-1]
  cases += [
    (kind, largest) for kind in BASELINES if (kind, largest) not in cases
  ]
  sizes = {}
  for kind, group in common_flags.progress(cases, len(cases)):
    size = planned_bytes(
      compiled_gradient(
        kind, model, values["chunk_size"], prompt, group, response
      )
    )
    sizes[kind, group] = size / MIB
    writer.write(
      part="memory",
      grad_scope=kind,
      P=prompt,
      G=group,
      R=response,
      MiB=size / MIB,
    )
  held = True
  for kind in OURS:
    ours = [sizes[kind, g] for g in values["memory_groups"]]
    held &= _say(
      f"{kind}: largest / smallest over G is {max(ours) / min(ours):.4f}",
      max(ours) <= FLATNESS * min(ours),
    )
  full = max(sizes["full", g] for g in values["memory_groups"])
  if prompt == 32768 and values["preset"] == "bench-hybrid":
    held &= _say(f"full needs {full:.1f} MiB", full <= MOST_MIB)
    factor = sizes["conventional", largest] / full
    held &= _say(
      f"conventional at G {largest} needs {factor:.0f} times as much",
      factor >= LEAST_FACTOR,
    )
  return held


def _say(claim: str, holds: bool) -> bool:
  print(f"{claim}: {'holds' if holds else 'FAILED'}", flush=True)
  return holds


def make_inputs(model: Model, prompt: int, group: int, response: int, seed):
  """Weights, token ids and a group whose numbers cost nothing to know."""
  random = np.random.default_rng(seed)
  ids = lambda *shape: jnp.asarray(
    random.integers(0, model.config.vocab_size, shape), jnp.int32
  )
  members = Group.create(
    ids(group, response),
    jnp.full(group, response),
    rewards=jnp.asarray(random.normal(size=group)),
    advantages=jnp.asarray(random.normal(size=group)),
    old_logprobs=jnp.full((group, response), -np.log(512.0)),
  )
  return model.init(jax.random.key(seed)), ids(prompt), members


def timed(values: dict, model: Model, group: int):
  """Least seconds of every way, interleaved; reasons where one was skipped."""
  prompt, response = values["time_prompt"], values["response"]
  inputs = make_inputs(model, prompt, group, response, values["seed"])
  limit = values["memory_limit_gib"] * GIB
  calls, skipped = {}, {}
  for kind in (*OURS, *BASELINES):
    compiled = compiled_gradient(
      kind, model, values["chunk_size"], prompt, group, response
    )
    size = planned_bytes(compiled)
    if size > limit:
      skipped[kind] = f"needs {size / GIB:.1f} GiB"
      continue
    calls[kind] = compiled
    jax.block_until_ready(compiled(*inputs))
  seconds = dict.fromkeys(calls, np.inf)
  for _ in range(values["repeats"]):
    for kind, call in calls.items():
      start = time.perf_counter()
      jax.block_until_ready(call(*inputs))
      seconds[kind] = min(seconds[kind], time.perf_counter() - start)
  return seconds, skipped


def time_rows(values: dict, model: Model, writer: RowWriter) -> bool:
  """Seconds, operations and ratios; whether the ratios' claim holds."""
  prompt, response = values["time_prompt"], values["response"]
  lean = dataclasses.replace(model.config, saved="everything")
  held = True
  for group in common_flags.progress(
    values["time_groups"], len(values["time_groups"])
  ):
    seconds, skipped = timed(values, model, group)
    sizes = (prompt, group, response, values["chunk_size"])
    flops = {k: count(k, model.config, *sizes) for k in (*OURS, *BASELINES)}
    common = {"P": prompt, "G": group, "R": response}
    for kind in flops:
      writer.write(
        part="time",
        grad_scope=kind,
        seconds=seconds.get(kind),
        gigaflops=flops[kind] / 1e9,
        skipped=skipped.get(kind),
        **common,
      )
    for ours in OURS:
      for other in BASELINES:
        if ours not in seconds or other not in seconds:
          continue
        measured = seconds[other] / seconds[ours]
        counted = flops[other] / flops[ours]
        held &= measured >= SHARE * counted
        writer.write(
          part="ratio",
          grad_scope=ours,
          against=other,
          measured=measured,
          counted=counted,
          counted_lean=flops[other] / count(ours, lean, *sizes),
          share=measured / counted,
          **common,
        )
  return _say(f"every ratio is at least {SHARE:.0%} of the counted one", held)


def run(values: dict) -> int:
  """Both parts; 0 where every claim held."""
  config = common_flags.config_of(values["preset"])
  groups = {
    name: common_flags.integers(values, name)
    for name in ("memory_groups", "time_groups")
    if values[name]
  }
  values = values | {"memory_groups": [], "time_groups": []} | groups
  common_flags.positive(
    values,
    *groups,
    *"prompt time_prompt response chunk_size repeats".split(),
  )
  model = Model(
    dataclasses.replace(
      config,
      saved=values["saved"],
      read_block=values["read_block"] or config.read_block,
      query_block=values["query_block"] or config.query_block,
    )
  )
  writer = RowWriter(
    values["out"],
    preset=values["preset"],
    seed=values["seed"],
    dtype=config.dtype,
    chunk_size=values["chunk_size"],
    saved=values["saved"],
    read_block=model.config.read_block,
    query_block=model.config.query_block,
  )
  held = True
  if values["memory_groups"]:
    held &= memory_rows(values, model, writer)
  if values["time_groups"]:
    held &= time_rows(values, model, writer)
  parts = {"memory": MEMORY_COLUMNS, "time": TIME_COLUMNS}
  for part, columns in (parts | {"ratio": RATIO_COLUMNS}).items():
    rows = [row for row in writer.rows if row["part"] == part]
    if rows:
      print()
      print_table(rows, columns.split())
  return 0 if held else 1


def main(argv: list[str]) -> int:
  """Reads the flags."""
  if len(argv) > 1:
    raise ValueError(f"{argv[1]}: this script takes flags only")
  return run(FLAGS.flag_values_dict())


if __name__ == "__main__":
  common_flags.define("bench-hybrid", "group_memory")
  flags.DEFINE_integer("prompt", 32768, "P of the memory part.")
  flags.DEFINE_integer("time_prompt", 4096, "P of the time part.")
  flags.DEFINE_integer("response", 128, "Response tokens R.")
  flags.DEFINE_list("memory_groups", ["2", "8", "64"], "G; empty skips.")
  flags.DEFINE_list("time_groups", ["8", "32"], "G; empty skips.")
  flags.DEFINE_integer("chunk_size", 256, "Prompt tokens at once.")
  flags.DEFINE_string("saved", "projections", "As in ModelConfig.")
  flags.DEFINE_integer("read_block", 0, "As in ModelConfig; 0 is the preset's.")
  flags.DEFINE_integer("query_block", 0, "The same.")
  flags.DEFINE_integer("repeats", 3, "Runs of each way; the least time counts.")
  flags.DEFINE_float("memory_limit_gib", 18.0, "Larger plans are not run.")
  app.run(exit_code(main), flags_parser=common_flags.parse)
