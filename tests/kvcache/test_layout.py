"""Geometry of pages and planes.

PROTECTS: which copy of a token a query reads, and how much memory a request is charged for.
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlt_jax.config import KVLayoutKind
from rlt_jax.kvcache.layout import MAX_WRITE_THROUGH_PLANES, KVLayout, read_plane


def layout(kind: KVLayoutKind = KVLayoutKind.LAST_EXITED, *, page_size: int = 16, max_loops: int = 4) -> KVLayout:
    """Ouro-1.4B in bfloat16."""
    return KVLayout.create(
        kind, max_loops=max_loops, page_size=page_size, kv_heads=16, head_dim=128, num_layers=24, dtype_bytes=2
    )


def test_v12_versions_read_at_loop_two() -> None:
    """Tokens that left after 1, 3 and 4 loops, read by loop 2 (depth 1): versions 1, 2, 2, that is planes 0, 1, 1."""
    assert [read_plane(1, exit_depth) for exit_depth in (1, 3, 4)] == [0, 1, 1]
    assert [read_plane(3, exit_depth) for exit_depth in (1, 3, 4)] == [0, 2, 3]
    assert [read_plane(0, exit_depth) for exit_depth in (1, 3, 4)] == [0, 0, 0]


def test_v8_a_request_of_191_positions() -> None:
    """48 blocks where a block is one plane: 12 pages of 4 planes; SHARED needs 12 of one."""
    last, shared = layout(), layout(KVLayoutKind.SHARED)
    assert last.pages_for(128 + 64 - 1) == 12
    assert 12 * last.planes == 48
    assert shared.pages_for(128 + 64 - 1) == 12
    assert 12 * shared.planes == 12


def test_v9_a_request_of_1056_positions() -> None:
    last = layout()
    assert last.pages_for(33 + 1024 - 1) == 66
    assert 66 * last.planes == 264


@pytest.mark.parametrize(("positions", "pages"), [(0, 0), (1, 1), (16, 1), (17, 2), (40, 3), (519, 33), (520, 33)])
def test_pages_are_rounded_up(positions: int, pages: int) -> None:
    assert layout().pages_for(positions) == pages


@given(st.integers(0, 5000), st.integers(1, 300))
def test_pages_hold_the_positions_and_no_page_is_idle(positions: int, page_size: int) -> None:
    pages = layout(page_size=page_size).pages_for(positions)
    assert pages * page_size >= positions > (pages - 1) * page_size or pages == positions == 0


def test_memory_of_the_real_model() -> None:
    """Ouro-1.4B: 768 KiB a token at four depths, a quarter of it when one plane is shared."""
    last, shared = layout(), layout(KVLayoutKind.SHARED)
    assert last.bytes_per_position == 786_432
    assert last.bytes_per_page == 16 * 786_432
    assert shared.bytes_per_position == 196_608
    assert shared.bytes_per_page == 16 * 196_608


def test_planes_written_and_read() -> None:
    last, shared = layout(), layout(KVLayoutKind.SHARED)
    assert last.planes == 4
    assert not last.prompt_is_sequential
    assert shared.planes == 1
    assert shared.prompt_is_sequential
    assert [last.plane(d) for d in range(4)] == [0, 1, 2, 3]
    assert [shared.plane(d) for d in range(4)] == [0, 0, 0, 0]
    np.testing.assert_array_equal(last.plane(np.arange(4)), np.arange(4))
    np.testing.assert_array_equal(shared.plane(np.arange(4)), np.zeros(4))


def test_too_many_planes_are_refused_by_number() -> None:
    assert layout(max_loops=MAX_WRITE_THROUGH_PLANES).planes == 8
    with pytest.raises(NotImplementedError, match=r"9 KV planes.*at most 8"):
        layout(max_loops=9)
    assert layout(KVLayoutKind.SHARED, max_loops=32).planes == 1
