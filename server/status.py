"""Which google.rpc status each error of a request becomes: one table, `of`."""

from __future__ import annotations

import grpc
from google.protobuf import any_pb2, duration_pb2
from google.protobuf.message import Message
from google.rpc import code_pb2, error_details_pb2, status_pb2
from grpc_status import rpc_status

from rlt.v1 import generation_service_pb2 as pb
from rlt_jax.client import wire
from rlt_jax.errors import InvalidRequest, QueueFull, RltError

RETRY_SECONDS = 1  # what RetryInfo suggests
MAX_MESSAGE_BYTES = 1000  # a status travels in the trailers, twice and encoded, and peers refuse more than 8 KiB there


class DuplicateRequest(RltError):
    """A live request has this id."""

    def __init__(self, request_id: str) -> None:
        super().__init__(f"a live request has the id {request_id!r}; an id is free again when its stream has ended")
        self.request_id = request_id


class SlowReader(RltError):
    """A stream that was not read while its tokens piled up."""

    def __init__(self, buffered_tokens: int, limit_tokens: int) -> None:
        super().__init__(
            f"the stream was read too slowly: {buffered_tokens} tokens were waiting, the limit is {limit_tokens}"
        )


class RequestFailed(RltError):
    """A request that the engine could not finish."""


class Loading(RltError):
    """The model is not ready yet."""


class ShuttingDown(RltError):
    """The server ends, by a signal or because its engine died."""


def of(error: RltError, request: pb.GenerateRequest | None = None) -> grpc.Status:
    """The status that answers `error`; `request` gives an invalid field its path."""
    match error:
        case InvalidRequest():
            field = wire.field_path(error.field, request) if request is not None else error.field
            violation = error_details_pb2.BadRequest.FieldViolation(field=field, description=_cut(error.description))
            details = error_details_pb2.BadRequest(field_violations=[violation])
            return _status(code_pb2.INVALID_ARGUMENT, f"{field}: {error.description}", details)
        case DuplicateRequest():
            resource = error_details_pb2.ResourceInfo(
                resource_type="rlt.v1.GenerateRequest", resource_name=error.request_id
            )
            return _status(code_pb2.ALREADY_EXISTS, str(error), resource)
        case QueueFull():
            return _status(code_pb2.RESOURCE_EXHAUSTED, str(error), _retry_info())
        case SlowReader():  # no RetryInfo: the server is not full
            return _status(code_pb2.RESOURCE_EXHAUSTED, str(error))
        case Loading():
            return _status(code_pb2.UNAVAILABLE, str(error), _retry_info())
        case ShuttingDown():
            return _status(code_pb2.UNAVAILABLE, str(error))
        case _:  # RequestFailed, EngineDead
            return _status(code_pb2.INTERNAL, str(error))


def _status(code: int, message: str, *details: Message) -> grpc.Status:
    packed = []
    for detail in details:
        any_message = any_pb2.Any()
        any_message.Pack(detail)
        packed.append(any_message)
    return rpc_status.to_status(status_pb2.Status(code=code, message=_cut(message), details=packed))


def _cut(message: str) -> str:
    """A device error can be many pages long; a status of that size never arrives."""
    data = message.encode(errors="replace")
    if len(data) <= MAX_MESSAGE_BYTES:
        return message
    return f"{data[:MAX_MESSAGE_BYTES].decode(errors='ignore')}... ({len(data)} bytes)"


def _retry_info() -> error_details_pb2.RetryInfo:
    return error_details_pb2.RetryInfo(retry_delay=duration_pb2.Duration(seconds=RETRY_SECONDS))
