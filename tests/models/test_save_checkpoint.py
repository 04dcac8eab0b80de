"""Writing model directories.

PROTECTS: what is written reads back bit for bit, also by other readers, and nothing of an older checkpoint stays
beside it.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from rlt_jax.errors import CheckpointError
from rlt_jax.models.checkpoint import load_checkpoint, save_checkpoint
from rlt_jax.models.registry import model_from_config
from rlt_jax.models.spec import TensorSource
from tests.models.checkpoint_files import (
    FIXTURE,
    VOCAB,
    tokenizer_json,
)


def random_params(model: Any, dtype: Any, seed: int = 0) -> Any:
    """Random bits, so that a round trip that rounds, reorders or swaps anything shows."""
    rng = np.random.default_rng(seed)

    def leaf(source: TensorSource) -> jax.Array:
        return jnp.asarray(rng.standard_normal(source.shape, np.float32)).astype(dtype)

    return jax.tree.map(leaf, model.sources())


def same_bits(a: Any, b: Any) -> bool:
    return all(
        x.dtype == y.dtype and np.array_equal(np.asarray(x).view(np.uint8), np.asarray(y).view(np.uint8))
        for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    )


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("shard_bytes", [5_000_000_000, 60_000])
def test_round_trip_is_bit_exact(tmp_path: Path, dtype: str, shard_bytes: int) -> None:
    config = json.loads((FIXTURE / "config.json").read_text())
    model = model_from_config(config)
    params = random_params(model, dtype)
    generation = {"do_sample": True, "temperature": 0.5}
    save_checkpoint(
        tmp_path / "out",
        model,
        params,
        tokenizer_json=tokenizer_json(),
        config=config,
        generation_config=generation,
        shard_bytes=shard_bytes,
    )
    files = sorted(p.name for p in (tmp_path / "out").glob("*.safetensors"))
    assert (files == ["model.safetensors"]) == (shard_bytes > 1_000_000)
    loaded = load_checkpoint(tmp_path / "out", dtype=dtype)
    assert same_bits(loaded.params, params)
    assert loaded.generation.temperature == 0.5
    assert loaded.tokenizer is not None
    assert loaded.model == model
    if shard_bytes < 1_000_000:
        sizes = [sum(t.nbytes for t in load_file(tmp_path / "out" / f).values()) for f in files]
        assert max(sizes) <= max(shard_bytes, VOCAB * 64 * params.head.dtype.itemsize)


def test_saved_files_are_read_by_safetensors_with_the_published_names(tmp_path: Path) -> None:
    config = json.loads((FIXTURE / "config.json").read_text())
    loaded = load_checkpoint(FIXTURE, dtype="float32")
    save_checkpoint(tmp_path, loaded.model, loaded.params, tokenizer_json=None, config=config)
    ours, original = load_file(tmp_path / "model.safetensors"), load_file(FIXTURE / "model.safetensors")
    assert ours.keys() == original.keys()
    for name, tensor in original.items():
        np.testing.assert_array_equal(ours[name], tensor)
    assert json.loads((tmp_path / "config.json").read_text()) == config


def test_saving_again_leaves_nothing_of_the_other_layout(tmp_path: Path) -> None:
    config = json.loads((FIXTURE / "config.json").read_text())
    model = model_from_config(config)
    for seed, shard_bytes in enumerate([50_000, 5_000_000, 90_000]):
        params = random_params(model, "float32", seed)
        text = tokenizer_json() if seed == 0 else None
        save_checkpoint(tmp_path, model, params, tokenizer_json=text, config=config, shard_bytes=shard_bytes)
        loaded = load_checkpoint(tmp_path, dtype="float32")
        assert same_bits(loaded.params, params)
        assert (loaded.tokenizer is None) == (seed > 0)
    assert not list(tmp_path.glob("*.tmp"))


def test_saving_what_does_not_fit(tmp_path: Path) -> None:
    config = json.loads((FIXTURE / "config.json").read_text())
    model = model_from_config(config)
    params = random_params(model, "float32")

    def save(path: Path = tmp_path / "out", **changes: Any) -> None:
        arguments = {"tokenizer_json": None, "config": config} | changes
        save_checkpoint(path, model, arguments.pop("params", params), **arguments)

    with pytest.raises(CheckpointError, match="config given describes another model"):
        save(config=config | {"rms_norm_eps": 1e-5})
    with pytest.raises(CheckpointError, match="are not the parameter tree of model_type 'ouro'"):
        save(params={"head": params.head})
    with pytest.raises(CheckpointError, match=r"embed_tokens.weight must have shape \[256, 64\].* found \[64, 256\]"):
        save(params=jax.tree.map(lambda x: x.T if x.shape == (256, 64) else x, params))
    with pytest.raises(CheckpointError, match=r"found \[.*\] int32"):
        save(params=jax.tree.map(lambda x: x.astype(jnp.int32), params))
    with pytest.raises(CheckpointError, match="shard_bytes must be >= 1"):
        save(shard_bytes=0)
    with pytest.raises(CheckpointError, match="'top_p'"):
        save(generation_config={"top_p": 3})
    assert not (tmp_path / "out").exists(), "a refused save must write nothing"
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="cannot be written"):
        save(path=tmp_path / "file")
    with pytest.raises(CheckpointError, match="cannot be written"):
        save(path=Path(os.devnull) / "below")
