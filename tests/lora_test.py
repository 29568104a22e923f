"""Adapters against the chain rule of the merged model, and prefix_frozen."""

import dataclasses
import functools
import json
import pathlib
import tempfile

from absl.testing import parameterized
from flax import traverse_util
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from longstraw_jax import (
  PRESETS,
  Group,
  LayerSpec,
  Model,
  Params,
  PolicyObjective,
  Span,
  Stage,
  capture,
  group_gradient,
  replay,
  sequence_logprobs,
  steps,
)
from longstraw_jax.lora import (
  LEAVES,
  LoraConfig,
  adapted_paths,
  add_lora,
  drop_lora,
  has_lora,
  linear_paths,
  merge_lora,
)
from longstraw_jax.models.layers import Linear
from longstraw_jax.state import Pages, tree_zeros
from longstraw_jax.steps import make_learner, score_reference, update
from longstraw_jax.tasks import Corpus, TaskConfig, make_task
from longstraw_jax.testing.baselines import (
  bounded_gradient,
  constant_tokens,
  group_scores,
)
from longstraw_jax.testing.compare import assert_gradients_close, quick_jit
from longstraw_jax.tokenizer import ByteTokenizer
from longstraw_jax.train_config import (
  EngineConfig,
  OptimizerConfig,
  SamplingConfig,
  TrainConfig,
)
from longstraw_jax.trainer import Trainer
from longstraw_jax.walk import zero_gradients
from longstraw_jax.weights.peft_files import (
  CONFIG_NAME,
  WEIGHTS_NAME,
  load_adapter,
  save_adapter,
)
from longstraw_jax.weights.safetensors_files import SafetensorsSource

CONFIG = dataclasses.replace(
  PRESETS["tiny-hybrid"],
  dtype="float64",
  param_dtype="float64",
  norm_eps=1e-3,
  saved="everything",
)
MODEL = Model(CONFIG)
CHUNK = 8
PROMPT = jnp.asarray(np.random.default_rng(0).integers(0, 61, 21), jnp.int32)
GROUP = Group.create(
  [[3, 9, 27, 20, 60], [5, 25, 3, 0, 0]],
  [5, 3],
  rewards=[1.0, 0.0],
  advantages=[1.0, -0.7],
  old_logprobs=np.full((2, 5), -4.0),
)
OBJECTIVE = PolicyObjective(entropy_coef=0.05, clip_low=0.9, clip_high=9.0)
LORA = LoraConfig(rank=3, alpha=7.0, targets="all-linear")


@functools.cache
def base() -> Params:
  """Well conditioned, as in gradients_test."""
  params = MODEL.init(jax.random.key(1))
  change = lambda path, x: 8 * x if "embed" in str(path) else x
  return jax.tree_util.tree_map_with_path(change, params)


def trained(params: Params, seed: int = 2) -> Params:
  """The same with B away from zero, as after some steps."""
  random = np.random.default_rng(seed)

  def change(path, x):
    noise = 0.1 * random.normal(size=x.shape)
    return jnp.asarray(x + noise, x.dtype) if "lora_b" in str(path) else x

  return params.replace(
    trainable=jax.tree_util.tree_map_with_path(change, params.trainable)
  )


@functools.cache
def adapted() -> Params:
  return trained(add_lora(MODEL, base(), jax.random.key(3), LORA))


def flatten(tree) -> dict:
  return traverse_util.flatten_dict(tree, sep="/")


def unflatten(flat) -> dict:
  return traverse_util.unflatten_dict(flat, sep="/")


def chain_rule(params: Params, dense: dict) -> dict:
  """dA = s dW B^T and dB = s A^T dW from the merged model's gradient."""
  tree, dense, grads = flatten(params.merged()), flatten(dense), {}
  for path in adapted_paths(MODEL, LORA):
    a, b, scale = (tree[f"{path}/{leaf}"] for leaf in LEAVES)
    dw = dense[f"{path}/kernel"] * scale[:, None, None]
    grads[f"{path}/lora_a"] = dw @ b.swapaxes(1, 2)
    grads[f"{path}/lora_b"] = a.swapaxes(1, 2) @ dw
  return unflatten(grads)


def assert_same(a, b) -> None:
  """Structure, dtypes and bits."""
  assert jax.tree.structure(a) == jax.tree.structure(b)
  for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
    assert x.dtype == y.dtype
    np.testing.assert_array_equal(x, y)


