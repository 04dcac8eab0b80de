"""The scheduler against a model of the device, without jax.

PROTECTS: that every request gets exactly the tokens the device made for it and then gives its slot and pages back:
whatever is cancelled, rolled back, lost with the device, or re-uses an id, and although plans run ahead of the events.
"""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from rlt_jax.config import KVLayoutKind
from rlt_jax.errors import InvalidRequest, QueueFull
from rlt_jax.kvcache.layout import KVLayout
from rlt_jax.kvcache.pages import PageAllocator
from rlt_jax.request import FinishReason, Request, ResolvedParams
from rlt_jax.runtime import scheduler as module
from rlt_jax.runtime.plan import MAX_CHUNKS, RoundEvents, RoundPlan
from rlt_jax.runtime.scheduler import Scheduler, SchedulerLimits

IN_FLIGHT = 2  # rounds dispatched before the oldest one's events are applied


def request(name: str, prompt: int = 5, max_tokens: int = 4) -> Request:
    params = ResolvedParams(
        max_tokens=max_tokens, temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, seed=0, sample_index=0, stop=(),
        stop_token_ids=(), ignore_eos=False, min_loops=1, max_loops=4, prefill_loops=4, exit_policy="gate",
        exit_threshold=0.5, exit_trace=None, initial_state="injected", logprobs="raw",
    )  # fmt: skip
    return Request(request_id=name, prompt_token_ids=tuple(range(prompt)), params=params)


def scheduler(
    *,
    slots: int = 2,
    pages: int = 8,
    page_size: int = 4,
    chunk: int = 4,
    ticks: int = 4,
    max_waiting: int | None = None,
    kind: KVLayoutKind = KVLayoutKind.LAST_EXITED,
) -> Scheduler:
    layout = KVLayout.create(
        kind, max_loops=4, page_size=page_size, kv_heads=1, head_dim=2, num_layers=1, dtype_bytes=4
    )
    limits = SchedulerLimits(slots=slots, prefill_chunk=chunk, round_ticks=ticks, max_waiting=max_waiting)
    return Scheduler(limits, layout, PageAllocator(pages))


class Device:
    """What a device would do with a plan, at once: it knows before the host who finished."""

    def __init__(self, slots: int, page_size: int, forced_prompts: bool) -> None:
        self.slots, self.page_size, self.forced = slots, page_size, forced_prompts
        self.owner: dict[int, Request] = {}
        self.pages: dict[int, tuple[int, ...]] = {}
        self.prompt_done: dict[int, int] = {}
        self.ready: set[int] = set()
        self.log: dict[Request, list[int]] = {}
        self.finished: dict[Request, FinishReason] = {}
        self.next_token = 0

    def run(self, plan: RoundPlan, rng: np.random.Generator) -> RoundEvents:
        for slot in plan.releases:
            self._free(slot)
        for bind in plan.binds:
            assert bind.slot not in self.owner, "a slot is bound while its last owner runs on the device"
            in_use = {p for pages in self.pages.values() for p in pages}
            assert not in_use & set(bind.pages), "a page is given away while a slot still writes to it"
            assert len(bind.pages) * self.page_size >= bind.request.capacity
            self.owner[bind.slot], self.pages[bind.slot] = bind.request, bind.pages
            self.prompt_done[bind.slot] = len(bind.request.prompt_token_ids) if self.forced else 0
            if self.forced:
                self.ready.add(bind.slot)
        assert len({c.slot for c in plan.chunks}) == len(plan.chunks), "at most one chunk per prompt"
        for chunk in plan.chunks:
            assert self.owner[chunk.slot] is chunk.request
            assert chunk.start == self.prompt_done[chunk.slot]
            self.prompt_done[chunk.slot] += chunk.count
            assert chunk.last == (self.prompt_done[chunk.slot] == len(chunk.request.prompt_token_ids))
            if chunk.last:
                self.ready.add(chunk.slot)
        shape = (plan.ticks, self.slots)
        token, depth, finish = np.full(shape, -1, np.int32), np.zeros(shape, np.int32), np.zeros(shape, np.int32)
        ticks = 0
        for tick in range(plan.ticks):
            ticks += 1
            for slot in sorted(self.ready):
                if rng.random() < 0.4:  # still in its loops
                    continue
                owner = self.owner[slot]
                log = self.log.setdefault(owner, [])
                token[tick, slot], depth[tick, slot] = self.next_token, 1 + self.next_token % 4
                log.append(self.next_token)
                self.next_token += 1
                if rng.random() < 0.1:
                    finish[tick, slot], self.finished[owner] = 1, FinishReason.STOP
                elif len(log) == owner.params.max_tokens:
                    finish[tick, slot], self.finished[owner] = 2, FinishReason.LENGTH
                if finish[tick, slot]:
                    self._free(slot)
            if plan.end_early and finish[tick].any():
                break
        empty = np.zeros(self.slots, np.int32)
        return RoundEvents(
            ticks=ticks, idle_row_ticks=0, token=token[:ticks], depth=depth[:ticks],
            logprob=-token[:ticks].astype(np.float32), finish=finish[:ticks], phase=empty, position=empty, loops=empty,
        )  # fmt: skip

    def _free(self, slot: int) -> None:
        self.owner.pop(slot, None)
        self.pages.pop(slot, None)
        self.ready.discard(slot)


