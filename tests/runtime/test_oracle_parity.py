"""The engine against the independent oracle, for requests nobody thought of (grade G2).

PROTECTS: the meaning of every exit and sampling parameter, in mixed batches, for both KV layouts.  The oracle runs
along the engine's own tokens and depths and says whether each choice was the right one; a choice that the oracle itself
was within 1e-4 of making is a near tie, counted, and at most one in a thousand.
"""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from rlt_jax import SamplingParams
from tests.engines import LAST_EXITED, SHARED, Job, engine, oracle, policy_of, serve
from tests.oracle import judge
from tests.oracle.judge import greedy_distance
from tests.oracle.sampling import sampled_distance

LOGPROB_TOLERANCE = 2e-4  # float32 against float64 over three layers, four loops and up to fifty positions


@st.composite
def parameters(draw: st.DrawFn) -> SamplingParams:
    outputs = draw(st.integers(1, 14))
    low, high = sorted(draw(st.tuples(st.integers(1, 4), st.integers(1, 4))))
    chosen: dict = {
        "max_tokens": outputs,
        "prefill_loops": draw(st.sampled_from([4, 4, 1, 2, 3])),
        "min_loops": low,
        "max_loops": high,
        "ignore_eos": draw(st.booleans()),
        "stop_token_ids": tuple(draw(st.lists(st.integers(0, 255), max_size=3))),
    }
    policy = draw(st.sampled_from(["gate", "gate", "gate_delayed", "fixed", "trace"]))
    if policy == "trace":
        rest = draw(st.lists(st.integers(low, high), min_size=outputs - 1, max_size=outputs - 1))
        chosen["exit_trace"] = (chosen["prefill_loops"], *rest)
    else:
        chosen["exit_policy"] = policy
        chosen["exit_threshold"] = draw(st.one_of(st.floats(0.1, 0.9), st.sampled_from([0.0, 1.0])))
    if draw(st.booleans()):
        chosen |= {
            "temperature": draw(st.floats(0.3, 1.5)),
            "top_k": draw(st.sampled_from([0, 0, 3, 40])),
            "top_p": draw(st.sampled_from([1.0, 1.0, 0.5, 0.9])),
            "min_p": draw(st.sampled_from([0.0, 0.0, 0.1])),
            "seed": draw(st.integers(0, 2**64 - 1)),
            "sample_index": draw(st.integers(0, 3)),
        }
    return SamplingParams(**chosen)


prompts = st.lists(st.integers(0, 255), min_size=1, max_size=30)
batches = st.lists(st.tuples(prompts, parameters(), st.integers(0, 4)), min_size=1, max_size=6)


@pytest.mark.parametrize(
    ("layout", "configuration"),
    [
        (LAST_EXITED, {"chunk": 5, "slots": 3, "page_size": 4}),
        (LAST_EXITED, {"chunk": 16, "slots": 8, "page_size": 16}),
        (SHARED, {"chunk": 5, "slots": 3, "page_size": 4}),
    ],
    ids=["last_exited small", "last_exited large", "shared"],
)
def test_every_choice_is_the_oracle_s(layout, configuration: dict) -> None:
    target, truth = engine(layout, **configuration), oracle(layout)
    outputs = near = 0

    @settings(
        max_examples=40, deadline=None, derandomize=True, database=None,
        phases=(Phase.explicit, Phase.generate), suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(batches)
    def every_batch(batch: list) -> None:
        nonlocal outputs, near
        jobs = [Job(id=f"r{i}", prompt=p, params=q, arrives=a) for i, (p, q, a) in enumerate(batch)]
        results = serve(target, jobs)
        for job in jobs:
            result, params = results[job.id], job.params
            distance = greedy_distance
            if params.temperature:
                distance = sampled_distance(
                    seed=params.seed,
                    sample_index=params.sample_index,
                    temperature=params.temperature,
                    top_k=params.top_k,
                    top_p=params.top_p,
                    min_p=params.min_p,
                )
            verdict = judge(
                truth,
                job.prompt,
                policy_of(params),
                tokens=result.tokens,
                depths=result.depths,
                logprobs=result.logprobs,
                prefill_loops=params.prefill_loops,
                distance=distance,
            )
            assert not verdict.mismatches, (job, verdict)
            assert verdict.logprob_error < LOGPROB_TOLERANCE, (job, verdict)
            outputs, near = outputs + verdict.outputs, near + verdict.near_ties
            stops = {*params.stop_token_ids, *(() if params.ignore_eos else (0,))}
            ended_by_id = result.tokens[-1] in stops
            assert not stops & set(result.tokens[:-1]), "generation went on past a stop id"
            assert ended_by_id or len(result.tokens) == params.max_tokens
            assert result.finish.value == ("stop" if ended_by_id else "length")

    every_batch()
    assert outputs > 300, "too few outputs judged to mean anything"
    assert near <= max(1, outputs // 1000), f"{near} near ties in {outputs} outputs"


def test_long_greedy_runs_with_early_exit() -> None:
    """Forty outputs each, where an error in a finalised plane would have time to show."""
    target = engine(LAST_EXITED)
    params = SamplingParams(max_tokens=40, ignore_eos=True, exit_threshold=0.45, min_loops=1)
    jobs = [Job(id=f"r{i}", prompt=[i, 3 * i, 7 * i + 1], params=params) for i in range(8)]
    results = serve(target, jobs)
    for job in jobs:
        r = results[job.id]
        verdict = judge(
            oracle(LAST_EXITED), job.prompt, policy_of(params), tokens=r.tokens, depths=r.depths, logprobs=r.logprobs
        )
        assert not verdict.mismatches, verdict
        assert verdict.logprob_error < LOGPROB_TOLERANCE
        assert len(set(r.depths)) > 1
