"""Paged attention as Pallas kernels lowered through Triton, for NVIDIA GPUs.

Two kernels, one contract (api.paged_attention):
  decode   one position per row: a program per (row, KV head) walks the row's pages.  The work is bound by the bytes of
           K and V, so a single query takes vector arithmetic; several queries of one KV head share the tile that two
           products make of them, where each would repeat that arithmetic.
  prefill  many queries of one row: a program per (row, query tile, head) multiplies tiles on the tensor cores.
Both reduce keys page by page in ascending position, and stop at their own row's last key: a row's bits depend on no
neighbour and on no table width.

Triton's tiles are powers of two.  A head size that is none (96) is loaded under a mask into the next one; queries and
outputs, small beside K and V, are padded outside the kernels.
"""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from rlt_jax.ops.paged_attention.reference import MASKED

LOG2E = math.log2(math.e)
QUERY_TILE = 64
DECODE_BLOCK = 64  # positions per step of the decode kernel, at most a page
VECTOR_WARPS, TILE_WARPS = 8, 4  # of the decode kernel, for one query a KV head and for several
SMALLEST_TILE = 16  # rows of a product on the tensor cores
SPLIT_POSITIONS = 128  # keys per program when there are too few (row, head) pairs to fill the chip
FULL_PROGRAMS = 4 * 132  # four per multiprocessor of an H200 hide the latency of page loads
MERGE_SPLITS = 8  # splits joined per step


def paged_attention_triton(
    q: jax.Array,
    k_pool: jax.Array,
    v_pool: jax.Array,
    table: jax.Array,
    positions: jax.Array,
    planes: jax.Array,
    exit_depth: jax.Array | None = None,
    history: str | None = None,
    *,
    interpret: bool = False,
) -> jax.Array:
    """See api.paged_attention."""
    if exit_depth is None:
        exit_depth = jnp.zeros((1, 1), jnp.int32)  # kernels take it always, and read it where there is a `history`
    with warnings.catch_warnings():
        # Pallas' Triton lowering announces its end; these kernels have no Mosaic version yet
        warnings.filterwarnings("ignore", category=DeprecationWarning, message=".*[Tt]riton.*")
        if q.shape[1] == 1:
            return _decode(q, k_pool, v_pool, table, positions, planes, exit_depth, history, interpret)
        return _prefill(q, k_pool, v_pool, table, positions, planes, exit_depth, history, interpret)


def load_positions(ref, page_id, plane, head, start, count: int, keep: jax.Array | None = None) -> jax.Array:
    """[count, lanes] of one (page, head) from position `start` on; lanes past the head size are 0.

    Args:
        ref: [P, N, K, page, D] whole.
        plane: one for all positions, or [count].
        count: positions, a power of two.
        keep: [count] bool, positions to load; the others are 0.  None: all.
    """
    dim = ref.shape[-1]
    lanes = pl.next_power_of_2(dim)
    lane = jnp.arange(lanes, dtype=jnp.int32)
    mask = None if lanes == dim else jnp.broadcast_to(lane[None, :] < dim, (count, lanes))
    if keep is not None:
        kept = jnp.broadcast_to(keep[:, None], (count, lanes))
        mask = kept if mask is None else mask & kept
    if lanes == dim and jnp.ndim(plane) == 0:
        tile = ref.at[page_id, plane, head, pl.ds(start, count), :]
    else:
        rows = start + jnp.arange(count, dtype=jnp.int32)
        plane = jnp.broadcast_to(plane, (count,))
        tile = ref.at[page_id, plane[:, None], head, rows[:, None], lane[None, :]]
    return plt.load(tile) if mask is None else plt.load(tile, mask=mask, other=0.0)


def _history(history: str | None, exit_ref, page_id, start, count: int, plane) -> tuple[jax.Array, jax.Array | None]:
    """Plane, one or [count], of the keys of a page, and which of them are seen at all (None: all); see the api."""
    if history is None:
        return plane, None
    exits = plt.load(exit_ref.at[page_id, pl.ds(start, count)])
    if history == "resolve":
        return jnp.minimum(plane, jnp.maximum(exits - 1, 0)), None
    return plane, exits > plane


def _pad_head(x: jax.Array) -> jax.Array:
    """Last axis to the next power of two."""
    return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, pl.next_power_of_2(x.shape[-1]) - x.shape[-1])])


