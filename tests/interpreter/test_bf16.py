"""bfloat16, float16, fp8 and TF32 to the last bit, against torch (which rounds once, to nearest even)."""

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from llmlab.interpreter import Checks, rounding, run

BF16 = torch.bfloat16


def _every_bf16() -> torch.Tensor:
    """All 65536 bit patterns."""
    return torch.arange(65536, dtype=torch.int32).to(torch.int16).view(BF16)


def _pairs(count: int = 1 << 15) -> tuple[torch.Tensor, torch.Tensor]:
    """Random pairs of all magnitudes, and every special value against every other."""
    generator = torch.Generator().manual_seed(0)
    values = torch.randint(0, 65536, (2, count), generator=generator, dtype=torch.int32).to(torch.int16).view(BF16)
    near = torch.randn(2, count, generator=generator).to(BF16)
    special = torch.tensor(
        [0.0, -0.0, 1.0, -1.0, float("inf"), float("-inf"), float("nan"), 3.3895e38, 9.2e-41, 1.1755e-38]
    ).to(BF16)
    left, right = torch.meshgrid(special, special, indexing="ij")
    pad = torch.zeros(412, dtype=BF16)  # up to a multiple of 512
    return torch.cat([values[0], near[0], left.reshape(-1), pad]), torch.cat(
        [values[1], near[1], right.reshape(-1), pad]
    )


