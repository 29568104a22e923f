"""Tokenizers: ids are the truth, text is a view of them."""

import pathlib
import tempfile

from absl.testing import absltest, parameterized
import numpy as np
import tokenizers

from longstraw_jax import tokenizer

LINES = [
  "def low(newer, lowest):\n",
  "  return newer + lowest  # code kq = 7\n",
] * 40


def make_folder(test):
  """A directory that goes with the test; absl's needs parsed flags."""
  folder = tempfile.TemporaryDirectory()
  test.addCleanup(folder.cleanup)
  return pathlib.Path(folder.name)


def write_tokenizer(folder, special=("<|endoftext|>", "<|im_end|>", "<pad>")):
  """Trains a small byte-level tokenizer and saves it; returns the path."""
  model = tokenizers.Tokenizer(tokenizers.models.BPE())
  model.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(
    add_prefix_space=False
  )
  model.decoder = tokenizers.decoders.ByteLevel()
  trainer = tokenizers.trainers.BpeTrainer(
    vocab_size=320,
    special_tokens=list(special),
    initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
    show_progress=False,
  )
  model.train_from_iterator(LINES, trainer)
  # As many files do, this one would put a token in front of every text.
  model.post_processor = tokenizers.processors.TemplateProcessing(
    single=f"{special[0]} $A", special_tokens=[(special[0], 0)]
  )
  path = folder / "tokenizer.json"
  model.save(str(path))
  return path


class ByteTokenizerTest(parameterized.TestCase):
  def setUp(self):
    super().setUp()
    self.tokenizer = tokenizer.ByteTokenizer()

  def test_ids_are_bytes(self):
    got = self.tokenizer.encode("aé\n")
    np.testing.assert_array_equal(got, [97, 0xC3, 0xA9, 10])
    self.assertEqual(got.dtype, np.int32)
    self.assertEqual(self.tokenizer.encode("").shape, (0,))
    np.testing.assert_array_equal(
      self.tokenizer.encode("aé\n", special=True), got
    )

  @parameterized.parameters("", "plain", "äöü €", "日本 🙂\n\t")
  def test_text_survives(self, text):
    self.assertEqual(self.tokenizer.decode(self.tokenizer.encode(text)), text)

  def test_special_ids_have_no_text(self):
    eos, pad = self.tokenizer.eos_id, self.tokenizer.pad_id
    self.assertEqual((eos, pad, self.tokenizer.vocab_size), (256, 257, 258))
    self.assertEqual(self.tokenizer.decode([55, eos, pad, pad]), "7")

  @parameterized.parameters(([0xC3],), ([0x80, 0x80],), ([258],), ([99999],))
  def test_ids_without_text_are_not_reproduced_by_their_text(self, ids):
    """Fault class: decoding and encoding again gives other ids."""
    text = self.tokenizer.decode(ids)
    self.assertEqual(text, "\ufffd" * len(ids))
    self.assertNotEqual(self.tokenizer.encode(text).tolist(), ids)

  def test_unknown_ids_do_not_vanish_from_an_answer(self):
    self.assertEqual(self.tokenizer.decode(np.array([300, 55])), "\ufffd7")

  def test_refuses_negative_ids(self):
    with self.assertRaisesRegex(ValueError, "-1 is negative"):
      self.tokenizer.decode([55, -1])


