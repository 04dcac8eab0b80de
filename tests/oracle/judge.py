"""Compare what an engine did with what the oracle says along the engine's own tokens and depths (grade G2).

A different choice is a near tie when the oracle itself was closer than `tolerance` to making it: near ties are counted
and bounded by the caller; everything else is a mismatch and named.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

from tests.oracle.ouro import Policy, Step, unchanged, wants_exit

# (output index, logits [V], token) -> how far the token is from the best choice; 0 when it is the best
Distance = Callable[[int, np.ndarray, int], float]

TINY = float(np.finfo(float).tiny)


class Oracle(Protocol):
    """What every oracle can do: the generation of one request, or what it thinks along given tokens and depths."""

    def run(self, prompt: Sequence[int], outputs: int, policy: Policy, **request: Any) -> list[Step]: ...


def greedy_distance(_: int, logits: np.ndarray, token: int) -> float:
    best = int(np.argmax(logits))
    return 0.0 if token == best else max(float(logits[best] - logits[token]), TINY)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Judgement:
    outputs: int
    near_ties: int
    mismatches: tuple[str, ...]
    logprob_error: float  # largest difference of the raw log-probabilities


def judge(
    oracle: Oracle,
    prompt: Sequence[int],
    policy: Policy,
    *,
    tokens: Sequence[int],
    depths: Sequence[int],
    logprobs: Sequence[float],
    distance: Distance = greedy_distance,
    tolerance: float = 1e-4,
    **request: Any,
) -> Judgement:
    """`request` is what else the oracle's `run` takes: prefill_loops, and of some oracles chunk or initial_state."""
    assert len(tokens) == len(depths) == len(logprobs) >= 1
    steps = oracle.run(prompt, len(tokens), policy, tokens=tokens, depths=depths, **request)
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
            margin = _depth_margin(policy, k, step, depths[k], tolerance)
            if margin > tolerance:
                wrong.append(f"output {k}: depth {depths[k]}, scores {np.round(step.scores, 5)}, {policy}")
            elif margin:
                near += 1
    raw = [step.log_probabilities[step.token] for step in steps]
    error = float(np.max(np.abs(np.asarray(raw) - np.asarray(logprobs))))
    return Judgement(outputs=len(tokens), near_ties=near, mismatches=tuple(wrong), logprob_error=error)


def _depth_margin(policy: Policy, output: int, step: Step, depth: int, tolerance: float) -> float:
    """0 when the policy leaves at `depth`; else how far a score or logit would have to move for it to do so.

    Infinity where no move up to `tolerance` does it, or none at all.
    """
    if _depth_chosen(policy, output, step.scores) == depth:
        return 0.0
    if policy.name in ("fixed", "trace") or not policy.min_loops <= depth <= policy.max_loops:
        return float("inf")
    if policy.name == "argmax":
        return _argmax_margin(policy, output, step.readouts, depth, tolerance)
    distances = [abs(score - policy.threshold) for score in step.scores]
    for margin in sorted(d for d in distances if d <= tolerance):  # move every score within `margin` to either side
        for side in (-1, 1):
            moved = [policy.threshold + side if d <= margin else s for s, d in zip(step.scores, distances, strict=True)]
            if _depth_chosen(policy, output, moved) == depth:
                return max(margin, TINY)
    return float("inf")


def _argmax_margin(policy: Policy, output: int, readouts: np.ndarray, depth: int, tolerance: float) -> float:
    """The same for a count of unchanged best tokens, where any token close enough to the best may be the best."""
    behind = readouts.max(axis=1, keepdims=True) - readouts  # [depth, V]
    for margin in sorted(set(behind[behind <= tolerance])):
        for best in itertools.product(*(np.flatnonzero(row <= margin) for row in behind)):
            if _depth_chosen(policy, output, [unchanged(best[:r]) for r in range(1, len(best) + 1)]) == depth:
                return max(float(margin), TINY)
    return float("inf")


def _depth_chosen(policy: Policy, output: int, scores: Sequence[float]) -> int:
    """The depth at which these scores end the loop; one past the last when they do not."""
    pending = None
    for r, score in enumerate(scores, start=1):
        leaves, pending = wants_exit(policy, output, r, score, pending)
        if leaves:
            return r
    return len(scores) + 1
