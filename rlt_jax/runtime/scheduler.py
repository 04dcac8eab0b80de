"""Queues, logical progress and pages of every live request.  Pure Python: no jax, testable in milliseconds.

The scheduler owns the queues, each request's stage and progress, and asks the page allocator; it never sees arrays.
It plans one round at a time and may run one round ahead of the device, so a plan is based on what is certain: chunks
finish when planned; what decode rows did is learned from the events of their round.
"""

from __future__ import annotations

import collections
import dataclasses
import enum

from rlt_jax.errors import CorruptState, InvalidRequest, QueueFull
from rlt_jax.kvcache.layout import KVLayout
from rlt_jax.kvcache.pages import PageAllocator
from rlt_jax.request import FinishReason, Request
from rlt_jax.runtime.plan import MAX_CHUNKS, NO_TOKEN, Delivery, Finish, PrefillChunk, RoundEvents, RoundPlan, SlotBind
from rlt_jax.runtime.policy import admission_order, prefill_order

_FINISH_REASONS = {Finish.NONE: None, Finish.STOP: FinishReason.STOP, Finish.LENGTH: FinishReason.LENGTH}


class Stage(enum.Enum):
    WAITING = "waiting"
    PREFILL = "prefill"  # owns slot and pages; chunks of its prompt remain to be planned
    DECODE = "decode"  # every chunk is planned, or the prompt runs forced on the device
    FINISHED = "finished"


@dataclasses.dataclass(eq=False)
class _Progress:
    """Logical progress of one live request; only the scheduler writes it."""

    request: Request
    stage: Stage = Stage.WAITING
    slot: int | None = None
    planned_prompt: int = 0  # prompt positions covered by planned chunks


@dataclasses.dataclass(frozen=True, kw_only=True)
class SchedulerLimits:
    """Static numbers of one server."""

    slots: int
    prefill_chunk: int
    round_ticks: int
    max_waiting: int | None


