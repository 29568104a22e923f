"""Mixtures of experts: every token through the experts chosen for it.

  y_t = sum_a w[t, a] down_e(silu(gate_e x_t) * up_e x_t),   e = experts[t, a]

Exact: nothing is dropped and no expert has a capacity. The (token, choice)
pairs are sorted by expert and every expert's run is padded to whole blocks of
rows; a loop whose trip count depends on the routing multiplies one block by
one expert's matrices at a time. Memory does not depend on the routing, and
one compiled program serves every routing.

A token's output depends on that token alone, to the bit: its row always meets
products of one shape, and its choices are added in ascending order of expert.
So a token is treated alike alone, in a batch and under jax.vmap, provided a
row's bits do not depend on its place in a product of fixed shape; on XLA:CPU
they do not.

Every matrix may have a low-rank adapter beside it, W_e + A_e B_e: one block's
rows meet that expert's A and B in the same loop, and no sum of the two is ever
made.

Axes beyond types.py: E experts, A choices of a token, B rows of a block. The
forms that matrices come in are those of ops/expert_maps.
"""

import dataclasses
import functools

from flax import struct
import jax
from jax import lax
from jax.custom_batching import custom_vmap
from jax.custom_derivatives import SymbolicZero
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

from longstraw_jax.ops.expert_maps import (
  Adapted,
  ExpertMap,
  MapSums,
  Parts,
  Shared,
  StackedLayer,
)
from longstraw_jax.ops.members import (
  any_leaf,
  fold_members,
  give_member_axis,
  one_by_one,
  one_gradient_for_members,
  unfold_members,
)
from longstraw_jax.ops.precision import wide_dtype, widen
from longstraw_jax.ops.token_sharding import (
  member_specs,
  members_divide,
  reduce_scatter_tokens,
  sum_members,
  token_specs,
)
from longstraw_jax.sharding import (
  MESH_AXES,
  WHOLE,
  num_shards,
  per_device,
  spec,
)
from longstraw_jax.types import Tree


def _swiglu(hidden: Float[Array, "... 2*F"]) -> Float[Array, "... F"]:
  """silu(gate) * up of [gate; up]."""
  gate, up = jnp.split(hidden, 2, axis=-1)
  return jax.nn.silu(gate) * up


def dense_expert_mlp(
  x_TD: Float[Array, "T D"],
  gate_up_EDF: Float[Array, "E D 2*F"],
  down_EFD: Float[Array, "E F D"],
  experts_TA: Int[Array, "T A"],
  weights_TA: Float[Array, "T A"],
) -> Float[Array, "T D"]:
  """All experts on all tokens: the form to read and to test against."""
  chosen_TAE = jax.nn.one_hot(
    experts_TA, down_EFD.shape[0], dtype=weights_TA.dtype
  )
  weights_TE = jnp.einsum("ta,tae->te", weights_TA, chosen_TAE)
  hidden_TEF = _swiglu(jnp.einsum("td,edf->tef", x_TD, gate_up_EDF))
  y_TED = jnp.einsum("tef,efd->ted", hidden_TEF, down_EFD)
  return jnp.einsum("te,ted->td", weights_TE, y_TED).astype(x_TD.dtype)


# --- Which rows a block holds ----------------------------------------------


@struct.dataclass
class _Plan:
  """The pairs, pair t * A + a, in order of expert, and their blocks."""

  order: Int[Array, "T*A"]
  starts: Int[Array, "E+1"]  # place of every expert's first pair in the order
  blocks: Int[Array, "E+1"]  # and number of blocks before its first

  @classmethod
  def of(cls, experts_TA, num_experts: int, row_block: int) -> "_Plan":
    ids = experts_TA.reshape(-1).astype(jnp.int32)
    known = (ids >= 0) & (ids < num_experts)
    ids = jnp.where(known, ids, num_experts)  # behind all others, in no block
    pairs = jnp.arange(ids.shape[0], dtype=jnp.int32)
    ids, order = lax.sort((ids, pairs), num_keys=1)
    everyone = jnp.arange(num_experts + 1, dtype=jnp.int32)
    starts = jnp.searchsorted(ids, everyone).astype(jnp.int32)
    counts = lax.div(jnp.diff(starts) + (row_block - 1), jnp.int32(row_block))
    blocks = jnp.cumsum(counts, dtype=jnp.int32)
    return cls(order=order, starts=starts, blocks=jnp.pad(blocks, (1, 0)))

  def rows(self, index, row_block: int):
    """Block `index`: its expert and its pairs, T * A where there is none."""
    expert = jnp.searchsorted(self.blocks, index, side="right") - 1
    expert = expert.astype(jnp.int32)
    within = (index - self.blocks[expert]) * row_block
    places = self.starts[expert] + within + jnp.arange(row_block, dtype="int32")
    nothing = self.order.shape[0]
    pairs = self.order.at[places].get(mode="fill", fill_value=nothing)
    return expert, jnp.where(places < self.starts[expert + 1], pairs, nothing)


