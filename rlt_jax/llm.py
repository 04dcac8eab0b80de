"""The offline API: prompts in, completions out."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import itertools
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rlt_jax.config import EngineConfig
from rlt_jax.errors import InvalidConfig, InvalidRequest, RltError
from rlt_jax.request import Completion, Request, RequestOutput, SamplingParams
from rlt_jax.runtime.engine import LLMEngine

Prompt = str | Sequence[int]


class LLM:
    """A looped language model, ready to generate.  Belongs to one thread; threads that share a model use a server.

    Args:
        model: a directory in Hugging Face layout, a Hugging Face repo id, or None for the bundled model.
        config: engine settings; see EngineConfig.
        revision: branch, tag or commit of a repo id.
        progress: show loading progress on stderr.
        settings: fields of EngineConfig by name, in place of `config`'s.

    Raises:
        CheckpointError, InvalidConfig, NotImplementedError: with the field, the value and the limit.

    Example:
        >>> llm = LLM()                                                         # doctest: +SKIP
        >>> llm.generate("copy: q d k a w z m e =", SamplingParams(max_tokens=8))[0].text  # doctest: +SKIP
        >>> huginn = LLM("path/to/huginn", kv_layout="drop", max_loops=16)      # doctest: +SKIP
        >>> until_it_rests = SamplingParams(exit_policy="latent", exit_threshold=0.03)  # doctest: +SKIP
        >>> huginn.generate("The moon is", [until_it_rests])[0].exit_depths     # doctest: +SKIP
    """

    def __init__(
        self,
        model: str | Path | None = None,
        config: EngineConfig | None = None,
        *,
        revision: str | None = None,
        progress: bool = False,
        **settings: Any,
    ) -> None:
        unknown = settings.keys() - {field.name for field in dataclasses.fields(EngineConfig)}
        if unknown:
            hint = " (the depth cap is max_loops)" if "depth_cap" in unknown else ""
            raise InvalidConfig(f"{', '.join(sorted(unknown))}: not a setting of LLM or EngineConfig{hint}")
        config = dataclasses.replace(config or EngineConfig(), **settings)
        self.engine = LLMEngine(model, config, revision=revision, progress=progress)
        self._numbers = itertools.count()
        self._inboxes: dict[str, collections.deque[RequestOutput]] = {}  # by request_id; one for all of a call
        self._abandoned: collections.deque[str] = collections.deque()  # request_ids to abort; any thread appends
        self._engine_is_busy = False

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[Completion]:
        """Complete the prompts, batched together; results in input order.

        Args:
            prompts: one prompt or several; each a string or a list of token ids.
            params: one SamplingParams for all, or one per prompt: each prompt has its own depth bounds, exit policy,
                initial state and sampling.

        Raises:
            InvalidRequest: a bad prompt or parameter; nothing was queued then.
            RltError: a prompt failed, which the message names by its index: the device did while it ran, or its
                numbers overflowed.  The others are aborted.
        """
        requests = self._prepare(prompts, params)
        parts: list[list[RequestOutput]] = [[] for _ in requests]
        for index, output in self._run(requests):
            parts[index].append(output)
        return [
            Completion.from_outputs(request.prompt_token_ids, request.params, outputs)
            for request, outputs in zip(requests, parts, strict=True)
        ]

    def stream(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> Iterator[tuple[int, RequestOutput]]:
        """Like `generate`, but yields (prompt index, news) as rounds end.

        A prompt that fails raises RltError as in `generate`, after its last good tokens.

        Closing the iterator, or dropping it, aborts what is left: at once, or before the engine's next step if the
        engine is in the middle of one.
        """
        return self._run(self._prepare(prompts, params))

    def chat(
        self, messages: Sequence[Mapping[str, Any]], params: SamplingParams | None = None, **variables: Any
    ) -> Completion:
        """Complete a conversation through the checkpoint's chat template.

        Args:
            messages: {"role": ..., "content": ...} each, oldest first.
            params: as in `generate`.
            variables: passed to the template, such as enable_thinking.

        Raises:
            InvalidRequest: the model has no template or no tokenizer, or the template refuses the messages.
        """
        loaded = self.engine.loaded
        template, tokenizer = loaded.chat_template, loaded.tokenizer
        if tokenizer is None:
            raise InvalidRequest("messages", f"{loaded.name} has no tokenizer.json; give token ids to generate")
        if template is None:  # a family's usual format is not guessed: a model answers badly to a wrong one, in silence
            raise InvalidRequest(
                "messages",
                f"{loaded.name} has no chat template; put its author's into the model directory as chat_template.jinja "
                "or as field 'chat_template' of tokenizer_config.json, or write the prompt out and give it to generate",
            )
        text = template.render(messages, add_generation_prompt=True, **variables)
        # the template writes the special tokens itself
        return self.generate(tokenizer.encode(text, add_special_tokens=False), params)[0]

    def close(self) -> None:
        """Give the device memory back."""
        self.engine.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _prepare(
        self, prompts: Prompt | Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None
    ) -> list[Request]:
        several: Sequence[Prompt]
        if not isinstance(prompts, Sequence) or isinstance(prompts, bytes):
            found = type(prompts).__name__
            raise InvalidRequest(
                "prompts", f"must be a string, a sequence of token ids, or a list of these, found {found}"
            )
        if isinstance(prompts, str) or (len(prompts) > 0 and isinstance(prompts[0], int)):
            several = [prompts]  # type: ignore[list-item]  # a single prompt, as text or as ids
        else:
            several = prompts  # type: ignore[assignment]
        if params is None or isinstance(params, SamplingParams):
            each: Sequence[SamplingParams | None] = [params] * len(several)
        elif isinstance(params, Sequence) and not isinstance(params, str):
            each = params
        else:
            raise InvalidRequest("params", f"must be a SamplingParams or a list of them, found {type(params).__name__}")
        if len(each) != len(several):
            raise InvalidRequest("params", f"has {len(each)} entries for {len(several)} prompts")
        ids = [f"offline-{next(self._numbers)}" for _ in several]
        return [self.engine.prepare(*row) for row in zip(ids, several, each, strict=True)]

    def _run(self, requests: list[Request]) -> Iterator[tuple[int, RequestOutput]]:
        thread = threading.get_ident()
        index = {request.request_id: i for i, request in enumerate(requests)}
        inbox: collections.deque[RequestOutput] = collections.deque()
        self._inboxes.update(dict.fromkeys(index, inbox))
        left: set[str] = set()
        try:
            for request in requests:
                with self._busy_engine():
                    self.engine.add(request)
                    left.add(request.request_id)
            while left:
                if not inbox:
                    self._step()
                while inbox:
                    output = inbox.popleft()
                    if output.finished:
                        left.discard(output.request_id)
                    if output.error is not None:
                        if output.token_ids:  # good ones from before the fault
                            yield index[output.request_id], output
                        raise RltError(f"prompt {index[output.request_id]}: {output.error}")
                    yield index[output.request_id], output
        finally:
            # Not always at a time of our choosing: a dropped stream is closed by the garbage collector, which may run
            # inside the engine's step, or in another thread.
            for request_id in index:
                del self._inboxes[request_id]
            self._abandoned.extend(left)
            if threading.get_ident() == thread and not self._engine_is_busy:
                self._abort_abandoned()

    def _step(self) -> None:
        """Several streams may be open: whoever makes the engine step, each gets its own news.

        News of a stream that was left early has no inbox any more.
        """
        self._abort_abandoned()
        with self._busy_engine():
            outputs = self.engine.step()
        for output in outputs:
            inbox = self._inboxes.get(output.request_id)
            if inbox is not None:
                inbox.append(output)

    @contextlib.contextmanager
    def _busy_engine(self) -> Iterator[None]:
        """While the engine changes its state it takes no aborts; those that came meanwhile are carried out after."""
        self._engine_is_busy = True
        try:
            yield
        finally:
            self._engine_is_busy = False
        self._abort_abandoned()

    def _abort_abandoned(self) -> None:
        """End the requests whose streams are gone.  Only in the thread that the engine belongs to, while it is idle."""
        while self._abandoned:
            self._engine_is_busy = True
            try:
                self.engine.abort(self._abandoned.popleft())
            finally:
                self._engine_is_busy = False
