"""Output tokens per second of one engine with as many slots as clients, in three forms, each beside its bound.

    steady  C requests at once; from the last first token to the first finish: every slot is busy all the time
    peer    C requests at once; decode only: from the last first token until all are drained
    closed  2C requests by C clients, each sending its next as the last ends; prefill and drain included

What bounds them, from the same engine: a full tick (median over the rounds of the steady form at fixed depth) and the
prefill of one prompt (a burst of C prompts with one output each).  Decode can bring C / (mean loops x full tick) tokens
a second; the closed form needs its prompts' prefill and its ticks, one after the other.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Iterator, Sequence
from typing import Any

from rlt_jax.bench.measure import WARM_UP
from rlt_jax.bench.timeline import Timeline, Window, guarded, prepare, refused, too_short
from rlt_jax.runtime.engine import LLMEngine

FORMS = ("steady", "peer", "closed")
Trace = list[list[int]] | None  # None: every token at full depth
_BURST = WARM_UP + 1_000  # request numbers of the prefill bursts
_LONE_OUTPUTS = 24


@dataclasses.dataclass(frozen=True, kw_only=True)
class Bounds:
    """What one engine's parts cost.  None where it could not be measured."""

    full_tick_ms: float | None  # every slot busy, fixed depth
    prefill_ms: float  # of one prompt, in a burst; 0 where prompts have no program of their own


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """Requests that were submitted, and how they went.  The steady and the peer form are two windows on one run."""

    engine: LLMEngine
    line: Timeline
    clients: int
    requests: int
    prompt: int
    outputs: int
    trace: Trace
    asked: dict[str, list[int]]  # exit depths by request id


def rows(
    engine: LLMEngine,
    *,
    clients: int,
    prompt: int,
    outputs: int,
    forms: Sequence[str],
    depths: Sequence[Trace],
    prefill_ms: float,
) -> Iterator[dict[str, Any]]:
    """The rows of one count of outputs, depth by depth, each in the order of FORMS.

    A run at fixed depth always comes first: its steady form gives the tick that the others are held against.
    """

    def run(trace: Trace, form: str) -> Run:
        return execute(engine, clients, 2 * clients if form == "closed" else clients, prompt, outputs, trace)

    reference = run(None, "steady")
    full_tick = throughput(reference, "steady", Bounds(full_tick_ms=None, prefill_ms=prefill_ms)).get("full_tick_ms")
    bounds = Bounds(full_tick_ms=full_tick, prefill_ms=prefill_ms)
    fixed: dict[str, float] = {}
    for trace in depths:
        opened = None if set(forms) == {"closed"} else reference if trace is None else run(trace, "steady")
        for form in forms:
            measured = run(trace, form) if form == "closed" or opened is None else opened
            row = throughput(measured, form, bounds)
            rate = row.get("tokens_per_second")
            if trace is None and rate:
                fixed[form] = rate
            elif rate and form in fixed:
                row["over_fixed"] = rate / fixed[form]
            yield row


def execute(engine: LLMEngine, clients: int, total: int, prompt: int, outputs: int, trace: Trace) -> Run:
    """Send `total` requests through a warm engine, at most `clients` at once, until all have finished."""
    requests = [prepare(engine, i, prompt, outputs, trace) for i in range(total)]
    line, waiting = Timeline(engine), iter(requests)
    with guarded():
        for _ in range(clients):
            line.submit(next(waiting))
        while len(line.finished) < total:
            for _ in line.step():
                if (following := next(waiting, None)) is not None:
                    line.submit(following)
    full = engine.loaded.model.spec.max_loops
    return Run(
        engine=engine,
        line=line,
        clients=clients,
        requests=total,
        prompt=prompt,
        outputs=outputs,
        trace=trace,
        asked={
            f"bench-{i}": [full] * outputs if trace is None else trace[i % len(trace)][:outputs] for i in range(total)
        },
    )


