"""Pointers that know where they come from, and the loads, stores and atomics through them.

Every pointer carries the ``Region`` (the tensor argument) it was derived from, and arithmetic keeps it. Loads and stores are
then numpy gathers and scatters on that tensor's own storage: nothing outside it can be touched, so a wild address raises
instead of killing the process, and a checker can tell an access that leaves its tensor for a neighbour's memory from a good one.
"""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import triton.language as tl

from llmlab.interpreter.rounding import bf16_from_bits, bf16_to_bits

BFLOAT16 = tl.bfloat16

# How an element lies in memory. bfloat16 is widened to float32 on its way into a register.
STORAGE_TYPE: dict[str, np.dtype] = {
    name: np.dtype(kind)
    for name, kind in {
        "int1": np.bool_,
        "int8": np.int8,
        "uint8": np.uint8,
        "int16": np.int16,
        "uint16": np.uint16,
        "int32": np.int32,
        "uint32": np.uint32,
        "int64": np.int64,
        "uint64": np.uint64,
        "fp16": np.float16,
        "bf16": np.uint16,
        "fp32": np.float32,
        "fp64": np.float64,
        "fp8e4nv": np.uint8,
        "fp8e5": np.uint8,
        "fp8e4b8": np.uint8,
        "fp8e5b16": np.uint8,
        "fp8e4b15": np.uint8,
    }.items()
}
REGISTER_TYPE: dict[str, np.dtype] = STORAGE_TYPE | {"bf16": np.dtype(np.float32)}

_TRITON_TYPE = {
    torch.bool: tl.int1,
    torch.int8: tl.int8,
    torch.uint8: tl.uint8,
    torch.int16: tl.int16,
    torch.uint16: tl.uint16,
    torch.int32: tl.int32,
    torch.uint32: tl.uint32,
    torch.int64: tl.int64,
    torch.uint64: tl.uint64,
    torch.float16: tl.float16,
    torch.bfloat16: tl.bfloat16,
    torch.float32: tl.float32,
    torch.float64: tl.float64,
    torch.float8_e4m3fn: tl.float8e4nv,
    torch.float8_e5m2: tl.float8e5,
    torch.float8_e4m3fnuz: tl.float8e4b8,
    torch.float8_e5m2fnuz: tl.float8e5b16,
}


NO_ORIGIN = "was not derived from any tensor argument (where a kernel reads addresses from memory, hand it those tensors as well)"


class MemoryAccessError(RuntimeError):
    """An access that even an unchecked run cannot carry out: outside the tensor's storage, or through a pointer to nowhere."""


def triton_type(dtype: torch.dtype) -> tl.dtype:
    """The Triton element type of a torch dtype; ValueError when there is none."""
    if dtype not in _TRITON_TYPE:
        raise ValueError(f"a tensor of {dtype} cannot be a kernel argument")
    return _TRITON_TYPE[dtype]


@dataclass(eq=False)
class Region:
    """One tensor argument: its storage as bytes, and which of them its view covers.

    Views are those that slicing, transposing and expanding make; of one whose own elements overlap otherwise (an unfold) some
    may be taken to lie outside it.
    """

    name: str
    tensor: torch.Tensor
    base: int = field(init=False)  # address of the storage
    raw: np.ndarray = field(init=False)  # uint8, the whole storage
    _views: dict[np.dtype, np.ndarray] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        storage = self.tensor.untyped_storage()
        self.base = storage.data_ptr()
        self.raw = torch.empty(0, dtype=torch.uint8).set_(storage).numpy()

    def elements(self, dtype: np.dtype) -> np.ndarray:
        """The storage as a flat array of ``dtype`` (a rest shorter than one element is left out)."""
        view = self._views.get(dtype)
        if view is None:
            whole = self.raw.size // dtype.itemsize * dtype.itemsize
            view = self._views[dtype] = self.raw[:whole].view(dtype)
        return view

    def covers(self, offset: np.ndarray) -> np.ndarray:
        """bool: does the byte at each offset (int64, into the storage) start an element of the view?"""
        tensor, size = self.tensor, self.tensor.element_size()
        rest = offset - tensor.storage_offset() * size
        inside = rest >= 0
        for stride, length in self._layout():
            steps = rest // (stride * size)
            inside = inside & (steps < length)
            rest = rest - steps * (stride * size)
        return inside & (rest < size) & (tensor.numel() > 0)

    def _layout(self) -> list[tuple[int, int]]:
        """(stride, length) of the dimensions, widest stride first, those that run on into each other joined."""
        dims = [(step, count) for step, count in zip(self.tensor.stride(), self.tensor.shape) if count > 1]
        dims.sort(reverse=True)
        joined: list[tuple[int, int]] = []
        for stride, length in dims:
            if stride == 0:  # an expanded dimension: the same bytes again
                continue
            if joined and joined[-1][0] == stride * length:
                joined[-1] = (stride, joined[-1][1] * length)
            else:
                joined.append((stride, length))
        return joined


