"""Every gradient leaf of every scope against plain jax.grad.

What costs a compiled program (chunk size, saved activations, block size,
members at once, scope, form, dtype, room of a response) is combined by a
covering array: every pair of values by default, every triple in the slow run.
What costs none (prompt and response lengths, masks, chunks of a tail) is run
through inside each program.
"""

from collections.abc import Iterator
import dataclasses
import functools
import importlib
import itertools
from unittest import mock

from absl.testing import parameterized
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from longstraw_jax import (
  PRESETS,
  Group,
  Model,
  PolicyObjective,
  capture,
  group_gradient,
  replay,
  replay_scores,
  sequence_logprobs,
)
from longstraw_jax.testing.baselines import (
  bounded_scores,
  constant_tokens,
  conventional_gradient,
)
from longstraw_jax.testing.compare import assert_gradients_close, leaf_errors

TOLERANCE = {"float64": 1e-12, "float32": 1e-5}
PROMPTS = (1, 2, 63, 64, 65, 129, 300)
RESPONSES = {1: (1,), 5: (2, 3, 5), 64: (64,)}  # room -> longest response
CAPACITY = 300
GROUP_SIZE = 3
TAILS = (1, 2, 0, 1000)

FACTORS = {
  "chunk": (1, 3, 64, 100, "P"),
  "saved": ("inputs", "projections", "everything"),
  "scope": ("full", "tail", "response_only"),
  "room": (1, 5, 64),
  "form": ("composed", "group_gradient"),
  "dtype": ("float64", "float32"),
  "split": (False, True),
  "members": (1, 2),
  "objective": ("coupling", "policy"),
}


def tuples_of(row: dict, strength: int) -> set[tuple]:
  """Every choice of `strength` factors of a row, with their values."""
  return set(itertools.combinations(sorted(row.items()), strength))


def all_tuples(factors: dict, strength: int) -> set[tuple]:
  names = itertools.combinations(sorted(factors), strength)
  return {
    tuple(zip(chosen, values, strict=True))
    for chosen in names
    for values in itertools.product(*(factors[name] for name in chosen))
  }


def covering_rows(factors: dict, strength: int) -> list[dict]:
  """A covering array: greedy, the same on every run.

  Each row starts from the first tuple that no row has yet and gives every
  other factor the value that covers most of those still missing.
  """
  missing = dict.fromkeys(sorted(all_tuples(factors, strength), key=repr))
  rows = []
  while missing:
    row = dict(next(iter(missing)))
    for name in factors:
      if name in row:
        continue
      gains = {
        value: sum(
          found in missing for found in tuples_of(row | {name: value}, strength)
        )
        for value in factors[name]
      }
      row[name] = max(gains, key=gains.get)
    for found in tuples_of(row, strength):
      missing.pop(found, None)
    rows.append(row)
  return rows


@dataclasses.dataclass(frozen=True)
class Coupling:
  """Nonlinear, and members are coupled by a product and a squared mean."""

  def __call__(self, logprobs, entropy, group):
    terms = jnp.tanh(logprobs) + 0.1 * logprobs**2 + 0.05 * entropy
    totals = jnp.where(group.loss_mask, terms, 0.0).sum(1)
    coupled = 0.1 * jnp.tanh(totals).prod() + 0.1 * totals.mean() ** 2
    return (totals * group.advantages).sum() + coupled, {}


OBJECTIVES = {
  "coupling": Coupling(),
  "policy": PolicyObjective(kl_coef=0.1, entropy_coef=0.05, clip_low=0.9),
}


@functools.cache
def make_model(dtype: str, saved: str = "projections", name: str = "tiny"):
  config = dataclasses.replace(
    PRESETS["tiny-hybrid"],
    name=name,
    dtype=dtype,
    param_dtype=dtype,
    saved=saved,
    norm_eps=1e-3,
  )
  return Model(config)


