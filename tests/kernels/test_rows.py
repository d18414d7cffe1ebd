"""Kernels that work row by row: norms, SwiGLU, embedding, the last tokens, the merge of attention states."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from llmlab.kernels.embedding import embedding, gather_last_tokens
from llmlab.kernels.merge import merge_attention_states
from llmlab.kernels.mlp import silu_and_mul
from llmlab.kernels.norm import fused_add_rms_norm, rms_norm

FUZZ = settings(
    derandomize=True, deadline=None, max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
DTYPES = st.sampled_from([torch.float32, torch.float16, torch.bfloat16])
LENGTHS = st.sampled_from([1, 3, 16, 48, 65, 576, 1000, 2500])


def view(*shape: int, dtype: torch.dtype, seed: int, pad: int = 3) -> torch.Tensor:
    """Random numbers in a view between NaN columns, so that the row stride is not the row length."""
    g = torch.Generator().manual_seed(seed)
    whole = torch.full((*shape[:-1], shape[-1] + 2 * pad), float("nan"), dtype=dtype)
    whole[..., pad : pad + shape[-1]] = torch.randn(shape, generator=g).to(dtype)
    return whole[..., pad : pad + shape[-1]]


def normed(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Float64, with the one rounding that Hugging Face makes in between."""
    wide = x.double()
    rounded = (wide / (wide.square().mean(-1, keepdim=True) + eps).sqrt()).to(x.dtype)
    return weight.double() * rounded.double()


@FUZZ
@given(rows=st.integers(1, 9), length=LENGTHS, dtype=DTYPES, seed=st.integers(0, 99), eps=st.sampled_from([1e-6, 1e-1]))
def test_rms_norm(assert_near, rows, length, dtype, seed, eps):
    x, weight = view(rows, length, dtype=dtype, seed=seed), view(1, length, dtype=dtype, seed=seed + 1)[0].contiguous()
    out = rms_norm(x, weight, eps)
    assert out.dtype == dtype and out.is_contiguous()
    assert_near(out, normed(x, weight, eps))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rms_norm_of_heads_in_a_qkv_tensor(assert_near, dtype):
    """Queries' heads as a [T, heads, head_dim] view, normed without a copy."""
    qkv = view(5, 7 * 64, dtype=dtype, seed=0)
    q = qkv[:, 64 : 64 + 3 * 64].unflatten(1, (3, 64))
    weight = torch.linspace(0.5, 2.0, 64, dtype=dtype)
    assert_near(rms_norm(q, weight, 1e-6), normed(q, weight, 1e-6))


