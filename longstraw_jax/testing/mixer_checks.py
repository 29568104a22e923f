"""Conformance of a mixer with the contract that everything else relies on.

A mixer is right when no caller can tell how a sequence was cut, padded, shared
or replayed, neither by values nor by gradients, and when it keeps its hands
off the pages' memory. Everything runs in float64 on a tiny model, so that a
wrong term cannot hide behind rounding.
"""

from collections.abc import Callable, Sequence
import itertools

import jax
import numpy as np

from longstraw_jax.config import ModelConfig
from longstraw_jax.presets import PRESETS
from longstraw_jax.testing.compare import (
  TOLERANCE,
  assert_gradients_close,
  leaves,
  require,
  require_equal,
)
from longstraw_jax.testing.mixer_calls import (
  check_causality,
  check_memory,
  check_padding,
  check_shapes,
  check_splits,
)
from longstraw_jax.testing.mixer_case import CAPACITY, LENGTHS, PROMPTS, Case
from longstraw_jax.testing.mixer_subject import Shared, Subject

BLOCK = 3  # response tokens at once, where a response spans blocks


def _check_replay(subject: Subject) -> None:
  """Scores over a captured prompt equal full rows; a member's own are the
  same, bitwise, whoever was replayed before it."""
  case = subject.case
  replay = case.replay(5, block_size=BLOCK)
  members = tuple(range(len(LENGTHS)))
  for length in PROMPTS:
    require_equal(
      "replay",
      replay(length, members),
      case.oracle("full", length)[1],
      f"prompt of {length}, response blocks of {BLOCK}, ",
    )
  wanted = _stacked(replay(PROMPTS[-1], members))
  for order in itertools.permutations(members):
    got = _stacked(replay(PROMPTS[-1], order))
    for place, member in enumerate(order):
      error = np.abs(got[place] - wanted[member]).max()
      require(
        bool(error == 0),
        "replay",
        f"member {member} scores otherwise when members run as {order}, by "
        f"{error:.3g}",
      )


def _stacked(scores: dict) -> np.ndarray:
  return np.stack(jax.tree.leaves(scores), axis=-1)


def _check_gradients(subject: Subject) -> None:
  """Every leaf of every form of the gradient equals plain jax.grad."""
  case, lean = subject.case, subject.lean_case
  forms = (
    ("full", "group_gradient", case.transaction(5, "full", block_size=BLOCK)),
    ("full", "group_gradient, lean", lean.transaction(4, "full")),
    (
      "full",
      "grad of replay(capture)",
      case.composed(4, "full", members_at_once=2),
    ),
    ("response_only", "group_gradient", case.transaction(5, "response_only")),
    (
      "response_only",
      "grad of replay(capture)",
      case.composed(CAPACITY, "response_only", block_size=BLOCK),
    ),
  )
  _compare_gradients(case, forms)


def _compare_gradients(case: Case, forms: tuple) -> None:
  """Gradients and scores of every form, for every prompt length."""
  layers = "+".join(case.model.config.layer_types)
  for scope, form, gradient in forms:
    for length in PROMPTS:
      what = f"{layers}, {scope} scope, prompt of {length}, {form}"
      grads, scores = gradient(length)
      wanted, _ = case.oracle(scope, length)
      assert_gradients_close(grads, wanted, TOLERANCE, f"gradients: {what}")
      _, wanted = case.oracle("full", length)
      require_equal("gradients", scores, wanted, what)
  whole = leaves(case.oracle("full", PROMPTS[-1])[0])
  dead = [path for path, x in whole.items() if not np.any(x)]
  require(
    not dead,
    "gradients",
    f"leaves {dead} have no gradient at all: freeze them by `trainable`",
  )


# --- All of it -------------------------------------------------------------

_CHECKS = {
  "shapes": check_shapes,
  "splits": check_splits,
  "padding": check_padding,
  "causality": check_causality,
  "memory": check_memory,
  "replay": _check_replay,
  "gradients": _check_gradients,
}
CHECKS = tuple(_CHECKS)


def check_mixer(
  name: str,
  config: ModelConfig | None = None,
  *,
  trainable: Callable[[str], bool] = lambda path: True,
  narrow_carries: Sequence[str] = ("conv_tail",),
  below: Sequence[str] = (),
  shared: Shared = lambda positions: {},
  checks: Sequence[str] = CHECKS,
) -> None:
  """Runs a registered mixer through everything the package relies on.

  By itself, called with segments and carries: declared shapes and dtypes are
  those returned, and every segment's tap is handed on ("shapes"); any split
  equals one pass ("splits"); padding changes nothing ("padding"); causality,
  by gradient ("causality"); no copies of the pages in a gradient's compiled
  temporaries ("memory").

  In a model of two repeats, each under gated attention: replay equals full
  rows, and members in any order, bitwise ("replay"); the full and the
  response_only gradient, by group_gradient and by jax.grad of
  replay(capture), keeping activations and recomputing them, every leaf
  against plain jax.grad ("gradients").

  Args:
    name: its key in longstraw_jax.MIXERS.
    config: sizes to test with; float64 replaces its dtypes and small stages
      its stages. "tiny-hybrid" by default.
    trainable: which parameters, by path a/b/c, are expected to learn; each
      must have a gradient.
    narrow_carries: carry fields that may stay in the model's dtype because
      they copy inputs; all others must be float32 or wider.
    below: mixers that must stand below this one in its pattern.
    shared: positions [T] -> what they would hand on (State.shared), for the
      calls of the mixer by itself; a function of the position alone.
    checks: which of CHECKS to run.

  Raises:
    AssertionError: names the check, the leaf and the figures.
    KeyError: no mixer is registered by this name; lists those that are.
    ValueError: a name in `checks` is unknown; lists CHECKS.
  """
  unknown = [check for check in checks if check not in CHECKS]
  if unknown:
    raise ValueError(f"checks {unknown} are unknown: use some of {CHECKS}")
  config = config or PRESETS["tiny-hybrid"]
  with jax.enable_x64(True):
    subject = Subject(
      name, config, trainable, tuple(narrow_carries), tuple(below), shared
    )
    for check in checks:
      _CHECKS[check](subject)
