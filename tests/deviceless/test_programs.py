"""What XLA makes of the engine's programs on an H200, seen without one.

PROTECTS: the pool is updated in place (a lost alias doubles memory and copies gigabytes a tick), no weight is copied
(stacked weights cost 1.1 ms a tick), and the number of launches per layer does not creep up.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from rlt_jax.bench.workload import SHAPES
from rlt_jax.config import KVLayoutKind
from rlt_jax.kvcache.layout import KVLayout
from rlt_jax.models.registry import model_from_config
from rlt_jax.models.spec import LoopedModel, TensorSource
from rlt_jax.runtime.programs import Programs

LAYERS, SLOTS, CONTEXT, PAGE = 3, 32, 1024, 64
KERNELS_PER_LAYER = 15  # decode: 4 matmuls, attention, kv_write, and what norms, rotary and residuals fuse into


def _programs(kind: KVLayoutKind, layers: int) -> tuple[Programs, object]:
    return _of(_cut("ouro-1.4b", layers), kind, SLOTS)


def _cut(name: str, layers: int) -> LoopedModel:
    """A model of SHAPES with fewer layers."""
    return model_from_config({**SHAPES[name], "num_hidden_layers": layers})


def _of(model: LoopedModel, kind: KVLayoutKind, slots: int) -> tuple[Programs, object]:
    spec = model.spec
    layout = KVLayout.create(
        kind,
        max_loops=spec.max_loops,
        page_size=PAGE,
        kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        num_layers=spec.num_layers,
        dtype_bytes=2,
        prelude_layers=spec.num_prelude_layers,
        coda_layers=spec.num_coda_layers,
    )
    pages_per_slot = layout.pages_for(CONTEXT)
    programs = Programs(
        model=model,
        layout=layout,
        dtype=jnp.dtype("bfloat16"),
        slots=slots,
        max_context=CONTEXT,
        pages_per_slot=pages_per_slot,
        pages=slots * pages_per_slot,
        max_ticks=4,
        attention="triton",
        kv_write="triton",
    )
    params = jax.tree.map(
        lambda source: jax.ShapeDtypeStruct(source.shape, jnp.bfloat16),
        model.sources(),
        is_leaf=lambda leaf: isinstance(leaf, TensorSource),
    )
    return programs, params


@pytest.fixture(scope="module")
def reports():
    from tests.deviceless.h200 import compile_for_h200

    programs, params = _programs(KVLayoutKind.LAST_EXITED, LAYERS)
    names = ("decode", "prefill_512", "bind", "begin", "report")
    return programs, compile_for_h200(programs, params, (512,), names)


@pytest.mark.parametrize("name", ["decode", "prefill_512"])
def test_the_pool_is_updated_in_place(reports, name):
    programs, by_name = reports
    pool = programs.pages * programs.layout.bytes_per_page
    assert by_name[name].alias_bytes >= pool
    assert by_name[name].temp_bytes < 128 << 20


def test_the_state_of_rounds_keeps_its_addresses(reports):
    """`begin` reads none of the old events; dropped as unused, their buffers would move and graphs be updated."""
    programs, by_name = reports
    _, *state = jax.eval_shape(programs.make_state)
    assert by_name["begin"].alias_bytes == sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state))


@pytest.mark.parametrize("name", ["decode", "prefill_512", "bind", "begin", "report"])
def test_nothing_as_large_as_a_weight_is_copied(reports, name):
    """The smallest matrix of a layer is attn_out, 8 MiB; nothing near it may be copied or transposed."""
    _, by_name = reports
    smallest_matrix = 2048 * 2048 * 2
    assert by_name[name].copies_of_at_least(smallest_matrix // 8) == []


@pytest.mark.parametrize("name", ["decode", "prefill_512"])
def test_a_run_of_a_large_program_is_one_graph(reports, name):
    """Whatever stays outside makes the host launch kernels and read predicates: 1.6 ms a tick at 128 slots.

    Without the device XLA does not choose CUB's sort, the one kernel that did so: tests/gpu looks for that.
    """
    _, by_name = reports
    assert by_name[name].outside_graphs == ()
    assert by_name[name].graphs == 1


@pytest.mark.parametrize("model", ["ouro-1.4b", "nanbeige4.2-3b"], ids=["one query a KV head", "grouped heads"])
def test_launches_grow_only_with_layers(model):
    """Two depths give the launches per layer; a fusion lost in the core, or padding around a kernel, shows."""
    from tests.deviceless.h200 import compile_for_h200

    counts = []
    for layers in (1, 2):
        programs, params = _of(_cut(model, layers), KVLayoutKind.LAST_EXITED, SLOTS)
        counts.append(compile_for_h200(programs, params, (), ("decode",))["decode"].kernels)
    assert 0 < counts[1] - counts[0] <= KERNELS_PER_LAYER, counts


def test_shared_layout_decodes_in_place():
    from tests.deviceless.h200 import compile_for_h200

    programs, params = _programs(KVLayoutKind.SHARED, 2)
    report = compile_for_h200(programs, params, (), ("decode",))["decode"]
    assert report.alias_bytes >= programs.pages * programs.layout.bytes_per_page
    assert report.copies_of_at_least(1 << 20) == []


@pytest.mark.parametrize(
    ("kind", "loops"), [(KVLayoutKind.LAST_EXITED, 32), (KVLayoutKind.DROP, 8)], ids=["resolved at read", "dropped"]
)
def test_a_model_with_prelude_and_coda_decodes_in_place_too(kind, loops):
    """Huginn-0125 at full size: 55 heads of 96, exit depths in the pool, exits that read out in every loop."""
    from tests.deviceless.h200 import compile_for_h200, kernel_resources

    programs, params = _of(model_from_config(SHAPES["huginn-0125"]).with_max_loops(loops), kind, 4)
    for report in compile_for_h200(programs, params, (512,), ("decode", "prefill_512")).values():
        assert report.alias_bytes >= programs.pages * programs.layout.bytes_per_page
        assert report.copies_of_at_least(5280 * 5280 * 2 // 8) == []
        assert (report.outside_graphs, report.graphs) == ((), 1)
    assert all(r.spill_bytes == 0 for r in kernel_resources(programs, 4).values())


@pytest.mark.parametrize("model", ["ouro-1.4b", "nanbeige4.2-3b"], ids=["vectors", "grouped heads: tiles"])
@pytest.mark.parametrize("slots", [1, 128], ids=["split keys", "one program per row and head"])
def test_kernels_do_not_spill(slots, model):
    """A spilled register turns a bandwidth-bound kernel into a latency-bound one."""
    from tests.deviceless.h200 import kernel_resources

    programs, _ = _of(_cut(model, 1), KVLayoutKind.LAST_EXITED, SLOTS)
    resources = kernel_resources(programs, slots)
    assert {"paged_attention_decode", "paged_attention_prefill", "kv_write"} <= set(resources)
    assert all(r.spill_bytes == 0 for r in resources.values()), resources
    assert all(r.registers <= 255 for r in resources.values()), resources
