"""The contract between a mixer and everything that runs it.

A mixer is a Flax module that sees one sequence, no batch axis. It reads state
and returns what it adds:

  y_TD, update = mixer(x_TD, span, state)

and declares, as a plain method that needs no parameters, what it will add:

  rows, carry = mixer.state_shapes(tokens, dtype)
"""

from typing import Protocol

from flax import struct
import jax
from jax import Array
from jaxtyping import Float

from longstraw_jax.ops.pages import Segment
from longstraw_jax.types import Span, Tree


@struct.dataclass
class State:
  """What one layer may read; it writes nothing back into it.

  Attributes:
    pages: runs of stored rows before this call, oldest first: the prompt's,
      then the member's own. There may be none.
    carry: fixed-size arrays, replaced each call.
  """

  pages: tuple[Segment, ...]
  carry: Tree


@struct.dataclass
class Update:
  """What one call adds.

  Attributes:
    rows: name -> [..., T, H], this call's new rows, padding included.
    carry: the new carry; padding must have left it untouched.
    taps: the tap of every segment in State.pages, as the reads handed it on.
  """

  rows: dict[str, Array]
  carry: Tree
  taps: tuple[dict | None, ...]


Shapes = tuple[dict[str, jax.ShapeDtypeStruct], Tree]


class Mixer(Protocol):
  """What a time-mixing module offers."""

  def __call__(
    self, x_TD: Float[Array, "T D"], span: Span, state: State
  ) -> tuple[Float[Array, "T D"], Update]:
    """Mixes T tokens with each other and with the state before them."""

  def state_shapes(self, tokens: int, dtype: str) -> Shapes:
    """Shapes of the rows that `tokens` tokens add, and of the carry."""
