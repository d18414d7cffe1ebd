"""Sixteen float32 lanes as a numba type, and the loads, stores and arithmetic that the CPU kernels are written in.

A kernel reads and writes memory by address (an int64) and a storage kind, "f32", "bf16" or "f16"; arithmetic is always
float32. LLVM maps sixteen lanes to one AVX-512 register, two AVX2 registers or four NEON registers, so the kernels say what
they mean once, and do not depend on the auto-vectoriser. Nothing here is "fast math": NaN and infinity behave.
"""

from __future__ import annotations

import functools
import operator
from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba import config, njit, types
from numba.core import cgutils
from numba.core.codegen import get_host_cpu_features
from numba.extending import intrinsic, models, overload, register_model

LANES = 16
KINDS = {torch.float32: "f32", torch.bfloat16: "bf16", torch.float16: "f16"}


def heads_together(x: torch.Tensor) -> torch.Tensor:
    """``x[T, heads, head_dim]`` with each token's heads one after another in memory (a view of joined QKV rows has them)."""
    return x if x.stride(2) == 1 and x.stride(1) == x.shape[2] else x.contiguous()


I8, I16, I32, I64, F32 = ir.IntType(8), ir.IntType(16), ir.IntType(32), ir.IntType(64), ir.FloatType()
BYTES = I8.as_pointer()
VOID = ir.VoidType()


@functools.cache
def cpu_has(feature: str) -> bool:
    """Whether numba compiles for an instruction set, by LLVM's name of it ("avx512f", "avx512bf16", "amx-bf16"): the
    processor's, unless ``NUMBA_CPU_FEATURES`` says otherwise."""
    chosen = config.CPU_FEATURES
    return f"+{feature}" in (get_host_cpu_features() if chosen is None else chosen).split(",")


class _BFloat(ir.types._BaseFloatType):  # llvmlite knows no bfloat; a name is all that is needed
    null = "0.0"
    intrinsic_name = "bf16"

    def __str__(self) -> str:
        return "bfloat"


_BFloat._create_instance()
BFLOAT = _BFloat()


def _vector(element: ir.Type, lanes: int = LANES) -> ir.VectorType:
    return ir.VectorType(element, lanes)


VEC = _vector(F32)


class Float32x16(types.Type):
    """Sixteen float32 lanes."""

    def __init__(self) -> None:
        super().__init__(name="float32x16")


float32x16 = Float32x16()


@register_model(Float32x16)
class _Float32x16Model(models.PrimitiveModel):
    def __init__(self, dmm: Any, fe_type: types.Type):
        super().__init__(dmm, fe_type, VEC)


# ---- emitting LLVM: small helpers that the intrinsics share ------------------------------------------------------------


def pointer(b: ir.IRBuilder, address: ir.Value, pointee: ir.Type) -> ir.Value:
    return b.inttoptr(address, pointee.as_pointer())


def call(b: ir.IRBuilder, name: str, result: ir.Type, *args: ir.Value) -> ir.Value:
    """Call an LLVM intrinsic by its full name."""
    kind = ir.FunctionType(result, [a.type for a in args])
    return b.call(cgutils.get_or_insert_function(b.module, kind, name), args)


def int64(value: int) -> ir.Constant:
    return ir.Constant(I64, value)


def itemsize(kind: str) -> int:
    return 4 if kind == "f32" else 2


def _lanes_of(value_type: ir.Type) -> tuple[int, Any]:
    """Number of lanes of a float32 scalar or vector, and the maker of types with as many."""
    if isinstance(value_type, ir.VectorType):
        return value_type.count, lambda element: ir.VectorType(element, value_type.count)
    return 1, lambda element: element


def _splat_int(int_type: ir.Type, value: int) -> ir.Constant:
    return ir.Constant(int_type, [value] * int_type.count if isinstance(int_type, ir.VectorType) else value)


def emit_decode(b: ir.IRBuilder, kind: str, stored: ir.Value) -> ir.Value:
    """Stored numbers, a scalar or a vector, as float32."""
    _, shape = _lanes_of(stored.type)
    if kind == "bf16":  # a bfloat16 is the upper half of a float32
        wide = shape(I32)
        return b.bitcast(b.shl(b.zext(stored, wide), _splat_int(wide, 16)), shape(F32))
    return b.fpext(stored, shape(F32)) if kind == "f16" else stored


