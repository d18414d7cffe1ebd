"""The machine's description against the operating system's own figures; ceilings kept, re-measured, and told from datasheets."""

from __future__ import annotations

import dataclasses
import json
import os
from datetime import UTC, datetime, timedelta
from pathlib import Path

import psutil
import pytest
import torch

from llmlab.measure import ceilings as benchmarks
from llmlab.measure import hardware
from llmlab.measure.datasheets import DATASHEETS, Roof, datasheet_of
from llmlab.measure.hardware import CacheLevel, Ceilings, CpuCache, Machine, ceilings, describe_machine
from llmlab.measure.timer import torch_threads

MACHINE = Machine(
    cpu="a CPU",
    isa=("avx2",),
    threads=4,
    cores=4,
    memory_bytes=8 << 30,
    caches=(CpuCache("L1", 32768, 1), CpuCache("L2", 1 << 20, 1), CpuCache("L3", 16 << 20, 4)),
    accelerator=None,
    accelerator_bytes=None,
    system="Linux x86_64",
    python="3.11.0",
    torch="2.13.0",
    triton=None,
)
MEASURED = Ceilings(
    machine=MACHINE,
    date=datetime.now(UTC).isoformat(timespec="seconds"),
    gemm={"float32": 2e11, "bfloat16": 4e11},
    read_bandwidth=2e10,
    copy_bandwidth=2.5e10,
    beyond_caches=True,
    levels=(CacheLevel("L2", 1 << 19, 1e11), CacheLevel("L3", 8 << 20, 5e10), CacheLevel("memory", 1 << 30, 2e10)),
    call_overhead=1e-6,
    load=0.0,
)


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """Counts measurements instead of making them; the user's cache is an empty folder."""
    monkeypatch.setenv("LLMLAB_HOME", str(tmp_path))
    calls: list[str] = []

    def fake(machine: Machine, device: torch.device) -> Ceilings:
        calls.append(device.type)
        return dataclasses.replace(MEASURED, machine=machine, date=datetime.now(UTC).isoformat(timespec="seconds"))

    monkeypatch.setattr(benchmarks, "measure_ceilings", fake)
    return calls


def kept_file(tmp_path: Path) -> Path:
    (file,) = (tmp_path / "measurements").glob("ceilings-*.json")
    return file


def test_describes_this_machine_as_the_system_does() -> None:
    machine = describe_machine()
    assert machine.threads == torch.get_num_threads()
    assert machine.memory_bytes == psutil.virtual_memory().total
    assert machine.torch == torch.__version__
    assert machine.cpu
    reported = {"L1": "SC_LEVEL1_DCACHE_SIZE", "L2": "SC_LEVEL2_CACHE_SIZE", "L3": "SC_LEVEL3_CACHE_SIZE"}
    for cache in machine.caches:
        size = os.sysconf(reported[cache.level]) if reported.get(cache.level) in os.sysconf_names else 0
        assert size in (0, cache.size)  # 0: the C library does not know
    assert machine.cpu in str(machine)


def test_fingerprint_changes_with_what_matters_only() -> None:
    same = dataclasses.replace(MACHINE, python="3.12.1")
    assert MACHINE.fingerprint == same.fingerprint
    for change in ({"threads": 2}, {"cpu": "another"}, {"torch": "2.14.0"}, {"accelerator": "a GPU"}, {"isa": ()}):
        assert dataclasses.replace(MACHINE, **change).fingerprint != MACHINE.fingerprint


@pytest.mark.parametrize(("text", "count"), [("0", 1), ("0-3", 4), ("0-3,8", 5), ("0,2,4-5", 4)])
def test_counts_a_cpu_list(text: str, count: int) -> None:
    assert hardware._count_cpus(text) == count


def test_ceilings_survive_json() -> None:
    assert Ceilings.from_dict(json.loads(json.dumps(MEASURED.to_dict()))) == MEASURED
    with pytest.raises(ValueError, match="schema"):
        Ceilings.from_dict(MEASURED.to_dict() | {"schema": 0})


