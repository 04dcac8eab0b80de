"""Device memory, on a real GPU.

PROTECTS: a GPU that another process fills is refused at once and by name, instead of failing after gigabytes were read.
"""

from __future__ import annotations

import subprocess
import sys

import jax
import pytest

from rlt_jax.platform import check_reservation, claim_device, set_memory_share
from tests.conftest import fixture_dir

pytestmark = pytest.mark.gpu


def test_the_share_is_reserved_and_a_second_process_that_asks_for_as_much_is_refused() -> None:
    set_memory_share(0.6)
    device = claim_device()
    stats = device.memory_stats()
    assert stats is not None
    assert stats["pool_bytes"] >= 0.99 * stats["bytes_limit"], "the name of the figure, which the check relies on"
    check_reservation("this", stats, preallocated=True)
    assert jax.devices()[0] == device
    command = [sys.executable, "-m", "rlt_jax.generate", "--model", str(fixture_dir("ouro_tiny")), "--prompt-ids", "1"]
    done = subprocess.run([*command, "--max-tokens", "1"], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (2, "")
    line = done.stderr.splitlines()[-1]
    assert line.startswith("rlt-generate: error: --memory-fraction: ")
    assert "another process holds the rest" in line
