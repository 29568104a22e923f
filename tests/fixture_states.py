"""Several processes capture, save and load one state; see distributed_test."""

from absl import app, flags
import jax
import numpy as np

from longstraw_jax import (
  capture,
  load_state,
  make_mesh,
  place_at_rest,
  replay,
  save_state,
)
from longstraw_jax.distributed import PeerError, fetch, initialize, is_leader
from tests.small_models import build, make_group, make_prompt

FLAGS = flags.FLAGS
LENGTH, CHUNK = 45, 16


def captured(pages: str):
  """The model, its parameters and a state on the current mesh."""
  model, params = build("tiny-hybrid")
  mesh = jax.sharding.get_mesh()
  params = params if mesh.empty else place_at_rest(params, mesh)
  state = capture(
    model, params, make_prompt(LENGTH), chunk_size=CHUNK, pages=pages
  )
  return model, params, state


def scores(model, params, state) -> np.ndarray:
  """Log-probabilities of a group, on the host."""
  group = make_group(5)
  return fetch(replay(model, params, state, group.responses, group.lengths))


def main(argv):
  """Saves into --out, loads and compares; then fails to save, in all alike."""
  del argv
  initialize(FLAGS.coordinator, FLAGS.num_processes, FLAGS.process_id)
  with jax.set_mesh(make_mesh(context=4, member=2)):
    for pages in ("device", "host"):
      model, params, state = captured(pages)
      path = f"{FLAGS.out}/{pages}.safetensors"
      save_state(path, model, params, state)
      loaded = load_state(path, model, params, pages=pages)
      np.testing.assert_array_equal(
        scores(model, params, loaded), scores(model, params, state)
      )
    try:
      save_state(f"{path}/no folder/state", model, params, state)
    except (OSError, PeerError) as error:
      wanted = OSError if is_leader() else PeerError
      assert isinstance(error, wanted), error
    else:
      raise AssertionError("a file became a folder")


if __name__ == "__main__":
  flags.DEFINE_string("out", None, "Folder of the states.")
  flags.DEFINE_string("coordinator", None, "Of the launcher.")
  flags.DEFINE_integer("num_processes", None, "Of the launcher.")
  flags.DEFINE_integer("process_id", None, "Of the launcher.")
  app.run(main)
