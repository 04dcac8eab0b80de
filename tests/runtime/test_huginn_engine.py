"""A model with a prelude, an injected core and a coda, through the engine that was built around whole-stack models.

PROTECTS: recorded tokens and depths exactly, for every KV layout that a reference recorded; what is written where; and
that what such a model cannot do is refused by name.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from rlt_jax import EngineConfig, InvalidConfig, InvalidRequest, LLMEngine
from tests.engines import Job, Result, alone, drained, sampling, serve
from tests.oracle import Policy, judge
from tests.oracle.huginn_checkpoint import HuginnShape
from tests.oracle.ouro import log_softmax
from tests.runtime.huginn import RETROFIT, TINY, engine, of_layout, oracle, policy_of, random_checkpoint

ATOL = 2e-4  # the fixtures' recommendation
LONG = [(37 * i + 11) % 256 for i in range(30)]


@pytest.fixture(scope="module")
def golden() -> dict[str, np.ndarray]:
    return dict(np.load(TINY / "golden.npz"))


@pytest.fixture(scope="module")
def retrofit() -> dict[str, np.ndarray]:
    return dict(np.load(RETROFIT / "golden.npz"))


def follows(result: Result, ids: np.ndarray, logits: np.ndarray | None = None) -> None:
    """Tokens exactly, and log-probabilities where logits were recorded."""
    assert result.tokens == ids.tolist()
    if logits is not None:
        expected = np.take_along_axis(log_softmax(logits), ids[:, None], -1)[:, 0]
        np.testing.assert_allclose(result.logprobs, expected, atol=ATOL, rtol=0)


class TestRecorded:
    """huginn_tiny: prelude 2, core 4, coda 2, eight loops; huginn_llama_tiny: 2, 3, 2, grouped heads, four loops."""

    @pytest.mark.parametrize("loops", [4, 8])
    @pytest.mark.parametrize("layout", ["last_exited", "drop"])
    def test_fixed_depth(self, golden, loops: int, layout: str) -> None:
        """The prompt's depth follows the request's max_loops."""
        result = alone(of_layout(layout), golden["input_ids"][0].tolist(), sampling(max_loops=loops))
        follows(result, golden[f"greedy_steps{loops}_ids"][0], golden[f"greedy_steps{loops}_logits"][0])
        assert set(result.depths) == {loops}

    @pytest.mark.parametrize("row", [0, 1])
    @pytest.mark.parametrize("loops", [1, 4])
    def test_retrofit(self, retrofit, row: int, loops: int) -> None:
        result = alone(engine(RETROFIT), retrofit["input_ids"][row].tolist(), sampling(max_loops=loops))
        follows(result, retrofit[f"greedy_steps{loops}_ids"][row], retrofit[f"greedy_steps{loops}_logits"][row])
        assert set(result.depths) == {loops}

    @pytest.mark.parametrize("loops", range(1, 9))
    def test_every_depth_of_a_prompt(self, golden, loops: int) -> None:
        prompts = [row[:n].tolist() for row in golden["input_ids"] for n in (1, 4, 5, 6, 12)]
        jobs = [
            Job(id=f"r{i}", prompt=p, params=sampling(max_tokens=1, prefill_loops=loops)) for i, p in enumerate(prompts)
        ]
        results = serve(engine(), jobs)
        recorded = log_softmax(golden["logits_per_step_zero"][loops - 1])  # [2, 12, V]
        for i, row in enumerate(recorded[:, [0, 3, 4, 5, 11]].reshape(10, -1)):
            assert results[f"r{i}"].tokens == [int(row.argmax())]
            np.testing.assert_allclose(results[f"r{i}"].logprobs[0], row.max(), atol=ATOL, rtol=0)
            assert results[f"r{i}"].depths == [loops]

    @pytest.mark.parametrize(("layout", "lookup"), [("drop", "full"), ("last_exited", "latest-m4")])
    @pytest.mark.parametrize(
        ("name", "threshold", "criterion"), [("latent", 0.12, "latent-diff"), ("kl", 0.02, "kl")], ids=["latent", "kl"]
    )
    def test_adaptive(self, golden, layout: str, lookup: str, name: str, threshold: float, criterion: str) -> None:
        """The recorded prompt decided its own depth; here it is given, and the outputs decide theirs."""
        ids, steps = (golden[f"adaptive_{lookup}_{criterion}_{what}"] for what in ("ids", "steps"))
        params = sampling(exit_policy=name, exit_threshold=threshold, min_loops=1, prefill_loops=int(steps[0]))
        target = of_layout(layout)
        result = alone(target, golden["input_ids"][0].tolist(), params)
        follows(result, ids[0])
        assert result.depths == steps.tolist()
        assert len(set(result.depths)) > 1

    @pytest.mark.parametrize(("planes", "lookup"), [(1, "latest-m4-compress-s4"), (2, "compress-s8")])
    def test_ring(self, golden, planes: int, lookup: str) -> None:
        """These ids are also those without a ring: the oracle's log-probabilities tell that it was used."""
        target = of_layout("ring", planes)
        prompt = golden["input_ids"][0].tolist()
        result = alone(target, prompt, sampling())
        follows(result, golden[f"greedy_steps8_{lookup}_ids"][0])
        policy = Policy(name="fixed", max_loops=8)
        errors = [
            judge(
                truth, prompt, policy, tokens=result.tokens, depths=result.depths, logprobs=result.logprobs
            ).logprob_error
            for truth in (oracle(TINY, "ring", planes), oracle(TINY, "last_exited"))
        ]
        assert errors[0] < ATOL
        assert errors[1] > 10 * ATOL

    @pytest.mark.parametrize("threshold", [None, 1, 2])
    def test_argmax(self, golden, threshold: int | None) -> None:
        """No reference generates by it: the oracle does, whose counts are the recorded ones."""
        prompt = golden["input_ids"][0].tolist()
        params = sampling(exit_policy="argmax", exit_threshold=threshold, min_loops=1)
        result = alone(engine(), prompt, params)
        steps = oracle(TINY, "last_exited").run(prompt, 12, policy_of(params, cap=8))
        assert result.tokens == [s.token for s in steps]
        assert result.depths == [s.depth for s in steps]
        assert min(result.depths[1:]) == {None: 6, 1: 2, 2: 3}[threshold]


