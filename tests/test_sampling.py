"""Sampling as pure functions.

PROTECTS: that a draw comes from the distribution the user asked for (exact filters, in the documented order), and that
it depends on the request's own seed and output index alone, never on who shares the batch.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from rlt_jax.sampling import TOKEN_STREAM, SamplerParams, filter_logits, request_key, sample

ROWS, VOCAB = 512, 12  # one shape for the whole file: a new one would compile
DRAWS = 16  # calls of ROWS rows each for a distribution test


@functools.cache
def compiled_sample():
    return jax.jit(sample)


@functools.cache
def compiled_filter():
    return jax.jit(filter_logits)


def key(seed: int, sample_index: int = 0) -> np.ndarray:
    high, low = (jnp.asarray(word, jnp.uint32) for word in (seed >> 32, seed & 0xFFFFFFFF))
    return np.asarray(request_key(high, low, jnp.asarray(sample_index, jnp.uint32)))


def params(rows: int = ROWS, **settings_: object) -> SamplerParams:
    """Every row the same unless a list is given."""
    defaults = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "processed": False}
    types = {"temperature": np.float32, "top_k": np.int32, "top_p": np.float32, "min_p": np.float32, "processed": bool}
    keys = settings_.pop("key", key(0))
    columns = {
        name: jnp.asarray(np.broadcast_to(np.asarray(settings_.pop(name, value), types[name]), (rows,)))
        for name, value in defaults.items()
    }
    assert not settings_
    return SamplerParams(**columns, key=jnp.asarray(np.broadcast_to(keys, (rows, 2)), jnp.uint32))


def run(logits: np.ndarray, chosen: SamplerParams, index: np.ndarray | int = 0, live: np.ndarray | None = None):
    """logits [V] or [ROWS, V]."""
    tokens, logprobs = compiled_sample()(
        jnp.asarray(np.broadcast_to(logits, (ROWS, logits.shape[-1])), jnp.float32),
        chosen,
        jnp.asarray(np.broadcast_to(index, (ROWS,)), jnp.int32),
        jnp.asarray(np.ones(ROWS, bool) if live is None else live),
    )
    return np.asarray(tokens), np.asarray(logprobs)


def draw(logits: np.ndarray, seed: int = 7, **settings_: object) -> np.ndarray:
    """ROWS * DRAWS tokens of one request: its output indices 0, 1, 2, ..."""
    chosen = params(key=key(seed), **settings_)
    return np.concatenate([run(logits, chosen, np.arange(ROWS) + ROWS * i)[0] for i in range(DRAWS)])


def expected(logits: np.ndarray, *, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0):
    """The distribution, in float64 and by the definition: one filter after the other, each on what is left."""
    z = logits.astype(np.float64) / temperature

    def probabilities() -> np.ndarray:
        p = np.exp(z - z.max())
        return p / p.sum()

    if top_k:
        z = np.where(z >= np.sort(z)[::-1][min(top_k, len(z)) - 1], z, -np.inf)
    if top_p < 1:
        p, kept, mass = probabilities(), np.zeros(len(z), bool), 0.0
        for token in np.argsort(-p, kind="stable"):
            kept[token] = mass <= top_p
            mass += p[token]
        z = np.where(kept, z, -np.inf)
    if min_p:
        p = probabilities()
        z = np.where(p >= min_p * p.max(), z, -np.inf)
    return probabilities()


def logits_of(*probabilities: float) -> np.ndarray:
    """Padded to VOCAB with tokens that never come."""
    p = np.zeros(VOCAB)
    p[: len(probabilities)] = probabilities
    return np.log(np.maximum(p, 1e-30)).astype(np.float32)


def kept(logits: np.ndarray, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> set[int]:
    """Tokens that the filters leave."""
    rows = jnp.asarray(logits, jnp.float32)[None]
    out = compiled_filter()(
        rows, jnp.asarray([top_k], jnp.int32), jnp.asarray([top_p], jnp.float32), jnp.asarray([min_p], jnp.float32)
    )
    survivors = np.isfinite(np.asarray(out[0]))
    np.testing.assert_array_equal(np.asarray(out[0])[survivors], np.asarray(rows[0])[survivors])
    return set(np.flatnonzero(survivors).tolist())


# ---- greedy --------------------------------------------------------------------------------------------------------


def test_greedy_takes_the_lowest_id_of_a_tie() -> None:
    logits = np.zeros(VOCAB, np.float32)
    logits[[3, 5, 11]] = 2.0
    assert set(run(logits, params(temperature=0.0))[0].tolist()) == {3}


def test_greedy_ignores_filters_seed_and_index() -> None:
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(ROWS, VOCAB)).astype(np.float32)
    plain = run(logits, params(temperature=0.0))
    noisy = params(
        temperature=0.0, top_k=rng.integers(0, 3, ROWS), top_p=rng.uniform(0.1, 1, ROWS), min_p=rng.random(ROWS),
        processed=rng.random(ROWS) < 0.5, key=rng.integers(0, 2**32, (ROWS, 2)),
    )  # fmt: skip
    other = run(logits, noisy, rng.integers(0, 99, ROWS))
    np.testing.assert_array_equal(plain[0], logits.argmax(-1))
    np.testing.assert_array_equal(plain[0], other[0])
    np.testing.assert_array_equal(plain[1], other[1])  # greedy log-probabilities are raw, bit for bit


def test_top_k_one_is_greedy_and_so_is_a_tiny_temperature() -> None:
    logits = np.random.default_rng(1).normal(size=(ROWS, VOCAB)).astype(np.float32) - 50.0
    greedy = logits.argmax(-1)
    np.testing.assert_array_equal(run(logits, params(top_k=1))[0], greedy)
    for temperature in (1e-6, 1e-30, 1e-37):
        tokens, logprobs = run(logits, params(temperature=temperature, processed=True))
        np.testing.assert_array_equal(tokens, greedy, err_msg=f"{temperature=}")
        np.testing.assert_array_equal(logprobs, np.zeros(ROWS), err_msg=f"{temperature=}")


# ---- filters -------------------------------------------------------------------------------------------------------


def test_ties_with_the_kth_token_are_kept() -> None:
    assert kept(np.asarray([1.0, 3.0, 2.0, 2.0, 2.0, 0.0]), top_k=2) == {1, 2, 3, 4}
    assert kept(np.asarray([1.0, 3.0, 2.0, 2.0, 2.0, 0.0]), top_k=1) == {1}
    assert kept(np.asarray([1.0, 3.0, 2.0, 2.0, 2.0, 0.0]), top_k=5) == {0, 1, 2, 3, 4}
    assert kept(np.asarray([1.0, 3.0, 2.0, 2.0, 2.0, 0.0]), top_k=99) == {0, 1, 2, 3, 4, 5}


def test_the_best_token_always_stays() -> None:
    logits = np.log(np.asarray([0.2, 0.5, 0.3]))
    assert kept(logits, top_p=1e-6) == {1}
    assert kept(logits, min_p=1.0) == {1}
    assert kept(logits, top_k=1, top_p=1e-6, min_p=1.0) == {1}


@pytest.mark.parametrize(
    ("top_p", "survivors"), [(0.4, {0}), (0.6, {0, 1}), (0.85, {0, 1, 2}), (0.95, {0, 1, 2, 3}), (1.0, {0, 1, 2, 3})]
)
def test_top_p_keeps_tokens_until_the_mass_before_exceeds_it(top_p: float, survivors: set[int]) -> None:
    assert kept(np.log(np.asarray([0.5, 0.3, 0.11, 0.09])), top_p=top_p) == survivors


@pytest.mark.parametrize(("min_p", "survivors"), [(0.7, {0}), (0.5, {0, 1}), (0.21, {0, 1, 2}), (0.1, {0, 1, 2, 3})])
def test_min_p_is_relative_to_the_best(min_p: float, survivors: set[int]) -> None:
    assert kept(np.log(np.asarray([0.5, 0.3, 0.11, 0.09])), min_p=min_p) == survivors


def test_the_order_is_top_k_then_top_p_then_min_p() -> None:
    """Each case would come out differently with the two filters the other way round."""
    logits = np.log(np.asarray([0.5, 0.3, 0.1, 0.1]))
    # top-k leaves (.625, .375): then .6 ends after the first.  top-p first would leave {0, 1}, and top-k both.
    assert kept(logits, top_k=2, top_p=0.6) == {0}
    # top-p leaves {0, 1}, both above min-p.  min-p first would leave (.625, .375), and top-p only the first.
    assert kept(logits, top_p=0.6, min_p=0.3) == {0, 1}


def test_temperature_comes_before_the_filters() -> None:
    """At temperature 1, top-p 0.6 leaves {0, 1}; flattened by temperature 4 it needs three."""
    logits = logits_of(0.6, 0.3, 0.06, 0.04)
    assert set(draw(logits, top_p=0.55).tolist()) == {0}
    assert set(draw(logits, top_p=0.55, temperature=4.0).tolist()) == {0, 1}
    assert set(np.flatnonzero(expected(logits, top_p=0.55, temperature=4.0))) == {0, 1}


@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    quarters=st.lists(st.integers(-40, 40), min_size=VOCAB, max_size=VOCAB),  # coarse: ties happen
    top_k=st.integers(0, VOCAB + 2),
    top_p=st.one_of(st.just(1.0), st.floats(1 / 128, 1.0, width=32)),
    min_p=st.one_of(st.just(0.0), st.floats(0.0, 1.0, width=32)),
)
def test_filters_equal_the_definition(quarters: list[int], top_k: int, top_p: float, min_p: float) -> None:
    logits = np.asarray(quarters, np.float32) / 4
    wanted = set(np.flatnonzero(expected(logits, top_k=top_k, top_p=top_p, min_p=min_p)).tolist())
    actual = kept(logits, top_k, top_p, min_p)
    if actual != wanted:  # only where float32 cannot tell the mass from the bound
        nudged = [
            set(np.flatnonzero(expected(logits, top_k=top_k, top_p=min(1.0, top_p * a), min_p=min_p * b)).tolist())
            for a in (1 - 1e-6, 1, 1 + 1e-6)
            for b in (1 - 1e-6, 1, 1 + 1e-6)
        ]
        assert actual in nudged, (actual, wanted)


# ---- distribution --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "chosen",
    [
        {},
        {"temperature": 0.6},
        {"temperature": 2.5},
        {"top_k": 3},
        {"top_p": 0.8},
        {"min_p": 0.2},
        {"temperature": 1.7, "top_k": 5, "top_p": 0.9, "min_p": 0.15},
    ],
    ids=str,
)
def test_draws_follow_the_distribution(chosen: dict) -> None:
    """8,192 draws with a fixed seed: tokens of probability 0 never come, the others pass a chi-square test."""
    logits = np.asarray([2.0, 1.5, 1.5, 0.5, 0.0, -0.5, -1.0, 0.9, 1.1, -2.0, 0.2, -0.1], np.float32)
    wanted = expected(logits, **chosen)
    tokens = draw(logits, **chosen)
    counts = np.bincount(tokens, minlength=VOCAB)
    assert counts[wanted == 0].sum() == 0
    possible = wanted > 0
    assert stats.chisquare(counts[possible], wanted[possible] * len(tokens)).pvalue > 1e-3


def test_consecutive_outputs_are_independent() -> None:
    """Pairs of neighbouring outputs of one request fill the product distribution."""
    tokens = draw(logits_of(0.4, 0.3, 0.2, 0.1), seed=3)
    pairs = np.bincount(tokens[:-1] * 4 + tokens[1:], minlength=16)[:16]
    marginal = np.asarray([0.4, 0.3, 0.2, 0.1])
    assert stats.chisquare(pairs, np.outer(marginal, marginal).ravel() * pairs.sum()).pvalue > 1e-3


# ---- streams -------------------------------------------------------------------------------------------------------


def test_v23_the_stream_is_a_function_of_seed_sample_and_output_index() -> None:
    """Written out: the 64-bit seed as two key words, then fold_in of stream, sample index and output index."""
    seed, sample_index = 0x0123456789ABCDEF, 5
    logits = np.linspace(-1, 1, VOCAB).astype(np.float32)
    tokens, _ = run(logits, params(key=key(seed, sample_index)), np.arange(ROWS))
    base = jax.random.wrap_key_data(jnp.asarray([0x01234567, 0x89ABCDEF], jnp.uint32))
    stream = jax.random.fold_in(jax.random.fold_in(base, TOKEN_STREAM), sample_index)
    for index in (0, 1, 2, 100, ROWS - 1):
        noise = jax.random.gumbel(jax.random.fold_in(stream, index), (VOCAB,), jnp.float32)
        assert tokens[index] == int(jnp.argmax(jnp.asarray(logits) + noise))


@pytest.mark.parametrize(
    ("one", "other"), [((5, 0), (5 + 2**32, 0)), ((5, 0), (6, 0)), ((5, 0), (5, 1)), ((2**64 - 1, 0), (2**32 - 1, 0))]
)
def test_another_seed_or_sample_is_another_stream(one: tuple[int, int], other: tuple[int, int]) -> None:
    logits = np.zeros(VOCAB, np.float32)
    a, b = (run(logits, params(key=key(*k)), np.arange(ROWS))[0] for k in (one, other))
    assert np.mean(a == b) < 0.2  # 1/12 by chance


def test_v23_a_row_does_not_see_its_neighbours() -> None:
    """Bitwise: the same requests beside greedy, filtered, processed and dead rows, and in other places."""
    rng = np.random.default_rng(5)
    logits, keys, index = (
        rng.normal(size=(ROWS, VOCAB)) * 2,
        rng.integers(0, 2**32, (ROWS, 2)),
        rng.integers(0, 50, ROWS),
    )
    mixed = {
        "temperature": rng.choice([0.0, 0.7, 1.0, 1.3], ROWS),
        "top_k": rng.choice([0, 0, 3], ROWS),
        "top_p": rng.choice([1.0, 1.0, 0.7], ROWS),
        "min_p": rng.choice([0.0, 0.0, 0.1], ROWS),
        "processed": rng.random(ROWS) < 0.5,
    }
    together = run(logits, params(key=keys, **mixed), index)
    plain = (mixed["top_k"] == 0) & (mixed["top_p"] == 1.0) & (mixed["min_p"] == 0.0)
    groups = {"greedy": mixed["temperature"] == 0, "fast": plain & (mixed["temperature"] > 0), "filtered": ~plain}
    for name, mine in groups.items():  # alone: the others are dead, so this group's program variant runs
        tokens, logprobs = run(logits, params(key=keys, **mixed), index, live=mine)
        np.testing.assert_array_equal(tokens[mine], together[0][mine], err_msg=name)
        np.testing.assert_array_equal(logprobs[mine], together[1][mine], err_msg=name)
    order = rng.permutation(ROWS)
    moved = run(logits[order], params(key=keys[order], **{n: v[order] for n, v in mixed.items()}), index[order])
    np.testing.assert_array_equal(moved[0], together[0][order])
    np.testing.assert_array_equal(moved[1], together[1][order])


# ---- log-probabilities ---------------------------------------------------------------------------------------------


def test_raw_log_probabilities_are_the_model_s_own() -> None:
    logits = np.random.default_rng(8).normal(size=(ROWS, VOCAB)).astype(np.float32) * 4
    tokens, logprobs = run(logits, params(temperature=1.7, top_k=3, top_p=0.8, min_p=0.05), np.arange(ROWS))
    wanted = [np.log(expected(row)[token]) for row, token in zip(logits, tokens, strict=True)]
    np.testing.assert_allclose(logprobs, wanted, atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    "chosen", [{"temperature": 0.5}, {"temperature": 1.7, "top_k": 4, "top_p": 0.8, "min_p": 0.05}]
)
def test_processed_log_probabilities_are_after_temperature_and_filters(chosen: dict) -> None:
    logits = np.random.default_rng(9).normal(size=(ROWS, VOCAB)).astype(np.float32) * 2
    tokens, logprobs = run(logits, params(processed=True, **chosen), np.arange(ROWS))
    wanted = [np.log(expected(row, **chosen)[token]) for row, token in zip(logits, tokens, strict=True)]
    np.testing.assert_allclose(logprobs, wanted, atol=1e-5, rtol=0)


def test_asking_for_processed_log_probabilities_changes_no_token() -> None:
    logits = np.random.default_rng(10).normal(size=(ROWS, VOCAB)).astype(np.float32)
    raw = params(temperature=1.2, top_k=5)
    tokens, _ = run(logits, raw, np.arange(ROWS))
    same, _ = run(logits, dataclasses.replace(raw, processed=jnp.ones((ROWS,), bool)), np.arange(ROWS))
    np.testing.assert_array_equal(tokens, same)