class ServedByScheduler(RuleBasedStateMachine):
    """Users, host and device take turns in any order; the device's own log says what each user must have got."""

    @initialize(
        slots=st.integers(1, 4), pages=st.integers(3, 9), chunk=st.sampled_from([1, 3, 4, 16]), seed=st.integers(0, 99),
        kind=st.sampled_from(list(KVLayoutKind)),
    )  # fmt: skip
    def start(self, slots: int, pages: int, chunk: int, seed: int, kind: KVLayoutKind) -> None:
        self.slots, self.pages, self.chunk = slots, pages, chunk
        self.scheduler = scheduler(slots=slots, pages=pages, chunk=chunk, kind=kind)
        self.forced = kind is KVLayoutKind.SHARED
        self.device = Device(slots, 4, self.forced)
        self.rng = np.random.default_rng(seed)
        self.in_flight: list[tuple[RoundPlan, RoundEvents]] = []
        self.got: dict[Request, list[int]] = {}
        self.ended: set[Request] = set()
        self.arrivals: list[Request] = []

    # -- users

    @rule(name=st.sampled_from("abcd"), prompt=st.integers(1, 9), max_tokens=st.integers(1, 4))
    def submit(self, name: str, prompt: int, max_tokens: int) -> None:
        new = request(name, prompt, max_tokens)
        if self.scheduler.find(name) is not None:
            before = (self.scheduler.waiting, self.scheduler.running)
            with pytest.raises(InvalidRequest, match="request_id"):
                self.scheduler.submit(new)
            assert (self.scheduler.waiting, self.scheduler.running) == before
            return
        self.scheduler.submit(new)
        self.arrivals.append(new)
        self.got[new] = []

    @precondition(lambda self: self.scheduler.has_live())
    @rule(which=st.integers(0, 3))
    def abort(self, which: int) -> None:
        live = [r for r in self.arrivals if r not in self.ended]
        mine = live[which % len(live)]
        assert self.scheduler.end(mine)
        assert not self.scheduler.end(mine)
        assert self.scheduler.find(mine.request_id) is None
        self.ended.add(mine)

    # -- host

    @precondition(lambda self: len(self.in_flight) < IN_FLIGHT and self.scheduler.has_plannable_work())
    @rule(fault=st.booleans())
    def dispatch(self, fault: bool) -> None:
        plan = self.scheduler.plan()
        if fault:  # the host stumbles before dispatch: the same plan comes again
            self.scheduler.rollback(plan)
            self.scheduler.check()
            again = self.scheduler.plan()
            for field in ("releases", "binds", "chunks", "ticks", "end_early", "owners"):
                assert getattr(plan, field) == getattr(again, field), field
            plan = again
        for bind in plan.binds:
            live = [r for r in self.arrivals if r not in self.ended]
            assert bind.request is live[0] or all(
                self.scheduler.is_live(r) is False or r in plan.owners.values()
                for r in live[: live.index(bind.request)]
            ), "first come, first served"
        assert len(plan.chunks) <= MAX_CHUNKS
        assert all(c.count <= self.chunk for c in plan.chunks)
        self.in_flight.append((plan, self.device.run(plan, self.rng)))

    @precondition(lambda self: self.in_flight)
    @rule()
    def collect(self) -> None:
        plan, events = self.in_flight.pop(0)
        for delivery in self.scheduler.apply(plan, events):
            assert delivery.request not in self.ended, "news for a request that is gone"
            assert len(delivery.tokens) == len(delivery.depths) == len(delivery.logprobs)
            assert delivery.depths == tuple(1 + t % 4 for t in delivery.tokens)
            self.got[delivery.request] += delivery.tokens
            if delivery.finish is not None:
                assert delivery.finish is self.device.finished[delivery.request]
                assert self.got[delivery.request] == self.device.log[delivery.request]
                self.ended.add(delivery.request)

    @precondition(lambda self: self.scheduler.running)
    @rule(really=st.integers(0, 4))
    def lose_the_device(self, really: int) -> None:
        if really:  # rarely: it ends every interesting state
            return
        held = set(self.scheduler.fail_running())
        assert all(not self.scheduler.is_live(r) for r in held)
        self.ended |= held
        self.in_flight.clear()
        device = Device(self.slots, 4, self.forced)
        device.next_token = self.device.next_token
        self.device = device

    # -- always

    @invariant()
    def nothing_is_lost(self) -> None:
        self.scheduler.check()
        for mine, tokens in self.got.items():
            assert tokens == self.device.log.get(mine, tokens)[: len(tokens)]

    def teardown(self) -> None:
        for _ in range(400):
            if not self.scheduler.has_live() and not self.in_flight:
                break
            if len(self.in_flight) < IN_FLIGHT and self.scheduler.has_plannable_work():
                self.dispatch(False)
            else:
                self.collect()
        assert not self.scheduler.has_live(), "every request ends"
        assert self.scheduler.free_slots == self.slots
        assert self.scheduler._pages.free_pages == self.pages
        assert set(self.arrivals) == self.ended


