"""The offline API.

PROTECTS: results in input order with their own parameters, streams that say the same as `generate`, and that leaving a
stream early leaves nothing behind.
"""

from __future__ import annotations

import dataclasses

import pytest

from rlt_jax import LLM, Completion, EngineConfig, FinishReason, InvalidRequest, QueueFull, RltError
from tests.engines import FIXTURE, Result, drained, llm, oracle, sampling, settled
from tests.oracle import Policy
from tests.server.scripted_model import expected_text, write_scripted_model

PROMPTS = [[3, 1, 4, 1, 5], [9, 2], [6, 5, 3, 5, 8, 9, 7, 9], [250], [100, 200]]
PARAMS = [sampling(max_tokens=3 + 2 * i, exit_threshold=0.5, min_loops=1) for i in range(5)]


def expected(index: int) -> tuple[list[int], list[int]]:
    steps = oracle().run(PROMPTS[index], PARAMS[index].max_tokens, Policy(threshold=0.5, min_loops=1))
    return [s.token for s in steps], [s.depth for s in steps]


def test_completions_are_in_input_order_with_their_own_parameters() -> None:
    results = llm().generate(PROMPTS, PARAMS)
    for i, result in enumerate(results):
        assert isinstance(result, Completion)
        assert list(result.prompt_token_ids) == PROMPTS[i]
        assert (list(result.token_ids), list(result.exit_depths)) == expected(i)
        assert len(result.logprobs) == PARAMS[i].max_tokens
        assert result.finish_reason is FinishReason.LENGTH
        assert result.text is None, "no tokenizer"
        assert result.params.exit_threshold == 0.5
        assert result.usage.decode_loops == sum(result.exit_depths[1:])
    settled(llm().engine)


def test_one_prompt_and_one_set_of_parameters() -> None:
    (single,) = llm().generate(PROMPTS[0], PARAMS[0])
    assert list(single.token_ids) == expected(0)[0]
    same = llm().generate(PROMPTS[:2], PARAMS[1])
    assert [len(r.token_ids) for r in same] == [PARAMS[1].max_tokens] * 2
    assert list(same[1].token_ids) == expected(1)[0]
    assert llm().generate([], PARAMS[0]) == []


def test_a_stream_says_what_generate_says() -> None:
    results = [Result() for _ in PROMPTS]
    for index, output in llm().stream(PROMPTS, PARAMS):
        results[index].add(output)
    for i, result in enumerate(results):
        assert (result.tokens, result.depths) == expected(i)
    settled(llm().engine)


def test_leaving_a_stream_early_leaves_nothing_behind() -> None:
    stream = llm().stream(PROMPTS, sampling(max_tokens=40))
    next(stream)
    assert llm().engine.stats()["running"] > 0
    stream.close()
    engine = llm().engine
    while engine.has_work():
        engine.step()  # the cancelled requests' last outputs, which nobody waits for
    drained(engine)
    assert list(llm().generate(PROMPTS[1], PARAMS[1])[0].token_ids) == expected(1)[0]


def test_two_streams_at_once() -> None:
    """Whoever makes the engine step, each stream gets its own news."""
    results = {(s, i): Result() for s in range(2) for i in range(3)}
    streams = [llm().stream(PROMPTS[:3], PARAMS[:3]) for _ in range(2)]
    while streams:
        for number, stream in enumerate(list(streams)):
            index, output = next(stream, (None, None))
            if index is None:
                streams.remove(stream)
            else:
                which = number if len(streams) == 2 else next(n for n in range(2) if not results[n, index].ended)
                results[which, index].add(output)
    for (_, index), result in results.items():
        assert (result.tokens, result.depths) == expected(index)
    settled(llm().engine)


def test_a_device_failure_is_an_error_and_the_next_call_works(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = llm().engine._runner
    collect, calls = runner.collect, []

    def fails_once():
        calls.append(1)
        if len(calls) == 2:
            raise RuntimeError("injected fault")
        return collect()

    monkeypatch.setattr(runner, "collect", fails_once)
    with pytest.raises(RltError, match="injected fault"):
        llm().generate(PROMPTS, PARAMS)
    engine = llm().engine
    while engine.has_work():
        engine.step()
    drained(engine)
    assert list(llm().generate(PROMPTS[2], PARAMS[2])[0].token_ids) == expected(2)[0]


def test_a_full_queue_leaves_nothing_of_the_call_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """The third prompt finds the queue full; the two before it do not run on for nobody."""
    scheduler = llm().engine._scheduler
    monkeypatch.setattr(scheduler, "_limits", dataclasses.replace(scheduler._limits, max_waiting=2))
    with pytest.raises(QueueFull, match="max_waiting=2"):
        llm().generate(PROMPTS[:3], PARAMS[:3])
    stats = llm().engine.stats()
    assert (stats["running"], stats["waiting"]) == (0, 0)
    while llm().engine.has_work():
        llm().engine.step()
    drained(llm().engine)


def test_use_after_close() -> None:
    from rlt_jax import LLM, EngineConfig, EngineDead

    with LLM(FIXTURE, EngineConfig(dtype="float32", slots=1, page_size=4, prefill_chunk=4, max_context=16)) as short:
        assert len(short.generate([1, 2], sampling(max_tokens=2))[0].token_ids) == 2
    with pytest.raises(EngineDead, match="closed"):
        short.generate([1, 2], sampling(max_tokens=2))


@pytest.mark.parametrize("prompts", [None, 5, {"text": "a"}, b"abc"], ids=str)
def test_prompts_of_a_wrong_type_are_named(prompts) -> None:
    with pytest.raises(InvalidRequest, match="prompts: must be a string, a sequence of token ids"):
        llm().generate(prompts, PARAMS[0])


@pytest.mark.parametrize("params", [5, "greedy", {"max_tokens": 3}], ids=str)
def test_parameters_of_a_wrong_type_are_named(params) -> None:
    with pytest.raises(InvalidRequest, match="params: must be a SamplingParams"):
        llm().generate(PROMPTS[0], params)
    settled(llm().engine)


def test_chat_renders_the_checkpoint_s_template(tmp_path) -> None:
    """The template writes the special tokens; the tokenizer must not add its own on top."""
    folder = write_scripted_model(tmp_path)
    template = "{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}a"
    (folder / "chat_template.jinja").write_text(template)
    with LLM(folder, EngineConfig(slots=1, dtype="float32", max_context=128)) as model:
        result = model.chat([{"role": "user", "content": "hi"}], sampling(max_tokens=6))
        tokenizer = model.engine.loaded.tokenizer
        assert tokenizer is not None
        assert tokenizer.decode(result.prompt_token_ids) == "user:hi;a"
        assert result.text == expected_text("a", 6)
        with pytest.raises(InvalidRequest, match="messages"):
            model.chat([{"content": "no role"}])


def test_chat_without_a_template_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="messages: .* has no chat template"):
        llm().chat([{"role": "user", "content": "hi"}])
