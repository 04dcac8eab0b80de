"""Loading model directories.

PROTECTS: a wrong checkpoint is refused with the file, tensor or field at fault (never loaded silently, never a raw
KeyError), and loading needs no second copy of the weights.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

from rlt_jax.errors import CheckpointError, InvalidConfig
from rlt_jax.models.checkpoint import load_checkpoint, read_params, save_checkpoint
from rlt_jax.models.generation_config import GenerationDefaults, read_generation_config
from rlt_jax.models.json_file import parse_object
from rlt_jax.models.ouro import Ouro
from rlt_jax.models.registry import model_from_config
from rlt_jax.models.spec import TensorSource
from rlt_jax.models.tensor_files import TensorFile, TensorStore
from tests.models.checkpoint_files import (
    FIXTURE,
    VOCAB,
    edit_header,
    edit_json,
    edit_tensors,
    refused,
    tokenizer_json,
    write_json,
)
from tests.oracle.checkpoint import read_tensors

# ---------------------------------------------------------------- what loads


@pytest.mark.parametrize("layout", ["directory", "sharded"])
def test_values_against_an_independent_reader(layout: str, request: pytest.FixtureRequest) -> None:
    path = request.getfixturevalue(layout)
    tensors = read_tensors(path)
    loaded = load_checkpoint(path, dtype="float32")
    used = 0
    sources, leaves = jax.tree.leaves(loaded.model.sources()), jax.tree.leaves(loaded.params)
    for source, leaf in zip(sources, leaves, strict=True):
        expected = np.concatenate([tensors[n] for n in source.names])
        assert leaf.dtype == jnp.float32
        np.testing.assert_array_equal(leaf, expected)
        used += len(source.names)
    assert used == len(tensors)
    assert loaded.parameter_count == sum(t.size for t in tensors.values())
    assert loaded.parameter_bytes == 4 * loaded.parameter_count
    assert (loaded.name, loaded.path, loaded.dtype) == ("model", path, "float32")
    assert loaded.tokenizer is None
    assert loaded.chat_template is None
    assert loaded.eos_token_ids == (0,)
    assert loaded.generation == GenerationDefaults(temperature=0.0, top_k=0, top_p=1.0, min_p=0.0)


def test_bfloat16_is_the_default_and_rounds_to_nearest_even(directory: Path) -> None:
    loaded = load_checkpoint(str(directory))
    raw = read_tensors(directory)["lm_head.weight"]
    assert loaded.params.head.dtype == jnp.bfloat16
    np.testing.assert_array_equal(loaded.params.head, raw.astype(ml_dtypes.bfloat16))
    assert loaded.parameter_bytes == 2 * loaded.parameter_count


@pytest.mark.parametrize("stored", [np.float16, ml_dtypes.bfloat16, np.float32])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_every_stored_dtype_loads_as_every_served_one(directory: Path, stored: Any, dtype: str) -> None:
    edit_tensors(directory / "model.safetensors", lambda t: t.update({n: a.astype(stored) for n, a in t.items()}))
    loaded = load_checkpoint(directory, dtype=dtype)
    expected = load_file(directory / "model.safetensors")["model.norm.weight"].astype(jnp.dtype(dtype))
    np.testing.assert_array_equal(loaded.params.loop_norm, expected)


def test_device_is_where_the_parameters_land(directory: Path) -> None:
    device = jax.devices()[-1]
    loaded = load_checkpoint(directory, device=device)
    assert all(leaf.devices() == {device} for leaf in jax.tree.leaves(loaded.params))


def test_parameters_do_not_change_with_the_file(directory: Path) -> None:
    """They must be copies: a trainer may rewrite the directory that a server was started from."""
    loaded = load_checkpoint(directory, dtype="float32")
    before = np.array(loaded.params.embed)
    raw = (directory / "model.safetensors").read_bytes()
    with (directory / "model.safetensors").open("r+b") as file:  # in place: the mapped pages themselves change
        file.write(raw[:-50_000] + bytes(50_000))
    np.testing.assert_array_equal(loaded.params.embed, before)


def test_loading_needs_no_transfer_guard_exception(directory: Path) -> None:
    with jax.transfer_guard("disallow"):
        load_checkpoint(directory)


def test_progress_bar_goes_to_stderr(directory: Path, capfd: pytest.CaptureFixture[str]) -> None:
    load_checkpoint(directory, progress=True)
    out, err = capfd.readouterr()
    assert out == ""
    assert "loading model" in err
    load_checkpoint(directory)
    assert capfd.readouterr() == ("", "")


def test_the_log_has_a_line_before_and_after_for_those_without_a_terminal(
    directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO", "rlt_jax"):
        load_checkpoint(directory)
    before, after = (record.getMessage() for record in caplog.records if record.name == "rlt_jax.models.checkpoint")
    assert before.startswith("loading model: 0.00 GB as bfloat16")
    assert after.startswith("loaded model in ")


# Shapes as published for the two released sizes.
def published_shapes(layers: int) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (49152, 2048),
        "lm_head.weight": (49152, 2048),
        "model.norm.weight": (2048,),
        "model.early_exit_gate.weight": (1, 2048),
        "model.early_exit_gate.bias": (1,),
    }
    for i in range(layers):
        at = f"model.layers.{i}."
        shapes |= {f"{at}self_attn.{p}_proj.weight": (2048, 2048) for p in "qkvo"}
        shapes |= {f"{at}mlp.{p}_proj.weight": (5632, 2048) for p in ("gate", "up")}
        shapes[f"{at}mlp.down_proj.weight"] = (2048, 5632)
        for norm in ("input_layernorm", "post_attention_layernorm"):
            shapes |= {f"{at}{norm}{suffix}.weight": (2048,) for suffix in ("", "_2")}
    return shapes


@pytest.mark.parametrize(("layers", "tensors", "parameters"), [(24, 269, 1_434_652_673), (48, 533, 2_667_974_657)])
def test_full_size_headers_are_what_the_model_reads(tmp_path: Path, layers: int, tensors: int, parameters: int) -> None:
    """A sparse file with the real header: names, shapes and count of the released checkpoints, without their data."""
    shapes = published_shapes(layers)
    header, at = {}, 0
    for name, shape in shapes.items():
        size = 2 * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header).encode()
    path = tmp_path / "model.safetensors"
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + at)
    config = json.loads((FIXTURE / "config.json").read_text()) | {
        "hidden_size": 2048,
        "num_hidden_layers": layers,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "head_dim": 128,
        "intermediate_size": 5632,
        "vocab_size": 49152,
        "max_position_embeddings": 65536,
        "layer_types": ["full_attention"] * layers,
    }
    sources = jax.tree.leaves(Ouro.from_config(config).sources())
    store = TensorStore.open(tmp_path)
    store.check({n: s for source in sources for n, s in zip(source.names, source.shapes, strict=True)})
    assert len(store.entries) == tensors
    assert sum(math.prod(source.shape) for source in sources) == parameters


# ---------------------------------------------------------------- tensors that are wrong


def test_missing_tensors(directory: Path) -> None:
    def drop(tensors: dict[str, np.ndarray]) -> None:
        for name in [n for n in tensors if "mlp" in n]:
            del tensors[name]

    edit_tensors(directory / "model.safetensors", drop)
    refused(directory, "model.safetensors", "9 of 38 tensors are missing", "mlp.gate_proj.weight", "(5 more)")


def test_unexpected_tensors(directory: Path) -> None:
    extra = {f"model.layers.9.extra_{i}": np.zeros(2, np.float32) for i in range(6)}
    edit_tensors(directory / "model.safetensors", lambda t: t.update(extra))
    refused(directory, "model.safetensors", "6 tensor(s) that the model does not have", "extra_0", "(2 more)")


@pytest.mark.parametrize("shape", [(64, 256), (255, 64), (256, 64, 1), ()])
def test_wrong_shape(directory: Path, shape: tuple[int, ...]) -> None:
    edit_tensors(directory / "model.safetensors", lambda t: t.update({"lm_head.weight": np.zeros(shape, np.float32)}))
    refused(directory, "'lm_head.weight' must have shape [256, 64]", f"found {list(shape)}")


@pytest.mark.parametrize("dtype", [np.float64, np.int8, np.int32, np.bool_])
def test_wrong_dtype(directory: Path, dtype: Any) -> None:
    edit_tensors(
        directory / "model.safetensors", lambda t: t.update({"model.norm.weight": t["model.norm.weight"].astype(dtype)})
    )
    refused(directory, "tensor 'model.norm.weight': dtype must be one of F32, F16, BF16")


# ---------------------------------------------------------------- files that are wrong


@pytest.mark.parametrize(
    ("keep", "says"),
    [
        (0, "expected an 8-byte header length, found 0 bytes"),
        (5, "expected an 8-byte header length, found 5 bytes"),
        (8, "truncated: the header needs"),
        (1000, "truncated: the header needs"),
        (-1, "the file has"),
        (-100_000, "the file has"),
    ],
)
def test_truncated_file(directory: Path, keep: int, says: str) -> None:
    path = directory / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    refused(directory, "model.safetensors: truncated", says)


def test_header_length_that_cannot_be(directory: Path) -> None:
    path = directory / "model.safetensors"
    raw = path.read_bytes()
    path.write_bytes((2**63).to_bytes(8, "little") + raw[8:])
    refused(directory, f"header length {2**63} exceeds 100000000")


@pytest.mark.parametrize(
    ("header", "says"),
    [
        (b"{not json", "header: not valid JSON"),
        (b"\xff\xfe\x00", "header: not valid JSON"),
        (b"[" * 100_000, "header: not valid JSON"),
        (b"[1]", "expected a JSON object, found list"),
        (b'{"a": 1, "a": 2}', "key 'a' is given twice"),
        (b'{"a": NaN}', "NaN is not a JSON number"),
        (b'{"__metadata__": {"a": 1}}', "'__metadata__' must map strings to strings"),
        (b'{"__metadata__": []}', "'__metadata__' must map strings to strings"),
        (b'{"a": 3}', "tensor 'a': header entry must have dtype, shape and data_offsets"),
        (b'{"a": {"dtype": "F32", "shape": [1]}}', "tensor 'a': header entry must have"),
        (b'{"a": {"dtype": [], "shape": [1], "data_offsets": [0, 4]}}', "tensor 'a': dtype must be one of"),
        (b'{"a": {"dtype": "F32", "shape": 1, "data_offsets": [0, 4]}}', "tensor 'a': shape must be a list"),
        (b'{"a": {"dtype": "F32", "shape": [true], "data_offsets": [0, 4]}}', "tensor 'a': shape must be a list"),
        (b'{"a": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}}', "tensor 'a': shape must be a list"),
        (b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": [0]}}', "tensor 'a': data_offsets must be two"),
        (b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": [0.0, 4]}}', "tensor 'a': data_offsets must be two"),
        (b'{"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}', "needs 8 bytes, data_offsets [0, 4] span 4"),
        (
            b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": [4, 0]}}',
            "needs 4 bytes, data_offsets [4, 0] span -4",
        ),
    ],
)
def test_corrupt_header(directory: Path, header: bytes, says: str) -> None:
    (directory / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))
    refused(directory, "model.safetensors", says)


def test_overlap_gap_and_surplus(directory: Path) -> None:
    path = directory / "model.safetensors"
    original = path.read_bytes()

    def shift(by: int) -> Callable[[dict[str, Any]], None]:
        def change(header: dict[str, Any]) -> None:
            begin, end = header["model.norm.weight"]["data_offsets"]
            header["model.norm.weight"]["data_offsets"] = [begin + by, end + by]

        return change

    edit_header(path, shift(-4))
    refused(directory, "'model.norm.weight' overlap by 4 bytes")
    path.write_bytes(original + b"surplus")
    refused(directory, "7 bytes at the end belong to no tensor")
    path.write_bytes(original)
    edit_header(path, lambda header: {n: e for n, e in header.items() if n != "lm_head.weight"})
    refused(directory, "belong to no tensor")


def test_duplicate_tensor_within_one_file(directory: Path) -> None:
    path = directory / "model.safetensors"
    raw = path.read_bytes()
    size = int.from_bytes(raw[:8], "little")
    header = raw[8 : 8 + size].replace(b'"model.layers.1.', b'"model.layers.0.')
    path.write_bytes(raw[:8] + header + raw[8 + size :])
    refused(directory, "model.safetensors: header: key 'model.layers.0.", "is given twice")


@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(at=st.integers(0, 3895), value=st.integers(0, 255))
def test_any_flipped_header_byte_loads_or_is_a_checkpoint_error(tmp_path: Path, at: int, value: int) -> None:
    raw = bytearray((FIXTURE / "model.safetensors").read_bytes())
    raw[at] = value
    path = tmp_path / "flipped.safetensors"
    path.write_bytes(raw)
    with contextlib.suppress(CheckpointError):  # any other exception fails the test
        TensorFile(path)


def test_unreadable_paths_are_checkpoint_errors(directory: Path) -> None:
    (directory / "model.safetensors").unlink()
    (directory / "model.safetensors").mkdir()
    refused(directory, "model.safetensors: cannot be read")
    (directory / "model.safetensors").rmdir()
    (directory / "config.json").unlink()
    (directory / "config.json").mkdir()
    refused(directory, "config.json: cannot be read")


# ---------------------------------------------------------------- layouts and the index


def test_no_weights_and_both_layouts(directory: Path, sharded: Path) -> None:
    assert directory == sharded
    shutil.copyfile(FIXTURE / "model.safetensors", directory / "model.safetensors")
    refused(directory, "expected one of model.safetensors and model.safetensors.index.json, found both")
    for file in directory.glob("model*"):
        file.unlink()
    refused(directory, "expected model.safetensors or model.safetensors.index.json, found neither")


def test_missing_shard(sharded: Path) -> None:
    (sharded / "model-00002-of-00003.safetensors").unlink()
    refused(sharded, "index.json: shard model-00002-of-00003.safetensors does not exist")


def test_duplicate_across_shards(sharded: Path) -> None:
    first, second = (sharded / f"model-0000{i}-of-00003.safetensors" for i in (1, 2))
    tensors = load_file(first)
    name = next(iter(tensors))
    edit_tensors(second, lambda t: t.update({name: tensors[name]}))
    refused(sharded, f"tensor '{name}' is in two shards: {first.name}, {second.name}")


def test_index_that_disagrees_with_the_shards(sharded: Path) -> None:
    path = sharded / "model.safetensors.index.json"
    original = json.loads(path.read_text())["weight_map"]
    name, shard = next(iter(original.items()))
    other = next(s for s in original.values() if s != shard)
    edit_json(path, weight_map=original | {name: other})
    refused(sharded, f"index.json: tensor '{name}' must be in {other}, found in {shard}")
    edit_json(path, weight_map=original | {"no.such.tensor": shard})
    refused(sharded, f"index.json: tensor 'no.such.tensor' must be in {shard}, found in no shard")
    edit_json(path, weight_map={n: s for n, s in original.items() if n != name})
    refused(sharded, f"index.json: 1 tensor(s) in the shards are not in 'weight_map': {name}")


@pytest.mark.parametrize("shard", ["../model.safetensors", "/etc/passwd", "a/b.safetensors", "model.bin", "", 3, None])
def test_index_that_points_elsewhere(sharded: Path, shard: Any) -> None:
    edit_json(sharded / "model.safetensors.index.json", weight_map={"lm_head.weight": shard})
    refused(sharded, "tensor 'lm_head.weight' must name a .safetensors file of the same directory", repr(shard))


@pytest.mark.parametrize("weight_map", [None, {}, [], "x"])
def test_index_without_a_map(sharded: Path, weight_map: Any) -> None:
    edit_json(sharded / "model.safetensors.index.json", weight_map=weight_map)
    refused(sharded, "index.json: field 'weight_map' must be a non-empty object")


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff", b'{"weight_map": {}, "weight_map": {}}'])
def test_corrupt_json_anywhere(sharded: Path, content: bytes) -> None:
    for name in ("model.safetensors.index.json", "tokenizer_config.json", "generation_config.json", "config.json"):
        path = sharded / name
        original = path.read_bytes() if path.exists() else None
        path.write_bytes(content)
        refused(sharded, name)
        path.write_bytes(original) if original is not None else path.unlink()
    load_checkpoint(sharded)


# ---------------------------------------------------------------- config.json at directory level


def test_missing_config(directory: Path) -> None:
    (directory / "config.json").unlink()
    refused(directory, "config.json: missing")


@pytest.mark.parametrize("model_type", [None, 3, ["ouro"], {}])
def test_model_type_of_a_wrong_kind(directory: Path, model_type: Any) -> None:
    edit_json(directory / "config.json", model_type=model_type)
    refused(directory, "config.json: field 'model_type' must be a string")


def test_config_errors_name_the_directory(directory: Path) -> None:
    edit_json(directory / "config.json", model_type="llama")
    refused(directory, str(directory), "'model_type' is 'llama'; supported:", "ouro")
    edit_json(directory / "config.json", model_type="ouro", moe_experts=8)
    refused(directory, str(directory), "unknown field(s) moe_experts")


def test_dtype_that_is_not_served(directory: Path) -> None:
    with pytest.raises(InvalidConfig, match="dtype must be one of bfloat16, float32, found 'float16'"):
        load_checkpoint(directory, dtype="float16")


# ---------------------------------------------------------------- tokenizer and EOS


def test_eos_is_the_union_of_three_files(directory: Path) -> None:
    """The released models disagree: config.json says end of text, the tokenizer end of turn; both must stop."""
    (directory / "tokenizer.json").write_text(tokenizer_json())
    write_json(directory / "tokenizer_config.json", {"eos_token": "<|im_end|>", "chat_template": "{{ eos_token }}"})
    write_json(directory / "generation_config.json", {"eos_token_id": [7, 0]})
    loaded = load_checkpoint(directory)
    assert loaded.eos_token_ids == (0, 7, 1)
    assert loaded.tokenizer is not None
    assert loaded.tokenizer.decode(loaded.tokenizer.encode("sort: 3")) == "sort: 3"
    assert loaded.chat_template is not None
    assert loaded.chat_template.render([{"role": "user", "content": "x"}]) == "<|im_end|>"
    write_json(directory / "tokenizer_config.json", {"eos_token": {"content": "<|endoftext|>", "special": True}})
    assert load_checkpoint(directory).eos_token_ids == (0, 7)


def test_no_eos_at_all_is_allowed(directory: Path) -> None:
    edit_json(directory / "config.json", eos_token_id=None)
    assert load_checkpoint(directory).eos_token_ids == ()


def test_eos_errors(directory: Path) -> None:
    edit_json(directory / "config.json", eos_token_id=[0, VOCAB])
    refused(directory, "config.json: field 'eos_token_id' must be below vocab_size=256", "found 256")
    edit_json(directory / "config.json", eos_token_id=0)
    write_json(directory / "generation_config.json", {"eos_token_id": 300})
    refused(directory, "generation_config.json: field 'eos_token_id' must be below vocab_size=256", "found 300")
    write_json(directory / "generation_config.json", {"eos_token_id": -1})
    refused(directory, "generation_config.json: field 'eos_token_id' must be a token id", "-1")
    (directory / "generation_config.json").unlink()
    (directory / "tokenizer.json").write_text(tokenizer_json())
    write_json(directory / "tokenizer_config.json", {"eos_token": "<|gone|>"})
    refused(directory, "tokenizer_config.json: field 'eos_token' is '<|gone|>', which tokenizer.json does not have")
    write_json(directory / "tokenizer_config.json", {"eos_token": 2})
    refused(directory, "tokenizer_config.json: field 'eos_token' must be a string")


def test_tokenizer_that_does_not_fit_or_parse(directory: Path) -> None:
    path = directory / "tokenizer.json"
    too_many = tuple(f"<|extra_{i}|>" for i in range(VOCAB))
    path.write_text(tokenizer_json(2 * VOCAB, too_many))
    message = refused(directory, "tokenizer.json: largest token id must be below vocab_size=256 of config.json")
    assert int(message.rsplit(" ", 1)[1]) >= VOCAB
    path.write_text("{}")
    refused(directory, "tokenizer.json")
    (directory / "chat_template.jinja").write_text("{% if %}")
    path.unlink()
    refused(directory, "chat_template.jinja: chat template does not compile")


# ---------------------------------------------------------------- generation_config.json


def test_generation_defaults_count_only_with_do_sample() -> None:
    fields = {"temperature": 0.7, "top_k": 20, "top_p": 0.9, "min_p": 0.05}
    expected = GenerationDefaults(temperature=0.7, top_k=20, top_p=0.9, min_p=0.05)
    assert read_generation_config({"do_sample": True, **fields}) == (expected, ())
    assert read_generation_config({"do_sample": False, **fields}) == (GenerationDefaults(), ())
    assert read_generation_config(fields) == (GenerationDefaults(), ())
    assert read_generation_config(None) == (GenerationDefaults(), ())
    assert read_generation_config({"do_sample": True, "top_k": None})[0] == GenerationDefaults(temperature=1.0)
    assert read_generation_config({"temperature": None, "eos_token_id": [2, 0, 2]}) == (GenerationDefaults(), (2, 0))


def test_generation_fields_that_change_nothing_are_accepted() -> None:
    config = {"transformers_version": "4.55.0", "max_new_tokens": 9, "repetition_penalty": 1.0, "num_beams": 1}
    assert read_generation_config({**config, "suppress_tokens": None, "bos_token_id": 0}) == (GenerationDefaults(), ())


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"do_sample": 1}, "field 'do_sample' must be true or false, found 1"),
        ({"temperature": -0.1}, "field 'temperature' must be a finite number >= 0, found -0.1"),
        ({"temperature": 10**400}, "field 'temperature' must be a finite number"),
        ({"temperature": True}, "field 'temperature' must be"),
        ({"temperature": "1"}, "field 'temperature' must be"),
        ({"top_k": -1}, "field 'top_k' must be an integer >= 0"),
        ({"top_k": 1.5}, "field 'top_k' must be"),
        ({"top_p": 0}, r"field 'top_p' must be a number in \(0, 1\], found 0"),
        ({"top_p": 1.1}, "field 'top_p' must be"),
        ({"min_p": 2}, r"field 'min_p' must be a number in \[0, 1\], found 2"),
        ({"repetition_penalty": 1.1}, "field 'repetition_penalty' is 1.1, which rlt_jax does not support; expected 1"),
        ({"num_beams": True}, "field 'num_beams' is True"),
        ({"num_beams": 4}, "field 'num_beams' is 4"),
        ({"forced_eos_token_id": 2}, "field 'forced_eos_token_id' is 2"),
        ({"eos_token_id": "2"}, "field 'eos_token_id' must be a token id, a list of token ids, or null, found '2'"),
        ({"temprature": 1}, r"unknown field\(s\) temprature"),
    ],
)
def test_generation_config_errors(config: dict[str, Any], says: str) -> None:
    with pytest.raises(CheckpointError, match=says) as caught:
        read_generation_config(config, "here/generation_config.json")
    assert str(caught.value).startswith("here/generation_config.json")


def test_generation_config_reaches_the_checkpoint(directory: Path) -> None:
    write_json(directory / "generation_config.json", {"do_sample": True, "top_p": 0.7})
    assert load_checkpoint(directory).generation == GenerationDefaults(temperature=1.0, top_p=0.7)
    write_json(directory / "generation_config.json", {"do_sample": True, "top_p": 7})
    refused(directory, str(directory / "generation_config.json"), "'top_p'")


# ---------------------------------------------------------------- memory

MEMORY_PROBE = """
import json, sys
import jax, numpy as np
from pathlib import Path
from rlt_jax.models.checkpoint import _NUMPY_DTYPES, _aligned_empty, load_checkpoint, read_params
from rlt_jax.models.registry import model_from_config
from rlt_jax.models.tensor_files import TensorStore

