"""What the operating system says: cores, memory, and how busy the machine is with something else.

On Linux from ``/proc`` and ``sysconf``, elsewhere from psutil: a measurement needs no package that a GPU machine may lack.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

BUSY = 0.25
"""Share of the machine that works for others from which on a clock says more about them than about what it clocks."""

SHORTEST_WINDOW = 0.1
"""Seconds. The system counts busy time in ticks of 10 ms: over less than this it says nothing."""


def physical_cores() -> int:
    """Cores, without counting hardware threads of one core twice."""
    folders = Path("/sys/devices/system/cpu").glob("cpu[0-9]*/topology/thread_siblings_list")
    if siblings := {text for text in map(_read, folders) if text}:
        return len(siblings)
    try:
        import psutil
    except ImportError:
        return os.cpu_count() or 1
    return psutil.cpu_count(logical=False) or os.cpu_count() or 1


def memory_bytes() -> int:
    """Main memory."""
    return _meminfo("MemTotal", "total")


def available_bytes() -> int:
    """Main memory that can be had without swapping."""
    return _meminfo("MemAvailable", "available")


class LoadMeter:
    """How busy the machine is with other things than this process, from the moment the meter is made."""

    def __init__(self) -> None:
        self._start = time.perf_counter(), time.process_time(), _busy_seconds()

    @property
    def share(self) -> float:
        """Of all hardware threads' time since then, the share that others took: 0 to 1. Time stolen by a hypervisor counts.

        0 where the window is too short, or the system does not say.
        """
        started, own, busy = self._start
        wall = time.perf_counter() - started
        if wall < SHORTEST_WINDOW:
            return 0.0
        others = _busy_seconds() - busy - (time.process_time() - own)
        return min(max(others / (wall * (os.cpu_count() or 1)), 0.0), 1.0)


def load_now(seconds: float = 0.3) -> float:
    """The share of the machine that others use during the next ``seconds``, in which this process sleeps."""
    meter = LoadMeter()
    time.sleep(seconds)
    return meter.share


def _busy_seconds() -> float:
    """Time that all hardware threads together have spent with anything but idling or waiting for a disk, since the start."""
    first = next(iter(_lines("/proc/stat")), "")
    if first.startswith("cpu "):
        user, nice, system, _idle, _iowait, irq, softirq, steal = map(int, (first.split()[1:] + ["0"] * 8)[:8])
        return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")
    try:
        import psutil
    except ImportError:
        return 0.0
    times = psutil.cpu_times()
    return sum(times) - times.idle


def _meminfo(linux: str, elsewhere: str) -> int:
    for line in _lines("/proc/meminfo"):
        if line.startswith(f"{linux}:"):
            return int(line.split()[1]) * 1024
    try:
        import psutil
    except ImportError:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return getattr(psutil.virtual_memory(), elsewhere)


def _lines(path: str) -> Iterator[str]:
    yield from (_read(Path(path)) or "").splitlines()


def _read(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8")
    except OSError:
        return None
