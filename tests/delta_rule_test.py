"""The delta rule in chunks against the recurrence it stands for."""

import functools

from absl.testing import absltest, parameterized
import jax
import jax.numpy as jnp
import numpy as np

from longstraw_jax.ops.delta_rule import (
  delta_rule_chunked,
  delta_rule_recurrent,
  unit_lower_inverse,
)

TOLERANCE = {"float64": 1e-12, "float32": 1e-5}

N, J, H = 2, 6, 4
FLOOR = 1e-30  # below it float32 has few digits or none
NAMES = ("q", "k", "v", "beta", "g", "state")

chunked = jax.jit(delta_rule_chunked, static_argnums=6)
recurrent = jax.jit(delta_rule_recurrent)


def trained_inputs(tokens, dtype="float64", seed=0):
  """What a mixer computes the rule's inputs from, gates near zero included."""
  rng = np.random.default_rng(seed)
  normal = lambda *shape: rng.normal(size=shape).astype(dtype)
  return {
    "q": normal(tokens, N, J),
    "k": normal(tokens, N, J),
    "v": normal(tokens, N, H),
    "b": normal(tokens, N),
    "a": normal(tokens, N) - 4.0,
    "A_log": normal(N),
    "state": normal(N, J, H),
  }


def rule_inputs(x):
  unit = lambda x: x / jnp.linalg.norm(x, axis=-1, keepdims=True)
  g = -jnp.exp(x["A_log"]) * jax.nn.softplus(x["a"])
  beta = jax.nn.sigmoid(x["b"])
  return unit(x["q"]), unit(x["k"]), x["v"], beta, g, x["state"]


def place_gates(strength, where, tokens, block):
  """Log decays near zero, strong ones among them."""
  rng = np.random.default_rng(4)
  at = np.arange(tokens)[:, None] % block
  strong = {
    "half": rng.random((tokens, N)) < 0.5,
    "alternate": at % 2 == 0,
    "first": at == 0,
    "last": at == block - 1,
    "all": at >= 0,
    "behind_padding": at >= 3,
  }[where]
  weak = 0.0 if where == "behind_padding" else -np.exp(rng.normal(size=N) - 4)
  return np.where(strong, strength, np.broadcast_to(weak, (tokens, N)))


@functools.partial(jax.jit, static_argnums=(0, 1))
def values_and_gradients(rule, extra, inputs, cotangents):
  """((o, state), gradients) by name."""
  call = lambda x: rule(*(x[name] for name in NAMES), *extra)
  (o, state), pull_back = jax.vjp(call, inputs)
  return {"o": o, "after": state} | pull_back(cotangents)[0]


