"""Package metadata; requirements.txt holds the versions behind the figures."""

import setuptools

_LINT = ["ruff>=0.12"]
_TEST = [
  "beartype>=0.20",
  "jaxtyping>=0.3",
  "pytest>=8",
  "pytest-xdist>=3.6",
  "safetensors>=0.5",
]

setuptools.setup(
  name="longstraw_jax",
  version="0.1.0",
  description=(
    "GRPO post-training over very long shared prompts: exact gradients "
    "through the prompt at the memory of its state, in JAX"
  ),
  license="Apache-2.0",
  packages=setuptools.find_packages(include=["longstraw_jax*"]),
  python_requires=">=3.11",
  install_requires=[
    "absl-py>=2.1",
    "chex>=0.1.90",
    "flax>=0.12",
    "gguf>=0.17",
    "jax>=0.10.2",
    "jaxtyping>=0.3",
    "jinja2>=3.1.6",
    "matplotlib>=3.9",
    "numpy>=2",
    "optax>=0.2.6",
    "orbax-checkpoint>=0.11.30",
    "tensorboardX>=2.6",
    "tokenizers>=0.21",
    "tqdm>=4.66",
  ],
  extras_require={
    "cuda12": ["jax[cuda12]>=0.10.2"],
    "test": _TEST,
    "parity": ["peft==0.21.2", "torch==2.13.0", "transformers==5.24.0"],
    # XLA's compiler for GPUs alone, 182 MB: they need no CUDA libraries.
    "plan": ["jax-cuda12-plugin>=0.10.2", "jax-cuda12-pjrt>=0.10.2"],
    "dev": _TEST + _LINT,
  },
)
