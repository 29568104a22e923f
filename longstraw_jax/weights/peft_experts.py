"""Experts' adapters as files have them: in PEFT's layout, or one by one.

Here gate and up of an expert are one matrix [D, 2 F] with one adapter, A [D, r]
and B [r, 2 F]. Files know two layouts. "fused", PEFT's for parameters of three
axes (its target_parameters; vLLM reads it too), has the experts of a layer in
two tensors a parameter,

  lora_A [E r, in]  row e r + i is row i of expert e
  lora_B [out, r E]  column i E + e is column i of expert e

named after the module that holds the parameters, once for each of them, the
inner one with `.base_layer`. "each" has modules of its own for every expert and
projection, experts.{e}.gate_proj, up_proj and down_proj, as checkpoints of
transformers 4 and vLLM do. Gate and up have one A there in two copies; where
they are adapters of their own, of rank r each, they are one of rank 2 r here,

  A = [A_gate A_up],  B = [[B_gate, 0], [0, B_up]]

and are written as two again while both zeros stand.
"""

from collections.abc import Iterator
import dataclasses
import re
from typing import Any

import numpy as np

FUSED, EACH = LAYOUTS = ("fused", "each")
INNER = ".base_layer"  # behind the module's name for what PEFT wraps first

Pair = tuple[np.ndarray, np.ndarray]  # lora_A [r, in] and lora_B [out, r]


def to_fused(a: np.ndarray, b: np.ndarray) -> Pair:
  """[E, in, r] and [E, r, out] as PEFT flattens them."""
  experts, inputs, rank = a.shape
  flat_a = a.swapaxes(1, 2).reshape(experts * rank, inputs)
  return flat_a, b.transpose(2, 1, 0).reshape(-1, rank * experts)


def from_fused(lora_a: np.ndarray, lora_b: np.ndarray, experts: int) -> Pair:
  """The inverse of to_fused."""
  a = lora_a.reshape(experts, -1, lora_a.shape[1]).swapaxes(1, 2)
  b = lora_b.reshape(lora_b.shape[0], -1, experts).transpose(2, 1, 0)
  return a, b


def only_parameter(config: dict[str, Any], holder: str) -> str:
  """The one parameter of a layer's experts that a configuration names.

  Raises:
    ValueError: it names none, or several.
  """
  targets = config.get("target_parameters")
  ends = {target.rpartition(".")[2] for target in targets or ()}
  found = ends & {"gate_up_proj", "down_proj"}
  if len(found) != 1:
    raise ValueError(
      f"target_parameters is {targets!r}: it must name the one parameter of "
      f"{holder!r} that has the adapter, gate_up_proj or down_proj"
    )
  return found.pop()


def check_orientation(
  path: str, tensors: dict, sizes: tuple[int, int], config: dict[str, Any]
) -> None:
  """Refuses fused tensors with inputs and outputs exchanged.

  Before 0.19 PEFT took the axes of experts [E, out, in] for [E, in, out]. Files
  without a version are of other tools, or of models of PEFT 0.17's time, whose
  experts were [E, in, out].

  Args:
    path: of the map.
    tensors: (part, "A" or "B") -> tensor.
    sizes: inputs and outputs of a matrix.
    config: adapter_config.json.

  Raises:
    ValueError: the sizes say so, or they are equal and the version does.
  """
  inputs, outputs = sizes
  by_size = inputs != outputs and all(
    x.shape[letter == "A"] == (outputs if letter == "A" else inputs)
    for (_, letter), x in tensors.items()
  )
  version = config.get("peft_version")
  number = re.match(r"(\d+)\.(\d+)", version or "")
  old = number is not None and tuple(map(int, number.groups())) < (0, 19)
  if by_size or (inputs == outputs and old):
    raise ValueError(
      f"the adapter of {path} is of another orientation, as PEFT before 0.19 "
      f"wrote it (peft_version is {version!r}): lora_A must be of the "
      f"{inputs} inputs and lora_B of the {outputs} outputs; merge it there, "
      "or train it again"
    )


@dataclasses.dataclass(frozen=True)
class Projections:
  """An expert's projections that one matrix here holds side by side.

  Attributes:
    names: in files, in the order of the matrix's columns.
  """

  names: tuple[str, ...]

  def apart(self, a: np.ndarray, b: np.ndarray) -> bool:
    """Whether a stack [..., in, r], [..., r, out] is of adapters of their own.

    Fresh ones, whose B is zero throughout, are not.
    """
    number, rank = len(self.names), a.shape[-1]
    if number == 1 or rank % number:
      return False
    grid = self._grid(b)
    own = np.eye(number, dtype=bool)
    used = np.array([[block.any() for block in row] for row in grid])
    return bool((used == own).all())

  def _grid(self, b: np.ndarray) -> list[list[np.ndarray]]:
    """B in blocks, [rows of A's share][columns of a projection]."""
    number = len(self.names)
    rows = np.split(b, number, axis=-2)
    return [np.split(row, number, axis=-1) for row in rows]

  def split(
    self, a: np.ndarray, b: np.ndarray, apart: bool
  ) -> Iterator[tuple[str, Pair]]:
    """Name -> (lora_A, lora_B) of one expert's [in, r] and [r, out]."""
    number = len(self.names)
    own_a = np.split(a, number, axis=-1) if apart else [a] * number
    if apart:
      own_b = [self._grid(b)[k][k] for k in range(number)]
    else:
      own_b = np.split(b, number, axis=-1)
    for name, one_a, one_b in zip(self.names, own_a, own_b, strict=True):
      yield name, (one_a.T, one_b.T)

  def join(self, stacks: list[Pair]) -> Pair:
    """[..., in, r] and [..., r, out] of all from those of every projection."""
    (first, _), *rest = stacks
    if all(np.array_equal(first, a) for a, _ in rest):
      return first, np.concatenate([b for _, b in stacks], axis=-1)
    a = np.concatenate([a for a, _ in stacks], axis=-1)
    columns, before = [], 0
    for _, b in stacks:
      rank = b.shape[-2]
      after = a.shape[-1] - before - rank
      edges = [(0, 0)] * (b.ndim - 2) + [(before, after), (0, 0)]
      columns.append(np.pad(b, edges))
      before += rank
    return a, np.concatenate(columns, axis=-1)
