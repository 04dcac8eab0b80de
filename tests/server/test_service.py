"""GenerationService over a real socket, on the tiny fixture model, which has no tokenizer.

PROTECTS: what a client gets is what the engine computed; bad input never reaches the device; whatever ends a stream
gives its slot and pages back; one client's trouble is not another's.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest
from google.rpc import code_pb2, error_details_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase
from grpc_status import rpc_status

from rlt.v1 import generation_service_pb2 as pb
from rlt.v1 import generation_service_pb2_grpc as pb_grpc
from rlt_jax.client import DeadlineExceeded, GenerationClient, ServerBusy, ServerError
from rlt_jax.client.wire import PARAM_PATHS, read_resolved
from rlt_jax.errors import InvalidRequest
from rlt_jax.llm import LLM
from rlt_jax.request import FinishReason, SamplingParams
from server import service
from server.service import MAX_REQUEST_ID_CHARS
from tests.conftest import fixture_dir
from tests.server.running import RunningServer, engine_maker, raw_channel, tiny_config

PROMPT = (5, 9, 200, 31)
LONG = SamplingParams(max_tokens=480, ignore_eos=True, exit_threshold=0.5, min_loops=1)


@pytest.fixture(scope="module")
def running() -> Iterator[RunningServer]:
    with RunningServer(engine_maker(fixture_dir("ouro_tiny"), tiny_config())) as server:
        yield server


@pytest.fixture
def client(running: RunningServer) -> Iterator[GenerationClient]:
    with GenerationClient(running.address) as client:
        yield client
    running.wait_drained()  # every test leaves nothing behind


@pytest.fixture
def stub(running: RunningServer) -> Iterator[pb_grpc.GenerationServiceStub]:
    with raw_channel(running.address) as channel:
        yield pb_grpc.GenerationServiceStub(channel)
    running.wait_drained()


# -- results ----------------------------------------------------------------------------------------------------------


def test_streams_equal_offline_generation(client: GenerationClient) -> None:
    prompts = [PROMPT, (1,), tuple(range(100)), (77, 3)]
    params = [
        SamplingParams(max_tokens=30, exit_threshold=0.5, min_loops=1, ignore_eos=True),
        SamplingParams(max_tokens=20, ignore_eos=True),
        SamplingParams(max_tokens=25, temperature=0.9, top_p=0.8, seed=2**64 - 1, ignore_eos=True),
        SamplingParams(max_tokens=4, exit_trace=(4, 1, 3, 2), ignore_eos=True),
    ]
    with LLM(fixture_dir("ouro_tiny"), tiny_config(max_waiting=None)) as llm:
        offline = llm.generate(prompts, params)
    with ThreadPoolExecutor(len(prompts)) as pool:
        served = list(pool.map(client.complete, prompts, params))
    assert [c.token_ids for c in served] == [c.token_ids for c in offline]
    assert [c.exit_depths for c in served] == [c.exit_depths for c in offline]
    assert [c.logprobs for c in served] == [c.logprobs for c in offline]
    assert [c.usage for c in served] == [c.usage for c in offline]
    assert [c.finish_reason for c in served] == [FinishReason.LENGTH] * 4
    assert served[3].exit_depths == (4, 1, 3, 2)
    assert served[2].params == offline[2].params


def test_events_come_in_order_and_several_tokens_share_a_message(stub: pb_grpc.GenerationServiceStub) -> None:
    request = pb.GenerateRequest(request_id="mine", return_prompt_token_ids=True)
    request.token_ids.ids.extend(PROMPT)
    request.stop.max_tokens = 40
    request.stop.ignore_eos = True
    events = list(stub.Generate(request))
    kinds = [event.WhichOneof("event") for event in events]
    assert kinds == ["started", *["delta"] * (len(events) - 2), "finished"]
    started, deltas, finished = events[0].started, [e.delta for e in events[1:-1]], events[-1].finished
    assert started.request_id == "mine"
    assert started.prompt_tokens == len(PROMPT)
    assert tuple(started.prompt_token_ids) == PROMPT
    assert all(len(d.token_ids) == len(d.exit_depths) == len(d.logprobs) for d in deltas)
    assert sum(len(d.token_ids) for d in deltas) == 40
    assert max(len(d.token_ids) for d in deltas) > 1
    assert not any(d.HasField("text") for d in deltas)
    assert finished.reason == pb.FINISH_REASON_LENGTH
    assert finished.WhichOneof("stop_match") is None
    assert finished.usage == pb.Usage(
        prompt_tokens=4, completion_tokens=40, prompt_loops=16, decode_loops=39 * 4, full_depth_loops=39 * 4
    )


def test_started_reports_every_parameter_resolved(stub: pb_grpc.GenerationServiceStub) -> None:
    request = pb.GenerateRequest()
    request.token_ids.ids.extend(PROMPT)
    request.stop.max_tokens = 1
    started = next(iter(stub.Generate(request))).started
    assert len(started.request_id) > 8
    assert not started.prompt_token_ids
    for path in PARAM_PATHS.values():
        group, field = path.split(".")
        if field not in ("strings", "token_ids", "exit_trace"):
            assert getattr(started, group).HasField(field), path
    resolved = read_resolved(started)
    assert (resolved.min_loops, resolved.max_loops, resolved.prefill_loops) == (2, 4, 4)
    assert (resolved.exit_policy, resolved.exit_threshold, resolved.temperature) == ("gate", 1.0, 0.0)


def test_a_reported_seed_repeats_the_result(client: GenerationClient) -> None:
    sampled = SamplingParams(max_tokens=20, temperature=1.0, ignore_eos=True)
    first = client.complete(PROMPT, sampled)
    again = SamplingParams(max_tokens=20, temperature=1.0, ignore_eos=True, seed=first.params.seed)
    assert client.complete(PROMPT, again).token_ids == first.token_ids
    assert client.complete(PROMPT, sampled).token_ids != first.token_ids  # another seed: 20 equal tokens by chance, no


def test_stop_id_is_reported(client: GenerationClient) -> None:
    free = client.complete(PROMPT, SamplingParams(max_tokens=6, ignore_eos=True))
    stop = free.token_ids[3]
    at = free.token_ids.index(stop)
    stopped = client.complete(PROMPT, SamplingParams(max_tokens=6, ignore_eos=True, stop_token_ids=(stop,)))
    assert stopped.token_ids == free.token_ids[: at + 1]
    assert (stopped.finish_reason, stopped.stop_match) == (FinishReason.STOP, stop)


# -- bad input --------------------------------------------------------------------------------------------------------


def bad_request(error: grpc.RpcError) -> error_details_pb2.BadRequest.FieldViolation:
    """The one violation of an INVALID_ARGUMENT status."""
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT, error
    status = rpc_status.from_call(error)
    assert status.code == code_pb2.INVALID_ARGUMENT
    details = error_details_pb2.BadRequest()
    assert status.details[0].Unpack(details)
    (violation,) = details.field_violations
    assert violation.description in error.details()
    return violation


def request_with(**fields: object) -> pb.GenerateRequest:
    """A good request, changed: "group__field" sets a parameter."""
    request = pb.GenerateRequest(token_ids=pb.TokenIds(ids=PROMPT))
    for path, value in fields.items():
        group, field = path.split("__")
        target = getattr(request, group)
        if field == "exit_trace":
            target.exit_trace.depths.extend(value)
            target.exit_trace.SetInParent()
        elif isinstance(value, list):
            getattr(target, field).extend(value)
        else:
            setattr(target, field, value)
    return request


NAN, INFINITY = float("nan"), float("inf")
BAD = {
    "no prompt": (pb.GenerateRequest(), "prompt", "missing"),
    "empty ids": (pb.GenerateRequest(token_ids=pb.TokenIds()), "token_ids.ids", "empty"),
    "empty text": (pb.GenerateRequest(text=""), "text", "empty"),
    "text without tokenizer": (pb.GenerateRequest(text="hello"), "text", "no tokenizer"),
    "long prompt": (pb.GenerateRequest(token_ids=pb.TokenIds(ids=[1] * 513)), "token_ids.ids", "512"),
    "id past the vocabulary": (pb.GenerateRequest(token_ids=pb.TokenIds(ids=[1, 256])), "token_ids.ids", "[0, 255]"),
    "long id": (pb.GenerateRequest(request_id="x" * 129), "request_id", str(MAX_REQUEST_ID_CHARS)),
    "max_tokens 0": (request_with(stop__max_tokens=0), "stop.max_tokens", ">= 1, found 0"),
    "max_tokens past the context": (request_with(stop__max_tokens=510), "stop.max_tokens", "max_context=512"),
    "temperature nan": (request_with(sampling__temperature=NAN), "sampling.temperature", "finite, found nan"),
    "temperature inf": (request_with(sampling__temperature=INFINITY), "sampling.temperature", "finite, found inf"),
    "temperature negative": (request_with(sampling__temperature=-0.5), "sampling.temperature", "found -0.5"),
    "top_p 0": (request_with(sampling__top_p=0), "sampling.top_p", "(0, 1], found 0"),
    "top_p 2": (request_with(sampling__top_p=2), "sampling.top_p", "(0, 1], found 2"),
    "min_p -1": (request_with(sampling__min_p=-1), "sampling.min_p", "[0, 1], found -1"),
    "unknown logprob mode": (request_with(sampling__logprob_mode=9), "sampling.logprob_mode", "found 9"),
    "threshold nan": (request_with(depth__exit_threshold=NAN), "depth.exit_threshold", "finite, found nan"),
    "threshold 1.5": (request_with(depth__exit_threshold=1.5), "depth.exit_threshold", "[0, 1], found 1.5"),
    "min_loops 0": (request_with(depth__min_loops=0), "depth.min_loops", ">= 1, found 0"),
    "min above max": (request_with(depth__min_loops=3, depth__max_loops=2), "depth.min_loops", "max_loops=2, found 3"),
    "max above the model": (request_with(depth__max_loops=5), "depth.max_loops", "[1, 4], found 5"),
    "prefill above the model": (request_with(depth__prefill_loops=5), "depth.prefill_loops", "[1, 4], found 5"),
    "unknown policy": (request_with(depth__exit_policy="never"), "depth.exit_policy", "found 'never'"),
    "policy of another model": (
        request_with(depth__exit_policy="latent"),
        "depth.exit_policy",
        "latent needs the score 'latent'; ouro gives 'gate'",
    ),
    "initial state": (
        request_with(depth__initial_state="zeros"),
        "depth.initial_state",
        "injected for ouro, found 'zeros'",
    ),
    "trace without depths": (request_with(depth__exit_policy="trace"), "depth.exit_trace", "one depth per output"),
    "short trace": (request_with(stop__max_tokens=3, depth__exit_trace=[4, 1]), "depth.exit_trace", "2 entries"),
    "empty trace": (request_with(stop__max_tokens=3, depth__exit_trace=[]), "depth.exit_trace", "0 entries"),
    "trace start": (request_with(stop__max_tokens=2, depth__exit_trace=[2, 2]), "depth.exit_trace", "prefill_loops=4"),
    "trace depth": (request_with(stop__max_tokens=2, depth__exit_trace=[4, 5]), "depth.exit_trace", "[1, 4]"),
    "stop string": (request_with(stop__strings=["x"]), "stop.strings", "no tokenizer"),
    "stop id": (request_with(stop__token_ids=[256]), "stop.token_ids", "[0, 255], found 256"),
    "17 stop ids": (request_with(stop__token_ids=list(range(1, 18))), "stop.token_ids", "17 ids"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_names_field_value_and_limit(
    name: str, running: RunningServer, stub: pb_grpc.GenerationServiceStub
) -> None:
    request, field, words = BAD[name]
    running.wait_idle()
    rounds = running.stats["rounds"]
    with pytest.raises(grpc.RpcError) as caught:
        list(stub.Generate(request))
    violation = bad_request(caught.value)
    assert violation.field == field
    assert words in violation.description
    assert running.stats["rounds"] == rounds  # it never came near the device


def test_the_client_raises_what_the_offline_api_raises(running: RunningServer, client: GenerationClient) -> None:
    cases = [
        ((), SamplingParams(), "prompt"),
        ((1, True), SamplingParams(), "prompt"),  # refused by the client: the wire has no bool here
        (PROMPT, SamplingParams(max_tokens=True), "max_tokens"),
        (PROMPT, SamplingParams(seed=-1), "seed"),
        (PROMPT, SamplingParams(seed=2**64), "seed"),
        (PROMPT, SamplingParams(top_p=0.0), "top_p"),  # refused by the server
        (PROMPT, SamplingParams(stop=("",)), "stop"),
        (PROMPT, SamplingParams(logprobs="best"), "logprobs"),
    ]
    for prompt, params, field in cases:
        with pytest.raises(InvalidRequest) as served:
            client.complete(prompt, params)
        with pytest.raises(InvalidRequest) as offline:
            running.engine.prepare("offline", prompt, params)
        assert served.value.field == offline.value.field == field


def test_duplicate_live_id(
    running: RunningServer, client: GenerationClient, stub: pb_grpc.GenerationServiceStub
) -> None:
    first = client.generate(PROMPT, LONG, request_id="twice")
    next(first)
    request = request_with(stop__max_tokens=2)
    request.request_id = "twice"
    with pytest.raises(grpc.RpcError) as caught:
        list(stub.Generate(request))
    assert caught.value.code() is grpc.StatusCode.ALREADY_EXISTS
    resource = error_details_pb2.ResourceInfo()
    assert rpc_status.from_call(caught.value).details[0].Unpack(resource)
    assert resource.resource_name == "twice"
    with pytest.raises(InvalidRequest, match="'twice'") as through_client:
        client.complete(PROMPT, request_id="twice")
    assert through_client.value.field == "request_id"
    assert len(first.completion().token_ids) > 400  # the owner was not disturbed
    assert client.complete(PROMPT, SamplingParams(max_tokens=2), request_id="twice").token_ids  # free again


# -- limits -----------------------------------------------------------------------------------------------------------


def test_full_server_refuses_and_says_when_to_retry(running: RunningServer, client: GenerationClient) -> None:
    streams = [client.generate(PROMPT, LONG) for _ in range(4)]  # two slots, two may wait
    running.wait_stats(running=2, waiting=2)
    with pytest.raises(ServerBusy, match="max_waiting=2") as caught:
        client.complete(PROMPT, LONG)
    assert caught.value.retry_after_seconds == 1
    assert caught.value.code is grpc.StatusCode.RESOURCE_EXHAUSTED
    completions = [stream.completion() for stream in streams]
    assert len({c.token_ids for c in completions}) == 1  # same prompt, greedy: nobody was disturbed
    assert len(completions[0].token_ids) == 480


def test_a_flood_is_refused_before_it_is_tokenised(
    running: RunningServer, client: GenerationClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Texts on the way to the queue are held in memory; their number is bounded too."""
    monkeypatch.setattr(service, "PREPARING_CALLS", -1)  # two slots, two may wait: three calls
    streams = [client.generate(PROMPT, LONG) for _ in range(3)]
    running.wait_stats(running=2, waiting=1)
    with pytest.raises(ServerBusy, match="3 calls are open; the limit is 3"):
        client.complete(PROMPT, LONG)
    assert [len(stream.completion().token_ids) for stream in streams] == [480] * 3
    assert client.complete(PROMPT, SamplingParams(max_tokens=2)).token_ids  # and free again


