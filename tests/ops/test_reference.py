"""The references against oracles that we did not write: torch's SDPA in float64, its own norms, counted FLOPs."""

from __future__ import annotations

import math

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from llmlab import ops


def paged(
    lens: list[tuple[int, int]], num_heads=6, num_kv_heads=2, head_dim=16, block_size=4, seed=0, dtype=torch.float32
):
    """Random requests ``(query_len, seq_len)`` in a shuffled, NaN-poisoned cache; also their contiguous keys and values."""
    g = torch.Generator().manual_seed(seed)
    blocks_of = [-(-seq // block_size) for _, seq in lens]
    num_blocks = sum(blocks_of) + 3
    order = torch.randperm(num_blocks, generator=g).tolist()
    key_cache = torch.full((num_blocks, block_size, num_kv_heads, head_dim), float("nan"), dtype=dtype)
    value_cache = key_cache.clone()
    block_table = torch.full((len(lens), max(blocks_of)), 2**30, dtype=torch.int32)
    keys, values = [], []
    for r, (_, seq) in enumerate(lens):
        mine = [order.pop() for _ in range(blocks_of[r])]
        block_table[r, : len(mine)] = torch.tensor(mine, dtype=torch.int32)
        k, v = torch.randn(2, seq, num_kv_heads, head_dim, generator=g).to(dtype)
        slots = torch.tensor([mine[p // block_size] * block_size + p % block_size for p in range(seq)])
        ops.reshape_and_cache.reference(k, v, key_cache, value_cache, slots)
        keys.append(k)
        values.append(v)
    starts = torch.tensor([0, *torch.tensor([q for q, _ in lens]).cumsum(0)], dtype=torch.int32)
    q = torch.randn(int(starts[-1]), num_heads, head_dim, generator=g).to(dtype)
    seq_lens = torch.tensor([seq for _, seq in lens], dtype=torch.int32)
    return (q, key_cache, value_cache, block_table, starts, seq_lens), keys, values


def sdpa(q, k, v, scale, window=None):
    """One request by torch's scaled_dot_product_attention in float64, masked bottom-right."""
    query_len, seq_len = len(q), len(k)
    own = torch.arange(seq_len - query_len, seq_len)[:, None]
    seen = torch.arange(seq_len)[None]
    mask = seen <= own
    if window:
        mask &= seen > own - window
    heads_first = lambda x: x.double().transpose(0, 1)[None]
    out = torch.nn.functional.scaled_dot_product_attention(
        heads_first(q), heads_first(k), heads_first(v), attn_mask=mask, scale=scale, enable_gqa=True
    )
    return out[0].transpose(0, 1)


LENS = [(1, 1), (5, 5), (1, 9), (3, 8), (4, 13), (1, 4)]


@pytest.mark.parametrize("window", [None, 1, 3, 100])
@pytest.mark.parametrize("heads", [(6, 2), (4, 4), (7, 1)])
def test_paged_attention_is_sdpa(heads, window):
    args, keys, values = paged(LENS, *heads)
    out = ops.paged_attention.reference(*args, 0.3, sliding_window=window)
    starts = args[4].tolist()
    for r in range(len(LENS)):
        rows = slice(starts[r], starts[r + 1])
        expected = sdpa(args[0][rows], keys[r], values[r], 0.3, window)
        torch.testing.assert_close(out[rows].double(), expected, atol=1e-5, rtol=1e-5)


def test_causality_is_bottom_right():
    """2 queries, 5 keys: row 0 sees 4 keys, row 1 sees 5. With equal keys the output is the mean of the values seen."""
    (q, kc, vc, table, starts, lens), _, _ = paged([(2, 5)], 1, 1, 4)
    slots = [int(table[0, p // 4]) * 4 + p % 4 for p in range(5)]
    for p, slot in enumerate(slots):
        kc.view(-1, 4)[slot] = 1.0
        vc.view(-1, 4)[slot] = float(p)
    out = ops.paged_attention.reference(q, kc, vc, table, starts, lens, 1.0)
    assert out[0, 0, 0].item() == pytest.approx(1.5)
    assert out[1, 0, 0].item() == pytest.approx(2.0)


def test_soft_cap_and_lse():
    args, keys, _ = paged([(1, 7)], 2, 1, 8)
    _, lse = ops.paged_attention.reference(*args, 1.0, soft_cap=2.0, return_lse=True)
    scores = 2.0 * torch.tanh(args[0][0].double() @ keys[0][:, 0].double().T / 2.0)
    torch.testing.assert_close(lse[0].double(), scores.logsumexp(-1), atol=1e-5, rtol=1e-5)


def test_merge_of_a_split_is_the_whole():
    args, _, _ = paged([(1, 8)], 2, 1, 8)
    whole, lse = ops.paged_attention.reference(*args, 0.5, return_lse=True)
    q, kc, vc, table, starts, _ = args
    first = ops.paged_attention.reference(q, kc, vc, table[:, :1], starts, torch.tensor([4]), 0.5, return_lse=True)
    second = ops.paged_attention.reference(q, kc, vc, table[:, 1:], starts, torch.tensor([4]), 0.5, return_lse=True)
    merged, merged_lse = ops.merge_attention_states.reference(*first, *second)
    torch.testing.assert_close(merged, whole)
    torch.testing.assert_close(merged_lse, lse)


def test_merge_known_values_and_empty_parts():
    out = lambda value: torch.full((1, 1, 2), value)
    lse = lambda value: torch.full((1, 1), value)
    merged, total = ops.merge_attention_states.reference(out(1.0), lse(0.0), out(3.0), lse(math.log(3)))
    assert merged[0, 0, 0].item() == pytest.approx(2.5)
    assert total.item() == pytest.approx(math.log(4))
    empty = out(float("nan")), lse(float("-inf"))
    merged, total = ops.merge_attention_states.reference(*empty, out(3.0), lse(0.5))
    assert merged.tolist() == [[[3.0, 3.0]]]
    assert total.item() == 0.5
    merged, total = ops.merge_attention_states.reference(*empty, *empty)
    assert merged.tolist() == [[[0.0, 0.0]]]
    assert total.item() == float("-inf")


def test_slot_minus_one_is_skipped_and_known_slot_is_hit():
    k = torch.arange(6.0).view(3, 1, 2)
    key_cache, value_cache = torch.zeros(13, 16, 1, 2), torch.zeros(13, 16, 1, 2)
    ops.reshape_and_cache.reference(k, k + 10, key_cache, value_cache, torch.tensor([137, -1, 0]))
    assert key_cache[8, 9, 0].tolist() == [0.0, 1.0]
    assert value_cache[0, 0, 0].tolist() == [14.0, 15.0]
    assert key_cache.count_nonzero() == 3  # 1 of slot 137, 4 and 5 of slot 0; the token of slot −1 nowhere


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rms_norm_is_hugging_faces_to_the_bit(dtype):
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    x = torch.randn(4, 64, generator=torch.Generator().manual_seed(0)).to(dtype)
    norm = LlamaRMSNorm(64, eps=1e-5).to(dtype)
    torch.nn.init.normal_(norm.weight)
    assert torch.equal(ops.rms_norm.reference(x, norm.weight.data, 1e-5), norm(x).detach())


def test_fused_add_norms_the_rounded_sum():
    """256 + 1 rounds to 256 in bfloat16, and what is rounded is what is normed: bit for bit the unfused pair."""
    x = torch.full((1, 4), 256.0, dtype=torch.bfloat16)
    _, total = ops.fused_add_rms_norm.reference(x, torch.ones_like(x), x[0], 1e-6)
    assert total.tolist() == [[256.0] * 4]

    x, residual = torch.randn(2, 8, 256, generator=torch.Generator().manual_seed(0)).bfloat16()
    weight = torch.linspace(0.5, 2.0, 256).bfloat16()
    normed, total = ops.fused_add_rms_norm.reference(x, residual, weight, 1e-6)
    assert torch.equal(total, x + residual)
    assert torch.equal(normed, ops.rms_norm.reference(x + residual, weight, 1e-6))
    unrounded = x.float() + residual.float()
    other = weight * (unrounded * torch.rsqrt(unrounded.square().mean(-1, keepdim=True) + 1e-6)).bfloat16()
    assert (normed != other).float().mean() > 0.05, "the data do not tell the two sums apart"


@pytest.mark.parametrize(("dtype", "unit"), [(torch.bfloat16, 2.0**-7), (torch.float16, 2.0**-10)])
def test_silu_and_mul_is_rounded_once(dtype, unit):
    """The float64 product rounded to half precision, but for a tie or so; torch's two rounded steps are a unit off in places."""
    x = torch.randn(8, 1024, generator=torch.Generator().manual_seed(0)).to(dtype)
    gate, up = x.chunk(2, dim=1)
    exact = (torch.nn.functional.silu(gate.double()) * up.double()).to(dtype)
    out, stepwise = ops.silu_and_mul.reference(x), torch.nn.functional.silu(gate) * up
    assert (out != exact).float().mean() < 1e-3 < (stepwise != exact).float().mean()
    torch.testing.assert_close(out, stepwise, rtol=unit, atol=1e-7)


def test_linear_and_attention_flops_are_counted_flops():
    x, w = torch.randn(7, 32), torch.randn(48, 32)
    with FlopCounterMode(display=False) as counter:
        ops.linear.reference(x, w)
    assert ops.linear.cost(x, w).flops == counter.get_total_flops()

    (q, *rest), keys, _ = paged([(5, 5)], 4, 4, 16)
    cost = ops.paged_attention.cost(q, *rest, 0.25)
    with FlopCounterMode(display=False) as counter:
        torch.einsum("qhd,khd->hqk", q, keys[0])
        torch.einsum("qhd,khd->hqk", q, keys[0])
    square, causal = 5 * 5, 5 * 6 // 2  # the counter sees the whole square; causality needs its lower half
    products = cost.flops * (4 * 16) / (4 * 16 + 5)
    assert products == pytest.approx(counter.get_total_flops() * causal / square)


def test_known_intensity_of_decode_attention():
    """2·G/κ FLOP a byte for the two products, whatever batch and context: Llama-3-8B's G = 4 in bfloat16 gives 4."""
    (q, *rest), _, _ = paged([(1, 4096)], 32, 8, 128, block_size=16, dtype=torch.bfloat16)
    cost = ops.paged_attention.cost(q, *rest, 0.1)
    assert cost.flops * 512 / 517 / cost.bytes == pytest.approx(4.0, rel=0.01)


def test_silu_and_mul_moves_three_fifths_of_the_two_step_form():
    x = torch.empty(8, 2 * 96)
    out = torch.empty(8, 96)
    two_steps = 2 * out.nbytes + 3 * out.nbytes  # silu reads and writes the gate; the product reads two, writes one
    assert ops.silu_and_mul.cost(x).bytes / two_steps == pytest.approx(3 / 5)


def test_empty_inputs():
    (q, kc, vc, *_), _, _ = paged([(1, 1)])
    none = torch.zeros(1, dtype=torch.int32)
    out = ops.paged_attention.reference(q[:0], kc, vc, torch.zeros(0, 0, dtype=torch.int32), none, none[:0], 1.0)
    assert out.shape == (0, 6, 16)
    ops.reshape_and_cache.reference(
        torch.zeros(0, 2, 16), torch.zeros(0, 2, 16), kc, vc, torch.zeros(0, dtype=torch.int64)
    )
    assert ops.gather_last_tokens.reference(torch.zeros(0, 8), none).shape == (0, 8)
