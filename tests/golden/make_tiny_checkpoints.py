"""Makes the tiny checkpoints beside this file, and their reference logits.

  pip install '.[parity]'
  python -m tests.golden.make_tiny_checkpoints tests/golden

Each folder gets config.json and model.safetensors, as the transformers library
writes them, and golden.npz with token ids [T] and the library's logits [T, V].
The files here are by transformers 5.24.0 and torch 2.13.0, on a CPU, float32.

Every parameter is random and away from its neutral start, so that one wrong
convention shows in the logits. What is stored is a sharp test: seeds are passed
over where a choice, of keys or of experts, is nearer than MIN_GAP to another,
and where the library's own float32 is further than MAX_NOISE from its float64.
"""

import contextlib
import copy
import math
import pathlib
import sys

import numpy as np
import torch
import transformers

SEED = 20240
LENGTH = 90  # several chunks, and two blocks of the delta rule
MIN_GAP = 3e-5
MAX_NOISE = 1e-5
MASKED = -1e30  # what is below was hidden from the choice

DELTA = dict(
  linear_num_key_heads=2,
  linear_key_head_dim=8,
  linear_value_head_dim=8,
  linear_conv_kernel_dim=4,
  rope_parameters=dict(
    rope_type="default",
    rope_theta=1e4,
    partial_rotary_factor=0.5,
    mrope_section=[2, 1, 1],
    mrope_interleaved=True,
  ),
)
SMALL = dict(
  vocab_size=64,
  hidden_size=32,
  num_key_value_heads=2,
  head_dim=16,
  max_position_embeddings=4096,
  tie_word_embeddings=False,
  bos_token_id=None,
  eos_token_id=None,
)


def qwen_dense(**changes):
  """Qwen3.5/3.6: the published pattern of layers, twice."""
  fields = (
    SMALL
    | DELTA
    | dict(
      intermediate_size=32,
      num_hidden_layers=8,
      num_attention_heads=6,
      linear_num_value_heads=6,
    )
  )
  config = transformers.Qwen3_5TextConfig(**(fields | changes))
  return transformers.Qwen3_5ForCausalLM, config


def qwen_moe(**changes):
  """Qwen3.5/3.6 with experts."""
  fields = (
    SMALL
    | DELTA
    | dict(
      num_hidden_layers=4,
      num_attention_heads=4,
      linear_num_value_heads=4,
      moe_intermediate_size=8,
      shared_expert_intermediate_size=16,
      num_experts=6,
      num_experts_per_tok=2,
    )
  )
  config = transformers.Qwen3_5MoeTextConfig(**(fields | changes))
  return transformers.Qwen3_5MoeForCausalLM, config


def glm_dsa(**changes):
  """GLM-5.2: three dense layers, and groups of layers that share an index.

  16 index heads: with few of them all may be negative for a pair of tokens,
  whose score is then 0 like others', and the choice between those is arbitrary.
  """
  fields = SMALL | dict(
    intermediate_size=32,
    moe_intermediate_size=8,
    num_hidden_layers=8,
    num_attention_heads=4,
    num_key_value_heads=4,
    n_shared_experts=1,
    n_routed_experts=6,
    num_experts_per_tok=2,
    n_group=2,
    topk_group=1,
    routed_scaling_factor=2.5,
    q_lora_rank=16,
    kv_lora_rank=12,
    qk_nope_head_dim=8,
    qk_rope_head_dim=4,
    v_head_dim=8,
    first_k_dense_replace=3,
    index_topk=8,
    index_head_dim=12,
    index_n_heads=16,
    index_topk_freq=2,
    index_skip_topk_offset=3,
    rms_norm_eps=1e-5,
    rope_parameters=dict(rope_type="default", rope_theta=8e6),
    pad_token_id=None,
  )
  config = transformers.GlmMoeDsaConfig(**(fields | changes))
  return transformers.GlmMoeDsaForCausalLM, config


def llama(**changes):
  """Llama with biases and the frequencies of Llama 3.1."""
  fields = SMALL | dict(
    intermediate_size=48,
    num_hidden_layers=3,
    num_attention_heads=4,
    attention_bias=True,
    rms_norm_eps=1e-5,
    rope_parameters=dict(
      rope_type="llama3",
      rope_theta=1e4,
      factor=8.0,
      low_freq_factor=1.0,
      high_freq_factor=4.0,
      original_max_position_embeddings=32,
    ),
  )
  config = transformers.LlamaConfig(**(fields | changes))
  return transformers.LlamaForCausalLM, config


def qwen2(**changes):
  """Qwen2: biases of q, k and v alone, the head tied, positions divided."""
  fields = SMALL | dict(
    intermediate_size=48,
    num_hidden_layers=3,
    num_attention_heads=4,
    tie_word_embeddings=True,
    rope_parameters=dict(rope_type="linear", rope_theta=1e4, factor=2.0),
  )
  del fields["head_dim"]  # the width over the heads
  config = transformers.Qwen2Config(**(fields | changes))
  return transformers.Qwen2ForCausalLM, config


def qwen3(**changes):
  """Qwen3: queries and keys normalised; YaRN."""
  fields = SMALL | dict(
    intermediate_size=48,
    num_hidden_layers=3,
    num_attention_heads=4,
    max_position_embeddings=128,
    rope_parameters=dict(
      rope_type="yarn",
      rope_theta=1e4,
      factor=4.0,
      original_max_position_embeddings=32,
    ),
  )
  config = transformers.Qwen3Config(**(fields | changes))
  return transformers.Qwen3ForCausalLM, config


