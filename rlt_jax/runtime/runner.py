"""Owner of everything on the device: parameters, KV pool, slot state, compiled programs and rounds in flight.

Others submit a RoundPlan and later receive that plan's RoundEvents; they never see an array.  Programs are compiled at
start and only called afterwards: nothing is traced or compiled while serving, and every host array travels through an
explicit device_put.
"""

from __future__ import annotations

import collections
import dataclasses
import logging
import time
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rlt_jax.config import ResolvedEngineConfig
from rlt_jax.errors import DeviceFault
from rlt_jax.kvcache.layout import KVLayout
from rlt_jax.models.spec import LoopedModel, Params
from rlt_jax.ops.kv_write.api import choose_kv_write
from rlt_jax.ops.paged_attention.api import choose_paged_attention
from rlt_jax.ops.selection import Requirement
from rlt_jax.runtime.compiler import compile_programs, prefill_buckets
from rlt_jax.runtime.memory import MemoryPlan, host_available_bytes, plan_memory
from rlt_jax.runtime.plan import PrefillChunk, RoundEvents, RoundPlan, SlotBind
from rlt_jax.runtime.programs import BEGIN_HEADER, Programs, begin_words
from rlt_jax.runtime.slots import pack_bind

log = logging.getLogger(__name__)

ASSUMED_TEMP_BYTES = 1 << 30  # program scratch assumed until the programs are compiled and tell
MAX_IN_FLIGHT = 2  # the host plans round k + 1 while the device runs round k


@dataclasses.dataclass(frozen=True)
class _InFlight:
    plan: RoundPlan
    packed: jax.Array


@dataclasses.dataclass(frozen=True)
class _Staged:
    """A plan as device arrays: all that its programs take besides the runner's own state."""

    begin: jax.Array
    binds: list[jax.Array]
    chunks: list[str]  # the program of each chunk; the chunks themselves are in `begin`


