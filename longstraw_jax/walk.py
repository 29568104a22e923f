"""The walk over one sequence in blocks, forward and in reverse.

One pair serves the prompt's capture and the members' replay alike. The forward
walk runs block after block against the pages of the blocks before it and
keeps rows and carries only. The reverse walk goes from the last block to the
first: it recomputes the block's forward from (pages before it, saved carry at
its entry), pulls back (outputs, its rows, its exit carry) and adds into the
parameters' gradient and into the accumulators of earlier rows. Memory is the
pages, one accumulator of their shape, and one block's work.

A batch of members that share prior pages walks together when `batched`: their
tokens, lengths, carries and own rows then have a leading axis M, priors and
block indices have none.
"""

import functools

from flax import struct
import jax
from jax import lax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from longstraw_jax.config import check_dtype
from longstraw_jax.models.model import Model, Params
from longstraw_jax.ops.pages import (
  Striping,
  host_zeros,
  on_host,
  wide_zeros,
)
from longstraw_jax.ops.precision import wide_dtype
from longstraw_jax.sharding import (
  carry_specs,
  constrain,
  constrain_at_rest,
  constrain_tree,
  member_vmap,
)
from longstraw_jax.state import (
  Pages,
  fill_rows,
  fill_up_rows,
  read_rows,
  save_carry,
  saved_carry,
  tree_zeros,
  write_layer_rows,
  write_rows,
)
from longstraw_jax.types import Span, Tree


@struct.dataclass
class Job:
  """A sequence to walk, padded to whole blocks.

  Attributes:
    tokens: [blocks * block] ids, or [M, blocks * block].
    targets: the ids these tokens predict, or None where no scores are wanted.
    length: real tokens, [] or [M].
    start: position of token 0.
    block: tokens of one block.
    striping: how devices share the sequence's own rows.
    choices: recorded choices to follow, stage -> layer -> name ->
      [*M, L, S, A]; None chooses afresh.
    temperature: that the logits are divided by; None for 1.
    batched: whether there is a member axis.
    pages: where the sequence's own rows and saved carries are kept, "device"
      or "host".
  """

  tokens: Int[Array, "*M S"]
  targets: Int[Array, "*M S"] | None
  length: Int[Array, "*M"]
  start: Int[Array, ""]
  block: int = struct.field(pytree_node=False)
  striping: Striping | None = struct.field(pytree_node=False, default=None)
  choices: Tree | None = None
  temperature: Float[Array, ""] | None = None
  batched: bool = struct.field(pytree_node=False, default=False)
  pages: str = struct.field(pytree_node=False, default="device")

  @property
  def blocks(self) -> int:
    """Blocks that the padded sequence holds."""
    return self.tokens.shape[-1] // self.block

  @property
  def filled_blocks(self) -> Int[Array, ""]:
    """Blocks that hold a real token of any member."""
    return lax.div(self.length.max() + (self.block - 1), jnp.int32(self.block))

  @property
  def member_shape(self) -> tuple[int, ...]:
    """() or (M,)."""
    return self.tokens.shape[:-1]


@struct.dataclass
class Walked:
  """What a forward walk leaves.

  Attributes:
    logprobs: of the targets, zero at padding, [*M, S].
    entropy: of every predicted distribution, zero at padding.
    changed: share of layers that would have chosen otherwise than the job's
      choices, zero at padding; None where it has none or nothing is scored.
    rows: the sequence's own rows, [*M, L, ..., S, H].
    carry: after the last real token.
    saved_carries: at the entry of every block, [blocks, *M, L, ...]; empty
      where not asked for.
  """

  logprobs: Float[Array, "*M S"]
  entropy: Float[Array, "*M S"]
  changed: Float[Array, "*M S"] | None
  rows: Tree
  carry: Tree
  saved_carries: Tree


@struct.dataclass
class Begun:
  """The beginning of a job, which an earlier walk has gone over.

  Attributes:
    length: tokens walked; they may end inside a block.
    rows: theirs, in buffers with room for the whole job. The job is padded to
      one block more, as a block that starts inside one reaches past it.
    saved_carries: at the entry of every block that was entered, in buffers for
      all; empty where not asked for.
  """

  length: Int[Array, ""]
  rows: Tree
  saved_carries: Tree