class Scheduler:
    """See the module docstring.  Not thread-safe: one engine thread calls it."""

    def __init__(self, limits: SchedulerLimits, layout: KVLayout, allocator: PageAllocator) -> None:
        self._limits = limits
        self._layout = layout
        self._pages = allocator
        self._live: dict[str, _Progress] = {}
        self._waiting: collections.deque[_Progress] = collections.deque()
        self._slots: dict[int, _Progress] = {}
        self._free_slots = list(range(limits.slots - 1, -1, -1))
        self._releases: list[int] = []  # slots whose owner ended on the host; the device hears with the next plan
        self._rounds = 0

    # -- what others may ask ------------------------------------------------------------------------------------------

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def running(self) -> int:
        return len(self._slots)

    @property
    def free_slots(self) -> int:
        return len(self._free_slots)

    def has_live(self) -> bool:
        return bool(self._live)

    def is_live(self, request: Request) -> bool:
        progress = self._live.get(request.request_id)
        return progress is not None and progress.request is request

    def find(self, request_id: str) -> Request | None:
        progress = self._live.get(request_id)
        return progress.request if progress else None

    def has_plannable_work(self) -> bool:
        """Whether a new round could do anything for anybody."""
        return bool(self._slots or self._releases or self._waiting)

    # -- life of a request --------------------------------------------------------------------------------------------

    def submit(self, request: Request) -> None:
        """Queue a checked request.

        Raises:
            InvalidRequest: field "request_id", for an id that is live.
            QueueFull: too many requests wait.
        """
        if request.request_id in self._live:
            raise InvalidRequest("request_id", f"{request.request_id!r} is in use by a live request")
        if self._limits.max_waiting is not None and len(self._waiting) >= self._limits.max_waiting:
            raise QueueFull(f"{len(self._waiting)} requests wait; the limit is max_waiting={self._limits.max_waiting}")
        progress = _Progress(request)
        self._live[request.request_id] = progress
        self._waiting.append(progress)

    def end(self, request: Request) -> bool:
        """Finish a live request from the host's side (abort, stop string); False if it is not live.

        Slot and pages are free at once: the next plan's releases come before anything else that it starts.
        """
        if not self.is_live(request):
            return False
        progress = self._live[request.request_id]
        if progress.stage is Stage.WAITING:
            self._waiting.remove(progress)
        elif progress.slot is not None:
            self._releases.append(progress.slot)
        self._retire(progress)
        return True

    def _retire(self, progress: _Progress) -> None:
        """The one place where a request gives everything back."""
        progress.stage = Stage.FINISHED
        del self._live[progress.request.request_id]
        if progress.slot is not None:
            del self._slots[progress.slot]
            self._free_slots.append(progress.slot)
            self._pages.release(progress.request)

    # -- rounds -------------------------------------------------------------------------------------------------------

    def plan(self) -> RoundPlan:
        """The next round.  Claims slots and pages for admitted requests; `rollback` undoes it."""
        releases, self._releases = tuple(self._releases), []
        decoding_before = any(p.stage is Stage.DECODE for p in self._slots.values())
        binds = self._admit()
        chunks = self._plan_chunks()
        self._rounds += 1
        return RoundPlan(
            number=self._rounds,
            releases=releases,
            binds=binds,
            chunks=chunks,
            ticks=self._ticks(chunks, decoding_before),
            end_early=bool(self._waiting),
            owners={slot: p.request for slot, p in self._slots.items()},
        )

    def _admit(self) -> tuple[SlotBind, ...]:
        """Bind waiting requests in the policy's order, while a slot and all their pages are free."""
        if not self._free_slots:
            return ()
        binds: list[SlotBind] = []
        for request in admission_order([p.request for p in self._waiting]):
            plan = self._pages.plan(self._layout.pages_for(request.capacity))
            if not self._free_slots or not plan.fits:
                break
            progress = self._live[request.request_id]
            self._waiting.remove(progress)
            progress.slot = self._free_slots.pop()
            progress.stage = Stage.DECODE if self._layout.prompt_is_sequential else Stage.PREFILL
            self._slots[progress.slot] = progress
            binds.append(SlotBind(slot=progress.slot, request=request, pages=self._pages.claim(request, plan)))
        return tuple(binds)

    def _plan_chunks(self) -> tuple[PrefillChunk, ...]:
        """At most one chunk per prompt and MAX_CHUNKS in all, in the policy's order.

        A slot whose prompt waits is as idle as one without a request, and a tick costs nearly the same for few rows as
        for many: with one chunk a round, prompts arrived more slowly than short answers ended, and half the rows of
        128 slots stood empty.  More than a few would make running streams wait for everybody's prompt.

        A round's load decides when a chunk runs, never how long it is: boundaries are multiples of prefill_chunk.
        """
        chunks: list[PrefillChunk] = []
        prefilling = [p.request for p in self._slots.values() if p.stage is Stage.PREFILL]
        for request in prefill_order(prefilling)[:MAX_CHUNKS]:
            progress = self._live[request.request_id]
            prompt = len(request.prompt_token_ids)
            count = min(self._limits.prefill_chunk, prompt - progress.planned_prompt)
            start = progress.planned_prompt
            progress.planned_prompt += count
            last = progress.planned_prompt == prompt
            if last:
                progress.stage = Stage.DECODE
            if progress.slot is None:
                raise CorruptState(f"request {request.request_id!r} prefills without a slot")
            chunks.append(PrefillChunk(slot=progress.slot, request=request, start=start, count=count, last=last))
        return tuple(chunks)

    def _ticks(self, chunks: tuple[PrefillChunk, ...], decoding_before: bool) -> int:
        """Ticks of the round.  Beside chunks, few: a new request's first token should not wait for others' ticks."""
        if not chunks:
            return self._limits.round_ticks
        if decoding_before:
            return max(1, self._limits.round_ticks // 2)
        return 1 if any(c.last for c in chunks) else 0

    def rollback(self, plan: RoundPlan) -> None:
        """Undo a plan that was never dispatched.  The oldest requests wait at the front again; nobody fails."""
        for chunk in reversed(plan.chunks):
            if self.is_live(chunk.request):
                progress = self._live[chunk.request.request_id]
                progress.planned_prompt = chunk.start
                progress.stage = Stage.PREFILL
        for bind in reversed(plan.binds):
            if self.is_live(bind.request):
                progress = self._live[bind.request.request_id]
                self._pages.release(bind.request)
                del self._slots[bind.slot]
                self._free_slots.append(bind.slot)
                progress.slot, progress.stage, progress.planned_prompt = None, Stage.WAITING, 0
                self._waiting.appendleft(progress)
        self._releases = [*plan.releases, *self._releases]

    def apply(self, plan: RoundPlan, events: RoundEvents) -> list[Delivery]:
        """Apply a round's events through the plan that produced them, in slot order."""
        deliveries: list[Delivery] = []
        for slot, request in plan.owners.items():
            if not self.is_live(request):
                continue  # ended on the host meanwhile: what the device still computed is dropped
            ticks = (events.token[:, slot] != NO_TOKEN).nonzero()[0]
            if not len(ticks):
                continue
            finish = _FINISH_REASONS[Finish(events.finish[ticks[-1], slot])]
            deliveries.append(
                Delivery(
                    request=request,
                    tokens=tuple(events.token[ticks, slot].tolist()),
                    depths=tuple(events.depth[ticks, slot].tolist()),
                    logprobs=tuple(events.logprob[ticks, slot].tolist()),
                    finish=finish,
                )
            )
            if finish is not None:
                self._retire(self._live[request.request_id])
        return deliveries

    def fail_running(self) -> list[Request]:
        """The device lost its state: every request that holds a slot ends; waiting ones stay.  Returns the failed."""
        failed = [p.request for p in self._slots.values()]
        for request in failed:
            self._retire(self._live[request.request_id])
        self._releases = []
        return failed

    def fail_waiting(self) -> list[Request]:
        """The device is lost for good: the waiting requests end too.  Returns them."""
        failed = [p.request for p in self._waiting]
        self._waiting.clear()
        for request in failed:
            self._retire(self._live[request.request_id])
        return failed

    def check(self) -> None:
        """Invariants that must hold whenever no plan is being made.

        Raises:
            CorruptState: with the numbers.
        """
        self._pages.check()
        if len(self._free_slots) + len(self._slots) != self._limits.slots:
            raise CorruptState(f"free slots {len(self._free_slots)} + bound {len(self._slots)} != {self._limits.slots}")
        if len(self._live) != len(self._slots) + len(self._waiting):
            raise CorruptState(f"live {len(self._live)} != bound {len(self._slots)} + waiting {len(self._waiting)}")
        if not self._slots and self._pages.used_pages:
            raise CorruptState(f"{self._pages.used_pages} pages are owned while no slot is bound")
