"""Tasks by name."""

from collections.abc import Callable
import functools
from typing import Protocol, runtime_checkable

from longstraw_jax.tasks import facts
from longstraw_jax.tasks.corpus import Corpus
from longstraw_jax.tasks.facts import Example, FactTask, TaskConfig
from longstraw_jax.tokenizer import Tokenizer


@runtime_checkable  # for run-time type checks of annotations
class Task(Protocol):
  """A source of prompts that needs no iterator state.

  Attributes:
    config: what it was made from.
  """

  config: TaskConfig

  @property
  def chance_level(self) -> float:
    """Expected exact match of uniform guesses in the right format."""

  def sample(self, index: int, split: str) -> Example:
    """The example of that index; always the same one."""


TaskBuilder = Callable[[TaskConfig, Corpus, Tokenizer], Task]

# Add yours: TASKS["mine"] = builder.
TASKS: dict[str, TaskBuilder] = {
  "needle": functools.partial(FactTask, puzzle_fn=facts.needle_puzzle),
  "multi_key": functools.partial(FactTask, puzzle_fn=facts.multi_key_puzzle),
  "variable_tracking": functools.partial(
    FactTask, puzzle_fn=facts.variable_tracking_puzzle
  ),
}


def make_task(config: TaskConfig, corpus: Corpus, tokenizer: Tokenizer) -> Task:
  """Builds the task that `config.kind` names.

  Args:
    config: what prompts look like.
    corpus: the text they are cut from.
    tokenizer: makes their ids.

  Returns:
    The task. Its first training prompt has been made once, so what does not
    fit has been found; held-out text that is too short shows at the first
    held-out prompt.

  Raises:
    ValueError: for an unknown kind, and whatever the builder refuses.
  """
  if config.kind not in TASKS:
    raise ValueError(
      f"kind={config.kind!r} is no task: use one of {sorted(TASKS)}, or add a"
      " builder to TASKS"
    )
  return TASKS[config.kind](config, corpus, tokenizer)
