"""Rows of a run: what is kept of a damaged file, and where they go on."""

import contextlib
import io
import json
import pathlib
import shutil
import tempfile

from absl.testing import parameterized

from longstraw_jax.metrics import MetricLog, read_rows

ROWS = [{"step": step, "loss": step / 7} for step in range(50)]


class RowsTest(parameterized.TestCase):
  def setUp(self):
    super().setUp()
    self.out = pathlib.Path(tempfile.mkdtemp())
    self.addCleanup(shutil.rmtree, self.out)
    self.path = self.out / "rows.jsonl"

  def read(self, lines: list[bytes]) -> tuple[list[dict], list[str]]:
    """The rows, and what was said of the others."""
    self.path.write_bytes(b"\n".join(lines))
    said = io.StringIO()
    with contextlib.redirect_stderr(said):
      rows = read_rows(self.path)
    return rows, said.getvalue().splitlines()

  @parameterized.parameters(
    b"", b'{"step": 3, "lo', b"\x00\xff\xfe", b"3", b"[]", b'{"loss": 1}',
    b'{"step": null}', b'{"step": 3}{"step": 4}',
  )  # fmt: skip
  def test_a_garbled_line_drops_itself(self, garbled):
    lines = [json.dumps(row).encode() for row in ROWS]
    lines[3] = garbled
    rows, said = self.read([*lines, b""])
    self.assertEqual(rows, ROWS[:3] + ROWS[4:])
    self.assertLen(said, 1)
    self.assertIn(f"line 4 of {self.path}", said[0])

  def test_a_line_cut_by_a_kill_is_no_damage(self):
    lines = [json.dumps(row).encode() for row in ROWS]
    lines[-1] = lines[-1][:9]
    self.assertEqual(self.read(lines), (ROWS[:-1], []))

  def test_a_log_goes_on_at_its_step(self):
    lines = [json.dumps(row).encode() for row in ROWS]
    lines[3] = b"garbled"
    self.path.write_bytes(b"\n".join(lines))
    with contextlib.redirect_stderr(io.StringIO()):
      log = MetricLog(self.out, 10)
    log.write({"step": 10, "loss": float("nan"), "kept": True})
    log.close()
    new = {"step": 10, "loss": None, "kept": True}
    self.assertEqual(read_rows(self.path), ROWS[:3] + ROWS[4:10] + [new])
    self.assertGreater(len(list((self.out / "tensorboard").iterdir())), 0)
