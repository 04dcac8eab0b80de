"""Complete prompts from the command line, on this machine or through a server: `python -m rlt_jax.generate --help`.

The scriptable surface: its options and its output stay.  Results alone go to stdout, everything else to stderr.
"""

from __future__ import annotations

import argparse
import asyncio
import io
import json
import logging
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rlt_jax import cli
from rlt_jax.errors import CheckpointError, InvalidConfig, InvalidRequest, RltError
from rlt_jax.request import Completion, SamplingParams

PROGRAM = "rlt-generate"
MAX_CONCURRENT_CALLS = 64  # with --server
BUSY_RETRY_SECONDS = 60.0  # how long a full server is asked again

Prompt = str | tuple[int, ...]

# Option -> field of SamplingParams.  What an option leaves out keeps the model's or the server's default.
PARAM_OPTIONS: dict[str, str] = {
    "--max-tokens": "max_tokens",
    "--temperature": "temperature",
    "--top-k": "top_k",
    "--top-p": "top_p",
    "--min-p": "min_p",
    "--seed": "seed",
    "--stop": "stop",
    "--stop-token-ids": "stop_token_ids",
    "--ignore-eos": "ignore_eos",
    "--logprobs": "logprobs",
    "--min-loops": "min_loops",
    "--max-loops": "max_loops",
    "--prefill-loops": "prefill_loops",
    "--exit-policy": "exit_policy",
    "--exit-threshold": "exit_threshold",
    "--initial-state": "initial_state",
}
_LOCAL_ONLY = {**cli.MODEL_OPTIONS, **cli.ENGINE_OPTIONS}


