"""What a compiler makes of every kernel, read without a GPU: ``python -m llmlab.measure.static_report --target sm_90``.

Each shipped configuration (``compile_cases()`` of each file in kernels) is compiled ahead of time and its machine code read:
registers, spills, shared memory, CTAs per multiprocessor, tensor-core instructions, asynchronous copies, the share of loads that
are 128 bits wide, the instructions of the hot loop. That shows the usual accidents (a lost vector load, a pipeline that did not
happen, a kernel that cannot be launched), and comparing with the committed baseline shows when one comes in.

It is no measurement. The bound is an interval: the share of the machine's peak that the hot loop could reach if nothing
overlapped, and if everything did; latency, bank conflicts, caches and clocks are in neither. ``tensor_share`` takes for granted
that memory keeps up; ``memory_share`` that every byte comes from device memory, none from the second-level cache.
"""

import argparse
import importlib
import json
import multiprocessing
import os
import pkgutil
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any

import pandas as pd
import triton
from tqdm.auto import tqdm
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

import llmlab.kernels
from llmlab.kernels.spec import CompileCase, Work
from llmlab.measure.machine_code import Code, Loop, parse_amdgcn, read_cubin
from llmlab.measure.static_gate import compare
from llmlab.measure.targets import TARGETS, Target, occupancy

LEGEND = """
tensor unit: its instructions in the code; async copies: those in the code, x buffers of the pipeline; wide loads: share that
are 128 bits; loop: instructions of the hot loop; bounds: the share of peak that the loop could reach if nothing overlapped, and
if everything did (an interval, no measurement)"""


def discover(pattern: str = "") -> Iterator[tuple[str, CompileCase]]:
    """(name, case) of every shipped configuration whose ``file/case`` contains ``pattern``, in the order of the files."""
    for module_info in sorted(pkgutil.iter_modules(llmlab.kernels.__path__), key=lambda info: info.name):
        module = importlib.import_module(f"llmlab.kernels.{module_info.name}")
        if not hasattr(module, "compile_cases") or module_info.name == "spec":
            continue
        for case in module.compile_cases():
            name = f"{module_info.name}/{case.name}"
            if pattern in name:
                yield name, case


def compile_case(case: CompileCase, target: Target) -> Any:
    """Triton's compiled kernel; whatever its compiler raises passes through."""
    kernel = case.kernel
    signature = {name: case.signature.get(name, "constexpr") for name in kernel.arg_names}
    attributes: dict[tuple[int], list[list[Any]]] = {}
    for name in case.divisible_by_16:
        attributes.setdefault((kernel.arg_names.index(name),), []).append(["tt.divisibility", 16])
    for name in case.near if target.backend == "hip" else ():
        attributes.setdefault((kernel.arg_names.index(name),), []).append(["tt.pointer_range", 32])
    source = ASTSource(kernel, signature=signature, constexprs=dict(case.constexprs), attrs=attributes)
    options = {"num_warps": case.num_warps, "num_stages": case.num_stages, **case.options}
    return triton.compile(source, target=GPUTarget(target.backend, target.arch, target.warp_size), options=options)


def report_case(name: str, case: CompileCase, target: Target) -> dict[str, Any]:
    """One row. A configuration that does not compile has ``error`` and no figures."""
    row: dict[str, Any] = {
        "case": name,
        "kernel": case.kernel.__name__,
        "target": target.name,
        "triton": triton.__version__,
        "num_warps": case.num_warps,
        "num_stages": case.num_stages,
        "error": None,
    }
    started = time.perf_counter()
    try:
        compiled = compile_case(case, target)
        code = read_cubin(compiled.asm["cubin"]) if target.backend == "cuda" else parse_amdgcn(compiled.asm["amdgcn"])
    except Exception as error:
        lines = str(error).strip().splitlines()
        return row | {"error": f"{type(error).__name__}: {lines[-1] if lines else ''}"}
    row["compile_seconds"] = round(time.perf_counter() - started, 3)
    warps = getattr(compiled.metadata, "total_num_warps", None) or compiled.metadata.num_warps
    return row | _figures(code, compiled, case.work, target, warps)


