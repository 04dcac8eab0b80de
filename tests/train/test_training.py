"""The training command at a tiny size.  PROTECTS: the recipe of the bundled model (both stages, export, evaluation)
runs from a fresh checkout, learns, and leaves in the exported directory exactly what was trained."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlt_jax.models.checkpoint import load_checkpoint
from rlt_jax.models.ouro import Ouro, OuroParams
from rlt_jax.models.registry import model_from_config
from rlt_jax.train import __main__ as command
from rlt_jax.train import evaluate, trainer
from rlt_jax.train.data import AHEAD, Curriculum, DataSpec
from rlt_jax.train.decode import decode, prefill
from rlt_jax.train.evaluate import Evaluator, Outcome, held_out_set, paired_loss, wilson
from rlt_jax.train.model import SIZES, cast, forward_states, init_params, model_config
from rlt_jax.train.tasks import HOLE, MAX_HOPS, TEST_CLASS, VALIDATION_CLASS, Difficulty, Symbols, held_out
from rlt_jax.train.tokenizer import build_tokenizer
from rlt_jax.train.trainer import (
    GATE_RULES,
    PROBE_SAMPLES,
    PROBE_SEED,
    HopProbe,
    TrainConfig,
    learning_rate,
    train_stage1,
    train_stage2,
    with_gate,
)

SETTINGS = TrainConfig(compute_dtype="float32", warmup=10, gate_steps=6, learning_rate=4e-3)
DATA = DataSpec(seq_len=112, rows=6, chunk_steps=6, steps=30, tasks=("copy", "chain"))


def tiny(loops: int = 4) -> Ouro:
    model = model_from_config(model_config(SIZES["tiny"], 1024, loops))
    assert isinstance(model, Ouro)
    return model


@pytest.fixture(scope="module")
def trained() -> tuple[Ouro, OuroParams, list[str]]:
    """A few steps of stage I: enough for the loss to fall, not to solve anything."""
    log: list[str] = []
    model = tiny()
    params = train_stage1(model, SETTINGS, Curriculum(DATA), threads=1, log=log.append)
    return model, params, log


def answers_ce(line: str) -> list[float]:
    return [float(v) for v in line.split("answers ce ")[1].split(" ")[0].split("/")]


def test_stage1_lowers_the_loss_of_every_loop(trained: tuple[Ouro, OuroParams, list[str]]) -> None:
    _, params, log = trained
    last = answers_ce(log[-1])
    assert len(last) == 4
    assert max(last) < np.log(1024) - 1.5, "a model that has learned nothing is at log(1024) = 6.9"
    assert all(np.isfinite(np.asarray(a)).all() for a in jax.tree.leaves(params))


def test_stage1_is_reproducible(trained: tuple[Ouro, OuroParams, list[str]]) -> None:
    model, params, _ = trained
    again = train_stage1(model, SETTINGS, Curriculum(DATA), threads=2, log=lambda _: None)
    for a, b in zip(jax.tree.leaves(params), jax.tree.leaves(again), strict=True):
        np.testing.assert_array_equal(a, b)


def test_the_curriculum_follows_the_model_and_the_one_loop_model_sees_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model that is said to know everything moves on whenever it is asked; its changes are recorded and replayed."""
    drawn: list[list[np.ndarray]] = []
    stream = trainer.stream

    def recording(*args: Any, **kwargs: Any) -> Iterator[Any]:
        drawn.append([])
        for chunk in stream(*args, **kwargs):
            drawn[-1].append(chunk.tokens)
            yield chunk

    monkeypatch.setattr(trainer, "stream", recording)
    monkeypatch.setattr(trainer, "PROBE_EVERY", 1)
    monkeypatch.setattr(HopProbe, "__call__", lambda self, params: [1.0] * MAX_HOPS)
    counts = {"steps": 30, "chunk-steps": 1, "warmup": 4, "rows": 2, "seq-len": 112, "gate-steps": 1, "threads": 1}
    arguments = [*(f"--{name}={value}" for name, value in counts.items()), "--size=tiny", "--tasks=copy,chain"]
    arguments += ["--validation-samples=12"]
    assert command.main([*arguments, "--baseline", f"--out={tmp_path / 'first'}"]) == 0
    record = json.loads((tmp_path / "first" / "training.json").read_text())
    assert record["curriculum"] == [[0, 1], [1 + AHEAD, 2], [1 + 2 * AHEAD, 3], [1 + 3 * AHEAD, 4]], (
        "it ends at chunk 18"
    )
    log = (tmp_path / "first" / "train.log").read_text()
    assert "step 2: 1 hops learned, hops right 1.00/1.00" in log
    looped, _, one_loop = drawn
    assert len(looped) == len(one_loop) == 30
    assert all(np.array_equal(a, b) for a, b in zip(looped, one_loop, strict=True))
    again = ["--curriculum", str(tmp_path / "first" / "training.json"), f"--out={tmp_path / 'second'}"]
    monkeypatch.setattr(HopProbe, "__call__", lambda self, params: [0.0] * MAX_HOPS)
    assert command.main([*arguments, *again]) == 0
    assert all(np.array_equal(a, b) for a, b in zip(looped, drawn[3], strict=True))
    assert record["settings"]["hold"] == 0.6


