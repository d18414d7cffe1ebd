"""What vendors print for known GPUs. Never measured here, and never mixed with what is: a :class:`Roof` names its source.

Matrix rates are dense (vendors like to print those with 2:4 sparsity, twice as high), with float32 accumulation, at boost clock;
bandwidths are of the device's main memory. A kernel reaches less: 70 to 90 % of either is usual.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Roof:
    """Two numbers that bound a computation: FLOP/s of a dtype, bytes/s of a memory; and where they come from."""

    device: str
    dtype: str
    memory: str
    flops: float
    bandwidth: float
    source: Literal["measured", "datasheet"]

    def __str__(self) -> str:
        rates = f"{self.dtype} {self.flops / 1e12:.3g} TFLOP/s, {self.memory} {self.bandwidth / 1e9:.3g} GB/s"
        return f"{self.device}: {rates} ({self.source})"

    @property
    def ridge(self) -> float:
        """Intensity in FLOP/byte at which the two bounds meet: below it memory limits, above it arithmetic."""
        return self.flops / self.bandwidth

    def seconds(self, flops: float, nbytes: float) -> float:
        """The least time that the work can take: whichever of arithmetic and traffic is slower, the other hidden behind it."""
        return max(flops / self.flops, nbytes / self.bandwidth)

    def attainable(self, intensity: float) -> float:
        """FLOP/s that the roof allows at an intensity."""
        return min(self.flops, intensity * self.bandwidth)


@dataclass(frozen=True)
class Datasheet:
    """One GPU as its vendor describes it: FLOP/s by dtype, bytes/s, bytes, and the units that run programs (SMs, or CUs)."""

    name: str
    flops: dict[str, float]
    bandwidth: float
    memory_bytes: float
    multiprocessors: int
    source: str

    def roof(self, dtype: str = "bfloat16") -> Roof:
        """Raises ValueError for a dtype that the device has no matrix units for."""
        if dtype not in self.flops:
            raise ValueError(f"{self.name}: no rate for {dtype!r}; there are {', '.join(self.flops)}")
        return Roof(self.name, dtype, "memory", self.flops[dtype], self.bandwidth, "datasheet")


def _sheet(
    name: str,
    half: float,
    float8: float | None,
    float32: float,
    bandwidth: float,
    gigabytes: float,
    multiprocessors: int,
    source: str,
) -> Datasheet:
    flops = {"bfloat16": half * 1e12, "float16": half * 1e12, "float32": float32 * 1e12}
    if float8 is not None:
        flops["float8"] = float8 * 1e12
    return Datasheet(name, flops, bandwidth * 1e12, gigabytes * 1e9, multiprocessors, source)


# float32 is the rate without matrix units (without TF32), as torch uses by default.
DATASHEETS: dict[str, Datasheet] = {
    sheet.name: sheet
    for sheet in (
        _sheet("A100-80GB SXM", 312, None, 19.5, 2.039, 80, 108, "NVIDIA A100 80GB datasheet (2021)"),
        _sheet("H100 SXM", 989.4, 1978.9, 66.9, 3.35, 80, 132, "NVIDIA H100 architecture whitepaper, SXM5 (2023)"),
        _sheet("H200 SXM", 989.4, 1978.9, 66.9, 4.8, 141, 132, "NVIDIA H200 datasheet (2023)"),
        _sheet(
            "B200 (HGX, 1000 W)", 2250, 4500, 80, 8.0, 180, 148, "NVIDIA Blackwell architecture technical brief (2024)"
        ),
        _sheet("RTX 4090", 165.2, 330.3, 82.6, 1.008, 24, 128, "NVIDIA Ada GPU architecture whitepaper v2 (2023)"),
        _sheet("MI300X", 1307.4, 2614.9, 163.4, 5.3, 192, 304, "AMD Instinct MI300X data sheet (2023)"),
    )
}


def datasheet_of(device_name: str) -> Datasheet | None:
    """The datasheet of a device by the name that its driver gives, or None if it is not among the known ones."""
    keys = {
        "A100-SXM4-80GB": "A100-80GB SXM",
        "H100 80GB HBM3": "H100 SXM",
        "H200": "H200 SXM",
        "B200": "B200 (HGX, 1000 W)",
        "RTX 4090": "RTX 4090",
        "MI300X": "MI300X",
    }
    return next(
        (DATASHEETS[name] for key, name in keys.items() if key in device_name and "GB200" not in device_name), None
    )
