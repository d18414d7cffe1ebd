"""RMSNorm in one pass over memory: a row is read once, and while it is written again it still stands in the L1 cache."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from torch import Tensor

from llmlab.ops import norm as reference
from llmlab.ops.cpu import simd
from llmlab.ops.cpu.memory import empty
from llmlab.ops.cpu.parallel import Kernel, arg, kernel, number, take

_SERIAL_BELOW = 1 << 13  # elements; below, one core is done before another is awake


@kernel("qqqqqqqqd")
def _norm(kind: str, fused: bool) -> Callable[[int], None]:
    """Rows of ``hidden`` elements (a multiple of 16): x, its row stride in bytes, the sum to read and write, out."""
    size = simd.itemsize(kind)
    step = simd.LANES * size

    def body(p: int) -> None:
        x, x_stride, residual, summed = arg(p, 0), arg(p, 1), arg(p, 2), arg(p, 3)
        weight, out, rows, hidden, eps = arg(p, 4), arg(p, 5), arg(p, 6), arg(p, 7), number(p, 8)
        row_bytes = hidden * size
        rows_together = min(max(rows // 8, 1), 16)
        while True:
            first = take(p, rows_together)
            if first >= rows:
                break
            for row in range(first, min(first + rows_together, rows)):
                source = x + row * x_stride
                squares = simd.splat(np.float32(0.0))
                for i in range(0, row_bytes, step):
                    v = simd.load(kind, source + i)
                    if fused:
                        v = simd.rounded(kind, v + simd.load(kind, residual + row * row_bytes + i))
                        simd.store(kind, summed + row * row_bytes + i, v)
                    squares = simd.fma(v, v, squares)
                if fused:
                    source = summed + row * row_bytes
                mean = simd.total(squares) / np.float32(hidden)
                factor = simd.splat(np.float32(1.0) / np.sqrt(mean + np.float32(eps)))
                for i in range(0, row_bytes, step):
                    normed = simd.rounded(kind, simd.load(kind, source + i) * factor)
                    simd.store(kind, out + row * row_bytes + i, normed * simd.load(kind, weight + i))

    return body


def _supported(x: Tensor, weight: Tensor) -> bool:
    return x.dtype in simd.KINDS and weight.dtype == x.dtype and x.shape[1] % simd.LANES == 0 and x.stride(1) == 1


def _run(one: Kernel, x: Tensor, residual: Tensor, summed: Tensor, weight: Tensor, out: Tensor, eps: float) -> None:
    rows, hidden = x.shape
    run = one.serial if rows * hidden < _SERIAL_BELOW else one.parallel
    run(
        x.data_ptr(),
        x.stride(0) * x.element_size(),
        residual.data_ptr(),
        summed.data_ptr(),
        weight.data_ptr(),
        out.data_ptr(),
        rows,
        hidden,
        eps,
    )


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    if not _supported(x, weight):
        return reference.rms_norm.reference(x, weight, eps)
    out = empty(x.shape, x.dtype)
    _run(_norm(simd.KINDS[x.dtype], False), x, x, x, weight.contiguous(), out, eps)
    return out


def fused_add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    if not (_supported(x, weight) and residual.dtype == x.dtype):
        return reference.fused_add_rms_norm.reference(x, residual, weight, eps)
    out = empty(x.shape, x.dtype)
    summed = empty(x.shape, x.dtype)
    _run(_norm(simd.KINDS[x.dtype], True), x, residual.contiguous(), summed, weight.contiguous(), out, eps)
    return out, summed
