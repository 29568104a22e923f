"""Layers of a model, one by one, grouped into stages of repeated patterns."""

from collections.abc import Sequence

from longstraw_jax.config import LayerSpec, Stage

# Mixers that need what an earlier layer of their own pattern hands on.
FOLLOWERS = ("shared_latent_attention",)


def group_layers(
  layers: Sequence[LayerSpec], followers: Sequence[str] = FOLLOWERS
) -> tuple[Stage, ...]:
  """The stages with the fewest layers in their patterns, then the fewest.

  A stage is one scan whose body is its pattern, so that the first number is
  how many layers are compiled and the second how many scans run. GLM-5.2's 78
  layers become 2 x [full dense], 1 x [full dense, 3 x shared moe] and
  18 x [full moe, 3 x shared moe]: 9 layers in 3 scans.

  Args:
    layers: every layer, bottom to top.
    followers: mixers that may not begin a pattern, because they use what the
      nearest layer below of another mixer shares within one.

  Raises:
    ValueError: if there is no layer, or the first one is a follower.
  """
  if not layers:
    raise ValueError("the model has no layer: give at least 1")
  if layers[0].mixer in followers:
    raise ValueError(
      f"layer 0 is {layers[0].mixer!r}: it uses what a layer below it shares, "
      "so the first layer must be another one"
    )
  known: dict[LayerSpec, int] = {}
  ids = [known.setdefault(layer, len(known)) for layer in layers]
  count = len(ids)
  # From the end: the cheapest way to lay out layers[i:], as (layers in
  # patterns, stages, width and repeats of the first stage, where it ends).
  best: list[tuple | None] = [None] * count + [(0, 0, 0, 0, count)]
  for i in reversed(range(count)):
    if layers[i].mixer in followers:
      continue
    for width in range(1, count - i + 1):
      pattern, end, repeats = ids[i : i + width], i, 0
      while ids[end : end + width] == pattern:
        end, repeats = end + width, repeats + 1
        rest = best[end]
        if rest is None:
          continue
        way = (rest[0] + width, rest[1] + 1, width, repeats, end)
        if best[i] is None or way[:2] < best[i][:2]:
          best[i] = way
  stages, i = [], 0
  while i < count:
    _, _, width, repeats, end = best[i]
    pattern = tuple(layers[i : i + width])
    stages.append(Stage(pattern=pattern, repeats=repeats))
    i = end
  return tuple(stages)
