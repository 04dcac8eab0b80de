"""Attention over a paged, depth-aware KV pool: the public function, and the choice of implementation."""

from __future__ import annotations

from jaxtyping import Array, Float, Int

from rlt_jax.ops.paged_attention.reference import paged_attention_reference
from rlt_jax.ops.selection import Choice, Requirement, choose, power_of_two

MAX_GROUP = 32  # query heads per KV head of the Triton kernels: twice the smallest tile, what was run on a GPU


def paged_attention(
    q: Float[Array, "B T H D"],
    k_pool: Float[Array, "P N K page D"],
    v_pool: Float[Array, "P N K page D"],
    table: Int[Array, "B MP"],
    positions: Int[Array, "B T"],
    planes: Int[Array, " B"],
    *,
    exit_depth: Int[Array, "P page"] | None = None,
    history: str | None = None,
    implementation: str = "reference",
) -> Float[Array, "B T H D"]:
    """Causal attention of T query positions per row over the row's pages, at one plane per row.

    Rows stand at different depths: each reads its own plane.  Query t of row b sees keys at positions
    0 .. positions[b, t] inclusive, found at pool[table[b, p // page], planes[b], :, p % page].  The keys of the query
    positions themselves must already be in the pool.  positions = -1 marks a query that sees nothing: its output is 0.

    With `history`, `exit_depth` (one-based, of every position of the pool) changes what row b sees of a key whose entry
    is e: "resolve" finds it at plane min(planes[b], e - 1), "drop" sees it only if e > planes[b].  A query that sees no
    key at all has the output 0.

    Args:
        table: page ids; entries past a row's last page must be valid ids (0), never read for their content.
        implementation: "reference" or "triton"; `choose_paged_attention` tells which one fits.

    Returns:
        Same shape and dtype as q; softmax in float32.
    """
    if history not in (None, "resolve", "drop") or (history is None) != (exit_depth is None):
        raise ValueError(f"{history=} is not one of None, resolve, drop, or exit_depth does not go with it")
    if implementation == "reference":
        return paged_attention_reference(q, k_pool, v_pool, table, positions, planes, exit_depth, history)
    if implementation == "triton":
        from rlt_jax.ops.paged_attention.triton import paged_attention_triton

        return paged_attention_triton(q, k_pool, v_pool, table, positions, planes, exit_depth, history)
    raise ValueError(f"{implementation=} is not one of reference, triton")


def triton_refusal(need: Requirement) -> str | None:
    """Why the Triton kernels cannot serve this, or None.  Their tiles are held in registers."""
    group = need.heads // need.kv_heads
    checks = [
        (need.platform == "gpu", f"platform {need.platform} is not gpu"),
        (16 <= need.head_dim <= 256, f"head_dim {need.head_dim} is not in [16, 256]"),
        (power_of_two(need.page_size) and need.page_size >= 16, f"page_size {need.page_size} not 2^n >= 16"),
        (group <= MAX_GROUP, f"{group} query heads per KV head are more than {MAX_GROUP}"),
    ]
    return next((reason for ok, reason in checks if not ok), None)


def choose_paged_attention(requested: str, need: Requirement) -> Choice:
    """See selection.choose."""
    return choose("paged_attention", requested, triton_refusal(need))
