"""What XLA's compiler has to know of a GPU that is not there.

Facts of a card, public or as its driver reports them, rendered as the text
form of XLA's GpuTargetConfigProto. `memory` is what the driver offers to a
process, a little less than what is sold.
"""

import dataclasses

_TEXT = """\
gpu_device_info {{
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_core: {shared_memory}
  threads_per_core_limit: {threads_per_core}
  core_count: {core_count}
  fpus_per_core: {fpus_per_core}
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  memory_bandwidth: {bandwidth}
  l2_cache_size: {l2_cache}
  clock_rate_ghz: {clock_ghz}
  device_memory_size: {memory}
  shared_memory_per_block_optin: {shared_memory_optin}
  cuda_compute_capability {{ major: {major} minor: {minor} }}
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 8 }}
runtime_version {{ major: 12 minor: 9 patch: 0 }}
device_description_str: "{name}"
"""
_RESERVED = 1024  # bytes of a core's shared memory that no block may have


@dataclasses.dataclass(frozen=True, kw_only=True)
class GpuTarget:
  """One kind of GPU; the defaults are those of the Hopper generation.

  Attributes:
    name: as its driver calls it.
    memory: bytes of device memory.
    bandwidth: of that memory, bytes a second.
    tflops: dense bfloat16 with float32 sums, 1e12 operations a second.
    core_count: streaming multiprocessors.
    capability: of CUDA, such as "9.0".
    clock_ghz: of the cores.
    l2_cache: bytes.
    fpus_per_core: float32 units of one core.
    threads_per_core: resident threads of one core.
    shared_memory: bytes of one core.
  """

  name: str
  memory: int
  bandwidth: int
  tflops: float
  core_count: int
  capability: str = "9.0"
  clock_ghz: float = 1.98
  l2_cache: int = 50 * 2**20
  fpus_per_core: int = 128
  threads_per_core: int = 2048
  shared_memory: int = 228 * 2**10

  def __post_init__(self):
    for field in dataclasses.fields(self):
      value = getattr(self, field.name)
      if field.type in (int, float) and not value > 0:
        raise ValueError(f"{field.name} is {value}: use a positive number")
    parts = self.capability.split(".")
    if len(parts) != 2 or not all(part.isdigit() for part in parts):
      raise ValueError(
        f"capability is {self.capability!r}: use one such as '9.0'"
      )

  def text(self) -> str:
    """The card as XLA's GpuTargetConfigProto, in text form."""
    major, minor = self.capability.split(".")
    return _TEXT.format(
      **dataclasses.asdict(self),
      shared_memory_optin=self.shared_memory - _RESERVED,
      major=major,
      minor=minor,
    )


GPU_TARGETS: dict[str, GpuTarget] = {
  "h20": GpuTarget(
    name="NVIDIA H20",
    memory=102_625_181_696,
    bandwidth=4_000_000_000_000,
    tflops=148,
    core_count=78,
    l2_cache=60 * 2**20,
  ),
  "h20-3e": GpuTarget(
    name="NVIDIA H20-3e",
    memory=150_754_820_096,
    bandwidth=4_800_000_000_000,
    tflops=148,
    core_count=78,
    l2_cache=60 * 2**20,
  ),
  "h100": GpuTarget(
    name="NVIDIA H100 80GB HBM3",
    memory=84_929_347_584,
    bandwidth=3_352_320_000_000,
    tflops=989,
    core_count=132,
  ),
  "h200": GpuTarget(
    name="NVIDIA H200",
    memory=150_754_820_096,
    bandwidth=4_800_000_000_000,
    tflops=989,
    core_count=132,
  ),
  "b200": GpuTarget(
    name="NVIDIA B200",
    memory=191_500_000_000,
    bandwidth=8_000_000_000_000,
    tflops=2250,
    core_count=148,
    capability="10.0",
    clock_ghz=1.965,
    l2_cache=126 * 2**20,
  ),
  "a100": GpuTarget(
    name="NVIDIA A100-SXM4-80GB",
    memory=85_094_039_552,
    bandwidth=2_039_000_000_000,
    tflops=312,
    core_count=108,
    capability="8.0",
    clock_ghz=1.41,
    l2_cache=40 * 2**20,
    fpus_per_core=64,
    shared_memory=164 * 2**10,
  ),
  "rtx4090": GpuTarget(
    name="NVIDIA GeForce RTX 4090",
    memory=25_393_364_992,
    bandwidth=1_008_000_000_000,
    tflops=165.2,
    core_count=128,
    capability="8.9",
    clock_ghz=2.52,
    l2_cache=72 * 2**20,
    threads_per_core=1536,
    shared_memory=100 * 2**10,
  ),
}
