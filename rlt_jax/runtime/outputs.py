"""What live requests have been given so far: text, stop strings, usage.  Turns tokens into RequestOutputs.  No jax."""

from __future__ import annotations

import dataclasses
import math

from rlt_jax.request import FinishReason, Request, RequestOutput, Usage
from rlt_jax.runtime.plan import Delivery
from rlt_jax.text import OutputText, TextTokenizer


@dataclasses.dataclass
class _Given:
    """What one request has received."""

    text: OutputText | None
    tokens: int = 0
    decode_loops: int = 0


NOT_A_NUMBER = "the log-probability of output token {} is not a number: values overflowed, or the weights are damaged"


class Outputs:
    """One entry per live request, from `open` to its last output.  Not thread-safe: one engine thread calls it."""

    def __init__(self) -> None:
        self._given: dict[Request, _Given] = {}

    def open(self, request: Request, tokenizer: TextTokenizer | None) -> None:
        """Begin with nothing given.  Without a tokenizer there will be no text."""
        self._given[request] = _Given(None if tokenizer is None else OutputText(tokenizer, request.params.stop))

    def deliver(self, delivery: Delivery) -> RequestOutput:
        """What a round's tokens add.  Tokens past a stop string are dropped, unbilled.

        The output may be the request's last although the device did not end it: a stop string did, or the request fails
        because a token was chosen from numbers that are none.
        """
        request, finish = delivery.request, delivery.finish
        given = self._given[request]
        stop_match: int | str | None = None
        error: str | None = None
        kept, text = len(delivery.tokens), ""
        for i, token in enumerate(delivery.tokens):
            if math.isnan(delivery.logprobs[i]):
                kept, finish, error = i, None, NOT_A_NUMBER.format(given.tokens + i + 1)
                break
            if finish is FinishReason.STOP and i == len(delivery.tokens) - 1:
                stop_match = token  # an EOS or stop id stays in token_ids and out of the text
                break
            if given.text is None:
                continue
            step = given.text.push(token)
            text += step.delta
            if step.stop_match is not None:
                kept, stop_match, finish = i + 1, step.stop_match, FinishReason.STOP
                break
        depths = delivery.depths[:kept]
        given.decode_loops += sum(depths if given.tokens else depths[1:])
        given.tokens += kept
        ended = finish is not None or error is not None
        if ended:
            del self._given[request]
            if given.text is not None:
                text += given.text.finish()  # nothing after a stop string
        return RequestOutput(
            request_id=request.request_id,
            token_ids=delivery.tokens[:kept],
            exit_depths=depths,
            logprobs=delivery.logprobs[:kept],
            text=None if given.text is None else text,
            finish_reason=finish,
            stop_match=stop_match,
            error=error,
            usage=_usage(request, given) if ended else None,
        )

    def close(self, request: Request, finish: FinishReason | None, *, error: str | None = None) -> RequestOutput:
        """The output that ends a request outside a round: aborted (`finish`) or failed (`error`)."""
        given = self._given.pop(request)
        return RequestOutput(
            request_id=request.request_id,
            token_ids=(),
            exit_depths=(),
            logprobs=(),
            text=None if given.text is None else given.text.finish(),
            finish_reason=finish,
            error=error,
            usage=_usage(request, given),
        )


def _usage(request: Request, given: _Given) -> Usage:
    prompt, params = len(request.prompt_token_ids), request.params
    return Usage(
        prompt_tokens=prompt,
        completion_tokens=given.tokens,
        prompt_loops=prompt * params.prefill_loops if given.tokens else 0,
        decode_loops=given.decode_loops,
        full_depth_loops=max(0, given.tokens - 1) * params.max_loops,
    )