def _figures(code: Code, compiled: Any, work: Work | None, target: Target, warps: int) -> dict[str, Any]:
    shared = compiled.metadata.shared
    fit = occupancy(target, code.registers, shared, warps)
    whole = code.mix()
    loop = code.hot_loop()
    in_loop = code.mix(loop) if loop is not None else None
    ttgir = compiled.asm["ttgir"]
    buffers = [int(count) for count in re.findall(r"local_alloc\s*:\s*\(\)\s*->\s*!ttg\.memdesc<(\d+)x\d+x\d+", ttgir)]
    return {
        "warps": warps,
        "registers": code.registers,
        "stack": code.stack,
        "spills": code.spills,
        "scalar_spills": code.scalar_spills,
        "shared_memory": shared,
        "ctas": fit.ctas,
        "occupancy": round(fit.share, 4),
        "limited_by": fit.limited_by,
        "wgmma": whole["wgmma"],
        "tcgen05": whole["tcgen05"],
        "mma": whole["mma"],
        "mfma": whole["mfma"],
        "async_copies": whole["async copy"],
        "bulk_copies": whole["bulk copy"],
        "loop_async_copies": None if in_loop is None else in_loop["async copy"] + in_loop["bulk copy"],
        "pipeline_buffers": max(buffers, default=0),
        "wide_load_share": _rounded(code.wide_load_share()),
        "loop_wide_load_share": None if loop is None else _rounded(code.wide_load_share(loop)),
        "layout_conversions": ttgir.count("ttg.convert_layout"),
        "warp_specialised": ttgir.count("ttg.warp_specialize"),
        "instructions": len(code.instructions),
        "loop_instructions": None if loop is None else len(loop),
        "loop_mix": None if in_loop is None else dict(sorted(in_loop.items())),
        **_bound(code, loop, work, target, warps),
    }


def _rounded(share: float | None) -> float | None:
    return None if share is None else round(share, 4)


def _bound(code: Code, loop: Loop | None, work: Work | None, target: Target, warps: int) -> dict[str, float | None]:
    """The interval for tensor cores and memory, over one trip of the hot loop, or over the program where there is no loop."""
    nothing: dict[str, float | None] = dict.fromkeys(
        ("tensor_share_low", "tensor_share_high", "memory_share_low", "memory_share_high")
    )
    scope = loop if work is None or work.scope == "loop" else None
    if scope is None and (work is None or work.scope == "loop"):
        return nothing
    part = code.part(scope)
    flops = float(sum(_cta_flops(i.opcode, i.mma_flops(), warps) for i in part))
    loaded = float(sum(instruction.load_bytes() for instruction in part) * target.warp_size * warps)
    if work is not None and work.scope == "loop" and work.flops and flops:
        unrolled = flops / work.flops  # the compiler may have put several trips of the source's loop into one
        flops, moved = unrolled * work.flops, unrolled * work.bytes
    else:
        flops, moved = (work.flops or flops, work.bytes) if work is not None else (flops, 0.0)
    mix = code.mix(scope)
    issue = len(part) * warps / target.issue_rate
    special = mix["special"] * target.warp_size * warps / target.special_rate
    tensor = flops / target.tensor_rate
    memory = (moved or loaded) / target.memory_rate
    bound = nothing
    if flops:
        bound |= _interval("tensor_share", tensor, (issue, special, tensor))
    if memory:
        bound |= _interval("memory_share", memory, (issue, special, tensor, memory))
    return bound


def _interval(name: str, part: float, parts: tuple[float, ...]) -> dict[str, float | None]:
    """The share of its time that one part is busy: if nothing overlaps, and if everything does."""
    return {f"{name}_low": round(part / sum(parts), 4), f"{name}_high": round(part / max(parts), 4)}


