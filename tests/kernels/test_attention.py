"""Paged attention against float64, over every tile of the tables and whatever batch the fuzzer makes up."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from llmlab.kernels.attention import paged_attention
from llmlab.kernels.attention_tile import TILES, Tile, choose_tile
from llmlab.kernels.paged_kernel import launch_paged_attention

FUZZ = settings(
    derandomize=True, deadline=None, max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
MIXED = [(1, 37), (5, 5), (33, 70), (1, 1), (2, 16), (1, 130)]
HOPPER = TILES["hopper"]
TABLES = [table for m in TILES.values() for table in (m.wide, m.middle, m.narrow, m.float32)]
ALL_TILES = sorted({(tile, head_dim > 128) for table in TABLES for head_dim, tile in table.items()}, key=str)

request_lens = st.tuples(st.sampled_from([1, 1, 1, 2, 15, 16, 17, 40]), st.integers(0, 90)).map(
    lambda pair: (pair[0], sum(pair))
)


@FUZZ
@given(
    lens=st.lists(request_lens, min_size=1, max_size=5),
    heads=st.sampled_from([(1, 1), (4, 4), (8, 2), (7, 1), (9, 3), (32, 1), (6, 2)]),
    head_dim=st.sampled_from([64, 80, 96, 128]),
    block_size=st.sampled_from([1, 2, 5, 8, 16, 32, 256]),
    dtype=st.sampled_from(DTYPES),
    window=st.sampled_from([None, None, 1, 16, 33, 500]),
    soft_cap=st.sampled_from([None, None, 5.0]),
    seed=st.integers(0, 1000),
)
def test_any_batch(paged_batch, assert_near, lens, heads, head_dim, block_size, dtype, window, soft_cap, seed):
    batch = paged_batch(lens, *heads, head_dim, block_size, dtype, seed)
    scale = head_dim**-0.5
    out, lse = paged_attention(*batch.args, scale, sliding_window=window, soft_cap=soft_cap, return_lse=True)
    expected, expected_lse = batch.oracle(scale, window, soft_cap)
    assert out.dtype == dtype and lse.dtype == torch.float32
    assert_near(out, expected)
    assert_near(lse, expected_lse, factor=4)


@pytest.mark.parametrize("group", [3, 32])
@pytest.mark.parametrize(("tile", "big_heads"), ALL_TILES, ids=str)
def test_every_tile_computes_the_same(paged_batch, assert_near, tile: Tile, big_heads: bool, group: int):
    """Each tile on a batch that crosses its edges in both directions; group 32 is larger than the narrow tiles' rows."""
    longer = tile.block_m // group + 2
    lens = [(1, 2 * tile.block_n + 1), (longer, longer + tile.block_n - 5), (3, tile.block_n)]
    batch = paged_batch(lens, group, 1, 256 if big_heads else 64, 16, torch.float16)
    out = torch.full(batch.q.shape, float("nan"), dtype=batch.q.dtype)
    launch_paged_attention(out, None, *batch.args, 0.1, None, None, tile)
    assert_near(out, batch.oracle(0.1)[0])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
def test_head_dims_and_dtypes(paged_batch, assert_near, head_dim, dtype):
    batch = paged_batch(MIXED, 6, 2, head_dim, 16, dtype)
    assert_near(paged_attention(*batch.args, head_dim**-0.5), batch.oracle(head_dim**-0.5)[0])


@pytest.mark.parametrize("query_len", [1, 2, 15, 16, 17])
@pytest.mark.parametrize("group", [1, 4, 7, 8, 32])
def test_lengths_at_block_edges(paged_batch, assert_near, query_len, group):
    """Sequence lengths of one, and one off a block either way."""
    block_size = 8
    lens = [(query_len, max(query_len, n)) for n in (1, block_size - 1, block_size, block_size + 1, 3 * block_size + 1)]
    batch = paged_batch(lens, group, 1, 64, block_size, torch.float16)
    assert_near(paged_attention(*batch.args, 0.125), batch.oracle(0.125)[0])


