"""The checked run: the same arithmetic, with every access and every operation that can go wrong looked at."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import triton.language as tl
from triton._C.libtriton import ir

from llmlab.interpreter import reduction, rounding
from llmlab.interpreter.builder import NumpyBuilder
from llmlab.interpreter.checks import Checks, Collector
from llmlab.interpreter.handle import Handle
from llmlab.interpreter.memory import NO_ORIGIN, REGISTER_TYPE, STORAGE_TYPE, Access, Region, gather, scatter
from llmlab.interpreter.ordering import Synchronisation
from llmlab.interpreter.races import GridAccesses, ProgramOrder
from llmlab.interpreter.runtime import Runtime, unwrap

POISON_INT = 0x5A5A5A5A  # as an index it leaves every tensor; as a sign-free number it is easily recognised


@dataclass(frozen=True, eq=False)
class Written:
    """What a store found before it stored: enough to take it back."""

    region: Region
    elements: np.ndarray
    index: np.ndarray
    before: np.ndarray


class CheckedBuilder(NumpyBuilder):
    """Computes and reports. Lanes whose address is wrong are reported and then left out, so that the run goes on."""

    def __init__(self, checks: Checks, collector: Collector) -> None:
        super().__init__()
        self.checks = checks
        self.collector = collector
        self.order = ProgramOrder(collector)
        self.grid = GridAccesses()
        self.synchronisation = Synchronisation()
        self.atomically = False  # inside a load or store that is an atomic (or volatile) one
        self.undo: list[Written] = []  # in the order of the stores
        self.keep_undo = False
        self.handed_out_poison = False  # whether this program loaded integers under a mask without `other`

    def start_program(self, program: tuple[int, int, int]) -> None:
        self.collector.program = program
        self.handed_out_poison = False
        self.order.barrier()
        self.synchronisation.start_program(len(self.grid.events))

    def program_number(self) -> int:
        x, y, z = self.grid_idx
        return (x * self.grid_dim[1] + y) * self.grid_dim[2] + z

    # -- memory

    def inspect(self, pointers: Handle, mask: np.ndarray | None, what: str) -> Access:
        """Like ``memory.resolve``, with the lanes that are out of bounds reported and switched off."""
        element = pointers.dtype.element_ty
        dtype = STORAGE_TYPE[element.name]
        addresses = pointers.data
        on = np.ones(addresses.shape, bool) if mask is None else np.broadcast_to(mask, addresses.shape)
        region = pointers.region
        if region is None:
            if on.any():
                self.collector.report(f"out-of-bounds-{what}", f"through a pointer that {NO_ORIGIN}")
            return Access(
                None, np.zeros(1, dtype), np.zeros(addresses.shape, np.int64), np.zeros(addresses.shape, bool)
            )
        offset = addresses - np.uint64(region.base)
        size = np.uint64(dtype.itemsize)
        inside = offset + size <= np.uint64(region.raw.size)
        inside &= offset < np.uint64(region.raw.size)  # a negative offset is a huge one, and the sum above may wrap
        inside &= offset % size == 0
        if self.checks.bounds:
            inside &= region.covers(np.where(inside, offset, np.uint64(0)).astype(np.int64))
        wrong = on & ~inside
        if wrong.any():
            self._report_bounds(region, offset[wrong], int(on.sum()), dtype, what)
        good = on & inside
        index = np.where(good, offset // size, np.uint64(0)).astype(np.int64)
        access = Access(region, region.elements(dtype), index, None if good.all() else good)
        if access.elements.size == 0:
            access.elements = np.zeros(1, dtype)
        return access

    def _report_bounds(self, region: Region, offsets: np.ndarray, lanes: int, dtype: np.dtype, what: str) -> None:
        view_start = region.tensor.storage_offset() * region.tensor.element_size()
        element = (int(offsets.astype(np.int64)[0]) - view_start) // dtype.itemsize
        self.collector.report(
            f"out-of-bounds-{what}",
            f"{offsets.size} of {lanes} lanes leave {region.name!r} (shape {tuple(region.tensor.shape)}, strides "
            f"{region.tensor.stride()}); the first is {element} elements from its start",
        )

    def record(self, kind: str, access: Access) -> None:
        """Remember an access for the checks of races and barriers."""
        if access.region is None or not (self.checks.races or self.checks.barriers):
            return
        lanes = np.arange(access.index.size)
        flat = access.index.reshape(-1)
        if access.mask is not None:
            on = access.mask.reshape(-1)
            lanes, flat = lanes[on], flat[on]
        if not flat.size:
            return
        if self.keep_undo and kind != "load":
            self.undo.append(Written(access.region, access.elements, flat, access.elements[flat]))
        addresses = flat.astype(np.uint64) * np.uint64(access.elements.itemsize) + np.uint64(access.region.base)
        if self.checks.races:
            self.grid.add(
                "atomic" if self.atomically else kind,
                addresses,
                access.elements.itemsize,
                access.region.base,
                self.program_number(),
                self.collector.place(),
                self.synchronisation.clock,
            )
        if self.checks.barriers and kind != "atomic":
            note = self.order.load if kind == "load" else self.order.store
            note(addresses, lanes, access.index.size, access.region.name)

    def load(self, pointers: Handle, mask: np.ndarray | None, other: Handle | None) -> Handle:
        element = pointers.dtype.element_ty
        access = self.inspect(pointers, mask, "load")
        self.record("load", access)
        if other is not None:
            fill: Any = other.data
        else:
            fill = self._poison(element) if self.checks.poison else None
            self.handed_out_poison |= fill is not None and access.mask is not None and element.is_int()
        return Handle(gather(access, element, fill), element)

    def _poison(self, element: tl.dtype) -> Any:
        kind = REGISTER_TYPE[element.name]
        if kind.kind == "f":
            return kind.type(np.nan)
        if kind.kind == "b":
            return np.bool_(True)
        return np.array(POISON_INT & np.iinfo(kind).max).astype(kind)

    def store(self, pointers: Handle, value: Handle, mask: np.ndarray | None) -> None:
        access = self.inspect(pointers, mask, "store")
        if access.region is None:
            return
        self.record("store", access)
        element = pointers.dtype.element_ty
        values = np.broadcast_to(value.data, access.index.shape)
        if self.checks.barriers:
            self._check_duplicates(access, values)
        scatter(access, element, values)

    def _check_duplicates(self, access: Access, values: np.ndarray) -> None:
        flat = access.active()
        if np.unique(flat).size == flat.size:
            return
        stored = values.reshape(-1) if access.mask is None else values[access.mask]
        order = np.argsort(flat, kind="stable")
        flat, stored = flat[order], stored[order]
        same_address = flat[1:] == flat[:-1]
        same_value = (stored[1:] == stored[:-1]) | ((stored[1:] != stored[1:]) & (stored[:-1] != stored[:-1]))
        if (same_address & ~same_value).any():
            count = int(np.unique(flat[1:][same_address & ~same_value]).size)
            self.collector.report(
                "duplicate-store", f"{count} addresses of {access.region.name!r} get several values at once"
            )

    def _read_modify_write(
        self, pointers: Handle, mask: np.ndarray | None, op: Callable[..., Any], value: Handle, by_lane: bool = False
    ) -> Handle:
        access = self.inspect(pointers, mask, "atomic")
        self.record("atomic", access)
        good = np.ones(access.index.shape, bool) if access.mask is None else access.mask
        if not good.any():
            return Handle(
                np.zeros(access.index.shape, REGISTER_TYPE[pointers.dtype.element_ty.name]), pointers.dtype.element_ty
            )
        return super()._read_modify_write(
            Handle(pointers.data, pointers.dtype, access.region), good, op, value, by_lane
        )

    def create_load(self, pointers: Handle, *rest: Any) -> Handle:
        with self._volatile(rest):
            return super().create_load(pointers, *rest)

    def create_masked_load(self, pointers: Handle, mask: Any, other: Any, *rest: Any, **named: Any) -> Handle:
        with self._volatile(rest):
            return super().create_masked_load(pointers, mask, other, *rest, **named)

    @contextmanager
    def _volatile(self, rest: tuple[Any, ...]) -> Iterator[None]:
        """A volatile load is the hardware's relaxed one: it may meet another program's atomics."""
        outer, self.atomically = self.atomically, self.atomically or (bool(rest) and rest[-1] is True)
        try:
            yield
        finally:
            self.atomically = outer

    def create_atomic_rmw(self, op: Any, pointers: Handle, value: Handle, mask: Handle, *rest: Any) -> Handle:
        with self._synchronising(pointers, mask, rest):
            return super().create_atomic_rmw(op, pointers, value, mask, *rest)

    def create_atomic_cas(self, pointers: Handle, expected: Handle, value: Handle, *rest: Any) -> Handle:
        with self._synchronising(pointers, None, rest):
            return super().create_atomic_cas(pointers, expected, value, *rest)

    def create_atomic_load(self, pointers: Handle, mask: Handle, *rest: Any) -> Handle:
        with self._synchronising(pointers, mask, rest):
            return super().create_atomic_load(pointers, mask, *rest)

    def create_atomic_store(self, pointers: Handle, value: Handle, mask: Handle, *rest: Any) -> None:
        with self._synchronising(pointers, mask, rest):
            super().create_atomic_store(pointers, value, mask, *rest)

    @contextmanager
    def _synchronising(self, pointers: Handle, mask: Handle | None, rest: tuple[Any, ...]) -> Iterator[None]:
        """A scalar atomic orders programs, by its semantics, which stand among ``rest``."""
        scalar = pointers.data.size == 1 and (mask is None or bool(mask.data.all()))
        semantics = next((value for value in rest if isinstance(value, ir.MEM_SEMANTIC)), None) if scalar else None
        address = int(pointers.data.reshape(-1)[0]) if scalar else 0
        outer, self.atomically = self.atomically, True
        if semantics in (ir.MEM_SEMANTIC.ACQUIRE, ir.MEM_SEMANTIC.ACQUIRE_RELEASE):
            self.synchronisation.acquire(address)
        try:
            yield
        finally:
            self.atomically = outer
        if semantics in (ir.MEM_SEMANTIC.RELEASE, ir.MEM_SEMANTIC.ACQUIRE_RELEASE):
            self.synchronisation.release(address, self.program_number(), len(self.grid.events))

    def create_barrier(self, *_: Any) -> None:
        self.order.barrier()
        self.synchronisation.barrier(len(self.grid.events))

    # -- arithmetic

    def arithmetic(self, name: str, op: np.ufunc, lhs: Handle, rhs: Handle, out: Handle) -> Handle:
        """Report when ``out`` = lhs op rhs left its type's range."""
        if not self.checks.overflow:
            return out
        a, b, result = lhs.data, rhs.data, out.data
        if result.dtype == np.float16:
            if (np.isinf(result) & np.isfinite(a) & np.isfinite(b)).any():
                self.collector.report("fp16-overflow", f"{name} of finite float16 numbers is infinite")
        elif result.dtype.kind == "i" and op is not np.divide:
            if result.dtype.itemsize < 8:
                exact = op(a.astype(np.int64), b.astype(np.int64))
                wrong = exact != result
            else:
                exact = op(a.astype(np.float64), b.astype(np.float64))
                wrong = np.abs(exact) > 2.0**63
            if wrong.any():
                wrong = wrong & (a != POISON_INT) & (b != POISON_INT)  # garbage in a masked lane may grow
            if wrong.any():
                worst = exact[wrong].reshape(-1)[0]
                self.report_overflow(f"{name} in {lhs.dtype} reaches {worst:.0f}")
        return out

    def create_cast(self, arg: Handle, src: tl.dtype, dst: tl.dtype, rounding_mode: Any) -> Handle:
        out = super().create_cast(arg, src, dst, rounding_mode)
        if self.checks.overflow:
            if dst.name == "fp16" and src.is_floating():
                if (np.isinf(out.data) & np.isfinite(arg.data)).any():
                    self.collector.report("fp16-overflow", f"a finite {src} becomes infinite as fp16")
            elif arg.data.dtype.kind == "i" and out.data.dtype.kind == "i" and out.data.itemsize < arg.data.itemsize:
                wrong = (out.data != arg.data) & (arg.data != POISON_INT)
                if wrong.any():
                    self.report_overflow(f"{int(arg.data[wrong].reshape(-1)[0])} does not fit {dst}")
        return out

    def report_overflow(self, message: str) -> None:
        if (
            self.handed_out_poison
        ):  # what is computed from it may leave the range too, and harms no one if it is masked again
            message += "; perhaps computed from a masked lane that an integer load gave no `other`"
        self.collector.report("int-overflow", message)

    def divisor(self, rhs: Handle) -> None:
        if self.checks.overflow and rhs.data.dtype.kind in "iu" and (rhs.data == 0).any():
            self.collector.report("int-division-by-zero", f"a divisor of type {rhs.dtype} is 0")

    def dot_operand(self, arg: Handle, input_precision: Any) -> np.ndarray:
        data = super().dot_operand(arg, input_precision)
        if self.checks.tf32 and arg.dtype.name == "fp32" and str(input_precision).rsplit(".", 1)[-1] == "TF32":
            return rounding.round_to_tf32(data)
        return data


