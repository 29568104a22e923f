"""What the training scripts share: their flags and what is built from them."""

from collections.abc import Iterable, Mapping, Sequence
import dataclasses
import functools
import hashlib
import json
import pathlib
import sys
from typing import Any

from absl import flags
import jax
import tqdm

from experiments import common_flags, config_flags, policies
from longstraw_jax import Model, PolicyObjective, distributed, make_mesh
from longstraw_jax.checkpoint import Checkpoints
from longstraw_jax.checks import differences
from longstraw_jax.disk import write_whole
from longstraw_jax.distributed import is_leader
from longstraw_jax.lora import has_lora, lora_coverage
from longstraw_jax.rewards import load_reward
from longstraw_jax.run import Run
from longstraw_jax.run_config import RunConfig, WarmStartConfig
from longstraw_jax.steps import Learner
from longstraw_jax.stop_ids import StopId, find_stop_ids
from longstraw_jax.tasks import Corpus, TaskConfig, make_task
from longstraw_jax.tokenizer import Tokenizer
from longstraw_jax.train_config import (
  EngineConfig,
  OptimizerConfig,
  SamplingConfig,
  TrainConfig,
)
from longstraw_jax.trainer import Trainer

# Every config of a training run: its defaults here, its flags' prefix, and
# fields that are no flags of their own.
TASK = TaskConfig(
  prompt_tokens=512, num_facts=1, key_length=1, value_alphabet="12345678"
)
CONFIGS: dict[str, tuple[Any, str, frozenset[str]]] = {
  "task": (TASK, "", frozenset({"kind", "seed"})),
  "sampling": (SamplingConfig(), "", frozenset()),
  "engine": (
    EngineConfig(prompts_at_once=16, members_at_once=16),
    "",
    frozenset(),
  ),
  "optimizer": (OptimizerConfig(), "", frozenset()),
  "objective": (PolicyObjective(), "", frozenset()),
  "train": (TrainConfig(), "", frozenset({"seed"})),
  "run": (RunConfig(steps=200), "", frozenset()),
  "warm_start": (WarmStartConfig(max_steps=100), "warm_start_", frozenset()),
  "warm_start_optimizer": (
    WarmStartConfig().optimizer,
    "warm_start_",
    frozenset({"master_dtype"}),  # one for both
  ),
}

# Flags whose default depends on the policy.
DEFAULTS: dict[str, dict[str, Any]] = {
  policies.SMOLLM2: {
    "lora_rank": 16,
    "prompt_tokens": 4096,
    "chunk_size": 512,
    "value_alphabet": "0123456789",
    "value_length": 4,
    "key_length": 2,
    "max_tokens": 4,
    "group_size": 8,
    "members_at_once": 8,
    "prompts_per_step": 4,
    "prompts_at_once": 1,
    # An hour on 2 cores: through the prompt a step takes four times as long.
    "grad_scope": "response_only",
    "learning_rate": 1e-3,
    "warmup_steps": 2,
    "steps": 10,
    "warm_start_max_steps": 0,
    "eval_prompts": 128,
    "eval_at_once": 2,
    "eval_every": 1000,
    "checkpoint_every": 10,
  }
}

# How many devices and processes share the work.
PROBE = 2**16  # characters of the corpus that tell tokenizers apart
MESH_FLAGS = "mesh_context mesh_member".split()

# What may change between a run and its continuation.
SCHEDULE = frozenset(
  "out steps eval_every eval_prompts eval_at_once checkpoint_every"
  " keep_checkpoints max_bad_steps wandb_project".split()
  + MESH_FLAGS
)


def define_flags(out: str) -> None:
  """Defines the flags of a training run."""
  policies.define_flags()
  flags.DEFINE_integer("seed", 0, "Of weights, prompts and sampling.")
  flags.DEFINE_string("out", out, "Directory of rows, curve and checkpoints.")
  flags.DEFINE_string("task", TASK.kind, "needle, multi_key, ... (TASKS).")
  flags.DEFINE_string(
    "corpus",
    None,
    "Directory or file of text; the running Python's standard library if not "
    "given.",
  )
  flags.DEFINE_string(
    "reward",
    "longstraw_jax.rewards:exact_match",
    "package.module:function, called as reward(prompt_text, response_text, "
    "info) -> float; prompt_ids, response_ids and truncated by keyword where "
    "it declares them.",
  )
  flags.DEFINE_integer(
    "mesh_context", 1, "Devices that share pages, weights and experts.", 1
  )
  flags.DEFINE_integer(
    "mesh_member", 1, "Groups of devices that replay members of their own.", 1
  )
  flags.DEFINE_boolean(
    "distributed", False, "Join processes that SLURM, MPI or Kubernetes made."
  )
  flags.DEFINE_string("coordinator", None, "host:port of process 0.")
  flags.DEFINE_integer("num_processes", None, "How many there are.")
  flags.DEFINE_integer("process_id", None, "Which one this is.")
  flags.DEFINE_integer(
    "peer_timeout", 60, "Seconds of silence after which a process is dead.", 1
  )
  for config, prefix, skip in CONFIGS.values():
    config_flags.define(config, prefix, skip)