def test_causality_is_bottom_right(paged_batch):
    """2 queries, 5 keys: with equal scores row 0 is the mean of 4 values, row 1 of 5."""
    batch = paged_batch([(2, 5)], 1, 1, 64, 4)
    batch.q.zero_()
    for position in range(5):
        block = int(batch.block_table[0, position // 4])
        batch.value_cache[block, position % 4] = float(position)
    out = paged_attention(*batch.args, 1.0)
    assert out[0, 0, 0].item() == pytest.approx(1.5) and out[1, 0, 0].item() == pytest.approx(2.0)


def test_freed_blocks_left_of_the_window_may_be_garbage(paged_batch, assert_near):
    """An engine may give away blocks that no window reaches any more: their entries point outside, their slots hold NaN."""
    batch = paged_batch([(1, 100), (3, 61)], 4, 2, 64, 16, torch.float16)
    expected, _ = batch.oracle(0.125, window=20)
    for r, first_visible in enumerate((100 - 20, 61 - 3 - 20 + 1)):
        batch.block_table[r, : first_visible // 16] = 2**30
    out = paged_attention(*batch.args, 0.125, sliding_window=20)
    assert_near(out, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(
    "lens",
    [[(0, 7), (3, 9), (0, 0), (2, 2), (0, 30)], [(0, 3), (0, 0), (5, 9)], [(0, 4), (0, 1), (2, 9), (0, 5)]],
    ids=str,
)
def test_empty_requests(paged_batch, assert_near, lens, dtype):
    """They may stand anywhere; the others may then have more queries than the shapes let one expect."""
    batch = paged_batch(lens, 8, 2, 64, 16, dtype)
    assert_near(paged_attention(*batch.args, 0.125), batch.oracle(0.125)[0])


def test_empty_batch(paged_batch):
    batch = paged_batch([])
    out, lse = paged_attention(*batch.args, 0.125, return_lse=True)
    assert out.shape == (0, 4, 64) and lse.shape == (0, 4)


def test_a_row_of_scores_far_below_zero_is_not_lost(paged_batch, assert_near):
    """exp2 of -1000 is 0: only the running maximum keeps such rows alive."""
    batch = paged_batch([(4, 50)], 2, 1, 64, 16)
    batch.q.fill_(-30.0)
    batch.key_cache.abs_().add_(1.0)
    for r, keys in enumerate(batch.keys):
        batch.keys[r] = keys.abs() + 1.0
    out, lse = paged_attention(*batch.args, 1.0, return_lse=True)
    expected, expected_lse = batch.oracle(1.0)
    assert expected_lse.max() < -1000
    assert_near(out, expected, factor=100)
    assert_near(lse, expected_lse)


def test_block_ids_past_two_to_the_31_elements(paged_batch, assert_near):
    """The second block starts 2^31 + 16 elements into the cache (memory that is reserved, and hardly touched)."""
    batch = paged_batch([(2, 20)], 2, 1, 64, 16, torch.float16)
    caches = []
    for cache in (batch.key_cache, batch.value_cache):
        far = torch.empty_strided((2, 16, 1, 64), (2**31 + 16, 64, 64, 1), dtype=torch.float16)
        for j in range(2):
            far[1 - j] = cache[int(batch.block_table[0, j])]
        caches.append(far)
    table = torch.tensor([[1, 0]], dtype=torch.int32)
    out = paged_attention(batch.q, *caches, table, batch.query_start_loc, batch.seq_lens, 0.125)
    assert_near(out, batch.oracle(0.125)[0])


def test_the_tile_follows_the_shape():
    assert choose_tile(64, 64, 4, 128, torch.bfloat16, "hopper") == HOPPER.narrow[128]
    assert choose_tile(128, 16, 4, 80, torch.bfloat16, "hopper") == HOPPER.middle[128]
    assert choose_tile(8192, 1, 4, 64, torch.float16, "ampere") == TILES["ampere"].wide[64]
    assert choose_tile(64, 64, 32, 128, torch.bfloat16, "hopper") == HOPPER.middle[128]
    assert choose_tile(8192, 1, 4, 256, torch.float32, "cdna") == TILES["cdna"].float32[256]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"scale": 0.0}, "scale must be positive, not 0.0"),
        ({"sliding_window": 0}, "sliding_window must be at least 1, not 0"),
        ({"soft_cap": -1.0}, "soft_cap must be positive, not -1.0"),
        ({"value_cache": torch.ones(2, 2)}, "both caches"),
        ({"query_start_loc": torch.zeros(1, dtype=torch.int32)}, "query_start_loc 2 entries"),
        ({"q": torch.ones(2, 3, 64)}, "3 query heads cannot share 2 KV heads"),
        ({"q": torch.ones(2, 4, 64).half()}, "q is torch.float16, the caches are torch.float32"),
        ({"q": torch.ones(2, 4, 64).double()}, "takes float16, bfloat16 and float32, not torch.float64"),
        ({"query_start_loc": torch.zeros(2, 3, dtype=torch.int32)[:, 0]}, "query_start_loc: .* its stride is 3"),
        ({name: torch.ones(2, 4, 0, 64) for name in ("key_cache", "value_cache")}, "cannot share 0 KV heads"),
    ],
)
def test_bad_input_is_named(paged_batch, change, message):
    batch = paged_batch([(2, 5)])
    names = ("q", "key_cache", "value_cache", "block_table", "query_start_loc", "seq_lens")
    with pytest.raises(ValueError, match=message):
        paged_attention(**{**dict(zip(names, batch.args, strict=True)), "scale": 0.1, **change})


def test_strided_lengths_are_refused(paged_batch):
    *rest, seq_lens = paged_batch([(1, 5), (2, 9)]).args
    with pytest.raises(ValueError, match="seq_lens: .* its stride is 2"):
        paged_attention(*rest, torch.stack([seq_lens, seq_lens], 1)[:, 0], 0.125)


def test_head_dim_above_the_tables_is_refused():
    with pytest.raises(ValueError, match="head_dim must be at most 256, not 300"):
        choose_tile(1, 1, 1, 300, torch.float16, "hopper")
