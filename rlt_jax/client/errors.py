"""What a failed call raises: the errors of the offline API where they fit, ServerError otherwise."""

from __future__ import annotations

import grpc
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from rlt_jax.client.wire import field_name
from rlt_jax.errors import InvalidRequest, QueueFull, RltError


class ServerError(RltError):
    """A call that failed for another reason than its input.

    Attributes:
        code: the gRPC status code.
        retry_after_seconds: when the server suggests to try again; None if it does not.
    """

    def __init__(self, code: grpc.StatusCode, message: str, retry_after_seconds: float | None = None) -> None:
        super().__init__(f"{code.name}: {message}")
        self.code = code
        self.retry_after_seconds = retry_after_seconds


class DeadlineExceeded(ServerError, TimeoutError):
    """The call's own deadline passed; the server has dropped the request."""


class ServerBusy(ServerError, QueueFull):
    """The server's waiting queue is full."""


def error_from_rpc(error: grpc.RpcError) -> RltError:
    """The exception to raise for a failed call."""
    code: grpc.StatusCode = error.code()
    message: str = error.details() or ""
    field, retry_after_seconds = None, None
    status = rpc_status.from_call(error)
    for detail in status.details if status is not None else ():
        if detail.Is(error_details_pb2.BadRequest.DESCRIPTOR):
            bad = error_details_pb2.BadRequest()
            detail.Unpack(bad)
            if bad.field_violations:
                field, message = bad.field_violations[0].field, bad.field_violations[0].description
        elif detail.Is(error_details_pb2.RetryInfo.DESCRIPTOR):
            retry = error_details_pb2.RetryInfo()
            detail.Unpack(retry)
            retry_after_seconds = retry.retry_delay.seconds + retry.retry_delay.nanos / 1e9
    if code is grpc.StatusCode.INVALID_ARGUMENT and field is not None:
        return InvalidRequest(field_name(field), message)
    if code is grpc.StatusCode.ALREADY_EXISTS:
        return InvalidRequest("request_id", message)
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED and retry_after_seconds is not None:
        return ServerBusy(code, message, retry_after_seconds)
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return DeadlineExceeded(code, message)
    return ServerError(code, message, retry_after_seconds)
