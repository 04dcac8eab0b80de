"""Private copies of the fixture checkpoint, to be broken."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from safetensors.numpy import load_file, save_file

from tests.models.checkpoint_files import (
    FIXTURE,
    write_json,
)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A private copy of the fixture's checkpoint, to be broken."""
    target = tmp_path / "model"
    target.mkdir()
    for name in ("config.json", "model.safetensors"):
        shutil.copyfile(FIXTURE / name, target / name)
    return target


@pytest.fixture
def sharded(directory: Path) -> Path:
    """The same in three shards, written by another writer (safetensors itself)."""
    tensors = load_file(directory / "model.safetensors")
    names = sorted(tensors)
    weight_map = {}
    for i in range(3):
        shard = f"model-{i + 1:05d}-of-00003.safetensors"
        part = {n: tensors[n] for n in names[i::3]}
        save_file(part, directory / shard, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, shard)
    (directory / "model.safetensors").unlink()
    write_json(directory / "model.safetensors.index.json", {"metadata": {}, "weight_map": weight_map})
    return directory
