"""Geometry of the depth-aware KV cache: the one place that knows planes, pages and the order of axes.  No jax.

A page holds `page_size` positions of every layer at every depth.  A *plane* is one depth's copy inside it.  Layers
before and after the loop run once per token and have one plane; those of the core have `planes`:

    LAST_EXITED   planes = max_loops   loop d of a token lives in plane d; where a token left earlier, loop d sees its
                                       last loop: history at loop d is read at min(d, exit - 1)
    DROP          planes = max_loops   the same planes, but loop d does not see a token that left before it at all
    RING          planes = kv_planes   loop d lives in plane d mod planes and overwrites what was there; history at loop
                                       d is whatever that plane holds, or the deepest plane of a token that never
                                       reached it
    SHARED        planes = 1           every loop overwrites the same entry; history is always the last write

A token is seen by itself at the loop being run, whatever the layout.

Up to MAX_WRITE_THROUGH_PLANES planes, a loop also writes the planes that are deeper than its own: the next loop
overwrites them, so when a token leaves, its planes are final.  Beyond, a loop writes its own plane alone, and the pool
keeps the exit depth of every position, by which reading resolves the plane.  DROP needs the exit depth in any case.

Pool arrays, per layer:  k, v  [pages, planes, kv_heads, page_size, head_dim].  One (page, plane, head) is a contiguous
tile of page_size x head_dim, which is what a kernel fetches.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from rlt_jax.config import MAX_RING_PLANES, KVLayoutKind
from rlt_jax.errors import InvalidConfig

MAX_WRITE_THROUGH_PLANES = 8  # beyond this, writing every deeper plane at every loop costs more than resolving at read
EXIT_DEPTH_BYTES = 4  # of one position, for all layers together


def read_plane(depth: int, exit_depth: int) -> int:
    """Plane at which loop `depth` (zero-based) reads a token that exited after `exit_depth` loops (one-based).

    The only function that mixes the two bases.  Where planes are written through, no program needs it; where they are
    not, it is the rule `history="resolve"` of `paged_attention`.
    """
    return min(depth, exit_depth - 1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class KVLayout:
    """Static geometry, part of every compiled program's key."""

    kind: KVLayoutKind
    planes: int  # of a core layer
    page_size: int
    kv_heads: int
    head_dim: int
    num_layers: int  # layers with one array pair each: prelude, core, coda, in this order
    prelude_layers: int
    coda_layers: int
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
        prelude_layers: int = 0,
        coda_layers: int = 0,
        ring_planes: int | None = None,
    ) -> KVLayout:
        """The layout of one engine.

        Args:
            ring_planes: planes of a RING, 1 if not given; the other layouts have no choice.

        Raises:
            InvalidConfig: naming kv_planes, for a number that a RING cannot have.
        """
        if kind is KVLayoutKind.RING:
            planes = 1 if ring_planes is None else ring_planes
            limit = min(MAX_RING_PLANES, max_loops)
            if not 1 <= planes <= limit:
                raise InvalidConfig(f"kv_planes must be in [1, {limit}] with max_loops={max_loops}, found {planes}")
        else:
            planes = 1 if kind is KVLayoutKind.SHARED else max_loops
        return cls(
            kind=kind,
            planes=planes,
            page_size=page_size,
            kv_heads=kv_heads,
            head_dim=head_dim,
            num_layers=num_layers,
            prelude_layers=prelude_layers,
            coda_layers=coda_layers,
            dtype_bytes=dtype_bytes,
        )

    # -- layers -------------------------------------------------------------------------------------------------------

    def is_core(self, layer: int) -> bool:
        """Whether a layer is inside the loop, and so has planes."""
        return self.prelude_layers <= layer < self.num_layers - self.coda_layers

    def planes_of(self, layer: int) -> int:
        return self.planes if self.is_core(layer) else 1

    # -- planes of the core -------------------------------------------------------------------------------------------

    @property
    def prompt_is_sequential(self) -> bool:
        """SHARED prompts run position by position at full depth, as decode with forced tokens."""
        return self.kind is KVLayoutKind.SHARED

    @property
    def prompt_is_one_chunk(self) -> bool:
        """A RING prompt runs its loops together: a later chunk would find only what the last loops left of it."""
        return self.kind is KVLayoutKind.RING

    @property
    def history(self) -> str | None:
        """How reading uses the exit depths that the pool keeps; None: it keeps none, planes are final as written.

        "resolve": a position is read at `read_plane(depth, exit depth)`; "drop": it is seen only if it ran the loop.
        A position that is being computed has the exit depth `planes`, with which both rules show its own loop.
        """
        if self.kind is KVLayoutKind.DROP:
            return "drop"
        if self.kind is KVLayoutKind.LAST_EXITED and self.planes > MAX_WRITE_THROUGH_PLANES:
            return "resolve"
        return None

    def plane(self, depth: Any) -> Any:
        """Plane that loop `depth` (zero-based) reads, and the first that it writes; ints and arrays."""
        if self.kind is KVLayoutKind.SHARED:
            return depth * 0
        return depth % self.planes if self.kind is KVLayoutKind.RING else depth

    def writes_deeper(self, depth: Any) -> Any:
        """Whether loop `depth` writes the planes from its own to the last one, or its own alone.

        A bool where all loops do the same, else as `depth`, an int or array: in a RING, only the loops of the first
        round may, later ones would overwrite what the round before left in the deeper planes.
        """
        if self.kind is KVLayoutKind.RING:
            return depth < self.planes
        return self.history is None

    # -- sizes --------------------------------------------------------------------------------------------------------

    def pages_for(self, positions: int) -> int:
        """Pages that hold positions [0, positions)."""
        return -(-positions // self.page_size)

    @property
    def bytes_per_page(self) -> int:
        """K and V of one page over all layers and their planes, and its exit depths where they are kept."""
        return self.page_size * self.bytes_per_position

    @property
    def bytes_per_position(self) -> int:
        entry = 2 * self.kv_heads * self.head_dim * self.dtype_bytes  # K and V of one layer at one plane
        entries = sum(self.planes_of(layer) for layer in range(self.num_layers))
        return entry * entries + (EXIT_DEPTH_BYTES if self.history is not None else 0)
