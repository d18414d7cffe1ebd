"""What the engine's norm is compared with, written in the same way: LayerNorm, and the residual addition by itself."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from torch import Tensor

from llmlab.ops.cpu import simd
from llmlab.ops.cpu.memory import empty
from llmlab.ops.cpu.parallel import Kernel, arg, kernel, number, take

_SERIAL_BELOW = 1 << 13  # elements, as in the engine's norm


@kernel("qqqqqqqd")
def _layer_norm(kind: str) -> Callable[[int], None]:
    size = simd.itemsize(kind)
    step = simd.LANES * size

    def body(p: int) -> None:
        x, x_stride, weight, bias, out = arg(p, 0), arg(p, 1), arg(p, 2), arg(p, 3), arg(p, 4)
        rows, hidden, eps = arg(p, 5), arg(p, 6), number(p, 7)
        row_bytes = hidden * size
        rows_together = min(max(rows // 8, 1), 16)
        while True:
            first = take(p, rows_together)
            if first >= rows:
                break
            for row in range(first, min(first + rows_together, rows)):
                source = x + row * x_stride
                sums = simd.splat(np.float32(0.0))
                for i in range(0, row_bytes, step):
                    sums = sums + simd.load(kind, source + i)
                mean = simd.splat(simd.total(sums) / np.float32(hidden))
                squares = simd.splat(np.float32(0.0))
                for i in range(0, row_bytes, step):  # a second look at a row that is in the L1 cache: exact, and cheap
                    centred = simd.load(kind, source + i) - mean
                    squares = simd.fma(centred, centred, squares)
                variance = simd.total(squares) / np.float32(hidden)
                factor = simd.splat(np.float32(1.0) / np.sqrt(variance + np.float32(eps)))
                for i in range(0, row_bytes, step):
                    normed = simd.rounded(kind, (simd.load(kind, source + i) - mean) * factor)
                    shifted = simd.fma(normed, simd.load(kind, weight + i), simd.load(kind, bias + i))
                    simd.store(kind, out + row * row_bytes + i, shifted)

    return body


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """``x [T, H]`` with H a multiple of 16, all of one dtype, weight and bias contiguous. Raises ValueError for anything else."""
    rows, hidden = x.shape
    kind = simd.KINDS.get(x.dtype)
    fits = kind is not None and weight.dtype == bias.dtype == x.dtype and hidden % simd.LANES == 0 and x.stride(1) == 1
    if not fits or not weight.is_contiguous() or not bias.is_contiguous():
        raise ValueError(
            f"needs rows of a multiple of {simd.LANES} elements, all of one dtype, not {tuple(x.shape)} {x.dtype}"
        )
    out = empty(x.shape, x.dtype)
    one: Kernel = _layer_norm(kind)
    run = one.serial if rows * hidden < _SERIAL_BELOW else one.parallel
    run(
        x.data_ptr(),
        x.stride(0) * x.element_size(),
        weight.data_ptr(),
        bias.data_ptr(),
        out.data_ptr(),
        rows,
        hidden,
        eps,
    )
    return out


@kernel("qqqq")
def _add(kind: str) -> Callable[[int], None]:
    step = simd.LANES * simd.itemsize(kind)

    def body(p: int) -> None:
        x, y, out, nbytes = arg(p, 0), arg(p, 1), arg(p, 2), arg(p, 3)
        together = min(max(nbytes // 8, step), 1 << 17) // step * step
        while True:
            first = take(p, together)
            if first >= nbytes:
                break
            for i in range(first, min(first + together, nbytes), step):
                simd.store(kind, out + i, simd.load(kind, x + i) + simd.load(kind, y + i))

    return body


def add(x: Tensor, y: Tensor) -> Tensor:
    """``x + y``, contiguous, of one shape and dtype, a multiple of 16 elements. Raises ValueError for anything else."""
    kind = simd.KINDS.get(x.dtype)
    alike = kind is not None and x.shape == y.shape and x.dtype == y.dtype and x.is_contiguous() and y.is_contiguous()
    if not alike or x.numel() % simd.LANES:
        raise ValueError(
            f"needs two contiguous tensors alike, of a multiple of {simd.LANES} elements, not {tuple(x.shape)}"
        )
    out = empty(x.shape, x.dtype)
    one: Kernel = _add(kind)
    run = one.serial if x.numel() < _SERIAL_BELOW else one.parallel
    run(x.data_ptr(), y.data_ptr(), out.data_ptr(), x.nbytes)
    return out
