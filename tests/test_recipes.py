"""docs/recipes/huginn.md's examples, run as they stand on the tiny checkpoint, and its tables.

PROTECTS: a recipe whose commands no longer run, sizes that the cache no longer has, and names of the authors' code
that stand beside something else.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator

import numpy as np
import pytest

from rlt_jax import LLM, SamplingParams
from rlt_jax.config import KVLayoutKind
from rlt_jax.exits import DEFAULT_THRESHOLDS, POLICY_NAMES, POLICY_NEEDS_SCORE
from rlt_jax.kvcache.layout import KVLayout
from rlt_jax.runtime.memory import MAX_ARRAY_ELEMENTS
from tests.conftest import fixture_dir
from tests.examples import ADDRESS, Page, run_command, run_program, started

PAGE = Page("docs/recipes/huginn.md")
EIGHT = set(range(1, 9))  # loops of the tiny checkpoint


def check_output(line: str, output: str) -> None:
    """One completion; as long as asked for, and, with a policy of its own, of several depths."""
    words = shlex.split(line)
    (result,) = [json.loads(each) for each in output.splitlines()]
    depths = result["exit_depths"]
    assert len(result["token_ids"]) == len(depths) == len(result["logprobs"]) == 12
    if "--exit-policy" in words:
        assert set(depths) <= EIGHT
        assert depths[0] == 8
        assert len(set(depths[1:])) > 1, "nothing to see in this example"
    else:
        assert depths == [10] * 12


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    (line,) = PAGE.commands("server")
    with started(line) as address:
        yield address


@pytest.mark.parametrize("line", PAGE.commands("run"))
def test_commands(line: str) -> None:
    check_output(line, run_command(line))


@pytest.mark.parametrize("line", PAGE.commands("client"))
def test_client_commands(line: str, server: str) -> None:
    assert ADDRESS in line
    check_output(line, run_command(line.replace(ADDRESS, server)))


def test_client_python(server: str, capsys: pytest.CaptureFixture[str]) -> None:
    (code,) = PAGE.programs("client")
    printed = run_program(code.replace(ADDRESS, server), capsys)
    assert printed.splitlines()[0].startswith("8 True 8 ")
    assert "('latent', 'kl', 'argmax')" in printed
    assert "('zeros', 'random')" in printed


def test_offline_python(capsys: pytest.CaptureFixture[str]) -> None:
    (code,) = PAGE.programs("offline")
    shallow, adaptive = run_program(code, capsys).splitlines()
    assert "(4, 4, 4, 4, 4, 4, 4, 4)" in shallow
    assert "(8, " in adaptive


# -- the reference's names --------------------------------------------------------------------------------------------

GOLDEN = fixture_dir("huginn_tiny") / "golden.npz"  # recorded from the authors' code, see its README


def served(**settings: object) -> LLM:
    return LLM(GOLDEN.parent, dtype="float32", slots=1, max_context=64, **settings)


@pytest.mark.parametrize(("layout", "reference"), [("drop", "full"), ("last_exited", "latest-m4")])
def test_layouts_and_policies_are_what_the_reference_calls_so(layout: str, reference: str) -> None:
    golden = np.load(GOLDEN)
    assert re.search(rf"^\| `{layout}`.*\| `{reference}`", PAGE.text, re.MULTILINE)
    with served(kv_layout=layout) as llm:
        for criterion, policy, threshold in (("latent-diff", "latent", 0.12), ("kl", "kl", 0.02)):
            assert re.search(rf"^\| `{policy}` \|.*\| `{criterion}` \|", PAGE.text, re.MULTILINE)
            recorded = {name: golden[f"adaptive_{reference}_{criterion}_{name}"] for name in ("ids", "steps")}
            params = SamplingParams(
                max_tokens=12, ignore_eos=True, min_loops=1, prefill_loops=int(recorded["steps"][0]),
                exit_policy=policy, exit_threshold=threshold,
            )  # fmt: skip
            (result,) = llm.generate(golden["input_ids"][0].tolist(), params)
            assert list(result.token_ids) == recorded["ids"][0].tolist()
            assert list(result.exit_depths) == recorded["steps"].tolist()


@pytest.mark.parametrize(("planes", "recorded"), [(1, "latest-m4-compress-s4"), (2, "compress-s8")])
def test_a_ring_is_what_the_reference_compresses_to(planes: int, recorded: str) -> None:
    golden = np.load(GOLDEN)
    with served(kv_layout="ring", kv_planes=planes) as llm:
        (result,) = llm.generate(golden["input_ids"][0].tolist(), SamplingParams(max_tokens=12, ignore_eos=True))
    assert list(result.token_ids) == golden[f"greedy_steps8_{recorded}_ids"][0].tolist()


# -- the tables -------------------------------------------------------------------------------------------------------


def test_links_lead_somewhere() -> None:
    assert PAGE.broken_links() == []


def huginn_layout(kind: KVLayoutKind, cap: int, ring_planes: int | None = None) -> KVLayout:
    """The cache of Huginn-0125 in bfloat16: 2 + 4 + 2 layers, 55 heads of 96."""
    return KVLayout.create(
        kind, max_loops=cap, page_size=64, kv_heads=55, head_dim=96, num_layers=8, prelude_layers=2, coda_layers=2,
        dtype_bytes=2, ring_planes=ring_planes,
    )  # fmt: skip


def test_sizes_are_those_of_the_layout() -> None:
    rows = re.findall(
        r"^\| `(\w+)`(?: \(default\))?(?:, `--kv-planes (\d)`)? \|.*\| ([\d,]+) / ([\d,]+) \|", PAGE.text, re.MULTILINE
    )
    assert {kind for kind, *_ in rows} == {kind.value for kind in KVLayoutKind}
    for kind, planes, *sizes in rows:
        found = [
            huginn_layout(KVLayoutKind(kind), cap, int(planes) if planes else None).bytes_per_position
            for cap in (8, 32)
        ]
        assert [f"{size:,}" for size in found] == sizes, kind
    deepest = huginn_layout(KVLayoutKind.LAST_EXITED, 32)
    pages = MAX_ARRAY_ELEMENTS // (deepest.planes * deepest.kv_heads * deepest.page_size * deepest.head_dim)
    assert f"{pages} pages of {deepest.page_size} positions, {pages * deepest.page_size:,} positions" in PAGE.text


def test_policies_and_defaults_are_those_of_the_code() -> None:
    rows = re.findall(r"^\| `(\w+)`(?: \(default\))? \|[^|]*\|[^|]*\| ([\d.]*) ?\|", PAGE.text, re.MULTILINE)
    shown = {name: default for name, default in rows if name in POLICY_NAMES}
    needs_gate = {name for name, score in POLICY_NEEDS_SCORE.items() if score == "gate"}
    assert set(shown) == set(POLICY_NAMES) - needs_gate
    assert {name: float(default) for name, default in shown.items() if default} == DEFAULT_THRESHOLDS
