"""The one mapping between Python's request types and the messages of protos/rlt/v1; client and server both use it.

    SamplingParams --write_params--> GenerateRequest --read_params--> SamplingParams
    ResolvedParams --write_resolved--> GenerateStarted --read_resolved--> ResolvedParams
    RequestOutput  --write_delta, write_finished--> GenerateResponse --read_delta, read_finished--> RequestOutput

`PARAM_PATHS` is the table of names: left as users of Python know a field, right its path in GenerateRequest, which is
what google.rpc.BadRequest names.  Only types and widths that the wire cannot carry are checked here; whether a value
makes sense is the engine's to say.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from rlt.v1 import generation_service_pb2 as pb
from rlt.v1 import params_pb2
from rlt_jax.errors import InvalidRequest, shown
from rlt_jax.request import FinishReason, RequestOutput, ResolvedParams, SamplingParams, Usage

PARAM_PATHS: dict[str, str] = {
    "max_tokens": "stop.max_tokens",
    "temperature": "sampling.temperature",
    "top_k": "sampling.top_k",
    "top_p": "sampling.top_p",
    "min_p": "sampling.min_p",
    "seed": "sampling.seed",
    "sample_index": "sampling.sample_index",
    "logprobs": "sampling.logprob_mode",
    "stop": "stop.strings",
    "stop_token_ids": "stop.token_ids",
    "ignore_eos": "stop.ignore_eos",
    "min_loops": "depth.min_loops",
    "max_loops": "depth.max_loops",
    "prefill_loops": "depth.prefill_loops",
    "exit_policy": "depth.exit_policy",
    "exit_threshold": "depth.exit_threshold",
    "exit_trace": "depth.exit_trace",
    "initial_state": "depth.initial_state",
}

_UINT32 = ("max_tokens", "top_k", "sample_index", "min_loops", "max_loops", "prefill_loops")
_FLOATS = ("temperature", "top_p", "min_p", "exit_threshold")
_LOGPROB_MODES = {"raw": params_pb2.LOGPROB_MODE_RAW, "processed": params_pb2.LOGPROB_MODE_PROCESSED}
_LOGPROB_NAMES = {mode: name for name, mode in _LOGPROB_MODES.items()}
_REASONS = {
    FinishReason.STOP: pb.FINISH_REASON_STOP,
    FinishReason.LENGTH: pb.FINISH_REASON_LENGTH,
    FinishReason.ABORT: pb.FINISH_REASON_ABORT,
}
_REASONS_BACK = {value: reason for reason, value in _REASONS.items()}

# Messages that carry `sampling`, `stop` and `depth`.
_HasParams = pb.GenerateRequest | pb.GenerateStarted | pb.RequestDefaults


# -- names ------------------------------------------------------------------------------------------------------------


def field_path(field: str, request: pb.GenerateRequest) -> str:
    """The path in GenerateRequest of a field as `InvalidRequest` names it."""
    if field == "prompt":
        kind = request.WhichOneof("prompt")
        return {"text": "text", "token_ids": "token_ids.ids"}.get(kind or "", "prompt")
    return PARAM_PATHS.get(field, field)


def field_name(path: str) -> str:
    """The inverse of `field_path`: what a Python caller knows the field as."""
    if path in ("text", "token_ids.ids"):
        return "prompt"
    return {wire_path: name for name, wire_path in PARAM_PATHS.items()}.get(path, path)


# -- request ----------------------------------------------------------------------------------------------------------


def write_request(
    prompt: str | Sequence[int], params: SamplingParams, *, request_id: str = "", return_prompt_token_ids: bool = False
) -> pb.GenerateRequest:
    """The message for a prompt and its parameters.

    Raises:
        InvalidRequest: a value of a type or size that the wire cannot carry.
    """
    if not isinstance(request_id, str):
        raise InvalidRequest("request_id", f"must be a string, found {request_id!r}")
    request = pb.GenerateRequest(request_id=request_id)
    if isinstance(prompt, str):
        try:
            request.text = prompt
        except ValueError:  # a lone surrogate
            raise InvalidRequest("prompt", f"must be valid Unicode, found {prompt[:40]!r}") from None
    else:
        if isinstance(prompt, list | tuple) and prompt and isinstance(prompt[0], str | list | tuple):
            raise InvalidRequest(
                "prompt",
                f"must be a string or a sequence of token ids, found a {type(prompt).__name__} that begins with "
                f"{shown(prompt[0])}; a call takes one prompt, so make one call per prompt",
            )
        _checked_ints("prompt", prompt, "token")
        request.token_ids.ids.extend(prompt)
        request.token_ids.SetInParent()  # an empty prompt must reach the server as an empty prompt, not as none
    write_params(request, params)
    if return_prompt_token_ids:
        request.return_prompt_token_ids = True
    return request


def write_params(message: _HasParams, params: SamplingParams | ResolvedParams) -> None:
    """Fill `sampling`, `stop` and `depth` of a message; a parameter that is None stays absent."""
    for name, path in PARAM_PATHS.items():
        value = getattr(params, name)
        if value is None:
            continue
        group, field = path.split(".")
        target = getattr(message, group)
        if name == "logprobs":
            if value not in _LOGPROB_MODES:
                raise InvalidRequest(name, f"must be one of {', '.join(_LOGPROB_MODES)}, found {shown(value)}")
            target.logprob_mode = _LOGPROB_MODES[value]
        elif name == "exit_trace":
            _checked_ints(name, value)
            target.exit_trace.depths.extend(value)
            target.exit_trace.SetInParent()
        elif name in ("stop", "stop_token_ids"):
            if name == "stop":
                _checked_strings(name, value)
            else:
                _checked_ints(name, value)
            getattr(target, field).extend(value)
        else:
            setattr(target, field, _checked_scalar(name, value))


def read_prompt(request: pb.GenerateRequest) -> str | list[int]:
    """The prompt of a request.

    Raises:
        InvalidRequest: neither text nor token ids were set.
    """
    match request.WhichOneof("prompt"):
        case "text":
            return request.text
        case "token_ids":
            return list(request.token_ids.ids)
        case _:
            raise InvalidRequest("prompt", "is missing; set text or token_ids")


def read_params(message: _HasParams) -> SamplingParams:
    """The parameters that a message sets; what it leaves out keeps SamplingParams' own default.

    Raises:
        InvalidRequest: a log-probability mode this version does not know.
    """
    return SamplingParams(**_read_fields(message))


def read_resolved(message: pb.GenerateStarted) -> ResolvedParams:
    """The parameters of a GenerateStarted, which has every field set (exit_trace only where the policy is "trace")."""
    return ResolvedParams(**({"exit_trace": None, "stop": (), "stop_token_ids": ()} | _read_fields(message)))


def _read_fields(message: _HasParams) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    for name, path in PARAM_PATHS.items():
        group, field = path.split(".")
        source = getattr(message, group)
        if name in ("stop", "stop_token_ids"):
            fields[name] = tuple(getattr(source, field))
        elif not source.HasField(field):
            continue
        elif name == "exit_trace":
            fields[name] = tuple(source.exit_trace.depths)
        elif name == "logprobs":
            if source.logprob_mode == params_pb2.LOGPROB_MODE_UNSPECIFIED:
                continue
            if source.logprob_mode not in _LOGPROB_NAMES:
                raise InvalidRequest("logprobs", f"must be one of {list(_LOGPROB_NAMES)}, found {source.logprob_mode}")
            fields[name] = _LOGPROB_NAMES[source.logprob_mode]
        else:
            fields[name] = getattr(source, field)
    return fields


def _checked_scalar(name: str, value: Any) -> Any:
    """`value` if the wire can carry it for this field.  Python's protobuf would take a bool for an int in silence."""
    if name in _UINT32 or name == "seed":
        limit = 2**64 if name == "seed" else 2**32
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < limit:
            raise InvalidRequest(name, f"must be an integer in [0, {limit - 1}], found {shown(value)}")
    elif name in _FLOATS:
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise InvalidRequest(name, f"must be a number, found {shown(value)}")
        if isinstance(value, int) and value.bit_length() > 1023:
            raise InvalidRequest(name, f"must fit a double, found {shown(value)}")
    elif name == "ignore_eos":
        if not isinstance(value, bool):
            raise InvalidRequest(name, f"must be True or False, found {shown(value)}")
    else:
        _checked_string(name, value, "must be")
    return value


