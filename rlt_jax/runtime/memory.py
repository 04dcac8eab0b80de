"""How many KV pages a server gets, and why.  Pure arithmetic over numbers that the runner reads from the device."""

from __future__ import annotations

import dataclasses
from typing import Any

from rlt_jax.errors import InvalidConfig
from rlt_jax.kvcache.layout import KVLayout

SLACK_BYTES = 256 << 20  # for what the programs' own figures leave out: allocator rounding, library workspaces
MAX_ARRAY_ELEMENTS = (1 << 31) - 1  # kernels address one layer's pool with 32-bit offsets


@dataclasses.dataclass(frozen=True, kw_only=True)
class MemoryPlan:
    """Where the device's memory goes; stated in GetServerInfo and in the log."""

    source: str  # "kv_pages" (asked for), "device_memory" (what the programs leave free), "host_default" (CPU)
    pages: int
    bytes_per_page: int
    useful_pages: int  # slots at full context: more would never be used
    parameter_bytes: int
    program_temp_bytes: int  # largest scratch of any compiled program; 0 where it is not known yet
    device_limit_bytes: int | None  # what the process may use on the device

    @property
    def kv_bytes(self) -> int:
        return self.pages * self.bytes_per_page

    def as_dict(self) -> dict[str, Any]:
        return {**dataclasses.asdict(self), "kv_bytes": self.kv_bytes}


def plan_memory(
    layout: KVLayout,
    *,
    requested_pages: int | None,
    slots: int,
    max_context: int,
    parameter_bytes: int,
    program_temp_bytes: int,
    device_limit_bytes: int | None,
) -> MemoryPlan:
    """Choose the number of pages: an explicit request, else what the device has left, else every slot at full context.

    Raises:
        InvalidConfig: not even one slot at full context fits, or a layer's array would be too large to address.
    """
    per_slot = layout.pages_for(max_context)
    useful = slots * per_slot
    if requested_pages is not None:
        source, pages = "kv_pages", requested_pages
    elif device_limit_bytes is not None:
        left = device_limit_bytes - parameter_bytes - program_temp_bytes - SLACK_BYTES
        source, pages = "device_memory", min(useful, left // layout.bytes_per_page)
        if pages < per_slot:
            raise InvalidConfig(
                f"one slot at max_context={max_context} needs {per_slot * layout.bytes_per_page:,} bytes of KV; "
                f"{max(left, 0):,} are left of {device_limit_bytes:,} after parameters ({parameter_bytes:,}) and "
                f"program scratch ({program_temp_bytes:,}): lower max_context"
            )
    else:
        source, pages = "host_default", useful
    page_elements = layout.planes * layout.kv_heads * layout.page_size * layout.head_dim
    if pages * page_elements > MAX_ARRAY_ELEMENTS:
        if source == "kv_pages":
            raise InvalidConfig(
                f"kv_pages={pages} exceeds {MAX_ARRAY_ELEMENTS // page_elements}, the most one layer can address"
            )
        pages = MAX_ARRAY_ELEMENTS // page_elements
    return MemoryPlan(
        source=source,
        pages=pages,
        bytes_per_page=layout.bytes_per_page,
        useful_pages=useful,
        parameter_bytes=parameter_bytes,
        program_temp_bytes=program_temp_bytes,
        device_limit_bytes=device_limit_bytes,
    )
