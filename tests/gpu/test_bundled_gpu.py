"""The bundled model on a real GPU, in the bfloat16 that ships.

PROTECTS: the default server configuration of a GPU (pages of 64, chunks of 512, Triton kernels) with head_dim 64, which
the other GPU tests do not use; and G1 in bfloat16, where a neighbour's influence on rounding would show first.
"""

from __future__ import annotations

import pytest

from rlt_jax import LLM, EngineConfig, SamplingParams
from rlt_jax.train.evaluate import EXAMPLES

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def llm():
    with LLM(config=EngineConfig(slots=32, max_context=512)) as llm:
        yield llm


def test_the_default_configuration_answers_every_task(llm):
    info = llm.engine.server_info()
    assert (info["page_size"], info["prefill_chunk"]) == (64, 512)
    assert {i["op"]: i["chosen"] for i in info["implementations"]} == {
        "paged_attention": "triton",
        "kv_write": "triton",
    }
    full = SamplingParams(max_tokens=32, exit_policy="fixed")
    for result, answer in zip(llm.generate(list(EXAMPLES), full), EXAMPLES.values(), strict=True):
        assert result.text == answer


def test_bits_do_not_depend_on_the_company(llm):
    """G1: alone, then in slots filled with greedy, sampled, filtered and still prefilling neighbours."""
    prompt = next(p for p in EXAMPLES if p.startswith("chain"))
    probe = SamplingParams(max_tokens=40, temperature=0.7, seed=11, ignore_eos=True)
    alone = llm.generate(prompt, probe)[0]
    company = [
        SamplingParams(max_tokens=4 + i, temperature=0.5 * (i % 3), top_p=0.8, top_k=i % 7, seed=i, ignore_eos=True)
        for i in range(60)
    ]
    prompts = [list(EXAMPLES)[i % len(EXAMPLES)] * (1 + i % 5) for i in range(60)]
    for place in (0, 17, 60):
        order = [*range(place), None, *range(place, 60)]
        results = llm.generate(
            [prompt if i is None else prompts[i] for i in order], [probe if i is None else company[i] for i in order]
        )
        result = results[place]
        assert (result.token_ids, result.exit_depths) == (alone.token_ids, alone.exit_depths)
        assert result.logprobs == alone.logprobs
    stats = llm.engine.stats()
    assert (stats["running"], stats["pages_free"]) == (0, stats["pages_total"])