def _take(array, indices):
  """Rows of an array, zero where the index lies behind its end."""
  return array.at[indices].get(mode="fill", fill_value=0)


# --- Experts on several devices --------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Sharding:
  """How the devices of the current mesh share one call.

  Attributes:
    experts: devices that share the experts; 1 where they do not divide them.
    members: whether the tokens are those of members on devices of their own.
  """

  experts: int
  members: bool

  @classmethod
  def of(cls, num_experts: int, folded: bool) -> "_Sharding":
    shards = num_shards("experts")
    return cls(
      experts=shards if num_experts % shards == 0 else 1,
      members=folded and num_shards("members") > 1,
    )

  def run(self, fn, in_specs, out_specs):
    """`fn` as every device runs it on its experts and members."""
    if self.experts == 1 and not self.members:
      return fn
    return per_device(fn, in_specs, out_specs)

  @property
  def tokens(self) -> PartitionSpec:
    """Of what goes in: experts on any device may be asked for."""
    return member_specs(self.members)

  def summed(self, tokens: int) -> PartitionSpec:
    """Of what sum_experts leaves of [T, ...]."""
    if self.experts == 1:
      return self.tokens
    return token_specs(tokens, self.members)

  def matrices(self, tree: Tree) -> Tree:
    """Of matrices: each device has those of its experts."""

    def specs(x):
      if isinstance(x, StackedLayer):
        stack = jax.tree.map(lambda _: spec(None, *held), x.stack)
        return StackedLayer(stack=stack, layer=WHOLE)
      return spec(*held)

    held = () if self.experts == 1 else ("experts",)
    return jax.tree.map(
      specs, tree, is_leaf=lambda x: isinstance(x, StackedLayer)
    )

  def local_ids(self, routed: "_Routed", matrices: "_Matrices") -> "_Routed":
    """The same tokens, their experts counted from the first one held here."""
    if self.experts == 1:
      return routed
    held = matrices.down.shape[0]
    first = held * lax.axis_index(MESH_AXES["experts"])
    return routed.replace(experts=routed.experts - first)

  def sum_experts(self, x_TD: Array) -> Array:
    """What the chosen experts add up to, for this device's share of tokens."""
    return x_TD if self.experts == 1 else reduce_scatter_tokens(x_TD)

  def sum_members(self, dmatrix: Array) -> Array:
    """A gradient's sum over members' devices, each of which has rounded it."""
    if not self.members:
      return dmatrix
    return sum_members(widen(dmatrix)).astype(dmatrix.dtype)


# --- The two loops ---------------------------------------------------------


@struct.dataclass
class _Routed:
  """Tokens and where they go; everything that has a row for each token."""

  x: Float[Array, "T D"]
  experts: Int[Array, "T A"]
  weights: Float[Array, "T A"]


@struct.dataclass
class _Matrices:
  """Of all experts; None stands for a gradient that nobody asked for."""

  gate_up: Float[Array, "E D 2*F"] | Adapted | None
  down: Float[Array, "E F D"] | Adapted | None


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class _Wanted:
  """What has a gradient."""

  gate_up: Parts
  down: Parts

  @classmethod
  def of(cls, matrices: _Matrices) -> "_Wanted":
    """By what is perturbed of a tree of primals."""

    def perturbed(tree):
      return any(x.perturbed for x in jax.tree.leaves(tree))

    def parts(one):
      if not isinstance(one, Adapted):
        return Parts(matrices=perturbed(one))
      return Parts(
        matrices=perturbed(one.matrices), adapter=perturbed((one.a, one.b))
      )

    return cls(gate_up=parts(matrices.gate_up), down=parts(matrices.down))

  @property
  def any(self) -> bool:
    """Whether there is a gradient that calls may share."""
    return self != _Wanted(gate_up=Parts(), down=Parts())

  def pick(self, matrices: _Matrices) -> _Matrices:
    """What has a gradient of all matrices."""
    return _Matrices(
      gate_up=self.gate_up.pick(matrices.gate_up),
      down=self.down.pick(matrices.down),
    )


def _forward(row_block, folded, routed: _Routed, matrices: _Matrices):
  """Every device multiplies by the experts that it holds."""
  sharding = _Sharding.of(matrices.down.shape[0], folded)
  call = functools.partial(_forward_part, row_block, sharding)
  specs = (sharding.tokens, sharding.matrices(matrices))
  summed = sharding.summed(routed.x.shape[0])
  return sharding.run(call, specs, summed)(routed, matrices)


