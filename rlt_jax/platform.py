"""Process-wide JAX settings that must be made before or right after JAX starts."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import jax
import numpy as np

from rlt_jax.errors import InvalidConfig


def reserve_memory(fraction: float) -> None:
    """Let XLA take this share of the device's memory.  Must run before the first use of a device.

    An operator's own XLA_PYTHON_CLIENT_MEM_FRACTION wins.
    """
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", f"{fraction:.3f}")


def first_device() -> jax.Device:
    """The device that an engine uses, its memory reserved: a full one is found before a checkpoint is read.

    On a GPU the reservation also takes memory of the host, 1/32 of what it reserves: XLA's allocator keeps 8 bytes for
    every 256 bytes of its pool.

    Raises:
        InvalidConfig: JAX cannot start on the platform it was told to use, or the device has no memory left.
    """
    device = _started_device()
    try:
        jax.device_put(np.zeros((), np.int32), device).block_until_ready()
    except jax.errors.JaxRuntimeError as error:
        fraction = os.environ.get("XLA_PYTHON_CLIENT_MEM_FRACTION", "")
        raise InvalidConfig(f"{device} has no memory to give (asked for its share {fraction}): {error}") from None
    return device


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
