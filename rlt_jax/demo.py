"""Three completions from a real server, started and stopped here: `python -m rlt_jax.demo`, or `make demo`.

Starts `python -m server` on a free port of this machine, sends three prompts at once and shows, per output token, the
number of loops it ran.  On a terminal in colour and as it happens, otherwise as plain lines.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import queue
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Self

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from rlt_jax import cli
from rlt_jax.client import GenerationClient
from rlt_jax.errors import RltError
from rlt_jax.request import RequestOutput, SamplingParams, Usage

PROGRAM = "python -m rlt_jax.demo"
START_SECONDS = 300.0  # load and compile; most of it is saved on disk for the next start
REQUEST_SECONDS = 120.0
STOP_SECONDS = 30.0
MAX_TOKENS = 48
SAVING_THRESHOLD = 0.5  # for a model whose own threshold is full depth
LISTENING = "rlt-server listening on "

# Used where the bundled model brings no prompts.json with a list "demo".
PROMPTS = (
    "sort: q d k a w z m e =",
    "calc: a:3+5*2 b:7-9 c:4 d:1*8+6-3*3 =",
    "chain: d k, q d, a q, k a; q3 a1 d2 k5 =",
)
PROMPTS_FILE = Path(__file__).resolve().parent / "bundled" / "prompts.json"

_DEPTH_COLOURS = ("green", "yellow", "dark_orange", "red")  # few loops to many


class DemoFailed(RltError):
    """The demo could not be shown; the message says why."""


# -- the server as a child process ------------------------------------------------------------------------------------


class ServerProcess:
    """`python -m server` on a free port, from the first line it prints to its end.  A context manager.

    Attributes:
        address: "HOST:PORT", once `wait_listening` has returned.
    """

    def __init__(self, arguments: Sequence[str] = ()) -> None:
        self.address = ""
        self._log: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115  (closed by __exit__)
        self._lines: queue.Queue[str | None] = queue.Queue()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "server", "--host", "127.0.0.1", "--port", "0", *arguments],
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
        )
        threading.Thread(target=self._read_lines, daemon=True).start()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
        self._log.close()

    def _read_lines(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(line.rstrip("\n"))
        self._lines.put(None)

    def wait_listening(self, timeout_seconds: float) -> str:
        """Wait until the server is warm; its address.

        Raises:
            DemoFailed: it ended, or was not ready within the time.
        """
        deadline = time.monotonic() + timeout_seconds
        while True:
            try:
                line = self._lines.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                raise DemoFailed(f"the server was not ready after {timeout_seconds:g} s") from None
            if line is None:
                raise DemoFailed(f"the server ended with exit code {self._process.wait()} before it was ready")
            if line.startswith(LISTENING):
                self.address = line.removeprefix(LISTENING)
                return self.address

    def stop(self, timeout_seconds: float = STOP_SECONDS) -> int:
        """Ask the server to end, insist after the time; its exit code (negative: the signal that ended it)."""
        if self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(timeout_seconds)
            except subprocess.TimeoutExpired:
                self._process.kill()
        return self._process.wait()

    def log_text(self) -> str:
        """What the server has logged so far."""
        # pread-like: the child writes through the same file description, so its position must not move
        return os.pread(self._log.fileno(), 1 << 20, 0).decode(errors="replace")


# -- what is shown ----------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Progress:
    """One prompt and what has come of it."""

    prompt: str
    text: str = ""
    token_ids: list[int] = dataclasses.field(default_factory=list)
    exit_depths: list[int] = dataclasses.field(default_factory=list)
    usage: Usage | None = None

    def add(self, output: RequestOutput) -> None:
        self.text += output.text or ""
        self.token_ids.extend(output.token_ids)
        self.exit_depths.extend(output.exit_depths)
        self.usage = output.usage or self.usage

    def render(self, max_loops: int) -> Text:
        """Four lines: prompt, text, depth per token, loops saved."""
        shown = Text(f"prompt  {self.prompt}\n", style="bold")
        shown.append(
            "text    " + (self.text or " ".join(map(str, self.token_ids))).strip() + "\n", style="not bold cyan"
        )
        shown.append("depths ", style="not bold")
        for depth in self.exit_depths:
            shown.append(f" {depth}", style=f"not bold {depth_colour(depth, max_loops)}")
        shown.append("\nloops   " + (saved(self.usage) if self.usage else "…") + "\n", style="not bold")
        return shown


def depth_colour(depth: int, max_loops: int) -> str:
    """Green for one loop, red for all of them."""
    last = len(_DEPTH_COLOURS) - 1
    return _DEPTH_COLOURS[min(last, last * (depth - 1) // max(1, max_loops - 1))]


def saved(usage: Usage) -> str:
    """How much of full depth a request did not need.  The first token comes from the prompt's own loops."""
    if usage.full_depth_loops == 0:
        return "one token: nothing to save"
    share = 1 - usage.decode_loops / usage.full_depth_loops
    return f"{usage.decode_loops} of {usage.full_depth_loops} after the first token: {share:.0%} saved"


def demo_prompts(path: Path = PROMPTS_FILE) -> tuple[str, ...]:
    """Prompts the bundled model was trained for."""
    if not path.is_file():
        return PROMPTS
    return tuple(json.loads(path.read_text(encoding="utf-8"))["demo"])


# -- the demo ---------------------------------------------------------------------------------------------------------