class Runner:
    """See the module docstring.  One thread, the engine's, calls it."""

    def __init__(
        self,
        model: LoopedModel,
        params: Params,
        config: ResolvedEngineConfig,
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
        self._kv: Any = None  # KVPool, SlotState, RoundState: donated to every program that takes them
        self._slots: Any = None
        self._round: Any = None
        spec = model.spec
        need = Requirement(
            platform=device.platform,
            dtype=config.dtype,
            heads=spec.num_heads,
            kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
            page_size=layout.page_size,
        )
        attention = choose_paged_attention(config.kernels, need)
        kv_write = choose_kv_write(config.kernels, need)
        self.implementations = (attention, kv_write)
        self.prefill_buckets = () if layout.prompt_is_sequential else prefill_buckets(config.prefill_chunk)
        plan = self._plan_memory(parameter_bytes, ASSUMED_TEMP_BYTES)
        self._programs = Programs(
            model=model,
            layout=layout,
            dtype=jnp.dtype(config.dtype),
            slots=config.slots,
            max_context=config.max_context,
            pages_per_slot=layout.pages_for(config.max_context),
            pages=plan.pages,
            max_ticks=config.round_ticks,
            attention=attention.chosen,
            kv_write=kv_write.chosen,
        )
        began = time.perf_counter()
        self._compiled = self._compile()
        temp = max(p.memory_analysis().temp_size_in_bytes for p in self._compiled.values())
        if temp > ASSUMED_TEMP_BYTES:
            plan = self._plan_memory(parameter_bytes, temp)
            if plan.pages < self._programs.pages:
                log.info("program scratch is %s bytes: compiling again for a smaller pool", f"{temp:,}")
                self._programs = dataclasses.replace(self._programs, pages=plan.pages)
                self._compiled = self._compile()
        self.memory_plan = dataclasses.replace(plan, program_temp_bytes=temp)
        self.compiled_programs = len(self._compiled)
        self.compile_seconds = time.perf_counter() - began
        self._make_state()

    def _compile(self) -> dict[str, Any]:
        return compile_programs(self._programs, self._params, self.prefill_buckets, self._device)

    def _plan_memory(self, parameter_bytes: int, scratch_bytes: int) -> MemoryPlan:
        """Before the pool exists: what the device has in use then is not ours to give away."""
        config = self._config
        stats = self._device.memory_stats() if self._device.platform == "gpu" else None
        return plan_memory(
            self._layout,
            requested_pages=config.kv_pages,
            slots=config.slots,
            max_context=config.max_context,
            parameter_bytes=parameter_bytes,
            used_bytes=stats["bytes_in_use"] if stats else parameter_bytes,
            scratch_bytes=scratch_bytes,
            device_limit_bytes=stats["bytes_limit"] if stats else None,
            host_available_bytes=None if stats else host_available_bytes(),
        )

    # -- rounds -------------------------------------------------------------------------------------------------------

    @property
    def in_flight(self) -> int:
        return len(self._in_flight)

    def dispatch(self, plan: RoundPlan) -> None:
        """Send a round to the device; returns at once.

        What the host prepares comes first, so that its faults find the device as it was.

        Raises:
            DeviceFault: a program of the round could not be started; only `reset` helps.  Sending the plan again would
                run the others twice, and lose the tokens of ticks that ran.
            Exception: anything else was the host's; nothing has changed, and the plan may be sent again.
        """
        staged = self._stage(plan)
        try:
            packed = self._launch(staged)
        except Exception as error:
            raise DeviceFault(f"{type(error).__name__}: {error}") from error
        self._in_flight.append(_InFlight(plan, packed))

    def _stage(self, plan: RoundPlan) -> _Staged:
        """Bring a plan to the device; starts no program."""
        slots = self._programs.slots
        words = np.zeros(begin_words(slots), np.int32)
        at = len(BEGIN_HEADER)
        words[:at] = plan.ticks, plan.end_early, self._config.boundary_batch
        words[[at + slot for slot in plan.releases]] = 1
        for i, c in enumerate(plan.chunks):
            words[at + slots + 4 * i :][:4] = c.slot, c.start, c.count, c.last
        return _Staged(
            begin=self._put(words),
            binds=[self._put(self._pack(bind)) for bind in plan.binds],
            chunks=[f"prefill_{self._bucket(c)}" for c in plan.chunks],
        )

    def _launch(self, staged: _Staged) -> jax.Array:
        """Start a round's programs, in order; the packed events that it will have."""
        self._slots, self._round = self._run("begin", self._slots, self._round, staged.begin)
        for words in staged.binds:
            self._slots = self._run("bind", self._slots, words)
        for program in (*staged.chunks, "decode"):
            self._kv, self._slots, self._round = self._run(program, self._params, self._kv, self._slots, self._round)
        packed = self._run("report", self._slots, self._round)
        with jax.transfer_guard_device_to_host("allow"):  # meant: the round's one transfer, started early
            packed.copy_to_host_async()
        return packed

    def collect(self) -> tuple[RoundPlan, RoundEvents]:
        """Wait for the oldest round in flight; its plan and its events."""
        oldest = self._in_flight[0]
        with jax.transfer_guard_device_to_host("allow"):
            packed = jax.device_get(oldest.packed)
        self._in_flight.popleft()
        return oldest.plan, RoundEvents.unpack(packed, self._programs.max_ticks)

    def reset(self) -> None:
        """Start over after a device failure: drop the rounds in flight and every old array, then make new state."""
        self._drop_state()  # before the new pool is made: two would not fit
        self._make_state()

    def close(self) -> None:
        """Give the device memory back.  The runner is dead afterwards."""
        self._drop_state()
        self._params = None
        self._compiled = {}

    def _make_state(self) -> None:
        self._kv, self._slots, self._round = self._compiled["make_state"]()
        jax.block_until_ready((self._kv, self._slots))

    def _drop_state(self) -> None:
        """Free the rounds in flight, the pool and the slots themselves: a traceback may still refer to the arrays."""
        rounds = [in_flight.packed for in_flight in self._in_flight]
        for leaf in jax.tree.leaves((rounds, self._kv, self._slots, self._round)):
            if not leaf.is_deleted():
                leaf.delete()
        self._in_flight.clear()
        self._kv = self._slots = self._round = None

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
