"""Training objectives.  PROTECTS: an entropy term with the wrong sign, or a gate target shifted by a loop, still trains
and still lowers its loss; only the exits come out useless.  Every number here is worked out by hand."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlt_jax.train.losses import (
    exit_log_probabilities,
    gate_loss,
    improvement_target,
    look_ahead_target,
    stage1_loss,
    token_cross_entropy,
)


def logit(p: float) -> float:
    return float(np.log(p / (1 - p)))


def gates(*values: float) -> jax.Array:
    return jnp.array([[logit(v)] for v in values], jnp.float32)


def sigmoid(x: float) -> float:
    return 1 / (1 + float(np.exp(-x)))


def test_exit_distribution_follows_the_official_rule_and_the_last_loop_takes_the_rest() -> None:
    p = jnp.exp(exit_log_probabilities(gates(0.5, 0.25, 0.8, 0.9), jnp.array([4])))[:, 0]
    # 0.5; 0.5 * 0.25; 0.5 * 0.75 * 0.8; the remaining 0.5 * 0.75 * 0.2, whatever the last gate says
    np.testing.assert_allclose(p, [0.5, 0.125, 0.3, 0.075], rtol=1e-6)


def test_a_token_that_exits_early_has_all_its_mass_up_to_there() -> None:
    p = jnp.exp(exit_log_probabilities(gates(0.5, 0.25, 0.8, 0.9), jnp.array([2])))[:, 0]
    np.testing.assert_allclose(p, [0.5, 0.5, 0.0, 0.0], rtol=1e-6)


def test_stage1_loss_is_expected_ce_minus_beta_times_entropy() -> None:
    ce = jnp.array([[2.0], [1.0], [0.5], [0.25]])
    loss, p = stage1_loss(ce, gates(0.5, 0.25, 0.8, 0.9), jnp.array([4]), 0.1)
    expected = 0.5 * 2 + 0.125 * 1 + 0.3 * 0.5 + 0.075 * 0.25
    entropy = -sum(q * np.log(q) for q in (0.5, 0.125, 0.3, 0.075))
    assert entropy > 0
    np.testing.assert_allclose(loss[0], expected - 0.1 * entropy, rtol=1e-5)
    np.testing.assert_allclose(p[:, 0], [0.5, 0.125, 0.3, 0.075], rtol=1e-5)


def test_the_entropy_term_spreads_the_exits() -> None:
    """With equal losses at all loops, descending the gradient must raise the entropy: the sign of the term."""
    ce = jnp.ones((4, 1))
    gate = gates(0.97, 0.5, 0.5, 0.5)  # nearly all mass on loop 1

    def entropy(g: jax.Array) -> float:
        p = np.asarray(jnp.exp(exit_log_probabilities(g, jnp.array([4]))))
        return float(-(p * np.log(p)).sum())

    gradient = jax.grad(lambda g: stage1_loss(ce, g, jnp.array([4]), 0.1)[0].sum())(gate)
    assert entropy(gate - 1.0 * gradient) > entropy(gate)


def test_loops_beyond_the_exit_neither_count_nor_produce_nan() -> None:
    gate = gates(0.5, 0.25, 0.8, 0.9)

    def objective(ce: jax.Array, g: jax.Array) -> jax.Array:
        return stage1_loss(ce, g, jnp.array([2]), 0.1)[0].sum()

    ce_gradient, gate_gradient = jax.grad(objective, argnums=(0, 1))(jnp.array([[2.0], [1.0], [5.0], [9.0]]), gate)
    np.testing.assert_allclose(ce_gradient[:, 0], [0.5, 0.5, 0, 0], rtol=1e-5)
    assert np.isfinite(gate_gradient).all()
    assert gate_gradient[0, 0] != 0
    np.testing.assert_array_equal(gate_gradient[1:, 0], 0)


def test_improvement_target_compares_each_loop_with_the_one_before() -> None:
    # loop 2 improved by 0.105, loop 3 got worse, loop 4 improved by 0.005 = gamma
    ce = jnp.array([[1.0], [0.895], [0.900], [0.895]])
    target = improvement_target(ce)[:, 0]
    np.testing.assert_allclose(target, [sigmoid(50 * 0.1), sigmoid(-50 * 0.005), 0.5], atol=1e-4)


def test_look_ahead_target_asks_whether_any_deeper_loop_helps() -> None:
    # nothing happens until loop 4: loops 1-3 must all go on
    late = look_ahead_target(jnp.array([[2.3], [2.3], [2.3], [0.1]]))[:, 0]
    np.testing.assert_allclose(late, [1, 1, 1], atol=1e-4)
    # all is known after loop 2: only loop 1 goes on
    early = look_ahead_target(jnp.array([[2.0], [0.1], [0.1], [0.1]]))[:, 0]
    np.testing.assert_allclose(early, [1, sigmoid(-0.25), sigmoid(-0.25)], atol=1e-4)
    # and Ouro's target on the late token, for contrast: told to leave at loops 2 and 3
    assert (np.asarray(improvement_target(jnp.array([[2.3], [2.3], [2.3], [0.1]])))[:2] < 0.5).all()


def test_gate_loss_is_bce_between_target_and_one_minus_lambda() -> None:
    gate, target = gates(0.25, 0.9), jnp.array([[0.8], [0.3]])
    by_hand = -np.mean([0.8 * np.log(0.75) + 0.2 * np.log(0.25), 0.3 * np.log(0.1) + 0.7 * np.log(0.9)])
    np.testing.assert_allclose(gate_loss(gate, target)[0], by_hand, rtol=1e-5)
    # its minimum is at 1 - lambda = target
    best = gate_loss(gates(0.2, 0.7), target)[0]
    for a, b in ((0.15, 0.7), (0.25, 0.7), (0.2, 0.65), (0.2, 0.75)):
        assert gate_loss(gates(a, b), target)[0] > best


def test_targets_carry_no_gradient() -> None:
    ce = jnp.array([[1.0], [0.9], [0.7], [0.7]])
    gradient = jax.grad(lambda c: gate_loss(gates(0.5, 0.5, 0.5), improvement_target(c)).sum())(ce)
    np.testing.assert_array_equal(gradient, 0)


@pytest.mark.parametrize("shift", [0.0, 1e4, -1e4])
def test_token_cross_entropy_matches_log_softmax_and_is_stable(shift: float) -> None:
    logits = jnp.array([[0.0, 1.0, 3.0], [2.0, 2.0, -1.0]]) + shift
    ce, right = token_cross_entropy(logits, jnp.array([1, 0]))
    wanted = -np.asarray(jax.nn.log_softmax(logits))[[0, 1], [1, 0]]
    np.testing.assert_allclose(ce, wanted, rtol=1e-4, atol=1e-3)
    assert right.tolist() == [False, True]
