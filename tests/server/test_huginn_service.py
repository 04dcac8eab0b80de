"""A model of the Huginn family through GenerationService.

PROTECTS: what is special to it (any depth, exits by convergence, a chosen initial state, planes per kind of layer) is
told, checked and carried out as the offline API does, field by field.
"""

from __future__ import annotations

from collections.abc import Iterator

import grpc
import pytest

from rlt.v1 import generation_service_pb2 as pb
from rlt.v1 import generation_service_pb2_grpc as pb_grpc
from rlt_jax.client import GenerationClient
from rlt_jax.client.wire import read_resolved
from rlt_jax.errors import InvalidRequest
from rlt_jax.llm import LLM
from rlt_jax.request import SamplingParams
from tests.conftest import fixture_dir
from tests.server.running import RunningServer, engine_maker, raw_channel, tiny_config
from tests.server.test_service import bad_request

MODEL = fixture_dir("huginn_tiny")
PROMPT = (5, 9, 200, 31)
CONFIG = tiny_config(
    max_context=128, prefill_chunk=16, kv_layout="drop", max_loops=6, boundary_batch=2, initial_state="random"
)


@pytest.fixture(scope="module")
def running() -> Iterator[RunningServer]:
    with RunningServer(engine_maker(MODEL, CONFIG)) as server:
        yield server


@pytest.fixture
def client(running: RunningServer) -> Iterator[GenerationClient]:
    with GenerationClient(running.address) as client:
        yield client
    running.wait_drained()


@pytest.fixture
def stub(running: RunningServer) -> Iterator[pb_grpc.GenerationServiceStub]:
    with raw_channel(running.address) as channel:
        yield pb_grpc.GenerationServiceStub(channel)
    running.wait_drained()


def test_what_the_model_and_the_server_say(client: GenerationClient) -> None:
    model, server = client.model_info(), client.server_info()
    assert (model.model_type, model.trained_loops, model.max_loops, model.open_ended) == ("huginn_raven", 8, 6, True)
    assert model.exit_scores == ("latent", "kl", "argmax")
    assert set(model.exit_policies) == {"fixed", "latent", "kl", "argmax", "trace"}
    assert model.initial_states == ("zeros", "random")
    # k and v of 4 heads of 16 in float32: 4 core layers of 6 planes, 4 others of one; and an exit depth
    assert (model.kv_planes, model.kv_bytes_per_token) == (6, 2 * 4 * 16 * 4 * (4 * 6 + 4) + 4)
    assert (server.settings.kv_layout, server.settings.boundary_batch) == ("drop", 2)
    defaults = server.defaults
    assert (defaults.exit_policy, defaults.initial_state) == ("fixed", "random")
    assert (defaults.min_loops, defaults.max_loops, defaults.prefill_loops) == (2, 6, 6)


@pytest.mark.parametrize(
    ("chosen", "threshold"),
    [
        (SamplingParams(exit_policy="latent"), 0.03),
        (SamplingParams(exit_policy="kl"), 1e-3),
        (SamplingParams(exit_policy="argmax"), 5.0),
        (SamplingParams(exit_policy="latent", exit_threshold=2.5), 2.5),
        (SamplingParams(exit_policy="argmax", exit_threshold=9.0), 9.0),
    ],
)
def test_thresholds_are_resolved_by_policy(
    stub: pb_grpc.GenerationServiceStub, chosen: SamplingParams, threshold: float
) -> None:
    request = pb.GenerateRequest(token_ids=pb.TokenIds(ids=PROMPT))
    request.stop.max_tokens = 1
    request.depth.exit_policy = chosen.exit_policy
    if chosen.exit_threshold is not None:
        request.depth.exit_threshold = chosen.exit_threshold
    resolved = read_resolved(next(iter(stub.Generate(request))).started)
    assert (resolved.exit_policy, resolved.exit_threshold) == (chosen.exit_policy, threshold)
    assert (resolved.initial_state, resolved.prefill_loops) == ("random", 6)


def test_streams_equal_offline_generation(client: GenerationClient) -> None:
    params = [
        SamplingParams(max_tokens=12, ignore_eos=True, seed=3, exit_policy="latent", exit_threshold=0.2, min_loops=1),
        SamplingParams(max_tokens=12, ignore_eos=True, initial_state="zeros", exit_policy="kl", exit_threshold=0.05),
        SamplingParams(max_tokens=12, ignore_eos=True, initial_state="zeros", max_loops=3),
        SamplingParams(max_tokens=12, ignore_eos=True, seed=4),
        SamplingParams(max_tokens=12, ignore_eos=True, seed=5),
    ]
    with LLM(MODEL, CONFIG, max_waiting=None) as llm:
        offline = llm.generate([PROMPT] * len(params), params)
    served = [client.complete(PROMPT, each) for each in params]
    assert [(c.token_ids, c.exit_depths, c.logprobs) for c in served] == [
        (c.token_ids, c.exit_depths, c.logprobs) for c in offline
    ]
    assert [c.params for c in served[3:]] == [c.params for c in offline[3:]]
    assert served[3].logprobs != served[4].logprobs  # greedy both: the seed is in the random state
    assert served[2].exit_depths == (3,) * 12
    assert served[0].exit_depths[0] == 6
    assert len(set(served[0].exit_depths[1:])) > 1


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("exit_policy", "gate", "gate needs the score 'gate'; huginn_raven gives 'latent', 'kl', 'argmax'"),
        ("initial_state", "ones", "must be one of zeros, random for huginn_raven, found 'ones'"),
        ("max_loops", 7, "[1, 6], found 7"),
        ("prefill_loops", 7, "[1, 6], found 7"),
    ],
)
def test_bad_input_names_field_value_and_limit(
    running: RunningServer, stub: pb_grpc.GenerationServiceStub, field: str, value: object, words: str
) -> None:
    request = pb.GenerateRequest(token_ids=pb.TokenIds(ids=PROMPT))
    setattr(request.depth, field, value)
    with pytest.raises(grpc.RpcError) as caught:
        list(stub.Generate(request))
    violation = bad_request(caught.value)
    assert (violation.field, words in violation.description) == (f"depth.{field}", True), violation
    with pytest.raises(InvalidRequest) as offline:
        running.engine.prepare("offline", PROMPT, SamplingParams(**{field: value}))
    assert (offline.value.field, offline.value.description) == (field, violation.description)


@pytest.mark.parametrize(
    ("policy", "threshold", "words"),
    [
        ("latent", -0.1, "found -0.1"),
        ("kl", float("nan"), "finite, found nan"),
        ("argmax", 0.0, "found 0.0"),
        ("argmax", 2.5, "whole number of loops, found 2.5"),
    ],
)
def test_a_threshold_is_checked_by_policy(
    stub: pb_grpc.GenerationServiceStub, policy: str, threshold: float, words: str
) -> None:
    request = pb.GenerateRequest(token_ids=pb.TokenIds(ids=PROMPT))
    request.depth.exit_policy, request.depth.exit_threshold = policy, threshold
    with pytest.raises(grpc.RpcError) as caught:
        list(stub.Generate(request))
    violation = bad_request(caught.value)
    assert violation.field == "depth.exit_threshold"
    assert words in violation.description