def _same_bits(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Equal bit for bit, any NaN equal to any other."""
    assert actual.dtype == expected.dtype
    nan = expected.isnan()
    assert torch.equal(actual.isnan(), nan)
    kind = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[actual.element_size()]
    wrong = (actual.view(kind) != expected.view(kind)) & ~nan
    assert not wrong.any(), f"{int(wrong.sum())} differ, e.g. {actual[wrong][0]} for {expected[wrong][0]}"


@triton.jit
def _arithmetic(x, y, o, N: tl.constexpr, B: tl.constexpr):
    i = tl.program_id(0) * B + tl.arange(0, B)
    a = tl.load(x + i)
    b = tl.load(y + i)
    tl.store(o + i, a + b)
    tl.store(o + N + i, a - b)
    tl.store(o + 2 * N + i, a * b)
    tl.store(o + 3 * N + i, a / b)
    tl.store(o + 4 * N + i, tl.where(a < b, a, b))
    tl.store(o + 5 * N + i, tl.abs(a))
    tl.store(o + 6 * N + i, (a * b) + (a - b))
    tl.store(o + 7 * N + i, a * 0.1)
    tl.store(o + 8 * N + i, 1 - a)


@pytest.mark.parametrize("checks", [None, Checks(overflow=False)], ids=["unchecked", "checked"])
def test_arithmetic_is_torchs(checks: Checks | None) -> None:
    x, y = _pairs()
    n = x.numel()
    out = torch.zeros(9, n, dtype=BF16)
    assert run(_arithmetic, (n // 512,), x, y, out, N=n, B=512, checks=checks) == []
    expected = [
        x + y,
        x - y,
        x * y,
        x / y,
        torch.where(x < y, x, y),
        x.abs(),
        x * y + (x - y),
        x * torch.tensor(0.1, dtype=BF16),
        torch.ones((), dtype=BF16) - x,
    ]
    for actual, wanted in zip(out, expected, strict=True):
        _same_bits(actual, wanted)


@triton.jit
def _compare(x, y, o, N: tl.constexpr, B: tl.constexpr):
    i = tl.program_id(0) * B + tl.arange(0, B)
    a, b = tl.load(x + i), tl.load(y + i)
    bits = (a < b).to(tl.int32) + 2 * (a <= b).to(tl.int32) + 4 * (a > b).to(tl.int32) + 8 * (a >= b).to(tl.int32)
    tl.store(o + i, bits + 16 * (a == b).to(tl.int32) + 32 * (a != b).to(tl.int32))


def test_comparisons_are_torchs() -> None:
    x, y = _pairs()
    out = torch.zeros(x.numel(), dtype=torch.int32)
    run(_compare, (x.numel() // 512,), x, y, out, N=x.numel(), B=512)
    tests = (x < y, x <= y, x > y, x >= y, x == y, x != y)
    assert torch.equal(out, sum(test.int() << i for i, test in enumerate(tests)))


@triton.jit
def _copy(x, o, B: tl.constexpr):
    i = tl.program_id(0) * B + tl.arange(0, B)
    tl.store(o + i, tl.load(x + i).to(o.dtype.element_ty))


def _cast(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    out = torch.zeros(values.numel(), dtype=dtype)
    run(_copy, (values.numel() // 512,), values, out, B=512)
    return out


def test_every_bf16_survives_a_load_and_a_store() -> None:
    values = _every_bf16()
    _same_bits(_cast(values, BF16), values)
    _same_bits(_cast(values, torch.float32), values.float())
    _same_bits(_cast(values, torch.float16), values.half())


@pytest.mark.parametrize("source", [torch.float32, torch.float16, torch.float64], ids=str)
def test_casts_to_bf16_round_to_nearest_even(source: torch.dtype) -> None:
    every = _every_bf16()
    # Every bfloat16, every midpoint to its successor, and both neighbours of each midpoint.
    halfway = (every.float().view(torch.int32) | 0x8000).view(torch.float32)
    around = [every.float(), halfway]
    around += [(halfway.view(torch.int32) + step).view(torch.float32) for step in (-1, 1)]
    values = torch.cat(around).to(source)
    if (
        source == torch.float64
    ):  # torch rounds doubles twice, through float32; midpoints plus a hair show the difference
        finite = halfway.double()[halfway.isfinite()][: 512 * 100]
        nudged = finite * (1 + 2.0**-40)
        up = _cast(nudged, BF16).double()
        assert ((up - nudged).abs() <= (finite - up).abs()).all()
        assert (up.abs() > finite.abs()).all(), "above the midpoint is up, even where the midpoint itself would go down"
        values = values.float().double()
    _same_bits(_cast(values, BF16), values.to(BF16))


def test_integers_to_bf16_round_once() -> None:
    # Within 2^24 float32 is exact, so that the oracle, which goes through it, rounds once too.
    drawn = torch.randint(-(2**24), 2**24, (2**15,), generator=torch.Generator().manual_seed(0))
    values = torch.cat([torch.arange(-(2**15), 2**15), drawn]).int()
    _same_bits(_cast(values, BF16), values.double().float().to(BF16))
    assert (
        _cast(torch.full((512,), 16842753, dtype=torch.int32), BF16)[0] == 16908288
    )  # 2^24 + 2^16 + 1: above a midpoint


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_fp8(dtype: torch.dtype) -> None:
    codes = torch.arange(256, dtype=torch.int32).to(torch.uint8).repeat(2).view(dtype)
    _same_bits(_cast(codes, torch.float32), codes.float())
    largest = torch.finfo(dtype).max
    values = torch.cat([torch.randn(1024) * scale for scale in (1e-3, 0.1, 1, 30, 300)] + [torch.linspace(0, 2, 512)])
    _same_bits(_cast(values, dtype).float(), values.clamp(-largest, largest).to(dtype).float())


@triton.jit
def _dot(a, b, o, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
    m, n, k = tl.arange(0, M), tl.arange(0, N), tl.arange(0, K)
    product = tl.dot(tl.load(a + m[:, None] * K + k[None, :]), tl.load(b + k[:, None] * N + n[None, :]))
    tl.store(o + m[:, None] * N + n[None, :], product.to(o.dtype.element_ty))


@pytest.mark.parametrize("dtype", [BF16, torch.float16, torch.float8_e4m3fn], ids=str)
def test_dot_multiplies_exactly_and_adds_in_float32(dtype: torch.dtype) -> None:
    a = torch.randint(-8, 9, (16, 64)).float().to(dtype)
    b = torch.randint(-8, 9, (64, 32)).float().to(dtype)
    out = torch.zeros(16, 32)
    run(_dot, (1,), a, b, out, M=16, N=32, K=64)
    assert torch.equal(out, a.float() @ b.float())  # integers: every sum is exact
    a, b = torch.randn(16, 64).to(dtype), torch.randn(64, 32).to(dtype)
    run(_dot, (1,), a, b, out, M=16, N=32, K=64)
    torch.testing.assert_close(out.double(), a.double() @ b.double(), rtol=1e-5, atol=1e-5)


def test_dot_in_tf32_where_the_check_is_on() -> None:
    a, b = torch.randn(16, 64), torch.randn(64, 32)
    exact = a.double() @ b.double()
    full, rounded = torch.zeros(16, 32), torch.zeros(16, 32)
    run(_dot, (1,), a, b, full, M=16, N=32, K=64)
    run(_dot, (1,), a, b, rounded, M=16, N=32, K=64, checks=Checks())
    assert (full - exact).abs().max() < 5e-5
    assert 1e-4 < (rounded - exact).abs().max() < 64 * 2.0**-10  # ten bits of significand


def test_round_to_tf32_keeps_ten_bits() -> None:
    x = np.array([1 + 2.0**-10, 1 + 2.0**-11, 1 + 2.0**-12, -1 - 2.0**-11, np.inf, np.nan, 3e38], np.float32)
    expected = np.array([1 + 2.0**-10, 1 + 2.0**-10, 1, -1 - 2.0**-10, np.inf, np.nan, 3e38], np.float32)
    np.testing.assert_allclose(rounding.round_to_tf32(x), expected, rtol=2.0**-11)
    np.testing.assert_array_equal(rounding.round_to_tf32(x)[:6], expected[:6])


@triton.jit
def _sums(x, o, N: tl.constexpr):
    a = tl.load(x + tl.arange(0, N))
    tl.store(o, tl.sum(a, 0))
    tl.store(o + 1, tl.sum(a.to(tl.float32), 0))
    tl.store(o + 2, tl.max(a, 0))
    tl.store(o + 3, tl.min(a, 0))


def test_a_bf16_sum_is_as_inexact_as_on_a_gpu_and_is_reported() -> None:
    ones = torch.ones(64, dtype=BF16)
    out = torch.zeros(4)
    findings = run(_sums, (1,), ones, out, N=64, checks=Checks())
    assert [finding.kind for finding in findings] == ["narrow-sum"]
    assert out.tolist() == [64, 64, 1, 1]  # exact where every partial sum is a bfloat16
    x = (1 + torch.rand(1024)).to(BF16)
    run(_sums, (1,), x, out, N=1024)
    exact = x.double().sum()
    assert abs(out[1] - exact) < 1e-3
    assert 1e-3 < abs(out[0] - exact) < exact * 2.0**-8 * 10  # ten roundings of half an ulp each, at the most
    assert (out[2], out[3]) == (x.max(), x.min())


@triton.jit
def _special_functions(x, o, N: tl.constexpr):
    i = tl.arange(0, N)
    a = tl.load(x + i).to(tl.float32)
    tl.store(o + i, (tl.exp(a) * tl.sigmoid(a)).to(o.dtype.element_ty))


def test_float32_inside_rounded_once_at_the_store() -> None:
    x = torch.randn(512).to(BF16)
    out = torch.zeros(512, dtype=BF16)
    run(_special_functions, (1,), x, out, N=512)
    exact = (x.double().exp() * x.double().sigmoid()).float()
    assert (out.float() - exact).abs().div(exact).max() <= 2.0**-8
    assert (out == exact.to(BF16)).float().mean() > 0.99  # but for float32's own error beside a midpoint


@triton.jit
def _atomic(o, x, N: tl.constexpr):
    tl.atomic_add(o + tl.arange(0, N) % 2, tl.load(x + tl.arange(0, N)))


def test_atomic_add_rounds_every_time() -> None:
    out = torch.zeros(2, dtype=BF16)
    x = torch.full((1024,), 1.0, dtype=BF16)
    run(_atomic, (1,), out, x, N=1024)
    assert out.tolist() == [256.0, 256.0]  # 256 + 1 is a tie and goes back to 256, for ever
