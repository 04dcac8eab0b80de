"""The Huginn family's config.json, field by field, and its files: tied heads, unused tables, blocks known by names.

PROTECTS: that a checkpoint is read as the model it is: the block that its tensors have, one copy of a tied embedding,
the ids its own code stops at; and that what is not built is refused by name.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from rlt_jax.errors import CheckpointError
from rlt_jax.models.checkpoint import load_checkpoint, save_checkpoint
from rlt_jax.models.huginn import Block, Huginn
from rlt_jax.models.layers import Llama3Scaling
from rlt_jax.models.registry import model_from_checkpoint, model_from_config
from rlt_jax.models.spec import ModelSpec
from rlt_jax.models.tensor_files import TensorStore
from tests.models.checkpoint_files import edit_json, edit_tensors, refused, tokenizer_json

FIXTURES = Path(__file__).parent.parent / "fixtures"
HUGINN: dict[str, Any] = json.loads((FIXTURES / "huginn_tiny" / "config.json").read_text())
RETROFIT: dict[str, Any] = json.loads((FIXTURES / "huginn_llama_tiny" / "config.json").read_text())
NORM_3, Q_NORM = "transformer.coda.0.norm_3.weight", "transformer.coda.0.attn.q_norm.weight"

# The released Huginn-0125: the sizes and fields of its config.json.
HUGINN_0125: dict[str, Any] = HUGINN | {
    "auto_map": {"AutoConfig": "raven_config_minimal.RavenConfig"},
    "block_size": 4096,
    "bos_token_id": 65504,
    "effective_expected_depth": 132,
    "eos_token_id": 65505,
    "head_dim": 96,
    "init_values": {
        "embed_scale": 72.6636084983398,
        "embedding": 0.008703882797784892,
        "out_proj": 0.0005356869554443541,
        "std": 0.008703882797784892,
    },
    "intermediate_size": 17920,
    "mean_recurrence": 32,
    "n_embd": 5280,
    "n_heads": 55,
    "num_key_value_heads": 55,
    "pad_token_id": 65509,
    "padded_vocab_size": 65536,
    "torch_dtype": "bfloat16",
    "vocab_size": 65536,
}
# Llama-3.2-1B cut to 4 + 6 + 4 layers, and OLMo-2-0425-1B to the same.
LLAMA_1B: dict[str, Any] = RETROFIT | {
    "block_size": 4096,
    "head_dim": 64,
    "init_values": {"embed_scale": 1.0, "std": 0.013975424859373686, "embedding": 0.014, "out_proj": 0.001},
    "intermediate_size": 8192,
    "max_position_embeddings": 131072,
    "n_embd": 2048,
    "n_heads": 32,
    "n_layers": 14,
    "n_layers_in_coda": 4,
    "n_layers_in_prelude": 4,
    "n_layers_in_recurrent_block": 6,
    "num_key_value_heads": 8,
    "padded_vocab_size": 128256,
    "rope_scaling": RETROFIT["rope_scaling"] | {"factor": 32.0, "original_max_position_embeddings": 8192},
    "vocab_size": 128256,
}
OLMO_1B: dict[str, Any] = {k: v for k, v in LLAMA_1B.items() if k != "rope_scaling"} | {
    "head_dim": 128,
    "n_heads": 16,
    "norm_eps": 1e-6,
    "num_key_value_heads": 16,
    "padded_vocab_size": 100352,
    "vocab_size": 100352,
}


def shapes_of(model: Huginn) -> dict[str, tuple[int, ...]]:
    sources = jax.tree.leaves(model.sources())
    return {name: shape for s in sources for name, shape in zip(s.names, s.shapes, strict=True)}


def published_shapes() -> dict[str, tuple[int, ...]]:
    """Huginn-0125's four shards, as the model's facts list them."""
    shapes: dict[str, tuple[int, ...]] = {
        "transformer.wte.weight": (65536, 5280),
        "lm_head.weight": (65536, 5280),
        "transformer.adapter.weight": (5280, 10560),
        "transformer.ln_f.weight": (5280,),
        "freqs_cis": (1, 4096, 1, 48, 2),
    }
    for block in ("prelude.0", "prelude.1", *(f"core_block.{i}" for i in range(4)), "coda.0", "coda.1"):
        at = f"transformer.{block}."
        shapes |= {f"{at}norm_{i}.weight": (5280,) for i in (1, 2, 3, 4)}
        shapes |= {at + "attn.Wqkv.weight": (15840, 5280), at + "attn.proj.weight": (5280, 5280)}
        shapes |= {at + "attn.qk_bias": (2, 1, 55, 96)}
        shapes |= {at + "mlp.fc.weight": (35840, 5280), at + "mlp.proj.weight": (5280, 17920)}
    return shapes


class TestReleasedModels:
    def test_huginn_0125(self) -> None:
        model = model_from_config(HUGINN_0125)
        assert model == Huginn(
            ModelSpec(
                model_type="huginn_raven",
                vocab_size=65536,
                hidden_size=5280,
                intermediate_size=17920,
                num_heads=55,
                num_kv_heads=55,
                head_dim=96,
                num_prelude_layers=2,
                num_core_layers=4,
                num_coda_layers=2,
                trained_loops=32,
                max_loops=32,
                open_ended=True,
                max_positions=4096,
                norm_eps=1e-6,
                rope_theta=5e4,
                injects=True,
                initial_states=("zeros", "random"),
                initial_state_std=0.008703882797784892 * 72.6636084983398,
                exit_scores=("latent", "kl", "argmax"),
                eos_token_ids=(65505,),
                eos_tokens=("<|begin_text|>", "<|end_text|>", "<|end_turn|>"),
            ),
            block=Block.HUGINN,
            embed_scale=72.6636084983398,
            tied=True,
            rope_scaling=None,
        )
        assert hash(model) == hash(model_from_checkpoint(dict(HUGINN_0125), [NORM_3]))

    def test_huginn_0125_in_full_size_shards(self, tmp_path: Path) -> None:
        """Sparse float32 files with the real headers: every tensor is read or known to be unused."""
        published = published_shapes()
        assert sum(4 * math.prod(s) for s in published.values()) == pytest.approx(15.63e9, rel=1e-3)
        weight_map = {}
        for shard in range(4):
            file = f"model-{shard + 1:05d}-of-00004.safetensors"
            part = dict(list(published.items())[shard::4])
            write_sparse(tmp_path / file, part)
            weight_map |= dict.fromkeys(part, file)
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
        store = TensorStore.open(tmp_path)
        model = model_from_checkpoint(HUGINN_0125, store.entries)
        assert isinstance(model, Huginn)
        store.check(shapes_of(model), model.unused_tensors())
        assert len(store.entries) == len(shapes_of(model)) + 2
        assert sum(math.prod(shape) for shape in shapes_of(model).values()) == 3_564_976_800
        block = [s for name, s in shapes_of(model).items() if name.startswith("transformer.coda.1.")]
        assert sum(map(math.prod, block)) == 395_398_080
        core = [s for name, s in shapes_of(model).items() if ".core_block." in name or ".adapter." in name]
        assert sum(map(math.prod, core)) == 1_637_349_120

    def test_llama_3_2_1b(self) -> None:
        model = model_from_checkpoint(LLAMA_1B, [])
        assert isinstance(model, Huginn)
        assert (model.block, model.tied, model.embed_scale) == (Block.LLAMA, False, 1.0)
        assert (model.spec.max_positions, model.spec.rope_theta, model.spec.eos_tokens) == (131072, 5e5, ())
        assert model.rope_scaling == Llama3Scaling(
            factor=32.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_positions=8192
        )
        assert model.unused_tensors() == {}
        shapes = shapes_of(model)
        assert len(shapes) == 4 + 14 * 6
        assert shapes["transformer.core_block.5.attn.Wqkv.weight"] == (3072, 2048)
        assert shapes["lm_head.weight"] == (128256, 2048)

    def test_olmo_2_1b(self) -> None:
        model = model_from_checkpoint(OLMO_1B, [Q_NORM])
        assert isinstance(model, Huginn)
        assert (model.block, model.tied, model.rope_scaling) == (Block.OLMO, False, None)
        shapes = shapes_of(model)
        assert len(shapes) == 4 + 14 * 8
        assert shapes["transformer.prelude.3.attn.q_norm.weight"] == (2048,)
        assert shapes["transformer.prelude.3.attn.k_norm.weight"] == (2048,)


def write_sparse(path: Path, shapes: Mapping[str, tuple[int, ...]]) -> None:
    header, at = {}, 0
    for name, shape in shapes.items():
        size = 4 * math.prod(shape)
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + at)


class TestBlock:
    @pytest.mark.parametrize("hint", ["llama", "olmo", "huginn", None, 7])
    def test_the_hint_of_a_config_decides_nothing(self, hint: Any) -> None:
        config = RETROFIT | {"block_variant": hint}
        assert model_from_checkpoint(config, []) == model_from_checkpoint(RETROFIT, [])
        olmo = model_from_checkpoint(config, [Q_NORM])
        assert isinstance(olmo, Huginn)
        assert olmo.block is Block.OLMO
        assert model_from_config(HUGINN | {"block_variant": hint}) == model_from_config(HUGINN)

    def test_a_retrofit_is_not_known_by_its_config(self) -> None:
        with pytest.raises(CheckpointError, match=r"'qk_bias' is false.*only the names of its tensors"):
            model_from_config(RETROFIT)

    def test_biases_must_fit_the_block(self) -> None:
        with pytest.raises(CheckpointError, match="field 'qk_bias' must be one of True .*found False"):
            model_from_checkpoint(HUGINN | {"qk_bias": False}, [NORM_3])
        for names in ([], [Q_NORM]):
            with pytest.raises(CheckpointError, match="field 'qk_bias' must be one of False .*found True"):
                model_from_checkpoint(RETROFIT | {"qk_bias": True}, names)

    def test_a_file_of_two_blocks(self, tmp_path: Path) -> None:
        copy("huginn_tiny", tmp_path)
        edit_tensors(tmp_path / "model.safetensors", lambda t: t.pop("transformer.core_block.2.norm_3.weight"))
        refused(tmp_path, "1 of 75 tensors are missing: transformer.core_block.2.norm_3.weight")


class TestConfig:
    def test_stored_init_values_win(self) -> None:
        spelled = model_from_config(HUGINN)
        assert isinstance(spelled, Huginn)
        for without in ({k: v for k, v in HUGINN.items() if k != "init_values"}, HUGINN | {"init_values": None}):
            computed = model_from_config(without)
            assert isinstance(computed, Huginn)
            assert computed.embed_scale == math.sqrt(64)
            assert computed.spec.initial_state_std == pytest.approx(spelled.spec.initial_state_std, rel=1e-12)
        other = model_from_config(HUGINN | {"init_values": {"embed_scale": 1.0, "std": 0.5}})
        assert isinstance(other, Huginn)
        assert (other.embed_scale, other.spec.initial_state_std) == (1.0, 0.5)

    def test_positions(self) -> None:
        """Huginn's rotary table has block_size rows; a retrofit has its base model's positions where it states them."""
        assert model_from_config(HUGINN | {"max_position_embeddings": 999}).spec.max_positions == 128
        retrofit = RETROFIT | {"block_size": 77}
        assert model_from_checkpoint(retrofit, []).spec.max_positions == 128
        assert model_from_checkpoint(retrofit | {"max_position_embeddings": None}, []).spec.max_positions == 77

    def test_fields_that_change_nothing(self) -> None:
        changes = {
            "activation_checkpoint_impl": "none",
            "effective_expected_depth": 1,
            "init_orthogonal": True,
            "init_strategy": "normal",
            "mean_backprop_depth": 1,
            "padding_multiple": 1,
            "sampling_scheme": "fixed",
            "test_time_noise_type": "geom",
            "tie_word_embeddings": False,
            "test_time_noise": 0.0,
        }
        assert model_from_config(HUGINN | changes) == model_from_config(HUGINN)
        assert model_from_checkpoint(RETROFIT | {"rope_base": 1.0}, []) == model_from_checkpoint(RETROFIT, [])

    @pytest.mark.parametrize(
        ("field", "value"),
        [
            ("architecture_class_name", "GPT"),
            ("bias", True),
            ("block_class_name", "TransformerPreNormBlock"),
            ("block_size", 0),
            ("eos_token_id", -1),
            ("head_dim", 15),
            ("init_values", 1.0),
            ("initial_state_mode", "embed-init"),
            ("initial_state_mode", "skip-adapter"),
            ("injection_type", "add"),
            ("injection_type", "gate"),
            ("mean_recurrence", 0),
            ("mean_recurrence", True),
            ("mlp_class_name", "BaseMLP"),
            ("n_layers", 9),
            ("n_layers_in_coda", 0),
            ("nonlin_name", "GELU"),
            ("norm_class_name", "LayerNorm"),
            ("norm_eps", 0),
            ("num_key_value_heads", 2),
            ("padded_vocab_size", 512),
            ("qk_bias", "yes"),
            ("rope_scaling", {"rope_type": "llama3", "factor": 8.0}),
            ("rope_theta", 10000.0),
            ("state_init", "zero"),
            ("test_time_noise", 0.1),
            ("tie_embeddings", 1),
        ],
    )
    def test_refused_by_name(self, field: str, value: Any) -> None:
        with pytest.raises(CheckpointError, match=rf"^config\.json: field '{field}' must be .*found ") as caught:
            model_from_config(HUGINN | {field: value})
        assert repr(value)[:40] in str(caught.value)

    @pytest.mark.parametrize(
        ("field", "value", "says"),
        [
            ("num_key_value_heads", 3, "field 'num_key_value_heads' must be a divisor of n_heads (4), found 3"),
            ("rope_theta", None, "field 'rope_theta' must be a finite number > 0, found None"),
            ("rope_scaling", "llama3", "field 'rope_scaling' must be an object, found 'llama3'"),
            ("rope_scaling", {"rope_type": "yarn", "factor": 2.0}, "field 'rope_scaling.rope_type' must be one of "),
            ("rope_scaling", {"rope_type": "linear", "factor": 2.0}, "found 'linear'"),
            ("rope_scaling", {"type": "llama3"}, "field 'rope_scaling.rope_type' must be one of 'llama3'"),
            ("rope_scaling.factor", 0, "field 'rope_scaling.factor' must be a finite number > 0, found 0"),
            ("rope_scaling.factor", None, "field 'rope_scaling.factor' is missing"),
            ("rope_scaling.original_max_position_embeddings", 0.5, "must be an integer in"),
            ("rope_scaling.high_freq_factor", 1.0, "must be above low_freq_factor (1.0), found 1.0"),
            ("rope_scaling.beta_fast", 32, "unknown field(s) rope_scaling.beta_fast"),
            ("init_values.embed_scale", -1, "field 'init_values.embed_scale' must be a finite number > 0, found -1"),
            ("init_values.zeta", 1, "unknown field(s) init_values.zeta for model_type 'huginn_raven'"),
        ],
    )
    def test_retrofits_refused_by_name(self, field: str, value: Any, says: str) -> None:
        outer, _, inner = field.partition(".")
        config = dict(RETROFIT)
        if inner:
            config[outer] = {k: v for k, v in RETROFIT[outer].items() if k != inner}
            config[outer] |= {} if value is None else {inner: value}
        else:
            config[outer] = value
        with pytest.raises(CheckpointError) as caught:
            model_from_checkpoint(config, [])
        assert str(caught.value).startswith("config.json: ")
        assert says in str(caught.value)

    @pytest.mark.parametrize("field", ["total_ut_steps", "hidden_size", "iter_injection", "num_loops"])
    def test_unknown_fields(self, field: str) -> None:
        with pytest.raises(CheckpointError, match=rf"unknown field\(s\) {field} for model_type 'huginn_raven'"):
            model_from_config(HUGINN | {field: 4})

    @pytest.mark.parametrize("field", ["n_embd", "n_heads", "vocab_size", "mean_recurrence", "rope_base", "block_size"])
    def test_required_fields(self, field: str) -> None:
        config = {k: v for k, v in HUGINN.items() if k != field}
        with pytest.raises(CheckpointError, match=f"field '{field}' is missing .model_type 'huginn_raven' needs it"):
            model_from_config(config)


def copy(name: str, to: Path) -> None:
    for file in ("config.json", "model.safetensors"):
        shutil.copyfile(FIXTURES / name / file, to / file)


class TestLoading:
    def test_a_tied_embedding_is_held_once(self) -> None:
        loaded = load_checkpoint(FIXTURES / "huginn_tiny", dtype="float32")
        stored = load_file(FIXTURES / "huginn_tiny" / "model.safetensors")
        assert loaded.params.head is None
        assert loaded.parameter_count == sum(
            t.size for n, t in stored.items() if n not in ("lm_head.weight", "freqs_cis")
        )
        np.testing.assert_array_equal(loaded.params.embed, stored["transformer.wte.weight"])
        hidden = jnp.eye(64, dtype=jnp.float32)[:3]
        np.testing.assert_array_equal(loaded.model.head(loaded.params, hidden), stored["lm_head.weight"].T[:3])

    def test_the_second_copy_and_the_table_may_be_absent(self, tmp_path: Path) -> None:
        copy("huginn_tiny", tmp_path)
        edit_tensors(tmp_path / "model.safetensors", lambda t: [t.pop(n) for n in ("lm_head.weight", "freqs_cis")])
        assert load_checkpoint(tmp_path).model == model_from_config(HUGINN)

    @pytest.mark.parametrize(
        ("name", "shape"), [("lm_head.weight", (255, 64)), ("freqs_cis", (1, 64, 1, 8, 2)), ("freqs_cis", (2,))]
    )
    def test_what_is_not_read_must_still_fit(self, tmp_path: Path, name: str, shape: tuple[int, ...]) -> None:
        copy("huginn_tiny", tmp_path)
        edit_tensors(tmp_path / "model.safetensors", lambda t: t.update({name: np.zeros(shape, np.float32)}))
        refused(tmp_path, f"tensor '{name}' must have shape", f"found {list(shape)}")

    def test_an_untied_head_must_be_there(self, tmp_path: Path) -> None:
        copy("huginn_llama_tiny", tmp_path)
        edit_tensors(tmp_path / "model.safetensors", lambda t: t.pop("lm_head.weight"))
        refused(tmp_path, "1 of 46 tensors are missing: lm_head.weight")
        copy("huginn_llama_tiny", tmp_path)
        edit_tensors(tmp_path / "model.safetensors", lambda t: t.update({"freqs_cis": np.zeros(2, np.float32)}))
        refused(tmp_path, "1 tensor(s) that the model does not have: freqs_cis")

    def test_float32_shards_become_bfloat16(self, tmp_path: Path) -> None:
        stored = load_file(FIXTURES / "huginn_tiny" / "model.safetensors")
        (tmp_path / "config.json").write_text(json.dumps(HUGINN))
        weight_map = {}
        for i in range(4):
            part, file = {n: stored[n] for n in sorted(stored)[i::4]}, f"model-{i + 1:05d}-of-00004.safetensors"
            save_file(part, tmp_path / file)
            weight_map |= dict.fromkeys(part, file)
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
        params = load_checkpoint(tmp_path).params
        assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {jnp.dtype(jnp.bfloat16)}
        expected = jnp.asarray(stored["transformer.core_block.3.mlp.fc.weight"]).astype(jnp.bfloat16)
        np.testing.assert_array_equal(params.core[3].gate_up, expected)

    @pytest.mark.parametrize(("name", "tied"), [("huginn_tiny", True), ("huginn_llama_tiny", False)])
    def test_round_trip(self, tmp_path: Path, name: str, tied: bool) -> None:
        """Also with another cap on the depth, which is no part of a checkpoint."""
        loaded = load_checkpoint(FIXTURES / name, dtype="float32")
        config = json.loads((FIXTURES / name / "config.json").read_text())
        capped = loaded.model.with_max_loops(3)
        save_checkpoint(tmp_path, capped, loaded.params, tokenizer_json=None, config=config, shard_bytes=200_000)
        assert len(list(tmp_path.glob("model-*.safetensors"))) > 1
        again = load_checkpoint(tmp_path, dtype="float32")
        assert again.model == loaded.model
        for a, b in zip(jax.tree.leaves(again.params), jax.tree.leaves(loaded.params), strict=True):
            np.testing.assert_array_equal(a, b)
        with pytest.raises(CheckpointError, match="config given describes another model"):
            save_checkpoint(
                tmp_path, capped, loaded.params, tokenizer_json=None, config=config | {"tie_embeddings": not tied}
            )

    def test_the_olmo_block_by_its_tensors(self, tmp_path: Path) -> None:
        copy("huginn_llama_tiny", tmp_path)

        def add_norms(tensors: dict[str, np.ndarray]) -> None:
            for name in [n for n in tensors if n.endswith("attn.proj.weight")]:
                at = name.removesuffix("proj.weight")
                tensors |= {
                    at + "q_norm.weight": np.ones(64, np.float32),
                    at + "k_norm.weight": np.ones(32, np.float32),
                }

        edit_tensors(tmp_path / "model.safetensors", add_norms)
        model = load_checkpoint(tmp_path).model
        assert isinstance(model, Huginn)
        assert model.block is Block.OLMO


class TestEndIds:
    SPECIAL = ("<|begin_text|>", "<|end_text|>", "<|begin_header|>", "<|end_header|>", "<|end_turn|>", "<|pad|>")

    def test_of_its_own_generation_loop(self, tmp_path: Path) -> None:
        """The released tokenizer's names: begin, end of text and end of turn stop; headers and padding do not."""
        copy("huginn_tiny", tmp_path)
        edit_json(tmp_path / "config.json", eos_token_id=1)
        (tmp_path / "tokenizer.json").write_text(tokenizer_json(special=self.SPECIAL))
        assert load_checkpoint(tmp_path).eos_token_ids == (1, 0, 4)
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|end_turn|>"}))
        assert load_checkpoint(tmp_path).eos_token_ids == (1, 4, 0)

    def test_a_tokenizer_without_them(self, tmp_path: Path) -> None:
        copy("huginn_tiny", tmp_path)
        (tmp_path / "tokenizer.json").write_text(tokenizer_json(special=("<|end_text|>",)))
        assert load_checkpoint(tmp_path).eos_token_ids == (2, 0)
        (tmp_path / "tokenizer.json").write_text(tokenizer_json())
        assert load_checkpoint(tmp_path).eos_token_ids == (2,)

    def test_a_retrofit_has_its_base_model_s(self, tmp_path: Path) -> None:
        copy("huginn_llama_tiny", tmp_path)
        (tmp_path / "tokenizer.json").write_text(tokenizer_json(special=self.SPECIAL))
        assert load_checkpoint(tmp_path).eos_token_ids == (2,)
