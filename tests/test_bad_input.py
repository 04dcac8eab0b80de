"""Requests that can never run are refused before anything is queued.

PROTECTS: the device and the other users from bad input, and the user from guessing: each error names the field, the
value that was found and the limit.
"""

from __future__ import annotations

import dataclasses

import pytest
from tokenizers import Tokenizer, models

from rlt_jax import EngineConfig, InvalidConfig, InvalidRequest, LLMEngine, QueueFull, SamplingParams
from rlt_jax.text import TextTokenizer
from tests.engines import CONTEXT, FIXTURE, LAST_EXITED, alone, drained, engine, llm, sampling, settled

NAN, INFINITY = float("nan"), float("inf")
PROMPT = [1, 2, 3]

# prompt, parameters, the field that the error names, and what its message must hold: the value and the limit
CASES = {
    "empty prompt": ([], {}, "prompt", ["empty", "at least 1"]),
    "too long prompt": ([7] * (CONTEXT + 1), {"max_tokens": 1}, "prompt", ["65", "max_context=64"]),
    "id above the vocabulary": ([1, 256], {}, "prompt", ["token 1 is 256", "[0, 255]"]),
    "negative id": ([-1], {}, "prompt", ["token 0 is -1", "[0, 255]"]),
    "bool as id": ([1, True], {}, "prompt", ["token 1", "True", "integer"]),
    "float as id": ([1.0], {}, "prompt", ["token 0", "1.0", "integer"]),
    "text without a tokenizer": ("hello", {}, "prompt", ["no tokenizer", "token ids"]),
    "number as prompt": (5, {}, "prompt", ["int", "sequence"]),
    "None as prompt": (None, {}, "prompt", ["NoneType", "sequence"]),
    "no tokens": (PROMPT, {"max_tokens": 0}, "max_tokens", ["0", ">= 1"]),
    "negative tokens": (PROMPT, {"max_tokens": -3}, "max_tokens", ["-3", ">= 1"]),
    "bool for int": (PROMPT, {"max_tokens": True}, "max_tokens", ["True", "integer", "bool"]),
    "float for int": (PROMPT, {"max_tokens": 4.0}, "max_tokens", ["4.0", "integer"]),
    "context exceeded": (PROMPT, {"max_tokens": 63}, "max_tokens", ["63", "65", "max_context=64", "62"]),
    "huge max_tokens": (PROMPT, {"max_tokens": 2**70}, "max_tokens", [str(2**70), "max_context=64"]),
    "NaN temperature": (PROMPT, {"temperature": NAN}, "temperature", ["nan", "finite"]),
    "infinite temperature": (PROMPT, {"temperature": INFINITY}, "temperature", ["inf", "finite"]),
    "negative temperature": (PROMPT, {"temperature": -0.5}, "temperature", ["-0.5", "[0"]),
    "temperature beyond float32": (PROMPT, {"temperature": 1e39}, "temperature", ["1e+39", "[0, 3.4e+38]"]),
    "bool temperature": (PROMPT, {"temperature": True}, "temperature", ["True", "number"]),
    "text temperature": (PROMPT, {"temperature": "hot"}, "temperature", ["'hot'", "number"]),
    "NaN threshold": (PROMPT, {"exit_threshold": NAN}, "exit_threshold", ["nan", "finite"]),
    "infinite threshold": (PROMPT, {"exit_threshold": INFINITY}, "exit_threshold", ["inf", "finite"]),
    "negative threshold": (PROMPT, {"exit_threshold": -0.01}, "exit_threshold", ["-0.01", "[0, 1]"]),
    "threshold above one": (PROMPT, {"exit_threshold": 1.5}, "exit_threshold", ["1.5", "[0, 1]"]),
    "top_p zero": (PROMPT, {"top_p": 0}, "top_p", ["0", "(0, 1]"]),
    "top_p above one": (PROMPT, {"top_p": 1.01}, "top_p", ["1.01", "(0, 1]"]),
    "NaN top_p": (PROMPT, {"top_p": NAN}, "top_p", ["nan", "finite"]),
    "negative top_k": (PROMPT, {"top_k": -1}, "top_k", ["-1", "[0"]),
    "bool top_k": (PROMPT, {"top_k": True}, "top_k", ["True", "integer"]),
    "float top_k": (PROMPT, {"top_k": 2.5}, "top_k", ["2.5", "integer"]),
    "negative min_p": (PROMPT, {"min_p": -0.1}, "min_p", ["-0.1", "[0, 1]"]),
    "min_p above one": (PROMPT, {"min_p": 1.1}, "min_p", ["1.1", "[0, 1]"]),
    "negative seed": (PROMPT, {"seed": -1}, "seed", ["-1", str(2**64 - 1)]),
    "seed of 65 bits": (PROMPT, {"seed": 2**64}, "seed", [str(2**64), str(2**64 - 1)]),
    "bool seed": (PROMPT, {"seed": False}, "seed", ["False", "integer"]),
    "negative sample index": (PROMPT, {"sample_index": -1}, "sample_index", ["-1", "[0"]),
    "min_loops above max_loops": (PROMPT, {"min_loops": 3, "max_loops": 2}, "min_loops", ["3", "max_loops=2"]),
    "min_loops above the model": (PROMPT, {"min_loops": 5}, "min_loops", ["5", "max_loops=4"]),
    "no loops": (PROMPT, {"min_loops": 0}, "min_loops", ["0", ">= 1"]),
    "max_loops above the model": (PROMPT, {"max_loops": 5}, "max_loops", ["5", "[1, 4]"]),
    "max_loops zero": (PROMPT, {"max_loops": 0}, "max_loops", ["0", "[1, 4]"]),
    "bool loops": (PROMPT, {"max_loops": True}, "max_loops", ["True", "integer"]),
    "prefill_loops above the model": (PROMPT, {"prefill_loops": 5}, "prefill_loops", ["5", "[1, 4]"]),
    "prefill_loops zero": (PROMPT, {"prefill_loops": 0}, "prefill_loops", ["0", "[1, 4]"]),
    "stop strings without a tokenizer": (PROMPT, {"stop": ("x",)}, "stop", ["1 stop", "no tokenizer"]),
    "one stop id too many": (
        PROMPT, {"stop_token_ids": tuple(range(20, 37)), "ignore_eos": True}, "stop_token_ids", ["17", "16"],
    ),
    "one stop id too many beside EOS": (
        PROMPT, {"stop_token_ids": tuple(range(20, 36)), "ignore_eos": False}, "stop_token_ids", ["16", "15", "EOS"],
    ),
    "stop id outside the vocabulary": (PROMPT, {"stop_token_ids": (3, 256)}, "stop_token_ids", ["256", "[0, 255]"]),
    "bool stop id": (PROMPT, {"stop_token_ids": (True,)}, "stop_token_ids", ["True", "integer"]),
    "a number of stop ids": (PROMPT, {"stop_token_ids": 3}, "stop_token_ids", ["int", "sequence"]),
    "short trace": (PROMPT, {"max_tokens": 3, "exit_trace": (4, 2)}, "exit_trace", ["2 entries", "max_tokens=3"]),
    "empty trace": (PROMPT, {"max_tokens": 3, "exit_trace": ()}, "exit_trace", ["0 entries", "max_tokens=3"]),
    "trace that does not start at the prompt's depth": (
        PROMPT, {"max_tokens": 2, "exit_trace": (3, 2)}, "exit_trace", ["entry 0 is 3", "prefill_loops=4"],
    ),
    "trace entry above max_loops": (
        PROMPT, {"max_tokens": 2, "exit_trace": (4, 4), "max_loops": 3}, "exit_trace", ["entry 1 is 4", "[1, 3]"],
    ),
    "trace entry below min_loops": (
        PROMPT, {"max_tokens": 2, "exit_trace": (4, 1), "min_loops": 2}, "exit_trace", ["entry 1 is 1", "[2, 4]"],
    ),
    "trace entry zero": (PROMPT, {"max_tokens": 2, "exit_trace": (4, 0)}, "exit_trace", ["0", ">= 1"]),
    "bool in a trace": (PROMPT, {"max_tokens": 2, "exit_trace": (4, True)}, "exit_trace", ["True", "integer"]),
    "unknown policy": (PROMPT, {"exit_policy": "greedy"}, "exit_policy", ["'greedy'", "gate_delayed"]),
    "policy that is no name": (PROMPT, {"exit_policy": 3}, "exit_policy", ["3", "gate_delayed"]),
    "policy trace without a trace": (PROMPT, {"exit_policy": "trace"}, "exit_trace", ["one depth per output"]),
    "trace with another policy": (
        PROMPT, {"max_tokens": 1, "exit_trace": (4,), "exit_policy": "gate"}, "exit_policy", ["'gate'", "trace"],
    ),
    "policy of a score that the model lacks": (
        PROMPT, {"exit_policy": "latent"}, "exit_policy", ["latent needs the score 'latent'", "ouro gives 'gate'"],
    ),
    "initial state that the model lacks": (
        PROMPT, {"initial_state": "zeros"}, "initial_state", ["'zeros'", "one of injected", "ouro"],
    ),
    "initial state that is no name": (PROMPT, {"initial_state": 0}, "initial_state", ["0", "injected"]),
    "unknown log-probabilities": (PROMPT, {"logprobs": "both"}, "logprobs", ["'both'", "raw", "processed"]),
    "ignore_eos that is no bool": (PROMPT, {"ignore_eos": 1}, "ignore_eos", ["1", "true or false"]),
}  # fmt: skip