def test_stop_ids_and_usage(golden) -> None:
    prompt = golden["input_ids"][0].tolist()
    free = alone(engine(), prompt, sampling(max_loops=4))
    result = alone(engine(), prompt, sampling(max_loops=4, stop_token_ids=(free.tokens[3],)))
    assert result.tokens == free.tokens[: free.tokens.index(free.tokens[3]) + 1]
    assert result.usage.prompt_loops == 12 * 4
    assert result.usage.decode_loops == 4 * (len(result.tokens) - 1)


@pytest.mark.parametrize("layout", ["last_exited", "drop", "shared", "ring"])
def test_pages_hold_every_group_of_layers(layout: str) -> None:
    """A sentinel fills the pool.  After a run, exactly the request's positions have changed.

    In prelude and coda in their one plane, in the core in those that its depth reached or wrote through.
    """
    sentinel, prompt, outputs, loops = np.float32(-77.25), LONG[:5], 6, 3
    target = of_layout(layout, 2)
    drained(target)
    runner = target._runner
    k, v = (tuple(jnp.full_like(a, sentinel) for a in arrays) for arrays in (runner._kv.k, runner._kv.v))
    runner._kv = dataclasses.replace(runner._kv, k=k, v=v)
    request = target.add_request("one", prompt, sampling(max_tokens=outputs, max_loops=loops))
    pages: tuple[int, ...] = ()
    while target.has_work():
        target.step()
        pages = target._pages.table(request) or pages
    size, written = target.config.page_size, len(prompt) + outputs - 1
    expected = np.zeros((target.stats()["pages_total"], size), bool)
    for position in range(written):
        expected[pages[position // size], position % size] = True
    for arrays in (runner._kv.k, runner._kv.v):
        assert len(arrays) == 8
        for layer, array in enumerate(arrays):
            changed = np.asarray(array) != sentinel  # [pages, planes, heads, page, D]
            core = 2 <= layer < 6
            assert changed.shape[1] == (target.model_info()["kv_planes"] if core else 1)
            reached = loops if core and layout == "drop" else changed.shape[1]
            for plane in range(changed.shape[1]):
                np.testing.assert_array_equal(
                    changed[:, plane].all(axis=(1, 3)), expected if plane < reached else np.zeros_like(expected)
                )
                assert plane < reached or not changed[:, plane].any()
    if layout == "drop":
        depth = np.asarray(runner._kv.exit_depth)
        assert set(depth[expected]) == {loops}
    drained(target)


def test_what_the_engine_says_about_itself() -> None:
    target = engine()
    model, server = target.model_info(), target.server_info()
    entry = 2 * 4 * 16 * 4  # K and V of four heads of 16 in float32
    assert model["kv_bytes_per_token"] == entry * (2 + 4 * 8 + 2)
    assert server["memory_plan"]["bytes_per_page"] == 4 * model["kv_bytes_per_token"]
    kv = target._runner._kv
    assert sum(a.nbytes for a in (*kv.k, *kv.v)) == server["memory_plan"]["kv_bytes"]
    assert model["exit_policies"] == ["fixed", "trace", "latent", "kl", "argmax"]
    assert (model["open_ended"], model["max_loops"], model["trained_loops"]) == (True, 8, 8)
    assert (model["kv_layout"], model["kv_planes"]) == ("last_exited", 8)
    assert model["initial_states"] == ["zeros", "random"]
    assert server["boundary_batch"] == 3
    defaults = server["defaults"]
    assert (defaults["exit_policy"], defaults["min_loops"], defaults["max_loops"]) == ("fixed", 2, 8)
    assert (defaults["prefill_loops"], defaults["initial_state"]) == (8, "zeros")
    assert of_layout("drop").model_info()["kv_bytes_per_token"] == entry * (2 + 4 * 8 + 2) + 4
    assert of_layout("ring", 2).model_info()["kv_bytes_per_token"] == entry * (2 + 4 * 2 + 2)


REFUSED = {
    "gate": ({"exit_policy": "gate"}, "exit_policy", ["gate needs the score 'gate'", "'latent', 'kl', 'argmax'"]),
    "delayed": ({"exit_policy": "ouro_delayed"}, "exit_policy", ["gate_delayed", "'gate'"]),
    "negative latent": ({"exit_policy": "latent", "exit_threshold": -0.1}, "exit_threshold", ["-0.1", "[0, 3.4e+38]"]),
    "infinite kl": ({"exit_policy": "kl", "exit_threshold": float("inf")}, "exit_threshold", ["inf", "finite"]),
    "no count": ({"exit_policy": "argmax", "exit_threshold": 0}, "exit_threshold", ["0", "[1, 1.67772e+07]"]),
    "half a count": ({"exit_policy": "argmax", "exit_threshold": 2.5}, "exit_threshold", ["2.5", "whole number"]),
    "threshold, no policy": ({"exit_threshold": 0.02}, "exit_threshold", ["'fixed'", "one of latent, kl, argmax"]),
    "threshold of fixed": ({"exit_policy": "fixed", "exit_threshold": 1.5}, "exit_threshold", ["1.5", "[0, 1]"]),
    "beyond the cap": ({"max_loops": 9}, "max_loops", ["9", "[1, 8]"]),
    "prompt beyond the cap": ({"prefill_loops": 9}, "prefill_loops", ["9", "[1, 8]"]),
    "trace not from the prompt": ({"exit_trace": (4, 2), "max_tokens": 2}, "exit_trace", ["entry 0 is 4", "8"]),
    "injected": ({"initial_state": "injected"}, "initial_state", ["'injected'", "zeros, random", "huginn_raven"]),
    "number": ({"initial_state": 1}, "initial_state", ["1", "zeros, random"]),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_requests(case: str) -> None:
    settings, field, fragments = REFUSED[case]
    with pytest.raises(InvalidRequest) as caught:
        engine().add_request("bad", [1, 2], sampling(**settings))
    assert caught.value.field == field
    for fragment in fragments:
        assert fragment in caught.value.description
    drained(engine())


def test_a_ring_takes_one_chunk() -> None:
    target = of_layout("ring", 2)
    with pytest.raises(InvalidRequest) as caught:
        target.add_request("bad", [1] * 17, sampling())
    assert caught.value.field == "prompt"
    for fragment in ("17 tokens", "kv_layout=ring", "prefill_chunk=16"):
        assert fragment in caught.value.description
    assert len(alone(target, [1] * 16, sampling(max_tokens=2)).tokens) == 2


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"initial_state": "injected"}, r"initial_state='injected'.*zeros, random"),
        ({"kv_layout": "ring", "kv_planes": 4, "max_loops": 3}, r"kv_planes must be in \[1, 3\] with max_loops=3.*4"),
        ({"kv_layout": "drop", "kernels": "triton"}, r"kernels=triton cannot serve"),
    ],
)
def test_refused_settings(settings: dict, message: str) -> None:
    with pytest.raises((InvalidConfig, NotImplementedError), match=message):
        LLMEngine(TINY, EngineConfig(dtype="float32", **settings))


