"""Ouro's pure functions against the recorded reference, with a dense attention written here.

PROTECTS: the numbers of the model itself (norm order, rotary pairs, sandwich norms, gate, readout).  Everything else is
tested against the engine's own oracle; this file is what ties both to the public reference implementation.
"""

from __future__ import annotations

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlt_jax.models.registry import model_from_config
from rlt_jax.models.spec import LoopedModel, TensorSource
from tests.oracle import OuroOracle, Policy
from tests.oracle.checkpoint import read_tensors

FIXTURE = Path(__file__).parent.parent / "fixtures" / "ouro_tiny"
ATOL = 2e-4  # fixtures' own recommendation; the reference's spread is 4e-5


@pytest.fixture(scope="module")
def golden() -> dict[str, np.ndarray]:
    return dict(np.load(FIXTURE / "golden.npz"))


@pytest.fixture(scope="module")
def model() -> LoopedModel:
    return model_from_config(json.loads((FIXTURE / "config.json").read_text()))


@pytest.fixture(scope="module")
def params(model: LoopedModel):
    """Parameters by the model's own table of sources: every tensor used exactly once, with the shape it states."""
    tensors = read_tensors(FIXTURE)
    used: list[str] = []

    def fetch(source: TensorSource) -> jax.Array:
        used.extend(source.names)
        parts = [tensors[name] for name in source.names]
        assert tuple(p.shape for p in parts) == source.shapes
        return jnp.asarray(np.concatenate(parts))

    loaded = jax.tree.map(fetch, model.sources())
    assert sorted(used) == sorted(tensors)
    return loaded


def forward(model: LoopedModel, params, ids: np.ndarray, positions: np.ndarray, visible: np.ndarray):
    """All loops over whole sequences.  visible [B, T] marks real tokens; returns states [U, B, T, E] and the KV."""
    steps = ids.shape[1]
    mask = np.tril(np.ones((steps, steps), bool)) & visible[:, None, :].astype(bool)  # [B, T, S]

    def attend(kv: list, layer: int, q: jax.Array, k: jax.Array, v: jax.Array):
        assert layer == len(kv) % model.spec.num_core_layers, "layers are visited in order"
        score = jnp.einsum("bthd,bshd->bhts", q, k, precision="highest") / np.sqrt(q.shape[-1])
        score = jnp.where(mask[:, None], score, -1e30)
        out = jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(score, axis=-1), v, precision="highest")
        return [*kv, (k, v)], out

    where = jnp.asarray(positions, jnp.int32)
    kv: list = []
    embedded, kv = model.prelude(params, model.embed(params, jnp.asarray(ids)), where, kv, attend)
    state, states = model.initial_state(params, embedded, None), []
    for _ in range(model.spec.trained_loops):
        state, kv = model.core(params, state, embedded, where, kv, attend)
        states.append(state)
    return jnp.stack(states), kv


@pytest.fixture(scope="module")
def run(model: LoopedModel, params, golden: dict[str, np.ndarray]):
    ids = golden["input_ids"]
    return forward(model, params, ids, np.tile(np.arange(ids.shape[1]), (2, 1)), np.ones_like(ids))


@pytest.fixture(scope="module")
def logits(model: LoopedModel, params, run) -> np.ndarray:
    return np.asarray(model.head(params, run[0]))


def close(actual, expected: np.ndarray, atol: float = ATOL) -> None:
    assert np.shape(actual) == expected.shape
    np.testing.assert_allclose(np.asarray(actual), expected, atol=atol, rtol=0)


