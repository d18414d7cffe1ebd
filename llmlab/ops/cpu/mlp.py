"""SiLU(gate)·up in one pass: two loads and a store for each sixteen outputs, the exponential in registers."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from llmlab.ops import mlp as reference
from llmlab.ops.cpu import simd
from llmlab.ops.cpu.memory import empty
from llmlab.ops.cpu.parallel import arg, kernel, take

_SERIAL_BELOW = 1 << 13  # outputs; below, one core is done before another is awake


@kernel("qqqqq")
def _silu_and_mul(kind: str) -> Callable[[int], None]:
    """Work is dealt in pieces of ``piece`` outputs, a multiple of 16 that divides a row."""
    size = simd.itemsize(kind)

    def body(p: int) -> None:
        x, out, tokens, inner, piece = arg(p, 0), arg(p, 1), arg(p, 2), arg(p, 3), arg(p, 4)
        pieces = inner // piece
        while True:
            index = take(p, 1)
            if index >= tokens * pieces:
                break
            token, begin = index // pieces, (index % pieces) * piece
            for i in range(begin, begin + piece, simd.LANES):
                gate = simd.load(kind, x + (token * 2 * inner + i) * size)
                up = simd.load(kind, x + (token * 2 * inner + inner + i) * size)
                simd.store(kind, out + (token * inner + i) * size, simd.silu(kind, gate) * up)

    return body


def silu_and_mul(x: Tensor) -> Tensor:
    kind, (tokens, width) = simd.KINDS.get(x.dtype), x.shape
    inner = width // 2
    if kind is None or inner % simd.LANES or width != 2 * inner:
        return reference.silu_and_mul.reference(x)
    x, out = x.contiguous(), empty((tokens, inner), x.dtype)
    one = _silu_and_mul(kind)
    run = one.serial if tokens * inner < _SERIAL_BELOW else one.parallel
    run(x.data_ptr(), out.data_ptr(), tokens, inner, inner)
    return out
