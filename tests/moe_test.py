"""Routers and mixtures against the formulas, one expert after another."""

import dataclasses

from absl.testing import absltest, parameterized
from flax import traverse_util
import jax
import jax.numpy as jnp
import numpy as np

from longstraw_jax.models.moe import (
  MoEConfig,
  SigmoidMoE,
  SoftmaxMoE,
  top_experts,
)
from longstraw_jax.testing.compare import assert_gradients_close

TOLERANCE = 1e-12  # float64

T, D, E, A = 11, 8, 6, 2

SIZES = MoEConfig(
  num_experts=E,
  experts_per_token=A,
  expert_hidden_dim=5,
  shared_hidden_dim=7,
  row_block=4,
)
GROUPS = dataclasses.replace(
  SIZES, num_groups=3, groups_per_token=2, scaling=2.5
)
CASES = {
  "softmax": (SoftmaxMoE, SIZES),
  "softmax, raw": (SoftmaxMoE, dataclasses.replace(SIZES, normalize=False)),
  "sigmoid": (SigmoidMoE, dataclasses.replace(SIZES, scaling=2.5)),
  "sigmoid, groups": (SigmoidMoE, GROUPS),
  "sigmoid, raw": (SigmoidMoE, dataclasses.replace(GROUPS, normalize=False)),
}


def build(case, dtype="float64", **changes):
  """The module of a case and parameters with a bias that matters."""
  kind, sizes = CASES[case]
  sizes = dataclasses.replace(sizes, **changes)
  module = kind(sizes, dtype=dtype, param_dtype=dtype)
  x_TD = jnp.zeros((1, D), dtype)
  shapes = jax.eval_shape(module.init, jax.random.key(0), x_TD, {})
  rng = np.random.default_rng(1)

  def values(x):
    scale = 0.3 if x.ndim == 1 else x.shape[-2] ** -0.5
    return jnp.asarray(rng.normal(size=x.shape) * scale, x.dtype)

  return module, jax.tree.map(values, shapes["params"])


def tokens(dtype="float64", number=T, seed=2):
  rng = np.random.default_rng(seed)
  return rng.normal(size=(number, D)).astype(dtype)


def other_choices(number=T, seed=3):
  ids = np.argsort(np.random.default_rng(seed).random((number, E)), axis=-1)
  return {"experts": ids[:, :A].astype("int32")}


# --- The formulas ----------------------------------------------------------


def sigmoid(x):
  return 1 / (1 + np.exp(-x))


def chosen_by_formula(case, params, x):
  """Ids of every token, one token at a time."""
  kind, sizes = CASES[case]
  logits = x @ params["router"]["kernel"]
  scores = logits
  if kind is SigmoidMoE:
    scores = sigmoid(logits) + params["correction_bias"]
  rows = []
  for row in np.asarray(scores):
    groups = row.reshape(sizes.num_groups, -1)
    best_two = np.sort(groups, axis=-1)[:, -2:].sum(-1)
    kept = np.argsort(-best_two, kind="stable")[: sizes.groups_per_token]
    width = groups.shape[1]
    left = sorted(g * width + i for g in kept for i in range(width))
    rows.append(sorted(left, key=lambda e, row=row: -row[e])[:A])
  return np.array(rows)


def output_by_formula(case, params, x, ids):
  """What a module gives for these ids, differentiable."""
  kind, sizes = CASES[case]
  logits = x @ params["router"]["kernel"]
  score = jax.nn.softmax if kind is SoftmaxMoE else jax.nn.sigmoid
  chosen = jnp.take_along_axis(score(logits), jnp.asarray(ids), axis=-1)
  eps = 1e-20 if kind is SigmoidMoE else 0.0
  if sizes.normalize:
    chosen = chosen / (chosen.sum(-1, keepdims=True) + eps)
  chosen = chosen * sizes.scaling

  def swiglu(x, gate, up, down):
    return (jax.nn.silu(x @ gate) * (x @ up)) @ down

  y = 0.0
  for e in range(sizes.num_experts):
    gate, up = jnp.split(params["experts_gate_up"][e], 2, axis=-1)
    weight = jnp.where(ids == e, chosen, 0.0).sum(-1, keepdims=True)
    y = y + weight * swiglu(x, gate, up, params["experts_down"][e])
  shared = params["shared_expert"]
  kernel = lambda name: shared[name]["kernel"]
  shared = swiglu(x, *map(kernel, ("gate_proj", "up_proj", "down_proj")))
  if kind is SoftmaxMoE:
    shared *= jax.nn.sigmoid(x @ params["shared_expert_gate"]["kernel"])
  return y + shared


def with_gradients(call):
  """(params, x, ...) -> value, aux, gradients, for a fixed cotangent."""

  def run(params, x, *args):
    dy = np.random.default_rng(4).normal(size=x.shape).astype(x.dtype)
    y, pull_back, aux = jax.vjp(
      lambda params, x: call(params, x, *args), params, x, has_aux=True
    )
    params, x = pull_back(dy)
    return y, aux, {"params": params, "x": x}

  return jax.jit(run)


