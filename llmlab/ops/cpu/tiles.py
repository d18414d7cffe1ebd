"""The inner loops of the matrix products, emitted with all their sums in registers.

A loaded vector is used for as many results as there are registers for their sums. Numba does not unroll loops over the
results so that they become registers; here they are unrolled in Python, while the LLVM code is written.
"""

from __future__ import annotations

import functools
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from llmlab.ops.cpu.simd import (
    BFLOAT,
    F32,
    I8,
    I32,
    LANES,
    VEC,
    call,
    cpu_has,
    emit_fma,
    emit_load,
    emit_prefetch,
    emit_splat,
    emit_store,
    emit_sums,
    int64,
    itemsize,
    pointer,
)

PREFETCH_BYTES = (
    4096  # so far ahead weights are asked for: measured; left alone, the processor keeps half the bandwidth idle
)


_PAIRS = ir.VectorType(BFLOAT, 2 * LANES)
_WORDS = ir.VectorType(I32, LANES)
_INTEGERS = ir.VectorType(I8, LANES)


def literal(value: types.Type) -> Any:
    return getattr(value, "literal_value", None)


def load_as(b: ir.IRBuilder, address: ir.Value, kind: ir.Type, align: int) -> ir.Value:
    value = b.load(pointer(b, address, kind))
    value.align = align
    return value


def _step_bytes(method: str) -> tuple[int, int, int]:
    """Of one step: input features, bytes of a panel, bytes of a row of x."""
    return {
        "f32": (1, 64, 4),
        "f16": (1, 32, 4),
        "bf16": (2, 64, 8),
        "bf16dot": (2, 64, 4),
        "i8": (1, 16, 4),
    }[method]


def _load_panel(b: ir.IRBuilder, method: str, address: ir.Value) -> list[ir.Value]:
    """The vectors of one step of a panel: one, or two for a pair of bfloat16 that is widened."""
    if method == "bf16dot":
        return [load_as(b, address, _PAIRS, 4)]
    if method == "i8":
        return [emit_load_int8(b, address)]
    if method != "bf16":
        return [emit_load(b, method, address)]
    words = load_as(b, address, _WORDS, 4)
    even = b.shl(words, ir.Constant(_WORDS, [16] * LANES))
    odd = b.and_(words, ir.Constant(_WORDS, [0xFFFF0000] * LANES))
    return [b.bitcast(even, VEC), b.bitcast(odd, VEC)]


def emit_load_int8(b: ir.IRBuilder, address: ir.Value) -> ir.Value:
    """Sixteen 8-bit integers as float32."""
    return b.sitofp(b.sext(load_as(b, address, _INTEGERS, 1), _WORDS), VEC)


def emit_int8_pairs(b: ir.IRBuilder, address: ir.Value) -> ir.Value:
    """Two rows of sixteen 8-bit integers as pairs of bfloat16, which hold them exactly: the lower half of a float32 is zero."""
    even, odd = (b.bitcast(emit_load_int8(b, b.add(address, int64(i * LANES))), _WORDS) for i in range(2))
    return b.or_(b.lshr(even, ir.Constant(_WORDS, [16] * LANES)), odd)


def _broadcast(b: ir.IRBuilder, method: str, address: ir.Value) -> list[ir.Value]:
    """The inputs of one step of a row of x, each in all lanes."""
    if method == "bf16dot":
        word = b.bitcast(load_as(b, address, I32, 4), F32)
        return [b.bitcast(emit_splat(b, word), _PAIRS)]
    count = 2 if method == "bf16" else 1
    return [emit_splat(b, load_as(b, b.add(address, int64(4 * i)), F32, 4)) for i in range(count)]


def _multiply(b: ir.IRBuilder, method: str, x: list[ir.Value], w: list[ir.Value], total: ir.Value) -> ir.Value:
    if method == "bf16dot":
        return call(b, "llvm.x86.avx512bf16.dpbf16ps.512", VEC, total, x[0], w[0])
    for one, other in zip(x, w, strict=True):
        total = emit_fma(b, one, other, total)
    return total


