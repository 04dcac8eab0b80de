"""Storing one KV entry per row in the depth-aware pool: the public function, and the choice of implementation."""

from __future__ import annotations

from jaxtyping import Array, Float, Int

from rlt_jax.ops.kv_write.reference import kv_write_reference
from rlt_jax.ops.selection import Choice, Requirement, choose, power_of_two


def kv_write(
    k_pool: Float[Array, "P N K page D"],
    v_pool: Float[Array, "P N K page D"],
    k: Float[Array, "B K D"],
    v: Float[Array, "B K D"],
    page: Int[Array, " B"],
    offset: Int[Array, " B"],
    planes_from: Int[Array, " B"],
    planes_to: Int[Array, " B"] | None,
    *,
    implementation: str = "reference",
) -> tuple[Float[Array, "P N K page D"], Float[Array, "P N K page D"]]:
    """Store row b's entry at pool[page[b], p, :, offset[b]] for every plane p in [planes_from[b], planes_to[b]).

    planes_to None means the one plane planes_from[b], which costs no more in a pool of many planes.

    A row whose page is >= P writes nothing (idle slots, padding).  No two live rows may share (page, offset).
    Updates in place where the caller donated the pools.
    """
    args = (k_pool, v_pool, k, v, page, offset, planes_from)
    if implementation == "reference":
        return kv_write_reference(*args, planes_to)
    if implementation == "triton":
        from rlt_jax.ops.kv_write.triton import kv_write_triton

        return kv_write_triton(*args, planes_from + 1 if planes_to is None else planes_to)
    raise ValueError(f"{implementation=} is not one of reference, triton")


def triton_refusal(need: Requirement) -> str | None:
    """Why the Triton kernel cannot serve this, or None."""
    if need.platform != "gpu":
        return f"platform {need.platform} is not gpu"
    if not power_of_two(need.head_dim):
        return f"head_dim {need.head_dim} is not a power of two"
    return None


def choose_kv_write(requested: str, need: Requirement) -> Choice:
    """See selection.choose."""
    return choose("kv_write", requested, triton_refusal(need))
