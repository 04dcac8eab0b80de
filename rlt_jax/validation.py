"""Everything about a request is checked here, before it enters any queue.  Pure functions, no arrays."""

from __future__ import annotations

import math
import secrets
from collections.abc import Sequence
from typing import Any

from rlt_jax.config import MAX_STOP_IDS, RequestDefaults
from rlt_jax.errors import InvalidRequest, shown
from rlt_jax.exits import DEFAULT_THRESHOLDS, POLICY_ALIASES, POLICY_NAMES, POLICY_NEEDS_SCORE
from rlt_jax.models.spec import ModelSpec
from rlt_jax.request import ResolvedParams, SamplingParams

MAX_STOP_STRINGS = 16
MAX_STOP_CHARACTERS = 256
MAX_FLOAT32 = 3.4e38  # the device computes in float32, where anything larger is infinite
MAX_COUNT = 1 << 24  # whole numbers up to here are themselves in float32


def _integer(field: str, value: Any, low: int, high: int | None) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidRequest(field, f"must be an integer, found {shown(value)} of type {type(value).__name__}")
    if value < low or (high is not None and value > high):
        limit = f"in [{low}, {high}]" if high is not None else f">= {low}"
        raise InvalidRequest(field, f"must be {limit}, found {shown(value)}")
    return value


def _number(field: str, value: Any, low: float, high: float, *, open_low: bool = False) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InvalidRequest(field, f"must be a number, found {shown(value)} of type {type(value).__name__}")
    if isinstance(value, float) and not math.isfinite(value):
        raise InvalidRequest(field, f"must be finite, found {value!r}")
    if value < low or value > high or (open_low and value == low):
        bracket = "(" if open_low else "["
        raise InvalidRequest(field, f"must be in {bracket}{low:g}, {high:g}], found {shown(value)}")
    return float(value)


