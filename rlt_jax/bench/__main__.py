"""python -m rlt_jax.bench: measure the engine at real shapes.

    python -m rlt_jax.bench tick --model ouro-1.4b --slots 1,32,128 --context 512
    python -m rlt_jax.bench throughput --model ouro-1.4b --clients 1,32,128 --prompt 512 --outputs 64 --depth both
    python -m rlt_jax.bench first-token --model ouro-1.4b --prompt 1024

One line for people per measurement; the last line of stdout is one JSON document.  An absolute time counts only on the
GPU it names; random weights and tokens; fixed or given depths, so that the work is the same for everybody.

Models: ouro-1.4b, ouro-2.6b and tiny have real shapes and random weights; anything else is a checkpoint to load.
`python -m rlt_jax.bench tick --help` and the like show each measurement's options.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rlt_jax import cli
from rlt_jax.config import DTYPES, KERNEL_CHOICES, KVLayoutKind
from rlt_jax.errors import RltError

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


def build_parser() -> argparse.ArgumentParser:
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--model", default="tiny", help="ouro-1.4b, ouro-2.6b, tiny (random weights), or a checkpoint")
    common.add_argument("--dtype", default="bfloat16", choices=DTYPES, help="of weights, activations and KV")
    common.add_argument("--kernels", default="auto", choices=KERNEL_CHOICES, help="implementation of the ops on the KV")
    common.add_argument("--page-size", type=int, help="positions per KV page (default: by platform)")
    common.add_argument("--prefill-chunk", type=int, help="prompt positions per program (default: by platform)")
    common.add_argument("--round-ticks", type=int, help="ticks per round at most (default: by slots)")
    common.add_argument("--kv-layout", default="last_exited", choices=LAYOUTS, help="KV layout of the engine")
    common.add_argument("--out", type=Path, help="also write the JSON document to this file")
    parser = argparse.ArgumentParser(prog="python -m rlt_jax.bench", description=__doc__, formatter_class=_Help)
    commands = parser.add_subparsers(dest="command", required=True)

    def add(name: str, text: str) -> argparse.ArgumentParser:
        return commands.add_parser(name, parents=[common], help=text, description=text, formatter_class=_Help)

    tick = add("tick", "time of one tick beside its byte floor")
    tick.add_argument("--slots", type=_numbers, default=[1, 8], help="comma-separated slot counts")
    tick.add_argument("--context", type=_numbers, default=[64], help="comma-separated prompt lengths")
    through = add("throughput", "output tokens per second")
    forms = (
        "steady: C requests, from the last first token to the first finish; peer: C requests, decode only, drained; "
        "closed: 2C requests by C clients, prefill and drain included"
    )
    through.add_argument("--form", default="all", choices=("steady", "peer", "closed", "all"), help=forms)
    through.add_argument("--clients", type=_numbers, default=[1, 8], help="comma-separated counts of streams")
    through.add_argument("--prompt", type=int, default=64, help="tokens in")
    through.add_argument("--outputs", type=_numbers, default=[32], help="tokens out, at most 128 with a trace")
    depths = "fixed: every token at full depth; trace: the committed depths, mean 2.5"
    through.add_argument("--depth", default="both", choices=("fixed", "trace", "both"), help=depths)
    first = add("first-token", "latency of a lone prompt's first token")
    first.add_argument("--prompt", type=_numbers, default=[64], help="comma-separated prompt lengths")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one benchmark; returns the exit code (3: the machine is not fit to measure on)."""
    args = build_parser().parse_args(argv)
    try:
        return _measure(args, argv)
    except (RltError, NotImplementedError) as error:  # a setting, a checkpoint: the message says what to change
        cli.fail("python -m rlt_jax.bench", error)
    except BrokenPipeError:  # the reader has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _measure(args: argparse.Namespace, argv: Sequence[str] | None) -> int:
    from rlt_jax.platform import enable_compilation_cache, reserve_memory

    reserve_memory(0.92)
    enable_compilation_cache()
    from rlt_jax.bench import measure, workload
    from rlt_jax.bench.environment import VALID_COPY_TB_S, copy_tb_s, environment, source_hash

    env, bandwidth = environment(), copy_tb_s()
    loaded = workload.load(args.model, args.dtype)
    settings: dict[str, Any] = {
        "kernels": args.kernels,
        "page_size": args.page_size,
        "prefill_chunk": args.prefill_chunk,
        "round_ticks": args.round_ticks,
        "kv_layout": KVLayoutKind(args.kv_layout),
    }
    rows: list[dict[str, Any]] = []

    def add(row: dict[str, Any]) -> None:
        rows.append(row)
        print("  ".join(f"{k}={_short(v)}" for k, v in row.items() if not isinstance(v, list)), flush=True)

    print(f"{args.model} {args.dtype} on {env['device_kind']}, copy {bandwidth * 1e3:.0f} GB/s")
    if args.command == "tick":
        for slots in args.slots:
            for context in args.context:
                add(measure.tick(loaded, slots, context, bandwidth, **settings))
    elif args.command == "first-token":
        for prompt in args.prompt:
            add(measure.first_token(loaded, prompt, **settings))
    else:
        trace = workload.read_trace()
        choices: dict[str, list[Any]] = {"fixed": [None], "trace": [trace], "both": [None, trace]}
        depths = choices[args.depth]
        forms = ("steady", "peer", "closed") if args.form == "all" else (args.form,)
        for clients in args.clients:
            engine = measure.make_engine(loaded, slots=clients, positions=args.prompt + max(args.outputs), **settings)
            measure.warm(engine, args.prompt, max(args.outputs))
            for outputs in args.outputs:
                for form in forms:
                    for depth in depths:
                        add(measure.throughput(engine, form, clients, args.prompt, outputs, depth))
            engine.close()
    valid = env["platform"] != "gpu" or "H200" not in env["device_kind"] or bandwidth >= VALID_COPY_TB_S
    document = {
        "schema_version": SCHEMA_VERSION,
        "command": " ".join(["python -m rlt_jax.bench", *(argv if argv is not None else sys.argv[1:])]),
        "environment": env,
        "model": loaded.name,
        "copy_tb_s": bandwidth,
        "source_hash": source_hash(),
        "valid": valid and all(row["compiles_in_window"] == 0 for row in rows),
        "rows": rows,
    }
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(document, indent=1) + "\n")
    if not valid:
        print(f"INVALID: this H200 copies at {bandwidth:.2f} TB/s, below {VALID_COPY_TB_S}", file=sys.stderr)
    print(json.dumps(document), flush=True)
    return 0 if document["valid"] else 3


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    sys.exit(main())
