"""Building blocks shared by the model files.  FP32 where the numbers must not move: statistics, angles, scores."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax


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