class _AppendIds(argparse.Action):
    """Append token ids to the same list as --prompt, so that the order on the command line is the order of results."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        namespace.prompts = [*(namespace.prompts or []), values]


def build_parser() -> cli.Parser:
    defaults = SamplingParams()
    names = ("--ignore-eos", "--exit-policy", "--initial-state", "--logprobs")
    numeric = [option for option in PARAM_OPTIONS if option not in names]
    parser = cli.Parser(
        prog=PROGRAM,
        description="Complete prompts with a looped language model. Each output token has its own exit depth: the "
        "number of loops it ran.",
        epilog="Results go to stdout in the order of the prompts. jsonl prints one object per prompt: "
        "prompt_token_ids, token_ids, exit_depths (one-based; the first is the prefill depth), logprobs, text (null "
        "without a tokenizer), finish_reason, stop_match, seed, usage. Exit codes: 0, 1 when the engine or the "
        "server failed, 2 for a wrong option, model or request.",
        dash_values=("--prompt", "--prompt-ids", *numeric),
    )
    cli.add_version(parser)
    group = parser.add_argument_group("prompts (at least one; both may be repeated)")
    group.add_argument("--prompt", dest="prompts", action="append", metavar="TEXT", help="a prompt as text")
    group.add_argument(
        "--prompt-ids",
        dest="prompts",
        action=_AppendIds,
        type=cli.integer_list,
        metavar="1,2,3",
        help="a prompt as token ids; the only kind for a model without a tokenizer",
    )
    group = parser.add_argument_group("output")
    group.add_argument("--format", choices=("text", "jsonl"), default="text", help="(default: %(default)s)")
    group.add_argument("--verbose", action="store_true", help="log what the engine chooses and does to stderr")
    group.add_argument(
        "--server",
        metavar="ADDRESS",
        help="complete through the server at HOST:PORT instead of loading a model; engine options do not apply",
    )
    group = parser.add_argument_group("exit depth (defaults: the model's)")
    group.add_argument("--min-loops", type=cli.integer, metavar="N", help="fewest loops per token; one-based")
    group.add_argument(
        "--max-loops", type=cli.integer, metavar="N", help="most loops per token; at most the model's, or --depth-cap"
    )
    group.add_argument(
        "--prefill-loops", type=cli.integer, metavar="N", help="loops of the prompt, and so of the first output"
    )
    group.add_argument(
        "--exit-policy",
        metavar="NAME",
        help="what ends a token's loops: fixed (--max-loops), gate or gate_delayed (the exit probability), latent (the "
        "state hardly moves), kl (the distribution hardly moves), argmax (the best token stays the same) or trace; a "
        "model serves those whose score it gives",
    )
    group.add_argument(
        "--exit-threshold",
        type=cli.number,
        metavar="X",
        help="gate, gate_delayed: leave once the exit probability reaches X in [0, 1], 1 = full depth (default: the "
        "checkpoint's). latent, kl: leave once the change is below X >= 0, 0 = full depth (default: 0.03, 0.001). "
        "argmax: leave after X >= 1 loops with the same best token, a whole number (default: 5)",
    )
    group.add_argument(
        "--exit-trace",
        type=Path,
        metavar="FILE",
        help="JSON: one list of one-based depths per prompt, the first entry prefill_loops; implies --exit-policy "
        "trace, and --max-tokens unless that is given",
    )
    group.add_argument(
        "--initial-state",
        metavar="zeros|random",
        help="state before the first loop, where the model leaves it open; random is drawn from the seed",
    )
    group = parser.add_argument_group("sampling and stopping (defaults: the model's)")
    group.add_argument(
        "--max-tokens",
        type=cli.integer,
        metavar="N",
        help=f"tokens to generate at most (default: {defaults.max_tokens})",
    )
    group.add_argument("--temperature", type=cli.number, metavar="T", help="0 is greedy")
    group.add_argument("--top-k", type=cli.integer, metavar="K", help="keep the K best tokens; 0 is off")
    group.add_argument("--top-p", type=cli.number, metavar="P", help="keep the smallest set with this mass; in (0, 1]")
    group.add_argument(
        "--min-p", type=cli.number, metavar="P", help="drop tokens below P times the best probability; in [0, 1]"
    )
    group.add_argument(
        "--seed", type=cli.integer, metavar="N", help="64-bit, for all prompts (default: drawn and reported in jsonl)"
    )
    group.add_argument("--stop", action="append", metavar="TEXT", help="end the text before this; may be repeated")
    group.add_argument(
        "--stop-token-ids",
        type=cli.integer_list,
        metavar="1,2,3",
        help="ids that end generation, also with --ignore-eos",
    )
    group.add_argument("--ignore-eos", action="store_true", default=None, help="go on past the model's end ids")
    group.add_argument(
        "--logprobs",
        metavar="raw|processed",
        help=f"of the model's own distribution, or after temperature and filters (default: {defaults.logprobs})",
    )
    cli.add_model_options(parser)
    cli.add_engine_options(parser)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; the process's exit code."""
    options = build_parser().parse_args(arguments)
    cli.log_to_stderr(logging.INFO if options.verbose else logging.WARNING)
    try:
        prompts: list[Prompt] = options.prompts or []
        if not prompts:
            raise InvalidConfig("no prompt given; add --prompt TEXT or --prompt-ids 1,2,3")
        params = _params(options, len(prompts))
        run = _here if options.server is None else _through_server
        _write(run(options, prompts, params), options.format)
    except InvalidRequest as error:
        cli.fail(PROGRAM, f"{_option(error.field, options.prompts)}: {error.description}")
    except (InvalidConfig, NotImplementedError) as error:  # the last: a choice that does not fit
        cli.fail(PROGRAM, cli.with_options(str(error), {**_LOCAL_ONLY, "--server": "address"}))
    except CheckpointError as error:
        cli.fail(PROGRAM, error)
    except RltError as error:
        cli.fail(PROGRAM, error, cli.EXIT_FAILURE)
    except KeyboardInterrupt:
        return cli.EXIT_INTERRUPTED
    return 0


def _option(field: str, prompts: Sequence[Prompt] | None) -> str:
    """The option that sets a field of a request."""
    if field == "prompt":
        kinds = ["--prompt" if isinstance(prompt, str) else "--prompt-ids" for prompt in prompts or []]
        return " or ".join(dict.fromkeys(kinds))
    return f"--{field.replace('_', '-')}"


# -- input ------------------------------------------------------------------------------------------------------------


def _params(options: argparse.Namespace, prompts: int) -> list[SamplingParams]:
    """One SamplingParams per prompt.

    Raises:
        InvalidRequest, InvalidConfig: options that contradict each other, or a trace file that cannot be used.
    """
    given = {field: cli.given(options, option) for option, field in PARAM_OPTIONS.items()}
    given = {field: value for field, value in given.items() if value is not None}
    if "stop" in given:
        given["stop"] = tuple(given["stop"])
    if options.exit_trace is None:
        return [SamplingParams(**given)] * prompts
    traces = read_traces(options.exit_trace)
    if len(traces) != prompts:
        raise InvalidRequest("exit_trace", f"{options.exit_trace} has {len(traces)} lists for {prompts} prompts")
    return [SamplingParams(**{"max_tokens": len(trace)} | given, exit_trace=trace) for trace in traces]