def join_processes() -> None:
  """Joins the other processes that the flags speak of, if any."""
  given = (
    flags.FLAGS.coordinator,
    flags.FLAGS.num_processes,
    flags.FLAGS.process_id,
  )
  if flags.FLAGS.distributed or any(x is not None for x in given):
    distributed.initialize(*given, timeout_s=flags.FLAGS.peer_timeout)


def parse_flags(argv: list[str]) -> list[str]:
  """Parses flags; a pretrained policy has defaults of its own."""
  rest = common_flags.parse(argv)
  for name, value in DEFAULTS.get(flags.FLAGS.preset, {}).items():
    if not flags.FLAGS[name].present:
      flags.FLAGS.set_default(name, value)
  return rest


def _flag_names() -> list[str]:
  names = [*policies.FLAG_NAMES, *MESH_FLAGS]
  names += "seed out task corpus reward".split()
  for config, prefix, skip in CONFIGS.values():
    scalars = config_flags.scalar_names(config, skip)
    names += [prefix + name for name in scalars]
  return names


def flag_values() -> dict[str, Any]:
  """Values of the training flags, by name."""
  return {name: flags.FLAGS[name].value for name in _flag_names()}


def _config(name: str, values: Mapping[str, Any], **others: Any) -> Any:
  config, prefix, skip = CONFIGS[name]
  return config_flags.parse(config, values, prefix, skip, **others)


def build_run(values: Mapping[str, Any], report=lambda row: None) -> Run:
  """The run that flag values describe.

  Args:
    values: from `flag_values`.
    report: called with every row.

  Raises:
    ValueError: a value is refused; the message names it.
  """
  policy = policies.build_policy(values)
  model, tokenizer = policy.model, policy.tokenizer
  train = _config(
    "train",
    values,
    seed=values["seed"],
    sampling=_config("sampling", values),
    engine=_config("engine", values),
    optimizer=_config("optimizer", values),
    objective=_config("objective", values),
  )
  warm = _config(
    "warm_start",
    values,
    optimizer=_config(
      "warm_start_optimizer", values, master_dtype=values["master_dtype"]
    ),
  )
  if tokenizer.vocab_size > model.config.vocab_size:
    raise ValueError(
      f"the tokenizer has {tokenizer.vocab_size} ids but "
      f"preset {values['preset']!r} has a vocabulary of "
      f"{model.config.vocab_size}: use a preset with a larger one, or take "
      "tokens that the weights have no rows for out of the files beside "
      "tokenizer.json"
    )
  corpus = (
    Corpus.standard_library()
    if values["corpus"] is None
    else Corpus.from_path(values["corpus"])
  )
  stops = find_stop_ids(
    tokenizer,
    policy.checkpoint,
    common_flags.integers(values, "stop_token_ids"),
    vocab_size=model.config.vocab_size,
  )
  task = _config("task", values, kind=values["task"], seed=values["seed"])
  make = lambda task: make_task(task, corpus, tokenizer)
  short = dataclasses.replace(task, prompt_tokens=warm.prompt_tokens)
  return Run(
    initial_params=policy.initial_params,
    trainer=Trainer(
      model=model,
      config=train,
      task=make(task),
      tokenizer=tokenizer,
      reward_fn=load_reward(values["reward"]),
      stops=stops,
    ),
    config=_config("run", values, warm_start=warm),
    out=pathlib.Path(values["out"]),
    warm_task=make(short),
    settings=_settings(values)
    | _read_from_outside(model, corpus, tokenizer, stops),
    report=report,
    accepted=functools.partial(
      save_values, values, pathlib.Path(values["out"])
    ),
    mesh=_mesh(values["mesh_context"], values["mesh_member"]),
  )


def _settings(values: Mapping[str, Any]) -> dict[str, Any]:
  """The flags that a continuation must share."""
  return {k: v for k, v in values.items() if k not in SCHEDULE}


def _read_from_outside(
  model: Model,
  corpus: Corpus,
  tokenizer: Tokenizer,
  stops: Sequence[StopId],
) -> dict[str, Any]:
  """What files gave under these flags, which a continuation must share too."""
  config = dataclasses.asdict(model.config)
  del config["name"]
  ids = tokenizer.encode(corpus.train[:PROBE])
  return {
    "SHA-256 of the corpus": corpus.digest,
    "SHA-256 of its first token ids": hashlib.sha256(ids.tobytes()).hexdigest(),
    "stop_ids": [stop.id for stop in stops],
    "model": config,
  }


