"""Process-wide JAX settings that must be made before or right after JAX starts."""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from pathlib import Path

import jax
import numpy as np

from rlt_jax.errors import InvalidConfig

_CLAIM_BYTES = 4 << 20  # put on a GPU to make XLA reserve its share; far above the allocator's grain


def set_memory_share(fraction: float) -> None:
    """Let XLA take this share of the device's memory.  Must run before the first use of a device.

    An operator's own XLA_PYTHON_CLIENT_MEM_FRACTION wins.
    """
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", f"{fraction:.3f}")


def claim_device() -> jax.Device:
    """The device that an engine uses; a GPU with its share of memory reserved, before a checkpoint is read.

    The reservation takes memory of the host as well, 1/32 of what it reserves: XLA's allocator keeps 8 bytes for every
    256 bytes of its pool.

    Raises:
        InvalidConfig: JAX cannot start on the platform it was told to use, or another process holds the GPU's memory.
    """
    device = _started_device()
    if device.platform == "gpu":
        try:
            jax.device_put(np.zeros(_CLAIM_BYTES, np.uint8), device).block_until_ready()
        except jax.errors.JaxRuntimeError as error:
            raise InvalidConfig(f"{device} cannot be used: {error}") from None
        preallocated = os.environ.get("XLA_PYTHON_CLIENT_PREALLOCATE", "true").lower() not in ("false", "0")
        check_reservation(str(device), device.memory_stats() or {}, preallocated=preallocated)
    return device


def check_reservation(name: str, stats: Mapping[str, int], *, preallocated: bool) -> None:
    """XLA takes what it can get if its share is not free, and says nothing; what is planned with the share then fails.

    Args:
        name: of the device.
        stats: its `memory_stats()`.
        preallocated: whether XLA reserves its share at once.

    Raises:
        InvalidConfig: the pool is smaller than the share.
    """
    share, pool = stats.get("bytes_limit"), stats.get("pool_bytes")
    if preallocated and share and pool is not None and pool < 0.99 * share:
        raise InvalidConfig(
            f"memory_fraction: {name} gave {pool / 1e9:.1f} GB of the {share / 1e9:.1f} GB asked for; another process "
            "holds the rest: end it, or ask for a smaller memory_fraction"
        )


def _started_device() -> jax.Device:
    try:
        return jax.devices()[0]
    except (RuntimeError, AssertionError) as error:  # the latter where a plugin is installed and finds no device
        asked = os.environ.get("JAX_PLATFORMS", "")
        raise InvalidConfig(f"JAX finds no device (JAX_PLATFORMS={asked!r}): {error or 'nothing answers'}") from None


def cache_directory() -> Path:
    """Where compiled programs are kept between starts: $RLT_JAX_CACHE_DIR, else under the user's cache folder."""
    explicit = os.environ.get("RLT_JAX_CACHE_DIR")
    if explicit:
        return Path(explicit)
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "rlt_jax" / "xla"


def enable_compilation_cache() -> Path:
    """Keep compiled programs on disk.  The folder is private: JAX trusts what it finds there.

    Raises:
        InvalidConfig: the folder cannot be made or used, or it exists and others may write to it.
    """
    folder = cache_directory()
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        mode = stat.S_IMODE(folder.stat().st_mode)
        if mode & 0o022:
            raise InvalidConfig(f"compilation cache {folder} has mode {mode:o}; others can write to it: chmod 700 it")
        folder.chmod(0o700)
    except OSError as error:
        raise InvalidConfig(
            f"compilation cache {folder} cannot be used ({error.strerror}); name another folder in RLT_JAX_CACHE_DIR"
        ) from None
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    return folder
