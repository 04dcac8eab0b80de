"""Exit policies as pure functions.

PROTECTS: the depth of every token.  A policy that counts loops from the wrong base, forgets an early loop's hazard, or
treats "full depth" as a threshold to reach would change every answer silently.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlt_jax.exits import (
    DEFAULT_THRESHOLDS,
    POLICY_ALIASES,
    POLICY_NAMES,
    POLICY_NEEDS_SCORE,
    ExitParams,
    ExitScores,
    ExitState,
    exit_test,
    fresh_exit_state,
    latent_score,
    observe,
    restarted,
)
from tests.oracle import Policy
from tests.oracle.huginn import exit_score
from tests.oracle.ouro import wants_exit

MAX_LOOPS = 4


def logit(hazard: float) -> float:
    return float(np.log(hazard) - np.log1p(-hazard))


def params(rows: list[Policy]) -> ExitParams:
    """Rows as the device sees them; TRACE rows carry bounds too."""
    return ExitParams(
        policy=jnp.asarray([POLICY_NAMES[p.name] for p in rows], jnp.int32),
        threshold=jnp.asarray([p.threshold for p in rows], jnp.float32),
        min_loops=jnp.asarray([p.min_loops for p in rows], jnp.int32),
        max_loops=jnp.asarray([p.max_loops for p in rows], jnp.int32),
    )


def depths(rows: list[Policy], gate_logits: np.ndarray | None, given_depths: list[int] | None = None) -> list[int]:
    """Run all rows until each has left; gate_logits [loops, rows]."""
    state, chosen = fresh_exit_state(len(rows)), np.zeros(len(rows), int)
    fixed = jnp.asarray(given_depths or [0] * len(rows), jnp.int32)
    for r in range(1, MAX_LOOPS + 1):
        logits = None if gate_logits is None else jnp.asarray(gate_logits[r - 1], jnp.float32)
        scores = ExitScores(gate=logits)
        state, leaves = exit_test(state, params(rows), jnp.full((len(rows),), r, jnp.int32), scores, fixed)
        chosen = np.where((chosen == 0) & np.asarray(leaves), r, chosen)
    assert (chosen > 0).all(), "every row leaves by the model's depth"
    return chosen.tolist()


def constant(hazard: float, rows: int = 1) -> np.ndarray:
    return np.full((MAX_LOOPS, rows), logit(hazard))


def test_survival_is_the_product_over_every_loop() -> None:
    state, seen = fresh_exit_state(1), []
    row = params([Policy(threshold=1.0)])
    for r in range(1, 4):
        scores = ExitScores(gate=jnp.asarray([logit(0.3)], jnp.float32))
        state, _ = exit_test(state, row, jnp.asarray([r], jnp.int32), scores, jnp.zeros(1, jnp.int32))
        seen.append(float(state.survival[0]))
    assert seen == pytest.approx([0.7, 0.49, 0.343], abs=1e-6)
    assert state.survival.dtype == jnp.float32


@pytest.mark.parametrize(
    ("policy", "hazard", "depth"),
    [
        (Policy(threshold=0.6), 0.4, 2),  # CDF .40, .64
        (Policy(threshold=0.5), 0.3, 2),  # CDF .30, .51
        (Policy(name="gate_delayed", threshold=0.5), 0.3, 3),
        (Policy(threshold=0.0), 0.01, 2),  # threshold 0 leaves at min_loops
        (Policy(threshold=0.0, min_loops=3), 0.01, 3),
        (Policy(threshold=0.0, min_loops=1), 0.01, 1),
        (Policy(threshold=0.9, max_loops=3), 0.01, 3),  # the cap
        (Policy(threshold=0.0, min_loops=1, max_loops=1), 0.01, 1),
        (Policy(name="gate_delayed", threshold=0.0), 0.01, 3),  # earliest: min + 1
        (Policy(name="gate_delayed", threshold=0.0, min_loops=1), 0.01, 2),
        (Policy(name="gate_delayed", threshold=0.0, min_loops=4), 0.01, 4),
        (Policy(name="gate_delayed", threshold=0.0, min_loops=1, max_loops=1), 0.01, 1),
        (Policy(name="fixed", threshold=0.0, max_loops=3), 0.99, 3),
    ],
    ids=str,
)
def test_constant_hazard(policy: Policy, hazard: float, depth: int) -> None:
    assert depths([policy], constant(hazard)) == [depth]


@pytest.mark.parametrize("name", ["gate", "gate_delayed"])
def test_threshold_one_is_full_depth_even_where_sigmoid_rounds_to_one(name: str) -> None:
    always = np.full((MAX_LOOPS, 1), 200.0)
    assert float(jax.nn.sigmoid(jnp.float32(200.0))) == 1.0
    assert depths([Policy(name=name, threshold=1.0, min_loops=1)], always) == [4]
    assert depths([Policy(name=name, threshold=0.999, min_loops=1)], always) == [1 if name == "gate" else 2]


def test_loops_before_min_count_towards_the_cdf() -> None:
    """All the hazard sits in loop 1: at min_loops = 2 the CDF is already there."""
    hazard = np.asarray([[logit(0.9)], [-30.0], [-30.0], [-30.0]])
    assert depths([Policy(threshold=0.8, min_loops=2)], hazard) == [2]


def test_delayed_trigger_at_the_last_but_one_loop_leaves_at_the_cap() -> None:
    hazard = np.asarray([[-30.0], [-30.0], [30.0], [-30.0]])
    assert depths([Policy(name="gate_delayed", threshold=0.5)], hazard) == [4]
    capped = np.asarray([[-30.0], [30.0], [-30.0], [-30.0]])
    assert depths([Policy(name="gate_delayed", threshold=0.5, max_loops=3)], capped) == [3]


def test_a_given_depth_overrules_every_policy() -> None:
    rows = [Policy(name="trace", threshold=0.0, min_loops=1)] * 4 + [Policy(threshold=0.0, min_loops=1)]
    assert depths(rows, constant(0.9, 5), [4, 2, 3, 1, 4]) == [4, 2, 3, 1, 4]


def test_a_model_without_a_gate_runs_to_its_bound() -> None:
    rows = [Policy(name="fixed", max_loops=2), Policy(name="fixed"), Policy(name="trace")]
    assert depths(rows, None, [0, 0, 3]) == [2, 4, 3]


def test_a_new_token_starts_afresh() -> None:
    """It forgets both the survival and an announced exit; its neighbours keep theirs."""
    fresh = fresh_exit_state(3)
    np.testing.assert_array_equal(fresh.survival, np.ones(3, np.float32))
    np.testing.assert_array_equal(fresh.pending, np.zeros(3, np.int32))
    used = ExitState(survival=jnp.full(3, 0.25, jnp.float32), pending=jnp.full(3, 2, jnp.int32))
    after = restarted(used, jnp.asarray([False, True, False]))
    np.testing.assert_array_equal(after.survival, np.asarray([0.25, 1, 0.25], np.float32))
    np.testing.assert_array_equal(after.pending, [2, 0, 2])


def test_names_and_aliases() -> None:
    assert {name: int(policy) for name, policy in POLICY_NAMES.items()} == {
        "fixed": 0, "gate": 1, "gate_delayed": 2, "trace": 3, "latent": 4, "kl": 5, "argmax": 6,
    }  # fmt: skip
    assert POLICY_ALIASES == {"ouro": "gate", "ouro_delayed": "gate_delayed"}
    assert set(POLICY_NEEDS_SCORE) == set(POLICY_NAMES) - {"fixed", "trace"}
    assert DEFAULT_THRESHOLDS == {"latent": 0.03, "kl": 1e-3, "argmax": 5}


rows_of_policies = st.lists(
    st.builds(
        lambda name, threshold, bounds: Policy(
            name=name, threshold=threshold, min_loops=min(bounds), max_loops=max(bounds)
        ),
        st.sampled_from(["gate", "gate_delayed", "fixed"]),
        st.one_of(st.floats(0, 1, width=32), st.sampled_from([0.0, 0.5, 1.0])),
        st.tuples(st.integers(1, MAX_LOOPS), st.integers(1, MAX_LOOPS)),
    ),
    min_size=5,
    max_size=5,  # one shape: a new one would compile
)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    rows=rows_of_policies,
    gate=st.lists(st.floats(-8, 8, width=32), min_size=5 * MAX_LOOPS, max_size=5 * MAX_LOOPS),
)
def test_rows_equal_the_serial_rule(rows: list[Policy], gate: list[float]) -> None:
    """Each row of a mixed batch decides as one token alone does, except where float32 meets the threshold itself."""
    logits = np.asarray(gate).reshape(MAX_LOOPS, 5)
    actual = depths(rows, logits)
    for row, policy in enumerate(rows):
        survival, pending, closest = 1.0, None, np.inf
        for r in range(1, MAX_LOOPS + 1):
            survival *= 1.0 - 1.0 / (1.0 + np.exp(-logits[r - 1, row]))
            closest = min(closest, abs(1.0 - survival - policy.threshold))
            leaves, pending = wants_exit(policy, 1, r, 1.0 - survival, pending)
            if leaves:
                break
        if closest > 1e-6 or policy.name == "fixed" or policy.threshold >= 1:
            assert actual[row] == r, (row, policy, logits[:, row])


def test_a_row_does_not_see_its_neighbours() -> None:
    """Bitwise: the same row in another place, among others, has the same state and decision."""
    rng = np.random.default_rng(3)
    rows = [
        Policy(name=name, threshold=float(t), min_loops=m)
        for name, t, m in zip(["gate", "gate_delayed", "fixed"] * 3, rng.random(9), rng.integers(1, 4, 9), strict=True)
    ]
    gate, done = rng.normal(size=9), rng.integers(1, 5, 9)
    before = ExitState(
        survival=jnp.asarray(rng.random(9), jnp.float32), pending=jnp.asarray(rng.integers(0, 4, 9), jnp.int32)
    )
    order = rng.permutation(9)

    def run(index: np.ndarray):
        return exit_test(
            jax.tree.map(lambda a: a[index], before),
            jax.tree.map(lambda a: a[index], params(rows)),
            jnp.asarray(done[index], jnp.int32),
            ExitScores(gate=jnp.asarray(gate[index], jnp.float32)),
            jnp.zeros(9, jnp.int32),
        )

    plain, mixed = run(np.arange(9)), run(order)
    for a, b in zip(jax.tree.leaves(plain), jax.tree.leaves(mixed), strict=True):
        np.testing.assert_array_equal(np.asarray(a)[order], np.asarray(b))
    assert {f.name for f in dataclasses.fields(ExitState)} == {"survival", "pending", "readout"}


VOCAB, WIDTH, ROWS = 7, 6, 4


def converging(
    rows: list[Policy], states: np.ndarray, logits: np.ndarray, read_out: list[bool] | None = None
) -> list[int]:
    """Depths by what states [loops + 1, rows, E] and readouts [loops, rows, V] say; all rows keep looping."""
    state = fresh_exit_state(len(rows), VOCAB, ("latent", "kl", "argmax"))
    chosen = np.zeros(len(rows), int)
    taken = jnp.asarray(read_out or [True] * len(rows))
    for r in range(1, len(logits) + 1):
        done = jnp.full((len(rows),), r, jnp.int32)
        readout, kl = observe(state.readout, jnp.asarray(logits[r - 1], jnp.float32), done, taken)
        latent = latent_score(jnp.asarray(states[r - 1], jnp.float32), jnp.asarray(states[r], jnp.float32))
        scores = ExitScores(latent=latent, kl=kl)
        state = dataclasses.replace(state, readout=readout)
        state, leaves = exit_test(state, params(rows), done, scores, jnp.zeros(len(rows), jnp.int32))
        chosen = np.where((chosen == 0) & np.asarray(leaves), r, chosen)
    return chosen.tolist()


def one_row(
    policy: Policy, changes: list[float] | None = None, best: list[int] | None = None, sharpness: float = 9.0
) -> int:
    """Depth of a row whose loop r changes the state by changes[r - 1] of its size; its best token is best[r - 1]."""
    loops = len(changes or best)
    states, logits = np.ones((loops + 1, 1, WIDTH)), np.zeros((loops, 1, VOCAB))
    for r, change in enumerate(changes or [], start=1):
        states[r] = states[r - 1] / (1 - change)  # |s_r - s_{r-1}| / |s_r| = change
    for r, token in enumerate(best or []):
        logits[r, 0, token] = sharpness
    return converging([policy], states, logits)[0]


@pytest.mark.parametrize(
    ("bounds", "threshold", "depth"),
    [
        ({"min_loops": 1}, 0.25, 2),
        ({"min_loops": 1}, 0.19, 4),  # strictly below
        ({"min_loops": 3}, 0.25, 4),  # 0.5 at 3 is no exit although 0.2 at 2 was one
        ({"min_loops": 1, "max_loops": 3}, 0.11, 3),
        ({"min_loops": 1}, 0.0, 5),
        ({"min_loops": 1}, 1.0, 1),
    ],
)
def test_latent(bounds: dict, threshold: float, depth: int) -> None:
    policy = Policy(name="latent", threshold=threshold, **{"max_loops": 5} | bounds)
    assert one_row(policy, [0.9, 0.2, 0.5, 0.1, 0.1]) == depth


def test_latent_from_zeros() -> None:
    """From a zero state the first change is the state itself: exactly 1.  A state of zeros never leaves early."""
    zeros, ones = jnp.zeros((1, WIDTH)), jnp.full((1, WIDTH), 3.0)
    assert float(latent_score(zeros, ones)[0]) == 1.0
    assert np.isnan(latent_score(zeros, zeros))
    policy = Policy(name="latent", threshold=5.0, min_loops=1, max_loops=3)
    assert converging([policy], np.zeros((4, 1, WIDTH)), np.zeros((3, 1, VOCAB))) == [3]


@pytest.mark.parametrize(
    ("best", "threshold", "bounds", "depth"),
    [
        ([3, 3, 3, 3, 3], 2, {}, 3),  # loop 1 has nobody before it: 0, 1, 2
        ([3, 3, 4, 4, 4], 2, {}, 5),
        ([3, 4, 3, 4, 3], 1, {}, 5),
        ([0, 0, 0, 0, 0], 1, {}, 2),  # token 0 is no "none"
        ([3, 3, 3, 3, 3], 1, {"min_loops": 4}, 4),
        ([3, 3, 3, 3, 3], 4, {"max_loops": 3}, 3),
    ],
)
def test_argmax(best: list[int], threshold: float, bounds: dict, depth: int) -> None:
    policy = Policy(name="argmax", threshold=threshold, **{"min_loops": 1, "max_loops": 5} | bounds)
    assert one_row(policy, best=best) == depth


def test_kl_starts_from_the_uniform_distribution() -> None:
    """An indifferent first readout has KL 0 from it; a sharp one leaves only once it repeats itself."""
    policy = Policy(name="kl", threshold=1e-3, min_loops=1, max_loops=5)
    assert one_row(policy, best=[2, 2, 2, 2, 2], sharpness=0.0) == 1
    assert one_row(policy, best=[2, 2, 2, 2, 2]) == 2
    assert one_row(policy, best=[2, 3, 4, 4, 5]) == 4
    assert one_row(dataclasses.replace(policy, threshold=0.0), best=[2, 2, 2, 2, 2], sharpness=0.0) == 5


@settings(max_examples=60, deadline=None, derandomize=True)
@given(seed=st.integers(0, 2**32 - 1), data=st.data())
def test_convergence_rows_equal_the_serial_rule(seed: int, data: st.DataObject) -> None:
    """Each row of a mixed batch decides as the oracle's rule does; rows that were not read out keep their state."""
    rng, loops = np.random.default_rng(seed), 6
    limits = {"latent": (0.02, 0.5), "kl": (1e-3, 0.3), "argmax": (1, 3)}
    rows = []
    for _ in range(ROWS):
        name = data.draw(st.sampled_from(sorted(limits)))
        low, high = sorted(data.draw(st.tuples(st.integers(1, loops), st.integers(1, loops))))
        threshold = float(data.draw(st.integers(1, 3))) if name == "argmax" else float(rng.uniform(*limits[name]))
        rows.append(Policy(name=name, threshold=threshold, min_loops=low, max_loops=high))
    shrink = 0.4 ** np.arange(loops + 1)[:, None, None]  # states and logits that settle down
    states = 1 + shrink * rng.normal(size=(loops + 1, ROWS, WIDTH))
    logits = 2 * rng.normal(size=(1, ROWS, VOCAB)) + 4 * shrink[1:] * rng.normal(size=(loops, ROWS, VOCAB))
    read_out = [row.name != "latent" for row in rows]
    actual = converging(rows, states, logits, read_out)
    for i, policy in enumerate(rows):
        for r in range(1, loops + 1):
            score = exit_score(policy.name, states[: r + 1, i], logits[:r, i])
            near = policy.name != "argmax" and abs(score - policy.threshold) < 1e-5
            leaves, _ = wants_exit(policy, 1, r, score, None)
            if leaves or near:
                break
        assert near or actual[i] == r, (policy, i)


def test_rows_that_are_not_read_out_keep_what_they_remember() -> None:
    before = fresh_exit_state(2, VOCAB, ("kl", "argmax")).readout
    logits = jnp.asarray(np.random.default_rng(0).normal(size=(2, VOCAB)), jnp.float32)
    after, kl = observe(before, logits, jnp.asarray([1, 1], jnp.int32), jnp.asarray([False, True]))
    for new, old in zip(jax.tree.leaves(after), jax.tree.leaves(before), strict=True):
        np.testing.assert_array_equal(new[0], old[0])
    assert kl.shape == (2,)
    assert int(after.best[1]) == int(jnp.argmax(logits[1]))


@pytest.mark.parametrize("scores", [(), ("gate",), ("latent",)])
def test_models_without_readout_scores_carry_no_readout(scores: tuple[str, ...]) -> None:
    assert fresh_exit_state(2, VOCAB, scores).readout is None
    only_kl = fresh_exit_state(2, VOCAB, ("kl",)).readout
    assert only_kl.best is None
    assert only_kl.log_probabilities.shape == (2, VOCAB)
    assert fresh_exit_state(2, VOCAB, ("argmax",)).readout.log_probabilities is None
