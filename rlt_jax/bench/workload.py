"""Models and requests to measure with: real shapes, random data, one committed trace of exit depths."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rlt_jax.models.checkpoint import LoadedCheckpoint, load_checkpoint
from rlt_jax.models.generation_config import GenerationDefaults
from rlt_jax.models.registry import model_from_config
from rlt_jax.models.spec import TensorSource
from rlt_jax.request import SamplingParams

_OURO: dict[str, Any] = {
    "model_type": "ouro",
    "hidden_size": 2048,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "head_dim": 128,
    "intermediate_size": 5632,
    "vocab_size": 49152,
    "total_ut_steps": 4,
    "max_position_embeddings": 65536,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "eos_token_id": 0,
}
SHAPES: dict[str, dict[str, Any]] = {
    "ouro-1.4b": {**_OURO, "num_hidden_layers": 24},
    "ouro-2.6b": {**_OURO, "num_hidden_layers": 48},
    "tiny": {**_OURO, "num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 4,
             "head_dim": 16, "intermediate_size": 160, "vocab_size": 256, "max_position_embeddings": 1024},
    "nanbeige4.2-3b": {"model_type": "nanbeige", "num_hidden_layers": 22, "num_loops": 2, "hidden_size": 3072,
                       "num_attention_heads": 48, "num_key_value_heads": 8, "head_dim": 128,
                       "intermediate_size": 10752, "vocab_size": 166144, "max_position_embeddings": 262144,
                       "rms_norm_eps": 1e-5, "rope_theta": 7e7, "eos_token_id": 166101},
    "huginn-0125": {"model_type": "huginn_raven", "n_embd": 5280, "n_heads": 55, "head_dim": 96,
                    "intermediate_size": 17920, "vocab_size": 65536, "block_size": 4096, "n_layers": 8,
                    "n_layers_in_prelude": 2, "n_layers_in_recurrent_block": 4, "n_layers_in_coda": 2,
                    "mean_recurrence": 32, "norm_eps": 1e-6, "rope_base": 50000, "tie_embeddings": True,
                    "qk_bias": True, "eos_token_id": 65505},
}  # fmt: skip


def load(name: str, dtype: str) -> LoadedCheckpoint:
    """A model of SHAPES with random weights, made on the device; any other name is a checkpoint to load."""
    if name not in SHAPES:
        return load_checkpoint(name, dtype=dtype)
    model = model_from_config(SHAPES[name])
    sources, tree = jax.tree.flatten(model.sources(), is_leaf=lambda x: isinstance(x, TensorSource))
    make = jax.jit(_random, static_argnums=(1, 2))
    leaves = [make(np.uint32(i), s.shape, dtype) for i, s in enumerate(sources)]
    params = jax.block_until_ready(jax.tree.unflatten(tree, leaves))
    return LoadedCheckpoint(
        name=f"{name} (random weights)",
        path=Path(name),
        model=model,
        params=params,
        tokenizer=None,
        chat_template=None,
        eos_token_ids=(),
        generation=GenerationDefaults(),
        dtype=dtype,
        parameter_count=sum(leaf.size for leaf in leaves),
        parameter_bytes=sum(leaf.nbytes for leaf in leaves),
    )


def _random(seed: jax.Array, shape: tuple[int, ...], dtype: str) -> jax.Array:
    """Norm weights near 1, matrices at 1/sqrt(fan_in): activations stay in a sane range through every loop."""
    noise = jax.random.normal(jax.random.key(seed), shape, jnp.float32)
    return (1.0 + 0.1 * noise if len(shape) == 1 else noise * shape[-1] ** -0.5).astype(dtype)


TRACE_FILE = Path(__file__).resolve().parent / "traces" / "mean2.5.json"
TRACE_DEPTHS, TRACE_SHARES, TRACE_SEED = (2, 3, 4), (0.6, 0.3, 0.1), 0


def make_trace(requests: int = 256, outputs: int = 128) -> list[list[int]]:
    """Exit depths of `requests` requests: the first output at 4, the others drawn from {2: 0.6, 3: 0.3, 4: 0.1}.

    How the committed trace was made; a test holds the two equal.
    """
    drawn = np.random.default_rng(TRACE_SEED).choice(TRACE_DEPTHS, size=(requests, outputs - 1), p=TRACE_SHARES)
    return [[4, *row] for row in drawn.tolist()]


def read_trace() -> list[list[int]]:
    return json.loads(TRACE_FILE.read_text())


def random_prompt(vocab: int, length: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, vocab, length).tolist()


def params_for(index: int, outputs: int, trace: list[list[int]] | None) -> SamplingParams:
    """Fixed depth, or the depths of a trace; the work is the same whatever the weights say."""
    if trace is None:
        return SamplingParams(max_tokens=outputs, ignore_eos=True, exit_policy="fixed", temperature=0.0, seed=index)
    row = tuple(trace[index % len(trace)][:outputs])
    return SamplingParams(max_tokens=outputs, ignore_eos=True, exit_trace=row, temperature=0.0, seed=index)


def tick_bytes(loaded: LoadedCheckpoint, contexts: int, rows: int, mean_loops: float) -> int:
    """Fewest bytes of one tick.

    In every tick: the core's weights once, and the KV that the rows read and write at one plane of its layers.  Once
    per token, so one part in `mean_loops` of a tick: prelude, coda and head with their weights and KV.

    Args:
        contexts: sum of the rows' context lengths.
        mean_loops: ticks per token of one row.
    """
    spec, params = loaded.model.spec, loaded.params

    def weights(*parts: str) -> int:
        return sum(leaf.nbytes for part in parts for leaf in jax.tree.leaves(getattr(params, part, None)))

    layer_kv = (contexts + rows) * 2 * spec.num_kv_heads * spec.head_dim * jnp.dtype(loaded.dtype).itemsize
    head = weights("head") or weights("embed")  # a tied head is the embedding
    per_token = weights("prelude", "coda") + head
    per_token += (spec.num_prelude_layers + spec.num_coda_layers) * layer_kv
    return int(weights("core", "adapter") + spec.num_core_layers * layer_kv + per_token / mean_loops)
