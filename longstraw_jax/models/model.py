"""A language model as stages of repeated layer patterns, one scan a stage."""

from collections.abc import Callable
import dataclasses
import functools
from typing import Any

from flax import struct, traverse_util
import flax.linen as nn
import jax
from jax import lax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from longstraw_jax.checks import check_weights
from longstraw_jax.config import LayerSpec, ModelConfig
from longstraw_jax.models.contract import Choice, State, Update
from longstraw_jax.models.layers import NORMS, PROJECTION, beside
from longstraw_jax.models.registry import FFNS, MIXERS, build
from longstraw_jax.ops.experts import Shared, StackedLayer
from longstraw_jax.ops.logprobs import logits_of, token_logprobs
from longstraw_jax.ops.pages import (
  PAGE_ATTENTION,
  Segment,
  keeps_all_but_staged,
  on_host,
  over_staged,
  stored_struct,
)
from longstraw_jax.sharding import constrain, num_shards
from longstraw_jax.state import Pages, tree_zeros
from longstraw_jax.types import Span, Tree


@struct.dataclass
class Params:
  """Parameters by whether they learn; gradients exist for trainable only.

  Both are nested dicts and no leaf is in both. Stage parameters are stacked
  over repeats: stage_0/layer_1/mixer/q_proj/kernel is [L, D, ...].
  """

  trainable: dict
  frozen: dict

  def merged(self) -> dict:
    """All parameters in one nested dict."""
    flat = traverse_util.flatten_dict(self.trainable)
    flat |= traverse_util.flatten_dict(self.frozen)
    return traverse_util.unflatten_dict(flat)


def split_params(tree: dict, trainable: Callable[[str], bool]) -> Params:
  """Sorts leaves by `trainable(path)`, paths written a/b/c."""
  flat = traverse_util.flatten_dict(tree, sep="/")
  chosen = {path for path in flat if trainable(path)}
  pick = lambda keep: traverse_util.unflatten_dict(
    {path: x for path, x in flat.items() if (path in chosen) == keep}, sep="/"
  )
  return Params(trainable=pick(True), frozen=pick(False))


@struct.dataclass
class Hidden:
  """What one call through all layers gives.

  Attributes:
    x_TD: final hidden states, normalised.
    rows: this call's rows, stage -> layer -> name -> [L, ..., T, H]; where
      they were written, the buffers.
    carry: the new carry, stage -> layer -> [L, ...].
    taps: of every segment, as handed on.
    choices: discrete choices that the live weights make, stage -> layer ->
      name -> [L, T, ...].
  """

  x_TD: Float[Array, "T D"]
  rows: Tree
  carry: Tree
  taps: tuple
  choices: Tree


class Block(nn.Module):
  """h += mixer(norm(h)); h += ffn(norm(h))."""

  mixer: nn.Module
  ffn: nn.Module | None
  norm: str
  norm_eps: float
  param_dtype: str

  @nn.compact
  def __call__(
    self, x_TD: Float[Array, "T D"], span: Span, state: State
  ) -> tuple[Float[Array, "T D"], Update]:
    norm = lambda name: NORMS[self.norm](
      self.norm_eps, self.param_dtype, name=name
    )
    y_TD, update = self.mixer(norm("mixer_norm")(x_TD), span, state)
    x_TD = x_TD + y_TD
    if self.ffn is None:
      return x_TD, update
    normed = norm("ffn_norm")(x_TD)
    if not getattr(self.ffn, "chooses", False):
      return x_TD + self.ffn(normed), update
    y_TD, chosen = self.ffn(normed, state.choices)
    return x_TD + y_TD, update.replace(choices=update.choices | chosen)

  @nn.nowrap
  def stacked(self) -> tuple[tuple[str, ...], ...]:
    """Paths of parameters that, frozen, are read in the stack of all layers."""
    return tuple(("ffn", name) for name in getattr(self.ffn, "stacked", ()))

  @nn.nowrap
  def declared_choices(self) -> dict[str, Choice]:
    """What the layer's modules choose for every token, by name."""
    declared = {}
    for module in (self.mixer, self.ffn):
      declared |= getattr(module, "declared_choices", dict)()
    return declared

  @nn.nowrap
  def names(self, attribute: str, path: str) -> bool:
    """Whether a module's `attribute` names the parameter at path a/b/c."""
    part, _, rest = path.partition("/")
    module = {"mixer": self.mixer, "ffn": self.ffn}.get(part)
    return rest.startswith(tuple(getattr(module, attribute, ())))