def _forward_part(row_block, sharding, routed: _Routed, matrices: _Matrices):
  routed = sharding.local_ids(routed, matrices)
  x_TD, choices = routed.x, routed.experts.shape[1]
  plan = _Plan.of(routed.experts, matrices.down.shape[0], row_block)
  wide = wide_dtype(x_TD.dtype)
  weights = routed.weights.reshape(-1).astype(wide)

  def body(index, y_TD):
    expert, pairs = plan.rows(index, row_block)
    tokens = pairs // choices
    x_BD = _take(x_TD, tokens)
    gate_up = ExpertMap.of(matrices.gate_up, expert, x_TD.dtype)
    down = ExpertMap.of(matrices.down, expert, x_TD.dtype)
    y_BD = down(_swiglu(gate_up(x_BD)).astype(x_TD.dtype))
    y_BD = _take(weights, pairs)[:, None] * y_BD
    return y_TD.at[tokens].add(y_BD, mode="drop")

  y_TD = jnp.zeros(x_TD.shape, wide)
  y_TD = lax.fori_loop(0, plan.blocks[-1], body, y_TD)
  return sharding.sum_experts(y_TD).astype(x_TD.dtype)


def _backward(row_block, folded, wanted, routed, matrices, dy_TD):
  """Gradients of x, of the weights and of the matrices that are wanted."""
  sharding = _Sharding.of(matrices.down.shape[0], folded)
  call = functools.partial(_backward_part, row_block, sharding, wanted)
  dmatrices = sharding.matrices(wanted.pick(matrices))
  summed = sharding.summed(dy_TD.shape[0])
  return sharding.run(
    call,
    (sharding.tokens, sharding.matrices(matrices), sharding.tokens),
    ((summed, summed), dmatrices),
  )(routed, matrices, dy_TD)


def _backward_part(
  row_block, sharding, wanted: _Wanted, routed, matrices, dy_TD
):
  routed = sharding.local_ids(routed, matrices)
  x_TD, choices = routed.x, routed.experts.shape[1]
  plan = _Plan.of(routed.experts, matrices.down.shape[0], row_block)
  narrow, wide = x_TD.dtype, wide_dtype(x_TD.dtype)
  weights = routed.weights.reshape(-1).astype(wide)

  def body(index, carry):
    dx_TD, dweights, dgate_up, ddown = carry
    expert, pairs = plan.rows(index, row_block)
    tokens = pairs // choices
    x_BD, dy_BD = _take(x_TD, tokens), _take(dy_TD, tokens)
    w_B1 = _take(weights, pairs)[:, None]
    gate_up = ExpertMap.of(matrices.gate_up, expert, narrow)
    down = ExpertMap.of(matrices.down, expert, narrow)

    hidden, pull_back = jax.vjp(_swiglu, gate_up(x_BD))
    hidden = hidden.astype(narrow).astype(wide)  # as the product below took it
    dhidden, ddown_inner = down.pull(dy_BD)  # but for the weight
    (dgates,) = pull_back(w_B1 * dhidden)
    dgates = dgates.astype(narrow)
    dx_BD, dgate_up_inner = gate_up.pull(dgates)

    is_first = index == plan.blocks[expert]
    dgate_up = dgate_up.add(
      expert, is_first, gate_up, x_BD, dgates, dgate_up_inner
    )
    if wanted.down != Parts():
      weighted = (w_B1 * hidden).astype(narrow)
      ddown = ddown.add(expert, is_first, down, weighted, dy_BD, ddown_inner)
    dx_TD = dx_TD.at[tokens].add(dx_BD, mode="drop")
    dweights = dweights.at[pairs].set((hidden * dhidden).sum(-1), mode="drop")
    return dx_TD, dweights, dgate_up, ddown

  carry = (
    jnp.zeros(x_TD.shape, wide),
    jnp.zeros(weights.shape, wide),
    MapSums.zeros_like(matrices.gate_up, wanted.gate_up),
    MapSums.zeros_like(matrices.down, wanted.down),
  )
  carry = lax.fori_loop(0, plan.blocks[-1], body, carry)
  dx_TD, dweights, dgate_up, ddown = carry
  dweights_TA = dweights.reshape(routed.weights.shape)
  picked = wanted.pick(matrices)
  own = (
    sharding.sum_experts(dx_TD).astype(x_TD.dtype),
    sharding.sum_experts(dweights_TA).astype(routed.weights.dtype),
  )
  return own, _Matrices(
    gate_up=dgate_up.like(picked.gate_up, sharding.sum_members),
    down=ddown.like(picked.down, sharding.sum_members),
  )


# --- Members ---------------------------------------------------------------


@functools.cache
def _forward_members(row_block: int, folded: bool = False):
  """The forward pass with its own rule for a batch of members."""

  @custom_vmap
  def forward(routed, matrices):
    return _forward(row_block, folded, routed, matrices)

  @forward.def_vmap
  def rule(axis_size, batched, routed, matrices):
    if any_leaf(batched[1]):
      return one_by_one(forward, batched, (routed, matrices))
    routed = fold_members(give_member_axis(axis_size, batched[0], routed))
    together = _forward_members(row_block, members_divide(axis_size))
    return unfold_members(together(routed, matrices), axis_size), True

  return forward


