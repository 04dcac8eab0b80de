"""The oracle of the Huginn family.

PROTECTS: every engine test of the family trusts it; here it must reproduce what the public references recorded
(golden.npz of both fixtures), its KV layouts must be what a literal store of planes gives, and what no fixture records
(the OLMo-2 block, shared planes, bounds of the exits) is checked against a property that only the right rule has.
"""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.oracle import DROP, LAST_EXITED, RING, SHARED, HuginnOracle, Policy, judge
from tests.oracle.checkpoint import read_tensors, write_checkpoint
from tests.oracle.huginn import exit_score, log_softmax, scaled_frequencies, visible_loop
from tests.oracle.huginn_checkpoint import HUGINN, LLAMA, OLMO2, HuginnShape, huginn_checkpoint, shapes

ROOT = Path(__file__).parent.parent.parent
FIXTURES = ROOT / "tests" / "fixtures"
TINY, RETROFIT = FIXTURES / "huginn_tiny", FIXTURES / "huginn_llama_tiny"
ATOL = {np.float64: 3e-5, np.float32: 5e-5}  # the references are float32 themselves; 1e-5 was seen
FIXED_8 = Policy(name="fixed", max_loops=8)
PROMPT = [5, 9, 60, 31, 17]

rows = pytest.mark.parametrize("row", [0, 1])
dtypes = pytest.mark.parametrize("dtype", ATOL)


@pytest.fixture(scope="module")
def golden() -> dict[str, np.ndarray]:
    return dict(np.load(TINY / "golden.npz"))


@pytest.fixture(scope="module")
def retrofit() -> dict[str, np.ndarray]:
    return dict(np.load(RETROFIT / "golden.npz"))


@pytest.fixture(scope="module")
def olmo2() -> tuple[dict, dict[str, np.ndarray]]:
    return huginn_checkpoint(HuginnShape(block=OLMO2, kv_heads=2, width=24), 3)


def close(actual: np.ndarray, expected: np.ndarray, dtype: type = np.float64) -> None:
    np.testing.assert_allclose(actual, expected, atol=ATOL[dtype], rtol=0)


def initial_state(golden: dict[str, np.ndarray], row: int, kind: str):
    return None if kind == "zero" else lambda position: golden["init_state"][row, position]


def random_oracle(block: str, *, seed: int = 0, layout: str = LAST_EXITED, planes: int | None = None, **sizes: object):
    config, tensors = huginn_checkpoint(HuginnShape(block=block, **sizes), seed)
    return HuginnOracle(None, config=config, tensors=tensors, layout=layout, planes=planes)


def test_shares_no_code_with_the_package() -> None:
    script = "import sys, tests.oracle.huginn, tests.oracle.judge; print([m for m in sys.modules if 'rlt_jax' in m])"
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip() == "[]"


