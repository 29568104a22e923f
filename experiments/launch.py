"""Starts one script as several local processes that share one mesh.

Claim: two processes of four devices each train as one process of eight does.
Command: python -m experiments.launch --processes=2 --devices=4 --
  experiments.train_grpo --mesh_context=4 --mesh_member=2   (make train-2proc)
Cost: that of the script; on one machine the processes share its cores.
Expected result: the script's own. When one process ends with an error or is
  killed, the others end too, within --peer_timeout of silence, and the same
  command, or the script alone, continues from the last checkpoint. Signals go
  on to all processes, which save and end with code 75; a second one ends them.
"""

import os
import signal
import socket
import subprocess
import sys
import time

from absl import app, flags

from experiments import common_flags
from experiments.report import exit_code
from longstraw_jax.interrupts import SIGNALS

FLAGS = flags.FLAGS


def free_port() -> int:
  """A port that nobody listens on just now."""
  with socket.socket() as probe:
    probe.bind(("127.0.0.1", 0))
    return probe.getsockname()[1]


def start(command: list[str], number: int, devices: int) -> list:
  """The processes, each with CPU devices of its own where it has no GPU."""
  coordinator = f"127.0.0.1:{free_port()}"
  environment = os.environ | {"JAX_NUM_CPU_DEVICES": str(devices)}
  return [
    subprocess.Popen(
      [
        *(sys.executable, "-m", *command),
        f"--coordinator={coordinator}",
        f"--num_processes={number}",
        f"--process_id={i}",
      ],
      env=environment,
      # A terminal's Ctrl-C must not reach them twice: that would be a second.
      process_group=0,
    )
    for i in range(number)
  ]


def main(argv):
  """Runs until all have ended; the first failure is the exit code."""
  if len(argv) < 2:
    raise ValueError("name a script after --, such as experiments.train_grpo")
  processes = start(argv[1:], FLAGS.processes, FLAGS.devices)

  def forward(number, frame):
    del frame
    for process in processes:
      process.send_signal(number)

  for number in SIGNALS:
    if signal.getsignal(number) is not signal.SIG_IGN:
      signal.signal(number, forward)
  try:
    while any(process.poll() is None for process in processes):
      time.sleep(0.2)
  finally:
    for process in processes:
      process.terminate()
  codes = [process.returncode for process in processes]
  return next((abs(code) for code in codes if code), 0)


if __name__ == "__main__":
  flags.DEFINE_integer("processes", 2, "Processes.", 1)
  flags.DEFINE_integer("devices", 4, "CPU devices of each.", 1)
  app.run(exit_code(main), flags_parser=common_flags.parse)
