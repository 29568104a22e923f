"""Weights of another dtype than the model's: refused, or the same numbers."""

import dataclasses
import functools

from absl.testing import parameterized
import jax
import jax.numpy as jnp
import numpy as np

from longstraw_jax import (
  PRESETS,
  Group,
  LoraConfig,
  Model,
  Params,
  PolicyObjective,
  add_lora,
  branch_gradient,
  capture,
  extend,
  group_gradient,
  quantize_base,
  replay,
  rollout,
  sequence_logprobs,
)

STAGES = tuple(
  dataclasses.replace(stage, repeats=1)
  for stage in PRESETS["tiny-hybrid"].stages
)
PROMPT = np.arange(6, dtype=np.int32)
GROUP = Group.create([[1, 2], [3, 4]], [2, 1], advantages=[1.0, -1.0])
A_LOG = "stage_0/layer_0/mixer/A_log"
GATE = "stage_0/layer_0/ffn/gate_proj/kernel"


@functools.cache
def build(dtype: str, param_dtype: str) -> tuple[Model, Params]:
  config = dataclasses.replace(
    PRESETS["tiny-hybrid"],
    dtype=dtype,
    param_dtype=param_dtype,
    saved="everything",
    stages=STAGES,
  )
  model = Model(config)
  return model, jax.jit(model.init)(jax.random.key(0))


def cast(params: Params, dtype: str, only: str = "") -> Params:
  """Params whose leaves, or those of one path, are of a dtype."""
  name = functools.partial(jax.tree_util.keystr, simple=True, separator="/")
  return jax.tree_util.tree_map_with_path(
    lambda path, x: x.astype(dtype) if only in name(path) else x, params
  )


def doors(model: Model, params: Params) -> dict:
  """Every public call, with weights of another dtype than its state's."""
  state = capture(model, params, PROMPT, chunk_size=4)
  group = (PROMPT, GROUP, PolicyObjective())
  return {
    "sequence_logprobs": lambda p: sequence_logprobs(model, p, PROMPT),
    "capture": lambda p: capture(model, p, PROMPT, chunk_size=4),
    "extend": lambda p: extend(model, p, state, PROMPT[:1]),
    "replay": lambda p: replay(model, p, state, GROUP.responses, GROUP.lengths),
    "rollout": lambda p: rollout(
      model, p, state, jax.random.key(0), group_size=2, max_tokens=2
    ),
    "group_gradient": lambda p: group_gradient(model, p, *group, chunk_size=4),
    "branch_gradient": lambda p: branch_gradient(
      model, p, *group[1:], state, block_size=2
    ),
  }


class WeightDtypesTest(parameterized.TestCase):
  @parameterized.parameters(
    ("float32", "float32", ""),
    ("bfloat16", "float32", A_LOG),
    ("bfloat16", "bfloat16", GATE),
  )
  def test_wider_than_the_model_is_refused(self, dtype, param_dtype, only):
    model, params = build(dtype, param_dtype)
    wrong = cast(params, "float64", only)
    message = (
      f"{only}.* are of dtype float64, the model computes in {dtype} and its "
      f"param_dtype is {param_dtype}"
    )
    for name, call in doors(model, params).items():
      for run in (call, jax.jit(call)):
        with self.subTest(name), self.assertRaisesRegex(ValueError, message):
          run(wrong)

  def test_wide_adapters_and_integers_are_refused(self):
    model, params = build("float32", "float32")
    lora = LoraConfig(rank=2)
    wide = add_lora(model, params, jax.random.key(1), lora, dtype="float64")
    with self.assertRaisesRegex(ValueError, "lora.* are of dtype float64"):
      sequence_logprobs(model, wide, PROMPT)
    whole = cast(params, "int8", GATE)
    with self.assertRaisesRegex(ValueError, f"{GATE} are of dtype int8"):
      sequence_logprobs(model, whole, PROMPT)

  @parameterized.parameters(
    ("float32", "float32", "bfloat16"),
    ("bfloat16", "bfloat16", "float32"),
  )
  def test_narrower_is_widened(self, dtype, param_dtype, other):
    """The same numbers as when cast beforehand, to the bit."""
    model, params = build(dtype, param_dtype)
    given = cast(params, other)
    run = jax.jit(functools.partial(sequence_logprobs, model, tokens=PROMPT))
    found, expected = run(given), run(cast(given, param_dtype))
    np.testing.assert_array_equal(found, expected)

  def test_adapters_of_float32_over_what_is_stored_narrower(self):
    model, _ = build("bfloat16", "bfloat16")
    make = lambda key: add_lora(model, model.init(key), key, LoraConfig(rank=2))
    params = jax.eval_shape(make, jax.random.key(1))
    self.assertEqual(
      {x.dtype for x in jax.tree.leaves(params.trainable)},
      {jnp.dtype("float32")},
    )
    run = functools.partial(sequence_logprobs, model, tokens=PROMPT)
    for given in (params, jax.eval_shape(quantize_base, params)):
      self.assertEqual(jax.eval_shape(run, given).dtype, jnp.float32)
