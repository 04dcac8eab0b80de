"""config.json, field by field.  PROTECTS: no field is ignored silently; every refusal names field, limit and value."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rlt_jax.errors import CheckpointError
from rlt_jax.models.config_reader import ConfigReader
from rlt_jax.models.registry import MODELS, model_from_config
from rlt_jax.models.spec import ModelSpec

FIXTURE = Path(__file__).parent.parent / "fixtures" / "ouro_tiny"

# The released Ouro-1.4B's fields, those that do nothing at inference included.
OURO_1_4B: dict[str, Any] = {
    "architectures": ["OuroForCausalLM"],
    "attention_dropout": 0.0,
    "auto_map": {"AutoConfig": "configuration_ouro.OuroConfig"},
    "bos_token_id": 0,
    "chunk_size": 2,
    "early_exit_threshold": 1.0,
    "eos_token_id": 0,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "initializer_range": 0.02,
    "intermediate_size": 5632,
    "layer_types": ["full_attention"] * 24,
    "max_position_embeddings": 65536,
    "max_window_layers": 28,
    "model_type": "ouro",
    "num_attention_heads": 16,
    "num_hidden_layers": 24,
    "num_key_value_heads": 16,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000.0,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "total_ut_steps": 4,
    "transformers_version": "4.55.0",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 49152,
}


def without(*fields: str) -> dict[str, Any]:
    return {k: v for k, v in OURO_1_4B.items() if k not in fields}


def refused(config: dict[str, Any], *says: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        model_from_config(config)
    message = str(caught.value)
    assert message.startswith("config.json")
    for words in says:
        assert words in message
    assert len(message) < 600, "a long value must be cut"


def test_released_config() -> None:
    assert model_from_config(OURO_1_4B).spec == ModelSpec(
        model_type="ouro",
        vocab_size=49152,
        hidden_size=2048,
        intermediate_size=5632,
        num_heads=16,
        num_kv_heads=16,
        head_dim=128,
        num_core_layers=24,
        trained_loops=4,
        max_loops=4,
        max_positions=65536,
        norm_eps=1e-6,
        rope_theta=1e6,
        exit_scores=("gate",),
        exit_threshold=1.0,
        eos_token_ids=(0,),
    )


def test_fixture_config() -> None:
    spec = model_from_config(json.loads((FIXTURE / "config.json").read_text())).spec
    assert (spec.num_layers, spec.head_dim, spec.max_loops) == (3, 16, 4)


def test_absent_and_null_mean_the_same_default() -> None:
    defaulted = ("head_dim", "num_key_value_heads", "early_exit_threshold", "layer_types", "use_sliding_window")
    nulls = OURO_1_4B | dict.fromkeys(defaulted)
    assert model_from_config(nulls) == model_from_config(without(*defaulted)) == model_from_config(OURO_1_4B)


def test_models_are_hashable_static_arguments() -> None:
    assert hash(model_from_config(OURO_1_4B)) == hash(model_from_config(dict(OURO_1_4B)))
    assert model_from_config(OURO_1_4B) != model_from_config(OURO_1_4B | {"rope_theta": 1e4})


@pytest.mark.parametrize(
    "field",
    [
        "hidden_size",
        "intermediate_size",
        "max_position_embeddings",
        "num_attention_heads",
        "num_hidden_layers",
        "rms_norm_eps",
        "rope_theta",
        "total_ut_steps",
        "vocab_size",
    ],
)
def test_required_fields(field: str) -> None:
    refused(without(field), f"field '{field}' is missing", "model_type 'ouro'")
    refused(OURO_1_4B | {field: None}, f"field '{field}' must be", "found None")


def test_a_layer_count_beyond_reason_is_refused_before_anything_is_made_of_it() -> None:
    refused(OURO_1_4B | {"num_hidden_layers": 3_000_000}, "field 'num_hidden_layers' must be", "[1, 1024]", "3000000")


@pytest.mark.parametrize("value", [0, -1, True, 2.0, "4", [4], 2**31, 10**30])
@pytest.mark.parametrize("field", ["hidden_size", "num_hidden_layers", "num_key_value_heads", "total_ut_steps"])
def test_sizes_are_positive_integers(field: str, value: Any) -> None:
    refused(OURO_1_4B | {field: value}, f"field '{field}' must be an integer in [1, 2147483647], found {value!r:.40}")


@pytest.mark.parametrize("value", [0, -1e-6, True, "1e-6", float("inf"), float("nan"), 10**400])
@pytest.mark.parametrize("field", ["rms_norm_eps", "rope_theta"])
def test_positive_numbers(field: str, value: Any) -> None:
    refused(OURO_1_4B | {field: value}, f"field '{field}' must be a finite number > 0")


@pytest.mark.parametrize("value", [-0.1, 1.01, float("nan"), True, "0.5"])
def test_threshold_range(value: Any) -> None:
    refused(OURO_1_4B | {"early_exit_threshold": value}, "field 'early_exit_threshold' must be a number in [0, 1]")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("hidden_act", "gelu"),
        ("tie_word_embeddings", True),
        ("tie_word_embeddings", 0),
        ("rope_scaling", {"rope_type": "yarn"}),
        ("use_sliding_window", True),
        ("sliding_window", 4096),
        ("attention_bias", True),
        ("early_exit_step", 2),
        ("layer_types", ["full_attention"] * 23),
        ("layer_types", ["sliding_attention"] * 24),
    ],
)
def test_fields_of_which_only_some_values_are_supported(field: str, value: Any) -> None:
    refused(OURO_1_4B | {field: value}, f"field '{field}' must be one of", "the values rlt_jax supports", "found")


def test_long_lists_are_told_apart_by_their_length() -> None:
    found = ["full_attention"] * 23
    refused(OURO_1_4B | {"layer_types": found}, "…] (24 entries)", "found ['full_attention', 'full_attention', …] (23")


def test_sizes_that_do_not_fit_each_other() -> None:
    refused(
        OURO_1_4B | {"num_key_value_heads": 5},
        "field 'num_key_value_heads' must be a divisor of num_attention_heads (16), found 5",
    )
    refused(OURO_1_4B | {"head_dim": 127}, "field 'head_dim' must be even", "found 127")
    refused(
        without("head_dim") | {"num_attention_heads": 4096}, "field 'head_dim' must be an integer in [1,", "found 0"
    )


@pytest.mark.parametrize(("value", "ids"), [(0, (0,)), ([2, 0, 2], (2, 0)), (None, ()), ([], ())])
def test_eos_forms(value: Any, ids: tuple[int, ...]) -> None:
    assert model_from_config(OURO_1_4B | {"eos_token_id": value}).spec.eos_token_ids == ids


@pytest.mark.parametrize("value", [-1, "0", True, [0, None], 1.0, 2**31])
def test_eos_errors(value: Any) -> None:
    refused(OURO_1_4B | {"eos_token_id": value}, "field 'eos_token_id' must be a token id", repr(value))


def test_unknown_fields_are_all_named() -> None:
    refused(
        OURO_1_4B | {"zeta": 1, "alpha": None},
        "unknown field(s) alpha, zeta for model_type 'ouro'",
        "cannot be ignored silently",
    )


@pytest.mark.parametrize("model_type", [None, "llama", "Ouro"])
def test_unknown_model_type_lists_the_known(model_type: Any) -> None:
    refused(OURO_1_4B | {"model_type": model_type}, f"field 'model_type' is {model_type!r}", *MODELS)


def test_reader_refuses_what_nobody_read() -> None:
    read = ConfigReader({"a": 1, "b": 2, "model_type": "x"}, "x")
    assert read.positive_int("a") == 1
    with pytest.raises(CheckpointError, match=r"unknown field\(s\) b"):
        read.finish()
    read.inert("b")
    read.finish()
