"""Prints requirements out of pyproject.toml, quoted for a shell, so that the Makefile does not repeat them.

python scripts/requirements.py build-system      # what builds the package
python scripts/requirements.py EXTRA             # the requirements of one extra
"""

from __future__ import annotations

import shlex
import sys
import tomllib
from pathlib import Path

settings = tomllib.loads((Path(__file__).resolve().parent.parent / "pyproject.toml").read_text())
name = sys.argv[1]
found = (
    settings["build-system"]["requires"]
    if name == "build-system"
    else settings["project"]["optional-dependencies"][name]
)
sys.stdout.write(shlex.join(found) + "\n")
