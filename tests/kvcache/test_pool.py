"""Writing into the pool and reading it back through attention.

PROTECTS: the depth rule of every layout (which version of an earlier token a loop sees), that finalising an exit costs
no separate copy and yet equals one, and that idle and padding rows never touch a page.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlt_jax.config import KVLayoutKind
from rlt_jax.kvcache.layout import KVLayout, read_plane
from rlt_jax.kvcache.pool import KVPool, empty_pool, mark_exits, write_rows
from rlt_jax.ops.paged_attention.api import paged_attention
from tests.oracle.huginn import visible_loop

LAST, SHARED = KVLayoutKind.LAST_EXITED, KVLayoutKind.SHARED
DROP, RING = KVLayoutKind.DROP, KVLayoutKind.RING


def layout(
    kind: KVLayoutKind,
    *,
    heads: int = 1,
    dim: int = 1,
    page_size: int = 4,
    layers: int = 1,
    max_loops: int = 4,
    ring_planes: int | None = None,
) -> KVLayout:
    return KVLayout.create(
        kind, max_loops=max_loops, page_size=page_size, kv_heads=heads, head_dim=dim, num_layers=layers, dtype_bytes=4,
        ring_planes=ring_planes,
    )  # fmt: skip


def ints(*values: int) -> jax.Array:
    return jnp.asarray(values, jnp.int32)


class OneRequest:
    """One request in a pool: table of pages, one row at a time, exactly the calls that the programs make."""

    def __init__(self, geometry: KVLayout, table: list[int], pages: int = 8) -> None:
        self.layout, self.table = geometry, table
        self.pool = empty_pool(geometry, pages, jnp.float32)

    def write(self, position: int, depth: int, key, value, layer: int = 0) -> None:
        shape = (1, self.layout.kv_heads, self.layout.head_dim)
        plane, deeper = self.layout.plane(depth), self.layout.writes_deeper(depth)
        self.pool = write_rows(
            self.pool,
            layer,
            jnp.broadcast_to(jnp.asarray(key, jnp.float32), shape),
            jnp.broadcast_to(jnp.asarray(value, jnp.float32), shape),
            page=ints(self.table[position // self.layout.page_size]),
            offset=ints(position % self.layout.page_size),
            planes_from=ints(plane),
            planes_to=None if deeper is False else ints(self.layout.planes if deeper else plane + 1),
        )

    def mark(self, position: int, exit_depth: int) -> None:
        self.pool = mark_exits(
            self.pool,
            ints(exit_depth),
            page=ints(self.table[position // self.layout.page_size]),
            offset=ints(position % self.layout.page_size),
        )

    def attend(self, position: int, depth: int, query, layer: int = 0) -> np.ndarray:
        heads, dim = self.layout.kv_heads, self.layout.head_dim
        out = paged_attention(
            jnp.broadcast_to(jnp.asarray(query, jnp.float32), (1, 1, heads, dim)),
            self.pool.k[layer],
            self.pool.v[layer],
            ints(*self.table)[None],
            ints(position)[None],
            ints(self.layout.plane(depth)),
            exit_depth=self.pool.exit_depth,
            history=self.layout.history,
        )
        return np.asarray(out)[0, 0]


@pytest.mark.parametrize(
    ("kind", "loop_one", "loop_two"),
    [(LAST, 20.0, 20.0), (SHARED, 22.6894, 20.7329)],
    ids=["V10 last_exited", "V11 shared"],
)
def test_toy_attention(kind: KVLayoutKind, loop_one: float, loop_two: float) -> None:
    """A ran two loops: (K, V) = (1, 10), then (2, 20), and left.  B follows, its second loop with Q = K = h/20, V = h.

    LAST_EXITED: loop 1 sees A's first version, mean(10, 30) = 20; loop 2 sees (2, 20) and (1, 20): 20.
    SHARED: loop 1 sees A's last version, softmax([2, 1]) . (20, 30) = 22.6894; loop 2 gives 20.7329.
    """
    one = OneRequest(layout(kind), [5])
    one.write(0, 0, 1.0, 10.0)
    one.write(0, 1, 2.0, 20.0)
    one.write(1, 0, 1.0, 30.0)
    h = float(one.attend(1, 0, 1.0)[0, 0])
    assert h == pytest.approx(loop_one, abs=1e-4)
    one.write(1, 1, h / 20, h)
    assert float(one.attend(1, 1, h / 20)[0, 0]) == pytest.approx(loop_two, abs=1e-4)


def test_history_of_mixed_exits_is_read_at_the_version_that_existed() -> None:
    """Values are depth markers and keys are equal, so attention returns the mean of the versions it met."""
    one, exits = OneRequest(layout(LAST, page_size=2), [3, 6, 0]), [1, 3, 4, 2, 4]
    for position, exit_depth in enumerate(exits):
        for depth in range(exit_depth):
            one.write(position, depth, 0.0, depth + 1.0)
    for depth in range(4):
        expected = np.mean([read_plane(depth, e) + 1.0 for e in exits])
        assert float(one.attend(len(exits) - 1, depth, 1.0)[0, 0]) == pytest.approx(expected, abs=1e-6)


def test_shared_history_is_always_the_last_write() -> None:
    one, exits = OneRequest(layout(SHARED, page_size=2), [3, 6, 0]), [1, 3, 4, 2, 4]
    for position, exit_depth in enumerate(exits):
        for depth in range(exit_depth):
            one.write(position, depth, 0.0, depth + 1.0)
    for depth in range(4):
        assert float(one.attend(len(exits) - 1, depth, 1.0)[0, 0]) == pytest.approx(np.mean(exits), abs=1e-6)


@pytest.mark.parametrize(
    ("kind", "max_loops", "ring_planes"),
    [(LAST, 4, None), (LAST, 11, None), (SHARED, 4, None), (DROP, 4, None), (DROP, 11, None), (RING, 11, 1),
     (RING, 11, 3), (RING, 8, 8)],
)  # fmt: skip
def test_every_layout_shows_the_loop_that_its_rule_names(
    kind: KVLayoutKind, max_loops: int, ring_planes: int | None
) -> None:
    """Positions that left after mixed depths, the last one still being computed; the pages held another request before.

    Values are depth markers and keys are equal, so attention returns the mean of the versions it met.
    """
    geometry = layout(kind, page_size=2, max_loops=max_loops, ring_planes=ring_planes)
    exits = [1, max_loops, 3, 2, max_loops - 1]
    one = OneRequest(geometry, [3, 6, 0])
    for position in range(6):  # the owner before
        for depth in range(max_loops):
            one.write(position, depth, 0.0, 1000.0)
        one.mark(position, 1 + position % max_loops)
    for position, exit_depth in enumerate(exits):
        one.mark(position, geometry.planes)
        for depth in range(exit_depth):
            one.write(position, depth, 0.0, depth + 1.0)
        one.mark(position, exit_depth)
    one.mark(len(exits), geometry.planes)
    for depth in range(max_loops):
        one.write(len(exits), depth, 0.0, depth + 1.0)
        seen = [visible_loop(kind.value, depth, e, geometry.planes) for e in exits]
        expected = np.mean([*(loop + 1.0 for loop in seen if loop is not None), depth + 1.0])
        assert float(one.attend(len(exits), depth, 1.0)[0, 0]) == pytest.approx(expected, abs=1e-5), depth


def test_planes_resolved_by_exit_depth_are_the_planes_written_through() -> None:
    """The same request in a pool of each kind, for decode rows and chunk rows, except for the order of a sum."""
    rng, exits = np.random.default_rng(5), [4, 1, 2, 3, 4, 2]
    through = OneRequest(layout(LAST, heads=2, dim=8, page_size=2), [3, 6, 0])
    resolved = OneRequest(through.layout, [3, 6, 0])
    resolved.pool = dataclasses.replace(resolved.pool, exit_depth=jnp.zeros((8, 2), jnp.int32))
    for position, exit_depth in enumerate(exits):
        for depth in range(exit_depth):
            key, value = rng.normal(size=(2, 1, 2, 8)).astype(np.float32)
            through.write(position, depth, key, value)
            where = {"page": ints([3, 6, 0][position // 2]), "offset": ints(position % 2)}
            resolved.pool = write_rows(
                resolved.pool, 0, jnp.asarray(key), jnp.asarray(value), planes_from=ints(depth), planes_to=None, **where
            )
        resolved.mark(position, exit_depth)
    q = jnp.asarray(rng.normal(size=(4, 3, 4, 8)), jnp.float32)
    table = jnp.tile(ints(3, 6, 0), (4, 1))
    positions = jnp.asarray([[0, 3, 5], [5, -1, 2], [4, 4, 4], [1, 0, -1]], jnp.int32)
    arguments = (table, positions, ints(0, 1, 2, 3))
    expected = paged_attention(q, through.pool.k[0], through.pool.v[0], *arguments)
    actual = paged_attention(
        q, resolved.pool.k[0], resolved.pool.v[0], *arguments, exit_depth=resolved.pool.exit_depth, history="resolve"
    )
    np.testing.assert_allclose(actual, expected, atol=1e-6, rtol=0)


def test_a_query_that_sees_nobody_is_zero() -> None:
    """DROP: everybody left before this loop, and the query itself is not in the pool."""
    one = OneRequest(layout(DROP), [2])
    one.write(0, 0, 1.0, 5.0)
    one.mark(0, 1)
    assert float(one.attend(0, 0, 1.0)[0, 0]) == 5.0
    assert float(one.attend(0, 1, 1.0)[0, 0]) == 0.0


def test_exit_depths_are_marked_where_they_are_kept() -> None:
    pool = empty_pool(layout(DROP, page_size=2), 3, jnp.float32)
    pool = mark_exits(pool, ints(4, 2, 9), page=ints(2, 0, 3), offset=ints(1, 0, 0))  # page 3 does not exist
    np.testing.assert_array_equal(pool.exit_depth, [[2, 0], [0, 0], [0, 4]])
    np.testing.assert_array_equal(mark_exits(pool, 7, page=ints(1), offset=ints(0)).exit_depth[1], [7, 0])
    plain = empty_pool(layout(LAST), 3, jnp.float32)
    assert plain.exit_depth is None
    assert mark_exits(plain, ints(1), page=ints(0), offset=ints(0)) is plain


@pytest.mark.parametrize(
    ("history", "exit_depth"), [("resolve", None), ("drop", None), (None, 1), ("last", 1), ("last", None)]
)
@pytest.mark.parametrize("implementation", ["reference", "triton"])
def test_history_and_exit_depths_go_together(history, exit_depth, implementation: str) -> None:
    pool = empty_pool(layout(DROP), 1, jnp.float32)
    exits = None if exit_depth is None else pool.exit_depth
    with pytest.raises(ValueError, match="history="):
        paged_attention(
            jnp.zeros((1, 1, 1, 1)), pool.k[0], pool.v[0], ints(0)[None], ints(0)[None], ints(0), exit_depth=exits,
            history=history, implementation=implementation,
        )  # fmt: skip


def test_layers_outside_the_loop_store_one_plane() -> None:
    geometry = KVLayout.create(
        LAST, max_loops=5, page_size=2, kv_heads=1, head_dim=2, num_layers=4, dtype_bytes=4, prelude_layers=1,
        coda_layers=1,
    )  # fmt: skip
    pool = empty_pool(geometry, 3, jnp.float32)
    assert [a.shape[1] for a in pool.k] == [a.shape[1] for a in pool.v] == [1, 5, 5, 1]
    assert sum(a.nbytes for a in (*pool.k, *pool.v)) == 3 * geometry.bytes_per_page


@pytest.mark.parametrize("exit_depth", [1, 2, 3, 4])
def test_write_through_equals_a_finalising_copy(exit_depth: int) -> None:
    """Bitwise: loop d writing planes d .. 3 leaves what copying the exit plane to the deeper ones would leave (V24)."""
    geometry, rng = layout(LAST, heads=2, dim=8, layers=2), np.random.default_rng(exit_depth)
    one = OneRequest(geometry, [2])
    expected = [np.array(a) for a in (*one.pool.k, *one.pool.v)]
    for depth in range(exit_depth):
        for layer in range(2):
            key, value = rng.normal(size=(2, 2, 8)).astype(np.float32)
            one.write(3, depth, key, value, layer)
            expected[layer][2, depth, :, 3] = key
            expected[2 + layer][2, depth, :, 3] = value
    for array in expected:
        array[2, exit_depth:, :, 3] = array[2, exit_depth - 1, :, 3]
    for actual, array in zip((*one.pool.k, *one.pool.v), expected, strict=True):
        np.testing.assert_array_equal(np.asarray(actual), array)


@pytest.mark.parametrize("kind", [LAST, SHARED])
def test_v21_padding_rows_write_nothing(kind: KVLayoutKind) -> None:
    """A sentinel fills the pool.  Of four rows, one is live: every element outside its slot survives."""
    geometry = layout(kind, heads=2, dim=4, layers=2)
    pages, sentinel = 5, np.float32(1234.5)
    pool = jax.tree.map(lambda a: jnp.full_like(a, sentinel), empty_pool(geometry, pages, jnp.float32))
    rows = jnp.ones((4, 2, 4), jnp.float32)
    written = write_rows(
        pool,
        1,
        rows,
        2 * rows,
        page=ints(pages, 3, pages + 7, pages),  # only row 1 has a page
        offset=ints(0, 2, 1, 3),
        planes_from=ints(0, geometry.plane(2), 0, 0),
        planes_to=ints(*[geometry.planes] * 4),
    )
    for layer in range(2):
        for array, value in ((written.k[layer], 1.0), (written.v[layer], 2.0)):
            expected = np.full(array.shape, sentinel)
            if layer == 1:
                expected[3, geometry.plane(2) :, :, 2] = value
            np.testing.assert_array_equal(np.asarray(array), expected)


def test_an_empty_range_of_planes_writes_nothing() -> None:
    geometry = layout(LAST)
    pool = empty_pool(geometry, 2, jnp.float32)
    rows = jnp.ones((1, 1, 1), jnp.float32)
    after = write_rows(pool, 0, rows, rows, page=ints(1), offset=ints(0), planes_from=ints(2), planes_to=ints(2))
    assert not np.asarray(after.k[0]).any()
    assert not np.asarray(after.v[0]).any()


def test_rows_of_one_call_keep_to_their_own_pages_and_depths() -> None:
    geometry = layout(LAST, heads=1, dim=1)
    pool = empty_pool(geometry, 4, jnp.float32)
    values = jnp.asarray([[[1.0]], [[2.0]], [[3.0]]], jnp.float32)
    pool = write_rows(
        pool, 0, values, values, page=ints(0, 1, 1), offset=ints(3, 0, 1), planes_from=ints(0, 1, 3),
        planes_to=ints(4, 4, 4),
    )  # fmt: skip
    expected = np.zeros((4, 4, 1, 4, 1), np.float32)
    expected[0, 0:, 0, 3] = 1.0
    expected[1, 1:, 0, 0] = 2.0
    expected[1, 3:, 0, 1] = 3.0
    np.testing.assert_array_equal(np.asarray(pool.k[0]), expected)


def test_entries_are_stored_in_the_pool_s_precision() -> None:
    geometry = layout(LAST)
    pool = empty_pool(geometry, 1, jnp.bfloat16)
    rows = jnp.full((1, 1, 1), 1.001, jnp.float32)
    pool = write_rows(pool, 0, rows, rows, page=ints(0), offset=ints(0), planes_from=ints(0), planes_to=ints(4))
    assert isinstance(pool, KVPool)
    assert pool.k[0].dtype == jnp.bfloat16
    assert pool.pages == 1
    assert float(pool.k[0][0, 0, 0, 0, 0]) == 1.0
