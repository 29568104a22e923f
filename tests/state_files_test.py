"""A captured state on disk comes back to the bit, or is refused."""

import dataclasses
import os
import pathlib
import tempfile
from unittest import mock

from absl.testing import absltest, parameterized
import jax
import jax.numpy as jnp
import numpy as np
from safetensors import safe_open

from longstraw_jax import (
  LoraConfig,
  Model,
  add_lora,
  capture,
  drop_lora,
  group_gradient,
  load_state,
  make_mesh,
  quantize_base,
  replay,
  save_state,
  split_params,
)
from longstraw_jax.models.model import Params
from longstraw_jax.ops.pages import Striping
from longstraw_jax.weights.safetensors_files import (
  SafetensorsSource,
  write_safetensors_file,
)
from tests.extend_test import (
  CHUNK,
  OBJECTIVE,
  PROMPT,
  adapted,
  build,
  captured,
  extended,
  make_group,
  scoped,
)

NAME = "prompt.state"


def assert_bitwise(state, expected) -> None:
  """Structure, static fields, dtypes and every bit."""
  assert jax.tree.structure(state) == jax.tree.structure(expected)
  for a, b in zip(
    jax.tree.leaves(state), jax.tree.leaves(expected), strict=True
  ):
    assert a.dtype == b.dtype
    bits = lambda x: np.atleast_1d(x).view(np.uint8)
    np.testing.assert_array_equal(bits(a), bits(b))


def changed(tree, path: str):
  """The tree with one number of one leaf, a/b/c, moved by its last bit."""

  def change(at, x):
    if jax.tree_util.keystr(at, simple=True, separator="/") != path:
      return x
    first = (0,) * x.ndim
    return x.at[first].set(jnp.nextafter(x[first], jnp.inf))

  moved = jax.tree_util.tree_map_with_path(change, tree)
  return moved


class Files(parameterized.TestCase):
  def setUp(self):
    super().setUp()
    folder = tempfile.TemporaryDirectory()
    self.addCleanup(folder.cleanup)
    self.folder = pathlib.Path(folder.name)
    self.path = self.folder / NAME

  def save(self, scope="full", name="tiny-hybrid"):
    """A saved state and what made it."""
    model, params, _ = scoped(name, scope)
    state = captured(name, scope, 40, step=6, prompt_id=4)
    save_state(self.path, model, params, state)
    return model, params, state

  def refused(self, model, params, message):
    with self.assertRaisesRegex(ValueError, message):
      load_state(self.path, model, params)


class RoundTripTest(Files):
  @parameterized.parameters(
    ("tiny-hybrid", "full"),
    ("tiny-hybrid", "tail"),
    ("tiny-hybrid", "response_only"),
    ("tiny-hybrid", "prefix_frozen"),
    ("tiny-glm", "full"),
  )
  def test_every_bit(self, name, scope):
    model, params, state = self.save(scope, name)
    assert_bitwise(load_state(self.path, model, params), state)

  def test_in_bfloat16(self):
    config = dataclasses.replace(
      build("tiny-hybrid")[0].config, dtype="bfloat16", param_dtype="bfloat16"
    )
    model = Model(config)
    params = jax.jit(model.init)(jax.random.key(0))
    state = capture(model, params, PROMPT[:20], chunk_size=CHUNK)
    save_state(self.path, model, params, state)
    assert_bitwise(load_state(self.path, model, params), state)

  def test_use(self):
    """Replayed, gone on with and differentiated as if never saved."""
    model, params, state = self.save()
    loaded, group = load_state(self.path, model, params), make_group()

    def uses(state):
      logprobs = replay(model, params, state, group.responses, group.lengths)
      longer = extended("tiny-hybrid", state, 40, 50, step=6)
      gradient = group_gradient(
        model,
        params,
        PROMPT[:50],
        group,
        OBJECTIVE,
        chunk_size=CHUNK,
        state=longer,
        step=6,
      )
      return logprobs, gradient

    assert_bitwise(uses(loaded), uses(state))

  def test_the_file_is_plain_safetensors(self):
    _, _, state = self.save()
    with safe_open(self.path, "numpy") as opened:
      names = opened.keys()
      found = opened.get_tensor("pages.stage_0.layer_1.k")
    stored = state.replace(fingerprint=None)  # the stamp knows every weight
    self.assertLen(names, len(jax.tree.leaves(stored)))
    np.testing.assert_array_equal(found, state.pages["stage_0"]["layer_1"]["k"])

  def test_the_array_is_a_copy(self):
    """A file that is replaced or cut takes nothing from a loaded state."""
    model, params, state = self.save()
    loaded = load_state(self.path, model, params)
    with self.path.open("r+b") as opened:
      opened.truncate(16)
    assert_bitwise(loaded, state)

  def test_on_meshes(self):
    """Written by one device or four that share it, read by one or two."""
    model, params, state = self.save()
    plain = self.path.read_bytes()
    with jax.set_mesh(make_mesh(4)):
      dealt = load_state(self.path, model, params)
      save_state(self.path, model, params, dealt)
    self.assertEqual(dealt.striping, Striping(chunk=CHUNK, shards=4))
    self.assertEqual(self.path.read_bytes(), plain)
    with jax.set_mesh(make_mesh(2)):
      dealt = load_state(self.path, model, params)
    k = dealt.pages["stage_0"]["layer_1"]["k"]
    held = np.asarray(k.addressable_shards[1].data)
    whole = np.asarray(state.pages["stage_0"]["layer_1"]["k"])
    for chunk in range(4):
      np.testing.assert_array_equal(
        held[..., 8 * chunk :, :][..., :8, :],
        whole[..., CHUNK * chunk + 8 :, :][..., :8, :],
      )

  def test_which_leaves_learn_does_not_matter(self):
    model, params, state = self.save()
    frozen = split_params(params.merged(), lambda path: path == "embed")
    assert_bitwise(load_state(self.path, model, frozen), state)

  def test_the_name_of_a_model_does_not_matter(self):
    model, params, state = self.save()
    model = Model(dataclasses.replace(model.config, name="another"))
    assert_bitwise(load_state(self.path, model, params), state)


