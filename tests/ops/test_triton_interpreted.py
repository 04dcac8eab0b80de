"""The Triton kernels' arithmetic against the reference, run by Pallas' interpreter on the CPU.

PROTECTS: masks, page walks, splits and head sizes of the kernels, in every suite; tests/gpu runs the compiled ones.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlt_jax.ops.kv_write.reference import kv_write_reference
from rlt_jax.ops.kv_write.triton import kv_write_triton
from rlt_jax.ops.paged_attention import triton
from rlt_jax.ops.paged_attention.reference import paged_attention_reference
from rlt_jax.ops.paged_attention.triton import paged_attention_triton

PAGES, PLANES, PAGE = 7, 3, 16


def pools(kv_heads: int, dim: int) -> tuple[jax.Array, jax.Array]:
    keys = jax.random.split(jax.random.key(dim), 2)
    shape = (PAGES, PLANES, kv_heads, PAGE, dim)
    k, v = (jax.random.normal(key, shape, jnp.float32) for key in keys)
    return k, v


@pytest.mark.parametrize("dim", [16, 24, 96])
@pytest.mark.parametrize("group", [1, 3])
@pytest.mark.parametrize("queries", [1, 5])
def test_attention_agrees_with_the_reference(dim: int, group: int, queries: int) -> None:
    """Rows at their own planes and lengths, one of them empty, pages out of order."""
    rng = np.random.default_rng(queries)
    k, v = pools(2, dim)
    table = jnp.asarray([[3, 1, 0], [5, 6, 2], [4, 0, 0]], jnp.int32)
    last = np.array([20, 40, -1])
    back = np.arange(queries)[::-1]
    positions = jnp.asarray(np.where(last[:, None] < 0, -1, last[:, None] - back), jnp.int32)
    planes = jnp.asarray([0, 2, 1], jnp.int32)
    q = jnp.asarray(rng.normal(size=(3, queries, 2 * group, dim)), jnp.float32)
    expected = paged_attention_reference(q, k, v, table, positions, planes)
    found = paged_attention_triton(q, k, v, table, positions, planes, interpret=True)
    assert found.shape == expected.shape
    np.testing.assert_allclose(found, expected, atol=2e-6)
    assert not np.asarray(found[2]).any(), "a row without keys gives 0"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("group", [1, 6])
@pytest.mark.parametrize("split", [True, False], ids=["split keys", "whole rows"])
def test_one_position_per_row_whether_its_keys_are_split_or_not(
    split: bool, group: int, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parts of one page: rows of one, two and three parts, one without any."""
    monkeypatch.setattr(triton, "SPLIT_POSITIONS", PAGE)
    monkeypatch.setattr(triton, "FULL_PROGRAMS", 10**6 if split else 0)
    k, v = (pool.astype(dtype) for pool in pools(2, 24))
    table = jnp.asarray([[3, 1, 0], [5, 6, 2], [4, 0, 0], [1, 2, 3]], jnp.int32)
    positions, planes = jnp.asarray([[20], [40], [-1], [PAGE - 1]], jnp.int32), jnp.asarray([0, 2, 1, 1], jnp.int32)
    q = jnp.asarray(np.random.default_rng(group).normal(size=(4, 1, 2 * group, 24)), dtype)
    expected = paged_attention_reference(*(x.astype(jnp.float32) for x in (q, k, v)), table, positions, planes)
    found = paged_attention_triton(q, k, v, table, positions, planes, interpret=True)
    assert found.dtype == q.dtype
    close = {"float32": 2e-6, "bfloat16": 2e-2}[dtype]
    np.testing.assert_allclose(found.astype(jnp.float32), expected, atol=close)
    assert not np.asarray(found[2], np.float32).any()


@pytest.mark.parametrize("dim", [16, 24])
@pytest.mark.parametrize("history", ["resolve", "drop"])
@pytest.mark.parametrize("queries", [1, 5])
def test_history_by_exit_depth_agrees_with_the_reference(dim: int, history: str, queries: int) -> None:
    """Exit depths at random, so that whole blocks vanish under drop; a query that sees nothing at all gives 0."""
    rng = np.random.default_rng(dim)
    k, v = pools(2, dim)
    table = jnp.asarray([[3, 1, 0], [5, 6, 2], [4, 0, 0]], jnp.int32)
    positions = jnp.asarray(np.array([20, 40, 7])[:, None] - np.arange(queries)[::-1], jnp.int32)
    planes = jnp.asarray([0, 2, 1], jnp.int32)
    exits = rng.integers(1, PLANES + 1, (PAGES, PAGE))
    exits[5] = 1  # the second row's first page is gone at plane 2
    exits[4] = 1  # all of the third row's keys are gone at plane 1
    q = jnp.asarray(rng.normal(size=(3, queries, 4, dim)), jnp.float32)
    args = (q, k, v, table, positions, planes, jnp.asarray(exits, jnp.int32), history)
    expected = paged_attention_reference(*args)
    found = paged_attention_triton(*args, interpret=True)
    np.testing.assert_allclose(found, expected, atol=2e-6)
    assert np.asarray(found[2]).any() == (history == "resolve")