@functools.cache
def _backward_members(row_block: int, wanted: _Wanted, folded: bool = False):
  """The backward pass, in which members share the matrices' gradient.

  Args:
    row_block: as in expert_mlp.
    wanted: what has a gradient.
    folded: whether the tokens are those of members that a mesh may deal.
  """

  def apart(own, matrices):
    routed, dy_TD = own
    return _backward(row_block, folded, wanted, routed, matrices, dy_TD)

  def together(members, own, matrices):
    call = _backward_members(row_block, wanted, members_divide(members))
    own, dmatrices = call(None, fold_members(own), matrices)
    return unfold_members(own, members), dmatrices

  return one_gradient_for_members(
    apart,
    together,
    several=one_by_one,
    shared_learns=wanted.any,
  )


# --- The function ----------------------------------------------------------


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _expert_mlp(row_block, x_TD, weights_TA, gate_up, down, experts_TA, member):
  del member  # of the backward pass
  routed = _Routed(x=x_TD, experts=experts_TA, weights=weights_TA)
  matrices = _Matrices(gate_up=gate_up, down=down)
  return _forward_members(row_block)(routed, matrices)


def _expert_mlp_fwd(
  row_block, x_TD, weights_TA, gate_up, down, experts_TA, member
):
  routed = _Routed(
    x=x_TD.value, experts=experts_TA.value, weights=weights_TA.value
  )
  value = lambda tree: jax.tree.map(lambda x: x.value, tree)
  matrices = _Matrices(gate_up=gate_up, down=down)
  matrices, wanted = value(matrices), _Wanted.of(matrices)
  for one, parts in (
    (matrices.gate_up, wanted.gate_up),
    (matrices.down, wanted.down),
  ):
    own = one.matrices if isinstance(one, Adapted) else one
    if parts.matrices and isinstance(own, StackedLayer):
      raise ValueError(
        f"a gradient of frozen experts {one.shape} was asked for: make them "
        "trainable (Model.split)"
      )
  y_TD = _forward_members(row_block)(routed, matrices)
  return y_TD, (value(member), routed, matrices, wanted)


def _expert_mlp_bwd(row_block, residuals, dy_TD):
  if isinstance(dy_TD, SymbolicZero):
    return (None,) * 6
  member, routed, matrices, wanted = residuals
  backward = _backward_members(row_block, wanted)
  (dx, dweights), dmatrices = backward(member, (routed, dy_TD), matrices)
  return dx, dweights, dmatrices.gate_up, dmatrices.down, None, None


_expert_mlp.defvjp(_expert_mlp_fwd, _expert_mlp_bwd, symbolic_zeros=True)


def expert_mlp(
  x_TD: Float[Array, "T D"],
  gate_up_EDF: Float[Array, "E D 2*F"],
  down_EFD: Float[Array, "E F D"],
  experts_TA: Int[Array, "T A"],
  weights_TA: Float[Array, "T A"],
  *,
  row_block: int = 256,
) -> Float[Array, "T D"]:
  """dense_expert_mlp with only the chosen experts' products.

  Differentiable in x, weights and the matrices, in reverse mode only. A
  matrix that is not differentiated costs nothing: no product, no buffer.

  Under jax.vmap over calls that share the matrices these are only more tokens
  of the forward pass, and of the backward pass where no matrix learns or they
  are members of one loss (Shared); otherwise they are pulled back one by one.

  Args:
    x_TD: tokens. Padding may stand among them: it is routed like the rest,
      changes nothing for the others and, while what comes out for it is
      ignored, adds exactly zero to every gradient. It must be finite.
    gate_up_EDF: [gate; up] side by side. Multiplied in the dtype of x.
    down_EFD: the way back. Either may be stored in another form that expands
      to it (see longstraw_jax.nf4), or be a StackedLayer; it then is a
      constant. Or it is Adapted, of any of these. Or it is Shared.
    experts_TA: ids, distinct within a token. An id outside [0, E) adds
      nothing, so that a device may hold a part of the experts.
    weights_TA: the mixture, float32 or wider.
    row_block: rows of one product. Every expert's run is padded to a multiple
      of it, so an expert with tokens wastes less than one block.

  Returns:
    y_TD in the dtype of x, summed in float32 or wider.
  """
  both = (gate_up_EDF, down_EFD)
  member = next((x.member for x in both if isinstance(x, Shared)), None)
  gate_up, down = (
    one.matrices if isinstance(one, Shared) else one for one in both
  )
  return _expert_mlp(
    row_block, x_TD, weights_TA, gate_up, down, experts_TA, member
  )
