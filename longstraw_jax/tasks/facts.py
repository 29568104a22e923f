"""Retrieval from real text: facts in a long prompt, a question at its end.

A prompt is source text with a few lines like `# code kq = 7` between its own,
and ends in `# answer: code kq = `, so that the answer is what comes next.

    needle             one key is asked for, the other facts distract
    multi_key          several keys are asked for at once: `kq,xe = ` -> `7,1`
    variable_tracking  facts form chains, `a = 7`, `b = a`, `c = b`, each in
                       this order; the end of one is asked for

The first two are the retrieval tasks and the last the tracing task of RULER
(arXiv:2404.06654), on source text instead of essays or repeated sentences.
"""

from collections.abc import Callable
import dataclasses
import re
import string
from typing import Any

import numpy as np

from longstraw_jax.tasks.corpus import SPLITS, Corpus
from longstraw_jax.tokenizer import Tokenizer

FACT_PATTERN = re.compile(r"# code (\S+) = (\S+)")
MAX_INDEX = 2**30


@dataclasses.dataclass(frozen=True, kw_only=True)
class TaskConfig:
  """What prompts look like.

  Attributes:
    prompt_tokens: length of every prompt, P.
    kind: name of the task in the registry.
    num_facts: facts in a prompt, evidence and distractors together.
    num_asked: keys asked for at once; read by "multi_key" alone.
    chain_length: facts from a chain's value to its end; read by
      "variable_tracking" alone.
    key_length: characters of a key.
    key_alphabet: what they are drawn from.
    value_length: characters of a value.
    value_alphabet: what they are drawn from, uniformly.
    seed: of all prompts.
  """

  prompt_tokens: int
  kind: str = "needle"
  num_facts: int = 8
  num_asked: int = 2
  chain_length: int = 3
  key_length: int = 2
  key_alphabet: str = string.ascii_lowercase
  value_length: int = 1
  value_alphabet: str = string.digits
  seed: int = 0

  def __post_init__(self):
    """Refuses what no task can be made from.

    Raises:
      ValueError: naming the field, the value and the remedy.
    """
    for name in ("prompt_tokens", "num_facts", "num_asked", "chain_length"):
      self._require(name, getattr(self, name) >= 1, "at least 1")
    for name in ("key_length", "value_length"):
      self._require(name, getattr(self, name) >= 1, "at least 1")
    self._require("seed", self.seed >= 0, "0 or more")
    for name in ("key_alphabet", "value_alphabet"):
      letters = getattr(self, name)
      plain = not set(letters) & set(string.whitespace + ",=#")
      distinct = len(set(letters)) == len(letters) >= 2
      self._require(
        name,
        plain and distinct,
        "two or more different characters, none of them space , = or #",
      )
    num_keys = len(self.key_alphabet) ** self.key_length
    self._require(
      "num_facts",
      self.num_facts <= num_keys,
      f"at most the {num_keys} keys there are, or a larger key_length",
    )

  def _require(self, name: str, ok: bool, remedy: str) -> None:
    if not ok:
      raise ValueError(f"{name}={getattr(self, name)!r}: give {remedy}")


@dataclasses.dataclass(frozen=True, eq=False)
class Example:
  """One prompt and its answer.

  Attributes:
    prompt_ids: [P] int32; what the model is to read. Its text encodes to other
      ids than these.
    prompt_text: what `prompt_ids` decode to.
    answer_text: the expected response.
    answer_ids: its ids, int32, without an end token.
    info: for reward functions and logs: "answer", "kind", "split", "index",
      "asked" (keys), "evidence" (keys of the facts that decide the answer) and
      "evidence_positions" (of their first tokens in the prompt).
    prompt_id: below 2^31, different for every (split, index).
  """

  prompt_ids: np.ndarray
  prompt_text: str
  answer_text: str
  answer_ids: np.ndarray
  info: dict[str, Any]
  prompt_id: int


@dataclasses.dataclass(frozen=True)
class Puzzle:
  """Facts in the order they take in the prompt, and a question about them.

  Attributes:
    facts: (key, what it is equal to), no key twice.
    asked: keys in the question.
    evidence: keys of the facts that decide the answer.
    answer: the expected response.
  """

  facts: tuple[tuple[str, str], ...]
  asked: tuple[str, ...]
  evidence: tuple[str, ...]
  answer: str


PuzzleFn = Callable[[TaskConfig, np.random.Generator], Puzzle]


def needle_puzzle(config: TaskConfig, rng: np.random.Generator) -> Puzzle:
  """Asks for one of `num_facts` unrelated facts.

  Args:
    config: sizes and alphabets.
    rng: decides everything else; its state advances.

  Returns:
    The puzzle.
  """
  return _lookup_puzzle(config, rng, num_asked=1)


