"""How far below its roof a device is assumed to stay, where nobody measured it. No torch here."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Efficiency:
    """Assumptions, not measurements: which share of a roof real kernels reach, and what a step costs besides.

    Attributes:
        flops: of peak arithmetic in compute-bound ops. bandwidth: of peak bandwidth in memory-bound ones.
        link: of the link's bandwidth, and of the host's.
        link_latency: seconds that a collective takes however little it moves.
        step_overhead: seconds of a step that no op accounts for (host, launches, sampling).

    Raises ValueError for shares outside (0, 1] and negative seconds.
    """

    flops: float = 0.7
    bandwidth: float = 0.8
    link: float = 0.7
    link_latency: float = 10e-6
    step_overhead: float = 1e-3

    def __post_init__(self) -> None:
        for name in ("flops", "bandwidth", "link"):
            if not 0 < getattr(self, name) <= 1:
                raise ValueError(f"efficiency {name} must be a share in (0, 1], got {getattr(self, name)!r}")
        for name in ("link_latency", "step_overhead"):
            if not (math.isfinite(getattr(self, name)) and getattr(self, name) >= 0):
                raise ValueError(f"efficiency {name} must be at least 0 seconds, got {getattr(self, name)!r}")

    def __str__(self) -> str:
        return (
            f"assumed: {self.flops:.0%} of peak FLOP/s, {self.bandwidth:.0%} of bandwidth, {self.link:.0%} of links, "
            f"{self.link_latency * 1e6:g} µs a collective, {self.step_overhead * 1e3:g} ms a step"
        )


PERFECT = Efficiency(1.0, 1.0, 1.0, 0.0, 0.0)