class StrongGatesTest(parameterized.TestCase):
  """The recurrence in float64 is exact for every gate, autodiff included."""

  def inputs(self, strength, where, tokens, block):
    q, k, v, beta, _, state = rule_inputs(trained_inputs(tokens))
    if where == "behind_padding":
      real = np.arange(tokens)[:, None] >= 3
      beta = beta * real
      q, k, v = (x * real[..., None] for x in (q, k, v))
    g = place_gates(strength, where, tokens, block)
    rng = np.random.default_rng(1)
    cotangents = rng.normal(size=(tokens, N, H)), rng.normal(size=(N, J, H))
    return dict(zip(NAMES, (q, k, v, beta, g, state), strict=True)), cotangents

  def check(self, got, wanted, tolerance, floor, note):
    for name, right in wanted.items():
      scale = np.abs(right).max()
      np.testing.assert_allclose(
        np.asarray(got[name], "float64"),
        right,
        rtol=0,
        atol=tolerance * scale + floor,
        err_msg=f"{name}, {note}",
      )

  @parameterized.product(
    where=("half", "alternate", "first", "last", "all", "behind_padding"),
    tokens_block=((75, 64), (13, 8), (1, 8)),
  )
  def test_equals_the_recurrence(self, where, tokens_block):
    """Values and gradients, in float32 and float64, to the leaf's own scale."""
    tokens, block = tokens_block
    narrow = lambda tree: jax.tree.map(lambda x: x.astype("float32"), tree)
    for strength in (0, -0.5, -10, -50, -104, -160, -1e4, -3e38, -np.inf):
      case = self.inputs(strength, where, tokens, block)
      wide = jax.tree.map(lambda x: x.astype("float64"), narrow(case))
      wanted = values_and_gradients(delta_rule_recurrent, (), *wide)
      got = values_and_gradients(delta_rule_chunked, (block,), *wide)
      self.check(got, wanted, TOLERANCE["float64"], 1e-300, strength)
      got = values_and_gradients(delta_rule_chunked, (block,), *narrow(case))
      self.check(got, wanted, TOLERANCE["float32"], FLOOR, strength)

  @parameterized.parameters(-160, -np.inf)
  def test_narrow_inputs_with_wide_gates(self, strength):
    inputs, cotangents = self.inputs(strength, "half", 75, 64)
    narrow = {
      name: x.astype("float32" if name in ("g", "state") else jnp.bfloat16)
      for name, x in inputs.items()
    }
    cotangents = tuple(x.astype("float32") for x in cotangents)
    wide = lambda tree: jax.tree.map(lambda x: x.astype("float64"), tree)
    wanted = values_and_gradients(
      delta_rule_recurrent, (), wide(narrow), wide(cotangents)
    )
    got = values_and_gradients(delta_rule_chunked, (64,), narrow, cotangents)
    kept = lambda x: {n: x[n] for n in ("o", "after", "g", "state")}
    self.check(kept(got), kept(wanted), TOLERANCE["float32"], FLOOR, strength)

  @parameterized.parameters(1e3, 1e30)
  def test_a_large_state_is_forgotten_at_once(self, size):
    """By the first gate of a call, where what follows must be as from zero."""
    inputs, cotangents = self.inputs(-np.inf, "first", 9, 64)
    run = lambda state: values_and_gradients(
      delta_rule_chunked, (8,), inputs | {"state": state}, cotangents
    )
    got = run(size * jnp.ones((N, J, H)))
    jax.tree.map(np.testing.assert_array_equal, got, run(jnp.zeros((N, J, H))))
    np.testing.assert_array_equal(got["state"], 0.0)

  def test_one_long_chunk(self):
    """The split's step grows with the chunk: here to 2^-9."""
    case = self.inputs(-104, "half", 400, 512)
    narrow = jax.tree.map(lambda x: x.astype("float32"), case)
    wide = jax.tree.map(lambda x: x.astype("float64"), narrow)
    wanted = values_and_gradients(delta_rule_recurrent, (), *wide)
    got = values_and_gradients(delta_rule_chunked, (512,), *narrow)
    self.check(got, wanted, TOLERANCE["float32"], FLOOR, "long")