def multi_key_puzzle(config: TaskConfig, rng: np.random.Generator) -> Puzzle:
  """Asks for `num_asked` of `num_facts` unrelated facts, joined by commas.

  Args:
    config: sizes and alphabets.
    rng: decides everything else; its state advances.

  Returns:
    The puzzle.

  Raises:
    ValueError: if more keys are asked for than there are facts.
  """
  if config.num_asked > config.num_facts:
    raise ValueError(
      f"num_asked={config.num_asked}: give at most num_facts={config.num_facts}"
    )
  return _lookup_puzzle(config, rng, config.num_asked)


def variable_tracking_puzzle(
  config: TaskConfig, rng: np.random.Generator
) -> Puzzle:
  """Asks for the end of one chain among chains of `chain_length` facts.

  Facts that do not fill a chain make a shorter one, which is never asked for.
  Chains interleave; within one, a fact stands behind what it refers to.

  Args:
    config: sizes and alphabets.
    rng: decides everything else; its state advances.

  Returns:
    The puzzle.

  Raises:
    ValueError: if there are too few facts for one chain, or if a value could
      be taken for a key.
  """
  if config.chain_length > config.num_facts:
    raise ValueError(
      f"chain_length={config.chain_length}: give at most"
      f" num_facts={config.num_facts}"
    )
  if set(config.key_alphabet) & set(config.value_alphabet):
    raise ValueError(
      f"key_alphabet={config.key_alphabet!r} and"
      f" value_alphabet={config.value_alphabet!r} share characters: give"
      " variable_tracking two that do not"
    )
  keys = _draw_keys(config, rng)
  slots = rng.permutation(config.num_facts)
  facts: list[tuple[str, str]] = [("", "")] * config.num_facts
  for start in range(0, config.num_facts, config.chain_length):
    chain = keys[start : start + config.chain_length]
    value = _draw_value(config, rng)
    for slot, fact in zip(
      sorted(slots[start : start + config.chain_length]),
      zip(chain, [value, *chain[:-1]], strict=True),
      strict=True,
    ):
      facts[slot] = fact
    if not start:
      evidence, answer = chain, value
  return Puzzle(tuple(facts), (evidence[-1],), tuple(evidence), answer)