@pytest.fixture(scope="module")
def target() -> LLMEngine:
    return engine(LAST_EXITED)


def check_error(error: InvalidRequest, field: str, fragments: list[str]) -> None:
    assert error.field == field, str(error)
    assert str(error).startswith(f"{field}: ")
    for fragment in fragments:
        assert fragment in error.description, (fragment, error.description)


@pytest.mark.parametrize("case", CASES)
def test_is_refused_by_the_engine(target: LLMEngine, case: str) -> None:
    prompt, settings, field, fragments = CASES[case]
    before = target.stats()
    with pytest.raises(InvalidRequest) as caught:
        target.add_request("bad", prompt, SamplingParams(**{"max_tokens": 2} | settings))
    check_error(caught.value, field, fragments)
    assert target.stats() == before
    drained(target)


@pytest.mark.parametrize("case", CASES)
def test_is_refused_by_generate(case: str) -> None:
    """Second of two prompts: the first, which is good, is not queued either."""
    prompt, settings, field, fragments = CASES[case]
    with pytest.raises(InvalidRequest) as caught:
        llm().generate([PROMPT, prompt], [SamplingParams(max_tokens=1), SamplingParams(**{"max_tokens": 2} | settings)])
    check_error(caught.value, field, fragments)
    settled(llm().engine)


