"""Measure a trained model on held-out samples, in the BF16 that ships, and write the model card.

    python -m rlt_jax.train.evaluate                                     the model in the package: prints the tables
    python -m rlt_jax.train.evaluate --model DIR/model --baseline DIR/baseline --out evaluation.json --card README.md

Accuracy is exact match: every answer token and the end of text.  All settings see the same samples.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rlt_jax import cli
from rlt_jax.errors import CheckpointError, InvalidConfig
from rlt_jax.models.checkpoint import load_checkpoint
from rlt_jax.models.ouro import Ouro, OuroParams
from rlt_jax.train.data import SMALL_SHARE, EnglishPieces
from rlt_jax.train.decode import Prompts, decode, prefill
from rlt_jax.train.losses import token_cross_entropy
from rlt_jax.train.model import forward_states
from rlt_jax.train.tasks import GENERATORS, HOLE, TEST_CLASS, VALIDATION_CLASS, Symbols, held_out
from rlt_jax.train.tokenizer import build_tokenizer

THRESHOLDS = tuple(round(0.1 * i, 1) for i in range(1, 11))
CANDIDATES = tuple(round(0.05 * i, 2) for i in range(1, 20))  # thresholds tried on the validation set
MIN_LOOPS = 2  # the engine's default for requests
ALLOWED_LOSS = 0.005  # the validation set may lose half of the point that the test set may lose
WANTED_SAVING = 0.30
EVALUATION_SEED = 20_000_003
SMALL_SAMPLES = 1200  # of few items, measured apart from the reasoning mix
# Every set is padded to these widths, so that all of them share one compiled program per model.
PROMPT_WIDTH, ANSWER_WIDTH = 96, 24
ENGLISH_STARTS, ENGLISH_GIVEN = 3, 12  # held-out entries that the model continues, and how many tokens of them it gets
EXAMPLES = {
    "copy: q d k a w z m e =": " q d k a w z m e",
    "reverse: q d k a w z m e =": " e m z w a k d q",
    "sort: q d k a w z m e =": " a d e k m q w z",
    "close:([(){<{[<([{<=": ">}])>]}>}])",
    "calc: a:3+5*2; b:7-9; c:4*1-2; d:1*8+6-3*3; =": " a6 b8 c2 d3",
    "chain: d k, c d, w z, k a, z q, a m, q c, m w; q3 a1 d2 k5 =": " q k a m d a k q",
}
DEEP_TASKS = {"calc": "operations", "chain": "hops"}  # a sample's level is the most of these an item may need
Log = Callable[[str], None]


@dataclasses.dataclass(frozen=True)
class HeldOut:
    """Samples of all tasks in one table."""

    tokens: np.ndarray  # [N, P] int32  prompts, right-padded with 0
    length: np.ndarray  # [N] int32
    answer: np.ndarray  # [N, A] int32  with end of text, HOLE beyond
    task: np.ndarray  # [N] int32  index into `tasks`
    level: np.ndarray  # [N] int32  difficulty drawn for the sample
    tasks: tuple[str, ...]

    def part(self, rows: slice) -> HeldOut:
        return HeldOut(
            self.tokens[rows], self.length[rows], self.answer[rows], self.task[rows], self.level[rows], self.tasks
        )


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What one setting gave, per sample."""

    right: np.ndarray  # [N] bool  exact match
    token_right: np.ndarray  # [N] float  share of answer tokens right before the first difference
    loops: np.ndarray  # [N] int  sum of exit depths of outputs 2..n
    outputs: np.ndarray  # [N] int  how many outputs that is

    @property
    def accuracy(self) -> float:
        return float(self.right.mean())

    @property
    def mean_loops(self) -> float:
        """0 where no answer has a second output."""
        return float(self.loops.sum() / max(self.outputs.sum(), 1))

    def saved(self, depth: int) -> float:
        """Share of the loops of full depth that was not run; answers of one output have none to save."""
        return 1 - self.mean_loops / depth if self.outputs.any() else 0.0