def test_a_second_call_measures_nothing(measured: list[str]) -> None:
    lines: list[str] = []
    first = ceilings(report=lines.append)
    assert ceilings(report=lines.append) == first
    assert measured == ["cpu"]
    assert len(lines) == 1


def test_measures_again_on_request(measured: list[str]) -> None:
    ceilings()
    ceilings(remeasure=True)
    assert len(measured) == 2


@pytest.mark.parametrize("damage", ["stale", "cut off", "other schema"])
def test_measures_again_what_can_not_be_trusted(measured: list[str], tmp_path: Path, damage: str) -> None:
    ceilings()
    file = kept_file(tmp_path)
    data = json.loads(file.read_text())
    if damage == "stale":
        data["date"] = (datetime.now(UTC) - timedelta(days=hardware.MAX_AGE_DAYS + 1)).isoformat()
    elif damage == "other schema":
        data["schema"] = -1
    file.write_text(json.dumps(data)[: -20 if damage == "cut off" else None])
    ceilings()
    assert len(measured) == 2


@pytest.mark.parametrize(("load_then", "load_now", "measurements"), [(0.9, 0.05, 2), (0.9, 0.9, 1), (0.05, 0.05, 1)])
def test_measures_again_when_the_machine_has_become_quiet(
    measured: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    load_then: float,
    load_now: float,
    measurements: int,
) -> None:
    ceilings()
    file = kept_file(tmp_path)
    file.write_text(json.dumps(json.loads(file.read_text()) | {"load": load_then}))
    monkeypatch.setattr(hardware, "load_now", lambda: load_now)
    found = ceilings()
    assert len(measured) == measurements
    assert found.disturbed == (load_then > 0.1 and measurements == 1)
    assert ("busy" in hardware.ceilings_table("cpu", datasheets=False)["source"].iloc[0]) == found.disturbed