class FactTask:
  """Prompts of one kind; every one a pure function of (seed, split, index).

  Attributes:
    config: what prompts look like.
    corpus: the text they are cut from.
    tokenizer: makes their ids.
  """

  def __init__(
    self,
    config: TaskConfig,
    corpus: Corpus,
    tokenizer: Tokenizer,
    puzzle_fn: PuzzleFn,
  ):
    """Checks the configuration by making the first training prompt.

    Args:
      config: what prompts look like.
      corpus: the text they are cut from.
      tokenizer: makes their ids.
      puzzle_fn: draws the facts and the question.

    Raises:
      ValueError: if the puzzle cannot be drawn, if it leaves no room in the
        prompt, or if the corpus is too short.
    """
    self.config = config
    self.corpus = corpus
    self.tokenizer = tokenizer
    self._puzzle_fn = puzzle_fn
    self._num_asked = len(self.sample(0, "train").info["asked"])

  @property
  def chance_level(self) -> float:
    """Expected exact match of uniform guesses in the right format.

    A policy that reads the prompt but not the question does better: for one
    asked key, copying the value of any of F facts is right with probability
    1 / F + (1 - 1 / F) chance_level.
    """
    characters = self.config.value_length * self._num_asked
    return float(len(self.config.value_alphabet)) ** -characters

  def sample(self, index: int, split: str) -> Example:
    """Makes one example; nothing is remembered between calls.

    Args:
      index: which one, in [0, 2^30).
      split: one of `SPLITS`; where the text comes from.

    Returns:
      The example. Its prompt has exactly `config.prompt_tokens` tokens: of the
      text in front of the first whole line, what is too much is cut off.

    Raises:
      ValueError: for an index or split out of range, if facts and question
        leave no room in the prompt, or if the corpus is too short.
    """
    if not 0 <= index < MAX_INDEX:
      raise ValueError(f"index={index}: give one in [0, {MAX_INDEX})")
    if split not in SPLITS:
      raise ValueError(f"split={split!r} is unknown: use one of {SPLITS}")
    split_number = SPLITS.index(split)
    rng = np.random.Generator(
      np.random.Philox(
        np.random.SeedSequence(
          self.config.seed, spawn_key=(split_number, index)
        )
      )
    )
    puzzle = self._puzzle_fn(self.config, rng)
    prompt_ids, positions = self._prompt(puzzle, rng, split)
    return Example(
      prompt_ids=prompt_ids,
      prompt_text=self.tokenizer.decode(prompt_ids),
      answer_text=puzzle.answer,
      answer_ids=self._piece(puzzle.answer),
      info={
        "answer": puzzle.answer,
        "kind": self.config.kind,
        "split": split,
        "index": index,
        "asked": puzzle.asked,
        "evidence": puzzle.evidence,
        "evidence_positions": tuple(positions[key] for key in puzzle.evidence),
      },
      prompt_id=2 * index + split_number,
    )

  def _prompt(
    self, puzzle: Puzzle, rng: np.random.Generator, split: str
  ) -> tuple[np.ndarray, dict[str, int]]:
    """Ids of the whole prompt, and where each key's fact begins in it."""
    facts = [self._fact_ids(key, value) for key, value in puzzle.facts]
    question = f"# answer: code {','.join(puzzle.asked)} = "
    question_ids = self._piece(question)
    begin_ids = np.asarray(self.tokenizer.begin_ids, np.int32)
    taken = sum(map(len, facts)) + len(question_ids) + len(begin_ids)
    room = self.config.prompt_tokens - taken
    if room < 0:
      raise ValueError(
        f"prompt_tokens={self.config.prompt_tokens}: facts and question alone"
        f" take {taken} tokens: give more, or fewer num_facts"
      )
    text_ids, borders = self._text(room, rng, split)
    places = _nearest(borders, np.sort(rng.uniform(0, room, len(facts))))
    pieces, positions, done = [begin_ids], {}, 0
    for (key, _), ids, place in zip(puzzle.facts, facts, places, strict=True):
      pieces.append(text_ids[done:place])
      before = [begin_ids, *facts[: len(positions)]]
      positions[key] = int(place) + sum(map(len, before))
      pieces.append(ids)
      done = place
    return np.concatenate([*pieces, text_ids[done:], question_ids]), positions

  def _fact_ids(self, key: str, value: str) -> np.ndarray:
    """A fact's line; its value has the ids that it has as an answer."""
    pieces = (f"# code {key} = ", value, "\n")
    return np.concatenate([self._piece(piece) for piece in pieces])

  def _piece(self, text: str) -> np.ndarray:
    """Ids of text that stands behind other text."""
    return self.tokenizer.encode(text, begin=False)

  def _text(
    self, num_tokens: int, rng: np.random.Generator, split: str
  ) -> tuple[np.ndarray, np.ndarray]:
    """Real text of an exact length, and the line borders in it.

    Lines are encoded one by one, so that a fact can stand between any two.

    Args:
      num_tokens: how many.
      rng: decides which text; its state advances.
      split: where from.

    Returns:
      Ids [num_tokens], and increasing indices into them at which a line begins
      or the text ends, the first of them 0.
    """
    num_chars = num_tokens
    while True:
      text = self.corpus.window(rng, num_chars, split)
      lines = [
        self._piece(line + "\n")
        for line in text.removesuffix("\n").split("\n")
        if not FACT_PATTERN.search(line)
      ]
      ends = np.cumsum([0] + [len(line) for line in lines])
      if ends[-1] >= num_tokens:
        break
      # Tokens can be longer than a character: ask for more, by what they were,
      # and for more than there is only when all of it was too little.
      wanted = 1.05 * num_chars * num_tokens / max(ends[-1], 1) + 64
      available = len(self.corpus.text(split))
      num_chars = max(num_chars + 1, min(int(wanted), available))
    surplus = ends[-1] - num_tokens
    ids = np.concatenate([np.zeros(0, np.int32), *lines])[surplus:]
    return ids, np.unique(np.maximum(ends - surplus, 0))


def _lookup_puzzle(
  config: TaskConfig, rng: np.random.Generator, num_asked: int
) -> Puzzle:
  keys = _draw_keys(config, rng)
  facts = tuple((key, _draw_value(config, rng)) for key in keys)
  order = rng.permutation(len(facts))[:num_asked]
  asked = tuple(facts[i][0] for i in order)
  answer = ",".join(facts[i][1] for i in order)
  return Puzzle(facts, asked, asked, answer)


def _draw_keys(config: TaskConfig, rng: np.random.Generator) -> list[str]:
  """`num_facts` different keys; drawing again is what keeps them so."""
  keys: dict[str, None] = {}
  while len(keys) < config.num_facts:
    keys[_draw(config.key_alphabet, config.key_length, rng)] = None
  return list(keys)


def _draw_value(config: TaskConfig, rng: np.random.Generator) -> str:
  return _draw(config.value_alphabet, config.value_length, rng)


def _draw(letters: str, length: int, rng: np.random.Generator) -> str:
  return "".join(letters[i] for i in rng.integers(len(letters), size=length))


def _nearest(sorted_values: np.ndarray, wanted: np.ndarray) -> np.ndarray:
  """The value nearest to each wanted one."""
  right = np.searchsorted(sorted_values, wanted).clip(0, len(sorted_values) - 1)
  left = (right - 1).clip(0)
  nearer_left = wanted - sorted_values[left] < sorted_values[right] - wanted
  return np.where(nearer_left, sorted_values[left], sorted_values[right])
