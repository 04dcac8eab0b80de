"""Order among requests: pure ranking, no side effects."""

from __future__ import annotations

from collections.abc import Sequence

from rlt_jax.request import Request


def admission_order(waiting: Sequence[Request]) -> Sequence[Request]:
    """Who is admitted first: arrival order.  The head is never overtaken, so nobody starves."""
    return waiting


def prefill_order(prefilling: Sequence[Request]) -> Sequence[Request]:
    """Whose chunk runs first where a round cannot take all: arrival order, so the oldest prompt finishes first."""
    return prefilling