def _boolean(field: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise InvalidRequest(field, f"must be true or false, found {shown(value)}")
    return value


def check_prompt(
    prompt: Any, *, vocab_size: int, max_context: int, prefill_chunk: int | None = None
) -> tuple[int, ...]:
    """Token ids of a prompt, checked.

    Args:
        prefill_chunk: tokens of a prompt at most, where the KV layout takes no longer one than a chunk; else None.

    Raises:
        InvalidRequest: field "prompt", for an empty or too long prompt or an id outside the vocabulary.
    """
    if isinstance(prompt, str | bytes) or not isinstance(prompt, Sequence):
        raise InvalidRequest("prompt", f"must be a string or a sequence of token ids, found {type(prompt).__name__}")
    if len(prompt) == 0:
        raise InvalidRequest("prompt", "is empty; at least 1 token is needed")
    if len(prompt) > max_context:
        raise InvalidRequest("prompt", f"has {len(prompt)} tokens; the limit is max_context={max_context}")
    if prefill_chunk is not None and len(prompt) > prefill_chunk:
        raise InvalidRequest(
            "prompt", f"has {len(prompt)} tokens; kv_layout=ring takes one chunk, prefill_chunk={prefill_chunk} at most"
        )
    for i, token in enumerate(prompt):
        if isinstance(token, bool) or not isinstance(token, int):
            raise InvalidRequest("prompt", f"token {i} must be an integer, found {shown(token)}")
        if not 0 <= token < vocab_size:
            raise InvalidRequest("prompt", f"token {i} is {shown(token)}; the vocabulary is [0, {vocab_size - 1}]")
    return tuple(prompt)


def resolve_params(
    params: SamplingParams,
    *,
    prompt_tokens: int,
    spec: ModelSpec,
    defaults: RequestDefaults,
    eos_token_ids: Sequence[int],
    max_context: int,
    max_capacity: int,
    has_tokenizer: bool,
) -> ResolvedParams:
    """Check every parameter and fill the defaults in.

    Args:
        max_capacity: positions that the whole KV pool can hold.

    Raises:
        InvalidRequest: the first bad field, with value and limit.
    """
    if not isinstance(params, SamplingParams):
        raise InvalidRequest("params", f"must be a SamplingParams, found {type(params).__name__}")
    max_tokens = _integer("max_tokens", params.max_tokens, 1, None)
    capacity = prompt_tokens + max_tokens - 1
    if capacity > max_context:
        raise InvalidRequest(
            "max_tokens",
            f"{shown(max_tokens)} with a prompt of {prompt_tokens} needs {shown(capacity)} positions; the limit is "
            f"max_context={max_context}, so at most {max_context - prompt_tokens + 1} here",
        )
    if capacity > max_capacity:
        fits = max_capacity - prompt_tokens + 1
        raise InvalidRequest(
            "max_tokens",
            f"{max_tokens} with a prompt of {prompt_tokens} needs {capacity} positions; the whole KV pool holds "
            f"{max_capacity}, so " + (f"at most {fits} here" if fits >= 1 else "the prompt alone does not fit"),
        )

    def pick(name: str) -> Any:
        value = getattr(params, name)
        return getattr(defaults, name) if value is None else value

    trace = _check_trace(params, max_tokens)
    policy = _check_policy(params, defaults, spec, trace)
    max_loops = _integer("max_loops", pick("max_loops"), 1, spec.max_loops)
    if params.min_loops is not None:
        min_loops = _integer("min_loops", params.min_loops, 1, None)
        if min_loops > max_loops:
            raise InvalidRequest("min_loops", f"must be at most max_loops={max_loops}, found {min_loops}")
    else:  # a trace states its depths outright
        min_loops = 1 if policy == "trace" else min(defaults.min_loops, max_loops)
    default_prefill = max_loops if spec.open_ended else defaults.prefill_loops
    prefill_loops = params.prefill_loops if params.prefill_loops is not None else default_prefill
    prefill_loops = _integer("prefill_loops", prefill_loops, 1, spec.max_loops)
    if trace is not None:
        if trace[0] != prefill_loops:
            raise InvalidRequest(
                "exit_trace", f"entry 0 is {trace[0]}; the first output comes from prefill_loops={prefill_loops}"
            )
        for i, depth in enumerate(trace[1:], start=1):
            if not min_loops <= depth <= max_loops:
                allowed = f"allowed is [{min_loops}, {max_loops}]"
                raise InvalidRequest("exit_trace", f"entry {i} is {shown(depth)}; {allowed}")
    if params.logprobs not in ("raw", "processed"):
        raise InvalidRequest("logprobs", f"must be 'raw' or 'processed', found {shown(params.logprobs)}")
    ignore_eos = _boolean("ignore_eos", params.ignore_eos)
    return ResolvedParams(
        max_tokens=max_tokens,
        temperature=_number("temperature", pick("temperature"), 0.0, MAX_FLOAT32),
        top_k=_integer("top_k", pick("top_k"), 0, (1 << 31) - 1),
        top_p=_number("top_p", pick("top_p"), 0.0, 1.0, open_low=True),
        min_p=_number("min_p", pick("min_p"), 0.0, 1.0),
        seed=secrets.randbits(64) if params.seed is None else _integer("seed", params.seed, 0, (1 << 64) - 1),
        sample_index=_integer("sample_index", params.sample_index, 0, (1 << 31) - 1),
        stop=_check_stop_strings(params.stop, has_tokenizer),
        stop_token_ids=_check_stop_ids(params.stop_token_ids, spec, () if ignore_eos else eos_token_ids),
        ignore_eos=ignore_eos,
        min_loops=min_loops,
        max_loops=max_loops,
        prefill_loops=prefill_loops,
        exit_policy=policy,
        exit_threshold=_check_threshold(policy, params, defaults, spec),
        exit_trace=trace,
        initial_state=_check_initial_state(pick("initial_state"), spec),
        logprobs=params.logprobs,
    )


def _check_policy(
    params: SamplingParams, defaults: RequestDefaults, spec: ModelSpec, trace: tuple[int, ...] | None
) -> str:
    name = params.exit_policy
    if name is None:
        name = "trace" if trace is not None else defaults.exit_policy
    if not isinstance(name, str) or POLICY_ALIASES.get(name, name) not in POLICY_NAMES:
        known = ", ".join([*POLICY_NAMES, *POLICY_ALIASES])
        raise InvalidRequest("exit_policy", f"must be one of {known}, found {shown(name)}")
    name = POLICY_ALIASES.get(name, name)
    needed = POLICY_NEEDS_SCORE.get(name)
    if needed is not None and needed not in spec.exit_scores:
        given = ", ".join(f"'{score}'" for score in spec.exit_scores) or "none"
        raise InvalidRequest("exit_policy", f"{name} needs the score '{needed}'; {spec.model_type} gives {given}")
    if name == "trace" and trace is None:
        raise InvalidRequest("exit_trace", "exit_policy 'trace' needs one depth per output; none was given")
    if name != "trace" and trace is not None:
        raise InvalidRequest("exit_policy", f"must be 'trace' when exit_trace is given, found {name!r}")
    return name


def _check_threshold(policy: str, params: SamplingParams, defaults: RequestDefaults, spec: ModelSpec) -> float:
    """What a threshold may be, and what it is if not given, depends on the policy; the checkpoint's is of its gate."""
    value = params.exit_threshold
    if value is None:
        return DEFAULT_THRESHOLDS.get(policy, defaults.exit_threshold)
    if policy == "fixed" and params.exit_policy is None:  # whoever gives a threshold means to leave early
        scored = [name for name, score in POLICY_NEEDS_SCORE.items() if score in spec.exit_scores]
        remedy = f"name an exit_policy with it, one of {', '.join(scored)}" if scored else "this model has no other"
        raise InvalidRequest("exit_threshold", f"has no effect under the default exit_policy 'fixed': {remedy}")
    if policy == "argmax":
        count = _number("exit_threshold", value, 1.0, float(MAX_COUNT))
        if not count.is_integer():
            raise InvalidRequest("exit_threshold", f"of argmax must be a whole number of loops, found {shown(value)}")
        return count
    return _number("exit_threshold", value, 0.0, MAX_FLOAT32 if policy in ("latent", "kl") else 1.0)


def _check_initial_state(value: Any, spec: ModelSpec) -> str:
    if not isinstance(value, str) or value not in spec.initial_states:
        offered = ", ".join(spec.initial_states)
        raise InvalidRequest("initial_state", f"must be one of {offered} for {spec.model_type}, found {shown(value)}")
    return value


def _check_trace(params: SamplingParams, max_tokens: int) -> tuple[int, ...] | None:
    trace = params.exit_trace
    if trace is None:
        return None
    if isinstance(trace, str | bytes) or not isinstance(trace, Sequence):
        raise InvalidRequest("exit_trace", f"must be a sequence of depths, found {type(trace).__name__}")
    if len(trace) < max_tokens:
        raise InvalidRequest("exit_trace", f"has {len(trace)} entries; max_tokens={max_tokens} needs one each")
    for i, depth in enumerate(trace):
        if isinstance(depth, bool) or not isinstance(depth, int) or depth < 1:
            raise InvalidRequest("exit_trace", f"entry {i} must be an integer >= 1, found {shown(depth)}")
    return tuple(trace)


def _check_stop_strings(stop: Any, has_tokenizer: bool) -> tuple[str, ...]:
    if isinstance(stop, str):
        stop = (stop,)
    if not isinstance(stop, Sequence):
        raise InvalidRequest("stop", f"must be a sequence of strings, found {type(stop).__name__}")
    if stop and not has_tokenizer:
        raise InvalidRequest(
            "stop", f"{len(stop)} stop strings given, but the model has no tokenizer; use stop_token_ids"
        )
    if len(stop) > MAX_STOP_STRINGS:
        raise InvalidRequest("stop", f"has {len(stop)} strings; the limit is {MAX_STOP_STRINGS}")
    for text in stop:
        if not isinstance(text, str):
            raise InvalidRequest("stop", f"must hold strings, found {shown(text)}")
        if not 1 <= len(text) <= MAX_STOP_CHARACTERS:
            raise InvalidRequest(
                "stop", f"a stop string has {len(text)} characters; allowed is 1 to {MAX_STOP_CHARACTERS}"
            )
        if any("\ud800" <= character <= "\udfff" for character in text):
            raise InvalidRequest("stop", f"must hold valid Unicode, found the lone surrogates of {shown(text)}")
    return tuple(dict.fromkeys(stop))


def _check_stop_ids(ids: Any, spec: ModelSpec, eos_token_ids: Sequence[int]) -> tuple[int, ...]:
    if isinstance(ids, str | bytes) or not isinstance(ids, Sequence):
        raise InvalidRequest("stop_token_ids", f"must be a sequence of token ids, found {type(ids).__name__}")
    checked = tuple(dict.fromkeys(_integer("stop_token_ids", i, 0, spec.vocab_size - 1) for i in ids))
    fits = MAX_STOP_IDS - len(set(eos_token_ids) - set(checked))
    if len(checked) > fits:
        raise InvalidRequest("stop_token_ids", f"has {len(checked)} ids; {fits} fit beside the model's EOS ids")
    return checked