@pytest.mark.parametrize(("layout", "planes", "warns"), [("ring", 2, True), ("ring", 3, False), ("drop", None, False)])
def test_a_layout_that_forgets_loops_says_so(caplog, layout: str, planes: int | None, warns: bool) -> None:
    config = EngineConfig(
        dtype="float32", kv_layout=layout, kv_planes=planes, max_loops=3, slots=1, max_context=16, page_size=8
    )
    with caplog.at_level("WARNING", logger="rlt_jax.runtime.engine"), LLMEngine(TINY, config):
        pass
    assert any(f"kv_layout=ring keeps {planes} of 3 loops" in r.message for r in caplog.records) == warns


@pytest.fixture(scope="module")
def deep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model that was trained at a depth of 128."""
    path, small = tmp_path_factory.mktemp("deep"), random_checkpoint(HuginnShape())
    config = json.loads((small / "config.json").read_text()) | {"mean_recurrence": 128}
    (path / "config.json").write_text(json.dumps(config))
    (path / "model.safetensors").symlink_to(small / "model.safetensors")
    return path


def test_a_checkpoint_deeper_than_given_depths_can_say(deep: Path) -> None:
    with pytest.raises(InvalidConfig, match=r"max_loops=128 of the model exceeds 127: set max_loops"):
        LLMEngine(deep, EngineConfig(dtype="float32"))


def test_thirty_two_loops_in_bfloat16(deep: Path) -> None:
    """Planes are an axis of the arrays, not the length of a program; and every program takes the dtype."""
    target = engine(deep, dtype="bfloat16", max_loops=32, initial_state="random")
    model, server = target.model_info(), target.server_info()
    assert (model["max_loops"], model["kv_planes"], model["trained_loops"]) == (32, 32, 128)
    assert server["compile_seconds"] < 60
    assert (server["defaults"]["prefill_loops"], server["defaults"]["initial_state"]) == (32, "random")
    result = alone(target, [1, 2, 3], sampling(max_tokens=3))
    assert result.depths == [32] * 3
    assert result.usage.prompt_loops == 96
    assert target.prepare("r", [1], sampling(max_loops=5)).params.prefill_loops == 5
    for name in ("kl", "latent", "argmax"):
        result = alone(target, [1, 2, 3], sampling(max_tokens=4, exit_policy=name, exit_threshold=1, min_loops=1))
        assert result.depths[0] == 32
        assert max(result.depths[1:]) < 32


def test_a_default_threshold_belongs_to_its_policy() -> None:
    prepared = {
        name: engine().prepare("r", [1], sampling(exit_policy=name)).params.exit_threshold
        for name in ("latent", "kl", "argmax", "fixed")
    }
    assert prepared == {"latent": 0.03, "kl": 1e-3, "argmax": 5.0, "fixed": 1.0}
