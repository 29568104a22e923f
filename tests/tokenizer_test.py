"""Tokenizers: ids are the truth, text is a view of them."""

import json
import pathlib
import tempfile

from absl.testing import absltest, parameterized
import numpy as np
import tokenizers

from longstraw_jax import tokenizer
from longstraw_jax.chat import ChatTemplate, load_chat_template

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

  def test_refuses_what_is_no_id(self):
    with self.assertRaisesRegex(ValueError, "-1 is negative"):
      self.tokenizer.decode([55, -1])
    with self.assertRaisesRegex(ValueError, "float64: give whole numbers"):
      self.tokenizer.decode([55, 2.7])
    self.assertEqual(self.tokenizer.decode([]), "")
    self.assertEqual(self.tokenizer.decode([2**40, 55]), "\ufffd7")

  def test_special_ids_show_where_text_is_judged(self):
    eos, pad = self.tokenizer.eos_id, self.tokenizer.pad_id
    got = self.tokenizer.decode([52, eos, 50, pad], special=True)
    self.assertEqual(got, "4\ufffd2\ufffd")


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
    self.assertEqual(ids[0], self._id("<|endoftext|>"))
    self.assertNotIn(self._id("<|endoftext|>"), ids[1:])

  def test_ids_that_encode_otherwise_decode_to_the_same_text(self):
    """Fault class: ids whose text re-tokenizes to other ids."""
    encode = lambda text: self.tokenizer.encode(text, begin=False)
    whole, split = encode("lowest"), np.concatenate([*map(encode, "lowest")])
    self.assertLess(len(whole), len(split))
    self.assertEqual(self.tokenizer.decode(split), "lowest")

  def test_special_and_unknown_ids(self):
    seven = int(self.tokenizer.encode("7")[-1])
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


def added(content, **flags):
  """An entry of added_tokens_decoder, all flags given as files have them."""
  names = ("single_word", "lstrip", "rstrip", "normalized", "special")
  return {"content": content} | dict.fromkeys(names, False) | flags


class BeginTest(parameterized.TestCase):
  """What tokenizer.json's post-processor puts in front of a text."""

  def setUp(self):
    super().setUp()
    self.folder = make_folder(self)

  def _load(self, single="<s> $A", config=None, **kwargs):
    path = write_tokenizer(self.folder, special=["<s>", "</s>", "<mask>"])
    model = tokenizers.Tokenizer.from_file(str(path))
    model.post_processor = tokenizers.processors.Sequence(
      [
        tokenizers.processors.ByteLevel(trim_offsets=False),
        tokenizers.processors.TemplateProcessing(
          single=single,
          special_tokens=[("<s>", 0), ("</s>", 1), ("<mask>", 2)],
        ),
      ]
    )
    model.save(str(path))
    if config is not None:
      file = self.folder / "tokenizer_config.json"
      file.write_text(json.dumps(config))
    return tokenizer.load_tokenizer(str(self.folder), **kwargs)

  @parameterized.parameters(
    ("<s> $A", [0]),
    ("<mask> <s> $A", [2, 0]),
    ("<s> $A </s>", [0]),  # a prompt goes on: no end behind it
    ("$A </s>", []),
    ("$A", []),
  )
  def test_plain_text(self, single, begin):
    made = self._load(single)
    plain = made.encode("lowest", begin=False).tolist()
    self.assertNotIn(0, plain)
    self.assertEqual(made.begin_ids, tuple(begin))
    self.assertEqual(made.encode("lowest").tolist(), begin + plain)
    self.assertEqual(made.encode("").tolist(), begin)
    self.assertEqual(made.decode(made.encode("lowest")), "lowest")
    # Content that names the token is content.
    ids = made.encode("<s>lowest")
    self.assertEqual(ids[: len(begin)].tolist(), begin)
    self.assertEqual(made.decode(ids), "<s>lowest")

  @parameterized.parameters(
    ("<s>low", [0]),
    ("low", [0]),
    ("\n<s>low", [0]),
    ("<s></s><s>low", [0, 1, 0]),
  )
  def test_once_through_a_template(self, text, special):
    made = self._load()
    ids = made.encode(ChatTemplate("{{ x }}").render([], x=text), special=True)
    self.assertEqual([i for i in ids if i < 3], special)
    if not text.startswith("\n"):
      self.assertEqual(ids[0], 0)
    piece = made.encode("low", special=True, begin=False)
    self.assertNotIn(0, piece)

  def test_once_where_the_template_writes_it_by_its_role(self):
    template = "{{ bos_token }}[{{ messages[0].content }}]"
    made = self._load(config={"bos_token": "<s>", "chat_template": template})
    text = load_chat_template(self.folder).render([{"content": "low"}])
    self.assertEqual(text, "<s>[low]")
    ids = made.encode(text, special=True)
    self.assertEqual([i for i in ids if i < 3], [0])

  @parameterized.parameters(
    ("<s> $A", {"add_bos_token": False}, [0]),
    ("$A", {"add_bos_token": True, "bos_token": "<mask>"}, []),
  )
  def test_tokenizer_json_alone_decides(self, single, config, begin):
    """As in transformers 5.24, whatever class tokenizer_config.json names."""
    self.assertEqual(self._load(single, config).begin_ids, tuple(begin))

  def test_left_off_when_said(self):
    made = self._load(begin=False)
    self.assertEqual(made.begin_ids, ())
    self.assertNotIn(0, made.encode("lowest"))

  def test_vocabularies_without_common_letters(self):
    bpe = tokenizers.models.BPE({"<s>": 0, "</s>": 1, "ж": 2}, [])
    model = tokenizers.Tokenizer(bpe)
    model.add_special_tokens(["<s>", "</s>"])
    model.post_processor = tokenizers.processors.BertProcessing(
      ("</s>", 1), ("<s>", 0)
    )
    made = tokenizer.LibraryTokenizer(model, 1)
    self.assertEqual(made.encode("ж").tolist(), [0, 2])