def stream_all(client: GenerationClient, progress: Sequence[Progress], params: SamplingParams) -> Iterator[None]:
    """Send all prompts at once; yields whenever one of them has news.

    Raises:
        RltError: of the first request that failed.
    """
    news: queue.Queue[tuple[int, RequestOutput | Exception | None]] = queue.Queue()

    def read(index: int) -> None:
        try:
            stream = client.generate(progress[index].prompt, params, timeout_seconds=REQUEST_SECONDS)
            for output in stream:
                news.put((index, output))
            news.put((index, None))
        except Exception as error:  # handed to the main thread, which raises it
            news.put((index, error))

    for index in range(len(progress)):
        threading.Thread(target=read, args=(index,), daemon=True).start()
    left = len(progress)
    while left:
        index, item = news.get()
        match item:
            case None:
                left -= 1
            case Exception():
                raise item
            case _:
                progress[index].add(item)
                yield


def exit_options(exit_policies: Collection[str], defaults: SamplingParams) -> dict[str, str]:
    """Options of rlt_jax.generate with which tokens leave at depths of their own, where the model can do that.

    Args:
        exit_policies: that the model serves.
        defaults: what a request gets that says nothing.
    """
    if "gate" in exit_policies:
        own = defaults.exit_threshold
        return {"--exit-threshold": f"{own if own is not None and own < 1 else SAVING_THRESHOLD:g}"}
    return {"--exit-policy": "latent"} if "latent" in exit_policies else {}


def show(console: Console, client: GenerationClient, prompts: Sequence[str]) -> dict[str, str]:
    """Complete the prompts before the reader's eyes; the exit options that were used."""
    model, defaults = client.model_info(), client.server_info().defaults
    exits = exit_options(model.exit_policies, defaults)
    shown = "".join(f", {option.removeprefix('--').replace('-', ' ')} {value}" for option, value in exits.items())
    console.print(
        f"{model.name}: {model.parameter_count:,} parameters, at most {model.max_loops} loops per token; "
        f"{len(prompts)} prompts at once{shown}\n"
    )
    threshold = exits.get("--exit-threshold")
    params = SamplingParams(
        max_tokens=MAX_TOKENS,
        exit_policy=exits.get("--exit-policy"),
        exit_threshold=None if threshold is None else float(threshold),
        temperature=0.0,
    )
    progress = [Progress(prompt) for prompt in prompts]

    def picture() -> Group:
        return Group(*(each.render(model.max_loops) for each in progress))

    if console.is_terminal:
        with Live(picture(), console=console, refresh_per_second=20) as live:
            for _ in stream_all(client, progress, params):
                live.update(picture())
    else:
        for _ in stream_all(client, progress, params):
            pass
        console.print(picture())
    usages = [each.usage for each in progress if each.usage is not None]
    total = Usage(**{f.name: sum(getattr(u, f.name) for u in usages) for f in dataclasses.fields(Usage)})
    console.print(f"together: {saved(total)}")
    return exits


def by_hand(prompt: str, exits: Mapping[str, str], server_arguments: Sequence[str]) -> list[str]:
    """The commands that do the same."""
    python = sys.executable
    with contextlib.suppress(ValueError):  # another drive
        python = min(python, os.path.relpath(python), key=len)
    address = "127.0.0.1:50051"
    server = [python, "-m", "server", *server_arguments]
    options = [word for pair in exits.items() for word in pair]
    generate = [python, "-m", "rlt_jax.generate", "--prompt", prompt, *options]
    return [
        f"{shlex.join(server)} &",
        f"# when it has printed: {LISTENING}{address}",
        shlex.join([*generate, "--server", address]),
        shlex.join([*generate, "--server", address, "--format", "jsonl"]),
        "kill %1",
    ]


def build_parser() -> cli.Parser:
    parser = cli.Parser(
        prog=PROGRAM,
        description="Start a server on this machine, stream completions of three prompts sent at once, show how many "
        "loops each token ran, stop the server.",
    )
    parser.add_argument("--model", metavar="DIR|REPO", help="instead of the bundled model")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the demo; the process's exit code."""
    options = build_parser().parse_args(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that `finally` ends the server
    server_arguments = [] if options.model is None else ["--model", options.model]
    prompts = demo_prompts()
    console = Console(highlight=False, soft_wrap=not sys.stdout.isatty())
    with ServerProcess(server_arguments) as server:
        try:
            with console.status("starting the server: loading the model, compiling (a minute the first time)"):
                address = server.wait_listening(START_SECONDS)
            console.print(f"server: {address}")
            with GenerationClient(address) as client:
                client.wait_until_serving(10)
                exits = show(console, client, prompts)
            exit_code = server.stop()
            if exit_code != 0:
                raise DemoFailed(f"the server ended with exit code {exit_code}")
        except RltError as error:
            sys.stderr.write(f"--- the server's log ---\n{server.log_text()}--- end of the log ---\n")
            cli.fail(PROGRAM, error, cli.EXIT_FAILURE)
        except KeyboardInterrupt:
            return cli.EXIT_INTERRUPTED
    console.print("server: stopped\n\nthe same by hand:")
    for command in by_hand(prompts[0], exits, server_arguments):
        console.print(f"  {command}", markup=False, soft_wrap=True)  # to be copied: no line breaks
    return 0


if __name__ == "__main__":
    sys.exit(main())
