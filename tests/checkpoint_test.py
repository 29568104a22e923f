"""Checkpoints: whole, of another run, damaged, and never mistaken."""

import pathlib
import shutil
import tempfile
from unittest import mock

from absl.testing import parameterized
import jax
import jax.numpy as jnp
import numpy as np

from longstraw_jax import checkpoint
from longstraw_jax.checkpoint import CheckpointError, Checkpoints

SETTINGS = {"rank": 4, "ids": (1, 2)}
TREE = {
  "weights": np.random.default_rng(0).normal(size=(40, 30)).astype("float32"),
  "moments": {"mean": np.arange(7.0), "count": np.int32(3)},
}


def tree(scale: float = 1.0):
  return jax.tree.map(lambda x: jnp.asarray(x * scale, x.dtype), TREE)


def assert_equal(found, wanted):
  same = lambda a, b: np.testing.assert_array_equal(a, b, strict=True)
  jax.tree.map(same, found, wanted)


class CheckpointsTest(parameterized.TestCase):
  def setUp(self):
    super().setUp()
    self.folder = pathlib.Path(tempfile.mkdtemp())
    self.addCleanup(shutil.rmtree, self.folder)

  def make(self, *steps: int, keep: int = 3) -> Checkpoints:
    """Checkpoints of these steps, each of other numbers."""
    checkpoints = Checkpoints(self.folder / "checkpoints", keep)
    self.addCleanup(checkpoints.close)
    for step in steps:
      checkpoints.save(step, tree(step), SETTINGS)
    checkpoints.wait()
    return checkpoints

  def refusal(self, checkpoints, step, like=None, settings=SETTINGS) -> str:
    with self.assertRaises(CheckpointError) as caught:
      checkpoints.restore(step, tree() if like is None else like, settings)
    message = str(caught.exception)
    self.assertIn(f"checkpoint {step} ", message)
    self.assertLen(message.splitlines(), 1)
    return message

  def test_the_last_ones_stay_as_they_were(self):
    checkpoints = self.make(1, 2, 5, 10, keep=2)
    self.assertEqual(checkpoints.steps(), [5, 10])
    names = [path.name for path in checkpoints.directory.iterdir()]
    self.assertCountEqual(names, ["5", "10"])
    for step in (5, 10):
      assert_equal(checkpoints.restore(step, tree(), SETTINGS), tree(step))

  def test_reading_changes_nothing(self):
    reader = Checkpoints(self.folder / "none")
    self.assertIsNone(reader.latest())
    reader.close()
    self.assertEqual(list(self.folder.iterdir()), [])

  def test_every_flipped_bit_is_refused(self):
    """At 24 random places of the data, and somewhere in every other file."""
    checkpoints = self.make(3, 4)
    folder = checkpoints.directory / "4"
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    data = [path for path in files if path.parent.name == "d"]
    self.assertGreater(sum(path.stat().st_size for path in data), 4800)
    random = np.random.default_rng(1)
    for path in [*random.choice(data, 24), *files]:
      whole = path.read_bytes()
      flipped = bytearray(whole)
      place = random.integers(len(whole))
      flipped[place] ^= 1 << random.integers(8)
      path.write_bytes(flipped)
      with self.subTest(f"{path.relative_to(folder)} {place}"):
        message = self.refusal(checkpoints, 4)
        self.assertIn("is damaged", message)
        self.assertIn("Checkpoint 3 is whole", message)
      path.write_bytes(whole)
    assert_equal(checkpoints.restore(4, tree(), SETTINGS), tree(4))

  @parameterized.parameters("cut", "gone", "longer", "manifest gone")
  def test_other_damage(self, kind):
    checkpoints = self.make(4)
    folder = checkpoints.directory / "4"
    path = max((folder / "tree").rglob("d/*"), key=lambda x: x.stat().st_size)
    if kind == "cut":
      path.write_bytes(path.read_bytes()[:-1])
    elif kind == "gone":
      path.unlink()
    elif kind == "longer":
      path.write_bytes(path.read_bytes() + b"x")
    else:
      (folder / "manifest.json").unlink()
    message = self.refusal(checkpoints, 4)
    self.assertIn("is damaged", message)
    self.assertIn("No older one is whole", message)

  def test_the_older_one_that_is_whole_is_found(self):
    checkpoints = self.make(3, 4, 5)
    for step in (4, 5):
      shutil.rmtree(checkpoints.directory / str(step) / "tree")
    self.assertIn("Checkpoint 3 is whole", self.refusal(checkpoints, 5))

  @parameterized.parameters(
    ("moments.count", lambda x: x.astype("float32"), "int32", "float32"),
    ("weights", lambda x: x.astype(jnp.bfloat16), "float32", "bfloat16"),
    ("weights", lambda x: x[:, :4], "float32[40, 30]", "float32[40, 4]"),
    ("moments.mean", lambda x: x.astype("int32"), "float64", "int32"),
    ("weights", lambda x: {"a": x}, "float32[40, 30]", "None"),
  )
  def test_other_arrays_are_no_damage(self, name, change, there, here):
    """Nothing is cast or cut; nobody is told to throw a checkpoint away."""
    like = tree()
    part, _, leaf = name.rpartition(".")
    holder = like[part] if part else like
    holder[leaf] = change(holder[leaf])
    message = self.refusal(self.make(4), 4, like)
    self.assertIn("is whole but", message)
    self.assertRegex(message, f"{name} is '.*' there and .* here")
    self.assertIn(there, message)
    self.assertIn(here, message)
    self.assertNotRegex(message.lower(), "damage|remove|delete|move ")

  def test_other_settings_are_no_damage(self):
    checkpoints = self.make(4)
    other = {"rank": 8, "ids": (1, 2)}
    message = self.refusal(checkpoints, 4, settings=other)
    self.assertIn("rank is 4 there and 8 here", message)
    self.assertNotRegex(message.lower(), "damage|remove|delete|move ")

  @parameterized.parameters(
    (pathlib.Path, "mkdir"), (checkpoint, "_digests"), (pathlib.Path, "rename")
  )
  def test_a_save_that_fails_leaves_nothing(self, owner, name):
    """The error is told at the next save at last, of the one that failed."""
    checkpoints = self.make(3)
    full = OSError(28, "No space left on device")
    with mock.patch.object(owner, name, side_effect=full):
      with self.assertRaisesRegex(CheckpointError, "checkpoint 4 .*No space"):
        checkpoints.save(4, tree(4), SETTINGS)
        checkpoints.save(5, tree(5), SETTINGS)
    names = [path.name for path in checkpoints.directory.iterdir()]
    self.assertEqual(names, ["3"])
    checkpoints.save(5, tree(5), SETTINGS)
    checkpoints.wait()
    assert_equal(checkpoints.restore(5, tree(), SETTINGS), tree(5))

  def test_what_a_kill_left_is_no_checkpoint(self):
    checkpoints = self.make(3)
    for name in ("4.partial", "2.removed"):
      shutil.copytree(checkpoints.directory / "3", checkpoints.directory / name)
    self.assertEqual(checkpoints.steps(), [3])
    checkpoints.save(6, tree(6), SETTINGS)
    checkpoints.wait()
    names = [path.name for path in checkpoints.directory.iterdir()]
    self.assertCountEqual(names, ["3", "6"])

  def test_one_that_is_removed_meanwhile_is_no_damage(self):
    checkpoints = self.make(3)
    message = self.refusal(checkpoints, 2)
    self.assertIn("removed while it was read", message)
