"""Comparing trees, and compiling the programs whose results are compared."""

from collections.abc import Callable
import functools

from flax import traverse_util
import jax
import numpy as np

from longstraw_jax.types import Tree

TOLERANCE = 1e-12  # float64, of values and of every gradient leaf
SMALL_LEAF = 1e-3  # leaves below this share of the whole are measured by it

# Every program runs once or twice on tiny arrays: XLA should not polish it.
QUICK = {
  "xla_backend_optimization_level": 0,
  "xla_cpu_use_fusion_emitters": False,
}


# --- Gradients -------------------------------------------------------------


def leaf_errors(actual: Tree, expected: Tree) -> dict[str, float]:
  """Error of every leaf, relative to the leaf but for vanishing ones.

    |a - b| / max(|b|, SMALL_LEAF |all leaves of b|),  Euclidean norms

  Args:
    actual: nested dict of gradients, a.
    expected: the same of the oracle, b.

  Returns:
    path a/b/c -> error. A leaf that is not finite has error inf; where b is
    zero throughout, a must be too.
  """
  flat = lambda tree: {
    path: np.asarray(x, np.float64)
    for path, x in traverse_util.flatten_dict(tree, sep="/").items()
  }
  actual, expected = flat(actual), flat(expected)
  if actual.keys() != expected.keys():
    raise ValueError(
      f"the trees differ in leaves {sorted(actual.keys() ^ expected.keys())}"
    )
  norms = {path: np.linalg.norm(x) for path, x in expected.items()}
  floor = SMALL_LEAF * np.sqrt(sum(norm**2 for norm in norms.values()))

  def error(path):
    gap = np.linalg.norm(actual[path] - expected[path])
    scale = max(norms[path], floor)
    if not np.isfinite(gap):
      return float("inf")
    return float(gap / scale) if scale else (0.0 if gap == 0 else float("inf"))

  return {path: error(path) for path in expected}


def assert_gradients_close(
  actual: Tree, expected: Tree, tolerance: float, what: str = ""
) -> None:
  """Every leaf_errors within a tolerance.

  Args:
    actual: gradients under test.
    expected: gradients to agree with.
    tolerance: largest error allowed.
    what: the case, which the message starts with.

  Raises:
    AssertionError: names the worst leaf that is off and its error, or the
      leaves that only one of the trees has.
  """
  case = f"{what}: " if what else ""
  try:
    errors = leaf_errors(actual, expected)
  except ValueError as error:
    raise AssertionError(f"{case}{error}") from error
  off = {path: error for path, error in errors.items() if error > tolerance}
  if off:
    worst = max(off, key=off.get)
    raise AssertionError(
      f"{case}{len(off)} of {len(errors)} leaves are off by more than "
      f"{tolerance:g}; worst is {worst} with error {off[worst]:.3g}"
    )


# --- Values and shapes -----------------------------------------------------


def require(holds: bool, check: str, message: str) -> None:
  """Raises AssertionError in the name of a check where something fails."""
  if not holds:
    raise AssertionError(f"{check}: {message}")


def leaves(tree: Tree) -> dict:
  """Path -> leaf."""
  flat, _ = jax.tree_util.tree_flatten_with_path(tree)
  return {jax.tree_util.keystr(path): x for path, x in flat}


def require_equal(check: str, got: Tree, wanted: Tree, what: str) -> None:
  """Values agree to TOLERANCE of the leaf's largest magnitude, at least 1."""
  arrays = lambda tree: {p: np.asarray(x) for p, x in leaves(tree).items()}
  got, wanted = arrays(got), arrays(wanted)
  require(got.keys() == wanted.keys(), check, f"{what}: leaves differ")
  for path, b in wanted.items():
    error = np.abs(got[path] - b).max(initial=0.0)
    limit = TOLERANCE * max(1.0, np.abs(b).max(initial=0.0))
    require(  # a comparison with NaN is False, so NaN fails too
      bool(error <= limit),
      check,
      f"{what}{path} differs by {error:.3g}, allowed {limit:.3g}",
    )


def require_shapes(check: str, got: Tree, wanted: Tree, what: str) -> None:
  """Same structure, shapes and dtypes."""
  describe = lambda tree: {
    path: f"{x.dtype}{list(x.shape)}" for path, x in leaves(tree).items()
  }
  got, wanted = describe(got), describe(wanted)
  require(got == wanted, check, f"{what} are {got}, declared {wanted}")


# --- Compiling -------------------------------------------------------------


@functools.cache
def _options() -> dict | None:
  """QUICK, unless this version of XLA does not know all of it."""
  try:
    jax.jit(lambda x: x, compiler_options=QUICK)(0.0)
  except Exception:  # noqa: BLE001  (the error's type differs by backend)
    return None
  return QUICK


def quick_jit(function: Callable, **kwargs) -> Callable:
  """jax.jit for programs that compile long and run briefly."""
  return jax.jit(function, compiler_options=_options(), **kwargs)