def make_block(config: ModelConfig, spec: LayerSpec) -> Block:
  """The unbound module of one layer."""
  return Block(
    mixer=build(MIXERS, spec.mixer, config),
    ffn=None if spec.ffn is None else build(FFNS, spec.ffn, config),
    norm=config.norm,
    norm_eps=config.norm_eps,
    param_dtype=config.param_dtype,
  )


# Writes one layer's new rows into buffers in host memory:
# (name -> [L, ..., S, H], name -> [..., T, H], layer) -> the buffers.
Writer = Callable[[dict, dict, Array], dict]


def _remat(apply: Callable, saved: str, staged: bool) -> Callable:
  """Recomputes in the backward pass what `saved` does not keep.

  Never kept are rows of pages in host memory, of layers that stage them: they
  are fetched again.
  """
  if staged:
    apply = over_staged(apply)
  if saved == "everything":
    if not staged:
      return apply
    return jax.checkpoint(apply, prevent_cse=False, policy=keeps_all_but_staged)
  names = [PAGE_ATTENTION]
  if saved == "projections":
    names.append(PROJECTION)
  policy = jax.checkpoint_policies.save_only_these_names(*names)
  return jax.checkpoint(apply, prevent_cse=False, policy=policy)


def _marked_experts(blocks, params, stacked, layer, member) -> Tree:
  """A layer's parameters with the experts as expert_mlp takes them.

  Frozen ones are read in the stack of all layers; those that learn, or have an
  adapter that does, are shared by the members where there are any.
  """
  flat = traverse_util.flatten_dict(params)
  for j, block in enumerate(blocks):
    for path in block.stacked():
      path = (f"layer_{j}", *path)
      if path in stacked:
        flat[path] = StackedLayer(stacked[path], layer)
      adapter = (*path[:-1], beside(path[-1]), "lora_a")
      learns = path not in stacked or adapter in flat
      if member is not None and learns:
        flat[path] = Shared(flat[path], member)
  return traverse_util.unflatten_dict(flat)


