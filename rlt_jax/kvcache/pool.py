"""Device arrays of the KV cache, and the pure function that writes into them.  Knows pages and planes, no requests."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from rlt_jax.kvcache.layout import KVLayout
from rlt_jax.ops.kv_write.api import kv_write


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class KVPool:
    """K and V of every layer.  Donated through every program: after a call the old object is dead.

    One array per layer: XLA then updates each in place inside `while` and `cond`.
    """

    k: tuple[Any, ...]  # per layer [pages, planes of the layer, kv_heads, page_size, head_dim]
    v: tuple[Any, ...]  # same
    exit_depth: Any = None  # [pages, page_size] i32, of every position; None where the layout does not need it

    @property
    def pages(self) -> int:
        return self.k[0].shape[0]


def empty_pool(layout: KVLayout, pages: int, dtype: jnp.dtype) -> KVPool:
    """A pool of zeros.  Contents are never read before they are written; zeros only keep NaNs out of masked lanes."""

    def layer(number: int) -> jax.Array:
        planes = layout.planes_of(number)
        return jnp.zeros((pages, planes, layout.kv_heads, layout.page_size, layout.head_dim), dtype)

    k, v = (tuple(layer(number) for number in range(layout.num_layers)) for _ in range(2))
    exit_depth = None if layout.history is None else jnp.zeros((pages, layout.page_size), jnp.int32)
    return KVPool(k=k, v=v, exit_depth=exit_depth)


def write_rows(
    pool: KVPool,
    layer: int,
    k: jax.Array,
    v: jax.Array,
    *,
    page: jax.Array,
    offset: jax.Array,
    planes_from: jax.Array,
    planes_to: jax.Array | None,
    implementation: str = "reference",
) -> KVPool:
    """Store one entry per row in planes [planes_from, planes_to) of its page slot.  DONATES pool.

    Args:
        k, v: [B, K, D], the rows' entries at the loop being run.
        page: [B] int32 page id; a row with page >= pages writes nothing (idle slots, padding).
        offset: [B] int32 in [0, page_size).
        planes_from, planes_to: [B] int32.  Writing through to the deeper planes finalises an exit in advance: a later
            loop overwrites them, so after an exit at e the planes >= e hold loop e - 1's entry, as LAST_EXITED asks.
            planes_to None writes planes_from alone.
    """
    new_k, new_v = kv_write(
        pool.k[layer], pool.v[layer], k, v, page, offset, planes_from, planes_to, implementation=implementation
    )
    return dataclasses.replace(
        pool,
        k=(*pool.k[:layer], new_k, *pool.k[layer + 1 :]),
        v=(*pool.v[:layer], new_v, *pool.v[layer + 1 :]),
    )


def mark_exits(pool: KVPool, exit_depth: jax.Array | int, *, page: jax.Array, offset: jax.Array) -> KVPool:
    """Note the exit depth of one position per row, one for all or [B] int32; `layout.planes` is that of a position
    being computed (see `KVLayout.history`).  DONATES pool.

    A row with page >= pages notes nothing; a pool that keeps no exit depths stays as it is.
    """
    if pool.exit_depth is None:
        return pool
    return dataclasses.replace(pool, exit_depth=pool.exit_depth.at[page, offset].set(exit_depth, mode="drop"))
