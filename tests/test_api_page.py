"""docs/api.md's examples, run as they stand against the bundled model, and what docs/performance.md says of the JSON.

PROTECTS: a client example that no longer runs or prints something else; a key of the benchmark that nobody explains.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest

from tests.examples import ADDRESS, ROOT, Page, run_program, started

PAGE = Page("docs/api.md")
# What an example must print, by a word that it alone holds.
PRINTS = {
    "exit_policies": ("'gate'", "(4,", "Usage("),
    'request_id="mine"': ("mine ", "True\nFinishReason.ABORT ", "StatusCode.CANCELLED"),
    "AsyncGenerationClient": (" q d k a w z m e", " e m z w a k d q"),
    "wait_until_serving": ("'rlt_jax': ", "exit_policy='gate'"),
}


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    with started("python -m server") as address:
        yield address


@pytest.mark.parametrize("word", PRINTS)
def test_client_python(word: str, server: str, capsys: pytest.CaptureFixture[str]) -> None:
    (code,) = [code for code in PAGE.programs("client") if word in code]
    printed = run_program(code.replace(ADDRESS, server), capsys)
    for expected in PRINTS[word]:
        assert expected in printed


def test_every_example_is_run() -> None:
    assert len(PAGE.programs("client")) == len(PAGE.examples) == len(PRINTS)


def test_links_lead_somewhere() -> None:
    assert PAGE.broken_links() == []


WRITERS = {
    "measure.py": ("tick", "first_token"),
    "throughput.py": ("rows", "throughput", "_against_bound"),
    "timeline.py": ("guards", "refused"),
    "loading.py": ("load",),
    "environment.py": ("environment",),
    "__main__.py": ("_load", "_report"),
}


def keys_of(file: str, functions: tuple[str, ...]) -> set[str]:
    """String keys of the dictionaries that functions of the benchmark write: literals and assigned items."""
    tree = ast.parse((ROOT / "rlt_jax/bench" / file).read_text(encoding="utf-8"))
    bodies = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name in functions]
    assert len(bodies) == len(functions), file
    keys: list[ast.expr | None] = []
    for node in (node for body in bodies for node in ast.walk(body)):
        if isinstance(node, ast.Dict):
            keys += node.keys
        elif isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store):
            keys.append(node.slice)
    return {key.value for key in keys if isinstance(key, ast.Constant) and isinstance(key.value, str)}


def test_every_key_of_the_json_is_explained() -> None:
    text = (ROOT / "docs/performance.md").read_text(encoding="utf-8")
    section = text[text.index("## Reading the JSON") : text.index("## One H200")]
    found = set().union(*(keys_of(file, functions) for file, functions in WRITERS.items()))
    assert {"share_of_bound", "over_fixed", "ratio", "invalid", "source_hash"} <= found
    assert {key for key in found if f"`{key}`" not in section} == set()
