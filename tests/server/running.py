"""A real server inside the test's process: sockets, event loop and engine thread are the product's own."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import grpc

from rlt_jax.client.client import channel_options
from rlt_jax.config import EngineConfig
from rlt_jax.runtime.engine import LLMEngine
from server.app import Server, ServerConfig

START_SECONDS = 240
PATIENCE_SECONDS = 30


class RunningServer:
    """Starts on construction, in a thread with its own event loop; stops with the `with` block.

    Args:
        make_engine: as `server.app.Server`.
        wait: until the engine is warm; False to look at a server that loads.
    """

    def __init__(self, make_engine: Callable[[], LLMEngine], *, wait: bool = True, **config: Any) -> None:
        self._make_engine = make_engine
        self._config = ServerConfig(port=0, **config)
        self._bound = threading.Event()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self.server = self.call(self._start())
        if wait:
            self.wait_ready()

    async def _start(self) -> Server:
        server = Server(self._config, self._make_engine)
        await server.start()
        return server

    def call[T](self, coroutine: Coroutine[Any, Any, T], timeout_seconds: float = PATIENCE_SECONDS) -> T:
        """Run a coroutine on the server's event loop."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(timeout_seconds)

    def wait_ready(self) -> None:
        self.engine = self.call(self.server.wait_ready(), START_SECONDS)

    @property
    def address(self) -> str:
        return self.server.address

    @property
    def stats(self) -> dict[str, Any]:
        return dict(self.server.engine_thread.stats)

    def wait_idle(self) -> None:
        """Wait until no round is in flight either: the last one may end after its requests have."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while self.engine.has_work():
            assert time.monotonic() < deadline, self.stats
            time.sleep(0.005)

    def wait_stats(self, **expected: int) -> dict[str, Any]:
        """Wait until these counters have these values; all counters then."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while True:
            stats = self.stats
            if all(stats[name] == value for name, value in expected.items()):
                return stats
            assert time.monotonic() < deadline, f"expected {expected}, found {stats}"
            time.sleep(0.002)

    def wait_drained(self) -> dict[str, Any]:
        """Wait until nothing is live and every slot and page is back."""
        return self.wait_stats(
            running=0, waiting=0, free_slots=self.engine.config.slots, pages_free=self.stats["pages_total"]
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self.call(self.server.stop()), "the engine thread did not end"
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(PATIENCE_SECONDS)
        self._loop.close()


def raw_channel(address: str) -> grpc.Channel:
    """A plain channel that does not ask the proxy of whoever runs the tests."""
    return grpc.insecure_channel(address, options=channel_options(address))


def tiny_config(**changes: Any) -> EngineConfig:
    """Small and exact: two slots, so that waiting is easy to see."""
    settings: dict[str, Any] = {"dtype": "float32", "slots": 2, "max_context": 512, "max_waiting": 2} | changes
    return EngineConfig(**settings)


def engine_maker(model: Path, config: EngineConfig) -> Callable[[], LLMEngine]:
    return lambda: LLMEngine(model, config)


def break_device(engine: LLMEngine, *, good_rounds: int, failures: int | None = None) -> None:
    """Let the device call of a decode round fail: after `good_rounds` of them, `failures` times (None: for ever)."""
    runner = engine._runner
    run = runner._run
    calls = 0

    def failing_run(name: str, *args: Any) -> Any:
        nonlocal calls
        calls += name == "decode"
        if name == "decode" and calls > good_rounds and (failures is None or calls <= good_rounds + failures):
            raise RuntimeError("INTERNAL: planted device failure")
        return run(name, *args)

    runner._run = failing_run  # type: ignore[method-assign]
