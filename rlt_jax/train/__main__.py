"""Train the bundled looped language model: stage I, stage II, and on request the one-loop baseline and the evaluation.

python -m rlt_jax.train --out DIR                          both stages, the model in DIR/model
python -m rlt_jax.train --out DIR --baseline --evaluate    also DIR/baseline, DIR/evaluation.json and the model card
python -m rlt_jax.train --size tiny --steps 20 --out DIR   a minute on a laptop, to see that it works
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import json
import math
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from rlt_jax import cli
from rlt_jax.config import MAX_LOOPS
from rlt_jax.errors import InvalidConfig, RltError
from rlt_jax.models.checkpoint import save_checkpoint
from rlt_jax.models.ouro import Ouro, OuroParams
from rlt_jax.models.registry import model_from_config
from rlt_jax.train.data import MIN_SEQ_LEN, Curriculum, DataSpec, EnglishPieces
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

if TYPE_CHECKING:  # the trainer needs optax, an extra: it is imported when a run starts
    from rlt_jax.train.trainer import Gate

DEFAULT_STEPS = 10_000  # those of the model in the package
MAX_SEED = 1 << 32


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m rlt_jax.train", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="directory to write")
    parser.add_argument("--size", choices=sorted(SIZES), default="bundled", help="model size (default bundled)")
    parser.add_argument(
        "--steps", type=int, default=DEFAULT_STEPS, help=f"optimizer steps of stage I (default {DEFAULT_STEPS})"
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
    parser.add_argument(
        "--curriculum",
        type=Path,
        metavar="TRAINING_JSON",
        help="training.json of a run of as many steps a chunk whose curriculum to repeat (default: by learning)",
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=min(8, os.cpu_count() or 1), help="data threads")
    return parser


def _check(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    at_least_one = ("steps", "loops", "samples", "validation_samples", "rows", "chunk_steps", "gate_steps", "warmup")
    for name in (*at_least_one, "threads"):
        value = getattr(args, name)
        if value is not None and value < 1:
            parser.error(f"--{name.replace('_', '-')} must be >= 1, found {value}")
    if args.loops > MAX_LOOPS:
        parser.error(f"--loops must be <= {MAX_LOOPS}, found {args.loops}")
    if args.learning_rate is not None and not 0 < args.learning_rate < math.inf:
        parser.error(f"--learning-rate must be finite and > 0, found {args.learning_rate}")
    if not MIN_SEQ_LEN <= args.seq_len <= MAX_POSITIONS:
        parser.error(f"--seq-len must be in [{MIN_SEQ_LEN}, {MAX_POSITIONS}], found {args.seq_len}")
    unknown = sorted(set(args.tasks.split(",")) - set(GENERATORS))
    if unknown:
        parser.error(f"--tasks: unknown {', '.join(unknown)}; known: {', '.join(GENERATORS)}")
    if not 0 <= args.seed < MAX_SEED:
        parser.error(f"--seed must be in [0, {MAX_SEED}), found {args.seed}")
    try:
        Curriculum(DataSpec(), _recorded_changes(args.curriculum))
    except (OSError, ValueError) as error:
        parser.error(f"--curriculum {args.curriculum}: {error}")
    try:  # all that will be written can be, before minutes are spent
        for folder in (args.out, args.out / "model", *([args.out / "baseline"] if args.baseline else [])):
            folder.mkdir(parents=True, exist_ok=True)
        for name in ("train.log", "training.json", "evaluation.json", "model/README.md"):
            cli.check_output_file("--out", args.out / name)
    except OSError as error:
        parser.error(f"--out: {error.filename} cannot be made: {error.strerror}")
    except InvalidConfig as error:
        parser.error(str(error))


def _recorded_changes(file: Path | None) -> list[tuple[int, int]] | None:
    """The curriculum's changes of an earlier run; None without a file.

    Raises:
        OSError: the file cannot be read.
        ValueError: it holds none.
    """
    if file is None:
        return None
    try:
        changes = [(first, hops) for first, hops in json.loads(file.read_bytes())["curriculum"]]
    except (KeyError, TypeError) as error:
        raise ValueError(f"no list of (first chunk, most hops) under 'curriculum' ({error!r})") from None
    if not all(type(value) is int for change in changes for value in change):
        raise ValueError(f"'curriculum' must hold integers, found {changes}")
    return changes


class Diverged(RltError):
    """Training gave no usable model."""


class Run:
    """One run of the command: its settings, its log, and the record that becomes training.json."""

    def __init__(self, args: argparse.Namespace) -> None:
        from rlt_jax.train.trainer import TrainConfig

        self.args, self.out = args, args.out
        self.begin = time.perf_counter()
        self.out.mkdir(parents=True, exist_ok=True)
        (self.out / "train.log").write_text("", encoding="utf-8")
        self.dtype = args.dtype
        if self.dtype == "auto":
            self.dtype = "float32" if jax.default_backend() == "cpu" else "bfloat16"
        given = {name: getattr(args, name) for name in ("learning_rate", "warmup") if getattr(args, name) is not None}
        self.settings = TrainConfig(seed=args.seed, compute_dtype=self.dtype, gate_steps=args.gate_steps, **given)
        self.data = DataSpec(
            seq_len=args.seq_len,
            rows=args.rows,
            chunk_steps=args.chunk_steps,
            steps=args.steps,
            loops=args.loops,
            tasks=tuple(args.tasks.split(",")),
        )
        english = EnglishPieces(args.seq_len)
        tokens, epochs = int(english.length.sum()), english.epochs(self.data)
        self.record: dict[str, Any] = {
            "command": _command(args),
            "steps": self.data.chunks * self.data.chunk_steps,
            "tokens_per_step": args.rows * args.seq_len,
            "english": {"tokens": tokens, "epochs": epochs, "share": epochs * tokens / self.data.tokens},
            "device": jax.devices()[0].device_kind,
            "dtype": self.dtype,
            "jax": jax.__version__,
            "stage2_seconds": 0.0,
            "gate": "stage I",
            "settings": dataclasses.asdict(self.settings),
        }
        self.log(f"jax {jax.__version__} on {self.record['device']}, {self.dtype}")

    def log(self, message: str) -> None:
        line = f"[{time.perf_counter() - self.begin:6.1f}] {message}"
        print(line, flush=True)
        with (self.out / "train.log").open("a", encoding="utf-8") as file:
            file.write(line + "\n")

    def save_record(self) -> None:
        (self.out / "training.json").write_text(json.dumps(self.record, indent=1) + "\n", encoding="utf-8")

    def model(self, loops: int) -> Ouro:
        model = model_from_config(model_config(SIZES[self.args.size], build_tokenizer().get_vocab_size(), loops))
        assert isinstance(model, Ouro)
        return model

    def export(self, name: str, params: OuroParams, loops: int, threshold: float) -> None:
        """Write a model directory in BF16."""
        tokenizer = build_tokenizer()
        config = model_config(SIZES[self.args.size], tokenizer.get_vocab_size(), loops, exit_threshold=threshold)
        save_checkpoint(
            self.out / name,
            model_from_config(config),
            cast(params, "bfloat16"),
            tokenizer_json=tokenizer.to_str(pretty=True),
            config=config,
            generation_config={"do_sample": False, "eos_token_id": 0, "pad_token_id": 0},
        )
        self.save_record()
        self.log(f"{name} written to {self.out / name}")

    def train_model(self) -> None:
        """Both stages, into out/model."""
        from rlt_jax.train.trainer import train_stage1, train_stage2

        model, loops = self.model(self.args.loops), self.args.loops
        start = time.perf_counter()
        curriculum = Curriculum(self.data, _recorded_changes(self.args.curriculum))
        master = train_stage1(model, self.settings, curriculum, threads=self.args.threads, log=self.log)
        self.record["curriculum"] = curriculum.changes
        self.record["parameters"] = count_parameters(master)
        self.record["stage1_seconds"] = time.perf_counter() - start
        if not all(bool(jnp.isfinite(leaf).all()) for leaf in jax.tree.leaves(master)):
            raise Diverged("stage I ended with parameters that are not finite; a smaller --learning-rate may help")
        params = cast(master, "bfloat16")
        self.export("model", params, loops, 1.0)  # the weights are safe on disk before anything else is tried
        if loops == 1:
            return
        start = time.perf_counter()
        frozen = cast(params, self.dtype)
        gates = train_stage2(model, self.settings, self.data, frozen, threads=self.args.threads, log=self.log)
        self.record["stage2_seconds"] = time.perf_counter() - start
        params, threshold = self.choose_gate(model, params, gates)
        self.export("model", params, loops, threshold)

    def choose_gate(self, model: Ouro, params: OuroParams, gates: dict[str, Gate]) -> tuple[OuroParams, float]:
        """The parameters with the gate that ships, and its threshold: both from the validation set."""
        from rlt_jax.train.trainer import with_gate

        self.log("choosing the gate and its threshold on the validation set")
        validation = held_out_set(self.args.validation_samples, VALIDATION_CLASS, self.data.tasks)
        evaluator = Evaluator(model, params, validation, rows=min(1200, len(validation.length)))
        full = evaluator.run()
        found = {}
        for rule, gate in gates.items():
            self.log(f"gate trained on the {rule} target:")
            found[rule] = choose_threshold(evaluator, with_gate(params, gate), full, self.log)
        rule = "improvement"
        if found[rule][1] < WANTED_SAVING and found["look_ahead"][1] > found[rule][1]:
            rule = "look_ahead"
        self.record["gate"] = rule
        self.record["gate_validation"] = {
            name: {"threshold": f[0], "saved": f[1], "lost": f[2], "tried": f[3]} for name, f in found.items()
        }
        summary = "; ".join(f"{n}: {f[1]:.1%} saved at {f[0]:g} for {100 * f[2]:.2f} points" for n, f in found.items())
        self.record["gate_reason"] = (
            "Both gate targets were trained on the same frozen model: `improvement` is Ouro's (did the last loop "
            "help?), `look_ahead` asks whether a deeper loop would still help. Ouro's is shipped where it saves "
            f"{WANTED_SAVING:.0%} of loops, else the better one. Validation: {summary}."
        )
        self.log(self.record["gate_reason"])
        return with_gate(params, gates[rule]), found[rule][0]

    def train_baseline(self) -> None:
        """A one-loop model with the same settings, steps and data, the curriculum's changes too, into out/baseline."""
        from rlt_jax.train.trainer import train_stage1

        start = time.perf_counter()
        data = dataclasses.replace(self.data, loops=1)
        curriculum = Curriculum(data, self.record["curriculum"])
        base = train_stage1(self.model(1), self.settings, curriculum, threads=self.args.threads, log=self.log)
        self.record["baseline_seconds"] = time.perf_counter() - start
        self.export("baseline", base, 1, 1.0)

    def evaluate(self) -> None:
        """Both models on the test set, and the model card."""
        result = evaluate(
            self.out / "model",
            self.out / "baseline" if self.args.baseline else None,
            samples=self.args.samples,
            validation_samples=self.args.validation_samples,
            rows=min(1200, self.args.samples),
            log=self.log,
        )
        (self.out / "evaluation.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        (self.out / "model" / "README.md").write_text(model_card(result, self.record), encoding="utf-8")
        self.log(f"evaluation.json and model/README.md written to {self.out}")


def main(argv: Sequence[str] | None = None) -> int:
    parser = _parser()
    args = parser.parse_args(argv)
    if importlib.util.find_spec("optax") is None:
        parser.exit(2, f"{parser.prog}: error: optax is not installed: pip install 'rlt_jax[train]'\n")
    _check(parser, args)
    run = Run(args)
    try:
        run.train_model()
        if args.baseline:
            run.train_baseline()
        if args.evaluate:
            run.evaluate()
    except Diverged as error:
        cli.fail(parser.prog, error, code=1)
    run.log("done")
    return 0


def _command(args: argparse.Namespace) -> str:
    """The command of this run; with --curriculum and its training.json it sees the same data again."""
    words = ["python -m rlt_jax.train", f"--steps {args.steps}", f"--seed {args.seed}"]
    defaults = vars(_parser().parse_args(["--out", "x"]))
    told = (
        "size",
        "loops",
        "rows",
        "seq_len",
        "chunk_steps",
        "gate_steps",
        "learning_rate",
        "warmup",
        "tasks",
        "dtype",
        "curriculum",
    )
    for name in (*told, "samples", "validation_samples"):
        if getattr(args, name) != defaults[name]:
            words.append(f"--{name.replace('_', '-')} {getattr(args, name)}")
    words += [f"--{name}" for name in ("baseline", "evaluate") if getattr(args, name)]
    return " ".join([*words, "--out DIR"])


if __name__ == "__main__":
    sys.exit(main())
