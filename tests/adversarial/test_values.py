"""Values that no sensible caller sends.

PROTECTS: that each is an InvalidRequest that names the field, in a message of a size that can be delivered, offline,
through the client and over the wire.
"""

from __future__ import annotations

import base64
import json
import threading
import time
import urllib.parse
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import pytest

from rlt.v1 import generation_service_pb2 as pb
from rlt.v1 import generation_service_pb2_grpc as pb_grpc
from rlt_jax import EngineDead, InvalidRequest, SamplingParams
from rlt_jax.client import GenerationClient
from rlt_jax.errors import CheckpointError, RltError, shown
from rlt_jax.models.checkpoint import load_checkpoint
from server import status
from server.streams import Stream
from tests.conftest import fixture_dir
from tests.engines import engine
from tests.server.running import RunningServer, engine_maker, raw_channel, tiny_config
from tests.server.scripted_model import write_scripted_model
from tests.server.test_streams import output

UNPRINTABLE = 10**5000  # Python refuses to turn more than 4,300 digits into text
LONG = "x" * 200_000


@pytest.fixture(scope="module")
def scripted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_scripted_model(tmp_path_factory.mktemp("scripted"))


@pytest.fixture(scope="module")
def served(scripted: Path) -> Iterator[RunningServer]:
    with RunningServer(engine_maker(scripted, tiny_config())) as server:
        yield server


HUGE: dict[str, dict] = {
    "max_tokens": {"max_tokens": UNPRINTABLE},
    "temperature": {"temperature": UNPRINTABLE},
    "exit_threshold": {"exit_threshold": -UNPRINTABLE},
    "seed": {"seed": UNPRINTABLE},
    "top_k": {"top_k": -UNPRINTABLE},
    "stop_token_ids": {"stop_token_ids": (UNPRINTABLE,)},
    "exit_trace": {"exit_trace": (4, UNPRINTABLE), "max_tokens": 2},
    "exit_policy": {"exit_policy": LONG},
    "logprobs": {"logprobs": LONG},
    "min_loops": {"min_loops": LONG},
}


@pytest.mark.parametrize("field", HUGE)
def test_a_huge_value_is_an_invalid_request_of_few_words(field: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        engine().prepare("r", [1, 2], SamplingParams(**{"max_tokens": 1} | HUGE[field]))
    assert caught.value.field == field
    assert len(str(caught.value)) < 600


@pytest.mark.parametrize("field", HUGE)
def test_the_client_says_the_same(served: RunningServer, field: str) -> None:
    with GenerationClient(served.address) as client, pytest.raises(InvalidRequest) as caught:
        client.complete("a", SamplingParams(**{"max_tokens": 1} | HUGE[field]))
    assert caught.value.field == field
    assert len(str(caught.value)) < 600


def test_a_huge_token_id() -> None:
    with pytest.raises(InvalidRequest, match="prompt: token 1 is an integer of 16610 bits"):
        engine().prepare("r", [1, UNPRINTABLE], SamplingParams())


def test_shown_keeps_ordinary_values() -> None:
    assert [shown(v) for v in (7, -(2**64), 1.5, "a", None)] == ["7", str(-(2**64)), "1.5", "'a'", "None"]


@pytest.mark.parametrize("where", ["stop", "exit_policy"])
def test_text_that_is_no_unicode(scripted: Path, served: RunningServer, where: str) -> None:
    """A shell hands undecodable bytes over as lone surrogates, which have no UTF-8."""
    bad = SamplingParams(**{"stop": {"stop": ("ok", "\udcff")}, "exit_policy": {"exit_policy": "\udcff"}}[where])
    with GenerationClient(served.address) as client, pytest.raises(InvalidRequest) as caught:
        client.complete("a", bad)
    assert caught.value.field == where
    with pytest.raises(InvalidRequest) as caught:
        served.engine.prepare("r", "a", bad)
    assert caught.value.field == where


# -- sizes of statuses ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("letter", ["x", "😀"])
def test_a_long_value_on_the_wire_still_gets_its_own_status(served: RunningServer, letter: str) -> None:
    """A status travels in the trailers: past 16 KiB peers drop it and report RESOURCE_EXHAUSTED instead."""
    request = pb.GenerateRequest(text="a")
    request.depth.exit_policy = letter * 100_000
    with raw_channel(served.address) as channel, pytest.raises(grpc.RpcError) as caught:
        list(pb_grpc.GenerationServiceStub(channel).Generate(request, timeout=20))
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "depth.exit_policy" in caught.value.details()


@pytest.mark.parametrize("letter", ["x", "😀", "\udcff"], ids=["ascii", "four bytes", "surrogate"])
@pytest.mark.parametrize("kind", [EngineDead, lambda text: InvalidRequest("prompt", text)], ids=["device", "request"])
def test_statuses_are_cut(kind: Callable[[str], RltError], letter: str) -> None:
    """Percent-encoding triples a message, and the details repeat it: the worst of letters must fit as well."""
    made = status.of(kind(letter * 200_000))
    assert made.details.endswith(" bytes)")
    encoded = len(urllib.parse.quote(made.details))
    encoded += sum(len(base64.b64encode(value)) for _, value in made.trailing_metadata)
    assert 1000 < encoded < 8000


# -- long prompts -----------------------------------------------------------------------------------------------------


def test_a_text_that_cannot_fit_is_refused_without_tokenising(served: RunningServer) -> None:
    began = time.monotonic()
    with pytest.raises(InvalidRequest, match=r"has 15000000 characters, at least 15000000 tokens; .*max_context=512"):
        served.engine.prepare("r", "a" * 15_000_000, SamplingParams())
    assert time.monotonic() - began < 2  # tokenising it takes some twenty seconds


def test_the_bound_is_a_bound(scripted: Path, served: RunningServer) -> None:
    tokenizer = served.engine.loaded.tokenizer
    for text in ("a", "日本😀", "a b\n" * 50, "é" * 7):
        assert 1 <= tokenizer.least_tokens(text) <= len(tokenizer.encode(text))


def test_tokenising_lets_other_threads_run(served: RunningServer) -> None:
    """Holding the GIL, one long prompt would stop every stream and the health check for as long as it takes."""
    tokenizer = served.engine.loaded.tokenizer
    text = "a" * 1_500_000
    turns = 0
    worker = threading.Thread(target=tokenizer.encode, args=(text,))
    worker.start()
    while worker.is_alive():
        time.sleep(0.001)
        turns += 1
    assert turns > 20


# -- others -----------------------------------------------------------------------------------------------------------


def test_one_delivery_always_fits_a_small_buffer() -> None:
    """A round may bring more tokens than the limit: a reader that is not behind must not be called slow."""
    stream = Stream("client", "engine", limit_tokens=1)
    assert stream.push(output(1, 2, 3, 4, 5, 6, 7, 8))
    assert not stream.push(output(9))


def test_more_end_ids_than_a_request_can_carry(tmp_path: Path) -> None:
    """Loaded, such a model would refuse every request for ids that the request did not give."""
    source = fixture_dir("ouro_tiny")
    config = json.loads((source / "config.json").read_text())
    (tmp_path / "model.safetensors").write_bytes((source / "model.safetensors").read_bytes())

    def load(ids: int) -> object:
        (tmp_path / "config.json").write_text(json.dumps(config | {"eos_token_id": list(range(ids))}))
        return load_checkpoint(tmp_path, dtype="float32")

    assert load(16)
    with pytest.raises(CheckpointError, match=r"17 end ids in config\.json.*at most 16"):
        load(17)
