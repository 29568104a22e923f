"""Real text to hide facts in, split into what is trained on and what is not."""

from collections.abc import Iterable, Sequence
import contextlib
import dataclasses
import hashlib
import json
import os
import pathlib
import sysconfig

import numpy as np

SPLITS = ("train", "heldout")
DEFAULT_HELDOUT_FRACTION = 0.2
RECORD_SUFFIXES = (".jsonl", ".ndjson")
STDLIB_EXCLUDED = frozenset(
  ("site-packages", "dist-packages", "__pycache__", "test", "tests")
  + ("idle_test",)
)


@dataclasses.dataclass(frozen=True, repr=False)
class Corpus:
  """Text of both splits, each one string in a fixed order.

  Attributes:
    train: text that training prompts are cut from.
    heldout: text that evaluation prompts are cut from; no file of it (no line
      range, if there was one file) is in `train`.
    source: where the text came from, for errors and logs.
  """

  train: str
  heldout: str
  source: str

  @classmethod
  def standard_library(
    cls, heldout_fraction: float = DEFAULT_HELDOUT_FRACTION
  ) -> "Corpus":
    """The Python files of the running interpreter's standard library.

    Installed packages and tests are left out. The text differs between Python
    versions: compare `digest` where that matters.

    Args:
      heldout_fraction: expected share of files held out, in (0, 1).

    Returns:
      The corpus, about 12 million characters.
    """
    return cls.from_path(
      sysconfig.get_paths()["stdlib"],
      heldout_fraction,
      suffixes=(".py",),
      excluded=STDLIB_EXCLUDED,
    )

  @classmethod
  def from_path(
    cls,
    path: str | os.PathLike[str],
    heldout_fraction: float = DEFAULT_HELDOUT_FRACTION,
    *,
    suffixes: Sequence[str] = (),
    excluded: Iterable[str] = (),
  ) -> "Corpus":
    """Reads a directory, split by file, or one file, split by lines.

    A file of a directory is held out if the SHA-256 of its path below the
    directory, as a fraction of the largest one, is under `heldout_fraction`:
    other files coming or going never moves it. Of a single file, the last lines
    are held out, starting at the first line border past 1 - `heldout_fraction`
    of its characters. Files that are not UTF-8, or hold a NUL, are skipped.
    Records of JSON are no text: their quotes and escapes would be trained on.

    Args:
      path: a directory, searched to the bottom, or a file.
      heldout_fraction: share of the files, or of the single file, in (0, 1).
      suffixes: file name endings to read; none means all.
      excluded: names of directories not to enter.

    Returns:
      The corpus; text is ordered by path, line ends are "\\n".

    Raises:
      FileNotFoundError: if there is nothing at the path.
      ValueError: for a fraction out of range, if no text was found, and for
        files of JSON records.
    """
    if not 0 < heldout_fraction < 1:
      raise ValueError(
        f"heldout_fraction={heldout_fraction!r} is not in (0, 1): both splits"
        " need text"
      )
    root = pathlib.Path(path)
    if root.is_file():
      text = _read(root) or ""
      if root.suffix in RECORD_SUFFIXES or _is_record(text):
        raise _records(root)
      train, heldout = _split_lines(text, heldout_fraction)
    elif root.is_dir():
      files = _text_files(root, tuple(suffixes), frozenset(excluded))
      for file in files:
        if file.suffix in RECORD_SUFFIXES:
          raise _records(file)
      train, heldout = _split_files(root, files, heldout_fraction)
    else:
      raise FileNotFoundError(
        f"corpus: there is no file or directory at {str(root)!r}"
      )
    if not train and not heldout:
      raise ValueError(
        f"no UTF-8 text at {str(root)!r}"
        + (f" in files ending in {tuple(suffixes)}" if suffixes else "")
      )
    return cls(train, heldout, str(root))

  @property
  def digest(self) -> str:
    """SHA-256 of the text: equal where prompts will be equal."""
    text = "\0".join((self.train, self.heldout))
    return hashlib.sha256(text.encode("utf-8")).hexdigest()

  def window(self, rng: np.random.Generator, num_chars: int, split: str) -> str:
    """Cuts a random stretch of text that begins at a line.

    Args:
      rng: decides where; its state advances.
      num_chars: length, at least 0.
      split: one of `SPLITS`.

    Returns:
      `num_chars` characters; files follow each other without a mark.

    Raises:
      ValueError: for an unknown split, and if its text is too short.
    """
    text = self.text(split)
    if num_chars > len(text):
      raise ValueError(
        f"{num_chars} characters of {split!r} text wanted, but {self.source!r}"
        f" has {len(self.train)} in 'train' and {len(self.heldout)} in"
        " 'heldout': use a larger corpus, shorter prompts, or another"
        " heldout_fraction"
      )
    start = int(rng.integers(len(text) - num_chars, endpoint=True))
    line_start = text.rfind("\n", 0, start) + 1
    return text[line_start : line_start + num_chars]

  def text(self, split: str) -> str:
    """The whole text of a split.

    Args:
      split: one of `SPLITS`.

    Returns:
      The text.

    Raises:
      ValueError: for an unknown split.
    """
    if split not in SPLITS:
      raise ValueError(f"split={split!r} is unknown: use one of {SPLITS}")
    return self.train if split == "train" else self.heldout


def _text_files(
  root: pathlib.Path, suffixes: tuple[str, ...], excluded: frozenset[str]
) -> list[pathlib.Path]:
  """Files below root, in the order of their relative paths."""
  found = []
  for folder, subfolders, names in os.walk(root):
    subfolders[:] = [name for name in subfolders if name not in excluded]
    found += [
      pathlib.Path(folder, name)
      for name in names
      if not suffixes or name.endswith(suffixes)
    ]
  return sorted(found, key=lambda file: file.relative_to(root).as_posix())


def _read(file: pathlib.Path) -> str | None:
  """Text of a file with "\\n" line ends, or None if it is not text."""
  try:
    text = file.read_bytes().decode("utf-8")
  except (UnicodeDecodeError, OSError):
    return None
  return None if "\0" in text else text.replace("\r\n", "\n")


def _is_record(text: str) -> bool:
  """Whether a text is one JSON value, or its first line an object of JSON."""
  text = text.strip("\ufeff \t\r\n")
  for part, kinds in ((text.partition("\n")[0], dict), (text, dict | list)):
    if part[:1] in ("{", "["):
      with contextlib.suppress(ValueError):
        return isinstance(json.loads(part), kinds)
  return False


def _records(file: pathlib.Path) -> ValueError:
  return ValueError(
    f"corpus: {str(file)!r} holds records of JSON, not text: write the text of "
    "its records into files, and give their directory or one of them"
  )


def _split_files(
  root: pathlib.Path, files: Iterable[pathlib.Path], heldout_fraction: float
) -> tuple[str, str]:
  parts: dict[str, list[str]] = {split: [] for split in SPLITS}
  for file in files:
    text = _read(file)
    if text:
      name = (
        file.relative_to(root).as_posix().encode("utf-8", "surrogateescape")
      )
      fraction = int.from_bytes(hashlib.sha256(name).digest()) / 2**256
      split = "heldout" if fraction < heldout_fraction else "train"
      parts[split].append(text if text.endswith("\n") else text + "\n")
  return "".join(parts["train"]), "".join(parts["heldout"])


def _split_lines(text: str, heldout_fraction: float) -> tuple[str, str]:
  border = round(len(text) * (1 - heldout_fraction))
  cut = text.find("\n", border) + 1 or len(text)
  return text[:cut], text[cut:]
