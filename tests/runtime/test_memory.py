"""How many pages a server gets.

PROTECTS: an operator who reads the memory plan: its numbers add up, what does not fit is refused by name before the
device refuses it, and nothing is promised that somebody else already uses.
"""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rlt_jax import EngineConfig, LLMEngine
from rlt_jax.config import KVLayoutKind
from rlt_jax.errors import InvalidConfig
from rlt_jax.kvcache.layout import KVLayout
from rlt_jax.runtime import runner
from rlt_jax.runtime.memory import MAX_ARRAY_ELEMENTS, SLACK_BYTES, MemoryPlan, plan_memory

GIB = 1 << 30
LAYOUT = KVLayout.create(
    KVLayoutKind.LAST_EXITED, max_loops=4, page_size=64, kv_heads=16, head_dim=128, num_layers=24, dtype_bytes=2
)  # Ouro-1.4B: 48 MiB a page


def plan(**changes: int | None) -> MemoryPlan:
    """An H200's worth of memory and 32 slots of 4,096 positions unless the test says otherwise."""
    settings: dict = {
        "requested_pages": None,
        "slots": 32,
        "max_context": 4096,
        "parameter_bytes": 3 * GIB,
        "used_bytes": 3 * GIB,
        "scratch_bytes": GIB,
        "device_limit_bytes": 128 * GIB,
    }
    return plan_memory(LAYOUT, **settings | changes)


def test_a_page_of_the_real_model() -> None:
    assert LAYOUT.bytes_per_page == 48 << 20


def test_slots_at_full_context_where_they_fit() -> None:
    found = plan()
    assert (found.source, found.pages, found.useful_pages) == ("device_memory", 2048, 2048)
    assert found.kv_bytes == 96 * GIB


@pytest.mark.parametrize("used", [3 * GIB, 70 * GIB])
def test_what_is_left_where_they_do_not_and_the_numbers_add_up(used: int) -> None:
    found = plan(device_limit_bytes=80 * GIB, used_bytes=used)
    free = found.device_limit_bytes - found.used_bytes - found.reserved_bytes - found.kv_bytes
    assert found.reserved_bytes == GIB + SLACK_BYTES
    assert 0 <= free < found.bytes_per_page, "not a page more would fit"
    assert found.pages < found.useful_pages


def test_a_context_that_does_not_fit_is_refused_by_name() -> None:
    least = 64 * LAYOUT.bytes_per_page  # one slot
    assert plan(device_limit_bytes=3 * GIB + GIB + SLACK_BYTES + least).pages == 64
    with pytest.raises(
        InvalidConfig, match=r"max_context=4096 needs 3,221,225,472 bytes of KV; 3,221,225,471 are left"
    ):
        plan(device_limit_bytes=3 * GIB + GIB + SLACK_BYTES + least - 1)


def test_pages_asked_for_are_given_or_refused() -> None:
    assert (plan(requested_pages=100).source, plan(requested_pages=100).pages) == ("kv_pages", 100)
    with pytest.raises(InvalidConfig, match="kv_pages=3000 needs .* are left of .*: lower kv_pages"):
        plan(requested_pages=3000)


def test_without_a_limit_every_slot_gets_its_context() -> None:
    found = plan(device_limit_bytes=None)
    assert (found.source, found.pages, found.reserved_bytes) == ("host_default", 2048, 0)


def test_a_cpu_is_not_asked_for_more_than_it_has() -> None:
    needed = 2048 * LAYOUT.bytes_per_page
    assert plan(device_limit_bytes=None, host_available_bytes=needed).pages == 2048
    with pytest.raises(InvalidConfig, match="slots=.* at max_context=4096 need .* available: lower slots"):
        plan(device_limit_bytes=None, host_available_bytes=needed - 1)
    with pytest.raises(InvalidConfig, match="lower slots, max_context or kv_pages"):
        plan(device_limit_bytes=None, requested_pages=2000, host_available_bytes=1 << 20)


