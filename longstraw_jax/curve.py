"""The picture of a run: reward against steps."""

import io
import pathlib
from typing import Any

from matplotlib.figure import Figure

from longstraw_jax.disk import write_whole


def plot_curve(
  rows: list[dict[str, Any]], path: pathlib.Path, warm_start: str
) -> None:
  """Reward of the training groups and on held-out prompts, against steps.

  Args:
    rows: of the run.
    path: of the PNG file.
    warm_start: the phase of the rows whose steps are shaded.

  Raises:
    DiskError: it could not be written.
  """
  # Without pyplot, whose backend is the program's own choice.
  figure = Figure(figsize=(7, 4), layout="constrained")
  axes = figure.subplots()
  for name, label, style in (
    ("reward_mean", "training groups", {"alpha": 0.4}),
    ("heldout_reward", "held-out prompts", {"marker": "o", "markersize": 3}),
  ):
    points = [(r["step"], r[name]) for r in rows if r.get(name) is not None]
    if points:
      axes.plot(*zip(*points, strict=True), label=label, **style)
  warm = [r["step"] for r in rows if r.get("phase") == warm_start]
  if warm:
    axes.axvspan(0, max(warm) + 1, alpha=0.1, label="supervised warm start")
  chance = rows[0].get("chance_level") if rows else None
  if chance is not None:
    axes.axhline(chance, linestyle=":", color="grey", label="chance")
  axes.set(xlabel="step", ylabel="mean reward", ylim=(0, 1.02))
  axes.legend(loc="best")
  picture = io.BytesIO()
  figure.savefig(picture, dpi=120, format="png")
  write_whole(path, picture.getvalue())
