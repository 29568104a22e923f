"""Puts known mistakes into the code, one at a time: the tests must see each.

Command: make mutants                  (or: python -m tests.mutants --help)
Cost: about half an hour on 2 cores; what was done is not done again, so an
  interrupted run goes on where it was.
Expected result: every mistake of tests/mutants.toml is caught by the tests it
  names; exit code 0 only then.

A mistake is a text that stands once in one file, and what it is replaced by.
The tests it names run on a copy of the tree with that one change: they must
fail there, and pass on the tree as it is.
"""

from collections.abc import Iterator
from concurrent import futures
import contextlib
import dataclasses
import hashlib
import json
import pathlib
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib

from absl import app, flags

ROOT = pathlib.Path(__file__).parent.parent
LIST = ROOT / "tests" / "mutants.toml"
CAUGHT, MISSED, BROKEN = "caught", "MISSED", "BROKEN"
FAILED = 1  # pytest's exit code where tests ran and some failed
ANY_MARK = "slow or not slow"
TIMEOUT_S = 900  # of one mistake's tests: a mistake may make a loop endless

FLAGS = flags.FLAGS


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mistake:
  """One change for the worse.

  Attributes:
    what: one line that says it; its name in the results.
    file: where it is made.
    old: the text that is replaced; it stands there once.
    new: what replaces it.
    caught_by: tests of which one fails at least, as pytest takes them.
    slow: whether only tests beyond the default suite see it.
  """

  what: str
  file: str
  old: str
  new: str
  caught_by: tuple[str, ...]
  slow: bool = False

  def apply(self, root: pathlib.Path) -> None:
    """Makes the mistake in a tree.

    Raises:
      ValueError: its text stands there never or more than once.
    """
    path = root / self.file
    text = path.read_text()
    found = text.count(self.old)
    if found != 1:
      raise ValueError(
        f"{self.what!r}: its text stands {found} times in {self.file}: "
        "mend tests/mutants.toml"
      )
    path.write_text(text.replace(self.old, self.new))

  def digest(self) -> str:
    """Changes with the mistake, the file it is made in and its tests."""
    paths = [self.file, *(test.split("::")[0] for test in self.caught_by)]
    sha = hashlib.sha256(repr(self).encode())
    for path in paths:
      sha.update((ROOT / path).read_bytes())
    return sha.hexdigest()[:16]


def read_list() -> list[Mistake]:
  """All mistakes.

  Raises:
    ValueError: two of them have one name.
  """
  rows = tomllib.loads(LIST.read_text())["mistake"]
  mistakes = [Mistake(**x | {"caught_by": tuple(x["caught_by"])}) for x in rows]
  names = [mistake.what for mistake in mistakes]
  twice = sorted({name for name in names if names.count(name) > 1})
  if twice:
    raise ValueError(f"mistakes listed twice: {twice}")
  return mistakes


@contextlib.contextmanager
def copied_tree() -> Iterator[pathlib.Path]:
  """A copy of what git tracks, as it is in the working tree."""
  listed = subprocess.run(
    ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
    cwd=ROOT,
    check=True,
    capture_output=True,
    text=True,
  )
  with tempfile.TemporaryDirectory() as name:
    root = pathlib.Path(name)
    for path in filter(None, listed.stdout.split("\0")):
      if (ROOT / path).is_file():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / path, root / path)
    yield root


def run_tests(root: pathlib.Path, tests, slow: bool) -> tuple[int, str]:
  """pytest's exit code and the last lines it printed."""
  command = [sys.executable, "-m", "pytest", "-x", "-p", "no:cacheprovider"]
  if slow:
    command += ["-m", ANY_MARK]
  try:
    done = subprocess.run(
      [*command, *tests],
      cwd=root,
      capture_output=True,
      text=True,
      timeout=None if root == ROOT else TIMEOUT_S,
    )
  except subprocess.TimeoutExpired:
    return FAILED, "no end"
  return done.returncode, "\n".join(done.stdout.splitlines()[-12:])


def try_mistake(mistake: Mistake) -> dict:
  """Makes one mistake and runs its tests."""
  start = time.monotonic()
  with copied_tree() as root:
    mistake.apply(root)
    code, text = run_tests(root, mistake.caught_by, mistake.slow)
  result = {0: MISSED, FAILED: CAUGHT}.get(code, BROKEN)
  return {
    "what": mistake.what,
    "digest": mistake.digest(),
    "result": result,
    "slow": mistake.slow,
    "seconds": round(time.monotonic() - start, 1),
    "caught_by": list(mistake.caught_by),
  } | ({} if result == CAUGHT else {"output": text})


def known_results(path: pathlib.Path) -> dict[str, dict]:
  """Rows of earlier runs, by digest."""
  if not path.exists():
    return {}
  rows = map(json.loads, path.read_text().splitlines())
  return {row["digest"]: row for row in rows}


def main(argv):
  """Tries every mistake that is not known to be caught."""
  if len(argv) > 1:
    raise app.UsageError(f"unexpected arguments {argv[1:]}")
  mistakes = [x for x in read_list() if FLAGS.only in x.what]
  path = pathlib.Path(FLAGS.out) / "rows.jsonl"
  path.parent.mkdir(parents=True, exist_ok=True)
  known = known_results(path)
  caught = lambda x: known.get(x.digest(), {}).get("result") == CAUGHT
  todo = [x for x in mistakes if not caught(x)]
  print(f"{len(mistakes)} mistakes, {len(todo)} to try", flush=True)
  for slow in (False, True):
    tests = {t for x in todo if x.slow == slow for t in x.caught_by}
    code, text = run_tests(ROOT, sorted(tests), slow) if tests else (0, "")
    if code:
      print(f"{text}\nthe tests fail on the tree as it is: mend that first")
      return 1
  with futures.ThreadPoolExecutor(FLAGS.jobs) as pool:
    for row in pool.map(try_mistake, todo):
      known[row["digest"]] = row
      with path.open("a") as file:
        file.write(json.dumps(row) + "\n")
      print(
        f"{row['result']:7} {row['seconds']:6} s  {row['what']}", flush=True
      )
      if "output" in row:
        print(row["output"], flush=True)
  left = [x.what for x in mistakes if not caught(x)]
  slow = sum(x.slow for x in mistakes)
  print(
    f"{len(mistakes) - len(left)} of {len(mistakes)} mistakes are caught, "
    f"{slow} of them by slow tests alone"
  )
  return 1 if left else 0


if __name__ == "__main__":
  flags.DEFINE_string("only", "", "Mistakes whose name holds this text.")
  flags.DEFINE_integer("jobs", 2, "Mistakes tried at once.", lower_bound=1)
  flags.DEFINE_string("out", "runs/mutants", "Directory of rows.jsonl.")
  app.run(main)
