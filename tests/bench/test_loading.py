"""Loading a checkpoint in a fresh process.

PROTECTS: the memory figure.  The files are those a published checkpoint has, the sampler sees a peak that comes and
goes in another process, and loading needs no second copy of the parameters.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

from rlt_jax.bench import loading, workload
from rlt_jax.bench.__main__ import main
from rlt_jax.models.checkpoint import load_checkpoint
from rlt_jax.models.registry import model_from_config

MEDIUM = {**workload.SHAPES["tiny"], "num_hidden_layers": 12, "hidden_size": 512, "num_attention_heads": 8,
          "num_key_value_heads": 8, "head_dim": 64, "intermediate_size": 1408, "vocab_size": 4096}  # fmt: skip


def test_the_document_of_a_load(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "model"
    assert main(["load", "--folder", str(folder)]) == 0
    document = json.loads(capsys.readouterr().out.strip().splitlines()[-1])
    (row,) = document["rows"]
    assert document["valid"]
    assert document["copy_tb_s"] > 0
    assert document["model"] == "tiny (random weights)"
    assert row["checkpoint_bytes"] == (folder / "model.safetensors").stat().st_size
    assert row["parameter_bytes"] == load_checkpoint(folder).parameter_bytes
    assert row["gb_per_s"] == pytest.approx(row["checkpoint_bytes"] / row["seconds"] / 1e9)
    excess = row["anon_peak"] - row["anon_before"] - row["parameters_in_host_bytes"]
    assert row["ratio"] == pytest.approx(excess / row["checkpoint_bytes"])
    assert row["anon_peak"] >= row["anon_after"]
    assert 0 <= row["anon_reserving"] <= row["anon_before"]
    assert row["written"]
    assert (row["device_bytes"], row["compiles_in_window"]) == (None, 0)


def test_files_are_those_of_a_published_checkpoint(tmp_path: Path) -> None:
    assert loading.write_checkpoint("tiny", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    sources = jax.tree.leaves(model_from_config(workload.SHAPES["tiny"]).sources())
    assert set(tensors) == {name for source in sources for name in source.names}
    assert "model.layers.1.self_attn.q_proj.weight" in tensors
    values = np.concatenate([tensor.astype(np.float32).ravel() for tensor in tensors.values()])
    assert np.isfinite(values).all()
    assert (values == 0).mean() < 0.01, "random, not zeros"
    loaded = load_checkpoint(tmp_path)
    assert loaded.model == model_from_config(workload.SHAPES["tiny"])
    np.testing.assert_array_equal(loaded.params.head, tensors["lm_head.weight"])
    assert loaded.tokenizer is None


def test_a_written_model_is_used_again_and_nothing_else_is_written_over(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    assert loading.write_checkpoint("tiny", folder)
    stamp = (folder / "model.safetensors").stat().st_mtime_ns
    assert not loading.write_checkpoint("tiny", folder)
    assert (folder / "model.safetensors").stat().st_mtime_ns == stamp
    with pytest.raises(loading.InvalidConfig, match="holds something other than ouro-1.4b"):
        loading.write_checkpoint("ouro-1.4b", folder)
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "mine.txt").write_text("mine")
    with pytest.raises(loading.InvalidConfig, match="name an empty folder"):
        loading.write_checkpoint("tiny", tmp_path / "notes")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ([], "--folder: tiny has no files of its own"),
        (["--model", "/nowhere/at/all", "--folder", "x"], "--folder: is for a model with random weights"),
        (["--model", "/nowhere/at/all"], "/nowhere/at/all: the process that loads ended with code 2"),
    ],
)
def test_what_cannot_be_loaded_is_one_line(words: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["load", *words])
    assert stop.value.code == 2
    assert says in capsys.readouterr().err


def test_the_sampler_sees_a_peak_that_comes_and_goes() -> None:
    program = (
        "import sys, time; print(flush=True); sys.stdin.readline()\n"
        "block = bytearray(b'x') * 80_000_000; time.sleep(0.1); del block\n"
        "print(flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        child.stdout.readline()
        before = loading.memory(child.pid)["anon"]
        with loading.Sampler(child.pid) as sampler:
            child.stdin.write("go\n")
            child.stdin.flush()
            child.stdout.readline()
        after = loading.memory(child.pid)["anon"]
        child.stdin.close()
    assert sampler.peak["anon"] - before >= 80_000_000
    assert after - before < 8_000_000, "gone again: only a sampler saw it"


def test_loading_holds_no_second_copy_of_the_parameters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """85 MB in parameters of at most 4 MB.  A second copy of them all would be a ratio of 1."""
    monkeypatch.setitem(workload.SHAPES, "medium", MEDIUM)
    row, facts = loading.load("medium", "bfloat16", tmp_path / "model")
    assert facts["environment"]["platform"] == "cpu"
    assert row["checkpoint_bytes"] > 80_000_000
    assert row["anon_peak"] - row["anon_before"] > 0.9 * row["parameter_bytes"], "on a CPU the parameters are in there"
    assert row["ratio"] <= 0.3