def _mesh(context: int, member: int):
  """The mesh of a run; None for one device."""
  if context * member == 1 and jax.process_count() == 1:
    return None
  if context * member != jax.device_count():
    raise ValueError(
      f"mesh_context={context} x mesh_member={member} must be all "
      f"{jax.device_count()} devices"
    )
  return make_mesh(context, member)


def print_coverage(run: Run) -> None:
  """One line on how far adapters reach, where they are what learns."""
  params = jax.eval_shape(lambda: run.initial_params(0))
  if has_lora(params) and is_leader():
    print(lora_coverage(run.trainer.model, params), flush=True)


def print_policy(run: Run) -> None:
  """One line on what prompts begin with and what ends responses, and why."""
  trainer = run.trainer
  begin = trainer.tokenizer.begin_ids
  if is_leader():
    print(
      "prompts begin with",
      f"{begin} {trainer.tokenizer.decode(begin, special=True)!r};"
      if begin
      else "no token of their own;",
      f"responses end at {', '.join(map(str, trainer.stops))}",
      flush=True,
    )


def save_values(values: Mapping[str, Any], out: pathlib.Path) -> None:
  """Leaves the flags beside the checkpoints, for evaluate and generate.

  Raises:
    DiskError: they could not be written; older ones stay.
  """
  text = json.dumps(dict(values), indent=1) + "\n"
  write_whole(out / "flags.json", text.encode())


def load_values(out: str) -> dict[str, Any]:
  """The flags of an earlier run, on one device whatever it was trained on.

  Raises:
    ValueError: there is no run with a checkpoint in this directory, or its
      flags are not those of the checkpoint.
    CheckpointError: the checkpoint is damaged.
  """
  path = pathlib.Path(out) / "flags.json"
  if not path.exists():
    raise ValueError(
      f"run={out!r} holds no flags.json: give the --out of a train_grpo run"
    )
  try:
    values = dict(json.loads(path.read_bytes()))
  except (ValueError, TypeError) as error:
    raise ValueError(f"{path} is damaged: {error}") from error
  checkpoints = Checkpoints(path.parent / "checkpoints")
  step = checkpoints.latest()
  if step is None:
    raise ValueError(f"run={out!r} has no checkpoint: train first")
  saved = checkpoints.settings(step)
  known = {name: saved[name] for name in _flag_names() if name in saved}
  other = differences(known, _settings(values))
  other += [
    f"{name} is missing" for name in _flag_names() if name not in values
  ]
  if other:
    raise ValueError(
      f"{path} does not hold the flags of checkpoint {step}: "
      + "; ".join(other)
      + ". Run the training again with those of the checkpoint"
    )
  return values | dict.fromkeys(MESH_FLAGS, 1) | {"out": out}


def restore_learner(
  run: Run, changed: Iterable[str] = ()
) -> tuple[Learner, int]:
  """The learner of a run's last checkpoint and its step.

  Args:
    run: of the settings that the checkpoint was made with.
    changed: settings in which it differs on purpose.

  Raises:
    ValueError: there is no checkpoint.
    CheckpointError: it is damaged, or of other settings.
  """
  checkpoints = Checkpoints(run.out / "checkpoints")
  step = checkpoints.latest()
  if step is None:
    raise ValueError(f"run={str(run.out)!r} has no checkpoint: train first")
  saved = checkpoints.settings(step)
  settings = dict(run.settings) | {name: saved[name] for name in changed}
  like = run.initial_state(run.initial_params(run.trainer.config.seed))
  state = checkpoints.restore(step, like, settings)
  checkpoints.close()
  return state.learner, step


class Progress:
  """Shows rows as a bar on a terminal and as plain lines elsewhere."""

  def __init__(self, total: int):
    """Opens the bar.

    Args:
      total: steps expected.
    """
    self._bar = None
    if sys.stderr.isatty():
      self._bar = tqdm.tqdm(total=total, unit="step", dynamic_ncols=True)

  def __call__(self, row: Mapping[str, Any]) -> None:
    """Reports one row."""
    heldout = row.get("heldout_reward")
    if self._bar is not None:
      shown = {"phase": row["phase"], "reward": row.get("reward_mean")}
      if heldout is not None:
        shown["heldout"] = round(heldout, 3)
      self._bar.set_postfix(shown, refresh=False)
      self._bar.update()
    elif heldout is not None:
      print(
        f"{row['phase']} step {row['step']}: held-out reward {heldout:.3f}"
        f" (chance {row['chance_level']:.3f})",
        flush=True,
      )
