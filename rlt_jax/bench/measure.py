"""Measurements through the engine: tick time, first token, and three forms of throughput.

What bounds them.  A decode tick reads the core's weights once and every row's KV at one plane: bytes over the copy
bandwidth is its floor.  Prefill is bound by arithmetic: 2 x core parameters x tokens x loops.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from typing import Any

import jax
import numpy as np

from rlt_jax.bench.environment import floor_tb_s
from rlt_jax.bench.workload import params_for, random_prompt, tick_bytes
from rlt_jax.config import EngineConfig
from rlt_jax.models.checkpoint import LoadedCheckpoint
from rlt_jax.runtime.engine import LLMEngine


class CompileWatch:
    """Counts XLA compiles; a timed window with one in it is not a measurement."""

    def __init__(self) -> None:
        self.compiles = 0
        jax.monitoring.register_event_duration_secs_listener(self._hear)

    def _hear(self, event: str, *_: Any, **__: Any) -> None:
        self.compiles += event == "/jax/core/compile/backend_compile_duration"


WATCH = CompileWatch()
WARM_UP = 1_000_000  # request numbers from here on belong to warm-up


@dataclasses.dataclass
class Timeline:
    """When each request's tokens arrived, on one clock."""

    submitted: dict[str, float] = dataclasses.field(default_factory=dict)
    arrivals: dict[str, list[float]] = dataclasses.field(default_factory=dict)
    depths: dict[str, list[int]] = dataclasses.field(default_factory=dict)
    finished: dict[str, float] = dataclasses.field(default_factory=dict)

    def step(self, engine: LLMEngine) -> list[str]:
        """One engine step; returns the ids that finished in it."""
        outputs = engine.step()
        now = time.perf_counter()
        ended = []
        for out in outputs:
            if out.error:
                raise RuntimeError(out.error)
            self.arrivals.setdefault(out.request_id, []).extend([now] * len(out.token_ids))
            self.depths.setdefault(out.request_id, []).extend(out.exit_depths)
            if out.finished:
                self.finished[out.request_id] = now
                ended.append(out.request_id)
        return ended


def _submit(engine: LLMEngine, line: Timeline, index: int, args: dict[str, Any]) -> None:
    name = f"bench-{index}"
    vocab = engine.loaded.model.spec.vocab_size
    prompt = random_prompt(vocab, args["prompt"], index)
    engine.add_request(name, prompt, params_for(index, args["outputs"], args["trace"]))
    line.submitted[name] = time.perf_counter()