def exit_distribution(gate_logits: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The official rule over [U, B, T] logits: the last loop takes the mass that is left."""
    leave = 1 / (1 + np.exp(-gate_logits.astype(np.float64)))
    stay = np.cumprod(1 - leave, axis=0)
    before = np.concatenate([np.ones_like(stay[:1]), stay[:-1]])
    pdf = np.concatenate([(leave * before)[:-1], before[-1:]])
    return np.moveaxis(pdf, 0, -1), np.moveaxis(np.cumsum(pdf, axis=0), 0, -1)


def test_hidden_state_of_every_loop(run, golden: dict[str, np.ndarray]) -> None:
    close(run[0], golden["hidden_per_loop"])


def test_gate_of_every_loop(model: LoopedModel, params, run, golden: dict[str, np.ndarray]) -> None:
    score = model.exit_score(params, run[0])
    assert score.dtype == jnp.float32
    close(score, golden["gate_logits"])
    close(jax.nn.sigmoid(score), golden["gate_prob"])


def test_exit_distribution(model: LoopedModel, params, run, golden: dict[str, np.ndarray]) -> None:
    pdf, cdf = exit_distribution(np.asarray(model.exit_score(params, run[0])))
    close(pdf, golden["exit_pdf"])
    close(cdf, golden["exit_cdf"])


def test_logits_of_every_loop(logits: np.ndarray, golden: dict[str, np.ndarray]) -> None:
    assert logits.dtype == np.float32
    close(logits, golden["logits_per_loop"])
    close(logits[-1], golden["logits"])


@pytest.mark.parametrize("threshold", ["0.3", "0.5", "0.7", "0.9"])
def test_readout_by_threshold(model: LoopedModel, params, run, golden: dict[str, np.ndarray], threshold: str) -> None:
    """The state is chosen per token, then multiplied by the head."""
    _, cdf = exit_distribution(np.asarray(model.exit_score(params, run[0])))
    step = np.argmax(cdf >= float(threshold), axis=-1)  # the last CDF is 1: there always is one
    np.testing.assert_array_equal(step, golden[f"exit_step_thr{threshold}"])
    chosen = np.take_along_axis(np.asarray(run[0]), step[None, :, :, None], axis=0)[0]
    close(model.head(params, jnp.asarray(chosen)), golden[f"logits_thr{threshold}"])


def test_weighted_readout(model: LoopedModel, params, run, logits: np.ndarray, golden: dict[str, np.ndarray]) -> None:
    pdf, _ = exit_distribution(np.asarray(model.exit_score(params, run[0])))
    close(np.einsum("btu,ubtv->btv", pdf, logits), golden["logits_weighted"])


@pytest.mark.parametrize("loop", range(4))
def test_keys_and_values_of_every_loop(model: LoopedModel, run, golden: dict[str, np.ndarray], loop: int) -> None:
    """Slot loop * layers + layer; keys after the rotation; recorded as [B, heads, T, D]."""
    layers = model.spec.num_core_layers
    for layer in range(layers):
        slot = loop * layers + layer
        keys, values = run[1][slot]
        close(jnp.swapaxes(keys, 1, 2), golden["kv_keys"][slot])
        close(jnp.swapaxes(values, 1, 2), golden["kv_values"][slot])


def test_left_padded_batch(model: LoopedModel, params, golden: dict[str, np.ndarray]) -> None:
    visible = golden["pad_attention_mask"]
    states, _ = forward(model, params, golden["pad_input_ids"], golden["pad_position_ids"], visible)
    actual = np.asarray(model.head(params, states[-1]))
    real = visible.astype(bool)
    assert real.sum() == 19, "row 0 has five pad positions"
    close(actual[real], golden["pad_logits"][real])


def test_rows_need_no_batch_axis(model: LoopedModel, params, run) -> None:
    """Leading axes are free: one token as [E] gives what it gives inside a batch (gate and head)."""
    state = run[0][2, 1, 5]
    one, all_rows = model.head(params, state), model.head(params, run[0])
    close(one, np.asarray(all_rows[2, 1, 5]), atol=1e-5)
    assert model.exit_score(params, state).shape == ()


def test_greedy_by_threshold_and_by_step(model: LoopedModel, params, golden: dict[str, np.ndarray]) -> None:
    """The reference's own early readout (all loops run, the state of one is read), decoded to the end."""
    for key in ("greedy_thr0.5", "greedy_step1"):
        expected = golden[f"{key}_ids"]
        ids = np.concatenate([golden["input_ids"], expected], axis=1)[:, :-1]
        states, _ = forward(model, params, ids, np.tile(np.arange(ids.shape[1]), (2, 1)), np.ones_like(ids))
        states = np.asarray(states)[:, :, -16:]
        if key == "greedy_step1":
            chosen = states[1]
        else:
            _, cdf = exit_distribution(np.asarray(model.exit_score(params, jnp.asarray(states))))
            step = np.argmax(cdf >= 0.5, axis=-1)
            chosen = np.take_along_axis(states, step[None, :, :, None], axis=0)[0]
        actual = np.asarray(model.head(params, jnp.asarray(chosen)))
        close(actual, golden[f"{key}_logits"])
        np.testing.assert_array_equal(actual.argmax(-1), expected)


def test_greedy_full_depth(model: LoopedModel, params, golden: dict[str, np.ndarray]) -> None:
    ids = np.concatenate([golden["input_ids"], golden["greedy_full_ids"]], axis=1)[:, :-1]
    states, _ = forward(model, params, ids, np.tile(np.arange(ids.shape[1]), (2, 1)), np.ones_like(ids))
    actual = np.asarray(model.head(params, states[-1, :, -16:]))
    close(actual, golden["greedy_full_logits"])
    np.testing.assert_array_equal(actual.argmax(-1), golden["greedy_full_ids"])


def test_grouped_heads_equal_the_oracle(tmp_path: Path) -> None:
    """Two KV heads for four query heads, which the fixture does not have: the joined q, k, v rows are split right."""
    config = json.loads((FIXTURE / "config.json").read_text()) | {"num_key_value_heads": 2}
    (tmp_path / "config.json").write_text(json.dumps(config))
    tensors = read_tensors(FIXTURE)
    for name in [n for n in tensors if ".k_proj." in n or ".v_proj." in n]:
        tensors[name] = tensors[name][:32]
    grouped = model_from_config(config)
    loaded = jax.tree.map(lambda s: jnp.asarray(np.concatenate([tensors[n] for n in s.names])), grouped.sources())
    prompt = [5, 77, 200, 13, 13, 90]

    def attend(kv: tuple, layer: int, q: jax.Array, k: jax.Array, v: jax.Array):
        assert (q.shape[1], k.shape[1], v.shape[1]) == (4, 2, 2)
        k, v = jnp.repeat(k, 2, axis=1), jnp.repeat(v, 2, axis=1)
        score = jnp.einsum("thd,shd->hts", q, k, precision="highest") / 4
        score = jnp.where(np.tril(np.ones((6, 6), bool)), score, -1e30)
        return kv, jnp.einsum("hts,shd->thd", jax.nn.softmax(score, axis=-1), v, precision="highest")

    state = grouped.embed(loaded, jnp.asarray(prompt))
    for _ in range(4):
        state, _ = grouped.core(loaded, state, state, jnp.arange(6, dtype=jnp.int32), (), attend)
    truth = OuroOracle(tmp_path, tensors=tensors)
    along = truth.run(prompt[:1], 6, Policy(name="fixed"), tokens=[*prompt[1:], 0], depths=[4] * 6)
    close(grouped.head(loaded, state), np.asarray([s.logits for s in along]))
