"""Nothing compiles and nothing is transferred implicitly while serving.

PROTECTS: latency.  One retrace or one stray NumPy argument inside the loop costs a compile or a blocking copy in the
middle of everybody's stream.  The guards are the engine's own: first each is shown to catch a planted fault, then whole
served runs pass under them.
"""

from __future__ import annotations

import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlt_jax import LLMEngine
from tests.engines import LAST_EXITED, SHARED, Job, Result, alone, drained, engine, sampling, serve

PROMPT = [11, 22, 33, 44, 55, 66, 77]
PARAMS = sampling(exit_threshold=0.5, min_loops=1, temperature=0.8, seed=1)


@pytest.fixture(params=[LAST_EXITED, SHARED], ids=lambda layout: layout.value)
def target(request: pytest.FixtureRequest) -> LLMEngine:
    return engine(request.param)


def served_with_fault(target: LLMEngine) -> Result:
    result = Result()
    target.add_request("victim", PROMPT, PARAMS)
    for _ in range(200):
        if not target.has_work():
            break
        for output in target.step():
            result.add(output)
    return result


def test_a_planted_retrace_is_caught(target: LLMEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """An eager operation that `step` reaches: the request fails by name instead of everybody waiting for XLA."""
    expected = alone(target, PROMPT, PARAMS).bits
    runner, planted = target._runner, []
    collect = runner.collect

    def collect_and_trace():
        if not planted:
            planted.append(True)
            jax.jit(lambda x: x * 3 + 1)(runner._slots.phase)
        return collect()

    monkeypatch.setattr(runner, "collect", collect_and_trace)
    result = served_with_fault(target)
    assert planted
    assert result.error is not None
    assert "trac" in result.error.lower(), result.error
    monkeypatch.undo()
    assert alone(target, PROMPT, PARAMS).bits == expected, "the engine serves on"


def test_a_planted_numpy_argument_is_caught(target: LLMEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan array that skips the explicit device_put."""
    expected = alone(target, PROMPT, PARAMS).bits
    monkeypatch.setattr(target._runner, "_put", lambda array: array)
    result = served_with_fault(target)
    assert result.error is not None
    assert "host-to-device" in result.error, result.error
    monkeypatch.undo()
    # two rounds failed in a row at most: the engine is still alive and right
    assert alone(target, PROMPT, PARAMS).bits == expected


def test_the_same_faults_pass_outside_step(target: LLMEngine) -> None:
    """What the two tests above plant is legal elsewhere: it is step's guard that refuses it."""
    assert int(jax.jit(lambda x: x * 3 + 1)(jnp.int32(2))) == 7
    assert int(jnp.add(np.int32(2), np.int32(3))) == 5
    drained(target)


def test_served_runs_compile_nothing(target: LLMEngine) -> None:
    """Every kind of request, arriving and leaving at every moment: no compile event in the whole process."""
    events: list[str] = []

    def listen(event: str, *_: object, **__: object) -> None:
        if "compile" in event or "trace" in event:
            events.append(event)

    rng = np.random.default_rng(0)
    jobs = []
    for i in range(24):
        outputs = int(rng.integers(1, 12))
        chosen = [
            {},
            {"exit_threshold": 0.3, "min_loops": 1},
            {"exit_policy": "gate_delayed", "exit_threshold": 0.6, "max_loops": 3},
            {"exit_trace": (4,) * outputs},
            {"temperature": 0.7, "seed": i},
            {"temperature": 1.3, "top_k": 9, "top_p": 0.8, "min_p": 0.01, "logprobs": "processed", "seed": i},
            {"stop_token_ids": (1, 2, 3), "ignore_eos": False},
            {"prefill_loops": 2},
        ][i % 8]
        jobs.append(
            Job(
                id=f"r{i}",
                prompt=rng.integers(0, 256, int(rng.integers(1, 30))).tolist(),
                params=sampling(max_tokens=outputs, **chosen),
                arrives=int(rng.integers(0, 10)),
                cancelled=12 if i % 5 == 0 else None,
            )
        )
    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        jax.jit(lambda x: x - 2)(1.5)
        assert events, "the listener must hear a compile"
        events.clear()
        serve(target, jobs)
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    assert events == []


def test_step_runs_in_whatever_thread_calls_it() -> None:
    """The guards are thread-local; `step` enters them itself, so an engine thread is covered like the main one."""
    target = engine(LAST_EXITED)
    expected = alone(target, PROMPT, PARAMS).bits
    seen: list[object] = []

    def thread() -> None:
        seen.append(alone(target, PROMPT, PARAMS).bits)
        runner = target._runner
        collect, planted = runner.collect, []

        def collect_and_trace():
            if not planted:
                planted.append(True)
                jax.jit(lambda x: x * 5 + 2)(runner._slots.phase)
            return collect()

        runner.collect = collect_and_trace
        try:
            seen.append(served_with_fault(target).error)
        finally:
            del runner.collect

    worker = threading.Thread(target=thread)
    worker.start()
    worker.join(timeout=120)
    assert seen[0] == expected
    assert "trac" in str(seen[1]).lower()
    drained(target)
