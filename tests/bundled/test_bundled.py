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
from rlt_jax.train.evaluate import EXAMPLES
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
    """The card's tables, row by row; how a card is written is tested with the trainer."""
    (folder,) = RESULTS.glob("bundled-*/")
    evaluation = json.loads((folder / "evaluation.json").read_text())
    card = (BUNDLED / "README.md").read_text()
    assert evaluation["samples"] >= 4000
    assert evaluation["environment"]["dtype"] == "bfloat16"
    fixed = evaluation["fixed"]
    assert np.all(np.diff([row["accuracy"] for row in fixed]) > 0), "depth pays"
    for row in fixed:
        low, high = row["interval"]
        tasks = " | ".join(f"{task['accuracy']:.1%}" for task in row["tasks"].values())
        assert f"| {row['loops']} | {row['accuracy']:.1%} ({low:.1%}–{high:.1%}) | {tasks} |" in card
    beside = json.loads((folder / "beside.json").read_text())
    for run, row in beside["one_loop"].items():
        low, high = row["interval"]
        assert row["parameters"] == evaluation["parameters"]
        assert f"| 1, trained with one loop, {run} run | {row['accuracy']:.1%} ({low:.1%}–{high:.1%}) |" in card
        assert fixed[-1]["accuracy"] - row["accuracy"] >= 0.1
    assert f"with few items it answers {beside['few_items']['accuracy']:.1%}." in card
    for row in evaluation["thresholds"]:
        low, high = row["interval"]
        shipped = " (shipped)" if row["threshold"] == evaluation["shipped_threshold"] else ""
        figures = f"{row['mean_loops']:.2f} | {row['saved']:.1%} | {100 * row['lost'] + 0.0:.2f} ("
        assert f"| {row['threshold']:g}{shipped} | {row['accuracy']:.1%} ({low:.1%}–{high:.1%}) | {figures}" in card
    assert any(row["saved"] >= 0.3 and row["lost"] <= 0.01 for row in evaluation["thresholds"])
