"""The contract between a mixer and everything that runs it.

A mixer is a Flax module that sees one sequence, no batch axis. It reads state
and returns what it adds:

  y_TD, update = mixer(x_TD, span, state)

and declares, as a plain method that needs no parameters, what it will add:

  rows, carry = mixer.state_shapes(tokens, dtype)

A feed-forward is y_TD = ffn(x_TD); one that chooses (an expert a token) says
so by `chooses = True` and is y_TD, chosen = ffn(x_TD, choices). Whatever
chooses declares it by a plain method, declared_choices(), name -> Choice;
recorded choices of no declared name are refused. One may name
parameters of experts, `stacked`, that it gives to expert_mlp as they come: they
are a StackedLayer where they are frozen, Shared where members of one loss do
share them. The leaves of their adapters, where there are any, are in a dict of
their own beside them (layers.beside).

Either may name, as class attributes, parameters by the start of their path:
`constants`, that no gradient reaches and no optimizer may touch; and `precise`,
that stay float32 where a file has them so, whatever dtype the others are asked
to be in. A mixer may name `constant_rows`: rows that no gradient flows into.

On a mesh reads of pages find their owners by themselves. A mixer may say how
its other arrays are shared out, `constrain(x, None, "heads", None)`, with the
names of sharding.MESH_AXES; what it leaves open XLA decides.
"""

import dataclasses

from flax import struct
import jax
from jax import Array

from longstraw_jax.ops.pages import Segment
from longstraw_jax.types import Tree


@struct.dataclass
class State:
  """What one layer may read; it writes nothing back into it.

  Attributes:
    pages: runs of stored rows before this call, oldest first: the prompt's,
      then the member's own. There may be none.
    carry: fixed-size arrays, replaced each call.
    shared: what a layer below, in the same pattern, hands on for these very
      tokens, by name.
    choices: recorded discrete choices to follow, name -> [T, ...] int32; what
      is not named is chosen afresh.
  """

  pages: tuple[Segment, ...]
  carry: Tree
  shared: dict[str, Array] = struct.field(default_factory=dict)
  choices: dict[str, Array] = struct.field(default_factory=dict)


@struct.dataclass
class Update:
  """What one call adds.

  Attributes:
    rows: name -> [..., T, H], this call's new rows, padding included.
    carry: the new carry; padding must have left it untouched.
    taps: the tap of every segment in State.pages, as the reads handed it on.
    shared: what layers above in the pattern may use.
    choices: the discrete choices that the live weights make, by name.
  """

  rows: dict[str, Array]
  carry: Tree
  taps: tuple[dict | None, ...]
  shared: dict[str, Array] = struct.field(default_factory=dict)
  choices: dict[str, Array] = struct.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Choice:
  """A discrete choice that a module makes for every token.

  Attributes:
    number: A, how many are chosen.
    ids: they are in [0, ids); None where they are positions of tokens, the
      choosing one's at most, and selection.NO_KEY where there is none.
  """

  number: int
  ids: int | None


Shapes = tuple[dict[str, jax.ShapeDtypeStruct], Tree]
