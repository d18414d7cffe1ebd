"""The GPUs that kernels are compiled for without having one: their limits, and their rates per clock and multiprocessor.

Limits are from NVIDIA's CUDA programming guide ("Compute capabilities", technical specifications) and AMD's CDNA3 instruction
set manual. Rates are the vendors' peak figures divided by multiprocessors and boost clock: A100-SXM 80 GB (312 TFLOP/s dense
bf16, 2.039 TB/s, 108 SMs, 1.41 GHz), H200-SXM (989 TFLOP/s, 4.8 TB/s, 132 SMs, 1.83 GHz), B200 (2250 TFLOP/s, 8 TB/s, 148 SMs,
1.85 GHz), MI300X (1307 TFLOP/s, 5.3 TB/s, 304 CUs, 2.1 GHz).
"""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Target:
    """One architecture. Sizes in bytes, counts per multiprocessor (SM or CU), rates per clock and multiprocessor."""

    name: str
    backend: Literal["cuda", "hip"]
    arch: int | str
    warp_size: int
    registers: int  # 32-bit, over all threads
    registers_per_thread: int
    register_granule: int  # registers a warp is given at a time
    shared_memory: int
    shared_memory_per_cta: int
    shared_memory_reserved: int  # the system's, per CTA
    warps: int
    ctas: int
    issue_rate: float  # warp instructions
    tensor_rate: float  # dense bf16 FLOPs
    special_rate: float  # exp2, rsqrt, ... by lane
    memory_rate: float  # bytes of device memory


_KIB = 1024
PARTITIONS = (
    4  # schedulers of a multiprocessor, or vector units of a compute unit: a warp's registers lie in one of them
)

TARGETS: dict[str, Target] = {
    target.name: target
    for target in (
        Target("sm_80", "cuda", 80, 32, 65536, 255, 256, 164 * _KIB, 163 * _KIB, _KIB, 64, 32, 4, 2048, 16, 13.4),
        Target("sm_90", "cuda", 90, 32, 65536, 255, 256, 228 * _KIB, 227 * _KIB, _KIB, 64, 32, 4, 4096, 16, 19.9),
        Target("sm_100", "cuda", 100, 32, 65536, 255, 256, 228 * _KIB, 227 * _KIB, _KIB, 64, 32, 4, 8192, 16, 29.2),
        # A wave of 64 lanes occupies its 16-lane unit for four clocks: one instruction a clock over the four units.
        Target(
            "gfx942", "hip", "gfx942", 64, 4 * 512 * 64, 512, 8 * 64, 64 * _KIB, 64 * _KIB, 0, 32, 16, 1, 2048, 16, 8.3
        ),
    )
}


@dataclass(frozen=True)
class Occupancy:
    """How many CTAs fit on one multiprocessor, the share of its warps that makes, and what stops the next one."""

    ctas: int
    share: float
    limited_by: str


def occupancy(target: Target, registers: int, shared_memory: int, warps: int) -> Occupancy:
    """CTAs of ``warps`` warps with ``registers`` per thread and ``shared_memory`` bytes each; 0 where one does not fit."""
    if min(registers, shared_memory) < 0 or warps < 1:
        raise ValueError(
            f"registers {registers}, shared_memory {shared_memory} and warps {warps} must not be negative (warps: 0)"
        )
    granule = target.register_granule
    per_warp = -(-max(registers, 1) * target.warp_size // granule) * granule
    resident = target.registers // PARTITIONS // per_warp * PARTITIONS  # each partition has its own part of the file
    limits = {
        "registers": resident // warps,
        "shared memory": target.shared_memory // max(shared_memory + target.shared_memory_reserved, 1),
        "warps": target.warps // warps,
        "CTAs": target.ctas,
    }
    if shared_memory > target.shared_memory_per_cta:
        limits["shared memory"] = 0
    limiting = min(limits, key=limits.__getitem__)
    ctas = limits[limiting]
    return Occupancy(ctas, ctas * warps / target.warps, limiting)
