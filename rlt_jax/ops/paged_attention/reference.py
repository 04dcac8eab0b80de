"""Paged attention in plain jnp: the specification, the oracle of all tests, and what runs on a CPU."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jax import lax

MASKED = -1e30  # below every real score, and finite: exp(MASKED - m) is exactly 0
BLOCK_POSITIONS = 128  # keys are reduced in blocks of this length, whatever the table width or the longest row


def paged_attention_reference(
    q: jax.Array,
    k_pool: jax.Array,
    v_pool: jax.Array,
    table: jax.Array,
    positions: jax.Array,
    planes: jax.Array,
    exit_depth: jax.Array | None = None,
    history: str | None = None,
) -> jax.Array:
    """See api.paged_attention.  Online softmax in float32 over blocks in ascending position.

    A block past a row's last key contributes exactly nothing (factor 1, sum + 0), so a row's bits do not depend on how
    far its longest neighbour makes the loop run.
    """
    batch, queries, heads, dim = q.shape
    _, _, kv_heads, page_size, _ = k_pool.shape
    group = heads // kv_heads
    pages_per_block = max(1, BLOCK_POSITIONS // page_size)
    block = pages_per_block * page_size
    table = jnp.pad(table, ((0, 0), (0, -table.shape[1] % pages_per_block)))
    scaled = q.astype(jnp.float32).reshape(batch, queries, kv_heads, group, dim) * (1.0 / math.sqrt(dim))

    def step(i: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        acc, peak, total = carry
        pages = lax.dynamic_slice_in_dim(table, i * pages_per_block, pages_per_block, axis=1)

        exits = None if exit_depth is None else exit_depth[pages]  # [B, pages, page]

        def fetch(pool: jax.Array) -> jax.Array:  # [B, K, block, D]
            if exits is not None and history == "resolve":
                plane = jnp.minimum(planes[:, None, None], jnp.maximum(exits - 1, 0))  # [B, pages, page]
                offset = jnp.arange(page_size, dtype=jnp.int32)
                rows = pool[pages[:, :, None], plane, :, offset]  # [B, pages, page, K, D]
                return rows.reshape(batch, block, kv_heads, dim).swapaxes(1, 2).astype(jnp.float32)
            tiles = pool[pages, planes[:, None]]  # [B, pages, K, page, D]
            return tiles.swapaxes(1, 2).reshape(batch, kv_heads, block, dim).astype(jnp.float32)

        scores = jnp.einsum("btkgd,bksd->btkgs", scaled, fetch(k_pool), precision=lax.Precision.HIGHEST)
        key_position = i * block + jnp.arange(block, dtype=jnp.int32)
        seen = key_position[None, None, :] <= positions[:, :, None]  # [B, T, block]
        if exits is not None and history == "drop":
            seen &= (exits.reshape(batch, block) > planes[:, None])[:, None, :]
        scores = jnp.where(seen[:, :, None, None, :], scores, MASKED)
        new_peak = jnp.maximum(peak, scores.max(-1))
        weight = jnp.where(seen[:, :, None, None, :], jnp.exp(scores - new_peak[..., None]), 0.0)
        shrink = jnp.exp(peak - new_peak)
        # a masked key weighs 0, but what others left there may be NaN or infinite, and 0 times that is NaN
        values = jnp.where(seen.any(1)[:, None, :, None], fetch(v_pool), 0.0)
        value = jnp.einsum("btkgs,bksd->btkgd", weight, values, precision=lax.Precision.HIGHEST)
        return acc * shrink[..., None] + value, new_peak, total * shrink + weight.sum(-1)

    rows = (batch, queries, kv_heads, group)
    start = (
        jnp.zeros((*rows, dim), jnp.float32),
        jnp.full(rows, MASKED, jnp.float32),
        jnp.zeros(rows, jnp.float32),
    )
    blocks = (jnp.max(positions) + block) // block  # positions are -1 where there is nothing to compute
    acc, _, total = lax.fori_loop(0, blocks.astype(jnp.int32), step, start)
    out = acc / jnp.maximum(total, 1e-30)[..., None]
    return out.reshape(batch, queries, heads, dim).astype(q.dtype)
