"""The mapping between Python's request types and the wire contract.

PROTECTS: no parameter is lost or swapped on its way; zero is not unset; an error names the field that the caller knows.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import grpc
import pytest
from google.protobuf.descriptor import FieldDescriptor
from hypothesis import given
from hypothesis import strategies as st

from rlt.v1 import generation_service_pb2 as pb
from rlt.v1 import params_pb2
from rlt_jax.client import ModelInfo, ServerInfo, wire
from rlt_jax.client.errors import DeadlineExceeded, ServerBusy, ServerError, error_from_rpc
from rlt_jax.errors import InvalidRequest, QueueFull
from rlt_jax.request import FinishReason, RequestOutput, ResolvedParams, SamplingParams, Usage
from server import status

uint32 = st.integers(0, 2**32 - 1)
floats = st.floats(allow_nan=False)
PARAMS = st.builds(
    SamplingParams,
    max_tokens=uint32,
    temperature=st.none() | floats,
    top_k=st.none() | uint32,
    top_p=st.none() | floats,
    min_p=st.none() | floats,
    seed=st.none() | st.integers(0, 2**64 - 1),
    sample_index=uint32,
    stop=st.lists(st.text(st.characters(exclude_categories=["Cs"])), max_size=3).map(tuple),
    stop_token_ids=st.lists(uint32, max_size=3).map(tuple),
    ignore_eos=st.booleans(),
    min_loops=st.none() | uint32,
    max_loops=st.none() | uint32,
    prefill_loops=st.none() | uint32,
    exit_policy=st.none() | st.sampled_from(["fixed", "gate", "latent", "kl", "argmax", ""]),
    exit_threshold=st.none() | floats,
    exit_trace=st.none() | st.lists(uint32, max_size=3).map(tuple),
    initial_state=st.none() | st.sampled_from(["zeros", "random", ""]),
    logprobs=st.sampled_from(["raw", "processed"]),
)


@given(PARAMS)
def test_parameters_survive_the_wire(params: SamplingParams) -> None:
    sent = wire.write_request([1, 2], params).SerializeToString()
    assert wire.read_params(pb.GenerateRequest.FromString(sent)) == params


def test_the_table_covers_every_parameter_and_every_field_of_the_contract() -> None:
    assert set(wire.PARAM_PATHS) == {f.name for f in dataclasses.fields(SamplingParams)}
    assert set(wire.PARAM_PATHS) == {f.name for f in dataclasses.fields(ResolvedParams)}
    groups = {"sampling": params_pb2.SamplingParams, "stop": params_pb2.StopParams, "depth": params_pb2.DepthParams}
    paths = {f"{group}.{field.name}" for group, message in groups.items() for field in message.DESCRIPTOR.fields}
    assert set(wire.PARAM_PATHS.values()) == paths


def test_every_scalar_parameter_can_tell_zero_from_unset() -> None:
    for message in (params_pb2.SamplingParams, params_pb2.StopParams, params_pb2.DepthParams):
        for field in message.DESCRIPTOR.fields:
            assert field.is_repeated or field.has_presence, field.full_name
    zero = wire.write_request([1], SamplingParams(temperature=0.0, top_k=0, seed=0))
    assert (zero.sampling.HasField("temperature"), zero.sampling.HasField("seed")) == (True, True)
    assert not wire.write_request([1], SamplingParams()).sampling.HasField("temperature")
    assert pb.GenerateRequest.DESCRIPTOR.fields_by_name["return_prompt_token_ids"].has_presence


def test_an_empty_request_means_the_defaults() -> None:
    assert wire.read_params(pb.GenerateRequest()) == SamplingParams()


def test_seed_keeps_64_bits_and_floats_are_doubles() -> None:
    fields = params_pb2.SamplingParams.DESCRIPTOR.fields_by_name
    assert fields["seed"].type == FieldDescriptor.TYPE_UINT64
    assert fields["temperature"].type == FieldDescriptor.TYPE_DOUBLE  # 0.1 comes back as 0.1, not as 0.10000000149


@pytest.mark.parametrize("prompt", ["", "text", "日本", [], [0, 1, 2**32 - 1]])
def test_prompts_survive_the_wire(prompt: str | list[int]) -> None:
    message = pb.GenerateRequest.FromString(wire.write_request(prompt, SamplingParams()).SerializeToString())
    assert wire.read_prompt(message) == prompt


@pytest.mark.parametrize("prompts", [["a", "b"], ("a",), [[1, 2], [3]]])
def test_a_call_takes_one_prompt(prompts: Any) -> None:
    with pytest.raises(InvalidRequest, match="a call takes one prompt, so make one call per prompt") as caught:
        wire.write_request(prompts, SamplingParams())
    assert caught.value.field == "prompt"


def test_a_missing_prompt() -> None:
    with pytest.raises(InvalidRequest) as caught:
        wire.read_prompt(pb.GenerateRequest())
    assert caught.value.field == "prompt"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", True), ("max_tokens", 1.0), ("max_tokens", -1), ("max_tokens", 2**32), ("top_k", False),
        ("seed", -1), ("seed", 2**64), ("seed", True), ("temperature", True), ("temperature", "hot"),
        ("exit_threshold", False), ("ignore_eos", 1), ("exit_policy", 3), ("initial_state", 0), ("logprobs", "best"),
        ("stop", "text"),
        ("stop", (1,)), ("stop_token_ids", (True,)), ("stop_token_ids", 5), ("exit_trace", (1, -1)),
    ],
)  # fmt: skip
def test_what_the_wire_cannot_carry_is_refused_before_it_is_sent(field: str, value: object) -> None:
    with pytest.raises(InvalidRequest) as caught:
        wire.write_request([1], dataclasses.replace(SamplingParams(), **{field: value}))
    assert caught.value.field == field
    shown = value[-1] if isinstance(value, tuple) else value
    assert repr(shown) in caught.value.description or type(shown).__name__ in caught.value.description


def test_field_names_are_translated_both_ways() -> None:
    text, ids = pb.GenerateRequest(text="x"), pb.GenerateRequest(token_ids=pb.TokenIds(ids=[1]))
    assert wire.field_path("prompt", text) == "text"
    assert wire.field_path("prompt", ids) == "token_ids.ids"
    assert wire.field_path("prompt", pb.GenerateRequest()) == "prompt"
    for field, path in wire.PARAM_PATHS.items():
        assert wire.field_path(field, text) == path
        assert wire.field_name(path) == field
    for path in ("text", "token_ids.ids", "prompt"):
        assert wire.field_name(path) == "prompt"


RESOLVED = ResolvedParams(
    max_tokens=3, temperature=0.25, top_k=7, top_p=0.5, min_p=0.125, seed=2**64 - 1, sample_index=2, stop=("a",),
    stop_token_ids=(4,), ignore_eos=True, min_loops=1, max_loops=4, prefill_loops=3, exit_policy="trace",
    exit_threshold=0.75, exit_trace=(3, 1, 4), initial_state="random", logprobs="processed",
)  # fmt: skip


@pytest.mark.parametrize(
    "resolved",
    [RESOLVED, dataclasses.replace(RESOLVED, exit_policy="gate", exit_trace=None, stop=(), stop_token_ids=())],
)
def test_resolved_parameters_survive_the_wire(resolved: ResolvedParams) -> None:
    started = pb.GenerateStarted()
    wire.write_params(started, resolved)
    assert wire.read_resolved(pb.GenerateStarted.FromString(started.SerializeToString())) == resolved


USAGE = Usage(prompt_tokens=1, completion_tokens=2, prompt_loops=3, decode_loops=4, full_depth_loops=5)


def output(**changes: object) -> RequestOutput:
    empty = {"request_id": "r", "token_ids": (), "exit_depths": (), "logprobs": (), "text": None}
    return RequestOutput(**empty | changes)


@pytest.mark.parametrize("text", [None, "", "é"])
def test_deltas_survive_the_wire(text: str | None) -> None:
    sent = output(token_ids=(1, 2), exit_depths=(4, 3), logprobs=(-0.5, -1.25), text=text)
    assert wire.read_delta("r", pb.TokenDelta.FromString(wire.write_delta(sent).SerializeToString())) == sent


@pytest.mark.parametrize("match", [None, 0, 17, "", "stop"])
@pytest.mark.parametrize("reason", FinishReason)
def test_endings_survive_the_wire(reason: FinishReason, match: int | str | None) -> None:
    sent = output(finish_reason=reason, stop_match=match, usage=USAGE)
    message = pb.GenerateFinished.FromString(wire.write_finished(sent).SerializeToString())
    assert wire.read_finished("r", message, has_text=False) == sent
    assert wire.read_finished("r", message, has_text=True).text == ""


# Name -> number of what clients of this version's first release may rely on.  A field is only ever added.
NUMBERS = {
    params_pb2.DepthParams: {
        "min_loops": 1, "max_loops": 2, "prefill_loops": 3, "exit_policy": 4, "exit_threshold": 5, "exit_trace": 6,
        "initial_state": 7,
    },
    pb.EngineSettings: {
        "kv_layout": 1, "slots": 2, "page_size": 3, "prefill_chunk": 4, "prefill_buckets": 5, "round_ticks": 6,
        "max_waiting": 7, "boundary_batch": 8,
    },
    pb.GetModelInfoResponse: {
        "name": 1, "model_type": 2, "vocab_size": 3, "max_context": 4, "trained_loops": 5, "max_loops": 6,
        "kv_planes": 7, "kv_bytes_per_token": 8, "exit_scores": 9, "exit_policies": 10, "eos_token_ids": 11,
        "has_tokenizer": 12, "parameter_count": 13, "dtype": 14, "open_ended": 15, "initial_states": 16,
    },
}  # fmt: skip


@pytest.mark.parametrize("message", NUMBERS, ids=lambda message: message.DESCRIPTOR.name)
def test_field_numbers_stay(message: Any) -> None:
    assert {field.name: field.number for field in message.DESCRIPTOR.fields} == NUMBERS[message]


def filled(message: Any) -> Any:
    """The message with a value in every scalar and repeated field that no other field of the message has."""
    for field in message.DESCRIPTOR.fields:
        value = {
            FieldDescriptor.TYPE_STRING: f"{field.name} {field.number}",
            FieldDescriptor.TYPE_BOOL: True,
            FieldDescriptor.TYPE_DOUBLE: field.number / 8,
        }.get(field.type, field.number)
        if field.type == FieldDescriptor.TYPE_MESSAGE:
            continue
        if field.is_repeated:
            getattr(message, field.name).extend([value, value])
        else:
            setattr(message, field.name, value)
    return type(message).FromString(message.SerializeToString())


def test_model_info_survives_the_wire() -> None:
    message = filled(pb.GetModelInfoResponse())
    info = ModelInfo.from_message(message)
    assert {field.name for field in dataclasses.fields(info)} == {f.name for f in message.DESCRIPTOR.fields}
    for field in message.DESCRIPTOR.fields:
        sent = getattr(message, field.name)
        assert getattr(info, field.name) == (tuple(sent) if field.is_repeated else sent), field.name


def test_server_info_survives_the_wire() -> None:
    message = filled(pb.GetServerInfoResponse())
    message.settings.CopyFrom(filled(pb.EngineSettings()))
    message.stats.CopyFrom(filled(pb.EngineStats()))
    message.versions["jax"] = "1"
    message.memory_plan.update({"pages": 3, "share": 0.5})
    wire.write_params(message.defaults, SamplingParams(max_tokens=5, initial_state="zeros", exit_policy="latent"))
    info = ServerInfo.from_message(pb.GetServerInfoResponse.FromString(message.SerializeToString()))
    assert {field.name for field in dataclasses.fields(info)} == {f.name for f in message.DESCRIPTOR.fields}
    for name in ("settings", "stats"):
        sent, read = getattr(message, name), getattr(info, name)
        assert {field.name for field in dataclasses.fields(read)} == {f.name for f in sent.DESCRIPTOR.fields}
        for field in sent.DESCRIPTOR.fields:
            value = getattr(sent, field.name)
            assert getattr(read, field.name) == (tuple(value) if field.is_repeated else value), field.name
    assert (info.versions, info.memory_plan) == ({"jax": "1"}, {"pages": 3, "share": 0.5})
    assert info.defaults == SamplingParams(max_tokens=5, initial_state="zeros", exit_policy="latent")


def test_the_contract_follows_the_naming_rules() -> None:
    """buf's STANDARD rules that matter to generated code."""
    (service,) = pb.DESCRIPTOR.services_by_name.values()
    assert service.full_name == "rlt.v1.GenerationService"
    for method in service.methods:
        assert method.input_type.name == f"{method.name}Request"
        assert method.output_type.name == f"{method.name}Response"
    for file in (pb.DESCRIPTOR, params_pb2.DESCRIPTOR):
        assert file.package == "rlt.v1"
        for enum in file.enum_types_by_name.values():
            prefix = "".join("_" + c if c.isupper() else c.upper() for c in enum.name).lstrip("_") + "_"
            assert enum.values_by_number[0].name == f"{prefix}UNSPECIFIED"
            assert all(name.startswith(prefix) for name in enum.values_by_name)
        for message in file.message_types_by_name.values():
            assert all(field.name == field.name.lower() for field in message.fields)