ServedByScheduler.TestCase.settings = settings(
    max_examples=200, stateful_step_count=50, deadline=None, derandomize=True
)
TestServedByScheduler = ServedByScheduler.TestCase


def test_the_head_of_the_queue_is_not_overtaken() -> None:
    """A small request behind one that does not fit waits with it: large ones would starve otherwise."""
    s = scheduler(slots=3, pages=4)
    for name, prompt in (("first", 8), ("large", 13), ("small", 1)):
        s.submit(request(name, prompt, 1))
    plan = s.plan()
    assert [b.request.request_id for b in plan.binds] == ["first"]
    assert plan.end_early, "requests wait"
    s.end(s.find("first"))
    assert [b.request.request_id for b in s.plan().binds] == ["large"]


def test_the_policy_orders_admission(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever order the policy gives is obeyed; the scheduler has none of its own."""
    monkeypatch.setattr(module, "admission_order", lambda waiting: sorted(waiting, key=lambda r: r.request_id))
    s = scheduler(slots=2, pages=32)
    for name in "cab":
        s.submit(request(name))
    assert [b.request.request_id for b in s.plan().binds] == ["a", "b"]
    s.check()
    assert s.waiting == 1


def test_chunks_depend_on_the_prompt_alone() -> None:
    """Neighbours delay a chunk, they never change its bounds."""

    def bounds(*prompts: int) -> list[tuple[int, int, bool]]:
        s = scheduler(slots=4, pages=64, chunk=4)
        for i, prompt in enumerate(prompts):
            s.submit(request(f"r{i}", prompt, 1))
        found = []
        for _ in range(30):
            found += [(c.start, c.count, c.last) for c in s.plan().chunks if c.request.request_id == "r0"]
        return found

    alone = bounds(11)
    assert alone == [(0, 4, False), (4, 4, False), (8, 3, True)]
    assert bounds(11, 9, 2, 30) == alone


def test_a_round_carries_chunks_of_the_oldest_prompts_four_at_most() -> None:
    """With one a round, short answers ended faster than 128 prompts arrived."""
    s = scheduler(slots=6, chunk=4, pages=64)
    for name in "abcdef":
        s.submit(request(name, 6, 4))
    assert [c.request.request_id for c in s.plan().chunks] == ["a", "b", "c", "d"]
    second = s.plan().chunks
    assert [(c.request.request_id, c.start, c.last) for c in second] == [(name, 4, True) for name in "abcd"]
    assert [c.request.request_id for c in s.plan().chunks] == ["e", "f"]


def test_ticks_beside_chunks_are_few_and_none_without_anyone_to_run() -> None:
    s = scheduler(slots=2, chunk=4, ticks=8, pages=32)
    s.submit(request("a", 6, 4))
    assert s.plan().ticks == 0, "the prompt's chunk is not its last and nobody decodes"
    assert s.plan().ticks == 1, "the first token"
    assert s.plan().ticks == 8
    s.submit(request("b", 6, 4))
    assert s.plan().ticks == 4, "a newcomer's prompt is not kept waiting by a whole round"


def test_a_full_queue_refuses_and_changes_nothing() -> None:
    s = scheduler(slots=1, max_waiting=2)
    s.submit(request("a"))
    s.submit(request("b"))
    with pytest.raises(QueueFull, match="max_waiting=2"):
        s.submit(request("c"))
    assert s.waiting == 2
    assert s.find("c") is None
    s.plan()  # "a" leaves the queue
    s.submit(request("c"))


def test_events_of_an_older_owner_never_reach_the_new_one() -> None:
    """The id and the slot are used again while the old owner's round is in flight."""
    s, device, rng = scheduler(slots=1), Device(1, 4, False), np.random.default_rng(1)
    old = request("same", 2, 4)
    s.submit(old)
    first = s.plan()
    old_events = device.run(first, rng)
    late = s.plan()
    late_events = device.run(late, rng)
    s.end(old)
    new = request("same", 2, 4)
    s.submit(new)
    plan = s.plan()
    assert plan.releases == (0,)
    assert [b.request for b in plan.binds] == [new]
    assert (old_events.token >= 0).any() or (late_events.token >= 0).any()
    assert s.apply(first, old_events) == []
    assert s.apply(late, late_events) == []
    assert s.is_live(new)


def test_the_scheduler_imports_no_jax() -> None:
    code = "import sys, rlt_jax.runtime.scheduler; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
