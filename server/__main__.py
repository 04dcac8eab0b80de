"""The server's command line: `python -m server --help`."""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rlt_jax import cli
from rlt_jax.errors import InvalidConfig, RltError
from server.app import LISTENING, ServerConfig, run

if TYPE_CHECKING:
    from rlt_jax.runtime.engine import LLMEngine

PROGRAM = "rlt-server"
DEFAULT_MAX_WAITING = 256

# Option -> field of EngineConfig or ServerConfig: what messages name, in the spelling of the command line.
OPTIONS: dict[str, str] = {
    **cli.ENGINE_OPTIONS,
    **cli.MODEL_OPTIONS,
    "--initial-state": "initial_state",
    "--max-waiting": "max_waiting",
    "--host": "host",
    "--port": "port",
    "--stream-buffer-tokens": "stream_buffer_tokens",
    "--drain-seconds": "drain_seconds",
    "--tls-cert": "tls_cert",
    "--tls-key": "tls_key",
}


def build_parser() -> cli.Parser:
    defaults = ServerConfig()
    parser = cli.Parser(
        prog=PROGRAM,
        description="Serve a looped language model over gRPC (service rlt.v1.GenerationService, with the standard "
        f'health and reflection services). When warm, prints one line to stdout: "{LISTENING} HOST:PORT". '
        "SIGTERM or Ctrl-C drains and exits 0; a second one exits at once.",
        epilog="Exit codes: 0 after a signal (drained, or stopped while loading), 1 when the engine failed, 2 for a "
        "wrong option or model, 130 or 143 after a second signal (SIGINT or SIGTERM): streams were cut.",
    )
    cli.add_version(parser)
    cli.add_model_options(parser)
    group = parser.add_argument_group("network")
    group.add_argument(
        "--host",
        default=defaults.host,
        metavar="ADDR",
        help="interface to listen on; there is no authentication (default: %(default)s)",
    )
    group.add_argument(
        "--port", type=cli.integer, default=defaults.port, metavar="N", help="0 takes a free one (default: %(default)s)"
    )
    group.add_argument("--tls-cert", type=Path, metavar="FILE", help="PEM certificate chain (default: plain text)")
    group.add_argument("--tls-key", type=Path, metavar="FILE", help="PEM private key of --tls-cert")
    group = parser.add_argument_group("requests")
    group.add_argument(
        "--max-waiting",
        type=cli.integer,
        default=DEFAULT_MAX_WAITING,
        metavar="N",
        help="requests that may wait for a slot; more are refused with RESOURCE_EXHAUSTED (default: %(default)s)",
    )
    group.add_argument(
        "--initial-state",
        metavar="zeros|random",
        help="state before the first loop of requests that do not say, where the model leaves it open; random is drawn "
        "from a request's seed (default: the model's first)",
    )
    group.add_argument(
        "--stream-buffer-tokens",
        type=cli.integer,
        default=defaults.stream_buffer_tokens,
        metavar="N",
        help="tokens that may wait for one slow reader before its request is aborted (default: %(default)s)",
    )
    group.add_argument(
        "--drain-seconds",
        type=cli.number,
        default=defaults.drain_seconds,
        metavar="S",
        help="how long running requests may go on after a signal (default: %(default)g)",
    )
    cli.add_engine_options(parser)
    group = parser.add_argument_group("log")
    group.add_argument(
        "--log-level",
        choices=("debug", "info", "warning", "error"),
        default="info",
        help="to stderr; prompts and outputs are never logged (default: %(default)s)",
    )
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the server; the process's exit code."""
    options = build_parser().parse_args(arguments)
    cli.log_to_stderr(getattr(logging, options.log_level.upper()))
    try:
        engine_config = cli.engine_config(options, max_waiting=options.max_waiting, initial_state=options.initial_state)
        config = ServerConfig(
            host=options.host,
            port=options.port,
            stream_buffer_tokens=options.stream_buffer_tokens,
            drain_seconds=options.drain_seconds,
            tls_cert=options.tls_cert,
            tls_key=options.tls_key,
        )

        def make_engine() -> LLMEngine:
            """A warm engine.  Runs in the engine thread, and imports jax, which takes seconds, only there."""
            from rlt_jax.runtime.engine import LLMEngine

            return LLMEngine(options.model, engine_config, revision=options.revision, progress=sys.stderr.isatty())

        return asyncio.run(run(config, make_engine))
    except (InvalidConfig, NotImplementedError) as error:  # the message says what to change
        cli.fail(PROGRAM, cli.with_options(str(error), OPTIONS))
    except RltError as error:
        cli.fail(PROGRAM, error)
    except KeyboardInterrupt:  # before or after the event loop, which has its own handler
        return cli.EXIT_INTERRUPTED


if __name__ == "__main__":
    sys.exit(main())
