"""Typed clients for rlt.v1.GenerationService: the offline API's types, over a wire.

    with GenerationClient("127.0.0.1:50051") as client:
        for output in client.generate("copy: abc =", SamplingParams(exit_threshold=0.5)):
            print(output.text, output.exit_depths)

`GenerationClient` blocks and may be shared by threads; `AsyncGenerationClient` is its asyncio twin.  Both raise what
the offline API raises (InvalidRequest, QueueFull) and ServerError for the rest.  A stream that is dropped is cancelled.
"""

from __future__ import annotations

import asyncio
import ipaddress
import time
from collections.abc import Sequence
from typing import Any, Self

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from rlt.v1 import generation_service_pb2 as pb
from rlt.v1 import generation_service_pb2_grpc as pb_grpc
from rlt_jax.client import wire
from rlt_jax.client.errors import ServerError, error_from_rpc
from rlt_jax.client.info import ModelInfo, ServerInfo
from rlt_jax.errors import InvalidConfig, RltError, shown
from rlt_jax.request import Completion, RequestOutput, ResolvedParams, SamplingParams

SERVICE_NAME = pb.DESCRIPTOR.services_by_name["GenerationService"].full_name
MAX_MESSAGE_BYTES = 16 << 20  # as the server; gRPC's own limit of 4 MiB is less than a long prompt's ids
CHANNEL_OPTIONS = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
)
LOOPBACK_OPTIONS = (
    ("grpc.enable_http_proxy", 0),
)  # a proxy named in the environment cannot reach this machine's ports
_POLL_SECONDS = 0.1


def is_loopback(host: str) -> bool:
    """Whether a host is this machine alone; a name other than localhost is taken for another machine's."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def channel_options(address: str) -> tuple[tuple[str, int], ...]:
    """The gRPC options of a connection to "host:port"."""
    host = address.rpartition(":")[0].strip("[]")
    return CHANNEL_OPTIONS + (LOOPBACK_OPTIONS if is_loopback(host) else ())


_GRPC_SCHEMES = ("unix:", "unix-abstract:", "dns:", "ipv4:", "ipv6:")


def check_address(address: str) -> str:
    """An address as gRPC takes it.  gRPC itself would try in vain to resolve a wrong one until the call's deadline.

    Raises:
        InvalidConfig: it is neither HOST:PORT nor begins with a scheme of gRPC's.
    """
    expected = f"address: expected HOST:PORT, found {shown(address)}"
    if not isinstance(address, str):
        raise InvalidConfig(expected)
    if address.startswith(_GRPC_SCHEMES):
        return address
    host, _, port = address.rpartition(":")
    bare = host.removeprefix("[").removesuffix("]")
    if not bare or "/" in bare or (":" in bare and host != f"[{bare}]"):
        raise InvalidConfig(expected)
    if not (port.isascii() and port.isdecimal() and len(port) <= 5 and 1 <= int(port) <= 65535):
        raise InvalidConfig(f"{expected}; a port is in [1, 65535]" if port.isdecimal() else expected)
    return address


class _Reader:
    """Folds the events of one stream: what both clients know about a request so far."""

    def __init__(self, prompt: str | Sequence[int]) -> None:
        self.request_id: str | None = None
        self.prompt_token_ids: tuple[int, ...] | None = None if isinstance(prompt, str) else tuple(prompt)
        self.params: ResolvedParams | None = None
        self._has_text = False
        self._outputs: list[RequestOutput] = []

    def read(self, response: pb.GenerateResponse) -> RequestOutput | None:
        """What the event says; None for the event that only says that the request is queued."""
        match response.WhichOneof("event"):
            case "started":
                self.request_id = response.started.request_id
                self.params = wire.read_resolved(response.started)
                if self.prompt_token_ids is None:
                    self.prompt_token_ids = tuple(response.started.prompt_token_ids)
                return None
            case "delta":
                output = wire.read_delta(self.request_id or "", response.delta)
                self._has_text = self._has_text or output.text is not None
            case "finished":
                output = wire.read_finished(self.request_id or "", response.finished, has_text=self._has_text)
            case kind:
                raise RltError(f"the server sent an event that this client does not know: {kind!r}")
        self._outputs.append(output)
        return output

    def completion(self) -> Completion:
        """The whole result, once the stream has ended."""
        if self.params is None or self.prompt_token_ids is None:
            raise RltError("the stream ended before the request was queued")
        return Completion.from_outputs(self.prompt_token_ids, self.params, self._outputs)


class _StreamBase:
    """What a stream knows besides its outputs."""

    def __init__(self, call: Any, prompt: str | Sequence[int]) -> None:
        self._call = call
        self._reader = _Reader(prompt)

    @property
    def request_id(self) -> str | None:
        """The request's name; None until the first output has arrived, unless the caller chose it."""
        return self._reader.request_id

    @property
    def prompt_token_ids(self) -> tuple[int, ...] | None:
        """The prompt as tokens; None until the server has answered, for a prompt given as text."""
        return self._reader.prompt_token_ids

    @property
    def params(self) -> ResolvedParams | None:
        """What really runs, the seed included; None until the server has answered."""
        return self._reader.params

    def cancel(self) -> None:
        """End the request now; reading on raises ServerError(CANCELLED).  No effect on one that has ended."""
        self._call.cancel()


