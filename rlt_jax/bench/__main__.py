"""python -m rlt_jax.bench: measure the engine at real shapes.

    python -m rlt_jax.bench tick --model ouro-1.4b --slots 1,32,128 --context 512
    python -m rlt_jax.bench throughput --model ouro-1.4b --clients 1,32,128 --prompt 512 --outputs 64 --depth both
    python -m rlt_jax.bench first-token --model ouro-1.4b --prompt 1024
    python -m rlt_jax.bench load --model ouro-1.4b --dtype bfloat16 --folder /tmp/ouro-1.4b

One line for people per measurement; the last line of stdout is one JSON document.  An absolute time counts only on the
GPU it names; random weights and tokens; fixed or given depths, so that the work is the same for everybody.

A row that is no measurement (an empty window, a compile in it, other work than asked for) carries the reason in
"invalid" and no rate; such a document, or an H200 that copies too slowly, has "valid": false and exit code 3.

Models: ouro-1.4b, ouro-2.6b, nanbeige4.2-3b and huginn-0125 have the released shapes and random weights, tiny is a
small model to try commands with.  Anything else is a checkpoint to load.
`python -m rlt_jax.bench tick --help` and the like show each measurement's options.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlt_jax import cli
from rlt_jax.config import DTYPES, KERNEL_CHOICES, EngineConfig, KVLayoutKind
from rlt_jax.errors import InvalidConfig, RltError

if TYPE_CHECKING:  # what measures is imported after the device's memory is reserved
    from rlt_jax.models.checkpoint import LoadedCheckpoint
    from rlt_jax.runtime.engine import LLMEngine

PROGRAM = "python -m rlt_jax.bench"
SCHEMA_VERSION = 1
LAYOUTS = tuple(kind.value for kind in KVLayoutKind)


def _numbers(text: str) -> list[int]:
    try:
        values = [int(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a comma-separated list of integers") from None
    if any(v < 1 for v in values):
        raise argparse.ArgumentTypeError(f"{text!r} holds a value below 1")
    return values


class _Help(argparse.RawDescriptionHelpFormatter, argparse.ArgumentDefaultsHelpFormatter):
    """The description as written; the default of every option that has one."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        return super()._get_help_string(action) if action.default is not None else action.help


def _number(text: str) -> int:
    values = _numbers(text)
    if len(values) != 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not one integer")
    return values[0]


