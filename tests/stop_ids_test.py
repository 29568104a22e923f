"""What ends a response: the union of all that a checkpoint names."""

import contextlib
import io
import json
import pathlib
import tempfile
from unittest import mock

from absl.testing import absltest, parameterized

from experiments import training
from longstraw_jax.stop_ids import find_stop_ids
from longstraw_jax.tokenizer import (
  ByteTokenizer,
  LibraryTokenizer,
  load_tokenizer,
)
from tests import gguf_tokenizer_test, tokenizer_test

NAMES = ["<|endoftext|>", "<|im_end|>", "<|user|>", "<|observation|>"]
NAMES += ["<|end_of_text|>", "<|eom_id|>", "<|eot_id|>"]
TEXT, TURN, USER, SEEN, END, EOM, EOT = range(7)


class FolderTest(parameterized.TestCase):
  def setUp(self):
    super().setUp()
    folder = tempfile.TemporaryDirectory()
    self.addCleanup(folder.cleanup)
    self.folder = pathlib.Path(folder.name)

  def _find(self, names=NAMES, given=(), vocab_size=None, **files):
    tokenizer_test.write_tokenizer(self.folder, special=names)
    for name, value in files.items():
      (self.folder / f"{name}.json").write_text(json.dumps(value))
    tokenizer = load_tokenizer(str(self.folder))
    return find_stop_ids(tokenizer, self.folder, given, vocab_size=vocab_size)

  @parameterized.named_parameters(
    # A base model: its tokenizer has the end of a turn, which it never writes.
    (
      "base",
      NAMES[:2],
      {
        "config": {"eos_token_id": TEXT},
        "generation_config": {"eos_token_id": TEXT},
        "tokenizer_config": {"eos_token": "<|endoftext|>"},
      },
      [TEXT],
    ),
    (
      "base_without_tokenizer_config",
      NAMES[:2],
      {"config": {"eos_token_id": TEXT}},
      [TURN, TEXT],
    ),
    (
      "chat",
      NAMES[:2],
      {
        "config": {"eos_token_id": TURN},
        "generation_config": {"eos_token_id": [TURN, TEXT]},
        "tokenizer_config": {"eos_token": "<|im_end|>"},
      },
      [TURN, TEXT],
    ),
    (
      "glm",
      NAMES[:1] + NAMES[2:4],
      {
        "config": {"eos_token_id": [0, 1, 2]},
        "tokenizer_config": {"eos_token": "<|endoftext|>"},
      },
      [0, 1, 2],
    ),
    (
      "llama3",
      NAMES[4:],
      {
        "config": {"eos_token_id": [0, 1, 2]},
        "generation_config": {"eos_token_id": [0, 1, 2]},
        "tokenizer_config": {"eos_token": {"content": "<|eot_id|>"}},
      },
      [2, 0, 1],
    ),
    (
      "wrapped",
      NAMES,
      {
        "config": {
          "eos_token_id": None,
          "text_config": {"eos_token_id": [USER, TEXT]},
        }
      },
      [TURN, USER, TEXT],
    ),
    (
      "generation_alone",
      NAMES,
      {"generation_config": {"eos_token_id": SEEN}},
      [TURN, SEEN],
    ),
    ("nothing_said", NAMES, {"config": {}, "generation_config": {}}, [TURN]),
    ("empty", NAMES, {"config": {"eos_token_id": []}}, [TURN]),
  )
  def test_union(self, names, files, want):
    found = self._find(names, **files)
    self.assertEqual([stop.id for stop in found], want)

  def test_given_ids_and_sources(self):
    found = self._find(
      given=[USER, SEEN],
      config={"eos_token_id": TURN},
      generation_config={"eos_token_id": [TURN, USER]},
    )
    self.assertEqual(
      [str(stop) for stop in found],
      [
        "1 '<|im_end|>' (tokenizer, config.json, generation_config.json)",
        "2 '<|user|>' (generation_config.json, stop_token_ids)",
        "3 '<|observation|>' (stop_token_ids)",
      ],
    )

  @parameterized.product(
    name=["config", "generation_config"],
    value=[10**6, -1, 2.0, "2", True, [2, None], [[2]], [2, 2.5], {"a": 2}],
  )
  def test_what_is_no_id_is_refused(self, name, value):
    with self.assertRaisesRegex(
      ValueError, f"{name}.json': eos_token_id is .*no id of a vocabulary"
    ) as raised:
      self._find(**{name: {"eos_token_id": value}})
    self.assertIn(repr(value), str(raised.exception))

  def test_other_refusals(self):
    with self.assertRaisesRegex(ValueError, "text_config.eos_token_id is 999"):
      self._find(config={"text_config": {"eos_token_id": 999}})
    with self.assertRaisesRegex(ValueError, r"stop_token_ids is \[400\]: 400"):
      self._find(given=[400], config={}, generation_config={})
    # The model's vocabulary counts, which may be wider or narrower.
    found = self._find(given=[400], vocab_size=512)
    self.assertEqual(found[-1].id, 400)
    with self.assertRaisesRegex(ValueError, "end token is 1: 1 is no id"):
      self._find(vocab_size=1)
    (self.folder / "generation_config.json").write_bytes(b"\xff{}")
    with self.assertRaisesRegex(ValueError, "generation_config.json' is no UT"):
      find_stop_ids(ByteTokenizer(), self.folder)

  def test_a_run_says_them_at_its_start(self):
    self._find(NAMES[:3])
    path = self.folder / "tokenizer.json"
    tokenizer = load_tokenizer(str(path))
    tokenizer = LibraryTokenizer(tokenizer._tokenizer, 1, begin_ids=[TEXT])
    stops = find_stop_ids(tokenizer, given=[USER])
    run = mock.Mock(trainer=mock.Mock(tokenizer=tokenizer, stops=stops))
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
      training.print_policy(run)
    self.assertEqual(
      out.getvalue(),
      "prompts begin with (0,) '<|endoftext|>'; responses end at 1 "
      "'<|im_end|>' (tokenizer), 2 '<|user|>' (stop_token_ids)\n",
    )

  def test_bytes(self):
    (found,) = find_stop_ids(ByteTokenizer())
    self.assertEqual((found.id, found.sources), (256, ("tokenizer",)))

  @parameterized.parameters(
    ({}, [2]),
    ({"eos": 0, "eot": 2}, [2, 0]),
    ({"eos": 0, "eot": 2, "eom": 1}, [2, 0, 1]),
    ({"eos": 0, "eom": 1}, [0, 1]),
  )
  def test_gguf(self, ids, want):
    file = self.folder / "model.gguf"
    gguf_tokenizer_test.write_tokenizer(file, **ids)
    found = find_stop_ids(load_tokenizer(str(file)), file)
    self.assertEqual([stop.id for stop in found], want)
    gguf_tokenizer_test.write_tokenizer(file, **ids | {"eom": 10**6})
    with self.assertRaisesRegex(ValueError, "eom_token_id is 1000000"):
      find_stop_ids(load_tokenizer(str(file)), file)


if __name__ == "__main__":
  absltest.main()
