"""Stored measurements: whole files only, what is not described is refused, and what went in comes out of the tables."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from llmlab.measure import measurements
from llmlab.measure.claims import judge
from llmlab.measure.hardware import CacheLevel, Ceilings, CpuCache, Machine
from llmlab.measure.measurements import load, main, new_entry, read, slug, store, stored_findings, write

MACHINE = Machine(
    cpu="A(R) CPU",
    isa=("avx2",),
    threads=2,
    cores=2,
    memory_bytes=8 << 30,
    caches=(CpuCache("L3", 16 << 20, 2),),
    accelerator=None,
    accelerator_bytes=None,
    system="Linux x86_64",
    python="3.11.0",
    torch="2.13.0",
    triton=None,
)
CEILINGS = Ceilings(
    machine=MACHINE,
    date="2026-01-02T03:04:05+00:00",
    gemm={"float32": 2e11, "bfloat16": 4e11},
    read_bandwidth=2e10,
    copy_bandwidth=2.5e10,
    beyond_caches=True,
    levels=(CacheLevel("L3", 8 << 20, 5e10), CacheLevel("memory", 1 << 30, 2e10)),
    call_overhead=1e-6,
    load=0.1,
)
KERNEL = {
    "op": "rms_norm", "dtype": "bfloat16", "shape": "T=1", "implementation": "torch", "seconds": 1e-5, "low": 9e-6,
    "high": 2e-5, "repeats": 25, "flops": 4.0, "bytes": 8.0, "load": 0.0,
}  # fmt: skip


@pytest.fixture
def entry() -> dict[str, Any]:
    made = new_entry("campaign", MACHINE, {"minutes": 1})
    made |= {"date": "2026-01-02T03:04:05+00:00", "ceilings": CEILINGS.to_dict(), "kernels": [KERNEL]}
    made["findings"] = [asdict(judge("C04", {"slot": 137}, machine="a machine"))]
    return made


def test_what_is_stored_is_loaded(entry: dict[str, Any], tmp_path: Path) -> None:
    file = store(entry, tmp_path)
    assert file.name == "2026-01-02-a-cpu-2-threads.json"
    assert read(file) == json.loads(json.dumps(entry))
    found = load(tmp_path)
    assert found.kernels[["op", "seconds", "device"]].to_dict("records") == [
        {"op": "rms_norm", "seconds": 1e-5, "device": "A(R) CPU, 2 threads"}
    ]
    assert len(found.ceilings) == 4
    assert set(found.ceilings["flops_per_s"]) == {2e11, 4e11}
    assert found.findings["verdict"].tolist() == ["confirmed"]
    assert found.engine.empty and found.correctness.empty
    assert [finding.numbers for finding in stored_findings(tmp_path)] == [{"slot": 137}]


def test_a_second_run_of_a_day_replaces_what_it_measured_only(entry: dict[str, Any], tmp_path: Path) -> None:
    store(json.loads(json.dumps(entry)), tmp_path)
    again = new_entry("report", MACHINE, {}) | {"date": entry["date"]}
    again["findings"] = [
        asdict(judge("C04", {"slot": 1}, machine="a machine")),
        asdict(judge("C11", {"smallest_mb": 2, "largest_mb": 67}, machine="a machine")),
    ]
    kept = read(store(again, tmp_path))
    assert kept["kernels"] == [KERNEL]
    assert kept["ceilings"] == json.loads(json.dumps(CEILINGS.to_dict()))
    assert [(f["claim"], f["numbers"]) for f in kept["findings"]] == [
        ("C04", {"slot": 1}),
        ("C11", {"smallest_mb": 2, "largest_mb": 67}),
    ]


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        ({"schema": 0}, "schema 0"),
        ({"kernels": [{"op": "x"}]}, r"kernels\[0\] lacks bytes"),
        ({"findings": [{"claim": "C04", "numbers": {"slots": 1}}]}, "C04 has the numbers"),
        ({"ceilings": {"schema": 99}}, "ceilings of schema"),
    ],
)
def test_what_is_not_described_is_refused(
    entry: dict[str, Any], tmp_path: Path, damage: dict[str, Any], message: str
) -> None:
    file = tmp_path / "x.json"
    write(entry | damage, file)
    with pytest.raises(ValueError, match=message):
        read(file)
    with pytest.raises(ValueError, match=message):
        load(tmp_path)


def test_missing_parts_and_cut_off_files_are_named(entry: dict[str, Any], tmp_path: Path) -> None:
    file = tmp_path / "x.json"
    del entry["engine"]
    write(entry, file)
    with pytest.raises(ValueError, match=r"x\.json: the entry lacks engine"):
        read(file)
    file.write_text(file.read_text()[:-30])
    with pytest.raises(ValueError, match=r"x\.json"):
        read(file)


def test_writing_leaves_a_whole_file_or_none(entry: dict[str, Any], tmp_path: Path) -> None:
    file = tmp_path / "x.json"
    write(entry, file)
    before = file.read_text()
    with pytest.raises(ValueError, match="not JSON compliant"):
        write(entry | {"kernels": [KERNEL | {"seconds": float("nan")}]}, file)
    assert file.read_text() == before
    assert [path.name for path in tmp_path.iterdir()] == ["x.json"]


def test_a_reports_findings_become_an_entry(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report, into = tmp_path / "report", tmp_path / "into"
    judge("C04", {"slot": 137}, machine="a machine", out=report)
    manifest = {
        "started": "2026-02-03T04:05:06+00:00", "command": {"model": "m"}, "commit": "abc", "dirty": False,
        "ceilings": CEILINGS.to_dict(), "notebooks": [{"name": "01", "error": None, "seconds": 3.0}],
    }  # fmt: skip
    (report / "manifest.json").write_text(json.dumps(manifest))
    assert main(["--from-report", str(report), "--into", str(into)]) == 0
    (file,) = into.glob("*.json")
    assert file.name == "2026-02-03-a-cpu-2-threads.json"
    assert load(into).findings["claim"].tolist() == ["C04"]
    assert main(["--into", str(into)]) == 0
    assert "1 findings" in capsys.readouterr().out
    with pytest.raises(ValueError, match="holds no report"):
        measurements.from_report(tmp_path)


@pytest.mark.parametrize(
    ("device", "name"),
    [("NVIDIA H200", "nvidia-h200"), ("Intel(R) Xeon(R) Processor, 2 threads", "intel-xeon-processor-2-threads")],
)
def test_slug(device: str, name: str) -> None:
    assert slug(device) == name


def test_what_the_project_stores_is_valid() -> None:
    found = load()
    for table in (found.kernels, found.engine, found.correctness, found.findings):
        assert table.empty or table["device"].str.len().min() > 0
