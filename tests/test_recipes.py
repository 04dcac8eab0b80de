"""docs/recipes/huginn.md's examples, run as they stand on the tiny checkpoint, and its tables.

PROTECTS: a recipe whose commands no longer run, and sizes that the cache no longer has.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator

import pytest

from rlt_jax.config import KVLayoutKind
from rlt_jax.exits import DEFAULT_THRESHOLDS, POLICY_NAMES, POLICY_NEEDS_SCORE
from rlt_jax.kvcache.layout import KVLayout
from rlt_jax.runtime.memory import MAX_ARRAY_ELEMENTS
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
