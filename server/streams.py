"""What one stream has to say and has not yet sent.  Touched by the event loop's thread alone, so there are no locks."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from typing import Any

from rlt_jax.errors import RltError
from rlt_jax.request import RequestOutput, merge_outputs
from server.status import RequestFailed, SlowReader


class Stream:
    """The mailbox between the engine thread's deliveries and the handler of one Generate call.

    Bounded in tokens (a token's text and numbers take a few dozen bytes): a reader that falls behind gets larger
    messages, and past the bound the stream fails instead of growing.

    Attributes:
        request_id: the name the client knows; unique among live streams, free again when the handler ends.
        engine_id: the name the engine knows; never used twice, so that news of an earlier owner of `request_id` cannot
            reach this stream.
        submitted: the engine thread has been told of it and must be told of an abort.
        abort_requested: by the Abort call.
    """

    def __init__(self, request_id: str, engine_id: str, *, limit_tokens: int) -> None:
        self.request_id = request_id
        self.engine_id = engine_id
        self.submitted = False
        self.abort_requested = False
        self._limit_tokens = limit_tokens
        self._news: list[RequestOutput] = []
        self._buffered_tokens = 0
        self._error: RltError | None = None
        self._complete = False
        self._ended = False
        self._accepted = asyncio.Event()
        self._changed = asyncio.Event()
        self._interruptible: asyncio.Task[Any] | None = None

    @property
    def error(self) -> RltError | None:
        """Why the stream failed."""
        return self._error

    @property
    def complete(self) -> bool:
        """Nothing more will be taken in: the last output has arrived, or the stream has failed."""
        return self._complete

    @property
    def ended(self) -> bool:
        """The engine has said its last word; it need not be told of an abort any more."""
        return self._ended

    def accept(self) -> None:
        """The engine has queued the request."""
        self._accepted.set()

    def push(self, output: RequestOutput) -> bool:
        """Take one delivery; False when it made the stream overflow, which fails it."""
        self._ended = self._ended or output.finished
        if self._complete:
            return True
        if output.error is not None:
            self.fail(RequestFailed(output.error))
            return True
        self._news.append(output)
        self._buffered_tokens += len(output.token_ids)
        # alone, a delivery always fits: one round may bring more tokens than a small limit
        if self._buffered_tokens > self._limit_tokens and len(self._news) > 1:
            self.fail(SlowReader(self._buffered_tokens, self._limit_tokens))
            return False
        self._complete = output.finished
        self._changed.set()
        return True

    def fail(self, error: RltError) -> None:
        """End the stream with an error; what was not sent is dropped.  No effect on one that has failed already."""
        if self._error is not None:
            return
        self._error = error
        self._complete = True
        self._news.clear()
        self._buffered_tokens = 0
        self._accepted.set()
        self._changed.set()
        if self._interruptible is not None:
            self._interruptible.cancel()

    @contextlib.contextmanager
    def interrupting(self, task: asyncio.Task[Any] | None) -> Iterator[None]:
        """Within the block, a failure of the stream cancels `task`; for a handler that is busy writing.

        One flag for the usual case instead of two more tasks per message: a busy server sends thousands a second.
        """
        self._interruptible = task
        try:
            yield
        finally:
            self._interruptible = None

    async def wait_accepted(self) -> None:
        """Wait until the engine has queued the request; raises the stream's error if it failed instead."""
        await self._accepted.wait()
        if self._error is not None:
            raise self._error

    async def take(self) -> RequestOutput:
        """Wait for news and take all of it as one output; raises the stream's error once it has failed."""
        await self._changed.wait()
        self._changed.clear()
        if self._error is not None:
            raise self._error
        news, self._news, self._buffered_tokens = self._news, [], 0
        return merge_outputs(news)
