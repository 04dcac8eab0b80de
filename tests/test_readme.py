"""README.md's examples, run as they stand.

PROTECTS: a newcomer who copies a line from the README and gets an error.  Every fenced block says in a comment before
it how it is run here, or why it is not; a block without such a comment fails.  Only one thing is changed: the server
gets `--port 0`, and its clients the address that it then prints.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from rlt_jax.exits import POLICY_ALIASES, POLICY_NAMES
from rlt_jax.models.hub import PINNED_REVISIONS
from rlt_jax.models.registry import MODELS
from rlt_jax.train.evaluate import EXAMPLES as TASKS

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
ADDRESS = "127.0.0.1:50051"  # what the README says
LISTENING = "rlt-server listening on "
COMMAND_SECONDS = 120  # far above what any takes, so that a hang ends
MARK = re.compile(r"<!-- (?:test: (?P<kind>run|server|client|offline|demo)|untested: (?P<reason>[^>]+)) -->")
BLOCK = re.compile(r"(?P<before>[^\n]*)\n```(?P<language>\w*)\n(?P<code>.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclasses.dataclass(frozen=True)
class Example:
    kind: str  # run, server, client, offline, demo (what it prints), or untested
    language: str
    code: str


def examples_of(text: str) -> list[Example]:
    """All fenced blocks; fails for one that does not say how it is tested."""
    found = []
    for block in BLOCK.finditer(text):
        mark = MARK.fullmatch(block["before"])
        assert mark, f"this block has no test comment before it:\n{block['code']}"
        found.append(Example(mark["kind"] or "untested", block["language"], block["code"]))
    assert len(found) * 2 == text.count("```"), "a fence that this file does not understand"
    return found


EXAMPLES = examples_of(README)


def commands(kind: str) -> list[str]:
    """The command lines of all shell blocks of a kind."""
    code = "\n".join(e.code for e in EXAMPLES if e.kind == kind and e.language == "sh")
    return [line for line in code.splitlines() if line.strip() and not line.startswith("#")]


def programs(kind: str) -> list[str]:
    return [e.code for e in EXAMPLES if e.kind == kind and e.language == "python"]


def environment() -> dict[str, str]:
    """As after `. .venv/bin/activate`, on the CPU."""
    here = str(Path(sys.executable).parent)
    return {**os.environ, "PATH": here + os.pathsep + os.environ["PATH"], "JAX_PLATFORMS": "cpu"}


def run_command(line: str) -> str:
    done = subprocess.run(
        ["bash", "-c", line], cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=COMMAND_SECONDS
    )
    assert done.returncode == 0, f"{line}\n{done.stderr}"
    check_output(line, done.stdout)
    return done.stdout


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


def run_program(code: str, capsys: pytest.CaptureFixture[str]) -> str:
    exec(compile(code, "README.md", "exec"), {"__name__": "__main__"})
    printed = capsys.readouterr().out
    assert printed.strip(), f"printed nothing:\n{code}"
    return printed


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    """The README's own server command on a free port; its address.  Stopped as the README says, exit code 0."""
    (line,) = commands("server")
    process = subprocess.Popen(
        [*shlex.split(line, comments=True), "--port", "0"],
        cwd=ROOT,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stderr is not None
    log: list[str] = []
    reader = threading.Thread(target=log.extend, args=(process.stderr,), daemon=True)
    reader.start()
    watchdog = threading.Timer(COMMAND_SECONDS, process.kill)
    watchdog.start()
    try:
        first = process.stdout.readline()
        assert first.startswith(LISTENING), "".join(log)
        yield first.removeprefix(LISTENING).strip()
        process.send_signal(signal.SIGINT)  # Ctrl-C
        assert process.wait(30) == 0, "".join(log)
    finally:
        watchdog.cancel()
        process.kill()
        process.wait()
        reader.join(10)


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
    run_command(line)


@pytest.mark.parametrize("code", programs("offline"), ids=lambda code: code.splitlines()[0])
def test_offline_python(code: str, capsys: pytest.CaptureFixture[str]) -> None:
    printed = run_program(code, capsys)
    assert re.search(r"\(\d(, \d)+\)", printed), "every example shows exit depths"


@pytest.mark.parametrize("line", commands("client"))
def test_client_commands(line: str, server: str) -> None:
    assert ADDRESS in line
    run_command(line.replace(ADDRESS, server))


@pytest.mark.parametrize("code", programs("client"), ids=lambda code: code.splitlines()[0])
def test_client_python(code: str, server: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert ADDRESS in code
    run_program(code.replace(ADDRESS, server), capsys)


def test_links_lead_somewhere() -> None:
    links = re.findall(r"\]\((?!https?:)([^)#]+)", README)
    assert len(links) >= 5
    assert [link for link in links if not (ROOT / link).exists()] == []


def test_the_demo_prints_what_the_readme_shows() -> None:
    """The prompt and the answer word for word.  A depth may differ where another machine rounds another way."""
    (shown,) = [e.code.splitlines() for e in EXAMPLES if e.kind == "demo"]
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
    assert dict(re.findall(r"`(ByteDance/[\w.-]+)` \| `(\w+)`", README)) == {
        name: revision[:12] for name, revision in PINNED_REVISIONS.items()
    }
    rows = README[README.index("| exit policy |") : README.index("| KV layout |")]
    policies = re.findall(r"^\| (?:exit policy)? ?\| `(\w+)` \|", rows, re.MULTILINE)
    assert set(policies) == set(POLICY_NAMES)
    assert all(f"`{alias}`" in README for alias in POLICY_ALIASES)
    assert set(MODELS) == {"huginn_raven", "ouro", "nanbeige"}, "the README says which models are served"