class GenerationStream(_StreamBase):
    """The outputs of one request, as they arrive: an iterator, and a context manager that cancels what is left.

    Dropping the last reference cancels too, so `for output in client.generate(...)` may be left at any time.
    """

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> RequestOutput:
        try:
            while (output := self._reader.read(next(self._call))) is None:
                pass
        except grpc.RpcError as error:
            raise error_from_rpc(error) from None
        return output

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.cancel()

    def completion(self) -> Completion:
        """Read what is left and return the whole result, from the first token on."""
        for _ in self:
            pass
        return self._reader.completion()


class AsyncGenerationStream(_StreamBase):
    """The asyncio twin of `GenerationStream`: an async iterator and an async context manager."""

    def __init__(self, call: Any, prompt: str | Sequence[int]) -> None:
        super().__init__(call, prompt)
        self._responses = aiter(call)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> RequestOutput:
        try:
            while (output := self._reader.read(await anext(self._responses))) is None:
                pass
        except grpc.RpcError as error:
            raise error_from_rpc(error) from None
        return output

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        self.cancel()

    async def completion(self) -> Completion:
        """Read what is left and return the whole result, from the first token on."""
        async for _ in self:
            pass
        return self._reader.completion()


class GenerationClient:
    """A blocking client.

    Args:
        address: "host:port" or "unix:path".
        credentials: for TLS, from `grpc.ssl_channel_credentials`; None is a plain connection.

    Raises:
        InvalidConfig: the address is not one.  Whether anybody answers there, the first call says.
    """

    def __init__(self, address: str, *, credentials: grpc.ChannelCredentials | None = None) -> None:
        self.address = check_address(address)
        if credentials is None:
            self._channel = grpc.insecure_channel(address, options=channel_options(address))
        else:
            self._channel = grpc.secure_channel(address, credentials, options=channel_options(address))
        self._stub = pb_grpc.GenerationServiceStub(self._channel)
        self._health = health_pb2_grpc.HealthStub(self._channel)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection; streams still open are cancelled."""
        self._channel.close()

    def generate(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams = SamplingParams(),  # noqa: B008  (frozen)
        *,
        request_id: str = "",
        timeout_seconds: float | None = None,
    ) -> GenerationStream:
        """Send a request; iterate the result for its outputs.

        Raises:
            InvalidRequest: here for a value the wire cannot carry, while iterating for one the server refuses.
        """
        request = wire.write_request(
            prompt, params, request_id=request_id, return_prompt_token_ids=isinstance(prompt, str)
        )
        return GenerationStream(self._stub.Generate(request, timeout=timeout_seconds), prompt)

    def complete(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams = SamplingParams(),  # noqa: B008  (frozen)
        *,
        request_id: str = "",
        timeout_seconds: float | None = None,
    ) -> Completion:
        """Run a request to its end."""
        return self.generate(prompt, params, request_id=request_id, timeout_seconds=timeout_seconds).completion()

    def abort(self, request_id: str) -> bool:
        """End a live request of any client; whether there was one.  Its stream ends with FinishReason.ABORT."""
        try:
            return self._stub.Abort(pb.AbortRequest(request_id=request_id)).found
        except grpc.RpcError as error:
            raise error_from_rpc(error) from None

    def model_info(self) -> ModelInfo:
        try:
            return ModelInfo.from_message(self._stub.GetModelInfo(pb.GetModelInfoRequest()))
        except grpc.RpcError as error:
            raise error_from_rpc(error) from None

    def server_info(self) -> ServerInfo:
        try:
            return ServerInfo.from_message(self._stub.GetServerInfo(pb.GetServerInfoRequest()))
        except grpc.RpcError as error:
            raise error_from_rpc(error) from None

    def is_serving(self) -> bool:
        """Whether the server is reachable, warm and not shutting down."""
        try:
            response = self._health.Check(health_pb2.HealthCheckRequest(service=SERVICE_NAME), timeout=5)
        except grpc.RpcError:
            return False
        return response.status == health_pb2.HealthCheckResponse.SERVING

    def wait_until_serving(self, timeout_seconds: float) -> None:
        """Block until the server serves.

        Raises:
            ServerError: it did not within the time.
        """
        deadline = time.monotonic() + timeout_seconds
        while not self.is_serving():
            if time.monotonic() >= deadline:
                raise _not_serving(self.address, timeout_seconds)
            time.sleep(_POLL_SECONDS)


class AsyncGenerationClient:
    """The asyncio twin of `GenerationClient`; construct it inside the event loop that uses it."""

    def __init__(self, address: str, *, credentials: grpc.ChannelCredentials | None = None) -> None:
        self.address = check_address(address)
        if credentials is None:
            self._channel = grpc.aio.insecure_channel(address, options=channel_options(address))
        else:
            self._channel = grpc.aio.secure_channel(address, credentials, options=channel_options(address))
        self._stub: Any = pb_grpc.GenerationServiceStub(self._channel)
        self._health: Any = health_pb2_grpc.HealthStub(self._channel)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connection; streams still open are cancelled."""
        await self._channel.close()

    def generate(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams = SamplingParams(),  # noqa: B008  (frozen)
        *,
        request_id: str = "",
        timeout_seconds: float | None = None,
    ) -> AsyncGenerationStream:
        """Send a request; iterate the result with `async for`.  Raises as `GenerationClient.generate`."""
        request = wire.write_request(
            prompt, params, request_id=request_id, return_prompt_token_ids=isinstance(prompt, str)
        )
        return AsyncGenerationStream(self._stub.Generate(request, timeout=timeout_seconds), prompt)

    async def complete(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams = SamplingParams(),  # noqa: B008  (frozen)
        *,
        request_id: str = "",
        timeout_seconds: float | None = None,
    ) -> Completion:
        """Run a request to its end."""
        return await self.generate(prompt, params, request_id=request_id, timeout_seconds=timeout_seconds).completion()

    async def abort(self, request_id: str) -> bool:
        """End a live request of any client; whether there was one.  Its stream ends with FinishReason.ABORT."""
        try:
            return (await self._stub.Abort(pb.AbortRequest(request_id=request_id))).found
        except grpc.RpcError as error:
            raise error_from_rpc(error) from None

    async def model_info(self) -> ModelInfo:
        try:
            return ModelInfo.from_message(await self._stub.GetModelInfo(pb.GetModelInfoRequest()))
        except grpc.RpcError as error:
            raise error_from_rpc(error) from None

    async def server_info(self) -> ServerInfo:
        try:
            return ServerInfo.from_message(await self._stub.GetServerInfo(pb.GetServerInfoRequest()))
        except grpc.RpcError as error:
            raise error_from_rpc(error) from None

    async def is_serving(self) -> bool:
        """Whether the server is reachable, warm and not shutting down."""
        try:
            response = await self._health.Check(health_pb2.HealthCheckRequest(service=SERVICE_NAME), timeout=5)
        except grpc.RpcError:
            return False
        return response.status == health_pb2.HealthCheckResponse.SERVING

    async def wait_until_serving(self, timeout_seconds: float) -> None:
        """Wait until the server serves; raises ServerError when it did not within the time."""
        deadline = time.monotonic() + timeout_seconds
        while not await self.is_serving():
            if time.monotonic() >= deadline:
                raise _not_serving(self.address, timeout_seconds)
            await asyncio.sleep(_POLL_SECONDS)


def _not_serving(address: str, timeout_seconds: float) -> ServerError:
    return ServerError(grpc.StatusCode.UNAVAILABLE, f"{address} is not serving after {timeout_seconds:g} s")
