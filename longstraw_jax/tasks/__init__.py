"""Prompts with answers, made from real text."""

from longstraw_jax.tasks.corpus import SPLITS, Corpus
from longstraw_jax.tasks.facts import Example, FactTask, Puzzle, TaskConfig
from longstraw_jax.tasks.registry import TASKS, Task, TaskBuilder, make_task

__all__ = [
  "SPLITS",
  "TASKS",
  "Corpus",
  "Example",
  "FactTask",
  "Puzzle",
  "Task",
  "TaskBuilder",
  "TaskConfig",
  "make_task",
]