@struct.dataclass
class Outputs:
  """What one block gives and what the reverse walk has cotangents for."""

  logprobs: Float[Array, "*M C"]
  entropy: Float[Array, "*M C"]
  rows: Tree
  carry: Tree


def _changed_share(live: Tree, followed: Tree, span: Span) -> Array:
  """Share of layers, per token, that choose another set than was followed."""
  differs = lambda name, a, b: jnp.any(
    jnp.sort(a[name], axis=-1) != jnp.sort(b, axis=-1), axis=-1
  )
  layers = [
    differs(name, live[stage][layer], x)
    for stage, choices in followed.items()
    for layer, names in choices.items()
    for name, x in names.items()
  ]
  return jnp.where(span.mask, jnp.concatenate(layers).mean(0), 0.0)


def _one_block(
  model: Model,
  write,
  params,
  carry,
  own,
  priors,
  tokens,
  targets,
  choices,
  span,
  member,
  temperature,
):
  """One block of one member: outputs, taps of priors and of its own pages.

  And, of no gradient, how far the choices differ.
  """
  segments = priors if own is None else (*priors, own)
  out = model.hidden(
    params, tokens, span, segments, carry, choices, write, member=member
  )
  changed = None
  if choices and targets is not None:
    changed = _changed_share(out.choices, choices, span)
  if targets is None:
    scores = (jnp.zeros(0),) * 2
  else:
    scores = model.logprobs(params, out.x_TD, targets, temperature)
    scores = tuple(jnp.where(span.mask, x, 0.0) for x in scores)
  outputs = Outputs(*scores, rows=out.rows, carry=out.carry)
  number = len(priors)
  return outputs, out.taps[:number], out.taps[number:], changed


def _block(
  model: Model, job: Job, offset, params, carry, own, priors, write=None
):
  """The block from token `offset` on, for one member or a batch of them.

  It ends where blocks end, at a multiple of their size. Where its layers write
  their rows into `own`, the outputs' rows are the buffers.
  """
  cut = lambda x: lax.dynamic_slice_in_dim(x, offset, job.block, x.ndim - 1)
  positions = job.start + offset + jnp.arange(job.block, dtype=jnp.int32)
  room = job.block - lax.rem(offset, jnp.int32(job.block))
  length = jnp.clip(job.length - offset, 0, room)
  call = functools.partial(_one_block, model, write)
  span = Span(positions=positions, length=length)
  member = None
  if job.batched:
    member = jnp.arange(job.member_shape[0], dtype=jnp.int32)
    own_axes = (
      None if own is None else Pages(rows=0, taps=0, length=None, start=None)
    )
    call = member_vmap(
      call,
      job.member_shape[0],
      in_axes=(
        None,
        0,
        own_axes,
        None,
        0,
        0,
        0,
        Span(positions=None, length=0),
        0,
        None,
      ),
      out_axes=(0, None, 0, 0),
    )
  targets = None if job.targets is None else cut(job.targets)
  choices = jax.tree.map(
    lambda x: lax.dynamic_slice_in_dim(x, offset, job.block, x.ndim - 2),
    job.choices,
  )
  tokens = cut(job.tokens)
  return call(
    params,
    carry,
    own,
    priors,
    tokens,
    targets,
    choices,
    span,
    member,
    job.temperature,
  )


def _own_pages(job: Job, rows: Tree, taps: Tree | None, offset) -> Pages | None:
  """The sequence's rows before token `offset`; a single block has none."""
  if job.blocks == 1:
    return None
  return Pages(
    rows=rows,
    taps=taps,
    length=offset,
    start=job.start,
    striping=job.striping,
  )


