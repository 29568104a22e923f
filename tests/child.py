"""Scripts that need a process of their own, for flags or for 32 bits."""

import json
import os
import subprocess
import sys
from typing import Any


def run_json(script: str, *arguments: str, **environment: str) -> Any:
  """What a Python script prints last, as JSON, in 32 bits.

  Raises:
    RuntimeError: it failed; holds what it said.
  """
  done = subprocess.run(
    [sys.executable, "-c", script, *arguments],
    env=os.environ | {"JAX_ENABLE_X64": "0"} | environment,
    capture_output=True,
    text=True,
    check=False,
  )
  if done.returncode:
    raise RuntimeError(done.stderr)
  return json.loads(done.stdout.splitlines()[-1])
