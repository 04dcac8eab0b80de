"""Shapes of models and engines that nobody wrote down, and this family's KV layouts under a model without its layers.

PROTECTS: that nothing in programs, pool or scheduler depends on the sizes that the other tests happen to use.
"""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tests.engines import FIXTURE, alone, sampling
from tests.engines import engine as whole_stack
from tests.oracle.huginn_checkpoint import shapes
from tests.runtime.huginn import engine
from tests.runtime.test_huginn_parity import LOGPROB_TOLERANCE, Case, Seen, batches, check


@st.composite
def cases(draw: st.DrawFn) -> Case:
    layout, loops = draw(st.sampled_from(["last_exited", "drop", "ring", "shared"])), draw(st.integers(3, 10))
    return Case(
        shape=draw(shapes()),
        layout=layout,
        planes=draw(st.integers(1, min(loops, 8))) if layout == "ring" else None,
        loops=loops,
        slots=draw(st.integers(1, 5)),
        page=draw(st.integers(1, 9)),
        chunk=draw(st.integers(1, 16)),
        batch=draw(st.integers(1, 6)),
    )


def test_any_shape_of_model_and_engine() -> None:
    """Each example compiles an engine, so there are few, with many requests each."""
    seen, layouts = Seen(), set()

    @settings(
        max_examples=5, deadline=None, derandomize=True, database=None,
        phases=(Phase.explicit, Phase.generate), suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(st.data(), cases())
    def every_case(data: st.DataObject, case: Case) -> None:
        layouts.add((case.layout, case.shape.block))
        for _ in range(4):
            check(case, data.draw(batches(case, most=8)), seen)

    every_case()
    assert len(layouts) > 2
    assert seen.outputs > 120
    assert seen.near_ties <= max(3, seen.outputs // 100), seen  # see test_huginn_parity


class TestWholeStack:
    """The two layouts that came with this family, for a model that has only a core: Ouro, of four loops."""

    PROMPT = (17, 230, 4, 99, 161)

    def test_a_ring_that_is_never_overwritten(self) -> None:
        params = sampling(exit_threshold=0.5, min_loops=1)
        plain = alone(whole_stack(), self.PROMPT, params)
        ring = alone(engine(FIXTURE, kv_layout="ring", kv_planes=4, boundary_batch=1), self.PROMPT, params)
        assert (ring.tokens, ring.depths) == (plain.tokens, plain.depths)
        assert len(set(plain.depths)) > 1

    def test_nobody_is_dropped_at_full_depth(self) -> None:
        target = engine(FIXTURE, kv_layout="drop", boundary_batch=1)
        full, early = sampling(), sampling(exit_threshold=0.3, min_loops=1)
        plain, drop = alone(whole_stack(), self.PROMPT, full), alone(target, self.PROMPT, full)
        assert (drop.tokens, drop.depths) == (plain.tokens, plain.depths)
        plain, drop = alone(whole_stack(), self.PROMPT, early), alone(target, self.PROMPT, early)
        assert drop.logprobs[:2] == pytest.approx(plain.logprobs[:2], abs=LOGPROB_TOLERANCE)
        assert drop.logprobs != pytest.approx(plain.logprobs, abs=LOGPROB_TOLERANCE), "who left early is not seen"
