"""The builder's casts, arithmetic and matrix product."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton._C.libtriton import ir

from llmlab.interpreter import rounding
from llmlab.interpreter.handle import INT1, Handle, common_region, rounded
from llmlab.interpreter.memory import REGISTER_TYPE


def _binary(op: np.ufunc) -> Callable[["Arithmetic", Handle, Handle], Handle]:
    def apply(self: "Arithmetic", lhs: Handle, rhs: Handle) -> Handle:
        a, b = lhs.data, rhs.data
        if a.dtype != b.dtype and a.dtype.itemsize == b.dtype.itemsize:  # one side lost its signedness in the front end
            a, b = a.view(f"u{a.dtype.itemsize}"), b.view(f"u{a.dtype.itemsize}")
        if a.dtype == np.bool_ and op in (np.add, np.subtract, np.multiply):  # int1 wraps around
            return Handle((op(a.astype(np.int8), b.astype(np.int8)) & 1).astype(bool), lhs.dtype)
        return Handle(rounded(op(a, b), lhs.dtype, a), lhs.dtype)

    return apply


def _compare(op: np.ufunc) -> Callable[["Arithmetic", Handle, Handle], Handle]:
    return lambda self, lhs, rhs: Handle(op(lhs.data, rhs.data), INT1)


def _unary(op: Callable[[np.ndarray], np.ndarray]) -> Callable[["Arithmetic", Handle], Handle]:
    return lambda self, arg: Handle(rounded(op(arg.data), arg.dtype, arg.data), arg.dtype)


def _cast(self: "Arithmetic", src: Handle, dst_type: tl.dtype, *_: Any) -> Handle:
    return Handle(self.convert(src.data, src.dtype, dst_type.scalar), dst_type.scalar)


def _shift(op: np.ufunc, signed: bool | None) -> Callable[["Arithmetic", Handle, Handle], Handle]:
    def apply(self: "Arithmetic", lhs: Handle, rhs: Handle) -> Handle:
        data = lhs.data
        if signed is not None and data.dtype != np.bool_:
            data = data.view(f"{'i' if signed else 'u'}{data.dtype.itemsize}")
        return Handle(op(data, rhs.data.astype(data.dtype)).view(lhs.data.dtype), lhs.dtype)

    return apply


class Arithmetic:
    """What computes; ``create_X`` has the name and arguments that Triton's front end calls."""

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
        return Handle(np.where(condition.data, lhs.data, rhs.data), lhs.dtype, common_region(lhs, rhs))

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
