"""The CPU's matrix product over packed weights, against torch's in float64."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("numba")

from llmlab import ops
from llmlab.ops.cpu import amx, linear
from llmlab.ops.cpu.panels import LinearPacker, PackedLinear, can_pack

# Error of one rounded result (a unit in the last place is 2⁻⁸, 2⁻¹¹ of it), and of sums of products in float32.
TOLERANCE = {torch.float32: (1e-5, 1e-5), torch.bfloat16: (2.0**-8, 1e-5), torch.float16: (2.0**-11, 1e-5)}


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def check(tokens: int, out_features: int, in_features: int, dtype: torch.dtype, with_bias: bool) -> None:
    x, weight = randn(tokens, in_features, dtype=dtype), randn(out_features, in_features, seed=1, dtype=dtype)
    weight = weight * 0.1
    bias = randn(out_features, seed=2, dtype=dtype) if with_bias else None
    packed = LinearPacker(1 << 20)(weight)
    assert isinstance(packed, PackedLinear)
    out = ops.linear.cpu(x, packed, bias)
    expected = torch.nn.functional.linear(x.double(), weight.double(), None if bias is None else bias.double())
    assert out.shape == expected.shape and out.dtype == dtype
    relative, absolute = TOLERANCE[dtype]
    torch.testing.assert_close(out.double(), expected, rtol=relative, atol=absolute)


# Below one tile, whole tiles, every remainder of the tiles of 8, 4, 2 and 1 tokens and of AMX's blocks of 16 and 32.
@pytest.mark.parametrize("tokens", [0, 1, 2, 3, 4, 5, 7, 8, 13, 16, 17, 24, 31, 32, 33, 49, 70])
@pytest.mark.parametrize("dtype", list(TOLERANCE))
def test_every_number_of_tokens(tokens, dtype):
    check(tokens, 144, 96, dtype, with_bias=tokens % 2 == 1)


@pytest.mark.parametrize(("out_features", "in_features"), [(16, 16), (16, 32), (80, 48), (960, 576), (576, 1536)])
@pytest.mark.parametrize("dtype", list(TOLERANCE))
def test_every_size(out_features, in_features, dtype):
    for tokens in (1, 9, 40):
        check(tokens, out_features, in_features, dtype, with_bias=True)


def test_inputs_that_outgrow_the_cache_are_taken_in_blocks():
    check(700, 64, 512, torch.float32, with_bias=False)
    check(1100, 64, 512, torch.bfloat16, with_bias=False)


@pytest.mark.parametrize("tokens", [1, 5, 40])
def test_bfloat16_without_amx(tokens, monkeypatch):
    monkeypatch.setattr(amx, "available", lambda: False)
    check(tokens, 144, 96, torch.bfloat16, with_bias=True)


@pytest.mark.parametrize("tokens", [1, 5, 40])
def test_bfloat16_without_pair_products(tokens, monkeypatch):
    monkeypatch.setattr(amx, "available", lambda: False)
    monkeypatch.setattr(linear, "_method", lambda stored, dtype: "bf16")
    check(tokens, 144, 96, torch.bfloat16, with_bias=True)


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_any_number_of_threads(threads):
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        check(3, 960, 64, torch.float32, with_bias=True)
        check(20, 48, 64, torch.bfloat16, with_bias=True)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", list(TOLERANCE))
def test_packing_keeps_the_weight(dtype):
    packer = LinearPacker(1 << 16)
    weights = [randn(o, i, seed=o, dtype=dtype) for o, i in ((32, 64), (16, 16), (160, 96), (48, 32))]
    for weight, packed in [(w, packer(w)) for w in weights]:
        assert torch.equal(packed.unpack(), weight)
        assert packed.shape == weight.shape and packed.dtype == dtype


@pytest.mark.parametrize("tokens", [1, 2, 7, 33])
def test_float32_weights_that_are_bfloat16s_take_half_the_bytes(tokens):
    weight, x, bias = randn(96, 160).bfloat16().float(), randn(tokens, 160, seed=1), randn(96, seed=2)
    packed = LinearPacker()(weight)
    assert (packed.dtype, packed.itemsize, packed.panels.dtype) == (torch.float32, 2, torch.bfloat16)
    assert torch.equal(packed.unpack(), weight)
    expected = x.double() @ weight.double().T + bias
    torch.testing.assert_close(ops.linear.cpu(x, packed, bias).double(), expected, rtol=1e-5, atol=2e-5)
    part = packed.rows(16, 48)
    torch.testing.assert_close(ops.linear.cpu(x, part).double(), (expected - bias)[:, 16:48], rtol=1e-5, atol=2e-5)
    weight[-1, -1] += 2.0**-20  # one number that is none
    assert LinearPacker()(weight).itemsize == 4
    with pytest.raises(ValueError, match="does not fit"):
        ops.linear.cpu(x.bfloat16(), packed)


def test_weights_that_do_not_divide_into_panels_stay_tensors():
    for weight in (randn(97, 64), randn(64, 40), randn(64, 64).double()):
        assert not can_pack(weight)
        assert LinearPacker()(weight) is weight
        x = randn(3, weight.shape[1], seed=1, dtype=weight.dtype)
        assert torch.equal(ops.linear.cpu(x, weight), torch.nn.functional.linear(x, weight))


def test_strided_and_wrong_inputs():
    weight, x = randn(32, 64), randn(3, 128, seed=1)
    packed = LinearPacker()(weight)
    torch.testing.assert_close(ops.linear.cpu(x[:, ::2], packed), x[:, ::2] @ weight.T, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(ops.linear.cpu(x[:, 64:], packed), x[:, 64:] @ weight.T, rtol=1e-5, atol=1e-5)
    with pytest.raises(ValueError, match=r"x\[3, 128\].* does not fit the weight \[32, 64\]"):
        ops.linear.cpu(x, packed)
    with pytest.raises(ValueError, match="does not fit"):
        ops.linear.cpu(x[:, 64:].bfloat16(), packed)


def test_not_a_number_stays_in_its_row():
    weight, x = randn(32, 64), randn(20, 64, seed=1)
    x[5, 3] = torch.nan
    out = ops.linear.cpu(x, LinearPacker()(weight))
    assert out[5].isnan().all() and not out[[*range(5), *range(6, 20)]].isnan().any()