class TestDenseModel:
    """States and logits after every loop, as the references recorded them."""

    @rows
    @dtypes
    @pytest.mark.parametrize("kind", ["zero", "given"])
    def test_huginn(self, golden, row: int, dtype: type, kind: str) -> None:
        oracle = HuginnOracle(TINY, dtype=dtype)
        assert oracle.block == HUGINN
        seen = oracle.trajectory(golden["input_ids"][row], 8, initial_state=initial_state(golden, row, kind))
        assert {a.dtype for a in (seen.injected, seen.states, seen.logits)} == {np.dtype(dtype)}
        close(seen.embedded, golden["embed_scaled"][row], dtype)
        close(seen.injected, golden["prelude_out"][row], dtype)
        close(seen.states[1:], golden[f"latents_{kind}"][:, row], dtype)
        close(seen.logits, golden[f"logits_per_step_{kind}"][:, row], dtype)

    @rows
    @dtypes
    @pytest.mark.parametrize("kind", ["zero", "given"])
    def test_llama_retrofit(self, retrofit, row: int, dtype: type, kind: str) -> None:
        oracle = HuginnOracle(RETROFIT, dtype=dtype)
        assert oracle.block == LLAMA
        seen = oracle.trajectory(retrofit["input_ids"][row], 8, initial_state=initial_state(retrofit, row, kind))
        for loops in (1, 2, 4, 8):
            close(seen.states[loops], retrofit[f"latents_steps{loops}_{kind}"][row], dtype)
            close(seen.logits[loops - 1], retrofit[f"logits_steps{loops}_{kind}"][row], dtype)

    @pytest.mark.parametrize("fixture", [TINY, RETROFIT], ids=lambda path: path.name)
    def test_kv_of_every_slot(self, fixture: Path) -> None:
        recorded = np.load(fixture / "golden.npz")
        oracle = HuginnOracle(fixture)
        core = oracle.layers["core_block"]
        for row in range(recorded["kv_keys_steps2"].shape[1]):
            memory = oracle.trajectory(recorded["input_ids"][row], 2).memory
            for slot, keys, values in zip(
                recorded["kv_slot_ids"],
                recorded["kv_keys_steps2"][:, row],
                recorded["kv_values_steps2"][:, row],
                strict=True,
            ):
                if slot < 0:
                    stage, where = "coda", (0, -slot - 1)
                elif slot < 2:
                    stage, where = "prelude", (0, slot)
                else:
                    stage, where = "core_block", divmod(slot - 2, core)
                close(memory.keys[stage][where].swapaxes(0, 1), keys)
                close(memory.values[stage][where].swapaxes(0, 1), values)

    @rows
    def test_exit_scores(self, golden, row: int) -> None:
        """Recorded per prompt: latent as the mean over positions, the others of the last position."""
        seen = HuginnOracle(TINY).trajectory(golden["input_ids"][row], 8)
        for r in range(1, 9):
            latent = [exit_score("latent", seen.states[: r + 1, t], []) for t in range(12)]
            np.testing.assert_allclose(latent, golden["latent_diff_zero"][r - 1, row], atol=1e-6)
            np.testing.assert_allclose(np.mean(latent), golden["exitval_latent-diff"][r - 1, row], atol=1e-6)
            last = seen.logits[:r, -1]
            np.testing.assert_allclose(exit_score("kl", [], last), golden["exitval_kl"][r - 1, row], atol=2e-6)
            assert exit_score("argmax", [], last) == golden["exitval_argmax-stability"][r - 1, row]
        assert golden["exitval_argmax-stability"][:, row].max() >= 5


