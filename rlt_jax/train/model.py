"""The model being trained: sizes, initial weights, and the teacher-forced forward pass of every loop.

The layer functions are the engine's own (`models/ouro.py`); only attention is different here: dense, causal within a
sample, and aware of exit depths.  At loop d a token is read at `min(d, e - 1)` where e is the one-based depth at which
it exited, exactly as LAST_EXITED keeps it at inference.  Training draws e at random for part of the samples, so that
the model meets the cache it will meet when tokens leave early.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from rlt_jax.models.layers import linear
from rlt_jax.models.ouro import Ouro, OuroLayer, OuroParams

LOOPS = 4


@dataclasses.dataclass(frozen=True, kw_only=True)
class Size:
    """A named model size."""

    hidden: int
    layers: int
    heads: int
    head_dim: int
    intermediate: int


SIZES = {
    # two layers: one pass is clearly too shallow for the tasks, eight layer visits are enough for most of them
    "bundled": Size(hidden=384, layers=2, heads=6, head_dim=64, intermediate=1024),
    "small": Size(hidden=128, layers=2, heads=4, head_dim=32, intermediate=352),
    "tiny": Size(hidden=64, layers=2, heads=2, head_dim=32, intermediate=128),
}
MAX_POSITIONS = 1024


def model_config(size: Size, vocab_size: int, loops: int, *, exit_threshold: float = 1.0) -> dict[str, Any]:
    """The config.json of a model of this size, in Ouro's layout."""
    return {
        "architectures": ["OuroForCausalLM"],
        "attention_dropout": 0.0,
        "bos_token_id": 0,
        "early_exit_threshold": exit_threshold,
        "eos_token_id": 0,
        "head_dim": size.head_dim,
        "hidden_act": "silu",
        "hidden_size": size.hidden,
        "initializer_range": 0.02,
        "intermediate_size": size.intermediate,
        "layer_types": ["full_attention"] * size.layers,
        "max_position_embeddings": MAX_POSITIONS,
        "model_type": "ouro",
        "num_attention_heads": size.heads,
        "num_hidden_layers": size.layers,
        "num_key_value_heads": size.heads,
        "pad_token_id": 0,
        "rms_norm_eps": 1e-6,
        "rope_scaling": None,
        "rope_theta": 10000.0,
        "sliding_window": None,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "total_ut_steps": loops,
        "use_cache": True,
        "use_sliding_window": False,
        "vocab_size": vocab_size,
    }


def init_params(model: Ouro, seed: int) -> OuroParams:
    """Float32 initial weights.

    The embedding has unit scale because the normed state that enters every later loop has it too; the norms after each
    half start at 0.5, so that a loop at first changes its input moderately.
    """
    s = model.spec
    keys = iter(jax.random.split(jax.random.key(seed), 4 * s.num_core_layers + 2))
    e, f, q, kv = s.hidden_size, s.intermediate_size, s.num_heads * s.head_dim, s.num_kv_heads * s.head_dim

    def matrix(rows: int, columns: int, scale: float | None = None) -> jax.Array:
        return jax.random.normal(next(keys), (rows, columns), jnp.float32) * (columns**-0.5 if scale is None else scale)

    def ones(scale: float = 1.0) -> jax.Array:
        return jnp.full((e,), scale, jnp.float32)

    layers = tuple(
        OuroLayer(
            attn_in_norm=ones(),
            qkv=matrix(q + 2 * kv, e),
            attn_out=matrix(e, q),
            attn_out_norm=ones(0.5),
            mlp_in_norm=ones(),
            gate_up=matrix(2 * f, e),
            down=matrix(e, f),
            mlp_out_norm=ones(0.5),
        )
        for _ in range(s.num_core_layers)
    )
    return OuroParams(
        embed=matrix(s.vocab_size, e, 1.0),
        core=layers,
        loop_norm=ones(),
        exit_gate_weight=jnp.zeros((1, e), jnp.float32),
        exit_gate_bias=jnp.full((1,), -0.8, jnp.float32),
        head=matrix(s.vocab_size, e, 0.5 * e**-0.5),
    )


def count_parameters(params: OuroParams) -> int:
    return sum(int(leaf.size) for leaf in jax.tree.leaves(params))


def attention_mask(segment: jax.Array) -> jax.Array:
    """segment [B, T] -> [B, 1, T, T] bool: causal, and only within one sample."""
    t = segment.shape[1]
    causal = jnp.tril(jnp.ones((t, t), bool))
    return (causal & (segment[:, :, None] == segment[:, None, :]))[:, None]


def dense_attention(q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array) -> jax.Array:
    """q, k, v [B, T, H, D], mask broadcastable to [B, H, T, S] -> [B, T, H, D]; scores and softmax in float32."""
    scores = jnp.einsum("bthd,bshd->bhts", q, k, preferred_element_type=jnp.float32) * (q.shape[-1] ** -0.5)
    weights = jax.nn.softmax(jnp.where(mask, scores, jnp.float32(-1e30)), axis=-1)
    return jnp.einsum("bhts,bshd->bthd", weights.astype(v.dtype), v)


def cast(params: OuroParams, dtype: str) -> OuroParams:
    """All parameters in another dtype."""
    return jax.tree.map(lambda a: a.astype(dtype), params)


def forward_states(
    model: Ouro,
    params: OuroParams,
    tokens: jax.Array,
    position: jax.Array,
    segment: jax.Array,
    exit_depth: jax.Array,
    *,
    dtype: str,
) -> list[jax.Array]:
    """The normed state after every loop, each [B, T, E], computed in `dtype`.

    The cast stands inside the loop: so the gradients of the loops, which share all weights, are added in the master
    weights' float32.  A token's own states beyond its exit depth are computed from its stopped KV and mean nothing;
    the losses leave them out.
    """
    mask = attention_mask(segment)
    # A product with one-hot rows equals `model.embed`, and its gradient is a product too: a gather's gradient is a
    # scatter of many thousand tokens onto a few hot rows, slow and in no fixed order on a GPU.
    state = linear(jax.nn.one_hot(tokens, model.spec.vocab_size, dtype=dtype), params.embed.astype(dtype).T)
    kept: list[tuple[jax.Array, jax.Array] | None] = [None] * model.spec.num_core_layers
    states = []
    for d in range(model.spec.trained_loops):
        running = (d < exit_depth)[:, :, None, None]

        def attend(
            kv: Any, layer: int, q: jax.Array, k: jax.Array, v: jax.Array, running: jax.Array = running
        ) -> tuple[Any, jax.Array]:
            if kv[layer] is not None:
                k, v = jnp.where(running, k, kv[layer][0]), jnp.where(running, v, kv[layer][1])
            kv = [*kv[:layer], (k, v), *kv[layer + 1 :]]
            return kv, dense_attention(q, k, v, mask)

        state, kept = model.core(cast(params, dtype), state, None, position, kept, attend)
        states.append(state)
    return states
