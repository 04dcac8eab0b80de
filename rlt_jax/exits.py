"""Exit policies as pure functions of per-row state: when does a token leave the loop?

After loop r (one-based), in float32:

    gate          leaves after r        iff  threshold < 1 and CDF_r >= threshold           (arXiv 2510.25741; "Q-exit")
    gate_delayed  the first r >= min with CDF_r >= threshold makes it leave after min(r + 1, max)
    latent        leaves after r        iff  |s_r - s_{r-1}| / |s_r| < threshold            (arXiv 2502.05171)
    kl            leaves after r        iff  KL(p_{r-1} || p_r) < threshold
    argmax        leaves after r        iff  the best token has been the same for threshold loops in a row
    fixed         leaves after max
    trace         leaves after the given depth, whatever the policy's own opinion

gate:    S_r = S_{r-1} * (1 - sigmoid(g_r)),  S_0 = 1,  CDF_r = 1 - S_r, with the gate's logit g_r
latent:  s_r is the state after loop r, s_0 the one before the first
kl:      p_r is the next-token distribution that a readout of s_r gives, p_0 is uniform
argmax:  loop r counts if the best token of p_r is that of p_{r-1}; the first loop never does

All leave at max at the latest, and none but trace before min; but every loop counts, also those before min.  A gate's
threshold >= 1 means full depth, even where sigmoid rounds to 1; a latent or kl threshold of 0 means full depth, even
where rounding makes a divergence negative.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Collection
from typing import Any

import jax
import jax.numpy as jnp


class ExitPolicy(enum.IntEnum):
    """Values are what the device sees."""

    FIXED = 0
    GATE = 1
    GATE_DELAYED = 2
    TRACE = 3
    LATENT = 4
    KL = 5
    ARGMAX = 6


POLICY_NAMES = {policy.name.lower(): policy for policy in ExitPolicy}
POLICY_ALIASES = {"ouro": "gate", "ouro_delayed": "gate_delayed"}
# policy -> exit score that the model must give; fixed and trace need none
POLICY_NEEDS_SCORE = {"gate": "gate", "gate_delayed": "gate", "latent": "latent", "kl": "kl", "argmax": "argmax"}
DEFAULT_THRESHOLDS = {"latent": 0.03, "kl": 1e-3, "argmax": 5.0}  # a gate's comes from its checkpoint
READOUT_SCORES = ("kl", "argmax")  # scores of next-token distributions: they take a readout after every loop


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class ReadoutState:
    """What the policies of READOUT_SCORES remember of the last readout; None where the model lacks the score.

    Never reset: the first loop of a token does not look at it.
    """

    log_probabilities: Any  # [B, V] f32, of the readout after the last loop
    best: Any  # [B] i32, its best token
    unchanged: Any  # [B] i32: for how many loops the best token has been the same


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class ExitState:
    """What a policy remembers about the token being computed; a new token starts from `restarted`."""

    survival: Any  # [B] f32 in [0, 1]: probability that the token has not left yet
    pending: Any  # [B] i32: loop after which it must leave (gate_delayed), 0 = not decided
    readout: Any = None  # ReadoutState, where the model has a score of READOUT_SCORES


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class ExitParams:
    """What a request chose."""

    policy: Any  # [B] i32, ExitPolicy
    threshold: Any  # [B] f32
    min_loops: Any  # [B] i32, one-based, inclusive
    max_loops: Any  # [B] i32


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExitScores:
    """What the model says after a loop; None where it does not say it (its policies are then never those that ask)."""

    gate: jax.Array | None = None  # [B] f32, logit
    latent: jax.Array | None = None  # [B] f32, `latent_score`
    kl: jax.Array | None = None  # [B] f32, `observe`


def fresh_exit_state(rows: int, vocab_size: int = 0, scores: Collection[str] = ()) -> ExitState:
    """State of tokens that have run no loop, for a model with these exit scores."""
    readout = None
    if not set(READOUT_SCORES).isdisjoint(scores):
        kl, argmax = (name in scores for name in READOUT_SCORES)
        readout = ReadoutState(
            log_probabilities=jnp.zeros((rows, vocab_size), jnp.float32) if kl else None,
            best=jnp.zeros((rows,), jnp.int32) if argmax else None,
            unchanged=jnp.zeros((rows,), jnp.int32) if argmax else None,
        )
    return ExitState(survival=jnp.ones((rows,), jnp.float32), pending=jnp.zeros((rows,), jnp.int32), readout=readout)


def restarted(state: ExitState, rows: jax.Array) -> ExitState:
    """The state with `rows` [B] bool standing before their first loop."""
    return dataclasses.replace(
        state,
        survival=jnp.where(rows, jnp.ones_like(state.survival), state.survival),
        pending=jnp.where(rows, jnp.zeros_like(state.pending), state.pending),
    )


def latent_score(before: jax.Array, after: jax.Array) -> jax.Array:
    """How much a loop changed the state [B, E], relative to the new one: [B] float32.  NaN, which never fires, at 0.

    Both norms come from one reduction, so that the first loop from zeros gives exactly 1, whatever the compiler fuses.
    """
    old, new = before.astype(jnp.float32), after.astype(jnp.float32)
    change, size = jnp.linalg.norm(jnp.stack([new - old, new]), axis=-1)
    return change / size


def observe(
    state: ReadoutState, logits: jax.Array, loops_done: jax.Array, rows: jax.Array
) -> tuple[ReadoutState, jax.Array | None]:
    """Take a readout after a loop in.

    Args:
        logits: [B, V] float32.
        loops_done: [B] int32, loops run for the token, the one just finished included.
        rows: [B] bool, which have been read out; the others' state stays.

    Returns:
        The new state, and KL(previous || current) [B] float32, meaningless outside `rows`, or None without "kl".
    """
    first, kl = loops_done <= 1, None
    if state.log_probabilities is not None:
        current = jax.nn.log_softmax(logits, axis=-1)
        uniform = jnp.log(jnp.float32(logits.shape[-1]))
        previous = jnp.where(first[:, None], -uniform, state.log_probabilities)
        kl = jnp.sum(jnp.exp(previous) * (previous - current), axis=-1)
        kept = jnp.where(rows[:, None], current, state.log_probabilities)
        state = dataclasses.replace(state, log_probabilities=kept)
    if state.best is not None:
        best = jnp.argmax(logits, axis=-1).astype(jnp.int32)
        unchanged = jnp.where(first | (best != state.best), 0, state.unchanged + 1)
        state = dataclasses.replace(
            state,
            best=jnp.where(rows, best, state.best),
            unchanged=jnp.where(rows, unchanged, state.unchanged),
        )
    return state, kl


def exit_test(
    state: ExitState, params: ExitParams, loops_done: jax.Array, scores: ExitScores, given: jax.Array
) -> tuple[ExitState, jax.Array]:
    """Advance the policy by one loop.

    Args:
        state: `readout` has taken the loop in already (`observe`).
        loops_done: [B] int32, loops run for the token, the one just finished included.
        given: [B] int32 exit depth to obey exactly (trace replay, prompt positions), 0 = none.

    Returns:
        The new state, and [B] bool: the token leaves now.
    """
    survival, pending = state.survival, state.pending
    fires = jnp.zeros(loops_done.shape, bool)
    if scores.gate is not None:
        survival = survival * (1.0 - jax.nn.sigmoid(scores.gate.astype(jnp.float32)))
        reached = (1.0 - survival) >= params.threshold
        fires = reached & (params.threshold < 1.0) & (loops_done >= params.min_loops)
    delayed_now = (pending > 0) & (loops_done >= pending)
    pending = jnp.where(fires & (pending == 0), loops_done + 1, pending)
    leaves = loops_done >= params.max_loops
    leaves |= (params.policy == ExitPolicy.GATE) & fires
    leaves |= (params.policy == ExitPolicy.GATE_DELAYED) & delayed_now
    allowed = loops_done >= params.min_loops
    for policy, score in ((ExitPolicy.LATENT, scores.latent), (ExitPolicy.KL, scores.kl)):
        if score is not None:
            converged = (score < params.threshold) & (params.threshold > 0.0)
            leaves |= (params.policy == policy) & converged & allowed
    if state.readout is not None and state.readout.unchanged is not None:
        stable = state.readout.unchanged.astype(jnp.float32) >= params.threshold
        leaves |= (params.policy == ExitPolicy.ARGMAX) & stable & allowed
    leaves = jnp.where(given > 0, loops_done >= given, leaves)
    return dataclasses.replace(state, survival=survival, pending=pending), leaves