class OtherWeightsTest(Files):
  @parameterized.parameters("embed", "stage_0/layer_0/mixer/conv")
  def test_one_bit_of_one_leaf(self, leaf):
    model, params, _ = self.save()
    moved = params.replace(trainable=changed(params.trainable, leaf))
    message = rf"other weights: 1 of \d+ leaves differ \({leaf}\)"
    self.refused(model, moved, message)

  def test_a_frozen_leaf(self):
    model, params, _ = self.save("full", "tiny-glm")
    leaf = "stage_0/layer_0/mixer/indexer/k_norm/bias"
    moved = params.replace(frozen=changed(params.frozen, leaf))
    self.refused(model, moved, leaf)

  def test_new_leaves(self):
    model, _, _ = self.save()
    self.refused(model, adapted(), r"lora_a, .* and \d+ more\)")

  def test_adapters_of_a_state_that_has_them(self):
    model, params = build("tiny-hybrid")[0], adapted()
    state = capture(model, params, PROMPT[:20], chunk_size=CHUNK)
    save_state(self.path, model, params, state)
    assert_bitwise(load_state(self.path, model, params), state)
    learned = jax.tree.map(lambda x: x + 1e-3, params.trainable)
    self.refused(model, params.replace(trainable=learned), "lora_a")

  def test_a_base_in_four_bits(self):
    model, _ = build("tiny-hybrid")
    params = quantize_base(adapted())
    state = capture(model, params, PROMPT[:20], chunk_size=CHUNK)
    save_state(self.path, model, params, state)
    assert_bitwise(load_state(self.path, model, params), state)
    kernel = params.frozen["stage_0"]["layer_0"]["ffn"]["down_proj"]["kernel"]
    kernel = kernel.replace(offset=kernel.offset + 1e-3)
    moved = jax.tree.map(lambda x: x, params)
    moved.frozen["stage_0"]["layer_0"]["ffn"]["down_proj"]["kernel"] = kernel
    self.refused(model, moved, r"1 of .*ffn/down_proj/kernel\)")


class PrefixFrozenTest(Files):
  def test_good_after_the_adapters_learned(self):
    model, params, state = self.save("prefix_frozen")
    learned = jax.tree.map(lambda x: x + 0.1, params.trainable)
    learned = params.replace(trainable=learned)
    assert_bitwise(load_state(self.path, model, learned), state)
    other = LoraConfig(rank=3, alpha=5.0, targets=("q_proj",))
    other = add_lora(model, drop_lora(params), jax.random.key(5), other)
    assert_bitwise(load_state(self.path, model, other), state)

  def test_another_base(self):
    model, params, _ = self.save("prefix_frozen")
    frozen = changed(params.frozen, "final_norm")
    self.refused(
      model, params.replace(frozen=frozen), r"1 of .* \(final_norm\)"
    )

  def test_a_base_that_learns(self):
    model, params, _ = self.save("prefix_frozen")
    learning = Params(trainable=params.merged(), frozen={})
    self.refused(model, learning, "learns: it needs parameters")


