"""CPU twins of the memory-bound ops against their references: to the bit where the rounding points are the same."""

from __future__ import annotations

import math

import pytest
import torch

pytest.importorskip("numba")

from llmlab import ops
from llmlab.ops.cpu.panels import LinearPacker

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
TOKENS = [0, 1, 7, 300]  # 300 rows are dealt to several threads


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view(torch.uint8)


def assert_rounded_alike(ours: torch.Tensor, expected: torch.Tensor, sixteen_bit_share: float) -> None:
    """float32 within a few units in the last place; 16-bit numbers equal but for a few that lie on the edge between two, and
    those within two units (of each of two roundings, one)."""
    assert ours.shape == expected.shape and ours.dtype == expected.dtype
    if not ours.numel():
        return
    if ours.dtype == torch.float32:
        torch.testing.assert_close(ours, expected, rtol=1e-6, atol=1e-6)
    else:
        unit = 2.0**-7 if ours.dtype == torch.bfloat16 else 2.0**-10
        torch.testing.assert_close(ours, expected, rtol=2 * unit, atol=1e-7)
        assert (ours != expected).float().mean().item() <= sixteen_bit_share


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("hidden", [16, 576])
def test_rms_norm(dtype, tokens, hidden):
    wide = randn(tokens, hidden + 16, dtype=dtype)
    weight = randn(hidden, seed=1, dtype=dtype)
    for x in (wide[:, :hidden], wide[:, :hidden].contiguous()):  # a view of wider rows, and rows of their own
        assert_rounded_alike(ops.rms_norm.cpu(x, weight, 1e-5), ops.rms_norm.reference(x, weight, 1e-5), 1e-3)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens", TOKENS)
def test_fused_add_rms_norm(dtype, tokens):
    x, residual = randn(tokens, 576, dtype=dtype), randn(tokens, 576, seed=1, dtype=dtype)
    weight = randn(576, seed=2, dtype=dtype)
    kept = residual.clone()
    normed, summed = ops.fused_add_rms_norm.cpu(x, residual, weight, 1e-5)
    expected, expected_sum = ops.fused_add_rms_norm.reference(x, residual, weight, 1e-5)
    assert torch.equal(summed, expected_sum)
    assert_rounded_alike(normed, expected, 1e-3)
    assert torch.equal(residual, kept)