class Gate:
    """Holds the engine thread before its next step, so that commands pile up."""

    def __init__(self) -> None:
        self._opened, self._reached = threading.Event(), threading.Event()
        self._opened.set()

    def close(self) -> None:
        self._reached.clear()
        self._opened.clear()

    def wait_reached(self) -> None:
        assert self._reached.wait(30)

    def open(self) -> None:
        self._opened.set()

    def pass_through(self) -> None:
        if not self._opened.is_set():
            self._reached.set()
            assert self._opened.wait(60)


@pytest.fixture
def gate(running: RunningServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    gate, step = Gate(), running.engine.step

    def gated_step() -> object:
        gate.pass_through()
        return step()

    monkeypatch.setattr(running.engine, "step", gated_step)
    yield gate
    gate.open()


def wait_commands(running: RunningServer, count: int) -> None:
    deadline = time.monotonic() + 30
    while running.server.engine_thread._commands.qsize() != count:
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_a_burst_fills_the_slots_before_anyone_is_refused(
    running: RunningServer, client: GenerationClient, gate: Gate
) -> None:
    # PROTECTS: requests leave the queue only inside a step, so a burst could find the queue (2 places) full while a
    # slot was free.
    gate.close()
    streams = [client.generate(PROMPT, LONG)]
    gate.wait_reached()
    streams += [client.generate(PROMPT, LONG) for _ in range(3)]
    wait_commands(running, 3)
    gate.open()
    assert [len(stream.completion().token_ids) for stream in streams] == [480] * 4


def test_a_cancelled_owner_does_not_end_the_next_owner_of_its_id(
    running: RunningServer, client: GenerationClient, gate: Gate
) -> None:
    # PROTECTS: the abort of the first and the second owner reach the engine in one turn; the first one's last output
    # then comes when the second is already known.
    first = client.generate(PROMPT, LONG, request_id="same")
    next(first)
    gate.close()
    gate.wait_reached()
    first.cancel()
    wait_commands(running, 1)
    second = client.generate(PROMPT, LONG, request_id="same")
    wait_commands(running, 2)
    gate.open()
    completion = second.completion()
    assert (completion.finish_reason, len(completion.token_ids)) == (FinishReason.LENGTH, 480)


# -- endings ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def rounds_at_abort(running: RunningServer, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The round counter at each moment the engine is told of an abort."""
    rounds: list[int] = []
    abort = running.engine.abort

    def noting_abort(request_id: str) -> bool:
        rounds.append(running.engine.stats()["rounds"])
        return abort(request_id)

    monkeypatch.setattr(running.engine, "abort", noting_abort)
    return rounds


def test_cancel_gives_slot_and_pages_back(
    running: RunningServer, client: GenerationClient, rounds_at_abort: list[int]
) -> None:
    stream = client.generate(PROMPT, LONG)
    next(stream)
    begun = time.monotonic()
    stream.cancel()
    with pytest.raises(ServerError) as caught:
        stream.completion()
    assert caught.value.code is grpc.StatusCode.CANCELLED
    assert time.monotonic() - begun < 1
    stats = running.wait_drained()
    (before,) = rounds_at_abort
    assert stats["rounds"] - before <= 2


def test_a_dropped_stream_is_cancelled(
    running: RunningServer, client: GenerationClient, rounds_at_abort: list[int]
) -> None:
    for _ in client.generate(PROMPT, LONG):
        break
    running.wait_drained()
    assert len(rounds_at_abort) == 1


def test_deadline(running: RunningServer, client: GenerationClient, rounds_at_abort: list[int]) -> None:
    blockers = [client.generate(PROMPT, LONG) for _ in range(2)]
    running.wait_stats(running=2)
    with pytest.raises(DeadlineExceeded):  # while it waits for a slot
        client.complete(PROMPT, LONG, timeout_seconds=0.05)
    with pytest.raises(TimeoutError):  # the standard type catches it too
        client.complete(PROMPT, LONG, timeout_seconds=0.05)
    assert [len(blocker.completion().token_ids) for blocker in blockers] == [480, 480]
    running.wait_drained()
    assert len(rounds_at_abort) == 2


def test_deadline_of_a_running_request(running: RunningServer, client: GenerationClient) -> None:
    with pytest.raises(DeadlineExceeded):
        client.complete(PROMPT, LONG, timeout_seconds=0.03)
    running.wait_drained()


def test_a_vanished_client_is_cleaned_up(running: RunningServer) -> None:
    with GenerationClient(running.address) as vanishing:
        stream = vanishing.generate(PROMPT, LONG)
        next(stream)
    running.wait_drained()


def test_abort_call(running: RunningServer, client: GenerationClient, rounds_at_abort: list[int]) -> None:
    stream = client.generate(PROMPT, LONG, request_id="doomed")
    next(stream)
    assert client.abort("doomed")
    completion = stream.completion()
    assert completion.finish_reason is FinishReason.ABORT
    assert 0 < len(completion.token_ids) == completion.usage.completion_tokens < 480
    stats = running.wait_drained()
    assert stats["rounds"] - rounds_at_abort[0] <= 2
    assert not client.abort("doomed")  # idempotent
    assert not client.abort("never seen")


def test_abort_of_a_waiting_request(running: RunningServer, client: GenerationClient) -> None:
    blockers = [client.generate(PROMPT, LONG) for _ in range(2)]
    running.wait_stats(running=2)
    waiting = client.generate(PROMPT, LONG, request_id="waiting")
    running.wait_stats(waiting=1)
    assert client.abort("waiting")
    completion = waiting.completion()
    assert completion.finish_reason is FinishReason.ABORT
    assert completion.token_ids == ()
    for blocker in blockers:
        blocker.cancel()


def test_abort_before_the_engine_has_heard_of_the_request(
    running: RunningServer, client: GenerationClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare, entered, release = running.engine.prepare, threading.Event(), threading.Event()

    def slow_prepare(*args: object) -> object:
        entered.set()
        assert release.wait(10)
        return prepare(*args)

    monkeypatch.setattr(running.engine, "prepare", slow_prepare)
    stream = client.generate(PROMPT, LONG, request_id="early")
    assert entered.wait(10)
    running.wait_idle()
    rounds = running.stats["rounds"]
    assert client.abort("early")
    release.set()
    completion = stream.completion()
    assert (completion.finish_reason, completion.token_ids) == (FinishReason.ABORT, ())
    assert completion.usage.prompt_tokens == len(PROMPT)
    assert running.stats["rounds"] == rounds


def test_an_id_is_free_as_soon_as_its_stream_ends(running: RunningServer, client: GenerationClient) -> None:
    # PROTECTS: late news of the first owner, whose rounds are still on the device, must not reach the second.
    short = SamplingParams(max_tokens=8, ignore_eos=True)
    expected = client.complete((1, 2), short)
    for _ in range(5):
        first = client.generate(PROMPT, LONG, request_id="same")
        next(first)
        client.abort("same")
        assert first.completion().finish_reason is FinishReason.ABORT
        assert client.complete((1, 2), short, request_id="same").token_ids == expected.token_ids


def test_different_fates_in_one_batch(running: RunningServer, client: GenerationClient) -> None:
    alone = client.complete(PROMPT, LONG)
    fates: list[str] = []

    def cancelled() -> None:
        for _ in client.generate((7, 7), LONG):
            break
        fates.append("cancelled")

    def invalid() -> None:
        with pytest.raises(InvalidRequest):
            client.complete(PROMPT, SamplingParams(max_loops=9))
        fates.append("invalid")

    stream = client.generate(PROMPT, LONG)
    next(stream)
    threads = [threading.Thread(target=f) for f in (cancelled, invalid) * 3]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sorted(fates) == ["cancelled"] * 3 + ["invalid"] * 3
    beside = stream.completion()
    assert (beside.token_ids, beside.exit_depths, beside.logprobs) == (
        alone.token_ids,
        alone.exit_depths,
        alone.logprobs,
    )


# -- information ------------------------------------------------------------------------------------------------------


def test_model_info(client: GenerationClient) -> None:
    info = client.model_info()
    assert (info.name, info.model_type, info.vocab_size, info.max_context) == ("ouro_tiny", "ouro", 256, 512)
    assert (info.trained_loops, info.max_loops, info.kv_planes) == (4, 4, 4)
    assert info.kv_bytes_per_token == 2 * 3 * 4 * 4 * 16 * 4  # k and v, layers, planes, heads, width, bytes
    assert (info.open_ended, info.initial_states, info.exit_scores) == (False, ("injected",), ("gate",))
    assert info.exit_policies == ("fixed", "gate", "gate_delayed", "trace")
    assert (info.eos_token_ids, info.has_tokenizer, info.dtype) == ((0,), False, "float32")


def test_server_info(client: GenerationClient) -> None:
    info = client.server_info()
    assert {"rlt_jax", "jax", "python"} <= set(info.versions)
    assert (info.settings.slots, info.settings.max_waiting, info.settings.kv_layout) == (2, 2, "last_exited")
    assert info.settings.boundary_batch == 1
    assert info.settings.prefill_buckets
    assert "paged_attention" in [item.op for item in info.implementations]
    assert all(item.chosen and item.reason for item in info.implementations)
    assert info.memory_plan["pages"] == info.stats.pages_total == info.stats.pages_free
    assert info.memory_plan["kv_bytes"] == info.memory_plan["pages"] * info.memory_plan["bytes_per_page"]
    defaults = info.defaults
    assert (defaults.max_tokens, defaults.min_loops, defaults.max_loops, defaults.prefill_loops) == (64, 2, 4, 4)
    assert (defaults.exit_policy, defaults.exit_threshold, defaults.seed) == ("gate", 1.0, None)
    assert info.compiled_programs > 0


def test_health_and_reflection(running: RunningServer) -> None:
    with raw_channel(running.address) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        for name in ("", "rlt.v1.GenerationService"):
            assert health.Check(health_pb2.HealthCheckRequest(service=name)).status == 1  # SERVING
        with pytest.raises(grpc.RpcError) as caught:
            health.Check(health_pb2.HealthCheckRequest(service="rlt.v1.Nothing"))
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND
        reflection = ProtoReflectionDescriptorDatabase(channel)
        assert set(reflection.get_services()) == {
            "grpc.health.v1.Health",
            "grpc.reflection.v1alpha.ServerReflection",
            "rlt.v1.GenerationService",
        }
        file = reflection.FindFileContainingSymbol("rlt.v1.GenerationService")
        assert [method.name for method in file.service[0].method] == [
            "Generate",
            "Abort",
            "GetModelInfo",
            "GetServerInfo",
        ]
