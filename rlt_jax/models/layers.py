"""Building blocks shared by the model files.  FP32 where the numbers must not move: statistics, angles, scores."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from rlt_jax.models.spec import KV, Attend, ModelSpec, TensorSource

Rotate = Callable[[jax.Array, jax.Array], jax.Array]  # x [..., heads, D], positions [...] -> x rotated
Adjust = Callable[[jax.Array, jax.Array], tuple[jax.Array, jax.Array]]  # q [..., H D], k [..., K D] -> both


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


@dataclasses.dataclass(frozen=True, kw_only=True)
class Llama3Scaling:
    """Llama 3's stretching of slow rotary frequencies; field names of a config's rope_scaling, positions excepted."""

    factor: float  # > 0: wavelengths beyond original_max_positions / low_freq_factor are stretched by it
    low_freq_factor: float
    high_freq_factor: float  # > low_freq_factor: shorter wavelengths than with it stay, those between are mixed
    original_max_positions: int  # of the model before it was stretched


def rope_frequencies(half: int, theta: float, scaling: Llama3Scaling | None = None) -> jax.Array:
    """Angle per position of each of the D/2 pairs, [half] float32."""
    frequency = theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
    if scaling is None:
        return frequency
    turns = scaling.original_max_positions * frequency / (2 * math.pi)  # over the original context
    kept = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    kept = jnp.clip(kept, 0.0, 1.0)
    return kept * frequency + (1 - kept) * (frequency / scaling.factor)


def rope_half(x: jax.Array, positions: jax.Array, theta: float, scaling: Llama3Scaling | None = None) -> jax.Array:
    """Rotary embedding, half-split pairs (i, i + D/2).  x [..., heads, D], positions [...] int32."""
    half = x.shape[-1] // 2
    angle = positions.astype(jnp.float32)[..., None, None] * rope_frequencies(half, theta, scaling)  # [..., 1, D/2]
    cos, sin = jnp.cos(angle).astype(x.dtype), jnp.sin(angle).astype(x.dtype)
    a, b = x[..., :half], x[..., half:]
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


def rope_pairs(x: jax.Array, positions: jax.Array, theta: float) -> jax.Array:
    """Rotary embedding, adjacent pairs (2i, 2i + 1), in float32.  x [..., heads, D], positions [...] int32."""
    half = x.shape[-1] // 2
    angle = positions.astype(jnp.float32)[..., None, None] * rope_frequencies(half, theta)  # [..., 1, D/2]
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    pairs = x.astype(jnp.float32).reshape(*x.shape[:-1], half, 2)
    a, b = pairs[..., 0], pairs[..., 1]
    return jnp.stack([a * cos - b * sin, b * cos + a * sin], axis=-1).reshape(x.shape).astype(x.dtype)


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
    *,
    rotate: Rotate | None = None,
    adjust: Adjust | None = None,
) -> tuple[jax.Array, KV]:
    """Grouped-query attention: x [..., E] -> [..., E], without the norm before it.

    Args:
        qkv: [(H + 2K) D, E], q, k and v rows joined (`qkv_source`): one matmul instead of three.
        out: [E, H D]; H D need not be E.
        layer: number that `attend` knows the layer by.
        rotate: rotary embedding; None is `rope_half` with the spec's theta.
        adjust: what happens to q and k before they are split into heads (a bias, a norm); None is nothing.
    """
    q_end, k_end = spec.num_heads * spec.head_dim, (spec.num_heads + spec.num_kv_heads) * spec.head_dim
    q, k, v = jnp.split(linear(x, qkv), (q_end, k_end), axis=-1)
    if adjust is not None:
        q, k = adjust(q, k)
    q, k, v = (part.reshape(*x.shape[:-1], -1, spec.head_dim) for part in (q, k, v))
    if rotate is None:
        rotate = functools.partial(rope_half, theta=spec.rope_theta)
    kv, mixed = attend(kv, layer, rotate(q, positions), rotate(k, positions), v)
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