class AddedTokensTest(parameterized.TestCase):
  """Tokens that stand beside tokenizer.json are one id each."""

  def setUp(self):
    super().setUp()
    self.folder = make_folder(self)
    self.path = write_tokenizer(self.folder)
    model = tokenizers.Tokenizer.from_file(str(self.path))
    model.post_processor = tokenizers.processors.ByteLevel()
    model.save(str(self.path))
    self.size = model.get_vocab_size()

  def _load(self, **files):
    for name, value in files.items():
      (self.folder / f"{name}.json").write_text(json.dumps(value))
    return tokenizer.load_tokenizer(str(self.folder))

  def _config(self, tokens, **other):
    return {"added_tokens_decoder": tokens} | other

  @parameterized.named_parameters(
    (
      "decoder",
      lambda i: {
        "tokenizer_config": {
          "added_tokens_decoder": {str(i): added("<|user|>", special=True)}
        }
      },
    ),
    ("named", lambda i: {"tokenizer_config": {"sep_token": "<|user|>"}}),
    (
      "list",
      lambda i: {
        "tokenizer_config": {
          "additional_special_tokens": ["<|im_end|>", "<|user|>"]
        }
      },
    ),
    (
      "extra",
      lambda i: {
        "tokenizer_config": {"extra_special_tokens": {"user_token": "<|user|>"}}
      },
    ),
    (
      "map",
      lambda i: {
        "special_tokens_map": {
          "additional_special_tokens": [{"content": "<|user|>"}]
        }
      },
    ),
    (
      "added",
      lambda i: {
        "added_tokens": {"<|user|>": i},
        "special_tokens_map": {"cls_token": "<|user|>"},
      },
    ),
  )
  def test_one_id(self, files):
    self.assertGreater(len(self._load().encode("<|user|>", special=True)), 1)
    made = self._load(**files(self.size))
    self.assertEqual(made.vocab_size, self.size + 1)
    ids = made.encode("low<|user|>est", special=True)
    self.assertEqual(ids.tolist().count(self.size), 1)
    self.assertEqual(made.decode(ids), "lowest")
    self.assertEqual(made.decode(ids, special=True), "low<|user|>est")
    # A special token's name in content is text.
    self.assertNotIn(self.size, made.encode("<|user|>"))

  def test_flags(self):
    i = self.size
    made = self._load(
      tokenizer_config=self._config(
        {
          str(i): added("<think>"),
          str(i + 1): added("<l>", lstrip=True, special=True),
          str(i + 2): added("<r>", rstrip=True, special=True),
          str(i + 3): added("word", single_word=True),
        }
      )
    )
    low = made.encode("low").tolist()
    encode = lambda text: made.encode(text, special=True).tolist()
    self.assertEqual(encode("low  <l>low"), [*low, i + 1, *low])
    self.assertEqual(encode("low<r>  low"), [*low, i + 2, *low])
    self.assertIn(i + 3, encode("word"))
    self.assertNotIn(i + 3, encode("words"))
    # A token that is not special is one wherever it stands, and has a text.
    self.assertEqual(made.encode("<think>").tolist(), [i])
    self.assertEqual(made.decode([i]), "<think>")

  def test_ids_with_holes(self):
    """Fault class: the library counts on from the last id, and says nothing."""
    i = self.size
    made = self._load(
      tokenizer_config=self._config(
        {
          str(i + 7): added("<b>", special=True),
          str(i + 2): added("<a>"),
        }
      )
    )
    self.assertEqual(made.encode("<a>").tolist(), [i + 2])
    self.assertEqual(made.encode("<b>", special=True).tolist(), [i + 7])
    self.assertEqual(made.vocab_size, i + 8)
    self.assertEqual(
      made.decode([i + 2, i + 5, i + 7], special=True), "<a>\ufffd<b>"
    )
    self.assertEqual(made.encode("<|im_end|>", special=True).tolist(), [1])

  def test_holes_in_tokenizer_json_itself(self):
    data = json.loads(self.path.read_text())
    data["added_tokens"].append({"id": self.size + 4} | added("<x>"))
    self.path.write_text(json.dumps(data))
    self.assertEqual(self._load().encode("<x>").tolist(), [self.size + 4])

  def test_a_plain_entry_of_the_vocabulary_becomes_a_token(self):
    data = json.loads(self.path.read_text())
    data["model"]["vocab"]["<|tool|>"] = self.size
    self.path.write_text(json.dumps(data))
    self.assertGreater(len(self._load().encode("<|tool|>", special=True)), 1)
    made = self._load(
      tokenizer_config=self._config(
        {str(self.size): added("<|tool|>", special=True)}
      )
    )
    ids = made.encode("<|tool|>", special=True)
    self.assertEqual(ids.tolist(), [self.size])

  def test_a_list_of_names_changes_no_flags(self):
    """As transformers: a token that tokenizer.json has keeps its text."""
    i = self.size
    made = self._load(
      tokenizer_config=self._config(
        {str(i): added("<think>")}, additional_special_tokens=["<think>"]
      )
    )
    self.assertEqual(made.decode([i]), "<think>")

  def test_roles(self):
    made = self._load(
      tokenizer_config={
        "eos_token": "<|endoftext|>",
        "pad_token": {"content": "<fill>"},
      }
    )
    self.assertEqual((made.eos_id, made.pad_id), (0, self.size))
    named = tokenizer.JsonTokenizer(self.path, eos_token="<|im_end|>")
    self.assertEqual(named.eos_id, 1)

  @parameterized.named_parameters(
    (
      "other_id",
      {"300": added("<|im_end|>")},
      "'<.im_end.>' the id 300.* id 1:",
    ),
    (
      "taken_id",
      {"5": added("<new>")},
      "'<new>' the id 5, where.*has '.*' and",
    ),
    ("huge", {"99999999999": added("<x>")}, "id is 99999999999: use a whole"),
    ("negative", {"-1": added("<x>")}, "id is '-1'"),
    ("no_number", {"x1": added("<x>")}, "id is 'x1'"),
    ("no_content", {"320": {"special": True}}, "token 320 has no content"),
    ("number", {"320": 7}, "token 320 is 7: use its name"),
    ("flag", {"320": added("<x>", lstrip="no")}, "lstrip of '<x>' is 'no'"),
    ("twice", {"320": added("<x>"), "321": added("<x>")}, "the id 321, where"),
    ("list", ["<x>"], "added_tokens_decoder is"),
  )
  def test_contradictions_are_refused(self, tokens, message):
    with self.assertRaisesRegex(ValueError, message) as raised:
      self._load(tokenizer_config=self._config(tokens))
    self.assertIn(str(self.folder), str(raised.exception))

  def test_files_that_contradict_each_other(self):
    with self.assertRaisesRegex(ValueError, "added_tokens.json.*'<x>' the id"):
      self._load(
        tokenizer_config=self._config({str(self.size): added("<x>")}),
        added_tokens={"<x>": self.size + 1},
      )