@functools.cache
def make_params(dtype: str):
  """The same numbers in both dtypes, and no norm at its initial weight.

  Embeddings near 1 and a norm_eps of 1e-3 keep the problem well conditioned:
  where a query and a key of a delta head happen to be nearly orthogonal, the
  norm of its small output would magnify every rounding, and plain jax.grad in
  float32 be off by 1e-5 itself, see test_plain_autodiff_reaches_the_tolerance.
  """
  params = make_model("float32").init(jax.random.key(1))
  random = np.random.default_rng(5)

  def change(path, x):
    if "embed" in str(path):
      return 8 * x
    if "weight" in str(path) or "final_norm" in str(path):
      return x + 0.1 * random.normal(size=x.shape).astype(np.float32)
    return x

  params = jax.tree_util.tree_map_with_path(change, params)
  return jax.tree.map(lambda x: x.astype(dtype), params)


def ids(seed: int, *shape: int):
  return np.random.default_rng(seed).integers(0, 61, shape).astype(np.int32)


PROMPT = ids(0, CAPACITY + 1)


def make_group(longest: int, room: int, excluded: bool) -> Group:
  """Three members of unequal lengths; one token of each may be excluded."""
  lengths = np.array([longest, (longest + 1) // 2, max(longest - 1, 1)])
  responses = ids(1, GROUP_SIZE, 64)[:, :room]
  inside = np.arange(room) < lengths[:, None]
  mask = inside.copy()
  if excluded:
    mask[0, longest // 3] = longest == 1
    mask[2, 0] = False
  random = np.random.default_rng(2)
  near = lambda: jnp.asarray(-4 + random.normal(size=(GROUP_SIZE, 64)))
  return Group.create(
    responses,
    lengths,
    loss_mask=mask,
    rewards=jnp.array([1.0, 0.0, 0.5]),
    advantages=jnp.array([1.0, -0.7, 0.4]),
    old_logprobs=near()[:, :room],
    sampling_logprobs=near()[:, :room],
    ref_logprobs=near()[:, :room],
  )


_oracle_scores = jax.jit(bounded_scores, static_argnums=0)


@functools.cache
def oracle(
  length: int,
  boundary,
  longest: int,
  excluded: bool,
  name: str,
  dtype: str = "float64",
):
  """Loss and gradient; boundary None is whole rows in one call."""
  model = make_model(dtype, "everything")
  params = make_params(dtype)
  group = make_group(longest, 64, excluded)

  def loss_of(trainable):
    tree = params.replace(trainable=trainable)
    scores = _oracle_scores(model, tree, PROMPT, length, boundary, group)
    return OBJECTIVES[name](*scores, group)[0]

  return jax.value_and_grad(loss_of)(params.trainable)


def our_gradient(
  program: dict, length: int, group: Group, tail_chunks, name: str = "tiny"
):
  """Loss and gradient by one of the two forms."""
  dtype = program["dtype"]
  model = make_model(dtype, program["saved"], name)
  params = make_params(dtype)
  objective = OBJECTIVES[program["objective"]]
  whole = program["chunk"] == "P"
  capture_options = {
    "chunk_size": length if whole else program["chunk"],
    "capacity": max(length - 1, 1) if whole else CAPACITY,
    "length": length,
    "grad_scope": program["scope"],
    "tail_chunks": tail_chunks,
  }
  split = (group.responses.shape[1] + 2) // 3
  replay_options = {
    "block_size": split if program["split"] else None,
    "members_at_once": program["members"],
  }
  if program["form"] == "group_gradient":
    return group_gradient(
      model,
      params,
      PROMPT,
      group,
      objective,
      **capture_options,
      **replay_options,
    )[:2]

  def loss_of(trainable):
    tree = params.replace(trainable=trainable)
    state = capture(model, tree, PROMPT, **capture_options)
    scores = replay_scores(
      model, tree, state, group.responses, group.lengths, **replay_options
    )
    return objective(*scores, group)[0]

  return jax.value_and_grad(loss_of)(params.trainable)


def check_cell(program: dict, length, longest, tail_chunks, excluded) -> None:
  """One gradient against its oracle."""
  group = make_group(longest, program["room"], excluded)
  loss, grads = our_gradient(program, length, group, tail_chunks)
  chunk = length if program["chunk"] == "P" else program["chunk"]
  scope = program["scope"]
  boundary = constant_tokens(scope, length, chunk, tail_chunks)
  expected_loss, expected = oracle(
    length,
    None if boundary == 0 else boundary,
    longest,
    excluded,
    program["objective"],
  )
  tolerance = TOLERANCE[program["dtype"]]
  where = f"{program} P={length} R={longest} {tail_chunks=} {excluded=}"
  try:
    np.testing.assert_allclose(loss, expected_loss, tolerance, tolerance)
    assert_gradients_close(grads, expected, tolerance)
  except AssertionError as error:
    raise AssertionError(f"{where}: {error}") from error


def cells(program: dict, prompts) -> Iterator[tuple]:
  """All lengths, tails and masks of one program."""
  tails = TAILS if program["scope"] == "tail" else (None,)
  every = itertools.product(prompts, RESPONSES[program["room"]], tails)
  for number, cell in enumerate(every):
    yield *cell, number % 2 == 1


def few_prompts(row: int, program: dict) -> tuple[int, ...]:
  """Lengths of a default case: each takes its turn, one program each."""
  if program["chunk"] == "P":
    return ((1, 2), (65,), (300,))[row % 3]
  return tuple(PROMPTS[(3 * row + i) % len(PROMPTS)] for i in range(3))


PAIRS = covering_rows(FACTORS, 2)
TRIPLES = covering_rows(FACTORS, 3)


class CoveringTest(parameterized.TestCase):
  @parameterized.parameters(2, 3)
  def test_rows_cover_every_tuple(self, strength):
    rows = covering_rows(FACTORS, strength)
    found = set().union(*(tuples_of(row, strength) for row in rows))
    self.assertEqual(found, all_tuples(FACTORS, strength))

  def test_default_rows_take_every_prompt_length(self):
    taken = {p for i, row in enumerate(PAIRS) for p in few_prompts(i, row)}
    self.assertEqual(taken, set(PROMPTS))


def slow_prompts(row: int, program: dict) -> tuple[int, ...]:
  """All lengths; whole-prompt chunks compile for each, so they take turns."""
  if program["chunk"] != "P":
    return PROMPTS
  return tuple(PROMPTS[(2 * row + i) % len(PROMPTS)] for i in (0, 2, 5))


@pytest.mark.slow
class EveryTripleTest(parameterized.TestCase):
  @parameterized.parameters(*range(len(TRIPLES)))
  def test_all_lengths_tails_and_masks(self, row):
    program = TRIPLES[row]
    for cell in cells(program, slow_prompts(row, program)):
      check_cell(program, *cell)
    jax.clear_caches()


class GradientTest(parameterized.TestCase):
  @parameterized.parameters(*range(len(PAIRS)))
  def test_every_pair_of_settings(self, row):
    program = PAIRS[row]
    every = list(cells(program, few_prompts(row, program)))
    # Enough to see each prompt length, response length and tail.
    step = 1 if len(every) <= 6 else len(every) // 6
    for cell in every[::step]:
      check_cell(program, *cell)

  @parameterized.parameters(
    {"length": 1, "longest": 1},
    {"length": 1, "longest": 5},
    {"length": 65, "longest": 1},
  )
  def test_shortest_prompt_and_response_train(self, length, longest):
    group = make_group(longest, 5, False)
    loss, grads = our_gradient(PROGRAM, length, group, None)
    self.assertNotEqual(float(loss), 0.0)
    # With P = R = 1 nothing is attended to but the token itself: queries and
    # keys get no gradient, everything else does.
    for path, leaf in jax.tree_util.tree_leaves_with_path(grads):
      name = jax.tree_util.keystr(path)
      alone = length == longest == 1
      if not (alone and any(part in name for part in ALONE)):
        self.assertGreater(jnp.abs(leaf).max(), 0, name)

  def test_oracle_equals_whole_rows_of_one_member_at_a_time(self):
    """Padding, dynamic lengths and vmap of the oracle add nothing."""
    length, group = 65, make_group(3, 5, False)
    model = make_model("float64")
    loss, grads, _ = conventional_gradient(
      model, make_params("float64"), PROMPT[:length], group, Coupling()
    )
    for boundary in (None, 0):
      found = oracle(length, boundary, 3, False, "coupling")
      np.testing.assert_allclose(found[0], loss, 1e-12)
      assert_gradients_close(found[1], grads, 1e-12)

  @parameterized.parameters(
    (1, 1, "coupling"), (63, 2, "policy"), (65, 3, "policy"), (129, 3, "policy")
  )
  @pytest.mark.slow
  def test_plain_autodiff_reaches_the_tolerance(self, length, longest, name):
    """float32 of plain jax.grad against float64: what 1e-5 can be asked of."""
    boundary = length - 1
    _, found = oracle(length, boundary, longest, True, name, "float32")
    _, expected = oracle(length, boundary, longest, True, name)
    assert_gradients_close(found, expected, 7e-6)

  def test_oracle_equals_finite_differences(self):
    """The value's slope along one direction, boundary or not."""
    length, boundary, group = 65, 40, make_group(5, 64, False)
    model = make_model("float64", "everything")
    params = make_params("float64")
    random = np.random.default_rng(3)
    direction = jax.tree.map(
      lambda x: jnp.asarray(random.normal(size=x.shape)), params.trainable
    )

    def loss(step):
      moved = jax.tree.map(
        lambda x, d: x + step * d, params.trainable, direction
      )
      tree = params.replace(trainable=moved)
      scores = _oracle_scores(model, tree, PROMPT, length, None, group)
      return Coupling()(*scores, group)[0]

    slope = (loss(1e-6) - loss(-1e-6)) / 2e-6
    products = lambda grads: sum(
      (g * d).sum()
      for g, d in zip(
        jax.tree.leaves(grads), jax.tree.leaves(direction), strict=True
      )
    )
    full = products(oracle(length, None, 5, False, "coupling")[1])
    np.testing.assert_allclose(full, slope, 1e-5)
    stopped = products(oracle(length, boundary, 5, False, "coupling")[1])
    self.assertGreater(abs(stopped - full), 1e-3 * abs(full))

  @pytest.mark.slow  # trainer_test batches prompts by default
  def test_gradient_under_vmap_over_prompts(self):
    model, params = make_model("float64"), make_params("float64")
    prompts, lengths = ids(4, 2, 66), jnp.array([66, 40])
    group = make_group(3, 5, False)

    def gradient(prompt, length):
      def loss_of(trainable):
        tree = params.replace(trainable=trainable)
        state = capture(
          model, tree, prompt, chunk_size=24, length=length, grad_scope="full"
        )
        scores = replay_scores(
          model, tree, state, group.responses, group.lengths
        )
        return Coupling()(*scores, group)[0]

      return jax.grad(loss_of)(params.trainable)

    together = jax.jit(jax.vmap(gradient))(prompts, lengths)
    alone = jax.jit(gradient)
    for i in range(2):
      assert_gradients_close(
        jax.tree.map(lambda x, i=i: x[i], together),
        alone(prompts[i], lengths[i]),
        1e-12,
      )


# Leaves without a gradient where a sequence has one token: scores do not
# matter, and nothing was written before that could decay.
ALONE = ("q_norm", "k_norm", "k_proj", "A_log", "dt_bias", "in_proj_a")

PROGRAM = {
  "chunk": 64,
  "saved": "projections",
  "scope": "full",
  "room": 5,
  "form": "group_gradient",
  "dtype": "float64",
  "split": False,
  "members": 1,
  "objective": "coupling",
}


def make_state(length: int, dtype="float64", prompt=PROMPT, **options):
  options = {"chunk_size": 64, "capacity": CAPACITY} | options
  return capture(
    make_model(dtype), make_params(dtype), prompt, length=length, **options
  )


def replayed(state, group, dtype="float64", **options):
  return replay(
    make_model(dtype),
    make_params(dtype),
    state,
    group.responses,
    group.lengths,
    **options,
  )


def one_pass(length: int, group: Group, dtype="float64", prompt=PROMPT):
  """Log-probabilities by the conventional pass, member by member."""
  score = jax.jit(sequence_logprobs, static_argnums=0)
  rows = []
  for response, real in zip(group.responses, group.lengths, strict=True):
    tokens = jnp.concatenate([jnp.asarray(prompt[:length]), response])
    logprobs = score(make_model(dtype), make_params(dtype), tokens)
    mask = jnp.arange(response.shape[0]) < real
    rows.append(jnp.where(mask, logprobs[length - 1 :], 0.0))
  return jnp.stack(rows)


class ReplayTest(parameterized.TestCase):
  @parameterized.parameters(
    ("float64", 1), ("float64", 130), ("float32", 65), ("float64", 65)
  )
  def test_replay_equals_one_pass(self, dtype, length):
    group = make_group(5, 5, False)
    expected = one_pass(length, group, dtype)
    state = make_state(length, dtype)
    tolerance = TOLERANCE[dtype]
    found = replayed(state, group, dtype)
    np.testing.assert_allclose(found, expected, tolerance, tolerance)

  @parameterized.parameters(
    {"members_at_once": 2},
    {"members_at_once": 3},
    {"members_at_once": 64},
    {"block_size": 2},
    {"block_size": 1, "members_at_once": 2},
  )
  def test_batches_and_blocks_change_nothing(self, **options):
    group, state = make_group(5, 5, False), make_state(65)
    np.testing.assert_allclose(
      replayed(state, group, **options), replayed(state, group), 1e-12
    )

  @pytest.mark.slow
  def test_more_members_at_once_than_there_are(self):
    group = make_group(5, 5, False)
    _, expected = our_gradient(PROGRAM, 65, group, None)
    for path, leaf in jax.tree_util.tree_leaves_with_path(expected):
      stacked = leaf if "stage" in jax.tree_util.keystr(path) else leaf[None]
      for layer in stacked:
        self.assertGreater(jnp.abs(layer).max(), 0, jax.tree_util.keystr(path))
    _, grads = our_gradient(PROGRAM | {"members": 64}, 65, group, None)
    assert_gradients_close(grads, expected, 1e-12)

  @parameterized.parameters("float32", "float64")
  def test_ratio_is_one_with_unchanged_weights(self, dtype):
    """Known fault 8: scoring and replay take the same path."""
    group, state = make_group(5, 5, False), make_state(65, dtype)
    group = group.replace(old_logprobs=replayed(state, group, dtype))
    *_, metrics = group_gradient(
      make_model(dtype),
      make_params(dtype),
      PROMPT,
      group,
      PolicyObjective(),
      chunk_size=64,
      capacity=CAPACITY,
      length=65,
      grad_scope="response_only",
    )
    self.assertLess(metrics["ratio_deviation_max"], 1e-6)

  @parameterized.parameters(1, 2)
  def test_nothing_depends_on_member_order(self, members_at_once):
    """Known fault 10: bitwise per member, values and one member's gradient."""
    model, params = make_model("float32"), make_params("float32")
    group, state = make_group(5, 5, False), make_state(65, "float32")

    @jax.jit
    def member_gradient(responses, lengths, cotangent):
      score = lambda tree: replay(
        model,
        tree,
        state,
        responses,
        lengths,
        members_at_once=members_at_once,
      )
      logprobs, pull_back = jax.vjp(score, params)
      return logprobs, pull_back(cotangent)[0].trainable

    def ordered(order):
      order = jnp.array(order)
      cotangent = jnp.where(order[:, None] == 1, jnp.ones((1, 5)), 0.0)
      logprobs, grads = member_gradient(
        group.responses[order],
        group.lengths[order],
        cotangent.astype(jnp.float32),
      )
      return logprobs[jnp.argsort(order)], grads

    first = ordered([0, 1, 2])
    for order in ([1, 0, 2], [2, 0, 1], [2, 1, 0]):
      jax.tree.map(np.testing.assert_array_equal, ordered(order), first)

  def test_one_trace_serves_every_prompt_length(self):
    model, params = make_model("float32"), make_params("float32")
    group, traces = make_group(5, 5, False), []

    @jax.jit
    def score(prompt, length):
      traces.append(length)
      state = capture(model, params, prompt, chunk_size=64, length=length)
      return replay(model, params, state, group.responses, group.lengths)

    compiled = score.lower(PROMPT[:129], 1).compile()
    found = {p: compiled(PROMPT[:129], p) for p in range(1, 130)}
    self.assertLen(traces, 1)
    self.assertLen({float(x[0, 0]) for x in found.values()}, len(found))
    expected = one_pass(65, group, "float32")
    np.testing.assert_allclose(found[65], expected, 1e-5, 1e-5)

  def test_a_replay_offset_of_one_is_seen(self):
    """Known fault 2: positions of a response are absolute."""
    module = importlib.import_module("longstraw_jax.replay")
    original = module.branch_job

    def shifted(*args):
      job = original(*args)
      return job.replace(start=job.start + 1)

    group, state = make_group(5, 5, False), make_state(65)
    expected = one_pass(65, group)
    with mock.patch.object(module, "branch_job", shifted):
      found = replay(
        make_model("float64", name="offset"),  # no compiled program to reuse
        make_params("float64"),
        state,
        group.responses,
        group.lengths,
      )
    self.assertGreater(jnp.abs(found - expected).max(), 1e-6)

  def test_the_first_response_token_sees_exactly_the_prompt(self):
    """Known fault 3: token P - 1 counts, what stands behind it does not."""
    length, group = 65, make_group(5, 5, False)
    base = replayed(make_state(length), group)
    change = lambda place: np.concatenate(
      [PROMPT[:place], [(PROMPT[place] + 1) % 61], PROMPT[place + 1 :]]
    )
    for place in (0, length - 2, length - 1):
      found = replayed(make_state(length, prompt=change(place)), group)
      self.assertGreater(jnp.abs(found - base)[:, 0].min(), 1e-9, place)
    behind = replayed(make_state(length, prompt=change(length)), group)
    np.testing.assert_array_equal(behind, base)

  def test_state_is_the_same_for_every_chunk_size(self):
    """Known fault 1."""
    length = 130
    expected = make_state(length)
    for chunk_size in (1, 3, 37, 129):
      state = make_state(length, chunk_size=chunk_size, capacity=length - 1)
      close = lambda a, b: np.testing.assert_allclose(a, b, 1e-10, 1e-12)
      jax.tree.map(close, state.carry, expected.carry)
      rows = lambda tree: jax.tree.map(lambda x: x[..., : length - 1, :], tree)
      jax.tree.map(close, rows(state.pages), rows(expected.pages))


class LeafErrorTest(parameterized.TestCase):
  def test_by_hand(self):
    expected = {"a": np.array([3.0, 4.0]), "b": {"c": np.zeros(2)}}
    actual = {"a": np.array([3.0, 4.5]), "b": {"c": np.array([0.0, 1e-3])}}
    found = leaf_errors(actual, expected)
    np.testing.assert_allclose(found["a"], 0.5 / 5)
    np.testing.assert_allclose(found["b/c"], 1e-3 / 5e-3)

  def test_the_worst_leaf_is_named(self):
    expected = {"a": np.ones(2), "b": np.ones(2)}
    actual = {"a": np.ones(2), "b": np.array([1.0, np.nan])}
    with self.assertRaisesRegex(AssertionError, "worst is b with error inf"):
      assert_gradients_close(actual, expected, 1e-12)

  def test_other_leaves_are_refused(self):
    with self.assertRaisesRegex(ValueError, "differ in leaves"):
      leaf_errors({"a": np.ones(1)}, {"b": np.ones(1)})

  def test_constant_tokens(self):
    # Nine captured tokens in chunks of four start at 0, 4 and 8.
    tail = lambda chunks: constant_tokens("tail", 10, 4, chunks)
    found = [tail(chunks) for chunks in (0, 1, 2, 3, 9)]
    self.assertEqual(found, [9, 8, 4, 0, 0])
    self.assertEqual(constant_tokens("full", 10, 4), 0)
    self.assertEqual(constant_tokens("response_only", 10, 4), 9)