class TestGeneration:
    @pytest.mark.parametrize("layout", [LAST_EXITED, DROP])
    @pytest.mark.parametrize("loops", [4, 8])
    @dtypes
    def test_huginn_at_fixed_depth(self, golden, layout: str, loops: int, dtype: type) -> None:
        policy = Policy(name="fixed", max_loops=loops)
        steps = HuginnOracle(TINY, dtype=dtype, layout=layout).run(golden["input_ids"][0], 12, policy)
        assert [s.token for s in steps] == golden[f"greedy_steps{loops}_ids"][0].tolist()
        close([s.logits for s in steps], golden[f"greedy_steps{loops}_logits"][0], dtype)
        assert {s.depth for s in steps} == {loops}

    @rows
    @pytest.mark.parametrize("loops", [1, 4])
    def test_llama_retrofit_at_fixed_depth(self, retrofit, row: int, loops: int) -> None:
        policy = Policy(name="fixed", max_loops=loops)
        steps = HuginnOracle(RETROFIT).run(retrofit["input_ids"][row], 12, policy)
        assert [s.token for s in steps] == retrofit[f"greedy_steps{loops}_ids"][row].tolist()
        close([s.logits for s in steps], retrofit[f"greedy_steps{loops}_logits"][row])

    @dtypes
    @pytest.mark.parametrize(("layout", "lookup"), [(DROP, "full"), (LAST_EXITED, "latest-m4")])
    @pytest.mark.parametrize(
        ("name", "threshold", "criterion"), [("latent", 0.12, "latent-diff"), ("kl", 0.02, "kl")], ids=["latent", "kl"]
    )
    def test_adaptive(
        self, golden, layout: str, lookup: str, name: str, threshold: float, criterion: str, dtype: type
    ) -> None:
        """The recorded prompt decided its own depth; here it is given, and the outputs decide theirs."""
        recorded = {key: golden[f"adaptive_{lookup}_{criterion}_{key}"] for key in ("ids", "steps", "exitvals")}
        policy = Policy(name=name, threshold=threshold, min_loops=1, max_loops=8)
        oracle = HuginnOracle(TINY, dtype=dtype, layout=layout)
        steps = oracle.run(golden["input_ids"][0], 12, policy, prefill_loops=int(recorded["steps"][0]))
        assert [s.token for s in steps] == recorded["ids"][0].tolist()
        assert [s.depth for s in steps] == recorded["steps"].tolist()
        np.testing.assert_allclose([s.scores[-1] for s in steps[1:]], recorded["exitvals"][1:], atol=1e-5)
        assert all(len(s.scores) == s.depth for s in steps[1:])

    @pytest.mark.parametrize(("planes", "lookup"), [(1, "latest-m4-compress-s4"), (2, "compress-s8")])
    def test_ring_at_fixed_depth(self, golden, planes: int, lookup: str) -> None:
        steps = HuginnOracle(TINY, layout=RING, planes=planes).run(golden["input_ids"][0], 12, FIXED_8)
        assert [s.token for s in steps] == golden[f"greedy_steps8_{lookup}_ids"][0].tolist()
        # these ids are also those without a ring: the logits are what tells that the ring was used
        plain = HuginnOracle(TINY).run(golden["input_ids"][0], 12, FIXED_8)
        assert np.abs(steps[0].logits - plain[0].logits).max() == 0
        assert np.abs(steps[1].logits - plain[1].logits).max() > 1e-3

    @pytest.mark.parametrize("block", [HUGINN, LLAMA, OLMO2])
    def test_decoding_at_fixed_depth_is_the_dense_model(self, block: str) -> None:
        oracle = random_oracle(block, kv_heads=4 if block == HUGINN else 2)
        steps = oracle.run(PROMPT, 6, Policy(name="fixed", max_loops=5))
        sequence = [*PROMPT, *(s.token for s in steps)]
        dense = oracle.trajectory(sequence, 5).logits[-1]
        np.testing.assert_allclose([s.logits for s in steps], dense[len(PROMPT) - 1 : -1], atol=1e-12)

    @pytest.mark.parametrize("layout", [LAST_EXITED, DROP, RING, SHARED])
    def test_following_a_run_reproduces_it(self, layout: str) -> None:
        oracle = HuginnOracle(TINY, layout=layout, planes=3 if layout == RING else None)
        policy = Policy(name="kl", threshold=0.02, min_loops=2, max_loops=8)
        run = oracle.run(PROMPT, 12, policy, prefill_loops=5)
        tokens, depths = [s.token for s in run], [s.depth for s in run]
        assert len(set(depths[1:])) > 1, "the run must mix depths to mean anything"
        again = oracle.run(PROMPT, 12, policy, prefill_loops=5, tokens=tokens, depths=depths)
        for a, b in zip(run, again, strict=True):
            assert (a.token, a.depth, a.scores) == (b.token, b.depth, b.scores)
            np.testing.assert_array_equal(a.logits, b.logits)
        trace = Policy(name="trace", trace=tuple(depths), max_loops=8)
        replayed = oracle.run(PROMPT, 12, trace, prefill_loops=5)
        assert [s.token for s in replayed] == tokens
        np.testing.assert_allclose([s.logits for s in replayed], [s.logits for s in run], atol=1e-12)

    def test_initial_state_of_every_position(self) -> None:
        """The prompt's and the outputs' positions alike; it must reach the logits and say the right position."""
        oracle, asked = HuginnOracle(TINY), []

        def state(position: int) -> np.ndarray:
            asked.append(position)
            return np.random.default_rng(position).standard_normal(64)

        steps = oracle.run(PROMPT, 4, Policy(name="fixed", max_loops=3), initial_state=state)
        assert asked == list(range(len(PROMPT) + 3))
        sequence = [*PROMPT, *(s.token for s in steps)]
        dense = oracle.trajectory(sequence, 3, initial_state=state).logits[-1]
        np.testing.assert_allclose([s.logits for s in steps], dense[len(PROMPT) - 1 : -1], atol=1e-12)
        zeros = oracle.run(PROMPT, 1, Policy(name="fixed", max_loops=3))
        assert np.abs(zeros[0].logits - steps[0].logits).max() > 1e-2

    def test_stop_ids_end_a_run(self, golden) -> None:
        steps = HuginnOracle(TINY).run(golden["input_ids"][0], 12, FIXED_8, stop=frozenset({139}))
        assert [s.token for s in steps] == golden["greedy_steps8_ids"][0, :3].tolist()


