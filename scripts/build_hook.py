"""Generates the gRPC stubs: package `rlt` from protos/rlt.  Runs inside every wheel and editable build.

The stubs are never committed: they only load on a grpcio and protobuf at least as new as the tools that wrote them, so
each installation generates its own.  `python scripts/build_hook.py` does the same by hand in a source tree.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

PACKAGE = "rlt"


def generate_stubs(root: Path) -> list[Path]:
    """Write `root`/rlt from `root`/protos/rlt/**/*.proto and return the files written.

    The old package is replaced as a whole, so that stubs of a deleted .proto do not live on.
    """
    from grpc_tools import protoc

    protos = sorted((root / "protos" / PACKAGE).rglob("*.proto"))
    if not protos:
        raise FileNotFoundError(f"no .proto files under {root / 'protos' / PACKAGE}")
    well_known = Path(protoc.__file__).parent / "_proto"
    with tempfile.TemporaryDirectory(dir=root, prefix=".stubs-") as folder:
        arguments = [f"--{kind}_out={folder}" for kind in ("python", "pyi", "grpc_python")]
        includes = [f"-I{root / 'protos'}", f"-I{well_known}"]
        status = protoc.main(["protoc", *includes, *arguments, *map(str, protos)])
        if status != 0:
            raise RuntimeError(f"protoc failed with status {status}; its messages are above")
        package = Path(folder) / PACKAGE
        for directory in [package, *(path for path in package.rglob("*") if path.is_dir())]:
            (directory / "__init__.py").write_text(
                f'"""Generated from protos/{PACKAGE} by the build; do not edit."""\n'
            )
        target = root / PACKAGE
        shutil.rmtree(target, ignore_errors=True)
        shutil.move(package, target)
    return sorted(path for path in target.rglob("*") if path.is_file())


class CustomBuildHook(BuildHookInterface):
    """hatchling's entry point."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Generate before hatchling collects files; for editable installs the package then lies in the source tree."""
        generate_stubs(Path(self.root))


if __name__ == "__main__":
    for written in generate_stubs(Path(__file__).resolve().parent.parent):
        sys.stdout.write(f"{written}\n")