def test_stage2_moves_the_gate_alone(trained: tuple[Ouro, OuroParams, list[str]]) -> None:
    model, master, _ = trained
    params = cast(master, "float32")
    before = jax.tree.map(np.array, params)
    gates = train_stage2(model, SETTINGS, DATA, params, threads=1, log=lambda _: None)
    assert set(gates) == set(GATE_RULES)
    for gate in gates.values():
        after = with_gate(params, gate)
        moved = [
            field.name
            for field in dataclasses.fields(OuroParams)
            if any(
                not np.array_equal(a, b)
                for a, b in zip(
                    jax.tree.leaves(getattr(before, field.name)),
                    jax.tree.leaves(getattr(after, field.name)),
                    strict=True,
                )
            )
        ]
        assert moved == ["exit_gate_weight", "exit_gate_bias"]
    assert not np.array_equal(gates["improvement"].weight, gates["look_ahead"].weight)


def test_schedule_warms_up_holds_and_ends_at_zero() -> None:
    def at(step: int) -> float:
        return float(learning_rate(SETTINGS, jnp.int32(step), jnp.int32(100)))

    assert at(0) == pytest.approx(4e-4)
    assert at(9) == at(60) == pytest.approx(4e-3)
    assert at(80) == pytest.approx(2e-3, rel=0.05)
    assert at(100) == 0


def test_the_probe_counts_right_answers_by_hops() -> None:
    """A model that always says the same letter is right where that letter is the answer, counted here in the texts."""
    model, tokenizer = tiny(), build_tokenizer()
    params = init_params(model, 0)
    letter = tokenizer.encode(" m").ids[0]
    # with one embedding for every token all states are one vector, and a head of that vector in one row says that row
    params = dataclasses.replace(params, embed=jnp.ones_like(params.embed) * params.embed[:1])
    one = jnp.ones((1, 1), jnp.int32)
    state = forward_states(model, params, one, 0 * one, one, 4 * one, dtype="float32")[-1][0, 0]
    params = dataclasses.replace(params, head=jnp.zeros_like(params.head).at[letter].set(state))
    wanted = []
    for hops in range(1, MAX_HOPS + 1):
        drawn = held_out(
            Symbols.of(tokenizer),
            "chain",
            PROBE_SAMPLES,
            split_class=VALIDATION_CLASS,
            seed=PROBE_SEED,
            difficulty=Difficulty(most_hops=hops, frontier=1, frontier_queries=1),
        )
        answers = [
            pair
            for tokens, start, end in zip(drawn.tokens, drawn.prompt, drawn.length, strict=True)
            for pair in tokenizer.decode(tokens[start : end - 1].tolist()).split()[1::2]
        ]
        assert len(answers) >= 4 * PROBE_SAMPLES
        wanted.append(answers.count("m") / len(answers))
    assert min(wanted) > 0
    np.testing.assert_allclose(HopProbe(model, "float32")(params), wanted, rtol=1e-6)


def test_generation_agrees_with_the_teacher_forced_forward_along_its_own_tokens_and_depths() -> None:
    """The evaluator's cache against the training forward pass, which shares no cache code with it."""
    model = tiny()
    params = init_params(model, 1)
    # a gate that disagrees with itself from token to token, so that depths differ
    params = dataclasses.replace(
        params,
        exit_gate_weight=jax.random.normal(jax.random.key(2), params.exit_gate_weight.shape) * 0.2,
    )
    data = held_out_set(6, TEST_CLASS, ("copy", "calc"))
    room = 12
    prompts = prefill(model, params, jnp.asarray(data.tokens), jnp.asarray(data.length), room=room)
    tokens, depths = decode(
        model, params, prompts, jnp.float32(0.5), jnp.int32(1), jnp.int32(4), jnp.int32(4), room=room
    )
    tokens, depths = np.asarray(tokens), np.asarray(depths)
    assert len(np.unique(depths[depths > 0])) >= 3, "the case must mix depths"
    for i, n in enumerate(data.length):
        out = tokens[i][tokens[i] != HOLE]
        whole = jnp.asarray(np.concatenate([data.tokens[i, :n], out])[None])
        exits = np.concatenate([np.full(n, 4), depths[i, 1 : len(out)], [4]])
        position = jnp.arange(whole.shape[1])[None]
        states = forward_states(
            model, params, whole, position, jnp.ones_like(whole), jnp.asarray(exits)[None], dtype="float32"
        )
        for t, depth in enumerate(depths[i, : len(out)]):
            logits = np.asarray(model.head(params, states[depth - 1][0, n - 1 + t]))
            # greedy, up to a near tie: the two computations add in different orders
            assert logits[out[t]] >= logits.max() - 1e-4