def _decode_kernel(
    plane_ref,  # [B]
    position_ref,  # [B]
    table_ref,  # [B, MP]
    exit_ref,  # [P, page], read if there is a history
    q_ref,  # [B, K, G, D] whole
    k_ref,  # [P, N, K, page, D] whole
    v_ref,  # same
    *out_refs,  # one split: as q_ref; several: whole [B, K, S, G, D] sums, [B, K, S, G] peaks and totals
    page: int,
    block: int,
    split: int | None,
    history: str | None,
    scale: float,
):
    row, head = pl.program_id(0), pl.program_id(1)
    plane, last = plane_ref[row], position_ref[row]
    group, dim = q_ref.shape[2:]
    blocks_per_page = page // block
    # where this head's queries stand in [..., G, D] and [..., G], and which lines of their tile there are
    vectors: tuple[Any, ...]
    scalars: tuple[Any, ...]
    shape: tuple[int, ...]
    if group == 1:
        vectors, scalars, wide, real, shape = (jnp.int32(0), slice(None)), (jnp.int32(0),), None, None, ()
        query = plt.load(q_ref.at[row, head, *vectors]).astype(jnp.float32) * scale  # [D]
        attend: Callable[..., Any] = _attend_vector
    else:
        shape = (max(SMALLEST_TILE, pl.next_power_of_2(group)),)
        line, lane = jnp.arange(shape[0], dtype=jnp.int32), jnp.arange(dim, dtype=jnp.int32)
        vectors, scalars, real = (line[:, None], lane[None, :]), (line,), line < group
        wide = jnp.broadcast_to(real[:, None], (*shape, dim))
        query = plt.load(q_ref.at[row, head, *vectors], mask=wide, other=0.0)  # [tile, D]
        attend = functools.partial(_attend_tile, scale=scale)

    def step(i, carry):
        page_id = table_ref[row, lax.div(i, jnp.int32(blocks_per_page))]
        first = lax.rem(i, jnp.int32(blocks_per_page)) * block
        at, alive = _history(history, exit_ref, page_id, first, block, plane)
        seen = i * block + jnp.arange(block, dtype=jnp.int32) <= last
        if alive is not None:
            seen &= alive
        keys = load_positions(k_ref, page_id, at, head, first, block)  # [block, D]
        # what others left where the query does not look may be NaN, and 0 times that is NaN
        values = load_positions(v_ref, page_id, at, head, first, block, keep=seen)
        return attend(carry, query, keys, values, seen)

    start, end = _nothing(shape, dim), (last + block) // block
    if split is None:
        (out_ref,) = out_refs
        mean = _mean(*lax.fori_loop(0, end, step, start))
        plt.store(out_ref.at[row, head, *vectors], mean.astype(out_ref.dtype), mask=wide)
        return
    acc_ref, peak_ref, total_ref = out_refs
    part = pl.program_id(2)
    first = part * (split // block)

    @pl.when(first < end)  # the merge never reads a split past the row's last key
    def _run():
        acc, peak, total = lax.fori_loop(first, jnp.minimum(first + split // block, end), step, start)
        plt.store(acc_ref.at[row, head, part, *vectors], acc, mask=wide)
        plt.store(peak_ref.at[row, head, part, *scalars], peak, mask=real)
        plt.store(total_ref.at[row, head, part, *scalars], total, mask=real)


def _nothing(shape: tuple[int, ...], dim: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Sums [*shape, dim], peaks and totals [*shape] before the first key."""
    return jnp.zeros((*shape, dim), jnp.float32), jnp.full(shape, MASKED, jnp.float32), jnp.zeros(shape, jnp.float32)


def _attend_vector(carry, query, keys, values, seen):
    """One step of the running softmax of one query, all in float32.

    Args:
        carry: sums [D], peak and total of the blocks before.
        query: [D] float32, times the scale of the scores and log2(e).
        keys, values: [block, D].
        seen: [block] bool.
    """
    acc, peak, total = carry
    scores = jnp.where(seen, jnp.sum(query[None, :] * keys.astype(jnp.float32), axis=1), MASKED)
    new_peak = jnp.maximum(peak, jnp.max(scores))
    shrink, weight = jnp.exp2(peak - new_peak), jnp.exp2(scores - new_peak)
    acc = acc * shrink + jnp.sum(weight[:, None] * values.astype(jnp.float32), axis=0)
    return acc, new_peak, total * shrink + jnp.sum(weight)


def _attend_tile(carry, queries, keys, values, seen, *, scale: float):
    """As `_attend_vector` for a tile of queries, as two products: on the tensor cores unless the dtype is float32.

    Scores and sums are float32; the weights are rounded to the dtype of the values before they meet them.

    Args:
        carry: sums [tile, D], peaks [tile] and totals [tile] of the blocks before.
        queries: [tile, D].
        keys, values: [block, D].
        seen: [block] bool, or [tile, block] where the queries differ in it.
        scale: of the scores, with log2(e) in it.
    """
    acc, peak, total = carry
    tf32 = queries.dtype != jnp.float32
    scores = plt.dot(queries, keys.T, allow_tf32=tf32) * scale  # [tile, block] f32
    scores = jnp.where(seen if seen.ndim > 1 else seen[None, :], scores, MASKED)
    new_peak = jnp.maximum(peak, jnp.max(scores, axis=-1))
    shrink = jnp.exp2(peak - new_peak)
    weight = jnp.exp2(scores - new_peak[:, None])
    acc = acc * shrink[:, None] + plt.dot(weight.astype(values.dtype), values, allow_tf32=tf32)
    return acc, new_peak, total * shrink + jnp.sum(weight, axis=-1)


def _mean(acc, peak, total) -> jax.Array:
    """acc [..., D] over its weights; 0 for a query that saw no key: masked keys weigh exp2(0) among themselves.

    Numbers that are none stay none: they leave no peak on a GPU, whose max passes over NaN, but a total that is NaN.
    """
    if acc.ndim > 1:
        peak, total = peak[:, None], total[:, None]
    return jnp.where(peak > MASKED, acc / jnp.maximum(total, 1e-30), jnp.where(total != total, total, 0.0))


def _merge_kernel(
    position_ref,  # [B]
    acc_ref,  # [B, K, S, G, D] whole, S a multiple of MERGE_SPLITS
    peak_ref,  # [B, K, S, G] whole
    total_ref,  # [B, K, S, G] whole
    out_ref,  # [1, 1, G, D] block
    *,
    split: int,
):
    """Join the splits of one (row, KV head) in ascending order; splits past the row's last key are masked."""
    row, head = pl.program_id(0), pl.program_id(1)
    group, dim = out_ref.shape[2:]
    splits = (position_ref[row] + split) // split
    lane = jnp.arange(MERGE_SPLITS, dtype=jnp.int32)

    for g in range(group):

        def step(i, carry, g=g):
            acc, peak, total = carry
            some = pl.ds(i * MERGE_SPLITS, MERGE_SPLITS)
            live = i * MERGE_SPLITS + lane < splits
            peaks = jnp.where(live, plt.load(peak_ref.at[row, head, some, jnp.int32(g)]), MASKED)
            totals = jnp.where(live, plt.load(total_ref.at[row, head, some, jnp.int32(g)]), 0.0)
            sums = jnp.where(live[:, None], plt.load(acc_ref.at[row, head, some, jnp.int32(g), :]), 0.0)
            new_peak = jnp.maximum(peak, jnp.max(peaks))
            shrink, weight = jnp.exp2(peak - new_peak), jnp.exp2(peaks - new_peak)
            acc = acc * shrink + jnp.sum(sums * weight[:, None], axis=0)
            return acc, new_peak, total * shrink + jnp.sum(totals * weight)

        start = jnp.zeros((dim,), jnp.float32), jnp.float32(MASKED), jnp.float32(0)
        acc, peak, total = lax.fori_loop(0, (splits + MERGE_SPLITS - 1) // MERGE_SPLITS, step, start)
        out_ref[0, 0, g, :] = _mean(acc, peak, total).astype(out_ref.dtype)


def _decode(q, k_pool, v_pool, table, positions, planes, exit_depth, history, interpret: bool) -> jax.Array:
    rows, _, heads, head_dim = q.shape
    _, _, kv_heads, page, _ = k_pool.shape
    group = heads // kv_heads
    q = _pad_head(q)
    dim = q.shape[-1]
    q = q.reshape(rows, kv_heads, group, dim)
    whole = pl.no_block_spec
    result = jax.ShapeDtypeStruct(q.shape, q.dtype)
    # few programs leave the chip idle while each walks its pages one by one: cut the keys into parts of fixed length.
    # The choice depends on shapes alone, so a server makes the same one for every request.
    split = max(page, SPLIT_POSITIONS) if rows * kv_heads < FULL_PROGRAMS and table.shape[1] > 1 else None
    splits = 1 if split is None else -(-table.shape[1] * page // split)
    padded = -(-splits // MERGE_SPLITS) * MERGE_SPLITS
    partial = [jax.ShapeDtypeStruct((rows, kv_heads, padded, group, *tail), jnp.float32) for tail in ((dim,), (), ())]
    out = pl.pallas_call(
        functools.partial(
            _decode_kernel,
            page=page,
            block=min(page, DECODE_BLOCK),
            split=split,
            history=history,
            scale=LOG2E / math.sqrt(head_dim),
        ),
        grid=(rows, kv_heads) if split is None else (rows, kv_heads, splits),
        in_specs=[whole] * 7,
        out_specs=whole if split is None else [whole] * 3,
        out_shape=result if split is None else partial,
        compiler_params=plt.CompilerParams(num_warps=VECTOR_WARPS if group == 1 else TILE_WARPS, num_stages=2),
        interpret=interpret,
        name="paged_attention_decode",
    )(planes, positions[:, 0], table, exit_depth, q, k_pool, v_pool)
    if split is not None:
        out = pl.pallas_call(
            functools.partial(_merge_kernel, split=split),
            grid=(rows, kv_heads),
            in_specs=[whole] * 4,
            out_specs=pl.BlockSpec((1, 1, group, dim), lambda b, h: (b, h, 0, 0)),
            out_shape=result,
            compiler_params=plt.CompilerParams(num_warps=1, num_stages=1),
            interpret=interpret,
            name="paged_attention_merge",
        )(positions[:, 0], *out)
    return out[..., :head_dim].reshape(rows, 1, heads, head_dim)


def _prefill_kernel(
    plane_ref,  # [B]
    table_ref,  # [B, MP]
    exit_ref,  # [P, page], read if there is a history
    position_ref,  # [1, tile] block
    q_ref,  # [1, tile, 1, D] block
    k_ref,  # [P, N, K, page, D] whole
    v_ref,  # same
    out_ref,  # [1, tile, 1, D] block
    *,
    page: int,
    group: int,
    history: str | None,
    scale: float,
):
    row, head = pl.program_id(0), pl.program_id(2) // group
    plane = plane_ref[row]
    position = position_ref[0, :]  # [tile]
    query = q_ref[0, :, 0, :]  # [tile, D]
    tile, dim = query.shape
    newest = jnp.max(position)

    def step(i, carry):
        page_id = table_ref[row, i]
        at, alive = _history(history, exit_ref, page_id, jnp.int32(0), page, plane)
        keys = load_positions(k_ref, page_id, at, head, jnp.int32(0), page)  # [page, D]
        key_position = i * page + jnp.arange(page, dtype=jnp.int32)
        seen, kept = key_position[None, :] <= position[:, None], key_position <= newest
        if alive is not None:
            seen, kept = seen & alive[None, :], kept & alive
        # what others left where no query looks may be NaN, and 0 times that is NaN
        values = load_positions(v_ref, page_id, at, head, jnp.int32(0), page, keep=kept)
        return _attend_tile(carry, query, keys, values, seen, scale=scale)

    pages = (newest + page) // page
    # padding queries meet only masked keys
    out_ref[0, :, 0, :] = _mean(*lax.fori_loop(0, pages, step, _nothing((tile,), dim))).astype(out_ref.dtype)


def _prefill(q, k_pool, v_pool, table, positions, planes, exit_depth, history, interpret: bool) -> jax.Array:
    rows, queries, heads, head_dim = q.shape
    _, _, kv_heads, page, _ = k_pool.shape
    tile = min(QUERY_TILE, max(SMALLEST_TILE, pl.next_power_of_2(queries)))
    pad = -queries % tile
    q = jnp.pad(_pad_head(q), ((0, 0), (0, pad), (0, 0), (0, 0)))
    dim = q.shape[-1]
    positions = jnp.pad(positions, ((0, 0), (0, pad)), constant_values=-1)
    block = pl.BlockSpec((1, tile, 1, dim), lambda b, t, h: (b, t, h, 0))
    whole = pl.no_block_spec
    out = pl.pallas_call(
        functools.partial(
            _prefill_kernel,
            page=page,
            group=heads // kv_heads,
            history=history,
            scale=LOG2E / math.sqrt(head_dim),
        ),
        grid=(rows, (queries + pad) // tile, heads),
        in_specs=[whole, whole, whole, pl.BlockSpec((1, tile), lambda b, t, h: (b, t)), block, whole, whole],
        out_specs=block,
        out_shape=jax.ShapeDtypeStruct(q.shape, q.dtype),
        compiler_params=plt.CompilerParams(num_warps=4, num_stages=3),
        interpret=interpret,
        name="paged_attention_prefill",
    )(planes, table, exit_depth, positions, q, k_pool, v_pool)
    return out[:, :queries, :, :head_dim]
