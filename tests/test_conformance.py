"""Conformance vectors of the looped-serving contract that need a running engine; each right value is written out.

PROTECTS: depths, stops and random streams as every other implementation of the same contract has them.

The others stand beside what they test: V8, V9, V12 in kvcache/test_layout.py, V10, V11 and V21's pool half in
kvcache/test_pool.py, the arithmetic of V1 to V5 again on the pure functions in test_exits.py.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlt_jax import FinishReason, LLMEngine
from tests.engines import LAST_EXITED, SHARED, Job, alone, constant_gate, drained, engine, oracle, sampling, serve
from tests.oracle import Policy

PROMPT = [17, 230, 4, 99, 161, 58, 7]
EOS_FIRST = [7, 140, 39]  # at full depth this prompt's first greedy token is 0, the fixture's EOS id


@pytest.fixture(scope="module", params=[LAST_EXITED, SHARED], ids=lambda layout: layout.value)
def served(request: pytest.FixtureRequest) -> LLMEngine:
    return engine(request.param)


@pytest.mark.parametrize(
    ("hazard", "settings", "depths"),
    [
        pytest.param(0.4, {"exit_threshold": 0.6}, [4, 2, 2, 2], id="V1"),  # CDF .40, .64
        # a survival left over from the token before would let the third output leave after one loop
        pytest.param(0.4, {"exit_threshold": 0.6, "min_loops": 1}, [4, 2, 2, 2], id="V1 m=1"),
        pytest.param(0.3, {"exit_threshold": 0.5}, [4, 2, 2, 2], id="V2 gate"),  # CDF .30, .51
        pytest.param(0.3, {"exit_threshold": 0.5, "exit_policy": "gate_delayed"}, [4, 3, 3, 3], id="V2 delayed"),
        pytest.param(1.0, {"exit_threshold": 1.0, "min_loops": 1}, [4, 4, 4, 4], id="V3"),  # the gate says +infinity
        pytest.param(0.01, {"exit_threshold": 0.0}, [4, 2, 2, 2], id="V4 m=2"),
        pytest.param(0.01, {"exit_threshold": 0.0, "min_loops": 3}, [4, 3, 3, 3], id="V4 m=3"),
        pytest.param(0.3, {"exit_threshold": 0.6, "exit_policy": "gate_delayed"}, [4, 4, 4, 4], id="V5"),  # .657 at 3
        pytest.param(0.3, {"exit_threshold": 0.5, "exit_policy": "gate_delayed", "max_loops": 3}, [4, 3, 3, 3],
                     id="V5 M=3"),
        pytest.param(0.01, {"exit_policy": "fixed", "max_loops": 2}, [4, 2, 2, 2], id="fixed"),
        pytest.param(0.3, {"exit_policy": "ouro", "exit_threshold": 0.5}, [4, 2, 2, 2], id="V2 by its other name"),
        pytest.param(0.3, {"exit_policy": "ouro_delayed", "exit_threshold": 0.5}, [4, 3, 3, 3],
                     id="V2 delayed by its other name"),
    ],
)  # fmt: skip
def test_v1_to_v5_exit_depths(served: LLMEngine, hazard: float, settings: dict, depths: list[int]) -> None:
    """The first output comes from the prompt at full depth, whatever the bounds of the others."""
    with constant_gate(served, hazard):
        assert alone(served, PROMPT, sampling(max_tokens=4, **settings)).depths == depths


def test_v7_a_trace_is_obeyed_exactly(served: LLMEngine) -> None:
    with constant_gate(served, 0.9):
        result = alone(served, PROMPT, sampling(max_tokens=4, exit_trace=(4, 2, 3, 1), min_loops=1))
    assert result.depths == [4, 2, 3, 1]


def test_a_trace_of_other_prefill_loops(served: LLMEngine) -> None:
    result = alone(served, PROMPT, sampling(max_tokens=3, exit_trace=(2, 4, 1), prefill_loops=2))
    assert result.depths == [2, 4, 1]


def test_v16_one_token_runs_no_decode_loop() -> None:
    """The prompt, then one readout: no position of an output is ever entered."""
    target = engine(LAST_EXITED)
    before = target.stats()
    result = alone(target, PROMPT[:5], sampling(max_tokens=1))
    after = target.stats()
    assert len(result.tokens) == 1
    assert result.depths == [4]
    assert result.finish is FinishReason.LENGTH
    assert after["ticks"] - before["ticks"] == 1
    assert result.usage.decode_loops == result.usage.full_depth_loops == 0
    assert result.usage.prompt_loops == 5 * 4


def test_v17_eos_as_the_first_token(served: LLMEngine) -> None:
    result = alone(served, EOS_FIRST, sampling(ignore_eos=False))
    assert result.tokens == [0]
    assert result.depths == [4]
    assert result.finish is FinishReason.STOP
    assert result.stop_match == 0


def test_v18_a_stop_id_ends_even_with_ignore_eos(served: LLMEngine) -> None:
    """EOS does not end this run, the stop id does, and it stays in the tokens."""
    free = alone(served, EOS_FIRST, sampling(max_tokens=8))
    assert free.tokens[0] == 0
    assert free.finish is FinishReason.LENGTH
    stop = next(t for t in free.tokens[1:] if t != 0)
    at = free.tokens.index(stop)
    result = alone(served, EOS_FIRST, sampling(max_tokens=8, stop_token_ids=(stop, 255)))
    assert result.tokens == free.tokens[: at + 1]
    assert result.finish is FinishReason.STOP
    assert result.stop_match == stop


def test_a_stop_on_the_last_allowed_token_is_a_stop(served: LLMEngine) -> None:
    """Order of the tests: stop id, EOS, then length."""
    free = alone(served, PROMPT, sampling(max_tokens=1))
    result = alone(served, PROMPT, sampling(max_tokens=1, stop_token_ids=(free.tokens[0],)))
    assert (result.tokens, result.finish) == (free.tokens, FinishReason.STOP)


@pytest.mark.parametrize("layout", [LAST_EXITED, SHARED], ids=lambda layout: layout.value)
@pytest.mark.parametrize("prompt", [[9], PROMPT[:3], PROMPT, PROMPT * 2], ids=len)
def test_v21_a_request_writes_its_own_positions_and_nothing_else(layout, prompt: list[int]) -> None:
    """A sentinel fills the pool.  After a run, exactly positions 0 .. P + O - 2 of the request's pages have changed.

    So padding rows of a chunk, idle slots and the last sampled token (which is never fed) wrote nothing.
    """
    target, outputs, sentinel = engine(layout), 6, np.float32(-77.25)
    drained(target)
    runner = target._runner
    runner._kv = jax.tree.map(lambda a: jnp.full_like(a, sentinel), runner._kv)
    request = target.add_request("v21", prompt, sampling(max_tokens=outputs, exit_threshold=0.5, min_loops=1))
    pages: tuple[int, ...] = ()
    while target.has_work():
        target.step()
        pages = target._pages.table(request) or pages
    size, planes = target.config.page_size, target._layout.planes
    written = len(prompt) + outputs - 1
    assert len(pages) == -(-written // size)
    expected = np.zeros((target.stats()["pages_total"], size), bool)
    for position in range(written):
        expected[pages[position // size], position % size] = True
    for array in (*runner._kv.k, *runner._kv.v):
        changed = np.asarray(array) != sentinel  # [pages, planes, heads, page, D]
        for plane in range(planes):
            np.testing.assert_array_equal(changed[:, plane].all(axis=(1, 3)), expected)
            np.testing.assert_array_equal(changed[:, plane].any(axis=(1, 3)), expected)
    drained(target)


def test_v23_a_seed_gives_the_same_stream_in_any_batch(served: LLMEngine) -> None:
    """Alone, with itself as neighbour and in a full batch of other seeds: the same bits."""
    mine = sampling(temperature=0.9, seed=0xFEDCBA9876543210, exit_threshold=0.5, min_loops=1)
    expected = alone(served, PROMPT, mine).bits
    others = [
        Job(id=f"other {i}", prompt=PROMPT[i % 5 :], params=sampling(temperature=1.3, seed=i, max_tokens=3 + i))
        for i in range(5)
    ]
    for place in range(len(others)):
        jobs = [*others[:place], Job(id="mine", prompt=PROMPT, params=mine), *others[place:]]
        jobs.append(Job(id="twin", prompt=PROMPT, params=mine))
        results = serve(served, jobs)
        assert results["mine"].bits == expected
        assert results["twin"].bits == expected


@pytest.mark.parametrize(
    "other",
    [{"seed": 5 + 2**32}, {"seed": 6}, {"seed": 5, "sample_index": 1}],
    ids=["high word", "low word", "sample index"],
)
def test_v23_another_seed_or_sample_is_another_stream(other: dict) -> None:
    target = engine(LAST_EXITED)
    one = alone(target, PROMPT, sampling(temperature=1.5, seed=5))
    two = alone(target, PROMPT, sampling(temperature=1.5, **other))
    assert one.tokens != two.tokens


def test_a_seed_that_was_not_given_is_drawn_and_reported() -> None:
    target = engine(LAST_EXITED)
    requests = [target.prepare(f"r{i}", PROMPT, sampling(temperature=1.5)) for i in range(4)]
    seeds = [request.params.seed for request in requests]
    assert len(set(seeds)) == 4
    assert all(0 <= seed < 2**64 for seed in seeds)
    assert max(seeds) >= 2**32, "the high word is drawn too"
    target.add(requests[0])
    drawn = [o for o in _run(target) if o.token_ids]
    again = alone(target, PROMPT, sampling(temperature=1.5, seed=seeds[0]))
    assert [t for o in drawn for t in o.token_ids] == again.tokens


def _run(target: LLMEngine) -> list:
    outputs = []
    while target.has_work():
        outputs += target.step()
    return outputs


def test_the_first_output_is_the_prompt_s_at_prefill_loops(served: LLMEngine) -> None:
    """For every prompt depth: token and log-probability of output 0 equal the oracle's."""
    for loops in (1, 2, 3, 4):
        result = alone(served, PROMPT, sampling(max_tokens=3, prefill_loops=loops, exit_threshold=0.5))
        layout = served.config.kv_layout
        steps = oracle(layout).run(
            PROMPT, 3, Policy(threshold=0.5), prefill_loops=loops, tokens=result.tokens, depths=result.depths
        )
        assert result.depths[0] == loops
        assert result.tokens[0] == int(np.argmax(steps[0].logits))
        raw = [s.log_probabilities[t] for s, t in zip(steps, result.tokens, strict=True)]
        np.testing.assert_allclose(result.logprobs, raw, atol=2e-4, rtol=0)
