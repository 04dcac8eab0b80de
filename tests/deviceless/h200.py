"""Compile the engine's programs for an H200 on a machine without a GPU, and inspect what XLA made of them.

Needs the compiler wheels (`make deviceless` installs them).  Autotuning is impossible without the device, so GEMM
kernels are defaults; copies, aliasing, kernel counts and spills are what to look at.
"""

from __future__ import annotations

import dataclasses
import functools
import pathlib
import re
import subprocess
import tempfile
from typing import Any

import jax
import jax.numpy as jnp
import nvidia
from jax.experimental import topologies
from jax.sharding import NamedSharding, PartitionSpec

from rlt_jax.ops.kv_write.triton import kv_write_triton
from rlt_jax.ops.paged_attention.triton import paged_attention_triton
from rlt_jax.runtime.compiler import compiler_options, lower_programs
from rlt_jax.runtime.programs import Programs

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
    outside_graphs: tuple[str, ...]  # what the host launches itself: top-level thunks that are no CUDA graph
    graphs: int

    def copies_of_at_least(self, size: int) -> list[tuple[str, str, int]]:
        return [c for c in self.copies if c[2] >= size]


_BYTES = {"bf16": 2, "f16": 2, "f32": 4, "s32": 4, "u32": 4, "s8": 1, "u8": 1, "pred": 1}
_COPY = re.compile(r"%?[\w.\-]+ = (\w+)\[([\d,]*)\]\S* (copy|copy-start|transpose)\(")
_TOP_LEVEL = re.compile(r"^\d+: (k\w+)", re.MULTILINE)
_LAUNCH = re.compile(r"k(?:Kernel|CustomKernel|Gemm|CublasLtMatmul|Cudnn|CustomCall|DeviceToDeviceCopy|Copy)\b")


def _mesh() -> Any:
    topology = topologies.get_topology_desc(platform="cuda", target_config=TARGET, topology="1x1x1")
    return topologies.make_mesh(topology, (1,), ("x",))


def compile_for_h200(
    programs: Programs, params: Any, buckets: tuple[int, ...], names: tuple[str, ...]
) -> dict[str, Report]:
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
        final = "".join(p.read_text() for p in pathlib.Path(folder).glob("*thunk_sequence_after_thunk_passes.txt"))
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
        outside_graphs=tuple(kind for kind in _TOP_LEVEL.findall(final) if kind != "kCommandBuffer"),
        graphs=final.count("kCommandBuffer"),
    )


@dataclasses.dataclass(frozen=True)
class Resources:
    """What ptxas says of one kernel."""

    registers: int
    spill_bytes: int


def kernel_resources(programs: Programs, slots: int) -> dict[str, Resources]:
    """Compile our own kernels alone, and ask ptxas for registers and spills; by kernel name."""
    spec, layout = programs.model.spec, programs.layout
    mesh = _mesh()
    sharding = NamedSharding(mesh, PartitionSpec())

    def array(*shape: int, dtype: Any = jnp.int32) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    pool = array(
        programs.pages, layout.planes, layout.kv_heads, layout.page_size, layout.head_dim, dtype=programs.dtype
    )
    table = programs.pages_per_slot

    def attention(rows: int, queries: int) -> tuple[Any, ...]:
        q = array(rows, queries, spec.num_heads, spec.head_dim, dtype=programs.dtype)
        exits = array(programs.pages, layout.page_size) if layout.history else None
        return q, pool, pool, array(rows, table), array(rows, queries), array(rows), exits

    entry = array(slots, layout.kv_heads, layout.head_dim, dtype=programs.dtype)
    attend = functools.partial(paged_attention_triton, history=layout.history)
    calls = (
        (attend, attention(slots, 1)),
        (attend, attention(1, 512)),
        (kv_write_triton, (pool, pool, entry, entry, *[array(slots)] * 4)),
    )
    found: dict[str, Resources] = {}
    for function, args in calls:
        with tempfile.TemporaryDirectory() as folder, jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            options = {"xla_gpu_autotune_level": 0, "xla_dump_to": folder, "xla_dump_emitter_re": ".*"}
            jax.jit(function).lower(*args).compile(compiler_options=options)
            for ptx in pathlib.Path(folder).glob("*.ptx"):
                found.update(_ptxas(ptx))
    return found


def _ptxas(ptx: pathlib.Path) -> dict[str, Resources]:
    (assembler,) = (p for root in nvidia.__path__ for p in pathlib.Path(root).glob("*/bin/ptxas"))
    command = [str(assembler), "-arch=sm_90a", "-v", str(ptx), "-o", "/dev/null"]
    said = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stderr
    result = {}
    for part in said.split("Compiling entry function")[1:]:
        name = part.split("'")[1]
        spills = sum(int(n) for n in re.findall(r"(\d+) bytes spill (?:stores|loads)", part))
        (registers,) = re.findall(r"Used (\d+) registers", part)
        result[name] = Resources(registers=int(registers), spill_bytes=spills)
    return result