# -- errors -----------------------------------------------------------------------------------------------------------


class FailedCall(grpc.RpcError):
    """What grpc raises for a call that ended with `status`."""

    def __init__(self, status: grpc.Status) -> None:
        self._status = status

    def code(self) -> grpc.StatusCode:
        return self._status.code

    def details(self) -> str:
        return self._status.details

    def trailing_metadata(self) -> tuple[tuple[str, bytes], ...]:
        return self._status.trailing_metadata


def raised(error: Exception) -> Exception:
    return error_from_rpc(FailedCall(status.of(error, pb.GenerateRequest(text="x"))))


def test_errors_survive_the_wire() -> None:
    for field in [*wire.PARAM_PATHS, "prompt", "request_id"]:
        back = raised(InvalidRequest(field, "must be smaller"))
        assert isinstance(back, InvalidRequest)
        assert (back.field, back.description) == (field, "must be smaller")
    busy = raised(QueueFull("256 wait"))
    assert isinstance(busy, ServerBusy)
    assert isinstance(busy, QueueFull)
    assert busy.retry_after_seconds == status.RETRY_SECONDS
    duplicate = raised(status.DuplicateRequest("mine"))
    assert isinstance(duplicate, InvalidRequest)
    assert duplicate.field == "request_id"
    for error, code in [
        (status.SlowReader(9, 8), grpc.StatusCode.RESOURCE_EXHAUSTED),
        (status.Loading("loading"), grpc.StatusCode.UNAVAILABLE),
        (status.ShuttingDown("bye"), grpc.StatusCode.UNAVAILABLE),
        (status.RequestFailed("broken"), grpc.StatusCode.INTERNAL),
    ]:
        back = raised(error)
        assert type(back) is ServerError
        assert back.code is code
        assert str(error) in str(back)
    assert raised(status.Loading("loading")).retry_after_seconds == 1
    assert raised(status.ShuttingDown("bye")).retry_after_seconds is None


def test_a_passed_deadline_is_a_timeout() -> None:
    late = error_from_rpc(FailedCall(status._status(4, "too late")))
    assert isinstance(late, DeadlineExceeded)
    assert isinstance(late, TimeoutError)
