"""CPU twins work on addresses: whatever strides and index dtypes their inputs have, they must do what the references do."""

from __future__ import annotations

import pytest
import torch

from llmlab import ops

R = lambda *shape, seed=0: torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def every_second(x: torch.Tensor) -> torch.Tensor:
    """The same values, twice as far apart in memory."""
    return torch.stack((x, x + 77), dim=-1).flatten(-2)[..., ::2] if x.dim() else x


def test_strided_activation():
    x = every_second(R(5, 64))
    assert not x.is_contiguous()
    for _ in range(3):
        torch.testing.assert_close(ops.silu_and_mul.cpu(x), ops.silu_and_mul.reference(x), atol=1e-6, rtol=1e-5)


def test_strided_slots_and_positions():
    k, v = R(3, 2, 32), R(3, 2, 32, seed=1)
    slots = every_second(torch.tensor([5, 1, 7]))
    caches = [torch.zeros(2, 4, 8, 2, 32) for _ in range(2)]
    ops.reshape_and_cache.cpu(k, v, *caches[0], slots)
    ops.reshape_and_cache.reference(k, v, *caches[1], slots)
    assert torch.equal(caches[0], caches[1])
    positions, table = every_second(torch.arange(3)), every_second(R(50, 32, seed=2))
    rotated = ops.rotary_embedding.cpu(positions, k, v, table)
    expected = ops.rotary_embedding.reference(positions, k, v, table)
    torch.testing.assert_close(rotated, expected, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.int16])
def test_index_dtypes_and_strided_tables(dtype):
    ids, table = every_second(torch.tensor([1, 2, 6], dtype=dtype)), R(96, 7).T
    assert torch.equal(ops.embedding.cpu(ids.long() if dtype == torch.int16 else ids, table), table[ids.long()])
    starts = torch.tensor([0, 2, 5], dtype=dtype)
    assert torch.equal(ops.gather_last_tokens.cpu(table, starts), table[[1, 4]])


@pytest.mark.parametrize("face", ["reference", "cpu"])
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_rows_outside_the_table_are_refused(face, dtype):
    table = R(7, 96)
    for bad in (-1, 7):
        with pytest.raises(IndexError):
            getattr(ops.embedding, face)(torch.tensor([0, bad], dtype=dtype), table)
    for starts in ([0, 0, 5], [0, 3, 8]):  # an empty first request would mean row -1; 8 tokens are more than there are
        with pytest.raises(IndexError):
            getattr(ops.gather_last_tokens, face)(table, torch.tensor(starts, dtype=dtype))


def test_strided_lengths_of_attention():
    lens = [(20, 20), (40, 70), (1, 5)]
    blocks = [-(-s // 16) for _, s in lens]
    table = torch.zeros(3, max(blocks), dtype=torch.int32)
    for r, count in enumerate(blocks):
        table[r, :count] = torch.arange(count) + sum(blocks[:r])
    caches = R(2, sum(blocks), 16, 2, 32)
    starts = every_second(torch.tensor([0, 20, 60, 61], dtype=torch.int32))
    seq_lens = every_second(torch.tensor([s for _, s in lens], dtype=torch.int32))
    args = (R(61, 4, 32, seed=3), *caches, table, starts, seq_lens, 0.2)
    torch.testing.assert_close(
        ops.paged_attention.cpu(*args), ops.paged_attention.reference(*args), atol=1e-5, rtol=1e-4
    )


def test_bias_of_a_packed_linear():
    weight, x = R(32, 64), R(3, 64, seed=1)
    packed = ops.bind("torch", "cpu").linear_packer()(weight)
    for bias in (every_second(R(32, seed=2)), R(1, seed=3).expand(32)):
        expected = torch.nn.functional.linear(x, weight, bias)
        torch.testing.assert_close(ops.linear.cpu(x, packed, bias), expected, atol=1e-4, rtol=1e-4)
    for bias in (R(16), R(32).bfloat16()):
        with pytest.raises(ValueError, match="bias.* does not fit"):
            ops.linear.cpu(x, packed, bias)
