"""A model without a gate, with grouped wide heads, through the engine that was built around another one.

PROTECTS: that the programs, the scheduler and the KV pool serve a looped model they know nothing about: recorded tokens
exactly, both KV layouts and both norm placements against the oracle, early exit by given depths, and policies that need
a gate refused by name.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from rlt_jax import LLM, EngineConfig, InvalidRequest, KVLayoutKind, SamplingParams
from tests.engines import LAST_EXITED, SHARED, Job, alone, sampling, serve, settled
from tests.oracle import Policy, judge
from tests.oracle.judge import greedy_distance
from tests.oracle.nanbeige import NanbeigeOracle
from tests.oracle.ouro import log_softmax
from tests.oracle.sampling import sampled_distance

FIXTURE = Path(__file__).parent.parent / "fixtures" / "nanbeige_tiny"
ATOL = 2e-4  # the fixture's recommendation
LOOPS = 2
SMALL, LARGE = (3, 4, 5), (8, 16, 16)  # slots, page size, prefill chunk


@pytest.fixture(scope="module")
def golden() -> dict[str, np.ndarray]:
    return dict(np.load(FIXTURE / "golden.npz"))


@pytest.fixture(scope="module")
def variant(tmp_path_factory: pytest.TempPathFactory):
    """A directory with the fixture's weights and some fields of its config changed."""

    @functools.cache
    def directory(**changes: object) -> Path:
        path = tmp_path_factory.mktemp("nanbeige")
        config = json.loads((FIXTURE / "config.json").read_text()) | changes
        (path / "config.json").write_text(json.dumps(config))
        (path / "model.safetensors").symlink_to(FIXTURE / "model.safetensors")
        return path

    return directory


def llm(path: Path = FIXTURE, layout: KVLayoutKind = LAST_EXITED, sizes: tuple[int, int, int] = SMALL) -> LLM:
    return _llm(path, layout, *sizes)


@functools.cache
def _llm(path: Path, layout: KVLayoutKind, slots: int, page_size: int, chunk: int) -> LLM:
    return LLM(
        path,
        EngineConfig(
            dtype="float32",
            kv_layout=layout,
            slots=slots,
            page_size=page_size,
            prefill_chunk=chunk,
            max_context=64,
        ),
    )


def policy_of(params: SamplingParams) -> Policy:
    max_loops = params.max_loops or LOOPS
    if params.exit_trace is not None:
        return Policy(name="trace", trace=params.exit_trace, min_loops=1, max_loops=max_loops)
    return Policy(name="fixed", min_loops=1, max_loops=max_loops)


@pytest.mark.parametrize("sizes", [SMALL, LARGE, (1, 3, 1)], ids=["small", "large", "one by one"])
def test_recorded_greedy_tokens(golden: dict[str, np.ndarray], sizes: tuple[int, int, int]) -> None:
    """The default request: full depth, by the policy `fixed`."""
    target = llm(sizes=sizes)
    rows = target.generate([row.tolist() for row in golden["input_ids"]], sampling(max_tokens=16))
    settled(target.engine)
    assert [row.token_ids for row in rows] == [tuple(ids) for ids in golden["greedy_ids"].tolist()]
    expected = np.take_along_axis(log_softmax(golden["greedy_logits"]), golden["greedy_ids"][..., None], -1)[..., 0]
    np.testing.assert_allclose([row.logprobs for row in rows], expected, atol=ATOL, rtol=0)
    assert {depth for row in rows for depth in row.exit_depths} == {2}


@pytest.mark.parametrize("row", [0, 1])
def test_shared_greedy_tokens(golden: dict[str, np.ndarray], row: int) -> None:
    """One plane, prompt position by position: no reference does this, the oracle does."""
    prompt = golden["input_ids"][row].tolist()
    target = llm(layout=SHARED)
    result = target.generate(prompt, sampling(max_tokens=16))[0]
    settled(target.engine)
    steps = NanbeigeOracle(FIXTURE, layout="shared").run(prompt, 16, Policy(name="fixed", max_loops=2))
    assert list(result.token_ids) == [s.token for s in steps]
    expected = [s.log_probabilities[s.token] for s in steps]
    np.testing.assert_allclose(result.logprobs, expected, atol=ATOL, rtol=0)


@pytest.mark.parametrize(
    ("changes", "request_loops", "array"),
    [
        ({}, 1, "logits_loops1"),
        ({"num_loops": 1}, None, "logits_loops1"),
        ({"skip_loop_final_norm": True}, 1, "logits_loops1"),
        ({"skip_loop_final_norm": True}, None, "logits_skip_norm"),
        ({"loop_loss_weights": (0.2, 0.3)}, None, "logits_loops3"),
    ],
    ids=["depth 1 of 2", "one loop", "depth 1, norm once", "norm once", "three loops by weights"],
)
def test_first_output_of_other_depths_and_norms(
    golden: dict[str, np.ndarray], variant, changes: dict, request_loops: int | None, array: str
) -> None:
    """Recorded logits at the end of every prefix of the prompt, so that every chunk boundary is met."""
    target = llm(variant(**changes) if changes else FIXTURE)
    prompts = [row[:length].tolist() for row in golden["input_ids"] for length in range(1, 13)]
    expected = log_softmax(golden[array]).reshape(24, -1)
    results = target.generate(prompts, sampling(max_tokens=1, prefill_loops=request_loops, max_loops=request_loops))
    settled(target.engine)
    for result, row in zip(results, expected, strict=True):
        # a token that ties within the tolerance would do; there is none in these arrays
        assert result.token_ids == (int(row.argmax()),)
        np.testing.assert_allclose(result.logprobs[0], row.max(), atol=ATOL, rtol=0)
        assert result.exit_depths == (request_loops or target.engine.loaded.model.spec.trained_loops,)