class GradientTest(parameterized.TestCase):
  @parameterized.parameters("full", "response_only")
  def test_equals_the_chain_rule_of_the_merged_model(self, scope):
    self.check(scope, None)

  @parameterized.parameters(1, 2)
  @pytest.mark.slow
  def test_equals_it_over_the_last_chunks(self, tail):
    self.check("tail", tail)

  def check(self, scope, tail):
    params = adapted()
    merged = MODEL.split(merge_lora(params).merged())
    length = len(PROMPT)
    boundary = constant_tokens(scope, length, CHUNK, tail)
    loss, dense, _ = bounded_gradient(
      MODEL, merged, PROMPT, GROUP, OBJECTIVE, length, boundary
    )
    ours, grads, _ = group_gradient(
      MODEL,
      params,
      PROMPT,
      GROUP,
      OBJECTIVE,
      chunk_size=CHUNK,
      grad_scope=scope,
      tail_chunks=tail,
    )
    np.testing.assert_allclose(ours, loss, rtol=1e-12)
    expected = chain_rule(params, dense)
    assert_gradients_close(grads, expected, 1e-12, scope)
    for path, leaf in flatten(expected).items():
      self.assertGreater(float(jnp.abs(leaf).max()), 0, path)

  def test_a_map_used_as_a_matrix(self):
    random = np.random.default_rng(0)
    make = lambda *shape: jnp.asarray(random.normal(size=shape))
    tree = {
      "kernel": make(5, 4),
      "lora_a": make(5, 2),
      "lora_b": make(2, 4),
      "lora_scale": jnp.float64(1.5),
    }
    expected = tree["kernel"] + 1.5 * tree["lora_a"] @ tree["lora_b"]
    linear, x = Linear(4, "float64", "float64"), make(3, 5)
    matrix = linear.apply({"params": tree}, 5, method="matrix")
    np.testing.assert_allclose(matrix, expected, rtol=1e-12)
    y = linear.apply({"params": tree}, x)
    np.testing.assert_allclose(y, x @ expected, rtol=1e-12)