def _checked_ints(name: str, values: Any, entry: str = "entry") -> None:
    if isinstance(values, str) or not isinstance(values, Sequence):
        raise InvalidRequest(name, f"must be a sequence of integers, found {type(values).__name__}")
    for i, value in enumerate(values):
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**32:
            raise InvalidRequest(name, f"{entry} {i} must be an integer in [0, {2**32 - 1}], found {shown(value)}")


def _checked_strings(name: str, values: Any) -> None:
    if isinstance(values, str) or not isinstance(values, Sequence):
        raise InvalidRequest(name, f"must be a sequence of strings, found {type(values).__name__}")
    for i, value in enumerate(values):
        _checked_string(name, value, f"entry {i} must be")


def _checked_string(name: str, value: Any, must_be: str) -> None:
    if not isinstance(value, str):
        raise InvalidRequest(name, f"{must_be} a string, found {shown(value)}")
    if any("\ud800" <= character <= "\udfff" for character in value):  # lone surrogates have no UTF-8
        raise InvalidRequest(name, f"{must_be} valid Unicode, found {shown(value)}")


# -- results ----------------------------------------------------------------------------------------------------------


def write_delta(output: RequestOutput) -> pb.TokenDelta:
    return pb.TokenDelta(
        token_ids=output.token_ids, exit_depths=output.exit_depths, logprobs=output.logprobs, text=output.text
    )


