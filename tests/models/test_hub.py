"""Finding a model: the bundled one, a directory, a repository at its revision.

PROTECTS: a name that is none of these is refused with what was expected, a revision is never ignored, and a machine
without a network is told what to do.
"""

from __future__ import annotations

import logging
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from rlt_jax.errors import CheckpointError
from rlt_jax.models import hub
from rlt_jax.models.checkpoint import load_checkpoint
from tests.models.checkpoint_files import (
    FIXTURE,
)


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    return


def test_bundled_model_or_a_clear_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "BUNDLED", tmp_path / "bundled")
    with pytest.raises(CheckpointError, match="the bundled model is not installed"):
        hub.find_model(None)
    shutil.copytree(FIXTURE, tmp_path / "bundled")
    assert load_checkpoint(None).name == "bundled"
    with pytest.raises(CheckpointError, match="revision 'main' applies to a repository id"):
        load_checkpoint(None, revision="main")


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("no-such-model", "no such directory, and not a repository id"),
        ("./a/b", "no such directory, and not a repository id"),
        ("/a/b", "no such directory, and not a repository id"),
        ("a/b/c", "no such directory, and not a repository id"),
        ("", "expected a model directory|not a repository id|config.json: missing"),
        (Path("owner/name"), "no such directory, and not a repository id"),
        ("x" * 5000, "not a usable path"),
        ("a\0b", "not a usable path|not a repository id"),
        (str(FIXTURE / "config.json"), "expected a model directory, found a file"),
    ],
)
def test_sources_that_are_no_model(source: str | Path, says: str) -> None:
    with pytest.raises(CheckpointError, match=says):
        load_checkpoint(source)


def test_a_directory_has_no_revision(directory: Path) -> None:
    with pytest.raises(CheckpointError, match="revision 'main' applies to a repository id"):
        load_checkpoint(directory, revision="main")


def hub_cache(root: Path, repo_id: str, commit: str, ref: str | None) -> Path:
    """huggingface_hub's own cache layout, holding the fixture."""
    repo = root / ("models--" + repo_id.replace("/", "--"))
    snapshot = repo / "snapshots" / commit
    snapshot.mkdir(parents=True)
    for name in ("config.json", "model.safetensors"):
        shutil.copyfile(FIXTURE / name, snapshot / name)
    if ref is not None:
        (repo / "refs").mkdir()
        (repo / "refs" / ref).write_text(commit)
    return snapshot


@pytest.mark.usefixtures("offline")
def test_repository_at_its_pinned_revision(tmp_path: Path) -> None:
    repo_id, commit = next(iter(hub.PINNED_REVISIONS.items()))
    snapshot = hub_cache(tmp_path, repo_id, commit, ref=None)
    found = hub.find_model(repo_id, cache_dir=tmp_path)
    assert (found.name, found.path.resolve()) == (repo_id, snapshot.resolve())
    assert load_checkpoint(found.path).parameter_count > 0


@pytest.mark.usefixtures("offline")
def test_other_repositories_take_main_and_say_which_commit(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    commit = "0123456789abcdef0123456789abcdef01234567"
    hub_cache(tmp_path, "someone/looped", commit, ref="main")
    with caplog.at_level(logging.INFO, logger="rlt_jax.models.hub"):
        assert hub.find_model("someone/looped", cache_dir=tmp_path).path.name == commit
    assert f"revision main is commit {commit}" in caplog.text


@pytest.mark.usefixtures("offline")
def test_no_network_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(
        CheckpointError, match=r"at revision 'v2' could not be downloaded: .*Connect to the network, or"
    ):
        hub.find_model("someone/looped", revision="v2", cache_dir=tmp_path)


def test_pinned_revisions_are_commits() -> None:
    assert all(re.fullmatch("[0-9a-f]{40}", commit) for commit in hub.PINNED_REVISIONS.values())