def read_traces(path: Path) -> list[tuple[int, ...]]:
    """The lists of a trace file; their entries are checked with the request.

    Raises:
        InvalidRequest: field "exit_trace": the file cannot be read or is not a list of lists.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InvalidRequest("exit_trace", f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:  # the last: lists in lists in lists
        raise InvalidRequest("exit_trace", f"{path} is not JSON: {error}") from None
    if not isinstance(content, list) or not all(isinstance(trace, list) for trace in content):
        raise InvalidRequest("exit_trace", f"{path} must hold a list of lists of depths, one per prompt")
    for i, trace in enumerate(content):
        if not trace:
            raise InvalidRequest("exit_trace", f"{path}: list {i} is empty; it needs one depth per output")
    return [tuple(trace) for trace in content]


# -- running ----------------------------------------------------------------------------------------------------------


def _here(
    options: argparse.Namespace, prompts: Sequence[Prompt], params: Sequence[SamplingParams]
) -> Sequence[Completion]:
    """Load the model into this process."""
    config = cli.engine_config(options)  # checked before jax is imported, which takes seconds
    from rlt_jax.llm import LLM

    with LLM(options.model, config, revision=options.revision, progress=sys.stderr.isatty()) as llm:
        return llm.generate(prompts, params)


def _through_server(
    options: argparse.Namespace, prompts: Sequence[Prompt], params: Sequence[SamplingParams]
) -> Sequence[Completion]:
    """Send the prompts to a running server, together."""
    if not options.server:
        raise InvalidConfig("--server is empty; give HOST:PORT")
    for option in _LOCAL_ONLY:
        if cli.given(options, option) is not None:
            raise InvalidConfig(f"{option} is fixed when a server starts; it cannot be given with --server")
    return asyncio.run(_complete_all(options.server, prompts, params))


async def _complete_all(
    address: str, prompts: Sequence[Prompt], params: Sequence[SamplingParams]
) -> Sequence[Completion]:
    from rlt_jax.client import AsyncGenerationClient, ServerBusy

    free = asyncio.Semaphore(MAX_CONCURRENT_CALLS)
    deadline = time.monotonic() + BUSY_RETRY_SECONDS

    async def complete(client: AsyncGenerationClient, prompt: Prompt, each: SamplingParams) -> Completion:
        async with free:
            while True:
                try:
                    return await client.complete(prompt, each)
                except ServerBusy as error:
                    if time.monotonic() >= deadline:
                        raise
                    await asyncio.sleep(error.retry_after_seconds or 1.0)

    async with AsyncGenerationClient(address) as client:
        tasks = [asyncio.ensure_future(complete(client, *pair)) for pair in zip(prompts, params, strict=True)]
        try:
            return await asyncio.gather(*tasks)
        finally:
            for task in tasks:  # after an error the others' results are not wanted
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


# -- output -----------------------------------------------------------------------------------------------------------


def _write(completions: Sequence[Completion], form: str) -> None:
    """Print the results.  A reader that has seen enough (`| head`) ends the command without a word."""
    if isinstance(sys.stdout, io.TextIOWrapper):  # no locale makes a result unprintable; JSON is always UTF-8
        if form == "jsonl":
            sys.stdout.reconfigure(encoding="utf-8")
        else:
            sys.stdout.reconfigure(errors="backslashreplace")
    try:
        for completion in completions:
            print(as_json(completion) if form == "jsonl" else as_text(completion))
        if sys.stdout is not None:  # None: closed by whoever started us
            sys.stdout.flush()
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # else Python writes the rest again at exit
        if isinstance(error, BrokenPipeError):
            raise SystemExit(cli.EXIT_FAILURE) from None
        cli.fail(PROGRAM, f"the results cannot be written: {error.strerror}", cli.EXIT_FAILURE)


def as_json(completion: Completion) -> str:
    """One line of --format jsonl."""
    usage = completion.usage
    return json.dumps(
        {
            "prompt_token_ids": completion.prompt_token_ids,
            "token_ids": completion.token_ids,
            "exit_depths": completion.exit_depths,
            "logprobs": completion.logprobs,
            "text": completion.text,
            "finish_reason": completion.finish_reason.value,
            "stop_match": completion.stop_match,
            "seed": completion.params.seed,
            "usage": {
                "prompt_tokens": usage.prompt_tokens,
                "completion_tokens": usage.completion_tokens,
                "prompt_loops": usage.prompt_loops,
                "decode_loops": usage.decode_loops,
                "full_depth_loops": usage.full_depth_loops,
            },
        },
        ensure_ascii=False,
    )


def as_text(completion: Completion) -> str:
    """The text, or the token ids of a model without a tokenizer."""
    if completion.text is None:
        return ",".join(str(token) for token in completion.token_ids)
    return completion.text


if __name__ == "__main__":
    sys.exit(main())
