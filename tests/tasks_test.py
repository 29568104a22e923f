"""Tasks: exact lengths, pure functions of the index, uniform evidence."""

import collections
import dataclasses
import pathlib
import re
import string
import tempfile

from absl.testing import absltest, parameterized
import numpy as np
import tokenizers

from longstraw_jax import tasks
from longstraw_jax.tasks import facts
from longstraw_jax.tokenizer import ByteTokenizer, JsonTokenizer

KINDS = ("needle", "multi_key", "variable_tracking")
FACT_LINE = re.compile(r"^# code (\S+) = (\S+)\n", re.MULTILINE)


def make_folder(test):
  """A directory that goes with the test; absl's needs parsed flags."""
  folder = tempfile.TemporaryDirectory()
  test.addCleanup(folder.cleanup)
  return pathlib.Path(folder.name)


def make_corpus(num_lines=3000):
  """Lines of different lengths, some of them not ASCII or empty."""
  line = lambda i, mark: (
    f"{mark}{i} = {'xé'[i % 2] * (i * 7 % 40)}\n" + "\n" * (i % 3)
  )
  return tasks.Corpus(
    train="".join(line(i, "t") for i in range(num_lines)),
    heldout="".join(line(i, "h") for i in range(num_lines)),
    source="made up",
  )


def make_bpe(folder, text):
  """A byte-level tokenizer with tokens that reach over line ends."""
  model = tokenizers.Tokenizer(tokenizers.models.BPE())
  model.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(
    add_prefix_space=False, use_regex=False
  )
  model.decoder = tokenizers.decoders.ByteLevel()
  trainer = tokenizers.trainers.BpeTrainer(
    vocab_size=500,
    special_tokens=["</s>"],
    initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
    show_progress=False,
  )
  pieces = [text[i : i + 200] for i in range(0, 20_000, 200)]
  pieces += [f"# code kq = {digit}\n" for digit in string.digits] * 50
  model.train_from_iterator(pieces, trainer)
  path = folder / "tokenizer.json"
  model.save(str(path))
  return JsonTokenizer(path)


def make_task(kind="needle", tokenizer=None, corpus=None, **settings):
  settings = {"prompt_tokens": 700} | settings
  return tasks.make_task(
    tasks.TaskConfig(kind=kind, **settings),
    corpus or make_corpus(),
    tokenizer or ByteTokenizer(),
  )


def find_ids(ids, wanted):
  """Every index at which the wanted ids stand."""
  windows = np.lib.stride_tricks.sliding_window_view(ids, len(wanted))
  return np.flatnonzero((windows == wanted).all(axis=1))


def solve(prompt_text):
  """Answers a question by reading the prompt, as a program would."""
  body, _, question = prompt_text.rpartition("\n")
  found = FACT_LINE.findall(body + "\n")
  known = dict(found)
  assert len(known) == len(found), "a key stands twice"
  match = re.fullmatch(r"# answer: code (\S+) = ", question)
  answers = []
  for key in match[1].split(","):
    while key in known:
      key = known[key]
    answers.append(key)
  return ",".join(answers)


