"""Small kernels over the language's features, run by two interpreters: ours, and Triton's own in another process.

As a script (with TRITON_INTERPRET=1) it runs all of them in Triton's interpreter and writes every output to the .npz file named.
No bfloat16 here, which Triton's interpreter gets wrong; test_bf16 has that, against torch.
"""

import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl

SIZE = 64
GLOBAL: tl.constexpr = tl.constexpr(3)


@triton.jit
def _helper(a, b, SCALE: tl.constexpr = 2):
    return a * SCALE + b, a - b


@triton.jit
def _larger(a, b):
    return tl.where(a > b, a, b)


@triton.jit
def _decay(a1, b1, a2, b2):
    return a1 * a2, b1 * a2 + b2


@triton.jit
def elementwise(x, y, o, n, B: tl.constexpr):
    i = tl.program_id(0) * B + tl.arange(0, B)
    m = i < n
    a = tl.load(x + i, mask=m, other=0.0)
    b = tl.load(y + i, mask=m, other=1.0)
    p, q = _helper(a, b)
    r = tl.exp(-tl.abs(a)) + tl.log(tl.abs(b) + 1.0) + tl.sqrt(tl.abs(p)) * tl.sigmoid(q) + tl.floor(a) - tl.ceil(b)
    r += (
        tl.sin(a) * tl.cos(b)
        + tl.exp2(tl.minimum(a, b))
        + tl.maximum(a, 0.5)
        + tl.clamp(a, -0.5, 0.5) / (tl.abs(b) + GLOBAL)
    )
    tl.store(o + i, tl.fma(r, a, tl.rsqrt(tl.abs(b) + 1e-3)) + tl.erf(a), mask=m)


@triton.jit
def integers(x, y, o, u, n, B: tl.constexpr):
    i = tl.arange(0, B)
    a = tl.load(x + i)
    b = tl.load(y + i)
    r = a // b + a % b - (a << 2) + (a >> 1) + (a & b) - (a | 7) + (a ^ b) + (~a)
    r = tl.where((a > b) & (a != 3) | (b == 2), r, -r)
    tl.store(o + i, r + tl.cdiv(n, 7) + (1 if B > 32 else 2))
    v = a.to(tl.uint32, bitcast=True)
    v = (v >> 3) * 2654435761 + tl.umulhi(v, 0xDEADBEEF + (v & 0))
    tl.store(u + i, v.to(tl.int64) + (v.to(tl.uint8)).to(tl.int64))


@triton.jit
def control_flow(o, start, limit, STEPS: tl.constexpr):
    total = 0
    i = start
    while (i < limit) and (total < 1000):
        if i % 2 == 0:
            total += i
        elif i % 3 == 0:
            total -= 1
        else:
            total += 2
        i += 1
    for j in range(3, limit, 2):
        total += j * STEPS
    for j in tl.static_range(STEPS):
        total += j if total > 5 else 1
    for j in tl.range(4, 0, -1):
        total = total * 2 - j
    acc = tl.zeros([4], tl.int32)
    for j in tl.range(0, STEPS, num_stages=2):
        acc += j
    tl.store(o + tl.arange(0, 4), acc + total)


@triton.jit
def early_return(x, o, n):
    p = tl.program_id(0)
    if p >= n:
        return
    if p == 1:
        tl.store(o + p, -1.0)
    else:
        tl.store(o + p, tl.load(x + p) * p)


@triton.jit
def reductions(x, o, M: tl.constexpr, N: tl.constexpr):
    a = tl.load(x + tl.arange(0, M)[:, None] * N + tl.arange(0, N)[None, :])
    rows = tl.arange(0, M)
    tl.store(o + rows, tl.sum(a, 1))
    tl.store(o + M + rows, tl.max(a, axis=1))
    tl.store(o + 2 * M + rows, tl.argmax(a, 1).to(tl.float32))
    low, where = tl.min(a, 1, return_indices=True)
    tl.store(o + 3 * M + rows, low + where)
    tl.store(o + 4 * M + rows, tl.reduce(a, 1, _larger))
    tl.store(o + 5 * M + rows, tl.sum(tl.max(a, 0)) + a.sum() + tl.xor_sum(rows, 0))
    kept = tl.sum(a, 1, keep_dims=True)
    tl.store(o + 6 * M + rows, tl.sum(kept + a, 1))


