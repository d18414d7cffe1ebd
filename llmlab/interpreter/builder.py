"""Triton's IR builder, replaced: where the compiler's builder appends an operation, this one computes it with numpy.

The front end (``TritonSemantic``) is Triton's own, so type promotion and broadcasting are those of the installed version; only
the arithmetic is here. It is the same on every supported version, whose stock interpreters differ (and are wrong for bfloat16).
Scalars are arrays of shape (1,), blocks have their own shape, bfloat16 is held in float32 arrays (see ``rounding``).
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton._C.libtriton import ir
from triton.runtime.interpreter import InterpreterBuilder, InterpreterOptions

from llmlab.interpreter import rounding
from llmlab.interpreter.memory import REGISTER_TYPE, Region, gather, resolve, scatter

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


def rounded(data: np.ndarray, dtype: tl.dtype, like: np.ndarray) -> np.ndarray:
    """``data`` as a register of ``dtype``; ``like`` has the numpy type that registers of this type have."""
    if dtype is BF16 or dtype.name == "bf16":
        return rounding.round_to_bf16(data)
    return data if data.dtype == like.dtype else data.astype(like.dtype)


def shape_of(type: tl.dtype) -> tuple[int, ...]:
    return tuple(tl.core._unwrap_if_constexpr(size) for size in type.shape)


def _common_region(*handles: Handle) -> Region | None:
    regions = {id(handle.region): handle.region for handle in handles if handle.region is not None}
    return next(iter(regions.values())) if len(regions) == 1 else None


def _binary(op: np.ufunc) -> Callable[["NumpyBuilder", Handle, Handle], Handle]:
    def apply(self: "NumpyBuilder", lhs: Handle, rhs: Handle) -> Handle:
        a, b = lhs.data, rhs.data
        if a.dtype != b.dtype and a.dtype.itemsize == b.dtype.itemsize:  # one side lost its signedness in the front end
            a, b = a.view(f"u{a.dtype.itemsize}"), b.view(f"u{a.dtype.itemsize}")
        if a.dtype == np.bool_ and op in (np.add, np.subtract, np.multiply):  # int1 wraps around
            return Handle((op(a.astype(np.int8), b.astype(np.int8)) & 1).astype(bool), lhs.dtype)
        return Handle(rounded(op(a, b), lhs.dtype, a), lhs.dtype)

    return apply


def _compare(op: np.ufunc) -> Callable[["NumpyBuilder", Handle, Handle], Handle]:
    return lambda self, lhs, rhs: Handle(op(lhs.data, rhs.data), INT1)


def _unary(op: Callable[[np.ndarray], np.ndarray]) -> Callable[["NumpyBuilder", Handle], Handle]:
    return lambda self, arg: Handle(rounded(op(arg.data), arg.dtype, arg.data), arg.dtype)


def _getter(dtype: tl.dtype) -> Callable[["NumpyBuilder", Any], Handle]:
    return lambda self, value: self.create_constant(value, dtype)


def _cast(self: "NumpyBuilder", src: Handle, dst_type: tl.dtype, *_: Any) -> Handle:
    return Handle(self.convert(src.data, src.dtype, dst_type.scalar), dst_type.scalar)


def _shift(op: np.ufunc, signed: bool | None) -> Callable[["NumpyBuilder", Handle, Handle], Handle]:
    def apply(self: "NumpyBuilder", lhs: Handle, rhs: Handle) -> Handle:
        data = lhs.data
        if signed is not None and data.dtype != np.bool_:
            data = data.view(f"{'i' if signed else 'u'}{data.dtype.itemsize}")
        return Handle(op(data, rhs.data.astype(data.dtype)).view(lhs.data.dtype), lhs.dtype)

    return apply


class NumpyBuilder(InterpreterBuilder):
    """Computes. One per kernel run; it holds the grid position and nothing else that changes."""

    def __init__(self) -> None:
        super().__init__()
        # The front end's own overflow test widens every integer operation, and reports nothing without a device.
        self.options = dataclasses.replace(InterpreterOptions(), sanitize_overflow=False)
        self.grid_dim: tuple[int, int, int] = (1, 1, 1)
        self.grid_idx: tuple[int, int, int] = (0, 0, 0)

    # -- constants

    def get_null_value(self, type: tl.dtype) -> Handle:
        return self.create_constant(0, type.scalar)

    def get_all_ones_value(self, type: tl.dtype) -> Handle:
        kind = REGISTER_TYPE[type.scalar.name]
        return Handle(
            np.full(1, True) if kind == np.bool_ else np.full(1, -1, f"i{kind.itemsize}").view(kind), type.scalar
        )

    def create_constant(self, value: float, dtype: tl.dtype) -> Handle:
        """A scalar constant of ``dtype``, rounded to it."""
        if dtype.name.startswith("fp8"):
            return Handle(rounding.fp8_encode(np.array([value], np.float32), dtype), dtype)
        if dtype.name == "bf16":
            return Handle(rounding.round_double_to_bf16(np.array([value], np.float64)), dtype)
        if dtype.is_ptr():
            return Handle(np.array([value], np.uint64), dtype)
        return Handle(np.array([value], REGISTER_TYPE[dtype.name]), dtype)

    get_int1, get_int8, get_int16, get_int32, get_int64 = map(_getter, (INT1, tl.int8, tl.int16, INT32, tl.int64))
    get_uint8, get_uint16, get_uint32, get_uint64 = map(_getter, (tl.uint8, tl.uint16, tl.uint32, tl.uint64))
    get_fp16, get_bf16, get_fp32, get_fp64 = map(_getter, (tl.float16, BF16, tl.float32, tl.float64))

    # -- program

    def create_get_program_id(self, axis: int) -> Handle:
        return Handle(np.array([self.grid_idx[axis]], np.int32), INT32)

    def create_get_num_programs(self, axis: int) -> Handle:
        return Handle(np.array([self.grid_dim[axis]], np.int32), INT32)

    # -- memory (the arguments after those named differ between versions and change nothing here)

    def create_load(self, pointers: Handle, *_: Any) -> Handle:
        return self.create_masked_load(pointers, None, None)

    def create_masked_load(
        self, pointers: Handle, mask: Handle | None, other: Handle | None, *_: Any, **__: Any
    ) -> Handle:
        element = pointers.dtype.element_ty
        access = resolve(pointers, None if mask is None else mask.data, "load")
        return Handle(gather(access, element, None if other is None else other.data), element)

    def create_store(self, pointers: Handle, value: Handle, *_: Any) -> None:
        self.create_masked_store(pointers, value, None)

    def create_masked_store(self, pointers: Handle, value: Handle, mask: Handle | None, *_: Any) -> None:
        scatter(resolve(pointers, None if mask is None else mask.data, "store"), pointers.dtype.element_ty, value.data)

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

    def create_barrier(self, *_: Any) -> None:
        """Nothing: one thread runs a program here."""

    # -- casts

    def convert(self, data: np.ndarray, src: tl.dtype, dst: tl.dtype, rounding_mode: Any = None) -> np.ndarray:
        """``data`` (a register of ``src``) as a register of ``dst``."""
        to = dst.name
        if src.name.startswith("fp8"):
            data = rounding.fp8_decode(data, src)
        if rounding_mode == ir.ROUNDING_MODE.RTZ:
            return _truncate_float(data, to)
        if to == "bf16":
            if data.dtype == np.float32:
                return data if src.name == "bf16" else rounding.round_to_bf16(data)
            return rounding.round_double_to_bf16(data.astype(np.float64))
        if to.startswith("fp8"):
            return rounding.fp8_encode(data, dst)
        kind = REGISTER_TYPE[to]
        if data.dtype.kind == "f" and kind.kind in "iu":
            return _float_to_int(data, kind)
        return data.astype(kind)

    def create_cast(self, arg: Handle, src: tl.dtype, dst: tl.dtype, rounding_mode: Any) -> Handle:
        return Handle(self.convert(arg.data, src, dst, rounding_mode), dst)

    create_si_to_fp = create_ui_to_fp = create_fp_to_si = create_fp_to_ui = _cast
    create_fp_ext = create_fp_trunc = create_int_cast = _cast

    def create_fp_to_fp(self, src: Handle, dst_type: tl.dtype, rounding_mode: Any) -> Handle:
        return Handle(self.convert(src.data, src.dtype, dst_type.scalar, rounding_mode), dst_type.scalar)

    def create_bitcast(self, src: Handle, dst_type: tl.dtype) -> Handle:
        dst = dst_type.scalar
        if src.dtype.is_ptr() or dst.is_ptr():
            return Handle(
                src.data.view(np.uint64 if dst.is_ptr() else np.int64), dst, src.region if dst.is_ptr() else None
            )
        bits = rounding.bf16_to_bits(src.data) if src.dtype.name == "bf16" else np.ascontiguousarray(src.data)
        if dst.name == "bf16":
            return Handle(rounding.bf16_from_bits(bits.view(np.uint16)), dst)
        return Handle(bits.view(REGISTER_TYPE[dst.name]), dst)

    create_int_to_ptr = create_ptr_to_int = create_bitcast

    # -- arithmetic

    create_fadd = create_add = _binary(np.add)
    create_fsub = create_sub = _binary(np.subtract)
    create_fmul = create_mul = _binary(np.multiply)
    create_fdiv = create_precise_divf = create_approx_divf = _binary(np.divide)
    create_frem = _binary(np.fmod)
    create_srem = create_urem = _binary(np.fmod)  # C's sign rule, as LLVM's
    create_and, create_or, create_xor = _binary(np.bitwise_and), _binary(np.bitwise_or), _binary(np.bitwise_xor)
    create_minsi = create_minui = create_minimumf = _binary(np.minimum)
    create_maxsi = create_maxui = create_maximumf = _binary(np.maximum)
    create_minnumf, create_maxnumf = _binary(np.fmin), _binary(np.fmax)
    create_shl = _shift(np.left_shift, None)
    create_lshr, create_ashr = _shift(np.right_shift, False), _shift(np.right_shift, True)

    def create_idiv(self, lhs: Handle, rhs: Handle) -> Handle:
        """Division towards zero, as LLVM's."""
        return Handle((lhs.data - np.fmod(lhs.data, rhs.data)) // rhs.data, lhs.dtype)

    create_sdiv = create_udiv = create_idiv

    create_icmpSLE = create_icmpULE = create_fcmpOLE = create_fcmpULE = _compare(np.less_equal)
    create_icmpSLT = create_icmpULT = create_fcmpOLT = create_fcmpULT = _compare(np.less)
    create_icmpSGE = create_icmpUGE = create_fcmpOGE = create_fcmpUGE = _compare(np.greater_equal)
    create_icmpSGT = create_icmpUGT = create_fcmpOGT = create_fcmpUGT = _compare(np.greater)
    create_icmpEQ = create_fcmpOEQ = create_fcmpUEQ = _compare(np.equal)
    create_icmpNE = create_fcmpONE = create_fcmpUNE = _compare(np.not_equal)

    def create_umulhi(self, lhs: Handle, rhs: Handle) -> Handle:
        size = lhs.data.dtype.itemsize
        a, b = lhs.data.view(f"u{size}"), rhs.data.view(f"u{size}")
        if size < 8:
            high = (a.astype(f"u{2 * size}") * b.astype(f"u{2 * size}")) >> np.array(8 * size, f"u{2 * size}")
        else:
            low32, shift = np.uint64(0xFFFFFFFF), np.uint64(32)
            cross = (a >> shift) * (b & low32) + (((a & low32) * (b & low32)) >> shift)
            other = (a & low32) * (b >> shift) + (cross & low32)
            high = (a >> shift) * (b >> shift) + (cross >> shift) + (other >> shift)
        return Handle(high.astype(f"u{size}").view(lhs.data.dtype), lhs.dtype)

    create_fneg = _unary(np.negative)
    create_fabs = create_iabs = _unary(np.abs)
    create_exp, create_exp2, create_log, create_log2 = _unary(np.exp), _unary(np.exp2), _unary(np.log), _unary(np.log2)
    create_sin, create_cos = _unary(np.sin), _unary(np.cos)
    create_sqrt = create_precise_sqrt = _unary(np.sqrt)
    create_rsqrt = _unary(lambda x: x.dtype.type(1) / np.sqrt(x))
    create_floor, create_ceil = _unary(np.floor), _unary(np.ceil)
    create_erf = _unary(lambda x: torch.erf(torch.from_numpy(np.ascontiguousarray(x))).numpy())

    def create_fma(self, x: Handle, y: Handle, z: Handle) -> Handle:
        exact = x.data.astype(np.float64) * y.data + z.data  # the product is exact in float64
        if z.dtype.name == "bf16":
            return Handle(rounding.round_double_to_bf16(exact), z.dtype)
        return Handle(exact.astype(z.data.dtype), z.dtype)

    def create_clampf(self, arg: Handle, low: Handle, high: Handle, propagate_nan: Any) -> Handle:
        if propagate_nan == ir.PROPAGATE_NAN.NONE:
            return Handle(np.fmin(np.fmax(arg.data, low.data), high.data), arg.dtype)
        return Handle(np.minimum(np.maximum(arg.data, low.data), high.data), arg.dtype)

    def create_select(self, condition: Handle, lhs: Handle, rhs: Handle) -> Handle:
        return Handle(np.where(condition.data, lhs.data, rhs.data), lhs.dtype, _common_region(lhs, rhs))

    # -- shapes

    def create_make_range(self, _: Any, start: int, stop: int) -> Handle:
        return Handle(np.arange(start, stop, dtype=np.int32), INT32)

    def create_splat(self, type: Any, arg: Handle) -> Handle:
        """``type``: the block type, or its shape as a tuple (what a recorded call holds)."""
        shape = type if isinstance(type, tuple) else shape_of(type)
        data = np.empty(
            shape, arg.data.dtype
        )  # filled, not broadcast: np.broadcast_to takes longer than these blocks do
        data.fill(arg.data.reshape(-1)[0])
        return Handle(data, arg.dtype, arg.region)

    def create_unsplat(self, arg: Handle) -> Handle:
        return Handle(arg.data.reshape(-1)[:1], arg.dtype, arg.region)

    def create_reshape(self, arg: Handle, shape: Sequence[int], *_: Any) -> Handle:
        return Handle(arg.data.reshape([int(s) for s in shape]), arg.dtype, arg.region)

    def create_trans(self, arg: Handle, dims: Sequence[int]) -> Handle:
        return Handle(np.transpose(arg.data, [int(d) for d in dims]), arg.dtype, arg.region)

    def create_expand_dims(self, arg: Handle, axis: int) -> Handle:
        shape = arg.data.shape
        return Handle(arg.data.reshape((*shape[:axis], 1, *shape[axis:])), arg.dtype, arg.region)

    def create_broadcast(self, arg: Handle, shape: Sequence[int]) -> Handle:
        data = np.empty([int(size) for size in shape], arg.data.dtype)
        data[...] = arg.data
        return Handle(data, arg.dtype, arg.region)

    def create_cat(self, lhs: Handle, rhs: Handle) -> Handle:
        return Handle(np.concatenate([lhs.data, rhs.data]), lhs.dtype, _common_region(lhs, rhs))

    def create_join(self, lhs: Handle, rhs: Handle) -> Handle:
        return Handle(np.stack([lhs.data, rhs.data], axis=-1), lhs.dtype, _common_region(lhs, rhs))

    def create_split(self, arg: Handle) -> tuple[Handle, Handle]:
        return tuple(Handle(arg.data[..., i], arg.dtype, arg.region) for i in range(2))

    def create_gather(self, src: Handle, indices: Handle, axis: int) -> Handle:
        return Handle(np.take_along_axis(src.data, indices.data.astype(np.int64), axis=axis), src.dtype)

    def create_histogram(self, data: Handle, bins: int, mask: Handle | None) -> Handle:
        kept = data.data if mask is None else data.data[mask.data]
        kept = kept[(kept >= 0) & (kept < bins)].astype(np.int64)
        return Handle(np.bincount(kept, minlength=bins).astype(np.int32), INT32)

    def create_make_block_ptr(self, *_: Any) -> None:
        raise NotImplementedError("block pointers are gone from triton 3.8 on; use pointers or a tensor descriptor")

    # -- matrix product

    def create_dot(self, a: Handle, b: Handle, acc: Handle, input_precision: Any, *_: Any) -> Handle:
        x, y = self.dot_operand(a, input_precision), self.dot_operand(b, input_precision)
        if x.dtype.kind in "iu":
            return Handle(np.matmul(x.astype(np.int32), y.astype(np.int32)) + acc.data, acc.dtype)
        return Handle(rounded(np.matmul(x, y) + acc.data, acc.dtype, acc.data), acc.dtype)

    def dot_operand(self, arg: Handle, input_precision: Any) -> np.ndarray:
        """An operand as the multiplier sees it: 16-bit and 8-bit floats widened without loss."""
        if arg.dtype.name.startswith("fp8"):
            return rounding.fp8_decode(arg.data, arg.dtype)
        return arg.data.astype(np.float32) if arg.data.dtype == np.float16 else arg.data

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


def _truncate_float(data: np.ndarray, to: str) -> np.ndarray:
    if to == "bf16":
        return rounding.truncate_to_bf16(data.astype(np.float32))
    if to in ("fp16", "fp32"):
        nearest = data.astype(REGISTER_TYPE[to])
        too_large = np.abs(nearest.astype(np.float64)) > np.abs(data.astype(np.float64))
        return np.where(too_large, np.nextafter(nearest, nearest.dtype.type(0)), nearest)
    raise NotImplementedError(f"rounding towards zero to {to}")


def _float_to_int(data: np.ndarray, kind: np.dtype) -> np.ndarray:
    """Towards zero, saturating, NaN to 0: what ``cvt.rzi`` does. It has no 8-bit form: there 16 bits saturate and 8 are kept."""
    converted = np.dtype(f"{kind.kind}2") if kind.itemsize == 1 else kind
    limits = np.iinfo(converted)
    wide = np.nan_to_num(data.astype(np.float64), nan=0.0, posinf=np.inf, neginf=-np.inf)
    largest = np.nextafter(float(limits.max) + 1.0, 0.0) if converted.itemsize == 8 else float(limits.max)
    return np.clip(wide, float(limits.min), largest).astype(converted).astype(kind)
