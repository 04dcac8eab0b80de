"""The life of the server process: bind, load, serve, drain.

bind        health NOT_SERVING; Generate is UNAVAILABLE; the port is known
warm        health SERVING; one line on stdout: "rlt-server listening on HOST:PORT"
signal      health NOT_SERVING, no new requests, running ones finish within --drain-seconds; exit code 0
            before the engine is warm: nothing to drain, the process ends at once; exit code 0
again       a second signal ends the process at once, streams are cut; exit code 128 + its number
dead engine every stream gets its error, health NOT_SERVING; exit code 1
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from rlt.v1 import generation_service_pb2_grpc as pb_grpc
from rlt_jax.client.client import is_loopback
from rlt_jax.errors import InvalidConfig
from rlt_jax.request import SamplingParams
from server.engine_thread import EngineThread
from server.service import SERVICE_NAME, GenerationService
from server.status import ShuttingDown

if TYPE_CHECKING:
    from rlt_jax.runtime.engine import LLMEngine

log = logging.getLogger(__name__)

LISTENING = "rlt-server listening on"  # + " HOST:PORT": the one line of stdout, for scripts that asked for port 0

# gRPC ignores an option it does not know without a word, so a test looks every name up in gRPC's own binary.
SERVER_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.max_receive_message_length", 16 << 20),  # token ids of a long prompt
    ("grpc.keepalive_time_ms", 60_000),  # a peer that vanished without a word is found after 80 s
    ("grpc.keepalive_timeout_ms", 20_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_ping_interval_without_data_ms", 10_000),  # let clients ping this often
    ("grpc.so_reuseport", 0),  # a second server on the port fails loudly
)

_FAILURE_GRACE_SECONDS = 10.0  # for streams to fetch their error when the engine has died
_CLOSE_GRACE_SECONDS = 1.0  # for calls that are still open after the drain
_ENGINE_STOP_SECONDS = 10.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """Settings of the process; those of the engine are its own.

    Attributes:
        host: interface to listen on.
        port: 0 takes any free one.
        stream_buffer_tokens: tokens that may wait for one slow reader; past it the request is aborted.
        drain_seconds: how long running requests may go on after SIGTERM or SIGINT.
        tls_cert, tls_key: PEM files; both or neither.
    """

    host: str = "127.0.0.1"
    port: int = 50051
    stream_buffer_tokens: int = 4096
    drain_seconds: float = 30.0
    tls_cert: Path | None = None
    tls_key: Path | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise InvalidConfig(f"port must be in [0, 65535], found {self.port}")
        if self.stream_buffer_tokens < 1:
            raise InvalidConfig(f"stream_buffer_tokens must be >= 1, found {self.stream_buffer_tokens}")
        if not 0 <= self.drain_seconds < float("inf"):
            raise InvalidConfig(f"drain_seconds must be finite and >= 0, found {self.drain_seconds}")
        if (self.tls_cert is None) != (self.tls_key is None):
            raise InvalidConfig("tls_cert and tls_key must be given together")

    def credentials(self) -> grpc.ServerCredentials | None:
        """TLS credentials; None for plain text.

        Raises:
            InvalidConfig: a file cannot be read.
        """
        if self.tls_cert is None or self.tls_key is None:
            return None
        try:
            return grpc.ssl_server_credentials([(self.tls_key.read_bytes(), self.tls_cert.read_bytes())])
        except OSError as error:
            raise InvalidConfig(f"tls_cert or tls_key: {error}") from None


class Server:
    """One gRPC server and its engine thread, from `start` to `stop`.  Belongs to one event loop.

    Attributes:
        address: "HOST:PORT" as bound.
        engine_thread: readiness, death and counters of the engine.
    """

    def __init__(self, config: ServerConfig, make_engine: Callable[[], LLMEngine]) -> None:
        """Nothing is bound or loaded yet.

        Args:
            config: the process's settings.
            make_engine: builds a warm engine; runs in the engine thread.
        """
        self.address = ""
        self.engine_thread = EngineThread(make_engine)
        self._config = config
        self._service = GenerationService(self.engine_thread, stream_buffer_tokens=config.stream_buffer_tokens)
        self._health = health.aio.HealthServicer()
        self._grpc = grpc.aio.server(options=SERVER_OPTIONS)

    async def start(self) -> None:
        """Bind and answer calls, with health NOT_SERVING; begin to load the model.

        Raises:
            InvalidConfig: the address cannot be bound, or a TLS file cannot be read.
        """
        pb_grpc.add_GenerationServiceServicer_to_server(self._service, self._grpc)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._grpc)
        reflection.enable_server_reflection((SERVICE_NAME, health.SERVICE_NAME, reflection.SERVICE_NAME), self._grpc)
        await self._set_serving(False)
        host = f"[{self._config.host}]" if ":" in self._config.host else self._config.host
        credentials = self._config.credentials()
        try:
            if credentials is None:
                port = self._grpc.add_insecure_port(f"{host}:{self._config.port}")
            else:
                port = self._grpc.add_secure_port(f"{host}:{self._config.port}", credentials)
        except RuntimeError as error:  # gRPC does not say why
            reason = _why_not_bound(self._config.host, self._config.port) or f"cannot listen: {error}"
            raise InvalidConfig(f"{host}:{self._config.port}: {reason}") from None
        self.address = f"{host}:{port}"
        if credentials is None and not is_loopback(self._config.host):
            log.warning("%s is open to other machines, without encryption or authentication", self.address)
        await self._grpc.start()
        self.engine_thread.start()

    @property
    def loading(self) -> bool:
        """Whether the engine is neither warm nor has failed to become so."""
        return not self.engine_thread.ready.done()

    async def wait_ready(self) -> LLMEngine:
        """Wait until the engine is warm, then serve.  Raises what prevented the engine from loading."""
        engine = await asyncio.shield(self.engine_thread.ready)
        await self._set_serving(True)
        return engine

    async def drain(self) -> None:
        """Refuse new requests, let running ones finish within the configured time, then end the rest."""
        await self._health.enter_graceful_shutdown()
        self._service.drain()
        if not await self._service.wait_idle(self._config.drain_seconds):
            log.warning("drain time is over; ending the streams that are left")
            self._service.fail_all(ShuttingDown("the server is shutting down"))
            await self._service.wait_idle(_CLOSE_GRACE_SECONDS)

    async def wait_failed(self) -> None:
        """Wait until a warm engine dies, then until every stream has its error."""
        await asyncio.shield(self.engine_thread.died)
        await self._health.enter_graceful_shutdown()
        if not await self._service.wait_idle(_FAILURE_GRACE_SECONDS):
            log.warning("some clients did not fetch their error in time")

    async def stop(self) -> bool:
        """Close the port and end the engine thread; whether it ended (one that compiles cannot be interrupted)."""
        await self._grpc.stop(_CLOSE_GRACE_SECONDS)
        self._service.close()
        self.engine_thread.stop()
        return await asyncio.to_thread(self.engine_thread.join, _ENGINE_STOP_SECONDS)

    async def _set_serving(self, serving: bool) -> None:
        status = health_pb2.HealthCheckResponse
        for name in ("", SERVICE_NAME):
            await self._health.set(name, status.SERVING if serving else status.NOT_SERVING)


async def run(config: ServerConfig, make_engine: Callable[[], LLMEngine]) -> int:
    """Serve until a signal or a failure; the exit code.

    Raises:
        RltError: the address cannot be bound or the model cannot be loaded.
    """
    loop = asyncio.get_running_loop()
    signalled = asyncio.Event()
    server = Server(config, make_engine)

    def on_signal(number: signal.Signals) -> None:
        """The first one asks for the drain; where waiting has no use or is not wanted, the process ends here."""
        if signalled.is_set():
            log.warning("second signal (%s); leaving at once, streams are cut", number.name)
            _leave(128 + number)
        if server.loading:
            log.info("%s received; stopped while loading", number.name)
            _leave(0)
        log.info("%s received; draining for at most %g s", number.name, config.drain_seconds)
        signalled.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal, number)
    await server.start()
    log.info("bound to %s; loading the model", server.address)
    stopping = asyncio.ensure_future(signalled.wait())
    serving = asyncio.ensure_future(_serve(server))
    exit_code = 0
    try:
        await asyncio.wait((stopping, serving), return_when=asyncio.FIRST_COMPLETED)
        if serving.done():
            serving.result()  # raises what prevented the start
            exit_code = 1
        else:
            serving.cancel()
            await server.drain()
    finally:
        stopping.cancel()
        ended = await server.stop()
    if not ended:
        log.warning("the engine did not stop in time; leaving without it")
        _leave(exit_code)
    return exit_code


def _leave(exit_code: int) -> NoReturn:
    """End the process here.  A regular end would unwind the engine's thread inside XLA or gRPC, which is an abort."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # nobody reads it any more
            stream.flush()
    os._exit(exit_code)


