"""The test session: strict, on the CPU unless told otherwise, and the same on every machine."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import hypothesis
import jax
import pytest

TESTS = Path(__file__).resolve().parent

# Mixing dtypes without saying so is how a bfloat16 path silently becomes float32.  (Rank promotion stays allowed:
# `[rows, width] * [width]` is how every norm and bias here is written.)
jax.config.update("jax_numpy_dtype_promotion", "strict")

# Compiled programs are shared by the test processes and kept between runs, in a folder that git ignores.
os.environ.setdefault("RLT_JAX_CACHE_DIR", str(TESTS.parent / ".pytest_cache" / "xla"))

# Programs under test compile while an example runs, so no time limit per example; the same examples every time, so
# that a failure in one run is a failure in the next.  HYPOTHESIS_PROFILE=thorough looks for new ones.
hypothesis.settings.register_profile("ci", deadline=None, max_examples=50, derandomize=True, database=None)
hypothesis.settings.register_profile("thorough", deadline=None, max_examples=1000)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


def fixture_dir(name: str) -> Path:
    """Folder of a committed fixture (a tiny checkpoint with its golden values), e.g. fixture_dir("ouro_tiny")."""
    folder = TESTS / "fixtures" / name
    if not folder.is_dir():
        raise FileNotFoundError(f"no fixture {name!r}; there are {sorted(p.name for p in folder.parent.iterdir())}")
    return folder


def pytest_configure(config: pytest.Config) -> None:
    """Run on the CPU, unless only tests/gpu was asked for or JAX_PLATFORMS says otherwise."""
    asked = [Path(config.invocation_params.dir, argument.partition("::")[0]).resolve() for argument in config.args]
    if "JAX_PLATFORMS" not in os.environ and not all(path.is_relative_to(TESTS / "gpu") for path in asked):
        jax.config.update("jax_platforms", "cpu")
        os.environ["JAX_PLATFORMS"] = "cpu"  # and so do the processes that tests start


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark by folder: what lies under tests/gpu needs a GPU, what lies under tests/deviceless its compiler."""
    compiler = importlib.util.find_spec("jax_cuda13_plugin") is not None
    for item in items:
        folder = item.path.relative_to(TESTS).parts[0]
        if folder == "gpu":
            item.add_marker(pytest.mark.gpu)
            if jax.default_backend() != "gpu":
                reason = f"needs an NVIDIA GPU, JAX runs on {jax.default_backend()}: make test-gpu"
                item.add_marker(pytest.mark.skip(reason=reason))
        elif folder == "deviceless":
            item.add_marker(pytest.mark.deviceless)
            if not compiler:
                item.add_marker(pytest.mark.skip(reason="needs the GPU compiler wheels: make deviceless"))
