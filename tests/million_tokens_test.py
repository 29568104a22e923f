"""A group update in pieces: the walk, and the script cut off and run again."""

import dataclasses
import json
import pathlib
import re
import subprocess
import sys
import tempfile

from absl.testing import absltest
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from longstraw_jax import (
  PRESETS,
  Group,
  Model,
  PolicyObjective,
  branch_gradient,
  capture,
  group_gradient,
  reverse_chunks,
)

ROOT = pathlib.Path(__file__).parent.parent
PROMPT = np.random.default_rng(0).integers(0, 61, 50).astype(np.int32)
CONFIG = dataclasses.replace(
  PRESETS["tiny-hybrid"],
  dtype="float64",
  param_dtype="float64",
  stages=(dataclasses.replace(PRESETS["tiny-hybrid"].stages[0], repeats=1),),
)
MODEL = Model(CONFIG)


class PiecesTest(absltest.TestCase):
  @pytest.mark.slow
  def test_parts_of_the_reverse_walk_equal_the_whole(self):
    params = jax.jit(MODEL.init)(jax.random.key(0))
    group = Group.create(
      np.random.default_rng(1).integers(0, 61, (2, 5)),
      [5, 3],
      rewards=[1.0, 0.0],
      advantages=[1.0, -1.0],
    )
    state = capture(MODEL, params, PROMPT, chunk_size=8, grad_scope="full")
    objective = PolicyObjective()
    loss, wanted, _ = group_gradient(
      MODEL, params, PROMPT, group, objective, chunk_size=8, state=state
    )
    branch = jax.jit(
      lambda params, group, state: branch_gradient(
        MODEL, params, group, objective, state, block_size=5
      )
    )
    found, sums, _ = branch(params, group, state)
    np.testing.assert_allclose(found, loss, 1e-12, 1e-12)

    @jax.jit
    def part(sums, first, stop):
      sums, pages = reverse_chunks(
        MODEL,
        params,
        PROMPT,
        state,
        sums.priors[0],
        sums.replace(priors=()),
        first=first,
        stop=stop,
      )
      return sums.replace(priors=(pages,))

    for first, stop in ((5, 7), (4, 5), (0, 4)):
      sums = part(sums, jnp.int32(first), jnp.int32(stop))
    for a, b in zip(
      jax.tree.leaves(sums.params), jax.tree.leaves(wanted), strict=True
    ):
      np.testing.assert_allclose(a, b, rtol=0, atol=1e-12 * np.abs(b).max())


@pytest.mark.slow
class ScriptTest(absltest.TestCase):
  def run_script(self, out: str, kill_after: str | None = None) -> list[dict]:
    """The script; killed when it prints a line that matches."""
    flags = "--prompt=400 --chunk_size=32 --piece=64 --group_size=3"
    command = [sys.executable, "-m", "experiments.million_tokens"]
    command += [*flags.split(), "--response=16", f"--out={out}"]
    with subprocess.Popen(
      command, cwd=ROOT, stdout=subprocess.PIPE, text=True
    ) as process:
      for line in process.stdout:
        if kill_after and re.match(kill_after, line):
          process.kill()
    if kill_after:
      self.assertNotEqual(process.returncode, 0)
      return []
    self.assertEqual(process.returncode, 0)
    text = (pathlib.Path(out) / "rows.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines()]

  def test_another_run_is_refused(self):
    with tempfile.TemporaryDirectory() as out:
      self.run_script(out, kill_after="captured 128")
      command = [sys.executable, "-m", "experiments.million_tokens"]
      done = subprocess.run(
        [*command, "--prompt=500", f"--out={out}"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
      )
    self.assertEqual(done.returncode, 2)
    self.assertRegex(done.stderr, "prompt is 400 there and 500 here")

  def test_killed_in_every_phase(self):
    with tempfile.TemporaryDirectory() as whole:
      wanted = self.run_script(whole)
    with tempfile.TemporaryDirectory() as out:
      self.run_script(out, kill_after="captured 192")
      self.run_script(out, kill_after="walked back 4")
      found = self.run_script(out)
    self.assertLen(found, 2)
    for row, expected in zip(found, wanted, strict=True):
      for name in ("grad_scope", "loss", "grad_norm", "update_norm"):
        self.assertEqual(row[name], expected[name], name)
      self.assertGreater(row["grad_norm"], 0)
    self.assertNotEqual(found[0]["grad_norm"], found[1]["grad_norm"])
