"""The mixer in a model: every form of replay and gradient, and an oracle."""

from collections.abc import Callable
import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from longstraw_jax.capture import capture
from longstraw_jax.group import group_gradient
from longstraw_jax.models.model import Model, Params
from longstraw_jax.replay import replay_scores
from longstraw_jax.testing.baselines import bounded_gradient
from longstraw_jax.testing.compare import quick_jit
from longstraw_jax.types import Group

CAPACITY = 12  # prompt tokens that are captured at most
PROMPTS = (1, 2, 8, 13)
LENGTHS = (7, 1, 4)  # of the members of a group


def weighted_scores(logprobs, entropy, group: Group):
  """A loss whose cotangents are the group's old_logprobs and ref_logprobs.

  Any objective reaches the model through its cotangents of the two scores, so
  random ones stand for all of them. The scores come back as metrics.
  """
  loss = (group.old_logprobs * logprobs + group.ref_logprobs * entropy).sum()
  return loss, {"logprobs": logprobs, "entropy": entropy}


@dataclasses.dataclass(frozen=True, eq=False)
class Case:
  """A padded prompt and a group; every program takes the prompt's length."""

  model: Model
  params: Params
  prompt: np.ndarray
  group: Group

  @classmethod
  def create(cls, model: Model, params: Params) -> "Case":
    """Random ids, and random cotangents of every score."""
    rng = np.random.default_rng(4)
    shape = (len(LENGTHS), max(LENGTHS))
    ids = lambda *shape: rng.integers(0, model.config.vocab_size, shape)
    prompt = ids(CAPACITY + 1).astype(np.int32)
    group = Group.create(
      ids(*shape),
      LENGTHS,
      old_logprobs=rng.normal(size=shape),
      ref_logprobs=rng.normal(size=shape),
    )
    return cls(model, params, prompt, group)

  def capture(self, params: Params, length, chunk: int, scope: str):
    """The prompt's state."""
    return capture(
      self.model,
      params,
      self.prompt,
      chunk_size=chunk,
      grad_scope=scope,
      capacity=CAPACITY,
      length=length,
    )

  @functools.cached_property
  def _oracle(self) -> Callable:
    def gradient(scope, params, prompt, group, length):
      boundary = {"full": None, "response_only": length - 1}[scope]
      _, grads, scores = bounded_gradient(
        self.model, params, prompt, group, weighted_scores, length, boundary
      )
      return grads, scores

    return quick_jit(gradient, static_argnums=0)

  @functools.cache  # noqa: B019  (a case lives as long as one check)
  def oracle(self, scope: str, length: int):
    """Gradient and scores by bounded_gradient, compiled once per scope."""
    length = jnp.int32(length)
    return self._oracle(scope, self.params, self.prompt, self.group, length)

  def replay(self, chunk: int, **sizes) -> Callable:
    """(length, order) -> scores of the members in some order."""

    def score(params, length, group):
      state = self.capture(params, length, chunk, "response_only")
      logprobs, entropy = replay_scores(
        self.model, params, state, group.responses, group.lengths, **sizes
      )
      return {"logprobs": logprobs, "entropy": entropy}

    score = quick_jit(score)

    def call(length, order):
      group = self.group.replace(
        responses=self.group.responses[np.array(order)],
        lengths=self.group.lengths[np.array(order)],
      )
      return score(self.params, jnp.int32(length), group)

    return call

  def transaction(self, chunk: int, scope: str, **sizes) -> Callable:
    """length -> gradient and scores by group_gradient."""

    def gradient(params, length):
      _, grads, scores = group_gradient(
        self.model,
        params,
        self.prompt,
        self.group,
        weighted_scores,
        chunk_size=chunk,
        grad_scope=scope,
        capacity=CAPACITY,
        length=length,
        **sizes,
      )
      return grads, scores

    gradient = quick_jit(gradient)
    return lambda length: gradient(self.params, jnp.int32(length))

  def composed(self, chunk: int, scope: str, **sizes) -> Callable:
    """length -> gradient and scores by jax.grad of replay(capture)."""

    def loss_of(trainable, length):
      params = self.params.replace(trainable=trainable)
      state = self.capture(params, length, chunk, scope)
      group = self.group
      scores = replay_scores(
        self.model, params, state, group.responses, group.lengths, **sizes
      )
      return weighted_scores(*scores, group)

    gradient = quick_jit(jax.grad(loss_of, has_aux=True))
    return lambda length: gradient(self.params.trainable, jnp.int32(length))