def _nothing_walked(model: Model, carry: Tree, job: Job, save_carries) -> Begun:
  """Empty buffers for a whole job."""
  shapes, _ = model.state_shapes(job.tokens.shape[-1])
  zeros = host_zeros if job.pages == "host" else jnp.zeros
  lead = lambda x: zeros((*job.member_shape, *x.shape), x.dtype)
  each = lambda x: zeros((job.blocks, *x.shape), x.dtype)
  rows = jax.tree.map(lead, shapes)
  if job.striping is not None:
    rows = jax.tree.map(
      lambda x: constrain(x, *(None,) * (x.ndim - 2), "rows", None), rows
    )
  saved = jax.tree.map(each, carry) if save_carries else {}
  if not job.batched:
    saved = constrain_tree(saved, carry_specs(saved, lead=2))
  return Begun(length=jnp.int32(0), rows=rows, saved_carries=saved)


def _save_entry(saved: Tree, index, carry: Tree, entered, striping) -> Tree:
  """Saves block `index`'s entry carry, unless an earlier walk entered it."""
  if entered is not None:
    keep = lambda old, new: jnp.where(entered, old, new)
    known = saved_carry(saved, index, striping)
    carry = jax.tree.map(keep, known, carry)
  return save_carry(saved, index, carry, striping)


def walk_forward(
  model: Model,
  params: Params,
  priors: tuple[Pages, ...],
  carry: Tree,
  job: Job,
  *,
  save_carries: bool,
  begun: Begun | None = None,
) -> Walked:
  """Runs a job block by block, without autograd.

  Args:
    model: the model.
    params: its parameters.
    priors: pages before this sequence, shared by all members.
    carry: at the entry of the first block, [*M, L, ...].
    job: the sequence.
    save_carries: keep the carry at the entry of every block.
    begun: goes on behind this beginning of an unscored job, to which `carry`
      then is the exit: its last block is filled up first.
  """
  scored = job.targets is not None
  wide = wide_dtype(model.config.dtype)
  width = job.tokens.shape[-1] if scored else 0
  scores = jnp.zeros((*job.member_shape, width), wide)
  first = jnp.int32(0)
  if begun is not None:
    first = lax.div(begun.length, jnp.int32(job.block))
  blank = begun or _nothing_walked(model, carry, job, save_carries)

  def body(index, walked):
    offset = border = index * job.block
    entered = None
    if begun is not None:
      offset = jnp.maximum(begun.length, border)
      entered = offset > border
    own = _own_pages(job, walked.rows, None, offset)
    saved = walked.saved_carries
    if save_carries:
      saved = _save_entry(saved, index, walked.carry, entered, job.striping)
    write = None
    if own is not None and on_host(own.rows):
      filled = None if begun is None else offset - border
      write = lambda buffers, rows, layer: write_layer_rows(
        buffers, rows, layer, border, job.striping, filled
      )
    outputs, _, _, changed = _block(
      model, job, offset, params, walked.carry, own, priors, write
    )
    put = lambda x, new: lax.dynamic_update_slice_in_dim(
      x, new.astype(x.dtype), offset, x.ndim - 1
    )
    logprobs, entropy = walked.logprobs, walked.entropy
    if scored:
      logprobs = put(logprobs, outputs.logprobs)
      entropy = put(entropy, outputs.entropy)
    rows = outputs.rows  # whole buffers where layers wrote into them
    if write is None and begun is None:
      rows = write_rows(walked.rows, rows, border, job.striping)
    elif write is None:
      place = (border, offset - border, job.block, job.striping)
      rows = fill_up_rows(walked.rows, rows, *place)
    return Walked(
      logprobs=logprobs,
      entropy=entropy,
      changed=jax.tree.map(put, walked.changed, changed),
      rows=rows,
      carry=outputs.carry,
      saved_carries=saved,
    )

  walked = Walked(
    logprobs=scores,
    entropy=scores,
    changed=(jnp.zeros(job.tokens.shape) if scored and job.choices else None),
    rows=blank.rows,
    carry=carry,
    saved_carries=blank.saved_carries,
  )
  if job.blocks == 1:
    return body(first, walked)
  return lax.fori_loop(first, job.filled_blocks, body, walked)


@struct.dataclass
class Gradients:
  """The running sums of a reverse walk.

  Attributes:
    params: of the trainable parameters, float32 or wider.
    priors: accumulators of prior pages, one tree a segment.
    carry: cotangent of the carry, in the end at the job's entry.
  """

  params: dict
  priors: tuple[Tree | None, ...]
  carry: Tree


