"""What every checkpoint reader offers: names, shapes, and one array a call."""

from collections.abc import Mapping
import dataclasses
from typing import Protocol, runtime_checkable

import numpy as np


@dataclasses.dataclass(frozen=True)
class TensorInfo:
  """One tensor, known without reading its data.

  Attributes:
    name: as the file has it.
    shape: sizes in row-major order, a matrix as [out, in]; () for a scalar.
    dtype: of the array that `read` returns, ml_dtypes types included.
  """

  name: str
  shape: tuple[int, ...]
  dtype: np.dtype


@runtime_checkable  # for run-time type checks of annotations
class TensorSource(Protocol):
  """An open checkpoint.

  Attributes:
    tensors: every tensor by name.
  """

  tensors: Mapping[str, TensorInfo]

  def read(self, name: str) -> np.ndarray:
    """Returns one tensor, with the shape and dtype of its `TensorInfo`.

    Raises:
      KeyError: if there is no such tensor.
    """