@pytest.mark.parametrize(
    ("settings", "tokens"),
    [
        ({"max_tokens": CONTEXT - 2}, CONTEXT - 2),  # prompt 3 + 62 - 1 = 64
        ({"top_p": 1e-9, "temperature": 1.0, "max_tokens": 1}, 1),
        ({"seed": 2**64 - 1, "temperature": 1.0, "max_tokens": 1}, 1),
        ({"seed": 0, "temperature": 1e-30, "max_tokens": 1}, 1),
        ({"temperature": 1e30, "max_tokens": 1}, 1),
        ({"exit_threshold": 0, "max_tokens": 2}, 2),
        ({"exit_threshold": 1, "max_tokens": 2}, 2),
        ({"stop_token_ids": tuple(range(100, 116)), "max_tokens": 1}, 1),
        ({"exit_trace": (4, 1, 4, 4, 4), "max_tokens": 2}, 2),  # longer than needed
        ({"min_loops": 4, "max_loops": 4, "max_tokens": 2}, 2),
        ({"top_k": 2**31 - 1, "temperature": 1.0, "max_tokens": 1}, 1),
    ],
    ids=str,
)
def test_the_limits_themselves_are_allowed(target: LLMEngine, settings: dict, tokens: int) -> None:
    result = alone(target, PROMPT, sampling(**settings))
    assert len(result.tokens) == tokens


def test_an_id_that_is_live(target: LLMEngine) -> None:
    target.add_request("same", PROMPT, sampling())
    before = target.stats()
    for _ in range(2):
        with pytest.raises(InvalidRequest) as caught:
            target.add_request("same", [4], sampling())
        check_error(caught.value, "request_id", ["'same'", "live"])
        assert target.stats()["waiting"] + target.stats()["running"] == before["waiting"] + before["running"]
        target.step()
    finished = []
    while target.has_work():
        finished += [o for o in target.step() if o.finished]
    assert len(finished) == 1
    target.add_request("same", PROMPT, sampling(max_tokens=1))
    while target.has_work():
        target.step()
    drained(target)


