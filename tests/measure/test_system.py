"""The operating system's figures against psutil's, and a load meter that tells others' work from its own."""

from __future__ import annotations

import time

import psutil
import pytest

from llmlab.measure import system
from llmlab.measure.system import LoadMeter, available_bytes, load_now, memory_bytes, physical_cores


def test_cores_and_memory_are_psutils() -> None:
    assert physical_cores() == psutil.cpu_count(logical=False)
    assert memory_bytes() == psutil.virtual_memory().total
    assert available_bytes() == pytest.approx(psutil.virtual_memory().available, rel=0.2)


def test_busy_time_is_psutils() -> None:
    times = psutil.cpu_times()
    idle = times.idle + getattr(times, "iowait", 0)
    counted_twice = getattr(times, "guest", 0) + getattr(times, "guest_nice", 0)
    assert system._busy_seconds() == pytest.approx(sum(times) - idle - counted_twice, rel=1e-3, abs=1)


@pytest.fixture
def clocks(monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """Wall, own and everybody's time, turned by hand, on four hardware threads."""
    now = {"wall": 0.0, "own": 0.0, "busy": 100.0}
    monkeypatch.setattr(system.os, "cpu_count", lambda: 4)
    monkeypatch.setattr(system.time, "perf_counter", lambda: now["wall"])
    monkeypatch.setattr(system.time, "process_time", lambda: now["own"])
    monkeypatch.setattr(system, "_busy_seconds", lambda: now["busy"])
    return now


@pytest.mark.parametrize(
    ("wall", "own", "busy", "share"),
    [(1, 4, 4, 0), (1, 0, 2, 0.5), (2, 1, 3, 0.25), (1, 2, 1.9, 0), (0.05, 0, 1, 0), (1, 0, 9, 1)],
)
def test_what_others_took(clocks: dict[str, float], wall: float, own: float, busy: float, share: float) -> None:
    meter = LoadMeter()
    clocks.update(wall=wall, own=own, busy=100 + busy)
    assert meter.share == pytest.approx(share)


def test_load_now_sleeps_and_measures() -> None:
    start = time.process_time()
    assert 0 <= load_now(0.12) <= 1
    assert time.process_time() - start < 0.1