def make_engine(loaded: LoadedCheckpoint, *, slots: int, positions: int, **settings: Any) -> LLMEngine:
    """An engine whose context is just what the workload needs, rounded up to pages."""
    page = settings.get("page_size") or (64 if jax.default_backend() == "gpu" else 16)
    context = -(-positions // page) * page
    config = EngineConfig(slots=slots, max_context=context, dtype=loaded.dtype, **settings)
    return LLMEngine(loaded, config)


def _drain(engine: LLMEngine, line: Timeline) -> None:
    while engine.has_work():
        line.step(engine)


def warm(engine: LLMEngine, prompt: int, outputs: int) -> None:
    """Run every program a few times: XLA captures its graphs on the second and third execution."""
    line = Timeline()
    for i in range(3):
        _submit(engine, line, WARM_UP + i, {"prompt": prompt, "outputs": min(16, outputs), "trace": None})
        _drain(engine, line)


def tick(loaded: LoadedCheckpoint, slots: int, context: int, copy_tb_s: float, **settings: Any) -> dict[str, Any]:
    """Median time of one tick with every slot busy at fixed depth, from the gaps between rounds."""
    loops = loaded.model.spec.trained_loops
    ticks_wanted = 160
    outputs = ticks_wanted // loops + 24 + slots // 8
    engine = make_engine(loaded, slots=slots, positions=context + outputs, **settings)
    line = Timeline()
    warm(engine, context, outputs)
    for i in range(slots):
        _submit(engine, line, i, {"prompt": context, "outputs": outputs, "trace": None})
    while len(line.arrivals) < slots:
        line.step(engine)
    before, compiles = engine.stats(), WATCH.compiles
    samples, positions = [], []
    last, ticks = time.perf_counter(), before["ticks"]
    while not line.finished:
        line.step(engine)
        now, after = time.perf_counter(), engine.stats()["ticks"]
        if after > ticks and not line.finished:
            samples.append((now - last) / (after - ticks))
            positions.append(sum(context + len(a) for a in line.arrivals.values()))
        last, ticks = now, after
    compiled = WATCH.compiles - compiles
    _drain(engine, line)
    engine.close()
    milliseconds = statistics.median(samples[2:]) * 1e3
    moved = tick_bytes(loaded, int(statistics.mean(positions)), slots, loops)
    floor = moved / floor_tb_s(copy_tb_s) / 1e9
    return {
        "op": "tick",
        "slots": slots,
        "context": context,
        "kv_layout": engine.config.kv_layout.value,
        "milliseconds": milliseconds,
        "spread_ms": [float(np.percentile(samples[2:], p)) * 1e3 for p in (10, 90)],
        "rounds": len(samples) - 2,
        "bytes": moved,
        "floor_ms": floor,
        "share_of_floor": floor / milliseconds,
        "compiles_in_window": compiled,
    }


def first_token(loaded: LoadedCheckpoint, prompt: int, repeats: int = 7, **settings: Any) -> dict[str, Any]:
    """Time from add_request to the first output of a lone prompt, through the engine."""
    engine = make_engine(loaded, slots=settings.pop("slots", 1), positions=prompt + 16, **settings)
    warm(engine, prompt, 16)
    times, compiles = [], WATCH.compiles
    for i in range(repeats):
        line = Timeline()
        _submit(engine, line, i, {"prompt": prompt, "outputs": 2, "trace": None})
        _drain(engine, line)
        name = f"bench-{i}"
        times.append(line.arrivals[name][0] - line.submitted[name])
    compiled = WATCH.compiles - compiles
    engine.close()
    return {
        "op": "first_token",
        "prompt": prompt,
        "kv_layout": engine.config.kv_layout.value,
        "prefill_chunk": engine.config.prefill_chunk,
        "milliseconds": statistics.median(times) * 1e3,
        "all_ms": [t * 1e3 for t in times],
        "compiles_in_window": compiled,
    }


def throughput(
    engine: LLMEngine, form: str, clients: int, prompt: int, outputs: int, trace: list[list[int]] | None
) -> dict[str, Any]:
    """Output tokens per second of a warm engine with as many slots as clients, in one of three forms.

    steady  C requests at once; from the last first token to the first finish: every slot is busy all the time
    peer    C requests at once; decode only: from the last first token until all are drained
    closed  2C requests by C clients, each sending its next as the last ends; prefill and drain included
    """
    line, args = Timeline(), {"prompt": prompt, "outputs": outputs, "trace": trace}
    total = 2 * clients if form == "closed" else clients
    before, compiles = engine.stats(), WATCH.compiles
    began = time.perf_counter()
    for i in range(clients):
        _submit(engine, line, i, args)
    sent = clients
    while len(line.finished) < total:
        for _ in line.step(engine):
            if sent < total:
                _submit(engine, line, sent, args)
                sent += 1
    ended = time.perf_counter()
    after = engine.stats()
    compiled = WATCH.compiles - compiles
    start = began if form == "closed" else max(a[0] for a in line.arrivals.values())
    stop = min(line.finished.values()) if form == "steady" else ended
    counted = sum(sum(start < t <= stop for t in a) for a in line.arrivals.values())
    if form == "closed":
        counted = sum(len(a) for a in line.arrivals.values())
    decode_depths = [d for ds in line.depths.values() for d in ds[1:]]
    ticks = after["ticks"] - before["ticks"]
    return {
        "op": "throughput",
        "form": form,
        "depth": "fixed" if trace is None else "trace",
        "clients": clients,
        "kv_layout": engine.config.kv_layout.value,
        "prompt": prompt,
        "outputs": outputs,
        "tokens_per_second": counted / (stop - start),
        "window_seconds": stop - start,
        "tokens": counted,
        "wall_seconds": ended - began,
        "mean_loops": statistics.mean(decode_depths),
        "work_loops": sum(decode_depths),
        "ticks": ticks,
        "idle_row_share": (after["idle_row_ticks"] - before["idle_row_ticks"]) / max(1, ticks * clients),
        "compiles_in_window": compiled,
    }
