"""Engines on the tiny fixture, shared by all test files, and what the tests do with them.

An engine costs seconds of compiling, so each configuration is built once per process and every test must leave it idle:
`serve` and `drained` check that.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import jax.numpy as jnp
import numpy as np

from rlt_jax import LLM, EngineConfig, FinishReason, KVLayoutKind, LLMEngine, RequestOutput, SamplingParams, Usage
from tests.oracle import OuroOracle, Policy

FIXTURE = Path(__file__).parent / "fixtures" / "ouro_tiny"
LAST_EXITED, SHARED = KVLayoutKind.LAST_EXITED, KVLayoutKind.SHARED
CONTEXT = 64


@functools.cache
def engine(
    layout: KVLayoutKind = LAST_EXITED,
    *,
    slots: int = 3,
    page_size: int = 4,
    chunk: int = 5,
    kv_pages: int | None = None,
    context: int = CONTEXT,
    dtype: str = "float32",
) -> LLMEngine:
    """The engine of this configuration; greedy and full depth by default, as the fixture's config says."""
    config = EngineConfig(
        dtype=dtype,
        kv_layout=layout,
        slots=slots,
        page_size=page_size,
        prefill_chunk=chunk,
        max_context=context,
        kv_pages=kv_pages,
    )
    return LLMEngine(FIXTURE, config)


@functools.cache
def llm() -> LLM:
    """The offline API, with the configuration of `engine()`."""
    return LLM(FIXTURE, engine().config)


@functools.cache
def oracle(layout: KVLayoutKind = LAST_EXITED) -> OuroOracle:
    return OuroOracle(FIXTURE, layout=layout.value)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job:
    """A request of a test, and when it arrives or is cancelled, counted in steps of the engine."""

    id: str
    prompt: Sequence[int]
    params: SamplingParams
    arrives: int = 0
    cancelled: int | None = None


@dataclasses.dataclass
class Result:
    tokens: list[int] = dataclasses.field(default_factory=list)
    depths: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[float] = dataclasses.field(default_factory=list)
    text: str | None = None
    finish: FinishReason | None = None
    stop_match: int | str | None = None
    usage: Usage | None = None
    error: str | None = None
    ended: bool = False

    def add(self, output: RequestOutput) -> None:
        assert not self.ended, f"{output} after the last output"
        assert len(output.token_ids) == len(output.exit_depths) == len(output.logprobs)
        self.tokens += output.token_ids
        self.depths += output.exit_depths
        self.logprobs += output.logprobs
        if output.text is not None:
            self.text = (self.text or "") + output.text
        if output.finished:
            assert output.usage is not None
            assert output.usage.completion_tokens == len(self.tokens)
            self.finish, self.error, self.ended = output.finish_reason, output.error, True
            self.stop_match, self.usage = output.stop_match, output.usage
        else:
            assert output.usage is None
            assert output.stop_match is None

    @property
    def bits(self) -> tuple:
        """What grade G1 compares: tokens, depths and log-probabilities bit for bit."""
        return tuple(self.tokens), tuple(self.depths), np.asarray(self.logprobs, np.float32).tobytes(), self.finish


def sampling(**settings: object) -> SamplingParams:
    """Parameters that do not stop at the fixture's meaningless EOS id."""
    return SamplingParams(**{"ignore_eos": True, "max_tokens": 12} | settings)


def serve(
    target: LLMEngine, jobs: Sequence[Job], *, each_step: Callable[[int], None] | None = None, max_steps: int = 2000
) -> dict[str, Result]:
    """Run the jobs to their ends; the engine must be idle before and is afterwards."""
    drained(target)
    resets = target.stats()["resets"]
    results = {job.id: Result() for job in jobs}
    pending = sorted(jobs, key=lambda job: job.arrives)
    cancels = [job for job in jobs if job.cancelled is not None]
    for step in range(max_steps):
        while pending and pending[0].arrives <= step:
            job = pending.pop(0)
            target.add_request(job.id, job.prompt, job.params)
        for job in [job for job in cancels if job.cancelled == step]:
            target.abort(job.id)
        if each_step is not None:
            each_step(step)
        if not target.has_work() and not pending:
            break
        for output in target.step():
            results[output.request_id].add(output)
    assert all(r.ended for r in results.values()), f"not finished after {max_steps} steps"
    assert target.stats()["resets"] == resets, "a device failure during an ordinary run"
    drained(target)
    return results


def alone(target: LLMEngine, prompt: Sequence[int], params: SamplingParams) -> Result:
    return serve(target, [Job(id="alone", prompt=prompt, params=params)])["alone"]


def drained(target: LLMEngine) -> None:
    """No request, slot or page is in use, and the invariants hold."""
    stats = target.stats()
    assert not target.has_work()
    assert (stats["running"], stats["waiting"]) == (0, 0)
    assert stats["free_slots"] == target.config.slots
    assert stats["pages_free"] == stats["pages_total"]
    target._scheduler.check()


def settled(target: LLMEngine) -> None:
    """Let rounds in flight end (`generate` returns once it has its results), then check that nothing is in use."""
    while target.has_work():
        assert target.step() == [], "news after the last output"
    drained(target)


def policy_of(params: SamplingParams) -> Policy:
    """The oracle's view of a request's exit parameters, with the fixture's defaults."""
    max_loops = params.max_loops or 4
    if params.exit_trace is not None:
        return Policy(name="trace", trace=params.exit_trace, min_loops=params.min_loops or 1, max_loops=max_loops)
    return Policy(
        name=params.exit_policy or "gate",
        threshold=1.0 if params.exit_threshold is None else params.exit_threshold,
        min_loops=params.min_loops or min(2, max_loops),
        max_loops=max_loops,
    )


@contextlib.contextmanager
def constant_gate(target: LLMEngine, hazard: float) -> Iterator[None]:
    """The same compiled programs with a gate that always says `hazard` (1.0: a logit of +infinity).

    Parameters are arguments of the programs, so nothing is compiled.
    """
    runner = target._runner
    before = runner._params
    logit = np.inf if hazard == 1.0 else np.log(hazard) - np.log1p(-hazard)
    runner._params = dataclasses.replace(
        before,
        exit_gate_weight=jnp.zeros_like(before.exit_gate_weight),
        exit_gate_bias=jnp.full_like(before.exit_gate_bias, logit),
    )
    try:
        yield
    finally:
        runner._params = before
