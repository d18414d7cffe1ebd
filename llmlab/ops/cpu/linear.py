"""x · wᵀ + bias over packed weights, for any number of tokens.

With few tokens the time is the time to read the weights: panels are read once, from front to back, prefetched, and all tokens
take part while a panel is in registers or in the L1 cache. With many it is arithmetic: tiles of tokens × panels with their sums
in registers, on AMX tiles where the processor has them. One layout, one copy of the weights, for both.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from llmlab.ops.cpu import amx, int8, simd
from llmlab.ops.cpu.cast import to_float32
from llmlab.ops.cpu.int8 import Int8Packer, PackedInt8
from llmlab.ops.cpu.memory import empty
from llmlab.ops.cpu.panels import LinearPacker, PackedLinear
from llmlab.ops.cpu.parallel import INPUTS_IN_CACHE, arg, kernel, piece, take
from llmlab.ops.cpu.tiles import panel_tile
from llmlab.ops.quantization import Int8Weight

__all__ = ["Int8Packer", "LinearPacker", "PackedInt8", "PackedLinear", "linear"]


@kernel("qqqqqqqqqqq")
def _multiply(method: str, kind: str, panels: int, tokens: int) -> Callable[[int], None]:
    """Tiles of ``panels`` × ``tokens`` (8, or 4 where registers are few); fewer tokens at the end in tiles of 4, 2 and 1.

    method: see :func:`panel_tile`. kind: of bias and out.
    """
    width = simd.LANES * simd.itemsize(kind)

    def body(p: int) -> None:
        x, x_stride, num_tokens, w, panel_bytes, in_features = (
            arg(p, 0),
            arg(p, 1),
            arg(p, 2),
            arg(p, 3),
            arg(p, 4),
            arg(p, 5),
        )
        bias, out, out_stride, units, threads = arg(p, 6), arg(p, 7), arg(p, 8), arg(p, 9), arg(p, 10)
        bias_width = width if bias else 0
        tokens_in_cache = max(INPUTS_IN_CACHE // (x_stride * tokens), 1) * tokens
        first, last = piece(take(p, 1), units, threads)
        while first < last:
            for begin in range(0, num_tokens, tokens_in_cache):
                end = min(begin + tokens_in_cache, num_tokens)
                for n in range(first * panels, last * panels, panels):
                    wn, bn, on = w + n * panel_bytes, bias + n * bias_width, out + n * width
                    t = begin
                    if t + tokens <= end:  # the first tile fetches the panels, the others find them in the cache
                        xt, ot = x + t * x_stride, on + t * out_stride
                        panel_tile(
                            method,
                            panels,
                            tokens,
                            1,
                            1,
                            kind,
                            wn,
                            panel_bytes,
                            xt,
                            x_stride,
                            in_features,
                            bn,
                            ot,
                            out_stride,
                        )
                        t += tokens
                    while t + tokens <= end:
                        xt, ot = x + t * x_stride, on + t * out_stride
                        panel_tile(
                            method,
                            panels,
                            tokens,
                            1,
                            0,
                            kind,
                            wn,
                            panel_bytes,
                            xt,
                            x_stride,
                            in_features,
                            bn,
                            ot,
                            out_stride,
                        )
                        t += tokens
                    if tokens > 4 and t + 4 <= end:
                        xt, ot = x + t * x_stride, on + t * out_stride
                        panel_tile(
                            method,
                            panels,
                            4,
                            1,
                            1,
                            kind,
                            wn,
                            panel_bytes,
                            xt,
                            x_stride,
                            in_features,
                            bn,
                            ot,
                            out_stride,
                        )
                        t += 4
                    if t + 2 <= end:
                        xt, ot = x + t * x_stride, on + t * out_stride
                        panel_tile(
                            method,
                            panels,
                            2,
                            2,
                            1,
                            kind,
                            wn,
                            panel_bytes,
                            xt,
                            x_stride,
                            in_features,
                            bn,
                            ot,
                            out_stride,
                        )
                        t += 2
                    if t < end:
                        xt, ot = x + t * x_stride, on + t * out_stride
                        panel_tile(
                            method,
                            panels,
                            1,
                            4,
                            1,
                            kind,
                            wn,
                            panel_bytes,
                            xt,
                            x_stride,
                            in_features,
                            bn,
                            ot,
                            out_stride,
                        )
            first, last = piece(take(p, 1), units, threads)

    return body


@functools.cache
def _method(stored: torch.dtype, dtype: torch.dtype) -> str:
    pairs = stored == dtype == torch.bfloat16 and simd.cpu_has("avx512bf16")
    return "bf16dot" if pairs else simd.KINDS[stored]


@functools.cache
def _tile_size(num_panels: int) -> tuple[int, int]:
    """Panels × tokens of a tile: with AVX-512's 32 registers, 3 × 8 sums, 3 vectors of weights, and room to spare."""
    if not simd.cpu_has("avx512f"):
        return 1, 4
    return next(n for n in (3, 2, 1) if num_panels % n == 0), 8


def _multiply_panels(x: Tensor, panels: Tensor, bias: Tensor | None, out: Tensor) -> None:
    method, kind = _method(panels.dtype, x.dtype), simd.KINDS[x.dtype]
    if method in ("bf16", "f16"):
        x = to_float32(x)
    in_features = x.shape[1]
    together, tokens = _tile_size(panels.shape[0])
    _multiply(method, kind, together, tokens).parallel(
        x.data_ptr(),
        x.stride(0) * x.element_size(),
        x.shape[0],
        panels.data_ptr(),
        in_features * simd.LANES * panels.element_size(),
        in_features,
        0 if bias is None else bias.data_ptr(),
        out.data_ptr(),
        out.stride(0) * out.element_size(),
        panels.shape[0] // together,
        torch.get_num_threads(),
    )


def linear(x: Tensor, weight: Tensor | PackedLinear | Int8Weight | PackedInt8, bias: Tensor | None = None) -> Tensor:
    if isinstance(weight, Tensor):
        return torch.nn.functional.linear(x, weight, bias)
    if isinstance(weight, Int8Weight):
        return weight.linear(x, bias)
    if isinstance(weight, PackedInt8):
        return int8.linear(x, weight, bias)
    tokens, in_features = x.shape
    if x.dtype != weight.dtype or in_features != weight.shape[1]:
        raise ValueError(f"x{list(x.shape)} {x.dtype} does not fit the weight {list(weight.shape)} {weight.dtype}")
    if bias is not None and (bias.dtype != x.dtype or bias.shape != weight.shape[:1]):
        raise ValueError(f"bias{list(bias.shape)} {bias.dtype} does not fit {list(weight.shape[:1])} {x.dtype}")
    bias = None if bias is None else bias.contiguous()
    x = x if x.stride(1) == 1 else x.contiguous()
    out = empty((tokens, weight.shape[0]), x.dtype)
    on_tiles = x.dtype == torch.bfloat16 and tokens > 1 and in_features % amx.STEP == 0 and amx.available()
    if tokens:
        (amx.multiply if on_tiles else _multiply_panels)(x, weight.panels, bias, out)
    return out
