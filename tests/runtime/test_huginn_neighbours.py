"""What a request of a model with a prelude and a coda gets does not depend on anybody else.

PROTECTS: grade G1 where rows wait for each other at the boundary of the loop and share readouts for exit tests, and the
random initial states, which are a function of seed and position alone.
"""

from __future__ import annotations

import dataclasses

import pytest

from tests.engines import Job, alone, drained, sampling, serve
from tests.oracle import judge
from tests.runtime.huginn import TINY, engine, of_layout, oracle, policy_of, random_start

ATOL = 2e-4  # the fixture's recommendation
STD = 0.07905694150420949 * 8  # of the fixture's random initial states: init_values.std * embed_scale
LONG = [(37 * i + 11) % 256 for i in range(30)]


class TestSamples:
    """Random initial states."""

    @pytest.mark.parametrize("layout", ["last_exited", "drop", "shared"])
    def test_states_come_from_the_documented_stream(self, layout: str) -> None:
        """A seed of both words, a prompt over several chunks, outputs at mixed depths."""
        seed, prompt = 0xFEDC_BA98_7654_3210, LONG[:13]
        params = sampling(initial_state="random", seed=seed, exit_policy="latent", exit_threshold=0.2, min_loops=1)
        target = of_layout(layout)
        result = alone(target, prompt, params)
        verdict = judge(
            oracle(TINY, layout), prompt, policy_of(params, cap=8), tokens=result.tokens, depths=result.depths,
            logprobs=result.logprobs, initial_state=random_start(seed, 64, STD),
        )  # fmt: skip
        assert not verdict.mismatches
        assert verdict.logprob_error < ATOL
        zeros = alone(target, prompt, dataclasses.replace(params, initial_state="zeros"))
        assert zeros.logprobs != result.logprobs

    def test_they_depend_on_the_seed_alone(self) -> None:
        """Not on the sample index, whose token streams differ; each word of the seed counts."""
        target, prompt = engine(), LONG[:7]
        greedy = sampling(initial_state="random", seed=5)
        mine = alone(target, prompt, greedy)
        assert alone(target, prompt, dataclasses.replace(greedy, sample_index=3)).bits == mine.bits
        for seed in (6, 5 + 2**32):
            assert alone(target, prompt, dataclasses.replace(greedy, seed=seed)).logprobs != mine.logprobs


MIXED = {
    "greedy": (LONG[:6], sampling(max_tokens=9)),
    "kl": (LONG[3:12], sampling(max_tokens=9, exit_policy="kl", exit_threshold=0.05, min_loops=1, prefill_loops=3)),
    "argmax": (LONG[5:10], sampling(max_tokens=7, exit_policy="argmax", exit_threshold=1, min_loops=1)),
    "latent": (LONG[8:10], sampling(max_tokens=8, exit_policy="latent", exit_threshold=0.3, min_loops=1)),
    "sampled": (
        LONG[9:17],
        sampling(max_tokens=9, temperature=0.9, top_p=0.8, seed=2**40 + 1, initial_state="random", max_loops=4),
    ),
    "trace": (LONG[2:9], sampling(max_tokens=5, exit_trace=(8, 1, 6, 2, 3))),
    "long prompt": (LONG, sampling(max_tokens=3, exit_policy="kl")),
}


class TestNeighbours:
    """Grade G1: tokens, depths and log-probabilities bit for bit, alone and beside all kinds of neighbours."""

    @pytest.mark.parametrize("layout", ["last_exited", "drop", "shared"])
    def test_a_request_s_bits_are_its_own(self, layout: str) -> None:
        """Seven requests in four slots, in two orders; a row waits for three at the boundary of the loop."""
        target = of_layout(layout)
        assert target.server_info()["boundary_batch"] == 3
        expected = {name: alone(target, *job).bits for name, job in MIXED.items()}
        for names in (list(MIXED), list(reversed(MIXED))):
            jobs = [Job(id=n, prompt=MIXED[n][0], params=MIXED[n][1], arrives=i // 2) for i, n in enumerate(names)]
            results = serve(target, jobs)
            assert {n: r.bits for n, r in results.items()} == expected

    @pytest.mark.parametrize("batch", [1, 2, 4, 4096])
    def test_waiting_at_the_boundary_changes_no_bit_and_ends(self, monkeypatch, batch: int) -> None:
        """Also where more must wait than there are slots: nobody is inside the loop then, and all go on."""
        target = engine()
        jobs = [Job(id=n, prompt=p, params=q, arrives=i) for i, (n, (p, q)) in enumerate(MIXED.items())]
        expected = serve(target, jobs)
        before = target.stats()["ticks"]
        monkeypatch.setattr(target._runner, "_config", dataclasses.replace(target.config, boundary_batch=batch))
        results = serve(target, jobs)
        assert {n: r.bits for n, r in results.items()} == {n: r.bits for n, r in expected.items()}
        assert target.stats()["ticks"] > before

    def test_rows_really_wait(self, monkeypatch) -> None:
        """Outputs of depth 2 beside outputs of depth 5, eleven and four after the first.

        Apart they take 22 and 20 ticks side by side.  Waiting for each other, they meet every five ticks while both
        live: 20 ticks for four outputs each, then 14 for the other seven of depth 2.
        """
        target, ticks = engine(), {}
        jobs = [
            Job(id=f"r{depth}", prompt=[depth], params=sampling(max_tokens=n, max_loops=depth, prefill_loops=2))
            for depth, n in ((2, 12), (5, 5))
        ]
        for batch in (1, 2):
            monkeypatch.setattr(target._runner, "_config", dataclasses.replace(target.config, boundary_batch=batch))
            before = target.stats()["ticks"]
            serve(target, jobs)
            ticks[batch] = target.stats()["ticks"] - before
        assert ticks == {1: 1 + 22, 2: 1 + 20 + 14}

    def test_chunks_change_no_token(self) -> None:
        """Grade G2 across configurations: other chunks, pages and slots."""
        target = engine(prefill_chunk=64, slots=2, page_size=16)
        for name in ("greedy", "sampled", "kl"):
            one, two = alone(engine(), *MIXED[name]), alone(target, *MIXED[name])
            assert (one.tokens, one.depths) == (two.tokens, two.depths)

    def test_cancelled_requests_leave_nothing_behind(self) -> None:
        target = engine()
        expected = {name: alone(target, *job).bits for name, job in MIXED.items()}
        jobs = [
            Job(id=n, prompt=p, params=q, arrives=i // 3, cancelled=2 + i if i % 2 else None)
            for i, (n, (p, q)) in enumerate(MIXED.items())
        ]
        results = serve(target, jobs)
        for i, name in enumerate(MIXED):
            if i % 2 == 0:
                assert results[name].bits == expected[name]
        drained(target)

    def test_depths_beyond_eight_planes(self) -> None:
        """Planes resolved by exit depth: each alone as in a full batch, on pages that others have used."""
        target = engine(max_loops=12)
        assert target.model_info()["kv_planes"] == 12
        jobs = {n: (p, dataclasses.replace(q, prefill_loops=None, exit_trace=None)) for n, (p, q) in MIXED.items()}
        expected = {name: alone(target, *job).bits for name, job in jobs.items()}
        results = serve(target, [Job(id=n, prompt=p, params=q) for n, (p, q) in jobs.items()])
        assert {n: r.bits for n, r in results.items()} == expected
