"""The models this engine serves: one line each."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from rlt_jax.errors import CheckpointError
from rlt_jax.models.huginn import Huginn
from rlt_jax.models.nanbeige import Nanbeige
from rlt_jax.models.ouro import Ouro
from rlt_jax.models.spec import LoopedModel

MODELS: dict[str, type[LoopedModel]] = {
    "huginn_raven": Huginn,
    "nanbeige": Nanbeige,
    "ouro": Ouro,
}


def model_from_config(config: Mapping[str, Any]) -> LoopedModel:
    """The model that a config.json describes.

    Raises:
        CheckpointError: unknown model_type (with the list of supported ones), a field the model refuses, or a family
            whose config.json does not say everything (`model_from_checkpoint`).
    """
    return _family(config).from_config(config)


def model_from_checkpoint(config: Mapping[str, Any], tensor_names: Collection[str]) -> LoopedModel:
    """The model of a checkpoint: what its config.json leaves open, the names of its tensors decide.

    Raises:
        CheckpointError: unknown model_type, or a field the model refuses.
    """
    return _family(config).from_checkpoint(config, tensor_names)


def _family(config: Mapping[str, Any]) -> type[LoopedModel]:
    model_type = config.get("model_type")
    if model_type not in MODELS:
        raise CheckpointError(
            f"config.json: field 'model_type' is {model_type!r}; supported: {', '.join(sorted(MODELS))}"
        )
    return MODELS[model_type]
