"""What a result depends on: machine, versions, a hash of the source, and the copy bandwidth of the same run."""

from __future__ import annotations

import datetime
import hashlib
import platform
import statistics
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

import rlt_jax

PACKAGE = Path(__file__).resolve().parents[1]
REFERENCE_COPY_TB_S = 4.28  # device copy of an H200, read + write; the floor uses at least this
VALID_COPY_TB_S = 4.1  # an H200 that copies slower than this is not fit to measure on


def source_hash() -> str:
    """SHA-256 over the package's Python files, names and contents in order: ties a result to the code that made it."""
    digest = hashlib.sha256()
    for path in sorted(PACKAGE.rglob("*.py")):
        digest.update(str(path.relative_to(PACKAGE)).encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def floor_tb_s(measured: float) -> float:
    """Bandwidth that a floor is computed with: what was measured, on an H200 never less than its reference."""
    return max(measured, REFERENCE_COPY_TB_S) if "H200" in jax.devices()[0].device_kind else measured


def environment() -> dict[str, Any]:
    device = jax.devices()[0]
    return {
        "platform": device.platform,
        "device_kind": device.device_kind,
        "device_count": jax.device_count(),
        "rlt_jax": rlt_jax.__version__,
        "jax": jax.__version__,
        "python": platform.python_version(),
        "utc": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "backend": device.client.platform_version.split("\n")[0],
    }


def copy_tb_s(gigabytes: float = 4.0, copies: int = 24, repeats: int = 5) -> float:
    """Median device copy bandwidth in TB/s, bytes read plus bytes written; random data.

    Copies are dispatched in bursts, so that the host's share of one dispatch does not count as copy time.
    """
    device = jax.devices()[0]
    elements = int(gigabytes * 1e9 / 4) if device.platform == "gpu" else 1 << 22
    source = jax.jit(lambda key: jax.random.bits(key, (elements,), jnp.uint32))(jax.random.key(0))
    copy = jax.jit(jnp.copy)
    times = []
    for _ in range(repeats + 1):
        began = time.perf_counter()
        for _ in range(copies):
            last = copy(source)
        last.block_until_ready()
        times.append((time.perf_counter() - began) / copies)
    return 2 * elements * 4 / statistics.median(times[1:]) / 1e12
