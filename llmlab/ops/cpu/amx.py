"""The matrix product on AMX tile registers: 16 tokens × 32 inputs times 32 inputs × 16 outputs in one instruction.

Eight tile registers: sums for (1 or 2 blocks of 16 tokens) × (1 to 3 panels), the tokens' inputs, the panels. The inputs are
read as they lie, a panel's next 32 inputs are one tile of 1 KB (Intel's Architecture Instruction Set Extensions, ch. 3).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic
from torch import Tensor

from llmlab.ops.cpu import simd
from llmlab.ops.cpu.parallel import arg, kernel, piece, take
from llmlab.ops.cpu.simd import I8, VOID, call, int64, pointer
from llmlab.ops.cpu.tiles import literal

BLOCK = 16  # tokens in a tile
STEP = 32  # inputs in a tile
_TILE_BYTES = 1024
_INPUTS = (
    640 << 10
)  # bytes of inputs, about, that all panels of a thread go over before the next: they stay in the L2 cache


@functools.cache
def available() -> bool:
    """Whether this processor and system let this process use AMX on bfloat16."""
    ask = getattr(torch.cpu, "_init_amx", None)  # Linux grants the registers on request only
    return simd.cpu_has("amx-tile") and simd.cpu_has("amx-bf16") and ask is not None and bool(ask())


def _tile(b: ir.IRBuilder, name: str, *args: ir.Value | int) -> None:
    """A tile instruction; plain integers are tile registers."""
    call(b, f"llvm.x86.{name}", VOID, *[ir.Constant(I8, a) if isinstance(a, int) else a for a in args])


@intrinsic
def configure(typingctx: Any, config: Any) -> Any:
    def codegen(context: Any, b: ir.IRBuilder, sig: Any, args: Any) -> Any:
        _tile(b, "ldtilecfg", pointer(b, args[0], I8))
        return context.get_dummy_value()

    return types.void(types.int64), codegen


@intrinsic
def release(typingctx: Any) -> Any:
    def codegen(context: Any, b: ir.IRBuilder, sig: Any, args: Any) -> Any:
        _tile(b, "tilerelease")
        return context.get_dummy_value()

    return types.void(), codegen


@intrinsic(prefer_literal=True)
def product(
    typingctx: Any,
    blocks: Any,
    panels: Any,
    add: Any,
    once: Any,
    w: Any,
    panel_bytes: Any,
    x: Any,
    x_stride: Any,
    in_features: Any,
    sums: Any,
    sums_stride: Any,
) -> Any:
    """``sums[16·blocks, 16·panels] = x · panels`` in float32.

    The first four are literals. ``add``: ``+=``. ``once``: 1 for inputs that come by once while the panels come again and again:
    their tiles are loaded past the L1 cache, in which then the panels stay.
    """
    num_blocks, num_panels, adding = literal(blocks), literal(panels), literal(add)
    load_inputs = "tileloaddt164" if literal(once) else "tileloadd64"
    spare = 8 - num_blocks * num_panels - num_blocks
    total = lambda m, n: m * num_panels + n
    inputs = lambda m: num_blocks * num_panels + m
    weights = lambda n: num_blocks * num_panels + num_blocks + n % spare

    def codegen(context: Any, b: ir.IRBuilder, sig: Any, args: Any) -> Any:
        *_, w, panel_bytes, x, x_stride, in_features, sums, sums_stride = args
        below = [b.mul(int64(BLOCK * m), x_stride) for m in range(num_blocks)]
        of_tile = {
            (m, n): pointer(b, b.add(sums, b.add(b.mul(int64(BLOCK * m), sums_stride), int64(n * 64))), I8)
            for m in range(num_blocks)
            for n in range(num_panels)
        }
        for (m, n), place in of_tile.items():
            if adding:
                _tile(b, "tileloadd64", total(m, n), place, sums_stride)
            else:
                _tile(b, "tilezero", total(m, n))
        with cgutils.for_range_slice(b, int64(0), in_features, int64(STEP)) as (k, _):
            for n in range(num_panels):
                at = b.add(b.add(w, b.mul(panel_bytes, int64(n))), b.mul(k, int64(_TILE_BYTES // STEP)))
                _tile(b, "tileloadd64", weights(n), pointer(b, at, I8), int64(64))
                for m in range(num_blocks):
                    if n == 0:
                        row = b.add(b.add(x, below[m]), b.mul(k, int64(2)))
                        _tile(b, load_inputs, inputs(m), pointer(b, row, I8), x_stride)
                    _tile(b, "tdpbf16ps", total(m, n), inputs(m), weights(n))
        for (m, n), place in of_tile.items():
            _tile(b, "tilestored64", total(m, n), place, sums_stride)
        return context.get_dummy_value()

    return types.void(blocks, panels, add, once, *[types.int64] * 7), codegen


@kernel("qqqqqqqqqqqq")
def _multiply(blocks: int, panels: int) -> Callable[[int], None]:
    """``blocks`` · 16 tokens at a time; the last time the last ones, some of them once more. Fewer tokens than that: once,
    with tiles of fewer rows (``config``)."""
    step, once = BLOCK * blocks, blocks - 1

    def body(p: int) -> None:
        x, x_stride, num_tokens, w, panel_bytes, in_features = (
            arg(p, 0),
            arg(p, 1),
            arg(p, 2),
            arg(p, 3),
            arg(p, 4),
            arg(p, 5),
        )
        bias, out, out_stride, units, threads, config = (
            arg(p, 6),
            arg(p, 7),
            arg(p, 8),
            arg(p, 9),
            arg(p, 10),
            arg(p, 11),
        )
        groups = (num_tokens * 2 * in_features + _INPUTS - 1) // _INPUTS
        tokens_in_cache = (max(num_tokens // max(groups, 1), 1) + step - 1) // step * step
        sums = simd.scratch(8 * 1024)
        configure(config)
        first, last = piece(take(p, 1), units, threads)
        while first < last:
            for begin in range(0, num_tokens, tokens_in_cache):
                end = min(begin + tokens_in_cache, num_tokens)
                for n in range(first * panels, last * panels, panels):
                    for start in range(begin, end, step):
                        t = max(min(start, num_tokens - step), 0)
                        xt, wn = x + t * x_stride, w + n * panel_bytes
                        product(blocks, panels, 0, once, wn, panel_bytes, xt, x_stride, in_features, sums, 64 * panels)
                        for i in range(min(step, num_tokens - t)):
                            for j in range(panels):
                                value = simd.load("f32", sums + (i * panels + j) * 64)
                                if bias:
                                    value = value + simd.load("bf16", bias + (n + j) * 32)
                                simd.store("bf16", out + (t + i) * out_stride + (n + j) * 32, value)
            first, last = piece(take(p, 1), units, threads)
        release()

    return body


@functools.cache
def config_for(rows: tuple[int, ...], panels: int) -> np.ndarray:
    """The tile configuration (palette 1), 64 bytes, for blocks of so many tokens each."""
    config = np.zeros(64, np.uint8)
    config[0] = 1
    sums = [r for r in rows for _ in range(panels)]
    of_tile = [*sums, *rows]
    config[48:56] = of_tile + [BLOCK] * (8 - len(of_tile))
    config[16:32].view(np.uint16)[:] = 64  # bytes of a row
    return config


@njit
def write_config(address, rows):  # type: ignore[no-untyped-def]
    """What :func:`config_for` makes for two panels and blocks of 16 and of ``rows`` tokens, written by a kernel."""
    simd.store_int64(address, 1)
    for i in (8, 32, 40, 56):
        simd.store_int64(address + i, 0)
    for i in (16, 24):
        simd.store_int64(address + i, 0x0040_0040_0040_0040)
    simd.store_int64(address + 48, 0x1010_0010_0000_1010 | rows << 16 | rows << 24 | rows << 40)


def multiply(x: Tensor, panels: Tensor, bias: Tensor | None, out: Tensor) -> None:
    """``out = x · wᵀ + bias`` for bfloat16; the number of inputs is a multiple of :data:`STEP`."""
    tokens, in_features = x.shape
    blocks = 1 if tokens <= BLOCK else 2
    together = next(n for n in (3, 2, 1) if panels.shape[0] % n == 0 and (n < 3 or blocks == 1))
    rows = (min(tokens, BLOCK),) if blocks == 1 else (BLOCK, min(tokens - BLOCK, BLOCK))
    _multiply(blocks, together).parallel(
        x.data_ptr(),
        x.stride(0) * 2,
        tokens,
        panels.data_ptr(),
        in_features * 2 * simd.LANES,
        in_features,
        0 if bias is None else bias.data_ptr(),
        out.data_ptr(),
        out.stride(0) * 2,
        panels.shape[0] // together,
        torch.get_num_threads(),
        config_for(rows, together).ctypes.data,
    )
