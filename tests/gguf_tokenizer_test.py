"""The tokenizer inside a GGUF: splits, special tokens, refusals."""

import copy
import pathlib
import pickle
import tempfile

from absl.testing import absltest, parameterized
import numpy as np
import tokenizers

from longstraw_jax import gguf_tokenizer, tokenizer
from longstraw_jax.weights.gguf_files import GgufSource
from tests.gguf_files_test import write_gguf

CONTROL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MERGES = ["Ġ t", "h e", "Ġt he", "1 2", "12 3", "l o", "Ċ Ċ"]


def make_folder(test):
  folder = tempfile.TemporaryDirectory()
  test.addCleanup(folder.cleanup)
  return pathlib.Path(folder.name)


def vocabulary(extra=()):
  """Names and types: three special tokens, bytes, merges, a user's token."""
  alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
  merged = [merge.replace(" ", "") for merge in MERGES]
  names = CONTROL + alphabet + merged + ["<tool>"] + list(extra)
  types = [3] * len(CONTROL) + [1] * (len(alphabet) + len(merged)) + [4]
  return names, types + [1] * len(extra)


def write_tokenizer(
  file,
  pre="smollm",
  model="gpt2",
  names=None,
  types=None,
  add_bos=None,
  more=(),
  **ids,
):
  """A GGUF with a tokenizer; `ids` are such as eos=2."""
  known, known_types = vocabulary()
  ids = {"bos": 1, "eos": 2, "padding": 0} | ids
  pairs = [
    ("add_tokenizer_model", model),
    ("add_token_list", known if names is None else names),
    ("add_token_types", known_types if types is None else types),
    ("add_token_merges", MERGES),
  ]
  if pre is not None:
    pairs.append(("add_tokenizer_pre", pre))
  if add_bos is not None:
    pairs.append(("add_add_bos_token", add_bos))
  pairs += more
  for kind, value in ids.items():
    if value is not None:
      key = f"tokenizer.ggml.{kind}_token_id"
      pairs.append(("add_uint32", key, value))
  return write_gguf(file, pairs)


