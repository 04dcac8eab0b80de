"""Engines of models with a prelude and a coda, shared by the test files; each must be left idle (`tests.engines`)."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from rlt_jax import EngineConfig, LLMEngine, SamplingParams
from tests.oracle import HuginnOracle, Policy
from tests.oracle.checkpoint import write_checkpoint
from tests.oracle.huginn_checkpoint import HuginnShape, huginn_checkpoint

FIXTURES = Path(__file__).parent.parent / "fixtures"
TINY, RETROFIT = FIXTURES / "huginn_tiny", FIXTURES / "huginn_llama_tiny"
THRESHOLDS = {"latent": 0.03, "kl": 1e-3, "argmax": 5.0}


@functools.cache
def engine(path: Path = TINY, **settings: object) -> LLMEngine:
    """Small pages and chunks, so that a short prompt meets several of both; rows wait at the boundary of the loop."""
    small = {"dtype": "float32", "slots": 4, "page_size": 4, "prefill_chunk": 5, "max_context": 64, "boundary_batch": 3}
    return LLMEngine(path, EngineConfig(**small | settings))


def of_layout(layout: str, planes: int | None = None) -> LLMEngine:
    """The engine of huginn_tiny with this layout; one per layout in a process."""
    if layout == "ring":
        return engine(kv_layout=layout, kv_planes=planes, prefill_chunk=16)
    return engine() if layout == "last_exited" else engine(kv_layout=layout)


@functools.cache
def random_checkpoint(shape: HuginnShape, seed: int = 0) -> Path:
    """A directory with a random model of this shape; it lives as long as the process."""
    folder = Path(_folder().name) / f"{abs(hash((shape, seed)))}"
    folder.mkdir()
    write_checkpoint(folder, *huginn_checkpoint(shape, seed))
    return folder


@functools.cache
def _folder() -> tempfile.TemporaryDirectory:
    return tempfile.TemporaryDirectory(prefix="huginn_checkpoints_")


@functools.cache
def oracle(path: Path, layout: str, planes: int | None = None) -> HuginnOracle:
    return HuginnOracle(path, layout=layout, planes=planes)


def policy_of(params: SamplingParams, *, cap: int) -> Policy:
    """The oracle's view of a request's exit parameters; `cap` is the engine's max_loops."""
    max_loops = params.max_loops or cap
    if params.exit_trace is not None:
        return Policy(name="trace", trace=params.exit_trace, min_loops=params.min_loops or 1, max_loops=max_loops)
    name = params.exit_policy or "fixed"
    threshold = THRESHOLDS.get(name, 1.0) if params.exit_threshold is None else params.exit_threshold
    return Policy(name=name, threshold=threshold, min_loops=params.min_loops or min(2, max_loops), max_loops=max_loops)


def random_start(seed: int, width: int, std: float) -> Callable[[int], np.ndarray]:
    """The documented stream of initial states, written out: (seed, position) -> [width], whatever else the request is.

    Args:
        std: of the state; init_values.std times init_values.embed_scale.
    """

    def state(position: int) -> np.ndarray:
        key = jax.random.wrap_key_data(jnp.asarray([seed >> 32, seed & 0xFFFFFFFF], jnp.uint32))
        key = jax.random.fold_in(jax.random.fold_in(key, 1), position)
        return np.asarray(jax.random.truncated_normal(key, -3.0, 3.0, (width,), jnp.float32)) * std

    return state
