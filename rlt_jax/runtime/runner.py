"""Owner of everything on the device: parameters, KV pool, slot state, compiled programs and rounds in flight.

Others submit a RoundPlan and later receive that plan's RoundEvents; they never see an array.  Programs are compiled at
start and only called afterwards: nothing is traced or compiled while serving, and every host array travels through an
explicit device_put.
"""

from __future__ import annotations

import collections
import concurrent.futures
import dataclasses
import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rlt_jax.config import EngineConfig
from rlt_jax.kvcache.layout import KVLayout
from rlt_jax.models.spec import LoopedModel, Params
from rlt_jax.ops.kv_write.api import choose_kv_write
from rlt_jax.ops.paged_attention.api import choose_paged_attention
from rlt_jax.ops.selection import Requirement
from rlt_jax.runtime.memory import MemoryPlan, plan_memory
from rlt_jax.runtime.plan import PrefillChunk, RoundEvents, RoundPlan, SlotBind
from rlt_jax.runtime.programs import Programs
from rlt_jax.runtime.slots import bind_words, pack_bind

log = logging.getLogger(__name__)

ASSUMED_TEMP_BYTES = 1 << 30  # program scratch assumed until the programs are compiled and tell
MAX_IN_FLIGHT = 2  # the host plans round k + 1 while the device runs round k
_COMPILE_STACK_BYTES = 64 << 20  # XLA's compiler recurses deeper than a thread's default stack


@dataclasses.dataclass(frozen=True)
class _InFlight:
    plan: RoundPlan
    packed: jax.Array


