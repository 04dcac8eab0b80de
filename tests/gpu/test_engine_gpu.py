"""The engine on a real GPU.

PROTECTS: what the CPU suite cannot see: Triton kernels, TF32 creeping into float32, CUDA graphs replayed over several
rounds, transfers that only a device makes.  Run on an H200 for the code that lands; docs/gpu-runs.md records it.
"""

from __future__ import annotations

import numpy as np
import pytest

from rlt_jax import LLM, EngineConfig, KVLayoutKind, SamplingParams
from tests.conftest import fixture_dir

pytestmark = pytest.mark.gpu
LAYOUTS = (KVLayoutKind.LAST_EXITED, KVLayoutKind.SHARED)


@pytest.fixture(scope="module", params=[(k, a) for k in LAYOUTS for a in ("triton", "reference")], ids=str)
def llm(request):
    kind, kernels = request.param
    config = EngineConfig(
        dtype="float32", kv_layout=kind, kernels=kernels, slots=8, page_size=16, prefill_chunk=8, max_context=256
    )
    with LLM(fixture_dir("ouro_tiny"), config) as llm:
        yield llm


@pytest.fixture(scope="module")
def golden():
    return np.load(fixture_dir("ouro_tiny") / "golden.npz")


def test_greedy_and_adaptive_tokens_are_exact_three_times_over(llm, golden):
    """Three executions: XLA captures its graphs on the second, and replays from then on."""
    derived = np.load(fixture_dir("ouro_tiny") / "derived.npz")
    kind = llm.engine.config.kv_layout.value
    prompts = golden["input_ids"].tolist()
    adaptive = SamplingParams(max_tokens=16, ignore_eos=True, min_loops=1, exit_threshold=0.5)
    full = SamplingParams(max_tokens=16, ignore_eos=True, exit_policy="fixed")
    for _ in range(3):
        results = llm.generate(prompts * 3, [adaptive, adaptive, full, full, adaptive, adaptive])
        for i in (0, 1, 4, 5):
            assert list(results[i].token_ids) == derived[f"adaptive_{kind}_thr0.5_ids"][i % 2].tolist()
            steps = derived[f"adaptive_{kind}_thr0.5_exit_steps"][i % 2]
            assert list(results[i].exit_depths) == [4, *(steps + 1).tolist()]
        if kind == "last_exited":
            for i in (2, 3):
                assert list(results[i].token_ids) == golden["greedy_full_ids"][i % 2].tolist()
    stats = llm.engine.stats()
    assert (stats["running"], stats["pages_free"]) == (0, stats["pages_total"])


def test_no_kernel_keeps_a_large_program_from_being_one_graph(llm):
    """CUB's kernels cannot be captured: then loops and conditions around them run on the host, 1.6 ms a tick."""
    compiled = llm.engine._runner._compiled
    for name in ("decode", *(n for n in compiled if n.startswith("prefill"))):
        assert "__cub$" not in compiled[name].as_text(), name


def test_a_request_gets_the_same_bits_alone_and_in_a_full_batch(llm, golden):
    """G1: tokens, depths and log-probabilities, beside greedy, sampled and filtered neighbours."""
    prompt = golden["input_ids"][0].tolist()
    probe = SamplingParams(max_tokens=24, ignore_eos=True, temperature=0.8, seed=2**63 + 5, exit_threshold=0.5)
    alone = llm.generate(prompt, probe)[0]
    neighbours = [
        SamplingParams(max_tokens=8 + i, ignore_eos=True, temperature=0.3 * (i % 3), top_p=0.9, seed=i, min_loops=1)
        for i in range(20)
    ]
    prompts = [np.random.default_rng(i).integers(1, 256, 3 + 5 * i % 40).tolist() for i in range(20)]
    together = llm.generate([*prompts, prompt], [*neighbours, probe])[-1]
    assert together.token_ids == alone.token_ids
    assert together.exit_depths == alone.exit_depths
    assert together.logprobs == alone.logprobs


def test_bfloat16_runs_with_the_same_work(golden):
    """bf16 on these weights is no token test; it must run, keep to the bounds and give finite log-probabilities."""
    with LLM(fixture_dir("ouro_tiny"), EngineConfig(dtype="bfloat16", slots=4, page_size=16, max_context=256)) as llm:
        assert llm.engine.server_info()["implementations"][0]["chosen"] == "triton"
        results = llm.generate(golden["input_ids"].tolist() * 4, SamplingParams(max_tokens=32, ignore_eos=True))
    for result in results:
        assert len(result.token_ids) == 32
        assert all(2 <= d <= 4 for d in result.exit_depths[1:])
        assert np.isfinite(result.logprobs).all()
