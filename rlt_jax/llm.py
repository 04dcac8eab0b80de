"""The offline API: prompts in, completions out."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path

from rlt_jax.config import EngineConfig
from rlt_jax.errors import InvalidRequest, RltError
from rlt_jax.request import Completion, Request, RequestOutput, SamplingParams
from rlt_jax.runtime.engine import LLMEngine

Prompt = str | Sequence[int]


class LLM:
    """A looped language model, ready to generate.

    Args:
        model: a directory in Hugging Face layout, a Hugging Face repo id, or None for the bundled model.
        config: engine settings; see EngineConfig.
        progress: show loading progress on stderr.

    Example:
        >>> llm = LLM()                                                         # doctest: +SKIP
        >>> llm.generate("copy: q d k a w z m e =", SamplingParams(max_tokens=8))[0].text  # doctest: +SKIP
    """

    def __init__(
        self, model: str | Path | None = None, config: EngineConfig | None = None, *, progress: bool = False
    ) -> None:
        self.engine = LLMEngine(model, config, progress=progress)
        self._numbers = itertools.count()
        self._mail: dict[str, list[RequestOutput]] = {}

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[Completion]:
        """Complete the prompts, batched together; results in input order.

        Args:
            prompts: one prompt or several; each a string or a list of token ids.
            params: one SamplingParams for all, or one per prompt.

        Raises:
            InvalidRequest: a bad prompt or parameter; nothing was queued then.
            RltError: the device failed while a prompt was running.
        """
        requests = self._prepare(prompts, params)
        parts: list[list[RequestOutput]] = [[] for _ in requests]
        for index, output in self._run(requests):
            parts[index].append(output)
        return [_completion(r, p) for r, p in zip(requests, parts, strict=True)]

    def stream(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> Iterator[tuple[int, RequestOutput]]:
        """Like `generate`, but yields (prompt index, news) as rounds end.  Closing the iterator aborts what is left."""
        return self._run(self._prepare(prompts, params))

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
        if isinstance(prompts, str) or (len(prompts) > 0 and isinstance(prompts[0], int)):
            several = [prompts]  # type: ignore[list-item]  # a single prompt, as text or as ids
        else:
            several = prompts  # type: ignore[assignment]
        if params is None or isinstance(params, SamplingParams):
            each: Sequence[SamplingParams | None] = [params] * len(several)
        else:
            each = params
        if len(each) != len(several):
            raise InvalidRequest("params", f"has {len(each)} entries for {len(several)} prompts")
        ids = [f"offline-{next(self._numbers)}" for _ in several]
        return [self.engine.prepare(*row) for row in zip(ids, several, each, strict=True)]

    def _run(self, requests: list[Request]) -> Iterator[tuple[int, RequestOutput]]:
        index = {r.request_id: i for i, r in enumerate(requests)}
        self._mail.update((request_id, []) for request_id in index)
        left = set(index)
        try:
            for request in requests:
                self.engine.add(request)
            while left:
                # several streams may be open: each takes its own mail, whoever made the engine step
                if not any(self._mail[request_id] for request_id in left):
                    for output in self.engine.step():
                        if output.request_id in self._mail:
                            self._mail[output.request_id].append(output)
                for request_id in sorted(left, key=index.__getitem__):
                    mail, self._mail[request_id] = self._mail[request_id], []
                    for output in mail:
                        if output.finished:
                            left.discard(request_id)
                        if output.error is not None:
                            raise RltError(output.error)
                        yield index[request_id], output
        finally:
            for request_id in left:
                self.engine.abort(request_id)
            for request_id in index:
                del self._mail[request_id]


def _completion(request: Request, parts: list[RequestOutput]) -> Completion:
    last = parts[-1]
    if last.finish_reason is None or last.usage is None:
        raise RltError(f"request {request.request_id} ended without a reason")
    texts = [p.text for p in parts if p.text is not None]
    return Completion(
        prompt_token_ids=request.prompt_token_ids,
        token_ids=tuple(itertools.chain.from_iterable(p.token_ids for p in parts)),
        exit_depths=tuple(itertools.chain.from_iterable(p.exit_depths for p in parts)),
        logprobs=tuple(itertools.chain.from_iterable(p.logprobs for p in parts)),
        text="".join(texts) if texts else None,
        finish_reason=last.finish_reason,
        stop_match=last.stop_match,
        params=request.params,
        usage=last.usage,
    )