class DeltaRuleTest(parameterized.TestCase):
  def assert_close(self, got, wanted, dtype):
    def check(a, b):
      scale = max(1.0, np.abs(b).max(initial=0.0))
      limit = TOLERANCE[dtype] * scale
      np.testing.assert_allclose(a, b, rtol=0, atol=limit)

    jax.tree.map(check, got, wanted)

  @parameterized.product(
    tokens_block=((1, 8), (7, 8), (8, 8), (19, 8), (20, 5), (13, 1)),
    dtype=("float64", "float32"),
  )
  def test_chunked_equals_recurrent(self, tokens_block, dtype):
    """Values, and gradients on the inputs that train (a, b, A_log)."""
    tokens, block = tokens_block
    x = trained_inputs(tokens, dtype)
    rng = np.random.default_rng(1)
    do = rng.normal(size=(tokens, N, H)).astype(dtype)
    dstate = rng.normal(size=(N, J, H)).astype(dtype)

    def run(rule, *args):
      @jax.jit
      def call(x):
        out, pull_back = jax.vjp(lambda x: rule(*rule_inputs(x), *args), x)
        return out, pull_back((do, dstate))[0]

      return call(x)

    wanted, wanted_grads = run(delta_rule_recurrent)
    got, grads = run(delta_rule_chunked, block)
    self.assertEqual(got[0].dtype, jnp.dtype(dtype))
    self.assert_close(got, wanted, dtype)
    self.assert_close(grads, wanted_grads, dtype)
    for name, x in wanted_grads.items():
      self.assertGreater(np.abs(x).max(), 0, name)

  @parameterized.parameters("float64", "float32")
  def test_identical_keys_written_with_full_strength(self, dtype):
    """512 equal keys and beta near 1: a naive inverse overflows here."""
    x = trained_inputs(512, dtype)
    q, k, v, _, g, state = rule_inputs(x)
    k = jnp.broadcast_to(k[:1], k.shape)
    beta = jnp.full_like(g, 0.999)
    args = (q, k, v, beta, 1e-3 * g, state)
    got = chunked(*args, 64)
    self.assert_close(got, recurrent(*args), dtype)

  @parameterized.parameters(1, 2, 7, 8, 9, 24)
  def test_unit_lower_inverse(self, size):
    rng = np.random.default_rng(2)
    a = np.tril(rng.normal(size=(3, size, size)), -1)
    cotangent = rng.normal(size=a.shape)
    plain = lambda a: jnp.linalg.inv(jnp.eye(size) + jnp.tril(a, -1))
    got, pull_back = jax.vjp(unit_lower_inverse, a)
    wanted, plain_pull_back = jax.vjp(plain, a)
    scale = np.abs(wanted).max() ** 2  # conditioning of the gradient
    np.testing.assert_allclose(got, wanted, atol=1e-12 * scale)
    np.testing.assert_allclose(
      pull_back(cotangent)[0],
      plain_pull_back(cotangent)[0],
      atol=1e-12 * scale * size,
    )

  def test_state_carried_over_any_split(self):
    *inputs, state = rule_inputs(trained_inputs(20))
    wanted = chunked(*inputs, state, 8)
    for split in (1, 13):
      first = chunked(*(x[:split] for x in inputs), state, 8)
      second = chunked(*(x[split:] for x in inputs), first[1], 8)
      o = np.concatenate([first[0], second[0]])
      self.assert_close((o, second[1]), wanted, "float64")

  @parameterized.parameters(recurrent, chunked)
  def test_zeros_leave_the_state_alone(self, rule):
    *inputs, state = rule_inputs(trained_inputs(9))
    zeros = [jnp.zeros_like(x) for x in inputs]
    np.testing.assert_array_equal(rule(*zeros, state)[1], state)
    padded = [jnp.pad(x, ((0, 4), *((0, 0),) * (x.ndim - 1))) for x in inputs]
    o, after = rule(*padded, state)
    wanted = rule(*inputs, state)
    self.assert_close((o[:9], after), wanted, "float64")

  def test_narrow_inputs_are_summed_wide(self):
    *inputs, state = rule_inputs(trained_inputs(9, "float32"))
    narrow = [x.astype(jnp.bfloat16) for x in inputs]
    wide = [x.astype(jnp.float32) for x in narrow]
    got = chunked(*narrow, state)
    self.assertEqual(got[1].dtype, jnp.float32)
    self.assert_close(got, chunked(*wide, state), "float32")

  def test_a_million_steps_stay_finite_and_forget(self):
    """Fault 13: the float32 carry neither overflows nor drifts."""
    tokens = 2**20
    rng = np.random.default_rng(3)
    draw = lambda *shape: rng.normal(size=shape).astype("float32")
    k = draw(512, 1, 2)
    k /= np.linalg.norm(k, axis=-1, keepdims=True)
    v = draw(512, 1, 1)
    beta = np.full((512, 1), 0.9, "float32")
    g = np.full((512, 1), -1e-3, "float32")

    @jax.jit
    def run(state):
      step = lambda _, s: delta_rule_chunked(k, k, v, beta, g, s, 64)[1]
      return jax.lax.fori_loop(0, tokens // 512, step, state)

    # The same 512 tokens repeat, so the state is a fixed point of them.
    state = run(np.full((1, 2, 1), 1e3, "float32"))
    self.assertEqual(state.dtype, jnp.float32)
    wide = [x.astype("float64") for x in (k, k, v, beta, g)]
    state64 = jnp.zeros((1, 2, 1), "float64")
    for _ in range(3):
      state64 = recurrent(*wide, state64)[1]
    self.assert_close(state, state64, "float32")


if __name__ == "__main__":
  absltest.main()
