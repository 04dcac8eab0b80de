"""Requests that arrive, are cancelled and reuse ids in any order, on engines of awkward shapes.

PROTECTS: grade G1 (a result is bit for bit what the request gets alone), grade G2 (every choice is the oracle's), news
that never reaches the next owner of an id, and slots and pages that are all free afterwards, where pages of one
position, chunks of one, a single slot, a context that no page size divides or a pool with room for one request make
every boundary happen.
"""

from __future__ import annotations

import random

import pytest

from rlt_jax import FinishReason, LLMEngine, SamplingParams
from tests.engines import LAST_EXITED, SHARED, Result, alone, drained, engine, oracle, policy_of, sampling
from tests.oracle import judge
from tests.oracle.judge import greedy_distance
from tests.oracle.sampling import sampled_distance

SHAPES = [
    (LAST_EXITED, {"slots": 1, "page_size": 1, "chunk": 1, "context": 13}),
    (LAST_EXITED, {"slots": 2, "page_size": 7, "chunk": 3, "context": 30, "kv_pages": 5}),
    (LAST_EXITED, {"slots": 5, "page_size": 16, "chunk": 64, "context": 33, "kv_pages": 3}),
    (SHARED, {"slots": 2, "page_size": 7, "chunk": 3, "context": 30, "kv_pages": 5}),
    (SHARED, {"slots": 3, "page_size": 64, "chunk": 64, "context": 33, "kv_pages": 1}),
    (LAST_EXITED, {"slots": 4, "page_size": 5, "chunk": 7, "context": 41, "dtype": "bfloat16"}),
]
ROUNDS = 12  # interleavings per shape
KINDS = 16  # different requests per shape


def shape_name(shape: object) -> str:
    layout, settings = shape
    return f"{layout.value} " + " ".join(f"{k}={v}" for k, v in settings.items())


@pytest.fixture(params=SHAPES, ids=shape_name)
def target(request: pytest.FixtureRequest) -> LLMEngine:
    return engine(request.param[0], **request.param[1])


class Drawer:
    """Draws requests whose lengths sit on the engine's own boundaries."""

    def __init__(self, target: LLMEngine, seed: int) -> None:
        self.random = random.Random(seed)
        config = target.config
        self.page, self.chunk = config.page_size, config.prefill_chunk
        self.capacity = min(config.max_context, target.stats()["pages_total"] * self.page)

    def prompt(self) -> tuple[int, ...]:
        r = self.random
        lengths = [1, self.page, 2 * self.page, self.chunk, 2 * self.chunk, self.capacity, r.randint(1, self.capacity)]
        return tuple(r.randrange(256) for _ in range(max(1, min(r.choice(lengths), self.capacity))))

    def params(self, prompt: tuple[int, ...]) -> SamplingParams:
        r = self.random
        most = self.capacity - len(prompt) + 1
        outputs = min(most, r.choice([1, 2, most, r.randint(1, 20)]))
        low, high = sorted((r.randint(1, 4), r.randint(1, 4)))
        chosen: dict = {
            "max_tokens": outputs, "min_loops": low, "max_loops": high, "prefill_loops": r.choice([1, 2, 3, 4]),
            "ignore_eos": r.random() < 0.7, "stop_token_ids": tuple(r.sample(range(256), r.randint(0, 3))),
        }  # fmt: skip
        policy = r.choice(["gate", "gate_delayed", "fixed", "trace"])
        if policy == "trace":
            chosen["exit_trace"] = (chosen["prefill_loops"], *(r.randint(low, high) for _ in range(outputs - 1)))
        else:
            chosen |= {"exit_policy": policy, "exit_threshold": r.choice([0.0, 1.0, r.uniform(0.3, 0.7)])}
        if r.random() < 0.5:
            chosen |= {
                "temperature": r.choice([1e-30, 0.5, 1.0, 1e30]), "top_k": r.choice([0, 1, 3, 300, 2**31 - 1]),
                "top_p": r.choice([1.0, 0.5, 1e-30]), "min_p": r.choice([0.0, 0.1, 1.0]),
                "seed": r.choice([0, 2**63, 2**64 - 1]), "sample_index": r.choice([0, 2**31 - 1]),
                "logprobs": r.choice(["raw", "processed"]),
            }  # fmt: skip
        return SamplingParams(**chosen)


