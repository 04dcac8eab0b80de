"""The one thread that owns the engine.  Everybody else posts commands to it and gets deliveries from it.

    event loop  --submit, abort, stop-->  queue  -->  engine thread: apply commands, engine.step(), repeat
    event loop  <--one call_soon_threadsafe per step--  all news of that step

jax's thread-local guards and the engine's methods belong to this thread; `engine.prepare` and the two info methods are
pure and may be called by any.
"""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import logging
import queue
import threading
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from rlt_jax.errors import EngineDead, InvalidRequest, QueueFull
from rlt_jax.request import Request, RequestOutput
from server.streams import Stream

if TYPE_CHECKING:
    from rlt_jax.runtime.engine import LLMEngine

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class _Submit:
    stream: Stream
    request: Request


@dataclasses.dataclass(frozen=True)
class _Abort:
    stream: Stream


@dataclasses.dataclass(frozen=True)
class _Stop:
    pass


type _Command = _Submit | _Abort | _Stop


def _submitted(commands: Iterable[_Command]) -> list[Stream]:
    return [command.stream for command in commands if isinstance(command, _Submit)]


class EngineThread:
    """Builds the engine in its own thread, then runs it until stopped or broken.

    Attributes:
        ready: resolves to the engine once it is warm, or to the exception that prevented it.
        died: resolves to the error that ended a warm engine; stays pending on a regular stop.
        stats: the engine's counters after its last step; replaced as a whole.
    """

    def __init__(self, make_engine: Callable[[], LLMEngine]) -> None:
        loop = asyncio.get_running_loop()
        self.ready: asyncio.Future[LLMEngine] = loop.create_future()
        self.died: asyncio.Future[EngineDead] = loop.create_future()
        self.stats: Mapping[str, Any] = {}
        self._loop = loop
        self._make_engine = make_engine
        self._commands: queue.SimpleQueue[_Command] = queue.SimpleQueue()
        # The next three belong to the engine thread alone.
        self._pending: collections.deque[_Command] = collections.deque()  # taken, not yet applied
        self._streams: dict[str, Stream] = {}  # by engine_id, from add() to the last output
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    # -- any thread ---------------------------------------------------------------------------------------------------

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Ask the thread to end after its current step; requests still in the engine are dropped."""
        self._commands.put(_Stop())

    def join(self, timeout_seconds: float) -> bool:
        """Wait for the thread's end; whether it ended."""
        self._thread.join(timeout_seconds)
        return not self._thread.is_alive()

    # -- event loop ---------------------------------------------------------------------------------------------------

    def submit(self, stream: Stream, request: Request) -> None:
        """Hand a prepared request over.  `stream` hears whether it was accepted or failed, then all its news.

        Raises:
            EngineDead: nobody is left to take it.
        """
        if self.died.done():
            raise self.died.result()
        stream.submitted = True
        self._commands.put(_Submit(stream, request))

    def abort(self, stream: Stream) -> None:
        """End a submitted request; its last output says FinishReason.ABORT.  No effect on one that has ended."""
        self._commands.put(_Abort(stream))

    def _deliver(self, news: Iterable[tuple[Stream, RequestOutput]]) -> None:
        for stream, output in news:
            if not stream.push(output):
                log.warning("request %s aborted: its stream was read too slowly", stream.request_id)
                self.abort(stream)

    def _bury(self, error: EngineDead, streams: list[Stream]) -> None:
        """Give every stream its error, also those whose command was not read.

        On the event loop, where commands are posted: none can slip in between the last look and `died`.
        """
        for stream in [*streams, *_submitted(self._take_commands(wait=False))]:
            stream.fail(error)
        self.died.set_result(error)

    # -- engine thread ------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            engine = self._make_engine()
        except BaseException as error:  # reported by whoever awaits `ready`
            self._post(self.ready.set_exception, error)
            return
        self.stats = engine.stats()
        self._post(self.ready.set_result, engine)
        try:
            self._serve(engine)
        except BaseException as error:
            log.exception("the engine has failed")
            dead = error if isinstance(error, EngineDead) else EngineDead(f"the engine has failed: {error!r}")
            self._post(self._bury, dead, [*self._streams.values(), *_submitted(self._pending)])
        finally:
            engine.close()

    def _serve(self, engine: LLMEngine) -> None:
        while not self._stopping:
            self._apply(engine, last_try=True)
            self._pending.extend(self._take_commands(wait=not engine.has_work()))
            self._apply(engine, last_try=False)
            outputs = engine.step() if engine.has_work() else []
            self.stats = engine.stats()  # before the news go out: whoever has heard them finds them counted
            if outputs:
                self._post(self._deliver, [self._route(output) for output in outputs])

    def _route(self, output: RequestOutput) -> tuple[Stream, RequestOutput]:
        """The stream that an output is for."""
        stream = self._streams[output.request_id]
        if output.finished:
            del self._streams[output.request_id]
        return stream, output

    def _take_commands(self, *, wait: bool) -> list[_Command]:
        """All commands that are waiting; with `wait`, at least one."""
        commands = [self._commands.get()] if wait else []
        while True:
            try:
                commands.append(self._commands.get_nowait())
            except queue.Empty:
                return commands

    def _apply(self, engine: LLMEngine, *, last_try: bool) -> None:
        """Apply the pending commands in order.

        Requests become running ones only inside a step, so a burst into an idle engine can fill the waiting queue while
        slots are free.  Hence a request that finds the queue full stays pending, with all that follows it, is tried
        again after the next step, and only then refused (`last_try`).
        """
        while self._pending:
            match self._pending[0]:
                case _Stop():
                    self._stopping = True
                case _Abort(stream):
                    if stream.engine_id in self._streams:
                        engine.abort(stream.engine_id)
                case _Submit(stream, request):
                    try:
                        engine.add(request)
                    except QueueFull as error:
                        if not last_try:
                            return
                        self._post(stream.fail, error)
                    except InvalidRequest as error:
                        self._post(stream.fail, error)
                    else:
                        self._streams[stream.engine_id] = stream
                        self._post(stream.accept)
            self._pending.popleft()

    def _post(self, callback: Callable[..., Any], *args: Any) -> None:
        try:
            self._loop.call_soon_threadsafe(callback, *args)
        except RuntimeError:  # the loop has closed: the process is ending and nobody listens
            log.debug("news after the end of the event loop dropped")
