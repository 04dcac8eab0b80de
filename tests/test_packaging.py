"""Set-up.  PROTECTS: two commands on a bare machine; a wheel that holds stubs, model files and console scripts.

The interpreter search runs against folders of small fake shims, so that it is tested on every machine alike.
"""

from __future__ import annotations

import configparser
import os
import re
import runpy
import shutil
import subprocess
import sys
import time
import tomllib
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent
SETTINGS = tomllib.loads((ROOT / "pyproject.toml").read_text())
# What the scripts may use besides the shell itself.
COREUTILS = ("sh", "tail", "head", "timeout", "grep")


@pytest.fixture
def bare(tmp_path):
    """A PATH that holds coreutils and nothing else, and an empty home."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "home").mkdir()
    for tool in COREUTILS:
        (tmp_path / "bin" / tool).symlink_to(shutil.which(tool))
    return tmp_path


def shim(path: Path, body: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)


def python_shim(path: Path, version: str) -> None:
    """Answers the search's probe like a Python of that version that lies at `path`."""
    new = tuple(int(part) for part in version.split(".")[:2]) >= (3, 12)
    shim(path, f"echo '{f'ok {version} {path}' if new else f'old {version}'}'")


def run_script(name: str, bare: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    environment = {"PATH": str(bare / "bin"), "HOME": str(bare / "home"), **environment}
    command = [str(bare / "bin" / "sh"), str(ROOT / "scripts" / name)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)


def test_failing_shims_are_passed_over(bare):
    """A version manager's shim exists for a version that is not selected, and only fails."""
    python_shim(bare / "bin/python3", "3.11.7")
    shim(bare / "bin/python3.12", "echo 'pyenv: python3.12: command not found' >&2; exit 127")
    wanted = bare / "home/.pyenv/versions/3.12.1/bin/python3"
    python_shim(wanted, "3.12.1")
    python_shim(bare / "home/.pyenv/versions/3.13.0/bin/python3", "3.13.0")
    result = run_script("find_python.sh", bare)
    assert (result.returncode, result.stdout.strip()) == (0, str(wanted))


@pytest.mark.parametrize(
    ("versions", "chosen"),
    [
        ({"python3": "3.14.0", "python3.13": "3.13.2"}, "python3.13"),
        ({"python3": "3.13.2", "python3.12": "3.12.9", "python3.14": "3.14.0"}, "python3.12"),
        ({"python3": "3.12.4", "python3.12": "3.12.9"}, "python3"),
        ({"python3": "3.15.0"}, "python3"),
        ({"python": "3.12.0"}, "python"),
    ],
)
def test_preferred_version(bare, versions, chosen):
    """3.12 before 3.13 before 3.14 before what is newer; of equals the first on the list."""
    for name, version in versions.items():
        python_shim(bare / "bin" / name, version)
    result = run_script("find_python.sh", bare)
    assert (result.returncode, result.stdout.strip()) == (0, str(bare / "bin" / chosen))


def test_pyenv_root_is_searched(bare):
    wanted = bare / "py env/versions/3.12.7/bin/python3"  # the blank is meant
    python_shim(wanted, "3.12.7")
    result = run_script("find_python.sh", bare, PYENV_ROOT=str(bare / "py env"))
    assert (result.returncode, result.stdout.strip()) == (0, str(wanted))


def test_no_fitting_python_is_one_line(bare):
    python_shim(bare / "bin/python3", "3.11.7")
    shim(bare / "bin/python3.12", "exit 127")
    shim(bare / "bin/python3.13", "echo novenv 3.13.5")
    result = run_script("find_python.sh", bare)
    assert result.returncode != 0
    assert result.stdout == ""
    assert result.stderr.count("\n") == 1
    for part in ("3.12 is needed", "python3 is 3.11.7", "python3.12 does not run", "3.13.5 but lacks the venv module"):
        assert part in result.stderr


def test_no_python_at_all(bare):
    result = run_script("find_python.sh", bare)
    assert result.returncode != 0
    assert "no Python at all" in result.stderr


def test_python_variable_overrides(bare):
    """An explicit choice is taken, or refused; never replaced by something else."""
    python_shim(bare / "bin/python3.12", "3.12.1")
    other = bare / "else where/python"
    python_shim(other, "3.13.9")
    assert run_script("find_python.sh", bare, PYTHON=str(other)).stdout.strip() == str(other)
    python_shim(other, "3.10.2")
    refused = run_script("find_python.sh", bare, PYTHON=str(other))
    assert refused.returncode != 0
    assert "is 3.10.2" in refused.stderr


def test_real_interpreters_answer_the_probe(bare):
    """The fakes above only stand for something if a real Python answers in the same words."""
    result = run_script("find_python.sh", bare, PYTHON=sys.executable)
    assert result.returncode == 0, result.stderr
    version = subprocess.check_output([result.stdout.strip(), "-c", "import sys; print(*sys.version_info[:2])"])
    assert tuple(map(int, version.split())) == sys.version_info[:2]


@pytest.mark.parametrize(
    ("driver", "extra"),
    [("580.159.04", "cuda13"), ("610.1", "cuda13"), ("579.99", "cuda12"), ("525.60.13", "cuda12"), ("470.1", "")],
)
def test_accelerator_follows_the_driver(bare, driver, extra):
    shim(bare / "bin/nvidia-smi", f"echo {driver}; echo {driver}")
    assert run_script("accelerator.sh", bare).stdout.strip() == extra


@pytest.mark.parametrize("body", ["echo 'NVIDIA-SMI has failed' ; exit 9", "exit 127", None])
def test_no_accelerator_without_a_driver(bare, body):
    if body is not None:
        shim(bare / "bin/nvidia-smi", body)
    result = run_script("accelerator.sh", bare)
    assert (result.returncode, result.stdout) == (0, "")


@pytest.fixture(scope="session")
def source_copy(tmp_path_factory):
    """What a fresh clone has: no stubs, no environment."""
    copy = tmp_path_factory.mktemp("source")
    ignore = shutil.ignore_patterns("__pycache__", "*.pyc")
    for name in ("rlt_jax", "server", "protos", "scripts"):
        shutil.copytree(ROOT / name, copy / name, ignore=ignore)
    for name in ("pyproject.toml", "LICENSE", "README.md", "Makefile", "constraints.txt", ".gitignore"):
        shutil.copy(ROOT / name, copy / name)
    return copy


@pytest.fixture(scope="session")
def wheel(source_copy, tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(command, cwd=source_copy, check=True, timeout=300)
    (path,) = folder.glob("*.whl")
    with zipfile.ZipFile(path) as archive:
        yield archive


def test_wheel_holds_the_three_packages_and_nothing_else(wheel):
    tops = {name.split("/")[0] for name in wheel.namelist()}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"rlt_jax", "server", "rlt"}


def test_wheel_holds_every_stub(wheel):
    """Git ignores the generated package; the wheel must not."""
    names = set(wheel.namelist())
    protos = sorted((ROOT / "protos/rlt/v1").glob("*.proto"))
    assert protos
    for proto in protos:
        for suffix in ("_pb2.py", "_pb2.pyi", "_pb2_grpc.py"):
            assert f"rlt/v1/{proto.stem}{suffix}" in names
    assert {"rlt/__init__.py", "rlt/v1/__init__.py", "rlt_jax/py.typed"} <= names


def test_wheel_holds_every_file_of_our_packages(wheel):
    """Model files and training data too, which are not Python."""
    names = set(wheel.namelist())
    ours = [path for name in ("rlt_jax", "server") for path in (ROOT / name).rglob("*") if path.is_file()]
    missing = [str(path.relative_to(ROOT)) for path in ours if "__pycache__" not in path.parts]
    assert [name for name in missing if name not in names] == []


def test_wheel_installs_the_console_scripts(wheel):
    (name,) = [name for name in wheel.namelist() if name.endswith("entry_points.txt")]
    parser = configparser.ConfigParser()
    parser.read_string(wheel.read(name).decode())
    scripts = dict(parser["console_scripts"])
    assert scripts == {"rlt-server": "server.__main__:main", "rlt-generate": "rlt_jax.generate:main"}
    for target in scripts.values():
        module, _, function = target.partition(":")
        subprocess.run([sys.executable, "-c", f"from {module} import {function}"], cwd=ROOT, check=True, timeout=120)


def test_stubs_are_replaced_as_a_whole(tmp_path):
    """A changed .proto gives new stubs and a deleted one leaves none behind."""
    folder = tmp_path / "protos/rlt/v1"
    folder.mkdir(parents=True)
    (tmp_path / "scripts").mkdir()
    shutil.copy(ROOT / "scripts/build_hook.py", tmp_path / "scripts")
    generate = [sys.executable, str(tmp_path / "scripts/build_hook.py")]
    head = 'syntax = "proto3"; package rlt.v1; '
    (folder / "one.proto").write_text(head + "message One { optional uint32 old = 1; }")
    (folder / "two.proto").write_text(head + 'import "rlt/v1/one.proto"; message Two { One one = 1; }')
    subprocess.run(generate, check=True, timeout=60, stdout=subprocess.DEVNULL)
    assert (tmp_path / "rlt/v1/two_pb2.py").exists()
    (folder / "two.proto").unlink()
    (folder / "one.proto").write_text(head + "message One { optional uint32 fresh = 1; }")
    subprocess.run(generate, check=True, timeout=60, stdout=subprocess.DEVNULL)
    assert not (tmp_path / "rlt/v1/two_pb2.py").exists()
    assert "fresh" in (tmp_path / "rlt/v1/one_pb2.pyi").read_text()
    assert {path.name for path in tmp_path.iterdir()} == {"protos", "rlt", "scripts"}  # no temporary folder left

    (folder / "one.proto").write_text("this is not a .proto")
    failed = subprocess.run(generate, timeout=60, capture_output=True)
    assert failed.returncode != 0
    assert "fresh" in (tmp_path / "rlt/v1/one_pb2.pyi").read_text()  # the last good stubs stay


def pinned() -> dict[str, str]:
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
    for line in lines:
        assert re.fullmatch(r"[a-z0-9-]+==[0-9][A-Za-z0-9.+!]*", line), f"not a plain name==version line: {line!r}"
    return dict(line.split("==") for line in lines)


def test_constraints_cover_and_satisfy_every_requirement():
    versions = pinned()
    project = SETTINGS["project"]
    requirements = [*project["dependencies"], *SETTINGS["build-system"]["requires"]]
    for extra in project["optional-dependencies"].values():
        requirements += extra
    for requirement in map(Requirement, requirements):
        version = versions[canonicalize_name(requirement.name)]
        assert requirement.specifier.contains(version), f"{requirement} excludes the pinned {version}"


def test_make_constraints_resolves_the_extras_there_are():
    """`deviceless` is a part of what cuda13 installs; every other extra is in some resolution."""
    resolutions = runpy.run_path(str(ROOT / "scripts" / "lock.py"), run_name="lock")["RESOLUTIONS"]
    assert set().union(*resolutions) == set(SETTINGS["project"]["optional-dependencies"]) - {"deviceless"}


def test_generator_is_not_newer_than_the_runtime():
    """Generated code refuses to load on a runtime older than its generator."""
    versions = {name: tuple(map(int, version.split("."))) for name, version in pinned().items() if "grpc" in name}
    assert versions["grpcio-tools"] <= versions["grpcio"]
    generators = Requirement(next(r for r in SETTINGS["build-system"]["requires"] if "tools" in r)).specifier
    runtime = Requirement(next(r for r in SETTINGS["project"]["dependencies"] if re.match(r"grpcio\b[>=]", r)))
    newest_generator = next(item.version for item in generators if item.operator == "<=")
    oldest_runtime = next(item.version for item in runtime.specifier if item.operator == ">=")
    assert tuple(map(int, newest_generator.split("."))) <= tuple(map(int, oldest_runtime.split(".")))


def make(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}
    command = ["make", "ACCELERATOR=cpu", "VENV=env", *arguments]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=120)


