"""Heads that share keys, on a real GPU.

PROTECTS: the tiles of the attention kernels: padded groups and head sizes, split keys and their merge, and float32
without TF32.  The CPU compiles none of it.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlt_jax import LLM, EngineConfig, SamplingParams
from rlt_jax.ops.paged_attention.reference import paged_attention_reference
from rlt_jax.ops.paged_attention.triton import paged_attention_triton
from tests.conftest import fixture_dir

pytestmark = pytest.mark.gpu
PAGE, PAGES_PER_ROW, PLANES = 64, 5, 3


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("history", [None, "resolve", "drop"], ids=str)
@pytest.mark.parametrize(
    ("rows", "kv_heads", "group", "dim"),
    [(5, 2, 1, 128), (5, 2, 3, 64), (5, 8, 6, 128), (70, 8, 6, 128), (5, 2, 20, 96)],
    ids=["one query", "split", "Nanbeige split", "Nanbeige whole", "two tiles' worth"],
)
def test_one_position_per_row_agrees_with_the_reference(
    rows: int, kv_heads: int, group: int, dim: int, history: str | None, dtype: str
) -> None:
    """Rows of every length, one without keys, NaN past each row's last key."""
    rng = np.random.default_rng(rows + dim)
    pages = rows * PAGES_PER_ROW
    shape = (pages, PLANES, kv_heads, PAGE, dim)
    k, v = (jax.random.normal(key, shape, jnp.float32).astype(dtype) for key in jax.random.split(jax.random.key(dim)))
    table = jnp.asarray(rng.permutation(pages).reshape(rows, PAGES_PER_ROW), jnp.int32)
    last = rng.integers(0, PAGE * PAGES_PER_ROW, rows)
    last[:4] = -1, 0, PAGE - 1, PAGE * PAGES_PER_ROW - 1
    planes = jnp.asarray(rng.integers(0, PLANES, rows), jnp.int32)
    exits = jnp.asarray(rng.integers(1, PLANES + 1, (pages, PAGE)), jnp.int32)
    q = jnp.asarray(rng.normal(size=(rows, 1, kv_heads * group, dim)), dtype)
    positions = jnp.asarray(last[:, None], jnp.int32)
    foreign = np.ones((pages, PAGE), bool)
    for row, end in zip(np.asarray(table), last, strict=True):
        foreign[row[:, None], np.arange(PAGE)] = np.arange(PAGES_PER_ROW * PAGE).reshape(-1, PAGE) > end
    mask = jnp.asarray(foreign)[:, None, None, :, None]
    more = (table, positions, planes, *(() if history is None else (exits, history)))
    expected = paged_attention_reference(*(x.astype(jnp.float32) for x in (q, k, v)), *more)
    found = paged_attention_triton(q, jnp.where(mask, jnp.nan, k), jnp.where(mask, jnp.nan, v), *more)
    close = {"atol": 2e-5} if dtype == "float32" else {"atol": 2e-2}
    np.testing.assert_allclose(np.asarray(found, np.float32), np.asarray(expected, np.float32), **close)
    assert not np.asarray(found, np.float32)[0].any()


@pytest.mark.parametrize("kernels", ["triton", "reference"])
def test_recorded_tokens_of_a_model_with_grouped_heads(kernels: str) -> None:
    golden = np.load(fixture_dir("nanbeige_tiny") / "golden.npz")
    prompts, expected = golden["input_ids"].tolist(), golden["greedy_ids"].tolist()
    params = SamplingParams(max_tokens=len(expected[0]), ignore_eos=True)
    config = EngineConfig(dtype="float32", kernels=kernels, slots=8, page_size=16, prefill_chunk=16, max_context=64)
    with LLM(fixture_dir("nanbeige_tiny"), config) as llm:
        for _ in range(3):  # XLA's graphs are captured, then replayed
            assert [list(r.token_ids) for r in llm.generate(prompts * 3, params)] == expected * 3