def _why_not_bound(host: str, port: int) -> str | None:
    """The system's reason for refusing an address; None if it does not refuse it (any more)."""
    try:
        for family, kind, protocol, _, address in socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        ):
            with socket.socket(family, kind, protocol) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as gRPC
                probe.bind(address)
    except OSError as error:
        reason = error.strerror or str(error)
        return reason[:1].lower() + reason[1:]
    return None


async def _serve(server: Server) -> None:
    """Become ready, say so, and return when the engine has died."""
    engine = await server.wait_ready()
    _report(engine)
    print(f"{LISTENING} {server.address}", flush=True)
    await server.wait_failed()


def _report(engine: LLMEngine) -> None:
    """Log what is served and how; the engine itself has logged its choices and its memory plan."""
    model, info = engine.model_info(), engine.server_info()
    log.info(
        "model %s (%s, %s parameters, %s), at most %d loops%s, exit policies %s",
        model["name"], model["model_type"], f"{model['parameters']:,}", model["dtype"], model["max_loops"],
        " (--depth-cap)" if model["open_ended"] else "", ", ".join(model["exit_policies"]),
    )  # fmt: skip
    log.info(
        "on %s (%s): %d slots, page size %d, KV layout %s (%d planes, %d bytes per position), boundary batch %d, "
        "%d programs",
        info["platform"], info["device_kind"], info["slots"], info["page_size"], info["kv_layout"], model["kv_planes"],
        model["kv_bytes_per_token"], info["boundary_batch"], info["compiled_programs"],
    )  # fmt: skip
    warning = pool_warning(info["memory_plan"]["pages"] * info["page_size"], model["max_context"])
    if warning is not None:
        log.warning("%s", warning)
    defaults = ", ".join(f"{name} {value}" for name, value in info["defaults"].items())
    log.info("defaults: %s", defaults)


def pool_warning(positions: int, max_context: int) -> str | None:
    """What cannot run though the limits allow it, because the whole KV pool is smaller; None if there is no such thing.

    Args:
        positions: that all pages of the pool hold together.
        max_context: positions a request may use.
    """
    if positions >= max_context:
        return None
    text = (
        f"memory plan: the whole KV pool holds {positions} positions, less than max_context={max_context}: one request "
        f"fits if its prompt and max_tokens - 1 are at most {positions} together"
    )
    default = SamplingParams().max_tokens
    if positions < default:
        text += f", so none with the default max_tokens={default} does"
    return f"{text}; raise --kv-pages or --memory-fraction, or lower --max-context"