class Runner:
    """See the module docstring.  One thread, the engine's, calls it."""

    def __init__(
        self,
        model: LoopedModel,
        params: Params,
        config: EngineConfig,
        layout: KVLayout,
        *,
        eos_token_ids: Sequence[int],
        device: jax.Device,
        parameter_bytes: int,
    ) -> None:
        self._params = params
        self._config = config
        self._layout = layout
        self._eos = tuple(eos_token_ids)
        self._device = device
        self._sharding = jax.sharding.SingleDeviceSharding(device)
        self._in_flight: collections.deque[_InFlight] = collections.deque()
        spec = model.spec
        need = Requirement(
            platform=device.platform,
            dtype=config.dtype,
            heads=spec.num_heads,
            kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
            page_size=layout.page_size,
        )
        self.implementations = (
            choose_paged_attention(config.attention, need),
            choose_kv_write(config.attention, need),
        )
        self.prefill_buckets = () if layout.prompt_is_sequential else prefill_buckets(config.prefill_chunk or 1)
        self.memory_plan, self._programs = self._plan(model, parameter_bytes, ASSUMED_TEMP_BYTES)
        began = time.perf_counter()
        self._compiled = self._compile()
        temp = max(p.memory_analysis().temp_size_in_bytes for p in self._compiled.values())
        corrected, programs = self._plan(model, parameter_bytes, temp)
        if corrected.source == "device_memory" and temp > ASSUMED_TEMP_BYTES:
            log.info("program scratch is %s bytes, more than assumed: compiling again for a smaller pool", f"{temp:,}")
            self._programs = programs
            self._compiled = self._compile()
        else:
            corrected = dataclasses.replace(corrected, pages=self.memory_plan.pages)
        self.memory_plan = corrected
        self.compile_seconds = time.perf_counter() - began
        self._kv, self._slots, self._round = self._compiled["make_state"]()
        jax.block_until_ready((self._kv, self._slots))

    def _plan(self, model: LoopedModel, parameter_bytes: int, temp_bytes: int) -> tuple[MemoryPlan, Programs]:
        config, layout = self._config, self._layout
        slots, context = config.slots or 1, config.max_context or 1
        stats = self._device.memory_stats() if self._device.platform == "gpu" else None
        plan = plan_memory(
            layout,
            requested_pages=config.kv_pages,
            slots=slots,
            max_context=context,
            parameter_bytes=parameter_bytes,
            program_temp_bytes=temp_bytes,
            device_limit_bytes=stats["bytes_limit"] if stats else None,
        )
        return plan, Programs(
            model=model,
            layout=layout,
            dtype=jnp.dtype(config.dtype),
            slots=slots,
            max_context=context,
            pages_per_slot=layout.pages_for(context),
            pages=plan.pages,
            max_ticks=config.round_ticks or 1,
            attention=self.implementations[0].chosen,
            kv_write=self.implementations[1].chosen,
        )

    # -- compiling ----------------------------------------------------------------------------------------------------

    @property
    def compiled_programs(self) -> int:
        return len(self._compiled)

    def _compile(self) -> dict[str, Any]:
        """Lower and compile every program ahead of time, in parallel."""
        lowered = lower_programs(self._programs, self._params, self.prefill_buckets, self._sharding)
        previous = threading.stack_size(_COMPILE_STACK_BYTES)
        try:
            with concurrent.futures.ThreadPoolExecutor(max_workers=len(lowered)) as pool:
                jobs = {
                    name: pool.submit(low.compile, compiler_options=compiler_options(name, self._device.platform))
                    for name, low in lowered.items()
                }
                return {name: job.result() for name, job in jobs.items()}
        finally:
            threading.stack_size(previous)

    # -- rounds -------------------------------------------------------------------------------------------------------

    @property
    def in_flight(self) -> int:
        return len(self._in_flight)

    def dispatch(self, plan: RoundPlan) -> None:
        """Send a round to the device; returns at once.  Everything before the ticks may be sent again safely."""
        # binds come after the releases of the same plan, and begin would free a slot that was just bound anew
        rebound = {bind.slot for bind in plan.binds}
        for bind in plan.binds:
            self._slots = self._run("bind", self._slots, self._put(self._pack(bind)))
        for chunk in plan.chunks:
            where = np.array([chunk.slot, chunk.start, chunk.count, chunk.last], np.int32)
            name = f"prefill_{self._bucket(chunk)}"
            self._kv, self._slots = self._run(name, self._params, self._kv, self._slots, self._put(where))
        words = np.zeros(2 + self._programs.slots, np.int32)
        words[:2] = plan.ticks, plan.end_early
        words[[2 + slot for slot in plan.releases if slot not in rebound]] = 1
        self._slots, self._round = self._run("begin", self._slots, self._round, self._put(words))
        self._kv, self._slots, self._round = self._run("decode", self._params, self._kv, self._slots, self._round)
        packed = self._run("report", self._slots, self._round)
        with jax.transfer_guard_device_to_host("allow"):  # meant: the round's one transfer, started early
            packed.copy_to_host_async()
        self._in_flight.append(_InFlight(plan, packed))

    def collect(self) -> tuple[RoundPlan, RoundEvents]:
        """Wait for the oldest round in flight; its plan and its events."""
        oldest = self._in_flight[0]
        with jax.transfer_guard_device_to_host("allow"):
            packed = jax.device_get(oldest.packed)
        self._in_flight.popleft()
        return oldest.plan, RoundEvents.unpack(packed, self._programs.max_ticks)

    def reset(self) -> None:
        """Start over after a device failure: drop the rounds in flight and every old array, then make new state."""
        self._in_flight.clear()
        self._kv = self._slots = self._round = None  # before the new pool is made: two would not fit
        self._kv, self._slots, self._round = self._compiled["make_state"]()
        jax.block_until_ready((self._kv, self._slots))

    def close(self) -> None:
        """Give the device memory back.  The runner is dead afterwards."""
        self._in_flight.clear()
        self._kv = self._slots = self._round = self._params = None
        self._compiled = {}

    def _run(self, name: str, *args: Any) -> Any:
        return self._compiled[name](*args)

    def _put(self, array: np.ndarray) -> jax.Array:
        return jax.device_put(array, self._sharding)

    def _bucket(self, chunk: PrefillChunk) -> int:
        return next(b for b in self.prefill_buckets if b >= chunk.count)

    def _pack(self, bind: SlotBind) -> np.ndarray:
        params = bind.request.params
        eos = () if params.ignore_eos else self._eos
        return pack_bind(
            bind.request,
            slot=bind.slot,
            pages=bind.pages,
            stop_ids=tuple(dict.fromkeys([*params.stop_token_ids, *eos])),
            sequential_prompt=self._layout.prompt_is_sequential,
            max_context=self._programs.max_context,
            pages_per_slot=self._programs.pages_per_slot,
        )


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
