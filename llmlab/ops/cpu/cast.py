"""Inputs as float32, by a kernel of this package, so that a recorded step holds the conversion too."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from llmlab.ops.cpu import simd
from llmlab.ops.cpu.memory import empty
from llmlab.ops.cpu.parallel import arg, kernel, take

_SERIAL_BELOW = 1 << 14  # elements; below, one core is done before another is awake


@kernel("qqqqq")
def _to_float32(kind: str) -> Callable[[int], None]:
    size = simd.itemsize(kind)

    def body(p: int) -> None:
        x, stride, rows, columns, out = arg(p, 0), arg(p, 1), arg(p, 2), arg(p, 3), arg(p, 4)
        while True:
            first = take(p, 16)
            if first >= rows:
                break
            for row in range(first, min(first + 16, rows)):
                for i in range(0, columns, simd.LANES):
                    simd.store("f32", out + (row * columns + i) * 4, simd.load(kind, x + row * stride + i * size))

    return body


def to_float32(x: Tensor) -> Tensor:
    """``x[T, n]``, n a multiple of 16 and each row contiguous, as float32; x itself if it is."""
    if x.dtype == torch.float32:
        return x
    out = empty(x.shape, torch.float32)
    one = _to_float32(simd.KINDS[x.dtype])
    run = one.serial if x.numel() < _SERIAL_BELOW else one.parallel
    run(x.data_ptr(), x.stride(0) * x.element_size(), *x.shape, out.data_ptr())
    return out
