"""Compile the engine's programs for an H200 on a machine without a GPU, and inspect what XLA made of them.

Needs the compiler wheels (`make deviceless` installs them).  Autotuning is impossible without the device, so GEMM
kernels are defaults; copies, aliasing, kernel counts and spills are what to look at.
"""

from __future__ import annotations

import dataclasses
import pathlib
import re
import tempfile
from typing import Any

import jax
from jax.experimental import topologies
from jax.sharding import NamedSharding, PartitionSpec

from rlt_jax.runtime.programs import Programs
from rlt_jax.runtime.runner import compiler_options, lower_programs

TARGET = """
platform_name: "CUDA"
device_description_str: "NVIDIA H200"
dnn_version_info { major: 9 minor: 10 }
gpu_device_info {
  name: "NVIDIA H200"
  cuda_compute_capability { major: 9 feature_extension: ACCELERATED_FEATURES }
  threads_per_warp: 32 threads_per_block_limit: 1024 threads_per_core_limit: 2048 core_count: 132 fpus_per_core: 128
  thread_dim_limit_x: 1024 thread_dim_limit_y: 1024 thread_dim_limit_z: 64
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  shared_memory_per_block: 49152 shared_memory_per_block_optin: 232448 shared_memory_per_core: 233472
  l2_cache_size: 52428800 clock_rate_ghz: 1.98 memory_bandwidth: 4800000000000 device_memory_size: 151397597184
  device_address_bits: 64 driver_version: "13.0.0" runtime_version: "13.0.0"
  compile_time_toolkit_version: "13.0.0" dnn_version: "9.10.0"
}"""


@dataclasses.dataclass(frozen=True)
class Report:
    """What one compiled program does to memory and how many launches it makes."""

    alias_bytes: int
    temp_bytes: int
    copies: tuple[tuple[str, str, int], ...]  # (operation, shape, bytes) of every copy-like instruction
    kernels: int  # launches in the thunk plan, loop bodies counted once
    spills: int  # bytes of register spills over all kernels, -1 where the compiler did not say

    def copies_of_at_least(self, size: int) -> list[tuple[str, str, int]]:
        return [c for c in self.copies if c[2] >= size]


_BYTES = {"bf16": 2, "f16": 2, "f32": 4, "s32": 4, "u32": 4, "s8": 1, "u8": 1, "pred": 1}
_COPY = re.compile(r"%?[\w.\-]+ = (\w+)\[([\d,]*)\]\S* (copy|copy-start|transpose)\(")
_LAUNCH = re.compile(r"k(?:Kernel|CustomKernel|Gemm|CublasLtMatmul|Cudnn|CustomCall|DeviceToDeviceCopy|Copy)\b")


def _mesh() -> Any:
    topology = topologies.get_topology_desc(platform="cuda", target_config=TARGET, topology="1x1x1")
    return topologies.make_mesh(topology, (1,), ("x",))


def compile_for_h200(programs: Programs, params: Any, buckets: tuple[int, ...], names: tuple[str, ...]) -> dict[str, Report]:
    """Compile the named programs of one server configuration; `params` holds ShapeDtypeStructs."""
    mesh = _mesh()
    sharding = NamedSharding(mesh, PartitionSpec())
    reports = {}
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        lowered = lower_programs(programs, params, buckets, sharding)
        for name in names:
            reports[name] = _report(name, lowered[name])
    return reports


def _report(name: str, lowered: Any) -> Report:
    with tempfile.TemporaryDirectory() as folder:
        options = {"xla_gpu_autotune_level": 0, "xla_dump_to": folder, **compiler_options(name, "gpu")}
        compiled = lowered.compile(compiler_options=options)
        plan = "".join(p.read_text() for p in pathlib.Path(folder).glob("*thunk_sequence.txt"))
    memory = compiled.memory_analysis()
    copies = []
    for dtype, dims, operation in _COPY.findall(compiled.as_text()):
        size = _BYTES.get(dtype, 8)
        for dim in filter(None, dims.split(",")):
            size *= int(dim)
        copies.append((operation, f"{dtype}[{dims}]", size))
    return Report(
        alias_bytes=memory.alias_size_in_bytes,
        temp_bytes=memory.temp_size_in_bytes,
        copies=tuple(copies),
        kernels=len(_LAUNCH.findall(plan)),
        spills=-1,
    )
