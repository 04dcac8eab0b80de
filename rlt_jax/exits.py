"""Exit policies as pure functions of per-row state: when does a token leave the loop?

After loop r (one-based) with gate logit g_r, in float32 (arXiv 2510.25741; "Q-exit"):

    S_r = S_{r-1} * (1 - sigmoid(g_r)),  S_0 = 1,  CDF_r = 1 - S_r         every loop counts, also r < min_loops
    gate          leaves after r        iff  r >= max  or (threshold < 1 and r >= min and CDF_r >= threshold)
    gate_delayed  the first r >= min with CDF_r >= threshold makes it leave after min(r + 1, max)
    fixed         leaves after max
    trace         leaves after the given depth, whatever the policy's own opinion

A threshold >= 1 means full depth, even where sigmoid rounds to 1.
"""

from __future__ import annotations

import dataclasses
import enum
from typing import Any

import jax
import jax.numpy as jnp


class ExitPolicy(enum.IntEnum):
    """Values are what the device sees."""

    FIXED = 0
    GATE = 1
    GATE_DELAYED = 2
    TRACE = 3


POLICY_NAMES = {"fixed": ExitPolicy.FIXED, "gate": ExitPolicy.GATE, "gate_delayed": ExitPolicy.GATE_DELAYED,
                "trace": ExitPolicy.TRACE}  # fmt: skip
POLICY_ALIASES = {"ouro": "gate", "ouro_delayed": "gate_delayed"}
POLICY_NEEDS_SCORE = {"gate": "gate", "gate_delayed": "gate"}  # policy -> exit score that the model must give


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class ExitState:
    """What a policy remembers about the token being computed; reset when the next token enters."""

    survival: Any  # [B] f32 in [0, 1]: probability that the token has not left yet
    pending: Any  # [B] i32: loop after which it must leave (gate_delayed), 0 = not decided


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class ExitParams:
    """What a request chose."""

    policy: Any  # [B] i32, ExitPolicy
    threshold: Any  # [B] f32
    min_loops: Any  # [B] i32, one-based, inclusive
    max_loops: Any  # [B] i32


def fresh_exit_state(rows: int) -> ExitState:
    """State of tokens that have run no loop."""
    return ExitState(survival=jnp.ones((rows,), jnp.float32), pending=jnp.zeros((rows,), jnp.int32))


def exit_test(
    state: ExitState, params: ExitParams, loops_done: jax.Array, gate_logit: jax.Array | None, given: jax.Array
) -> tuple[ExitState, jax.Array]:
    """Advance the policy by one loop.

    Args:
        loops_done: [B] int32, loops run for the token, the one just finished included.
        gate_logit: [B] float32, or None for a model without a gate (its policies are then never gate ones).
        given: [B] int32 exit depth to obey exactly (trace replay, prompt positions), 0 = none.

    Returns:
        The new state, and [B] bool: the token leaves now.
    """
    survival, pending = state.survival, state.pending
    fires = jnp.zeros(loops_done.shape, bool)
    if gate_logit is not None:
        survival = survival * (1.0 - jax.nn.sigmoid(gate_logit.astype(jnp.float32)))
        reached = (1.0 - survival) >= params.threshold
        fires = reached & (params.threshold < 1.0) & (loops_done >= params.min_loops)
    delayed_now = (pending > 0) & (loops_done >= pending)
    pending = jnp.where(fires & (pending == 0), loops_done + 1, pending)
    leaves = loops_done >= params.max_loops
    leaves |= (params.policy == ExitPolicy.GATE) & fires
    leaves |= (params.policy == ExitPolicy.GATE_DELAYED) & delayed_now
    leaves = jnp.where(given > 0, loops_done >= given, leaves)
    return ExitState(survival=survival, pending=pending), leaves
