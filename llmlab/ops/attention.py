"""Attention over the paged KV cache, one call for any mix of prefill chunks and decodes, and the merge of partial results.

Query ``i`` of request ``r`` stands at position ``seq_lens[r] − query_len + i`` and sees the keys up to its own position
(bottom-right aligned causality). K and V are always read from the cache, where this step's own have been written before.
"""

from __future__ import annotations

import math

import torch
from jaxtyping import Float, Int
from torch import Tensor

from llmlab.ops.registry import Cost, op


def visible_pairs(query_len: int, seq_len: int, sliding_window: int | None = None) -> int:
    """Number of (query, key) pairs that a causal, possibly windowed attention of one request computes."""
    first = seq_len - query_len + 1  # keys that the first query sees
    if sliding_window is None or seq_len <= sliding_window:
        return query_len * first + query_len * (query_len - 1) // 2
    return sum(min(first + i, sliding_window) for i in range(query_len))


def visible_keys(query_len: int, seq_len: int, sliding_window: int | None = None) -> int:
    """Number of distinct keys of one request that any of its queries in this step sees."""
    if query_len == 0:
        return 0
    return seq_len if sliding_window is None else min(seq_len, query_len + sliding_window - 1)


def _paged_attention_cost(
    q: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    scale: float,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    return_lse: bool = False,
) -> Cost:
    num_heads, head_dim = q.shape[1:]
    block_size, num_kv_heads = key_cache.shape[1:3]
    query_lens = query_start_loc.diff().tolist()
    lens = list(zip(query_lens, seq_lens.tolist(), strict=True))
    pairs = sum(visible_pairs(a, b, sliding_window) for a, b in lens)
    keys = sum(visible_keys(a, b, sliding_window) for a, b in lens)
    entries = sum(math.ceil(visible_keys(a, b, sliding_window) / block_size) for a, b in lens)
    # Q·K and P·V are two products of head_dim multiply-adds a pair; scale, max, exp, sum and rescale are five more.
    flops = num_heads * pairs * (4 * head_dim + 5)
    moved = 2 * q.numel() * q.element_size() + 2 * keys * num_kv_heads * head_dim * key_cache.element_size()
    return Cost(flops, moved + entries * block_table.element_size() + 8 * len(lens))


@op(cost=_paged_attention_cost)
def paged_attention(
    q: Float[Tensor, "num_sched_tokens num_heads head_dim"],
    key_cache: Float[Tensor, "num_blocks block_size num_kv_heads head_dim"],
    value_cache: Float[Tensor, "num_blocks block_size num_kv_heads head_dim"],
    block_table: Int[Tensor, "num_reqs max_blocks_per_req"],
    query_start_loc: Int[Tensor, "num_reqs+1"],
    seq_lens: Int[Tensor, "num_reqs"],
    scale: float,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    return_lse: bool = False,
) -> (
    Float[Tensor, "num_sched_tokens num_heads head_dim"]
    | tuple[Float[Tensor, "num_sched_tokens num_heads head_dim"], Float[Tensor, "num_sched_tokens num_heads"]]
):
    """``softmax(scale · q · Kᵀ) · V`` of each request over its own blocks, in float32, rounded once.

    Args:
        block_table: logical block → block id; entries past a request's length may hold anything.
        sliding_window: see only the last so many keys, the own one included.
        soft_cap: scores become ``cap · tanh(score / cap)``.
        return_lse: also return the log-sum-exp of the scores (natural logarithm, float32), for merging.
    """
    block_size, num_kv_heads = key_cache.shape[1:3]
    group = q.shape[1] // num_kv_heads
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
    starts, lens = query_start_loc.tolist(), seq_lens.tolist()
    for r, seq_len in enumerate(lens):
        begin, end = starts[r], starts[r + 1]
        if begin == end:
            continue
        blocks = block_table[r, : -(-seq_len // block_size)].long()
        keys = key_cache[blocks].flatten(0, 1)[:seq_len].float()  # [seq_len, num_kv_heads, head_dim]
        values = value_cache[blocks].flatten(0, 1)[:seq_len].float()
        queries = q[begin:end].float().unflatten(1, (num_kv_heads, group))
        scores = torch.einsum("qhgd,khd->hgqk", queries, keys) * scale
        if soft_cap is not None:
            scores = soft_cap * torch.tanh(scores / soft_cap)
        own = torch.arange(seq_len - (end - begin), seq_len, device=q.device)[:, None]
        seen = torch.arange(seq_len, device=q.device)[None, :]
        hidden = seen > own
        if sliding_window is not None:
            hidden |= seen <= own - sliding_window
        scores = scores.masked_fill(hidden, float("-inf"))
        lse[begin:end] = scores.logsumexp(-1).flatten(0, 1).T
        out[begin:end] = torch.einsum("hgqk,khd->qhgd", scores.softmax(-1), values).flatten(1, 2).to(q.dtype)
    return (out, lse) if return_lse else out


def _merge_attention_states_cost(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> Cost:
    return Cost(3 * out_a.numel(), 3 * out_a.numel() * out_a.element_size() + 3 * lse_a.numel() * lse_a.element_size())


@op(cost=_merge_attention_states_cost)
def merge_attention_states(
    out_a: Float[Tensor, "num_sched_tokens num_heads head_dim"],
    lse_a: Float[Tensor, "num_sched_tokens num_heads"],
    out_b: Float[Tensor, "num_sched_tokens num_heads head_dim"],
    lse_b: Float[Tensor, "num_sched_tokens num_heads"],
) -> tuple[Float[Tensor, "num_sched_tokens num_heads head_dim"], Float[Tensor, "num_sched_tokens num_heads"]]:
    """Attention over the union of two disjoint sets of keys, from the results over each (Flash-Decoding's reduction).

    A part without keys has ``lse = −inf`` and counts for nothing; if both have none, the result is 0 with ``lse = −inf``.
    """
    highest = torch.maximum(lse_a, lse_b)
    highest = torch.where(highest == float("-inf"), 0.0, highest)
    weight_a, weight_b = torch.exp(lse_a - highest), torch.exp(lse_b - highest)
    total = weight_a + weight_b
    share = lambda weight, out: torch.where(weight[..., None] > 0, weight[..., None] * out.float(), 0.0)
    out = (share(weight_a, out_a) + share(weight_b, out_b)) / torch.where(total > 0, total, 1.0)[..., None]
    return out.to(out_a.dtype), torch.log(total) + highest
