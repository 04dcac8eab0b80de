"""Ouro's two training objectives, per token, as pure functions (arXiv 2510.25741, sections on training).

    stage I    L = sum_u p_u CE_u - beta Entropy(p)           all parameters
    stage II   BCE(w_u, 1 - lambda_u), language model frozen  the exit gate alone

Loops are on axis 0 everywhere: [U, ...].
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

GAIN_SLOPE, GAIN_FLOOR = 50.0, 0.005  # k and gamma of stage II


def exit_log_probabilities(gate: jax.Array, exit_depth: jax.Array) -> jax.Array:
    """log p_u of leaving at loop u, [U, ...], from gate logits [U, ...]; loop `exit_depth` takes all mass that is left.

    `exit_depth` is one-based and [...]; loops beyond it get -inf.  With exit_depth = U this is Ouro's rule.
    """
    loop = jnp.arange(1, gate.shape[0] + 1).reshape((-1,) + (1,) * (gate.ndim - 1))
    stay = jnp.cumsum(jax.nn.log_sigmoid(-gate), axis=0)
    before = jnp.concatenate([jnp.zeros_like(stay[:1]), stay[:-1]])
    leave = jnp.where(loop == exit_depth, 0.0, jax.nn.log_sigmoid(gate))
    return jnp.where(loop <= exit_depth, before + leave, -jnp.inf)


def stage1_loss(
    cross_entropy: jax.Array, gate: jax.Array, exit_depth: jax.Array, beta: jax.Array | float
) -> tuple[jax.Array, jax.Array]:
    """Expected cross-entropy minus beta times the entropy of the exit distribution.

    Args:
        cross_entropy: [U, ...] float32.
        gate: [U, ...] float32 gate logits.
        exit_depth: [...] int, one-based.
        beta: weight of the entropy; positive keeps the exit distribution from collapsing on one loop.

    Returns:
        The loss per token [...] and p [U, ...].
    """
    log_p = exit_log_probabilities(gate, exit_depth)
    allowed = jnp.isfinite(log_p)
    p = jnp.where(allowed, jnp.exp(jnp.where(allowed, log_p, 0.0)), 0.0)
    entropy = -jnp.sum(p * jnp.where(allowed, log_p, 0.0), axis=0)
    return jnp.sum(p * cross_entropy, axis=0) - beta * entropy, p


def improvement_target(cross_entropy: jax.Array) -> jax.Array:
    """Ouro's continue-probability w_u for loops 2..U, [U - 1, ...], from what the loop just run improved."""
    gain = jnp.maximum(0.0, cross_entropy[:-1] - cross_entropy[1:])
    return jax.nn.sigmoid(GAIN_SLOPE * (gain - GAIN_FLOOR))


def look_ahead_target(cross_entropy: jax.Array) -> jax.Array:
    """Continue-probability for loops 1..U-1, [U - 1, ...], from what the best deeper loop would still improve.

    Ouro's target asks whether the *last* loop helped.  A token whose answer appears only at loop 4 shows no
    improvement at loops 2 and 3, so that target tells it to leave; this one tells it to stay.
    """
    best_later = jnp.flip(jax.lax.cummin(jnp.flip(cross_entropy[1:], 0), axis=0), 0)
    gain = jnp.maximum(0.0, cross_entropy[:-1] - best_later)
    return jax.nn.sigmoid(GAIN_SLOPE * (gain - GAIN_FLOOR))


def gate_loss(gate: jax.Array, continue_target: jax.Array) -> jax.Array:
    """Binary cross-entropy between 1 - sigmoid(gate) and the target, averaged over loops: [n, ...] -> [...]."""
    target = jax.lax.stop_gradient(continue_target)
    return -jnp.mean(target * jax.nn.log_sigmoid(-gate) + (1 - target) * jax.nn.log_sigmoid(gate), axis=0)


def token_cross_entropy(logits: jax.Array, targets: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Cross-entropy and whether the target is the (a) best token: logits [..., V], targets [...] -> two [...]."""
    top = jax.lax.stop_gradient(jnp.max(logits, axis=-1))
    log_total = jnp.log(jnp.sum(jnp.exp(logits - top[..., None]), axis=-1)) + top
    # a masked sum, not a gather: its gradient is elementwise, where a gather's would be a scatter
    chosen = jnp.arange(logits.shape[-1]) == targets[..., None]
    wanted = jnp.sum(jnp.where(chosen, logits, 0.0), axis=-1)
    return log_total - wanted, wanted >= top
