"""Sampling as pure per-row functions with stateless random keys, all in float32.

A row's draw depends on (seed, sample index, output index) alone, never on its neighbours: noise comes from
`fold_in(request key, output index)`, and the token is argmax(logits / temperature + Gumbel noise), which is a draw from
the softmax.  Filters (top-k, top-p, min-p, in this order after temperature) only remove candidates; they see the same
noise, so a request without filters gets the same bits beside one with them.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

TOKEN_STREAM, STATE_STREAM = 0, 1  # fold_in constants: of draws of tokens, and of random initial states
STATE_CUT = 3.0  # random initial states are standard normal, cut at so many sigmas
REMOVED = -jnp.inf


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplerParams:
    """Per-row sampling choices, as arrays: a new value never compiles anything."""

    temperature: Any  # [B] f32, 0 = greedy
    top_k: Any  # [B] i32, 0 = off
    top_p: Any  # [B] f32 in (0, 1], 1 = off
    min_p: Any  # [B] f32 in [0, 1], 0 = off
    processed: Any  # [B] bool, log-probability after temperature and filters instead of raw
    key: Any  # [B, 2] u32, key data of the request's stream


def request_key(seed_high: jax.Array, seed_low: jax.Array, sample_index: jax.Array) -> jax.Array:
    """Key data [2] uint32 of a request's token stream.

    The 64-bit seed travels as two words through wrap_key_data: `jax.random.key(seed)` would lose the high one.
    """
    key = jax.random.wrap_key_data(jnp.stack([seed_high, seed_low]).astype(jnp.uint32))
    key = jax.random.fold_in(jax.random.fold_in(key, TOKEN_STREAM), sample_index)
    return jax.random.key_data(key)


def state_key(seed_high: jax.Array, seed_low: jax.Array) -> jax.Array:
    """Key data [2] uint32 of a request's stream of initial states.

    It leaves the sample index out: all samples of one seed start a position from the same state, so they may share
    what has been computed for their prompt.
    """
    key = jax.random.wrap_key_data(jnp.stack([seed_high, seed_low]).astype(jnp.uint32))
    return jax.random.key_data(jax.random.fold_in(key, STATE_STREAM))


def state_noise(keys: jax.Array, positions: jax.Array, width: int) -> jax.Array:
    """[B, width] float32, standard normal cut at STATE_CUT; row b depends on keys[b] and positions[b] only."""

    def row(data: jax.Array, position: jax.Array) -> jax.Array:
        key = jax.random.fold_in(jax.random.wrap_key_data(data), position)
        return jax.random.truncated_normal(key, -STATE_CUT, STATE_CUT, (width,), jnp.float32)

    return jax.vmap(row)(keys, positions)


def gumbel_noise(keys: jax.Array, output_index: jax.Array, vocab: int) -> jax.Array:
    """[B, V] float32 noise; row b depends on keys[b] and output_index[b] only."""

    def row(data: jax.Array, index: jax.Array) -> jax.Array:
        key = jax.random.fold_in(jax.random.wrap_key_data(data), index)
        return jax.random.gumbel(key, (vocab,), jnp.float32)

    return jax.vmap(row)(keys, output_index)


def filter_logits(scaled: jax.Array, top_k: jax.Array, top_p: jax.Array, min_p: jax.Array) -> jax.Array:
    """Remove candidates: top-k (ties with the k-th kept), then top-p, then min-p.  Exact: one sort per row.

    Args:
        scaled: [B, V] float32, logits over temperature.

    Returns:
        [B, V], removed entries at -inf; the best token always stays.
    """
    vocab = scaled.shape[-1]
    order = jnp.argsort(scaled, axis=-1, descending=True, stable=True)
    ranked = jnp.take_along_axis(scaled, order, axis=-1)
    k = jnp.where(top_k <= 0, vocab, jnp.minimum(top_k, vocab))
    kth = jnp.take_along_axis(ranked, (k - 1)[:, None], axis=-1)
    ranked = jnp.where(ranked >= kth, ranked, REMOVED)
    mass = jax.nn.softmax(ranked, axis=-1)
    before = jnp.cumsum(mass, axis=-1) - mass  # mass of the better tokens
    keep = (before <= top_p[:, None]) | (top_p >= 1.0)[:, None]
    keep &= mass >= min_p[:, None] * mass[:, :1]  # ratios to the best survive renormalising
    keep = keep.at[:, 0].set(True)
    ranked = jnp.where(keep, ranked, REMOVED)
    rows = jnp.arange(scaled.shape[0], dtype=jnp.int32)[:, None]
    return jnp.zeros_like(scaled).at[rows, order].set(ranked)


def sample(
    logits: jax.Array, params: SamplerParams, output_index: jax.Array, live: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """One token per row.

    Args:
        logits: [B, V] float32.
        output_index: [B] int32, zero-based index of the output being drawn.
        live: [B] bool; other rows' results are meaningless and must not choose the work to do.

    Returns:
        tokens [B] int32, and the log-probability [B] float32 of each.

    The filtered variant runs only when a live row asks for it.  It adds to the fast one: what a row without filters
    gets comes from the same operations either way.
    """
    vocab = logits.shape[-1]
    greedy = params.temperature <= 0.0
    # a greedy row divides by 1; the draw below replaces only sampled rows.  The best logit becomes 0 first: divided by
    # a tiny temperature the others then overflow to -inf, as they should, and the best does not
    shifted = logits - jnp.max(logits, axis=-1, keepdims=True)
    scaled = shifted / jnp.where(greedy, 1.0, params.temperature)[:, None]
    filtered = live & ~greedy & ((params.top_k > 0) | (params.top_p < 1.0) | (params.min_p > 0.0))
    best = jnp.argmax(logits, axis=-1).astype(jnp.int32)  # the lowest id wins ties

    def draw(_: None) -> tuple[jax.Array, jax.Array]:
        noise = gumbel_noise(params.key, output_index, vocab)
        free = jnp.argmax(scaled + noise, axis=-1).astype(jnp.int32)

        def with_filters(_: None) -> tuple[jax.Array, jax.Array]:
            kept = filter_logits(scaled, params.top_k, params.top_p, params.min_p)
            token = jnp.argmax(kept + noise, axis=-1).astype(jnp.int32)
            lse = jax.nn.logsumexp(kept, axis=-1)
            return jnp.where(filtered, token, free), lse

        def without(_: None) -> tuple[jax.Array, jax.Array]:
            return free, jnp.zeros(free.shape, jnp.float32)

        token, kept_lse = jax.lax.cond(filtered.any(), with_filters, without, None)
        lse = jnp.where(filtered, kept_lse, jax.nn.logsumexp(scaled, axis=-1))
        return token, _take(scaled, token) - lse

    def all_greedy(_: None) -> tuple[jax.Array, jax.Array]:
        return best, jnp.zeros(best.shape, jnp.float32)

    drawn, processed = jax.lax.cond((live & ~greedy).any(), draw, all_greedy, None)
    token = jnp.where(greedy, best, drawn)
    raw = _take(logits, token) - jax.nn.logsumexp(logits, axis=-1)
    return token, jnp.where(params.processed & ~greedy, processed, raw)


def _take(rows: jax.Array, token: jax.Array) -> jax.Array:
    return jnp.take_along_axis(rows, token[:, None], axis=-1)[:, 0]
