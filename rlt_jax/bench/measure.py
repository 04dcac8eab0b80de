"""Measurements through the engine at one size: the time of a tick, and of a first token.

What bounds them.  A decode tick reads the core's weights once and every row's KV at one plane: bytes over the copy
bandwidth is its floor.  Prefill is bound by arithmetic: 2 x core parameters x tokens x loops.
"""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from rlt_jax.bench.environment import floor_tb_s
from rlt_jax.bench.timeline import Timeline, guarded, prepare, refused, too_short
from rlt_jax.bench.workload import tick_bytes
from rlt_jax.config import PLATFORM_DEFAULTS, EngineConfig
from rlt_jax.errors import InvalidConfig
from rlt_jax.models.checkpoint import LoadedCheckpoint
from rlt_jax.runtime.engine import LLMEngine

WARM_UP = 1_000_000  # request numbers from here on belong to warm-up


@contextlib.contextmanager
def engine(loaded: LoadedCheckpoint, *, slots: int, prompt: int, outputs: int, **settings: Any) -> Iterator[LLMEngine]:
    """A warm engine whose context is just what prompts and outputs of these lengths need, rounded up to pages.

    Raises:
        InvalidConfig: the KV pool that fits is too small for every slot at that context, so some would wait.
    """
    defaults = PLATFORM_DEFAULTS["gpu" if jax.default_backend() == "gpu" else "cpu"]
    page = settings.get("page_size") or defaults["page_size"]
    context = -(-(prompt + outputs) // page) * page
    built = LLMEngine(loaded, EngineConfig(slots=slots, max_context=context, dtype=loaded.dtype, **settings))
    try:
        plan = built.server_info()["memory_plan"]
        if plan["pages"] < plan["useful_pages"]:
            raise InvalidConfig(
                f"{slots} slots at {context} positions need {plan['useful_pages']} KV pages, {plan['pages']} fit: "
                "measure fewer slots or a shorter context"
            )
        _warm(built, prompt, outputs)
        yield built
    finally:
        built.close()


def _warm(engine: LLMEngine, prompt: int, outputs: int) -> None:
    """Run every program a few times: XLA captures its graphs on the second and third execution."""
    line = Timeline(engine)
    for i in range(3):
        line.submit(prepare(engine, WARM_UP + i, prompt, min(16, outputs), None))
        line.drain()


def tick_outputs(loops: int, slots: int) -> int:
    """Outputs per request that keep every slot busy for about 160 ticks."""
    return 160 // loops + 24 + slots // 8


def tick(engine: LLMEngine, context: int, copy_tb_s: float) -> dict[str, Any]:
    """Median time of one tick of a warm engine with every slot busy at fixed depth, from the gaps between rounds.

    The engine must have room for `tick_outputs` beside the context.
    """
    loaded, slots = engine.loaded, engine.config.slots
    loops = loaded.model.spec.max_loops
    requests = [prepare(engine, i, context, tick_outputs(loops, slots), None) for i in range(slots)]
    line = Timeline(engine)
    with guarded():
        for request in requests:
            line.submit(request)
        while len(line.arrivals) < slots:
            line.step()
        while not line.finished:
            line.step()
    # two rounds after the last first token the device is in step again; the step that finishes the first request ends
    first, last = line.last_first_token() + 2, min(line.finished.values()) - 1
    window = line.window(first, last)
    guards = line.guards()
    line.drain()
    row = {
        "op": "tick",
        "slots": slots,
        "context": context,
        "loops": loops,
        "kv_layout": engine.config.kv_layout.value,
        "kv_planes": engine.model_info()["kv_planes"],
        "rounds": window.rounds,
        "idle_row_share": window.idle_row_ticks / max(1, window.ticks * slots),
        **guards,
    }
    reason = too_short(window)
    if reason is not None:
        return refused(row, f"too few rounds with every slot busy: {window.rounds}", ())
    milliseconds = statistics.median(window.tick_seconds) * 1e3
    lengths = [
        sum(context + sum(step <= at for step in steps) for steps in line.arrivals.values())
        for at in range(first, last + 1)
    ]
    moved = tick_bytes(loaded, int(statistics.mean(lengths)), slots, loops)
    floor = moved / floor_tb_s(copy_tb_s) / 1e9
    figures = {
        "milliseconds": milliseconds,
        "spread_ms": [float(np.percentile(window.tick_seconds, p)) * 1e3 for p in (10, 90)],
        "bytes": moved,
        "floor_ms": floor,
        "share_of_floor": floor / milliseconds,
    }
    return refused({**row, **figures}, None, tuple(figures))


def first_token(engine: LLMEngine, prompt: int, repeats: int = 7) -> dict[str, Any]:
    """Time from add to the first output of a lone prompt on a warm engine."""
    requests = [prepare(engine, i, prompt, 2, None) for i in range(repeats)]
    line = Timeline(engine)
    with guarded():
        for request in requests:
            line.submit(request)
            line.drain()
    times = [line.samples[line.arrivals[name][0]].at - line.submitted[name] for name in line.submitted]
    row = {
        "op": "first_token",
        "slots": engine.config.slots,
        "prompt": prompt,
        "kv_layout": engine.config.kv_layout.value,
        "prefill_chunk": engine.config.prefill_chunk,
        "milliseconds": statistics.median(times) * 1e3,
        "all_ms": [t * 1e3 for t in times],
        **line.guards(),
    }
    return refused(row, None, ("milliseconds", "all_ms"))
