"""Split keys: any number of splits gives the unsplit result, also where splits are empty or the batch is no decode."""

from __future__ import annotations

import pytest
import torch
from llmlab.kernels.attention import paged_attention
from llmlab.kernels.attention_tile import TILES, choose_tile
from llmlab.kernels.flash_decoding import attend_in_splits, choose_splits, flash_decoding
from llmlab.kernels.paged_kernel import meta_batch

from llmlab.kernels import flash_decoding as module

DECODES = [(1, 1), (1, 17), (1, 300), (1, 64), (1, 129)]


@pytest.mark.parametrize("splits", [1, 2, 8, 64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_splits_change_nothing(paged_batch, assert_near, splits, dtype):
    batch = paged_batch(DECODES, 8, 2, 64, 16, dtype)
    out, lse = flash_decoding(*batch.args, 0.125, return_lse=True, num_splits=splits)
    expected, expected_lse = batch.oracle(0.125)
    assert_near(out, expected)
    assert_near(lse, expected_lse)


@pytest.mark.parametrize("options", [{"sliding_window": 40}, {"soft_cap": 3.0}, {"sliding_window": 1, "soft_cap": 3.0}])
@pytest.mark.parametrize("lens", [DECODES, [(3, 200), (0, 9), (40, 90)]], ids=["decodes", "chunks"])
def test_windows_caps_and_chunks(paged_batch, assert_near, lens, options):
    batch = paged_batch(lens, 6, 2, 80, 8, torch.float16)
    out = flash_decoding(*batch.args, 0.2, **options, num_splits=4)
    assert_near(out, batch.oracle(0.2, options.get("sliding_window"), options.get("soft_cap"))[0])


@pytest.mark.parametrize("group", [1, 7, 32])
@pytest.mark.parametrize("splits", [1, 4])
def test_by_request_leaves_long_requests_alone(paged_batch, assert_near, group, splits):
    """The narrow launch of a mixed batch: rows of requests that do not fit its tile stay as they were."""
    lens = [(1, 100), (20, 60), (0, 5), (1, 1), (90, 90), (2, 33)]
    batch = paged_batch(lens, group, 1, 64, 16, torch.float16)
    tile = TILES["hopper"].narrow[64]
    out = torch.full(batch.q.shape, 7.0, dtype=torch.float16)
    lse = torch.full(batch.q.shape[:2], 7.0)
    attend_in_splits(out, lse, *batch.args, 0.125, None, None, tile, splits, by_request=True)
    expected, expected_lse = batch.oracle(0.125)
    starts = batch.query_start_loc.tolist()
    for r, (query_len, _) in enumerate(lens):
        rows = slice(starts[r], starts[r + 1])
        if query_len <= 16 // min(group, 16):
            assert_near(out[rows], expected[rows])
            assert_near(lse[rows], expected_lse[rows])
        else:
            assert (out[rows] == 7).all() and (lse[rows] == 7).all()


def test_a_mixed_batch_splits_its_decodes(paged_batch, assert_near, monkeypatch):
    """On a machine of many SMs: wide tiles for the chunk, split narrow ones for the decodes, one result."""
    monkeypatch.setattr(module, "sm_count", lambda device: 132)
    batch = paged_batch([(1, 700), (50, 80), (1, 3), (2, 600)], 8, 2, 64, 16, torch.float16)
    out, lse = paged_attention(*batch.args, 0.125, return_lse=True)
    expected, expected_lse = batch.oracle(0.125)
    assert_near(out, expected)
    assert_near(lse, expected_lse)


def test_the_number_of_splits_follows_the_machine(monkeypatch):
    def splits(num_reqs: int, block_table_width: int = 8192, window: int | None = None) -> int:
        q, key_cache, _, table, _, _ = meta_batch(num_reqs, num_reqs, 32, 8, 128)
        table = torch.empty(num_reqs, block_table_width, dtype=torch.int32, device="meta")
        tile = choose_tile(num_reqs, num_reqs, 4, 128, torch.bfloat16, "hopper")
        return choose_splits(q, key_cache, table, num_reqs, window, tile)

    assert [splits(n) for n in (1, 4, 16, 33, 64)] == [64, 16, 4, 1, 1]
    assert splits(1, block_table_width=8) == 1, "128 keys are not worth cutting"
    assert splits(1, window=1024) == 8


def test_nothing_in_nothing_out(paged_batch):
    assert flash_decoding(*paged_batch([]).args, 0.1, num_splits=4).shape == (0, 4, 64)


@pytest.mark.parametrize("splits", [0, 3, 128])
def test_bad_splits_are_named(paged_batch, splits):
    with pytest.raises(ValueError, match=f"a power of two up to 64, not {splits}"):
        flash_decoding(*paged_batch([(1, 5)]).args, 0.1, num_splits=splits)
