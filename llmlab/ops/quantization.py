"""Weight-only quantisation: weights as 8-bit integers with one scale an output feature, activations as they were.

The step from a number to its integer is at most half the row's scale, the greatest of the row divided by 127 (symmetric,
round to nearest: Jacob et al. 2018, arXiv:1712.05877, with a zero point of 0).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

METHODS = ("int8",)


@dataclass(frozen=True)
class Int8Weight:
    """A weight ``[out_features, in_features]`` ≈ ``scales[:, None] · values``.

    Attributes:
        values: int8 ``[out_features, in_features]``, in [−127, 127]. scales: float32 ``[out_features]``.
    """

    values: Tensor
    scales: Tensor

    @property
    def shape(self) -> torch.Size:
        return self.values.shape

    @property
    def dtype(self) -> torch.dtype:
        return self.values.dtype

    @property
    def itemsize(self) -> int:
        return self.values.itemsize

    def rows(self, begin: int, end: int) -> Int8Weight:
        """The part of the weight with some output features, over the same memory."""
        return Int8Weight(self.values[begin:end], self.scales[begin:end])

    def linear(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """``x · weightᵀ + bias``, in float32, rounded to x's dtype once."""
        out = torch.nn.functional.linear(x.float(), self.values.float()) * self.scales
        return (out if bias is None else out + bias.float()).to(x.dtype)


def quantize_int8(weight: Tensor) -> Int8Weight:
    """The nearest :class:`Int8Weight`."""
    weight = weight.float()
    scales = weight.abs().amax(dim=1) / 127
    scales = torch.where(scales > 0, scales, 1.0)  # a row of zeros
    return Int8Weight((weight / scales[:, None]).round().to(torch.int8), scales)
