"""Paged attention as Pallas kernels lowered through Triton, for NVIDIA GPUs.

Two kernels, one contract (api.paged_attention):
  decode   one query per row: a program per (row, KV head) walks the row's pages with vector arithmetic.  The work is
           bound by the bytes of K and V, so tensor cores would not help a single query.
  prefill  many queries of one row: a program per (row, query tile, head) multiplies tiles on the tensor cores.
Both reduce keys page by page in ascending position, and stop at their own row's last key: a row's bits depend on no
neighbour and on no table width.
"""

from __future__ import annotations

import functools
import math
import warnings

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from rlt_jax.ops.paged_attention.reference import MASKED

LOG2E = math.log2(math.e)
QUERY_TILE = 64


def paged_attention_triton(
    q: jax.Array,
    k_pool: jax.Array,
    v_pool: jax.Array,
    table: jax.Array,
    positions: jax.Array,
    planes: jax.Array,
    *,
    interpret: bool = False,
) -> jax.Array:
    """See api.paged_attention."""
    with warnings.catch_warnings():
        # Pallas' Triton lowering announces its end; the Mosaic kernels that replace it are not faster yet
        warnings.filterwarnings("ignore", category=DeprecationWarning, message=".*[Tt]riton.*")
        if q.shape[1] == 1:
            return _decode(q, k_pool, v_pool, table, positions, planes, interpret)
        return _prefill(q, k_pool, v_pool, table, positions, planes, interpret)


