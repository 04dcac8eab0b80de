"""Nanbeige's pure functions against the recorded reference and the oracle; its config.json, field by field.

PROTECTS: the numbers of a model without a gate, with grouped wide heads and two placements of the final norm, and the
refusal of every part of its official class that is not built.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rlt_jax.errors import CheckpointError
from rlt_jax.models.checkpoint import load_checkpoint, save_checkpoint
from rlt_jax.models.nanbeige import Nanbeige
from rlt_jax.models.registry import model_from_config
from rlt_jax.models.spec import LoopedModel, ModelSpec
from tests.oracle import SHARED, Policy
from tests.oracle.checkpoint import read_tensors
from tests.oracle.nanbeige import NanbeigeOracle

FIXTURE = Path(__file__).parent.parent / "fixtures" / "nanbeige_tiny"
CONFIG: dict[str, Any] = json.loads((FIXTURE / "config.json").read_text())
ATOL = 2e-4  # fixtures' own recommendation; the reference's spread is 4e-5
FULL = Policy(name="fixed", min_loops=1, max_loops=2)

# The released Nanbeige4.2-3B: its sizes and the fields that its config.json has.
NANBEIGE_3B: dict[str, Any] = {
    "architectures": ["NanbeigeForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "auto_map": {"AutoConfig": "configuration_nanbeige.NanbeigeConfig"},
    "bos_token_id": 166100,
    "eos_token_id": 166101,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 3072,
    "initializer_range": 0.02,
    "intermediate_size": 10752,
    "kv_channels": 128,
    "loop_loss_weights": [],
    "max_position_embeddings": 262144,
    "mlp_bias": False,
    "model_type": "nanbeige",
    "num_attention_heads": 48,
    "num_hidden_layers": 22,
    "num_key_value_heads": 8,
    "num_loops": 2,
    "pad_token_id": 0,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 70000000.0,
    "skip_loop_final_norm": False,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.53.3",
    "use_cache": True,
    "vocab_size": 166144,
}


@pytest.fixture(scope="module")
def golden() -> dict[str, np.ndarray]:
    return dict(np.load(FIXTURE / "golden.npz"))


def build(tensors: dict[str, np.ndarray], **changes: Any) -> tuple[LoopedModel, Any]:
    """The fixture's model with some fields changed, and parameters by its own table of sources."""
    model = model_from_config(CONFIG | changes)
    return model, jax.tree.map(lambda s: jnp.asarray(np.concatenate([tensors[n] for n in s.names])), model.sources())


@pytest.fixture(scope="module")
def tensors() -> dict[str, np.ndarray]:
    return read_tensors(FIXTURE)


@pytest.fixture(scope="module")
def every(tensors: dict[str, np.ndarray]) -> tuple[LoopedModel, Any]:
    """Norm after every loop."""
    return build(tensors)


@pytest.fixture(scope="module")
def once(tensors: dict[str, np.ndarray]) -> tuple[LoopedModel, Any]:
    """Norm after the last loop alone."""
    return build(tensors, skip_loop_final_norm=True)


