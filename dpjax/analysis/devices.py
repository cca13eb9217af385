"""The accelerators that XLA compiles for on a machine without them.

  v5e:4x4       16 chips of a TPU v5e, in that topology
  h100, h100:8  one NVIDIA H100, or eight in one machine
  cpu           this machine's processor
  here          all devices that JAX has

Memory sizes are those of the manufacturers' data sheets.
"""

import dataclasses
import importlib.util
import os

from dpjax.errors import UserError

# What libtpu would query from a TPU's machine.
NO_TPU = {
  "TPU_ACCELERATOR_TYPE": "v5litepod-4",
  "TPU_WORKER_HOSTNAMES": "localhost",
  "TPU_WORKER_ID": "0",
}


@dataclasses.dataclass(frozen=True)
class Device:
  """One chip.

  Attributes:
    platform: "tpu", "cuda" or "cpu".
    memory: bytes.
    target: XLA's description of a GPU, a `GpuTargetConfigProto` as text.
  """

  platform: str
  memory: int
  target: str = ""


_TARGET = """
  gpu_device_info {{
    threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152
    threads_per_core_limit: 2048 block_dim_limit_x: 2147483647 block_dim_limit_y: 65535
    block_dim_limit_z: 65535 registers_per_core_limit: 65536 registers_per_block_limit: 65536
    device_memory_size: {memory} memory_bandwidth: {bandwidth} {chip}
  }}
  platform_name: "CUDA" device_description_str: "NVIDIA {name}"
  dnn_version_info {{ major: 9 minor: 10 patch: 0 }}
  runtime_version {{ major: 13 minor: 0 patch: 0 }}"""
_HOPPER = """
    core_count: 132 fpus_per_core: 128 clock_rate_ghz: 1.98 l2_cache_size: 52428800
    shared_memory_per_core: 233472 shared_memory_per_block_optin: 232448
    cuda_compute_capability { major: 9 }"""
_AMPERE = """
    core_count: 108 fpus_per_core: 64 clock_rate_ghz: 1.41 l2_cache_size: 41943040
    shared_memory_per_core: 167936 shared_memory_per_block_optin: 166912
    cuda_compute_capability { major: 8 }"""


def _gpu(name: str, memory: int, gb_per_second: int, chip: str) -> Device:
  bandwidth = gb_per_second * 10**9
  target = _TARGET.format(name=name, memory=memory, bandwidth=bandwidth, chip=chip)
  return Device("cuda", memory, target)


DEVICES = {
  "v4": Device("tpu", 32 * 2**30),
  "v5e": Device("tpu", 16 * 2**30),
  "v5p": Device("tpu", 95 * 2**30),
  "v6e": Device("tpu", 32 * 2**30),
  "a100": _gpu("A100-SXM4-80GB", 85_094_825_984, 2_039, _AMPERE),
  "h100": _gpu("H100 80GB HBM3", 84_929_347_584, 3_352, _HOPPER),
  "h200": _gpu("H200", 150_754_820_096, 4_800, _HOPPER),
}


def prepare() -> None:
  """Hides accelerators from JAX and its compilers; call it before importing them."""
  os.environ |= {
    "JAX_PLATFORMS": "cpu",
    "CUDA_VISIBLE_DEVICES": "-1",
    "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1",  # It needs a driver.
    "TPU_SKIP_MDS_QUERY": "1",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    **NO_TPU,
  }
  flags = os.environ.get("XLA_FLAGS", "")
  flag = "--xla_gpu_autotune_level=0"
  if flag not in flags:  # XLA otherwise times a GPU's kernels to choose among them.
    os.environ["XLA_FLAGS"] = f"{flags} {flag}".strip()


def find(topology: str) -> tuple[Device, list]:
  """The device type of a topology, and its `jax.Device`s for `dpjax.training.sharding.make_mesh`.

  Raises:
    UserError: the topology is unknown, or its compiler is not installed.
  """
  import jax
  from jax.experimental import topologies

  name, _, shape = topology.partition(":")
  if topology in ("cpu", "here"):
    from dpjax.training import sharding

    local = jax.local_devices(backend="cpu" if topology == "cpu" else None)
    # A process can query only the memory of its own devices.
    memory = (local[0].memory_stats() or {}).get("bytes_limit") or sharding.machine_memory()
    return Device(local[0].platform, memory), local[:1] if topology == "cpu" else jax.devices()
  if name not in DEVICES:
    names = ", ".join((*DEVICES, "cpu", "here"))
    expected = f"expected one of {names}, such as v5e:2x2 or h100:8"
    raise UserError(f"--topology: {expected}, got {topology}")
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
      # The smallest topology of some TPUs is a tray of four chips.
      tray = topologies.get_topology_desc(platform="tpu", topology_name=f"{name}:{shape or '2x2'}")
      return device, list(tray.devices)[: None if shape else 1]
    machine = topologies.get_topology_desc(
      platform="cuda", target_config=device.target, topology=f"1x1x{int(shape or 1)}"
    )
    return device, list(machine.devices)
  except (RuntimeError, ValueError, NotImplementedError) as error:
    expected = "a topology that the compiler supports"
    raise UserError(f"--topology: expected {expected}, got {topology} ({error})") from error
