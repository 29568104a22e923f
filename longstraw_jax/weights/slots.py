"""Where every tensor of a checkpoint belongs in the parameters.

A parameter of a stage is stacked over the stage's repeats, and experts over
their number, so that a checkpoint's tensor is a region of a leaf, often with
its axes in another order. A Slot says which. Loading and saving walk the same
slots in opposite directions.
"""

from collections.abc import Callable, Iterator, Mapping
import dataclasses
import functools
from typing import Protocol

from flax import traverse_util
import jax
from jax import Array

from longstraw_jax.config import ModelConfig
from longstraw_jax.models.model import Model

Shape = tuple[int, ...]


class Form(Protocol):
  """An order of axes, for numpy and jax arrays alike."""

  def to_leaf(self, x: Array) -> Array:
    """From a checkpoint's tensor to the region of the leaf."""

  def to_file(self, x: Array) -> Array:
    """The inverse."""


@dataclasses.dataclass(frozen=True)
class Same:
  """As it is."""

  def to_leaf(self, x: Array) -> Array:
    """x."""
    return x

  def to_file(self, x: Array) -> Array:
    """x."""
    return x


@dataclasses.dataclass(frozen=True)
class Transposed:
  """Checkpoints store a linear map [out, in], a kernel is [in, out]."""

  def to_leaf(self, x: Array) -> Array:
    """Swaps the last two axes."""
    return x.swapaxes(-1, -2)

  def to_file(self, x: Array) -> Array:
    """Swaps the last two axes."""
    return x.swapaxes(-1, -2)


@dataclasses.dataclass(frozen=True)
class Taps:
  """A depthwise convolution, [U, 1, W] stored and [W, U] here."""

  def to_leaf(self, x: Array) -> Array:
    """[U, 1, W] to [W, U]."""
    return x[:, 0].T

  def to_file(self, x: Array) -> Array:
    """[W, U] to [U, 1, W]."""
    return x.T[:, None]


@dataclasses.dataclass(frozen=True)
class Paired:
  """Rows of each head in the order of GGUF's llama: pairs side by side.

  llama.cpp rotates dims 2j and 2j + 1 of that architecture, so its converter
  moves dim j of a head to 2j and dim j + H / 2 to 2j + 1.

  Attributes:
    heads: how many the rows hold.
    inner: what else is done, as to any other tensor of this kind.
  """

  heads: int
  inner: Same | Transposed

  def to_leaf(self, x: Array) -> Array:
    """Halves of a head apart again."""
    rows = x.reshape(self.heads, -1, 2, *x.shape[1:])
    return self.inner.to_leaf(rows.swapaxes(1, 2).reshape(x.shape))

  def to_file(self, x: Array) -> Array:
    """Halves of a head interleaved."""
    x = self.inner.to_file(x)
    rows = x.reshape(self.heads, 2, -1, *x.shape[1:])
    return rows.swapaxes(1, 2).reshape(x.shape)


SAME, TRANSPOSED, TAPS = Same(), Transposed(), Taps()

Names = Mapping[str, tuple[str, Form]]


@dataclasses.dataclass(frozen=True)
class Naming:
  """What a kind of checkpoint calls its tensors.

  Attributes:
    top: parameter outside the layers -> name and form.
    layer: what the names of layer {} begin with.
    norms: parameter of a block itself, by path in the layer.
    mixers: mixer -> path in the mixer -> name behind `layer`, and form.
    ffns: the same of feed-forwards.
  """

  top: Names
  layer: str
  norms: Names
  mixers: Mapping[str, Names]
  ffns: Mapping[str, Names]


@dataclasses.dataclass(frozen=True)
class Slot:
  """One tensor of a checkpoint, and the region of a leaf that it is.

  Attributes:
    tensor: its name.
    shape: its shape in the checkpoint.
    leaf: the parameter, by its path a/b/c.
    start: first element of the region.
    region: its shape; axes of the leaf before these have one element of it.
    form: how the axes are reordered.
  """

  tensor: str
  shape: Shape
  leaf: str
  start: Shape
  region: Shape
  form: Form

  @property
  def size(self) -> Shape:
    """Shape of the region with the leaf's rank."""
    return (1,) * (len(self.start) - len(self.region)) + self.region