@intrinsic(prefer_literal=True)
def panel_tile(
    typingctx: Any,
    method: Any,
    panels: Any,
    tokens: Any,
    unroll: Any,
    ahead: Any,
    target: Any,
    w: Any,
    panel_bytes: Any,
    x: Any,
    x_stride: Any,
    in_features: Any,
    bias: Any,
    out: Any,
    out_stride: Any,
) -> Any:
    """``out[t, 16·p + lane] = Σ x[t, i] · w[p, i, lane] + bias``, for a few panels and tokens.

    The first six are literals:
        method: "f32", "f16", "bf16", "i8" (widened; x is float32), or "bf16dot" (the pair product; x is bfloat16).
        panels, tokens: the size of the tile.
        unroll: steps whose sums are kept apart, so that additions do not wait for each other.
        ahead: whether to prefetch.
        target: the kind of out and bias; "+f32" adds to what stands in out.
    Strides in bytes; bias is 0 for none.
    """
    how, num_panels, num_tokens = literal(method), literal(panels), literal(tokens)
    num_sums, prefetch = literal(unroll), bool(literal(ahead))
    adding, kind = literal(target).startswith("+"), literal(target).removeprefix("+")
    features, w_bytes, x_bytes = _step_bytes(how)

    def codegen(context: Any, b: ir.IRBuilder, sig: Any, args: Any) -> Any:
        *_, w, panel_bytes, x, x_stride, in_features, bias, out, out_stride = args
        panel = [b.add(w, b.mul(panel_bytes, int64(i))) for i in range(num_panels)]
        row = [b.add(x, b.mul(x_stride, int64(i))) for i in range(num_tokens)]
        zero = ir.Constant(VEC, [0.0] * LANES)
        sums = [
            [[cgutils.alloca_once(b, VEC) for _ in range(num_sums)] for _ in range(num_panels)]
            for _ in range(num_tokens)
        ]
        for slot in (slot for of_token in sums for of_panel in of_token for slot in of_panel):
            b.store(zero, slot)
        steps = b.udiv(in_features, int64(features))
        with cgutils.for_range_slice(b, int64(0), steps, int64(num_sums)) as (first, _):
            for u in range(num_sums):
                step = b.add(first, int64(u))
                at = [b.add(address, b.mul(step, int64(w_bytes))) for address in panel]
                if prefetch:
                    for address in at:
                        emit_prefetch(b, b.add(address, int64(PREFETCH_BYTES)))
                weights = [_load_panel(b, how, address) for address in at]
                for t in range(num_tokens):
                    inputs = _broadcast(b, how, b.add(row[t], b.mul(step, int64(x_bytes))))
                    for p in range(num_panels):
                        slot = sums[t][p][u]
                        b.store(_multiply(b, how, inputs, weights[p], b.load(slot)), slot)
        width = LANES * itemsize(kind)
        shift = [cgutils.alloca_once_value(b, zero) for _ in range(num_panels)]
        with b.if_then(b.icmp_signed("!=", bias, int64(0))):
            for p, slot in enumerate(shift):
                b.store(emit_load(b, kind, b.add(bias, int64(p * width))), slot)
        for t in range(num_tokens):
            line = b.add(out, b.mul(out_stride, int64(t)))
            for p in range(num_panels):
                value = functools.reduce(b.fadd, (b.load(slot) for slot in sums[t][p]))
                place = b.add(line, int64(p * width))
                value = b.fadd(value, emit_load(b, kind, place) if adding else b.load(shift[p]))
                emit_store(b, kind, place, value)
        return context.get_dummy_value()

    return types.void(method, panels, tokens, unroll, ahead, target, *[types.int64] * 8), codegen


def _dot_load(b: ir.IRBuilder, kind: str, pairs: bool, address: ir.Value) -> ir.Value:
    return load_as(b, address, _PAIRS, 2) if pairs else emit_load(b, kind, address)


