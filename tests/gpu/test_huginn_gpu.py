"""Models with a prelude and a coda on a real GPU: every layout through the Triton kernels.

PROTECTS: planes resolved by exit depth, dropped history and rings as compiled kernels, not as their interpreter; exits
that read out in every loop, inside a CUDA graph.
"""

from __future__ import annotations

import numpy as np
import pytest

from rlt_jax import LLM, EngineConfig, SamplingParams
from tests.conftest import fixture_dir

pytestmark = pytest.mark.gpu
GOLDEN = np.load(fixture_dir("huginn_tiny") / "golden.npz")
PROMPT = GOLDEN["input_ids"][0].tolist()
THRESHOLDS = {"latent": ("latent-diff", 0.12), "kl": ("kl", 0.02)}


def engine(layout: str, **settings: object) -> LLM:
    config = EngineConfig(
        dtype="float32", kernels="triton", kv_layout=layout, slots=8, page_size=16, prefill_chunk=16, max_context=64,
        **settings,
    )  # fmt: skip
    return LLM(fixture_dir("huginn_tiny"), config)


@pytest.mark.parametrize(("layout", "strategy"), [("last_exited", "latest-m4"), ("drop", "full")])
@pytest.mark.parametrize("cap", [8, 12])
def test_recorded_adaptive_runs(layout: str, strategy: str, cap: int) -> None:
    """At a cap of 12 LAST_EXITED keeps exit depths too; three executions each, beside full-depth neighbours."""
    with engine(layout, max_loops=cap) as llm:
        for policy, (name, threshold) in THRESHOLDS.items():
            steps = GOLDEN[f"adaptive_{strategy}_{name}_steps"].tolist()
            probe = SamplingParams(
                max_tokens=len(steps), ignore_eos=True, exit_policy=policy, exit_threshold=threshold, min_loops=1,
                max_loops=8, prefill_loops=steps[0],
            )  # fmt: skip
            neighbour = SamplingParams(max_tokens=9, ignore_eos=True, temperature=0.7, seed=3, initial_state="random")
            for _ in range(3):
                results = llm.generate([PROMPT, PROMPT[:5], PROMPT], [probe, neighbour, probe])
                for result in (results[0], results[2]):
                    assert list(result.token_ids) == GOLDEN[f"adaptive_{strategy}_{name}_ids"][0].tolist()
                    assert list(result.exit_depths) == steps


@pytest.mark.parametrize(("planes", "recorded"), [(1, "latest-m4-compress-s4"), (2, "compress-s8")])
def test_recorded_rings(planes: int, recorded: str) -> None:
    expected = GOLDEN[f"greedy_steps8_{recorded}_ids"][0].tolist()
    with engine("ring", kv_planes=planes) as llm:
        for _ in range(3):
            (result,) = llm.generate(PROMPT, SamplingParams(max_tokens=len(expected), ignore_eos=True))
            assert list(result.token_ids) == expected
