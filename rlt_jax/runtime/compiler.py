"""From pure functions to executables: which programs a server has, and how XLA compiles them, all before serving."""

from __future__ import annotations

import concurrent.futures
import threading
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from rlt_jax.models.spec import Params
from rlt_jax.runtime.programs import Programs, begin_words
from rlt_jax.runtime.slots import bind_words

_COMPILE_STACK_BYTES = 64 << 20  # XLA's compiler recurses deeper than a thread's default stack


def prefill_buckets(prefill_chunk: int) -> tuple[int, ...]:
    """Compiled chunk lengths: the full chunk, and powers of two from 64 below it for short prompts and tails."""
    below = [1 << i for i in range(6, 15) if 1 << i < prefill_chunk]
    return (*below, prefill_chunk)


# Everything that the two large programs launch, so that each run of one is a single CUDA graph: a launch from the host
# costs more than most of their kernels run, and a loop or condition left outside makes the host read a predicate back.
_CAPTURED = "FUSION,CUSTOM_CALL,CUBLAS,CUBLASLT,CUDNN,DYNAMIC_SLICE_FUSION,WHILE,CONDITIONAL"


def compiler_options(program: str, platform: str) -> dict[str, Any]:
    """XLA options of one program.  An unknown name raises at compile time, so they are per platform."""
    if platform != "gpu":
        return {}
    if program != "decode" and not program.startswith("prefill"):
        # a few kernels on arguments of their own: updating a graph for each call would cost more than it saves
        return {"xla_gpu_enable_command_buffer": ""}
    return {
        "xla_gpu_graph_min_graph_size": 1,
        "xla_gpu_enable_command_buffer": _CAPTURED,
        # CUB's sort (sampling with filters) cannot be captured, and then neither can the condition that it stands in,
        # nor the loop around that; docs/performance.md has what one kernel cost
        "xla_gpu_enable_cub_radix_sort": False,
    }


def lower_programs(
    programs: Programs, params: Params, buckets: Sequence[int], sharding: jax.sharding.Sharding
) -> dict[str, Any]:
    """Lower every program for the given sharding.  `params` may be arrays or ShapeDtypeStructs.

    Returns:
        name -> jax.stages.Lowered: make_state, begin, bind, decode, report and one prefill_<bucket> each.
    """

    def struct(leaf: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    def argument(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.int32, sharding=sharding)

    weights = jax.tree.map(struct, params)
    kv, slots, round_ = jax.tree.map(struct, jax.eval_shape(programs.make_state))
    words = argument(bind_words(programs.max_context, programs.pages_per_slot))

    def lower(function: Callable[..., Any], *args: Any, donate: tuple[int, ...] = ()) -> Any:
        # an argument that is donated but not read would be dropped, and its result given a new address every time
        return jax.jit(function, donate_argnums=donate, keep_unused=True).lower(*args)

    lowered = {
        "make_state": jax.jit(programs.make_state, out_shardings=sharding).lower(),
        "begin": lower(programs.begin, slots, round_, argument(begin_words(programs.slots)), donate=(0, 1)),
        "bind": lower(programs.bind, slots, words, donate=(0,)),
        "decode": lower(programs.decode, weights, kv, slots, round_, donate=(1, 2, 3)),
        "report": lower(programs.report, slots, round_),
    }
    for bucket in buckets:

        def prefill(params: Any, kv: Any, slots: Any, round_: Any, bucket: int = bucket) -> Any:
            return programs.prefill(params, kv, slots, round_, bucket=bucket)

        lowered[f"prefill_{bucket}"] = lower(prefill, weights, kv, slots, round_, donate=(1, 2, 3))
    return lowered


def compile_programs(
    programs: Programs, params: Params, buckets: Sequence[int], device: jax.Device
) -> dict[str, jax.stages.Compiled]:
    """Compile every program for one device, in parallel; names as in `lower_programs`."""
    lowered = lower_programs(programs, params, buckets, jax.sharding.SingleDeviceSharding(device))
    previous = threading.stack_size(_COMPILE_STACK_BYTES)
    try:
        with concurrent.futures.ThreadPoolExecutor(max_workers=len(lowered)) as pool:
            jobs = {
                name: pool.submit(low.compile, compiler_options=compiler_options(name, device.platform))
                for name, low in lowered.items()
            }
            return {name: job.result() for name, job in jobs.items()}
    finally:
        threading.stack_size(previous)
