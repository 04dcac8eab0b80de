"""Three forms of throughput, and what keeps a number that means nothing out of a document.

PROTECTS: whoever compares rates.  Every row did the work that was asked for, its window is the one its form names, its
bound follows from parts of the same engine, and a window that is empty, short, compiled in or unguarded has no rate.
"""

from __future__ import annotations

import json
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlt_jax.bench import measure, throughput, timeline, workload
from rlt_jax.bench.__main__ import main
from rlt_jax.bench.timeline import Timeline, guarded, refused, too_short

TRACE = workload.read_trace()
SIZE = ["--clients", "3", "--prompt", "12", "--round-ticks", "1"]


def _document(printed: str) -> dict:
    return json.loads(printed.strip().splitlines()[-1])


@pytest.fixture(scope="module")
def measured():
    """A small engine as the command makes it, warm."""
    loaded = workload.load("tiny", "bfloat16")
    with measure.engine(loaded, slots=2, prompt=12, outputs=16, round_ticks=1) as engine:
        yield engine


def test_every_form_does_the_work_asked_for_and_stands_beside_its_bound(capsys):
    assert main(["throughput", *SIZE, "--outputs", "20,24"]) == 0
    document = _document(capsys.readouterr().out)
    rows = document["rows"]
    assert document["valid"]
    assert [(r["outputs"], r["depth"], r["form"]) for r in rows] == [
        (outputs, depth, form)
        for outputs in (20, 24)
        for depth in ("fixed", "trace")
        for form in ("steady", "peer", "closed")
    ]
    rates = {(r["outputs"], r["form"], r["depth"]): r["tokens_per_second"] for r in rows}
    for row in rows:
        outputs, form = row["outputs"], row["form"]
        requests = 6 if form == "closed" else 3
        fixed, given = requests * (outputs - 1) * 4, sum(sum(depths[1:outputs]) for depths in TRACE[:requests])
        assert row["work_loops"] == row["asked_loops"] == (fixed if row["depth"] == "fixed" else given)
        assert row["mean_loops"] == pytest.approx(row["work_loops"] / (requests * (outputs - 1)))
        assert (row["compiles_in_window"], row["transfer_guard"]) == (0, "disallow")
        assert row["tokens_per_second"] == pytest.approx(row["tokens"] / row["window_seconds"])
        assert row["tick_ms"] == pytest.approx(1e3 * row["window_seconds"] / row["window_ticks"])
        if form == "closed":
            assert row["tokens"] == requests * outputs
            assert row["window_seconds"] == row["wall_seconds"]
            assert row["bound_seconds"] == pytest.approx(
                (requests * row["prefill_ms"] + row["ticks"] * row["full_tick_ms"]) / 1e3
            )
            assert row["over_bound"] == pytest.approx(row["wall_seconds"] / row["bound_seconds"])
            assert row["prefill_ms"] > 0
        else:
            assert 8 <= row["window_rounds"] <= row["window_ticks"] < row["ticks"]
            assert row["bound_tokens_per_second"] == pytest.approx(3e3 / (row["mean_loops"] * row["full_tick_ms"]))
            assert row["share_of_bound"] == pytest.approx(row["tokens_per_second"] / row["bound_tokens_per_second"])
        if row["depth"] == "trace":
            assert row["over_fixed"] == pytest.approx(row["tokens_per_second"] / rates[outputs, form, "fixed"])
        else:
            assert "over_fixed" not in row


def test_one_full_tick_serves_all_rows_also_where_the_steady_form_is_not_asked_for(capsys):
    assert main(["throughput", *SIZE, "--outputs", "16", "--form", "peer", "--depth", "trace"]) == 0
    (row,) = _document(capsys.readouterr().out)["rows"]
    assert (row["form"], row["depth"]) == ("peer", "trace")
    assert row["full_tick_ms"] > 0


def test_the_tick_is_measured_on_the_same_engine(capsys):
    words = ["throughput", *SIZE, "--outputs", "12", "--form", "peer", "--depth", "fixed", "--tick"]
    assert main(words) == 0
    tick, peer = _document(capsys.readouterr().out)["rows"]
    assert (tick["op"], tick["slots"], tick["context"]) == ("tick", 3, 12)
    assert tick["share_of_floor"] == pytest.approx(tick["floor_ms"] / tick["milliseconds"])
    assert peer["op"] == "throughput"


def test_a_short_window_has_no_rate_and_fails_the_run(capsys):
    """Two outputs: the steady window is one token a client, 4 ticks."""
    assert main(["throughput", *SIZE, "--outputs", "2", "--form", "steady", "--depth", "fixed"]) == 3
    printed = capsys.readouterr()
    document = _document(printed.out)
    (row,) = document["rows"]
    assert not document["valid"]
    assert "rounds" in row["invalid"] or "before the last first token" in row["invalid"]
    assert not set(row) & {"tokens_per_second", "tick_ms", "full_tick_ms", "share_of_bound", "bound_tokens_per_second"}
    assert f"INVALID: throughput (form steady, depth fixed, clients 3, outputs 2, prompt 12): {row['invalid']}" in (
        printed.err
    )


def test_depths_beyond_the_trace_are_refused(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["throughput", "--outputs", "129"])
    assert stop.value.code == 2
    assert "--outputs: the trace has 128 depths a request, found 129" in capsys.readouterr().err


