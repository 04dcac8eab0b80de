"""One measured run of an engine: what was submitted, what each step brought and when, and the guards around it."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Iterator
from typing import Any

import jax

from rlt_jax.bench.workload import params_for, random_prompt
from rlt_jax.request import Request
from rlt_jax.runtime.engine import LLMEngine

MIN_ROUNDS = 8  # a window with fewer rounds says more about its ends than about what lies between
_COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"


class CompileWatch:
    """Counts XLA compiles; a timed window with one in it is not a measurement."""

    def __init__(self) -> None:
        self.compiles = 0
        jax.monitoring.register_event_duration_secs_listener(self._hear)

    def _hear(self, event: str, *_: Any, **__: Any) -> None:
        self.compiles += event == _COMPILE_EVENT


WATCH = CompileWatch()


@contextlib.contextmanager
def guarded() -> Iterator[None]:
    """Forbid retracing and implicit transfers to this thread, the one that drives the engine, until the block ends.

    The engine enters the same guards in each of its steps; this covers what the benchmark does between them too.
    """
    with jax.no_tracing(), jax.transfer_guard("disallow"):
        yield


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sample:
    """The clock and the engine's counters after one step."""

    at: float  # seconds, time.perf_counter
    rounds: int
    ticks: int
    idle_row_ticks: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Window:
    """What happened between two steps of a timeline: after the first, up to and including the last."""

    seconds: float
    tokens: int
    rounds: int
    ticks: int
    idle_row_ticks: int
    tick_seconds: list[float]  # of each step that ran ticks: its time over its ticks


class Timeline:
    """Drives an engine and remembers, per request, in which step its tokens arrived."""

    def __init__(self, engine: LLMEngine) -> None:
        self._engine = engine
        self._compiles = WATCH.compiles
        self.samples = [self._sample()]
        self.submitted: dict[str, float] = {}
        self.arrivals: dict[str, list[int]] = {}  # index into samples of the step that brought each token
        self.depths: dict[str, list[int]] = {}
        self.finished: dict[str, int] = {}  # index into samples
        self.transfer_guard = "disallow"

    def _sample(self) -> Sample:
        stats = self._engine.stats()
        counters = {name: stats[name] for name in ("rounds", "ticks", "idle_row_ticks")}
        return Sample(at=time.perf_counter(), **counters)

    @property
    def compiles(self) -> int:
        """XLA compiles since the timeline began."""
        return WATCH.compiles - self._compiles

    def submit(self, request: Request) -> None:
        self._engine.add(request)
        self.submitted[request.request_id] = time.perf_counter()

    def step(self) -> list[str]:
        """One engine step; returns the ids that finished in it.

        Raises:
            RuntimeError: a request failed.
        """
        outputs = self._engine.step()
        self.samples.append(self._sample())
        now, ended = len(self.samples) - 1, []
        if jax.config.jax_transfer_guard != "disallow":
            self.transfer_guard = "off"
        for out in outputs:
            if out.error:
                raise RuntimeError(out.error)
            self.arrivals.setdefault(out.request_id, []).extend([now] * len(out.token_ids))
            self.depths.setdefault(out.request_id, []).extend(out.exit_depths)
            if out.finished:
                self.finished[out.request_id] = now
                ended.append(out.request_id)
        return ended

    def drain(self) -> None:
        while self._engine.has_work():
            self.step()

    def last_first_token(self) -> int:
        """Index of the step after which every request that produced anything has its first token."""
        return max(steps[0] for steps in self.arrivals.values())

    def window(self, first: int, last: int) -> Window:
        """From the end of step `first` to the end of step `last`; all zero if `last` does not come later."""
        begin, end = self.samples[first], self.samples[max(first, last)]
        inside = self.samples[first : last + 1]
        pairs = [(a, b) for a, b in zip(inside, inside[1:], strict=False) if b.ticks > a.ticks]
        return Window(
            seconds=end.at - begin.at,
            tokens=sum(first < step <= last for steps in self.arrivals.values() for step in steps),
            rounds=end.rounds - begin.rounds,
            ticks=end.ticks - begin.ticks,
            idle_row_ticks=end.idle_row_ticks - begin.idle_row_ticks,
            tick_seconds=[(b.at - a.at) / (b.ticks - a.ticks) for a, b in pairs],
        )

    def guards(self) -> dict[str, Any]:
        """What a row says about its run: compiles since it began, and the transfer guard that every step ran under."""
        return {"compiles_in_window": self.compiles, "transfer_guard": self.transfer_guard}


def prepare(engine: LLMEngine, index: int, prompt: int, outputs: int, trace: list[list[int]] | None) -> Request:
    """Request number `index` of a workload, checked and ready, so that no time is spent on making it later."""
    vocab = engine.loaded.model.spec.vocab_size
    return engine.prepare(f"bench-{index}", random_prompt(vocab, prompt, index), params_for(index, outputs, trace))


def refused(row: dict[str, Any], reason: str | None, figures: tuple[str, ...]) -> dict[str, Any]:
    """`row` as it is if there is no reason against it, else without its figures and with the reason."""
    if reason is None and row["compiles_in_window"]:
        reason = f"{row['compiles_in_window']} programs were compiled in the timed window"
    if reason is None and row["transfer_guard"] != "disallow":
        reason = "a step ran without the transfer guard"
    if reason is None:
        return row
    return {**{name: value for name, value in row.items() if name not in figures}, "invalid": reason}


def too_short(window: Window) -> str | None:
    """Why a window is no measurement, or None."""
    if window.rounds >= MIN_ROUNDS:
        return None
    return f"the window holds {window.rounds} rounds, fewer than {MIN_ROUNDS}: raise --outputs"
