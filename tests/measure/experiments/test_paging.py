"""Paging experiments: batches hold the same keys in any layout, stories tell what the manager did, capacities add up."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from llmlab import ops
from llmlab.measure.experiments import paging


@pytest.mark.parametrize("block_size", [1, 3, 16])
def test_a_batch_is_the_same_attention_in_any_layout(block_size: int) -> None:
    seq_lens, heads = [20, 3, 17], paging.Heads(4, 2, 8)
    flat = paging.attention_batch([2, 1, 17], seq_lens, heads, block_size=32, shuffled=False)
    want = []
    for r, (begin, end, length) in enumerate(((0, 2, 20), (2, 3, 3), (3, 20, 17))):
        q, k, v = (
            x.double().transpose(0, 1)
            for x in (flat.q[begin:end], flat.key_cache[r, :length], flat.value_cache[r, :length])
        )
        mask = torch.ones(end - begin, length, dtype=torch.bool).tril(length - (end - begin))
        want.append(scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True).transpose(0, 1))
    batch = paging.attention_batch([2, 1, 17], seq_lens, heads, block_size)
    assert batch.key_cache.shape[:2] == (sum(-(-n // block_size) for n in seq_lens), block_size)
    torch.testing.assert_close(ops.paged_attention.reference(*batch.args).double(), torch.cat(want), atol=1e-5, rtol=0)


@pytest.mark.parametrize("shuffled", [False, True])
def test_tables_share_the_pool_out(shuffled: bool) -> None:
    table = paging.block_tables([9, 4, 1], 4, shuffled)
    assert table.shape == (3, 3)
    assert table.dtype == torch.int32
    assert sorted([*table[0].tolist(), table[1, 0].item(), table[2, 0].item()]) == [0, 1, 2, 3, 4]
    assert (table[0].tolist() == [0, 1, 2]) != shuffled


def test_the_engines_attention_is_the_references_equal() -> None:
    batch = paging.attention_batch([1, 1], [40, 33], paging.SMOLLM2, 16, dtype=torch.bfloat16)
    got = paging.engine_attention("cpu")(*batch.args)
    torch.testing.assert_close(got.float(), ops.paged_attention.reference(*batch.args).float(), atol=2e-2, rtol=2e-2)


def test_a_story_is_what_the_manager_did() -> None:
    story = paging.PoolStory(num_blocks=3, block_size=4)
    assert story.grow("A", 5)
    assert story.grow("B", 4)
    before = story.manager.block_pool.num_free, dict(story.requests)
    assert not story.grow("C", 1)
    assert (story.manager.block_pool.num_free, dict(story.requests)) == before
    assert story.grow("A", 1)
    story.finish("B")
    assert story.grow("C", 2)
    story.manager.block_pool.check()
    table = story.table()
    last = table[table["event"] == 5].set_index(["request", "index"])
    assert last["filled"].to_dict() == {("A", 0): 4, ("A", 1): 2, ("C", 0): 2}
    assert last.loc[("C", 0), "block"] == table.query("request == 'B'")["block"].iloc[0]  # given back, given out again
    assert table[table["event"] == 2]["label"].iloc[0] == "C +1\nrefused"
    with pytest.raises(KeyError):
        story.finish("B")


def test_capacity_adds_up() -> None:
    lengths, slots = [5, 16, 7, 9, 1, 12, 16, 3] * 4, 64
    table = paging.capacity(lengths, slots, 16, [1, 4, 16]).set_index(["layout", "block_size"])
    assert table["requests"].to_dict() == {("reserved", 16): 4, ("paged", 1): 6, ("paged", 4): 6, ("paged", 16): 4}
    assert table.loc[("paged", 4), "used"] == sum(lengths[:6]) / slots
    assert table.loc[("paged", 4), "waste"] == 1 - 50 / 60  # 8 + 16 + 8 + 12 + 4 + 12 slots handed out
    assert table.loc[("paged", 1), "waste"] == 0
    assert table.loc[("paged", 4), "worst_waste_blocks"] == 0.75
    assert table.loc[("reserved", 16), "waste"] == 1 - 37 / 64
    with pytest.raises(ValueError, match="max_model_len = 8"):
        paging.capacity(lengths, slots, 8, [4])
    with pytest.raises(ValueError, match="do not fill"):
        paging.capacity([5], slots, 16, [4])


def test_the_sweep_clocks_every_layout() -> None:
    sweep = paging.sweep_block_size([1, 16], num_reqs=2, context=64, layers=2, max_seconds=0.1)
    layouts = [("contiguous", 0), ("in order", 1), ("in order", 16), ("shuffled", 1), ("shuffled", 16)]
    assert list(sweep[["layout", "block_size"]].itertuples(index=False, name=None)) == layouts
    assert (sweep["seconds"] > 0).all()
    assert sweep.loc[0, "slowdown"] == 1
    kv_bytes = 2 * 2 * 64 * 3 * 64 * 2  # of a layer
    assert sweep.loc[1, "bytes_per_s"] == pytest.approx(kv_bytes / sweep.loc[1, "seconds"])
    assert (sweep["sure_low"] <= sweep["slowdown"]).all()
    with pytest.raises(ValueError, match="must divide the context 64"):
        paging.sweep_block_size([3], context=64)
