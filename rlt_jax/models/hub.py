"""Finding a model: the bundled one, a directory, or a Hugging Face repository at a fixed revision.  No jax here."""

from __future__ import annotations

import dataclasses
import logging
import re
from pathlib import Path

from rlt_jax.errors import CheckpointError

log = logging.getLogger(__name__)

BUNDLED = Path(__file__).resolve().parent.parent / "bundled"

# Revisions that this version was written for.  A repository outside the table is taken at "main" unless the caller
# names a revision, and the commit that this was is logged.  A pin is a whole commit hash of which it is known that the
# files the loader reads are there:
#   huginn-0125: what "main" was in July and August 2026, with config, tokenizer and four shards of weights.  The other
#       known one, 972cea674c2f4ea37da6777ece1a0c9895c9998b, is what the retrofits' conversion scripts start from.
#   Nanbeige4.2-3B, the retrofits: released files have not been loaded yet, so no hash is pinned: taken at "main".
PINNED_REVISIONS = {
    "ByteDance/Ouro-1.4B": "574fa66cb8bf5abdc979642d01cf2b79b16bfab1",
    "ByteDance/Ouro-2.6B": "1ed04250da1a9936042725d302e81c8fa2ab5abd",
    "ByteDance/Ouro-1.4B-Thinking": "3aaa2224253a92ca45cf2e3d427c360e1ef9c93d",
    "tomg-group-umd/huginn-0125": "bb6621b65e90b6a4b9b29ef88dc83866d450470c",
}

# Only what the loader reads: no remote code, no second copy of the weights in another format.
FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "model.safetensors",
    "model.safetensors.index.json",
    "model-*.safetensors",
)
_REPO_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*/[A-Za-z0-9][A-Za-z0-9._-]*")


@dataclasses.dataclass(frozen=True)
class ModelSource:
    """A model directory and the name it goes by."""

    name: str
    path: Path


def find_model(source: str | Path | None, *, revision: str | None = None, cache_dir: Path | None = None) -> ModelSource:
    """Find the directory of a model, downloading it if it is a repository id.

    Args:
        source: None for the bundled model, a directory, or a repository id such as "ByteDance/Ouro-1.4B".
        revision: branch, tag or commit of a repository; only for a repository id.
        cache_dir: where downloads live; None is huggingface_hub's own cache.

    Raises:
        CheckpointError: there is no such directory, a revision of something that has none, or the download failed
            (offline, unknown, no access).
    """
    if source is None:
        if revision is not None:
            raise CheckpointError(f"revision {revision!r} applies to a repository id, this is the bundled model")
        if not BUNDLED.is_dir():
            raise CheckpointError(f"{BUNDLED}: the bundled model is not installed; name a model directory instead")
        return ModelSource("bundled", BUNDLED)
    path = Path(source)
    try:
        exists, is_dir = path.exists(), path.is_dir()
    except (OSError, ValueError) as error:  # too long a name, a NUL byte
        raise CheckpointError(f"model {str(source)!r:.200}: not a usable path: {error}") from error
    if exists:
        if not is_dir:
            raise CheckpointError(f"{path}: expected a model directory, found a file")
        if revision is not None:
            raise CheckpointError(f"{path}: revision {revision!r} applies to a repository id, this is a directory")
        return ModelSource(path.resolve().name, path)
    if isinstance(source, Path) or not _REPO_ID.fullmatch(source):
        raise CheckpointError(
            f"model {str(source)!r:.200}: no such directory, and not a repository id (expected owner/name)"
        )
    return ModelSource(source, _download(source, revision, cache_dir))


def _download(repo_id: str, revision: str | None, cache_dir: Path | None) -> Path:
    wanted = revision or PINNED_REVISIONS.get(repo_id, "main")
    advice = (
        "Connect to the network, or download the files elsewhere and give the directory instead of the repository id"
    )
    try:
        import huggingface_hub
    except ImportError as error:
        raise CheckpointError(f"model {repo_id!r}: huggingface_hub is not installed ({error}). {advice}") from error
    try:
        path = huggingface_hub.snapshot_download(
            repo_id, revision=wanted, allow_patterns=list(FILES), cache_dir=cache_dir
        )
    except Exception as error:  # its own errors, those of the HTTP client below it, and OSError have no common base
        reason = f"{type(error).__name__}: {error}".strip().splitlines()[0]
        raise CheckpointError(
            f"model {repo_id!r}: no such directory, and the repository at revision {wanted!r} could not be "
            f"downloaded: {reason:.300}. {advice}"
        ) from error
    directory = Path(path)
    log.info("model %s: revision %s is commit %s", repo_id, wanted, directory.name)
    return directory
