"""What the scheduler asks of the device in one round, and what the device answers.  No jax."""

from __future__ import annotations

import dataclasses
import enum

import numpy as np

from rlt_jax.request import FinishReason, Request

MAX_CHUNKS = 4  # prompt chunks of one round at most; see Scheduler._plan_chunks
NO_TOKEN = -1  # in events and stop ids: an id no vocabulary has


class Finish(enum.IntEnum):
    """Whether a slot's request ended on the device.  Values are what the events hold."""

    NONE = 0
    STOP = 1  # a stop or EOS id
    LENGTH = 2


@dataclasses.dataclass(frozen=True, kw_only=True)
class SlotBind:
    """Give a slot to a request, with the pages it may use."""

    slot: int
    request: Request
    pages: tuple[int, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class PrefillChunk:
    """Prompt positions [start, start + count) of a slot.  Boundaries depend on the prompt alone."""

    slot: int
    request: Request
    start: int
    count: int
    last: bool


@dataclasses.dataclass(frozen=True, kw_only=True)
class RoundPlan:
    """One round, in dispatch order: releases, binds, chunks (at most one per prompt), then up to `ticks` ticks.

    `owners` is the slot -> request binding that the round's events are applied through: a slot bound anew later, or a
    request that reuses an id, is never touched by an older round.
    """

    number: int
    releases: tuple[int, ...]
    binds: tuple[SlotBind, ...]
    chunks: tuple[PrefillChunk, ...]
    ticks: int
    end_early: bool  # requests wait: end the round as soon as a slot finishes
    owners: dict[int, Request]


@dataclasses.dataclass(frozen=True, kw_only=True)
class RoundEvents:
    """A round's packed Events, unpacked on the host.  Shapes as in programs.Events, cut to the ticks that ran."""

    ticks: int
    idle_row_ticks: int
    token: np.ndarray  # [ticks, S], NO_TOKEN where nothing was sampled
    depth: np.ndarray  # [ticks, S]
    logprob: np.ndarray  # [ticks, S] float32
    finish: np.ndarray  # [ticks, S], Finish
    phase: np.ndarray  # [S] at the end of the round
    position: np.ndarray  # [S]
    loops: np.ndarray  # [S] loops done for the token being computed

    @classmethod
    def unpack(cls, packed: np.ndarray, max_ticks: int) -> RoundEvents:
        """The inverse of `programs.Events.pack`."""
        ticks_row, idle_row, phase, position, loops = packed[4 * max_ticks :]
        ticks = int(ticks_row[0])
        part = [packed[i * max_ticks : i * max_ticks + ticks] for i in range(4)]
        return cls(
            ticks=ticks,
            idle_row_ticks=int(idle_row[0]),
            token=part[0],
            depth=part[1],
            logprob=np.ascontiguousarray(part[2]).view(np.float32),
            finish=part[3],
            phase=phase,
            position=position,
            loops=loops,
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Delivery:
    """Tokens that one round produced for one request, and whether the device ended it."""

    request: Request
    tokens: tuple[int, ...]
    depths: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish: FinishReason | None
