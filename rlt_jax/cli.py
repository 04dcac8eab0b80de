"""What the command lines share: engine options with their defaults, one-line errors, number types.  No jax here."""

from __future__ import annotations

import argparse
import dataclasses
import logging
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from rlt_jax import __version__
from rlt_jax.config import DTYPES, KERNEL_CHOICES, PLATFORM_DEFAULTS, EngineConfig, KVLayoutKind
from rlt_jax.errors import InvalidConfig

EXIT_FAILURE = 1  # the engine or the server failed
EXIT_USAGE = 2  # the command, the model directory or the request is wrong
EXIT_INTERRUPTED = 130


class Parser(argparse.ArgumentParser):
    """An argparse parser whose errors are one line on stderr, and which takes values that begin with a dash.

    Args:
        dash_values: options whose next argument is always their value, even "-1,2" or "--" (as getopt does).
    """

    def __init__(self, *args: Any, dash_values: Sequence[str] = (), **kwargs: Any) -> None:
        kwargs.setdefault("allow_abbrev", False)  # an abbreviation would break when a new option arrives
        kwargs.setdefault("formatter_class", _HelpFormatter)
        super().__init__(*args, **kwargs)
        self._dash_values = frozenset(dash_values)

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        words = list(sys.argv[1:] if args is None else args)
        joined: list[str] = []
        while words:
            word = words.pop(0)
            if word in self._dash_values and words:
                word = f"{word}={words.pop(0)}"
            joined.append(word)
        return super().parse_known_args(joined, namespace)

    def error(self, message: str) -> NoReturn:
        fail(self.prog, message.removeprefix("argument "))


class _HelpFormatter(argparse.HelpFormatter):
    """Wide enough that no option of ours breaks its line."""

    def __init__(self, prog: str, **kwargs: Any) -> None:
        super().__init__(prog, max_help_position=34, width=110, **kwargs)


def fail(program: str, message: object, code: int = EXIT_USAGE) -> NoReturn:
    """Say what is wrong on one line of stderr and exit."""
    print(f"{program}: error: {' '.join(str(message).split())}", file=sys.stderr)
    raise SystemExit(code)


def check_output_file(option: str, path: Path | None) -> None:
    """Refuse a bad file name before minutes are spent on what it should hold; makes the file's folder and the file.

    Raises:
        InvalidConfig: it cannot be written; names the option.
    """
    if path is None:
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a"):
            pass
    except OSError as error:
        raise InvalidConfig(f"{option}: {path} cannot be written: {error.strerror}") from error


def integer(text: str) -> int:
    """An argparse type: a whole number of any size and sign; its range is checked where its meaning is known."""
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be an integer, found {text!r}") from None


def number(text: str) -> float:
    """An argparse type: a number, nan and infinity included; its range is checked where its meaning is known."""
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be a number, found {text!r}") from None


def integer_list(text: str) -> tuple[int, ...]:
    """An argparse type: "1,2,3"; an empty text is an empty list."""
    words = text.split(",") if text.strip() else []
    try:
        return tuple(int(word) for word in words)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be integers separated by commas, found {text!r}") from None


def add_version(parser: argparse.ArgumentParser) -> None:
    """--version, beside --help."""
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}", help="show it and exit")


