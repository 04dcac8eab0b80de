"""A request and its results: what users pass in and get back.  No jax here."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Sequence

from rlt_jax.errors import RltError


class FinishReason(enum.Enum):
    """Why a request ended.  The value is the public spelling."""

    STOP = "stop"  # an EOS id, a stop id or a stop string
    LENGTH = "length"  # max_tokens reached
    ABORT = "abort"  # cancelled by the caller


@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """What a user may choose per request.  None means the server's default (`GetServerInfo` shows it).

    Attributes:
        max_tokens: tokens to generate at most, >= 1.
        temperature: 0 is greedy (the lowest id wins ties); finite, >= 0.
        top_k: keep the k best tokens, ties kept; 0 is off.
        top_p: keep the smallest set with this mass, in (0, 1]; the best token always stays.
        min_p: drop tokens below min_p times the best probability, in [0, 1].
        seed: 64-bit unsigned; None draws one from the system and reports it.
        sample_index: which sample of one seed this is; changes the random stream.
        stop: strings that end the text; the match and what follows is removed.
        stop_token_ids: ids that end generation even with ignore_eos; the id stays in token_ids, not in text.
        ignore_eos: do not end at the model's EOS ids.
        min_loops, max_loops: bounds of the exit depth of outputs 2..n, one-based, inclusive.
        prefill_loops: loops that prompt positions run; the first output comes from this depth.  The model's trained
            depth if not given; max_loops for a model that loops to any depth.
        exit_policy: "fixed" or "trace" for any model; "gate" or "gate_delayed" ("ouro", "ouro_delayed" are accepted
            spellings) for one with an exit gate; "latent", "kl" or "argmax" for one whose states converge.
        exit_threshold: of a gate in [0, 1], a token leaves once its exit probability reaches it, 1 is full depth; of
            latent and kl >= 0, it leaves once a loop changes the state or the next-token distribution by less, 0 is
            full depth; of argmax a whole number >= 1, it leaves once the best token stayed the same for so many loops.
            Without an exit_policy it is for the default one, and refused where that is "fixed".
        exit_trace: given exit depths, at least max_tokens of them; the first is prefill_loops.  Implies the policy
            "trace" and min_loops 1.
        initial_state: "zeros" or "random", before the first loop of every position, where the model offers the choice;
            random ones depend on seed and position alone.
        logprobs: "raw" (of the model's own distribution) or "processed" (after temperature and filters).
    """

    max_tokens: int = 64
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: int | None = None
    sample_index: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    min_loops: int | None = None
    max_loops: int | None = None
    prefill_loops: int | None = None
    exit_policy: str | None = None
    exit_threshold: float | None = None
    exit_trace: tuple[int, ...] | None = None
    initial_state: str | None = None
    logprobs: str = "raw"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Usage:
    """What a request cost.  Tokens past a stop string are not in it."""

    prompt_tokens: int
    completion_tokens: int
    prompt_loops: int  # over prompt positions: prompt_tokens * prefill_loops, 0 if it ended before its first token
    decode_loops: int  # loops that produced outputs 2..n: the sum of their exit depths
    full_depth_loops: int  # what outputs 2..n would have cost at the request's own max_loops


@dataclasses.dataclass(frozen=True, kw_only=True)
class RequestOutput:
    """News about one request: what is new since its last RequestOutput.

    The three per-token tuples are aligned.  `text` may lag behind `token_ids`: it never splits a UTF-8 character and is
    held back while it could still become a stop string; it is None for a model without a tokenizer.
    """

    request_id: str
    token_ids: tuple[int, ...]
    exit_depths: tuple[int, ...]  # one-based loops per token; the first output's is prefill_loops
    logprobs: tuple[float, ...]
    text: str | None
    finish_reason: FinishReason | None = None  # set on the last output only
    stop_match: int | str | None = None  # the id or string that ended it
    usage: Usage | None = None  # set on the last output only
    error: str | None = None  # set on the last output of a request that failed

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None or self.error is not None


def merge_outputs(outputs: Sequence[RequestOutput]) -> RequestOutput:
    """One RequestOutput that says what `outputs`, consecutive ones of one request, say."""
    if len(outputs) == 1:
        return outputs[0]
    texts = [output.text for output in outputs if output.text is not None]
    return dataclasses.replace(
        outputs[-1],
        token_ids=tuple(token for output in outputs for token in output.token_ids),
        exit_depths=tuple(depth for output in outputs for depth in output.exit_depths),
        logprobs=tuple(logprob for output in outputs for logprob in output.logprobs),
        text="".join(texts) if texts else None,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Completion:
    """The whole result of one prompt, as `LLM.generate` returns it."""

    prompt_token_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    exit_depths: tuple[int, ...]
    logprobs: tuple[float, ...]
    text: str | None
    finish_reason: FinishReason
    stop_match: int | str | None
    params: ResolvedParams
    usage: Usage

    @classmethod
    def from_outputs(
        cls, prompt_token_ids: tuple[int, ...], params: ResolvedParams, outputs: Sequence[RequestOutput]
    ) -> Completion:
        """The result of a request from all its outputs, the first to the last.

        Raises:
            RltError: they end before the request finished.
        """
        whole = merge_outputs(outputs) if outputs else None
        if whole is None or whole.finish_reason is None or whole.usage is None:
            raise RltError("the outputs end before the request finished")
        return cls(
            prompt_token_ids=prompt_token_ids,
            token_ids=whole.token_ids,
            exit_depths=whole.exit_depths,
            logprobs=whole.logprobs,
            text=whole.text,
            finish_reason=whole.finish_reason,
            stop_match=whole.stop_match,
            params=params,
            usage=whole.usage,
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class ResolvedParams:
    """SamplingParams with every default filled in and checked: what really runs, and what is reported back."""

    max_tokens: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int
    sample_index: int
    stop: tuple[str, ...]
    stop_token_ids: tuple[int, ...]
    ignore_eos: bool
    min_loops: int
    max_loops: int
    prefill_loops: int
    exit_policy: str
    exit_threshold: float
    exit_trace: tuple[int, ...] | None
    initial_state: str
    logprobs: str


@dataclasses.dataclass(eq=False)
class Request:
    """One live request.  Identity is the object, not the id: an id may be reused as soon as its owner is gone.

    Created by `LLMEngine.prepare` after every check has passed; afterwards only the scheduler changes its progress.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    params: ResolvedParams

    @property
    def capacity(self) -> int:
        """KV positions it can ever use: the last sampled token is never fed."""
        return len(self.prompt_token_ids) + self.params.max_tokens - 1
