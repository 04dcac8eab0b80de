"""Greedy generation for evaluation: a dense cache with one plane per loop, and true LAST_EXITED early exit.

This is an evaluator, small enough to be read in one go, not the engine: all rows step together, every row keeps its
own depth, and a row that leaves at depth e finds its KV of loop e - 1 in all deeper planes afterwards.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from rlt_jax.models.ouro import Ouro, OuroParams
from rlt_jax.train.model import dense_attention


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Prompts:
    """Prompts after prefill at full depth.  Planes below n and `states[n - 1]` are what an n-loop prefill leaves."""

    keys: tuple[tuple[jax.Array, ...], ...]  # [layer][plane] of [B, S, H, D]
    values: tuple[tuple[jax.Array, ...], ...]
    states: jax.Array  # [U, B, E]  last prompt position after every loop
    length: jax.Array  # [B] int32


@functools.partial(jax.jit, static_argnums=(0,), static_argnames=("room",))
def prefill(model: Ouro, params: OuroParams, tokens: jax.Array, length: jax.Array, *, room: int) -> Prompts:
    """tokens [B, P] right-padded, length [B]; `room` positions are reserved for the answer."""
    b, p = tokens.shape
    loops, layers = model.spec.trained_loops, model.spec.num_core_layers
    mask = jnp.tril(jnp.ones((p, p), bool))[None, None]
    position = jnp.broadcast_to(jnp.arange(p, dtype=jnp.int32), (b, p))
    state = model.embed(params, tokens)
    planes: list[list[tuple[jax.Array, jax.Array]]] = [[] for _ in range(layers)]

    def attend(kv: Any, layer: int, q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[Any, jax.Array]:
        grow = ((0, 0), (0, room), (0, 0), (0, 0))
        planes[layer].append((jnp.pad(k, grow), jnp.pad(v, grow)))
        return kv, dense_attention(q, k, v, mask)

    states = []
    for _ in range(loops):
        state, _ = model.core(params, state, None, position, None, attend)
        states.append(jnp.take_along_axis(state, (length - 1)[:, None, None], axis=1)[:, 0])
    return Prompts(
        keys=tuple(tuple(k for k, _ in layer) for layer in planes),
        values=tuple(tuple(v for _, v in layer) for layer in planes),
        states=jnp.stack(states),
        length=length,
    )


@functools.partial(jax.jit, static_argnums=(0,), static_argnames=("room",))
def decode(
    model: Ouro,
    params: OuroParams,
    prompts: Prompts,
    threshold: jax.Array,
    min_loops: jax.Array,
    max_loops: jax.Array,
    prefill_loops: jax.Array,
    *,
    room: int,
) -> tuple[jax.Array, jax.Array]:
    """Greedy answers: tokens and exit depths, both [B, room] int32; nothing (-1, 0) after end of text.

    `threshold` >= 1 never exits early; the first token comes from the prompt, at `prefill_loops`.
    """
    eos, loops, b = model.spec.eos_token_ids[0], model.spec.trained_loops, prompts.length.shape[0]
    rows = jnp.arange(b)
    first = prompts.states[prefill_loops - 1]

    def pick(state: jax.Array) -> jax.Array:
        return jnp.argmax(model.head(params, state), axis=-1).astype(jnp.int32)

    def step(carry: Any, t: jax.Array) -> tuple[Any, tuple[jax.Array, jax.Array]]:
        keys, values, token, depth, live = carry
        emitted = (jnp.where(live, token, -1), jnp.where(live, depth, 0))
        live = live & (token != eos)
        position = prompts.length + t  # of the token just emitted
        visible = (jnp.arange(keys[0][0].shape[1])[None, :] <= position[:, None])[:, None, None, :]
        keys, values = [list(k) for k in keys], [list(v) for v in values]
        x = model.embed(params, token)
        result = x
        active, survive, depth = live, jnp.ones((b,), jnp.float32), jnp.zeros((b,), jnp.int32)
        own: list[tuple[jax.Array, jax.Array] | None] = [None] * model.spec.num_core_layers
        for d in range(loops):

            def attend(
                kv: Any,
                layer: int,
                q: jax.Array,
                k: jax.Array,
                v: jax.Array,
                d: int = d,
                active: jax.Array = active,
            ) -> tuple[Any, jax.Array]:
                previous = own[layer]
                if previous is not None:  # a row that has left keeps writing what it left with
                    running = active[:, None, None]
                    k, v = jnp.where(running, k, previous[0]), jnp.where(running, v, previous[1])
                own[layer] = (k, v)
                keys[layer][d] = keys[layer][d].at[rows, position].set(k)
                values[layer][d] = values[layer][d].at[rows, position].set(v)
                return kv, dense_attention(q[:, None], keys[layer][d], values[layer][d], visible)[:, 0]

            x, _ = model.core(params, x, None, position, None, attend)
            result = jnp.where(active[:, None], x, result)
            depth = depth + active.astype(jnp.int32)
            survive = survive * (1 - jax.nn.sigmoid(model.exit_score(params, x)))
            by_gate = (threshold < 1) & (d + 1 >= min_loops) & (1 - survive >= threshold)
            active = active & ~by_gate & (d + 1 < max_loops)
        carry = (tuple(map(tuple, keys)), tuple(map(tuple, values)), pick(result), depth, live)
        return carry, emitted

    start = (prompts.keys, prompts.values, pick(first), jnp.full((b,), prefill_loops, jnp.int32), jnp.ones((b,), bool))
    _, (tokens, depths) = jax.lax.scan(step, start, jnp.arange(room, dtype=jnp.int32))
    return tokens.T, depths.T