class CorpusTest(parameterized.TestCase):
  def _folder(self, num_files=40):
    folder = make_folder(self)
    for i in range(num_files):
      file = folder / f"part{i % 3}" / f"file{i}.txt"
      file.parent.mkdir(exist_ok=True)
      file.write_text(f"name {i}\r\n" * 3 + f"end {i}")
    return folder

  def _names(self, text):
    return re.findall(r"^end (\d+)$", text, re.MULTILINE)

  def test_every_file_is_in_one_split(self):
    corpus = tasks.Corpus.from_path(self._folder(), heldout_fraction=0.3)
    train, heldout = self._names(corpus.train), self._names(corpus.heldout)
    self.assertCountEqual(train + heldout, map(str, range(40)))
    self.assertBetween(len(heldout), 4, 22)
    self.assertNotIn("\r", corpus.train)

  def test_a_file_stays_in_its_split(self):
    folder = self._folder()
    before = tasks.Corpus.from_path(folder)
    again = tasks.Corpus.from_path(folder)
    self.assertEqual(before, again)
    self.assertEqual(before.digest, again.digest)
    (folder / "part0" / "another.txt").write_text("new\n")
    (folder / "part1" / "file1.txt").unlink()
    after = tasks.Corpus.from_path(folder)
    self.assertNotEqual(before.digest, after.digest)
    held = set(self._names(before.heldout)) - {"1"}
    self.assertEqual(held, set(self._names(after.heldout)) - {"1"})

  def test_skips_what_is_not_text_or_not_wanted(self):
    folder = self._folder(6)
    (folder / "latin.txt").write_bytes(b"caf\xe9\n")
    (folder / "zeros.txt").write_bytes(b"a\0b\n")
    (folder / "code.py").write_text("only\n")
    (folder / "tests").mkdir()
    (folder / "tests" / "x.py").write_text("hidden\n")
    corpus = tasks.Corpus.from_path(folder)
    everything = corpus.train + corpus.heldout
    self.assertNotIn("caf", everything)
    self.assertNotIn("\0", everything)
    self.assertIn("hidden", everything)
    corpus = tasks.Corpus.from_path(
      folder, suffixes=[".py"], excluded=["tests"]
    )
    self.assertEqual(corpus.train + corpus.heldout, "only\n")

  def test_single_file_is_split_by_lines(self):
    lines = [f"line {i}\n" for i in range(10, 110)]
    file = make_folder(self) / "lines.txt"
    file.write_text("".join(lines))
    corpus = tasks.Corpus.from_path(file, heldout_fraction=0.25)
    self.assertEqual(corpus.train + corpus.heldout, "".join(lines))
    self.assertTrue(corpus.train.endswith("\n"))
    self.assertBetween(corpus.heldout.count("\n"), 23, 25)

  @parameterized.parameters(
    ("a.jsonl", '{"text": "one"}\n{"text": "two"}\n'),
    ("a.ndjson", "anything\n"),
    ("a.txt", '\ufeff{"prompt": "one"}\r\n{"prompt": "two"}\r\n'),
    ("a.json", '[\n  {"text": "one"},\n  {"text": "two"}\n]\n'),
    ("a.json", '{\n  "text": ["one"]\n}\n'),
  )
  def test_records_are_no_text(self, name, text):
    file = make_folder(self) / name
    file.write_text(text)
    with self.assertRaisesRegex(ValueError, f"corpus: .*{name}.* not text"):
      tasks.Corpus.from_path(file)
    if file.suffix in (".jsonl", ".ndjson"):
      (file.parent / "fine.txt").write_text("fine\n")
      with self.assertRaisesRegex(ValueError, f"corpus: .*{name}.* not text"):
        tasks.Corpus.from_path(file.parent)

  @parameterized.parameters(
    "[section]\nkey = {1}\n", "{braces} in prose\n", "[1] a footnote\n"
  )
  def test_brackets_are_text(self, text):
    file = make_folder(self) / "a.txt"
    file.write_text(text * 20)
    corpus = tasks.Corpus.from_path(file)
    self.assertEqual(corpus.train + corpus.heldout, text * 20)

  def test_standard_library(self):
    corpus = tasks.Corpus.standard_library()
    self.assertGreater(len(corpus.train), 3_000_000)
    self.assertGreater(len(corpus.heldout), 500_000)
    everything = corpus.train + corpus.heldout
    self.assertIn("class OrderedDict(dict):", everything)
    self.assertNotIn("class TestCase_", everything)
    self.assertIsNone(facts.FACT_PATTERN.search(everything))

  def test_windows_begin_at_lines_and_have_the_length(self):
    corpus = make_corpus()
    rng = np.random.default_rng(0)
    starts = set()
    for num_chars in (0, 1, 50, 1000, len(corpus.heldout)):
      for _ in range(20):
        window = corpus.window(rng, num_chars, "heldout")
        self.assertLen(window, num_chars)
        self.assertIn("\n" + window, "\n" + corpus.heldout)
        starts.add(window[:8])
    self.assertGreater(len(starts), 40)

  def test_too_short_names_sizes_and_remedy(self):
    corpus = tasks.Corpus(train="abc\n" * 5, heldout="x\n", source="here")
    with self.assertRaisesRegex(
      ValueError, "21 characters of 'train'.*'here' has 20 in.*larger corpus"
    ):
      corpus.window(np.random.default_rng(0), 21, "train")
    with self.assertRaisesRegex(ValueError, "larger corpus"):
      make_task(corpus=corpus)

  def test_refusals(self):
    with self.assertRaisesRegex(FileNotFoundError, "nowhere"):
      tasks.Corpus.from_path("nowhere")
    with self.assertRaisesRegex(ValueError, "no UTF-8 text"):
      tasks.Corpus.from_path(make_folder(self))
    for fraction in (0.0, 1.0):
      with self.assertRaisesRegex(ValueError, f"fraction={fraction}"):
        tasks.Corpus.from_path(self._folder(1), fraction)
    with self.assertRaisesRegex(ValueError, "split='test'"):
      make_corpus().text("test")


