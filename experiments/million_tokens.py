"""One group update over a prompt of a million tokens, on a small machine.

Claim: at 1,048,576 prompt tokens of real text a GRPO group's gradient, without
  and with the part through the prompt, is computed in the memory of 8-bit
  pages, one float32 accumulator of their shape and one chunk's work.
Command: python -m experiments.million_tokens --prompt=1048576
Cost: 70 minutes on 2 CPU cores, 1.7 GB. Every piece of the capture and of the
  reverse walk is on disk when it is done: run it again to go on.
Expected result: a row for each phase, capture, response_only and full, with
  its seconds over all runs and the peak of resident memory.
"""

import functools
import json
import math
import pathlib
import time
from typing import Any

from absl import app, flags
import jax
import jax.numpy as jnp

from experiments import common_flags
from experiments.report import RowWriter, exit_code, print_table
from longstraw_jax import (
  Group,
  Model,
  PolicyObjective,
  branch_gradient,
  capture,
  extend,
  group_advantages,
  load_state,
  reverse_chunks,
  rollout,
  save_state,
)
from longstraw_jax.checkpoint import Checkpoints
from longstraw_jax.checks import differences
from longstraw_jax.metrics import peak_memory_bytes
from longstraw_jax.state import PromptState
from longstraw_jax.tasks import Corpus, TaskConfig, make_task
from longstraw_jax.tokenizer import ByteTokenizer
from longstraw_jax.train_config import OptimizerConfig
from longstraw_jax.walk import Gradients

FLAGS = flags.FLAGS
OBJECTIVE = PolicyObjective()
SETTINGS = "preset seed prompt chunk_size piece group_size response".split()


class Ledger:
  """Seconds of every phase and peak memory, over all runs."""

  def __init__(self, path: pathlib.Path):
    """Reads what earlier runs left."""
    self._path = path
    self.seconds: dict[str, float] = {}
    self.peak_bytes = 0
    if path.exists():
      found = json.loads(path.read_text())
      self.seconds, self.peak_bytes = found["seconds"], found["peak_bytes"]

  def add(self, phase: str, begin: float) -> None:
    """Adds the time since `begin` and says how far the phase is."""
    elapsed = time.perf_counter() - begin
    self.seconds[phase] = self.seconds.get(phase, 0.0) + elapsed
    self.peak_bytes = max(self.peak_bytes, peak_memory_bytes())
    found = {"seconds": self.seconds, "peak_bytes": self.peak_bytes}
    self._path.write_text(json.dumps(found))


def check_same_run(out: pathlib.Path) -> dict[str, Any]:
  """The settings of this run, which files of earlier ones must share.

  Raises:
    ValueError: the directory holds another run.
  """
  settings = {name: FLAGS[name].value for name in SETTINGS}
  path = out / "settings.json"
  if path.exists():
    lines = differences(json.loads(path.read_text()), settings)
    if lines:
      raise ValueError(
        f"--out={out} holds another run: {'; '.join(lines)}. Give its settings "
        "or another directory"
      )
  path.write_text(json.dumps(settings))
  return settings


def captured_state(
  model, params, prompt, prompt_id, out, ledger
) -> PromptState:
  """The prompt's state, piece by piece, going on where the file left off."""
  path, piece = out / "state.safetensors", FLAGS.piece
  if path.exists():
    state = load_state(path, model, params)
  else:
    begin = time.perf_counter()
    state = capture(
      model,
      params,
      prompt[: piece + 1],
      chunk_size=FLAGS.chunk_size,
      capacity=len(prompt) - 1,
      grad_scope="full",
      prompt_id=prompt_id,
    )
    save_state(path, model, params, jax.block_until_ready(state))
    ledger.add("capture", begin)
  grow = jax.jit(
    functools.partial(extend, model, capacity=len(prompt) - 1),
    donate_argnums=1,
  )
  while int(state.length) < len(prompt) - 1:
    begin = time.perf_counter()
    done = int(state.length)
    new = prompt[done + 1 : done + 1 + piece]
    padded = jnp.pad(new, (0, piece - len(new)))
    state = grow(params, state, padded, length=jnp.int32(len(new)))
    save_state(path, model, params, jax.block_until_ready(state))
    ledger.add("capture", begin)
    print(f"captured {int(state.length)} of {len(prompt) - 1}", flush=True)
  return state


def sampled_group(model, params, state: PromptState) -> Group:
  """Responses with rewards that differ: the share of letters in each."""
  group = rollout(
    model,
    params,
    state,
    jax.random.key(FLAGS.seed + 1),
    group_size=FLAGS.group_size,
    max_tokens=FLAGS.response,
  )
  lower = group.responses | 32  # of the ASCII letters
  rewards = ((lower >= 97) & (lower <= 122)).mean(1)
  return group.replace(rewards=rewards, advantages=group_advantages(rewards))


def branch(model, params, group, state, ledger, phase):
  """Everything before the prompt's reverse walk."""
  begin = time.perf_counter()
  call = jax.jit(
    functools.partial(
      branch_gradient, model, objective=OBJECTIVE, block_size=FLAGS.response
    )
  )
  loss, sums, _ = jax.block_until_ready(
    call(params=params, group=group, state=state)
  )
  ledger.add(phase, begin)
  return float(loss), sums