class TestLayouts:
    """`visible_loop` against planes that are really overwritten, and what follows for whole runs."""

    @given(exit_depth=st.integers(1, 12), loop=st.integers(0, 11), planes=st.integers(1, 12))
    def test_rule_is_what_stored_planes_give(self, exit_depth: int, loop: int, planes: int) -> None:
        def stored(slots: int) -> dict[int, int]:
            """Plane -> the loop it holds when a token has run all its loops."""
            held: dict[int, int] = {}
            for d in range(exit_depth):
                held[d % slots] = d
            return held

        every, ring = stored(12), stored(planes)
        assert visible_loop(DROP, loop, exit_depth) == every.get(loop)
        assert visible_loop(LAST_EXITED, loop, exit_depth) == every.get(loop, max(every.values()))
        assert visible_loop(SHARED, loop, exit_depth) == stored(1)[0]
        assert visible_loop(RING, loop, exit_depth, planes) == ring.get(loop % planes, ring[max(ring)])

    def test_ring_of_three_by_hand(self) -> None:
        """Five loops leave loops 3, 4, 2 in planes 0, 1, 2; two leave 0, 1 and nothing."""
        assert [visible_loop(RING, d, 5, 3) for d in range(7)] == [3, 4, 2, 3, 4, 2, 3]
        assert [visible_loop(RING, d, 2, 3) for d in range(7)] == [0, 1, 1, 0, 1, 1, 0]

    @pytest.mark.parametrize("layout", [LAST_EXITED, DROP])
    def test_chunks_do_not_matter(self, layout: str) -> None:
        oracle = HuginnOracle(TINY, layout=layout)
        policy = Policy(name="latent", threshold=0.12, min_loops=1, max_loops=8)
        whole = oracle.run(PROMPT, 8, policy)
        for chunk in (1, 2):
            split = oracle.run(PROMPT, 8, policy, chunk=chunk)
            assert [(s.token, s.depth) for s in split] == [(s.token, s.depth) for s in whole]
            np.testing.assert_allclose([s.logits for s in split], [s.logits for s in whole], atol=1e-12)

    def test_chunks_matter_to_a_ring_that_is_overwritten(self) -> None:
        def first(planes: int, chunk: int | None) -> np.ndarray:
            return HuginnOracle(TINY, layout=RING, planes=planes).run(PROMPT, 1, FIXED_8, chunk=chunk)[0].logits

        whole = HuginnOracle(TINY).run(PROMPT, 1, FIXED_8)[0].logits
        np.testing.assert_array_equal(first(3, None), whole)
        assert np.abs(first(3, 2) - whole).max() > 1e-3
        np.testing.assert_allclose(first(8, 2), whole, atol=1e-12)

    def test_a_ring_that_is_never_overwritten_is_last_exited(self) -> None:
        policy = Policy(name="kl", threshold=0.02, min_loops=1, max_loops=8)
        ring, plain = (
            HuginnOracle(TINY, layout=layout, planes=planes).run(PROMPT, 12, policy)
            for layout, planes in ((RING, 8), (LAST_EXITED, None))
        )
        np.testing.assert_array_equal([s.logits for s in ring], [s.logits for s in plain])

    def test_shared_is_a_ring_of_one_plane_fed_position_by_position(self) -> None:
        policy = Policy(name="latent", threshold=0.12, min_loops=1, max_loops=8)
        shared = HuginnOracle(TINY, layout=SHARED).run(PROMPT, 12, policy)
        ring = HuginnOracle(TINY, layout=RING, planes=1).run(PROMPT, 12, policy, chunk=1)
        np.testing.assert_array_equal([s.logits for s in shared], [s.logits for s in ring])
        plain = HuginnOracle(TINY).run(PROMPT, 1, policy)
        assert np.abs(shared[0].logits - plain[0].logits).max() > 1e-3

    def test_layouts_differ_where_depths_do(self) -> None:
        """One token that left early, then a deep one: every layout shows that one another history."""
        policy = Policy(name="trace", trace=(5, 2, 8), max_loops=8)
        logits = [
            HuginnOracle(TINY, layout=layout, planes=planes)
            .run(PROMPT, 3, policy, prefill_loops=5, tokens=[7, 8, 9])[2]
            .logits
            for layout, planes in ((LAST_EXITED, None), (DROP, None), (SHARED, None), (RING, 3), (RING, 2), (RING, 1))
        ]
        for i, a in enumerate(logits):
            assert all(np.abs(a - b).max() > 1e-4 for b in logits[:i])

    def test_dropped_history_may_be_empty(self) -> None:
        """Loop 2 sees nobody: the same as a token without history from there on, so it is finite and not an error."""
        policy = Policy(name="trace", trace=(1, 4), max_loops=4)
        steps = HuginnOracle(TINY, layout=DROP).run([7], 2, policy, prefill_loops=1)
        assert np.isfinite(steps[1].logits).all()

    def test_reading_what_nobody_wrote_is_an_error(self) -> None:
        oracle = HuginnOracle(TINY)
        memory = oracle.trajectory([1, 2, 3], 2).memory
        memory.exit_depth[:] = 3  # a lie: two loops ran
        rows = np.zeros((1, oracle.kv_heads, oracle.head_dim))
        memory.keys["core_block"] = np.pad(
            memory.keys["core_block"], [(0, 1), *[(0, 0)] * 4], constant_values=np.nan
        )  # room for loop 2
        memory.values["core_block"] = np.pad(memory.values["core_block"], [(0, 1), *[(0, 0)] * 4])
        memory.exchange("core_block", 0, 1, 2, rows, rows)
        with pytest.raises(AssertionError, match="nobody wrote"):
            memory.exchange("core_block", 0, 2, 2, rows, rows)

    @pytest.mark.parametrize(
        ("layout", "planes"), [("ring", None), ("last_exited", 2), ("latest", None)], ids=["ring", "planes", "unknown"]
    )
    def test_layouts_are_checked(self, layout: str, planes: int | None) -> None:
        with pytest.raises(ValueError, match="layout"):
            HuginnOracle(TINY, layout=layout, planes=planes)


