"""Strict reading of a Hugging Face config.json: every field is used, declared inert, or refused by name."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

from rlt_jax.errors import CheckpointError

# Fields that any Hugging Face config may carry and that change nothing here.
_INERT_EVERYWHERE = frozenset(
    {
        "_name_or_path",
        "architectures",
        "auto_map",
        "bos_token_id",
        "dtype",
        "model_type",
        "output_attentions",
        "output_hidden_states",
        "pad_token_id",
        "return_dict",
        "torch_dtype",
        "transformers_version",
        "use_cache",
    }
)
_MISSING = object()
_MAX_LAYERS = 1024
_MAX_INT = 2**31 - 1  # every size and id travels as int32 on the device
_MAX_FLOAT = sys.float_info.max  # JSON also has integers that no float can hold


def _short(value: Any) -> str:
    """repr for an error message, cut: a list with one entry per layer says nothing in full."""
    if isinstance(value, list) and len(value) > 4:
        return f"[{value[0]!r:.40}, {value[1]!r:.40}, …] ({len(value)} entries)"
    return f"{value!r:.120}"


def read_token_ids(value: Any, where: str) -> tuple[int, ...]:
    """An id, a list of ids, or None as a tuple without repeats.  `where` names file and field in the error."""
    ids = [] if value is None else value if isinstance(value, list) else [value]
    if any(isinstance(i, bool) or not isinstance(i, int) or not 0 <= i <= _MAX_INT for i in ids):
        raise CheckpointError(f"{where} must be a token id, a list of token ids, or null, found {_short(value)}")
    return tuple(dict.fromkeys(ids))


class ConfigReader:
    """Reads fields one by one and remembers which; `finish` refuses the rest.

    A field that has a default may also be JSON null, which means the default.  Errors are CheckpointError and name the
    field, what was expected and what was found.
    """

    def __init__(self, config: Mapping[str, Any], model_type: str) -> None:
        self._config = config
        self._model_type = model_type
        self._seen = set(_INERT_EVERYWHERE)
        self._prefix = ""  # of a section's fields in messages

    def _get(self, field: str, default: Any = _MISSING) -> Any:
        self._seen.add(field)
        value = self._config.get(field, default)
        if value is _MISSING:
            raise CheckpointError(
                f"config.json: field '{self._prefix}{field}' is missing (model_type '{self._model_type}' needs it)"
            )
        return default if value is None and default is not _MISSING else value

    def _bad(self, field: str, expected: str, found: Any) -> CheckpointError:
        return CheckpointError(f"config.json: field '{self._prefix}{field}' must be {expected}, found {_short(found)}")

    def has(self, field: str) -> bool:
        """Whether a field is there and not null."""
        return self._get(field, None) is not None

    def section(self, field: str) -> ConfigReader:
        """A reader of the fields inside an object; absent and null are an empty one.  It needs its own `finish`."""
        value = self._get(field, {})
        if not isinstance(value, dict):
            raise self._bad(field, "an object", value)
        section = ConfigReader(value, self._model_type)
        section._seen, section._prefix = set(), f"{self._prefix}{field}."
        return section

    def positive_int(self, field: str, default: Any = _MISSING) -> int:
        value = self._get(field, default)
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= _MAX_INT:
            raise self._bad(field, f"an integer in [1, {_MAX_INT}]", value)
        return value

    def layer_count(self, field: str) -> int:
        """A number of layers: bounded, because one entry per layer is made before the files are looked at."""
        value = self.positive_int(field)
        if value > _MAX_LAYERS:
            raise self._bad(field, f"an integer in [1, {_MAX_LAYERS}]", value)
        return value

    def positive_float(self, field: str, default: Any = _MISSING) -> float:
        value = self._get(field, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= _MAX_FLOAT:
            raise self._bad(field, "a finite number > 0", value)
        return float(value)

    def unit_float(self, field: str, default: Any = _MISSING) -> float:
        """A number in [0, 1]."""
        value = self._get(field, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
            raise self._bad(field, "a number in [0, 1]", value)
        return float(value)

    def numbers(self, field: str) -> tuple[float, ...]:
        """A list of finite numbers; absent and null are an empty one."""
        value = self._get(field, [])
        if not isinstance(value, list) or any(
            isinstance(v, bool) or not isinstance(v, int | float) or not abs(v) <= _MAX_FLOAT for v in value
        ):
            raise self._bad(field, "a list of finite numbers", value)
        return tuple(map(float, value))

    def token_ids(self, field: str) -> tuple[int, ...]:
        """An id, a list of ids, or null; the result is a tuple without repeats."""
        return read_token_ids(self._get(field, None), f"config.json: field '{self._prefix}{field}'")

    def only(self, field: str, allowed: Sequence[Any], default: Any) -> Any:
        """A field of which we support certain values alone."""
        value = self._get(field, default)
        if not any(type(value) is type(a) and value == a for a in allowed):
            expected = ", ".join(map(_short, allowed))
            raise self._bad(field, f"one of {expected} (the values rlt_jax supports)", value)
        return value

    def divides(self, small_field: str, small: int, big_field: str, big: int) -> None:
        if big % small:
            raise self._bad(small_field, f"a divisor of {big_field} ({big})", small)

    def above(self, big_field: str, big: float, small_field: str, small: float) -> None:
        if not big > small:
            raise self._bad(big_field, f"above {small_field} ({small})", big)

    def even(self, field: str, value: int) -> None:
        if value % 2:
            raise self._bad(field, "even (rotary pairs)", value)

    def inert(self, *fields: str) -> None:
        """Declare fields that are known and change nothing at inference."""
        self._seen.update(fields)

    def finish(self) -> None:
        unknown = [self._prefix + field for field in sorted(set(self._config) - self._seen)]
        if unknown:
            raise CheckpointError(
                f"config.json: unknown field(s) {', '.join(unknown)} for model_type '{self._model_type}'; "
                "a field that changes the model cannot be ignored silently"
            )