@pytest.mark.parametrize("bad", ["", 5, None, b"id"])
def test_an_id_that_is_no_name(target: LLMEngine, bad: object) -> None:
    with pytest.raises(InvalidRequest) as caught:
        target.add_request(bad, PROMPT, sampling())
    check_error(caught.value, "request_id", [repr(bad), "non-empty string"])
    drained(target)


def test_parameters_of_another_type(target: LLMEngine) -> None:
    with pytest.raises(InvalidRequest) as caught:
        target.add_request("bad", PROMPT, {"max_tokens": 3})
    check_error(caught.value, "params", ["dict", "SamplingParams"])
    drained(target)


def test_as_many_parameters_as_prompts() -> None:
    with pytest.raises(InvalidRequest) as caught:
        llm().generate([PROMPT, PROMPT, PROMPT], [SamplingParams(max_tokens=1)] * 2)
    check_error(caught.value, "params", ["2", "3"])
    settled(llm().engine)


def test_more_than_the_whole_pool_holds() -> None:
    small = engine(LAST_EXITED, slots=2, page_size=4, chunk=5, kv_pages=8)
    with pytest.raises(InvalidRequest) as caught:
        small.add_request("bad", PROMPT, sampling(max_tokens=31))
    check_error(caught.value, "max_tokens", ["31", "33", "32", "at most 30 here"])
    with pytest.raises(InvalidRequest) as caught:
        small.add_request("bad", [1] * 33, sampling(max_tokens=1))
    check_error(caught.value, "max_tokens", ["33", "32", "the prompt alone does not fit"])
    drained(small)
    assert len(alone(small, PROMPT, sampling(max_tokens=30)).tokens) == 30


class TestWithTokenizer:
    """Stop strings are checked where there is a tokenizer to make text."""

    @pytest.fixture
    def texting(self, target: LLMEngine, monkeypatch: pytest.MonkeyPatch) -> LLMEngine:
        words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(256)}, unk_token="w0"))
        monkeypatch.setattr(target, "loaded", dataclasses.replace(target.loaded, tokenizer=TextTokenizer(words)))
        return target

    @pytest.mark.parametrize(
        ("stop", "fragments"),
        [
            (("",), ["0 characters", "1 to 256"]),
            (("ok", ""), ["0 characters", "1 to 256"]),
            (("x" * 257,), ["257 characters", "1 to 256"]),
            (tuple(map(str, range(17))), ["17 strings", "16"]),
            (("ok", 3), ["3", "strings"]),
            (5, ["int", "sequence of strings"]),
        ],
        ids=["empty", "one empty", "too long", "too many", "a number among them", "a number"],
    )
    def test_bad_stop_strings(self, texting: LLMEngine, stop: object, fragments: list[str]) -> None:
        with pytest.raises(InvalidRequest) as caught:
            texting.add_request("bad", PROMPT, sampling(stop=stop))
        check_error(caught.value, "stop", fragments)
        drained(texting)

    def test_an_empty_text(self, texting: LLMEngine) -> None:
        with pytest.raises(InvalidRequest) as caught:
            texting.add_request("bad", "", sampling())
        check_error(caught.value, "prompt", ["empty", "at least 1"])
        drained(texting)