@dataclass(eq=False)
class Access:
    """One load, store or atomic, resolved: flat element indices into ``region``, for every lane (0 where masked off)."""

    region: Region | None
    elements: np.ndarray  # the region's storage as flat elements
    index: np.ndarray  # int64, shape of the block
    mask: np.ndarray | None  # bool, shape of the block; None: all lanes

    def active(self) -> np.ndarray:
        """The indices of the lanes that are on, flat."""
        return self.index.reshape(-1) if self.mask is None else self.index[self.mask]


def resolve(pointers: Any, mask: np.ndarray | None, what: str) -> Access:
    """Turn addresses into indices. Raises MemoryAccessError outside the storage."""
    element = pointers.dtype.element_ty
    dtype = STORAGE_TYPE[element.name]
    addresses = pointers.data
    region: Region | None = pointers.region
    if mask is not None:
        if mask.shape != addresses.shape:
            mask = np.broadcast_to(mask, addresses.shape)
        if mask.all():
            mask = None
        elif not mask.any():
            return Access(region, np.zeros(1, dtype), np.zeros(addresses.shape, np.int64), mask)
    if region is None:
        raise MemoryAccessError(f"a {what} through a pointer that {NO_ORIGIN}")
    offset = addresses - np.uint64(region.base)
    if mask is not None:
        offset = np.where(mask, offset, np.uint64(0))
    elements = region.elements(dtype)
    size = dtype.itemsize
    if size > 1:
        if (offset & np.uint64(size - 1)).any():
            raise MemoryAccessError(
                f"a {what} of {element} through {region.name!r} at an address not a multiple of {size}"
            )
        offset = offset >> np.uint64(size.bit_length() - 1)
    if offset.size and offset.max() >= elements.size:
        outside = offset[offset >= np.uint64(elements.size)]
        first = int(outside.astype(np.int64)[0])
        limit = elements.size
        raise MemoryAccessError(
            f"a {what} through {region.name!r} leaves its storage: {outside.size} lanes, the first at element "
            f"{first if first >= 0 else f'{first * size} bytes'} of {limit}"
        )
    return Access(region, elements, offset.astype(np.int64), mask)


def gather(access: Access, element: tl.dtype, other: np.ndarray | None) -> np.ndarray:
    """The loaded values in register form; masked lanes hold ``other`` (0 without one)."""
    values = access.elements.take(access.index)
    if element.name == "bf16":
        values = bf16_from_bits(values)
    if access.mask is not None:
        values = np.where(access.mask, values, values.dtype.type(0) if other is None else other)
    return values


def scatter(access: Access, element: tl.dtype, values: np.ndarray) -> None:
    """Store register values; of lanes on one address the last one stays."""
    if values.shape != access.index.shape:
        values = np.broadcast_to(values, access.index.shape)
    if element.name == "bf16":
        values = bf16_to_bits(values)
    if access.mask is None:
        access.elements[access.index.reshape(-1)] = values.reshape(-1)
    else:
        access.elements[access.index[access.mask]] = values[access.mask]
