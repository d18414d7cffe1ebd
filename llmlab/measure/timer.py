"""Clocks that don't fool their reader: warm-up, many repeats, medians, and a spread that travels with every number.

On a GPU each repeat is a pair of CUDA events around one call, with the L2 cache emptied before it. On a CPU it is a wall clock
around as many calls as make it long enough to read. Caches: pass several sets of arguments as ``inputs`` and they are used in
turn, so that no call finds its operands where the last one left them.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from llmlab.measure.system import BUSY, LoadMeter

SHORTEST_SAMPLE = 50e-6
"""Seconds. Calls that are quicker are clocked several at a time, so that reading the clock costs well under 1 %."""


@dataclass(frozen=True)
class Measurement:
    """Seconds of one call, one entry a repeat, in the order in which they were taken.

    ``load``: the share of the machine that worked for others meanwhile; 0 where it was too short to tell.
    """

    samples: tuple[float, ...]
    load: float = 0.0

    def __post_init__(self) -> None:
        if not self.samples:
            raise ValueError("a measurement needs at least one sample")

    @property
    def median(self) -> float:
        return float(np.median(self.samples))

    @property
    def low(self) -> float:
        """10th percentile."""
        return float(np.percentile(self.samples, 10))

    @property
    def high(self) -> float:
        """90th percentile."""
        return float(np.percentile(self.samples, 90))

    @property
    def best(self) -> float:
        return min(self.samples)

    @property
    def repeats(self) -> int:
        return len(self.samples)

    def __str__(self) -> str:
        unit, scale = _unit(self.median)
        return (
            f"{self.median * scale:.3g} {unit} "
            f"(p10 {self.low * scale:.3g}, p90 {self.high * scale:.3g}, {self.repeats} repeats)"
        )


@dataclass(frozen=True)
class Comparison:
    """How many times as fast one thing is as another: the median of the ratios of times, and two intervals around it.

    Attributes:
        ratio: above 1, ``name`` is faster than ``other``.
        low, high: 10th and 90th percentile of the ratios: where a single run falls.
        sure_low, sure_high: interval that holds the median of the ratios with 95 % confidence.
        load: the share of the machine that worked for others meanwhile: if it was high, nothing is decided.
    """

    name: str
    other: str
    ratio: float
    low: float
    high: float
    sure_low: float
    sure_high: float
    load: float = 0.0

    @property
    def inside_spread(self) -> bool:
        """Whether single runs fall on either side of 1."""
        return self.low <= 1.0 <= self.high

    @property
    def disturbed(self) -> bool:
        """Whether so much else ran that the clock decides nothing."""
        return self.load >= BUSY

    @property
    def shown(self) -> bool:
        """Whether the medians differ at all, with 95 % confidence, on a machine quiet enough to tell."""
        return not self.disturbed and not self.sure_low <= 1.0 <= self.sure_high

    def __str__(self) -> str:
        numbers = f"{self.ratio:.2f}× (p10 {self.low:.2f}, p90 {self.high:.2f})"
        if self.disturbed:
            return f"{self.name} against {self.other}: {numbers}, not decided (machine busy)"
        if not self.shown:
            return f"{self.name} against {self.other}: {numbers}, no difference shown"
        faster = f"{self.name} is {'faster' if self.ratio > 1 else 'slower'} than {self.other}: {numbers}"
        return f"{faster}, inside the spread of single runs" if self.inside_spread else faster


def measure(
    run: Callable[..., Any],
    *,
    inputs: Sequence[tuple] = ((),),
    device: str | torch.device = "cpu",
    warmup: int = 3,
    repeats: int = 25,
    max_seconds: float = 2.0,
) -> Measurement:
    """Clock ``run(*inputs[i])``, the sets of arguments in turn.

    Args:
        warmup: calls before the first sample; each set of arguments gets at least one (compilation, page faults, lazy init).
        max_seconds: stop after about so long, with at least three samples, even if ``repeats`` are not reached.
    """
    return measure_in_turns(
        {"": run}, inputs=inputs, device=device, warmup=warmup, repeats=repeats, max_seconds=max_seconds
    )[""]


def measure_in_turns(
    runs: Mapping[str, Callable[..., Any]],
    *,
    inputs: Sequence[tuple] = ((),),
    device: str | torch.device = "cpu",
    warmup: int = 3,
    repeats: int = 25,
    max_seconds: float = 2.0,
) -> dict[str, Measurement]:
    """Clock several ways of doing the same, one sample of each in turn, so that a machine that drifts drifts for all.

    Returns measurements of equal length, whose samples belong together pairwise: :func:`compare` uses that.
    """
    if repeats < 3 or warmup < 0 or not inputs or not runs:
        raise ValueError(
            f"need repeats >= 3, warmup >= 0, inputs and runs; got {repeats}, {warmup}, {len(inputs)}, {len(runs)}"
        )
    device = torch.device(device)
    clock = _CudaClock(device) if device.type == "cuda" else _WallClock()
    for run in runs.values():
        for i in range(max(warmup, len(inputs))):
            run(*inputs[i % len(inputs)])
    clock.settle()
    clocked = {name: clock.prepare(run, inputs) for name, run in runs.items()}
    samples: dict[str, list[Any]] = {name: [] for name in runs}
    meter = LoadMeter()
    started = time.perf_counter()
    for i in range(repeats):
        for name, sample in clocked.items():
            samples[name].append(sample(i))
        if i >= 2 and time.perf_counter() - started > max_seconds:
            break
    clock.settle()
    load = meter.share
    return {name: Measurement(tuple(clock.seconds(taken)), load) for name, taken in samples.items()}


def compare(name: str, measured: Measurement, other: str, against: Measurement) -> Comparison:
    """How many times as fast ``measured`` is as ``against``. Samples taken in turns are compared pair by pair."""
    if measured.repeats == against.repeats:
        ratios = np.sort(np.array(against.samples) / np.array(measured.samples))
    else:
        ratios = np.sort(np.divide.outer(np.array(against.samples), np.array(measured.samples)).ravel())
    outside = _order_statistic(min(measured.repeats, against.repeats), len(ratios))
    low, high = np.percentile(ratios, (10, 90))
    return Comparison(
        name,
        other,
        float(np.median(ratios)),
        float(low),
        float(high),
        float(ratios[outside]),
        float(ratios[-1 - outside]),
        max(measured.load, against.load),
    )


def rotation(make: Callable[[], tuple], cache_bytes: int, most: int = 32) -> list[tuple]:
    """Sets of arguments, made by ``make()``, that together are twice as large as a cache: pass them as ``inputs``."""
    sets = [make()]
    size = sum(a.nbytes for a in sets[0] if isinstance(a, torch.Tensor))
    wanted = math.ceil(2 * cache_bytes / max(size, 1)) + 1
    return sets + [make() for _ in range(min(wanted, most) - 1)]


def _order_statistic(samples: int, ratios: int) -> int:
    """How many sorted values to leave out at either end so that the rest holds the median with 95 % confidence.

    The median lies below the k-th smallest of n samples with probability ``P(Binomial(n, ½) < k)``, whatever their distribution.
    """
    left_out, tail = 0, 0.5**samples
    while tail <= 0.025:
        left_out += 1
        tail += math.comb(samples, left_out) * 0.5**samples
    return min(max(left_out - 1, 0) * ratios // samples, (ratios - 1) // 2)


def _unit(seconds: float) -> tuple[str, float]:
    return next(
        (unit, scale) for unit, scale, least in (("s", 1, 1), ("ms", 1e3, 1e-3), ("µs", 1e6, 0)) if seconds >= least
    )


class _WallClock:
    def settle(self) -> None:
        pass

    def prepare(self, run: Callable[..., Any], inputs: Sequence[tuple]) -> Callable[[int], float]:
        start = time.perf_counter()
        run(*inputs[0])
        once = time.perf_counter() - start
        calls = max(1, math.ceil(SHORTEST_SAMPLE / max(once, 1e-9)))

        def sample(i: int) -> float:
            chosen = [inputs[(i * calls + j) % len(inputs)] for j in range(calls)]
            start = time.perf_counter()
            for arguments in chosen:
                run(*arguments)
            return (time.perf_counter() - start) / calls

        return sample

    def seconds(self, samples: list[float]) -> list[float]:
        return samples


class _CudaClock:
    """Events are read only at the end, so that the device never waits for the host between two samples."""

    def __init__(self, device: torch.device):
        self.device = device
        l2_bytes = torch.cuda.get_device_properties(device).L2_cache_size
        self.flush = torch.empty(2 * l2_bytes // 4, dtype=torch.int32, device=device)

    def settle(self) -> None:
        torch.cuda.synchronize(self.device)

    def prepare(self, run: Callable[..., Any], inputs: Sequence[tuple]) -> Callable[[int], tuple[Any, Any]]:
        def sample(i: int) -> tuple[Any, Any]:
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            self.flush.zero_()
            start.record()
            run(*inputs[i % len(inputs)])
            end.record()
            return start, end

        return sample

    def seconds(self, samples: list[tuple[Any, Any]]) -> list[float]:
        return [start.elapsed_time(end) * 1e-3 for start, end in samples]


@contextmanager
def torch_threads(count: int | None) -> Iterator[None]:
    """Let torch, and with it the CPU kernels, use so many threads inside the block (None: as many as now).

    Afterwards it uses as many as before, whatever was run inside: numba's parallel loops set the number for everybody.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(count or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)