def live(module):
  return lambda params, x, choices: module.apply({"params": params}, x, choices)


class MoETest(parameterized.TestCase):
  @parameterized.product(case=tuple(CASES), forced=(False, True))
  def test_equals_the_formulas(self, case, forced):
    """Values and every leaf; forced ids take the live router's weights."""
    module, params = build(case)
    x = tokens()
    choices = other_choices() if forced else {}
    y, chosen, grads = with_gradients(live(module))(params, x, choices)
    wanted_ids = chosen_by_formula(case, params, x)
    np.testing.assert_array_equal(chosen["experts"], wanted_ids)
    self.assertEqual(chosen["experts"].dtype, jnp.int32)

    ids = choices["experts"] if forced else wanted_ids
    formula = lambda params, x: (output_by_formula(case, params, x, ids), None)
    wanted, _, wanted_grads = with_gradients(formula)(params, x)
    np.testing.assert_allclose(y, wanted, rtol=0, atol=TOLERANCE)
    assert_gradients_close(grads, wanted_grads, TOLERANCE, case)
    self.assertGreater(np.abs(grads["params"]["router"]["kernel"]).max(), 1e-3)

  @parameterized.parameters("softmax", "sigmoid, groups")
  def test_forcing_what_it_would_choose_changes_no_bit(self, case):
    module, params = build(case, "float32")
    x = tokens("float32")
    run = with_gradients(live(module))
    wanted = run(params, x, {})
    recorded = jax.tree.map(np.asarray, wanted[1])
    jax.tree.map(
      np.testing.assert_array_equal, run(params, x, recorded), wanted
    )

  @parameterized.parameters("softmax", "sigmoid, groups")
  def test_members_choose_and_replay_like_single_sequences(self, case):
    module, params = build(case)
    x = np.stack([tokens(seed=seed) for seed in range(3)])
    choices = [other_choices(seed=seed) for seed in range(3)]
    choices = jax.tree.map(lambda *x: np.stack(x), *choices)
    members = jax.vmap(live(module), (None, 0, 0))
    y, chosen, grads = with_gradients(members)(params, x, choices)
    dy = np.random.default_rng(4).normal(size=x.shape)
    total = jax.tree.map(np.zeros_like, params)
    for i in range(3):
      one = jax.tree.map(lambda x, i=i: x[i], choices)
      wanted, aux, _ = with_gradients(live(module))(params, x[i], one)
      np.testing.assert_array_equal(chosen["experts"][i], aux["experts"])
      np.testing.assert_allclose(y[i], wanted, rtol=0, atol=TOLERANCE)
      pull = lambda p, x=x[i], one=one: live(module)(p, x, one)[0]
      (dparams,) = jax.jit(lambda p, dy, f=pull: jax.vjp(f, p)[1](dy))(
        params, dy[i]
      )
      total = jax.tree.map(np.add, total, dparams)
    assert_gradients_close(grads["params"], total, TOLERANCE)

  @parameterized.parameters("softmax", "sigmoid, groups")
  def test_near_ties_are_decided_alike_in_any_batch(self, case):
    """Fault 18: experts whose logits are bits apart."""
    module, params = build(case, "float32", row_block=8)
    rng = np.random.default_rng(5)
    column = rng.normal(size=(D, 1)).astype("float32")
    # Within a rounding of each other, so that the order of a sum decides.
    noise = 1 + 1e-7 * rng.integers(-1, 2, size=(D, E))
    params["router"]["kernel"] = (column * noise).astype("float32")
    if "correction_bias" in params:
      params["correction_bias"] = np.zeros(E, "float32")
    x = tokens("float32", 48)
    apply = jax.jit(live(module))
    choose = lambda x: np.asarray(apply(params, x, {})[1]["experts"])
    wanted = choose(x)
    self.assertGreater(len(np.unique(wanted, axis=0)), 3)
    for number in (1, 2, 5, 17, 33):
      np.testing.assert_array_equal(choose(x[-number:]), wanted[-number:])
    for members in (2, 16):
      split = x.reshape(members, -1, D)
      vmapped = jax.jit(jax.vmap(live(module), (None, 0, None)))
      ids = vmapped(params, split, {})[1]["experts"]
      np.testing.assert_array_equal(ids.reshape(48, A), wanted)

  def test_equal_scores_go_to_the_lowest_id(self):
    sizes = dataclasses.replace(SIZES, experts_per_token=4)
    scores = np.array(
      [
        [-0.0, 0.0, -0.0, 0.0, -0.0, 0.0],
        [-1.0, -0.0, 2.0, 0.0, 2.0, -3.0],
        [0.5, 0.5, 0.5, 0.5, 0.5, 0.5],
      ],
      "float32",
    )
    wanted = [[0, 1, 2, 3], [2, 4, 1, 3], [0, 1, 2, 3]]
    choose = jax.jit(lambda scores: top_experts(scores, sizes))
    np.testing.assert_array_equal(choose(scores), wanted)

  def test_equal_groups_go_to_the_lowest_group(self):
    scores = np.array(
      [[-0.3, -0.2, -0.2, -0.3, -0.9, -0.1], [0.1, 0.2, 0.9, 0.0, 0.5, 0.4]],
      "float32",
    )
    sizes = dataclasses.replace(GROUPS, groups_per_token=1)
    got = jax.jit(lambda scores: top_experts(scores, sizes))(scores)
    np.testing.assert_array_equal(got, [[1, 0], [2, 3]])

  def test_the_bias_moves_the_choice_and_has_no_gradient(self):
    module, params = build("sigmoid")
    x = tokens()
    run = with_gradients(live(module))
    bias = params["correction_bias"]
    _, chosen, grads = run(params, x, {})
    np.testing.assert_array_equal(grads["params"]["correction_bias"], 0.0)
    favoured = params | {"correction_bias": bias + 2.0 * (np.arange(E) == 3)}
    y, moved, _ = run(favoured, x, {})
    np.testing.assert_array_equal(moved["experts"][:, 0], 3)
    self.assertFalse((chosen["experts"] == moved["experts"]).all())
    # The weights know nothing of it.
    wanted = output_by_formula("sigmoid", params, x, moved["experts"])
    np.testing.assert_allclose(y, wanted, rtol=0, atol=TOLERANCE)

  @parameterized.parameters("softmax", "sigmoid")
  def test_forced_experts_of_no_weight_stay_finite(self, case):
    """Replayed choices may lie far from what the router thinks now."""
    module, params = build(case, "float32")
    kernel = np.zeros((D, E), "float32")
    kernel[0] = np.where(np.arange(E) < 2, -60.0, 60.0)
    params["router"]["kernel"] = kernel
    x = np.abs(tokens("float32")) + 1
    choices = {"experts": np.tile(np.array([[0, 1]], "int32"), (T, 1))}
    y, _, grads = with_gradients(live(module))(params, x, choices)
    for leaf in jax.tree.leaves((y, grads)):
      self.assertTrue(np.isfinite(leaf).all())

  @parameterized.parameters("softmax", "sigmoid")
  def test_parameters_and_narrow_dtypes(self, case):
    module, params = build(case, "bfloat16")
    x = jnp.asarray(tokens(), jnp.bfloat16)
    params = jax.jit(module.init)(jax.random.key(0), x, {})["params"]
    flat = traverse_util.flatten_dict(params, sep="/")
    router = "float32" if case == "sigmoid" else "bfloat16"
    wanted = {
      "router/kernel": ((D, E), router),
      "experts_gate_up": ((E, D, 10), "bfloat16"),
      "experts_down": ((E, 5, D), "bfloat16"),
      "shared_expert/gate_proj/kernel": ((D, 7), "bfloat16"),
      "shared_expert/up_proj/kernel": ((D, 7), "bfloat16"),
      "shared_expert/down_proj/kernel": ((7, D), "bfloat16"),
    }
    if case == "sigmoid":
      wanted["correction_bias"] = ((E,), "float32")
    else:
      wanted["shared_expert_gate/kernel"] = ((D, 1), "bfloat16")
    got = {path: (x.shape, x.dtype.name) for path, x in flat.items()}
    self.assertEqual(got, wanted)
    matrix = np.asarray(params["experts_gate_up"], "float64")
    self.assertAlmostEqual(matrix.std(), D**-0.5, delta=0.05)

    y, chosen, grads = with_gradients(live(module))(params, x, {})
    self.assertEqual((y.dtype, grads["x"].dtype), (x.dtype, x.dtype))
    wide = lambda tree: jax.tree.map(lambda x: x.astype("float64"), tree)
    ids = chosen["experts"]
    formula = lambda params, x: (output_by_formula(case, params, x, ids), None)
    exact = with_gradients(formula)(wide(params), wide(x))
    assert_gradients_close(
      {"y": y} | grads, {"y": exact[0]} | exact[2], 2e-2, case
    )

  @parameterized.parameters(
    ({"num_groups": 4}, "num_groups is 4"),
    ({"num_groups": 6}, "best two"),
    ({"num_groups": 3, "groups_per_token": 4}, "groups_per_token is 4"),
    ({"num_groups": 3, "experts_per_token": 3}, "experts_per_token is 3"),
    ({"experts_per_token": 7}, "experts_per_token is 7"),
    ({"row_block": 0}, "row_block is 0"),
  )
  def test_sizes_that_cannot_be(self, changes, message):
    with self.assertRaisesRegex(ValueError, message):
      dataclasses.replace(SIZES, **changes)

  def test_softmax_refuses_groups(self):
    with self.assertRaisesRegex(ValueError, "only SigmoidMoE"):
      SoftmaxMoE(GROUPS, dtype="float32", param_dtype="float32")


if __name__ == "__main__":
  absltest.main()