def test_a_full_queue_is_not_an_invalid_request(target: LLMEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """It says so with its own error, and what waits stays."""
    scheduler = target._scheduler
    monkeypatch.setattr(scheduler, "_limits", dataclasses.replace(scheduler._limits, max_waiting=2))
    for i in range(2):
        target.add_request(f"r{i}", PROMPT, sampling(max_tokens=1))
    with pytest.raises(QueueFull, match="max_waiting=2"):
        target.add_request("late", PROMPT, sampling(max_tokens=1))
    assert target.stats()["waiting"] == 2
    finished = []
    while target.has_work():
        finished += [o.request_id for o in target.step() if o.finished]
    assert sorted(finished) == ["r0", "r1"]
    drained(target)


@pytest.mark.parametrize(
    ("settings", "fragments"),
    [
        ({"slots": 0}, ["slots", "0", "[1, 4096]"]),
        ({"slots": True}, ["slots", "True"]),
        ({"page_size": 2048}, ["page_size", "2048", "1024"]),
        ({"prefill_chunk": 0}, ["prefill_chunk", "0"]),
        ({"max_context": 1}, ["max_context", "1", "[2,"]),
        ({"kv_pages": 0}, ["kv_pages", "0"]),
        ({"round_ticks": 65}, ["round_ticks", "65", "64"]),
        ({"dtype": "float16"}, ["dtype", "float16", "bfloat16, float32"]),
        ({"kv_layout": "both"}, ["kv_layout", "last_exited, shared, drop, ring", "'both'"]),
        ({"kv_planes": 2}, ["kv_planes=2", "ring", "last_exited"]),
        ({"kv_planes": 2, "kv_layout": "drop"}, ["kv_planes=2", "ring", "drop"]),
        ({"kv_planes": 0, "kv_layout": "ring"}, ["kv_planes", "0", "[1, 8]"]),
        ({"kv_planes": 9, "kv_layout": "ring"}, ["kv_planes", "9", "[1, 8]"]),
        ({"max_loops": 128}, ["max_loops", "128", "[1, 127]"]),
        ({"max_loops": 0}, ["max_loops", "0", "[1, 127]"]),
        ({"boundary_batch": 0}, ["boundary_batch", "0", "[1, 4096]"]),
        ({"boundary_batch": True}, ["boundary_batch", "True"]),
        ({"initial_state": "ones"}, ["initial_state", "'ones'", "injected, zeros, random"]),
        ({"kernels": "magic"}, ["kernels", "magic", "auto, reference, triton"]),
        ({"memory_fraction": 1.0}, ["memory_fraction", "1.0", "[0.05, 0.98]"]),
        ({"memory_fraction": NAN}, ["memory_fraction", "nan"]),
        ({"max_waiting": 0}, ["max_waiting", "0"]),
    ],
    ids=str,
)
def test_settings_are_checked_at_once(settings: dict, fragments: list[str]) -> None:
    with pytest.raises(InvalidConfig) as caught:
        EngineConfig(**settings)
    for fragment in fragments:
        assert fragment in str(caught.value)


def test_a_context_beyond_the_model() -> None:
    with pytest.raises(InvalidConfig, match=r"max_context=1024.*max_position_embeddings=512"):
        resolved(max_context=1024)


def resolved(*, initial_states: tuple[str, ...] = ("injected",), whole_stack: bool = True, **settings: object):
    """Settings for a model of four loops and 512 positions on a CPU."""
    return EngineConfig(**settings).resolved(
        platform="cpu", max_positions=512, max_loops=4, initial_states=initial_states, whole_stack=whole_stack
    )


def test_an_initial_state_that_the_model_does_not_offer() -> None:
    with pytest.raises(InvalidConfig, match=r"initial_state='random'.*offers injected"):
        resolved(initial_state="random")
    with pytest.raises(InvalidConfig, match=r"initial_state='injected'.*offers zeros, random"):
        resolved(initial_state="injected", initial_states=("zeros", "random"))


def test_a_boundary_that_the_model_does_not_have() -> None:
    with pytest.raises(InvalidConfig, match="boundary_batch must be 1.*found 2"):
        resolved(boundary_batch=2)
    assert resolved(boundary_batch=1).boundary_batch == 1


def test_settings_that_the_model_decides() -> None:
    """What None means, and that a quarter of few slots is still one."""
    ouro, huginn = resolved(), resolved(initial_states=("zeros", "random"), whole_stack=False)
    assert (ouro.initial_state, ouro.boundary_batch, ouro.max_loops, ouro.kv_planes) == ("injected", 1, 4, None)
    assert (huginn.initial_state, huginn.boundary_batch) == ("zeros", 2)  # of 8 slots
    assert resolved(whole_stack=False, slots=3).boundary_batch == 1
    assert resolved(whole_stack=False, boundary_batch=5).boundary_batch == 5
    assert resolved(kv_layout="ring").kv_planes == 1
    assert resolved(kv_layout="ring", kv_planes=3).kv_planes == 3


@pytest.mark.parametrize("asked", [1, 3, 5])
def test_another_depth_of_a_model_of_fixed_depth(asked: int) -> None:
    with pytest.raises(InvalidConfig, match=rf"max_loops must be 4, the only cap of .*'ouro', found {asked}"):
        LLMEngine(FIXTURE, EngineConfig(max_loops=asked))


def test_more_ring_planes_than_loops() -> None:
    with pytest.raises(InvalidConfig, match=r"kv_planes must be in \[1, 4\] .*max_loops=4.*found 5"):
        LLMEngine(FIXTURE, EngineConfig(kv_layout="ring", kv_planes=5))
