"""The accelerators that XLA compiles for without having them, and what they can do.

  v5e:4x4     16 chips of a TPU v5e, in that topology
  h100, h100:8  one NVIDIA H100, or eight of a machine
  cpu         this machine's processor
  here        all devices that JAX has

Memory, bandwidth and rates are the makers' data sheets: of matrix products with sums in float32,
without sparsity, of bfloat16 and of float32, which a GPU multiplies as TF32 and a TPU as bfloat16.
"""

import dataclasses
import importlib.util
import os
from typing import Any

from dpjax.commands.flags import NO_TPU
from dpjax.errors import UserError

GB = 10**9


@dataclasses.dataclass(frozen=True)
class Device:
  """One chip.

  Attributes:
    platform: "tpu", "cuda" or "cpu".
    memory: bytes.
    bandwidth: bytes/s of its memory.
    rates: operations/s of matrix products, by dtype; {} if unknown.
    target: what XLA knows of a GPU, `GpuTargetConfigProto` as text.
  """

  platform: str
  memory: int
  bandwidth: float = 0.0
  rates: dict[str, float] = dataclasses.field(default_factory=dict)
  target: str = ""


def _tpu(memory: int, bandwidth: int, rate: int) -> Device:
  """Of GiB, GB/s and Tflop/s."""
  rates: dict[str, float] = {"bfloat16": rate * 1e12, "float32": rate * 1e12}
  return Device("tpu", memory * 2**30, bandwidth * GB, rates)


def _gpu(name: str, memory: int, bandwidth: int, rate: int, **facts: float) -> Device:
  known = dict(
    threads_per_block_limit=1024,
    threads_per_warp=32,
    shared_memory_per_block=49_152,
    threads_per_core_limit=2048,
    block_dim_limit_x=2**31 - 1,
    block_dim_limit_y=65_535,
    block_dim_limit_z=65_535,
    registers_per_core_limit=65_536,
    registers_per_block_limit=65_536,
    memory_bandwidth=bandwidth * GB,
    device_memory_size=memory,
  )
  major = facts.pop("capability")
  described = " ".join(f"{key}: {value}" for key, value in (known | facts).items())
  target = (
    f"gpu_device_info {{ {described} cuda_compute_capability {{ major: {major} }} }} "
    'platform_name: "CUDA" dnn_version_info { major: 9 minor: 10 patch: 0 } '
    f'runtime_version {{ major: 13 minor: 0 patch: 0 }} device_description_str: "{name}"'
  )
  rates = {"bfloat16": rate * 1e12, "float32": rate * 1e12 / 2}
  return Device("cuda", memory, bandwidth * GB, rates, target)


_HOPPER = dict(
  core_count=132,
  fpus_per_core=128,
  clock_rate_ghz=1.98,
  l2_cache_size=52_428_800,
  shared_memory_per_core=233_472,
  shared_memory_per_block_optin=232_448,
  capability=9,
)
_AMPERE = dict(
  core_count=108,
  fpus_per_core=64,
  clock_rate_ghz=1.41,
  l2_cache_size=41_943_040,
  shared_memory_per_core=167_936,
  shared_memory_per_block_optin=166_912,
  capability=8,
)
DEVICES = {
  "v4": _tpu(32, 1_228, 275),
  "v5e": _tpu(16, 819, 197),
  "v5p": _tpu(95, 2_765, 459),
  "v6e": _tpu(32, 1_640, 918),
  "a100": _gpu("NVIDIA A100-SXM4-80GB", 85_094_825_984, 2_039, 312, **_AMPERE),
  "h100": _gpu("NVIDIA H100 80GB HBM3", 84_929_347_584, 3_352, 989, **_HOPPER),
  "h200": _gpu("NVIDIA H200", 150_754_820_096, 4_800, 989, **_HOPPER),
}


def prepare() -> None:
  """Tells JAX and its compilers, before they are imported, that there is no accelerator."""
  os.environ |= {
    "JAX_PLATFORMS": "cpu",
    "CUDA_VISIBLE_DEVICES": "-1",
    "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1",  # It needs a driver.
    "TPU_SKIP_MDS_QUERY": "1",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    **NO_TPU,
  }
  known, flag = os.environ.get("XLA_FLAGS", ""), "--xla_gpu_autotune_level=0"
  if flag not in known:  # A GPU's kernels are else chosen by timing them there.
    os.environ["XLA_FLAGS"] = f"{known} {flag}".strip()


def find(topology: str) -> tuple[Device, list[Any]]:
  """A kind of device, and those of a topology for `dpjax.training.sharding.make_mesh`.

  A `UserError` if the topology or its compiler is missing.
  """
  import jax
  from jax.experimental import topologies

  name, _, shape = topology.partition(":")
  if topology in ("cpu", "here"):
    from dpjax.training import profiling

    here = jax.devices("cpu")[:1] if topology == "cpu" else jax.devices()
    memory = (here[0].memory_stats() or {}).get("bytes_limit") or profiling.machine_memory()
    return Device(here[0].platform, memory), here
  if name not in DEVICES:
    known = ", ".join((*DEVICES, "cpu"))
    raise UserError(f"--topology: expected one of {known}, as v5e:2x2 or h100:8, got {topology}")
  device = DEVICES[name]
  modules = {"tpu": ("libtpu",), "cuda": ("jax_cuda13_plugin", "jax_cuda12_plugin")}
  if not any(map(importlib.util.find_spec, modules[device.platform])):
    extra = {"tpu": "tpu-compile", "cuda": "gpu-compile"}[device.platform]
    raise UserError(
      f"--topology: expected the compiler for {name} to be installed "
      f"(pip install 'dpjax[{extra}]'), got none"
    )
  try:
    if device.platform == "tpu":
      # Of some sizes XLA knows no part smaller than a tray of four chips.
      found = topologies.get_topology_desc(platform="tpu", topology_name=f"{name}:{shape or '2x2'}")
      return device, list(found.devices)[: None if shape else 1]
    sizes = dict(target_config=device.target, topology=f"1x1x{int(shape or 1)}")
    return device, list(topologies.get_topology_desc(platform="cuda", **sizes).devices)
  except (RuntimeError, ValueError, NotImplementedError) as error:
    expected = "one that its compiler knows"
    raise UserError(f"--topology: expected {expected}, got {topology} ({error})") from error