def _cta_flops(opcode: str, flops: int, warps: int) -> float:
    """A wgmma is issued by a group of four warps together, every other matrix instruction by one warp."""
    return flops * warps / 4 if re.match(r"^[HIQ]GMMA", opcode) else flops * warps


def collect(targets: Iterable[str], pattern: str = "", jobs: int = 1, progress: bool = False) -> list[dict[str, Any]]:
    """Rows for every case (matching ``pattern``) and target, leaving out targets that a case does not mean to serve.

    ``jobs`` processes compile at once. Raises ValueError for an unknown target or fewer than one job.
    """
    chosen = list(targets)
    unknown = sorted(set(chosen) - set(TARGETS))
    if unknown:
        raise ValueError(f"unknown targets {unknown}; known are {sorted(TARGETS)}")
    if jobs < 1:
        raise ValueError(f"jobs must be at least 1, not {jobs}")
    work = [
        (name, target)
        for name, case in discover(pattern)
        for target in chosen
        if case.targets is None or target in case.targets
    ]
    bar = tqdm(total=len(work), desc="compiling", unit="kernel", disable=not progress, file=sys.stderr)
    rows = []
    with bar, _mapper(jobs) as mapper:
        for row in mapper(_report_named, work):
            rows.append(row)
            bar.update()
    return rows


@contextmanager
def _mapper(jobs: int) -> Iterator[Callable[..., Iterable[dict[str, Any]]]]:
    """``map``, in this process or in a pool of fresh ones (a forked one would inherit the compiler's threads)."""
    if jobs == 1:
        yield map
    else:
        with ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
            yield pool.map


@lru_cache(maxsize=1)
def _cases() -> dict[str, CompileCase]:
    return dict(discover())


def _report_named(job: tuple[str, str]) -> dict[str, Any]:
    name, target = job
    return report_case(name, _cases()[name], TARGETS[target])


def collect_with(triton_path: Path, targets: Iterable[str], pattern: str = "", jobs: int = 1) -> list[dict[str, Any]]:
    """``collect`` in a process that uses the Triton in ``triton_path`` (``pip install --target DIR --no-deps triton==...``).

    Raises ValueError where there is none, RuntimeError with the process's last lines when it fails.
    """
    if not (triton_path / "triton" / "__init__.py").is_file():
        raise ValueError(f"{triton_path} holds no triton package")
    command = [sys.executable, "-m", "llmlab.measure.static_report", "--json", "--kernel", pattern, "--jobs", str(jobs)]
    command += [argument for target in targets for argument in ("--target", target)]
    paths = [str(triton_path.resolve()), *filter(None, [os.environ.get("PYTHONPATH")])]
    done = subprocess.run(
        command, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    )
    if not done.stdout.strip():
        raise RuntimeError(f"the report with {triton_path} failed: {done.stderr.strip()[-2000:]}")
    return json.loads(done.stdout)["rows"]


def table(rows: list[dict[str, Any]]) -> pd.DataFrame:
    """The rows as people read them; everything that is known of each is in ``--json``."""
    return pd.DataFrame([_readable(row) for row in rows], dtype=object).fillna("")


def _readable(row: dict[str, Any]) -> dict[str, Any]:
    case = {"case": row["case"], "target": row["target"]}
    if row["error"]:
        return {**case, "tensor unit": f"does not compile: {row['error']}"}
    unit = next((f"{unit} {row[unit]}" for unit in ("tcgen05", "wgmma", "mfma", "mma") if row[unit]), "")
    copies = row["async_copies"] + row["bulk_copies"]
    percent = lambda share: "" if share is None else f"{100 * share:.0f} %"
    interval = lambda low, high: "" if high is None else f"{100 * low:.0f}-{100 * high:.0f} %"
    return {
        **case,
        "registers": row["registers"],
        "spills": row["spills"],
        "shared KiB": round(row["shared_memory"] / 1024),
        "CTAs/SM": f"{row['ctas']} ({row['limited_by']})",
        "tensor unit": unit,
        "async copies": f"{copies} x{row['pipeline_buffers']}" if copies else "",
        "wide loads": percent(row["wide_load_share"]),
        "loop": "" if row["loop_instructions"] is None else row["loop_instructions"],
        "tensor bound": interval(row["tensor_share_low"], row["tensor_share_high"]),
        "memory bound": interval(row["memory_share_low"], row["memory_share_high"]),
    }


