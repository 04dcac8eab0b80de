"""Train the bundled looped language model: stage I, stage II, and on request the one-loop baseline and the evaluation.

python -m rlt_jax.train --out DIR                          both stages, the model in DIR/model
python -m rlt_jax.train --out DIR --baseline --evaluate    also DIR/baseline, DIR/evaluation.json and the model card
python -m rlt_jax.train --size tiny --steps 20 --out DIR   a minute on a laptop, to see that it works
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

from rlt_jax.models.checkpoint import save_checkpoint
from rlt_jax.models.ouro import Ouro, OuroParams
from rlt_jax.models.registry import model_from_config
from rlt_jax.train.data import MIN_SEQ_LEN, DataSpec
from rlt_jax.train.evaluate import (
    WANTED_SAVING,
    Evaluator,
    choose_threshold,
    evaluate,
    held_out_set,
    model_card,
)
from rlt_jax.train.model import LOOPS, MAX_POSITIONS, SIZES, cast, count_parameters, model_config
from rlt_jax.train.tasks import GENERATORS, VALIDATION_CLASS
from rlt_jax.train.tokenizer import build_tokenizer

DEFAULT_STEPS = 6000


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m rlt_jax.train", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="directory to write")
    parser.add_argument("--size", choices=sorted(SIZES), default="bundled", help="model size (default bundled)")
    length = parser.add_mutually_exclusive_group()
    length.add_argument("--steps", type=int, help=f"optimizer steps of stage I (default {DEFAULT_STEPS})")
    length.add_argument(
        "--seconds",
        type=float,
        help="time for stage I without compilation: the steps that fit are fixed at the end of the warm-up and logged",
    )
    parser.add_argument("--loops", type=int, default=LOOPS, help=f"loops of the model (default {LOOPS})")
    parser.add_argument("--baseline", action="store_true", help="also train a one-loop model for as many steps")
    parser.add_argument("--evaluate", action="store_true", help="also evaluate and write the model card")
    parser.add_argument("--samples", type=int, default=4800, help="held-out test samples (default 4800)")
    parser.add_argument("--validation-samples", type=int, default=2400, help="to choose the threshold (default 2400)")
    parser.add_argument("--rows", type=int, default=128, help="rows per step (default 128)")
    parser.add_argument("--seq-len", type=int, default=256, help="tokens per row (default 256)")
    parser.add_argument("--chunk-steps", type=int, default=16, help="steps per dispatch (default 16)")
    parser.add_argument("--gate-steps", type=int, default=320, help="steps of stage II (default 320)")
    parser.add_argument("--learning-rate", type=float, help="peak of stage I (default: the trainer's)")
    parser.add_argument("--warmup", type=int, help="steps of warm-up (default: the trainer's)")
    parser.add_argument("--tasks", default=",".join(GENERATORS), help="comma-separated tasks (default: all)")
    parser.add_argument("--dtype", choices=("auto", "bfloat16", "float32"), default="auto", help="of the computation")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=min(8, os.cpu_count() or 1), help="data threads")
    return parser


def _check(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    for name in ("steps", "loops", "samples", "validation_samples", "rows", "chunk_steps", "gate_steps", "warmup"):
        value = getattr(args, name)
        if value is not None and value < 1:
            parser.error(f"--{name.replace('_', '-')} must be >= 1, found {value}")
    if args.seconds is not None and not args.seconds > 0:
        parser.error(f"--seconds must be > 0, found {args.seconds}")
    if not MIN_SEQ_LEN <= args.seq_len <= MAX_POSITIONS:
        parser.error(f"--seq-len must be in [{MIN_SEQ_LEN}, {MAX_POSITIONS}], found {args.seq_len}")
    unknown = sorted(set(args.tasks.split(",")) - set(GENERATORS))
    if unknown:
        parser.error(f"--tasks: unknown {', '.join(unknown)}; known: {', '.join(GENERATORS)}")
    if args.seed < 0:
        parser.error(f"--seed must be >= 0, found {args.seed}")


def export(path: Path, args: argparse.Namespace, params: OuroParams, loops: int, threshold: float) -> None:
    """Write a model directory in BF16."""
    config = model_config(SIZES[args.size], build_tokenizer().get_vocab_size(), loops, exit_threshold=threshold)
    model = model_from_config(config)
    save_checkpoint(
        path,
        model,
        cast(params, "bfloat16"),
        tokenizer_json=build_tokenizer().to_str(pretty=True),
        config=config,
        generation_config={"do_sample": False, "eos_token_id": 0, "pad_token_id": 0},
    )


def main(argv: Sequence[str] | None = None) -> int:
    parser = _parser()
    args = parser.parse_args(argv)
    _check(parser, args)
    try:  # only now: optax belongs to an extra, and wrong options are told without it
        from rlt_jax.train.trainer import TrainConfig, train_stage1, train_stage2, with_gate
    except ModuleNotFoundError as error:
        if error.name != "optax":
            raise
        parser.exit(2, f"{parser.prog}: error: optax is not installed: pip install 'rlt_jax[train]'\n")
    begin = time.perf_counter()

    def log(message: str) -> None:
        print(f"[{time.perf_counter() - begin:6.1f}] {message}", flush=True)

    dtype = args.dtype if args.dtype != "auto" else "float32" if jax.default_backend() == "cpu" else "bfloat16"
    device = jax.devices()[0].device_kind
    log(f"jax {jax.__version__} on {device}, {dtype}")
    args.out.mkdir(parents=True, exist_ok=True)
    given = {name: getattr(args, name) for name in ("learning_rate", "warmup") if getattr(args, name) is not None}
    settings = TrainConfig(seed=args.seed, compute_dtype=dtype, gate_steps=args.gate_steps, **given)
    data = DataSpec(
        seq_len=args.seq_len,
        rows=args.rows,
        steps=args.chunk_steps,
        loops=args.loops,
        tasks=tuple(args.tasks.split(",")),
    )
    steps = args.steps if args.steps or args.seconds else DEFAULT_STEPS
    vocabulary = build_tokenizer().get_vocab_size()
    model = model_from_config(model_config(SIZES[args.size], vocabulary, args.loops))
    assert isinstance(model, Ouro)

    start = time.perf_counter()
    master, steps = train_stage1(
        model, settings, data, steps=steps, seconds=args.seconds, threads=args.threads, log=log
    )
    record: dict[str, Any] = {
        "command": _command(args, steps),
        "steps": steps,
        "tokens_per_step": args.rows * args.seq_len,
        "device": device,
        "dtype": dtype,
        "jax": jax.__version__,
        "parameters": count_parameters(master),
        "stage1_seconds": time.perf_counter() - start,
        "stage2_seconds": 0.0,
        "gate": "stage I",
    }
    params, threshold = cast(master, "bfloat16"), 1.0
    # the weights are safe on disk before anything else is tried
    export(args.out / "model", args, params, args.loops, threshold)

    if args.loops > 1:
        start = time.perf_counter()
        gates = train_stage2(model, settings, data, cast(params, dtype), threads=args.threads, log=log)
        record["stage2_seconds"] = time.perf_counter() - start
        log("choosing the gate and its threshold on the validation set")
        validation = held_out_set(args.validation_samples, VALIDATION_CLASS, data.tasks)
        evaluator = Evaluator(model, params, validation, rows=min(1200, len(validation.length)))
        full = evaluator.run()
        found = {}
        for rule, gate in gates.items():
            log(f"gate trained on the {rule} target:")
            found[rule] = choose_threshold(evaluator, with_gate(params, gate), full, log)
        rule = "improvement"
        if found[rule][1] < WANTED_SAVING and found["look_ahead"][1] > found[rule][1]:
            rule = "look_ahead"
        threshold = found[rule][0]
        params = with_gate(params, gates[rule])
        record["gate"] = rule
        record["gate_validation"] = {
            name: {"threshold": f[0], "saved": f[1], "lost": f[2], "tried": f[3]} for name, f in found.items()
        }
        summary = "; ".join(f"{n}: {f[1]:.1%} saved at {f[0]:g} for {100 * f[2]:.2f} points" for n, f in found.items())
        record["gate_reason"] = (
            "Both gate targets were trained on the same frozen model: `improvement` is Ouro's (did the last loop "
            "help?), `look_ahead` asks whether a deeper loop would still help. Ouro's is shipped where it saves "
            f"{WANTED_SAVING:.0%} of loops, else the better one. Validation: {summary}."
        )
        log(record["gate_reason"])
        export(args.out / "model", args, params, args.loops, threshold)
    (args.out / "training.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    log(f"model written to {args.out / 'model'}")

    if args.baseline:
        base_config = model_config(SIZES[args.size], vocabulary, 1)
        base_model = model_from_config(base_config)
        assert isinstance(base_model, Ouro)
        base_data = DataSpec(seq_len=data.seq_len, rows=data.rows, steps=data.steps, loops=1, tasks=data.tasks)
        start = time.perf_counter()
        base, _ = train_stage1(base_model, settings, base_data, steps=steps, threads=args.threads, log=log)
        record["baseline_seconds"] = time.perf_counter() - start
        export(args.out / "baseline", args, base, 1, 1.0)
        (args.out / "training.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        log(f"baseline written to {args.out / 'baseline'}")

    if args.evaluate:
        result = evaluate(
            args.out / "model",
            args.out / "baseline" if args.baseline else None,
            samples=args.samples,
            validation_samples=args.validation_samples,
            rows=min(1200, args.samples),
            log=log,
        )
        (args.out / "evaluation.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        (args.out / "model" / "README.md").write_text(model_card(result, record), encoding="utf-8")
        log(f"evaluation.json and model/README.md written to {args.out}")
    log("done")
    return 0


def _command(args: argparse.Namespace, steps: int) -> str:
    """The command that repeats this run: the same, with the steps in place of a time budget."""
    words = ["python -m rlt_jax.train", f"--steps {steps}", f"--seed {args.seed}"]
    defaults = vars(_parser().parse_args(["--out", "x"]))
    for name in ("size", "loops", "rows", "seq_len", "chunk_steps", "gate_steps", "learning_rate", "warmup", "tasks"):
        if getattr(args, name) != defaults[name]:
            words.append(f"--{name.replace('_', '-')} {getattr(args, name)}")
    return " ".join([*words, "--out DIR"])


if __name__ == "__main__":
    sys.exit(main())
