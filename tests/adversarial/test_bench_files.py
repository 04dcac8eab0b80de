"""Files that the benchmark cannot read or write.

PROTECTS: one line that names the option, and a measurement that is not lost because its file cannot be written.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rlt_jax import cli
from rlt_jax.bench import __main__ as bench


@pytest.mark.parametrize("content", [b"{", b"\xff\xfe", b"[]", None], ids=["cut", "no text", "list", "a folder"])
def test_a_folder_whose_config_is_no_config(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: bytes | None
) -> None:
    config = tmp_path / "config.json"
    if content is None:
        config.mkdir()
    else:
        config.write_bytes(content)
    with pytest.raises(SystemExit) as caught:
        bench.main(["load", "--folder", str(tmp_path)])
    assert caught.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "--folder: " in line
    assert str(tmp_path) in line


@pytest.mark.parametrize("known", [True, False], ids=["before", "after"])
def test_a_document_that_cannot_be_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, known: bool
) -> None:
    """Refused before anything is measured; if the path goes bad meanwhile, the document is still printed."""
    if not known:
        monkeypatch.setattr(cli, "check_output_file", lambda option, path: None)
    with pytest.raises(SystemExit) as caught:
        bench.main(["first-token", "--prompt", "4", "--out", str(tmp_path)])
    assert caught.value.code == 2
    printed = capsys.readouterr()
    assert (printed.out == "") == known
    if not known:
        assert json.loads(printed.out.splitlines()[-1])["valid"]
    (line,) = printed.err.splitlines()
    assert f"--out: {tmp_path} cannot be written" in line