def dense(kv: list, layer: int, q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[list, jax.Array]:
    """`attend` over whole sequences [..., T, heads, D]; each KV head serves H / K query heads in a row."""
    t, h, d = q.shape[-3:]
    groups = q.reshape(*q.shape[:-2], k.shape[-2], h // k.shape[-2], d)
    score = jnp.einsum("...tkgd,...skd->...kgts", groups, k, precision="highest") / np.sqrt(d)
    score = jnp.where(np.tril(np.ones((t, t), bool)), score, -1e30)
    out = jnp.einsum("...kgts,...skd->...tkgd", jax.nn.softmax(score, axis=-1), v, precision="highest")
    return [*kv, (layer, k, v)], out.reshape(q.shape)


def forward(model: LoopedModel, params: Any, ids: np.ndarray, loops: int | None = None):
    """States after each loop [U, ..., T, E], the last one's logits, and the KV of all loops."""
    where = jnp.broadcast_to(jnp.arange(ids.shape[-1], dtype=jnp.int32), ids.shape)
    injected, kv = model.prelude(params, model.embed(params, jnp.asarray(ids)), where, [], dense)
    state, states = model.initial_state(params, injected, None), []
    for _ in range(loops or model.spec.trained_loops):
        state, kv = model.core(params, state, injected, where, kv, dense)
        states.append(state)
    hidden, after = model.readout(params, state, where, kv, dense)
    assert after is kv, "no coda: the readout leaves the KV alone"
    return states, model.head(params, hidden), kv


def close(actual: Any, expected: np.ndarray, atol: float = ATOL) -> None:
    assert np.shape(actual) == expected.shape
    np.testing.assert_allclose(np.asarray(actual), expected, atol=atol, rtol=0)


class TestRecordedReference:
    """Every array of golden.npz."""

    def test_states_and_logits_of_every_loop(self, every, golden: dict[str, np.ndarray]) -> None:
        model, params = every
        states, logits, _ = forward(model, params, golden["input_ids"])
        close(jnp.stack(states), golden["hidden_per_loop"])
        close(model.head(params, jnp.stack(states)), golden["logits_per_loop"])
        assert logits.dtype == jnp.float32
        close(logits, golden["logits"])

    def test_keys_and_values_of_every_loop(self, every, golden: dict[str, np.ndarray]) -> None:
        """Slot loop * layers + layer; keys after the rotation; recorded as [B, heads, T, D]."""
        _, _, kv = forward(*every, golden["input_ids"])
        assert [layer for layer, _, _ in kv] == [0, 1, 2] * 2
        close(jnp.swapaxes(jnp.stack([k for _, k, _ in kv]), -2, -3), golden["kv_keys"])
        close(jnp.swapaxes(jnp.stack([v for _, _, v in kv]), -2, -3), golden["kv_values"])

    @pytest.mark.parametrize("loops", [1, 3])
    @pytest.mark.parametrize("by_weights", [False, True])
    def test_other_depths(self, tensors, golden: dict[str, np.ndarray], loops: int, by_weights: bool) -> None:
        changes = {"loop_loss_weights": [0.25] * (loops - 1)} if by_weights and loops > 1 else {"num_loops": loops}
        model, params = build(tensors, **changes)
        assert model.spec.trained_loops == model.spec.max_loops == loops
        close(forward(model, params, golden["input_ids"])[1], golden[f"logits_loops{loops}"])

    def test_norm_after_the_last_loop_alone(self, once, golden: dict[str, np.ndarray]) -> None:
        model, params = once
        states, logits, _ = forward(model, params, golden["input_ids"])
        close(logits, golden["logits_skip_norm"])
        assert np.abs(np.asarray(model.head(params, states[-1])) - golden["logits_skip_norm"]).max() > 0.1, (
            "the norm must matter"
        )

    def test_one_loop_is_the_same_for_both_norm_placements(self, once, golden: dict[str, np.ndarray]) -> None:
        """A token that leaves early still gets its norm: it belongs to the readout, not to the last loop."""
        close(forward(*once, golden["input_ids"], loops=1)[1], golden["logits_loops1"])

    def test_greedy(self, every, golden: dict[str, np.ndarray]) -> None:
        ids = np.concatenate([golden["input_ids"], golden["greedy_ids"]], axis=1)[:, :-1]
        logits = np.asarray(forward(*every, ids)[1])[:, -16:]
        close(logits, golden["greedy_logits"])
        np.testing.assert_array_equal(logits.argmax(-1), golden["greedy_ids"])


class TestOracle:
    """The oracle that the engine is judged by reproduces the reference too, on its own."""

    @pytest.mark.parametrize("row", [0, 1])
    def test_greedy(self, golden: dict[str, np.ndarray], row: int) -> None:
        steps = NanbeigeOracle(FIXTURE).run(golden["input_ids"][row], 16, FULL)
        assert [s.token for s in steps] == golden["greedy_ids"][row].tolist()
        assert {s.depth for s in steps} == {2}
        close([s.logits for s in steps], golden["greedy_logits"][row])

    @pytest.mark.parametrize(
        ("changes", "array"),
        [
            ({}, "logits"),
            ({"num_loops": 1}, "logits_loops1"),
            ({"num_loops": 3}, "logits_loops3"),
            ({"loop_loss_weights": [0.1, 0.2]}, "logits_loops3"),
            ({"skip_loop_final_norm": True}, "logits_skip_norm"),
        ],
    )
    def test_logits(self, golden: dict[str, np.ndarray], changes: dict, array: str) -> None:
        oracle, prompt = NanbeigeOracle(FIXTURE, config=changes), golden["input_ids"][0]
        along = oracle.run(prompt[:1], 12, FULL, tokens=[*prompt[1:], 0], depths=[oracle.loops] * 12)
        close([s.logits for s in along], golden[array][0])

    def test_shared_history_is_another_model(self) -> None:
        """Else a test of SHARED against this oracle could not tell the two layouts apart."""
        prompt = [5, 77, 200, 13]
        shared = NanbeigeOracle(FIXTURE, layout=SHARED).run(prompt, 1, FULL)
        assert np.abs(shared[0].logits - NanbeigeOracle(FIXTURE).run(prompt, 1, FULL)[0].logits).max() > 0.01


@st.composite
def shapes(draw: st.DrawFn) -> dict[str, Any]:
    kv_heads, head_dim = draw(st.integers(1, 3)), 2 * draw(st.integers(1, 6))
    return CONFIG | {
        "vocab_size": draw(st.integers(2, 40)),
        "hidden_size": draw(st.integers(1, 24)),
        "intermediate_size": draw(st.integers(1, 30)),
        "num_hidden_layers": draw(st.integers(1, 3)),
        "num_attention_heads": kv_heads * draw(st.integers(1, 4)),
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "kv_channels": head_dim,
        "num_loops": draw(st.integers(1, 4)),
        "rope_theta": draw(st.sampled_from([1e4, 7e7])),
        "skip_loop_final_norm": draw(st.booleans()),
    }


@settings(max_examples=25, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
@given(shapes(), st.integers(0, 2**32 - 1), st.integers(1, 9))
def test_any_shape_equals_the_oracle(config: dict[str, Any], seed: int, length: int) -> None:
    model = model_from_config(config)
    random = np.random.default_rng(seed)
    tensors = {
        name: random.normal(1.0 if len(shape) == 1 else 0.0, 0.3, shape).astype(np.float32)
        for source in jax.tree.leaves(model.sources())
        for name, shape in zip(source.names, source.shapes, strict=True)
    }
    params = jax.tree.map(lambda s: jnp.asarray(np.concatenate([tensors[n] for n in s.names])), model.sources())
    prompt = random.integers(0, config["vocab_size"], length)
    loops = config["num_loops"]
    along = NanbeigeOracle(None, config=config, tensors=tensors).run(
        prompt[:1], length, FULL, tokens=[*prompt[1:], 0], depths=[loops] * length
    )
    logits = np.asarray([s.logits for s in along])
    np.testing.assert_allclose(np.asarray(forward(model, params, prompt)[1]), logits, atol=ATOL, rtol=1e-3)


class TestConfig:
    def test_released_config(self) -> None:
        model = model_from_config(NANBEIGE_3B)
        assert model == Nanbeige(
            ModelSpec(
                model_type="nanbeige",
                vocab_size=166144,
                hidden_size=3072,
                intermediate_size=10752,
                num_heads=48,
                num_kv_heads=8,
                head_dim=128,
                num_core_layers=22,
                trained_loops=2,
                max_loops=2,
                max_positions=262144,
                norm_eps=1e-5,
                rope_theta=7e7,
                exit_scores=(),
                exit_threshold=1.0,
                eos_token_ids=(166101,),
            ),
            norm_every_loop=True,
        )
        assert hash(model) == hash(model_from_config(dict(NANBEIGE_3B)))
        assert model != model_from_config(NANBEIGE_3B | {"skip_loop_final_norm": True})

    def test_released_tensors(self) -> None:
        """201 tensors, 4,169,800,704 parameters: the published counts."""
        sources = jax.tree.leaves(model_from_config(NANBEIGE_3B).sources())
        shapes = {name: shape for s in sources for name, shape in zip(s.names, s.shapes, strict=True)}
        assert len(shapes) == 201
        assert sum(int(np.prod(shape)) for shape in shapes.values()) == 4_169_800_704
        assert shapes["model.layers.21.self_attn.q_proj.weight"] == (6144, 3072)
        assert shapes["model.layers.21.self_attn.k_proj.weight"] == (1024, 3072)
        assert shapes["model.layers.21.self_attn.o_proj.weight"] == (3072, 6144)

    @pytest.mark.parametrize(
        ("changes", "loops"),
        [
            ({"num_loops": 3}, 3),
            ({"num_loops": None}, 1),
            ({"loop_loss_weights": [0.3]}, 2),
            ({"loop_loss_weights": [0.1, 0, 0.2], "num_loops": 2}, 4),
            ({"loop_loss_weights": None}, 2),
        ],
    )
    def test_loops(self, changes: dict, loops: int) -> None:
        spec = model_from_config(CONFIG | changes).spec
        assert (spec.trained_loops, spec.max_loops) == (loops, loops)

    def test_parts_that_are_off_may_be_spelled_out(self) -> None:
        spelled = {
            "enable_double_loop_split": False,
            "loop_middle_layers": None,
            "loop_share_kv": False,
            "enable_hyper_connection": False,
            "num_residual_streams": 4,
            "mhc_sinkhorn_iterations": 20,
            "enable_depth_attention": None,
            "emb_neighbor_num": None,
            "insert_ngram_layer_idx": [],
            "ngram_fused_mode": "average",
            "qk_layernorm": False,
        }
        assert model_from_config(CONFIG | spelled) == model_from_config(CONFIG)

    @pytest.mark.parametrize(
        ("field", "value"),
        [
            ("enable_double_loop_split", True),
            ("loop_middle_layers", 1),
            ("loop_share_kv", True),
            ("enable_hyper_connection", True),
            ("enable_mhc", True),
            ("enable_h_res_identity", True),
            ("mhc_identity_nohresparam", True),
            ("mhc_diff_for_loop", True),
            ("mhc_double_stream_position_for_loop", "mid"),
            ("enable_depth_attention", True),
            ("depth_attention_stride", 2),
            ("emb_neighbor_num", 3),
            ("emb_split_num", 2),
            ("ngram_vocab_size_ratio", 0.5),
            ("ngram_insert_all_layers", True),
            ("insert_ngram_layer_idx", [0]),
            ("qk_layernorm", True),
            ("attention_bias", True),
            ("mlp_bias", True),
            ("tie_word_embeddings", True),
            ("rope_scaling", {"type": "linear", "factor": 2.0}),
            ("hidden_act", "gelu"),
            ("pretraining_tp", 2),
            ("kv_channels", 32),
            ("skip_loop_final_norm", 1),
            ("num_loops", 0),
            ("num_loops", True),
            ("loop_loss_weights", 0.5),
            ("loop_loss_weights", [0.5, "0.5"]),
            ("loop_loss_weights", [float("nan")]),
            ("num_key_value_heads", 4),
            ("head_dim", 15),
            ("eos_token_id", -1),
        ],
    )
    def test_refused_by_name(self, field: str, value: Any) -> None:
        with pytest.raises(CheckpointError, match=rf"^config\.json: field '{field}' must be .*found ") as caught:
            model_from_config(CONFIG | {field: value})
        assert repr(value)[:40] in str(caught.value)

    @pytest.mark.parametrize("field", ["total_ut_steps", "early_exit_threshold", "sliding_window"])
    def test_fields_of_other_models_are_unknown(self, field: str) -> None:
        with pytest.raises(CheckpointError, match=rf"unknown field\(s\) {field} for model_type 'nanbeige'"):
            model_from_config(CONFIG | {field: 4})

    @pytest.mark.parametrize("field", ["hidden_size", "num_hidden_layers", "rope_theta", "vocab_size"])
    def test_required_fields(self, field: str) -> None:
        config = {k: v for k, v in CONFIG.items() if k != field}
        with pytest.raises(CheckpointError, match=f"field '{field}' is missing .model_type 'nanbeige' needs it"):
            model_from_config(config)

    def test_unknown_model_type_lists_both(self) -> None:
        with pytest.raises(CheckpointError, match="field 'model_type' is 'llama'; supported: .*nanbeige.*, ouro"):
            model_from_config(CONFIG | {"model_type": "llama"})


class TestLoading:
    def test_fixture(self, every) -> None:
        loaded = load_checkpoint(FIXTURE, dtype="float32")
        assert loaded.model == every[0]
        assert loaded.eos_token_ids == (2,)
        for a, b in zip(jax.tree.leaves(loaded.params), jax.tree.leaves(every[1]), strict=True):
            np.testing.assert_array_equal(a, b)

    def test_round_trip_in_shards(self, every, tmp_path: Path, tensors: dict[str, np.ndarray]) -> None:
        model, params = every
        save_checkpoint(tmp_path, model, params, tokenizer_json=None, config=CONFIG, shard_bytes=200_000)
        assert len(list(tmp_path.glob("model-*.safetensors"))) > 1
        written = read_tensors(tmp_path)
        assert sorted(written) == sorted(tensors)
        for name, value in tensors.items():
            np.testing.assert_array_equal(written[name], value)
        assert load_checkpoint(tmp_path, dtype="float32").model == model

    def test_a_head_dim_that_the_weights_do_not_have(self, tmp_path: Path) -> None:
        (tmp_path / "config.json").write_text(json.dumps(CONFIG | {"head_dim": 8, "kv_channels": 8}))
        (tmp_path / "model.safetensors").symlink_to(FIXTURE / "model.safetensors")
        with pytest.raises(CheckpointError, match=r"q_proj.weight' must have shape \[48, 64\], found \[96, 64\]"):
            load_checkpoint(tmp_path)
