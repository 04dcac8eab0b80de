"""`python -m rlt_jax.generate` in hostile surroundings: pipes that close, full disks, odd locales, unusable folders.

PROTECTS: results or one line on stderr, and never a traceback.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from rlt_jax.errors import InvalidConfig
from rlt_jax.platform import check_reservation
from tests.conftest import fixture_dir
from tests.server.scripted_model import expected_text, write_scripted_model

TINY = ["--model", str(fixture_dir("ouro_tiny")), "--dtype", "float32", "--slots", "2", "--max-context", "512"]


@pytest.fixture(scope="module")
def scripted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_scripted_model(tmp_path_factory.mktemp("scripted"))


def start(*arguments: str, stdout: int = subprocess.PIPE, **environment: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "rlt_jax.generate", *arguments]
    return subprocess.Popen(command, stdout=stdout, stderr=subprocess.PIPE, env=os.environ | environment)


def run(*arguments: str, **environment: str) -> tuple[int, bytes, str]:
    process = start(*arguments, **environment)
    out, err = process.communicate(timeout=240)
    return process.returncode, out, err.decode()


def refused(*arguments: str, **environment: str) -> str:
    code, out, err = run(*arguments, **environment)
    assert (code, out) == (2, b""), err
    (line,) = err.splitlines()
    assert line.startswith("rlt-generate: error: ")
    return line


def test_a_reader_that_leaves_ends_the_command_without_a_word() -> None:
    read, write = os.pipe()
    process = start(*TINY, "--prompt-ids", "1", "--max-tokens", "4", stdout=write)
    os.close(write)
    os.close(read)
    _, err = process.communicate(timeout=240)
    assert (process.returncode, err) == (1, b"")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full, a disk that is full")
def test_a_full_disk_is_one_line() -> None:
    with Path("/dev/full").open("wb") as full:
        process = start(*TINY, "--prompt-ids", "1", "--max-tokens", "4", stdout=full.fileno())
        _, err = process.communicate(timeout=240)
    assert process.returncode == 1
    assert err.decode() == "rlt-generate: error: the results cannot be written: No space left on device\n"


@pytest.mark.parametrize("form", ["text", "jsonl"])
def test_a_locale_that_cannot_print_the_text(scripted: Path, form: str) -> None:
    code, out, err = run(
        "--model", str(scripted), "--prompt", "a", "--max-tokens", "10", "--ignore-eos", "--format", form,
        PYTHONIOENCODING="ascii",
    )  # fmt: skip
    assert (code, err) == (0, "")
    text = expected_text("a", 10)
    assert not text.isascii()
    if form == "jsonl":
        assert json.loads(out.decode("utf-8"))["text"] == text
    else:
        assert out.decode("ascii").rstrip("\n") == text.encode("ascii", "backslashreplace").decode()


def test_a_trace_of_lists_in_lists(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    path.write_text("[" * 200_000)
    assert "--exit-trace" in refused("--prompt-ids", "1", "--exit-trace", str(path))


def test_a_number_of_more_digits_than_python_prints() -> None:
    line = refused(*TINY, "--prompt-ids", "1,2", "--max-tokens", "9" * 4300)
    assert "--max-tokens" in line
    assert len(line) < 600


def test_an_empty_address_is_not_no_address() -> None:
    """An unset shell variable must not turn a remote run into a local one."""
    assert "--server is empty" in refused("--server", "", "--prompt", "a")


def test_bytes_that_are_no_text() -> None:
    arguments = [os.fsencode(word) for word in ("--server", "127.0.0.1:1", "--prompt", "a", "--stop")]
    command = [sys.executable, "-m", "rlt_jax.generate", *arguments, b"\xff"]
    done = subprocess.run(command, capture_output=True, timeout=240)
    assert (done.returncode, done.stdout) == (2, b"")
    assert done.stderr.startswith(b"rlt-generate: error: --stop: ")


def test_a_cache_folder_that_cannot_be(tmp_path: Path) -> None:
    taken = tmp_path / "file"
    taken.write_text("")
    line = refused(*TINY, "--prompt-ids", "1", RLT_JAX_CACHE_DIR=str(taken))
    assert str(taken) in line
    assert "RLT_JAX_CACHE_DIR" in line


def test_a_platform_that_is_not_there() -> None:
    line = refused(*TINY, "--prompt-ids", "1", JAX_PLATFORMS="nosuch")
    assert "JAX_PLATFORMS='nosuch'" in line


@pytest.mark.parametrize(
    ("pool", "preallocated", "refused"),
    [(131, True, False), (60, True, True), (60, False, False), (None, True, False)],
    ids=["all of it", "another process holds the rest", "nothing is reserved", "not told"],
)
def test_a_gpu_that_gives_less_than_its_share(pool: int | None, preallocated: bool, refused: bool) -> None:
    """What XLA says of its pool, in GB.  tests/gpu has a process that meets another one's memory."""
    stats = {"bytes_limit": 131 * 10**9} | ({} if pool is None else {"pool_bytes": pool * 10**9})
    if not refused:
        check_reservation("cuda:0", stats, preallocated=preallocated)
        return
    with pytest.raises(InvalidConfig, match="memory_fraction: cuda:0 gave 60.0 GB of the 131.0 GB asked for"):
        check_reservation("cuda:0", stats, preallocated=preallocated)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [(["--model", "nosuch"], "model 'nosuch'"), (["--model", "tiny", "--page-size", "0"], "page_size")],
)
def test_the_benchmark_refuses_in_one_line(arguments: list[str], words: str) -> None:
    command = [sys.executable, "-m", "rlt_jax.bench", "tick", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith("python -m rlt_jax.bench: error: ")
    assert words in line
