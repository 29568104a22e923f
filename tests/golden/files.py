"""The stored checkpoints, for tests."""

import pathlib

import numpy as np

from longstraw_jax.weights.safetensors_files import SafetensorsSource
from longstraw_jax.weights.source import TensorInfo

FOLDER = pathlib.Path(__file__).parent
NAMES = ("qwen_dense", "qwen_moe", "glm_dsa", "llama", "qwen2", "qwen3")
WITH_EXPERTS = ("qwen_moe", "glm_dsa")


def reference(name):
  """Token ids [T] and logits [T, V] of the transformers library."""
  with np.load(FOLDER / name / "golden.npz") as stored:
    return stored["ids"], stored["logits"]


def tensors(folder):
  """Every tensor of a checkpoint by name."""
  source = SafetensorsSource(folder)
  return {name: source.read(name) for name in source.tensors}


def items(arrays):
  """What write_safetensors takes."""
  return [
    (TensorInfo(name, array.shape, array.dtype), array)
    for name, array in arrays.items()
  ]
