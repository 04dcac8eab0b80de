"""A request whose numbers overflow.

PROTECTS: it fails and says so, instead of answering token 0 for ever; grade G1 beside it and after it: what it left in
the pool must not make NaN of anybody else's.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator

import numpy as np
import pytest

from rlt_jax import RltError, SamplingParams
from rlt_jax.runtime.engine import LLMEngine
from tests.engines import Job, alone, engine, llm, sampling, serve, settled

BAD = 7  # the token whose embedding is no number


@contextlib.contextmanager
def damaged(target: LLMEngine, token: int, value: float) -> Iterator[None]:
    """Within the block the embedding of `token` is `value`."""
    before = target._runner._params
    target._runner._params = dataclasses.replace(before, embed=before.embed.at[token].set(value))
    try:
        yield
    finally:
        target._runner._params = before
        target._runner.reset()


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_it_fails_and_harms_nobody_else(value: float) -> None:
    target, params, clean = engine(), sampling(max_tokens=6), (3, 1, 4)
    expected = alone(target, clean, params)
    assert BAD not in expected.tokens
    with damaged(target, BAD, value):
        jobs = [Job(id="bad", prompt=(BAD,) * 9, params=params), Job(id="clean", prompt=clean, params=params)]
        results = serve(target, jobs)
        assert results["bad"].error is not None
        assert results["bad"].error.startswith("the log-probability of output token 1 is not a number")
        assert (results["bad"].tokens, results["bad"].finish) == ([], None)
        assert results["clean"].bits == expected.bits
        assert results["clean"].error is None
        assert alone(target, clean, params).bits == expected.bits


def test_what_came_before_is_delivered() -> None:
    """The third output's embedding is damaged: it is still chosen from good numbers, the fourth is not."""
    target, params = engine(), sampling(max_tokens=8)
    for start in range(20):
        prompt = (3 + start, 1, 4)
        expected = alone(target, prompt, params)
        third = expected.tokens[2]
        if len(expected.tokens) == 8 and third not in prompt and expected.tokens.index(third) == 2:
            break
    else:
        pytest.fail("no prompt of these is fit for the test")
    with damaged(target, third, np.nan):
        result = serve(target, [Job(id="late", prompt=prompt, params=params)])["late"]
    assert result.tokens == expected.tokens[:3]
    assert result.logprobs == expected.logprobs[:3]
    assert result.error is not None
    assert result.error.startswith("the log-probability of output token 4 is not a number")
    assert result.usage is not None
    assert result.usage.completion_tokens == 3


def test_the_offline_api_names_the_prompt_and_goes_on() -> None:
    """The good prompt is aborted with the bad one, and answered by the next call."""
    params, good = SamplingParams(max_tokens=6), [3, 1, 4]
    expected = llm().generate(good, params)[0].token_ids
    with damaged(llm().engine, BAD, np.nan):
        with pytest.raises(
            RltError, match="prompt 1: .* output token 1 is not a number: values overflowed, or the wei"
        ):
            llm().generate([good, [BAD, BAD]], params)
        assert llm().generate(good, params)[0].token_ids == expected
        settled(llm().engine)


def test_a_stream_has_the_good_tokens_before_it_fails() -> None:
    params, prompt = SamplingParams(max_tokens=8), [3, 1, 4]
    tokens = llm().generate(prompt, params)[0].token_ids
    second = tokens[1]
    assert tokens.index(second) == 1
    assert second not in prompt
    got: list[int] = []
    with damaged(llm().engine, second, np.nan):
        stream = llm().stream(prompt, params)
        with pytest.raises(RltError, match="prompt 0: .* output token 3"):
            got.extend(token for _, news in stream for token in news.token_ids)
    assert got == list(tokens[:2])
