"""The Huginn family's pure functions against two recorded references, and all three blocks against plain NumPy.

PROTECTS: the numbers of a model with prelude, injected core and coda: rotary pairs of both kinds, Llama 3's frequency
scaling, biases and norms of q and k, grouped heads, the place of the final norm, the layer numbers and the start state.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rlt_jax.errors import InvalidConfig
from rlt_jax.models.huginn import Block, Huginn
from rlt_jax.models.layers import Llama3Scaling, rope_frequencies
from rlt_jax.models.registry import model_from_checkpoint, model_from_config
from rlt_jax.models.spec import LoopedModel
from tests.oracle.checkpoint import read_tensors

FIXTURES = Path(__file__).parent.parent / "fixtures"
ATOL = 2e-4  # fixtures' own recommendation; the reference's spread is 4e-5


class Recorded:
    """A fixture: its model, parameters by the model's own table of sources, and what the reference computed."""

    def __init__(self, name: str) -> None:
        tensors = read_tensors(FIXTURES / name)
        self.config: dict[str, Any] = json.loads((FIXTURES / name / "config.json").read_text())
        self.golden = dict(np.load(FIXTURES / name / "golden.npz"))
        self.model = model_from_checkpoint(self.config, tensors)
        self.params = parameters(self.model, tensors)

    def run(self, ids: np.ndarray, loops: int, state: np.ndarray | None = None) -> Run:
        return Run(self.model, self.params, ids, loops, state)


def parameters(model: LoopedModel, tensors: Mapping[str, np.ndarray]) -> Any:
    """Every tensor used once, but for those that the model says it does not need."""
    used = [name for source in jax.tree.leaves(model.sources()) for name in source.names]
    assert sorted([*used, *model.unused_tensors()]) == sorted(tensors)
    return jax.tree.map(lambda s: jnp.asarray(np.concatenate([tensors[n] for n in s.names])), model.sources())


