"""Branch replay: the members of a group, one at a time, over one prompt."""

import functools

import jax
from jax import lax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from longstraw_jax.checks import (
  check_chunk_size,
  check_one_prompt,
  check_responses,
  check_temperature,
  check_weights,
)
from longstraw_jax.choices import response_choices
from longstraw_jax.group_checks import check_same_prompt
from longstraw_jax.models.model import Model, Params
from longstraw_jax.ops.pages import (
  on_host,
  refuse_host_cotangent,
  wide_zeros,
)
from longstraw_jax.sharding import constrain, num_shards
from longstraw_jax.staleness import check_fresh, if_fresh
from longstraw_jax.state import Pages, PromptState, fill_rows, tree_zeros
from longstraw_jax.types import Tree
from longstraw_jax.walk import (
  Gradients,
  Job,
  walk_backward,
  walk_forward,
  zero_gradients,
)


def replay(
  model: Model,
  params: Params,
  state: PromptState,
  responses: Int[Array, "G R"],
  lengths: Int[Array, "G"],
  *,
  block_size: int | None = None,
  members_at_once: int = 1,
  choices: Tree | None = None,
  temperature: Float[Array, ""] | float | None = None,
  allow_stale: bool = False,
  prompt_id: Int[Array, ""] | int | None = None,
) -> Float[Array, "G R"]:
  """log pi(responses[g, t] given prompt and responses[g, :t]), [G, R].

  Zero from lengths[g] on. Differentiable in params and, by its grad_scope, in
  the state and so in the prompt. A lax.map over the members runs forward; the
  backward pass runs them again one by one and threads a single accumulator of
  the prompt's pages. Forward-mode differentiation is refused.

  Args:
    model: the model.
    params: its parameters.
    state: of the prompt, from capture with the same parameters.
    responses: token ids [G, R]; ids behind lengths[g] are ignored.
    lengths: real tokens of each member, at least 1.
    block_size: tokens of a response processed at once; R by default. Longer
      responses are walked block by block against their own pages.
    members_at_once: members replayed together, on every device that has
      members of its own; memory grows with it.
    choices: recorded ones to follow, see Group.choices; the prompt's are
      capture's.
    temperature: scores the policy whose logits are divided by it, as
      Group.temperature; None for 1.
    allow_stale: no warning of a constant state of other weights. A state that
      passes a gradient on must be of these: under jax.jit, where values cannot
      be refused, it gives NaN.
    prompt_id: the id of the prompt that the responses were made for, which the
      state must carry if it carries one.

  Returns:
    [G, R] in float32 or wider.

  Raises:
    ValueError: empty or over-long responses, bad sizes, ids outside the
      vocabulary, a temperature that is not positive, a state of other weights
      or of another prompt.
  """
  return replay_scores(
    model,
    params,
    state,
    responses,
    lengths,
    block_size=block_size,
    members_at_once=members_at_once,
    choices=choices,
    temperature=temperature,
    allow_stale=allow_stale,
    prompt_id=prompt_id,
  )[0]


def replay_scores(
  model: Model,
  params: Params,
  state: PromptState,
  responses: Int[Array, "G R"],
  lengths: Int[Array, "G"],
  *,
  block_size: int | None = None,
  members_at_once: int = 1,
  choices: Tree | None = None,
  temperature: Float[Array, ""] | float | None = None,
  allow_stale: bool = False,
  prompt_id: Int[Array, ""] | int | None = None,
) -> tuple[Float[Array, "G R"], Float[Array, "G R"]]:
  """`replay`, and the entropy of the distribution each token came from."""
  check_one_prompt(state)
  check_weights(model.config, params.merged())
  check_same_prompt(state=state.prompt_id, responses=prompt_id)
  check_responses(responses, lengths, None, model.config.vocab_size)
  check_replay_sizes(block_size, members_at_once)
  check_temperature(temperature)
  if temperature is not None:
    temperature = jnp.asarray(temperature, jnp.result_type(float))
  responses = jnp.asarray(responses, jnp.int32)
  choices = response_choices(
    model, choices, responses.shape, lengths, state.length
  )
  lengths = jnp.asarray(lengths, jnp.int32)
  block_size = block_size or responses.shape[1]
  seen = check_fresh(params, state, allow_stale)
  if seen:
    state = state.replace(fingerprint=None)
  scores = _replay(
    model,
    min(block_size, responses.shape[1]),
    members_at_once,
    params,
    state,
    responses,
    lengths,
    choices,
    temperature,
  )
  return scores if seen else if_fresh(params, state, scores)