class AdaptersTest(parameterized.TestCase):
  def test_only_adapters_learn(self):
    params = adapted()
    paths = flatten(params.trainable)
    self.assertLen(paths, 2 * len(linear_paths(MODEL)))
    for path in paths:
      self.assertIn(path.rpartition("/")[2], ("lora_a", "lora_b"))
    structure = jax.tree.structure(params.trainable)
    sums = zero_gradients(params)
    self.assertEqual(jax.tree.structure(sums), structure)
    _, grads, _ = group_gradient(
      MODEL, params, PROMPT, GROUP, OBJECTIVE, chunk_size=CHUNK
    )
    self.assertEqual(jax.tree.structure(grads), structure)
    learner = make_learner(params, OptimizerConfig())
    moments = [x for x in jax.tree.leaves(learner.opt_state) if x.ndim]
    self.assertLen(moments, 2 * len(paths))

  def test_a_new_adapter_changes_nothing(self):
    params = add_lora(MODEL, base(), jax.random.key(0), LORA)
    score = quick_jit(lambda p: sequence_logprobs(MODEL, p, PROMPT))
    np.testing.assert_allclose(score(params), score(base()), rtol=1e-14)
    for path, leaf in flatten(params.trainable).items():
      if path.endswith("lora_b"):
        np.testing.assert_array_equal(leaf, 0)
        continue
      bound = leaf.shape[1] ** -0.5  # kaiming_uniform_(a=sqrt(5)) of [r, D]
      self.assertLessEqual(float(jnp.abs(leaf).max()), bound)
      self.assertGreater(float(jnp.abs(leaf).max()), 0.8 * bound)
      self.assertEqual(leaf.shape[-1], 3)
    scales = [
      x for p, x in flatten(params.frozen).items() if p.endswith("lora_scale")
    ]
    for scale in scales:
      np.testing.assert_array_equal(scale, np.full(2, 7 / 3))

  def test_merged_and_dropped(self):
    params = adapted()
    self.assertTrue(has_lora(params))
    self.assertFalse(has_lora(base()))
    dropped = drop_lora(params)
    self.assertFalse(has_lora(dropped))
    self.assertFalse(dropped.trainable)
    assert_same(dropped.frozen, base().trainable)
    score = quick_jit(lambda p: sequence_logprobs(MODEL, p, PROMPT))
    ours = score(params)
    np.testing.assert_allclose(score(merge_lora(params)), ours, rtol=1e-12)
    self.assertGreater(float(jnp.abs(score(base()) - ours).max()), 0.05)
    assert_same(merge_lora(dropped), dropped)

  def test_targets(self):
    paths = lambda *targets: adapted_paths(MODEL, LoraConfig(targets=targets))
    self.assertEqual(paths("q_proj"), ("stage_0/layer_1/mixer/q_proj",))
    self.assertEqual(paths("mixer/q_proj"), paths("q_proj"))
    self.assertLen(paths("gate_proj", "up_proj"), 4)
    self.assertEqual(paths(r".*layer_1/ffn/\w+_proj"), paths(r".*1/ffn/.*"))
    self.assertEqual(paths("all-linear"), linear_paths(MODEL))
    maps = {path.split("/", 2)[-1] for path in linear_paths(MODEL)}
    delta = {f"in_proj_{x}" for x in ("qkv", "z", "a", "b")} | {"out_proj"}
    attention = {f"{x}_proj" for x in "qkvo"}
    ffn = {f"ffn/{x}_proj" for x in ("gate", "up", "down")}
    self.assertEqual(maps, {f"mixer/{x}" for x in delta | attention} | ffn)

  def test_the_papers_number_of_parameters(self):
    """Rank 16 on every linear map of the 27B model: 116.7M."""
    model, config = Model(PRESETS["qwen3.6-27b"]), LoraConfig(rank=16)
    params = jax.eval_shape(
      lambda key: add_lora(model, model.init(key), key, config),
      jax.random.key(0),
    )
    sizes = [x.size for x in jax.tree.leaves(params.trainable)]
    self.assertEqual(sum(sizes), 116_727_808)

  def test_adapters_of_a_narrow_base_are_wide(self):
    config = dataclasses.replace(
      CONFIG, dtype="bfloat16", param_dtype="bfloat16"
    )
    model = Model(config)
    shapes = jax.eval_shape(
      lambda key: add_lora(model, model.init(key), key, LORA),
      jax.random.key(0),
    )
    for leaf in jax.tree.leaves(shapes.trainable):
      self.assertEqual(leaf.dtype, jnp.float32)
    shapes = jax.eval_shape(
      lambda key: add_lora(model, model.init(key), key, LORA, "bfloat16"),
      jax.random.key(0),
    )
    for leaf in jax.tree.leaves(shapes.trainable):
      self.assertEqual(leaf.dtype, jnp.bfloat16)

  @parameterized.parameters(
    ({"rank": 0}, "rank is 0"),
    ({"alpha": 0.0}, "alpha is 0"),
    ({"targets": ()}, "targets is empty"),
    ({"targets": ("q_proj", "qq_proj")}, r"\['qq_proj'\] name no linear map"),
    ({"targets": "head"}, "one of .*'mixer/q_proj'"),
    ({"targets": "_proj"}, "regular expression"),
  )
  def test_refused(self, changes, message):
    with self.assertRaisesRegex(ValueError, message):
      config = dataclasses.replace(LORA, **changes)
      add_lora(MODEL, base(), jax.random.key(0), config)

  def test_a_second_adapter_is_refused(self):
    with self.assertRaisesRegex(ValueError, "have adapters already"):
      add_lora(MODEL, adapted(), jax.random.key(0), LORA)


# --- prefix_frozen ---------------------------------------------------------


def frozen_prefix_scores(params: Params):
  """The oracle: base over P - 1 tokens in one call, then plain autodiff."""
  captured = len(PROMPT) - 1
  positions = lambda n, first: first + jnp.arange(n, dtype=jnp.int32)
  carry = tree_zeros(MODEL.state_shapes(1)[1])
  span = Span(positions=positions(captured, 0), length=jnp.int32(captured))
  out = MODEL.hidden(drop_lora(params), PROMPT[:-1], span, (), carry)
  pages = Pages(
    rows=out.rows, taps=None, length=span.length, start=jnp.int32(0)
  )

  def one(response, length):
    tokens = jnp.append(PROMPT[-1], response[:-1])
    span = Span(positions=positions(len(tokens), captured), length=length)
    branch = MODEL.hidden(params, tokens, span, (pages,), out.carry)
    scores = MODEL.logprobs(params, branch.x_TD, response)
    return jax.tree.map(lambda x: jnp.where(span.mask, x, 0.0), scores)

  return jax.vmap(one)(GROUP.responses, GROUP.lengths)


