"""Stop strings: found on the host while the device is already further.

PROTECTS: what a user sees and pays for.  Text ends where the match begins, tokens end with the one that completed it,
and what the device computed past it is neither delivered nor billed.
"""

from __future__ import annotations

import codecs
import dataclasses

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from rlt_jax import FinishReason, LLMEngine
from rlt_jax.text import TextTokenizer
from tests.engines import LAST_EXITED, SHARED, Job, Result, alone, drained, engine, sampling, serve

PROMPT = [30, 60, 90, 120]
LONG = sampling(max_tokens=24, temperature=1.0, seed=2, exit_threshold=0.5, min_loops=1)


def bytes_tokenizer() -> TextTokenizer:
    """Token i is byte i: every output is text, and characters span tokens."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    letters = {b: chr(b) for b in printable}
    letters |= {b: chr(256 + i) for i, b in enumerate(b for b in range(256) if b not in letters)}
    tokenizer = Tokenizer(models.BPE({letters[b]: b for b in range(256)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return TextTokenizer(tokenizer)


@pytest.fixture(params=[LAST_EXITED, SHARED], ids=lambda layout: layout.value)
def target(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> LLMEngine:
    shared = engine(request.param)
    monkeypatch.setattr(shared, "loaded", dataclasses.replace(shared.loaded, tokenizer=bytes_tokenizer()))
    return shared


def text_after(tokens: list[int]) -> str:
    """Whole characters only."""
    return codecs.getincrementaldecoder("utf-8")("replace").decode(bytes(tokens))


def test_text_is_the_tokens_text(target: LLMEngine) -> None:
    result = alone(target, PROMPT, LONG)
    assert result.text == bytes(result.tokens).decode("utf-8", "replace")
    assert len(result.tokens) == 24


@pytest.mark.parametrize("length", [1, 2, 4])
@pytest.mark.parametrize("at", [0, 3, 11])
def test_the_run_ends_where_the_match_begins(target: LLMEngine, at: int, length: int) -> None:
    free = alone(target, PROMPT, LONG)
    stop = text_after(free.tokens)[at : at + length]
    kept = next(n for n in range(25) if stop in text_after(free.tokens[:n]))
    result = alone(target, PROMPT, dataclasses.replace(LONG, stop=("never there", stop)))
    assert result.text == text_after(free.tokens)[: text_after(free.tokens).index(stop)]
    assert result.tokens == free.tokens[:kept]
    assert result.depths == free.depths[:kept]
    assert result.logprobs == free.logprobs[:kept]
    assert result.finish is FinishReason.STOP
    assert result.stop_match == stop
    assert result.usage.completion_tokens == kept
    assert result.usage.decode_loops == sum(free.depths[1:kept])


def test_a_match_on_the_last_token_is_a_stop(target: LLMEngine) -> None:
    free = alone(target, PROMPT, LONG)
    text = text_after(free.tokens)
    last = next(i for i in range(len(text)) if text.index(text[i:]) == i and text_after(free.tokens[:-1]) != text)
    result = alone(target, PROMPT, dataclasses.replace(LONG, stop=(text[last:],)))
    assert result.finish is FinishReason.STOP
    assert result.stop_match == text[last:]
    assert result.text == text[:last]


def test_text_held_back_is_given_when_no_match_comes(target: LLMEngine) -> None:
    free = alone(target, PROMPT, LONG)
    text = bytes(free.tokens).decode("utf-8", "replace")
    result = alone(target, PROMPT, dataclasses.replace(LONG, stop=(text[-3:] + "and more",)))
    assert result.text == text
    assert result.finish is FinishReason.LENGTH


def test_a_cancelled_run_gives_what_it_held_back(target: LLMEngine) -> None:
    free = alone(target, PROMPT, LONG)
    job = Job(id="r", prompt=PROMPT, params=dataclasses.replace(LONG, stop=("no such text",)), cancelled=4)
    result = serve(target, [job])["r"]
    assert result.finish is FinishReason.ABORT
    assert result.text == bytes(result.tokens).decode("utf-8", "replace")
    assert free.tokens[: len(result.tokens)] == result.tokens


def test_neighbours_do_not_notice(target: LLMEngine) -> None:
    """Slots whose owner was stopped on the host are given to others while its old rounds are in flight."""
    params = [dataclasses.replace(LONG, seed=i) for i in range(9)]
    free = [alone(target, PROMPT, p) for p in params]
    jobs = []
    for i, p in enumerate(params):
        stop = (text_after(free[i].tokens)[2 + i // 3],) if i % 2 else ()
        jobs.append(Job(id=f"r{i}", prompt=PROMPT, params=dataclasses.replace(p, stop=stop)))
    results = serve(target, jobs)
    for i in range(9):
        mine: Result = results[f"r{i}"]
        assert mine.tokens == free[i].tokens[: len(mine.tokens)]
        assert mine.finish is (FinishReason.STOP if i % 2 else FinishReason.LENGTH)
        if i % 2 == 0:
            assert mine.bits == free[i].bits
    drained(target)


def test_prompts_may_be_text(target: LLMEngine) -> None:
    request = target.prepare("r", "héllo", LONG)
    assert request.prompt_token_ids == tuple("héllo".encode())
