"""Ahead-of-time compilation for GPUs that are not here: no spills, and tensor cores, pipelines and wide loads where they belong.

Every case of every file is compiled by ``llmlab.measure.static_report``; here the most telling ones, to be quick.
"""

from __future__ import annotations

import ast
import functools
import json
from pathlib import Path
from typing import Any

import pytest
import triton
from llmlab.kernels.attention_tile import TILES
from llmlab.kernels.spec import CompileCase

from llmlab.kernels import attention, contiguous_attention, flash_decoding, linear
from llmlab.measure.machine_code import Code, read_cubin
from llmlab.measure.static_gate import compare
from llmlab.measure.static_report import compile_case, discover, report_case
from llmlab.measure.targets import TARGETS

ON_HOPPER = [
    "attention/prefill_d64",
    "attention/prefill_d128",
    "attention/decode_d128",
    "attention/decode_d128_window",
    "attention/float32_d128",
    "flash_decoding/llama3_8b_batch1",
    "contiguous_attention/decode_d128",
    "linear/",
    "norm/",
    "rope/",
    "cache/",
    "embedding/",
    "mlp/",
    "merge/",
    "sampling/",
    "selection/",
]
ELSEWHERE = {
    "sm_80": ["attention/ampere_wide_d128", "attention/ampere_narrow_d128", "linear/rows4096_without_tma"],
    "sm_100": ["attention/prefill_d128", "attention/short_d128", "linear/rows4096"],
    "gfx942": ["attention/cdna_wide_d128", "attention/cdna_narrow_d128", "linear/cdna_rows4096", "linear/cdna_rows16"],
}
EVERYWHERE = [
    "norm/fused_add_rms_norm_bfloat16_h4096",
    "rope/computed_llama3_8b",
    "rope/and_cache_d80",
    "cache/llama3_8b",
    "mlp/silu_and_mul_bfloat16_i14336",
    "merge/d80",
    "selection/top_k_top_p_v128k",
    "sampling/gumbel",
]


@functools.cache
def baseline() -> dict[tuple[str, str], dict[str, Any]]:
    """The committed rows of the Triton at hand, by case and target; empty where none are stored for it."""
    path = Path(__file__).parents[2] / "data" / "static_report" / f"triton-{triton.__version__}.json"
    rows = json.loads(path.read_text())["rows"] if path.is_file() else []
    return {(row["case"], row["target"]): row for row in rows}


@functools.cache
def cases() -> dict[str, CompileCase]:
    return dict(discover())


@functools.cache
def report(name: str, target: str) -> dict[str, Any]:
    return report_case(name, cases()[name], TARGETS[target])


def compiled_code(name: str) -> Code:
    return read_cubin(compile_case(cases()[name], TARGETS["sm_90"]).asm["cubin"])


def chosen() -> list[tuple[str, str]]:
    """(case, target): a name takes itself and its parts (after a dot), one that ends in / everything under it."""
    wanted = {"sm_90": ON_HOPPER, **{target: [*names, *EVERYWHERE] for target, names in ELSEWHERE.items()}}
    return [
        (name, target)
        for target, patterns in wanted.items()
        for name, case in cases().items()
        if (case.targets is None or target in case.targets)
        and any(name == p or name.startswith(p if p.endswith("/") else p + ".") for p in patterns)
    ]


@pytest.mark.parametrize(("name", "target"), chosen())
def test_it_compiles_fits_and_does_not_spill(name: str, target: str):
    row = report(name, target)
    assert row["error"] is None
    assert row["spills"] == 0 and row["stack"] == 0
    assert row["ctas"] >= 1


@pytest.mark.parametrize(("name", "target"), chosen())
def test_it_is_no_worse_than_the_committed_baseline(name: str, target: str):
    """Lost tensor cores, asynchronous copies and vector loads fail; growth of a loop is only told by ``llmlab kernels``."""
    if not baseline():
        pytest.skip(f"no baseline is stored for Triton {triton.__version__}")
    known = baseline().get((name, target))
    assert known is not None, "a new case: write the baseline again"
    assert [str(found) for found in compare([known], [report(name, target)]) if found.fatal] == []


