"""Choosing an implementation by what it can do, never by a version number."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class Requirement:
    """What a server needs from its ops; each implementation answers whether it can serve it."""

    platform: str  # jax's name: "gpu", "cpu"
    dtype: str
    heads: int
    kv_heads: int
    head_dim: int
    page_size: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Choice:
    """The implementation of one op that runs, and why; shown once in the log and in GetServerInfo."""

    op: str
    chosen: str
    reason: str


def power_of_two(n: int) -> bool:
    return n > 0 and n & (n - 1) == 0


def choose(op: str, requested: str, triton_refusal: str | None) -> Choice:
    """Pick the implementation of `op`.

    Args:
        requested: "auto", "triton" or "reference".
        triton_refusal: why the Triton kernels cannot serve the configuration, or None.

    Raises:
        NotImplementedError: an explicit request that does not fit, naming the unmet requirement; never a silent switch.
    """
    if requested == "triton" and triton_refusal:
        raise NotImplementedError(f"kernels=triton cannot serve this configuration: {op}: {triton_refusal}")
    if requested != "auto":
        return Choice(op=op, chosen=requested, reason="requested")
    if triton_refusal is None:
        return Choice(op=op, chosen="triton", reason="fastest that fits the platform and shapes")
    return Choice(op=op, chosen="reference", reason=f"triton does not fit: {triton_refusal}")