def test_work_other_than_asked_for_is_no_measurement(measured, monkeypatch):
    prepare = throughput.prepare
    monkeypatch.setattr(throughput, "prepare", lambda engine, index, prompt, outputs, trace: prepare(
        engine, index, prompt, outputs, None
    ))  # fmt: skip
    bounds = throughput.Bounds(full_tick_ms=1.0, prefill_ms=1.0)
    run = throughput.execute(measured, clients=2, total=4, prompt=12, outputs=16, trace=TRACE)
    row = throughput.throughput(run, "closed", bounds)
    assert row["invalid"] == "4 of 4 requests did not get the exit depths they asked for"
    assert row["work_loops"] > row["asked_loops"]
    assert "tokens_per_second" not in row
    assert "over_bound" not in row


def test_prefill_of_a_prompt_costs_something_where_it_has_a_program(measured):
    assert throughput.prefill_ms(measured, 2, 12) > 0
    loaded = workload.load("tiny", "bfloat16")
    with measure.engine(loaded, slots=1, prompt=12, outputs=8, kv_layout="shared") as shared:
        assert throughput.prefill_ms(shared, 1, 12) == 0


# ---------------------------------------------------------------- windows, from a script


def _output(name: str, tokens: int, *, finished: bool = False) -> types.SimpleNamespace:
    return types.SimpleNamespace(
        request_id=name, token_ids=[1] * tokens, exit_depths=[4] * tokens, finished=finished, error=None
    )


class _Scripted:
    """An engine whose steps are given: (ticks, idle rows x ticks, outputs); one round each."""

    def __init__(self, *steps) -> None:
        self._steps = list(steps)
        self._stats = {"rounds": 0, "ticks": 0, "idle_row_ticks": 0}

    def stats(self) -> dict[str, int]:
        return dict(self._stats)

    def step(self) -> list:
        ticks, idle, outputs = self._steps.pop(0)
        self._stats["rounds"] += 1
        self._stats["ticks"] += ticks
        self._stats["idle_row_ticks"] += idle
        return outputs

    def has_work(self) -> bool:
        return bool(self._steps)


def _line(*steps) -> Timeline:
    line = Timeline(_Scripted(*steps))
    line.drain()
    for i, sample in enumerate(line.samples):  # a clock of its own: one second a step
        line.samples[i] = timeline.Sample(**{**vars(sample), "at": float(i)})
    return line


def test_a_window_counts_what_came_after_its_first_step_up_to_its_last():
    line = _line(
        (1, 1, [_output("a", 1)]),
        (2, 1, [_output("a", 1), _output("b", 1)]),  # the last first token
        (4, 0, [_output("a", 1), _output("b", 1)]),
        (0, 0, []),
        (2, 1, [_output("a", 1, finished=True), _output("b", 1)]),  # the first finish
        (2, 3, [_output("b", 1, finished=True)]),
    )
    assert line.last_first_token() == 2
    window = line.window(2, 5)
    assert (window.seconds, window.tokens, window.rounds, window.ticks, window.idle_row_ticks) == (3.0, 4, 3, 6, 1)
    assert window.tick_seconds == [1 / 4, 1 / 2], "a step without ticks is nobody's tick"
    assert too_short(window) == "the window holds 3 rounds, fewer than 8: raise --outputs"
    assert throughput._refusal("steady", line, window, 2) == too_short(window)


def test_streams_that_never_ran_together_are_named():
    """What 128 clients did: the first request ended before the last prompt had run."""
    line = _line(
        (1, 1, [_output("a", 1)]),
        (1, 1, [_output("a", 1, finished=True)]),
        (1, 1, []),
        (1, 1, [_output("b", 1)]),
        *[(1, 1, [_output("b", 1)])] * 9,
        (1, 1, [_output("b", 1, finished=True)]),
    )
    first = line.last_first_token()
    empty = line.window(first, min(line.finished.values()))
    assert (empty.seconds, empty.tokens, empty.rounds) == (0.0, 0, 0)
    for form, window in (("steady", empty), ("peer", line.window(first, 14))):
        reason = throughput._refusal(form, line, window, first)
        assert reason is not None
        assert reason.startswith("1 of 2 requests finished before the last first token (the first one 2.000 s earlier)")
    assert throughput._refusal("closed", line, line.window(0, 14), 0) is None


# ---------------------------------------------------------------- guards


def test_a_planted_transfer_and_a_planted_retrace_do_not_pass_the_guard():
    double = jax.jit(lambda x: x * 2)
    compiled, here = double.lower(jnp.ones(3)).compile(), np.ones(3, np.float32)
    with guarded():
        compiled(jax.device_put(here))
    with guarded(), pytest.raises(Exception, match="(?i)disallowed host-to-device transfer"):
        compiled(here)
    with guarded(), pytest.raises(RuntimeError, match="tracing"):
        double(jax.device_put(here))


def test_a_step_without_the_guard_and_a_compile_in_the_window_leave_no_rate():
    line = _line((1, 0, [_output("a", 1, finished=True)]))
    assert line.guards() == {"compiles_in_window": 0, "transfer_guard": "off"}
    row = {"op": "x", "rate": 1.0, "compiles_in_window": 0, "transfer_guard": "disallow"}
    assert refused(row, None, ("rate",)) == row
    unguarded, compiled = {**row, "transfer_guard": "off"}, {**row, "compiles_in_window": 2}
    assert refused(unguarded, None, ("rate",)) == {
        "op": "x", "compiles_in_window": 0, "transfer_guard": "off", "invalid": "a step ran without the transfer guard",
    }  # fmt: skip
    assert refused(compiled, None, ("rate",))["invalid"] == "2 programs were compiled in the timed window"


def test_compiles_are_counted():
    line = Timeline(_Scripted())
    jax.jit(lambda x: x * 3 + 5)(jnp.ones(7))
    assert line.compiles >= 1