class TestExits:
    @pytest.mark.parametrize("name", ["latent", "kl"])
    def test_threshold_zero_is_full_depth(self, name: str) -> None:
        steps = HuginnOracle(TINY).run(PROMPT, 6, Policy(name=name, threshold=0.0, min_loops=1, max_loops=7))
        assert [s.depth for s in steps] == [7] * 6

    @pytest.mark.parametrize(("name", "threshold"), [("latent", 5.0), ("kl", 50.0), ("argmax", 0.0)])
    def test_bounds_hold(self, name: str, threshold: float) -> None:
        """A threshold that every loop meets leaves at min_loops, whatever the prompt ran."""
        policy = Policy(name=name, threshold=threshold, min_loops=3, max_loops=5)
        steps = HuginnOracle(TINY).run(PROMPT, 5, policy, prefill_loops=7)
        assert [s.depth for s in steps] == [7, 3, 3, 3, 3]

    def test_argmax_counts_what_stayed(self) -> None:
        policy = Policy(name="argmax", threshold=2, min_loops=1, max_loops=8)
        steps = HuginnOracle(TINY).run(PROMPT, 16, policy)
        assert len({s.depth for s in steps[1:]}) > 1
        for step in steps[1:]:
            best = step.readouts.argmax(axis=1).tolist()
            stays = [r for r in range(3, len(best) + 1) if len(set(best[r - 3 : r])) == 1]
            assert step.depth == (stays[0] if stays else 8)
            np.testing.assert_array_equal(step.logits, step.readouts[-1])

    def test_kl_by_hand(self) -> None:
        """From uniform over two to (3/4, 1/4), then to (1/2, 1/2): the first argument is the earlier one."""
        readouts = [np.log([3.0, 1.0]), np.zeros(2)]
        assert exit_score("kl", [], readouts[:1]) == pytest.approx(0.5 * np.log(0.5 / 0.75) + 0.5 * np.log(0.5 / 0.25))
        assert exit_score("kl", [], readouts) == pytest.approx(0.75 * np.log(0.75 / 0.5) + 0.25 * np.log(0.25 / 0.5))

    def test_readouts_change_nothing_but_the_exit(self) -> None:
        """Running the coda after every loop overwrites its K/V; what stays is that of the last loop."""
        along = {"tokens": [3, 1, 4, 1], "depths": [5, 2, 6, 4]}
        kl, fixed = (
            HuginnOracle(TINY).run(PROMPT, 4, Policy(name=name, threshold=0.1, max_loops=6), prefill_loops=5, **along)
            for name in ("kl", "fixed")
        )
        np.testing.assert_allclose([s.logits for s in kl], [s.logits for s in fixed], atol=1e-12)


