"""Contiguous attention: float64's result, and the paged kernel's bit for bit."""

from __future__ import annotations

import pytest
import torch
from llmlab.kernels.attention import paged_attention
from llmlab.kernels.contiguous_attention import contiguous_attention

LENS = [(1, 37), (5, 5), (33, 70), (0, 3), (1, 1), (1, 130)]


def flattened(batch) -> tuple[torch.Tensor, ...]:
    """The batch's keys and values end to end, between NaN rows and NaN heads, and where each request starts."""
    k, v = torch.cat(batch.keys), torch.cat(batch.values)
    whole = torch.full((2, len(k) + 9, k.shape[1] + 2, k.shape[2]), float("nan"), dtype=k.dtype)
    whole[0, 4:-5, 1:-1], whole[1, 4:-5, 1:-1] = k, v
    starts = torch.tensor([0, *batch.seq_lens.cumsum(0)], dtype=torch.int32)
    return batch.q, whole[0, 4:-5, 1:-1], whole[1, 4:-5, 1:-1], batch.query_start_loc, starts


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("options", [{}, {"sliding_window": 20}, {"soft_cap": 4.0}], ids=str)
@pytest.mark.parametrize("head_dim", [64, 80])
def test_contiguous_is_the_oracle(paged_batch, assert_near, dtype, options, head_dim):
    batch = paged_batch(LENS, 6, 2, head_dim, 16, dtype)
    out, lse = contiguous_attention(*flattened(batch), 0.2, **options, return_lse=True)
    expected, expected_lse = batch.oracle(0.2, options.get("sliding_window"), options.get("soft_cap"))
    assert_near(out, expected)
    assert_near(lse, expected_lse, factor=4)


@pytest.mark.parametrize("lens", [[(40, 90)], [(1, 70), (1, 5), (1, 33)]], ids=["prefill", "decode"])
def test_paging_changes_no_bit(paged_batch, lens):
    batch = paged_batch(lens, 4, 2, 64, 16, torch.float16)
    assert torch.equal(contiguous_attention(*flattened(batch), 0.125), paged_attention(*batch.args, 0.125))


def test_nothing_in_nothing_out():
    starts = torch.zeros(1, dtype=torch.int32)
    out = contiguous_attention(torch.empty(0, 2, 64), torch.empty(0, 1, 64), torch.empty(0, 1, 64), starts, starts, 1.0)
    assert out.shape == (0, 2, 64)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"k": torch.ones(4, 3, 64)}, "k, v"),
        ({"key_start_loc": torch.zeros(1, dtype=torch.int32)}, r"\[R \+ 1\] alike"),
        ({"v": torch.ones(4, 2, 64).half()}, "q is torch.float32, k and v are torch.float32 and torch.float16"),
        ({"query_start_loc": torch.zeros(2, 3, dtype=torch.int32)[:, 0]}, "query_start_loc: .* its stride is 3"),
        ({"k": torch.ones(4, 0, 64), "v": torch.ones(4, 0, 64)}, "Hkv dividing Hq"),
        ({"sliding_window": 0}, "sliding_window must be positive, not 0"),
    ],
)
def test_bad_input_is_named(change, message):
    starts = torch.tensor([0, 4], dtype=torch.int32)
    good = {"q": torch.ones(4, 2, 64), "k": torch.ones(4, 2, 64), "v": torch.ones(4, 2, 64), "scale": 1.0}
    with pytest.raises(ValueError, match=message):
        contiguous_attention(**{**good, "query_start_loc": starts, "key_start_loc": starts, **change})
