"""The matrix product over 8-bit weights: quantisation against its own error bound, kernels against torch in float64."""

from __future__ import annotations

import pytest
import torch

from llmlab import LLM, ops
from llmlab.ops.quantization import Int8Weight, quantize_int8

pytest.importorskip("numba")

from llmlab.ops.cpu import amx
from llmlab.ops.cpu.int8 import Int8Packer, PackedInt8

TOLERANCE = {torch.float32: (1e-5, 1e-5), torch.bfloat16: (2.0**-8, 1e-5), torch.float16: (2.0**-11, 1e-5)}


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def dequantized(weight: Int8Weight) -> torch.Tensor:
    return weight.values.double() * weight.scales.double()[:, None]


def check(tokens: int, out_features: int, in_features: int, dtype: torch.dtype, with_bias: bool) -> None:
    x = randn(tokens, in_features, dtype=dtype)
    weight = randn(out_features, in_features, seed=1, dtype=dtype) * 0.1
    bias = randn(out_features, seed=2, dtype=dtype) if with_bias else None
    packed = Int8Packer()(weight)
    assert isinstance(packed, PackedInt8)
    expected = torch.nn.functional.linear(
        x.double(), dequantized(quantize_int8(weight)), None if bias is None else bias.double()
    )
    relative, absolute = TOLERANCE[dtype]
    for out in (ops.linear.cpu(x, packed, bias), ops.linear.reference(x, quantize_int8(weight), bias)):
        assert out.shape == expected.shape and out.dtype == dtype
        torch.testing.assert_close(out.double(), expected, rtol=relative, atol=absolute)


# Every remainder of the tiles of 8, 4, 2 and 1 tokens and of AMX's blocks; beyond 256, a second group of tokens.
@pytest.mark.parametrize("tokens", [0, 1, 2, 3, 4, 5, 7, 8, 13, 16, 17, 31, 32, 33, 49, 256, 257, 300])
@pytest.mark.parametrize("dtype", list(TOLERANCE))
def test_every_number_of_tokens(tokens, dtype):
    check(tokens, 144, 96, dtype, with_bias=tokens % 2 == 1)


@pytest.mark.parametrize(("out_features", "in_features"), [(16, 16), (16, 32), (80, 48), (576, 1536), (32, 2080)])
@pytest.mark.parametrize("dtype", list(TOLERANCE))
def test_every_size(out_features, in_features, dtype):
    for tokens in (1, 9, 40):
        check(tokens, out_features, in_features, dtype, with_bias=True)


@pytest.mark.parametrize("tokens", [1, 5, 40, 700])
def test_without_amx(tokens, monkeypatch):
    monkeypatch.setattr(amx, "available", lambda: False)
    check(tokens, 48, 512, torch.bfloat16, with_bias=True)


def test_the_step_is_at_most_half_a_scale():
    weight = randn(64, 96) * torch.logspace(-6, 3, 64)[:, None]
    quantized = quantize_int8(weight)
    error = (dequantized(quantized) - weight.double()).abs()
    assert (error <= quantized.scales.double()[:, None] * 0.5000001).all()
    assert quantized.values.abs().amax(1).eq(127).all()


def test_a_row_of_zeros_stays_zero():
    weight = randn(32, 32)
    weight[3] = 0
    assert ops.linear.cpu(randn(2, 32), Int8Packer()(weight))[:, 3].eq(0).all()


def test_packing_keeps_the_integers():
    packer = Int8Packer()
    for out_features, in_features in ((32, 64), (16, 16), (160, 96)):
        weight = randn(out_features, in_features, seed=out_features)
        unpacked, quantized = packer(weight).unpack(), quantize_int8(weight)
        assert torch.equal(unpacked.values, quantized.values) and torch.equal(unpacked.scales, quantized.scales)


def test_weights_that_do_not_divide_into_panels_are_quantised_all_the_same():
    weight, x = randn(97, 64), randn(3, 64, seed=1)
    packed = Int8Packer()(weight)
    assert isinstance(packed, Int8Weight)
    expected = x.double() @ dequantized(packed).T
    torch.testing.assert_close(ops.linear.cpu(x, packed).double(), expected, rtol=1e-5, atol=1e-5)


def test_strided_and_wrong_inputs():
    weight, x = randn(32, 64), randn(3, 128, seed=1)
    packed = Int8Packer()(weight)
    expected = x[:, ::2].double() @ dequantized(quantize_int8(weight)).T
    torch.testing.assert_close(ops.linear.cpu(x[:, ::2], packed).double(), expected, rtol=1e-5, atol=1e-5)
    with pytest.raises(ValueError, match=r"x\[3, 128\].* does not fit the weight \[32, 64\]"):
        ops.linear.cpu(x, packed)
    with pytest.raises(ValueError, match="does not fit"):
        ops.linear.cpu(x[:, 64:].double(), packed)


def test_a_packer_for_every_backend():
    assert isinstance(ops.bind("torch", "cpu").linear_packer("int8")(randn(32, 32)), PackedInt8)
    assert isinstance(ops.bind("reference", "cpu").linear_packer("int8")(randn(32, 32)), Int8Weight)
    with pytest.raises(ValueError, match="no Triton kernel"):
        ops.bind("triton", "cpu").linear_packer("int8")
    with pytest.raises(ValueError, match="None or one of int8, got 'fp4'"):
        ops.bind("torch", "cpu").linear_packer("fp4")


def test_the_engine_gives_the_dequantised_models_logits():
    tokens = list(range(3, 60))
    fast, plain = (LLM("tiny", dtype="float32", backend=b, quantization="int8") for b in ("torch", "reference"))
    torch.testing.assert_close(fast.forward_logits(tokens), plain.forward_logits(tokens), rtol=1e-4, atol=1e-4)
    exact = LLM("tiny", dtype="float32").forward_logits(tokens)
    difference = (fast.forward_logits(tokens) - exact).abs().max()
    assert 0 < difference < 0.1 * exact.abs().max()
    with ops.record_ops() as ledger:
        fast.forward_logits(tokens)
    weights = ledger.table().query("op == 'linear' and tensor == 'weight'")
    assert set(weights["dtype"]) == {"int8"}
