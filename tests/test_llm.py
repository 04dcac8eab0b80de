"""The offline API.

PROTECTS: results in input order with their own parameters, streams that say the same as `generate`, and that leaving a
stream early leaves nothing behind.
"""

from __future__ import annotations

import dataclasses
import gc
import threading
from collections.abc import Iterator

import pytest

from rlt_jax import LLM, Completion, EngineConfig, FinishReason, InvalidRequest, KVLayoutKind, QueueFull, RltError
from rlt_jax.errors import InvalidConfig
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


class Cycle:
    """Holds a stream where only the garbage collector can find it."""

    def __init__(self, stream: Iterator[object]) -> None:
        self.stream, self.me = stream, self


@pytest.fixture
def no_collection() -> Iterator[None]:
    """Garbage is collected where the test says so."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def abandon() -> None:
    """Start a stream of two requests and lose it in a cycle."""
    stream = llm().stream(PROMPTS[:2], sampling(max_tokens=40))
    next(stream)
    Cycle(stream)


@pytest.mark.usefixtures("no_collection")
@pytest.mark.parametrize("where", ["_scheduler.plan", "_runner.dispatch", "_runner.collect", "_scheduler.apply"])
def test_a_stream_collected_inside_a_step_is_aborted_after_it(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The garbage collector runs where it likes, and closes a lost stream there."""
    engine = llm().engine
    owner = getattr(engine, where.split(".")[0])
    step, abort, run = engine.step, engine.abort, getattr(owner, where.split(".")[1])
    inside, aborted_inside = [], []

    def watched_step():
        inside.append(True)
        try:
            return step()
        finally:
            inside.pop()

    def watched_abort(request_id):
        aborted_inside.append(bool(inside))
        return abort(request_id)

    def collecting(*args):
        result = run(*args)
        gc.collect()
        return result

    monkeypatch.setattr(engine, "step", watched_step)
    monkeypatch.setattr(engine, "abort", watched_abort)
    abandon()
    assert engine.stats()["running"] + engine.stats()["waiting"] == 2
    monkeypatch.setattr(owner, where.split(".")[1], collecting)
    results = llm().generate(PROMPTS[2:4], PARAMS[2:4])
    assert [(list(r.token_ids), list(r.exit_depths)) for r in results] == [expected(2), expected(3)]
    assert aborted_inside == [False, False]
    monkeypatch.undo()
    while engine.has_work():
        assert all(output.finish_reason is FinishReason.ABORT for output in engine.step())
    drained(engine)


@pytest.mark.usefixtures("no_collection")
def test_a_stream_collected_by_another_thread_is_aborted_by_the_engines_own(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, abort, threads = llm().engine, llm().engine.abort, []

    def watched_abort(request_id):
        threads.append(threading.current_thread())
        return abort(request_id)

    monkeypatch.setattr(engine, "abort", watched_abort)
    abandon()
    collector = threading.Thread(target=gc.collect)
    collector.start()
    collector.join()
    assert threads == []
    assert engine.stats()["running"] + engine.stats()["waiting"] == 2
    (result,) = llm().generate(PROMPTS[2], PARAMS[2])
    assert (list(result.token_ids), list(result.exit_depths)) == expected(2)
    assert threads == [threading.current_thread()] * 2
    settled(engine)


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


def test_chat_without_a_template_or_a_tokenizer_says_what_to_do(tmp_path) -> None:
    messages = [{"role": "user", "content": "hi"}]
    with pytest.raises(InvalidRequest, match=r"messages: ouro_tiny has no tokenizer.json; give token ids to generate"):
        llm().chat(messages)
    with (
        LLM(write_scripted_model(tmp_path), EngineConfig(slots=1, dtype="float32", max_context=128)) as model,
        pytest.raises(InvalidRequest, match=r"has no chat template; put its author's .* as chat_template\.jinja"),
    ):
        model.chat(messages)


def test_settings_by_name_in_place_of_a_config() -> None:
    with pytest.raises(InvalidConfig, match="slots must be an integer in"):
        LLM(FIXTURE, slots=0)
    with pytest.raises(InvalidConfig, match="kv_layuot: not a setting of LLM or EngineConfig"):
        LLM(FIXTURE, kv_layuot="drop")
    config = EngineConfig(dtype="float32", slots=4, page_size=4, prefill_chunk=4, max_context=16)
    with LLM(FIXTURE, config, kv_layout="shared", slots=1) as model:
        found = model.engine.config
        assert (found.kv_layout, found.slots, found.page_size) == (KVLayoutKind.SHARED, 1, 4)