def check_against_oracle(target: LLMEngine, prompt: tuple[int, ...], params: SamplingParams, result: Result) -> None:
    if target.config.dtype != "float32" or (params.temperature or 1.0) in (1e-30, 1e30):
        return  # bfloat16 has its own tolerance; at such temperatures the noise decides to the last bit
    distance = greedy_distance
    if params.temperature:
        distance = sampled_distance(
            seed=params.seed, sample_index=params.sample_index, temperature=params.temperature,
            top_k=params.top_k, top_p=params.top_p, min_p=params.min_p,
        )  # fmt: skip
    verdict = judge(
        oracle(target.config.kv_layout), prompt, policy_of(params), tokens=result.tokens, depths=result.depths,
        logprobs=result.logprobs, prefill_loops=params.prefill_loops, distance=distance,
    )  # fmt: skip
    assert not verdict.mismatches, (prompt, params, verdict)
    assert params.logprobs == "processed" or verdict.logprob_error < 2e-4


def test_any_interleaving_leaves_every_result_as_it_is_alone(target: LLMEngine) -> None:
    drawer = Drawer(target, seed=17)
    r = drawer.random
    kinds = [(prompt, drawer.params(prompt)) for prompt in (drawer.prompt() for _ in range(KINDS))]
    expected = [alone(target, *kind) for kind in kinds]
    for kind, result in zip(kinds, expected, strict=True):
        check_against_oracle(target, *kind, result)

    cancelled = finished = 0
    for _ in range(ROUNDS):
        live: dict[str, tuple[int, Result]] = {}

        def take(outputs: list, live: dict[str, tuple[int, Result]] = live) -> int:
            ended = 0
            for output in outputs:
                if output.finish_reason is FinishReason.ABORT:
                    continue
                kind, result = live[output.request_id]  # a KeyError here: news for nobody
                result.add(output)
                if output.finished:
                    ended += 1
                    del live[output.request_id]
                    assert result.bits == expected[kind].bits, kinds[kind]
            return ended

        for _ in range(r.randint(3, 25)):
            for _ in range(r.choice([0, 1, 1, 3])):
                name = f"id{r.randint(0, 5)}"
                if name in live:
                    kind, result = live.pop(name)
                    assert target.abort(name)
                    assert not target.abort(name)
                    cancelled += 1
                    assert result.tokens == expected[kind].tokens[: len(result.tokens)]
                if r.random() < 0.8:  # the id is taken again at once
                    kind = r.randrange(KINDS)
                    target.add_request(name, *kinds[kind])
                    live[name] = (kind, Result())
            if target.has_work():
                finished += take(target.step())
        while target.has_work():
            finished += take(target.step())
        assert not live
        drained(target)
    assert cancelled > 20
    assert finished > 20
    assert target.stats()["resets"] == 0


@pytest.mark.parametrize("layout", [LAST_EXITED, SHARED], ids=lambda layout: layout.value)
def test_the_end_of_an_old_owner_comes_before_the_news_of_the_new_one(layout) -> None:
    """An id is free at once after `abort`; whoever reads by id must see ABORT first, then the new request's tokens."""
    target = engine(layout)
    params = sampling(max_tokens=3)
    target.add_request("id", [1, 2], params)
    assert target.abort("id")
    target.add_request("id", [3, 4], params)
    news = []
    while target.has_work():
        news += target.step()
    assert [output.finish_reason for output in news if output.finished] == [FinishReason.ABORT, FinishReason.LENGTH]
    assert news[0].finish_reason is FinishReason.ABORT
    assert news[0].usage.completion_tokens == 0
    assert sum(len(output.token_ids) for output in news[1:]) == 3
    drained(target)