def read_delta(request_id: str, delta: pb.TokenDelta) -> RequestOutput:
    return RequestOutput(
        request_id=request_id,
        token_ids=tuple(delta.token_ids),
        exit_depths=tuple(delta.exit_depths),
        logprobs=tuple(delta.logprobs),
        text=delta.text if delta.HasField("text") else None,
    )


def write_finished(output: RequestOutput) -> pb.GenerateFinished:
    """The closing message of a request that finished (`output.finish_reason` is set)."""
    if output.finish_reason is None:
        raise ValueError(f"{output.request_id} has not finished")
    finished = pb.GenerateFinished(reason=_REASONS[output.finish_reason])
    if isinstance(output.stop_match, str):
        finished.stop_string = output.stop_match
    elif output.stop_match is not None:
        finished.stop_token_id = output.stop_match
    if output.usage is not None:
        finished.usage.CopyFrom(pb.Usage(**dataclasses.asdict(output.usage)))
    return finished


def read_finished(request_id: str, finished: pb.GenerateFinished, *, has_text: bool) -> RequestOutput:
    """The last RequestOutput of a stream; `has_text` says whether its deltas had text."""
    match: int | str | None = None
    if kind := finished.WhichOneof("stop_match"):
        match = getattr(finished, kind)
    usage = finished.usage
    return RequestOutput(
        request_id=request_id,
        token_ids=(),
        exit_depths=(),
        logprobs=(),
        text="" if has_text else None,
        finish_reason=_REASONS_BACK[finished.reason],
        stop_match=match,
        usage=Usage(
            prompt_tokens=usage.prompt_tokens,
            completion_tokens=usage.completion_tokens,
            prompt_loops=usage.prompt_loops,
            decode_loops=usage.decode_loops,
            full_depth_loops=usage.full_depth_loops,
        ),
    )