OPTIMIZER = OptimizerConfig(learning_rate=1e-2, warmup_steps=0)


def engine(chunk_size: int = CHUNK) -> EngineConfig:
  return EngineConfig(chunk_size=chunk_size, grad_scope="prefix_frozen")


def frozen_state(params: Params, scope: str = "prefix_frozen"):
  return capture(MODEL, params, PROMPT, chunk_size=CHUNK, grad_scope=scope)


class PrefixFrozenTest(parameterized.TestCase):
  @pytest.mark.slow
  def test_gradient(self):
    params = adapted()

    def loss_of(trainable):
      scores = frozen_prefix_scores(params.replace(trainable=trainable))
      return OBJECTIVE(*scores, GROUP)[0]

    loss, expected = quick_jit(jax.value_and_grad(loss_of))(params.trainable)
    ours, grads, _ = group_gradient(
      MODEL,
      params,
      PROMPT,
      GROUP,
      OBJECTIVE,
      chunk_size=CHUNK,
      grad_scope="prefix_frozen",
    )
    np.testing.assert_allclose(ours, loss, rtol=1e-12)
    assert_gradients_close(grads, expected, 1e-12)

  def test_the_state_stays_good_over_optimizer_steps(self):
    learner = make_learner(adapted(), OPTIMIZER)
    state = frozen_state(learner.params)
    many = lambda tree: jax.tree.map(lambda x: x[None], tree)
    for _ in range(8):
      learner, metrics = update(
        MODEL,
        engine(),
        OPTIMIZER,
        OBJECTIVE,
        learner,
        PROMPT[None],
        many(GROUP),
        many(state),
      )
      self.assertGreater(float(metrics["grad_norm"]), 0)
    self.assertEqual(int(learner.step), 8)
    for old, new in zip(
      jax.tree.leaves(adapted().trainable),
      jax.tree.leaves(learner.params.trainable),
      strict=True,
    ):
      self.assertGreater(float(jnp.abs(old - new).max()), 1e-3)
    assert_same(learner.params.frozen, adapted().frozen)
    assert_same(frozen_state(learner.params), state)
    # That of another scope would have changed, and is refused when stale.
    moved = frozen_state(learner.params, "response_only")
    gap = moved.pages["stage_0"]["layer_1"]["k"]
    gap = gap - state.pages["stage_0"]["layer_1"]["k"]
    self.assertGreater(float(jnp.abs(gap).max()), 1e-2)
    options = {"chunk_size": CHUNK, "step": 8}
    call = functools.partial(
      group_gradient, MODEL, learner.params, PROMPT, GROUP, OBJECTIVE
    )
    call(state=state, grad_scope="prefix_frozen", **options)
    with self.assertRaisesRegex(ValueError, "weights of step 0"):
      call(state=moved, grad_scope="response_only", **options)

  @pytest.mark.slow
  def test_the_reference_is_the_base_with_a_state_of_its_own(self):
    params = adapted()
    groups = jax.tree.map(lambda x: x[None], GROUP)
    score = lambda params: score_reference(
      MODEL, engine(), params, groups, PROMPT[None]
    )[0]
    expected, _ = group_scores(MODEL, base(), PROMPT, GROUP)
    ours = score(drop_lora(params))
    np.testing.assert_allclose(ours, expected, rtol=1e-12)
    policy = replay(
      MODEL, params, frozen_state(params), GROUP.responses, GROUP.lengths
    )
    self.assertGreater(float(jnp.abs(policy - ours).max()), 1e-2)
    # A reference with adapters is read as the policy is.
    np.testing.assert_allclose(score(params), policy, rtol=1e-12)

  def test_refused_unless_exactly_adapters_learn(self):
    params = adapted()
    everything = Params(
      trainable=params.merged(), frozen=Params({}, {}).merged()
    )
    for bad, message in (
      (base(), "'embed' learns"),
      (drop_lora(params), "nothing learns"),
      (everything, "learns"),
    ):
      with self.assertRaisesRegex(ValueError, message):
        frozen_state(bad)

  def test_trainer_shares_one_state(self):
    config = dataclasses.replace(
      PRESETS["tiny-hybrid"],
      vocab_size=258,
      stages=(Stage(pattern=(LayerSpec(mixer="attention"),), repeats=1),),
    )
    model = Model(config)
    plain = model.init(jax.random.key(0))
    params = trained(add_lora(model, plain, jax.random.key(1), LORA))
    task = make_task(
      TaskConfig(prompt_tokens=40, num_facts=1),
      Corpus.standard_library(),
      ByteTokenizer(),
    )
    settings = TrainConfig(
      prompts_per_step=2,
      updates_per_rollout=2,
      sampling=SamplingConfig(group_size=2, max_tokens=2),
      engine=engine(20),
      optimizer=OPTIMIZER,
    )
    reward = lambda prompt, response, info: sum(response.encode()) % 7 / 7
    trainer = Trainer(model, settings, task, ByteTokenizer(), reward)
    programs = steps._update._cache_size()
    learner, row = trainer.step(make_learner(params, OPTIMIZER), 0, None)
    self.assertEqual(
      steps._update._cache_size(), programs + 1
    )  # both with a state
    self.assertEqual(int(learner.step), 2)
    self.assertGreater(row["grad_norm"], 0)
    assert_same(learner.params.frozen, params.frozen)
    # Evaluation captures by the same scope: it is the same policy.
    with self.assertRaisesRegex(ValueError, "prefix_frozen"):
      trainer.evaluate(make_learner(plain, OPTIMIZER), 2)