def throughput(run: Run, form: str, bounds: Bounds) -> dict[str, Any]:
    """One form's row of a run.

    Names that begin with window_, and tokens, tokens_per_second and tick_ms, count in the form's window; wall_seconds,
    ticks, the idle rows and the loops count from the first submission to the end.  A window that is empty or too short,
    and work other than what was asked for, give a row without a rate and with the reason in "invalid".
    """
    line, clients = run.line, run.clients
    end = len(line.samples) - 1
    first = 0 if form == "closed" else line.last_first_token()
    last = min(line.finished.values()) if form == "steady" else end
    window, whole = line.window(first, last), line.window(0, end)
    decode_depths = [depth for depths in line.depths.values() for depth in depths[1:]]
    reason = _refusal(form, line, window, first)
    if line.depths != run.asked:
        wrong = sum(line.depths.get(name) != depths for name, depths in run.asked.items())
        reason = f"{wrong} of {run.requests} requests did not get the exit depths they asked for"
    full = float(run.engine.loaded.model.spec.max_loops)
    row: dict[str, Any] = {
        "op": "throughput",
        "form": form,
        "depth": "fixed" if run.trace is None else "trace",
        "clients": clients,
        "requests": run.requests,
        "kv_layout": run.engine.config.kv_layout.value,
        "prompt": run.prompt,
        "outputs": run.outputs,
        "tokens_per_second": window.tokens / window.seconds if window.seconds else 0.0,
        "tokens": window.tokens,
        "window_seconds": window.seconds,
        "window_rounds": window.rounds,
        "window_ticks": window.ticks,
        "window_idle_row_share": window.idle_row_ticks / max(1, window.ticks * clients),
        "tick_ms": 1e3 * window.seconds / max(1, window.ticks),
        "wall_seconds": whole.seconds,
        "mean_loops": statistics.mean(decode_depths) if decode_depths else full,
        "work_loops": sum(decode_depths),
        "asked_loops": sum(sum(depths[1:]) for depths in run.asked.values()),
        "ticks": whole.ticks,
        "idle_row_ticks": whole.idle_row_ticks,
        "idle_row_share": whole.idle_row_ticks / max(1, whole.ticks * clients),
    }
    if form == "steady" and run.trace is None and window.tick_seconds:
        row["full_tick_ms"] = 1e3 * statistics.median(window.tick_seconds)
    elif bounds.full_tick_ms is not None:
        row["full_tick_ms"] = bounds.full_tick_ms
    if "full_tick_ms" in row:
        row |= _against_bound(row, bounds.prefill_ms)
    row |= line.guards()
    return refused(row, reason, ("tokens_per_second", "tick_ms", "full_tick_ms", *_BOUND_FIELDS))


_BOUND_FIELDS = (
    "bound_tokens_per_second",
    "share_of_bound",
    "prefill_ms",
    "prefill_seconds",
    "bound_seconds",
    "over_bound",
)


def _against_bound(row: dict[str, Any], prefill_ms: float) -> dict[str, Any]:
    """The bound of a row and how close it came."""
    seconds = row["full_tick_ms"] / 1e3
    if row["form"] == "closed":
        prefill = row["requests"] * prefill_ms / 1e3
        bound = prefill + row["ticks"] * seconds
        return {
            "prefill_ms": prefill_ms,
            "prefill_seconds": prefill,
            "bound_seconds": bound,
            "over_bound": row["wall_seconds"] / bound,
        }
    bound = row["clients"] / (row["mean_loops"] * seconds)
    return {"bound_tokens_per_second": bound, "share_of_bound": row["tokens_per_second"] / bound}


def _refusal(form: str, line: Timeline, window: Window, first: int) -> str | None:
    """Why a run is no measurement of its form, or None."""
    early = sum(step <= first for step in line.finished.values())
    if form != "closed" and early:
        seconds = line.samples[first].at - line.samples[min(line.finished.values())].at
        return (
            f"{early} of {len(line.finished)} requests finished before the last first token (the first one "
            f"{seconds:.3f} s earlier): the streams never ran together; raise --outputs"
        )
    return too_short(window)


def prefill_ms(engine: LLMEngine, clients: int, prompt: int) -> float:
    """Milliseconds of prefill per prompt: a burst of C prompts with one output each, less the ticks it ran.

    Those ticks have one or few rows, so they count at what a tick of a lone request takes on this engine.  The fastest
    of at least two bursts counts: what disturbs a burst only makes it longer, and a bound should not be generous.
    0 where the layout has no prefill program (its prompts run in ticks).
    """
    if not engine.server_info()["prefill_buckets"]:
        return 0.0
    outputs = min(_LONE_OUTPUTS, engine.config.max_context - prompt)
    lone = Timeline(engine)
    lone_request = prepare(engine, _BURST, prompt, outputs, None)
    with guarded():
        lone.submit(lone_request)
        lone.drain()
    ticks = lone.window(lone.last_first_token(), len(lone.samples) - 1).tick_seconds
    lone_tick = statistics.median(ticks) if ticks else 0.0
    best = float("inf")
    for burst in range(max(2, 8 // clients)):
        start = _BURST + 1 + burst * clients
        requests = [prepare(engine, start + i, prompt, 1, None) for i in range(clients)]
        line = Timeline(engine)
        with guarded():
            for request in requests:
                line.submit(request)
            line.drain()
        run = line.window(0, len(line.samples) - 1)
        best = min(best, run.seconds - run.ticks * lone_tick)
    return max(0.0, 1e3 * best / clients)
