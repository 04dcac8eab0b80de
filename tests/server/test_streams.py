"""One stream's mailbox, and the reader that does not read.

PROTECTS: a slow reader gets larger messages, then an error; it never holds a slot, pages or growing memory.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Iterator
from typing import Any, NoReturn

import grpc
import pytest

from rlt.v1 import generation_service_pb2 as pb
from rlt.v1 import generation_service_pb2_grpc as pb_grpc
from rlt_jax.client.client import channel_options
from rlt_jax.errors import EngineDead
from rlt_jax.request import FinishReason, RequestOutput, Usage
from server import status
from server.service import _write_or_fail
from server.status import RequestFailed, SlowReader
from server.streams import Stream
from tests.conftest import fixture_dir
from tests.server.running import RunningServer, engine_maker, tiny_config

USAGE = Usage(prompt_tokens=1, completion_tokens=3, prompt_loops=4, decode_loops=5, full_depth_loops=8)


def output(*tokens: int, text: str | None = None, **last: Any) -> RequestOutput:
    return RequestOutput(
        request_id="engine",
        token_ids=tokens,
        exit_depths=tuple(t + 1 for t in tokens),
        logprobs=tuple(-float(t) for t in tokens),
        text=text,
        **last,
    )


def test_waiting_news_becomes_one_output() -> None:
    async def run() -> None:
        stream = Stream("client", "engine", limit_tokens=10)
        assert stream.push(output(1, 2, text="a"))
        assert stream.push(output(text="b"))
        assert not stream.complete
        assert stream.push(output(3, text="", finish_reason=FinishReason.LENGTH, usage=USAGE))
        assert stream.complete
        taken = await stream.take()
        assert taken == output(1, 2, 3, text="ab", finish_reason=FinishReason.LENGTH, usage=USAGE)

    asyncio.run(run())


def test_taking_makes_room_and_waits_for_more() -> None:
    async def run() -> None:
        stream = Stream("client", "engine", limit_tokens=3)
        for token in range(9):
            assert stream.push(output(token))
            assert (await stream.take()).token_ids == (token,)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(stream.take(), 0.01)

    asyncio.run(run())


def test_overflow_fails_the_stream_once() -> None:
    async def run() -> None:
        stream = Stream("client", "engine", limit_tokens=3)
        assert stream.push(output(1, 2, 3))
        assert not stream.push(output(4))
        assert stream.complete
        assert stream.push(output(5))  # late news is dropped
        stream.fail(EngineDead("later"))  # the first error stays
        for wait in (stream.take(), stream.wait_accepted()):
            with pytest.raises(SlowReader, match="4 tokens were waiting, the limit is 3"):
                await wait

    asyncio.run(run())


def test_a_failed_request_fails_its_stream() -> None:
    async def run() -> None:
        stream = Stream("client", "engine", limit_tokens=3)
        stream.push(output(1))
        stream.push(output(error="the device failed"))
        with pytest.raises(RequestFailed, match="the device failed"):
            await stream.take()

    asyncio.run(run())


# -- a peer that stops reading ----------------------------------------------------------------------------------------


@dataclasses.dataclass
class StalledContext:
    """A peer that reads `reads` messages and then no more.  gRPC itself would buffer all that this model can say."""

    reads: int
    written: list[pb.GenerateResponse] = dataclasses.field(default_factory=list)
    status: grpc.Status | None = None

    async def write(self, response: pb.GenerateResponse) -> None:
        if len(self.written) == self.reads:
            await asyncio.Event().wait()
        self.written.append(response)

    async def abort_with_status(self, status: grpc.Status) -> NoReturn:
        self.status = status
        raise grpc.aio.AbortError


@pytest.fixture(scope="module")
def running() -> Iterator[RunningServer]:
    with RunningServer(engine_maker(fixture_dir("ouro_tiny"), tiny_config()), stream_buffer_tokens=32) as server:
        yield server


@pytest.mark.parametrize("reads", [0, 1, 3])
def test_a_reader_that_stops_is_aborted(running: RunningServer, reads: int) -> None:
    request = pb.GenerateRequest(token_ids=pb.TokenIds(ids=[1, 2, 3]))
    request.stop.max_tokens = 480
    request.stop.ignore_eos = True
    context = StalledContext(reads)

    async def call() -> None:
        await running.server._service.Generate(request, context)  # type: ignore[arg-type]

    with pytest.raises(grpc.aio.AbortError):
        running.call(call())
    assert context.status.code is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "limit is 32" in context.status.details
    assert len(context.written) == reads
    stats = running.wait_drained()
    assert stats["pages_free"] == stats["pages_total"]


def test_a_slow_reader_gets_larger_messages(running: RunningServer) -> None:
    """Reading more slowly than the engine produces, but within the bound."""
    request = pb.GenerateRequest(token_ids=pb.TokenIds(ids=[1, 2, 3]))
    request.stop.max_tokens = 30
    request.stop.ignore_eos = True

    class Slow(StalledContext):
        async def write(self, response: pb.GenerateResponse) -> None:
            await asyncio.sleep(0.2)
            self.written.append(response)

    context = Slow(0)

    async def call() -> None:
        await running.server._service.Generate(request, context)  # type: ignore[arg-type]

    running.call(call())
    deltas = [len(r.delta.token_ids) for r in context.written if r.WhichOneof("event") == "delta"]
    assert sum(deltas) == 30
    assert len(deltas) <= 2  # 30 tokens in the time of one write


def test_the_status_reaches_a_peer_whose_window_is_full() -> None:
    """Over a real socket: the status is sent although a message is stuck behind flow control."""
    message = pb.GenerateResponse(delta=pb.TokenDelta(text="x" * 500_000))

    class Flood(pb_grpc.GenerationServiceServicer):
        writes = 0

        async def Generate(self, request: pb.GenerateRequest, context: grpc.aio.ServicerContext) -> None:
            stream = Stream("client", "engine", limit_tokens=1)
            asyncio.get_running_loop().call_later(0.5, stream.fail, SlowReader(2, 1))
            try:
                while True:
                    await _write_or_fail(context, message, stream)
                    self.writes += 1
            except SlowReader as error:
                await context.abort_with_status(status.of(error))

    async def run() -> None:
        server, flood = grpc.aio.server(), Flood()
        pb_grpc.add_GenerationServiceServicer_to_server(flood, server)
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        address = f"127.0.0.1:{port}"
        async with grpc.aio.insecure_channel(address, options=channel_options(address)) as channel:
            call = pb_grpc.GenerationServiceStub(channel).Generate(pb.GenerateRequest())
            await call.read()
            await asyncio.sleep(1.0)  # not reading
            written = flood.writes
            assert 0 < written < 1000  # it was stuck, it did not buffer without end

            async def read_on() -> None:
                while await call.read() is not grpc.aio.EOF:
                    pass

            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await read_on()
            assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert flood.writes == written
        await server.stop(0)

    asyncio.run(run())
