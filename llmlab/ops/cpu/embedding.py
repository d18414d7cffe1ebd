"""Rows copied by index: the embedding look-up, and the gather of each request's last token."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from llmlab.ops import embedding as embedding_op
from llmlab.ops import gather_last_tokens as gather_op
from llmlab.ops.cpu import simd
from llmlab.ops.cpu.memory import empty
from llmlab.ops.cpu.panels import PackedLinear
from llmlab.ops.cpu.parallel import arg, kernel, report, take

_SERIAL_BELOW = 1 << 17  # bytes; below, one core is done before another is awake


@kernel("qqqqqqqq")
def _gather(index_bytes: int) -> Callable[[int], None]:
    """out[i] = table[index[i] + shift], rows of ``row_bytes`` bytes."""

    def body(p: int) -> None:
        index, count, shift, table, rows = arg(p, 0), arg(p, 1), arg(p, 2), arg(p, 3), arg(p, 4)
        row_bytes, row_stride, out = arg(p, 5), arg(p, 6), arg(p, 7)
        while True:
            first = take(p, 16)
            if first >= count:
                break
            for i in range(first, min(first + 16, count)):
                at = index + index_bytes * i
                row = (simd.load_int64(at) if index_bytes == 8 else simd.load_int32(at)) + shift
                if 0 <= row < rows:
                    simd.copy(out + i * row_bytes, table + row * row_stride, row_bytes)
                else:
                    report(p, i + 1)

    return body


@kernel("qqqqqq")
def _gather_packed(index_bytes: int, unit: int, widen: bool) -> Callable[[int], None]:
    """out[i] = row ``index[i]`` of panels in which ``unit`` bytes of a row are followed by those of the other fifteen.

    widen: from bfloat16 to float32.
    """
    line = unit * simd.LANES

    def body(p: int) -> None:
        index, count, panels, rows = arg(p, 0), arg(p, 1), arg(p, 2), arg(p, 3)
        row_bytes, out = arg(p, 4), arg(p, 5)
        while True:
            first = take(p, 4)
            if first >= count:
                break
            for i in range(first, min(first + 4, count)):
                at = index + index_bytes * i
                row = simd.load_int64(at) if index_bytes == 8 else simd.load_int32(at)
                if 0 <= row < rows:
                    source = panels + row // simd.LANES * simd.LANES * row_bytes + row % simd.LANES * unit
                    if widen:
                        for k in range(row_bytes // unit):
                            at, target = source + k * line, out + (i * row_bytes + k * unit) * 2
                            simd.store("f32", target, simd.load_one("bf16", at))
                            simd.store("f32", target + 4, simd.load_one("bf16", at + 2))
                    else:
                        for k in range(row_bytes // unit):
                            simd.copy(out + i * row_bytes + k * unit, source + k * line, unit)
                else:
                    report(p, i + 1)

    return body


def _packed_rows(table: PackedLinear, index: Tensor) -> Tensor:
    """Rows of a weight in panels: sixteen times the bytes are read, of a weight that is read whole by the LM head anyway."""
    rows, width = table.shape
    row_bytes = width * table.itemsize
    out = empty((index.shape[0], width), table.dtype)
    widen = table.dtype != table.panels.dtype
    one = _gather_packed(index.element_size(), row_bytes // table.panels.shape[1], widen)
    run = one.serial if simd.LANES * row_bytes * index.shape[0] < _SERIAL_BELOW else one.parallel
    bad = run(index.data_ptr(), index.shape[0], table.panels.data_ptr(), rows, row_bytes, out.data_ptr())
    if bad:
        raise IndexError(f"row {index[bad - 1].item()} is outside a table of {rows} rows")
    return out


def _rows(table: Tensor, index: Tensor, shift: int) -> Tensor:
    rows, width = table.shape
    size = table.element_size()
    out = empty((index.shape[0], width), table.dtype)
    one = _gather(index.element_size())
    run = one.serial if out.numel() * size < _SERIAL_BELOW else one.parallel
    bad = run(
        index.data_ptr(),
        index.shape[0],
        shift,
        table.data_ptr(),
        rows,
        width * size,
        table.stride(0) * size,
        out.data_ptr(),
    )
    if bad:
        raise IndexError(f"row {index[bad - 1].item() + shift} is outside a table of {rows} rows")
    return out


def embedding(token_ids: Tensor, weight: Tensor | PackedLinear) -> Tensor:
    if isinstance(weight, PackedLinear):
        index = token_ids.contiguous() if token_ids.dtype == torch.int32 else token_ids.long().contiguous()
        return _packed_rows(weight, index)
    if token_ids.dtype not in (torch.int64, torch.int32) or weight.stride(1) != 1:
        return embedding_op.reference(token_ids, weight)
    return _rows(weight, token_ids.contiguous(), 0)


def gather_last_tokens(x: Tensor, query_start_loc: Tensor) -> Tensor:
    if query_start_loc.dtype not in (torch.int64, torch.int32) or x.stride(1) != 1:
        return gather_op.reference(x, query_start_loc)
    return _rows(x, query_start_loc.contiguous()[1:], -1)