def emit_encode(b: ir.IRBuilder, kind: str, value: ir.Value) -> ir.Value:
    """Float32 numbers as they are stored, rounded to nearest even.

    AVX512-BF16 does sixteen in one instruction; it makes subnormal numbers (below 1.2e-38) zero.
    """
    lanes, shape = _lanes_of(value.type)
    if kind == "bf16" and lanes == LANES and cpu_has("avx512bf16"):
        rounded = call(b, "llvm.x86.avx512bf16.cvtneps2bf16.512", shape(BFLOAT), value)
        return b.bitcast(rounded, shape(I16))
    if kind == "bf16":
        wide = shape(I32)
        bits = b.bitcast(value, wide)
        odd = b.and_(b.lshr(bits, _splat_int(wide, 16)), _splat_int(wide, 1))
        nearest = b.add(bits, b.add(odd, _splat_int(wide, 0x7FFF)))
        nearest = b.select(b.fcmp_unordered("uno", value, value), _splat_int(wide, 0x7FC00000), nearest)
        return b.trunc(b.lshr(nearest, _splat_int(wide, 16)), shape(I16))
    return b.fptrunc(value, shape(ir.HalfType())) if kind == "f16" else value


def emit_load(b: ir.IRBuilder, kind: str, address: ir.Value, lanes: int = LANES) -> ir.Value:
    """``lanes`` numbers from memory, as float32 (a scalar for one lane)."""
    element = {"f32": F32, "bf16": I16, "f16": ir.HalfType()}[kind]
    stored = b.load(pointer(b, address, _vector(element, lanes) if lanes > 1 else element))
    stored.align = itemsize(kind)
    return emit_decode(b, kind, stored)


def emit_store(b: ir.IRBuilder, kind: str, address: ir.Value, value: ir.Value) -> None:
    """Round float32 lanes (or a scalar) and store them."""
    stored = emit_encode(b, kind, value)
    b.store(stored, pointer(b, address, stored.type)).align = itemsize(kind)


def emit_fma(b: ir.IRBuilder, x: ir.Value, y: ir.Value, z: ir.Value) -> ir.Value:
    return call(b, "llvm.fma.v16f32", VEC, x, y, z)


def emit_prefetch(b: ir.IRBuilder, address: ir.Value, locality: int = 3) -> None:
    """Ask for a cache line; into the L1 cache (locality 3) or the L2 cache (2)."""
    read, keep, data = ir.Constant(I32, 0), ir.Constant(I32, locality), ir.Constant(I32, 1)
    call(b, "llvm.prefetch.p0", VOID, pointer(b, address, I8), read, keep, data)


def emit_splat(b: ir.IRBuilder, value: ir.Value) -> ir.Value:
    one = b.insert_element(ir.Constant(VEC, ir.Undefined), value, ir.Constant(I32, 0))
    return b.shuffle_vector(one, ir.Constant(VEC, ir.Undefined), ir.Constant(_vector(I32), [0] * LANES))


