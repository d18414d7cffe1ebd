"""The builder's loads, stores, atomics and tensor descriptors."""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from triton._C.libtriton import ir

from llmlab.interpreter.handle import INT1, Handle, rounded
from llmlab.interpreter.memory import REGISTER_TYPE, Region, gather, resolve, scatter


@dataclasses.dataclass(eq=False)
class Descriptor:
    """A tensor descriptor: bounds are those it declares, and what lies outside reads as padding and is never written."""

    base: Handle
    shape: list[int]
    strides: list[int]
    block_shape: list[int]
    padding: Any

    def pointers(self, offsets: Sequence[int]) -> tuple[Handle, np.ndarray]:
        """(addresses, inside the declared bounds) of the block at ``offsets``."""
        size = self.base.dtype.element_ty.primitive_bitwidth // 8
        if offsets[-1] * size % 16:
            raise ValueError(f"a descriptor's last offset must be a multiple of 16 bytes, not {offsets[-1] * size}")
        rank = len(self.shape)
        address = np.zeros(self.block_shape, np.int64)
        inside = np.ones(self.block_shape, bool)
        for dim in range(rank):
            position = (offsets[dim] + np.arange(self.block_shape[dim])).reshape(
                [-1 if d == dim else 1 for d in range(rank)]
            )
            address += position * (self.strides[dim] * size)
            inside &= (position >= 0) & (position < self.shape[dim])
        return Handle(self.base.data + address.astype(np.uint64), self.base.dtype, self.base.region), inside


_ATOMIC_BY_NAME: dict[str, Callable[[np.ndarray, np.ndarray], np.ndarray]] = {
    "ADD": np.add,
    "FADD": np.add,
    "MIN": np.minimum,
    "UMIN": np.minimum,
    "MAX": np.maximum,
    "UMAX": np.maximum,
    "AND": np.bitwise_and,
    "OR": np.bitwise_or,
    "XOR": np.bitwise_xor,
    "INC": lambda old, new: np.where(old >= new, old.dtype.type(0), old + old.dtype.type(1)),
    "XCHG": lambda old, new: np.broadcast_to(new, old.shape),
}
_ATOMIC = {
    member: _ATOMIC_BY_NAME[name] for name, member in ir.ATOMIC_OP.__members__.items() if name in _ATOMIC_BY_NAME
}