def test_a_machine_that_can_keep_nothing_still_gets_ceilings(
    measured: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("LLMLAB_HOME", str(tmp_path / "file"))
    assert ceilings().read_bandwidth == MEASURED.read_bandwidth


def test_roof_of_a_dtype_over_a_memory() -> None:
    roof = MEASURED.roof(torch.bfloat16)
    assert (roof.flops, roof.bandwidth, roof.source, roof.memory) == (4e11, 2e10, "measured", "memory")
    assert roof.ridge == pytest.approx(20)
    assert MEASURED.roof("float32", "L3").bandwidth == 5e10
    with pytest.raises(ValueError, match="float16"):
        MEASURED.roof("float16")
    with pytest.raises(ValueError, match="L4"):
        MEASURED.roof("float32", "L4")


@pytest.mark.parametrize(
    ("nbytes", "level"), [(1000, "L2"), (4 << 20, "L2"), ((4 << 20) + 1, "L3"), (16 << 20, "L3"), (17 << 20, "memory")]
)
def test_level_that_holds_a_working_set(nbytes: int, level: str) -> None:
    assert MEASURED.level_holding(nbytes) == level  # four private L2 caches hold 4 MiB together; L1 was not measured


def test_table_keeps_measured_and_printed_figures_apart(measured: list[str]) -> None:
    table = hardware.ceilings_table("cpu")
    datasheets = table[table["source"] == "datasheet"]
    assert set(datasheets["device"]) == set(DATASHEETS)
    assert table["source"].iloc[0].startswith("measured 20")
    assert not set(table[table["source"] != "datasheet"]["device"]) & set(DATASHEETS)
    assert len(hardware.ceilings_table("cpu", datasheets=False)) == len(table) - len(DATASHEETS)


def test_measuring_leaves_torch_its_threads() -> None:
    """numba's parallel loops set OpenMP's number of threads for everybody."""
    with torch_threads(1):
        benchmarks.measure_ceilings(describe_machine(), torch.device("cpu"), gemm_sizes=(16,), largest_buffer=1 << 16)
        assert torch.get_num_threads() == 1


def test_micro_benchmarks_measure_every_ceiling() -> None:
    machine = describe_machine()
    found = benchmarks.measure_ceilings(machine, torch.device("cpu"), gemm_sizes=(32, 64), largest_buffer=1 << 20)
    assert set(found.gemm) == {"float32", "bfloat16", "float16"}
    assert min(found.gemm.values()) > 0
    assert found.read_bandwidth > 0 and found.copy_bandwidth > 0 and found.call_overhead > 0
    assert found.levels[-1].level == "memory"
    last = max((cache.size for cache in machine.caches), default=0)
    assert found.beyond_caches == (2 * last <= 1 << 20), "a buffer that fits a cache says nothing about memory"


def test_stream_reader_reads_everything() -> None:
    np = pytest.importorskip("numpy")
    pytest.importorskip("numba")
    array = np.arange(1000, dtype=np.float32)
    assert benchmarks._stream_reader()(array, 3, 2) == pytest.approx(3 * array.sum())


def test_datasheets_are_dense_and_name_their_source() -> None:
    for sheet in DATASHEETS.values():
        assert sheet.source
        assert sheet.roof().source == "datasheet"
        if "float8" in sheet.flops:  # twice the half-precision rate; a sparse figure would be four times
            assert sheet.flops["float8"] / sheet.flops["bfloat16"] == pytest.approx(2, rel=1e-3)
    with pytest.raises(ValueError, match="float8"):
        DATASHEETS["A100-80GB SXM"].roof("float8")


@pytest.mark.parametrize(
    ("name", "ridge"),
    [("A100-80GB SXM", 153), ("H100 SXM", 295), ("H200 SXM", 206), ("RTX 4090", 164), ("MI300X", 247)],
)
def test_ridge_of_known_gpus(name: str, ridge: float) -> None:
    assert DATASHEETS[name].roof().ridge == pytest.approx(ridge, abs=0.6)


@pytest.mark.parametrize(
    ("driver", "name"),
    [
        ("NVIDIA A100-SXM4-80GB", "A100-80GB SXM"),
        ("NVIDIA H100 80GB HBM3", "H100 SXM"),
        ("NVIDIA H200", "H200 SXM"),
        ("NVIDIA B200", "B200 (HGX, 1000 W)"),
        ("NVIDIA GeForce RTX 4090", "RTX 4090"),
        ("AMD Instinct MI300X", "MI300X"),
        ("NVIDIA GB200", None),
        ("NVIDIA A100-PCIE-40GB", None),
        ("Tesla T4", None),
    ],
)
def test_finds_the_datasheet_by_the_drivers_name(driver: str, name: str | None) -> None:
    sheet = datasheet_of(driver)
    assert (sheet.name if sheet else None) == name


def test_roof_bounds_time_and_rate() -> None:
    roof = Roof("x", "bfloat16", "memory", flops=100.0, bandwidth=10.0, source="measured")
    assert roof.ridge == 10
    assert roof.seconds(flops=50, nbytes=100) == 10
    assert roof.seconds(flops=5000, nbytes=100) == 50
    assert (roof.attainable(1), roof.attainable(10), roof.attainable(99)) == (10, 100, 100)


@pytest.mark.gpu
def test_ceilings_of_a_gpu_stay_under_its_datasheet() -> None:
    machine = describe_machine("cuda")
    found = benchmarks.measure_ceilings(machine, torch.device("cuda"))
    sheet = datasheet_of(machine.accelerator or "")
    assert found.levels == ()
    if sheet is not None:
        assert 0.3 * sheet.flops["bfloat16"] < found.gemm["bfloat16"] <= 1.05 * sheet.flops["bfloat16"]
        assert 0.5 * sheet.bandwidth < found.copy_bandwidth <= 1.05 * sheet.bandwidth
