"""Examples in the documentation, run as they stand.

Every fenced block of a page says in a comment before it how it is run, or why it is not.  Only one thing is changed:
a server gets `--port 0`, and its clients the address that it then prints.
"""

from __future__ import annotations

import contextlib
import dataclasses
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

ROOT = Path(__file__).resolve().parent.parent
ADDRESS = "127.0.0.1:50051"  # what the pages say
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


class Page:
    """One page of documentation and its examples."""

    def __init__(self, path: str) -> None:
        self.text = (ROOT / path).read_text(encoding="utf-8")
        self.examples = examples_of(self.text)
        self.folder = (ROOT / path).parent

    def commands(self, kind: str) -> list[str]:
        """The command lines of all shell blocks of a kind."""
        code = "\n".join(e.code for e in self.examples if e.kind == kind and e.language == "sh")
        return [line for line in code.replace("\\\n", "").splitlines() if line.strip() and not line.startswith("#")]

    def programs(self, kind: str) -> list[str]:
        return [e.code for e in self.examples if e.kind == kind and e.language == "python"]

    def broken_links(self) -> list[str]:
        """Links to files that are not there."""
        links = re.findall(r"\]\((?!https?:)([^)#]+)", self.text)
        return [link for link in links if not (self.folder / link).exists()]


def environment() -> dict[str, str]:
    """As after `. .venv/bin/activate`, on the CPU."""
    here = str(Path(sys.executable).parent)
    return {**os.environ, "PATH": here + os.pathsep + os.environ["PATH"], "JAX_PLATFORMS": "cpu"}


def run_command(line: str) -> str:
    """Run a command line as a shell would; what it printed."""
    done = subprocess.run(
        ["bash", "-c", line], cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=COMMAND_SECONDS
    )
    assert done.returncode == 0, f"{line}\n{done.stderr}"
    return done.stdout


def run_program(code: str, capsys: pytest.CaptureFixture[str]) -> str:
    """Run a Python example; what it printed."""
    exec(compile(code, "example", "exec"), {"__name__": "__main__"})
    printed = capsys.readouterr().out
    assert printed.strip(), f"printed nothing:\n{code}"
    return printed


@contextlib.contextmanager
def started(line: str) -> Iterator[str]:
    """A page's server command on a free port; its address.  Stopped by Ctrl-C, exit code 0."""
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
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 0, "".join(log)
    finally:
        watchdog.cancel()
        process.kill()
        process.wait()
        reader.join(10)