@intrinsic(prefer_literal=True)
def score_tile(
    typingctx: Any, method: Any, heads: Any, head_dim: Any, q: Any, keys: Any, offsets: Any, scores: Any, stride: Any
) -> Any:
    """``scores[g, j] = q[g] · key[j]`` for sixteen keys: ``key[j]`` stands at ``keys + offsets[j]``.

    method ("f32", "f16", "bf16", "bf16dot"), heads and head_dim (a multiple of 16, of 32 for pairs) are literals; ``q`` is
    ``[heads, head_dim]``, contiguous; ``offsets`` are int64, ``scores`` float32 with rows of ``stride`` bytes.
    """
    how, num_heads, dim = literal(method), literal(heads), literal(head_dim)
    pairs, kind = how.endswith("dot"), how.removesuffix("dot")
    step, size = (2 * LANES if pairs else LANES), itemsize(kind)

    def codegen(context: Any, b: ir.IRBuilder, sig: Any, args: Any) -> Any:
        *_, q, keys, offsets, scores, stride = args
        key = [b.add(keys, b.load(pointer(b, b.add(offsets, int64(8 * j)), offsets.type))) for j in range(LANES)]
        for g in range(num_heads):
            query = [_dot_load(b, kind, pairs, b.add(q, int64((g * dim + i) * size))) for i in range(0, dim, step)]
            sums = []
            for address in key:
                total = ir.Constant(VEC, [0.0] * LANES)
                for i, part in zip(range(0, dim, step), query, strict=True):
                    other = _dot_load(b, kind, pairs, b.add(address, int64(i * size)))
                    total = _multiply(b, how if pairs else "f32", [part], [other], total)
                sums.append(total)
            emit_store(b, "f32", b.add(scores, b.mul(stride, int64(g))), emit_sums(b, sums))
        return context.get_dummy_value()

    return types.void(method, heads, head_dim, *[types.int64] * 5), codegen


@intrinsic(prefer_literal=True)
def weighted_sum(
    typingctx: Any,
    kind: Any,
    heads: Any,
    head_dim: Any,
    values: Any,
    offsets: Any,
    count: Any,
    weights: Any,
    stride: Any,
    factors: Any,
    sums: Any,
) -> Any:
    """``sums[g] = factors[g]·sums[g] + Σ weights[g, j]·value[j]`` over ``count`` values; ``value[j]`` at ``values + offsets[j]``.

    kind, heads and head_dim (a multiple of 16) are literals; ``sums`` is ``[heads, head_dim]`` float32, ``factors`` one float32
    a head, ``weights`` float32 with rows of ``stride`` bytes. As many columns at a time as leave all sums in registers.
    """
    how, num_heads, dim = literal(kind), literal(heads), literal(head_dim)
    registers = 24 if cpu_has("avx512f") else 6
    together = next(
        n for n in range(dim // LANES, 0, -1) if (dim // LANES) % n == 0 and (n * num_heads <= registers or n == 1)
    )

    def codegen(context: Any, b: ir.IRBuilder, sig: Any, args: Any) -> Any:
        *_, values, offsets, count, weights, stride, factors, sums = args
        for first in range(0, dim // LANES, together):
            columns = range(first, first + together)
            at = {(g, c): b.add(sums, int64((g * dim + c * LANES) * 4)) for g in range(num_heads) for c in columns}
            total = {place: cgutils.alloca_once(b, VEC) for place in at}
            for g in range(num_heads):
                factor = emit_splat(b, load_as(b, b.add(factors, int64(4 * g)), F32, 4))
                for c in columns:
                    b.store(b.fmul(factor, load_as(b, at[g, c], VEC, 4)), total[g, c])
            with cgutils.for_range(b, count, intp=int64(0).type) as loop:
                j = loop.index
                value = b.add(values, b.load(pointer(b, b.add(offsets, b.mul(j, int64(8))), offsets.type)))
                vectors = {c: emit_load(b, how, b.add(value, int64(c * LANES * itemsize(how)))) for c in columns}
                for g in range(num_heads):
                    address = b.add(b.add(weights, b.mul(stride, int64(g))), b.mul(j, int64(4)))
                    weight = emit_splat(b, load_as(b, address, F32, 4))
                    for c in columns:
                        b.store(emit_fma(b, weight, vectors[c], b.load(total[g, c])), total[g, c])
            for place, slot in total.items():
                emit_store(b, "f32", at[place], b.load(slot))
        return context.get_dummy_value()

    return types.void(kind, heads, head_dim, *[types.int64] * 7), codegen
