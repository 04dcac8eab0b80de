"""Geometry of the depth-aware KV cache: the one place that knows planes, pages and the order of axes.  No jax.

A page holds `page_size` positions of every layer at every depth.  A *plane* is one depth's copy inside it:

    LAST_EXITED   planes = max_loops   loop d of a token lives in plane d; planes deeper than its exit hold a copy of
                                       the exit loop, so history at loop d is read at min(d, exit - 1)
    SHARED        planes = 1           every loop overwrites the same entry; history is always the last write

Pool arrays, per layer:  k, v  [pages, planes, kv_heads, page_size, head_dim].  One (page, plane, head) is a contiguous
tile of page_size x head_dim, which is what a kernel fetches.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from rlt_jax.config import KVLayoutKind

MAX_WRITE_THROUGH_PLANES = 8  # beyond this, writing every deeper plane at every loop costs more than resolving at read


def read_plane(depth: int, exit_depth: int) -> int:
    """Plane at which loop `depth` (zero-based) reads a token that exited after `exit_depth` loops (one-based).

    The only function that mixes the two bases.
    """
    return min(depth, exit_depth - 1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class KVLayout:
    """Static geometry, part of every compiled program's key."""

    kind: KVLayoutKind
    planes: int
    page_size: int
    kv_heads: int
    head_dim: int
    num_layers: int  # layers with one array pair each
    dtype_bytes: int

    @classmethod
    def create(
        cls,
        kind: KVLayoutKind,
        *,
        max_loops: int,
        page_size: int,
        kv_heads: int,
        head_dim: int,
        num_layers: int,
        dtype_bytes: int,
    ) -> KVLayout:
        planes = max_loops if kind is KVLayoutKind.LAST_EXITED else 1
        if planes > MAX_WRITE_THROUGH_PLANES:
            raise NotImplementedError(
                f"{planes} KV planes: finalising by write-through is built for at most {MAX_WRITE_THROUGH_PLANES}"
            )
        return cls(
            kind=kind,
            planes=planes,
            page_size=page_size,
            kv_heads=kv_heads,
            head_dim=head_dim,
            num_layers=num_layers,
            dtype_bytes=dtype_bytes,
        )

    @property
    def prompt_is_sequential(self) -> bool:
        """SHARED prompts run position by position at full depth, as decode with forced tokens."""
        return self.kind is KVLayoutKind.SHARED

    def plane(self, depth: Any) -> Any:
        """Plane that loop `depth` (zero-based) writes and reads; ints and arrays."""
        return depth if self.kind is KVLayoutKind.LAST_EXITED else depth * 0

    def pages_for(self, positions: int) -> int:
        """Pages that hold positions [0, positions)."""
        return -(-positions // self.page_size)

    @property
    def bytes_per_page(self) -> int:
        """K and V of one page over all layers and planes."""
        return 2 * self.num_layers * self.planes * self.kv_heads * self.page_size * self.head_dim * self.dtype_bytes

    @property
    def bytes_per_position(self) -> int:
        return self.bytes_per_page // self.page_size
