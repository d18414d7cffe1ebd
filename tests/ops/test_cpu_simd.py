"""The vocabulary of the CPU kernels, held to numpy's float64 and to torch's own conversions."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

pytest.importorskip("numba")

from llmlab.ops.cpu import simd
from llmlab.ops.cpu.parallel import arg, kernel

EXPONENTS = {"exp": (-87.0, 88.0), "exp2": (-126.0, 126.9)}


@kernel("qqq")
def apply(name: str):
    def body(p: int) -> None:
        x, out, count = arg(p, 0), arg(p, 1), arg(p, 2)
        for i in range(0, count, simd.LANES):
            v = simd.load("f32", x + 4 * i)
            if name == "exp":
                v = simd.exp(v)
            elif name == "exp2":
                v = simd.exp2(6, v)
            elif name == "silu":
                v = simd.silu("f32", v)
            simd.store("f32", out + 4 * i, v)

    return body


@kernel("qqq")
def convert(source: str, target: str):
    source_size, target_size = simd.itemsize(source), simd.itemsize(target)

    def body(p: int) -> None:
        for i in range(0, arg(p, 2), simd.LANES):
            simd.store(target, arg(p, 1) + i * target_size, simd.load(source, arg(p, 0) + i * source_size))

    return body


@kernel("qqq")
def convert_one(source: str, target: str):
    source_size, target_size = simd.itemsize(source), simd.itemsize(target)

    def body(p: int) -> None:
        for i in range(arg(p, 2)):
            simd.store(target, arg(p, 1) + i * target_size, simd.load_one(source, arg(p, 0) + i * source_size))

    return body


@kernel("qq")
def reduce_lanes():
    def body(p: int) -> None:
        v = simd.load("f32", arg(p, 0))
        simd.store("f32", arg(p, 1), simd.total(v))
        simd.store("f32", arg(p, 1) + 4, simd.highest(v))
        simd.store("f32", arg(p, 1) + 64, simd.keep_from(simd.keep_first(v, 11, np.float32(-1.0)), 3, np.float32(-2.0)))

    return body


@kernel("qqq")
def turn():
    def body(p: int) -> None:
        simd.transpose("f32", arg(p, 0), arg(p, 1), arg(p, 2))

    return body


def run(name: str, x: torch.Tensor) -> torch.Tensor:
    out = torch.empty_like(x)
    apply(name).serial(x.data_ptr(), out.data_ptr(), x.numel())
    return out


@pytest.mark.parametrize("name", ["exp", "exp2"])
def test_exponentials_within_three_units_in_the_last_place(name):
    x = torch.linspace(*EXPONENTS[name], 1 << 16)
    expected = np.exp(x.double().numpy()) if name == "exp" else np.exp2(x.double().numpy())
    error = np.abs(run(name, x).double().numpy() / expected - 1)
    assert error.max() < 3 * 2.0**-23


@pytest.mark.parametrize("name", ["exp", "exp2"])
def test_exponentials_at_the_ends(name):
    x = torch.tensor([0.0, -0.0, -math.inf, -1000.0, math.nan, -200.0] + [1.0] * 10)
    out = run(name, x)
    assert out[:4].tolist() == [1.0, 1.0, 0.0, 0.0] and out[4].isnan() and out[5] == 0.0
    if name == "exp":
        assert run(name, torch.tensor([math.inf, 89.0] + [0.0] * 14))[:2].tolist() == [math.inf, math.inf]


def test_silu_is_torchs():
    x = torch.cat((torch.linspace(-80, 80, 4096), torch.tensor([math.inf, -math.inf, math.nan, -1e4] + [0.0] * 12)))
    torch.testing.assert_close(run("silu", x), torch.nn.functional.silu(x), rtol=1e-6, atol=1e-6, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("maker", [convert, convert_one])
def test_every_stored_number_is_read_as_torch_reads_it(dtype, maker):
    every = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(dtype)
    out = torch.empty(1 << 16)
    maker(simd.KINDS[dtype], "f32").serial(every.data_ptr(), out.data_ptr(), 1 << 16)
    torch.testing.assert_close(out, every.float(), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("maker", [convert, convert_one])
def test_rounding_is_to_nearest_even(dtype, maker):
    g = torch.Generator().manual_seed(0)
    bits = torch.randint(0x00800000, 0x7F800000, (1 << 16,), generator=g, dtype=torch.int32)
    bits[: 1 << 12] = bits[: 1 << 12] & ~0xFFFF | 0x8000  # ties of bfloat16
    x = bits.view(torch.float32) * torch.where(torch.rand(1 << 16, generator=g) < 0.5, -1.0, 1.0)
    x = torch.cat((x, torch.tensor([0.0, -0.0, math.inf, -math.inf, math.nan, 3.4e38] + [1.0] * 10)))
    out = torch.empty(x.shape, dtype=dtype)
    maker("f32", simd.KINDS[dtype]).serial(x.data_ptr(), out.data_ptr(), x.numel())
    torch.testing.assert_close(out.float(), x.to(dtype).float(), rtol=0, atol=0, equal_nan=True)


def test_lanes_are_summed_compared_and_masked():
    x = torch.randn(16, generator=torch.Generator().manual_seed(1))
    out = torch.zeros(32)
    reduce_lanes().serial(x.data_ptr(), out.data_ptr())
    assert out[0].item() == pytest.approx(x.double().sum().item(), abs=1e-6)
    assert out[1] == x.max()
    assert torch.equal(out[16:], torch.cat((torch.full((3,), -2.0), x[3:11], torch.full((5,), -1.0))))


def test_transpose_takes_rows_from_anywhere():
    x = torch.randn(40, 16, generator=torch.Generator().manual_seed(2))
    rows = torch.randperm(40, generator=torch.Generator().manual_seed(3))[:16]
    offsets, out = rows * 64, torch.empty(16, 16)
    turn().serial(x.data_ptr(), offsets.data_ptr(), out.data_ptr())
    assert torch.equal(out, x[rows].T)
