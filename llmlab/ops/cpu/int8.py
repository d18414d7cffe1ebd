"""x · wᵀ over weights in 8-bit integers: half the bytes of bfloat16 to read, the products and sums in float32 all the same.

With few tokens the integers are widened in registers, on their way from memory to the multiply-add with float32 inputs. With
AMX tiles and more tokens, a piece of a few panels is widened once into the cache, as bfloat16, and all tokens are multiplied
with it. Either way the scale of an output feature is applied to its sum.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from llvmlite import ir
from numba import types
from numba.extending import intrinsic
from torch import Tensor

from llmlab.ops.cpu import amx, simd
from llmlab.ops.cpu.cast import to_float32
from llmlab.ops.cpu.memory import empty
from llmlab.ops.cpu.panels import LinearPacker
from llmlab.ops.cpu.parallel import INPUTS_IN_CACHE, arg, kernel, piece, take
from llmlab.ops.cpu.simd import LANES, emit_prefetch, int64, pointer
from llmlab.ops.cpu.tiles import PREFETCH_BYTES, emit_int8_pairs, panel_tile
from llmlab.ops.quantization import Int8Weight, quantize_int8

FEATURES = 1024  # input features that are widened at a time
FEW = 4  # up to so many tokens, widening in registers is the faster way: measured
GROUP = 256  # tokens that are multiplied with them before the next ones


@dataclass(frozen=True)
class PackedInt8:
    """An :class:`Int8Weight` laid out for a CPU.

    Attributes:
        shape: ``(out_features, in_features)``. panels: int8 ``[out_features/16, in_features, 16]``.
        scales: float32 ``[out_features]``.
    """

    shape: torch.Size
    panels: Tensor
    scales: Tensor

    @property
    def dtype(self) -> torch.dtype:
        return self.panels.dtype

    @property
    def itemsize(self) -> int:
        return self.panels.itemsize

    def rows(self, begin: int, end: int) -> PackedInt8 | None:
        """The part of the weight with some output features, over the same memory; None unless it is whole panels."""
        if begin % LANES or end % LANES:
            return None
        shape = torch.Size((end - begin, self.shape[1]))
        return PackedInt8(shape, self.panels[begin // LANES : end // LANES], self.scales[begin:end])

    def unpack(self) -> Int8Weight:
        """Row by row again (a copy)."""
        return Int8Weight(self.panels.permute(0, 2, 1).reshape(self.shape), self.scales)


class Int8Packer:
    """Quantises weights and packs them one after another; those that do not divide into panels are quantised only."""

    def __init__(self) -> None:
        self._area = LinearPacker()

    def __call__(self, weight: Tensor) -> PackedInt8 | Int8Weight:
        quantized = quantize_int8(weight)
        out_features, in_features = weight.shape
        if out_features % LANES or in_features % LANES:
            return quantized
        source = quantized.values.view(out_features // LANES, LANES, in_features).permute(0, 2, 1)
        return PackedInt8(weight.shape, self._area.reserve(source).copy_(source), quantized.scales)


@kernel("qqqqqqqqqqqqq")
def _stream(kind: str, panels: int, tokens: int) -> Callable[[int], None]:
    """Tiles of ``panels`` × ``tokens``, fewer tokens at the end; their sums wait on the stack for their scales. x is float32,
    whatever the kind of out and bias."""
    width = LANES * simd.itemsize(kind)

    def body(p: int) -> None:
        x, x_stride, num_tokens, w, panel_bytes, in_features = (
            arg(p, 0),
            arg(p, 1),
            arg(p, 2),
            arg(p, 3),
            arg(p, 4),
            arg(p, 5),
        )
        scales, bias, out, out_stride = arg(p, 6), arg(p, 7), arg(p, 8), arg(p, 9)
        units, threads = arg(p, 10), arg(p, 11)
        row = 64 * panels
        tokens_in_cache = max(INPUTS_IN_CACHE // (x_stride * tokens), 1) * tokens
        sums = simd.scratch(4096)
        first, last = piece(take(p, 1), units, threads)
        while first < last:
            for begin in range(0, num_tokens, tokens_in_cache):
                end = min(begin + tokens_in_cache, num_tokens)
                for n in range(first * panels, last * panels, panels):
                    wn = w + n * panel_bytes
                    t = begin
                    while t < end:
                        xt = x + t * x_stride
                        if t + tokens <= end:
                            count = tokens
                            panel_tile(
                                "i8",
                                panels,
                                tokens,
                                1,
                                1,
                                "f32",
                                wn,
                                panel_bytes,
                                xt,
                                x_stride,
                                in_features,
                                0,
                                sums,
                                row,
                            )
                        elif tokens > 4 and t + 4 <= end:
                            count = 4
                            panel_tile(
                                "i8", panels, 4, 1, 1, "f32", wn, panel_bytes, xt, x_stride, in_features, 0, sums, row
                            )
                        elif t + 2 <= end:
                            count = 2
                            panel_tile(
                                "i8", panels, 2, 2, 1, "f32", wn, panel_bytes, xt, x_stride, in_features, 0, sums, row
                            )
                        else:
                            count = 1
                            panel_tile(
                                "i8", panels, 1, 4, 1, "f32", wn, panel_bytes, xt, x_stride, in_features, 0, sums, row
                            )
                        for i in range(count):
                            for j in range(panels):
                                value = simd.load("f32", sums + (i * panels + j) * 64)
                                value = value * simd.load("f32", scales + (n + j) * 64)
                                if bias:
                                    value = value + simd.load(kind, bias + (n + j) * width)
                                simd.store(kind, out + (t + i) * out_stride + (n + j) * width, value)
                        t += count
            first, last = piece(take(p, 1), units, threads)

    return body


@intrinsic
def widen(typingctx: Any, source: Any, target: Any) -> Any:
    """``widen(source, target)``: two rows of a panel, 32 integers, as sixteen pairs of bfloat16; prefetches."""

    def codegen(context: Any, b: ir.IRBuilder, sig: Any, args: Any) -> Any:
        source, target = args
        emit_prefetch(b, b.add(source, int64(PREFETCH_BYTES)))
        pairs = emit_int8_pairs(b, source)
        b.store(pairs, pointer(b, target, pairs.type)).align = 64
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), codegen


@kernel("qqqqqqqqqqqqq")
def _multiply_tiles(blocks: int, panels: int) -> Callable[[int], None]:
    """On AMX tiles, ``blocks`` · 16 tokens at a time, as :func:`llmlab.ops.cpu.amx.multiply`."""
    step, once = amx.BLOCK * blocks, blocks - 1
    block_bytes = step * panels * 64
    room = GROUP // step * block_bytes
    wide_bytes = FEATURES * LANES * 2
    wide_room = wide_bytes * panels

    def body(p: int) -> None:
        x, x_stride, num_tokens, w, panel_bytes, in_features = (
            arg(p, 0),
            arg(p, 1),
            arg(p, 2),
            arg(p, 3),
            arg(p, 4),
            arg(p, 5),
        )
        scales, bias, out, out_stride = arg(p, 6), arg(p, 7), arg(p, 8), arg(p, 9)
        units, threads, config = arg(p, 10), arg(p, 11), arg(p, 12)
        sums, wide = simd.scratch(room), simd.scratch(wide_room)
        amx.configure(config)
        first, last = piece(take(p, 1), units, threads)
        while first < last:
            for n in range(first * panels, last * panels, panels):
                for begin in range(0, num_tokens, GROUP):
                    end = min(begin + GROUP, num_tokens)
                    for k in range(0, in_features, FEATURES):
                        features = min(FEATURES, in_features - k)
                        for j in range(panels):
                            source, target = w + (n + j) * panel_bytes + k * LANES, wide + j * wide_bytes
                            for i in range(0, features, 2):
                                widen(source + i * LANES, target + i * LANES * 2)
                        to = sums
                        for start in range(begin, end, step):
                            xt = x + max(min(start, num_tokens - step), 0) * x_stride + 2 * k
                            if k:
                                amx.product(
                                    blocks, panels, 1, once, wide, wide_bytes, xt, x_stride, features, to, 64 * panels
                                )
                            else:
                                amx.product(
                                    blocks, panels, 0, once, wide, wide_bytes, xt, x_stride, features, to, 64 * panels
                                )
                            to += block_bytes
                    at = sums
                    for start in range(begin, end, step):
                        t = max(min(start, num_tokens - step), 0)
                        for i in range(min(step, num_tokens - t)):
                            for j in range(panels):
                                value = simd.load("f32", at + (i * panels + j) * 64)
                                value = value * simd.load("f32", scales + (n + j) * 64)
                                if bias:
                                    value = value + simd.load("bf16", bias + (n + j) * 32)
                                simd.store("bf16", out + (t + i) * out_stride + (n + j) * 32, value)
                        at += block_bytes
            first, last = piece(take(p, 1), units, threads)
        amx.release()

    return body


def _together(num_panels: int, most: int) -> int:
    return next(n for n in range(most, 0, -1) if num_panels % n == 0)


def linear(x: Tensor, weight: PackedInt8, bias: Tensor | None) -> Tensor:
    """``x · wᵀ + bias`` in x's dtype."""
    tokens, in_features = x.shape
    if x.dtype not in simd.KINDS or in_features != weight.shape[1]:
        raise ValueError(f"x{list(x.shape)} {x.dtype} does not fit the weight {list(weight.shape)} {weight.dtype}")
    if bias is not None and (bias.dtype != x.dtype or bias.shape != weight.shape[:1]):
        raise ValueError(f"bias{list(bias.shape)} {bias.dtype} does not fit {list(weight.shape[:1])} {x.dtype}")
    bias = None if bias is None else bias.contiguous()
    x = x if x.stride(1) == 1 else x.contiguous()
    num_panels = weight.panels.shape[0]
    out = empty((tokens, weight.shape[0]), x.dtype)
    if x.dtype == torch.bfloat16 and tokens > FEW and in_features % amx.STEP == 0 and amx.available():
        blocks = 1 if tokens <= amx.BLOCK else 2
        together = _together(num_panels, 3 if blocks == 1 else 2)
        rows = (tokens,) if blocks == 1 else (amx.BLOCK, min(tokens - amx.BLOCK, amx.BLOCK))
        run, last = _multiply_tiles(blocks, together), amx.config_for(rows, together).ctypes.data
    else:
        together, tile = (_together(num_panels, 3), 8) if simd.cpu_has("avx512f") else (1, 4)
        run, last = _stream(simd.KINDS[x.dtype], together, tile), 0
        x = to_float32(x)
    if tokens:
        run.parallel(
            x.data_ptr(),
            x.stride(0) * x.element_size(),
            tokens,
            weight.panels.data_ptr(),
            in_features * LANES,
            in_features,
            weight.scales.data_ptr(),
            0 if bias is None else bias.data_ptr(),
            out.data_ptr(),
            out.stride(0) * out.element_size(),
            num_panels // together,
            torch.get_num_threads(),
            last,
        )
    return out