class TestOLMo2Block:
    """No fixture has it.  Each property holds for this block and fails for its neighbours."""

    def _logits(self, olmo2, **changes) -> np.ndarray:
        config, tensors = olmo2
        oracle = HuginnOracle(None, config=config | {"norm_eps": 1e-12}, tensors=tensors | changes)
        assert oracle.block == OLMO2
        return oracle.trajectory(PROMPT, 3).logits

    def _scaled(self, olmo2, name: str, rows: slice) -> dict[str, np.ndarray]:
        value = olmo2[1][name].astype(np.float64)
        value[rows] *= 3
        return {name: value}

    @pytest.mark.parametrize("name", ["attn.proj", "mlp.proj"])
    def test_branches_are_normed_at_their_end(self, olmo2, name: str) -> None:
        changes = self._scaled(olmo2, f"transformer.core_block.1.{name}.weight", slice(None))
        np.testing.assert_allclose(self._logits(olmo2, **changes), self._logits(olmo2), atol=1e-7)

    @pytest.mark.parametrize(("start", "one_head", "all_heads"), [(0, 8, 32), (32, 8, 16)], ids=["q", "k"])
    def test_q_and_k_are_normed_over_their_whole_width(self, olmo2, start: int, one_head: int, all_heads: int) -> None:
        name, before = "transformer.core_block.0.attn.Wqkv.weight", self._logits(olmo2)
        all_changed = self._scaled(olmo2, name, slice(start, start + all_heads))
        np.testing.assert_allclose(self._logits(olmo2, **all_changed), before, atol=1e-7)
        one_changed = self._scaled(olmo2, name, slice(start, start + one_head))
        assert np.abs(self._logits(olmo2, **one_changed) - before).max() > 1e-3

    def test_without_branches_a_loop_is_its_adapter(self, olmo2) -> None:
        config, tensors = olmo2
        silent = {name: np.zeros_like(value) for name, value in tensors.items() if ".norm_" in name}
        seen = HuginnOracle(None, config=config, tensors=tensors | silent).trajectory(PROMPT, 2)
        adapter = tensors["transformer.adapter.weight"].astype(np.float64)
        np.testing.assert_array_equal(seen.injected, seen.embedded)
        for r in (0, 1):
            expected = seen.states[r] @ adapter[:, :24].T + seen.injected @ adapter[:, 24:].T
            np.testing.assert_allclose(seen.states[r + 1], expected, atol=1e-12)

    def test_one_block_term_by_term(self, olmo2) -> None:
        """Two positions through prelude block 0, each number from its definition."""
        config, tensors = olmo2
        w = {n.removeprefix("transformer.prelude.0."): v.astype(float) for n, v in tensors.items() if "prelude.0" in n}

        def rms(x: np.ndarray, weight: str) -> np.ndarray:
            return (
                np.array([weight_i * x_i for weight_i, x_i in zip(w[weight], x, strict=True)])
                / (sum(float(x_i) ** 2 for x_i in x) / len(x) + config["norm_eps"]) ** 0.5
            )

        def turned(x: np.ndarray, position: int) -> np.ndarray:
            out = x.copy()
            for head in range(0, len(x), 8):
                for i in range(4):
                    angle = position / 10000 ** (2 * i / 8)
                    a, b = x[head + i], x[head + i + 4]
                    out[head + i] = a * np.cos(angle) - b * np.sin(angle)
                    out[head + i + 4] = b * np.cos(angle) + a * np.sin(angle)
            return out

        x = tensors["transformer.wte.weight"].astype(float)[[5, 9]] * config["init_values"]["embed_scale"]
        q = [turned(rms(w["attn.Wqkv.weight"][:32] @ row, "attn.q_norm.weight"), t) for t, row in enumerate(x)]
        k = [turned(rms(w["attn.Wqkv.weight"][32:48] @ row, "attn.k_norm.weight"), t) for t, row in enumerate(x)]
        v = [w["attn.Wqkv.weight"][48:] @ row for row in x]
        for t in (0, 1):
            mixed = []
            for head in range(4):
                mine, group = slice(8 * head, 8 * head + 8), slice(8 * (head // 2), 8 * (head // 2) + 8)
                e = [np.exp(q[t][mine] @ k[u][group] / 8**0.5) for u in range(t + 1)]
                mixed += list(sum(e_u * v[u][group] for u, e_u in enumerate(e)) / sum(e))
            y = x[t] + rms(w["attn.proj.weight"] @ np.array(mixed), "norm_1.weight")
            gate, up = w["mlp.fc.weight"][:48] @ y, w["mlp.fc.weight"][48:] @ y
            expected = y + rms(w["mlp.proj.weight"] @ (gate / (1 + np.exp(-gate)) * up), "norm_2.weight")
            seen = HuginnOracle(None, config=config, tensors=tensors).trajectory([5, 9], 1)
            np.testing.assert_allclose(seen.injected[t], expected, atol=1e-12)


class TestRandomCheckpoints:
    @given(shape=shapes(), seed=st.integers(0, 2**32 - 1))
    def test_of_any_shape_stay_in_bounds(self, shape: HuginnShape, seed: int) -> None:
        """The variant is told by names; states and logits are of an ordinary size and depend on the input."""
        config, tensors = huginn_checkpoint(shape, seed)
        oracle = HuginnOracle(None, config=config, tensors=tensors)
        assert oracle.block == shape.block
        seen = oracle.trajectory(np.random.default_rng(seed).integers(0, shape.vocab, 12), 8)
        size = np.sqrt(np.mean(seen.states[1:] ** 2, axis=-1))
        assert size.min() > 0.1
        assert size.max() < 20
        assert 0.3 < seen.logits.std() < 10
        assert seen.logits[-1].std(axis=0).mean() > 0.1, "the same logits whatever the input"

    @pytest.mark.parametrize("block", [HUGINN, LLAMA, OLMO2])
    def test_float32_stays_near_float64(self, block: str) -> None:
        """Not for every input: some narrow model amplifies some token a hundredfold, so this is about nearly all."""
        worst = []
        for seed in range(40):
            config, tensors = huginn_checkpoint(HuginnShape(block=block), seed)
            tokens = np.random.default_rng(seed).integers(0, 96, 24)
            exact, rounded = (
                HuginnOracle(None, config=config, tensors=tensors, dtype=dtype).trajectory(tokens, 8).logits
                for dtype in (np.float64, np.float32)
            )
            worst.append(np.abs(exact - rounded).max())
        assert np.quantile(worst, 0.9) < 5e-5

    @pytest.mark.parametrize("block", [HUGINN, LLAMA, OLMO2])
    @pytest.mark.parametrize(("name", "threshold"), [("latent", 0.1), ("kl", 0.02), ("argmax", 3)])
    def test_leave_at_mixed_depths(self, block: str, name: str, threshold: float) -> None:
        policy = Policy(name=name, threshold=threshold, min_loops=1, max_loops=8)
        depths = [
            step.depth
            for seed in range(6)
            for step in random_oracle(block, seed=seed, loops=8).run(PROMPT, 10, policy)[1:]
        ]
        assert len(set(depths)) >= 3

    @pytest.mark.parametrize("block", [HUGINN, LLAMA, OLMO2])
    @pytest.mark.parametrize("tied", [True, False])
    def test_written_and_read_again(self, block: str, tied: bool, tmp_path: Path) -> None:
        config, tensors = huginn_checkpoint(HuginnShape(block=block, tied=tied), 7)
        read = read_tensors(write_checkpoint(tmp_path, config, tensors))
        assert read.keys() == tensors.keys()
        for name, value in tensors.items():
            np.testing.assert_array_equal(read[name], value)
        given_, stored = HuginnOracle(None, config=config, tensors=tensors), HuginnOracle(tmp_path)
        np.testing.assert_array_equal(stored.trajectory(PROMPT, 2).logits, given_.trajectory(PROMPT, 2).logits)

    def test_a_tied_head_needs_no_copy(self) -> None:
        config, tensors = huginn_checkpoint(HuginnShape(tied=True), 7)
        alone = {name: value for name, value in tensors.items() if name not in ("lm_head.weight", "freqs_cis")}
        both, one = (HuginnOracle(None, config=config, tensors=t).trajectory(PROMPT, 2) for t in (tensors, alone))
        np.testing.assert_array_equal(one.logits, both.logits)

    @pytest.mark.parametrize(("block", "fixture"), [(HUGINN, TINY), (LLAMA, RETROFIT)], ids=["huginn", "llama"])
    def test_have_the_published_names_and_shapes(self, block: str, fixture: Path) -> None:
        """The fixtures' checkpoints came from the references' own classes."""
        shape = HuginnShape(
            block=block, prelude=2, core=4 if block == HUGINN else 3, coda=2, width=64, heads=4,
            kv_heads=4 if block == HUGINN else 2, head_dim=16, intermediate=96, vocab=256, tied=block == HUGINN,
        )  # fmt: skip
        published = {name: value.shape for name, value in read_tensors(fixture).items()}
        assert {name: value.shape for name, value in huginn_checkpoint(shape, 0)[1].items()} == published

    def test_sizes_are_checked(self) -> None:
        with pytest.raises(ValueError, match="kv_heads"):
            HuginnShape(block=HUGINN, kv_heads=2)
        with pytest.raises(ValueError, match="head_dim"):
            HuginnShape(block=LLAMA, head_dim=7)
        with pytest.raises(ValueError, match="block"):
            HuginnShape(block="gpt")


def test_llama3_scaling_has_three_regions() -> None:
    """Fast turns stay, slow ones are stretched by the factor, one turn per half low wavelength is in between."""
    scaling = {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    }  # fmt: skip
    plain, scaled = scaled_frequencies(5e5, 16, None), scaled_frequencies(5e5, 16, scaling)
    turns = 32 * plain / (2 * np.pi)
    np.testing.assert_allclose(scaled[turns > 4], plain[turns > 4])
    np.testing.assert_allclose(scaled[turns < 1], plain[turns < 1] / 8)
    assert (turns > 4).any()
    assert (turns < 1).any()
    with pytest.raises(ValueError, match="yarn"):
        scaled_frequencies(5e5, 16, {"rope_type": "yarn"})


class TestJudge:
    """What an engine did, judged along its own tokens and depths, for the policies that only this family has."""

    POLICIES = (
        Policy(name="latent", threshold=0.12, min_loops=1, max_loops=8),
        Policy(name="kl", threshold=0.02, min_loops=1, max_loops=8),
        Policy(name="argmax", threshold=2, min_loops=1, max_loops=8),
    )

    def _record(self, policy: Policy, **request) -> dict:
        run = HuginnOracle(TINY).run(PROMPT, 8, policy, **request)
        return {
            "tokens": [s.token for s in run],
            "depths": [s.depth for s in run],
            "logprobs": [log_softmax(s.logits)[s.token] for s in run],
        }

    @pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: policy.name)
    def test_accepts_the_truth_and_refuses_another_depth(self, policy: Policy) -> None:
        record = self._record(policy, prefill_loops=5)
        verdict = judge(HuginnOracle(TINY), PROMPT, policy, prefill_loops=5, **record)
        assert (verdict.mismatches, verdict.near_ties) == ((), 0)
        assert verdict.logprob_error < 1e-12
        for output, change in ((2, 1), (2, -1)):
            depths = list(record["depths"])
            depths[output] += change if 1 <= depths[output] + change <= 8 else -change
            verdict = judge(HuginnOracle(TINY), PROMPT, policy, prefill_loops=5, **record | {"depths": depths})
            assert any(m.startswith(f"output {output}: depth") for m in verdict.mismatches)

    @pytest.mark.parametrize("policy", POLICIES[:2], ids=lambda policy: policy.name)
    @pytest.mark.parametrize(("gap", "near"), [(5e-5, True), (3e-4, False)])
    def test_a_score_at_the_threshold_is_a_near_tie(self, policy: Policy, gap: float, near: bool) -> None:
        """The engine left where the oracle saw a score that little above the threshold."""
        record = self._record(policy, prefill_loops=5)
        run = HuginnOracle(TINY).run(PROMPT, 2, policy, prefill_loops=5)
        moved = dataclasses.replace(policy, threshold=run[1].scores[-1] - gap)
        first_two = {key: value[:2] for key, value in record.items()}
        verdict = judge(HuginnOracle(TINY), PROMPT, moved, prefill_loops=5, **first_two)
        assert (not verdict.mismatches, verdict.near_ties) == (near, int(near))

    @pytest.mark.parametrize(("gap", "near"), [(5e-5, True), (3e-4, False)])
    def test_best_logits_that_are_close_are_a_near_tie(self, gap: float, near: bool) -> None:
        """Loop 2 prefers token 1 by `gap`; an engine that saw token 0 stay has left after it."""
        readouts = np.array([[1.0, 0.0, -1.0], [1.0, 1.0 + gap, -1.0]])

        class Fixed:
            def run(self, prompt, outputs, policy, **request) -> list:
                first = HuginnOracle(TINY).run([1], 1, FIXED_8)[0]
                step = dataclasses.replace(
                    first, token=1, depth=2, logits=readouts[-1], scores=(0.0, 0.0), readouts=readouts
                )
                return [dataclasses.replace(first, logits=readouts[-1], token=1), step]

        policy = Policy(name="argmax", threshold=1, min_loops=1, max_loops=8)
        logprob = float(log_softmax(readouts[-1])[1])
        verdict = judge(Fixed(), [1], policy, tokens=[1, 1], depths=[8, 2], logprobs=[logprob] * 2)
        assert (not verdict.mismatches, verdict.near_ties) == (near, int(near))

    def test_judges_a_given_start(self) -> None:
        def state(position: int) -> np.ndarray:
            return np.full(64, 0.1 * position)

        policy = self.POLICIES[0]
        record = self._record(policy, prefill_loops=5, initial_state=state)
        assert not judge(HuginnOracle(TINY), PROMPT, policy, prefill_loops=5, initial_state=state, **record).mismatches
        assert judge(HuginnOracle(TINY), PROMPT, policy, prefill_loops=5, **record).logprob_error > 1e-3
