"""rlt.v1.GenerationService on the event loop: checks, streams, cancellation.  Owns the streams, knows no device."""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
import uuid
from collections.abc import Awaitable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, NoReturn

import grpc

from rlt.v1 import generation_service_pb2 as pb
from rlt.v1 import generation_service_pb2_grpc as pb_grpc
from rlt_jax.client import wire
from rlt_jax.errors import InvalidRequest, QueueFull, RltError
from rlt_jax.request import FinishReason, Request, RequestOutput, SamplingParams, Usage
from server import status
from server.engine_thread import EngineThread
from server.streams import Stream

if TYPE_CHECKING:
    from rlt_jax.runtime.engine import LLMEngine

log = logging.getLogger(__name__)

SERVICE_NAME = pb.DESCRIPTOR.services_by_name["GenerationService"].full_name
MAX_REQUEST_ID_CHARS = 128
PREPARING_CALLS = (
    64  # calls that may be tokenising beyond those that run or wait; texts of theirs are all held in memory
)
PREPARE_THREADS = 2  # tokenising must not hold the event loop; more threads would only fight for the GIL

type _Context = grpc.aio.ServicerContext


class GenerationService(pb_grpc.GenerationServiceServicer):
    """Generate, Abort, GetModelInfo, GetServerInfo.

    Args:
        engine_thread: runs the engine.
        stream_buffer_tokens: tokens that may wait for one slow reader.
    """

    def __init__(self, engine_thread: EngineThread, *, stream_buffer_tokens: int) -> None:
        self._engine_thread = engine_thread
        self._stream_buffer_tokens = stream_buffer_tokens
        self._live: dict[str, Stream] = {}  # by request_id, from the first check to the end of the handler
        self._idle = asyncio.Event()
        self._idle.set()
        self._serial = itertools.count()
        self._draining = False
        self._preparers = ThreadPoolExecutor(PREPARE_THREADS, thread_name_prefix="prepare")

    # -- life of the process ------------------------------------------------------------------------------------------

    def drain(self) -> None:
        """Take no more requests; those that run go on."""
        self._draining = True

    async def wait_idle(self, timeout_seconds: float) -> bool:
        """Wait until no Generate call is open; whether that was so within the time."""
        try:
            async with asyncio.timeout(timeout_seconds):
                await self._idle.wait()
        except TimeoutError:
            return False
        return True

    def fail_all(self, error: RltError) -> None:
        """End every open stream with an error."""
        for stream in list(self._live.values()):
            stream.fail(error)

    def close(self) -> None:
        self._preparers.shutdown(wait=False, cancel_futures=True)

    # -- calls --------------------------------------------------------------------------------------------------------

    async def Generate(self, request: pb.GenerateRequest, context: _Context) -> None:
        """See generation_service.proto.  A coroutine that writes, so that cancellation always ends in its `finally`."""
        try:
            engine = self._engine()
            stream = self._open(engine, request)
        except RltError as error:
            await _refuse(context, error, request)
        try:
            prepared = await self._prepare(engine, stream, request)
            await self._run(stream, prepared, request, context)
        except RltError as error:
            await _refuse(context, error, request)
        finally:  # a cancelled client, a passed deadline and a broken connection come here as CancelledError
            self._close(stream)

    async def Abort(self, request: pb.AbortRequest, context: _Context) -> pb.AbortResponse:
        """See generation_service.proto."""
        stream = self._live.get(request.request_id)
        if stream is None or stream.complete:
            return pb.AbortResponse(found=False)
        stream.abort_requested = True
        if stream.submitted:
            self._engine_thread.abort(stream)
        return pb.AbortResponse(found=True)

    async def GetModelInfo(self, request: pb.GetModelInfoRequest, context: _Context) -> pb.GetModelInfoResponse:
        """See generation_service.proto."""
        try:
            return _model_info(self._engine().model_info())
        except RltError as error:
            await _refuse(context, error)

    async def GetServerInfo(self, request: pb.GetServerInfoRequest, context: _Context) -> pb.GetServerInfoResponse:
        """See generation_service.proto."""
        try:
            return _server_info(self._engine().server_info(), self._engine_thread.stats)
        except RltError as error:
            await _refuse(context, error)

    # -- steps of Generate --------------------------------------------------------------------------------------------

    def _engine(self) -> LLMEngine:
        """The engine, if it is warm and alive."""
        ready = self._engine_thread.ready
        if self._draining or self._engine_thread.died.done():
            raise status.ShuttingDown("the server is shutting down")
        if not ready.done():
            raise status.Loading("the model is loading")
        if ready.exception() is not None:
            raise status.ShuttingDown("the model could not be loaded; the server is shutting down")
        return ready.result()

    def _open(self, engine: LLMEngine, request: pb.GenerateRequest) -> Stream:
        """Reserve the request's id until `_close`.

        The engine counts who waits only after tokenising; this bounds how many may be on the way there.
        """
        if engine.config.max_waiting is not None:
            limit = engine.config.slots + engine.config.max_waiting + PREPARING_CALLS
            if len(self._live) >= limit:
                raise QueueFull(f"{len(self._live)} calls are open; the limit is {limit}")
        request_id = request.request_id or uuid.uuid4().hex
        if len(request_id) > MAX_REQUEST_ID_CHARS:
            raise InvalidRequest(
                "request_id", f"must have at most {MAX_REQUEST_ID_CHARS} characters, found {len(request_id)}"
            )
        if request_id in self._live:
            raise status.DuplicateRequest(request_id)
        stream = Stream(request_id, f"{request_id}#{next(self._serial)}", limit_tokens=self._stream_buffer_tokens)
        self._live[request_id] = stream
        self._idle.clear()
        return stream

    def _close(self, stream: Stream) -> None:
        if stream.submitted and not stream.ended:
            self._engine_thread.abort(stream)
        del self._live[stream.request_id]
        if not self._live:
            self._idle.set()

    async def _prepare(self, engine: LLMEngine, stream: Stream, request: pb.GenerateRequest) -> Request:
        """Check and tokenise, off the event loop."""

        def prepare() -> Request:
            return engine.prepare(stream.engine_id, wire.read_prompt(request), wire.read_params(request))

        return await asyncio.get_running_loop().run_in_executor(self._preparers, prepare)

    async def _run(self, stream: Stream, prepared: Request, request: pb.GenerateRequest, context: _Context) -> None:
        """Queue the request and send what comes of it."""
        started = pb.GenerateResponse(started=_started(stream, prepared, request))
        if stream.abort_requested:  # before the engine heard of it
            await context.write(started)
            await context.write(pb.GenerateResponse(finished=wire.write_finished(_never_ran(stream, prepared))))
            return
        self._engine_thread.submit(stream, prepared)
        await stream.wait_accepted()
        begun = time.monotonic()
        await _write_or_fail(context, started, stream)
        while True:
            output = await stream.take()
            if output.token_ids or output.text:
                await _write_or_fail(context, pb.GenerateResponse(delta=wire.write_delta(output)), stream)
            if output.finish_reason is not None:
                await _write_or_fail(context, pb.GenerateResponse(finished=wire.write_finished(output)), stream)
                log.debug(
                    "request %s: %s, %s, %.3f s",
                    stream.request_id, output.finish_reason.value, output.usage, time.monotonic() - begun,
                )  # fmt: skip
                return


