"""The benchmark command.

PROTECTS: that scripts can parse its last line, that the floor is computed from the right bytes, and that the depths of
the committed trace are the ones described.  No time is asserted here.
"""

from __future__ import annotations

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlt_jax.bench import workload
from rlt_jax.bench.__main__ import _report, build_parser, main
from rlt_jax.bench.environment import source_hash
from rlt_jax.models.registry import model_from_config
from rlt_jax.models.spec import TensorSource
from rlt_jax.runtime.engine import LLMEngine

ROW = {"op", "slots", "context", "kv_layout", "milliseconds", "bytes", "floor_ms", "share_of_floor"}


def _document(capsys) -> dict:
    return json.loads(capsys.readouterr().out.strip().splitlines()[-1])


def test_tick_ends_with_one_json_document(capsys):
    assert main(["tick", "--model", "tiny", "--slots", "1,2", "--context", "24"]) == 0
    document = _document(capsys)
    assert {"schema_version", "environment", "copy_tb_s", "source_hash", "rows"} <= set(document)
    assert document["source_hash"] == source_hash()
    assert [row["slots"] for row in document["rows"]] == [1, 2]
    for row in document["rows"]:
        assert set(row) >= ROW
        assert row["op"] == "tick"
        assert row["milliseconds"] > 0
        assert row["share_of_floor"] == pytest.approx(row["floor_ms"] / row["milliseconds"])
        assert (row["compiles_in_window"], row["transfer_guard"]) == (0, "disallow")
        assert row["settings"] == {
            "dtype": "bfloat16", "page_size": 16, "prefill_chunk": 64, "round_ticks": 8, "boundary_batch": 1,
            "kernels": {"paged_attention": "reference", "kv_write": "reference"},
        }  # fmt: skip


def test_slots_that_would_have_to_wait_for_pages_are_refused(monkeypatch, capsys):
    full = LLMEngine.server_info

    def short_of_one_page(engine):
        info = full(engine)
        return {**info, "memory_plan": {**info["memory_plan"], "useful_pages": info["memory_plan"]["pages"] + 1}}

    monkeypatch.setattr(LLMEngine, "server_info", short_of_one_page)
    with pytest.raises(SystemExit) as stop:
        main(["tick", "--slots", "1", "--context", "24"])
    assert stop.value.code == 2
    assert "1 slots at 96 positions need 7 KV pages, 6 fit" in capsys.readouterr().err


def test_first_token(capsys):
    assert main(["first-token", "--prompt", "40"]) == 0
    (row,) = _document(capsys)["rows"]
    assert row["op"] == "first_token"
    assert len(row["all_ms"]) == 7
    assert (row["compiles_in_window"], row["transfer_guard"]) == (0, "disallow")


@pytest.mark.parametrize("out", [["--out", "{}"], ["--out={}"]])
def test_the_recorded_command_does_not_say_where_the_document_lies(out, tmp_path, capsys):
    file = tmp_path / "new" / "document.json"
    words = [word.format(file) for word in out]
    assert main(["first-token", *words, "--prompt", "20"]) == 0
    document = _document(capsys)
    assert document["command"] == "python -m rlt_jax.bench first-token --prompt 20"
    assert json.loads(file.read_text()) == document


@pytest.mark.parametrize(("copy", "code"), [(4.05, 3), (4.2, 0)])
def test_an_h200_that_copies_too_slowly_is_not_measured_on(copy, code, capsys):
    found = {"environment": {"device_kind": "NVIDIA H200"}, "model": "m", "copy_tb_s": copy, "rows": []}
    assert _report(build_parser().parse_args(["tick"]), ["tick"], found) == code
    printed = capsys.readouterr()
    assert json.loads(printed.out)["valid"] == (code == 0)
    assert ("INVALID: this H200 copies at 4.05 TB/s, below 4.1" in printed.err) == (code == 3)


def test_committed_trace_is_the_described_one():
    trace = workload.read_trace()
    assert trace == workload.make_trace()
    assert (len(trace), {len(row) for row in trace}) == (256, {128}), "2 x 128 requests of the closed form, 128 outputs"
    later = np.array([row[1:] for row in trace])
    assert {row[0] for row in trace} == {4}
    assert later.mean() == pytest.approx(2.5, abs=0.01)
    assert set(np.unique(later)) == {2, 3, 4}


def test_the_depth_of_an_open_ended_model_is_the_one_asked_for(monkeypatch, capsys):
    small = {**workload.SHAPES["huginn-0125"], "n_embd": 64, "n_heads": 4, "head_dim": 16, "intermediate_size": 96,
             "vocab_size": 256}  # fmt: skip
    monkeypatch.setitem(workload.SHAPES, "small", small)
    assert main(["tick", "--model", "small", "--depth-cap", "3", "--slots", "2", "--context", "16"]) == 0
    (row,) = _document(capsys)["rows"]
    assert (row["loops"], row["kv_planes"]) == (3, 3)
    with pytest.raises(SystemExit):
        main(["throughput", "--model", "small", "--depth-cap", "3", "--clients", "2"])
    assert "the trace is for models of 4 loops, this one runs 3" in capsys.readouterr().err


class _Shape(jax.ShapeDtypeStruct):
    @property
    def nbytes(self) -> int:
        return self.size * self.dtype.itemsize


@pytest.mark.parametrize(
    ("name", "loops", "expected"),
    [
        # a layer of 51,388,416 parameters, KV of a position and loop, a quarter of the head
        ("ouro-1.4b", 4, 24 * 51_388_416 * 2 + (32 * 512 + 32) * 196_608 + 49152 * 2048 * 2 / 4),
        ("ouro-2.6b", 4, 48 * 51_388_416 * 2 + (32 * 512 + 32) * 393_216 + 49152 * 2048 * 2 / 4),
        ("nanbeige4.2-3b", 2, 22 * 143_136_768 * 2 + (32 * 512 + 32) * 90_112 + 166144 * 3072 * 2 / 2),
        # four core blocks and the adapter in every tick; four blocks, their KV and the tied head once in eight
        (
            "huginn-0125",
            8,
            1_637_349_120 * 2
            + (32 * 512 + 32) * 4 * 21_120
            + (4 * 395_398_080 * 2 + (32 * 512 + 32) * 4 * 21_120 + 65536 * 5280 * 2) / 8,
        ),
    ],
)
def test_bytes_of_a_tick_at_real_size(name, loops, expected):
    model = model_from_config(workload.SHAPES[name])
    params = jax.tree.map(
        lambda s: _Shape(s.shape, jnp.bfloat16), model.sources(), is_leaf=lambda s: isinstance(s, TensorSource)
    )
    loaded = workload.load("tiny", "bfloat16")
    loaded = type(loaded)(**{**vars(loaded), "model": model, "params": params})
    assert workload.tick_bytes(loaded, 32 * 512, 32, loops) == expected


def test_help_names_every_model_that_has_random_weights():
    described = build_parser().format_help()
    assert [name for name in workload.SHAPES if name not in described] == []


@pytest.mark.parametrize(
    "bad",
    [
        ["tick", "--slots", "0"],
        ["tick", "--slots", "a"],
        ["tick", "--context", ""],
        ["tick", "--page-size", "8,16"],
        ["throughput", "--prompt", "0"],
    ],
)
def test_bad_numbers_are_refused(bad):
    with pytest.raises(SystemExit) as stop:
        build_parser().parse_args(bad)
    assert stop.value.code == 2
