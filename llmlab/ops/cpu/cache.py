"""The write into the paged KV cache: a copy of one row of K and one of V a token."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from llmlab.ops import cache as reference
from llmlab.ops.cpu import simd
from llmlab.ops.cpu.parallel import arg, kernel, report, take

_SERIAL_BELOW = 1 << 16  # elements; below, one core is done before another is awake


@kernel("qqqqqqqqqqqq")
def _scatter() -> Callable[[int], None]:
    """Rows of ``row_bytes`` bytes; strides in bytes; ``slots`` is the number of slots in the cache."""

    def body(p: int) -> None:
        k, k_stride, v, v_stride = arg(p, 0), arg(p, 1), arg(p, 2), arg(p, 3)
        key_cache, value_cache, block_size, block_stride = arg(p, 4), arg(p, 5), arg(p, 6), arg(p, 7)
        slot_mapping, tokens, slots, row_bytes = arg(p, 8), arg(p, 9), arg(p, 10), arg(p, 11)
        while True:
            first = take(p, 16)
            if first >= tokens:
                break
            for t in range(first, min(first + 16, tokens)):
                slot = simd.load_int64(slot_mapping + 8 * t)
                if slot >= slots:
                    report(p, t + 1)
                elif slot >= 0:
                    at = slot // block_size * block_stride + slot % block_size * row_bytes
                    simd.copy(key_cache + at, k + t * k_stride, row_bytes)
                    simd.copy(value_cache + at, v + t * v_stride, row_bytes)

    return body


def blocks_alike(key_cache: Tensor, value_cache: Tensor) -> bool:
    """Whether each block's slots stand one after another, and the blocks at the same distance in both caches."""
    _, _, kv_heads, head_dim = key_cache.shape
    return key_cache.stride()[1:] == (kv_heads * head_dim, head_dim, 1) and value_cache.stride() == key_cache.stride()


def reshape_and_cache(k: Tensor, v: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor) -> None:
    if not (
        k.dtype == v.dtype == key_cache.dtype == value_cache.dtype
        and slot_mapping.dtype == torch.int64
        and blocks_alike(key_cache, value_cache)
    ):
        return reference.reshape_and_cache.reference(k, v, key_cache, value_cache, slot_mapping)
    # A tensor whose address is taken must have a name, or it is gone before the kernel runs.
    k, v, slot_mapping = simd.heads_together(k), simd.heads_together(v), slot_mapping.contiguous()
    num_blocks, block_size, kv_heads, head_dim = key_cache.shape
    tokens, size = k.shape[0], k.element_size()
    one = _scatter()
    run = one.serial if k.numel() < _SERIAL_BELOW else one.parallel
    bad = run(
        k.data_ptr(),
        k.stride(0) * size,
        v.data_ptr(),
        v.stride(0) * size,
        key_cache.data_ptr(),
        value_cache.data_ptr(),
        block_size,
        key_cache.stride(0) * size,
        slot_mapping.data_ptr(),
        tokens,
        num_blocks * block_size,
        kv_heads * head_dim * size,
    )
    if bad:
        slots = num_blocks * block_size
        raise IndexError(f"slot {slot_mapping[bad - 1].item()} is outside the cache of {slots} slots")
    return None