# --- Files -----------------------------------------------------------------


class FilesTest(parameterized.TestCase):
  def folder(self) -> pathlib.Path:
    made = tempfile.TemporaryDirectory()
    self.addCleanup(made.cleanup)
    return pathlib.Path(made.name)

  @parameterized.parameters("bfloat16", "float16", "float32", "float64")
  def test_adapters_are_wide_whatever_the_file_has(self, dtype):
    """They are what learns: float32, or wider where they are; values exact."""
    folder = self.folder()
    made = trained(add_lora(MODEL, base(), jax.random.key(0), LORA))
    cast = lambda x: x.astype(dtype)
    narrow = made.replace(trainable=jax.tree.map(cast, made.trainable))
    save_adapter(folder, MODEL, narrow)
    loaded = load_adapter(folder, MODEL, base())
    wide = jnp.promote_types(dtype, jnp.float32)
    for a, b in zip(
      jax.tree.leaves(loaded.trainable),
      jax.tree.leaves(narrow.trainable),
      strict=True,
    ):
      self.assertEqual(a.dtype, wide)
      np.testing.assert_array_equal(a, b.astype(wide))

  @parameterized.parameters("float32", "bfloat16", "float64")
  def test_round_trip(self, dtype):
    folder = self.folder()
    config = dataclasses.replace(LORA, rank=6, alpha=32.0)
    key = jax.random.key(0)
    params = trained(add_lora(MODEL, base(), key, config, dtype))
    save_adapter(folder, MODEL, params)
    assert_same(load_adapter(folder, MODEL, base(), dtype), params)
    settings = json.loads((folder / CONFIG_NAME).read_text())
    self.assertEqual(settings["r"], 6)
    self.assertEqual(settings["lora_alpha"], 32)

  def test_layout(self):
    folder = self.folder()
    targets = ("q_proj", "in_proj_qkv", r".*layer_1/ffn/up_proj")
    config = dataclasses.replace(LORA, targets=targets)
    params = trained(add_lora(MODEL, base(), jax.random.key(0), config))
    save_adapter(folder, MODEL, params, base="a/b")
    source = SafetensorsSource(folder / WEIGHTS_NAME)
    names = {  # layers 0 and 2 are delta, 1 and 3 attention
      "layers.0.linear_attn.in_proj_qkv": (24, 56),
      "layers.2.linear_attn.in_proj_qkv": (24, 56),
      "layers.1.self_attn.q_proj": (24, 64),
      "layers.3.self_attn.q_proj": (24, 64),
      "layers.1.mlp.up_proj": (24, 40),
      "layers.3.mlp.up_proj": (24, 40),
    }
    expected = {}
    for name, (inputs, outputs) in names.items():
      key = f"base_model.model.model.{name}.lora_"
      expected[f"{key}A.weight"] = (3, inputs)
      expected[f"{key}B.weight"] = (outputs, 3)
    found = {name: info.shape for name, info in source.tensors.items()}
    self.assertEqual(found, expected)
    mixer = params.trainable["stage_0"]["layer_1"]["mixer"]
    key = "base_model.model.model.layers.3.self_attn.q_proj.lora_A.weight"
    np.testing.assert_array_equal(
      source.read(key), mixer["q_proj"]["lora_a"][1].T
    )
    settings = json.loads((folder / CONFIG_NAME).read_text())
    self.assertEqual(settings["base_model_name_or_path"], "a/b")
    # up_proj alone would find those of layers 0 and 2 too.
    self.assertEqual(
      settings["target_modules"],
      sorted(f"model.{name}" for name in names),
    )

  def test_short_target_names(self):
    for target in ("q_proj", "up_proj", "all-linear"):
      folder = self.folder()
      config = dataclasses.replace(LORA, targets=target)
      params = add_lora(MODEL, base(), jax.random.key(0), config)
      save_adapter(folder, MODEL, params, trunk="model.language_model.")
      settings = json.loads((folder / CONFIG_NAME).read_text())
      short = {"q_proj": ["q_proj"], "up_proj": ["mlp.up_proj"]}
      if target in short:
        self.assertEqual(settings["target_modules"], short[target])
      assert_same(load_adapter(folder, MODEL, base()), params)

  @parameterized.parameters(
    ({"use_dora": True}, "use_dora is True"),
    ({"peft_type": "IA3"}, "peft_type is 'IA3'"),
    ({"rank_pattern": {"q_proj": 2}}, "rank_pattern is"),
    ({"modules_to_save": ["lm_head"]}, "modules_to_save is"),
    ({"init_lora_weights": "pissa"}, "init_lora_weights is 'pissa'"),
    ({"lora_alpha": None}, "lora_alpha is None"),
  )
  def test_other_kinds_are_refused(self, changes, message):
    folder = self.folder()
    save_adapter(folder, MODEL, adapted())
    file = folder / CONFIG_NAME
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    with self.assertRaisesRegex(ValueError, message):
      load_adapter(folder, MODEL, base())

  def test_root_scaling(self):
    folder = self.folder()
    save_adapter(folder, MODEL, adapted())
    file = folder / CONFIG_NAME
    settings = json.loads(file.read_text()) | {"use_rslora": True}
    file.write_text(json.dumps(settings))
    loaded = load_adapter(folder, MODEL, base())
    scale = loaded.frozen["stage_0"]["layer_1"]["mixer"]["q_proj"]["lora_scale"]
    np.testing.assert_allclose(scale, 7 / 3**0.5, rtol=1e-12)

  def test_other_models_are_refused(self):
    folder = self.folder()
    save_adapter(folder, MODEL, adapted())
    stage = CONFIG.stages[0]
    repeats = lambda n: Model(
      dataclasses.replace(
        CONFIG, stages=(dataclasses.replace(stage, repeats=n),)
      )
    )
    shorter, longer = repeats(1), repeats(3)
    wider = Model(dataclasses.replace(CONFIG, embed_dim=32))
    for model, message in (
      (shorter, "belongs to no linear map"),
      (longer, "has no lora_A in repeat 2 of 3"),
      (wider, r"has shape \(24, 3\), wanted is \(32, 3\)"),
    ):
      params = jax.eval_shape(model.init, jax.random.key(0))
      with self.assertRaisesRegex(ValueError, message):
        load_adapter(folder, model, params)

  def test_misuse(self):
    folder = self.folder()
    with self.assertRaisesRegex(ValueError, "no adapters"):
      save_adapter(folder, MODEL, base())
    with self.assertRaises(FileNotFoundError):
      load_adapter(folder, MODEL, base())
    save_adapter(folder, MODEL, adapted())
    with self.assertRaisesRegex(FileExistsError, WEIGHTS_NAME):
      save_adapter(folder, MODEL, adapted())
    with self.assertRaisesRegex(ValueError, "have adapters already"):
      load_adapter(folder, MODEL, adapted())
    self.assertEqual(
      sorted(file.name for file in folder.iterdir()),
      [CONFIG_NAME, WEIGHTS_NAME],
    )