@pytest.mark.parametrize("group", [1, 2])
@pytest.mark.parametrize("queries", [1, 5])
def test_what_others_left_behind_does_not_count_even_if_it_is_not_a_number(queries: int, group: int) -> None:
    """Past a row's last key, in its last page and in pages that its table only pads with."""
    k, v = pools(2, 16)
    table, positions = jnp.asarray([[3, 1, 0]], jnp.int32), jnp.asarray([20 - np.arange(queries)[::-1]], jnp.int32)
    q = jnp.asarray(np.random.default_rng(0).normal(size=(1, queries, 2 * group, 16)), jnp.float32)
    planes = jnp.asarray([1], jnp.int32)
    clean = paged_attention_triton(q, k, v, table, positions, planes, interpret=True)
    own = np.zeros((PAGES, PAGE), bool)
    own[3], own[1, :5] = True, True
    k, v = (jnp.where(jnp.asarray(own)[:, None, None, :, None], pool, jnp.nan) for pool in (k, v))
    np.testing.assert_array_equal(paged_attention_triton(q, k, v, table, positions, planes, interpret=True), clean)


@pytest.mark.parametrize("implementation", ["reference", "triton"])
@pytest.mark.parametrize("queries", [1, 5])
def test_what_others_left_in_planes_that_a_token_never_wrote_does_not_count(queries: int, implementation: str) -> None:
    """Under drop a token that left at loop e wrote planes below e; the deeper ones hold what was there before."""
    attend = {
        "reference": paged_attention_reference,
        "triton": functools.partial(paged_attention_triton, interpret=True),
    }[implementation]
    rng = np.random.default_rng(3)
    k, v = pools(2, 16)
    exits = jnp.asarray(rng.integers(1, PLANES + 1, (PAGES, PAGE)), jnp.int32)
    table, positions = jnp.asarray([[3, 1, 0]], jnp.int32), jnp.asarray([20 - np.arange(queries)[::-1]], jnp.int32)
    q = jnp.asarray(rng.normal(size=(1, queries, 4, 16)), jnp.float32)
    more = (table, positions, jnp.asarray([1], jnp.int32), exits, "drop")
    written = (exits[:, None, :] > jnp.arange(PLANES)[None, :, None])[:, :, None, :, None]
    left = [jnp.where(written, pool, jnp.nan) for pool in (k, v)]
    np.testing.assert_array_equal(attend(q, *left, *more), attend(q, k, v, *more))


@pytest.mark.parametrize("group", [1, 3])
@pytest.mark.parametrize("queries", [1, 5])
@pytest.mark.parametrize("damaged", ["q", "k", "v"])
def test_a_rows_own_numbers_that_are_none_stay_none(damaged: str, queries: int, group: int) -> None:
    """An output of 0 in their place would be a wrong answer that nobody notices.  The other row keeps its bits."""
    k, v = pools(2, 16)
    table, planes = jnp.asarray([[3, 1, 0], [5, 6, 2]], jnp.int32), jnp.asarray([1, 1], jnp.int32)
    positions = jnp.asarray(np.array([20, 40])[:, None] - np.arange(queries)[::-1], jnp.int32)
    q = jnp.asarray(np.random.default_rng(0).normal(size=(2, queries, 2 * group, 16)), jnp.float32)
    clean = paged_attention_triton(q, k, v, table, positions, planes, interpret=True)
    if damaged == "q":
        q = q.at[0].set(jnp.nan)
    elif damaged == "k":
        k = k.at[jnp.asarray([3, 1])].set(jnp.nan)
    else:
        v = v.at[3, :, :, 0].set(jnp.nan)
    expected = paged_attention_reference(q, k, v, table, positions, planes)
    found = paged_attention_triton(q, k, v, table, positions, planes, interpret=True)
    assert np.isnan(expected[0]).all()
    assert np.isnan(found[0]).all()
    np.testing.assert_array_equal(found[1], clean[1])


def test_kv_write_of_one_plane() -> None:
    k_pool, v_pool = pools(2, 24)
    k, v = (jnp.asarray(np.random.default_rng(i).normal(size=(2, 2, 24)), jnp.float32) for i in range(2))
    page, offset, plane = jnp.asarray([2, PAGES], jnp.int32), jnp.asarray([4, 5], jnp.int32), jnp.asarray([1, 2])
    expected = kv_write_reference(k_pool, v_pool, k, v, page, offset, plane, None)
    found = kv_write_triton(k_pool, v_pool, k, v, page, offset, plane, None, interpret=True)
    for mine, theirs in zip(found, expected, strict=True):
        np.testing.assert_array_equal(mine, theirs)


@pytest.mark.parametrize("dim", [16, 96])
def test_kv_write_stores_the_wanted_planes_and_nothing_else(dim: int) -> None:
    k_pool, v_pool = pools(2, dim)
    rng = np.random.default_rng(1)
    k, v = (jnp.asarray(rng.normal(size=(4, 2, dim)), jnp.float32) for _ in range(2))
    page = jnp.asarray([2, PAGES, 6, 0], jnp.int32)  # the second row is idle
    offset = jnp.asarray([0, 3, 15, 7], jnp.int32)
    first, end = jnp.asarray([0, 0, 1, 2], jnp.int32), jnp.asarray([3, 3, 2, 3], jnp.int32)
    expected = kv_write_reference(k_pool, v_pool, k, v, page, offset, first, end)
    found = kv_write_triton(k_pool, v_pool, k, v, page, offset, first, end, interpret=True)
    for mine, theirs in zip(found, expected, strict=True):
        np.testing.assert_array_equal(mine, theirs)