@dataclasses.dataclass(frozen=True)
class Model:
  """The functions of one configuration; holds no arrays, hashable.

  Trees of state and parameters have one entry per stage, `stage_i`, and in it
  one per layer of the pattern, `layer_j`.
  """

  config: ModelConfig
  # The unbound module of every layer of every pattern. Part of the hash: a
  # mixer registered anew under its name makes another model.
  blocks: tuple[tuple[Block, ...], ...] = dataclasses.field(
    init=False, repr=False
  )

  def __post_init__(self):
    blocks = tuple(
      tuple(make_block(self.config, spec) for spec in stage.pattern)
      for stage in self.config.stages
    )
    object.__setattr__(self, "blocks", blocks)

  @classmethod
  def from_pretrained(cls, path, **options) -> tuple["Model", Params]:
    """The model of a checkpoint, a folder or a .gguf file, and its weights.

    Args:
      path: as `longstraw_jax.load_pretrained` takes it.
      **options: of `load_pretrained`.
    """
    # Reading files knows models, not the other way round.
    from longstraw_jax.weights.load import load_pretrained

    return load_pretrained(path, **options)

  def layers(self):
    """Yields (stage name, layer name, block, repeats) from bottom to top."""
    for i, stage in enumerate(self.config.stages):
      for j, block in enumerate(self.blocks[i]):
        yield f"stage_{i}", f"layer_{j}", block, stage.repeats

  def init(
    self, key: jax.Array, trainable: Callable[[str], bool] = lambda path: True
  ) -> Params:
    """Random parameters, stacked over the repeats of each stage.

    Args:
      key: a typed key.
      trainable: as in `split`.
    """
    config = self.config
    keys = iter(jax.random.split(key, config.num_layers + 2))
    matrix = nn.initializers.normal(config.embed_dim**-0.5)
    shape = (config.vocab_size, config.embed_dim)
    first = {"zero_centred": jnp.zeros, "plain": jnp.ones}[config.norm]
    tree: dict[str, Any] = {
      "embed": matrix(next(keys), shape, config.param_dtype),
      "final_norm": first(config.embed_dim, config.param_dtype),
    }
    head = next(keys)
    if not config.tie_embeddings:
      tree["head"] = matrix(head, shape[::-1], config.param_dtype)
    x_TD = jnp.zeros((1, config.embed_dim), config.dtype)
    span = Span(positions=jnp.zeros(1, jnp.int32), length=jnp.int32(1))
    for stage, layer, block, repeats in self.layers():
      state = State(pages=(), carry=tree_zeros(self._shapes(block, 1)[1]))
      make = lambda key, b=block, s=state: b.init(key, x_TD, span, s)["params"]
      stacked = jnp.stack([next(keys) for _ in range(repeats)])
      tree.setdefault(stage, {})[layer] = jax.vmap(make)(stacked)
    return self.split(tree, trainable)

  def split(
    self, tree: dict, trainable: Callable[[str], bool] = lambda path: True
  ) -> Params:
    """Sorts leaves into those that learn and those that do not.

    Args:
      tree: all parameters.
      trainable: which leaves learn, by their path a/b/c. Those that their
        module calls constant never do.
    """
    return split_params(
      tree, lambda path: trainable(path) and not self._names("constants", path)
    )

  def is_precise(self, path: str) -> bool:
    """Whether a module asks that the parameter at path a/b/c not be rounded."""
    return self._names("precise", path)

  def _names(self, attribute: str, path: str) -> bool:
    stage, _, rest = path.partition("/")
    layer, _, rest = rest.partition("/")
    if not layer:
      return False
    at = lambda name: int(name.rpartition("_")[2])
    return self.blocks[at(stage)][at(layer)].names(attribute, rest)

  def _shapes(self, block: Block, tokens: int):
    return block.mixer.state_shapes(tokens, self.config.dtype)

  def state_shapes(self, tokens: int) -> tuple[Tree, Tree]:
    """Shapes of all rows of `tokens` tokens, as stored, and of all carries.

    Rows without a gradient (constant_rows) keep the model's dtype.
    """
    config = self.config
    rows: dict[str, dict] = {}
    carry: dict[str, dict] = {}
    for stage, layer, block, repeats in self.layers():
      new_rows, new_carry = self._shapes(block, tokens)
      constant = getattr(block.mixer, "constant_rows", ())
      new_rows = {
        name: x if name in constant else stored_struct(x, config.page_dtype)
        for name, x in new_rows.items()
      }
      stacked = jax.tree.map(
        lambda x, n=repeats: jax.ShapeDtypeStruct((n, *x.shape), x.dtype),
        (new_rows, new_carry),
      )
      rows.setdefault(stage, {})[layer] = stacked[0]
      carry.setdefault(stage, {})[layer] = stacked[1]
    return rows, carry

  def declared_choices(self) -> dict[str, dict[str, dict]]:
    """What every layer chooses, stage -> layer -> name -> (Choice, repeats).

    Stages and layers that choose nothing are not among them.
    """
    out: dict[str, dict] = {}
    for stage, layer, block, repeats in self.layers():
      declared = block.declared_choices()
      if declared:
        out.setdefault(stage, {})[layer] = {
          name: (kind, repeats) for name, kind in declared.items()
        }
    return out

  def gradient_rows(self, rows: Tree) -> Tree:
    """The part of a tree of rows, or of their taps, that has a gradient."""
    out: dict[str, dict] = {}
    for stage, layer, block, _ in self.layers():
      constant = getattr(block.mixer, "constant_rows", ())
      kept = rows[stage][layer].items()
      kept = {name: x for name, x in kept if name not in constant}
      out.setdefault(stage, {})[layer] = kept
    return out

  def hidden(
    self,
    params: Params,
    tokens: Int[Array, "T"],
    span: Span,
    segments: tuple[Pages, ...],
    carry: Tree,
    choices: Tree | None = None,
    write: Writer | None = None,
    *,
    member: Int[Array, ""] | None = None,
  ) -> Hidden:
    """Runs one call's tokens through every layer.

    Pages in host memory are on the device one layer at a time.

    Args:
      params: the parameters.
      tokens: ids; real ones first.
      span: their positions.
      segments: pages before them, oldest first.
      carry: of every layer, before them.
      choices: recorded discrete choices to follow, stage -> layer -> name ->
        [L, T, ...]; what is missing is chosen afresh.
      write: how every layer writes its rows into the last segment's buffers,
        which are in host memory; None hands the rows back. A loop around this
        call may not both carry host buffers and have a layer scan inside read
        them as a constant: XLA for GPUs then loses track of where they are.
      member: the member's number, under a jax.vmap over members of one loss
        that is differentiated outside it (see ops/members.py).
    """
    tree = params.merged()
    x_TD = tree["embed"][tokens].astype(self.config.dtype)
    x_TD = constrain(x_TD, "tokens", None)
    taps = tuple(segment.taps for segment in segments)
    rows, new_carry, chosen = {}, {}, {}
    for i, stage in enumerate(self.config.stages):
      name = f"stage_{i}"
      body = functools.partial(self._layer, self.blocks[i], span, member)
      views = [s.replace(rows=s.rows[name], taps=None) for s in segments]
      own_taps = tuple(None if tap is None else tap[name] for tap in taps)
      follow = {} if choices is None else choices.get(name, {})
      scanned, stacked = self._split_stacked(
        i, tree[name], params.frozen.get(name, {})
      )
      index = jnp.arange(stage.repeats, dtype=jnp.int32)
      written = None if write is None else views[-1].rows
      (x_TD, own_taps, written), outputs = lax.scan(
        functools.partial(body, stacked, views, write),
        (x_TD, own_taps, written),
        (scanned, carry[name], follow, index),
      )
      rows[name], new_carry[name], chosen[name] = outputs
      if write is not None:
        rows[name] = written
      taps = tuple(
        None if tap is None else tap | {name: own}
        for tap, own in zip(taps, own_taps, strict=True)
      )
    norm = NORMS[self.config.norm](
      self.config.norm_eps, self.config.param_dtype
    )
    weight = {"params": {"weight": tree["final_norm"]}}
    x_TD = norm.apply(weight, x_TD)
    return Hidden(x_TD, rows, new_carry, taps, chosen)

  def _split_stacked(
    self, stage: int, tree: Tree, frozen: Tree
  ) -> tuple[Tree, dict]:
    """A stage's parameters that the scan cuts, and by path those it does not.

    The latter are frozen, so that no gradient has to be stacked, and their
    experts can be shared out, so that no device needs them all.
    """
    frozen = traverse_util.flatten_dict(frozen)
    flat = traverse_util.flatten_dict(tree)
    stacked = {
      (f"layer_{j}", *path): flat.pop((f"layer_{j}", *path))
      for j, block in enumerate(self.blocks[stage])
      for path in block.stacked()
      if (f"layer_{j}", *path) in frozen
      and frozen[(f"layer_{j}", *path)].shape[1] % num_shards("experts") == 0
    }
    return traverse_util.unflatten_dict(flat), stacked

  def _layer(
    self, blocks, span, member, stacked, views, write, running, inputs
  ):
    """One repeat of a stage's pattern; the scan's body."""
    x_TD, taps, written = running
    if write is not None:
      views = [*views[:-1], views[-1].replace(rows=written)]
    params, carry, choices, index = inputs
    params = _marked_experts(blocks, params, stacked, index, member)
    rows, new_carry, chosen, shared = {}, {}, {}, {}
    for j, block in enumerate(blocks):
      name = f"layer_{j}"
      pages = tuple(
        Segment(
          rows=view.rows[name],
          tap=None if tap is None else tap[name],
          layer=index,
          length=view.length,
          start=view.start,
          member=member,
          striping=view.striping,
          dtype=self.config.dtype if self.config.page_dtype else None,
        )
        for view, tap in zip(views, taps, strict=True)
      )
      staged = any(on_host(segment.rows) for segment in pages)
      apply = _remat(block.apply, self.config.saved, staged)
      state = State(
        pages=pages,
        carry=carry[name],
        shared=shared,
        choices=choices.get(name, {}),
      )
      x_TD, update = apply({"params": params[name]}, x_TD, span, state)
      x_TD = constrain(x_TD, "tokens", None)
      rows[name], new_carry[name] = update.rows, update.carry
      if write is not None:
        rows[name] = {}
        own = write(written[name], update.rows, index)
        written = written | {name: own}
      chosen[name] = update.choices
      shared = shared | update.shared
      taps = tuple(
        None if tap is None else tap | {name: own}
        for tap, own in zip(taps, update.taps, strict=True)
      )
    return (x_TD, taps, written), (rows, new_carry, chosen)

  def _head(self, params: Params, dtype) -> Float[Array, "D V"]:
    tree = params.merged()
    if self.config.tie_embeddings:
      return tree["embed"].astype(dtype).T
    return tree["head"].astype(dtype)

  def logprobs(
    self,
    params: Params,
    hidden_TD: Float[Array, "T D"],
    targets: Int[Array, "T"],
    temperature: Float[Array, ""] | None = None,
  ) -> tuple[Float[Array, "T"], Float[Array, "T"]]:
    """Log-probability of each target and entropy of its distribution.

    Of the policy whose logits are divided by a temperature; None divides by
    nothing.
    """
    head = self._head(params, hidden_TD.dtype)
    block = self.config.logprob_block
    return token_logprobs(hidden_TD, head, targets, block, temperature)

  def logits(
    self, params: Params, hidden_TD: Float[Array, "T D"]
  ) -> Float[Array, "T V"]:
    """Logits of few tokens, as sampling needs them."""
    return logits_of(hidden_TD, self._head(params, hidden_TD.dtype))


def sequence_logprobs(
  model: Model, params: Params, tokens: Int[Array, "T"]
) -> Float[Array, "T-1"]:
  """log pi(tokens[t + 1] | tokens[: t + 1]) in one conventional pass.

  No state, no chunks, differentiable by plain jax.grad: the oracle that
  everything else is compared with. Float32 or wider.
  """
  return sequence_scores(model, params, tokens)[0]


def sequence_scores(
  model: Model, params: Params, tokens: Int[Array, "T"]
) -> tuple[Float[Array, "T-1"], Float[Array, "T-1"]]:
  """sequence_logprobs and the entropy at every position."""
  check_weights(model.config, params.merged())
  inputs, targets = tokens[:-1], tokens[1:]
  length = inputs.shape[0]
  span = Span(
    positions=jnp.arange(length, dtype=jnp.int32), length=jnp.int32(length)
  )
  carry = tree_zeros(model.state_shapes(1)[1])
  out = model.hidden(params, inputs, span, (), carry)
  return model.logprobs(params, out.x_TD, targets)
