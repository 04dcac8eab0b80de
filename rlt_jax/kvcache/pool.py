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

    k: tuple[Any, ...]  # per layer [pages, planes, kv_heads, page_size, head_dim]
    v: tuple[Any, ...]  # same

    @property
    def pages(self) -> int:
        return self.k[0].shape[0]


def empty_pool(layout: KVLayout, pages: int, dtype: jnp.dtype) -> KVPool:
    """A pool of zeros.  Contents are never read before they are written; zeros only keep NaNs out of masked lanes."""
    shape = (pages, layout.planes, layout.kv_heads, layout.page_size, layout.head_dim)
    arrays = [tuple(jnp.zeros(shape, dtype) for _ in range(layout.num_layers)) for _ in range(2)]
    return KVPool(k=arrays[0], v=arrays[1])


def write_rows(
    pool: KVPool,
    layer: int,
    k: jax.Array,
    v: jax.Array,
    *,
    page: jax.Array,
    offset: jax.Array,
    planes_from: jax.Array,
    planes_to: jax.Array,
    implementation: str = "reference",
) -> KVPool:
    """Store one entry per row in planes [planes_from, planes_to) of its page slot.  DONATES pool.

    Args:
        k, v: [B, K, D], the rows' entries at the loop being run.
        page: [B] int32 page id; a row with page >= pages writes nothing (idle slots, padding).
        offset: [B] int32 in [0, page_size).
        planes_from, planes_to: [B] int32.  Writing through to the deeper planes finalises an exit in advance: a later
            loop overwrites them, so after an exit at e the planes >= e hold loop e - 1's entry, as LAST_EXITED asks.
    """
    new_k, new_v = kv_write(
        pool.k[layer], pool.v[layer], k, v, page, offset, planes_from, planes_to, implementation=implementation
    )
    return KVPool(
        k=(*pool.k[:layer], new_k, *pool.k[layer + 1 :]),
        v=(*pool.v[:layer], new_v, *pool.v[layer + 1 :]),
    )
