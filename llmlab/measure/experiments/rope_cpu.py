"""The engine's rotary kernel with its cosines and sines computed, sixteen at a time, instead of looked up: for comparison only.

The sine and cosine are those of Cephes' single-precision library: Cody & Waite's reduction by multiples of pi/2 in three parts,
then polynomials of degree 7 and 8 within pi/4; within two units in the last place up to about 100,000 radians.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from llvmlite import ir
from numba import types
from numba.extending import intrinsic
from torch import Tensor

from llmlab.ops.cpu import simd
from llmlab.ops.cpu.memory import empty
from llmlab.ops.cpu.parallel import arg, kernel, take

_SERIAL_BELOW = 1 << 13  # elements, as in the engine's rotation
_LARGEST_HALF = 256
_HALF_PI = (1.5703125, 4.837512969970703125e-4, 7.54978995489188216e-8)
_SINE = (-1.9515295891e-4, 8.3321608736e-3, -1.6666654611e-1)
_COSINE = (2.443315711809948e-5, -1.388731625493765e-3, 4.166664568298827e-2)


def _emit_turned(b: ir.IRBuilder, x: ir.Value, quarter_turns: int) -> ir.Value:
    """``sin(x + quarter_turns · pi/2)`` of each lane."""
    number = lambda value: ir.Constant(simd.VEC, [value] * simd.LANES)
    wide = ir.VectorType(simd.I32, simd.LANES)
    integer = lambda value: ir.Constant(wide, [value] * simd.LANES)
    n = simd.call(b, "llvm.rint.v16f32", simd.VEC, b.fmul(x, number(0.6366197723675814)))
    r = x
    for part in _HALF_PI:
        r = simd.emit_fma(b, n, number(-part), r)
    square = b.fmul(r, r)

    def polynomial(coefficients: tuple[float, ...]) -> ir.Value:
        y = number(coefficients[0])
        for c in coefficients[1:]:
            y = simd.emit_fma(b, y, square, number(c))
        return y

    sine = simd.emit_fma(b, b.fmul(polynomial(_SINE), square), r, r)
    cosine = simd.emit_fma(b, square, number(-0.5), number(1.0))
    cosine = simd.emit_fma(b, b.fmul(square, square), polynomial(_COSINE), cosine)
    quadrant = b.add(b.fptosi(n, wide), integer(quarter_turns))
    odd = b.icmp_signed("!=", b.and_(quadrant, integer(1)), integer(0))
    chosen = b.bitcast(b.select(odd, cosine, sine), wide)
    sign = b.shl(b.and_(quadrant, integer(2)), integer(30))
    return b.bitcast(b.xor(chosen, sign), simd.VEC)


@intrinsic
def sin(typingctx: Any, x: Any) -> Any:
    """``sin(x)`` of each lane."""
    code = lambda context, b, sig, args: _emit_turned(b, args[0], 0)
    return simd.float32x16(simd.float32x16), code


@intrinsic
def cos(typingctx: Any, x: Any) -> Any:
    """``cos(x)`` of each lane. Beside :func:`sin` of the same x, LLVM does what both share once."""
    code = lambda context, b, sig, args: _emit_turned(b, args[0], 1)
    return simd.float32x16(simd.float32x16), code


@intrinsic
def to_float32(typingctx: Any, x: Any) -> Any:
    """``to_float32(int64) -> float32``."""
    return types.float32(types.int64), lambda context, b, sig, args: b.sitofp(args[0], simd.F32)


@kernel("qqqqqqqqqqqqq")
def _rotate_computed(kind: str) -> Callable[[int], None]:
    size = simd.itemsize(kind)

    def body(p: int) -> None:
        positions, inv_freq, rotary_dim, tokens, head_dim = arg(p, 0), arg(p, 1), arg(p, 2), arg(p, 3), arg(p, 4)
        half = rotary_dim // 2
        angles = simd.scratch(2048)  # this token's cosines, then, 1024 bytes on, its sines
        together = min(max(tokens // 8, 1), 8)
        while True:
            first = take(p, together)
            if first >= tokens:
                break
            for t in range(first, min(first + together, tokens)):
                position = simd.splat(to_float32(simd.load_int64(positions + 8 * t)))
                for i in range(0, half, simd.LANES):
                    angle = position * simd.load("f32", inv_freq + 4 * i)
                    simd.store("f32", angles + 4 * i, cos(angle))
                    simd.store("f32", angles + 1024 + 4 * i, sin(angle))
                for which in range(2):  # q, then k
                    x, stride = arg(p, 5 + 4 * which), arg(p, 6 + 4 * which)
                    heads, out = arg(p, 7 + 4 * which), arg(p, 8 + 4 * which)
                    for h in range(heads):
                        source = x + t * stride + h * head_dim * size
                        target = out + (t * heads + h) * head_dim * size
                        for i in range(0, half, simd.LANES):
                            c, s = simd.load("f32", angles + 4 * i), simd.load("f32", angles + 1024 + 4 * i)
                            a = simd.load(kind, source + i * size)
                            b = simd.load(kind, source + (half + i) * size)
                            simd.store(kind, target + i * size, a * c - b * s)
                            simd.store(kind, target + (half + i) * size, b * c + a * s)
                        for i in range(rotary_dim, head_dim, simd.LANES):
                            simd.store(kind, target + i * size, simd.load(kind, source + i * size))

    return body


def rotary_embedding_computed(positions: Tensor, q: Tensor, k: Tensor, inv_freq: Tensor) -> tuple[Tensor, Tensor]:
    """``q [T, Hq, D]`` and ``k [T, Hkv, D]`` turned by ``positions [T]`` (int64) times ``inv_freq [rotary_dim/2]`` (float32).

    Raises ValueError for a shape or dtype that the kernel does not take.
    """
    tokens, heads, head_dim = q.shape
    kind, half = simd.KINDS.get(q.dtype), inv_freq.numel()
    fits = (
        kind is not None and k.dtype == q.dtype and inv_freq.dtype == torch.float32 and positions.dtype == torch.int64
    )
    if not fits or half % simd.LANES or head_dim % simd.LANES or not 0 < 2 * half <= min(head_dim, 2 * _LARGEST_HALF):
        raise ValueError(
            f"needs half a rotary dimension that is a multiple of {simd.LANES} and at most {_LARGEST_HALF}, in a head that is one"
            f" too, and dtypes as the engine has them; got {half}, {head_dim}, {q.dtype}, {positions.dtype}"
        )
    q, k = simd.heads_together(q), simd.heads_together(k)
    positions, inv_freq = positions.contiguous(), inv_freq.contiguous()
    out_q, out_k = empty(q.shape, q.dtype), empty(k.shape, k.dtype)
    one, size = _rotate_computed(kind), q.element_size()
    run = one.serial if tokens * heads * head_dim < _SERIAL_BELOW else one.parallel
    sides = [(x.data_ptr(), x.stride(0) * size, x.shape[1], out.data_ptr()) for x, out in ((q, out_q), (k, out_k))]
    run(positions.data_ptr(), inv_freq.data_ptr(), 2 * half, tokens, head_dim, *sides[0], *sides[1])
    return out_q, out_k
