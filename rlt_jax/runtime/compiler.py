"""From pure functions to executables: which programs a server has, and how XLA compiles them, all before serving."""

from __future__ import annotations

import concurrent.futures
import threading
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from rlt_jax.models.spec import Params
from rlt_jax.runtime.programs import Programs
from rlt_jax.runtime.slots import bind_words

_COMPILE_STACK_BYTES = 64 << 20  # XLA's compiler recurses deeper than a thread's default stack


def prefill_buckets(prefill_chunk: int) -> tuple[int, ...]:
    """Compiled chunk lengths: the full chunk, and powers of two from 64 below it for short prompts and tails."""
    below = [1 << i for i in range(6, 15) if 1 << i < prefill_chunk]
    return (*below, prefill_chunk)


def compiler_options(program: str, platform: str) -> dict[str, Any]:
    """XLA options of one program.  An unknown name raises at compile time, so they are per platform."""
    if platform != "gpu":
        return {}
    if program.startswith("prefill"):
        # a graph would have to be updated for every chunk's own argument; kernels are long enough to launch one by one
        return {"xla_gpu_enable_command_buffer": ""}
    # the whole round, loop and conditions included, becomes one CUDA graph: without WHILE and CONDITIONAL the host
    # reads each predicate back and launches every tick's kernels itself (docs/performance.md has the figures)
    captured = "FUSION,CUSTOM_CALL,CUBLAS,CUBLASLT,CUDNN,DYNAMIC_SLICE_FUSION,WHILE,CONDITIONAL"
    return {"xla_gpu_graph_min_graph_size": 1, "xla_gpu_enable_command_buffer": captured}


def lower_programs(
    programs: Programs, params: Params, buckets: Sequence[int], sharding: jax.sharding.Sharding
) -> dict[str, Any]:
    """Lower every program for the given sharding.  `params` may be arrays or ShapeDtypeStructs.

    Returns:
        name -> jax.stages.Lowered: make_state, bind, begin, decode, report and one prefill_<bucket> each.
    """

    def struct(leaf: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    def argument(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.int32, sharding=sharding)

    weights = jax.tree.map(struct, params)
    kv, slots, round_ = jax.tree.map(struct, jax.eval_shape(programs.make_state))
    words = argument(bind_words(programs.max_context, programs.pages_per_slot))

    def lower(function: Callable[..., Any], *args: Any, donate: tuple[int, ...] = ()) -> Any:
        return jax.jit(function, donate_argnums=donate).lower(*args)

    lowered = {
        "make_state": jax.jit(programs.make_state, out_shardings=sharding).lower(),
        "bind": lower(programs.bind, slots, words, donate=(0,)),
        "begin": lower(programs.begin, slots, round_, argument(2 + programs.slots), donate=(0, 1)),
        "decode": lower(programs.decode, weights, kv, slots, round_, donate=(1, 2, 3)),
        "report": lower(programs.report, slots, round_),
    }
    for bucket in buckets:

        def prefill(params: Any, kv: Any, slots: Any, chunk: Any, bucket: int = bucket) -> Any:
            return programs.prefill(params, kv, slots, chunk, bucket=bucket)

        lowered[f"prefill_{bucket}"] = lower(prefill, weights, kv, slots, argument(4), donate=(1, 2))
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