FAMILIES = {
  make.__name__: make
  for make in (qwen_dense, qwen_moe, glm_dsa, llama, qwen2, qwen3)
}


def _value(name, parameter, generator, tied):
  """A value that a wrong convention would expose."""
  shape = parameter.shape
  normal = torch.randn(shape, generator=generator, dtype=torch.float32)
  if name.endswith("A_log"):
    return torch.log(0.05 + torch.rand(shape, generator=generator))
  if name.endswith("dt_bias"):
    return 0.5 * normal - 1.0
  if name.endswith("e_score_correction_bias"):
    return 0.1 * normal
  if name.endswith("bias"):
    return 0.2 * normal
  if "norm" in name:
    # Stored around 0 or around 1, as the fresh module shows.
    centre = round(float(parameter.float().mean()))
    return centre + 0.2 * normal
  if "conv1d" in name:
    return 0.5 * normal
  if "embed_tokens" in name and not tied:
    return normal
  return normal / math.sqrt(shape[-1])


def build(model_class, config, seed):
  """A model of random parameters, in float32, for evaluation."""
  model = model_class._from_config(config, attn_implementation="eager").eval()
  generator = torch.Generator().manual_seed(seed)
  with torch.no_grad():
    seen = set()
    for name, parameter in (
      *model.named_parameters(),
      *model.named_buffers(),
    ):
      if "inv_freq" in name or parameter.data_ptr() in seen:
        continue
      seen.add(parameter.data_ptr())
      tied = config.tie_word_embeddings
      parameter.copy_(_value(name, parameter, generator, tied))
  return model


def random_ids(config, seed, length=LENGTH):
  """Token ids [1, T]."""
  generator = torch.Generator().manual_seed(seed + 1)
  return torch.randint(0, config.vocab_size, (1, length), generator=generator)


@contextlib.contextmanager
def smallest_gap(index_topk=None):
  """Yields a list of gaps at the cuts of every choice made meanwhile.

  Args:
    index_topk: keys that a query chooses; other uses of Tensor.topk take sums
      of the best, where no gap matters.
  """
  gaps = [math.inf]
  of_module, of_tensor = torch.topk, torch.Tensor.topk

  def note(x, k):
    if k < x.shape[-1]:
      best = of_tensor(x.detach(), k + 1, dim=-1).values
      gap = best[..., -2] - best[..., -1]
      gap = gap[best[..., -1] > MASKED]
      gaps.append(float(gap.min()) if gap.numel() else math.inf)

  def module_topk(x, k, *args, **kwargs):
    note(x, k)
    return of_module(x, k, *args, **kwargs)

  def tensor_topk(x, k, *args, **kwargs):
    if k == index_topk:
      note(x, k)
    return of_tensor(x, k, *args, **kwargs)

  torch.topk, torch.Tensor.topk = module_topk, tensor_topk
  try:
    yield gaps
  finally:
    torch.topk, torch.Tensor.topk = of_module, of_tensor


def logits_of(model, ids):
  """Logits [T, V] of one pass, and the smallest gap of any choice in it."""
  index_topk = getattr(model.config, "index_topk", None)
  with torch.no_grad(), smallest_gap(index_topk) as gaps:
    logits = model(input_ids=ids, use_cache=False).logits[0]
  return logits.numpy(), min(gaps)


def noise_of(model, ids, logits):
  """How far logits in float32 are from the same model's in float64."""
  wide = copy.deepcopy(model).double()
  if hasattr(wide, "set_experts_implementation"):
    wide.set_experts_implementation("eager")  # the default has no float64
  return float(np.abs(logits_of(wide, ids)[0] - logits).max())


def build_clear(make, seed, length=LENGTH, **changes):
  """A model and ids that make a sharp test; see the top of this file.

  Returns:
    The model, ids [1, T] and logits [T, V].
  """
  for attempt in range(seed, seed + 100):
    model_class, config = make(**changes)
    model = build(model_class, config, attempt)
    ids = random_ids(config, attempt, length)
    logits, gap = logits_of(model, ids)
    if gap >= MIN_GAP and noise_of(model, ids, logits) <= MAX_NOISE:
      return model, ids, logits
  raise RuntimeError(f"no seed from {seed} on is a sharp test")


def main(folder):
  """Writes every checkpoint.

  Args:
    folder: where their folders go.
  """
  torch.set_num_threads(1)
  for name, make in FAMILIES.items():
    model, ids, logits = build_clear(make, SEED)
    _, gap = logits_of(model, ids)
    noise = noise_of(model, ids, logits)
    path = pathlib.Path(folder, name)
    model.save_pretrained(path)
    (path / "generation_config.json").unlink(missing_ok=True)
    (path / "model.safetensors").chmod(0o644)
    golden = {"ids": ids[0].numpy().astype(np.int32), "logits": logits}
    np.savez(path / "golden.npz", **golden)
    count = sum(x.numel() for x in model.parameters())
    print(
      f"{name}: {count} parameters, std {logits.std():.3f}, gap {gap:.1e}, "
      f"noise {noise:.1e}"
    )


if __name__ == "__main__":
  main(sys.argv[1])
