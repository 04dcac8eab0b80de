"""README.md's examples, run as they stand.

PROTECTS: a newcomer who copies a line from the README and gets an error; a block that nobody runs.
"""

from __future__ import annotations

import itertools
import json
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator

import pytest

from rlt_jax.config import KVLayoutKind
from rlt_jax.exits import POLICY_ALIASES, POLICY_NAMES
from rlt_jax.models.hub import PINNED_REVISIONS
from rlt_jax.models.registry import MODELS
from rlt_jax.train.evaluate import EXAMPLES as TASKS
from tests.examples import (
    ADDRESS,
    COMMAND_SECONDS,
    LISTENING,
    ROOT,
    Page,
    environment,
    examples_of,
    run_command,
    run_program,
    started,
)

PAGE = Page("README.md")
README = PAGE.text
commands, programs = PAGE.commands, PAGE.programs


def check_output(line: str, output: str) -> None:
    """What every command of its kind must have printed."""
    words = shlex.split(line, comments=True)
    lines = output.splitlines()
    prompts = sum(word in ("--prompt", "--prompt-ids") for word in words)
    answers = [TASKS[prompt] for option, prompt in itertools.pairwise(words) if option == "--prompt"]
    if "rlt_jax.bench" in words:
        assert json.loads(lines[-1])["valid"]
    elif "jsonl" in words:
        results = [json.loads(each) for each in lines]
        assert len(results) == prompts >= 1
        for result in results:
            assert len(result["token_ids"]) == len(result["exit_depths"]) == len(result["logprobs"]) >= 1
            assert set(result["exit_depths"]) <= {1, 2, 3, 4}
            assert result["finish_reason"] in ("stop", "length")
        assert [result["text"] for result in results if result["text"] is not None] == answers
    else:
        assert prompts >= 1, f"no check for: {line}"
        assert lines == answers


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    """The address of the README's own server."""
    (line,) = commands("server")
    with started(line) as address:
        yield address


def test_every_kind_of_example_is_there() -> None:
    assert len(commands("run")) >= 3
    assert len(commands("server")) == 1
    assert commands("client")
    assert programs("client")
    assert programs("offline")
    assert f"{LISTENING}{ADDRESS}" in README


def test_an_unmarked_block_is_refused() -> None:
    with pytest.raises(AssertionError, match="no test comment"):
        examples_of("text\n\n```sh\nmake nonsense\n```\n")


@pytest.mark.parametrize("line", commands("run"))
def test_commands(line: str) -> None:
    check_output(line, run_command(line))


@pytest.mark.parametrize("code", programs("offline"), ids=lambda code: code.splitlines()[0])
def test_offline_python(code: str, capsys: pytest.CaptureFixture[str]) -> None:
    printed = run_program(code, capsys)
    assert re.search(r"\(\d(, \d)+\)", printed), "every example shows exit depths"


@pytest.mark.parametrize("line", commands("client"))
def test_client_commands(line: str, server: str) -> None:
    assert ADDRESS in line
    check_output(line, run_command(line.replace(ADDRESS, server)))


@pytest.mark.parametrize("code", programs("client"), ids=lambda code: code.splitlines()[0])
def test_client_python(code: str, server: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert ADDRESS in code
    run_program(code.replace(ADDRESS, server), capsys)


def test_links_lead_somewhere() -> None:
    assert len(re.findall(r"\]\((?!https?:)", README)) >= 5
    assert PAGE.broken_links() == []


def test_the_demo_prints_what_the_readme_shows() -> None:
    """The prompt and the answer word for word.  A depth may differ where another machine rounds another way."""
    (shown,) = [e.code.splitlines() for e in PAGE.examples if e.kind == "demo"]
    done = subprocess.run(
        [sys.executable, "-m", "rlt_jax.demo"],
        cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=COMMAND_SECONDS,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    printed = done.stdout.splitlines()
    at = printed.index(shown[0])
    prompt, text, depths, loops = printed[at : at + 4]
    assert [prompt, text] == shown[:2]
    assert len(depths.split()) == len(shown[2].split())
    assert depths.startswith("depths  4 ")
    assert re.sub(r"\d+", "N", loops) == re.sub(r"\d+", "N", shown[3])


def test_tables_say_what_the_code_says() -> None:
    assert dict(re.findall(r"^\| `([\w.-]+/[\w.-]+)` \| `([0-9a-f]{12})` \|", README, re.MULTILINE)) == {
        name: revision[:12] for name, revision in PINNED_REVISIONS.items()
    }
    exits = README[README.index("| exit policy |") : README.index("| KV layout |")]
    policies = re.findall(r"^\| (?:exit policy)? ?\| `(\w+)` \|", exits, re.MULTILINE)
    assert set(policies) == set(POLICY_NAMES)
    layouts = README[README.index("| KV layout |") : README.index("| setting | default |")]
    assert re.findall(r"^\| (?:KV layout)? ?\| `(\w+)` \|", layouts, re.MULTILINE) == [k.value for k in KVLayoutKind]
    assert all(f"`{alias}`" in README for alias in POLICY_ALIASES)
    assert set(MODELS) == {"huginn_raven", "ouro", "nanbeige"}, "the README says which models are served"