class JsonTokenizerTest(parameterized.TestCase):
  def setUp(self):
    super().setUp()
    self.path = write_tokenizer(make_folder(self))
    self.tokenizer = tokenizer.JsonTokenizer(self.path)

  def _id(self, token):
    return tokenizers.Tokenizer.from_file(str(self.path)).token_to_id(token)

  def test_special_ids(self):
    self.assertEqual(self.tokenizer.eos_id, self._id("<|im_end|>"))
    self.assertEqual(self.tokenizer.pad_id, self._id("<pad>"))
    last = tokenizers.Tokenizer.from_file(str(self.path)).get_vocab_size() - 1
    self.assertEqual(self.tokenizer.vocab_size, last + 1)
    named = tokenizer.JsonTokenizer(self.path, eos_token="<|endoftext|>")
    self.assertEqual(named.eos_id, self._id("<|endoftext|>"))

  def test_pad_falls_back_to_the_end_token(self):
    folder = make_folder(self)
    path = write_tokenizer(folder, special=["</s>"])
    got = tokenizer.JsonTokenizer(path)
    self.assertEqual((got.eos_id, got.pad_id), (0, 0))

  @parameterized.parameters("", LINES[0], LINES[1], "é 日本\n")
  def test_text_survives(self, text):
    ids = self.tokenizer.encode(text)
    self.assertEqual(ids.dtype, np.int32)
    self.assertEqual(self.tokenizer.decode(ids), text)
    self.assertNotIn(self._id("<|endoftext|>"), ids)

  def test_ids_that_encode_otherwise_decode_to_the_same_text(self):
    """Fault class: ids whose text re-tokenizes to other ids."""
    whole = self.tokenizer.encode("lowest")
    split = np.concatenate([self.tokenizer.encode(c) for c in "lowest"])
    self.assertLess(len(whole), len(split))
    self.assertEqual(self.tokenizer.decode(split), "lowest")

  def test_special_and_unknown_ids(self):
    seven = int(self.tokenizer.encode("7")[0])
    end, pad = self.tokenizer.eos_id, self.tokenizer.pad_id
    self.assertEqual(self.tokenizer.decode([seven, end, pad]), "7")
    self.assertEqual(self.tokenizer.decode([999, seven, 998]), "\ufffd7\ufffd")
    many = self.tokenizer.decode([999] * 5000)
    self.assertEqual(many, "\ufffd" * 5000)
    with self.assertRaisesRegex(ValueError, "negative"):
      self.tokenizer.decode([-5])

  def test_special_tokens_in_content_are_text(self):
    """Fault class: a user's text that ends the turn it stands in."""
    text = "lowest<|im_end|>\n"
    end = self.tokenizer.eos_id
    rendered = self.tokenizer.encode(text, special=True)
    self.assertIn(end, rendered)
    self.assertEqual(self.tokenizer.decode(rendered), "lowest\n")
    content = self.tokenizer.encode(text)
    self.assertNotIn(end, content)
    self.assertEqual(self.tokenizer.decode(content), text)

  def test_ids_in_holes_of_the_vocabulary_do_not_vanish(self):
    path = self.path.parent / "holes.json"
    bpe = tokenizers.models.BPE({"a": 0, "</s>": 5}, [])
    tokenizers.Tokenizer(bpe).save(str(path))
    got = tokenizer.JsonTokenizer(path)
    self.assertEqual(got.vocab_size, 6)
    self.assertEqual(got.decode([0, 3, 0, 5]), "a\ufffda")

  def test_padding_and_truncation_of_the_file_are_off(self):
    model = tokenizers.Tokenizer.from_file(str(self.path))
    model.enable_padding(length=64, pad_id=2, pad_token="<pad>")
    model.enable_truncation(3)
    model.save(str(self.path))
    got = tokenizer.JsonTokenizer(self.path).encode(LINES[0])
    np.testing.assert_array_equal(got, self.tokenizer.encode(LINES[0]))

  def test_refusals(self):
    with self.assertRaisesRegex(ValueError, "<stop>.*eos_token"):
      tokenizer.JsonTokenizer(self.path, eos_token="<stop>")
    with self.assertRaisesRegex(FileNotFoundError, "absent.json"):
      tokenizer.JsonTokenizer(self.path.parent / "absent.json")
    other = self.path.parent / "other.json"
    other.write_text("{}")
    with self.assertRaisesRegex(ValueError, "no tokenizer.json"):
      tokenizer.JsonTokenizer(other)


class LoadTokenizerTest(absltest.TestCase):
  def test_byte(self):
    got = tokenizer.load_tokenizer("byte")
    self.assertIsInstance(got, tokenizer.ByteTokenizer)

  def test_path(self):
    path = write_tokenizer(make_folder(self))
    got = tokenizer.load_tokenizer(str(path), eos_token="<|endoftext|>")
    self.assertIsInstance(got, tokenizer.JsonTokenizer)
    self.assertEqual(got.eos_id, 0)

  def test_folder(self):
    path = write_tokenizer(make_folder(self))
    got = tokenizer.load_tokenizer(str(path.parent))
    self.assertIsInstance(got, tokenizer.JsonTokenizer)

  def test_refusals(self):
    with self.assertRaisesRegex(FileNotFoundError, "'bytes' is neither"):
      tokenizer.load_tokenizer("bytes")
    with self.assertRaisesRegex(FileNotFoundError, "is neither"):
      tokenizer.load_tokenizer(str(make_folder(self)))
    with self.assertRaisesRegex(ValueError, "eos_token='x'"):
      tokenizer.load_tokenizer("byte", eos_token="x")


if __name__ == "__main__":
  absltest.main()
