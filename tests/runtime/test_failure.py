"""What a fault costs, and whom.

PROTECTS: a stumble of the host costs nothing; a lost device state costs the requests that were on it, each with one
clear reason, and nobody else; a device that stays broken ends every request instead of leaving clients to wait.
"""

from __future__ import annotations

import dataclasses

import pytest

from rlt_jax import EngineConfig, EngineDead, FinishReason, LLMEngine
from rlt_jax.errors import CorruptState
from tests.engines import FIXTURE, LAST_EXITED, SHARED, Job, Result, alone, drained, engine, sampling, serve

PROMPTS = {f"r{i}": [i + 1, 40 * i % 256, 200 - i, 9, 9 * i, 77, 31 * i % 256] for i in range(8)}
PARAMS = sampling(max_tokens=10, exit_threshold=0.5, min_loops=1)


@pytest.fixture(params=[LAST_EXITED, SHARED], ids=lambda layout: layout.value)
def target(request: pytest.FixtureRequest) -> LLMEngine:
    return engine(request.param)


@pytest.fixture
def expected(target: LLMEngine) -> dict[str, tuple]:
    return {name: alone(target, prompt, PARAMS).bits for name, prompt in PROMPTS.items()}


class Fault:
    """Raises once, at the n-th call of what it wraps, before or after the real call."""

    def __init__(self, real, at: int, *, after: bool = False, times: int = 1) -> None:
        self.real, self.at, self.after, self.times = real, at, after, times
        self.calls = self.raised = 0

    def __call__(self, *args: object) -> object:
        self.calls += 1
        due = self.calls >= self.at and self.raised < self.times
        if due and not self.after:
            self.raised += 1
            raise RuntimeError("injected fault")
        result = self.real(*args)
        if due:
            self.raised += 1
            raise RuntimeError("injected fault")
        return result


def run(target: LLMEngine) -> dict[str, Result]:
    results = {name: Result() for name in PROMPTS}
    for name, prompt in PROMPTS.items():
        target.add_request(name, prompt, PARAMS)
    for _ in range(500):
        if not target.has_work():
            break
        for output in target.step():
            results[output.request_id].add(output)
    assert all(r.ended for r in results.values())
    return results


