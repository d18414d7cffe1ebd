"""The static report: its readers on small kernels and small texts, and its gate on planted regressions."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from llmlab.kernels.launch import launch
from llmlab.kernels.spec import CompileCase, Work, capture

from llmlab.measure import machine_code, static_report
from llmlab.measure.static_gate import compare
from llmlab.measure.targets import TARGETS, occupancy

ALL_TARGETS = sorted(TARGETS)


@triton.jit
def _copy(x, o, n, B: tl.constexpr):
    i = tl.program_id(0) * B + tl.arange(0, B)
    tl.store(o + i, tl.load(x + i, mask=i < n), mask=i < n)


@triton.jit
def _matmul(x, w, o, K, xs, ws, os, M: tl.constexpr, N: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr):
    m, n, k = tl.arange(0, M), tl.arange(0, N), tl.arange(0, BK)
    acc = tl.zeros([M, N], tl.float32)
    for start in tl.range(0, K, BK, num_stages=STAGES):
        a = tl.load(x + m[:, None] * xs + start + k[None, :])
        b = tl.load(w + n[None, :] * ws + start + k[:, None])
        acc = tl.dot(a, b, acc)
    tl.store(o + m[:, None] * os + n[None, :], acc.to(tl.bfloat16))


def copy_case(offset: int = 0) -> CompileCase:
    x = torch.empty(1 << 16, dtype=torch.bfloat16, device="meta")[offset:]
    n = (1 << 16) - 16
    work = Work(bytes=2 * 2 * 2048, scope="program")
    return capture("copy", lambda: launch(_copy, (32,), x, torch.empty_like(x), n, B=2048), work=work)[0]


def matmul_case(m: int = 128, n: int = 128, warps: int = 8, stages: int = 3, k: int = 4096) -> CompileCase:
    x, w = (torch.empty(rows, k, dtype=torch.bfloat16, device="meta") for rows in (m, n))
    out = torch.empty(m, n, dtype=torch.bfloat16, device="meta")
    sizes = {"M": m, "N": n, "BK": 64, "STAGES": stages, "num_warps": warps, "num_stages": stages}
    work = Work(flops=2.0 * m * n * 64, bytes=(m + n) * 64 * 2.0)
    return capture(
        "matmul",
        lambda: launch(_matmul, (1,), x, w, out, k, x.stride(0), w.stride(0), out.stride(0), **sizes),
        work=work,
    )[0]


def row_of(case: CompileCase, target: str = "sm_90") -> dict[str, Any]:
    row = static_report.report_case(f"test/{case.name}", case, TARGETS[target])
    assert row["error"] is None, row["error"]
    return row


@pytest.fixture(scope="module")
def matmul_row() -> dict[str, Any]:
    return row_of(matmul_case())


@pytest.mark.parametrize("target", ALL_TARGETS)
def test_a_copy_on_every_target(target: str) -> None:
    row = row_of(copy_case(), target)
    assert (row["spills"], row["wide_load_share"], row["loop_instructions"]) == (0, 1.0, None)
    assert row["ctas"] >= 4 and 0 < row["occupancy"] <= 1
    assert row["wgmma"] == row["mma"] == row["mfma"] == row["tcgen05"] == 0
    assert 0 < row["memory_share_low"] < row["memory_share_high"] <= 1 and row["tensor_share_high"] is None


@pytest.mark.parametrize(
    ("target", "unit"), [("sm_80", "mma"), ("sm_90", "wgmma"), ("sm_100", "tcgen05"), ("gfx942", "mfma")]
)
def test_a_matrix_product_uses_each_targets_unit(target: str, unit: str) -> None:
    row = row_of(matmul_case(stages=2), target)
    others = {"mma", "wgmma", "tcgen05", "mfma"} - {unit}
    assert row[unit] > 0 and all(row[other] == 0 for other in others)
    assert row["loop_instructions"] > 0 and row["spills"] == 0 and row["ctas"] >= 1
    assert 0 < row["tensor_share_low"] < row["tensor_share_high"] <= 1
    if target != "gfx942":
        assert row["loop_async_copies"] > 0 and row["wide_load_share"] > 0.99


def test_shared_memory_and_pipeline_are_stages_of_tiles(matmul_row: dict[str, Any]) -> None:
    assert matmul_row["shared_memory"] == 3 * 2 * 128 * 64 * 2  # stages x two tiles x rows x depth x bytes
    assert matmul_row["pipeline_buffers"] == 3
    assert matmul_row["ctas"] == 2  # 97 KiB of 228 each


def test_the_flops_of_the_machine_code_are_those_of_the_source() -> None:
    for target in ("sm_80", "sm_90"):
        case = matmul_case()
        compiled = static_report.compile_case(case, TARGETS[target])
        code = machine_code.read_cubin(compiled.asm["cubin"])
        flops = sum(static_report._cta_flops(i.opcode, i.mma_flops(), 8) for i in code.part(code.hot_loop()))
        assert flops == case.work.flops


# -- planted regressions


def kinds(before: dict[str, Any], after: dict[str, Any], fatal: bool = True) -> set[str]:
    return {regression.kind for regression in compare([before], [after]) if regression.fatal == fatal}


def test_the_same_report_passes(matmul_row: dict[str, Any]) -> None:
    assert compare([matmul_row], [dict(matmul_row)]) == []


def test_too_few_warps_spill(matmul_row: dict[str, Any]) -> None:
    bad = row_of(matmul_case(128, 256, warps=4))
    assert bad["spills"] > 0 and bad["registers"] == 255
    assert "spill" in kinds(matmul_row, bad)
    assert "spill" in {regression.kind for regression in compare([], [bad]) if regression.fatal}  # a new case, too
    assert kinds(bad, bad) == set() and kinds(bad, bad, fatal=False) == {"spill"}  # known ones are only told


def test_what_lies_within_two_gigabytes_is_addressed_by_amds_buffer_instructions() -> None:
    case = copy_case()
    assert case.near == ("x", "o")
    far = torch.empty(1 << 30, dtype=torch.bfloat16, device="meta")[: 1 << 16]
    far_case = capture("copy", lambda: launch(_copy, (32,), far, far, (1 << 16) - 16, B=2048))[0]
    assert far_case.near == ()
    texts = [static_report.compile_case(one, TARGETS["gfx942"]).asm["amdgcn"] for one in (case, far_case)]
    assert ["buffer_load" in text for text in texts] == [True, False]


def test_lost_alignment_is_lost_vector_loads(matmul_row: dict[str, Any]) -> None:
    assert "lost vector loads" in kinds(row_of(copy_case()), row_of(copy_case(offset=1)))
    bad = row_of(matmul_case(k=4098))  # rows start off any 16-byte boundary
    assert {"lost vector loads", "lost async copies"} <= kinds(matmul_row, bad)
    assert "loop growth" in kinds(matmul_row, bad, fatal=False)


def test_one_stage_is_no_pipeline(matmul_row: dict[str, Any]) -> None:
    assert "lost async copies" in kinds(matmul_row, row_of(matmul_case(stages=1)))


def test_a_small_tile_loses_wgmma(matmul_row: dict[str, Any]) -> None:
    bad = row_of(matmul_case(m=16))
    assert bad["wgmma"] == 0 and bad["mma"] > 0
    assert "lost tensor instructions" in kinds(matmul_row, bad)
    assert "lost tensor instructions" not in kinds(bad, matmul_row)  # mma giving way to wgmma is no loss


def test_too_much_shared_memory_compiles_and_fits_nowhere(matmul_row: dict[str, Any]) -> None:
    bad = row_of(matmul_case(128, 256, stages=6))
    assert bad["shared_memory"] > TARGETS["sm_90"].shared_memory_per_cta and bad["ctas"] == 0
    assert "zero occupancy" in kinds(matmul_row, bad)


def test_a_loop_may_grow_by_five_percent(matmul_row: dict[str, Any]) -> None:
    length = matmul_row["loop_instructions"]
    assert compare([matmul_row], [matmul_row | {"loop_instructions": int(length * 1.05)}]) == []
    assert kinds(matmul_row, matmul_row | {"loop_instructions": int(length * 1.05) + 1}, fatal=False) == {"loop growth"}


def test_what_does_not_compile_is_a_row_and_a_failure(matmul_row: dict[str, Any]) -> None:
    case = matmul_case()
    broken = CompileCase(case.kernel, case.name, case.signature, dict(case.constexprs) | {"BK": 48}, case.num_warps)
    row = static_report.report_case("test/matmul", broken, TARGETS["sm_90"])
    assert "power of" in row["error"] and "registers" not in row
    assert kinds(matmul_row, row) == {"does not compile"}
    failed, good = static_report.table([row, matmul_row]).to_dict("records")
    assert failed["tensor unit"].startswith("does not compile") and failed["spills"] == ""
    assert (good["shared KiB"], good["CTAs/SM"].split()[0], good["spills"]) == (96, "2", 0)
    assert good["tensor unit"] == f"wgmma {matmul_row['wgmma']}" and good["async copies"].endswith("x3")


def test_cases_that_come_and_go_are_notices(matmul_row: dict[str, Any]) -> None:
    other = matmul_row | {"case": "test/other"}
    found = compare([matmul_row], [other])
    assert {(regression.kind, regression.fatal) for regression in found} == {("gone", False), ("new", False)}
    assert "note" in str(found[0]) and "test/" in str(found[0])


# -- the readers

SASS = """
        /*0000*/                   LDG.E.128 R4, desc[UR4][R2.64] ;
        /*0010*/              @!P0 BRA `(.L_x_1) ;
.L_x_0:
        /*0020*/                   LDGSTS.E.BYPASS.128 [R1], desc[UR4][R2.64] ;
        /*0030*/                   LDG.E.U16 R4, desc[UR4][R2.64] ;
        /*0040*/                   HGMMA.64x128x16.F32.BF16 R24, gdesc[UR12], R24 ;
        /*0050*/                   HMMA.16816.F32.BF16 R4, R8, R10, R4 ;
        /*0060*/                   MUFU.EX2 R4, R4 ;
        /*0070*/                   STL.64 [R1], R2 ;
        /*0080*/                   FFMA R1, R2, R3, R4 ;
        /*0090*/                   IMAD R1, R2, R3, R4 ;
        /*00a0*/               @P0 BRA `(.L_x_0) ;