def parameter_shapes(model: Model) -> dict[str, jax.ShapeDtypeStruct]:
  """Every parameter by its path a/b/c, without making one."""
  params = jax.eval_shape(model.init, jax.random.key(0))
  return traverse_util.flatten_dict(params.merged(), sep="/")


@functools.lru_cache(maxsize=4096)
def _file_shape(form: Form, shape: Shape) -> Shape:
  struct = jax.ShapeDtypeStruct(shape, "float32")
  return jax.eval_shape(form.to_file, struct).shape


def tensor_slots(
  config: ModelConfig,
  shapes: Mapping[str, jax.ShapeDtypeStruct],
  naming: Naming,
  stacked: Callable[[str], bool],
) -> list[Slot]:
  """The slots that together fill every parameter, in the order of layers.

  Args:
    config: the model.
    shapes: of its parameters, from `parameter_shapes`.
    naming: of the checkpoint.
    stacked: whether the checkpoint has the experts of a layer in one tensor of
      this name; else each expert has its own.

  Raises:
    ValueError: if the checkpoint has no name for a parameter.
  """
  slots = []
  for path in naming.top:
    if path in shapes:
      name, form = naming.top[path]
      slots.append(_slot(name, form, path, shapes[path].shape))
  first = 0
  for i, stage in enumerate(config.stages):
    for repeat in range(stage.repeats):
      for j, spec in enumerate(stage.pattern):
        number = first + repeat * len(stage.pattern) + j
        names = _layer_names(naming, spec)
        prefix = f"stage_{i}/layer_{j}/"
        for path in [path for path in shapes if path.startswith(prefix)]:
          slots += _layer_slots(
            naming.layer.format(number),
            names,
            path,
            path.removeprefix(prefix),
            (repeat, *shapes[path].shape[1:]),
            stacked,
          )
    first += len(stage.pattern) * stage.repeats
  left = set(shapes) - {slot.leaf for slot in slots}
  if left:
    raise ValueError(
      f"no checkpoint has names for the parameters {sorted(left)}: only "
      "models of the families in longstraw_jax.weights.families can be stored"
    )
  return slots


def _layer_names(naming: Naming, spec) -> Names:
  """Names by path in the layer."""
  names = dict(naming.norms)
  for part, table, kind in (
    ("mixer", naming.mixers, spec.mixer),
    ("ffn", naming.ffns, spec.ffn),
  ):
    names |= {f"{part}/{path}": x for path, x in table.get(kind, {}).items()}
  return names


def _slot(
  name: str, form: Form, path: str, shape: Shape, repeat: int | None = None
) -> Slot:
  """A tensor that is a whole leaf, or one repeat of it."""
  lead = () if repeat is None else (repeat,)
  start = lead + (0,) * len(shape)
  return Slot(name, _file_shape(form, shape), path, start, shape, form)


def _layer_slots(
  prefix: str,
  names: Names,
  path: str,
  inner: str,
  region: Shape,
  stacked: Callable[[str], bool],
) -> Iterator[Slot]:
  """The slots of one parameter of one layer.

  Args:
    prefix: what the layer's tensors begin with.
    names: by path in the layer.
    path: of the parameter.
    inner: its path in the layer.
    region: which repeat, and the shape of one.
    stacked: as in `tensor_slots`.
  """
  if inner not in names:
    return
  repeat, *shape = region
  name, form = names[inner]
  experts = EXPERT_PROJECTIONS.get(inner)
  if experts is None or stacked(prefix + name):
    yield _slot(prefix + name, form, path, tuple(shape), repeat)
    return
  # One matrix of each expert and projection; side by side in the last axis.
  number, inputs, outputs = shape
  width = outputs // len(experts)
  for expert in range(number):
    for k, projection in enumerate(experts):
      yield Slot(
        f"{prefix}mlp.experts.{expert}.{projection}.weight",
        (width, inputs),
        path,
        (repeat, expert, 0, k * width),
        (inputs, width),
        TRANSPOSED,
      )


# Parameters that hold all experts, by their path in a layer, and the tensors
# that one expert has, side by side there.
EXPERT_PROJECTIONS = {
  "ffn/experts_gate_up": ("gate_proj", "up_proj"),
  "ffn/experts_down": ("down_proj",),
}
