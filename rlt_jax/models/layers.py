"""Building blocks shared by the model files.  FP32 where the numbers must not move: statistics, angles, scores."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from rlt_jax.models.spec import KV, Attend, ModelSpec, TensorSource


def linear(x: jax.Array, weight: jax.Array, *, out_dtype: jnp.dtype | None = None) -> jax.Array:
    """x [..., in] @ weight[out, in]^T -> [..., out].

    Weights keep the checkpoint's [out, in] order: contracting the minor axis needs no transposed copy.  float32 asks
    for full precision, because NVIDIA's default for it is TF32, which flips greedy tokens.
    """
    precision = lax.Precision.HIGHEST if x.dtype == jnp.float32 else lax.Precision.DEFAULT
    return lax.dot_general(
        x,
        weight,
        (((x.ndim - 1,), (1,)), ((), ())),
        precision=precision,
        preferred_element_type=out_dtype or x.dtype,
    )


def rms_norm(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    """RMSNorm: statistics in float32, cast to x's dtype, then times the weight (in that order; bf16 sees it)."""
    f = x.astype(jnp.float32)
    normed = f * lax.rsqrt(jnp.mean(f * f, axis=-1, keepdims=True) + eps)
    return normed.astype(x.dtype) * weight


def rope_half(x: jax.Array, positions: jax.Array, theta: float) -> jax.Array:
    """Rotary embedding, half-split pairs (i, i + D/2).  x [..., heads, D], positions [...] int32."""
    half = x.shape[-1] // 2
    frequency = theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angle = positions.astype(jnp.float32)[..., None, None] * frequency  # [..., 1, D/2]
    cos, sin = jnp.cos(angle).astype(x.dtype), jnp.sin(angle).astype(x.dtype)
    a, b = x[..., :half], x[..., half:]
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


def swiglu(x: jax.Array, gate_up: jax.Array, down: jax.Array) -> jax.Array:
    """down(silu(gate x) * up x) with gate and up stored as one [2F, E] matrix."""
    gate, up = jnp.split(linear(x, gate_up), 2, axis=-1)
    return linear(jax.nn.silu(gate) * up, down)


def self_attention(
    x: jax.Array,
    qkv: jax.Array,
    out: jax.Array,
    spec: ModelSpec,
    layer: int,
    positions: jax.Array,
    kv: KV,
    attend: Attend,
) -> tuple[jax.Array, KV]:
    """Grouped-query attention without biases, half-split rotary: normed x [..., E] -> [..., E].

    Args:
        qkv: [(H + 2K) D, E], q, k and v rows joined (`qkv_source`): one matmul instead of three.
        out: [E, H D]; H D need not be E.
        layer: number that `attend` knows the layer by.
    """
    q_end, k_end = spec.num_heads * spec.head_dim, (spec.num_heads + spec.num_kv_heads) * spec.head_dim
    parts = jnp.split(linear(x, qkv), (q_end, k_end), axis=-1)
    q, k, v = (part.reshape(*x.shape[:-1], -1, spec.head_dim) for part in parts)
    q, k = rope_half(q, positions, spec.rope_theta), rope_half(k, positions, spec.rope_theta)
    kv, mixed = attend(kv, layer, q, k, v)
    return linear(mixed.reshape(*x.shape[:-1], -1), out), kv


def tensor(name: str, *shape: int) -> TensorSource:
    """A parameter that is one tensor of the checkpoint."""
    return TensorSource((name,), (shape,))


def qkv_source(spec: ModelSpec, prefix: str) -> TensorSource:
    """The joined projection of `self_attention`; `prefix` ends before `q_proj.weight`."""
    q, kv = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    return TensorSource(
        tuple(f"{prefix}{n}_proj.weight" for n in "qkv"), tuple((n, spec.hidden_size) for n in (q, kv, kv))
    )


def gate_up_source(spec: ModelSpec, prefix: str) -> TensorSource:
    """The joined matrix of `swiglu`; `prefix` ends before `gate_proj.weight`."""
    shape = (spec.intermediate_size, spec.hidden_size)
    return TensorSource((f"{prefix}gate_proj.weight", f"{prefix}up_proj.weight"), (shape, shape))