class FactTaskTest(parameterized.TestCase):
  @parameterized.product(
    kind=KINDS,
    split=tasks.SPLITS,
    prompt_tokens=(160, 161, 233, 700, 5001),
  )
  def test_prompts_are_exact_and_solvable(self, kind, split, prompt_tokens):
    task = make_task(kind, prompt_tokens=prompt_tokens)
    for index in range(8):
      example = task.sample(index, split)
      self.assertEqual(example.prompt_ids.shape, (prompt_tokens,))
      self.assertEqual(example.prompt_ids.dtype, np.int32)
      self.assertEqual(solve(example.prompt_text), example.answer_text)
      self.assertEqual(example.info["answer"], example.answer_text)
      self.assertLen(FACT_LINE.findall(example.prompt_text), 8)
      ids = task.tokenizer.encode(example.answer_text)
      np.testing.assert_array_equal(example.answer_ids, ids)
      other = "h" if split == "train" else "t"
      self.assertNotRegex(example.prompt_text, rf"(?m)^{other}\d+ = ")

  @parameterized.parameters(*KINDS)
  def test_evidence_is_where_info_says(self, kind):
    task = make_task(kind)
    for index in range(30):
      example = task.sample(index, "train")
      info, text = example.info, example.prompt_text
      last_line = text.rfind("\n") + 1
      for key, position in zip(
        info["evidence"], info["evidence_positions"], strict=True
      ):
        ids = task.tokenizer.encode(f"# code {key} = ")
        np.testing.assert_array_equal(
          find_ids(example.prompt_ids, ids), [position]
        )
        if position:
          self.assertEqual(example.prompt_ids[position - 1], ord("\n"))
        self.assertLess(text.index(f"# code {key} = "), last_line)
      self.assertEqual(text[last_line:].count("# code "), 0)

  def test_asked_keys(self):
    needle = make_task("needle").sample(0, "train").info
    self.assertLen(needle["asked"], 1)
    self.assertEqual(needle["asked"], needle["evidence"])
    multi = make_task("multi_key", num_asked=3).sample(0, "train")
    self.assertLen(set(multi.info["asked"]), 3)
    self.assertEqual(multi.info["asked"], multi.info["evidence"])
    self.assertRegex(multi.answer_text, r"^\d,\d,\d$")

  @parameterized.parameters((8, 3), (3, 3), (7, 1), (9, 4))
  def test_chains(self, num_facts, chain_length):
    task = make_task(
      "variable_tracking", num_facts=num_facts, chain_length=chain_length
    )
    for index in range(20):
      example = task.sample(index, "train")
      evidence = example.info["evidence"]
      self.assertLen(evidence, chain_length)
      known = dict(FACT_LINE.findall(example.prompt_text))
      self.assertLen(known, num_facts)
      self.assertEqual(known[evidence[0]], example.answer_text)
      for behind, ahead in zip(evidence[1:], evidence, strict=False):
        self.assertEqual(known[behind], ahead)
      self.assertEqual(example.info["asked"], (evidence[-1],))
      positions = example.info["evidence_positions"]
      self.assertEqual(list(positions), sorted(positions))

  @parameterized.parameters(*KINDS)
  def test_a_pure_function_of_seed_split_and_index(self, kind):
    task, other = make_task(kind), make_task(kind)
    backwards = {i: other.sample(i, "train") for i in (5, 3, 1, 0)}
    for index, expected in backwards.items():
      got = task.sample(index, "train")
      np.testing.assert_array_equal(got.prompt_ids, expected.prompt_ids)
      self.assertEqual(got.info, expected.info)
      self.assertEqual(got.prompt_id, expected.prompt_id)
    prompts = {
      make_task(kind, seed=seed).sample(index, split).prompt_text
      for seed in (0, 1)
      for index in (0, 1)
      for split in tasks.SPLITS
    }
    self.assertLen(prompts, 8)

  @parameterized.parameters(*KINDS)
  def test_splits_do_not_share_their_facts(self, kind):
    task = make_task(kind)
    same = [
      task.sample(i, "train").info["asked"]
      == task.sample(i, "heldout").info["asked"]
      for i in range(20)
    ]
    self.assertLess(sum(same), 3)

  def test_prompt_ids_are_unique_31_bit_integers(self):
    task = make_task()
    examples = [
      task.sample(index, split)
      for split in tasks.SPLITS
      for index in (*range(50), 2**30 - 1)
    ]
    self.assertLen({e.prompt_id for e in examples}, len(examples))
    self.assertLess(max(e.prompt_id for e in examples), 2**31)
    for index in (-1, 2**30):
      with self.assertRaisesRegex(ValueError, f"index={index}"):
        task.sample(index, "train")
    with self.assertRaisesRegex(ValueError, "split='dev'"):
      task.sample(0, "dev")

  @parameterized.parameters(*KINDS)
  def test_evidence_is_uniform_over_the_prompt(self, kind):
    """Chi-square over 8 bins; 24.3 is passed by chance once in 1,000."""
    task = make_task(
      kind, prompt_tokens=4000, num_facts=3, num_asked=3, chain_length=3
    )
    counts, samples = np.zeros(8), 400
    for index in range(samples):
      positions = task.sample(index, "train").info["evidence_positions"]
      for position in positions:
        counts[position * 8 // 4000] += 1
    expected = counts.sum() / 8
    self.assertGreaterEqual(expected, samples / 8)
    self.assertLess(((counts - expected) ** 2 / expected).sum(), 24.3)

  def test_answers_and_asked_places_are_uniform(self):
    """Chi-square with 9 and 7 degrees of freedom at once in 1,000."""
    task = make_task()
    answers, places = collections.Counter(), collections.Counter()
    for index in range(800):
      example = task.sample(index, "train")
      keys = [key for key, _ in FACT_LINE.findall(example.prompt_text)]
      answers[example.answer_text] += 1
      places[keys.index(example.info["asked"][0])] += 1
    for counts, size, limit in ((answers, 10, 27.9), (places, 8, 24.3)):
      self.assertLen(counts, size)
      mean = 800 / size
      total = sum((count - mean) ** 2 / mean for count in counts.values())
      self.assertLess(total, limit)

  @parameterized.parameters(
    ("needle", 1, string.digits, 0.1),
    ("needle", 3, "ab", 1 / 8),
    ("multi_key", 1, string.digits, 0.01),
    ("variable_tracking", 2, string.digits, 0.01),
  )
  def test_chance_level(self, kind, value_length, value_alphabet, expected):
    task = make_task(
      kind, value_length=value_length, value_alphabet=value_alphabet
    )
    self.assertAlmostEqual(task.chance_level, expected, 12)

  @parameterized.product(kind=KINDS, prompt_tokens=(200, 511))
  def test_other_tokenizers(self, kind, prompt_tokens):
    """Exact lengths in tokens, from ids that their text does not give back."""
    corpus = make_corpus()
    bpe = make_bpe(make_folder(self), corpus.train)
    task = make_task(
      kind, tokenizer=bpe, corpus=corpus, prompt_tokens=prompt_tokens
    )
    reencoded = set()
    for index in range(10):
      example = task.sample(index, "heldout")
      self.assertEqual(example.prompt_ids.shape, (prompt_tokens,))
      self.assertEqual(solve(example.prompt_text), example.answer_text)
      reencoded.add(len(bpe.encode(example.prompt_text)))
      key = example.info["evidence"][0]
      value = dict(FACT_LINE.findall(example.prompt_text))[key]
      ids = np.append(bpe.encode(f"# code {key} = "), bpe.encode(value))
      self.assertIn(
        example.info["evidence_positions"][0], find_ids(example.prompt_ids, ids)
      )
    self.assertNotEqual(reencoded, {prompt_tokens})

  @parameterized.parameters(*KINDS)
  def test_one_begin_token(self, kind):
    """A prompt begins once, however many pieces it is made of."""
    corpus, folder = make_corpus(), make_folder(self)
    plain = make_bpe(folder, corpus.train)
    path = folder / "tokenizer.json"
    model = tokenizers.Tokenizer.from_file(str(path))
    model.post_processor = tokenizers.processors.TemplateProcessing(
      single="</s> $A", special_tokens=[("</s>", plain.eos_id)]
    )
    model.save(str(path))
    begun = JsonTokenizer(path)
    self.assertEqual(begun.begin_ids, (plain.eos_id,))
    make = lambda bpe, tokens: make_task(
      kind, tokenizer=bpe, corpus=corpus, prompt_tokens=tokens
    )
    for index in range(5):
      want = make(plain, 300).sample(index, "train")
      got = make(begun, 301).sample(index, "train")
      np.testing.assert_array_equal(
        got.prompt_ids, [plain.eos_id, *want.prompt_ids]
      )
      self.assertEqual(got.prompt_text, want.prompt_text)
      np.testing.assert_array_equal(got.answer_ids, want.answer_ids)
      self.assertEqual(
        got.info["evidence_positions"],
        tuple(i + 1 for i in want.info["evidence_positions"]),
      )

  def test_facts_of_the_corpus_are_left_out(self):
    line = "# code zz = 5 or so\nplain text, more of it\n"
    corpus = tasks.Corpus(line * 300, line * 300, "made up")
    for index in range(10):
      example = make_task(corpus=corpus).sample(index, "train")
      self.assertLen(example.prompt_ids, 700)
      self.assertNotIn("or so", example.prompt_text)
      self.assertEqual(solve(example.prompt_text), example.answer_text)
    # 300 plain lines of 23: all of the text is asked for before giving up.
    facts_and_question = 8 * 14 + 20
    fits = 300 * 23 + facts_and_question
    example = make_task(corpus=corpus, prompt_tokens=fits).sample(0, "train")
    self.assertLen(example.prompt_ids, fits)
    with self.assertRaisesRegex(ValueError, "larger corpus"):
      make_task(corpus=corpus, prompt_tokens=fits + 1)

  def test_text_without_lines(self):
    corpus = tasks.Corpus("x" * 5000, "y" * 5000, "made up")
    example = make_task(corpus=corpus).sample(0, "train")
    self.assertLen(example.prompt_ids, 700)
    self.assertEqual(solve(example.prompt_text), example.answer_text)

  def test_smallest_prompt(self):
    """Facts of 14 bytes and a question of 20, and nothing else."""
    task = make_task(prompt_tokens=2 * 14 + 20, num_facts=2)
    example = task.sample(0, "train")
    self.assertEqual(solve(example.prompt_text), example.answer_text)
    with self.assertRaisesRegex(
      ValueError, "prompt_tokens=47: .* take 48 tokens"
    ):
      make_task(prompt_tokens=47, num_facts=2)

  @parameterized.parameters(
    dict(prompt_tokens=0),
    dict(num_facts=0),
    dict(num_facts=5, key_length=1, key_alphabet="abcd"),
    dict(key_length=0),
    dict(value_length=0),
    dict(value_alphabet="1"),
    dict(value_alphabet="112"),
    dict(value_alphabet="1,2"),
    dict(key_alphabet="a b"),
    dict(seed=-1),
    dict(kind="multi_key", num_asked=9),
    dict(kind="variable_tracking", chain_length=9),
    dict(kind="variable_tracking", value_alphabet="ab"),
  )
  def test_refuses_nonsense(self, **settings):
    with self.assertRaisesRegex(ValueError, "=.*(give|use)"):
      make_task(**settings)

  def test_all_keys_can_be_used(self):
    task = make_task(num_facts=26, key_length=1)
    text = task.sample(0, "train").prompt_text
    keys = [key for key, _ in FACT_LINE.findall(text)]
    self.assertCountEqual(keys, string.ascii_lowercase)


class RegistryTest(absltest.TestCase):
  def test_unknown_kind(self):
    with self.assertRaisesRegex(ValueError, "kind='riddle'.*needle"):
      make_task("riddle")

  def test_a_user_can_add_a_task(self):
    def count_puzzle(config, rng):
      puzzle = facts.needle_puzzle(config, rng)
      return dataclasses.replace(puzzle, answer=str(len(puzzle.facts)))

    def build(config, corpus, tokenizer):
      return tasks.FactTask(config, corpus, tokenizer, count_puzzle)

    tasks.TASKS["count"] = build
    self.addCleanup(tasks.TASKS.pop, "count")
    example = make_task("count", num_facts=5).sample(0, "train")
    self.assertEqual(example.answer_text, "5")
    self.assertEqual(example.info["kind"], "count")


if __name__ == "__main__":
  absltest.main()
