"""RoPE straight from the joined QKV rows: q and k are read where the projection left them and written turned, once."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from llmlab.ops import rope as reference
from llmlab.ops.cpu import simd
from llmlab.ops.cpu.memory import empty
from llmlab.ops.cpu.parallel import arg, kernel, report, take

_SERIAL_BELOW = 1 << 13  # elements; below, one core is done before another is awake


@kernel("qqqqqqqqqqqqqq")
def _rotate(kind: str) -> Callable[[int], None]:
    """Half the rotary dimension and the rest of a head are multiples of 16. Strides are those of a token, in bytes."""
    size = simd.itemsize(kind)

    def body(p: int) -> None:
        positions, table, max_position, rotary_dim = arg(p, 0), arg(p, 1), arg(p, 2), arg(p, 3)
        tokens, head_dim = arg(p, 4), arg(p, 5)
        half = rotary_dim // 2
        together = min(max(tokens // 8, 1), 8)
        while True:
            first = take(p, together)
            if first >= tokens:
                break
            for t in range(first, min(first + together, tokens)):
                position = simd.load_int64(positions + 8 * t)
                if position < 0 or position >= max_position:
                    report(p, t + 1)
                    continue
                cos = table + position * rotary_dim * 4
                for which in range(2):  # q, then k
                    x, stride = arg(p, 6 + 4 * which), arg(p, 7 + 4 * which)
                    heads, out = arg(p, 8 + 4 * which), arg(p, 9 + 4 * which)
                    for h in range(heads):
                        source = x + t * stride + h * head_dim * size
                        target = out + (t * heads + h) * head_dim * size
                        for i in range(0, half, simd.LANES):
                            c, s = simd.load("f32", cos + 4 * i), simd.load("f32", cos + 4 * (half + i))
                            a = simd.load(kind, source + i * size)
                            b = simd.load(kind, source + (half + i) * size)
                            simd.store(kind, target + i * size, a * c - b * s)
                            simd.store(kind, target + (half + i) * size, b * c + a * s)
                        for i in range(rotary_dim, head_dim, simd.LANES):
                            simd.store(kind, target + i * size, simd.load(kind, source + i * size))

    return body


def rotary_embedding(positions: Tensor, q: Tensor, k: Tensor, cos_sin_cache: Tensor) -> tuple[Tensor, Tensor]:
    tokens, heads, head_dim = q.shape
    kv_heads, (max_position, rotary_dim) = k.shape[1], cos_sin_cache.shape
    kind = simd.KINDS.get(q.dtype)
    if (
        kind is None
        or k.dtype != q.dtype
        or cos_sin_cache.dtype != torch.float32
        or positions.dtype != torch.int64
        or rotary_dim % (2 * simd.LANES)
        or head_dim % simd.LANES
        or rotary_dim > head_dim
    ):
        return reference.rotary_embedding.reference(positions, q, k, cos_sin_cache)
    q, k = simd.heads_together(q), simd.heads_together(k)
    positions, cos_sin_cache = positions.contiguous(), cos_sin_cache.contiguous()
    out_q, out_k = empty(q.shape, q.dtype), empty(k.shape, k.dtype)
    one, size = _rotate(kind), q.element_size()
    run = one.serial if tokens * (heads + kv_heads) * head_dim < _SERIAL_BELOW else one.parallel
    bad = run(
        positions.data_ptr(),
        cos_sin_cache.data_ptr(),
        max_position,
        rotary_dim,
        tokens,
        head_dim,
        q.data_ptr(),
        q.stride(0) * size,
        heads,
        out_q.data_ptr(),
        k.data_ptr(),
        k.stride(0) * size,
        kv_heads,
        out_k.data_ptr(),
    )
    if bad:
        raise IndexError(f"position {positions[bad - 1].item()} is outside the rotary table of {max_position} rows")
    return out_q, out_k