def _decode_kernel(
    plane_ref,  # [B]
    position_ref,  # [B]
    table_ref,  # [B, MP]
    q_ref,  # [1, 1, G, D] block
    k_ref,  # [P, N, K, page, D] whole
    v_ref,  # same
    out_ref,  # [1, 1, G, D] block
    *,
    page: int,
    scale: float,
):
    row, head = pl.program_id(0), pl.program_id(1)
    plane, last = plane_ref[row], position_ref[row]
    query = q_ref[0, 0, :, :].astype(jnp.float32) * scale  # [G, D]
    group, dim = query.shape

    def step(i, carry):
        acc, peak, total = carry  # [G, D], [G], [G]
        page_id = table_ref[row, i]
        keys = plt.load(k_ref.at[page_id, plane, head, :, :]).astype(jnp.float32)  # [page, D]
        values = plt.load(v_ref.at[page_id, plane, head, :, :]).astype(jnp.float32)
        scores = jnp.sum(query[:, None, :] * keys[None, :, :], axis=-1)  # [G, page]
        seen = i * page + jnp.arange(page, dtype=jnp.int32) <= last
        scores = jnp.where(seen[None, :], scores, MASKED)
        new_peak = jnp.maximum(peak, jnp.max(scores, axis=-1))
        shrink = jnp.exp2(peak - new_peak)
        weight = jnp.exp2(scores - new_peak[:, None])
        acc = acc * shrink[:, None] + jnp.sum(weight[:, :, None] * values[None, :, :], axis=1)
        return acc, new_peak, total * shrink + jnp.sum(weight, axis=-1)

    start = jnp.zeros((group, dim), jnp.float32), jnp.full((group,), MASKED), jnp.zeros((group,), jnp.float32)
    acc, _, total = lax.fori_loop(0, (last + page) // page, step, start)
    out_ref[0, 0, :, :] = (acc / jnp.maximum(total, 1e-30)[:, None]).astype(out_ref.dtype)


def _decode(q, k_pool, v_pool, table, positions, planes, interpret: bool) -> jax.Array:
    rows, _, heads, dim = q.shape
    _, _, kv_heads, page, _ = k_pool.shape
    group = heads // kv_heads
    block = pl.BlockSpec((1, 1, group, dim), lambda b, h: (b, h, 0, 0))
    whole = pl.no_block_spec
    out = pl.pallas_call(
        functools.partial(_decode_kernel, page=page, scale=LOG2E / math.sqrt(dim)),
        grid=(rows, kv_heads),
        in_specs=[whole, whole, whole, block, whole, whole],
        out_specs=block,
        out_shape=jax.ShapeDtypeStruct((rows, kv_heads, group, dim), q.dtype),
        compiler_params=plt.CompilerParams(num_warps=4, num_stages=2),
        interpret=interpret,
        name="paged_attention_decode",
    )(planes, positions[:, 0], table, q.reshape(rows, kv_heads, group, dim), k_pool, v_pool)
    return out.reshape(q.shape)


def _prefill_kernel(
    plane_ref,  # [B]
    table_ref,  # [B, MP]
    position_ref,  # [1, tile] block
    q_ref,  # [1, tile, 1, D] block
    k_ref,  # [P, N, K, page, D] whole
    v_ref,  # same
    out_ref,  # [1, tile, 1, D] block
    *,
    page: int,
    group: int,
    scale: float,
):
    row, head = pl.program_id(0), pl.program_id(2) // group
    plane = plane_ref[row]
    position = position_ref[0, :]  # [tile]
    query = q_ref[0, :, 0, :]  # [tile, D]
    tile, dim = query.shape
    precise = query.dtype == jnp.float32

    def step(i, carry):
        acc, peak, total = carry
        page_id = table_ref[row, i]
        keys = plt.load(k_ref.at[page_id, plane, head, :, :])  # [page, D]
        values = plt.load(v_ref.at[page_id, plane, head, :, :])
        scores = plt.dot(query, keys.T, allow_tf32=not precise) * scale  # [tile, page] f32
        key_position = i * page + jnp.arange(page, dtype=jnp.int32)
        scores = jnp.where(key_position[None, :] <= position[:, None], scores, MASKED)
        new_peak = jnp.maximum(peak, jnp.max(scores, axis=-1))
        shrink = jnp.exp2(peak - new_peak)
        weight = jnp.exp2(scores - new_peak[:, None])
        acc = acc * shrink[:, None] + plt.dot(weight.astype(values.dtype), values, allow_tf32=not precise)
        return acc, new_peak, total * shrink + jnp.sum(weight, axis=-1)

    start = jnp.zeros((tile, dim), jnp.float32), jnp.full((tile,), MASKED), jnp.zeros((tile,), jnp.float32)
    pages = (jnp.max(position) + page) // page
    acc, _, total = lax.fori_loop(0, pages, step, start)
    alive = position >= 0  # a padding query met only masked keys: its weights are exp2(0)
    out = jnp.where(alive[:, None], acc / jnp.maximum(total, 1e-30)[:, None], 0.0)
    out_ref[0, :, 0, :] = out.astype(out_ref.dtype)


def _prefill(q, k_pool, v_pool, table, positions, planes, interpret: bool) -> jax.Array:
    rows, queries, heads, dim = q.shape
    _, _, kv_heads, page, _ = k_pool.shape
    tile = min(QUERY_TILE, max(16, pl.next_power_of_2(queries)))
    pad = -queries % tile
    q = jnp.pad(q, ((0, 0), (0, pad), (0, 0), (0, 0)))
    positions = jnp.pad(positions, ((0, 0), (0, pad)), constant_values=-1)
    block = pl.BlockSpec((1, tile, 1, dim), lambda b, t, h: (b, t, h, 0))
    whole = pl.no_block_spec
    out = pl.pallas_call(
        functools.partial(_prefill_kernel, page=page, group=heads // kv_heads, scale=LOG2E / math.sqrt(dim)),
        grid=(rows, (queries + pad) // tile, heads),
        in_specs=[whole, whole, pl.BlockSpec((1, tile), lambda b, t, h: (b, t)), block, whole, whole],
        out_specs=block,
        out_shape=jax.ShapeDtypeStruct(q.shape, q.dtype),
        compiler_params=plt.CompilerParams(num_warps=4, num_stages=3),
        interpret=interpret,
        name="paged_attention_prefill",
    )(planes, table, positions, q, k_pool, v_pool)
    return out[:, :queries]
