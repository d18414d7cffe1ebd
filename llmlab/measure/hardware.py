"""This machine: what it is, and the ceilings that it reaches, measured, with their date.

A ceiling is the best of many repeats, as in STREAM (McCalpin 1995): other work on the machine can only lower a rate, never
raise it. The measurements themselves are in :mod:`llmlab.measure.ceilings`; vendors' figures in :mod:`llmlab.measure.datasheets`.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from llmlab.measure.datasheets import DATASHEETS, Roof
from llmlab.measure.system import load_now, memory_bytes, physical_cores

if TYPE_CHECKING:
    import pandas as pd

MAX_AGE_DAYS = 30
QUIET = 0.1
"""A ceiling needs a quieter machine than a comparison: what others do for a second halves whatever is measured in that second."""
SCHEMA = 1
_ISA = ("avx2", "fma", "avx512f", "avx512_bf16", "avx512_fp16", "avx512_vnni", "amx_tile", "amx_bf16", "amx_fp16", "amx_int8",
        "asimd", "asimddp", "sve", "bf16", "i8mm")  # fmt: skip


@dataclass(frozen=True)
class CpuCache:
    """One cache as the operating system describes it: bytes of one instance, and how many hardware threads share it."""

    level: str
    size: int
    shared_by: int


@dataclass(frozen=True)
class Machine:
    """Everything about a machine that a measurement depends on. ``accelerator`` is None where only the CPU is used."""

    cpu: str
    isa: tuple[str, ...]
    threads: int
    cores: int
    memory_bytes: int
    caches: tuple[CpuCache, ...]
    accelerator: str | None
    accelerator_bytes: int | None
    system: str
    python: str
    torch: str
    triton: str | None

    @property
    def fingerprint(self) -> str:
        """Twelve hexadecimal digits that change when a measured ceiling could."""
        parts = (SCHEMA, self.cpu, self.isa, self.threads, self.cores, self.caches, self.accelerator, self.torch)
        return hashlib.sha256(repr(parts).encode()).hexdigest()[:12]

    @property
    def device(self) -> str:
        """The device that computes, in words."""
        return self.accelerator or f"{self.cpu}, {self.threads} threads"

    def __str__(self) -> str:
        features = ", ".join(
            name for name in self.isa if name.startswith(("avx512f", "amx", "avx2", "sve", "asimd", "bf16"))
        )
        device = f"{self.accelerator}, {self.accelerator_bytes / 1e9:.0f} GB, beside " if self.accelerator else ""
        return (
            f"{device}{self.cpu} ({features or 'no vector extensions found'}), {self.threads} threads on {self.cores} cores, "
            f"{self.memory_bytes / 2**30:.0f} GiB; Python {self.python}, torch {self.torch}, triton {self.triton or 'absent'}"
        )


@dataclass(frozen=True)
class CacheLevel:
    """Measured read bandwidth of data that lies in one level: bytes/s at a working set of ``working_set`` bytes."""

    level: str
    working_set: int
    bandwidth: float


@dataclass(frozen=True)
class Ceilings:
    """Measured ceilings of one machine. Rates are the best of the repeats, in FLOP/s, bytes/s and seconds.

    Attributes:
        gemm: square matrix product by dtype.
        read_bandwidth: from main memory; of data that no cache can hold, if ``beyond_caches``.
        copy_bandwidth: bytes read plus bytes written.
        levels: read bandwidth by cache level (CPU only), the fastest first, main memory last.
        call_overhead: seconds that an op on one element takes: what every op costs before it does any work.
        load: what else ran while this was measured: the share of all hardware threads' time that others took.
    """

    machine: Machine
    date: str
    gemm: dict[str, float]
    read_bandwidth: float
    copy_bandwidth: float
    beyond_caches: bool
    levels: tuple[CacheLevel, ...]
    call_overhead: float
    load: float

    def roof(self, dtype: str | torch.dtype = "bfloat16", level: str = "memory") -> Roof:
        """The roof for one dtype over one memory ("memory", or a cache level's name). ValueError if it was not measured."""
        dtype = str(dtype).removeprefix("torch.")
        bandwidths = {level.level: level.bandwidth for level in self.levels} | {"memory": self.read_bandwidth}
        if dtype not in self.gemm:
            raise ValueError(f"no GEMM rate was measured for {dtype!r}; there are {', '.join(self.gemm)}")
        if level not in bandwidths:
            raise ValueError(f"no bandwidth was measured for {level!r}; there are {', '.join(bandwidths)}")
        return Roof(self.machine.device, dtype, level, self.gemm[dtype], bandwidths[level], "measured")

    def level_holding(self, nbytes: float) -> str:
        """The fastest level whose caches together hold a working set of so many bytes; "memory" if none does."""
        sizes = {
            cache.level: cache.size * max(1, self.machine.threads // cache.shared_by) for cache in self.machine.caches
        }
        measured = [level.level for level in self.levels if level.level != "memory"]
        return next((name for name in measured if nbytes <= sizes.get(name, 0)), "memory")

    @property
    def age_days(self) -> float:
        return (datetime.now(UTC) - datetime.fromisoformat(self.date)).total_seconds() / 86400

    @property
    def stale(self) -> bool:
        return self.age_days > MAX_AGE_DAYS

    @property
    def disturbed(self) -> bool:
        """Whether so much else ran that the ceilings may be too low."""
        return self.load >= QUIET

    def to_dict(self) -> dict[str, Any]:
        return {"schema": SCHEMA, **asdict(self)}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Ceilings:
        """Raises ValueError for a file of another schema."""
        if data.get("schema") != SCHEMA:
            raise ValueError(f"ceilings of schema {data.get('schema')!r}; this version reads {SCHEMA}")
        machine = dict(data["machine"])
        machine["isa"] = tuple(machine["isa"])
        machine["caches"] = tuple(CpuCache(**cache) for cache in machine["caches"])
        rest = {key: value for key, value in data.items() if key not in ("schema", "machine", "levels")}
        return cls(machine=Machine(**machine), levels=tuple(CacheLevel(**level) for level in data["levels"]), **rest)


def describe_machine(device: str | torch.device = "cpu") -> Machine:
    """The machine as it is now: threads are those that torch uses at this moment."""
    device = torch.device(device)
    on_gpu = device.type == "cuda"
    properties = torch.cuda.get_device_properties(device) if on_gpu else None
    cpu, isa = _cpu_name_and_isa()
    return Machine(
        cpu=cpu,
        isa=isa,
        threads=torch.get_num_threads(),
        cores=physical_cores(),
        memory_bytes=memory_bytes(),
        caches=_cpu_caches(),
        accelerator=properties.name if properties else None,
        accelerator_bytes=properties.total_memory if properties else None,
        system=f"{platform.system()} {platform.machine()}",
        python=platform.python_version(),
        torch=torch.__version__,
        triton=_version("triton"),
    )


def ceilings(
    device: str | torch.device = "cpu", *, remeasure: bool = False, report: Callable[[str], None] = lambda line: None
) -> Ceilings:
    """This machine's ceilings, from the user's cache if they were measured on the same machine and are not stale.

    Those that were measured while the machine was busy are measured again as soon as it is quiet.

    Args:
        remeasure: measure in any case (some ten seconds).
        report: told in a sentence when a measurement starts.
    """
    from llmlab.measure.ceilings import measure_ceilings

    machine = describe_machine(device)
    file = _file(machine)
    if not remeasure:
        kept = _read(file)
        if kept is not None and not kept.stale and not (kept.disturbed and load_now() < QUIET):
            return kept
    report("measuring this machine's ceilings: about ten seconds, once in thirty days")
    measured = measure_ceilings(machine, torch.device(device))
    _write(file, measured)
    return measured


def stored_ceilings(device: str | torch.device = "cpu") -> Ceilings | None:
    """What the user's cache holds for this machine, whatever its age; None if nothing was measured yet."""
    return _read(_file(describe_machine(device)))


def _file(machine: Machine) -> Path:
    return measurements_dir() / f"ceilings-{machine.fingerprint}.json"


def ceilings_table(device: str | torch.device = "auto", *, datasheets: bool = True) -> pd.DataFrame:
    """One row a device and dtype: FLOP/s, bandwidth, ridge, and whether that was measured or is from a datasheet.

    This machine first, with a row for each memory level; then, if asked, the known GPUs, for comparison.
    """
    import pandas as pd

    if str(device) == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    measured = roofs_table(ceilings(device))
    return pd.concat([measured, roofs_table(None)], ignore_index=True) if datasheets else measured


def roofs_table(measured: Ceilings | None) -> pd.DataFrame:
    """Roofs in words and round numbers: those of measured ceilings, or of the datasheets if that is None; never of both."""
    import pandas as pd

    if measured is None:
        roofs = [sheet.roof() for sheet in DATASHEETS.values()]
    else:
        levels = [level.level for level in measured.levels] or ["memory"]
        roofs = [measured.roof(dtype, level) for dtype in measured.gemm for level in levels]
    rows = [
        {
            "device": roof.device,
            "dtype": roof.dtype,
            "memory": roof.memory,
            "TFLOP/s": round(roof.flops / 1e12, 3),
            "GB/s": round(roof.bandwidth / 1e9, 1),
            "ridge (FLOP/byte)": round(roof.ridge, 1),
            "source": "datasheet" if measured is None else _source(measured),
        }
        for roof in roofs
    ]
    return pd.DataFrame(rows)


def _source(measured: Ceilings) -> str:
    busy = f", machine {measured.load:.0%} busy with something else" if measured.disturbed else ""
    return f"measured {measured.date[:10]}{busy}"


def measurements_dir() -> Path:
    """Where measurements are kept between runs: ``$LLMLAB_HOME/measurements``, or the user's cache directory."""
    if home := os.environ.get("LLMLAB_HOME"):
        return Path(home).expanduser() / "measurements"
    if sys.platform == "darwin":
        base = Path.home() / "Library" / "Caches"
    else:
        base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return base / "llmlab" / "measurements"


def _read(file: Path) -> Ceilings | None:
    """None for a file that is absent, cut off or of another version: then it is measured anew."""
    try:
        return Ceilings.from_dict(json.loads(file.read_text(encoding="utf-8")))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _write(file: Path, measured: Ceilings) -> None:
    """A machine on which nothing can be kept still gets its ceilings, only anew each time."""
    temporary = file.with_suffix(f".{os.getpid()}.part")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(json.dumps(measured.to_dict(), indent=1), encoding="utf-8")
        temporary.replace(file)
    except OSError:
        return


def _cpu_name_and_isa() -> tuple[str, tuple[str, ...]]:
    name, flags = "", set()
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "model name":
                name = name or " ".join(value.split())
            elif key.strip() in ("flags", "Features"):
                flags = flags or set(value.split())
    except OSError:
        pass
    return name or platform.processor() or platform.machine(), tuple(feature for feature in _ISA if feature in flags)


def _cpu_caches() -> tuple[CpuCache, ...]:
    """Data caches of the first CPU, from Linux' sysfs; empty where there is none."""
    found = []
    for folder in sorted(Path("/sys/devices/system/cpu/cpu0/cache").glob("index*")):
        try:
            read = {name: (folder / name).read_text().strip() for name in ("level", "type", "size", "shared_cpu_list")}
        except OSError:
            continue
        if read["type"] != "Instruction":
            factor = {"K": 2**10, "M": 2**20, "G": 2**30}.get(read["size"][-1:], 1)
            size = int(read["size"].rstrip("KMG")) * factor
            found.append(CpuCache(f"L{read['level']}", size, _count_cpus(read["shared_cpu_list"])))
    return tuple(found)


def _count_cpus(cpu_list: str) -> int:
    """``0-3,8`` is five."""
    spans = [span.split("-") for span in cpu_list.split(",") if span]
    return sum(int(span[-1]) - int(span[0]) + 1 for span in spans)


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