async def _write_or_fail(context: _Context, response: pb.GenerateResponse, stream: Stream) -> None:
    """Write, unless the stream fails first: a peer that does not read would hold the write for ever."""
    task = asyncio.current_task()
    with stream.interrupting(task):
        try:
            await context.write(response)
        except asyncio.CancelledError:
            if stream.error is None:
                raise
            if task is not None:
                task.uncancel()  # it was `stream.fail` that interrupted us, nobody ended the call
            raise stream.error from None


async def _refuse(context: _Context, error: RltError, request: pb.GenerateRequest | None = None) -> NoReturn:
    """End the call with the error's status."""
    call: Awaitable[Any] = context.abort_with_status(status.of(error, request))
    await call
    raise AssertionError("abort_with_status returned")


# -- messages ---------------------------------------------------------------------------------------------------------


def _started(stream: Stream, prepared: Request, request: pb.GenerateRequest) -> pb.GenerateStarted:
    started = pb.GenerateStarted(request_id=stream.request_id, prompt_tokens=len(prepared.prompt_token_ids))
    if request.return_prompt_token_ids:
        started.prompt_token_ids.extend(prepared.prompt_token_ids)
    wire.write_params(started, prepared.params)
    return started


def _never_ran(stream: Stream, prepared: Request) -> RequestOutput:
    """The last output of a request that was aborted before the engine got it."""
    usage = Usage(
        prompt_tokens=len(prepared.prompt_token_ids),
        completion_tokens=0,
        prompt_loops=0,
        decode_loops=0,
        full_depth_loops=0,
    )
    return RequestOutput(
        request_id=stream.request_id,
        token_ids=(),
        exit_depths=(),
        logprobs=(),
        text=None,
        finish_reason=FinishReason.ABORT,
        usage=usage,
    )


def _model_info(info: dict[str, Any]) -> pb.GetModelInfoResponse:
    return pb.GetModelInfoResponse(
        name=info["name"],
        model_type=info["model_type"],
        vocab_size=info["vocab_size"],
        max_context=info["max_context"],
        trained_loops=info["trained_loops"],
        max_loops=info["max_loops"],
        kv_planes=info["kv_planes"],
        kv_bytes_per_token=info["kv_bytes_per_token"],
        exit_scores=info["exit_scores"],
        exit_policies=info["exit_policies"],
        eos_token_ids=info["eos_token_ids"],
        has_tokenizer=info["has_tokenizer"],
        parameter_count=info["parameters"],
        dtype=info["dtype"],
        open_ended=info["open_ended"],
        initial_states=info["initial_states"],
    )


def _server_info(info: dict[str, Any], stats: Mapping[str, Any]) -> pb.GetServerInfoResponse:
    response = pb.GetServerInfoResponse(
        versions=info["versions"],
        platform=info["platform"],
        device_kind=info["device_kind"],
        device_count=info["devices"],
        settings=pb.EngineSettings(
            kv_layout=info["kv_layout"],
            slots=info["slots"],
            page_size=info["page_size"],
            prefill_chunk=info["prefill_chunk"],
            prefill_buckets=info["prefill_buckets"],
            round_ticks=info["round_ticks"],
            max_waiting=info["max_waiting"],
            boundary_batch=info["boundary_batch"],
        ),
        implementations=[pb.OpImplementation(**implementation) for implementation in info["implementations"]],
        compiled_programs=info["compiled_programs"],
        uptime_seconds=info["uptime_seconds"],
        stats=pb.EngineStats(**stats),
    )
    response.memory_plan.update(info["memory_plan"])
    wire.write_params(response.defaults, SamplingParams(**info["defaults"]))
    return response