def baseline_document(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """What is committed: the rows without what differs from run to run, in a fixed order."""
    kept = [{key: value for key, value in row.items() if key not in ("compile_seconds", "triton")} for row in rows]
    kept.sort(key=lambda row: (row["case"], row["target"]))
    return {"triton": rows[0]["triton"] if rows else triton.__version__, "rows": kept}


def read_baseline(path: Path) -> dict[str, Any]:
    """What ``baseline_document`` made. Raises OSError or ValueError for a file that is none."""
    try:
        document = json.loads(path.read_text())
        if isinstance(document, dict) and isinstance(document["triton"], str) and isinstance(document["rows"], list):
            return document
    except (ValueError, KeyError):
        pass
    raise ValueError(f"{path} is no baseline of this report")


def main(argv: list[str] | None = None) -> int:
    """Print the report; with ``--baseline`` compare and return 1 where the gate fails, or where something does not compile.

    2 for a bad argument, file or name, with one line on stderr.
    """
    parser = argparse.ArgumentParser(
        prog="llmlab kernels", description="What a compiler makes of every kernel, without a GPU."
    )
    parser.add_argument(
        "--target", action="append", choices=sorted(TARGETS), help="may be given several times; default sm_90"
    )
    parser.add_argument("--kernel", default="", metavar="TEXT", help="only cases whose file/case contains TEXT")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--baseline", type=Path, metavar="FILE", help="compare with this file; exit 1 on a regression")
    parser.add_argument("--write-baseline", type=Path, metavar="FILE", help="write the rows there")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="compile in N processes")
    parser.add_argument("--triton-path", type=Path, metavar="DIR", help="use the Triton installed there")
    arguments = parser.parse_args(argv)
    try:
        return _report(arguments, list(dict.fromkeys(arguments.target or ["sm_90"])))
    except (ValueError, OSError, RuntimeError) as error:
        print(f"llmlab kernels: {error}", file=sys.stderr)
        return 2


def _report(arguments: argparse.Namespace, targets: list[str]) -> int:
    baseline = None if arguments.baseline is None else read_baseline(arguments.baseline)
    if arguments.triton_path is not None:
        rows = collect_with(arguments.triton_path, targets, arguments.kernel, arguments.jobs)
    else:
        rows = collect(targets, arguments.kernel, arguments.jobs, progress=sys.stderr.isatty())
    if not rows:
        raise ValueError(f"no case of {', '.join(targets)} is called like {arguments.kernel!r}")
    regressions = []
    if baseline is not None:
        if baseline["triton"] != rows[0]["triton"]:
            raise ValueError(
                f"{arguments.baseline} is a baseline of triton {baseline['triton']}, which says nothing of "
                f"triton {rows[0]['triton']}"
            )
        known = [row for row in baseline["rows"] if row["target"] in targets and arguments.kernel in row["case"]]
        regressions = compare(known, rows)
    if arguments.write_baseline is not None:
        arguments.write_baseline.parent.mkdir(parents=True, exist_ok=True)
        arguments.write_baseline.write_text(json.dumps(baseline_document(rows), indent=1) + "\n")
    if arguments.json:
        document = {"rows": rows, "regressions": [vars(regression) for regression in regressions]}
        print(json.dumps(document, indent=1, default=vars))
    else:
        print(table(rows).to_string(index=False))
        print(LEGEND)
        for regression in regressions:
            print(regression)
    failed = any(regression.fatal for regression in regressions) or any(row["error"] for row in rows)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
