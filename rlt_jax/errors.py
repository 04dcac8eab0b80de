"""Errors that users see.  Each names the field, the value and the limit, so that the request can be fixed unread."""

from __future__ import annotations


def shown(value: object) -> str:
    """`value` as a message shows it: short, and for integers that Python refuses to print (over 4,300 digits) too."""
    if isinstance(value, int) and value.bit_length() > 128:
        return f"an integer of {value.bit_length()} bits"
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:160]}... ({len(text)} characters)"


class RltError(Exception):
    """Base of every error this package raises on purpose."""


class InvalidRequest(RltError, ValueError):
    """A request that can never run.  Raised before it enters any queue; nothing has changed.

    Attributes:
        field: name of the offending field, as the user wrote it (``max_tokens``, ``prompt_token_ids``).
        description: what was found and what is allowed.
    """

    def __init__(self, field: str, description: str) -> None:
        super().__init__(f"{field}: {description}")
        self.field = field
        self.description = description


class InvalidConfig(RltError, ValueError):
    """A server or engine setting that cannot work.  The message names the setting, the value and the limit."""


class CheckpointError(RltError):
    """A model directory that cannot be loaded.  The message names file, tensor or field, expected and found."""


class QueueFull(RltError):
    """The waiting queue is at its limit; try again later."""


class EngineDead(RltError):
    """The device failed and did not recover; the process must be restarted."""


class DeviceFault(RltError):
    """A program of a round could not be started: the state that it was given can no longer be trusted."""


class CorruptState(RltError):
    """An internal invariant does not hold (a page leaked, a slot was bound twice).  Always a bug of ours."""
