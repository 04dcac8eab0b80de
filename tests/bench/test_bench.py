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
from rlt_jax.bench.__main__ import build_parser, main
from rlt_jax.bench.environment import source_hash
from rlt_jax.models.registry import model_from_config
from rlt_jax.models.spec import TensorSource

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
        assert row["compiles_in_window"] == 0


def test_throughput_does_the_same_work_in_every_form(capsys):
    """Equal work first: the loops run are those of the trace, whatever the form."""
    assert main(["throughput", "--clients", "3", "--prompt", "12", "--outputs", "9"]) == 0
    rows = _document(capsys)["rows"]
    assert [(r["form"], r["depth"]) for r in rows] == [
        (form, depth) for form in ("steady", "peer", "closed") for depth in ("fixed", "trace")
    ]
    trace = workload.read_trace()
    for row in rows:
        requests = 6 if row["form"] == "closed" else 3
        fixed, given = requests * 8 * 4, sum(sum(depths[1:9]) for depths in trace[:requests])
        assert row["work_loops"] == (fixed if row["depth"] == "fixed" else given)
        assert row["tokens_per_second"] > 0


def test_first_token(capsys):
    assert main(["first-token", "--prompt", "40"]) == 0
    (row,) = _document(capsys)["rows"]
    assert row["op"] == "first_token"
    assert len(row["all_ms"]) == 7


def test_committed_trace_is_the_described_one():
    trace = workload.read_trace()
    assert trace == workload.make_trace()
    later = np.array([row[1:] for row in trace])
    assert {row[0] for row in trace} == {4}
    assert later.mean() == pytest.approx(2.5, abs=0.01)
    assert set(np.unique(later)) == {2, 3, 4}


def test_bytes_of_a_tick_at_real_size():
    """Ouro-1.4B: 2.4666 GB of core weights, 196,608 bytes of KV a position and loop, a quarter of the head."""
    model = model_from_config(workload.SHAPES["ouro-1.4b"])

    class Shape(jax.ShapeDtypeStruct):
        @property
        def nbytes(self) -> int:
            return self.size * self.dtype.itemsize

    params = jax.tree.map(
        lambda s: Shape(s.shape, jnp.bfloat16), model.sources(), is_leaf=lambda s: isinstance(s, TensorSource)
    )
    loaded = workload.load("tiny", "bfloat16")
    loaded = type(loaded)(**{**vars(loaded), "model": model, "params": params})
    expected = 24 * 51_388_416 * 2 + (32 * 512 + 32) * 196_608 + 49152 * 2048 * 2 / 4
    assert workload.tick_bytes(loaded, 32 * 512, 32, 4) == expected


@pytest.mark.parametrize("bad", [["--slots", "0"], ["--slots", "a"], ["--context", ""]])
def test_bad_lists_are_refused(bad):
    with pytest.raises(SystemExit) as stop:
        build_parser().parse_args(["tick", *bad])
    assert stop.value.code == 2
