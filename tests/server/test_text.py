"""Text over the wire, from a model whose output is known beforehand (tests/server/scripted_model.py).

PROTECTS: a delta never splits a character; text that could become a stop string is held back; what comes after a stop
string is neither sent nor billed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from rlt_jax.client import AsyncGenerationClient, GenerationClient
from rlt_jax.errors import InvalidRequest
from rlt_jax.request import Completion, FinishReason, RequestOutput, SamplingParams
from tests.server.running import RunningServer, engine_maker, tiny_config
from tests.server.scripted_model import EOS, expected_text, is_permutation, write_scripted_model


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    model = write_scripted_model(tmp_path_factory.mktemp("scripted"))
    # one tick per round: one token per message, so that every character of several bytes is cut between two rounds
    with RunningServer(engine_maker(model, tiny_config(round_ticks=1))) as server:
        yield server


@pytest.fixture
def client(running: RunningServer) -> Iterator[GenerationClient]:
    with GenerationClient(running.address) as client:
        yield client
    running.wait_drained()


def test_the_premise() -> None:
    assert is_permutation()
    assert expected_text("a", 8) == "→é日"
    assert expected_text("a", 4) == "→\ufffd"


def test_no_delta_splits_a_character(client: GenerationClient) -> None:
    outputs: list[RequestOutput] = list(client.generate("xa", SamplingParams(max_tokens=60, exit_threshold=0.5)))
    texts = [output.text for output in outputs]
    assert None not in texts
    assert "".join(texts) == expected_text("a", 60)
    assert "\ufffd" not in "".join(texts[:-1])
    assert sum(len(output.token_ids) for output in outputs) == 60
    assert [output.text for output in outputs if output.text == "日"]  # whole, though three tokens made it


def test_an_unfinished_character_is_replaced_at_the_end(client: GenerationClient) -> None:
    completion = client.complete("xa", SamplingParams(max_tokens=4))
    assert completion.text == "→\ufffd"
    assert len(completion.token_ids) == 4


def test_stop_string_is_removed_held_back_and_not_billed(client: GenerationClient) -> None:
    params = SamplingParams(max_tokens=40, stop=("stop!b", "never"))
    outputs = list(client.generate("xa", params))
    text = "".join(output.text or "" for output in outputs)
    assert text == "→é日😀 "
    last = outputs[-1]
    assert (last.finish_reason, last.stop_match) == (FinishReason.STOP, "stop!b")
    tokens = len("→é日😀 stop!b".encode())
    assert sum(len(output.token_ids) for output in outputs) == tokens == last.usage.completion_tokens


def test_a_stop_string_that_does_not_come_is_given_back(client: GenerationClient) -> None:
    tokens = len("→é日😀 stop".encode())
    completion = client.complete("xa", SamplingParams(max_tokens=tokens, stop=("stop?",)))
    assert (completion.text, completion.finish_reason) == ("→é日😀 stop", FinishReason.LENGTH)


def test_end_of_sequence_and_ignore_eos(client: GenerationClient) -> None:
    ended = client.complete("y", SamplingParams(max_tokens=10))
    assert (ended.text, ended.finish_reason, ended.stop_match) == ("z", FinishReason.STOP, EOS)
    assert ended.token_ids[-1] == EOS  # it stays in the ids
    goes_on = client.complete("y", SamplingParams(max_tokens=10, ignore_eos=True))
    assert goes_on.token_ids[:2] == ended.token_ids
    assert len(goes_on.token_ids) == 10


def test_prompt_token_ids_of_a_text_prompt_come_back(running: RunningServer, client: GenerationClient) -> None:
    completion = client.complete("xa→", SamplingParams(max_tokens=1))
    assert list(completion.prompt_token_ids) == running.engine.loaded.tokenizer.encode("xa→")
    assert completion.usage.prompt_tokens == 5


def test_refused_text(client: GenerationClient) -> None:
    for params, field in [
        (SamplingParams(stop=("",)), "stop"),
        (SamplingParams(stop=("x",) * 3 + ("y" * 300,)), "stop"),
    ]:
        with pytest.raises(InvalidRequest) as caught:
            client.complete("a", params)
        assert caught.value.field == field
    with pytest.raises(InvalidRequest) as caught:
        client.complete("lone surrogate \ud800")
    assert caught.value.field == "prompt"


def test_async_client_streams_many_at_once(running: RunningServer) -> None:
    async def run() -> list[Completion]:
        async with AsyncGenerationClient(running.address) as client:
            await client.wait_until_serving(5)
            assert (await client.model_info()).has_tokenizer
            assert (await client.server_info()).settings.slots == 2
            stream = client.generate("xa", SamplingParams(max_tokens=400, ignore_eos=True), request_id="left")
            async with stream:
                first = await anext(stream)
                assert first.token_ids
            completions = await asyncio.gather(
                *(client.complete("xa", SamplingParams(max_tokens=20)) for _ in range(3))
            )
            with pytest.raises(InvalidRequest):
                await client.complete("", SamplingParams())
            return completions

    assert [c.text for c in asyncio.run(run())] == [expected_text("a", 20)] * 3
    running.wait_drained()
