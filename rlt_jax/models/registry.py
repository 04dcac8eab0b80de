"""The models this engine serves: one line each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlt_jax.errors import CheckpointError
from rlt_jax.models.nanbeige import Nanbeige
from rlt_jax.models.ouro import Ouro
from rlt_jax.models.spec import LoopedModel

MODELS: dict[str, type[LoopedModel]] = {
    "nanbeige": Nanbeige,
    "ouro": Ouro,
}


def model_from_config(config: Mapping[str, Any]) -> LoopedModel:
    """The model that a config.json describes.

    Raises:
        CheckpointError: unknown model_type (with the list of supported ones), or a field the model refuses.
    """
    model_type = config.get("model_type")
    if model_type not in MODELS:
        raise CheckpointError(
            f"config.json: field 'model_type' is {model_type!r}; supported: {', '.join(sorted(MODELS))}"
        )
    return MODELS[model_type].from_config(config)