def test_make_installs_once_and_again_when_a_proto_changes(source_copy, tmp_path):
    """`make -q` answers 0 if nothing is to be done and 1 if something is."""
    tree = tmp_path / "tree"
    shutil.copytree(source_copy, tree)
    assert make(tree, "-q", "install").returncode == 1
    (tree / "env/bin").mkdir(parents=True)
    (tree / "env/bin/python").symlink_to(sys.executable)
    (tree / "env/.installed-cpu").touch()
    assert make(tree, "-q", "install").returncode == 0
    later = time.time() + 10
    os.utime(next((tree / "protos/rlt/v1").glob("*.proto")), (later, later))
    assert make(tree, "-q", "install").returncode == 1


def test_make_refuses_an_unknown_accelerator(source_copy):
    result = make(source_copy, "ACCELERATOR=tpu", "install")
    assert result.returncode != 0
    assert 'ACCELERATOR must be cpu, cuda12 or cuda13, found "tpu"' in result.stderr


def test_make_passes_the_missing_python_on(source_copy, tmp_path):
    """The one-line error reaches the user, and no half-made environment stays."""
    result = make(source_copy, f"VENV={tmp_path / 'env'}", "PYTHON=/nonexistent/python", "install")
    assert result.returncode != 0
    assert "Python >= 3.12 is needed" in result.stderr
    assert not (tmp_path / "env").exists()


def test_make_help_names_every_target(source_copy):
    text = make(source_copy, "help").stdout
    for target in ("demo", "test", "lint", "format", "deviceless", "clean"):
        assert re.search(rf"make {target} +\S", text), f"{target} is not explained"
