"""python -m rlt_jax.bench: measure the engine at real shapes.

    python -m rlt_jax.bench tick --model ouro-1.4b --slots 1,32,128 --context 512
    python -m rlt_jax.bench throughput --model ouro-1.4b --clients 1,32,128 --prompt 512 --outputs 64 --depth both
    python -m rlt_jax.bench first-token --model ouro-1.4b --prompt 1024

A table for people comes first; the last line of stdout is one JSON document.  An absolute time counts only on the GPU
it names; random weights and tokens; fixed or given depths, so that the work is the same for everybody.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rlt_jax import cli
from rlt_jax.errors import RltError

SCHEMA_VERSION = 1


def _numbers(text: str) -> list[int]:
    try:
        values = [int(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a comma-separated list of integers") from None
    if any(v < 1 for v in values):
        raise argparse.ArgumentTypeError(f"{text!r} holds a value below 1")
    return values


def build_parser() -> argparse.ArgumentParser:
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--model", default="tiny", help="ouro-1.4b, ouro-2.6b, tiny (random weights), or a checkpoint")
    common.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    common.add_argument("--kernels", default="auto", choices=("auto", "reference", "triton"))
    common.add_argument("--page-size", type=int, help="positions per KV page (default: by platform)")
    common.add_argument("--prefill-chunk", type=int, help="prompt positions per program (default: by platform)")
    common.add_argument("--round-ticks", type=int, help="ticks per round at most (default: by slots)")
    common.add_argument("--kv-layout", default="last_exited", choices=("last_exited", "shared"))
    common.add_argument("--out", type=Path, help="also write the JSON document to this file")
    parser = argparse.ArgumentParser(
        prog="python -m rlt_jax.bench", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    tick = commands.add_parser("tick", parents=[common], help="time of one tick beside its byte floor")
    tick.add_argument("--slots", type=_numbers, default=[1, 8], help="comma-separated slot counts")
    tick.add_argument("--context", type=_numbers, default=[64], help="comma-separated prompt lengths")
    through = commands.add_parser("throughput", parents=[common], help="output tokens per second")
    through.add_argument("--form", default="all", choices=("steady", "peer", "closed", "all"))
    through.add_argument("--clients", type=_numbers, default=[1, 8], help="comma-separated counts of streams")
    through.add_argument("--prompt", type=int, default=64, help="tokens in")
    through.add_argument("--outputs", type=_numbers, default=[32], help="tokens out, at most 128 with a trace")
    through.add_argument("--depth", default="both", choices=("fixed", "trace", "both"))
    first = commands.add_parser("first-token", parents=[common], help="latency of a lone prompt's first token")
    first.add_argument("--prompt", type=_numbers, default=[64], help="comma-separated prompt lengths")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one benchmark; returns the exit code (3: the machine is not fit to measure on)."""
    args = build_parser().parse_args(argv)
    try:
        return _measure(args, argv)
    except (RltError, NotImplementedError) as error:  # a setting, a checkpoint: the message says what to change
        cli.fail("python -m rlt_jax.bench", error)


def _measure(args: argparse.Namespace, argv: Sequence[str] | None) -> int:
    from rlt_jax.platform import enable_compilation_cache, reserve_memory

    reserve_memory(0.92)
    enable_compilation_cache()
    from rlt_jax.bench import measure, workload
    from rlt_jax.bench.environment import VALID_COPY_TB_S, copy_tb_s, environment, source_hash
    from rlt_jax.config import KVLayoutKind

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

    print(f"{args.model} {args.dtype} on {env['device_kind']}, copy {bandwidth:.2f} TB/s")
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
    print(json.dumps(document))
    return 0 if document["valid"] else 3


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    sys.exit(main())