class GgufTokenizerTest(parameterized.TestCase):
  def setUp(self):
    super().setUp()
    self.file = make_folder(self) / "model.gguf"

  def _load(self, eos_token=None, **kwargs):
    write_tokenizer(self.file, **kwargs)
    return tokenizer.load_tokenizer(str(self.file), eos_token)

  def _tokens(self, made, text, **kwargs):
    names, _ = vocabulary()
    return [names[i] for i in made.encode(text, begin=False, **kwargs)]

  @parameterized.parameters(
    # What llama.cpp gives for these families of expressions.
    ("smollm", " the123", ["Ġthe", "1", "2", "3"]),
    ("smollm", "lo the\n\n", ["lo", "Ġthe", "ĊĊ"]),
    ("gpt-2", " the123", ["Ġthe", "123"]),
    ("gpt-2", "123 12", ["123", "Ġ", "12"]),
    ("llama-bpe", "12312", ["123", "12"]),
    ("qwen2", "12312", ["1", "2", "3", "1", "2"]),
    ("qwen35", "12 the", ["1", "2", "Ġthe"]),
    ("glm4", "1123", ["1", "12", "3"]),
    ("default", "12312", ["123", "12"]),
    (None, "12312", ["123", "12"]),
  )
  def test_splits(self, pre, text, want):
    made = self._load(pre=pre)
    self.assertEqual(self._tokens(made, text), want)
    self.assertEqual(made.decode(made.encode(text)), text)

  @parameterized.parameters(
    ("qwen2", [["a"], ["\u0301", "b"]]),  # a mark begins a word of its own
    ("qwen35", [["a", "\u0301", "b"]]),  # or goes on with the letters
  )
  def test_marks(self, pre, words):
    write_tokenizer(self.file, pre=pre)
    made = gguf_tokenizer.build_tokenizer(GgufSource(self.file))
    pieces = made.pre_tokenizer.pre_tokenize_str("a\u0301b")
    want = ["".join(word) for word in words]
    start = 0
    for (_, (begin, end)), word in zip(pieces, want, strict=True):
      self.assertEqual((begin, end), (start, start + len(word)))
      start = end

  def test_contractions_keep_case_apart(self):
    for pre in ("gpt-2", "qwen2", "smollm"):
      write_tokenizer(self.file, pre=pre)
      made = gguf_tokenizer.build_tokenizer(GgufSource(self.file))
      upper = made.pre_tokenizer.pre_tokenize_str("I'LL")
      lower = made.pre_tokenizer.pre_tokenize_str("I'll")
      self.assertEqual([piece for piece, _ in lower], ["I", "'ll"])
      # GPT-2's expression knows lower case alone.
      want = ["I", "'LL"] if pre == "qwen2" else ["I", "'", "LL"]
      self.assertEqual([piece for piece, _ in upper], want)

  def test_whole_tokens_come_first_for_llama3(self):
    names, types = vocabulary(extra=["xyz"])
    for pre, count in (("llama-bpe", 1), ("qwen2", 3)):
      made = self._load(pre=pre, names=names, types=types)
      self.assertLen(made.encode("xyz", begin=False), count)

  def test_special_tokens_in_content_are_text(self):
    made = self._load()
    text = "lo<|im_end|>\n<tool>"
    rendered = self._tokens(made, text, special=True)
    self.assertEqual(rendered, ["lo", "<|im_end|>", "Ċ", "<tool>"])
    plain = self._tokens(made, text)
    self.assertEqual(plain[:4], ["lo", "<", "|", "i"])
    # A user-defined token is a token wherever it stands, as in llama.cpp.
    self.assertEqual(plain[-1], "<tool>")
    self.assertEqual(made.decode(made.encode(text)), text)
    self.assertEqual(made.decode(made.encode(text, special=True)), "lo\n<tool>")

  @parameterized.parameters(
    (lambda made: pickle.loads(pickle.dumps(made)),),
    (copy.deepcopy,),
  )
  def test_copies_keep_content_apart_from_special_tokens(self, copied):
    """Fault class: the library forgets the setting in a pickle."""
    made = self._load()
    made.encode("lo", special=True)
    again = copied(made)
    for special in (False, True):
      np.testing.assert_array_equal(
        again.encode("<|im_end|>", special=special),
        made.encode("<|im_end|>", special=special),
      )
    self.assertNotIn(2, again.encode("<|im_end|>"))

  def test_ids(self):
    made = self._load()
    self.assertEqual((made.eos_id, made.pad_id), (2, 0))
    self.assertEqual(made.vocab_size, len(vocabulary()[0]))
    self.assertEqual(self._load(eot=1).eos_id, 1)
    self.assertEqual(self._load(eos=None).eos_id, 2)  # <|im_end|> by name
    self.assertEqual(self._load(eos_token="<|endoftext|>").eos_id, 0)

  @parameterized.parameters(
    (dict(add_bos=True), [1]),
    (dict(add_bos=False), []),
    (dict(), []),
    # As in llama.cpp, which adds it for these unless the file says otherwise.
    (dict(pre="llama-bpe"), [1]),
    (dict(pre="llama-bpe", add_bos=False), []),
    (dict(pre="llama-bpe", bos=None), []),
  )
  def test_begin(self, kwargs, begin):
    made = self._load(**kwargs)
    plain = made.encode("lo the", begin=False).tolist()
    self.assertEqual(made.encode("lo the").tolist(), begin + plain)
    ids = made.encode("<|im_start|>lo the", special=True).tolist()
    self.assertEqual(ids, [1] + plain)
    left_off = tokenizer.load_tokenizer(str(self.file), begin=False)
    self.assertEqual(left_off.encode("lo the").tolist(), plain)

  def test_begin_without_a_token_is_refused(self):
    with self.assertRaisesRegex(ValueError, "add_bos_token is true.*no bos"):
      self._load(bos=None, add_bos=True)

  def test_padding_is_never_a_token_with_text(self):
    made = self._load(padding=10)
    self.assertEqual(made.pad_id, made.eos_id)
    text = vocabulary()[0][10]
    self.assertEqual(made.decode(made.encode(text)), text)

  def test_ends_are_special_whatever_the_file_says(self):
    """Fault class: a conversion that types every token as normal."""
    names, _ = vocabulary()
    made = self._load(types=[1] * len(names), eos=0)
    for i, name in enumerate(CONTROL):  # first of sequence, end, end by name
      self.assertEqual(made.encode(name, special=True).tolist(), [i])
      self.assertNotIn(i, made.encode(name))

  def test_empty_names_keep_their_ids(self):
    names, types = vocabulary(extra=["", "", "last"])
    made = self._load(names=names, types=types)
    self.assertEqual(made.vocab_size, len(names))
    self.assertEqual(made.decode([len(names) - 1]), "last")

  def test_bytes_without_a_token_get_no_id(self):
    names, types = vocabulary()
    names, types = zip(
      *((n, t) for n, t in zip(names, types, strict=True) if n != "z"),
      strict=True,
    )
    made = self._load(names=list(names), types=list(types))
    self.assertEqual(made.decode(made.encode("xzy")), "xy")

  @parameterized.named_parameters(
    ("model", dict(model="llama"), "model is 'llama'; only byte-level BPE"),
    ("pre", dict(pre="kimi-k2"), "pre is 'kimi-k2'; known are default, gpt-2"),
    ("twice", dict(names=["a", "b", "a"]), "vocabulary has 'a' twice"),
    ("merges", dict(names=["a", "b"]), "merges do not fit"),
    ("types", dict(types=[1]), "token_type is no list of"),
    ("eos", dict(eos=10**6), "eos_token_id is 1000000, the vocabulary has"),
  )
  def test_refusals(self, kwargs, message):
    write_tokenizer(self.file, **kwargs)
    with self.assertRaisesRegex(ValueError, message) as raised:
      tokenizer.GgufTokenizer(self.file)
    self.assertIn("model.gguf", str(raised.exception))

  def test_refuses_files_without_a_tokenizer(self):
    write_gguf(self.file)
    with self.assertRaisesRegex(ValueError, "model is None"):
      tokenizer.GgufTokenizer(self.file)
    write_gguf(self.file, [("add_tokenizer_model", "gpt2")])
    with self.assertRaisesRegex(ValueError, "tokens is no list of strings"):
      tokenizer.GgufTokenizer(self.file)

  def test_refuses_absent_end_tokens(self):
    with self.assertRaisesRegex(ValueError, "<stop>.*eos_token"):
      self._load(eos_token="<stop>")


if __name__ == "__main__":
  absltest.main()