def check_replay_sizes(block_size: int | None, members_at_once: int) -> None:
  """Refuses sizes below 1."""
  if block_size is not None:
    check_chunk_size("block_size", block_size)
  check_chunk_size("members_at_once", members_at_once)


def member_batches(members_at_once: int, tree: Tree) -> Tree:
  """[G, ...] leaves as [batches, M, ...], padded with zeros; as is if M = 1.

  M counts `members_at_once` on every device that replays members of its own.
  A padding member has length 0: it scores nothing and its gradient is zero.
  """
  shards = num_shards("members")
  if members_at_once * shards == 1:
    return tree

  def split(x):
    size = x.shape[0]
    at_once = min(members_at_once * shards, size + -size % shards)
    x = jnp.pad(x, ((0, -size % at_once),) + ((0, 0),) * (x.ndim - 1))
    x = x.reshape(-1, at_once, *x.shape[1:])
    return constrain(x, None, "members", *(None,) * (x.ndim - 2))

  return jax.tree.map(split, tree)


def branch_job(
  state: PromptState,
  responses: Int[Array, "*M R"],
  lengths: Int[Array, "*M"],
  choices: Tree | None,
  block: int,
  temperature: Float[Array, ""] | None = None,
) -> Job:
  """The walk over one member, or a batch: last prompt token first."""
  padding = -responses.shape[-1] % block
  pad = lambda x: jnp.pad(x, ((0, 0),) * (x.ndim - 1) + ((0, padding),))
  last = jnp.broadcast_to(state.last_token, (*responses.shape[:-1], 1))
  tokens = jnp.concatenate([last, responses[..., :-1]], axis=-1)
  return Job(
    tokens=pad(tokens),
    targets=pad(responses),
    length=lengths,
    start=state.length,
    block=block,
    choices=jax.tree.map(
      lambda x: jnp.pad(x, ((0, 0),) * (x.ndim - 2) + ((0, padding), (0, 0))),
      choices,
    ),
    temperature=temperature,
    batched=responses.ndim == 2,
  )


def prompt_pages(state: PromptState, taps: Tree | None) -> tuple[Pages, ...]:
  """The prompt's pages as the segment before every response."""
  rows = lax.stop_gradient(state.pages)
  return (
    Pages(
      rows=rows,
      taps=taps,
      length=state.length,
      start=jnp.int32(0),
      striping=state.striping,
    ),
  )


def entry_carry(state: PromptState, job: Job) -> Tree:
  """The prompt's carry, once or for every member."""
  if not job.batched:
    return state.carry
  shape = job.member_shape
  return jax.tree.map(
    lambda x: jnp.broadcast_to(x, (*shape, *x.shape)), state.carry
  )


def score_members(
  model: Model,
  block: int,
  members_at_once: int,
  params: Params,
  state: PromptState,
  responses: Int[Array, "G R"],
  lengths: Int[Array, "G"],
  choices: Tree | None,
  temperature: Float[Array, ""] | None,
) -> tuple[tuple[Float[Array, "G R"], Float[Array, "G R"]], Array | None]:
  """Scores every member without a graph.

  Returns:
    ((log-probabilities, entropy), share of layers [G, R] that would have
    chosen otherwise than `choices`; None without any).
  """
  priors = prompt_pages(state, None)

  def batch(members):
    job = branch_job(state, *members, block, temperature)
    carry = entry_carry(state, job)
    walked = walk_forward(model, params, priors, carry, job, save_carries=False)
    return (walked.logprobs, walked.entropy), walked.changed

  batches = member_batches(members_at_once, (responses, lengths, choices))
  group_size, room = responses.shape
  out = lax.map(batch, batches)
  flat = lambda x: x.reshape(-1, x.shape[-1])[:group_size, :room]
  return jax.tree.map(flat, out)