def dense(kv: list, layer: int, q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[list, jax.Array]:
    """`attend` over whole sequences [..., T, heads, D]; each KV head serves H / K query heads in a row."""
    t, h, d = q.shape[-3:]
    groups = q.reshape(*q.shape[:-2], k.shape[-2], h // k.shape[-2], d)
    score = jnp.einsum("...tkgd,...skd->...kgts", groups, k, precision="highest") / math.sqrt(d)
    score = jnp.where(np.tril(np.ones((t, t), bool)), score, -1e30)
    out = jnp.einsum("...kgts,...skd->...tkgd", jax.nn.softmax(score, axis=-1), v, precision="highest")
    return [*kv, (layer, k, v)], out.reshape(q.shape)


class Run:
    """A forward pass over whole sequences [..., T], with a readout after every loop.

    Attributes:
        embedded, injected: [..., T, E].
        states: [loops, ..., T, E], logits: [loops, ..., T, V].
        kv: (layer, k, v) of prelude and core in order, and of the last readout's coda.
    """

    def __init__(
        self, model: LoopedModel, params: Any, ids: np.ndarray, loops: int, state: np.ndarray | None = None
    ) -> None:
        where = jnp.broadcast_to(jnp.arange(ids.shape[-1], dtype=jnp.int32), ids.shape)
        self.embedded = model.embed(params, jnp.asarray(ids))
        self.injected, kv = model.prelude(params, self.embedded, where, [], dense)
        zeros = jnp.zeros(self.injected.shape, jnp.float32)
        now = model.initial_state(params, self.injected, zeros) if state is None else jnp.asarray(state)
        states, logits = [], []
        for _ in range(loops):
            now, kv = model.core(params, now, self.injected, where, kv, dense)
            hidden, self.kv = model.readout(params, now, where, kv, dense)
            states.append(now)
            logits.append(model.head(params, hidden))
        self.states, self.logits = jnp.stack(states), jnp.stack(logits)


def close(actual: Any, expected: np.ndarray, atol: float = ATOL) -> None:
    assert np.shape(actual) == expected.shape
    np.testing.assert_allclose(np.asarray(actual), expected, atol=atol, rtol=0)


def greedy(recorded: Recorded, loops: int, name: str) -> None:
    """The recorded tokens and logits, by computing the whole sequence at once."""
    ids, logits = recorded.golden[f"{name}_ids"], recorded.golden[f"{name}_logits"]
    fed = np.concatenate([recorded.golden["input_ids"][: len(ids)], ids], axis=1)[:, :-1]
    found = np.asarray(recorded.run(fed, loops).logits[-1])[:, -ids.shape[1] :]
    close(found, logits)
    np.testing.assert_array_equal(found.argmax(-1), ids)


def keys_and_values(recorded: Recorded, rows: int) -> None:
    """All entries of a run of two loops, by the reference's slots: core P + r C + j, coda from -1 downwards."""
    spec, golden = recorded.model.spec, recorded.golden
    before, core = spec.num_prelude_layers, spec.num_core_layers
    kv = recorded.run(golden["input_ids"][:rows], 2).kv
    numbers = [*range(before), *(2 * [*range(before, before + core)]), *range(before + core, spec.num_layers)]
    assert [layer for layer, _, _ in kv] == numbers
    slots = [*range(before + 2 * core), *(-1 - i for i in range(spec.num_coda_layers))]
    assert sorted(slots) == golden["kv_slot_ids"].tolist()
    by_slot = dict(zip(slots, kv, strict=True))
    for i, name in ((1, "kv_keys_steps2"), (2, "kv_values_steps2")):  # keys after the rotation; [slots, B, heads, T, D]
        close(jnp.stack([jnp.swapaxes(by_slot[s][i], -2, -3) for s in golden["kv_slot_ids"].tolist()]), golden[name])


@pytest.fixture(scope="module")
def huginn() -> Recorded:
    return Recorded("huginn_tiny")


@pytest.fixture(scope="module")
def retrofit() -> Recorded:
    return Recorded("huginn_llama_tiny")


@pytest.fixture(scope="module")
def zero(huginn: Recorded) -> Run:
    """Eight loops from zeros."""
    return huginn.run(huginn.golden["input_ids"], 8)


class TestRecordedHuginn:
    """Every array of huginn_tiny that the model's functions produce; adaptive runs and KV rings are the engine's."""

    def test_embedding_and_prelude(self, huginn: Recorded, zero: Run) -> None:
        close(zero.embedded, huginn.golden["embed_scaled"])
        close(zero.injected, huginn.golden["prelude_out"])

    def test_every_loop_from_zeros(self, huginn: Recorded, zero: Run) -> None:
        close(zero.states, huginn.golden["latents_zero"])
        assert zero.logits.dtype == jnp.float32
        close(zero.logits, huginn.golden["logits_per_step_zero"])

    def test_every_loop_from_a_given_state(self, huginn: Recorded) -> None:
        run = huginn.run(huginn.golden["input_ids"], 8, huginn.golden["init_state"])
        close(run.states, huginn.golden["latents_given"])
        close(run.logits, huginn.golden["logits_per_step_given"])

    def test_keys_and_values(self, huginn: Recorded) -> None:
        keys_and_values(huginn, rows=1)

    @pytest.mark.parametrize("loops", [4, 8])
    def test_greedy(self, huginn: Recorded, loops: int) -> None:
        greedy(huginn, loops, f"greedy_steps{loops}")

    def test_exit_values_follow_from_states_and_logits(self, huginn: Recorded, zero: Run) -> None:
        """The six criteria, over what the model's functions return: nothing else goes into them."""
        golden = huginn.golden
        states = np.concatenate([np.zeros_like(zero.states[:1]), zero.states]).astype(np.float64)
        change = np.linalg.norm(states[1:] - states[:-1], axis=-1) / np.linalg.norm(states[1:], axis=-1)
        close(change, golden["latent_diff_zero"])
        close(change.mean(-1), golden["exitval_latent-diff"])
        dot = np.sum(states[2:] * states[1:-1], axis=-1)
        cosine = dot / np.linalg.norm(states[2:], axis=-1) / np.linalg.norm(states[1:-1], axis=-1)
        close(1 - cosine.mean(-1), golden["exitval_cosine"][1:])

        logits = np.asarray(zero.logits[:, :, -1], np.float64)  # of the last position
        p = np.exp(logits - logits.max(-1, keepdims=True))
        p /= p.sum(-1, keepdims=True)
        close(divergence(p), golden["exitval_kl"])
        floor = np.where(p < 0.1 * p.max(-1, keepdims=True), 1 / p.shape[-1], p)
        close(divergence(floor / floor.sum(-1, keepdims=True)), golden["exitval_minp-kl"])
        entropy = -np.sum(p * np.log(p), axis=-1)
        close(np.abs(np.diff(entropy, axis=0, prepend=100.0)), golden["exitval_entropy-diff"])
        chosen, count = logits.argmax(-1), np.zeros((8, 2))
        for r in range(1, 8):
            count[r] = np.where(chosen[r] == chosen[r - 1], count[r - 1] + 1, 0)
        np.testing.assert_array_equal(count, golden["exitval_argmax-stability"])


def divergence(p: np.ndarray) -> np.ndarray:
    """KL(previous || current) [steps, B] of p [steps, B, V]; the first previous is uniform."""
    previous = np.concatenate([np.full_like(p[:1], 1 / p.shape[-1]), p[:-1]])
    return np.sum(previous * (np.log(previous) - np.log(p)), axis=-1)


class TestRecordedRetrofit:
    """Every array of huginn_llama_tiny."""

    @pytest.mark.parametrize("start", ["zero", "given"])
    def test_states_and_logits(self, retrofit: Recorded, start: str) -> None:
        golden = retrofit.golden
        run = retrofit.run(golden["input_ids"], 8, golden["init_state"] if start == "given" else None)
        for loops in (1, 2, 4, 8):
            close(run.states[loops - 1], golden[f"latents_steps{loops}_{start}"])
            close(run.logits[loops - 1], golden[f"logits_steps{loops}_{start}"])

    def test_keys_and_values(self, retrofit: Recorded) -> None:
        keys_and_values(retrofit, rows=2)

    @pytest.mark.parametrize("loops", [1, 4])
    def test_greedy(self, retrofit: Recorded, loops: int) -> None:
        greedy(retrofit, loops, f"greedy_steps{loops}")

    def test_scaled_frequencies_matter(self, retrofit: Recorded) -> None:
        """Else the arrays above could not tell whether they are scaled."""
        plain = model_from_checkpoint(retrofit.config | {"rope_scaling": None}, ())
        run = Run(plain, retrofit.params, retrofit.golden["input_ids"], 1)
        assert np.abs(run.logits[0] - retrofit.golden["logits_steps1_zero"]).max() > 0.01


class TestInitialState:
    @pytest.mark.parametrize(("dtype", "rtol"), [(jnp.float32, 1e-6), (jnp.bfloat16, 2**-8)])
    def test_is_the_scaled_noise(self, huginn: Recorded, retrofit: Recorded, dtype: Any, rtol: float) -> None:
        noise = np.random.default_rng(3).normal(size=(5, 64)).astype(np.float32)
        noise[0] = 0
        for recorded, std in ((huginn, 8 * math.sqrt(2 / 320)), (retrofit, math.sqrt(2 / 320))):
            assert recorded.model.spec.initial_state_std == pytest.approx(std, rel=1e-12)
            state = recorded.model.initial_state(recorded.params, jnp.ones((5, 64), dtype), jnp.asarray(noise))
            assert state.dtype == dtype
            np.testing.assert_allclose(np.asarray(state, np.float64), std * noise.astype(np.float64), rtol=rtol)

    def test_the_family_starts_from_zeros_unless_asked(self, huginn: Recorded, retrofit: Recorded) -> None:
        for recorded in (huginn, retrofit):
            assert recorded.model.spec.initial_states == ("zeros", "random")
            assert recorded.model.spec.injects


def test_embedding_scale_is_not_rounded_to_bfloat16(huginn: Recorded) -> None:
    """sqrt(5280) = 72.6636 is no bfloat16 number; the reference multiplies in float32 and rounds once."""
    init = huginn.config["init_values"] | {"embed_scale": math.sqrt(5280)}
    model = model_from_config(huginn.config | {"init_values": init})
    params = jax.tree.map(lambda a: a.astype(jnp.bfloat16), huginn.params)
    ids = jnp.arange(256)
    exact = np.asarray(params.embed, np.float64) * math.sqrt(5280)
    found = model.embed(params, ids)
    assert found.dtype == jnp.bfloat16
    np.testing.assert_allclose(np.asarray(found, np.float64), exact, rtol=2**-8 * 1.001, atol=0)  # half a unit
    twice_rounded = np.asarray(params.embed * jnp.bfloat16(math.sqrt(5280)))
    assert (twice_rounded != np.asarray(found)).any(), "the scale must matter"


@pytest.mark.parametrize("name", ["huginn_tiny", "huginn_llama_tiny"])
def test_bfloat16_stays_bfloat16(name: str) -> None:
    """No step may widen the state: every weight would be converted in every loop."""
    recorded = Recorded(name)
    params = jax.tree.map(lambda a: a.astype(jnp.bfloat16), recorded.params)
    run = Run(recorded.model, params, recorded.golden["input_ids"], 2)
    kept = (run.embedded, run.injected, run.states, *(array for _, *arrays in run.kv for array in arrays))
    assert {array.dtype for array in kept} == {jnp.dtype(jnp.bfloat16)}
    assert run.logits.dtype == jnp.float32


class TestCap:
    def test_moves_on_open_ended_models(self, huginn: Recorded) -> None:
        spec = huginn.model.spec
        assert (spec.open_ended, spec.trained_loops, spec.max_loops) == (True, 8, 8)
        for cap in (1, 64):
            capped = huginn.model.with_max_loops(cap)
            assert (capped.spec.trained_loops, capped.spec.max_loops) == (8, cap)
            assert capped.with_max_loops(8) == huginn.model
            assert hash(capped) != hash(huginn.model)

    @pytest.mark.parametrize("cap", [0, -1])
    def test_is_at_least_one(self, huginn: Recorded, cap: int) -> None:
        with pytest.raises(InvalidConfig, match=f"max_loops must be >= 1, found {cap}"):
            huginn.model.with_max_loops(cap)

    def test_is_fixed_on_other_models(self) -> None:
        ouro = model_from_config(json.loads((FIXTURES / "ouro_tiny" / "config.json").read_text()))
        assert not ouro.spec.open_ended
        assert ouro.with_max_loops(4) == ouro
        for cap in (0, 3, 5):
            with pytest.raises(InvalidConfig, match=f"max_loops must be 4, the only cap of .*'ouro', found {cap}"):
                ouro.with_max_loops(cap)


# ---------------------------------------------------------------- every block against plain NumPy


class Plain:
    """The family written out once more: float64, one token at a time, tensors by their names in a checkpoint."""

    def __init__(self, config: Mapping[str, Any], tensors: Mapping[str, np.ndarray], block: Block) -> None:
        self.c, self.block = config, block
        self.w = {name: value.astype(np.float64) for name, value in tensors.items()}
        self.keys: dict[Any, list[np.ndarray]] = {}
        self.values: dict[Any, list[np.ndarray]] = {}

    def logits(self, ids: np.ndarray, loops: int) -> np.ndarray:
        c, scale = self.c, self.c["init_values"]["embed_scale"]
        head = self.w["transformer.wte.weight" if c["tie_embeddings"] else "lm_head.weight"]
        out = []
        for position, token in enumerate(ids):
            e = self.w["transformer.wte.weight"][token] * scale
            for i in range(c["n_layers_in_prelude"]):
                e = self.layer(e, f"transformer.prelude.{i}.", ("prelude", i), position)
            s = np.zeros_like(e)
            for r in range(loops):
                s = self.w["transformer.adapter.weight"] @ np.concatenate([s, e])
                for i in range(c["n_layers_in_recurrent_block"]):
                    s = self.layer(s, f"transformer.core_block.{i}.", (r, i), position)
            if self.block is Block.HUGINN:
                s = self.norm(s, "transformer.ln_f.weight")
            for i in range(c["n_layers_in_coda"]):
                s = self.layer(s, f"transformer.coda.{i}.", ("coda", i), position)
            out.append(head @ self.norm(s, "transformer.ln_f.weight"))
        return np.array(out)

    def norm(self, x: np.ndarray, name: str) -> np.ndarray:
        return self.w[name] * x / np.sqrt(np.mean(x**2) + self.c["norm_eps"])

    def layer(self, x: np.ndarray, at: str, slot: Any, position: int) -> np.ndarray:
        n = [at + f"norm_{i}.weight" for i in range(5)]
        match self.block:
            case Block.HUGINN:
                x = self.norm(x + self.attention(self.norm(x, n[1]), at, slot, position), n[2])
                return self.norm(x + self.mlp(self.norm(x, n[3]), at), n[4])
            case Block.LLAMA:
                x = x + self.attention(self.norm(x, n[1]), at, slot, position)
                return x + self.mlp(self.norm(x, n[2]), at)
            case Block.OLMO:
                x = x + self.norm(self.attention(x, at, slot, position), n[1])
                return x + self.norm(self.mlp(x, at), n[2])

    def mlp(self, x: np.ndarray, at: str) -> np.ndarray:
        a, b = np.split(self.w[at + "mlp.fc.weight"] @ x, 2)
        return self.w[at + "mlp.proj.weight"] @ (a / (1 + np.exp(-a)) * b)

    def attention(self, x: np.ndarray, at: str, slot: Any, position: int) -> np.ndarray:
        heads, kv_heads, d = self.c["n_heads"], self.c["num_key_value_heads"], self.c["head_dim"]
        qkv = self.w[at + "attn.Wqkv.weight"] @ x
        q, k, v = qkv[: heads * d], qkv[heads * d : -kv_heads * d], qkv[-kv_heads * d :]
        if self.block is Block.OLMO:  # over the whole width, before the heads are split
            q, k = self.norm(q, at + "attn.q_norm.weight"), self.norm(k, at + "attn.k_norm.weight")
        q, k, v = q.reshape(heads, d), k.reshape(kv_heads, d), v.reshape(kv_heads, d)
        if self.block is Block.HUGINN:
            bias = self.w[at + "attn.qk_bias"][:, 0]
            q, k = q + bias[0], k + bias[1]
        q, k = (np.array([self.turn(row, position) for row in rows]) for rows in (q, k))
        self.keys.setdefault(slot, []).append(k)
        self.values.setdefault(slot, []).append(v)
        mixed = []
        for h in range(heads):
            group = h // (heads // kv_heads)
            score = np.array([key[group] @ q[h] for key in self.keys[slot]]) / np.sqrt(d)
            weight = np.exp(score - score.max())
            mixed.append(weight @ np.array([value[group] for value in self.values[slot]]) / weight.sum())
        return self.w[at + "attn.proj.weight"] @ np.concatenate(mixed)

    def turn(self, x: np.ndarray, position: int) -> np.ndarray:
        half, original = len(x) // 2, self.block is Block.HUGINN
        theta = self.c["rope_base" if original else "rope_theta"]
        turn = np.exp(1j * position * scaled(theta ** (-np.arange(half) / half), self.c.get("rope_scaling")))
        if original:
            z = (x[0::2] + 1j * x[1::2]) * turn
            return np.stack([z.real, z.imag], axis=1).reshape(-1)
        z = (x[:half] + 1j * x[half:]) * turn
        return np.concatenate([z.real, z.imag])


def scaled(frequencies: np.ndarray, scaling: Mapping[str, Any] | None) -> np.ndarray:
    """Llama 3's rule, case by case: short wavelengths stay, long ones are stretched, those between are mixed."""
    if scaling is None:
        return frequencies
    low, high, context = (
        scaling[f] for f in ("low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    )
    out = []
    for frequency in frequencies:
        wavelength = 2 * math.pi / frequency
        if wavelength < context / high:
            out.append(frequency)
        elif wavelength > context / low:
            out.append(frequency / scaling["factor"])
        else:
            smooth = (context / wavelength - low) / (high - low)
            out.append((1 - smooth) * frequency / scaling["factor"] + smooth * frequency)
    return np.array(out)


@st.composite
def shapes(draw: st.DrawFn) -> tuple[Block, dict[str, Any]]:
    block = draw(st.sampled_from(list(Block)))
    kv_heads, head_dim = draw(st.integers(1, 3)), 2 * draw(st.integers(1, 6))
    heads = kv_heads * (1 if block is Block.HUGINN else draw(st.integers(1, 4)))
    config: dict[str, Any] = {
        "model_type": "huginn_raven",
        "vocab_size": draw(st.integers(2, 40)),
        "n_embd": draw(st.integers(1, 24)),
        "n_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "intermediate_size": draw(st.integers(1, 30)),
        "n_layers_in_prelude": draw(st.integers(1, 2)),
        "n_layers_in_recurrent_block": draw(st.integers(1, 3)),
        "n_layers_in_coda": draw(st.integers(1, 2)),
        "mean_recurrence": draw(st.integers(1, 4)),
        "block_size": 64,
        "norm_eps": draw(st.sampled_from([1e-6, 1e-5])),
        "init_values": {"embed_scale": draw(st.sampled_from([1.0, 2.5]))},
        "qk_bias": block is Block.HUGINN,
        "tie_embeddings": draw(st.booleans()),
        "rope_base" if block is Block.HUGINN else "rope_theta": draw(st.sampled_from([100.0, 5e5])),
    }
    if block is not Block.HUGINN and draw(st.booleans()):
        config["rope_scaling"] = {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": draw(st.sampled_from([8, 32])),
        }
    return block, config


def random_tensors(config: Mapping[str, Any], block: Block, seed: int) -> dict[str, np.ndarray]:
    """A checkpoint of the names and shapes that the published files have."""
    c = config
    e, f, v = c["n_embd"], c["intermediate_size"], c["vocab_size"]
    q, kv = c["n_heads"] * c["head_dim"], c["num_key_value_heads"] * c["head_dim"]
    shapes = {
        "transformer.wte.weight": (v, e),
        "transformer.adapter.weight": (e, 2 * e),
        "transformer.ln_f.weight": (e,),
        "lm_head.weight": (v, e),
    }
    parts = {"prelude": "prelude", "core_block": "recurrent_block", "coda": "coda"}
    for at in (f"transformer.{p}.{i}." for p, n in parts.items() for i in range(c[f"n_layers_in_{n}"])):
        shapes |= {at + f"norm_{i}.weight": (e,) for i in range(1, 5 if block is Block.HUGINN else 3)}
        shapes |= {at + "attn.Wqkv.weight": (q + 2 * kv, e), at + "attn.proj.weight": (e, q)}
        shapes |= {at + "mlp.fc.weight": (2 * f, e), at + "mlp.proj.weight": (e, f)}
        if block is Block.HUGINN:
            shapes[at + "attn.qk_bias"] = (2, 1, c["n_heads"], c["head_dim"])
        if block is Block.OLMO:
            shapes |= {at + "attn.q_norm.weight": (q,), at + "attn.k_norm.weight": (kv,)}
    if block is Block.HUGINN:
        shapes["freqs_cis"] = (1, c["block_size"], 1, c["head_dim"] // 2, 2)
    random = np.random.default_rng(seed)
    return {
        name: random.normal(1.0 if len(shape) == 1 else 0.0, 0.3, shape).astype(np.float32)
        for name, shape in shapes.items()
    }


@settings(max_examples=25, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
@given(shapes(), st.integers(0, 2**32 - 1), st.integers(1, 9), st.integers(1, 3))
def test_any_shape_of_any_block_equals_plain_numpy(
    shape: tuple[Block, dict[str, Any]], seed: int, length: int, loops: int
) -> None:
    block, config = shape
    tensors = random_tensors(config, block, seed)
    model = model_from_checkpoint(config, tensors)
    assert isinstance(model, Huginn)
    assert model.block is block
    ids = np.random.default_rng(seed).integers(0, config["vocab_size"], length)
    found = Run(model, parameters(model, tensors), ids, loops).logits[-1]
    np.testing.assert_allclose(found, Plain(config, tensors, block).logits(ids, loops), atol=ATOL, rtol=1e-3)


def test_plain_numpy_reproduces_the_references(huginn: Recorded, retrofit: Recorded) -> None:
    """Else agreement with it would prove little."""
    for recorded, block, name in (
        (huginn, Block.HUGINN, "logits_per_step_zero"),
        (retrofit, Block.LLAMA, "logits_steps2_zero"),
    ):
        expected = recorded.golden[name][1] if block is Block.HUGINN else recorded.golden[name]
        tensors = read_tensors(FIXTURES / ("huginn_tiny" if block is Block.HUGINN else "huginn_llama_tiny"))
        for row in (0, 1):
            found = Plain(recorded.config, tensors, block).logits(recorded.golden["input_ids"][row], 2)
            close(found, expected[row])


def test_released_llama_frequencies() -> None:
    """Llama-3.2-1B: factor 32 over 8192 positions; the fast half stays, the slow end is stretched by the factor."""
    section = {
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    scaling = Llama3Scaling(factor=32.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_positions=8192)
    plain = 5e5 ** (-np.arange(32) / 32)
    found = np.asarray(rope_frequencies(32, 5e5, scaling))
    np.testing.assert_allclose(found, scaled(plain, section), rtol=2e-6)
    np.testing.assert_allclose(found[:15], plain[:15], rtol=2e-6)
    np.testing.assert_allclose(found[18:], plain[18:] / 32, rtol=2e-6)
    assert ((found < plain * 0.999) & (found > plain / 31)).sum() >= 2, "some are mixed"
