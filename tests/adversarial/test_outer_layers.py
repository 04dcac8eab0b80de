"""Models with a prelude and a coda: requests in any order, on pages and slots that others have used.

PROTECTS: grade G1 (a result is bit for bit what the request gets alone) where up to four prompts run in one round, rows
wait for each other at the boundary of the loop, requests are cancelled between rounds, and the exit depths that the
pool keeps are those of other owners.
"""

from __future__ import annotations

import dataclasses
import random

import jax.numpy as jnp
import pytest

from rlt_jax import FinishReason, LLMEngine, SamplingParams
from tests.engines import Job, Result, alone, drained, sampling, serve
from tests.runtime.huginn import engine

TIGHT = {"slots": 6, "page_size": 3, "prefill_chunk": 3, "max_context": 26, "kv_pages": 21, "round_ticks": 3}
SHAPES = {
    "resolve": {"max_loops": 12},  # as in test_huginn_neighbours
    "tight drop in bfloat16": TIGHT | {"kv_layout": "drop", "max_loops": 5, "dtype": "bfloat16", "boundary_batch": 5},
}
KINDS, ROUNDS = 10, 6


@pytest.fixture(params=SHAPES)
def target(request: pytest.FixtureRequest) -> LLMEngine:
    return engine(**SHAPES[request.param])


def draw(r: random.Random, target: LLMEngine) -> tuple[tuple[int, ...], SamplingParams]:
    """A request whose lengths sit on the engine's boundaries, at any mix of depths."""
    config = target.config
    page, chunk, cap = config.page_size, config.prefill_chunk, config.max_loops
    longest = config.max_context
    length = min(longest, r.choice([1, page, chunk, chunk + 1, 4 * chunk, longest, r.randint(1, longest)]))
    most = config.max_context - length + 1
    outputs = min(most, r.choice([1, 2, most, r.randint(1, 10)]))
    low, high = sorted((r.randint(1, cap), r.randint(1, cap)))
    chosen: dict = {
        "max_tokens": outputs, "min_loops": r.choice([1, low]), "max_loops": high, "ignore_eos": True,
        "prefill_loops": r.choice([1, high, cap, r.randint(1, cap)]), "seed": r.choice([0, 2**64 - 1]),
        "initial_state": r.choice(["zeros", "random"]), "temperature": r.choice([0.0, 0.0, 1.0]),
    }  # fmt: skip
    policy = r.choice(["latent", "kl", "argmax", "trace"])
    if policy == "trace":
        depths = (r.randint(chosen["min_loops"], high) for _ in range(outputs - 1))
        chosen["exit_trace"] = (chosen["prefill_loops"], *depths)
    else:
        thresholds = {"latent": [0.0, 0.1, 0.3, 3.4e38], "kl": [0.0, 0.01, 0.1, 3.4e38], "argmax": [1, 2, 2**24]}
        chosen |= {"exit_policy": policy, "exit_threshold": r.choice(thresholds[policy])}
    return tuple(r.randrange(256) for _ in range(length)), SamplingParams(**chosen)


def test_any_interleaving_leaves_every_result_as_it_is_alone(target: LLMEngine) -> None:
    r = random.Random(5)
    kinds = [draw(r, target) for _ in range(KINDS)]
    expected = [alone(target, *kind) for kind in kinds]
    cancelled = finished = 0
    for _ in range(ROUNDS):
        live: dict[str, tuple[int, Result]] = {}
        steps = r.randint(5, 20)
        while steps > 0 or target.has_work():
            steps -= 1
            for _ in range(r.choice([0, 1, 2, 5]) if steps > 0 else 0):
                name = f"id{r.randint(0, 9)}"
                if name in live:
                    del live[name]
                    assert target.abort(name)
                    cancelled += 1
                if r.random() < 0.8:
                    kind = r.randrange(KINDS)
                    target.add_request(name, *kinds[kind])
                    live[name] = (kind, Result())
            for output in target.step():
                if output.finish_reason is FinishReason.ABORT:
                    continue
                kind, result = live[output.request_id]
                result.add(output)
                if output.finished:
                    del live[output.request_id]
                    assert result.bits == expected[kind].bits, kinds[kind]
                    finished += 1
        assert not live
        drained(target)
    assert cancelled > 15
    assert finished > 15
    assert target.stats()["resets"] == 0


def test_what_older_owners_left_in_the_pool_is_never_seen(target: LLMEngine) -> None:
    """Every page full of huge numbers, every exit depth one that no request can have."""
    params = sampling(max_tokens=9, exit_policy="latent", exit_threshold=0.2, min_loops=1)
    jobs = [Job(id=f"r{n}", prompt=[(41 * n + i) % 256 for i in range(n)], params=params) for n in (1, 2, 3, 5, 8)]
    expected = {name: result.bits for name, result in serve(target, jobs).items()}
    kv = target._runner._kv
    for exits in (0, 1, 10**6):
        k, v = (tuple(jnp.full_like(pool, 1e30) for pool in pools) for pools in (kv.k, kv.v))
        depths = None if kv.exit_depth is None else jnp.full_like(kv.exit_depth, exits)
        target._runner._kv = dataclasses.replace(kv, k=k, v=v, exit_depth=depths)
        assert {name: result.bits for name, result in serve(target, jobs).items()} == expected
        kv = target._runner._kv