def replay_batch(
  model: Model,
  params: Params,
  state: PromptState,
  job: Job,
  dscores: tuple[Array, Array],
  sums: Gradients,
) -> Gradients:
  """Replays one member, or one batch, with its cotangents into the sums.

  Args:
    model: the model.
    params: its parameters.
    state: of the prompt.
    job: from branch_job.
    dscores: cotangents of log-probabilities and entropy, [*M, R].
    sums: parameter gradients, the accumulator of the prompt's pages (or None)
      and the cotangent of the prompt's carry (empty where none is wanted).
  """
  priors = prompt_pages(state, None)
  carry = entry_carry(state, job)
  if job.blocks == 1:
    # The entry carry is the prompt's, and no block reads the member's rows.
    rows, saved = {}, jax.tree.map(lambda x: x[None], carry)
  else:
    walked = walk_forward(model, params, priors, carry, job, save_carries=True)
    rows, saved = walked.rows, walked.saved_carries
  room = job.tokens.shape[-1]
  pad = lambda x: jnp.pad(
    x, ((0, 0),) * (x.ndim - 1) + ((0, room - x.shape[-1]),)
  )
  wanted = sums.carry
  branch = sums.replace(carry=tree_zeros(carry))
  branch, _ = walk_backward(
    model,
    params,
    priors,
    job,
    rows,
    saved,
    jax.tree.map(pad, dscores),
    None,
    branch,
  )
  if not state.differentiated:
    return branch.replace(carry=wanted)
  members = lambda x: x.sum(0) if job.batched else x
  total = jax.tree.map(lambda w, x: w + members(x), wanted, branch.carry)
  return branch.replace(carry=total)


def replay_members(
  model: Model,
  block: int,
  members_at_once: int,
  params: Params,
  state: PromptState,
  responses: Int[Array, "G R"],
  lengths: Int[Array, "G"],
  choices: Tree | None,
  temperature: Float[Array, ""] | None,
  dscores: tuple[Float[Array, "G R"], Float[Array, "G R"]],
  page_grad_dtype=None,
) -> Gradients:
  """Replays every member in turn into one set of sums.

  Args:
    model: the model.
    block: tokens of a response processed at once.
    members_at_once: members replayed together.
    params: the parameters.
    state: of the prompt.
    responses: token ids.
    lengths: real tokens of each member.
    choices: recorded ones to follow, or None.
    temperature: that the logits are divided by, or None.
    dscores: cotangents of log-probabilities and entropy.
    page_grad_dtype: of the accumulator of the prompt's pages; None takes
      float32 or wider.
  """
  sums = zero_sums(model, params, state, page_grad_dtype)

  def one(sums, members):
    responses, lengths, choices, *dscores = members
    job = branch_job(state, responses, lengths, choices, block, temperature)
    sums = replay_batch(model, params, state, job, tuple(dscores), sums)
    return sums, None

  members = (responses, lengths, choices, *dscores)
  batches = member_batches(members_at_once, members)
  return lax.scan(one, sums, batches)[0]


def zero_sums(
  model: Model, params: Params, state: PromptState, page_grad_dtype=None
) -> Gradients:
  """Fresh sums for a group; pages and carry only where the scope wants them."""
  pages, carry = None, {}
  if state.differentiated:
    pages = wide_zeros(model.gradient_rows(state.pages), page_grad_dtype)
    carry = tree_zeros(state.carry)
  return Gradients(params=zero_gradients(params), priors=(pages,), carry=carry)


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _replay(
  model,
  block,
  members_at_once,
  params,
  state,
  responses,
  lengths,
  choices,
  temperature,
):
  members = (responses, lengths, choices, temperature)
  return score_members(model, block, members_at_once, params, state, *members)[
    0
  ]


def _replay_fwd(model, block, members_at_once, params, state, *members):
  if model.config.page_dtype is not None and state.differentiated:
    raise ValueError(
      f"pages of page_dtype={model.config.page_dtype!r} cannot carry a "
      "cotangent from replay to capture: use group_gradient, which keeps it in "
      "float32"
    )
  if state.differentiated and on_host(state.pages):
    refuse_host_cotangent()
  out = _replay(model, block, members_at_once, params, state, *members)
  return out, (params, state, *members)


def _replay_bwd(model, block, members_at_once, residuals, cotangents):
  params, state, *members = residuals
  sums = replay_members(
    model, block, members_at_once, params, state, *members, cotangents
  )
  cast = lambda x, like: x.astype(like.dtype)
  trainable = jax.tree.map(cast, sums.params, params.trainable)
  dstate = None
  if state.differentiated:
    dstate = PromptState(
      pages=fill_rows(tree_zeros(state.pages), sums.priors[0]),
      carry=sums.carry,
      saved_carries=None,
      last_token=None,
      length=None,
      first_chunk=None,
      step=None,
      prompt_id=None,
      grad_scope=state.grad_scope,
      chunk_size=state.chunk_size,
      striping=state.striping,
      fingerprint=None,
    )
  dparams = Params(trainable=trainable, frozen=None)
  return dparams, dstate, None, None, None, None


_replay.__wrapped__.defvjp(_replay_fwd, _replay_bwd)
