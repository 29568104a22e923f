"""Responses of a trained checkpoint to held-out prompts or to a file.

Claim: none of its own; it shows what a run's last checkpoint writes.
Command: python -m experiments.generate --run=runs/train_grpo
Cost: under a minute on 2 CPU cores.
Expected result: the end of each prompt, the sampled responses with their
  log-probabilities, and the answer where one is known.
"""

import pathlib

from absl import app, flags
import jax

from experiments import common_flags, training
from experiments.report import exit_code
from longstraw_jax.train_config import SamplingConfig

FLAGS = flags.FLAGS


def _prompts(run, values):
  """(ids, text, answer) of every prompt asked for."""
  if FLAGS.prompt_file is not None:
    text = pathlib.Path(FLAGS.prompt_file).read_text()
    yield run.trainer.tokenizer.encode(text), text, None
    return
  for index in range(FLAGS.prompts):
    example = run.trainer.task.sample(index, "heldout")
    yield example.prompt_ids, example.prompt_text, example.answer_text


def main(argv):
  """Samples responses."""
  if len(argv) > 1:
    raise app.UsageError(f"unexpected arguments {argv[1:]}")
  values = training.load_values(FLAGS.run)
  run = training.build_run(values)
  training.print_policy(run)
  learner, _ = training.restore_learner(run)
  trainer = run.trainer
  key = jax.random.key(FLAGS.seed)
  sampling = SamplingConfig(
    group_size=FLAGS.responses,
    max_tokens=FLAGS.max_tokens or values["max_tokens"],
    temperature=FLAGS.temperature,
    top_k=FLAGS.top_k,
    top_p=FLAGS.top_p,
  )
  for number, (ids, text, answer) in enumerate(_prompts(run, values)):
    group = trainer.sample(
      learner, ids, jax.random.fold_in(key, number), sampling
    )
    print(f"--- prompt {number}, {len(ids)} tokens: ...{text[-60:]!r}")
    if answer is not None:
      print(f"answer    {answer!r}")
    for member in range(FLAGS.responses):
      length = int(group.lengths[member])
      response = trainer.tokenizer.decode(
        group.responses[member, :length], special=True
      )
      logprob = float(group.old_logprobs[member].sum())
      print(f"response  {response!r}  log-probability {logprob:.3f}")
  return 0


if __name__ == "__main__":
  flags.DEFINE_string("run", "runs/train_grpo", "The --out of a training run.")
  flags.DEFINE_integer("seed", 0, "Of sampling.")
  flags.DEFINE_integer("prompts", 4, "Held-out prompts.", lower_bound=1)
  flags.DEFINE_string("prompt_file", None, "A text to continue instead.")
  flags.DEFINE_integer("responses", 2, "Responses a prompt.", lower_bound=1)
  flags.DEFINE_integer(
    "max_tokens", None, "Their room; the run's own by default."
  )
  flags.DEFINE_float("temperature", 1.0, "Of sampling; 0 is greedy.")
  flags.DEFINE_integer("top_k", 0, "Sample among so many ids; 0 means all.")
  flags.DEFINE_float("top_p", 1.0, "Smallest set of ids with this mass.")
  app.run(exit_code(main), flags_parser=common_flags.parse)
