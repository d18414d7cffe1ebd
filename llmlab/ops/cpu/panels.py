"""The layout of a weight for streaming: panels of sixteen output features, contiguous, in the order in which they are used.

A panel ``[in_features, 16]`` holds, for each input feature, what it adds to sixteen outputs: one vector load, one multiply-add
with that input broadcast, and no sum over lanes at the end. bfloat16 panels hold pairs, ``[in_features/2, 16, 2]``: what the
processors' pair products (AVX512-BF16, AMX) want. Read from front to back, whatever the number of tokens.

A checkpoint in bfloat16 that is loaded in float32 says no more than before: the lower half of each number is zero. Such weights
stay in bfloat16 and are widened in registers, a shift each: float32 arithmetic on the same numbers, from half the bytes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from llmlab.ops.cpu.memory import large_pages
from llmlab.ops.cpu.simd import KINDS, LANES


@dataclass(frozen=True)
class PackedLinear:
    """A weight ``[out_features, in_features]`` laid out for a CPU.

    Attributes:
        shape: ``(out_features, in_features)`` of the weight.
        panels: ``[out_features/16, in_features, 16]``, or in bfloat16 ``[out_features/16, in_features/2, 16, 2]``.
        dtype: of the weight, which is that of the panels, or float32 where bfloat16 panels hold its very numbers.
    """

    shape: torch.Size
    panels: Tensor
    dtype: torch.dtype

    @property
    def itemsize(self) -> int:
        """Bytes of a number in memory."""
        return self.panels.dtype.itemsize

    def rows(self, begin: int, end: int) -> PackedLinear | None:
        """The part of the weight with some output features, over the same memory; None unless it is whole panels."""
        if begin % LANES or end % LANES:
            return None
        shape = torch.Size((end - begin, self.shape[1]))
        return PackedLinear(shape, self.panels[begin // LANES : end // LANES], self.dtype)

    def unpack(self) -> Tensor:
        """The weight row by row again (a copy)."""
        order = (0, 2, 1, 3) if self.panels.ndim == 4 else (0, 2, 1)
        return self.panels.permute(order).reshape(self.shape).to(self.dtype)


def can_pack(weight: Tensor) -> bool:
    """Whether the weight divides into panels, and its dtype has kernels."""
    out_features, in_features = weight.shape
    return weight.dtype in KINDS and out_features % LANES == 0 and in_features % LANES == 0


def _is_bfloat16(weight: Tensor) -> bool:
    """Whether each float32 is a bfloat16, looked at in parts: most weights that are not say so in the first."""
    words = weight.contiguous().view(torch.int32).flatten()
    return not any((part & 0xFFFF).any() for part in words.split(1 << 18))


class LinearPacker:
    """Packs weights one after another into areas of large pages (2 MB): with 4 KB pages, address translation halves the
    bandwidth at which weights stream. Weights that do not divide into panels stay as they are."""

    def __init__(self, area_bytes: int = 64 << 20):
        self._area_bytes = area_bytes
        self._area = torch.empty(0, dtype=torch.uint8)

    def __call__(self, weight: Tensor) -> PackedLinear | Tensor:
        if not can_pack(weight):
            return weight
        out_features, in_features = weight.shape
        dtype = weight.dtype
        if dtype == torch.float32 and _is_bfloat16(weight):
            weight = weight.bfloat16()
        if weight.dtype == torch.bfloat16:
            source = weight.view(out_features // LANES, LANES, in_features // 2, 2).permute(0, 2, 1, 3)
        else:
            source = weight.view(out_features // LANES, LANES, in_features).permute(0, 2, 1)
        return PackedLinear(weight.shape, self.reserve(source).copy_(source), dtype)

    def reserve(self, like: Tensor) -> Tensor:
        """Memory for a tensor of this shape and dtype, behind what was reserved before."""
        size = like.numel() * like.element_size()
        if size > self._area.numel():
            self._area = large_pages(max(size, self._area_bytes))
        taken, self._area = self._area[:size], self._area[-(-size // 64) * 64 :]
        return taken.view(like.dtype).view(like.shape)
