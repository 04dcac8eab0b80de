"""A request whose numbers overflow.

PROTECTS: grade G1 beside it and after it: what it left in the pool must not make NaN of anybody else's.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from tests.engines import Job, alone, engine, sampling, serve

BAD = 7  # the token whose embedding is no number


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_it_harms_nobody_else(monkeypatch: pytest.MonkeyPatch, value: float) -> None:
    target, params, clean = engine(), sampling(max_tokens=6), (3, 1, 4)
    before = target._runner._params
    embed = before.embed.at[BAD].set(value)
    monkeypatch.setattr(target._runner, "_params", dataclasses.replace(before, embed=embed))
    expected = alone(target, clean, params)
    assert BAD not in expected.tokens
    try:
        jobs = [Job(id="bad", prompt=(BAD,) * 9, params=params), Job(id="clean", prompt=clean, params=params)]
        results = serve(target, jobs)
        assert np.isnan(results["bad"].logprobs).all()
        assert results["clean"].bits == expected.bits
        assert alone(target, clean, params).bits == expected.bits
    finally:
        target._runner.reset()