.L_x_1:
        /*00b0*/              @!P1 BRA `(.L_x_3) ;
.L_x_2:
        /*00c0*/                   EXIT ;
.L_x_3:
        /*00d0*/                   SYNCS.PHASECHK.TRANS64.TRYWAIT P1, [R2], R3 ;
        /*00e0*/              @!P1 BRA `(.L_x_3) ;
        /*00f0*/                   BRA `(.L_x_2) ;
"""
AMDGCN = """
k:
	s_load_dwordx4 s[0:3], s[4:5], 0x0
	global_load_dwordx4 v[0:3], v4, s[0:1]
.LBB0_1:
	global_load_ushort v5, v4, s[0:1]
	v_mfma_f32_32x32x8_bf16_1k a[0:15], v[0:1], v[2:3], a[0:15]
	v_exp_f32_e32 v1, v1
	s_cbranch_scc1 .LBB0_1
	s_endpgm
	.amdgpu_metadata
    .private_segment_fixed_size: 12
    .sgpr_spill_count: 3
    .vgpr_count:     88
    .vgpr_spill_count: 2
"""


def test_sass_is_read() -> None:
    code = machine_code.parse_sass(SASS, "Function k:\n REG:40 STACK:16 SHARED:0")
    assert (code.registers, code.stack, code.spills, len(code.instructions)) == (40, 16, 1, 16)
    loop, waiting = code.loops
    assert loop == tuple(range(2, 11)) and code.hot_loop() == loop
    assert waiting == (13, 14), "the jump back from out of line closes no loop"
    assert code.mix(loop) == {
        "async copy": 1, "load": 1, "wgmma": 1, "mma": 1, "special": 1, "spill": 1, "float": 1, "integer and other": 2
    }  # fmt: skip
    assert code.wide_load_share() == 32 / 34 and code.wide_load_share(loop) == 16 / 18
    assert [i.mma_flops() for i in code.part(loop) if i.mma_flops()] == [2 * 64 * 128 * 16, 2 * 16 * 8 * 16]
    with pytest.raises(RuntimeError, match="no kernel"):
        machine_code.parse_sass("", "")


def test_amdgcn_is_read() -> None:
    code = machine_code.parse_amdgcn(AMDGCN)
    assert (code.registers, code.stack, code.spills, code.scalar_spills) == (88, 12, 2, 3)
    assert code.loops == ((2, 3, 4, 5),)
    assert code.mix() == {"integer and other": 3, "load": 2, "mfma": 1, "special": 1}
    assert code.wide_load_share() == 16 / 18
    assert sum(i.mma_flops() for i in code.instructions) == 2 * 32 * 32 * 8


@pytest.mark.parametrize(
    ("registers", "shared", "warps", "ctas", "limited_by"),
    [
        # NVIDIA's occupancy calculator, compute capability 9.0
        (32, 0, 4, 16, "registers"),
        (32, 0, 8, 8, "registers"),
        (64, 0, 8, 4, "registers"),
        (168, 0, 8, 1, "registers"),
        (255, 0, 8, 1, "registers"),
        (32, 100 * 1024, 4, 2, "shared memory"),
        (16, 0, 1, 32, "CTAs"),
        (200, 0, 1, 8, "registers"),  # the file would hold ten warps, each of its four parts holds two
        (24, 0, 16, 4, "warps"),
        (64, 228 * 1024, 4, 0, "shared memory"),
    ],
)
def test_occupancy(registers: int, shared: int, warps: int, ctas: int, limited_by: str) -> None:
    found = occupancy(TARGETS["sm_90"], registers, shared, warps)
    assert found.ctas == ctas and found.share == ctas * warps / 64
    assert found.limited_by == limited_by
    with pytest.raises(ValueError, match="warps"):
        occupancy(TARGETS["sm_90"], 32, 0, 0)


# -- the command


def test_the_command_compares_with_a_baseline(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    baseline = tmp_path / "sub" / "baseline.json"
    select = ["--kernel", "mlp/silu_and_mul_bfloat16_i1536", "--target", "sm_90"]
    assert static_report.main([*select, "--write-baseline", str(baseline)]) == 0
    assert "silu_and_mul" in capsys.readouterr().out
    document = json.loads(baseline.read_text())
    assert document["triton"] == triton.__version__ and "compile_seconds" not in document["rows"][0]
    assert static_report.main([*select, "--baseline", str(baseline), "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["regressions"] == [] and printed["rows"][0]["case"] == "mlp/silu_and_mul_bfloat16_i1536"
    document["rows"][0]["async_copies"] = 4  # as if it had had them
    baseline.write_text(json.dumps(document))
    assert static_report.main([*select, "--baseline", str(baseline)]) == 1
    assert "FAIL  mlp/silu_and_mul_bfloat16_i1536 [sm_90] lost async copies" in capsys.readouterr().out


def test_every_kernel_file_is_found_and_its_cases_have_names_of_their_own() -> None:
    names = [name for name, _ in static_report.discover()]
    assert {"attention", "cache", "embedding", "linear", "mlp", "norm", "rope"} <= {
        name.split("/")[0] for name in names
    }
    assert len(set(names)) == len(names)
    with pytest.raises(ValueError, match="sm_75"):
        static_report.collect(["sm_75"])


def test_the_committed_baselines_hold_no_defect() -> None:
    """A baseline makes a known defect a notice: so that none slips in with a new baseline, there may be none."""
    baselines = sorted((Path(__file__).parents[2] / "data" / "static_report").glob("triton-*.json"))
    if not baselines:
        pytest.skip("no baseline is stored yet")
    for path in baselines:
        document = json.loads(path.read_text())
        assert document["triton"].startswith(path.stem.removeprefix("triton-")), path
        assert not [str(regression) for regression in compare(document["rows"], document["rows"])], path


def test_a_name_that_matches_nothing_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert static_report.main(["--kernel", "no_such_kernel"]) == 2
    assert "no_such_kernel" in capsys.readouterr().err


def test_bad_files_and_arguments_are_one_line_on_stderr(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one = ["--kernel", "mlp/silu_and_mul_bfloat16_i1536"]
    other_version, no_baseline = tmp_path / "other.json", tmp_path / "rows.json"
    other_version.write_text(json.dumps({"triton": "3.0.0", "rows": []}))
    no_baseline.write_text("[1]")
    for arguments, message in (
        (["--baseline", str(tmp_path / "missing.json")], "missing.json"),
        (["--baseline", str(no_baseline)], "is no baseline"),
        (["--baseline", str(other_version)], "is a baseline of triton 3.0.0, which says nothing of triton"),
        (["--triton-path", str(tmp_path)], "holds no triton package"),
        (["--jobs", "0"], "jobs must be at least 1, not 0"),
    ):
        assert static_report.main([*one, *arguments]) == 2
        printed = capsys.readouterr()
        assert message in printed.err and printed.err.count("\n") == 1 and not printed.out


def test_a_target_named_twice_is_reported_once(capsys: pytest.CaptureFixture[str]) -> None:
    target = ["--target", "sm_90"]
    assert static_report.main(["--kernel", "mlp/silu_and_mul_bfloat16_i1536", *target, *target, "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["rows"]) == 1


def test_jobs_change_nothing() -> None:
    def rows(jobs: int) -> list[dict[str, Any]]:
        found = static_report.collect(["sm_90", "sm_80"], "mlp/silu_and_mul_bfloat16", jobs=jobs)
        return [{key: value for key, value in row.items() if key != "compile_seconds"} for row in found]

    assert len(rows(1)) >= 4 and rows(2) == rows(1)
    with pytest.raises(ValueError, match="jobs"):
        static_report.collect(["sm_90"], jobs=0)


def test_another_triton_is_asked_in_another_process(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no triton"):
        static_report.collect_with(tmp_path, ["sm_90"])
    here = Path(triton.__file__).parents[1]  # the installed one, as if it lay beside
    (row,) = static_report.collect_with(here, ["sm_90"], "mlp/silu_and_mul_bfloat16_i1536")
    assert row["triton"] == triton.__version__ and row["registers"] > 0


def test_the_module_runs_as_a_command() -> None:
    command = [
        sys.executable,
        "-m",
        "llmlab.measure.static_report",
        "--target",
        "sm_90",
        "--json",
        "--kernel",
        "mlp/silu_and_mul_bfloat16_i14336",
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert [row["spills"] for row in document["rows"]] == [0] and document["regressions"] == []