class OtherModelTest(Files):
  @parameterized.parameters(
    ({"norm_eps": 1e-6}, "norm_eps is 0.001 there and 1e-06 here"),
    ({"dtype": "float32"}, "dtype is 'float64' there and 'float32' here"),
    ({"delta.conv_width": 3}, "delta.conv_width is 4 there and 3 here"),
  )
  def test_named(self, changes, message):
    model, params, _ = self.save()
    ((name, value),) = changes.items()
    outer, _, inner = name.partition(".")
    if inner:
      part = getattr(model.config, outer)
      value = dataclasses.replace(part, **{inner: value})
    config = dataclasses.replace(model.config, **{outer: value})
    self.refused(Model(config), params, message)

  def test_saving_a_state_of_another_model(self):
    model, params = build("tiny-glm")
    state = captured("tiny-hybrid", "full", 20)
    with self.assertRaisesRegex(ValueError, "not of this model: .*latent"):
      save_state(self.path, model, params, state)
    self.assertEqual(os.listdir(self.folder), [])

  def test_saving_a_batch(self):
    model, params = build("tiny-hybrid")
    state = captured("tiny-hybrid", "full", 20)
    states = jax.tree.map(lambda x: x[None], state)
    with self.assertRaisesRegex(ValueError, r"batch axis, \[1\]"):
      save_state(self.path, model, params, states)


class DamageTest(Files):
  def test_cut_anywhere(self):
    model, params, _ = self.save()
    data = self.path.read_bytes()
    header = 8 + int.from_bytes(data[:8], "little")
    cuts = (0, 7, 8, header // 2, header, header + 1, len(data) - 1)
    for size in cuts:
      self.path.write_bytes(data[:size])
      self.refused(model, params, "^no whole state: .*capture the prompt again")
    self.path.write_bytes(data + b"\0")
    self.refused(model, params, "^no whole state: .*behind its tensors")

  @parameterized.parameters(
    (None, "its format is None"),
    ({"format": "pt"}, "its format is 'pt'"),
    ({"format": "longstraw_jax state 99"}, "its format is '.* 99'"),
    ({"stamp": "{"}, "its stamp does not hold grad_scope"),
    ({"stamp": "{}"}, "its stamp does not hold grad_scope"),
  )
  def test_another_kind_of_file(self, changes, message):
    """As if written by something else; a model's checkpoint is one."""
    model, params, _ = self.save()
    tensors, metadata = self.contents()
    metadata = {} if changes is None else metadata | changes
    write_safetensors_file(self.path, tensors, metadata)
    self.refused(model, params, message)

  def test_an_array_missing(self):
    model, params, _ = self.save()
    (first, *rest), metadata = self.contents()
    write_safetensors_file(self.path, rest, metadata)
    name = first[0].name
    self.refused(model, params, f"no whole state: .*: {name} is None there")

  def contents(self):
    """What write_safetensors_file took."""
    source = SafetensorsSource(self.path)
    read = lambda info: (info, np.array(source.read(info.name)))
    return [read(info) for info in source.tensors.values()], source.metadata

  def test_no_file(self):
    model, params = build("tiny-hybrid")
    with self.assertRaisesRegex(FileNotFoundError, "no state in .*prompt"):
      load_state(self.path, model, params)

  def test_a_stopped_write_leaves_the_old_file(self):
    model, params, state = self.save()
    longer = extended("tiny-hybrid", state, 40, 50, step=6)
    full = OSError("no space left on device")
    with mock.patch.object(os, "fsync", side_effect=full):
      with self.assertRaisesRegex(OSError, "no space left"):
        save_state(self.path, model, params, longer)
    self.assertEqual(os.listdir(self.folder), [NAME])
    assert_bitwise(load_state(self.path, model, params), state)
    save_state(self.path, model, params, longer)
    self.assertEqual(os.listdir(self.folder), [NAME])
    assert_bitwise(load_state(self.path, model, params), longer)

  def test_a_folder_is_made(self):
    self.path = self.folder / "a" / "b" / NAME
    model, params, state = self.save()
    assert_bitwise(load_state(self.path, model, params), state)


if __name__ == "__main__":
  absltest.main()