def log_to_stderr(level: int) -> None:
    """Send the log to stderr.  jax's own says at INFO what it tried and did not find, so it must be a warning."""
    logging.basicConfig(level=level, stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    logging.getLogger("jax").setLevel(max(level, logging.WARNING))


def with_options(message: str, options: Mapping[str, str]) -> str:
    """A message about settings, with the options that set them in place of their names in Python.

    "page_size must be ..." becomes "--page-size: must be ...".  Inside the text only names with an underscore are
    replaced: "slots" and "port" are words too.

    Args:
        options: option -> name in Python.
    """
    names = {name: option for option, name in options.items()}
    start = re.match(r"(\w+)(?:=|: | (?=must ))", message)
    prefix = ""
    if start is not None and start[1] in names:
        prefix, message = f"{names[start[1]]}: ", message[start.end() :]
    return prefix + re.sub(r"(?<![-\w./])\w+_\w+(?![\w/])", lambda word: names.get(word[0], word[0]), message)


# -- engine options ---------------------------------------------------------------------------------------------------

# Option -> field of EngineConfig.  What an option leaves out keeps EngineConfig's default.  The cap on the depth is not
# called --max-loops: that is a request's own bound, and a command line may have both.  EngineConfig.initial_state, a
# default of requests, is the server's to offer; where one process serves one command, the request says it.
ENGINE_OPTIONS: dict[str, str] = {
    "--dtype": "dtype",
    "--kv-layout": "kv_layout",
    "--kv-planes": "kv_planes",
    "--depth-cap": "max_loops",
    "--boundary-batch": "boundary_batch",
    "--slots": "slots",
    "--page-size": "page_size",
    "--prefill-chunk": "prefill_chunk",
    "--max-context": "max_context",
    "--kv-pages": "kv_pages",
    "--memory-fraction": "memory_fraction",
    "--round-ticks": "round_ticks",
    "--kernels": "kernels",
}

MODEL_OPTIONS: dict[str, str] = {"--model": "model", "--revision": "revision"}


def given(options: argparse.Namespace, option: str) -> Any:
    """The value of "--an-option" as parsed, None if it was left out."""
    return getattr(options, option.removeprefix("--").replace("-", "_"))


def add_model_options(parser: argparse.ArgumentParser) -> None:
    """--model and --revision."""
    group = parser.add_argument_group("model")
    group.add_argument(
        "--model", metavar="DIR|REPO", help="a model directory or a Hugging Face repo id (default: the bundled model)"
    )
    group.add_argument(
        "--revision",
        metavar="REV",
        help="commit, tag or branch of the repo id (default: a fixed commit for models this version knows, else main)",
    )


def add_engine_options(parser: argparse.ArgumentParser) -> None:
    """The options of `ENGINE_OPTIONS`.  All default to None, which tells a given option from one left out."""
    defaults = {field.name: field.default for field in dataclasses.fields(EngineConfig)}
    gpu, cpu = PLATFORM_DEFAULTS["gpu"], PLATFORM_DEFAULTS["cpu"]

    def by_platform(name: str) -> str:
        return f"(default: {gpu[name]} on a GPU, {cpu[name]} on a CPU)"

    group = parser.add_argument_group("engine")
    group.add_argument("--dtype", metavar="|".join(DTYPES), help=f"(default: {defaults['dtype']})")
    group.add_argument(
        "--kv-layout",
        metavar="|".join(kind.value for kind in KVLayoutKind),
        help="KV of several depths: a plane per depth, a token that left early is read at its last loop (last_exited) "
        "or not at all (drop); one plane, always the last write (shared); --kv-planes of them in turn (ring) "
        f"(default: {KVLayoutKind.LAST_EXITED.value})",
    )
    group.add_argument(
        "--kv-planes", type=integer, metavar="N", help="planes of the layout ring, and of no other (default: 1)"
    )
    group.add_argument(
        "--depth-cap",
        type=integer,
        metavar="N",
        help="most loops that any request may ask for, where the model runs to any depth: the KV planes of last_exited "
        "and drop (default: the checkpoint's mean_recurrence). One request's own bound is its max_loops",
    )
    group.add_argument(
        "--boundary-batch",
        type=integer,
        metavar="N",
        help="rows that wait before the layers ahead of or behind the loop run for them "
        "(default: a quarter of the slots where the model has such layers, else 1)",
    )
    group.add_argument("--slots", type=integer, metavar="N", help=f"requests computed at once {by_platform('slots')}")
    group.add_argument(
        "--page-size", type=integer, metavar="N", help=f"positions per KV page {by_platform('page_size')}"
    )
    group.add_argument(
        "--prefill-chunk",
        type=integer,
        metavar="N",
        help=f"prompt positions per prefill program at most {by_platform('prefill_chunk')}",
    )
    group.add_argument(
        "--max-context",
        type=integer,
        metavar="N",
        help="positions a request may use, prompt and output together (default: the model's own, at most "
        f"{gpu['max_context']} on a GPU, {cpu['max_context']} on a CPU)",
    )
    group.add_argument(
        "--kv-pages",
        type=integer,
        metavar="N",
        help="pages in the KV pool (default: from free memory on a GPU, all slots at full context on a CPU)",
    )
    group.add_argument(
        "--memory-fraction",
        type=number,
        metavar="F",
        help=f"share of the device's memory to use, in [0.05, 0.98] (default: {defaults['memory_fraction']:g})",
    )
    group.add_argument(
        "--round-ticks",
        type=integer,
        metavar="N",
        help="passes over the model per dispatched round at most (default: 4 from 32 slots up, else 8)",
    )
    group.add_argument(
        "--kernels",
        metavar="|".join(KERNEL_CHOICES),
        help="implementation of the ops on the KV cache; auto takes per op the best that fits and reports why "
        f"(default: {defaults['kernels']})",
    )


def engine_config(options: argparse.Namespace, **overrides: Any) -> EngineConfig:
    """The settings that the options of `add_engine_options` ask for.

    Raises:
        InvalidConfig: a setting that cannot work.
    """
    settings = {field: given(options, option) for option, field in ENGINE_OPTIONS.items()}
    return EngineConfig(**{field: value for field, value in settings.items() if value is not None}, **overrides)