def build_parser() -> argparse.ArgumentParser:
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--model", default="tiny", help="a name from the list above, or a checkpoint")
    common.add_argument("--dtype", default="bfloat16", choices=DTYPES, help="of weights, activations and KV")
    common.add_argument("--out", type=Path, help="also write the JSON document to this file")
    served = argparse.ArgumentParser(add_help=False)
    served.add_argument("--kernels", default="auto", choices=KERNEL_CHOICES, help="implementation of the ops on the KV")
    served.add_argument("--page-size", type=int, help="positions per KV page (default: by platform)")
    served.add_argument("--prefill-chunk", type=int, help="prompt positions per program (default: by platform)")
    served.add_argument("--round-ticks", type=int, help="ticks per round at most (default: by slots)")
    served.add_argument("--depth-cap", type=int, help="loops of an open-ended model (default: the checkpoint's)")
    served.add_argument("--boundary-batch", type=int, help="rows that wait for prelude and coda (default: by slots)")
    served.add_argument("--kv-planes", type=int, help="planes of the ring layout")
    served.add_argument("--kv-layout", default="last_exited", choices=LAYOUTS, help="KV layout of the engine")
    parser = argparse.ArgumentParser(prog=PROGRAM, description=__doc__, formatter_class=_Help)
    commands = parser.add_subparsers(dest="command", required=True)

    def add(name: str, text: str, *parents: argparse.ArgumentParser) -> argparse.ArgumentParser:
        return commands.add_parser(
            name,
            parents=[common, *parents],
            help=text.split(".")[0],
            description=textwrap.fill(text, 100),
            formatter_class=_Help,
            allow_abbrev=False,
        )

    tick = add("tick", "time of one tick beside its byte floor", served)
    tick.add_argument("--slots", type=_numbers, default=[1, 8], help="comma-separated slot counts")
    tick.add_argument("--context", type=_numbers, default=[64], help="comma-separated prompt lengths")
    through = add("throughput", "output tokens per second", served)
    forms = (
        "steady: C requests, from the last first token to the first finish; peer: C requests, decode only, drained; "
        "closed: 2C requests by C clients, prefill and drain included"
    )
    through.add_argument("--form", default="all", choices=("steady", "peer", "closed", "all"), help=forms)
    through.add_argument("--clients", type=_numbers, default=[1, 8], help="comma-separated counts of streams")
    through.add_argument("--prompt", type=_number, default=64, help="tokens in")
    through.add_argument("--outputs", type=_numbers, default=[64], help="tokens out, at most 128 with a trace")
    through.add_argument("--tick", action="store_true", help="also measure the tick on each engine, as `tick` does")
    depths = "fixed: every token at full depth; trace: the committed depths, mean 2.5"
    through.add_argument("--depth", default="both", choices=("fixed", "trace", "both"), help=depths)
    first = add("first-token", "latency of a lone prompt's first token", served)
    first.add_argument("--prompt", type=_numbers, default=[64], help="comma-separated prompt lengths")
    load = add(
        "load",
        "Load a full-size checkpoint in a fresh process: seconds, and the anonymous host memory it takes beside the "
        "checkpoint's size (ratio). On a CPU the parameters themselves are anonymous host memory: they are subtracted, "
        "and what is left is a lower bound of what loading needs in between; on a GPU the ratio means what it says.",
    )
    load.add_argument(
        "--folder", type=Path, help="where the files of a random-weights model are, or are written if it is empty"
    )
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one benchmark; returns the exit code (3: the machine or a row is no measurement)."""
    words = list(sys.argv[1:] if argv is None else argv)
    args = build_parser().parse_args(words)
    try:
        cli.check_output_file("--out", args.out)
        document = (_load if args.command == "load" else _measure)(args)
        return _report(args, words, document)
    except (RltError, NotImplementedError) as error:  # a setting, a checkpoint: the message says what to change
        cli.fail(PROGRAM, error)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


class _Rows(list[dict[str, Any]]):
    """Rows of the document; each is shown as it comes."""

    def add(self, row: dict[str, Any], engine: LLMEngine | None = None) -> None:
        """Show a row and keep it, with the settings that its engine really ran with."""
        plain = {k: v for k, v in row.items() if not isinstance(v, list)}
        print("  ".join(f"{k}={_short(v)}" for k, v in plain.items()), flush=True)
        self.append(row if engine is None else row | {"settings": _settings(engine)})


def _settings(engine: LLMEngine) -> dict[str, Any]:
    info = engine.server_info()
    names = ("page_size", "prefill_chunk", "round_ticks", "boundary_batch")
    kernels = {choice["op"]: choice["chosen"] for choice in info["implementations"]}
    return {"dtype": engine.config.dtype, **{name: info[name] for name in names}, "kernels": kernels}


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Task:
    """What every measurement on an engine needs."""

    args: argparse.Namespace
    loaded: LoadedCheckpoint
    settings: dict[str, Any]  # of each engine
    loops: int  # of a token at full depth
    bandwidth: float  # TB/s
    rows: _Rows


def _measure(args: argparse.Namespace) -> dict[str, Any]:
    from rlt_jax.platform import enable_compilation_cache, set_memory_share

    set_memory_share(EngineConfig().memory_fraction)
    enable_compilation_cache()
    from rlt_jax.bench import workload
    from rlt_jax.bench.environment import copy_tb_s, environment

    longest = len(workload.read_trace()[0])
    if args.command == "throughput" and args.depth != "fixed" and max(args.outputs) > longest:
        raise InvalidConfig(f"--outputs: the trace has {longest} depths a request, found {max(args.outputs)}")
    env, bandwidth = environment(), copy_tb_s()
    loaded = workload.load(args.model, args.dtype)
    print(f"{args.model} {args.dtype} on {env['device_kind']}, copy {bandwidth * 1e3:.0f} GB/s", flush=True)
    rows = _Rows()
    settings: dict[str, Any] = {
        "kernels": args.kernels,
        "page_size": args.page_size,
        "prefill_chunk": args.prefill_chunk,
        "round_ticks": args.round_ticks,
        "boundary_batch": args.boundary_batch,
        "kv_layout": KVLayoutKind(args.kv_layout),
        "kv_planes": args.kv_planes,
        "max_loops": args.depth_cap,
    }
    loops = args.depth_cap or loaded.model.spec.max_loops
    task = _Task(args=args, loaded=loaded, settings=settings, loops=loops, bandwidth=bandwidth, rows=rows)
    {"tick": _ticks, "first-token": _first_tokens, "throughput": _throughputs}[args.command](task)
    return {"environment": env, "model": loaded.name, "copy_tb_s": bandwidth, "rows": rows}


def _ticks(task: _Task) -> None:
    from rlt_jax.bench import measure

    for slots in task.args.slots:
        for context in task.args.context:
            outputs = measure.tick_outputs(task.loops, slots)
            with measure.engine(task.loaded, slots=slots, prompt=context, outputs=outputs, **task.settings) as engine:
                task.rows.add(measure.tick(engine, context, task.bandwidth), engine)


def _first_tokens(task: _Task) -> None:
    from rlt_jax.bench import measure

    for prompt in task.args.prompt:
        with measure.engine(task.loaded, slots=1, prompt=prompt, outputs=16, **task.settings) as engine:
            task.rows.add(measure.first_token(engine, prompt), engine)


def _throughputs(task: _Task) -> None:
    from rlt_jax.bench import measure, throughput, workload

    args, loops, trace = task.args, task.loops, workload.read_trace()
    if args.depth != "fixed" and loops != trace[0][0]:
        raise InvalidConfig(
            f"--depth {args.depth}: the trace is for models of {trace[0][0]} loops, this one runs {loops}: use fixed"
        )
    choices: dict[str, list[throughput.Trace]] = {"fixed": [None], "trace": [trace], "both": [None, trace]}
    forms = throughput.FORMS if args.form == "all" else (args.form,)
    for clients in args.clients:
        longest = max([*args.outputs, measure.tick_outputs(loops, clients) if args.tick else 1])
        with measure.engine(task.loaded, slots=clients, prompt=args.prompt, outputs=longest, **task.settings) as engine:
            if args.tick:
                task.rows.add(measure.tick(engine, args.prompt, task.bandwidth), engine)
            prefill_ms = throughput.prefill_ms(engine, clients, args.prompt)
            for outputs in args.outputs:
                for row in throughput.rows(
                    engine,
                    clients=clients,
                    prompt=args.prompt,
                    outputs=outputs,
                    forms=forms,
                    depths=choices[args.depth],
                    prefill_ms=prefill_ms,
                ):
                    task.rows.add(row, engine)


def _load(args: argparse.Namespace) -> dict[str, Any]:
    from rlt_jax.bench.loading import load

    rows = _Rows()
    row, facts = load(args.model, args.dtype, args.folder)
    rows.add(row)
    name = f"{args.model} (random weights)" if args.folder is not None else facts["name"]
    return {"environment": facts["environment"], "model": name, "copy_tb_s": facts["copy_tb_s"], "rows": rows}


def _report(args: argparse.Namespace, words: list[str], found: dict[str, Any]) -> int:
    """Complete the document, write and print it; the exit code."""
    from rlt_jax.bench.environment import VALID_COPY_TB_S, source_hash

    reasons = []
    if "H200" in found["environment"]["device_kind"] and found["copy_tb_s"] < VALID_COPY_TB_S:
        reasons.append(f"this H200 copies at {found['copy_tb_s']:.2f} TB/s, below {VALID_COPY_TB_S}")
    for row in found["rows"]:
        if "invalid" in row:
            names = ("form", "depth", "clients", "outputs", "slots", "context", "prompt")
            what = ", ".join(f"{name} {row[name]}" for name in names if name in row)
            reasons.append(f"{row['op']} ({what}): {row['invalid']}")
    rows = found.pop("rows")
    document = {
        "schema_version": SCHEMA_VERSION,
        "command": " ".join([PROGRAM, *_without_out(words)]),
        **found,
        "source_hash": source_hash(),
        "valid": not reasons,
        "rows": rows,
    }
    for reason in reasons:
        print(f"INVALID: {reason}", file=sys.stderr)
    print(json.dumps(document), flush=True)  # before the file: a measurement must not be lost to a bad path
    if args.out:
        try:
            args.out.parent.mkdir(parents=True, exist_ok=True)
            args.out.write_text(json.dumps(document, indent=1) + "\n")
        except OSError as error:
            raise InvalidConfig(f"--out: {args.out} cannot be written: {error}") from error
    return 3 if reasons else 0


def _without_out(words: Sequence[str]) -> list[str]:
    """The command as given, less --out and its value: where a document lies is not part of what was measured."""
    kept, rest = [], iter(words)
    for word in rest:
        if word == "--out":
            next(rest, None)
        elif not word.startswith("--out="):
            kept.append(word)
    return kept


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    sys.exit(main())
