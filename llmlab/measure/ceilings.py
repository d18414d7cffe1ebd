"""The micro-benchmarks behind :func:`llmlab.measure.hardware.ceilings`: matrix products, reads, copies, and an op on nothing."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import numpy as np
import torch

from llmlab.measure.system import LoadMeter, available_bytes
from llmlab.measure.timer import measure, torch_threads

if TYPE_CHECKING:
    from llmlab.measure.hardware import CacheLevel, Ceilings, Machine

GEMM_SIZES = {"cpu": (512, 1024, 2048), "cuda": (4096, 8192)}
GEMM_SECONDS = 0.2
"""A product that takes longer is not made larger: some dtypes are emulated on some machines, a thousand times slower."""
GEMM_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
BEYOND_CACHES = 2
"""A buffer is read from memory, and not from a cache, when it is so many times the last level's size."""
MEMORY_SHARE = 0.4
"""Of the free memory, what the buffers may take."""
LARGEST_BUFFER = 2 * 2**30


def measure_ceilings(
    machine: Machine,
    device: torch.device,
    *,
    gemm_sizes: Sequence[int] | None = None,
    largest_buffer: int = LARGEST_BUFFER,
) -> Ceilings:
    """Measure everything once: about ten seconds on two cores, about two on a GPU.

    Args:
        gemm_sizes, largest_buffer (bytes): smaller ones measure no ceiling, but everything else that this function does.
    """
    with torch_threads(machine.threads):
        return _measure_all(machine, device, gemm_sizes or GEMM_SIZES[device.type], largest_buffer)


def _measure_all(machine: Machine, device: torch.device, gemm_sizes: Sequence[int], largest_buffer: int) -> Ceilings:
    from llmlab.measure.hardware import Ceilings

    meter = LoadMeter()
    gemm = {str(dtype).removeprefix("torch."): _gemm(dtype, device, gemm_sizes) for dtype in GEMM_DTYPES}
    last_cache = max((cache.size for cache in machine.caches), default=0)
    if device.type == "cuda":
        last_cache = torch.cuda.get_device_properties(device).L2_cache_size
    nbytes = _buffer_bytes(last_cache, device, largest_buffer)
    read, copy = _main_memory(nbytes, device, machine.threads)
    levels = _cache_levels(machine, nbytes, read) if device.type == "cpu" else ()
    return Ceilings(
        machine=machine,
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        gemm=gemm,
        read_bandwidth=read,
        copy_bandwidth=copy,
        beyond_caches=nbytes >= BEYOND_CACHES * last_cache,
        levels=levels,
        call_overhead=_call_overhead(device),
        load=round(meter.share, 2),
    )


def _gemm(dtype: torch.dtype, device: torch.device, sizes: Sequence[int]) -> float:
    """FLOP/s of a square matrix product ``a · bᵀ``, the layout of a linear layer: the best over sizes and repeats."""
    best = 0.0
    for n in sizes:
        a, b = (torch.randn(n, n, device=device).to(dtype) for _ in range(2))
        product = functools.partial(torch.nn.functional.linear, a, b)
        seconds = measure(product, device=device, warmup=1, repeats=15, max_seconds=1.0).best
        best = max(best, 2 * n**3 / seconds)
        if seconds * 8 > GEMM_SECONDS:
            break
    return best


def _buffer_bytes(last_cache: int, device: torch.device, largest: int) -> int:
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else available_bytes()
    wanted = max(4 * last_cache, 256 * 2**20)
    return int(min(wanted, largest, free * MEMORY_SHARE / 2)) // 4096 * 4096


def _main_memory(nbytes: int, device: torch.device, threads: int) -> tuple[float, float]:
    """Bytes/s of reading a large buffer once, and of copying half of it to the other half (read and written bytes)."""
    buffer = torch.ones(nbytes // 4, device=device)
    half = buffer.numel() // 2
    copy = nbytes / measure(lambda: buffer[half:].copy_(buffer[:half]), device=device, warmup=1, repeats=9).best
    read = nbytes / measure(buffer.sum, device=device, warmup=1, repeats=9).best
    stream = _stream_reader() if device.type == "cpu" else None
    if stream is not None:
        array = buffer.numpy()
        read = max(read, nbytes / measure(lambda: stream(array, 1, threads), warmup=1, repeats=9).best)
    return read, copy


def _cache_levels(machine: Machine, buffer_bytes: int, memory_bandwidth: float) -> tuple[CacheLevel, ...]:
    """Read bandwidth of a working set that half fills each level, read over and over by the threads, each its own part."""
    from llmlab.measure.hardware import CacheLevel

    levels = []
    stream = _stream_reader()
    if stream is not None:
        for cache in machine.caches:
            instances = max(1, machine.threads // cache.shared_by)
            working_set = cache.size * instances // 2
            if working_set > buffer_bytes:
                continue
            array = np.ones(working_set // 4, np.float32)
            reps = max(1, 64 * 2**20 // working_set)
            seconds = measure(lambda a=array, n=reps: stream(a, n, machine.threads), warmup=1, repeats=15).best
            levels.append(CacheLevel(cache.level, working_set, working_set * reps / seconds))
    return (*levels, CacheLevel("memory", buffer_bytes, memory_bandwidth))


def _stream_reader() -> Callable[[np.ndarray, int, int], float] | None:
    """``read(array, reps, threads)``: each thread sums its own part of a float32 array ``reps`` times; None without numba.

    torch's own sum is no help for small arrays: starting its threads takes longer than reading a cache.
    """
    try:
        from numba import njit, prange
    except ImportError:
        return None

    @njit(parallel=True, fastmath=True)
    def read(array, reps, threads):
        part = array.size // threads
        total = 0.0
        for thread in prange(threads):
            mine = array[thread * part : (thread + 1) * part]
            for _ in range(reps):
                subtotal = np.float32(0)
                for i in range(part):
                    subtotal += mine[i]
                total += subtotal
        return total

    return read


def _call_overhead(device: torch.device) -> float:
    """Seconds an op on one element: on a CPU the call itself, on a GPU a launch, many queued behind one another."""
    x = torch.ones(1, device=device)
    calls = 1000

    def once() -> float:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        start = time.perf_counter()
        for _ in range(calls):
            torch.add(x, x)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return (time.perf_counter() - start) / calls

    once()
    return min(once() for _ in range(5))
