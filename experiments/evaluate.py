"""Held-out reward of a trained checkpoint.

Claim: none of its own; it measures what a run's last checkpoint can do.
Command: python -m experiments.evaluate --run=runs/train_grpo
Cost: about a minute on 2 CPU cores for 1,024 prompts.
Expected result: the mean reward of one sampled response a prompt, with its
  standard error, beside the chance level.
"""

import math

from absl import app, flags

from experiments import common_flags, training
from experiments.report import RowWriter, exit_code, print_table

FLAGS = flags.FLAGS


def main(argv):
  """Evaluates the last checkpoint of a run."""
  if len(argv) > 1:
    raise app.UsageError(f"unexpected arguments {argv[1:]}")
  values = training.load_values(FLAGS.run)
  if FLAGS.prompt_tokens is not None:
    values["prompt_tokens"] = FLAGS.prompt_tokens
  values["temperature"] = FLAGS.temperature
  run = training.build_run(values)
  training.print_policy(run)
  learner, step = training.restore_learner(
    run, changed=("prompt_tokens", "temperature")
  )
  rewards = run.trainer.evaluate(learner, FLAGS.prompts)
  error = rewards.std() / math.sqrt(len(rewards))
  writer = RowWriter(
    FLAGS.out,
    preset=values["preset"],
    grad_scope=values["grad_scope"],
    G=1,
    R=values["max_tokens"],
    dtype=run.trainer.model.config.dtype,
  )
  writer.write(
    run=FLAGS.run,
    step=step,
    P=values["prompt_tokens"],
    prompts=len(rewards),
    temperature=FLAGS.temperature,
    heldout_reward=rewards.mean(),
    standard_error=error,
    chance_level=run.trainer.task.chance_level,
  )
  columns = "step P prompts temperature heldout_reward standard_error"
  print_table(writer.rows, [*columns.split(), "chance_level"])
  return 0


if __name__ == "__main__":
  flags.DEFINE_string("run", "runs/train_grpo", "The --out of a training run.")
  flags.DEFINE_string("out", "runs/evaluate", "Directory of rows.jsonl.")
  flags.DEFINE_integer("prompts", 1024, "Held-out prompts.", lower_bound=1)
  flags.DEFINE_integer(
    "prompt_tokens", None, "Their length; the run's own if not given."
  )
  flags.DEFINE_float("temperature", 1.0, "Of sampling; 0 is greedy.")
  app.run(exit_code(main), flags_parser=common_flags.parse)
