"""The oracle itself.

PROTECTS: every engine test trusts the oracle; here it must reproduce what the public reference recorded (golden.npz)
and what a second, unrelated oracle found for early exit (derived.npz), and its judge must refuse what is wrong.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from tests.oracle import LAST_EXITED, SHARED, OuroOracle, Policy, judge

FIXTURE = Path(__file__).parent.parent / "fixtures" / "ouro_tiny"
FULL = Policy(name="fixed")
ADAPTIVE = Policy(threshold=0.5, min_loops=1)


@pytest.fixture(scope="module")
def golden() -> dict[str, np.ndarray]:
    return dict(np.load(FIXTURE / "golden.npz"))


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
@pytest.mark.parametrize("layout", [LAST_EXITED, SHARED])
@pytest.mark.parametrize("row", [0, 1])
def test_adaptive_greedy_equals_the_derived_fixture(layout: str, row: int, dtype: type) -> None:
    derived = np.load(FIXTURE / "derived.npz")
    prompt = np.load(FIXTURE / "golden.npz")["input_ids"][row]
    steps = OuroOracle(FIXTURE, dtype=dtype, layout=layout).run(prompt, 16, ADAPTIVE)
    assert [s.token for s in steps] == derived[f"adaptive_{layout}_thr0.5_ids"][row].tolist()
    assert [s.depth for s in steps[1:]] == (derived[f"adaptive_{layout}_thr0.5_exit_steps"][row] + 1).tolist()
    assert steps[0].depth == 4


@pytest.mark.parametrize("row", [0, 1])
def test_full_depth_equals_the_reference(golden: dict[str, np.ndarray], row: int) -> None:
    steps = OuroOracle(FIXTURE).run(golden["input_ids"][row], 16, FULL)
    assert [s.token for s in steps] == golden["greedy_full_ids"][row].tolist()
    np.testing.assert_allclose([s.logits for s in steps], golden["greedy_full_logits"][row], atol=2e-4, rtol=0)
    assert {s.depth for s in steps} == {4}


@pytest.mark.parametrize("row", [0, 1])
def test_gate_sees_the_reference_cdf(golden: dict[str, np.ndarray], row: int) -> None:
    """Full-depth decode along the prompt: the CDF that a decode token gets is the reference's for that position."""
    prompt = golden["input_ids"][row]
    along = OuroOracle(FIXTURE).run(prompt[:1], 12, FULL, tokens=[*prompt[1:], 0], depths=[4] * 12)
    cdf = np.asarray([s.scores for s in along[1:]])
    np.testing.assert_allclose(cdf[:, :3], golden["exit_cdf"][row, 1:, :3], atol=2e-4, rtol=0)
    np.testing.assert_allclose([s.logits for s in along], golden["logits"][row], atol=2e-4, rtol=0)


def test_following_a_run_reproduces_it() -> None:
    oracle, prompt = OuroOracle(FIXTURE), [5, 9, 200, 31]
    policy = Policy(name="gate_delayed", threshold=0.45, min_loops=1)
    run = oracle.run(prompt, 12, policy)
    tokens, depths = [s.token for s in run], [s.depth for s in run]
    assert len(set(depths[1:])) > 1, "the run must mix depths to mean anything"
    again = oracle.run(prompt, 12, policy, tokens=tokens, depths=depths)
    for a, b in zip(run, again, strict=True):
        assert dataclasses.replace(a, logits=None) == dataclasses.replace(b, logits=None)
        np.testing.assert_array_equal(a.logits, b.logits)


@pytest.fixture(scope="module")
def record() -> dict:
    run = OuroOracle(FIXTURE).run([5, 9, 200, 31], 8, ADAPTIVE)
    return {
        "tokens": [s.token for s in run],
        "depths": [s.depth for s in run],
        "logprobs": [s.log_probabilities[s.token] for s in run],
    }


class TestJudge:
    """A true record passes; one wrong token, depth or log-probability is refused or measured."""

    def _judge(self, record: dict):
        return judge(OuroOracle(FIXTURE), [5, 9, 200, 31], ADAPTIVE, **record)

    def test_accepts_the_truth(self, record: dict) -> None:
        verdict = self._judge(record)
        assert verdict.mismatches == ()
        assert verdict.near_ties == 0
        assert verdict.logprob_error < 1e-12

    @pytest.mark.parametrize("output", [0, 3, 7])
    def test_refuses_a_wrong_token(self, record: dict, output: int) -> None:
        tokens = list(record["tokens"])
        tokens[output] = (tokens[output] + 1) % 256
        verdict = self._judge(record | {"tokens": tokens})
        assert any(m.startswith(f"output {output}: token") for m in verdict.mismatches)

    @pytest.mark.parametrize("output", [1, 7])
    def test_refuses_a_wrong_depth(self, record: dict, output: int) -> None:
        depths = list(record["depths"])
        depths[output] = depths[output] % 4 + 1
        verdict = self._judge(record | {"depths": depths})
        assert any(m.startswith(f"output {output}: depth") for m in verdict.mismatches)

    def test_refuses_a_prompt_at_another_depth(self, record: dict) -> None:
        verdict = self._judge(record | {"depths": [3, *record["depths"][1:]]})
        assert any(m.startswith("output 0: depth 3") for m in verdict.mismatches)

    def test_measures_log_probabilities(self, record: dict) -> None:
        logprobs = [record["logprobs"][0] - 0.25, *record["logprobs"][1:]]
        assert self._judge(record | {"logprobs": logprobs}).logprob_error == pytest.approx(0.25)