def test_one_layer_s_array_stays_addressable_with_32_bits() -> None:
    elements = 4 * 16 * 64 * 128
    most = MAX_ARRAY_ELEMENTS // elements
    assert plan(device_limit_bytes=None, slots=4096).pages == most == 4095
    whole = most * 64
    assert plan(device_limit_bytes=None, slots=1, max_context=whole).pages == most
    with pytest.raises(
        InvalidConfig, match=r"needs 4096 KV pages; 4095 are the most .* lower max_context, or the depth"
    ):
        plan(device_limit_bytes=None, slots=1, max_context=whole + 1)
    with pytest.raises(InvalidConfig, match="kv_pages=4096 exceeds 4095"):
        plan(device_limit_bytes=None, requested_pages=4096)


def test_the_plan_is_json_able() -> None:
    found = plan()
    assert found.as_dict() == {**dataclasses.asdict(found), "kv_bytes": found.kv_bytes}
    assert all(value is None or isinstance(value, str | int) for value in found.as_dict().values())


# ---------------------------------------------------------------- what an engine makes of it


ROOT = Path(__file__).parents[2]
FIXTURE = ROOT / "tests" / "fixtures" / "ouro_tiny"


def test_programs_that_need_more_scratch_than_assumed_leave_a_smaller_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pool is planned again from what the compiled programs say, and the plan tells what was made."""
    most = 40  # pages that would fit beside no scratch at all

    def with_a_limit(layout: KVLayout, **asked: Any) -> MemoryPlan:
        limit = asked["used_bytes"] + SLACK_BYTES + most * layout.bytes_per_page
        return plan_memory(layout, **{**asked, "device_limit_bytes": limit, "host_available_bytes": None})

    monkeypatch.setattr(runner, "plan_memory", with_a_limit)
    monkeypatch.setattr(runner, "ASSUMED_TEMP_BYTES", 0)
    config = EngineConfig(dtype="float32", slots=8, page_size=16, max_context=512, prefill_chunk=64)
    with LLMEngine(FIXTURE, config) as engine:
        found = engine.server_info()["memory_plan"]
        made = engine._runner._kv
        assert found["source"] == "device_memory"
        assert found["program_temp_bytes"] > 0
        assert found["reserved_bytes"] == found["program_temp_bytes"] + SLACK_BYTES
        assert found["pages"] == most - -(-found["program_temp_bytes"] // found["bytes_per_page"]) < most
        assert found["kv_bytes"] == sum(array.nbytes for array in (*made.k, *made.v))
        assert engine.stats()["pages_total"] == engine.stats()["pages_free"] == found["pages"]


@pytest.mark.parametrize(("own", "share"), [(None, "0.500"), ("0.3", "0.3")])
def test_the_share_of_the_device_is_set_before_jax_starts(own: str | None, share: str) -> None:
    """Whatever is imported first; an operator's own setting wins.  The plan is in the log."""
    program = f"""
import logging, os, sys
import jax
import rlt_jax.bench.measure, rlt_jax.llm, server.__main__
from jax._src import xla_bridge
from rlt_jax import EngineConfig, LLMEngine
from rlt_jax.runtime import engine

claim_device = engine.claim_device
def spy():
    print(xla_bridge.backends_are_initialized(), os.environ["XLA_PYTHON_CLIENT_MEM_FRACTION"])
    return claim_device()
engine.claim_device = spy
logging.basicConfig(level=logging.INFO, stream=sys.stdout, format="%(message)s")
LLMEngine({str(FIXTURE)!r}, EngineConfig(memory_fraction=0.5, slots=1, max_context=64)).close()
"""
    environment = {k: v for k, v in os.environ.items() if k != "XLA_PYTHON_CLIENT_MEM_FRACTION"}
    environment |= {"JAX_PLATFORMS": "cpu"} | ({} if own is None else {"XLA_PYTHON_CLIENT_MEM_FRACTION": own})
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert f"False {share}" in done.stdout
    assert "memory plan: {'source': 'host_default', 'pages': 4, " in done.stdout
