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
    POLICY_ALIASES,
    POLICY_NAMES,
    POLICY_NEEDS_SCORE,
    ExitParams,
    ExitPolicy,
    ExitState,
    exit_test,
    fresh_exit_state,
)
from tests.oracle import Policy
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
        state, leaves = exit_test(state, params(rows), jnp.full((len(rows),), r, jnp.int32), logits, fixed)
        chosen = np.where((chosen == 0) & np.asarray(leaves), r, chosen)
    assert (chosen > 0).all(), "every row leaves by the model's depth"
    return chosen.tolist()


def constant(hazard: float, rows: int = 1) -> np.ndarray:
    return np.full((MAX_LOOPS, rows), logit(hazard))


def test_survival_is_the_product_over_every_loop() -> None:
    state, seen = fresh_exit_state(1), []
    row = params([Policy(threshold=1.0)])
    for r in range(1, 4):
        state, _ = exit_test(
            state, row, jnp.asarray([r], jnp.int32), jnp.asarray([logit(0.3)], jnp.float32), jnp.zeros(1, jnp.int32)
        )
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
    """fresh_exit_state forgets both the survival and an announced exit."""
    fresh = fresh_exit_state(3)
    np.testing.assert_array_equal(fresh.survival, np.ones(3, np.float32))
    np.testing.assert_array_equal(fresh.pending, np.zeros(3, np.int32))


def test_names_and_aliases() -> None:
    assert {name: policy.name.lower() for name, policy in POLICY_NAMES.items()} == {n: n for n in POLICY_NAMES}
    assert POLICY_ALIASES == {"ouro": "gate", "ouro_delayed": "gate_delayed"}
    assert set(POLICY_NEEDS_SCORE) == {"gate", "gate_delayed"}
    assert len(set(ExitPolicy)) == 4


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
            jnp.asarray(gate[index], jnp.float32),
            jnp.zeros(9, jnp.int32),
        )

    plain, mixed = run(np.arange(9)), run(order)
    for a, b in zip(jax.tree.leaves(plain), jax.tree.leaves(mixed), strict=True):
        np.testing.assert_array_equal(np.asarray(a)[order], np.asarray(b))
    assert {f.name for f in dataclasses.fields(ExitState)} == {"survival", "pending"}
