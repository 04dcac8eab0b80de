"""Writes constraints.txt: one name==version line for everything that any install of this project resolves to.

    make constraints

Resolves the project with each extra (the two CUDA generations separately: they exclude nothing, but a machine has one)
and merges the answers.  Nothing is installed.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
HEADER = """\
# What the project was developed and tested with.  Written by `make constraints`; edit the holds in scripts/lock.py.
"""
# Held back on purpose; everything else is the newest release that fits.
HOLDS = {
    "jax": "0.11.2",  # the version of the recorded GPU measurements
    "jaxlib": "0.11.2",
    "triton": "3.6.0",  # jax-triton and triton go in pairs, and this is the pair that was run on the H200
    "jax-triton": "0.3.1",
}
RESOLUTIONS = (
    ("train", "test", "triton", "cuda13"),
    ("train", "test", "triton", "cuda12"),
)  # deviceless is a part of cuda13


def canonical(name: str) -> str:
    """Package name in the spelling that PEP 503 compares."""
    return re.sub(r"[-_.]+", "-", name).lower()


def resolve(requirements: list[str]) -> dict[str, str]:
    """Ask pip what it would install into an empty environment: canonical name -> version."""
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as holds:
        holds.writelines(f"{name}=={version}\n" for name, version in HOLDS.items())
        holds.flush()
        options = ["--dry-run", "--ignore-installed", "--quiet", "--report", "-", "-c", holds.name]
        command = [sys.executable, "-m", "pip", "install", *options, *requirements]
        report = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
    return {canonical(entry["metadata"]["name"]): entry["metadata"]["version"] for entry in report["install"]}


def main() -> None:
    """Resolve every combination and rewrite the file."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    project, build = settings["project"], settings["build-system"]["requires"]
    versions: dict[str, str] = {}
    for extras in RESOLUTIONS:
        wanted = [*project["dependencies"], *build]
        for extra in extras:
            wanted += project["optional-dependencies"][extra]
        for name, version in resolve(wanted).items():
            if versions.setdefault(name, version) != version:
                raise SystemExit(f"error: {name} resolves to {versions[name]} and to {version} with {extras}")
    lines = [f"{name}=={version}\n" for name, version in sorted(versions.items())]
    (ROOT / "constraints.txt").write_text(HEADER + "".join(lines))
    sys.stdout.write(f"constraints.txt: {len(lines)} packages\n")


if __name__ == "__main__":
    main()