@st.composite
def parameters(draw: st.DrawFn) -> SamplingParams:
    outputs = draw(st.integers(1, 14))
    chosen: dict = {
        "max_tokens": outputs,
        "prefill_loops": draw(st.sampled_from([2, 2, 1])),
        "max_loops": draw(st.sampled_from([2, 2, 1])),
        "ignore_eos": draw(st.booleans()),
    }
    kind = draw(st.sampled_from(["default", "fixed", "trace", "trace"]))
    if kind == "trace":
        rest = draw(st.lists(st.integers(1, chosen["max_loops"]), min_size=outputs - 1, max_size=outputs - 1))
        chosen["exit_trace"] = (chosen["prefill_loops"], *rest)
    elif kind == "fixed":
        chosen["exit_policy"] = "fixed"
    if draw(st.booleans()):
        chosen |= {
            "temperature": draw(st.floats(0.3, 1.5)),
            "top_k": draw(st.sampled_from([0, 0, 3, 40])),
            "top_p": draw(st.sampled_from([1.0, 1.0, 0.5])),
            "seed": draw(st.integers(0, 2**64 - 1)),
        }
    return SamplingParams(**chosen)


prompts = st.lists(st.integers(0, 255), min_size=1, max_size=30)
batches = st.lists(st.tuples(prompts, parameters(), st.integers(0, 4)), min_size=1, max_size=6)


@pytest.mark.parametrize("norm_once", [False, True], ids=["norm every loop", "norm once"])
@pytest.mark.parametrize(
    ("layout", "sizes"), [(LAST_EXITED, SMALL), (LAST_EXITED, LARGE), (SHARED, SMALL)], ids=["small", "large", "shared"]
)
def test_every_choice_is_the_oracle_s(variant, layout: KVLayoutKind, sizes: tuple, norm_once: bool) -> None:
    """Mixed batches of fixed depth 1 and 2, given depths and sampling; the judge follows the engine's own tokens."""
    path = variant(skip_loop_final_norm=True) if norm_once else FIXTURE
    target, truth = llm(path, layout, sizes).engine, NanbeigeOracle(path, layout=layout.value)
    outputs = near = 0
    depths: set[int] = set()

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
                    seed=params.seed, temperature=params.temperature, top_k=params.top_k, top_p=params.top_p
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
            assert verdict.logprob_error < ATOL, (job, verdict)
            ended_by_id = not params.ignore_eos and result.tokens[-1] == 2
            assert ended_by_id or len(result.tokens) == params.max_tokens
            assert result.finish.value == ("stop" if ended_by_id else "length")
            outputs, near = outputs + verdict.outputs, near + verdict.near_ties
            depths.update(result.depths[1:])

    every_batch()
    assert outputs > 300, "too few outputs judged to mean anything"
    assert near <= max(1, outputs // 1000), f"{near} near ties in {outputs} outputs"
    assert depths == {1, 2}


def test_neighbours_change_no_bit() -> None:
    target = llm().engine
    jobs = [
        Job(id="deep", prompt=[7, 7, 9], params=sampling()),
        Job(id="mixed", prompt=list(range(20)), params=sampling(exit_trace=(2, *[1, 2] * 6)), arrives=1),
        Job(id="shallow", prompt=[200], params=sampling(max_loops=1, temperature=1.0, seed=3), arrives=2),
        Job(id="late", prompt=[1] * 11, params=sampling(prefill_loops=1), arrives=3),
    ]
    together = serve(target, jobs)
    for job in jobs:
        assert together[job.id].bits == alone(target, job.prompt, job.params).bits


@pytest.mark.parametrize("policy", ["gate", "gate_delayed", "ouro", "ouro_delayed"])
def test_policies_that_need_a_gate_are_refused(policy: str) -> None:
    target = llm()
    with pytest.raises(InvalidRequest, match=r"exit_policy.*gate.* needs the score 'gate'; nanbeige gives none"):
        target.generate([1, 2, 3], sampling(exit_policy=policy, exit_threshold=0.5))
    assert not target.engine.has_work()


def test_depths_beyond_the_model_are_refused() -> None:
    for name in ("max_loops", "prefill_loops"):
        with pytest.raises(InvalidRequest, match=rf"{name}.*\[1, 2\].*3"):
            llm().generate([1, 2, 3], sampling(**{name: 3}))


@pytest.mark.parametrize(("layout", "planes"), [(LAST_EXITED, 2), (SHARED, 1)], ids=["last_exited", "shared"])
def test_model_info(layout: KVLayoutKind, planes: int) -> None:
    info = llm(layout=layout).engine.model_info()
    assert info["model_type"] == "nanbeige"
    assert (info["trained_loops"], info["max_loops"], info["kv_planes"]) == (2, 2, planes)
    assert info["kv_bytes_per_token"] == planes * 2 * 3 * 2 * 16 * 4  # planes, k and v, layers, KV heads, D, float32
    assert (info["exit_scores"], info["exit_policies"]) == ([], ["fixed", "trace"])
    assert info["eos_token_ids"] == [2]
    assert llm(layout=layout).engine.defaults.exit_policy == "fixed"


def test_bfloat16_runs(variant) -> None:
    """The state that the slots keep between loops is not normed here; depth 1 and 2 both come out finite."""
    target = LLM(
        variant(skip_loop_final_norm=True), EngineConfig(slots=2, page_size=4, prefill_chunk=4, max_context=32)
    )
    results = target.generate([[5, 6, 7], [8, 9]], sampling(max_tokens=9, exit_trace=(2, *[1, 2] * 4)))
    settled(target.engine)
    for result in results:
        assert len(result.token_ids) == 9
        assert np.isfinite(result.logprobs).all()
        assert result.exit_depths == (2, *[1, 2] * 4)
