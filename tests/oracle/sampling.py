"""How far a sampled token is from the one that the request's random stream chooses on the oracle's logits.

Noise comes from jax.random by the documented chain (64-bit seed as two key words; fold_in of the token stream, the
sample index and the output index); the filters are the definition, one after the other.
"""

from __future__ import annotations

import itertools

import jax
import numpy as np

TOKEN_STREAM = 0


def gumbel(seed: int, sample_index: int, output: int, vocab: int) -> np.ndarray:
    key = jax.random.wrap_key_data(np.asarray([seed >> 32, seed & 0xFFFFFFFF], np.uint32))
    for number in (TOKEN_STREAM, sample_index, output):
        key = jax.random.fold_in(key, number)
    return np.asarray(jax.random.gumbel(key, (vocab,), np.float32), np.float64)


def filtered(logits: np.ndarray, temperature: float, top_k: int, top_p: float, min_p: float, slack: float = 0.0):
    """[V] float64 scores with removed tokens at -inf; `slack` makes top-k count near ties as ties."""
    z = logits / temperature
    if top_k:
        z = np.where(z >= np.sort(z)[-min(top_k, len(z))] - slack, z, -np.inf)
    if top_p < 1:
        p = np.exp(z - z.max())
        p /= p.sum()
        order = np.argsort(-p, kind="stable")
        before = np.cumsum(p[order]) - p[order]
        kept = order[before <= top_p]
        z = np.where(np.isin(np.arange(len(z)), kept), z, -np.inf)
    return np.where(np.exp(z - z.max()) >= min_p, z, -np.inf)


def sampled_distance(
    *, seed: int, sample_index: int = 0, temperature: float, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0,
    tolerance: float = 1e-4,
):  # fmt: skip
    """A `judge` distance.  A token on the edge of a filter is judged with the edge moved by the tolerance."""

    def distance(output: int, logits: np.ndarray, token: int) -> float:
        noise = gumbel(seed, sample_index, output, len(logits))

        def margin(nudge_p: float = 0.0, nudge_min: float = 0.0, slack: float = 0.0) -> float:
            scores = filtered(logits, temperature, top_k, top_p + nudge_p, min_p + nudge_min, slack) + noise
            return float(scores.max() - scores[token])

        exact = margin()
        if exact == 0:
            return 0.0
        edges = itertools.product((-tolerance, 0, tolerance), (-tolerance, 0, tolerance), (-tolerance, 0, tolerance))
        return max(min(margin(*edge) for edge in edges), float(np.finfo(float).tiny))

    return distance