@pytest.mark.parametrize("at", [1, 2, 3, 6])
def test_a_host_fault_before_dispatch_costs_nothing(
    target: LLMEngine, expected: dict[str, tuple], monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    """The plan is rolled back and made again: no request fails, no bit differs."""
    fault = Fault(target._runner.dispatch, at)
    monkeypatch.setattr(target._runner, "dispatch", fault)
    resets = target.stats()["resets"]
    results = run(target)
    assert fault.raised == 1
    assert {name: r.bits for name, r in results.items()} == expected
    assert target.stats()["resets"] == resets
    drained(target)


@pytest.mark.parametrize("at", [1, 2, 5, 9])
def test_a_host_fault_while_a_plan_is_sent_costs_nothing(
    target: LLMEngine, expected: dict[str, tuple], monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    """The transfer of one of several plan arrays fails: no program has run yet, so all may be sent again."""
    fault = Fault(target._runner._put, at)
    monkeypatch.setattr(target._runner, "_put", fault)
    results = run(target)
    assert fault.raised == 1
    assert {name: r.bits for name, r in results.items()} == expected
    drained(target)


def check_loss(target: LLMEngine, results: dict[str, Result], expected: dict[str, tuple]) -> list[str]:
    """Slot holders failed with the reason, everybody else got what they get alone."""
    failed = [name for name, r in results.items() if r.error is not None]
    assert failed
    assert len(failed) <= target.config.slots
    for name, r in results.items():
        if name in failed:
            assert "injected fault" in r.error, r.error
            assert "device failed" in r.error
            assert r.finish is None
            assert tuple(r.tokens) == expected[name][0][: len(r.tokens)], "what was delivered before was true"
        else:
            assert r.bits == expected[name], name
    drained(target)
    return failed


@pytest.mark.parametrize("at", [1, 2, 4])
def test_a_failed_round_costs_the_slot_holders_only(
    target: LLMEngine, expected: dict[str, tuple], monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    """The error surfaces where the host waits for the round.  Eight requests, three slots: the others wait and run."""
    resets = target.stats()["resets"]
    fault = Fault(target._runner.collect, at)
    monkeypatch.setattr(target._runner, "collect", fault)
    results = run(target)
    failed = check_loss(target, results, expected)
    assert fault.raised == 1
    assert target.stats()["resets"] == resets + 1
    if at == 1:  # arrival order: the first three held the slots
        assert failed == ["r0", "r1", "r2"]
    monkeypatch.undo()
    jobs = [Job(id=name, prompt=prompt, params=PARAMS) for name, prompt in PROMPTS.items()]
    assert {name: r.bits for name, r in serve(target, jobs).items()} == expected, "served afterwards as before"


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("program", ["bind", "begin", "decode", "report"])
def test_a_round_that_has_begun_is_not_sent_again(
    target: LLMEngine, expected: dict[str, tuple], monkeypatch: pytest.MonkeyPatch, program: str, after: bool
) -> None:
    """A program took its donated state and raised.  Sent again, the round would lose the tokens of ticks that ran."""
    resets = target.stats()["resets"]
    fault = Fault(target._runner._compiled[program], 3, after=after)
    monkeypatch.setitem(target._runner._compiled, program, fault)
    results = run(target)
    check_loss(target, results, expected)
    assert target.stats()["resets"] == resets + 1
    monkeypatch.undo()
    assert alone(target, PROMPTS["r0"], PARAMS).bits == expected["r0"]


def test_the_old_pool_is_freed_before_the_new_one_is_made(
    target: LLMEngine, expected: dict[str, tuple], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two pools would not fit.  The fault's own traceback still refers to the arrays, so they are freed by hand."""
    runner = target._runner
    make_state, old, freed = runner._compiled["make_state"], runner._kv.k[0], []

    def make() -> object:
        freed.append(old.is_deleted())
        return make_state()

    def run_no_decode(name: str, *args: object) -> object:
        if name == "decode":
            raise RuntimeError("injected fault")
        return run_program(name, *args)

    run_program = runner._run
    monkeypatch.setattr(runner, "_run", run_no_decode)
    monkeypatch.setitem(runner._compiled, "make_state", make)
    target.add_request("r0", PROMPTS["r0"], PARAMS)
    assert ["injected fault" in o.error for o in target.step()] == [True]
    assert freed == [True]
    monkeypatch.undo()
    assert alone(target, PROMPTS["r0"], PARAMS).bits == expected["r0"]


def test_a_host_fault_twice_costs_the_running_requests_only(
    target: LLMEngine, expected: dict[str, tuple], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the failed plan had just admitted waits again: it has nothing on the device to lose."""
    target.add_request("running", PROMPTS["r0"], PARAMS)
    assert all(o.error is None for o in target.step())
    monkeypatch.setattr(target._runner, "dispatch", Fault(target._runner.dispatch, 1, times=2))
    results = {name: Result() for name in ("running", "r1")}
    target.add_request("r1", PROMPTS["r1"], PARAMS)
    while target.has_work():
        for output in target.step():
            results[output.request_id].add(output)
    assert "injected fault" in results["running"].error
    assert results["r1"].bits == expected["r1"]
    drained(target)


def test_wrong_books_are_not_taken_for_a_broken_device(target: LLMEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fresh pool would not repair the scheduler: the bug is shown, not hidden by a reset."""

    def corrupt() -> None:
        raise CorruptState("planted")

    monkeypatch.setattr(target._scheduler, "plan", corrupt)
    resets = target.stats()["resets"]
    target.add_request("r0", PROMPTS["r0"], PARAMS)
    with pytest.raises(CorruptState, match="planted"):
        target.step()
    assert target.stats()["resets"] == resets
    monkeypatch.undo()
    target.abort("r0")
    assert [o.finish_reason for o in target.step()] == [FinishReason.ABORT]
    drained(target)


def test_an_id_is_free_after_its_owner_failed(
    target: LLMEngine, expected: dict[str, tuple], monkeypatch: pytest.MonkeyPatch
) -> None:
    fault = Fault(target._runner.collect, 1)
    monkeypatch.setattr(target._runner, "collect", fault)
    target.add_request("r0", PROMPTS["r0"], PARAMS)
    outputs = target.step()
    assert [o.request_id for o in outputs] == ["r0"]
    assert outputs[0].error is not None
    result = Result()
    target.add_request("r0", PROMPTS["r0"], PARAMS)
    while target.has_work():
        for output in target.step():
            result.add(output)
    assert result.bits == expected["r0"]
    drained(target)


def test_failures_far_apart_do_not_add_up(
    target: LLMEngine, expected: dict[str, tuple], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only failures without one good round in between mean a broken device."""
    real = target._runner.collect
    for _ in range(5):
        monkeypatch.setattr(target._runner, "collect", Fault(real, 2))
        check_loss(target, run(target), expected)


def test_a_device_that_stays_broken_ends_every_request() -> None:
    """Running and waiting requests get their error, then the engine says that it is dead."""
    config = EngineConfig(dtype="float32", slots=1, page_size=4, prefill_chunk=4, max_context=16)
    broken = LLMEngine(FIXTURE, config)
    prompts = {f"r{i}": [i, i + 1] for i in range(5)}
    for name, prompt in prompts.items():
        broken.add_request(name, prompt, dataclasses.replace(PARAMS, max_tokens=4))
    broken._runner.collect = Fault(broken._runner.collect, 1, times=10**9)
    errors: dict[str, str] = {}

    def step_until_dead() -> None:
        for _ in range(100):
            for output in broken.step():
                assert output.request_id not in errors, "one last output each"
                assert output.error is not None
                errors[output.request_id] = output.error

    with pytest.raises(EngineDead, match="did not recover"):
        step_until_dead()
    assert list(errors) == list(prompts), "every request heard before the engine gave up"
    assert "did not recover" in errors["r4"]
    stats = broken.stats()
    assert (stats["running"], stats["waiting"]) == (0, 0)
    assert broken.has_work(), "a dead engine does not pass for an idle one"
    with pytest.raises(EngineDead):
        broken.add_request("late", [1], PARAMS)
    broken.close()