def test_rms_norm_rounds_before_the_weight():
    """The order of Hugging Face's Llama, bit for bit: the other order differs in this row."""
    x = torch.randn(64, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    weight = torch.randn(64, generator=torch.Generator().manual_seed(1)).bfloat16()
    rstd = torch.rsqrt(x.float().square().mean(-1, keepdim=True) + 1e-5)
    other_order = (x.float() * rstd * weight.float()).bfloat16()
    out = rms_norm(x, weight, 1e-5)
    assert torch.equal(out, weight * (x.float() * rstd).bfloat16())
    assert not torch.equal(out, other_order)


@FUZZ
@given(rows=st.integers(1, 9), length=LENGTHS, dtype=DTYPES, seed=st.integers(0, 99))
def test_fused_add_rms_norm(assert_near, rows, length, dtype, seed):
    x, residual = view(rows, length, dtype=dtype, seed=seed), view(rows, length, dtype=dtype, seed=seed + 1, pad=5)
    weight = view(1, length, dtype=dtype, seed=seed + 2)[0].contiguous()
    out, total = fused_add_rms_norm(x, residual, weight, 1e-5)
    assert torch.equal(total, x + residual)
    assert_near(out, normed(total, weight, 1e-5))
    assert torch.equal(out, rms_norm(total, weight, 1e-5)), "fused and unfused must agree bit for bit"


def test_the_norm_sees_the_rounded_sum():
    """The norm of the unrounded sum would be another one in every tenth element or so."""
    x, residual = torch.randn(2, 8, 256, generator=torch.Generator().manual_seed(0)).bfloat16()
    weight = torch.linspace(0.5, 2.0, 256).bfloat16()
    rounded, unrounded = (x + residual).float(), x.float() + residual.float()
    expected, other = (
        weight * (total * torch.rsqrt(total.square().mean(-1, keepdim=True) + 1e-6)).bfloat16()
        for total in (rounded, unrounded)
    )
    out, total = fused_add_rms_norm(x, residual, weight, 1e-6)
    assert torch.equal(total, x + residual)
    assert (out != expected).float().mean() < 0.01 < 0.05 < (out != other).float().mean()


@FUZZ
@given(rows=st.integers(1, 9), length=LENGTHS, dtype=DTYPES, seed=st.integers(0, 99))
def test_silu_and_mul(assert_near, rows, length, dtype, seed):
    x = view(rows, 2 * length, dtype=dtype, seed=seed) * 4
    gate, up = x[:, :length].double(), x[:, length:].double()
    out = silu_and_mul(view(rows, 2 * length, dtype=dtype, seed=seed) * 4)
    assert_near(out, gate * torch.sigmoid(gate) * up, factor=0.5)


def test_silu_of_extreme_gates():
    x = torch.tensor([[-1e4, -200.0, 0.0, 200.0, 1.0, 1.0, 1.0, 1.0]])
    assert silu_and_mul(x).tolist() == [[0.0, 0.0, 0.0, 200.0]]


@FUZZ
@given(rows=st.integers(1, 9), length=LENGTHS, dtype=DTYPES, wide=st.booleans(), seed=st.integers(0, 99))
def test_embedding(rows, length, dtype, wide, seed):
    weight = view(11, length, dtype=dtype, seed=seed)
    token_ids = torch.randint(0, 11, (2 * rows,), generator=torch.Generator().manual_seed(seed))[::2]
    out = embedding(token_ids if wide else token_ids.int(), weight)
    assert torch.equal(out, torch.stack([weight[i] for i in token_ids.tolist()]))


def test_embedding_past_two_to_the_31_elements():
    """Row 2 of a table whose rows lie 2^30 + 16 elements apart (memory that is reserved, and hardly touched)."""
    weight = torch.empty_strided((3, 48), (2**30 + 16, 1), dtype=torch.float16)
    for row in range(3):
        weight[row] = row + 1
    out = embedding(torch.tensor([2, 0]), weight)
    assert out[:, 0].tolist() == [3.0, 1.0] and out.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gather_last_tokens(dtype):
    x = view(9, 70, dtype=dtype, seed=0)
    out = gather_last_tokens(x, torch.tensor([0, 1, 5, 9], dtype=torch.int32))
    assert torch.equal(out, torch.stack([x[0], x[4], x[8]]))


@FUZZ
@given(tokens=st.integers(1, 4), heads=st.integers(1, 5), head_dim=st.sampled_from([64, 80, 128]), dtype=DTYPES)
def test_merge_of_two_halves_is_attention_over_the_whole(assert_near, tokens, heads, head_dim, dtype):
    g = torch.Generator().manual_seed(tokens * 10 + heads)
    scores = torch.randn(tokens, heads, 12, generator=g, dtype=torch.float64) * 5
    values = torch.randn(12, head_dim, generator=g, dtype=torch.float64)

    def part(keys: slice) -> tuple[torch.Tensor, torch.Tensor]:
        return (scores[..., keys].softmax(-1) @ values[keys]).to(dtype), scores[..., keys].logsumexp(-1).float()

    out, lse = merge_attention_states(*part(slice(0, 5)), *part(slice(5, 12)))
    assert_near(out, scores.softmax(-1) @ values)
    assert_near(lse, scores.logsumexp(-1))


def test_merge_by_hand_and_with_parts_that_saw_nothing():
    """(1 at lse 0) with (3 at lse ln 3) is (2.5 at ln 4); an empty part may hold NaN and counts for nothing."""
    inf = float("inf")
    out_a = torch.tensor([1.0, float("nan"), 7.0, float("nan")])[:, None, None].expand(4, 1, 64)
    out_b = torch.tensor([3.0, 5.0, float("nan"), float("nan")])[:, None, None].expand(4, 1, 64)
    lse_a = torch.tensor([0.0, -inf, 2.0, -inf])[:, None]
    lse_b = torch.tensor([math.log(3), 1.0, -inf, -inf])[:, None]
    out, lse = merge_attention_states(out_a, lse_a, out_b, lse_b)
    torch.testing.assert_close(out[:, 0, 0], torch.tensor([2.5, 5.0, 7.0, 0.0]))
    torch.testing.assert_close(lse[:, 0], torch.tensor([math.log(4), 1.0, 2.0, -inf]))


def test_nothing_in_nothing_out():
    empty = torch.empty(0, 64)
    weight = torch.ones(64)
    assert rms_norm(empty, weight, 1e-5).shape == (0, 64)
    assert [t.shape for t in fused_add_rms_norm(empty, empty, weight, 1e-5)] == [(0, 64), (0, 64)]
    assert silu_and_mul(empty).shape == (0, 32)
    assert embedding(torch.empty(0, dtype=torch.int64), torch.ones(4, 64)).shape == (0, 64)
    assert gather_last_tokens(empty, torch.zeros(1, dtype=torch.int32)).shape == (0, 64)
    states = torch.empty(0, 2, 64), torch.empty(0, 2)
    assert [t.shape for t in merge_attention_states(*states, *states)] == [(0, 2, 64), (0, 2)]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: rms_norm(torch.ones(2, 8), torch.ones(7), 1e-5), r"weight must be contiguous, of shape \(8,\)"),
        (lambda: rms_norm(torch.ones(8, 2).T, torch.ones(8), 1e-5), "last dimension must be contiguous"),
        (lambda: rms_norm(torch.ones(8), torch.ones(8), 1e-5), "2 or 3 dimensions, not 1"),
        (lambda: rms_norm(torch.ones(1, 70000), torch.ones(70000), 1e-5), "whole rows of 1 to 65536"),
        (lambda: fused_add_rms_norm(torch.ones(2, 8), torch.ones(1, 8), torch.ones(8), 1e-5), r"\[T, H\] alike"),
        (lambda: silu_and_mul(torch.ones(2, 7)), r"2 \* intermediate_size"),
        (lambda: embedding(torch.ones(2, 2, dtype=torch.int64), torch.ones(4, 8)), "a vector and a matrix"),
        (
            lambda: merge_attention_states(torch.ones(2, 2, 8), torch.ones(2, 2), torch.ones(2, 2, 8), torch.ones(2)),
            r"both lses \[T, Hq\]",
        ),
    ],
)
def test_bad_input_is_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()
