"""The demo, as a newcomer runs it: a real server process, three streams, a clean end.

PROTECTS: the first thing anybody sees works, leaves nothing running, and says what is wrong when it does not.
"""

from __future__ import annotations

import io
import json
import shlex
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from rlt_jax import demo
from rlt_jax.errors import RltError
from rlt_jax.generate import build_parser as generate_parser
from rlt_jax.request import FinishReason, RequestOutput, SamplingParams, Usage
from server.__main__ import build_parser as server_parser
from tests.server.scripted_model import write_scripted_model

USAGE = Usage(prompt_tokens=3, completion_tokens=4, prompt_loops=12, decode_loops=6, full_depth_loops=12)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_scripted_model(tmp_path_factory.mktemp("scripted"))


def run_demo(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "rlt_jax.demo", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


def test_the_demo(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")  # many a machine has one, and it must not be asked
    done = run_demo("--model", str(model))
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    lines = done.stdout.splitlines()
    assert "\x1b" not in done.stdout  # not a terminal: no colour codes
    assert [line.split(maxsplit=1)[1] for line in lines if line.startswith("prompt ")] == list(demo.demo_prompts())
    depths = [line.split()[1:] for line in lines if line.startswith("depths ")]
    assert len(depths) == 3
    assert all(row[0] == "4" and set(row) <= set("1234") for row in depths)
    loops = [line for line in lines if line.startswith("loops ")]
    assert len(loops) == 3
    assert all("after the first token: " in line and line.endswith("% saved") for line in loops)
    assert any(line.startswith("together: ") for line in lines)
    address = next(line for line in lines if line.startswith("server: 127")).split()[1]
    host, port = address.split(":")
    with pytest.raises(ConnectionRefusedError):  # stopped
        socket.create_connection((host, int(port)), timeout=5)


def test_a_demo_that_fails_shows_the_servers_log(tmp_path: Path) -> None:
    done = run_demo("--model", str(tmp_path))
    assert done.returncode == 1
    assert "config.json: missing" in done.stderr  # from the server's log
    assert done.stderr.splitlines()[-1] == (
        "python -m rlt_jax.demo: error: the server ended with exit code 2 before it was ready"
    )
    assert "Traceback" not in done.stderr


def test_a_server_that_is_not_ready_in_time_is_stopped(model: Path) -> None:
    with demo.ServerProcess(["--model", str(model)]) as server:
        with pytest.raises(demo.DemoFailed, match="not ready after 0.1 s"):
            server.wait_listening(0.1)
        assert server.stop() is not None
    assert server._process.returncode is not None


def test_the_commands_to_do_it_by_hand_are_valid() -> None:
    serve, wait, text, jsonl, stop = demo.by_hand("it's a prompt", {"--exit-threshold": "0.5"}, ["--model", "some dir"])
    assert serve.endswith(" &")
    words = shlex.split(serve.removesuffix(" &"))
    assert words[1:3] == ["-m", "server"]
    options = server_parser().parse_args(words[3:])
    assert options.model == "some dir"
    for command in (text, jsonl):
        words = shlex.split(command)
        assert words[1:3] == ["-m", "rlt_jax.generate"]
        given = generate_parser().parse_args(words[3:])
        assert given.prompts == ["it's a prompt"]
        assert given.server == f"{options.host}:{options.port}"
        assert given.exit_threshold == 0.5
    assert wait.startswith("# ")
    assert stop == "kill %1"


@pytest.mark.parametrize(
    ("policies", "threshold", "options"),
    [
        (("fixed", "gate", "trace"), 0.2, {"--exit-threshold": "0.2"}),
        (("fixed", "gate", "trace"), 1.0, {"--exit-threshold": "0.5"}),  # its own is full depth: nothing to see
        (("fixed", "latent", "kl", "trace"), 1.0, {"--exit-policy": "latent"}),
        (("fixed", "trace"), 1.0, {}),
    ],
)
def test_the_demo_asks_for_what_the_model_serves(policies: tuple, threshold: float, options: dict) -> None:
    assert demo.exit_options(policies, SamplingParams(exit_threshold=threshold)) == options
    words = [word for pair in options.items() for word in pair]
    assert generate_parser().parse_args(words).exit_policy == options.get("--exit-policy")


def output(*depths: int, text: str, usage: Usage | None = None) -> RequestOutput:
    return RequestOutput(
        request_id="r",
        token_ids=depths,
        exit_depths=depths,
        logprobs=(0.0,) * len(depths),
        text=text,
        finish_reason=FinishReason.LENGTH if usage else None,
        usage=usage,
    )


def test_what_is_shown_grows() -> None:
    progress = demo.Progress("sort: b a =")
    progress.add(output(4, 1, text=" a"))
    assert progress.render(4).plain == "prompt  sort: b a =\ntext    a\ndepths  4 1\nloops   …\n"
    progress.add(output(2, 3, text=" b", usage=USAGE))
    assert progress.render(4).plain.splitlines()[1:] == [
        "text    a b",
        "depths  4 1 2 3",
        "loops   6 of 12 after the first token: 50% saved",
    ]


def test_depths_are_coloured_on_a_terminal() -> None:
    progress = demo.Progress("p")
    progress.add(output(1, 4, text="x", usage=USAGE))
    for terminal in (True, False):
        shown = io.StringIO()
        colours = "standard" if terminal else None
        Console(file=shown, force_terminal=terminal, color_system=colours).print(progress.render(4))
        assert ("\x1b[" in shown.getvalue()) is terminal
    assert demo.depth_colour(1, 4) == demo.depth_colour(1, 8) == "green"
    assert demo.depth_colour(4, 4) == demo.depth_colour(8, 8) == "red"
    assert demo.depth_colour(1, 1) == "green"


def test_nothing_to_save_with_one_token() -> None:
    one = Usage(prompt_tokens=3, completion_tokens=1, prompt_loops=12, decode_loops=0, full_depth_loops=0)
    assert demo.saved(one) == "one token: nothing to save"


def test_prompts_come_from_the_model_where_it_brings_them(tmp_path: Path) -> None:
    file = tmp_path / "prompts.json"
    assert demo.demo_prompts(file) == demo.PROMPTS
    file.write_text(json.dumps({"demo": ["a", "b", "c"]}))
    assert demo.demo_prompts(file) == ("a", "b", "c")
    assert len(demo.demo_prompts()) == 3


def test_the_first_failed_stream_fails_the_demo() -> None:
    class Client:
        """Refuses the second prompt."""

        def generate(self, prompt: str, params: object, *, timeout_seconds: float) -> list[RequestOutput]:
            if prompt == "bad":
                raise RltError("refused")
            return [output(1, text="x", usage=USAGE)]

    progress = [demo.Progress("good"), demo.Progress("bad")]
    with pytest.raises(RltError, match="refused"):
        list(demo.stream_all(Client(), progress, demo.SamplingParams()))  # type: ignore[arg-type]
