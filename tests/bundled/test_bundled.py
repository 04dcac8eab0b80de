"""The model that ships in the package, through the engine.

PROTECTS: what every newcomer meets first.  The files are whole and small, the tasks are answered, depth pays, exits
save loops at the shipped threshold, and the card's numbers are those of the recorded evaluation.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

import rlt_jax
from rlt_jax import LLM, EngineConfig, SamplingParams
from rlt_jax.train.evaluate import EXAMPLES, held_out_set, model_card
from rlt_jax.train.tasks import HOLE, TEST_CLASS
from rlt_jax.train.tokenizer import build_tokenizer

BUNDLED = Path(rlt_jax.__file__).parent / "bundled"
RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
MAX_PARAMETERS, MAX_FILE_BYTES = 8_000_000, 16 << 20


@pytest.fixture(scope="module")
def llm():
    with LLM(config=EngineConfig(slots=8, max_context=256)) as llm:
        yield llm


def test_files_are_small_and_the_tokenizer_is_the_one_the_project_builds(llm):
    info = llm.engine.model_info()
    assert info["parameters"] <= MAX_PARAMETERS
    assert info["dtype"] == "bfloat16"
    assert all(f.stat().st_size <= MAX_FILE_BYTES for f in BUNDLED.iterdir())
    assert (BUNDLED / "tokenizer.json").read_text() == build_tokenizer().to_str(pretty=True)


def test_every_task_is_answered_at_full_depth(llm):
    full = SamplingParams(max_tokens=32, exit_policy="fixed")
    for result, answer in zip(llm.generate(list(EXAMPLES), full), EXAMPLES.values(), strict=True):
        assert result.text == answer
        assert result.finish_reason.value == "stop"
        assert set(result.exit_depths) == {4}


def test_short_prompts_are_answered(llm):
    """What a newcomer types first has one, two or three items."""
    answers = {
        "copy: q d =": " q d",
        "reverse: x y z =": " z y x",
        "sort: c a b =": " a b c",
        "close:([=": "])",
        "calc: a:3+5; =": " a8",
        "chain: d k, k a, a d; d2 =": " d a",
    }
    full = SamplingParams(max_tokens=32, exit_policy="fixed")
    assert [r.text for r in llm.generate(list(answers), full)] == list(answers.values())


def test_the_demo_prompts_save_loops_at_the_default_threshold(llm):
    prompts = json.loads((BUNDLED / "prompts.json").read_text())["demo"]
    assert len(prompts) == 3
    results = llm.generate(prompts, SamplingParams(max_tokens=48))
    assert [r.text for r in results] == [EXAMPLES[p] for p in prompts]
    spent = sum(r.usage.decode_loops for r in results)
    full = sum(r.usage.full_depth_loops for r in results)
    assert spent <= 0.7 * full


def test_deep_chains_need_depth(llm):
    """Two hops are answered after two loops; one loop is too shallow.  (The card has the full table.)"""
    prompt = "chain: d k, c d, w z, k a, z q, a m, q c, m w; q2 a2 d2 k2 ="
    answer = " q d a w d a k m"
    shallow, deep = (
        SamplingParams(max_tokens=32, prefill_loops=n, min_loops=n, max_loops=n, exit_policy="fixed") for n in (1, 4)
    )
    first, second = llm.generate([prompt, prompt], [shallow, deep])
    assert first.text != answer
    assert second.text == answer


def test_the_card_states_the_recorded_evaluation():
    (folder,) = RESULTS.glob("bundled-*/")
    evaluation = json.loads((folder / "evaluation.json").read_text())
    training = json.loads((folder / "training.json").read_text())
    assert (BUNDLED / "README.md").read_text() == model_card(evaluation, training)
    assert evaluation["samples"] >= 4000
    assert evaluation["environment"]["dtype"] == "bfloat16"
    accuracy = [row["accuracy"] for row in evaluation["fixed"]]
    assert np.all(np.diff(accuracy) > 0), "depth pays"
    assert all(row["gain_interval"][0] > 0 for row in evaluation["fixed"][1:]), "and not by chance"
    assert evaluation["baseline"]["parameters"] == evaluation["parameters"]
    assert evaluation["baseline"]["gain_interval"][0] >= 0.1
    assert any(row["saved"] >= 0.3 and row["lost"] <= 0.01 for row in evaluation["thresholds"])
    assert len(evaluation["claims"]) == 3
    assert all(evaluation["claims"].values())


def test_the_weights_are_those_of_the_recorded_run():
    """The samples of `calc` at one loop, where the model is right on some: another run's weights are on others."""
    (folder,) = RESULTS.glob("bundled-*/")
    evaluation = json.loads((folder / "evaluation.json").read_text())
    samples = held_out_set(evaluation["samples"], TEST_CLASS)
    of_calc = np.flatnonzero(samples.task == samples.tasks.index("calc"))
    prompts = [samples.tokens[i, : samples.length[i]].tolist() for i in of_calc]
    one = SamplingParams(max_tokens=24, prefill_loops=1, min_loops=1, max_loops=1, exit_policy="fixed")
    with LLM(config=EngineConfig(slots=64, max_context=128, prefill_chunk=128)) as llm:
        results = llm.generate(prompts, one)
    right = np.array(
        [
            list(result.token_ids) == [t for t in samples.answer[i] if t != HOLE]
            for i, result in zip(of_calc, results, strict=True)
        ]
    )
    recorded = evaluation["fixed"][0]["tasks"]["calc"]
    assert abs(right.sum() - recorded["accuracy"] * len(right)) <= 3, "a near tie in bfloat16 may fall either way"
    for level, accuracy in recorded["by_level"].items():
        mine = right[samples.level[of_calc] == int(level)]
        assert abs(mine.sum() - accuracy * len(mine)) <= 2
