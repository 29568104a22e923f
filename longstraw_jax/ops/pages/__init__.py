"""Reading pages: the primitives that own the gradient into stored rows.

Pages are far larger than one call's work, so their cotangent must never be
materialised per read. Every primitive here takes the rows as constants and,
beside them, a tap of the same shape that passes through unread. The cotangent
of the tap is the accumulator: the backward pass adds its blocks into it in
place and hands it on. A reader threads the tap through its reads,

  (o, lse), tap = attend(q, segment, size)
  segment = segment.replace(tap=tap)            # only if it is read again
  ... Update(rows, carry, taps=(tap,))

and must hand on the tap, never the segment, through a scan of its own: a scan
saves what it carries, and a segment holds the whole buffer.

Without a tap (None) nothing flows into the pages. Forward-mode
differentiation is refused, as for every jax.custom_vjp.

Under jax.vmap every call has an accumulator of its own, as jax.vmap of jax.grad
needs. Only members of one loss, which the walk marks (Segment.member), share
one buffer: the backward passes sum over the members before they add.
"""

from longstraw_jax.ops.pages.attend import attend
from longstraw_jax.ops.pages.attend_blocks import Part, attend_blocks
from longstraw_jax.ops.pages.attend_chosen import attend_chosen
from longstraw_jax.ops.pages.memory import (
  PLACES,
  check_place,
  host_zeros,
  on_host,
  put_beside,
  put_layer,
  refuse_host_cotangent,
  take_layer,
  to_device,
  to_host,
)
from longstraw_jax.ops.pages.own import merge, open_rows
from longstraw_jax.ops.pages.read import gather_rows, read_block
from longstraw_jax.ops.pages.segment import (
  EMPTY_LSE,
  PAGE_ATTENTION,
  Segment,
)
from longstraw_jax.ops.pages.staging import (
  keeps_all_but_staged,
  over_staged,
)
from longstraw_jax.ops.pages.stored import (
  ScaledRows,
  store,
  stored_struct,
  wide_zeros,
)
from longstraw_jax.ops.pages.striping import (
  Striping,
  on_owners,
  row_specs,
)

__all__ = [
  "EMPTY_LSE",
  "PAGE_ATTENTION",
  "PLACES",
  "Part",
  "ScaledRows",
  "Segment",
  "Striping",
  "attend",
  "attend_blocks",
  "attend_chosen",
  "check_place",
  "gather_rows",
  "host_zeros",
  "keeps_all_but_staged",
  "merge",
  "on_host",
  "on_owners",
  "open_rows",
  "over_staged",
  "put_beside",
  "put_layer",
  "read_block",
  "refuse_host_cotangent",
  "row_specs",
  "store",
  "stored_struct",
  "take_layer",
  "to_device",
  "to_host",
  "wide_zeros",
]
