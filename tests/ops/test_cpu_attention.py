"""The CPU's paged attention against torch's SDPA in float64: decodes, parts of contexts, prompts in tiles, any mix of them."""

from __future__ import annotations

import math

import pytest
import torch

pytest.importorskip("numba")

from hypothesis import given, settings
from hypothesis import strategies as st

from llmlab import ops
from llmlab.ops.cpu import amx, flash

# float32 sums; bfloat16 and float16: the result rounded once, and with bfloat16 products the weights as well.
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}
MIXES = {
    "one decode": [(1, 1)],
    "a long context in parts": [(1, 700)],
    "decodes": [(1, 64), (1, 65), (1, 1), (1, 300), (1, 31)],
    "short chunks": [(7, 70), (16, 20)],
    "prompts": [(17, 17), (33, 33), (150, 150)],
    "chunks": [(40, 200), (32, 70), (300, 500)],
    "a mix": [(1, 130), (20, 64), (0, 3), (65, 65), (1, 1), (3, 50)],
}
SHAPES = {"gqa": (9, 3, 64, 16), "mha": (2, 2, 80, 1), "mqa": (8, 1, 128, 7)}


def paged(lens, num_heads, num_kv_heads, head_dim, block_size, dtype, seed=0):
    """Requests ``(query_len, seq_len)`` in shuffled blocks; what no request owns is NaN, unused table entries point nowhere."""
    g = torch.Generator().manual_seed(seed)
    blocks_of = [-(-seq // block_size) for _, seq in lens]
    num_blocks = sum(blocks_of) + 3
    order = torch.randperm(num_blocks, generator=g).tolist()
    caches = torch.full((2, num_blocks, block_size, num_kv_heads, head_dim), math.nan, dtype=dtype)
    table = torch.full((len(lens), max(blocks_of) + 2), 2**30, dtype=torch.int32)
    contexts = []
    for r, (_, seq) in enumerate(lens):
        mine = torch.tensor([order.pop() for _ in range(blocks_of[r])])
        table[r, : len(mine)] = mine
        kv = torch.randn(2, seq, num_kv_heads, head_dim, generator=g).to(dtype)
        at = torch.arange(seq)
        caches[:, mine[at // block_size], at % block_size] = kv
        contexts.append(kv)
    starts = torch.tensor([0] + [q for q, _ in lens]).cumsum(0).int()
    joined = torch.randn(int(starts[-1]), num_heads + 2 * num_kv_heads, head_dim, generator=g).to(dtype)
    seq_lens = torch.tensor([seq for _, seq in lens], dtype=torch.int32)
    return (joined[:, :num_heads], *caches, table, starts, seq_lens), contexts


def oracle(q, kv, scale, window=None, soft_cap=None):
    """One request in float64: ``(out, lse)``, by SDPA where it can, by the formula with a soft cap."""
    query_len, seq_len, per_kv_head = len(q), kv.shape[1], q.shape[1] // kv.shape[2]
    own, seen = torch.arange(seq_len - query_len, seq_len)[:, None], torch.arange(seq_len)[None]
    mask = (seen <= own) & (seen > own - window if window else True)
    q, k, v = (x.double().transpose(0, 1) for x in (q, *kv))
    k, v = k.repeat_interleave(per_kv_head, 0), v.repeat_interleave(per_kv_head, 0)
    scores = q @ k.transpose(1, 2) * scale
    if soft_cap:
        scores = soft_cap * (scores / soft_cap).tanh()
    scores = scores.masked_fill(~mask, -math.inf)
    if soft_cap:
        out = scores.softmax(-1) @ v
    else:
        out = torch.nn.functional.scaled_dot_product_attention(q[None], k[None], v[None], attn_mask=mask, scale=scale)[
            0
        ]
    return out.transpose(0, 1), scores.logsumexp(-1).T


def check(lens, shape, dtype, window=None, soft_cap=None, seed=0):
    args, contexts = paged(lens, *shape, dtype, seed)
    scale = shape[2] ** -0.5
    out, lse = ops.paged_attention.cpu(*args, scale, window, soft_cap, return_lse=True)
    assert out.dtype == dtype and out.shape == args[0].shape and lse.dtype == torch.float32
    for r, kv in enumerate(contexts):
        begin, end = args[4][r : r + 2].tolist()
        if begin == end:
            continue
        expected, expected_lse = oracle(args[0][begin:end], kv, scale, window, soft_cap)
        torch.testing.assert_close(out[begin:end].double(), expected, rtol=0, atol=TOLERANCE[dtype])
        torch.testing.assert_close(lse[begin:end].double(), expected_lse, rtol=0, atol=3e-5)
    assert torch.equal(ops.paged_attention.cpu(*args, scale, window, soft_cap), out)


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("mix", list(MIXES))
def test_mixes(mix, dtype):
    check(MIXES[mix], SHAPES["gqa"], dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", ["mha", "mqa"])
def test_heads_and_block_sizes(shape, dtype):
    check(MIXES["a mix"], SHAPES[shape], dtype)


@pytest.mark.parametrize("query_len", [1, 2, 15, 16, 17])
@pytest.mark.parametrize(("group", "head_dim"), [(1, 64), (4, 96), (7, 80), (32, 128)])
def test_lengths_at_block_edges(query_len, group, head_dim):
    """Contexts of one token, and one off a block either way, for groups that are no power of two or very large."""
    block_size = 8
    lens = [(query_len, max(query_len, n)) for n in (1, block_size - 1, block_size, block_size + 1, 3 * block_size + 1)]
    check(lens, (group, 1, head_dim, block_size), torch.float32)


def test_block_ids_past_two_to_the_31_elements():
    """The second block starts 2^31 + 16 elements into the cache (memory that is reserved, and hardly touched)."""
    (q, keys, values, table, starts, seq_lens), (kv,) = paged([(2, 20)], 2, 1, 64, 16, torch.float16)
    caches = []
    for cache in (keys, values):
        far = torch.empty_strided((2, 16, 1, 64), (2**31 + 16, 64, 64, 1), dtype=torch.float16)
        for j in range(2):
            far[1 - j] = cache[int(table[0, j])]
        caches.append(far)
    out = ops.paged_attention.cpu(q, *caches, torch.tensor([[1, 0]], dtype=torch.int32), starts, seq_lens, 0.125)
    torch.testing.assert_close(out.double(), oracle(q, kv, 0.125)[0], rtol=0, atol=TOLERANCE[torch.float16])


@pytest.mark.parametrize("soft_cap", [None, 5.0])
@pytest.mark.parametrize("window", [1, 17, 64, 1000])
def test_windows_and_soft_caps(window, soft_cap):
    for dtype in (torch.float32, torch.bfloat16):
        check([*MIXES["a mix"], (90, 400), (1, 300)], SHAPES["gqa"], dtype, window, soft_cap)


def test_large_scores_do_not_overflow():
    args, contexts = paged([(1, 100), (40, 90)], *SHAPES["gqa"], torch.float32)
    out = ops.paged_attention.cpu(*args, 300.0)
    for r, kv in enumerate(contexts):
        begin, end = args[4][r : r + 2].tolist()
        expected, _ = oracle(args[0][begin:end], kv, 300.0)
        torch.testing.assert_close(out[begin:end].double(), expected, rtol=0, atol=5e-3)  # float32 scores of thousands


@pytest.mark.parametrize("method", ["f32", "bf16dot"])
def test_prompts_without_amx(method, monkeypatch):
    if method == "bf16dot" and flash._method(torch.bfloat16, 64) == "f32":
        pytest.skip("no bfloat16 pair products here")
    monkeypatch.setattr(amx, "available", lambda: False)
    if method == "f32":
        monkeypatch.setattr(flash, "_method", lambda dtype, head_dim: "f32")
    check(MIXES["chunks"], SHAPES["gqa"], torch.bfloat16)


@pytest.mark.parametrize("threads", [1, 3])
def test_any_number_of_threads(threads):
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        check(MIXES["a long context in parts"], SHAPES["gqa"], torch.float32)
        check(MIXES["a mix"], SHAPES["gqa"], torch.float32)
    finally:
        torch.set_num_threads(before)


def test_a_request_alone_or_in_a_crowd_gives_the_same_bits():
    """Who else is in the batch may decide how a context is split, not what a prompt's tile computes."""
    lens = [(33, 90), (1, 40), (50, 50)]
    args, _ = paged(lens, *SHAPES["gqa"], torch.float32)
    together = ops.paged_attention.cpu(*args, 0.125)
    q, keys, values, table, starts, seq_lens = args
    for r in (0, 2):
        begin, end = starts[r : r + 2].tolist()
        alone = (
            q[begin:end],
            keys,
            values,
            table[r : r + 1],
            torch.tensor([0, end - begin]).int(),
            seq_lens[r : r + 1],
        )
        assert torch.equal(ops.paged_attention.cpu(*alone, 0.125), together[begin:end])


@settings(max_examples=100, deadline=None)
@given(
    requests=st.lists(st.tuples(st.integers(0, 100), st.integers(0, 90)), min_size=1, max_size=9),
    window=st.sampled_from([None, 1, 40, 500]),
)
def test_a_plan_deals_out_every_query_and_every_visible_key_once(requests, window):
    lens, seq_lens = [n for n, _ in requests], [n + before for n, before in requests]
    starts = torch.tensor([0, *lens]).cumsum(0)
    longest = max(seq_lens)
    plan = flash.Plan.of(starts.int(), torch.tensor(seq_lens).int(), sum(lens), longest, window)
    rows, keys, blocks, left_over = plan.words[:4].tolist()
    table = plan.words[8:].view(-1, 16)[:rows, :8].tolist()
    tiled = [r for r, n in enumerate(lens) if n >= flash.FEWEST]
    assert [row[:4] for row in table] == [[int(starts[r]), lens[r], seq_lens[r], r] for r in tiled]
    few = [t for r, n in enumerate(lens) if r not in tiled for t in range(int(starts[r]), int(starts[r]) + n)]
    assert plan.few[:left_over].tolist() == few and left_over <= len(plan.few)
    next_key, next_block = 0, 0
    for r, (*_, first, key, item, block) in zip(tiled, table, strict=True):
        unseen = 0 if window is None else max(seq_lens[r] - lens[r] + 1 - window, 0)  # by the request's first query
        assert unseen - 32 < first <= unseen and first % 32 == 0
        assert (key, item, block) == (next_key, next_key // 32, next_block)
        next_key += -(-(seq_lens[r] - first) // 32) * 32
        next_block += -(-lens[r] // flash.QUERIES)
    assert (keys, blocks) == (next_key, next_block) and keys <= plan.most_keys


def test_what_the_kernels_do_not_take_goes_to_the_reference():
    for shape, dtype, scale in (((4, 2, 24, 4), torch.float32, 0.2), ((4, 2, 32, 4), torch.float64, 0.2)):
        args, _ = paged([(3, 9), (1, 5)], *shape, dtype)
        assert torch.equal(ops.paged_attention.cpu(*args, scale), ops.paged_attention.reference(*args, scale))
    args, _ = paged([(3, 9)], 4, 2, 32, 4, torch.float32)
    assert torch.equal(ops.paged_attention.cpu(*args, -0.5), ops.paged_attention.reference(*args, -0.5))


def test_nothing_scheduled():
    args, _ = paged([(0, 5), (0, 9)], *SHAPES["gqa"], torch.float32)
    assert ops.paged_attention.cpu(*args, 0.125).shape == (0, 9, 64)