@triton.jit
def scans(x, o, i, N: tl.constexpr):
    k = tl.arange(0, N)
    a = tl.load(x + k)
    tl.store(o + k, tl.cumsum(a, 0))
    tl.store(o + N + k, tl.cumsum(a, 0, reverse=True))
    tl.store(o + 2 * N + k, tl.cumprod(1.0 + a * 0.01, 0))
    decayed, sums = tl.associative_scan((a * 0 + 0.5, a), 0, _decay)
    tl.store(o + 3 * N + k, decayed + sums)
    tl.store(o + 4 * N + k, tl.sort(a))
    tl.store(o + 5 * N + k, tl.flip(a, 0))
    tl.store(i + tl.arange(0, 8), tl.histogram(tl.abs(a * 3).to(tl.int32), 8))


@triton.jit
def products(x, y, o, h, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
    m, n, k = tl.arange(0, M), tl.arange(0, N), tl.arange(0, K)
    a = tl.load(x + m[:, None] * K + k[None, :])
    b = tl.load(y + k[:, None] * N + n[None, :])
    c = tl.dot(a, b, input_precision="ieee")
    c = tl.dot(a, b, c, input_precision="ieee")
    tl.store(o + m[:, None] * N + n[None, :], c)
    d = tl.dot(a.to(tl.float16), b.to(tl.float16))
    tl.store(h + n[:, None] * M + m[None, :], d.T)


@triton.jit
def shapes(x, o, N: tl.constexpr):
    a = tl.load(x + tl.arange(0, N))
    square = tl.reshape(a, [N // 8, 8])
    left, right = tl.split(tl.reshape(a, [N // 2, 2]))
    both = tl.reshape(tl.join(right, left), [N])
    turned = tl.reshape(tl.trans(square), [N])
    wide = tl.broadcast_to(tl.sum(square, 1)[:, None], [N // 8, 8])
    flat = (
        tl.interleave(left, right)
        + tl.permute(square, 1, 0).reshape(N)
        + tl.ravel(wide)
        + tl.expand_dims(a, 0).reshape(N)
    )
    tl.store(o + tl.arange(0, N), both + 2 * turned + 3 * flat + tl.full([N], 0.25, tl.float32))


@triton.jit
def atomics(x, f, i, n):
    p = tl.program_id(0)
    k = tl.arange(0, 16)
    tl.atomic_add(f + k % 4, tl.load(x + k) * 0 + 0.5)
    tl.atomic_max(i + k, p + k)
    tl.atomic_min(i + 16 + k, p - k, mask=k < 8)
    tl.atomic_or(i + 32 + k, 1 << p)
    old = tl.atomic_xchg(i + 48, p)
    tl.atomic_add(i + 49, old)
    won = tl.atomic_cas(i + 50, 0, p + 1)
    tl.atomic_add(i + 51, won)


@triton.jit
def random_numbers(o, i, seed, N: tl.constexpr):
    k = tl.arange(0, N)
    tl.store(o + k, tl.rand(seed, k))
    tl.store(i + k, tl.randint(seed + 1, k).to(tl.int64))


@triton.jit
def conversions(x, o, h, i, N: tl.constexpr):
    k = tl.arange(0, N)
    a = tl.load(x + k)
    half = a.to(tl.float16)
    tl.store(h + k, half * half - half / 3 + 0.1)
    tl.store(o + k, half.to(tl.float32) + (a * 100).to(tl.int32).to(tl.float32) + (a > 0).to(tl.float32))
    bits = a.to(tl.int32, bitcast=True)
    tl.store(i + k, (bits.to(tl.int64) << 3) + (a * 50).to(tl.int8).to(tl.int64) + (k > 3).to(tl.int64))


@triton.jit
def descriptors(x, o, M, N, BM: tl.constexpr, BN: tl.constexpr):
    source = tl.make_tensor_descriptor(x, [M, N], [N, 1], [BM, BN])
    target = tl.make_tensor_descriptor(o, [M, N], [N, 1], [BM, BN])
    row, column = tl.program_id(0) * BM, tl.program_id(1) * BN
    target.store([row, column], source.load([row, column]) * 2 + 1)


def _floats(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def _ints(*shape: int, low: int = 1, high: int = 50, seed: int = 1) -> torch.Tensor:
    return torch.randint(low, high, shape, generator=torch.Generator().manual_seed(seed), dtype=torch.int32)


def _out(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype)


def cases() -> dict[str, tuple[Any, tuple[int, ...], tuple[Any, ...], dict[str, Any]]]:
    """name -> (kernel, grid, arguments, constexprs), with fresh tensors."""
    n = SIZE
    return {
        "elementwise": (elementwise, (4,), (_floats(50), _floats(50, seed=2), _out(50), 50), {"B": 16}),
        "integers": (
            integers,
            (1,),
            (_ints(n) - 25, _ints(n, seed=3), _out(n, dtype=torch.int32), _out(n, dtype=torch.int64), 45),
            {"B": n},
        ),
        "control_flow": (control_flow, (1,), (_out(4, dtype=torch.int32), 2, 17), {"STEPS": 5}),
        "early_return": (early_return, (6,), (_floats(6), _out(6), 4), {}),
        "reductions": (reductions, (1,), (_floats(8, 16), _out(56)), {"M": 8, "N": 16}),
        "scans": (scans, (1,), (_floats(n), _out(6 * n), _out(8, dtype=torch.int32)), {"N": n}),
        "products": (
            products,
            (1,),
            (_floats(16, 32), _floats(32, 8), _out(16, 8), _out(8, 16)),
            {"M": 16, "N": 8, "K": 32},
        ),
        "shapes": (shapes, (1,), (_floats(n), _out(n)), {"N": n}),
        "atomics": (atomics, (5,), (_floats(16), _out(4), _out(64, dtype=torch.int32), 16), {}),
        "random_numbers": (random_numbers, (1,), (_out(n), _out(n, dtype=torch.int64), 1234), {"N": n}),
        "conversions": (
            conversions,
            (1,),
            (_floats(n), _out(n), _out(n, dtype=torch.float16), _out(n, dtype=torch.int64)),
            {"N": n},
        ),
        "descriptors": (descriptors, (2, 2), (_floats(20, 24), _out(20, 24), 20, 24), {"BM": 16, "BN": 16}),
    }


def results(run: Callable[..., Any], names: list[str] | None = None) -> dict[str, np.ndarray]:
    """Every tensor argument after ``run(kernel, grid, *args, **constexprs)``, as ``name/position``."""
    found = {}
    for name, (kernel, grid, args, constexprs) in cases().items():
        if names is None or name in names:
            run(kernel, grid, *args, **constexprs)
            found |= {f"{name}/{i}": arg.numpy() for i, arg in enumerate(args) if isinstance(arg, torch.Tensor)}
    return found


def _stock_results() -> dict[str, np.ndarray]:
    """Of Triton's interpreter; a kernel that it cannot run has ``name/error`` instead."""
    found: dict[str, np.ndarray] = {}
    for name in cases():
        try:
            found |= results(lambda kernel, grid, *args, **constexprs: kernel[grid](*args, **constexprs), [name])
        except Exception as error:
            found[f"{name}/error"] = np.array(str(error))
    return found


if __name__ == "__main__":
    np.savez(sys.argv[1], **_stock_results())