class MalformedFilesTest(parameterized.TestCase):
  def setUp(self):
    super().setUp()
    self.folder = make_folder(self)
    self.path = write_tokenizer(self.folder)

  def test_a_byte_order_mark_changes_nothing(self):
    want = tokenizer.load_tokenizer(str(self.folder)).encode("low est")
    (self.folder / "tokenizer_config.json").write_text("{}")
    for name in ("tokenizer.json", "tokenizer_config.json"):
      file = self.folder / name
      file.write_bytes(b"\xef\xbb\xbf" + file.read_bytes())
    got = tokenizer.load_tokenizer(str(self.folder)).encode("low est")
    np.testing.assert_array_equal(got, want)

  @parameterized.product(
    name=["tokenizer.json", "tokenizer_config.json", "added_tokens.json"],
    case=[
      ('{"a": "\xe9"}'.encode("latin-1"), "is no UTF-8"),
      (b"\xff\xfe{\x00}\x00", "is no UTF-8"),
      (b"{", "is no (JSON|tokenizer.json)"),
      (b"[" * 10**5, "is no (JSON|tokenizer.json)"),
    ],
  )
  def test_one_error_names_the_file(self, name, case):
    content, message = case
    (self.folder / name).write_bytes(content)
    with self.assertRaisesRegex(ValueError, message) as raised:
      tokenizer.load_tokenizer(str(self.folder))
    self.assertIn(name, str(raised.exception))

  def test_huge_ids(self):
    """Fault class: a table as long as the largest id that a file names."""
    data = json.loads(self.path.read_text())
    data["model"]["vocab"]["zzz"] = 2**31 + 5
    self.path.write_text(json.dumps(data))
    with self.assertRaisesRegex(ValueError, "'zzz' the id 2147483653"):
      tokenizer.load_tokenizer(str(self.folder))


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
