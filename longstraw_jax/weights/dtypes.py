"""Which dtype each parameter is loaded or stored in."""

from collections.abc import Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from longstraw_jax.config import check_dtype
from longstraw_jax.models.model import Model
from longstraw_jax.ops.precision import wide_dtype

REST = ""  # in a mapping of dtypes, all that it does not name


def parameter_dtypes(
  model: Model,
  shapes: Mapping[str, jax.ShapeDtypeStruct],
  own: Mapping[str, np.dtype],
  wanted: Any,
) -> dict[str, np.dtype]:
  """The dtype of every parameter by its path.

  Args:
    model: whose modules name parameters that rounding would harm.
    shapes: of its parameters were it in bfloat16: what is wider then is
      float32 in any case.
    own: what the file, or the model, has them in.
    wanted: one dtype for all but those that are wider for the module's sake;
      or a mapping from ends of paths to dtypes, which they are then given,
      `REST` for the others; or None for their own.

  Raises:
    ValueError: a mapping names no parameter; a dtype is refused, as float16.
  """
  named = wanted if isinstance(wanted, Mapping) else {REST: wanted}
  for asked in named.values():
    if asked is not None:
      check_dtype("param_dtype", asked)
  _check_names(named, own)
  dtypes = {}
  for path, has in own.items():
    end = _longest_end(path, named)
    asked = named.get(end or REST)
    dtype = np.dtype(has if asked is None else asked)
    if shapes[path].dtype != jnp.bfloat16:
      dtype = wide_dtype(dtype)
    elif not end and model.is_precise(path) and has == wide_dtype(has):
      dtype = wide_dtype(dtype)
    dtypes[path] = np.dtype(dtype)
    if dtype == np.float16:
      raise ValueError(
        f"parameter {path!r} is stored in float16, whose range is too narrow "
        "to compute and train in: pass param_dtype='bfloat16' or 'float32' "
        "(on a command line --param_dtype)"
      )
  return dtypes


def _ends(path: str, end: str) -> bool:
  return bool(end) and f"/{path}".endswith(f"/{end}")


def _longest_end(path: str, named: Iterable[str]) -> str | None:
  return max((end for end in named if _ends(path, end)), key=len, default=None)


def _check_names(named: Iterable[str], paths: Iterable[str]) -> None:
  for end in named:
    if end != REST and not any(_ends(path, end) for path in paths):
      raise ValueError(
        f"param_dtype names {end!r}, in which no parameter's path ends: give "
        f"ends such as 'mixer/A_log', and {REST!r} for the rest"
      )