def held_out_set(
    samples: int, split_class: int, tasks: Sequence[str] = tuple(GENERATORS), *, small: bool = False
) -> HeldOut:
    """At least `samples` samples, equally many of every task (the "reasoning mix"); `small`: of few items instead."""
    symbols, each = Symbols.of(build_tokenizer()), -(-samples // len(tasks))
    parts = [
        held_out(symbols, task, each, split_class=split_class, seed=EVALUATION_SEED, small=small) for task in tasks
    ]
    tokens = np.zeros((len(parts) * each, PROMPT_WIDTH), np.int32)
    answer = np.full((len(parts) * each, ANSWER_WIDTH), HOLE, np.int32)
    for i, part in enumerate(parts):
        for j in range(each):
            row, n = i * each + j, int(part.prompt[j])
            tokens[row, :n] = part.tokens[j, :n]
            rest = part.tokens[j, n : int(part.length[j])]
            answer[row, : len(rest)] = rest
    length = np.concatenate([p.prompt for p in parts]).astype(np.int32)
    task = np.repeat(np.arange(len(parts)), each).astype(np.int32)
    return HeldOut(tokens, length, answer, task, np.concatenate([p.level for p in parts]), tuple(tasks))


class Evaluator:
    """Prefills a held-out set once and decodes it under many settings."""

    def __init__(self, model: Ouro, params: OuroParams, data: HeldOut, *, rows: int = 1024) -> None:
        # the evaluator is told its thresholds: with the checkpoint's left in, models that differ in nothing else would
        # each be compiled anew
        model = Ouro(dataclasses.replace(model.spec, exit_threshold=1.0))
        self.model, self.params, self.data, self.rows = model, params, data, rows
        self.room = data.answer.shape[1] + 1
        self._prompts: list[tuple[Prompts, HeldOut]] = []
        for start in range(0, len(data.length), rows):
            part = data.part(slice(start, start + rows))
            fill = rows - len(part.length)  # one compiled shape: the last block is padded with copies of its first row
            tokens = np.concatenate([part.tokens, np.repeat(part.tokens[:1], fill, 0)])
            length = np.concatenate([part.length, np.repeat(part.length[:1], fill)])
            prompts = prefill(model, params, jnp.asarray(tokens), jnp.asarray(length), room=self.room)
            self._prompts.append((prompts, part))

    def run(
        self,
        *,
        threshold: float = 1.0,
        min_loops: int = MIN_LOOPS,
        max_loops: int | None = None,
        prefill_loops: int | None = None,
        gate: OuroParams | None = None,
    ) -> Outcome:
        """Decode everything under one setting.  `gate`: parameters with another exit gate than at prefill."""
        depth = max_loops or self.model.spec.trained_loops
        outcomes = []
        for prompts, part in self._prompts:
            tokens, depths = decode(
                self.model,
                gate if gate is not None else self.params,
                prompts,
                jnp.float32(threshold),
                jnp.int32(min(min_loops, depth)),
                jnp.int32(depth),
                jnp.int32(prefill_loops or depth),
                room=self.room,
            )
            n = len(part.length)
            outcomes.append(_score(np.asarray(tokens)[:n], np.asarray(depths)[:n], part.answer))
        return Outcome(*(np.concatenate([getattr(o, f.name) for o in outcomes]) for f in dataclasses.fields(Outcome)))


def _score(tokens: np.ndarray, depths: np.ndarray, answer: np.ndarray) -> Outcome:
    wanted = np.full_like(tokens, HOLE)
    wanted[:, : answer.shape[1]] = answer
    same = tokens == wanted
    length = (wanted != HOLE).sum(axis=1)
    return Outcome(
        right=same.all(axis=1),
        token_right=np.minimum(np.cumprod(same, axis=1).sum(axis=1), length) / length,
        loops=depths[:, 1:].sum(axis=1),
        outputs=(depths[:, 1:] > 0).sum(axis=1),
    )


def wilson(right: int, n: int, z: float = 1.959964) -> tuple[float, float]:
    """95 % interval of a share."""
    p, zz = right / n, z * z / n
    centre, half = (p + zz / 2) / (1 + zz), z * math.sqrt(p * (1 - p) / n + zz / (4 * n)) / (1 + zz)
    return max(0.0, centre - half), min(1.0, centre + half)


def paired_loss(full: Outcome, other: Outcome, z: float = 1.959964) -> tuple[float, float, float]:
    """Accuracy lost against `full` on the same samples, with its 95 % interval (normal, paired)."""
    difference = full.right.astype(float) - other.right.astype(float)
    mean, half = float(difference.mean()), z * float(difference.std()) / math.sqrt(len(difference))
    return mean, mean - half, mean + half


def choose_threshold(
    evaluator: Evaluator, gate: OuroParams, full: Outcome, log: Log = print
) -> tuple[float, float, float, list[dict[str, float]]]:
    """On the validation set: the threshold that saves most for at most ALLOWED_LOSS; (threshold, saving, loss, all).

    Thresholds are tried from high to low; the first one that loses too much ends the search.
    """
    best, tried = (1.0, 0.0, 0.0), []
    depth = evaluator.model.spec.trained_loops
    for threshold in reversed(CANDIDATES):
        outcome = evaluator.run(threshold=threshold, gate=gate)
        loss, saving = full.accuracy - outcome.accuracy, outcome.saved(depth)
        tried.append({"threshold": threshold, "loss": loss, "saving": saving})
        if loss > ALLOWED_LOSS:
            break
        if saving > best[1]:
            best = (threshold, saving, loss)
    log("validation: " + ", ".join(f"{t['threshold']:.2f}: -{t['saving']:.1%} loops {-t['loss']:+.2%}" for t in tried))
    return *best, tried


@functools.partial(jax.jit, static_argnums=(0,))
def english_per_loop(
    model: Ouro, params: OuroParams, tokens: jax.Array, length: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Of every loop: mean cross-entropy (nats per token) and the share of tokens that are the model's first choice.

    tokens [N, T], length [N] -> two [U].
    """
    columns = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    segment = (columns < length[:, None]).astype(jnp.int32)
    depth = jnp.full_like(tokens, model.spec.trained_loops)
    states = forward_states(model, params, tokens, columns, segment, depth, dtype="bfloat16")
    targets = jnp.roll(tokens, -1, axis=1)
    inside = segment[:, 1:].astype(jnp.float32)
    found = [token_cross_entropy(model.head(params, h), targets) for h in states]

    def mean(values: list[jax.Array]) -> jax.Array:
        return jnp.sum(jnp.stack(values)[:, :, :-1] * inside, axis=(1, 2)) / jnp.sum(inside)

    return mean([f[0] for f in found]), mean([f[1].astype(jnp.float32) for f in found])


def english_references(shown: EnglishPieces, held: EnglishPieces, vocab_size: int) -> dict[str, float]:
    """Cross-entropy of the held-out text under two guesses that read nothing: uniform, and the book's frequencies."""

    def targets(pieces: EnglishPieces) -> np.ndarray:
        columns = np.arange(pieces.tokens.shape[1])
        return pieces.tokens[(columns >= 1) & (columns < pieces.length[:, None])]

    counts = np.bincount(targets(shown), minlength=vocab_size) + 1.0  # add-one: no token is impossible
    frequency = counts / counts.sum()
    return {"uniform": math.log(vocab_size), "frequencies": float(-np.log(frequency[targets(held)]).mean())}


def english_measures(model: Ouro, params: OuroParams, *, rows: int) -> dict[str, Any]:
    """What the model knows of English: held-out entries, as many pieces it was trained on, and what it writes.

    `rows`: those of the evaluator, whose compiled programs are used again.
    """
    tokenizer = build_tokenizer()
    held, shown = EnglishPieces(256, validation=True), EnglishPieces(256)

    def per_loop(tokens: np.ndarray, length: np.ndarray) -> dict[str, list[float]]:
        ce, right = english_per_loop(model, params, jnp.asarray(tokens), jnp.asarray(length))
        return {"cross_entropy": [float(v) for v in ce], "right": [float(v) for v in right]}

    starts = np.flatnonzero(held.length > ENGLISH_GIVEN)[: min(ENGLISH_STARTS, rows)]
    given = np.zeros((rows, PROMPT_WIDTH), np.int32)
    given[: len(starts), :ENGLISH_GIVEN] = held.tokens[starts, :ENGLISH_GIVEN]
    length, room = jnp.full((rows,), ENGLISH_GIVEN, jnp.int32), ANSWER_WIDTH + 1
    depth = jnp.int32(model.spec.trained_loops)
    prompts = prefill(model, params, jnp.asarray(given), length, room=room)
    written, _ = decode(model, params, prompts, jnp.float32(1), jnp.int32(MIN_LOOPS), depth, depth, room=room)
    n = len(held.length)
    return {
        "held_out_tokens": int(held.length.sum()),
        "held_out": per_loop(held.tokens, held.length),
        "trained_on": per_loop(shown.tokens[:n], shown.length[:n]),
        **english_references(shown, held, model.spec.vocab_size),
        "continuations": [
            [tokenizer.decode(before[:ENGLISH_GIVEN].tolist()), tokenizer.decode(after[after != HOLE].tolist())]
            for before, after in zip(given[: len(starts)], np.asarray(written), strict=False)
        ],
    }


def _gain(outcome: Outcome, less: Outcome) -> dict[str, Any]:
    """How much more is right than in `less`, paired."""
    lost, low, high = paired_loss(outcome, less)
    return {"gain": lost, "gain_interval": (low, high)}


def _row(outcome: Outcome, data: HeldOut) -> dict[str, Any]:
    n = len(outcome.right)
    per_task = {}
    for i, task in enumerate(data.tasks):
        mine = outcome.right[data.task == i]
        per_task[task] = {"accuracy": float(mine.mean()), "interval": wilson(int(mine.sum()), len(mine))}
        if task in DEEP_TASKS:
            level = data.level[data.task == i]
            per_task[task]["by_level"] = {int(n): float(mine[level == n].mean()) for n in np.unique(level)}
    return {
        "accuracy": outcome.accuracy,
        "interval": wilson(int(outcome.right.sum()), n),
        "tokens_before_first_error": float(outcome.token_right.mean()),
        "mean_loops": outcome.mean_loops,
        "tasks": per_task,
    }


def _load(folder: Path | None) -> tuple[Ouro, OuroParams]:
    loaded = load_checkpoint(folder, dtype="bfloat16")
    if not isinstance(loaded.model, Ouro):
        kind = loaded.model.spec.model_type
        raise CheckpointError(f"{loaded.path}: the evaluation is for models of type ouro, found {kind}")
    return loaded.model, loaded.params


def evaluate(
    model_dir: Path | None,
    baseline_dir: Path | None,
    *,
    samples: int,
    validation_samples: int,
    rows: int,
    log: Log = print,
) -> dict[str, Any]:
    """All numbers of the model card; without `model_dir` of the model in the package.

    Raises:
        CheckpointError: a directory that cannot be loaded, or holds a model of another family.
    """
    begin = time.perf_counter()
    model, params = _load(model_dir)
    base = None if baseline_dir is None else _load(baseline_dir)
    depth = model.spec.trained_loops
    test = held_out_set(samples, TEST_CLASS)
    evaluator = Evaluator(model, params, test, rows=rows)
    result: dict[str, Any] = {
        "schema_version": 1,
        "environment": {"jax": jax.__version__, "device": jax.devices()[0].device_kind, "dtype": "bfloat16"},
        "samples": len(test.length),
        "samples_per_task": len(test.length) // len(test.tasks),
        "tasks": list(test.tasks),
        "min_loops": MIN_LOOPS,
        "trained_loops": depth,
        "parameters": sum(int(a.size) for a in jax.tree.leaves(params)),
        "vocab_size": model.spec.vocab_size,
        "fixed": [],
        "thresholds": [],
    }
    outcomes = [evaluator.run(max_loops=loops) for loops in range(1, depth + 1)]
    for loops, outcome in enumerate(outcomes, 1):
        result["fixed"].append({"loops": loops, **_row(outcome, test)})
        if loops > 1:
            result["fixed"][-1] |= _gain(outcome, outcomes[loops - 2])
        log(f"{loops} loops: {outcome.accuracy:.2%} exact")
    full = outcomes[-1]
    for threshold in sorted({*THRESHOLDS, round(model.spec.exit_threshold, 4)}):
        outcome = evaluator.run(threshold=threshold)
        loss, low, high = paired_loss(full, outcome)
        saved = outcome.saved(depth)
        result["thresholds"].append(
            {"threshold": threshold, "saved": saved, "lost": loss, "lost_interval": (low, high), **_row(outcome, test)}
        )
        log(f"threshold {threshold}: {outcome.accuracy:.2%} exact, mean loops {outcome.mean_loops:.3f} (-{saved:.1%})")
    validation = held_out_set(validation_samples, VALIDATION_CLASS)
    checker = Evaluator(model, params, validation, rows=rows)
    chosen, saving, loss, tried = choose_threshold(checker, params, checker.run(), log)
    result["validation"] = {
        "samples": len(validation.length),
        "threshold": chosen,
        "saved": saving,
        "lost": loss,
        "tried": tried,
    }
    result["shipped_threshold"] = model.spec.exit_threshold
    few = held_out_set(min(SMALL_SAMPLES, samples), TEST_CLASS, small=True)
    checker = Evaluator(model, params, few, rows=rows)
    result["small"] = {
        "samples": len(few.length),
        "fixed": [{"loops": n, **_row(checker.run(max_loops=n), few)} for n in range(1, depth + 1)],
    }
    log("few items: " + ", ".join(f"{row['loops']} loops {row['accuracy']:.2%}" for row in result["small"]["fixed"]))
    result["english"] = english_measures(evaluator.model, params, rows=rows)
    log(f"english: {json.dumps(result['english'])}")
    if base is not None:
        one = Evaluator(*base, test, rows=rows).run()
        result["baseline"] = {
            "parameters": sum(int(a.size) for a in jax.tree.leaves(base[1])),
            "loops": base[0].spec.trained_loops,
            **_gain(full, one),
            **_row(one, test),
        }
        log(f"separately trained with one loop: {one.accuracy:.2%} exact")
    result["claims"] = _claims(result)
    log("claims: " + json.dumps(result["claims"]))
    log(f"evaluated in {time.perf_counter() - begin:.0f} s")
    return result


def _claims(result: dict[str, Any]) -> dict[str, bool]:
    """The properties this model exists for, as measured."""
    fixed = [row["accuracy"] for row in result["fixed"]]
    claims = {}
    if len(fixed) > 1:
        claims["accuracy rises with every loop"] = all(a < b for a, b in zip(fixed, fixed[1:], strict=False))
    claims |= {
        "some threshold saves 30 % of loops for at most 1 point": any(
            row["saved"] >= WANTED_SAVING and row["lost"] <= 0.01 for row in result["thresholds"]
        ),
    }
    if "baseline" in result:
        claims["10 points above the one-loop model"] = result["baseline"]["gain"] >= 0.10
    return claims


def _share(row: dict[str, Any]) -> str:
    low, high = row["interval"]
    return f"{row['accuracy']:.1%} ({100 * low:.1f}–{100 * high:.1f})"


def _points(value: float, interval: Sequence[float]) -> str:
    return f"{100 * value:.2f} ({100 * interval[0]:.2f} to {100 * interval[1]:.2f})"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    return ["", *("| " + " | ".join(cells) + " |" for cells in (head, ["---"] * len(head), *rows))]


def _task_table(rows: Sequence[tuple[str, dict[str, Any]]], tasks: Sequence[str]) -> list[str]:
    """Accuracy of every setting, all tasks together and each."""
    cells = [[name, _share(row), *(_share(row["tasks"][task]) for task in tasks)] for name, row in rows]
    return _table(["loops", "all", *tasks], cells)


def model_card(result: dict[str, Any], training: dict[str, Any] | None) -> str:
    """The model card as markdown, from the two records of a run alone."""
    lines = [
        "# The bundled model",
        "",
        f"A looped language model in Ouro's layout: {result['parameters']:,} parameters, "
        f"{result['trained_loops']} loops over the same layers, BF16. It answers six small reasoning tasks: a "
        "demonstration of adaptive depth, not an assistant.",
        "",
        "## Prompts it knows, and the right answers",
        "",
        *(f"    {prompt}`{answer}`".replace("`", "   ->  `", 1) for prompt, answer in EXAMPLES.items()),
        *_recipe(result, training),
        *measured(result),
        *_english(result, training),
        "",
    ]
    return "\n".join(lines)


_RECORDED = ("command", "steps", "tokens_per_step", "device", "dtype", "stage1_seconds", "stage2_seconds", "gate")


def model_card_record(training: Any) -> None:
    """Check that this is a training.json.

    Raises:
        ValueError: it lacks what a card says.
    """
    missing = [name for name in _RECORDED if not isinstance(training, dict) or name not in training]
    if missing:
        raise ValueError(f"is no record of a training run: it lacks {', '.join(missing)}")


def _recipe(result: dict[str, Any], training: dict[str, Any] | None) -> list[str]:
    lines = [
        "",
        "## Data, recipe, command",
        "",
        "Tasks are generated on the fly (`rlt_jax/train/tasks.py`), with difficulty drawn per sample and per item; "
        "prompts are split into training, validation and test by a hash of their tokens, so held-out prompts never "
        f"occur in training. {SMALL_SHARE:.0%} of the training samples have few items. A curriculum asks `chain` for "
        "up to one hop more than the model knows, until it knows all; the learning rate is held until 60 % of the run, "
        "then falls to zero. English: *The Devil's "
        "Dictionary* (public domain, `rlt_jax/train/data/NOTICE.md`). Stage I minimises the expected cross-entropy "
        "over exit depths minus an entropy term; stage II freezes the language model and trains the exit gate alone. "
        "In stage I a third of the samples have random exit depths, so that the model learns with the KV cache that "
        "early exits leave. That cache is the layout `last_exited`; under `shared`, which it never saw in training, "
        "the model answers nonsense at every depth.",
    ]
    if training is None:
        return lines
    lines += [
        "",
        f"Command: `{training['command']}`",
        "",
        f"{training['steps']:,} steps of {training['tokens_per_step']:,} tokens on {training['device']}, computed in "
        f"{training['dtype']}; stage I {training['stage1_seconds']:.0f} s, stage II {training['stage2_seconds']:.0f} "
        "s, with compilation.",
    ]
    if result["trained_loops"] > 1:
        lines[-1] += (
            f" Gate shipped: `{training['gate']}` (chosen on the validation set), threshold "
            f"{result['shipped_threshold']:g}."
        )
    if "baseline_seconds" in training:
        lines[-1] += f" The same command trains the one-loop model, in {training['baseline_seconds']:.0f} s."
    if training.get("gate_reason"):
        lines += ["", training["gate_reason"]]
    return lines


def measured(result: dict[str, Any]) -> list[str]:
    """The tables of the tasks."""
    tasks, base, depth = result["tasks"], result.get("baseline"), result["trained_loops"]
    by_loops = [(str(row["loops"]), row) for row in result["fixed"]]
    with_base = [*by_loops, ("1, trained with one loop", base)] if base else by_loops
    gains = [f"{row['loops']}: {_points(row['gain'], row['gain_interval'])}" for row in result["fixed"][1:]]
    lines = [
        "",
        "## Measured",
        "",
        f"{result['samples']:,} held-out samples ({result['samples_per_task']} per task), the same for every row; "
        f"exact match of the whole answer, greedy, BF16, on {result['environment']['device']}. In brackets 95 % "
        "intervals: Wilson for shares, normal and paired for differences. `python -m rlt_jax.train.evaluate` "
        "reproduces the tables from the files of the package.",
        "",
        "Prompt and decode at a fixed number of loops:",
        *_task_table(with_base, tasks),
    ]
    if gains:
        lines += ["", f"Points gained by each loop: {'; '.join(gains)}."]
    if base:
        lines += [
            "",
            f"The last row is a separately trained one-loop model of equal parameters ({base['parameters']:,}), data "
            f"(its curriculum moved on when the model above learned) and steps. {depth} loops are "
            f"{_points(base['gain'], base['gain_interval'])} points above it. Its weights do not ship: the command "
            "above trains it again (`DIR/baseline`), and `python -m rlt_jax.train.evaluate "
            "--baseline DIR/baseline` measures it.",
        ]
    for task, unit in DEEP_TASKS.items():
        levels = list(result["fixed"][0]["tasks"].get(task, {}).get("by_level", {}))
        rows = []
        for name, row in with_base:
            found = row["tasks"][task]["by_level"]
            rows.append([name, *(f"{found[n]:.0%}" if n in found else "" for n in levels)])
        lines += ["", f"`{task}` by difficulty (the most {unit} any item of the sample may need):"]
        lines += _table(["loops", *(str(n) for n in levels)], rows)
    small = result["small"]
    lines += [
        "",
        f"Few items (lists of 1 to 7, 1 to 3 results), {small['samples']:,} held-out samples that are not part of the "
        "mix above:",
        *_task_table([(str(row["loops"]), row) for row in small["fixed"]], tasks),
        "",
        f"Early exit (prompt at {depth} loops, min_loops {result['min_loops']}); loops are the mean over outputs "
        "2..n; lost is paired with full depth:",
    ]
    rows = []
    for row in result["thresholds"]:
        mark = " (shipped)" if row["threshold"] == round(result["shipped_threshold"], 4) else ""
        lost = _points(row["lost"], row["lost_interval"])
        rows.append(
            [f"{row['threshold']:g}{mark}", _share(row), f"{row['mean_loops']:.2f}", f"{row['saved']:.1%}", lost]
        )
    if base:
        rows.append(
            [
                "any, trained with one loop",
                _share(base),
                f"{base['mean_loops']:.2f}",
                "",
                _points(base["gain"], base["gain_interval"]),
            ]
        )
    lines += _table(["threshold", "all", "mean loops", "loops saved", "points lost"], rows)
    check = result["validation"]
    lines += [
        "",
        f"The threshold was chosen on {check['samples']:,} other samples (validation): {check['threshold']:g} saves "
        f"{check['saved']:.1%} of loops there for {100 * check['lost']:.2f} points.",
        "",
        "What this model is for, as measured: "
        + "; ".join(f"{claim}: {'yes' if holds else 'NO'}" for claim, holds in result["claims"].items())
        + ".",
    ]
    return lines


def _english(result: dict[str, Any], training: dict[str, Any] | None) -> list[str]:
    """What the model can and cannot do in English, decided by the numbers."""
    english = result["english"]
    held, shown = english["held_out"], english["trained_on"]
    full = held["cross_entropy"][-1]
    cells = [
        [str(n + 1), f"{held['cross_entropy'][n]:.2f}", f"{held['right'][n]:.1%}", f"{shown['cross_entropy'][n]:.2f}"]
        for n in range(result["trained_loops"])
    ]
    if full >= english["uniform"]:
        verdict = "that is worse than guessing among the entries of the vocabulary: it knows no English at all"
    elif full >= english["frequencies"]:
        verdict = "that is no better than knowing how often each token occurs: it knows no English to speak of"
    else:
        verdict = (
            f"that is {english['frequencies'] - full:.2f} nats better than knowing how often each token occurs: it has "
            "picked up how tokens follow each other"
        )
    if shown["cross_entropy"][-1] < full - 1:
        verdict += ", and it knows the entries it was shown far better than others: it has learned them by heart"
    text = []
    if training and "english" in training:
        text = [
            f"The {training['english']['tokens']:,} tokens of the book's training part were shown "
            f"{training['english']['epochs']:.3g} times ({training['english']['share']:.2%} of all tokens): more "
            "repetitions of so small a book are learned by heart and teach nothing about other text.",
            "",
        ]
    return [
        "",
        "## English",
        "",
        *text,
        f"Held-out entries ({english['held_out_tokens']:,} tokens), cross-entropy in nats per token and how often the "
        "next token is the first choice; the last column is a part of the training text of equally many pieces:",
        *_table(["loops", "held out", "first choice", "trained on"], cells),
        "",
        f"Guessing uniformly: {english['uniform']:.2f}; the book's token frequencies: {english['frequencies']:.2f}. "
        f"At full depth {verdict}. It is not a model to write or read English with. Held-out entries, and how it goes "
        "on at full depth:",
        "",
        *(f"    {json.dumps(given)}  ->  {json.dumps(written)}" for given, written in english["continuations"]),
    ]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m rlt_jax.train.evaluate", description=__doc__.split("\n\n")[0])
    parser.add_argument("--model", type=Path, help="model directory (default: the one in the package)")
    parser.add_argument("--baseline", type=Path, help="directory of the one-loop model to compare with")
    parser.add_argument("--samples", type=int, default=4800, help="held-out test samples (default 4800)")
    parser.add_argument("--validation-samples", type=int, default=2400, help="for the threshold (default 2400)")
    parser.add_argument("--rows", type=int, default=1200, help="samples decoded together (default 1200)")
    parser.add_argument("--training", type=Path, help="training.json of the run, for the card")
    parser.add_argument("--out", type=Path, help="write all numbers as JSON")
    parser.add_argument("--card", type=Path, help="write the model card (markdown)")
    args = parser.parse_args(argv)
    for name in ("samples", "validation_samples", "rows"):
        if getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be >= 1, found {getattr(args, name)}")
    # everything that can be refused is, before minutes are spent
    training = None
    try:
        if args.training:
            training = json.loads(args.training.read_text(encoding="utf-8"))
            model_card_record(training)
        for option in ("out", "card"):
            cli.check_output_file(f"--{option}", getattr(args, option))
    except (OSError, ValueError) as error:
        parser.error(f"--training {args.training}: {error}")
    except InvalidConfig as error:
        parser.error(str(error))
    try:
        result = evaluate(
            args.model,
            args.baseline,
            samples=args.samples,
            validation_samples=args.validation_samples,
            rows=min(args.rows, max(args.samples, args.validation_samples)),
            log=lambda message: print(message, flush=True),
        )
    except CheckpointError as error:
        parser.error(str(error))
    if args.out:
        args.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    if args.card:
        args.card.write_text(model_card(result, training), encoding="utf-8")
    else:
        print("\n".join(measured(result)))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
