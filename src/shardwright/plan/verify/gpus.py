"""Describe GPUs to XLA, so that it compiles for GPUs on machines without GPUs.

XLA reads a `GpuTargetConfigProto` as text. The values are those of its own files, in
https://github.com/openxla/xla/tree/main/xla/backends/gpu/target_config/specs
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
from typing import Final


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class GpuModel:
    """The properties of a GPU that XLA needs.

    Attributes:
      name: Name that the driver reports.
      capability: CUDA compute capability.
      cores: Streaming multiprocessors.
      clock_ghz: Clock rate.
      memory: Bytes of memory. XLA schedules and rematerializes so that a program fits into it.
      memory_rate: Bytes per second.
      l2_cache: Bytes of the L2 cache.
      fpus: Units for float32 in one core.
      shared: Bytes of shared memory in one core.
      per_host: GPUs of one host.
    """

    name: str
    capability: tuple[int, int]
    cores: int
    clock_ghz: float
    memory: int
    memory_rate: int
    l2_cache: int
    fpus: int = 128
    shared: int = 233472
    per_host: int = 8

    def target_config(self) -> str:
        """Return the text of the `GpuTargetConfigProto`."""
        major, minor = self.capability
        return f"""gpu_device_info {{
  threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048
  shared_memory_per_block: 49152 shared_memory_per_core: {self.shared}
  shared_memory_per_block_optin: {self.shared - 1024}
  core_count: {self.cores} fpus_per_core: {self.fpus} clock_rate_ghz: {self.clock_ghz}
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: {self.memory_rate} l2_cache_size: {self.l2_cache}
  device_memory_size: {self.memory}
  cuda_compute_capability {{ major: {major} minor: {minor} }}
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
}}
platform_name: "CUDA" dnn_version_info {{ major: 9 minor: 10 }}
device_description_str: "{self.name}"
"""


_A100: Final = GpuModel(
    name="NVIDIA A100-SXM4-80GB",
    capability=(8, 0),
    cores=108,
    clock_ghz=1.41,
    memory=85100068864,
    memory_rate=2039040000000,
    l2_cache=41943040,
    fpus=64,
    shared=167936,
)
_H100: Final = GpuModel(
    name="NVIDIA H100 80GB HBM3",
    capability=(9, 0),
    cores=132,
    clock_ghz=1.98,
    memory=84942979072,
    memory_rate=3352320000000,
    l2_cache=52428800,
)
_GB200: Final = GpuModel(
    name="NVIDIA GB200",
    capability=(10, 0),
    cores=152,
    clock_ghz=2.062,
    memory=197897748480,
    memory_rate=7928064000000,
    l2_cache=135528448,
    per_host=4,
)
# Keys: the names of `hardware.toml`. XLA for CUDA does not compile for AMD's GPUs.
GPUS: Final = {
    "a100": _A100,
    "a100-40gb": dataclasses.replace(
        _A100, name="NVIDIA A100-SXM4-40GB", memory=42331013120, memory_rate=1555200000000
    ),
    "h100": _H100,
    "h100-pcie": dataclasses.replace(
        _H100, name="NVIDIA H100 PCIe", cores=114, clock_ghz=1.755, memory_rate=2039040000000
    ),
    "h200": dataclasses.replace(
        _H100, name="NVIDIA H200 141GB HBM3e", memory=151397597184, memory_rate=4800000000000
    ),
    "b200": dataclasses.replace(
        _GB200,
        name="NVIDIA B200",
        cores=148,
        clock_ghz=1.965,
        memory=191514411008,
        memory_rate=7672320000000,
        l2_cache=132644864,
        per_host=8,
    ),
    "gb200": _GB200,
    "gb300": dataclasses.replace(
        _GB200, name="NVIDIA GB300", capability=(10, 3), clock_ghz=2.07, memory=297021079552
    ),
}
# The distributions of JAX with XLA for CUDA. Each is for one version of jaxlib.
_PLUGINS: Final = ("jax-cuda13-plugin", "jax-cuda12-plugin")


def cuda_plugin() -> str | None:
    """Return the name of the installed distribution that compiles for GPUs, or None."""
    installed = {each.name.lower() for each in importlib.metadata.distributions()}
    return next((name for name in _PLUGINS if name in installed), None)