def emit_sums(b: ir.IRBuilder, vectors: list[ir.Value]) -> ir.Value:
    """The sums over the lanes of 2ⁿ ≤ 16 vectors, as one vector of so many lanes (a scalar for one vector).

    Every step adds the upper half of each group of lanes to the lower and packs two vectors into one while there are two:
    n vectors take n − 1 + log2(16/n) additions instead of 4·n.
    """

    def halves(x: ir.Value, y: ir.Value, width: int, group: int, both: bool) -> ir.Value:
        lower = [start + lane for start in range(0, width, group) for lane in range(group // 2)]
        upper = [lane + group // 2 for lane in lower]
        if both:
            lower, upper = lower + [width + lane for lane in lower], upper + [width + lane for lane in upper]
        pick = lambda lanes: ir.Constant(_vector(I32, len(lanes)), lanes)
        return b.fadd(b.shuffle_vector(x, y, pick(lower)), b.shuffle_vector(x, y, pick(upper)))

    group, width = LANES, LANES
    while len(vectors) > 1:
        pairs = zip(vectors[::2], vectors[1::2], strict=True)
        vectors = [halves(x, y, width, group, both=True) for x, y in pairs]
        group //= 2
    (vector,) = vectors
    while group > 1:
        vector = halves(vector, vector, width, group, both=False)
        width, group = width // 2, group // 2
    return vector if width > 1 else b.extract_element(vector, ir.Constant(I32, 0))


# ---- intrinsics: what a kernel calls ---------------------------------------------------------------------------------------


def _literal(value: types.Type) -> Any:
    return getattr(value, "literal_value", None)


@intrinsic(prefer_literal=True)
def load(typingctx: Any, kind: Any, address: Any) -> Any:
    """``load(kind, address) -> float32x16``."""
    return float32x16(kind, types.int64), lambda context, b, sig, args: emit_load(b, _literal(kind), args[1])


@intrinsic(prefer_literal=True)
def load_one(typingctx: Any, kind: Any, address: Any) -> Any:
    """``load_one(kind, address) -> float32``."""
    return types.float32(kind, types.int64), lambda context, b, sig, args: emit_load(b, _literal(kind), args[1], 1)


@intrinsic(prefer_literal=True)
def store(typingctx: Any, kind: Any, address: Any, value: Any) -> Any:
    """``store(kind, address, value)``: sixteen lanes, or one for a float32."""

    def codegen(context: Any, b: ir.IRBuilder, sig: Any, args: Any) -> Any:
        emit_store(b, _literal(kind), args[1], args[2])
        return context.get_dummy_value()

    return types.void(kind, types.int64, float32x16 if value == float32x16 else types.float32), codegen


@intrinsic(prefer_literal=True)
def rounded(typingctx: Any, kind: Any, value: Any) -> Any:
    """``rounded(kind, value)``: the value as the storage kind would hold it, still float32."""
    own = float32x16 if value == float32x16 else types.float32
    code = lambda context, b, sig, args: emit_decode(b, _literal(kind), emit_encode(b, _literal(kind), args[1]))
    return own(kind, own), code


@intrinsic
def load_int32(typingctx: Any, address: Any) -> Any:
    """``load_int32(address) -> int64``."""
    return types.int64(types.int64), lambda context, b, sig, args: b.sext(b.load(pointer(b, args[0], I32)), I64)


@intrinsic
def load_int64(typingctx: Any, address: Any) -> Any:
    """``load_int64(address) -> int64``."""
    return types.int64(types.int64), lambda context, b, sig, args: b.load(pointer(b, args[0], I64))


@intrinsic
def store_int64(typingctx: Any, address: Any, value: Any) -> Any:
    """``store_int64(address, value)``."""

    def codegen(context: Any, b: ir.IRBuilder, sig: Any, args: Any) -> Any:
        b.store(args[1], pointer(b, args[0], I64))
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), codegen


@intrinsic
def load_float64(typingctx: Any, address: Any) -> Any:
    """``load_float64(address) -> float64``."""
    double = ir.DoubleType()
    return types.float64(types.int64), lambda context, b, sig, args: b.load(pointer(b, args[0], double))


@intrinsic
def fetch_add(typingctx: Any, address: Any, value: Any) -> Any:
    """``fetch_add(address, value) -> int64``: add to a shared counter, atomically, and return what it was before."""

    def codegen(context: Any, b: ir.IRBuilder, sig: Any, args: Any) -> Any:
        return b.atomic_rmw("add", pointer(b, args[0], I64), args[1], "acq_rel")

    return types.int64(types.int64, types.int64), codegen


@intrinsic
def copy(typingctx: Any, target: Any, source: Any, count: Any) -> Any:
    """``copy(target, source, count)``: so many bytes, areas not overlapping."""

    def codegen(context: Any, b: ir.IRBuilder, sig: Any, args: Any) -> Any:
        cgutils.raw_memcpy(b, pointer(b, args[0], I8), pointer(b, args[1], I8), args[2], 1)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), codegen


@intrinsic
def prefetch(typingctx: Any, address: Any) -> Any:
    """``prefetch(address)``: ask for the cache line, into the L2 cache, and go on."""

    def codegen(context: Any, b: ir.IRBuilder, sig: Any, args: Any) -> Any:
        emit_prefetch(b, args[0], 2)
        return context.get_dummy_value()

    return types.void(types.int64), codegen


@intrinsic(prefer_literal=True)
def scratch(typingctx: Any, count: Any) -> Any:
    """``scratch(count) -> address`` of so many bytes (a literal) on the stack, aligned to 64."""
    size = _literal(count)

    def codegen(context: Any, b: ir.IRBuilder, sig: Any, args: Any) -> Any:
        area = cgutils.alloca_once(b, VEC, size=size // 64)  # LLVM takes seconds over an array of bytes
        area.align = 64
        return b.ptrtoint(area, I64)

    return types.int64(count), codegen


@intrinsic
def splat(typingctx: Any, value: Any) -> Any:
    """``splat(float32) -> float32x16``."""
    return float32x16(types.float32), lambda context, b, sig, args: emit_splat(b, args[0])


@intrinsic
def fma(typingctx: Any, x: Any, y: Any, z: Any) -> Any:
    """``fma(x, y, z) -> x·y + z``, rounded once."""
    return float32x16(float32x16, float32x16, float32x16), lambda context, b, sig, args: emit_fma(b, *args)


@intrinsic
def total(typingctx: Any, x: Any) -> Any:
    """``total(x) -> float32``: the sum of the lanes."""
    return types.float32(float32x16), lambda context, b, sig, args: emit_sums(b, [args[0]])


@intrinsic
def highest(typingctx: Any, x: Any) -> Any:
    """``highest(x) -> float32``: the greatest lane."""
    code = lambda context, b, sig, args: call(b, "llvm.vector.reduce.fmax.v16f32", F32, args[0])
    return types.float32(float32x16), code


@intrinsic
def maximum(typingctx: Any, x: Any, y: Any) -> Any:
    """``maximum(x, y)`` of each lane."""
    code = lambda context, b, sig, args: b.select(b.fcmp_ordered(">", *args), *args)
    return float32x16(float32x16, float32x16), code


def _keep(comparison: str) -> Any:
    def codegen(context: Any, b: ir.IRBuilder, sig: Any, args: Any) -> Any:
        wide = _vector(I32)
        limit = b.insert_element(ir.Constant(wide, ir.Undefined), b.trunc(args[1], I32), ir.Constant(I32, 0))
        limit = b.shuffle_vector(limit, ir.Constant(wide, ir.Undefined), ir.Constant(wide, [0] * LANES))
        kept = b.icmp_signed(comparison, ir.Constant(wide, list(range(LANES))), limit)
        return b.select(kept, args[0], emit_splat(b, args[2]))

    return float32x16(float32x16, types.int64, types.float32), codegen


@intrinsic
def keep_first(typingctx: Any, x: Any, count: Any, other: Any) -> Any:
    """``keep_first(x, count, other)``: lanes below ``count`` of x, the rest ``other`` (a float32)."""
    return _keep("<")


@intrinsic
def keep_from(typingctx: Any, x: Any, count: Any, other: Any) -> Any:
    """``keep_from(x, count, other)``: lanes from ``count`` on of x, the rest ``other``."""
    return _keep(">=")


def emit_exp(b: ir.IRBuilder, x: ir.Value) -> ir.Value:
    """e^x of each lane, within three units in the last place; 0 where the result would be subnormal.

    x = n·ln 2 + r with |r| ≤ ln 2 / 2 (Cody & Waite: ln 2 in two parts), e^r by a polynomial of degree 7 (the coefficients
    of Cephes' expf), 2ⁿ by adding n to the exponent.
    """
    number = lambda value: ir.Constant(VEC, [value] * LANES)
    n = call(b, "llvm.rint.v16f32", VEC, b.fmul(x, number(1.44269504088896341)))
    n = b.select(b.fcmp_ordered(">", n, number(127.0)), number(127.0), n)
    r = emit_fma(b, n, number(-0.693359375), x)
    r = emit_fma(b, n, number(2.12194440e-4), r)
    y = number(1.9875691500e-4)
    for c in (1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1, 1.0, 1.0):
        y = emit_fma(b, y, r, number(c))
    wide = _vector(I32)
    result = b.bitcast(b.add(b.bitcast(y, wide), b.shl(b.fptosi(n, wide), _splat_int(wide, 23))), VEC)
    result = b.select(b.fcmp_ordered("<", x, number(-87.3)), number(0.0), result)
    result = b.select(b.fcmp_ordered(">", x, number(88.7228)), number(float("inf")), result)
    return b.select(b.fcmp_unordered("uno", x, x), x, result)


_EXP2 = {  # 2^r on [0, 1) by degree: coefficients that make the greatest relative error least (2⁻¹⁸, 2⁻²³·⁹)
    4: (1.00000262, 0.693003833, 0.241442755, 0.0520114638, 0.0135341678),
    6: (1.0, 0.693147004, 0.24022983, 0.0554833412, 0.00967884064, 0.00124396884, 0.000217022549),
}


def emit_exp2(b: ir.IRBuilder, x: ir.Value, degree: int) -> ir.Value:
    """2^x of each lane. Without AVX-512, of lanes below 128 only, and 0 where the result would be subnormal."""
    number = lambda value: ir.Constant(VEC, [value] * LANES)
    if cpu_has("avx512dq"):  # two instructions take the fraction, and shift by the integer
        every, default = ir.Constant(I16, -1), ir.Constant(I32, 4)
        floor = ir.Constant(I32, 9)
        fraction = call(b, "llvm.x86.avx512.mask.reduce.ps.512", VEC, x, floor, number(0.0), every, default)
    else:
        whole = call(b, "llvm.floor.v16f32", VEC, x)
        fraction = b.fsub(x, whole)
    *rest, y = (number(c) for c in _EXP2[degree])
    for c in reversed(rest):
        y = emit_fma(b, y, fraction, c)
    if cpu_has("avx512dq"):
        return call(b, "llvm.x86.avx512.mask.scalef.ps.512", VEC, y, x, number(0.0), every, default)
    wide = _vector(I32)
    shifted = b.add(b.bitcast(y, wide), b.shl(b.fptosi(whole, wide), _splat_int(wide, 23)))
    return b.select(b.fcmp_ordered("<", x, number(-126.0)), number(0.0), b.bitcast(shifted, VEC))


@intrinsic
def exp(typingctx: Any, x: Any) -> Any:
    """``exp(x)`` of each lane."""
    return float32x16(float32x16), lambda context, b, sig, args: emit_exp(b, args[0])


@intrinsic(prefer_literal=True)
def silu(typingctx: Any, kind: Any, x: Any) -> Any:
    """``x / (1 + exp(−x))`` of each lane, as exactly as float32 goes, or as bfloat16 and float16 can tell."""

    def codegen(context: Any, b: ir.IRBuilder, sig: Any, args: Any) -> Any:
        number = lambda value: ir.Constant(VEC, [value] * LANES)
        x = args[1]
        if _literal(kind) == "f32" or not cpu_has("avx512dq"):
            return b.fdiv(x, b.fadd(number(1.0), emit_exp(b, b.fsub(number(0.0), x))))
        below = b.fadd(number(1.0), emit_exp2(b, b.fmul(x, number(-1.44269504088896341)), 6))
        guess = call(b, "llvm.x86.avx512.rcp14.ps.512", VEC, below, number(0.0), ir.Constant(I16, -1))
        error = emit_fma(b, b.fsub(number(0.0), below), guess, number(1.0))
        inverse = emit_fma(b, error, guess, guess)  # one step of Newton's method
        return b.fmul(x, b.select(b.fcmp_ordered(">", below, number(3e38)), number(0.0), inverse))

    return float32x16(kind, float32x16), codegen


@intrinsic(prefer_literal=True)
def exp2(typingctx: Any, degree: Any, x: Any) -> Any:
    """``exp2(degree, x)``: 2^x of each lane, none above 127, to 18 bits (degree 4, a literal) or 24 (6)."""
    code = lambda context, b, sig, args: emit_exp2(b, args[1], _literal(degree))
    return float32x16(degree, float32x16), code


@intrinsic
def exp2_one(typingctx: Any, x: Any) -> Any:
    """``exp2_one(float32) -> float32``: :func:`exp2` of degree 6."""

    def codegen(context: Any, b: ir.IRBuilder, sig: Any, args: Any) -> Any:
        return b.extract_element(emit_exp2(b, emit_splat(b, args[0]), 6), ir.Constant(I32, 0))

    return types.float32(types.float32), codegen


def _arithmetic(function: Any, instruction: str) -> None:
    @intrinsic
    def apply(typingctx: Any, x: Any, y: Any) -> Any:
        code = lambda context, b, sig, args: getattr(b, instruction)(*args)
        return float32x16(float32x16, float32x16), code

    @overload(function)
    def overloaded(x, y):  # numba compares this signature with the inner one
        if x == float32x16 and y == float32x16:
            return lambda x, y: apply(x, y)
        return None


for _function, _instruction in (
    (operator.add, "fadd"),
    (operator.sub, "fsub"),
    (operator.mul, "fmul"),
    (operator.truediv, "fdiv"),
):
    _arithmetic(_function, _instruction)


# ---- rearranging -----------------------------------------------------------------------------------------------------------


def emit_transpose(b: ir.IRBuilder, rows: list[ir.Value]) -> list[ir.Value]:
    """Sixteen vectors of sixteen lanes, rows and lanes exchanged: in four steps, blocks of 1, 2, 4 and 8 change places."""
    rows = list(rows)
    for width in (1, 2, 4, 8):
        upper = [lane & width for lane in range(LANES)]
        first = [LANES + lane - width if up else lane for lane, up in enumerate(upper)]
        second = [LANES + lane if up else lane + width for lane, up in enumerate(upper)]
        for i in (i for i in range(LANES) if not i & width):
            x, y = rows[i], rows[i + width]
            rows[i], rows[i + width] = (
                b.shuffle_vector(x, y, ir.Constant(_vector(I32), lanes)) for lanes in (first, second)
            )
    return rows


@intrinsic(prefer_literal=True)
def transpose(typingctx: Any, kind: Any, source: Any, offsets: Any, target: Any) -> Any:
    """``target[lane, row] = source[row, lane]``: sixteen rows, which stand at ``source + offsets[row]`` (int64), as float32.

    kind "f32" copies any 32-bit words.
    """

    def codegen(context: Any, b: ir.IRBuilder, sig: Any, args: Any) -> Any:
        _, source, offsets, target = args
        at = [b.load(pointer(b, b.add(offsets, int64(8 * row)), I64)) for row in range(LANES)]
        rows = [emit_load(b, _literal(kind), b.add(source, offset)) for offset in at]
        for lane, column in enumerate(emit_transpose(b, rows)):
            emit_store(b, "f32", b.add(target, int64(64 * lane)), column)
        return context.get_dummy_value()

    return types.void(kind, *[types.int64] * 3), codegen


@intrinsic
def interleave(typingctx: Any, even: Any, odd: Any, target: Any) -> Any:
    """``target[2·i] = even[i]; target[2·i + 1] = odd[i]`` for sixteen 16-bit words each; even or odd may be 0 for zeros."""

    def codegen(context: Any, b: ir.IRBuilder, sig: Any, args: Any) -> Any:
        even, odd, target = args
        words, wide = _vector(I16), _vector(I32)

        def read(address: ir.Value) -> ir.Value:
            slot = cgutils.alloca_once_value(b, ir.Constant(words, None))
            with b.if_then(b.icmp_signed("!=", address, int64(0))):
                value = b.load(pointer(b, address, words))
                value.align = 2
                b.store(value, slot)
            return b.zext(b.load(slot), wide)

        pairs = b.or_(read(even), b.shl(read(odd), _splat_int(wide, 16)))
        b.store(pairs, pointer(b, target, wide)).align = 4
        return context.get_dummy_value()

    return types.void(*[types.int64] * 3), codegen


@njit
def capped(scores, cap):  # type: ignore[no-untyped-def]
    """The soft cap of attention scores (Gemma 2): cap · tanh(scores / cap)."""
    one, limit = splat(np.float32(1.0)), splat(cap)
    half = scores / limit
    return limit * (one - (one + one) / (exp(half + half) + one))
