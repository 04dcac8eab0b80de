"""Geometry of pages and planes.

PROTECTS: which copy of a token a query reads, and how much memory a request is charged for.
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlt_jax.config import KVLayoutKind
from rlt_jax.errors import InvalidConfig
from rlt_jax.kvcache.layout import EXIT_DEPTH_BYTES, KVLayout, read_plane


def layout(kind: KVLayoutKind = KVLayoutKind.LAST_EXITED, *, page_size: int = 16, max_loops: int = 4) -> KVLayout:
    """Ouro-1.4B in bfloat16."""
    return KVLayout.create(
        kind, max_loops=max_loops, page_size=page_size, kv_heads=16, head_dim=128, num_layers=24, dtype_bytes=2
    )


def huginn(kind: KVLayoutKind, *, max_loops: int = 32, ring_planes: int | None = None) -> KVLayout:
    """Huginn-0125 in bfloat16: two layers, four that loop, two."""
    return KVLayout.create(
        kind, max_loops=max_loops, page_size=64, kv_heads=55, head_dim=96, num_layers=8, dtype_bytes=2,
        prelude_layers=2, coda_layers=2, ring_planes=ring_planes,
    )  # fmt: skip


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


def test_layers_outside_the_loop_have_one_plane() -> None:
    found = huginn(KVLayoutKind.LAST_EXITED)
    assert [found.is_core(i) for i in range(8)] == [False] * 2 + [True] * 4 + [False] * 2
    assert [found.planes_of(i) for i in range(8)] == [1, 1, 32, 32, 32, 32, 1, 1]
    assert [layout().planes_of(i) for i in (0, 23)] == [4, 4]


@pytest.mark.parametrize(
    ("kind", "ring_planes", "entries", "exit_depth"),
    [
        (KVLayoutKind.LAST_EXITED, None, 2 + 4 * 32 + 2, EXIT_DEPTH_BYTES),
        (KVLayoutKind.DROP, None, 2 + 4 * 32 + 2, EXIT_DEPTH_BYTES),
        (KVLayoutKind.RING, 3, 2 + 4 * 3 + 2, 0),
        (KVLayoutKind.SHARED, None, 8, 0),
    ],
)
def test_memory_by_groups_of_layers(kind: KVLayoutKind, ring_planes: int | None, entries: int, exit_depth: int) -> None:
    """21,120 bytes an entry: K and V of 55 heads of 96."""
    found = huginn(kind, ring_planes=ring_planes)
    assert found.bytes_per_position == 21_120 * entries + exit_depth
    assert found.bytes_per_page == 64 * found.bytes_per_position


def test_planes_of_a_ring() -> None:
    ring = huginn(KVLayoutKind.RING, ring_planes=3)
    assert ring.planes == 3
    assert [ring.plane(d) for d in range(7)] == [0, 1, 2, 0, 1, 2, 0]
    assert [ring.writes_deeper(d) for d in range(7)] == [True] * 3 + [False] * 4
    np.testing.assert_array_equal(ring.plane(np.arange(7)), [0, 1, 2, 0, 1, 2, 0])
    np.testing.assert_array_equal(ring.writes_deeper(np.arange(4)), [True, True, True, False])
    assert ring.prompt_is_one_chunk
    assert not ring.prompt_is_sequential
    assert huginn(KVLayoutKind.RING).planes == 1
    with pytest.raises(InvalidConfig, match=r"kv_planes must be in \[1, 8\] with max_loops=32, found 9"):
        huginn(KVLayoutKind.RING, ring_planes=9)
    with pytest.raises(InvalidConfig, match=r"kv_planes must be in \[1, 2\] with max_loops=2, found 3"):
        huginn(KVLayoutKind.RING, ring_planes=3, max_loops=2)


@pytest.mark.parametrize(
    ("kind", "max_loops", "history"),
    [
        (KVLayoutKind.LAST_EXITED, 8, None),
        (KVLayoutKind.LAST_EXITED, 9, "resolve"),
        (KVLayoutKind.DROP, 2, "drop"),
        (KVLayoutKind.DROP, 9, "drop"),
        (KVLayoutKind.SHARED, 32, None),
        (KVLayoutKind.RING, 32, None),
    ],
)
def test_who_needs_exit_depths(kind: KVLayoutKind, max_loops: int, history: str | None) -> None:
    """Where they are kept, a loop writes its own plane alone; elsewhere the deeper ones too, a RING only at first."""
    found = huginn(kind, max_loops=max_loops)
    assert found.history == history
    assert bool(found.writes_deeper(0)) == (history is None)
    assert found.planes == (1 if kind in (KVLayoutKind.SHARED, KVLayoutKind.RING) else max_loops)
    assert [found.prompt_is_one_chunk, found.prompt_is_sequential] == [
        kind is KVLayoutKind.RING, kind is KVLayoutKind.SHARED,
    ]  # fmt: skip
