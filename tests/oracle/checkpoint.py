"""A safetensors reader of twenty lines: the oracle must not inherit a bug of the package's loader."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np


def read_tensors(directory: Path) -> dict[str, np.ndarray]:
    """Every tensor of the directory's *.safetensors files as float32 or float64 arrays (bfloat16 is widened)."""
    tensors: dict[str, np.ndarray] = {}
    for file in sorted(directory.glob("*.safetensors")):
        raw = file.read_bytes()
        header_size = int.from_bytes(raw[:8], "little")
        header = json.loads(raw[8 : 8 + header_size])
        header.pop("__metadata__", None)
        for name, entry in header.items():
            begin, end = (8 + header_size + offset for offset in entry["data_offsets"])
            tensors[name] = _decode(raw[begin:end], entry["dtype"]).reshape(entry["shape"])
    return tensors


def _decode(data: bytes, dtype: str) -> np.ndarray:
    if dtype == "BF16":  # the upper half of a float32
        return (np.frombuffer(data, "<u2").astype(np.uint32) << 16).view(np.float32)
    return np.frombuffer(data, {"F32": "<f4", "F16": "<f2", "F64": "<f8"}[dtype])