def anonymous():
    line = next(l for l in open("/proc/self/status") if l.startswith("RssAnon"))
    return int(line.split()[1]) * 1024

path, dtype = Path(sys.argv[1]), sys.argv[2]
jax.device_put(np.ones(4, np.float32)).block_until_ready()
model = model_from_config(json.loads((path / "config.json").read_text()))
before = peak = anonymous()

# Placing is the moment of most memory: the buffer is full and the device has not taken it yet.  A device with memory
# of its own takes nothing from the host, so this is what loading costs there.
def place(host):
    global peak
    peak = max(peak, anonymous())

read_params(TensorStore.open(path), model.sources(), _NUMPY_DTYPES[dtype], place)
on_device = peak - before

# On a CPU the parameters themselves are host memory: what is held at the end, and nothing beyond one more parameter.
before = anonymous()
loaded = load_checkpoint(path, dtype=dtype)
held = anonymous() - before
print(json.dumps({"on_device": on_device, "held": held, "parameters": loaded.parameter_bytes}))
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="measures RssAnon, which only Linux has")
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_anonymous_memory_of_loading(tmp_path: Path, dtype: str) -> None:
    """At most 0.3 of the checkpoint's bytes above the process before, for a checkpoint with the real proportions.

    Ouro-1.4B at a quarter of its width: 24 layers, and an embedding and a head of 7 % each.
    """
    config = json.loads((FIXTURE / "config.json").read_text()) | {
        "hidden_size": 512,
        "num_hidden_layers": 24,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "intermediate_size": 1408,
        "vocab_size": 12288,
        "layer_types": None,
    }
    model = model_from_config(config)
    zeros = jax.tree.map(lambda s: np.ones(s.shape, ml_dtypes.bfloat16), model.sources())
    save_checkpoint(tmp_path, model, zeros, tokenizer_json=None, config=config)
    size = (tmp_path / "model.safetensors").stat().st_size
    assert size > 170_000_000
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    run = subprocess.run(
        [sys.executable, "-c", MEMORY_PROBE, str(tmp_path), dtype],
        capture_output=True,
        text=True,
        timeout=120,
        env=environment,
        cwd=Path(__file__).parent.parent.parent,
    )
    assert run.returncode == 0, run.stderr
    measured = json.loads(run.stdout.splitlines()[-1])
    largest = 12288 * 512 * jnp.dtype(dtype).itemsize
    assert measured["on_device"] >= largest // 2, "the probe saw nothing: it does not measure what it should"
    assert measured["on_device"] <= 0.3 * size, measured
    assert measured["held"] >= 0.9 * measured["parameters"], measured
    assert measured["held"] <= measured["parameters"] + 0.3 * size, measured


