"""How many KV pages a server gets, and why.  Pure arithmetic over numbers that the runner reads from the device."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from rlt_jax.errors import InvalidConfig
from rlt_jax.kvcache.layout import KVLayout

SLACK_BYTES = 256 << 20  # for what the programs' own figures leave out: allocator rounding, library workspaces
MAX_ARRAY_ELEMENTS = (1 << 31) - 1  # kernels address one layer's pool with 32-bit offsets


def host_available_bytes() -> int | None:
    """Memory that the system can give without swapping, or None where it does not say (not Linux)."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:")), None)


@dataclasses.dataclass(frozen=True, kw_only=True)
class MemoryPlan:
    """Where the device's memory goes; stated in GetServerInfo and in the log."""

    source: str  # "kv_pages" (asked for), "device_memory" (what the programs leave free), "host_default" (CPU)
    pages: int
    bytes_per_page: int
    useful_pages: int  # slots at full context: more would never be used
    parameter_bytes: int
    used_bytes: int  # in use before the pool is made: the parameters, and whatever else this process keeps there
    reserved_bytes: int  # set aside for program scratch and SLACK_BYTES
    device_limit_bytes: int | None  # what the process may use on the device; None where it is not known (CPU)
    program_temp_bytes: int = 0  # largest scratch of any compiled program; 0 until they are compiled

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
    used_bytes: int,
    scratch_bytes: int,
    device_limit_bytes: int | None,
    host_available_bytes: int | None = None,
) -> MemoryPlan:
    """Choose the number of pages: an explicit request, else what the device has left, else every slot at full context.

    Args:
        used_bytes: in use on the device now, parameters included.
        scratch_bytes: to leave free for the programs' temporary buffers.
        device_limit_bytes: what the process may use on the device; None on a CPU.
        host_available_bytes: on a CPU, memory that the system can still give; None where it does not say.

    Raises:
        InvalidConfig: the pages asked for, or one slot at full context, do not fit, or a layer's array would be too
            large to address.
    """
    per_slot = layout.pages_for(max_context)
    useful = slots * per_slot
    addressable = MAX_ARRAY_ELEMENTS // (layout.planes * layout.kv_heads * layout.page_size * layout.head_dim)
    if requested_pages is None and per_slot > addressable:
        raise InvalidConfig(
            f"one slot at max_context={max_context} needs {per_slot} KV pages; {addressable} are the most that one "
            f"layer of {layout.planes} planes can address: lower max_context, or the depth cap max_loops"
        )
    reserved, left = 0, None
    if device_limit_bytes is not None:
        reserved = scratch_bytes + SLACK_BYTES
        left = max(0, device_limit_bytes - used_bytes - reserved)

    def must_fit_host(pages: int) -> None:
        if host_available_bytes is not None and pages * layout.bytes_per_page > host_available_bytes:
            raise InvalidConfig(
                f"slots={slots} at max_context={max_context} need {pages * layout.bytes_per_page:,} bytes of KV; this "
                f"machine has {host_available_bytes:,} available: lower slots, max_context or kv_pages"
            )

    def must_fit(what: str, pages: int, remedy: str) -> None:
        if left is not None and pages * layout.bytes_per_page > left:
            raise InvalidConfig(
                f"{what} needs {pages * layout.bytes_per_page:,} bytes of KV; {left:,} are left of "
                f"{device_limit_bytes:,} after what is in use ({used_bytes:,}, parameters included) and room for "
                f"the programs ({reserved:,}): lower {remedy}"
            )

    if requested_pages is not None:
        source, pages = "kv_pages", requested_pages
        must_fit(f"kv_pages={pages}", pages, "kv_pages")
        if pages > addressable:
            raise InvalidConfig(f"kv_pages={pages} exceeds {addressable}, the most one layer can address")
    elif left is not None:
        must_fit(f"one slot at max_context={max_context}", per_slot, "max_context")
        source, pages = "device_memory", min(useful, left // layout.bytes_per_page, addressable)
    else:
        source, pages = "host_default", min(useful, addressable)
    if device_limit_bytes is None:
        must_fit_host(pages)
    return MemoryPlan(
        source=source,
        pages=pages,
        bytes_per_page=layout.bytes_per_page,
        useful_pages=useful,
        parameter_bytes=parameter_bytes,
        used_bytes=used_bytes,
        reserved_bytes=reserved,
        device_limit_bytes=device_limit_bytes,
    )
