"""Compare what an engine did with what the oracle says along the engine's own tokens and depths (grade G2).

A different choice is a near tie when the oracle itself was closer than `tolerance` to making it: near ties are counted
and bounded by the caller; everything else is a mismatch and named.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np

from tests.oracle.ouro import OuroOracle, Policy, wants_exit

# (output index, logits [V], token) -> how far the token is from the best choice; 0 when it is the best
Distance = Callable[[int, np.ndarray, int], float]


def greedy_distance(_: int, logits: np.ndarray, token: int) -> float:
    best = int(np.argmax(logits))
    return 0.0 if token == best else max(float(logits[best] - logits[token]), np.finfo(float).tiny)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Judgement:
    outputs: int
    near_ties: int
    mismatches: tuple[str, ...]
    logprob_error: float  # largest difference of the raw log-probabilities


def judge(
    oracle: OuroOracle,
    prompt: Sequence[int],
    policy: Policy,
    *,
    tokens: Sequence[int],
    depths: Sequence[int],
    logprobs: Sequence[float],
    prefill_loops: int | None = None,
    distance: Distance = greedy_distance,
    tolerance: float = 1e-4,
) -> Judgement:
    assert len(tokens) == len(depths) == len(logprobs) >= 1
    steps = oracle.run(prompt, len(tokens), policy, prefill_loops=prefill_loops, tokens=tokens, depths=depths)
    near, wrong = 0, []
    if depths[0] != steps[0].depth:
        wrong.append(f"output 0: depth {depths[0]}, the prompt ran {steps[0].depth} loops")
    for k, step in enumerate(steps):
        margin = distance(k, step.logits, step.token)
        if margin > tolerance:
            wrong.append(f"output {k}: token {step.token} is {margin:.2e} from the best choice")
        elif margin:
            near += 1
        if k:
            margin = _depth_margin(policy, k, step.cdf, depths[k])
            if margin > tolerance:
                wrong.append(f"output {k}: depth {depths[k]}, cdf {np.round(step.cdf, 5)}, {policy}")
            elif margin:
                near += 1
    raw = [step.log_probabilities[step.token] for step in steps]
    error = float(np.max(np.abs(np.asarray(raw) - np.asarray(logprobs))))
    return Judgement(outputs=len(tokens), near_ties=near, mismatches=tuple(wrong), logprob_error=error)


def _depth_margin(policy: Policy, output: int, cdf: Sequence[float], depth: int) -> float:
    """0 when the policy leaves at `depth`; else how far a CDF would have to move for it to do so."""
    if _depth_chosen(policy, output, cdf) == depth:
        return 0.0
    if policy.name in ("fixed", "trace") or policy.threshold >= 1 or not policy.min_loops <= depth <= policy.max_loops:
        return float("inf")
    distances = [abs(c - policy.threshold) for c in cdf]
    for margin in sorted(distances):  # move every CDF within `margin` to the side that the engine saw
        for side in (-1, 1):
            moved = [policy.threshold + side if d <= margin else c for c, d in zip(cdf, distances, strict=True)]
            if _depth_chosen(policy, output, moved) == depth:
                return max(margin, np.finfo(float).tiny)
    return float("inf")


def _depth_chosen(policy: Policy, output: int, cdf: Sequence[float]) -> int:
    """The depth at which these CDFs end the loop; one past the last when they do not."""
    pending = None
    for r, value in enumerate(cdf, start=1):
        leaves, pending = wants_exit(policy, output, r, value, pending)
        if leaves:
            return r
    return len(cdf) + 1