class Accesses:
    """What touches memory. Arguments after those named differ between Triton's versions, and change nothing here."""

    regions: list[Region]  # the tensor arguments

    # -- loads, stores, atomics

    def create_load(self, pointers: Handle, *_: Any) -> Handle:
        return self.create_masked_load(pointers, None, None)

    def create_masked_load(
        self, pointers: Handle, mask: Handle | None, other: Handle | None, *_: Any, **__: Any
    ) -> Handle:
        lanes = None if mask is None else mask.data
        if pointers.region is not None:
            return self.load(pointers, lanes, other)
        result = self.load(pointers, np.zeros(pointers.data.shape, bool), other)
        for part, own in self.by_region(pointers, lanes):
            loaded = self.load(part, own, other)
            result = Handle(np.where(own, loaded.data, result.data), result.dtype)
        return result

    def load(self, pointers: Handle, mask: np.ndarray | None, other: Handle | None) -> Handle:
        element = pointers.dtype.element_ty
        access = resolve(pointers, mask, "load")
        return Handle(gather(access, element, None if other is None else other.data), element)

    def by_region(self, pointers: Handle, mask: np.ndarray | None) -> Iterator[tuple[Handle, np.ndarray]]:
        """Pointers that have lost their origin (chosen between two tensors, made from integers), told apart by address.

        Yields the pointers with an origin, and the lanes that are its; what belongs to no tensor comes last, without one.
        """
        left = np.ones(pointers.data.shape, bool) if mask is None else np.broadcast_to(mask, pointers.data.shape).copy()
        for only_covered in (True, False):  # of several views into one storage the one that has the element goes first
            for region in self.regions:
                offset = pointers.data - np.uint64(region.base)
                own = left & (offset < np.uint64(region.raw.size))
                if only_covered and own.any():
                    own &= region.covers(np.where(own, offset, np.uint64(0)).astype(np.int64))
                if own.any():
                    left &= ~own
                    yield Handle(pointers.data, pointers.dtype, region), own
        if left.any():
            yield pointers, left

    def create_store(self, pointers: Handle, value: Handle, *_: Any) -> None:
        self.create_masked_store(pointers, value, None)

    def create_masked_store(self, pointers: Handle, value: Handle, mask: Handle | None, *_: Any) -> None:
        lanes = None if mask is None else mask.data
        if pointers.region is not None:
            self.store(pointers, value, lanes)
        else:
            for part, own in self.by_region(pointers, lanes):
                self.store(part, value, own)

    def store(self, pointers: Handle, value: Handle, mask: np.ndarray | None) -> None:
        scatter(resolve(pointers, mask, "store"), pointers.dtype.element_ty, value.data)

    def create_atomic_load(self, pointers: Handle, mask: Handle, *_: Any) -> Handle:
        return self.create_masked_load(pointers, mask, None)

    def create_atomic_store(self, pointers: Handle, value: Handle, mask: Handle, *_: Any) -> None:
        self.create_masked_store(pointers, value, mask)

    def create_atomic_rmw(self, op: Any, pointers: Handle, value: Handle, mask: Handle, *_: Any) -> Handle:
        return self._read_modify_write(pointers, mask.data, _ATOMIC[op], value)

    def create_atomic_cas(self, pointers: Handle, expected: Handle, value: Handle, *_: Any) -> Handle:
        def swap(old: np.ndarray, new: np.ndarray, lane: tuple[int, ...]) -> np.ndarray:
            return new if old == np.broadcast_to(expected.data, pointers.data.shape)[lane] else old

        return self._read_modify_write(pointers, None, swap, value, by_lane=True)

    def _read_modify_write(
        self, pointers: Handle, mask: np.ndarray | None, op: Callable[..., Any], value: Handle, by_lane: bool = False
    ) -> Handle:
        element = pointers.dtype.element_ty
        access = resolve(pointers, mask, "atomic")
        values = np.broadcast_to(value.data, access.index.shape)
        active = access.active()
        if not by_lane and np.unique(active).size == active.size:  # no two lanes meet: one gather, one scatter
            old = gather(access, element, None)
            with np.errstate(all="ignore"):
                scatter(access, element, rounded(op(old, values), element, old))
            return Handle(old, element)
        old = np.zeros(access.index.shape, REGISTER_TYPE[element.name])
        for lane in np.ndindex(access.index.shape):
            if access.mask is not None and not access.mask[lane]:
                continue
            one = dataclasses.replace(access, index=access.index[lane].reshape(1), mask=None)
            before = gather(one, element, None)
            old[lane] = before[0]
            new = op(before, values[lane], lane) if by_lane else op(before, values[lane])
            scatter(one, element, rounded(np.asarray(new).reshape(1), element, before))
        return Handle(old, element)

    def create_addptr(self, pointers: Handle, offset: Handle) -> Handle:
        size = max(1, pointers.get_element_ty().primitive_bitwidth // 8)
        step = offset.data.astype(np.int64)
        return Handle(pointers.data + (step * size).view(np.uint64), pointers.dtype, pointers.region)

    # -- tensor descriptors

    def create_make_tensor_descriptor(
        self, base: Handle, shape: list[Handle], strides: list[Handle], block_shape: list[int], *rest: Any
    ) -> Descriptor:
        size = base.dtype.element_ty.primitive_bitwidth // 8
        sizes, steps = ([int(handle.data.item()) for handle in values] for values in (shape, strides))
        if int(base.data.item()) % 16 or any(step * size % 16 for step in steps[:-1]) or steps[-1] != 1:
            raise ValueError(
                f"a tensor descriptor needs a 16-byte aligned base, strides of 16-byte multiples and a last stride of 1; "
                f"strides are {steps} elements of {size} bytes"
            )
        padding = rest[1] if len(rest) > 1 else ir.PADDING_OPTION.PAD_ZERO
        return Descriptor(base, sizes, steps, [int(s) for s in block_shape], padding)

    def create_descriptor_load(self, desc: Descriptor, indices: list[Handle], *_: Any) -> Handle:
        return self._descriptor_load(desc, [int(index.data.item()) for index in indices])

    def _descriptor_load(self, desc: Descriptor, offsets: list[int]) -> Handle:
        pointers, inside = desc.pointers(offsets)
        element = pointers.dtype.element_ty
        fill = float("nan") if desc.padding == ir.PADDING_OPTION.PAD_NAN else 0
        other = Handle(np.full(inside.shape, fill, REGISTER_TYPE[element.name]), element)
        return self.create_masked_load(pointers, Handle(inside, INT1), other)

    def create_descriptor_store(self, desc: Descriptor, value: Handle, indices: list[Handle]) -> None:
        pointers, inside = desc.pointers([int(index.data.item()) for index in indices])
        self.create_masked_store(pointers, value, Handle(inside, INT1))

    def create_descriptor_reduce(self, kind: Any, desc: Descriptor, value: Handle, indices: list[Handle]) -> None:
        pointers, inside = desc.pointers([int(index.data.item()) for index in indices])
        self._read_modify_write(pointers, inside, _ATOMIC_BY_NAME[str(kind).rsplit(".", 1)[-1]], value)

    def create_descriptor_gather(self, desc: Descriptor, rows: Handle, column: Handle, *_: Any) -> Handle:
        picked = [self._descriptor_load(desc, [int(row), int(column.data.item())]).data for row in rows.data]
        return Handle(np.concatenate(picked), desc.base.dtype.element_ty)

    def create_descriptor_scatter(self, desc: Descriptor, value: Handle, rows: Handle, column: Handle, *_: Any) -> None:
        for i, row in enumerate(rows.data):
            pointers, inside = desc.pointers([int(row), int(column.data.item())])
            self.create_masked_store(pointers, Handle(value.data[i : i + 1], value.dtype), Handle(inside, INT1))
