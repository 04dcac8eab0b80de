"""Logical page allocator: who owns which page.  No arrays, no jax; tests run in milliseconds.

Contract: `plan` answers whether a claim can succeed and changes nothing; `claim` of a plan that fits cannot fail;
`release` is idempotent.  Page tables are append-only while owned.  A page released here may be used by any program
dispatched afterwards: the device runs programs in order, so nobody waits for it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable

from rlt_jax.errors import CorruptState


@dataclasses.dataclass(frozen=True, kw_only=True)
class AdmissionPlan:
    """What admitting a request would take, and whether it fits now."""

    required_pages: int
    free_pages: int

    @property
    def fits(self) -> bool:
        return self.required_pages <= self.free_pages


class PageAllocator:
    """Owns the free list and every page table.  Owners are any hashable identity (the request object itself)."""

    def __init__(self, total_pages: int) -> None:
        if total_pages < 1:
            raise ValueError(f"total_pages={total_pages} must be >= 1")
        self._total = total_pages
        self._free = list(range(total_pages - 1, -1, -1))  # LIFO: the page freed last is the warmest
        self._tables: dict[Hashable, tuple[int, ...]] = {}

    @property
    def total_pages(self) -> int:
        return self._total

    @property
    def free_pages(self) -> int:
        return len(self._free)

    @property
    def used_pages(self) -> int:
        return self._total - len(self._free)

    def plan(self, required_pages: int) -> AdmissionPlan:
        """What a claim of `required_pages` would meet now.  No side effects."""
        return AdmissionPlan(required_pages=required_pages, free_pages=len(self._free))

    def claim(self, owner: Hashable, plan: AdmissionPlan) -> tuple[int, ...]:
        """Give `owner` its pages, lowest position first.

        Raises:
            CorruptState: the owner has pages already, or the plan does not fit; both are bugs of the caller.
        """
        if owner in self._tables:
            raise CorruptState(f"{owner!r} owns {len(self._tables[owner])} pages already")
        if plan.required_pages > len(self._free):
            raise CorruptState(f"claim of {plan.required_pages} pages with {len(self._free)} free")
        pages = tuple(self._free.pop() for _ in range(plan.required_pages))
        self._tables[owner] = pages
        return pages

    def table(self, owner: Hashable) -> tuple[int, ...]:
        """The owner's pages in position order; empty if it owns none."""
        return self._tables.get(owner, ())

    def release(self, owner: Hashable) -> int:
        """Take the owner's pages back; returns how many.  Idempotent."""
        pages = self._tables.pop(owner, ())
        self._free.extend(reversed(pages))
        return len(pages)

    def check(self) -> None:
        """Every page is free or owned exactly once.

        Raises:
            CorruptState: with the counts.
        """
        owned = [p for table in self._tables.values() for p in table]
        if len(set(owned) | set(self._free)) != self._total or len(owned) + len(self._free) != self._total:
            raise CorruptState(f"free {len(self._free)} + owned {len(owned)} != total {self._total}, or a page twice")