def test_full_depth_ignores_the_gate_and_fixed_depth_is_obeyed() -> None:
    model = tiny()
    params = init_params(model, 1)
    data = held_out_set(4, TEST_CLASS, ("copy",))
    eager = dataclasses.replace(params, exit_gate_bias=jnp.array([9.0]))
    evaluator = Evaluator(model, eager, data, rows=3)  # two blocks, the second padded
    assert evaluator.run(threshold=1.0).mean_loops == 4
    assert evaluator.run(threshold=0.5, min_loops=1).mean_loops == 1
    assert evaluator.run(threshold=0.5).mean_loops == 2
    assert evaluator.run(max_loops=3).mean_loops == 3
    assert len(evaluator.run().right) == 4


def test_wilson_interval_and_paired_loss() -> None:
    low, high = wilson(90, 100)
    assert (low, high) == (pytest.approx(0.8256, abs=1e-3), pytest.approx(0.9448, abs=1e-3))
    assert wilson(0, 10)[0] == 0
    zeros = np.zeros(4)
    full = Outcome(np.array([True, True, True, False]), zeros, zeros, zeros)
    other = Outcome(np.array([True, False, True, False]), zeros, zeros, zeros)
    assert paired_loss(full, other)[0] == 0.25


def test_the_command_trains_exports_and_evaluates(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    counts = {"steps": 8, "warmup": 4, "chunk-steps": 4, "rows": 4, "seq-len": 112, "gate-steps": 4, "threads": 1}
    counts |= {"samples": 12, "validation-samples": 12}
    arguments = [f"--{name}={value}" for name, value in counts.items()]
    arguments += ["--size=tiny", "--baseline", "--evaluate", f"--out={tmp_path}"]
    assert command.main(arguments) == 0
    loaded = load_checkpoint(tmp_path / "model", dtype="bfloat16")
    assert loaded.model.spec.trained_loops == 4
    assert loaded.eos_token_ids == (0,)
    assert loaded.tokenizer is not None
    assert 0 < loaded.model.spec.exit_threshold <= 1
    record = json.loads((tmp_path / "training.json").read_text())
    assert record["gate"] in GATE_RULES
    assert "--steps 8" in record["command"]
    assert "--baseline --evaluate" in record["command"]
    assert record["baseline_seconds"] > 0
    assert record["curriculum"] == [[0, 1]], "eight steps teach nothing"
    assert 0 < record["english"]["epochs"] < 4
    result = json.loads((tmp_path / "evaluation.json").read_text())
    assert [row["loops"] for row in result["fixed"]] == [1, 2, 3, 4]
    assert {0.1, 0.5, 1.0} <= {row["threshold"] for row in result["thresholds"]}
    assert result["baseline"]["parameters"] == result["parameters"]
    card = (tmp_path / "model" / "README.md").read_text()
    assert "| 4 |" in card
    assert "1, trained with one loop" in card
    assert card == command.model_card(result, record), "the card comes from the two records alone"
    assert 6 < min(result["english"]["held_out"]["cross_entropy"]) < 8, "untrained: near log(1024)"
    assert 5 < result["english"]["frequencies"] < result["english"]["uniform"]
    assert len(result["small"]["fixed"]) == 4
    log = (tmp_path / "train.log").read_text()
    assert "tokens/s" in log
    assert log == capsys.readouterr().out
    assert load_checkpoint(tmp_path / "baseline", dtype="bfloat16").model.spec.trained_loops == 1


def test_the_bundled_size_fits_its_limits() -> None:
    model = model_from_config(model_config(SIZES["bundled"], 1024, 4))
    shapes = jax.eval_shape(lambda: init_params(model, 0))  # type: ignore[arg-type]
    parameters = sum(int(np.prod(a.shape)) for a in jax.tree.leaves(shapes))
    assert parameters <= 8_000_000
    assert 2 * parameters < 16 * 1024 * 1024


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--steps", "0"], "--steps must be >= 1, found 0"),
        (["--seq-len", "10"], "--seq-len must be in [112, 1024]"),
        (["--tasks", "copy,dance"], "--tasks: unknown dance"),
        (["--seed", "-1"], "--seed must be in [0, 4294967296), found -1"),
        (["--seed", str(2**63)], "--seed must be in [0, 4294967296)"),
        (["--threads", "0"], "--threads must be >= 1, found 0"),
        (["--loops", "128"], "--loops must be <= 127, found 128"),
        (["--learning-rate", "nan"], "--learning-rate must be finite and > 0, found nan"),
        (["--learning-rate", "-1"], "--learning-rate must be finite and > 0, found -1.0"),
        (["--curriculum", "/nowhere/training.json"], "--curriculum /nowhere/training.json: "),
    ],
)
def test_bad_settings_are_refused_by_name(
    arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        command.main(["--out", str(tmp_path), *arguments])
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{}", "no list of (first chunk, most hops) under 'curriculum'"),
        ('{"curriculum": 3}', "no list of (first chunk, most hops) under 'curriculum'"),
        ('{"curriculum": []}', "ascending from chunk 0, found []"),
        ('{"curriculum": [[0, 1], [40, 9]]}', "hops in [1, 8]"),
        ('{"curriculum": [[0, 5], [8, 2]]}', "ascending from chunk 0"),
        ('{"curriculum": [[0, 1], [8, Infinity]]}', "must hold integers"),
        ('{"curriculum": [[0, 1.5]]}', "must hold integers"),
        ("no json", "Expecting value"),
    ],
)
def test_a_bad_curriculum_is_refused(
    content: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "training.json"
    file.write_text(content)
    with pytest.raises(SystemExit):
        command.main(["--out", str(tmp_path / "out"), "--curriculum", str(file)])
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("taken", ["out", "out/model"])
def test_an_output_folder_that_cannot_be_is_refused_before_training(
    taken: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / taken
    file.parent.mkdir(exist_ok=True)
    file.write_text("mine")
    with pytest.raises(SystemExit) as stopped:
        command.main(["--out", str(tmp_path / "out"), "--size=tiny"])
    assert stopped.value.code == 2
    assert f"--out: {file} cannot be made: " in capsys.readouterr().err
    assert file.read_text() == "mine"


def test_a_run_that_diverges_writes_no_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def diverging(model: Ouro, config: TrainConfig, *args: Any, **kwargs: Any) -> OuroParams:
        params = init_params(model, config.seed)
        return dataclasses.replace(params, loop_norm=params.loop_norm.at[3].set(jnp.nan))

    monkeypatch.setattr(trainer, "train_stage1", diverging)
    with pytest.raises(SystemExit) as stopped:
        command.main(["--size=tiny", f"--out={tmp_path}"])
    assert stopped.value.code == 1
    assert "parameters that are not finite; a smaller --learning-rate may help" in capsys.readouterr().err
    assert not (tmp_path / "model" / "model.safetensors").exists()


def test_a_model_without_second_outputs_saves_nothing() -> None:
    """It would look as if it saved every loop."""
    ones, zeros = np.ones(3), np.zeros(3)
    silent = Outcome(right=zeros.astype(bool), token_right=zeros, loops=zeros, outputs=zeros)
    assert (silent.saved(4), silent.mean_loops) == (0.0, 0.0)
    assert Outcome(right=zeros.astype(bool), token_right=zeros, loops=2 * ones, outputs=ones).saved(4) == 0.5


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "/nowhere/at/all"], "/nowhere/at/all"),
        (["--model", "tests/fixtures/huginn_tiny"], "the evaluation is for models of type ouro, found huginn"),
        (["--baseline", "/nowhere/at/all"], "/nowhere/at/all"),
        (["--training", "/nowhere/training.json"], "--training /nowhere/training.json: "),
        (["--training", "pyproject.toml"], "--training pyproject.toml: "),
        (
            ["--training", "tests/fixtures/huginn_tiny/config.json"],
            "is no record of a training run: it lacks command",
        ),
        (["--out", "/proc/nowhere/x.json"], "--out: /proc/nowhere/x.json cannot be written: "),
        (["--card", "tests"], "--card: tests cannot be written: "),
        (["--rows", "0"], "--rows must be >= 1, found 0"),
    ],
)
def test_an_evaluation_refuses_what_it_can_before_it_begins(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        evaluate.main(arguments)
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err


def test_without_optax_the_help_works_and_a_run_names_the_extra(tmp_path: Path) -> None:
    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        hidden = "import runpy, sys; sys.modules['optax'] = None; sys.argv[0] = 'train'; "
        command = [sys.executable, "-c", hidden + "runpy.run_module('rlt_jax.train', run_name='__main__')", *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=120)

    shown = run("--help")
    assert (shown.returncode, shown.stderr) == (0, "")
    assert "--gate-steps" in shown.stdout
    refused = run("--size=tiny", "--steps=1", f"--out={tmp_path / 'new'}")
    assert refused.returncode == 2
    (line,) = refused.stderr.splitlines()
    assert line == "python -m rlt_jax.train: error: optax is not installed: pip install 'rlt_jax[train]'"
    assert not (tmp_path / "new").exists()