def full_gradient(model, params, prompt, group, state, settings, out, ledger):
  """The reverse walk in pieces, each on disk before the next begins.

  Returns:
    The loss and the gradient.
  """
  checkpoints = Checkpoints(out / "reverse", keep=1)
  chunks = math.ceil((len(prompt) - 1) / FLAGS.chunk_size)
  done = checkpoints.latest()
  if done is None:
    loss, sums = branch(model, params, group, state, ledger, "full")
    tree = (jnp.float32(loss), sums)
    done = 0
    checkpoints.save(done, tree, settings)
  else:
    call = functools.partial(
      branch_gradient,
      model,
      objective=OBJECTIVE,
      block_size=FLAGS.response,
    )
    shapes = jax.eval_shape(call, params=params, group=group, state=state)
    like = (jnp.float32(0), jax.tree.map(jnp.zeros_like, shapes[1]))
    tree = checkpoints.restore(done, like, settings)
  step = max(FLAGS.piece // FLAGS.chunk_size, 1)

  @functools.partial(jax.jit, donate_argnums=0)
  def walk(sums: Gradients, params, prompt, state, first, stop) -> Gradients:
    sums, pages = reverse_chunks(
      model,
      params,
      prompt,
      state,
      sums.priors[0],
      sums.replace(priors=()),
      first=first,
      stop=stop,
    )
    return sums.replace(priors=(pages,))

  while done < chunks:
    begin = time.perf_counter()
    loss, sums = tree
    stop = chunks - done
    first = max(stop - step, 0)
    number = lambda x: jnp.int32(x)
    sums = walk(sums, params, prompt, state, number(first), number(stop))
    tree, done = (loss, jax.block_until_ready(sums)), chunks - first
    checkpoints.save(done, tree, settings)
    checkpoints.wait()
    ledger.add("full", begin)
    print(f"walked back {done} of {chunks} chunks", flush=True)
  checkpoints.close()
  return float(tree[0]), tree[1].params


def updated(params, grads) -> dict[str, Any]:
  """What one optimizer step of this gradient does."""
  optimizer = OptimizerConfig().build()
  trainable = params.trainable
  updates, _ = optimizer.update(grads, optimizer.init(trainable), trainable)
  norm = lambda tree: float(
    jnp.sqrt(sum((x**2).sum() for x in jax.tree.leaves(tree)))
  )
  return {"grad_norm": norm(grads), "update_norm": norm(updates)}


def main(argv):
  """Captures, then one update of either scope."""
  if len(argv) > 1:
    raise app.UsageError(f"unexpected arguments {argv[1:]}")
  for name in ("prompt", "chunk_size", "piece", "group_size", "response"):
    value = FLAGS[name].value
    common_flags.require(value >= 2, name, value, "give at least 2")
  common_flags.require(
    FLAGS.piece % FLAGS.chunk_size == 0,
    "piece",
    FLAGS.piece,
    f"give a multiple of chunk_size={FLAGS.chunk_size}",
  )
  out = pathlib.Path(FLAGS.out)
  out.mkdir(parents=True, exist_ok=True)
  settings = check_same_run(out)
  model = Model(common_flags.config_of(FLAGS.preset))
  params = jax.jit(model.init)(jax.random.key(FLAGS.seed))
  task = make_task(
    TaskConfig(prompt_tokens=FLAGS.prompt, seed=FLAGS.seed),
    Corpus.standard_library(),
    ByteTokenizer(),
  )
  example = task.sample(0, "train")
  prompt = jnp.asarray(example.prompt_ids)
  ledger = Ledger(out / "ledger.json")
  state = captured_state(model, params, prompt, example.prompt_id, out, ledger)
  group = sampled_group(model, params, state)

  writer = RowWriter(
    out,
    preset=FLAGS.preset,
    seed=FLAGS.seed,
    P=FLAGS.prompt,
    G=FLAGS.group_size,
    R=FLAGS.response,
    dtype=model.config.dtype,
    page_dtype=model.config.page_dtype,
    chunk_size=FLAGS.chunk_size,
  )
  constant = state.replace(grad_scope="response_only", saved_carries={})
  ledger.seconds.pop("response_only", None)  # every run does it anew
  loss, sums = branch(model, params, group, constant, ledger, "response_only")
  found = {"response_only": (loss, sums.params)}
  found["full"] = full_gradient(
    model, params, prompt, group, state, settings, out, ledger
  )
  for scope, (loss, grads) in found.items():
    writer.write(
      grad_scope=scope,
      loss=loss,
      **updated(params, grads),
      seconds_capture=ledger.seconds["capture"],
      seconds_gradient=ledger.seconds[scope],
      peak_resident_bytes=ledger.peak_bytes,
    )
  columns = (
    "grad_scope P G R loss grad_norm update_norm seconds_capture "
    "seconds_gradient peak_resident_bytes"
  )
  print_table(writer.rows, columns.split())
  return 0


if __name__ == "__main__":
  common_flags.define("million-hybrid", "million_tokens")
  flags.DEFINE_integer("prompt", 2**20, "Prompt tokens.")
  flags.DEFINE_integer("chunk_size", 1024, "Tokens processed at once.")
  flags.DEFINE_integer("piece", 2**16, "Tokens between two saves.")
  flags.DEFINE_integer("group_size", 4, "Members.")
  flags.DEFINE_integer("response", 128, "Response tokens.")
  app.run(exit_code(main), flags_parser=common_flags.parse)