def test_no_kernel_has_block_pointers_or_an_autotuner():
    """Triton deprecates the first and removes them; the second times every choice at a first call, which needs a GPU."""
    files = sorted(Path(attention.__file__).parent.glob("*.py"))
    assert len(files) > 10
    for file in files:
        used = {node.attr for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.Attribute)}
        assert not used & {"make_block_ptr", "advance", "autotune"}, file.name


def test_the_baseline_knows_every_case():
    if not baseline():
        pytest.skip(f"no baseline is stored for Triton {triton.__version__}")
    shipped = {(name, target) for name, case in cases().items() for target in case.targets or TARGETS}
    assert set(baseline()) == shipped


def test_the_patterns_above_name_something():
    names = [name for name, _ in chosen()]
    for pattern in [*ON_HOPPER, *EVERYWHERE, *(p for patterns in ELSEWHERE.values() for p in patterns)]:
        assert any(name.startswith(pattern) for name in names), pattern


@pytest.mark.parametrize("name", ["attention/prefill_d64", "attention/prefill_d128"])
def test_prefill_runs_on_wgmma_with_asynchronous_wide_copies(name):
    row = report(name, "sm_90")
    assert row["wgmma"] > 0 and row["mma"] == 0
    assert row["loop_async_copies"] > 0 and row["pipeline_buffers"] >= 2


@pytest.mark.parametrize("name", ["attention/decode_d128", "flash_decoding/llama3_8b_batch1.paged_attention_kernel"])
def test_decode_streams_its_keys_asynchronously(name):
    """K and V both: eight 128-bit copies a thread for a tile of 32 keys, two tiles in flight, several CTAs to an SM."""
    row = report(name, "sm_90")
    assert row["loop_async_copies"] >= 8 and row["pipeline_buffers"] >= 2 and row["ctas"] >= 4


def test_blackwell_uses_its_own_tensor_cores():
    assert report("attention/prefill_d128", "sm_100")["tcgen05"] > 0
    assert report("linear/rows4096", "sm_100")["tcgen05"] > 0


def test_the_large_gemm_is_fed_by_bulk_copies_and_the_small_one_by_wide_ones():
    large, small = report("linear/rows4096", "sm_90"), report("linear/rows1.linear_kernel", "sm_90")
    assert large["wgmma"] > 0 and large["bulk_copies"] > 0
    assert small["loop_async_copies"] > 0 and small["loop_wide_load_share"] == 1.0


@pytest.mark.parametrize(
    ("name", "narrow_loads"),
    [
        ("norm/rms_norm_bfloat16_h4096", 0),
        ("norm/fused_add_rms_norm_bfloat16_h576", 0),
        ("mlp/silu_and_mul_bfloat16_i14336", 0),
        ("rope/table_llama3_8b", 3),  # the position, for each use of it
        ("cache/llama3_8b", 1),  # the slot
        ("embedding/embedding_llama3_8b", 1),  # the token id
    ],
)
def test_streaming_kernels_load_128_bits_at_a_time(name, narrow_loads):
    """All but the index that says where to load from."""
    code = compiled_code(name)
    widths = [("LDG" in i.opcode, ".128" in i.opcode) for i in code.instructions]
    assert sum(load and not wide for load, wide in widths) <= narrow_loads
    assert any(load and wide for load, wide in widths)


def test_every_tile_of_every_machine_is_among_the_cases():
    """A configuration that ships is a configuration that is compiled."""
    tiles = {
        (case.constexprs["BLOCK_M"], case.constexprs["BLOCK_N"], case.num_warps, case.num_stages)
        for module in (attention, flash_decoding, contiguous_attention)
        for case in module.compile_cases()
        if "NUM_SPLITS" in case.constexprs and "BLOCK_M" in case.constexprs
    }
    tables = [table for m in TILES.values() for table in (m.wide, m.middle, m.narrow, m.float32)]
    shipped = {(t.block_m, t.block_n, t.num_warps, t.num_stages) for table in tables for t in table.values()}
    assert shipped <= tiles
    gemms = {
        (case.constexprs["BLOCK_M"], case.constexprs["BLOCK_N"], case.constexprs["BLOCK_K"], case.num_warps)
        for case in linear.compile_cases()
        if "BLOCK_K" in case.constexprs
    }
    for tile in [*linear.SMALL_TILES.values(), linear.PLAIN_TILE, *linear.TMA_TILES, linear.FLOAT32_TILE]:
        assert (tile.block_m, tile.block_n, tile.block_k, tile.num_warps) in gemms
