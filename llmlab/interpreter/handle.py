"""A value of a running kernel: numpy data, a Triton type, and for pointers the tensor they came from."""

import numpy as np
import triton.language as tl

from llmlab.interpreter import rounding
from llmlab.interpreter.memory import Region

INT1, INT32, BF16 = tl.int1, tl.int32, tl.bfloat16


class Handle:
    """A value: ``data`` in register form, its scalar ``dtype``, and for pointers the ``region`` they came from."""

    __slots__ = ("data", "dtype", "region")

    def __init__(self, data: np.ndarray, dtype: tl.dtype, region: Region | None = None) -> None:
        self.data = data
        self.dtype = dtype
        self.region = region

    def get_element_ty(self) -> tl.dtype:
        dtype = self.dtype
        while hasattr(dtype, "element_ty"):
            dtype = dtype.element_ty
        return dtype


def rounded(data: np.ndarray, dtype: tl.dtype, like: np.ndarray) -> np.ndarray:
    """``data`` as a register of ``dtype``; ``like`` has the numpy type that registers of this type have."""
    if dtype is BF16 or dtype.name == "bf16":
        return rounding.round_to_bf16(data)
    return data if data.dtype == like.dtype else data.astype(like.dtype)


def shape_of(type: tl.dtype) -> tuple[int, ...]:
    return tuple(tl.core._unwrap_if_constexpr(size) for size in type.shape)


def common_region(*handles: Handle) -> Region | None:
    regions = {id(handle.region): handle.region for handle in handles if handle.region is not None}
    return next(iter(regions.values())) if len(regions) == 1 else None