def _watch(name: str, word: str, op: np.ufunc) -> None:
    plain = getattr(NumpyBuilder, name)

    def watched(self: CheckedBuilder, lhs: Handle, rhs: Handle) -> Handle:
        return self.arithmetic(word, op, lhs, rhs, plain(self, lhs, rhs))

    setattr(CheckedBuilder, name, watched)


def _watch_divisor(name: str) -> None:
    plain = getattr(NumpyBuilder, name)

    def watched(self: CheckedBuilder, lhs: Handle, rhs: Handle) -> Handle:
        self.divisor(rhs)
        return plain(self, lhs, rhs)

    setattr(CheckedBuilder, name, watched)


for _name, _word, _op in (
    ("create_add", "addition", np.add),
    ("create_fadd", "addition", np.add),
    ("create_sub", "subtraction", np.subtract),
    ("create_fsub", "subtraction", np.subtract),
    ("create_mul", "multiplication", np.multiply),
    ("create_fmul", "multiplication", np.multiply),
    ("create_fdiv", "division", np.divide),
):
    _watch(_name, _word, _op)
for _name in ("create_sdiv", "create_udiv", "create_srem", "create_urem"):
    _watch_divisor(_name)


class CheckedRuntime(Runtime):
    """A run whose hints and sums are looked at too."""

    builder: CheckedBuilder

    def __init__(self, builder: CheckedBuilder) -> None:
        super().__init__(builder, max_trips=builder.checks.max_trips)
        self.files = builder.collector.files

    def reduce(self, input: Any, axis: Any, combine_fn: Any, keep_dims: Any = False) -> Any:
        checks, collector = self.builder.checks, self.builder.collector
        first = input[0] if isinstance(input, (tuple, tl.core.tuple)) else input
        result = super().reduce(input, axis, combine_fn, keep_dims)
        if combine_fn in reduction.SUM:
            if checks.sums and first.dtype.name in ("bf16", "fp16"):
                collector.report("narrow-sum", f"tl.sum of a {first.dtype} block; convert it to float32 first")
            if checks.overflow and first.handle.data.dtype.kind == "i":
                exact = reduction.exact_sum(first, unwrap(axis))
                if (np.asarray(exact).reshape(-1) != result.handle.data.reshape(-1)).any():
                    self.builder.report_overflow(f"tl.sum in {first.dtype} reaches {int(np.abs(exact).max())}")
        self.builder.order.synchronised()
        return result

    def associative_scan(self, input: Any, axis: Any, combine_fn: Any, reverse: Any = False) -> Any:
        result = super().associative_scan(input, axis, combine_fn, reverse)
        if combine_fn in reduction.SUM and self.builder.checks.overflow:
            first = input[0] if isinstance(input, (tuple, tl.core.tuple)) else input
            if first.handle.data.dtype.kind == "i":
                exact = reduction.exact_cumsum(first, unwrap(axis), bool(unwrap(reverse)))
                got = result[0] if isinstance(result, (tuple, tl.core.tuple)) else result
                if (exact != got.handle.data).any():
                    self.builder.report_overflow(f"tl.cumsum in {first.dtype} reaches {int(np.abs(exact).max())}")
        self.builder.order.synchronised()
        return result

    def multiple_of(self, value: Any, values: Any) -> Any:
        first = self._first(value)
        if any(first % factor for factor in _factors(values)):
            self._wrong_hint(f"multiple_of({_factors(values)}): the first value is {first}")
        return value

    def max_contiguous(self, value: Any, values: Any) -> Any:
        self._check_groups(value, values, step=1, name="max_contiguous")
        return value

    def max_constancy(self, value: Any, values: Any) -> Any:
        self._check_groups(value, values, step=0, name="max_constancy")
        return value

    @staticmethod
    def _first(value: Any) -> int:
        data = getattr(getattr(value, "handle", None), "data", None)
        return int(data.reshape(-1)[0]) if data is not None else int(unwrap(value))

    def _check_groups(self, value: Any, values: Any, step: int, name: str) -> None:
        data = value.handle.data
        size = value.dtype.element_ty.primitive_bitwidth // 8 if value.dtype.is_ptr() else 1
        for axis, length in enumerate(_factors(values)):
            if axis >= data.ndim or length <= 1 or data.shape[axis] % length:
                continue
            groups = np.moveaxis(data, axis, -1).reshape(-1, length).astype(np.int64)
            if (np.diff(groups, axis=1) != step * size).any():
                self._wrong_hint(f"{name}({_factors(values)}): not so along axis {axis}")

    def _wrong_hint(self, message: str) -> None:
        if self.builder.checks.hints:
            self.builder.collector.report("wrong-hint", message)


def _factors(values: Any) -> list[int]:
    values = unwrap(values)
    return [unwrap(v) for v in values] if isinstance(values, (list, tuple, tl.core.tuple)) else [values]
