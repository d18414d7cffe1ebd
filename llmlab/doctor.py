"""``llmlab doctor``: what this machine has, and what that means for the lab."""

from __future__ import annotations

import importlib.util
import os
import platform
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import psutil


@dataclass(frozen=True)
class Finding:
    """One thing looked at: what was found, and what follows from it. ``ok`` is False for what should be changed."""

    what: str
    found: str
    means: str
    ok: bool = True


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def examine() -> list[Finding]:
    """All findings, most basic first. Looks only; changes and downloads nothing."""
    return [
        *(_python(), _torch(), _triton(), _gpu(), _isa(), _threads(), _memory(), _load(), _ceilings()),
        *_packages(),
        *_models(),
    ]


def measure_again(report: Callable[[str], None]) -> None:
    """Measure the ceilings of this machine's device anew, and keep them. ``report`` is told when it starts."""
    from llmlab.measure.hardware import ceilings

    ceilings(_device(), remeasure=True, report=report)


def _device() -> str:
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def _load() -> Finding:
    from llmlab.measure.system import BUSY, load_now

    load = load_now()
    means = "quiet enough to measure" if load < BUSY else "too busy to measure: clocks decide nothing now"
    return Finding("load", f"{load:.0%} of the machine works for others", means, ok=load < BUSY)


def _ceilings() -> Finding:
    from llmlab.measure.hardware import stored_ceilings

    kept = stored_ceilings(_device())
    if kept is None:
        return Finding("ceilings", "not measured yet", "the first notebook measures them, or: llmlab doctor --measure")
    best = max(kept.gemm, key=lambda dtype: kept.gemm[dtype])
    found = f"{kept.gemm[best] / 1e12:.3g} TFLOP/s in {best}, {kept.read_bandwidth / 1e9:.3g} GB/s, of {kept.date[:10]}"
    if kept.stale or kept.disturbed:
        why = f"measured with {kept.load:.0%} of the machine busy" if kept.disturbed else "more than thirty days old"
        return Finding("ceilings", found, f"{why}: llmlab doctor --measure", ok=False)
    return Finding("ceilings", found, "what this machine reaches; llmlab doctor --measure takes them again")


def _python() -> Finding:
    return Finding("python", platform.python_version(), "3.11 or newer is needed")


def _torch() -> Finding:
    import torch

    built = (
        f"CUDA {torch.version.cuda}"
        if torch.version.cuda
        else f"ROCm {torch.version.hip}"
        if torch.version.hip
        else "CPU only"
    )
    return Finding(
        "torch", f"{torch.__version__} ({built})", "the reference of every op, and the CPU path's matrix products"
    )


def _triton() -> Finding:
    found = _version("triton")
    if found is None:
        return Finding(
            "triton", "absent", "no kernels: pip install triton (Linux only); backend='torch' works", ok=False
        )
    return Finding(
        "triton",
        found,
        "kernels compile for GPUs, and run on a CPU through the interpreter (for correctness, not for speed)",
    )


def _gpu() -> Finding:
    import torch

    if not torch.cuda.is_available():
        return Finding(
            "GPU",
            "none",
            "models run on the CPU; kernels can still be compiled and interpreted",
        )
    names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return Finding("GPU", ", ".join(names), "device='auto' uses the first with the Triton backend")


def _isa() -> Finding:
    import torch

    capability = torch.backends.cpu.get_cpu_capability()
    features = torch.cpu.get_capabilities() if hasattr(torch.cpu, "get_capabilities") else {}
    bf16 = [name for name in ("amx_bf16", "avx512_bf16") if features.get(name)]
    means = (
        f"bfloat16 products in hardware ({', '.join(bf16)})"
        if bf16
        else "bfloat16 is converted for every product: float32 may be as fast"
    )
    return Finding("CPU", f"{platform.machine()}, {capability}", means)


def _threads() -> Finding:
    import torch

    cores, threads = psutil.cpu_count(logical=False) or os.cpu_count() or 1, torch.get_num_threads()
    means = (
        "one thread a core"
        if threads <= cores
        else "more threads than cores: set OMP_NUM_THREADS to the number of cores"
    )
    return Finding("threads", f"{threads} of {cores} cores", means, ok=threads <= cores)


def _memory() -> Finding:
    memory = psutil.virtual_memory()
    return Finding(
        "memory",
        f"{memory.available / 2**30:.1f} of {memory.total / 2**30:.1f} GiB free",
        "a KV cache takes a quarter of what is free at most, and only the pages that it uses",
    )


def _packages() -> list[Finding]:
    wanted = {
        "numba": "the CPU path's streaming kernels; without it plain torch, several times slower at small batches",
        "xgrammar": "structured output; without it such requests are refused: pip install 'llmlab[grammar]'",
        "jupyterlab": "the notebooks",
    }
    found = []
    for package, means in wanted.items():
        there = _version(package)
        found.append(Finding(package, there or "absent", means, ok=there is not None))
    if importlib.util.find_spec("torchvision") is not None and _version("torchvision") is None:
        found.append(
            Finding("torchvision", "broken", "transformers may fail to import it: pip uninstall torchvision", ok=False)
        )
    return found


def _models() -> list[Finding]:
    from llmlab.hub import PACKAGED_MODELS, models_dir, tiny_model_dir

    found = [
        _model(
            "tiny",
            tiny_model_dir(),
            "part of the project; tests and interpreter runs use it",
        )
    ]
    for name in PACKAGED_MODELS:
        found.append(_model(name, models_dir() / name, f"if absent: llmlab fetch {name}"))
    return found


def _model(name: str, path: Any, means: str) -> Finding:
    there = (path / "config.json").is_file()
    return Finding(f"model {name}", "present" if there else "absent", means, ok=there)


def as_dicts(findings: list[Finding]) -> list[dict[str, Any]]:
    return [asdict(finding) for finding in findings]
