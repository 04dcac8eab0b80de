"""Storing KV entries by scatter, in plain jnp: the specification, and what runs on a CPU."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def kv_write_reference(
    k_pool: jax.Array,
    v_pool: jax.Array,
    k: jax.Array,
    v: jax.Array,
    page: jax.Array,
    offset: jax.Array,
    planes_from: jax.Array,
    planes_to: jax.Array | None,
) -> tuple[jax.Array, jax.Array]:
    """See api.kv_write.  Unwanted (row, plane) pairs get an index out of range, which the scatter drops."""
    planes = k_pool.shape[1]
    if planes_to is None:

        def put_one(pool: jax.Array, rows: jax.Array) -> jax.Array:
            return pool.at[page, planes_from, :, offset, :].set(rows.astype(pool.dtype), mode="drop")

        return put_one(k_pool, k), put_one(v_pool, v)
    plane = jnp.arange(planes, dtype=jnp.int32)[None, :]
    wanted = (plane >= planes_from[:, None]) & (plane < planes_to[:, None])
    plane = jnp.where(wanted, plane, planes)

    def put(pool: jax.Array, rows: jax.Array) -> jax.Array:
        rows = jnp.broadcast_to(rows[:, None], (rows.shape[0], planes, *rows.shape[1:])).astype(pool.dtype)
        return pool.at[page[:, None], plane, :, offset[:, None], :].set(rows, mode="drop")

    return put(k_pool, k), put(v_pool, v)
