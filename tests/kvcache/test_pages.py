"""The logical page allocator against a model of it.

PROTECTS: no page is owned twice, lost, or moved while owned; a claim that was planned cannot fail half-way.
"""

from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, rule

from rlt_jax.errors import CorruptState
from rlt_jax.kvcache.pages import PageAllocator


class Owner:
    """Identity is the object, as with requests: two owners with one name are two owners."""

    def __init__(self, name: str) -> None:
        self.name = name


class AllocatorMachine(RuleBasedStateMachine):
    """The reference model is a dict from owner to its pages and the set of the others."""

    owners = Bundle("owners")
    released = Bundle("released")

    @initialize(total=st.integers(1, 24))
    def start(self, total: int) -> None:
        self.pages = PageAllocator(total)
        self.total = total
        self.free = set(range(total))
        self.owned: dict[Owner, tuple[int, ...]] = {}

    @rule(target=owners, count=st.integers(0, 30), name=st.sampled_from("abc"))
    def claim(self, count: int, name: str) -> Owner:
        owner = Owner(name)
        plan = self.pages.plan(count)
        assert plan.required_pages == count
        assert plan.free_pages == len(self.free)
        assert plan.fits == (count <= len(self.free))
        if plan.fits:
            given = self.pages.claim(owner, plan)
            assert len(given) == len(set(given)) == count
            assert set(given) <= self.free
            self.owned[owner] = given
            self.free -= set(given)
        else:
            with pytest.raises(CorruptState, match=f"claim of {count} pages with {len(self.free)} free"):
                self.pages.claim(owner, plan)
        return owner

    @rule(owner=owners, count=st.integers(1, 3))
    def claim_twice(self, owner: Owner, count: int) -> None:
        if owner in self.owned:
            with pytest.raises(CorruptState, match=r"owns .* already"):
                self.pages.claim(owner, self.pages.plan(count))

    @rule(target=released, owner=consumes(owners))
    def release(self, owner: Owner) -> Owner:
        mine = self.owned.pop(owner, ())
        assert self.pages.release(owner) == len(mine)
        self.free |= set(mine)
        return owner

    @rule(owner=released)
    def release_again(self, owner: Owner) -> None:
        assert self.pages.release(owner) == 0

    @invariant()
    def tables_are_what_was_given(self) -> None:
        for owner, given in self.owned.items():
            assert self.pages.table(owner) == given

    @invariant()
    def counts_agree(self) -> None:
        assert self.pages.total_pages == self.total
        assert self.pages.free_pages == len(self.free)
        assert self.pages.used_pages == self.total - len(self.free)
        self.pages.check()


AllocatorMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None, derandomize=True)
TestAllocator = AllocatorMachine.TestCase


def test_a_stale_plan_never_takes_a_page_twice() -> None:
    pages = PageAllocator(4)
    stale = pages.plan(3)
    pages.claim("first", pages.plan(2))
    with pytest.raises(CorruptState, match="claim of 3 pages with 2 free"):
        pages.claim("second", stale)
    assert pages.free_pages == 2
    assert pages.table("second") == ()
    pages.check()


def test_the_page_freed_last_is_used_first() -> None:
    pages = PageAllocator(8)
    first = pages.claim("a", pages.plan(3))
    pages.claim("b", pages.plan(2))
    pages.release("a")
    assert pages.claim("c", pages.plan(3)) == first


def test_shared_fits_four_times_the_requests() -> None:
    """One page of four planes is four pages of one: same bytes, four times as many positions."""
    last, shared = PageAllocator(12), PageAllocator(48)
    need = 12  # 191 positions of 16
    assert last.plan(need).fits
    assert not last.plan(need + 1).fits
    for n in range(4):
        assert shared.plan(need).fits
        shared.claim(n, shared.plan(need))
    assert not shared.plan(1).fits
    assert shared.free_pages == 0


def test_check_sees_a_corruption() -> None:
    pages = PageAllocator(4)
    pages.claim("a", pages.plan(2))
    pages._free.append(pages.table("a")[0])  # what a double release would do
    with pytest.raises(CorruptState, match="a page twice"):
        pages.check()


def test_no_pages_is_refused() -> None:
    with pytest.raises(ValueError, match="total_pages=0"):
        PageAllocator(0)


def test_the_allocator_imports_no_jax() -> None:
    """Its tests and a scheduler on top of it must run without a device runtime."""
    code = "import sys, rlt_jax.kvcache.pages, rlt_jax.kvcache.layout; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