# ---------------------------------------------------------------- small parts


def test_joined_parts_keep_their_order(tmp_path: Path) -> None:
    parts = {n: np.full((rows, 3), rows, np.float32) for n, rows in (("q", 2), ("k", 1), ("v", 4))}
    save_file(parts, tmp_path / "model.safetensors")
    source = TensorSource(("v", "q", "k"), ((4, 3), (2, 3), (1, 3)))
    placed = read_params(TensorStore.open(tmp_path), (source,), np.dtype(np.float32), lambda array: array)[0]
    np.testing.assert_array_equal(placed[:, 0], [4, 4, 4, 4, 2, 2, 1])
    assert placed.ctypes.data % 64 == 0


def test_unaligned_data_loads(tmp_path: Path) -> None:
    """The format does not promise alignment: a header of odd length shifts everything after it."""
    header = json.dumps({"a": {"dtype": "F32", "shape": [3], "data_offsets": [0, 12]}}).encode()
    header += b" " * (1 - len(header) % 2)
    values = np.array([1.5, -2, 3e-5], np.float32)
    path = tmp_path / "model.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header + values.tobytes())
    np.testing.assert_array_equal(TensorFile(path).view("a"), values)


def test_json_objects_only() -> None:
    assert parse_object(b'{"a": {"b": [1]}}', "x") == {"a": {"b": [1]}}
    with pytest.raises(CheckpointError, match=r"^here: key 'b' is given twice"):
        parse_object('{"a": {"b": 1, "b": 1}}', "here")
    with pytest.raises(CheckpointError, match="not valid JSON"):
        parse_object('{"a": ' + "9" * 5000 + "}", "x")
