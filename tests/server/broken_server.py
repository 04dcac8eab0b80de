"""A server whose device breaks for good after a few rounds: run by test_lifecycle.py as a process.

python -m tests.server.broken_server MODEL
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from rlt_jax.runtime.engine import LLMEngine
from server.app import ServerConfig, run
from tests.server.running import break_device, tiny_config


def make_engine() -> LLMEngine:
    engine = LLMEngine(Path(sys.argv[1]), tiny_config(max_waiting=8))
    break_device(engine, good_rounds=3)
    return engine


if __name__ == "__main__":
    sys.exit(asyncio.run(run(ServerConfig(port=0), make_engine)))