def zero_gradients(params: Params) -> dict:
  """Accumulators for the trainable parameters, float32 or wider."""
  for path, leaf in jax.tree.leaves_with_path(params.trainable):
    name = jax.tree_util.keystr(path, simple=True, separator="/")
    check_dtype(f"the dtype of parameter {name}", leaf.dtype)
  return constrain_at_rest(
    jax.tree.map(
      lambda x: jnp.zeros(x.shape, wide_dtype(x.dtype)), params.trainable
    )
  )


def walk_backward(
  model: Model,
  params: Params,
  priors: tuple[Pages, ...],
  job: Job,
  rows: Tree,
  saved_carries: Tree,
  dscores: tuple[Array, Array] | None,
  own: Tree | None,
  gradients: Gradients,
  *,
  first_block=0,
) -> tuple[Gradients, Tree | None]:
  """Adds one job's gradients by walking its blocks from last to first.

  Args:
    model: the model.
    params: its parameters.
    priors: as in walk_forward; their taps are taken from `gradients`.
    job: the sequence.
    rows: its rows, as walk_forward left them.
    saved_carries: the carry at the entry of every block.
    dscores: cotangents of (logprobs, entropy), or None without targets.
    own: accumulator of the job's own rows, holding what came from outside;
      None starts from zero.
    gradients: the running sums, `carry` being the cotangent of the exit.
    first_block: blocks before it are constants.

  Returns:
    The sums with this job's share added, `carry` being the cotangent at the
    entry of the first block walked; and the accumulator of the job's own rows,
    with what the walked blocks added to the rows before them.
  """
  if own is None and job.blocks > 1:
    own = wide_zeros(model.gradient_rows(rows))
  last = job.filled_blocks - 1

  def body(step, sums):
    gradients, own = sums
    index = last - step if job.blocks > 1 else jnp.int32(0)
    offset = index * job.block
    cut = lambda x: lax.dynamic_slice_in_dim(x, offset, job.block, x.ndim - 1)

    def call(trainable, carry, prior_taps, own_taps):
      tapped = tuple(
        prior.replace(taps=taps)
        for prior, taps in zip(priors, prior_taps, strict=True)
      )
      pages = _own_pages(job, rows, own_taps, offset)
      tree = params.replace(trainable=trainable)
      return _block(model, job, offset, tree, carry, pages, tapped)[:3]

    entry = saved_carry(saved_carries, index, job.striping)
    own_taps = own if job.blocks > 1 else None
    (outputs, _, _), pull_back = jax.vjp(
      call, params.trainable, entry, gradients.priors, own_taps
    )
    if dscores is None:
      dlogprobs, dentropy = (
        jnp.zeros_like(x) for x in (outputs.logprobs, outputs.entropy)
      )
    else:
      dlogprobs, dentropy = map(cut, dscores)
    drows = tree_zeros(outputs.rows)
    if own is not None:
      # All layers in one slice, before the pull-back: no copy is made.
      known = read_rows(own, offset, job.block, job.striping)
      drows = fill_rows(drows, known)
    cotangent = Outputs(dlogprobs, dentropy, rows=drows, carry=gradients.carry)
    accumulated = () if own_taps is None else (own_taps,)
    dparams, dcarry, prior_taps, own_taps = pull_back(
      (cotangent, gradients.priors, accumulated)
    )
    add = lambda total, new: total + new.astype(total.dtype)
    gradients = Gradients(
      params=constrain_at_rest(jax.tree.map(add, gradients.params, dparams)),
      priors=prior_taps,
      carry=dcarry,
    )
    return gradients, own if own_taps is None else own_taps

  if job.blocks == 1:
    sums = (gradients, own)
    if isinstance(first_block, int) and first_block == 0:
      return body(jnp.int32(0), sums)
    return lax.cond(
      first_block < 1, lambda s: body(jnp.int32(0), s), lambda s: s, sums
    )
  trips = jnp.maximum(last + 1 - first_block, 0)
  return lax.fori_loop(jnp.int32(0), trips, body, (gradients, own))