def test_rms_norm_rounds_before_the_weight_as_hugging_face_does():
    x, weight = randn(50, 64, dtype=torch.bfloat16), 1 + 0.3 * randn(64, seed=1).bfloat16()
    x32 = x.float()
    once = (x32 * torch.rsqrt(x32.square().mean(-1, keepdim=True) + 1e-5) * weight.float()).bfloat16()
    ours = ops.rms_norm.cpu(x, weight, 1e-5)
    assert (ours != once).any(), "the data do not tell one rounding from two"
    assert_rounded_alike(ours, ops.rms_norm.reference(x, weight, 1e-5), 0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize(("head_dim", "rotary_dim"), [(64, 64), (80, 32), (96, 96), (128, 64)])
def test_rotary_embedding_to_the_bit(dtype, tokens, head_dim, rotary_dim):
    q, k, _ = randn(tokens, 9, head_dim, dtype=dtype).split((4, 2, 3), dim=1)
    positions = torch.randint(0, 50, (tokens,), generator=torch.Generator().manual_seed(1))
    table = randn(50, rotary_dim, seed=2)
    ours = ops.rotary_embedding.cpu(positions, q, k, table)
    for one, expected in zip(ours, ops.rotary_embedding.reference(positions, q, k, table), strict=True):
        assert torch.equal(bits(one), bits(expected))


@pytest.mark.parametrize("position", [50, -1])
def test_a_position_outside_the_table_is_named(position):
    q = randn(3, 2, 32)
    with pytest.raises(IndexError, match=f"position {position} is outside the rotary table of 50 rows"):
        ops.rotary_embedding.cpu(torch.tensor([1, position, 2]), q, q, randn(50, 32))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens", TOKENS)
def test_reshape_and_cache_to_the_bit(dtype, tokens):
    _, k, v = randn(tokens, 15, 24, dtype=dtype).split((9, 3, 3), dim=1)
    slots = torch.randperm(40 * 16, generator=torch.Generator().manual_seed(1))[:tokens]
    slots[::5] = -1
    caches = [torch.full((2, 40, 16, 3, 24), math.nan, dtype=dtype) for _ in range(2)]
    assert ops.reshape_and_cache.cpu(k, v, *caches[0], slots) is None
    ops.reshape_and_cache.reference(k, v, *caches[1], slots)
    assert torch.equal(bits(caches[0]), bits(caches[1]))


def test_slots_past_two_to_the_31_elements():
    """Slot 3 in block 1, which starts 2^31 + 64 elements into the cache (memory that is reserved, and hardly touched)."""
    caches = [torch.empty_strided((2, 2, 1, 64), (2**31 + 64, 64, 64, 1), dtype=torch.float16) for _ in range(2)]
    k = torch.ones(1, 1, 64, dtype=torch.float16)
    ops.reshape_and_cache.cpu(k, k + 1, *caches, torch.tensor([3]))
    assert (caches[0][1, 1] == 1).all() and (caches[1][1, 1] == 2).all()


def test_a_slot_outside_the_cache_writes_nothing_and_is_named():
    k, cache = randn(2, 1, 16), torch.zeros(2, 3, 4, 1, 16)
    with pytest.raises(IndexError, match="slot 12 is outside the cache of 12 slots"):
        ops.reshape_and_cache.cpu(k, k, *cache, torch.tensor([12, -1]))
    assert not cache.any()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens", TOKENS)
def test_silu_and_mul(dtype, tokens):
    x = 6 * randn(tokens, 2 * 112, dtype=dtype)
    ours, expected = ops.silu_and_mul.cpu(x), ops.silu_and_mul.reference(x)
    assert_rounded_alike(ours, expected, 1e-3)


@pytest.mark.parametrize("dtype", DTYPES)
def test_silu_and_mul_at_the_ends(dtype):
    gate = torch.tensor([math.inf, -math.inf, math.nan, 0.0, -0.0, 1e4, -1e4, 88.0] * 2)
    x = torch.cat((gate, torch.ones(16)))[None].to(dtype)
    torch.testing.assert_close(
        ops.silu_and_mul.cpu(x), ops.silu_and_mul.reference(x), rtol=1e-2, atol=1e-30, equal_nan=True
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("index", [torch.int64, torch.int32])
def test_rows_are_gathered(dtype, index):
    table = randn(50, 40, dtype=dtype)
    ids = torch.randint(0, 50, (1000,), generator=torch.Generator().manual_seed(1)).to(index)
    assert torch.equal(ops.embedding.cpu(ids, table), table[ids.long()])
    starts = torch.tensor([0, 1, 30, 31, 50], dtype=index)
    assert torch.equal(ops.gather_last_tokens.cpu(table, starts), table[[0, 29, 30, 49]])


@pytest.mark.parametrize("dtype", [*DTYPES, "float32 that is bfloat16"])
@pytest.mark.parametrize("index", [torch.int64, torch.int32, torch.int16])
@pytest.mark.parametrize("tokens", TOKENS)
def test_rows_are_gathered_out_of_panels(dtype, index, tokens):
    table = randn(64, 48, dtype=dtype) if dtype in DTYPES else randn(64, 48).bfloat16().float()
    packed = LinearPacker(1 << 16)(table)
    ids = torch.randint(0, 64, (2 * tokens,), generator=torch.Generator().manual_seed(1)).to(index)
    assert torch.equal(ops.embedding.cpu(ids, packed), table[ids.long()])
    assert torch.equal(ops.embedding.cpu(ids[::2], packed), table[ids[::2].long()])


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("token", [48, -1])
def test_a_token_outside_the_table_is_named(token, packed):
    table = randn(48, 16)
    with pytest.raises(IndexError, match=f"row {token} is outside a table of 48 rows"):
        ops.embedding.cpu(torch.tensor([3, token]), LinearPacker(1 << 16)(table) if packed else table)


def test_sizes_that_do_not_fill_vectors_are_served_by_the_reference():
    x, weight = randn(5, 40), randn(40, seed=1)
    assert torch.equal(ops.rms_norm.cpu(x, weight, 1e-5), ops.rms_norm.reference(x, weight, 1e-5))
    assert torch.equal(ops.silu_and_mul.cpu(x), ops.silu_and_mul.reference(x))
    q, table = randn(5, 2, 24), randn(9, 24, seed=2)
    ours = ops.rotary_embedding.cpu(torch.arange(5), q, q, table)
    assert torch.equal(ours[0], ops.rotary_embedding.reference(torch.arange(5), q, q, table)[0])
    assert ops.silu_and_mul.cpu(x.double()).dtype == torch.float64
