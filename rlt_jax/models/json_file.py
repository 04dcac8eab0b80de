"""Reading the JSON files of a model directory: one object each, no repeated keys, errors that name the file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NoReturn

from rlt_jax.errors import CheckpointError


def parse_object(text: str | bytes, where: str) -> dict[str, Any]:
    """Parse a JSON object.

    Args:
        text: the JSON; bytes must be UTF-8.
        where: what to call it in errors.

    Raises:
        CheckpointError: not JSON, not an object, a key given twice, or NaN or Infinity (which JSON has not).
    """

    def no_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        result = dict(pairs)
        if len(result) != len(pairs):
            keys = [k for k, _ in pairs]
            twice = next(k for k in keys if keys.count(k) > 1)
            raise CheckpointError(f"{where}: key {twice!r} is given twice")
        return result

    def no_constant(name: str) -> NoReturn:
        raise ValueError(f"{name} is not a JSON number")

    try:
        if isinstance(text, bytes):
            text = text.decode("utf-8")
        value = json.loads(text, object_pairs_hook=no_repeats, parse_constant=no_constant)
    except (ValueError, RecursionError) as error:  # JSONDecodeError and UnicodeDecodeError are ValueErrors
        raise CheckpointError(f"{where}: not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{where}: expected a JSON object, found {type(value).__name__}")
    return value


def read_text(path: Path) -> str:
    """The file's text.  Raises CheckpointError if it cannot be read or is not UTF-8."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path}: cannot be read: {error}") from error


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file.  Raises CheckpointError naming the file."""
    return parse_object(read_text(path), str(path))


def read_optional_object(path: Path) -> dict[str, Any] | None:
    """`read_object`, or None where there is no such file."""
    return read_object(path) if path.exists() else None
