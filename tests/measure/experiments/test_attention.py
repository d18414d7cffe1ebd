"""Attention experiments: the online softmax against two passes, tile maps against masks, bytes where they can be known."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from llmlab.measure.experiments import attention as experiment
from llmlab.measure.experiments.paging import Heads

LLAMA = Heads(32, 8, 128)


@pytest.mark.parametrize("tile", [1, 3, 4, 17, 40])
def test_every_answer_is_the_softmax_of_the_keys_so_far(tile: int) -> None:
    rng = np.random.default_rng(tile)
    scores, values = torch.from_numpy(rng.normal(0, 30, 17)), torch.from_numpy(rng.normal(size=17))
    steps = experiment.online_softmax_steps(scores.numpy(), values.numpy(), tile)
    assert steps["keys"].iloc[-1] == 17
    for row in steps.itertuples():
        weights = scores[: row.keys].softmax(0)
        assert row.answer == pytest.approx(float(weights @ values[: row.keys]), rel=1e-12)
        assert row.max + np.log(row.sum) == pytest.approx(float(scores[: row.keys].logsumexp(0)), rel=1e-12)


def test_nothing_to_walk_over() -> None:
    with pytest.raises(ValueError, match="tile of at least 1"):
        experiment.online_softmax_steps([], [], 4)


@pytest.mark.parametrize("sliding_window", [None, 1, 5, 100])
@pytest.mark.parametrize(("query_len", "seq_len"), [(24, 24), (7, 30), (1, 9), (16, 40)])
def test_tile_maps_are_what_the_mask_says(query_len: int, seq_len: int, sliding_window: int | None) -> None:
    own = torch.arange(seq_len - query_len, seq_len)[:, None]
    seen = torch.arange(seq_len)[None, :]
    visible = seen <= own
    if sliding_window is not None:
        visible &= seen > own - sliding_window
    for block_m, block_n in ((8, 8), (4, 16), (5, 3), (64, 64)):
        for tile in experiment.tile_map(query_len, seq_len, block_m, block_n, sliding_window).itertuples():
            rows = slice(tile.row * block_m, (tile.row + 1) * block_m)
            part = visible[rows, tile.column * block_n : (tile.column + 1) * block_n]
            assert tile.kind == ("whole" if part.all() else "masked" if part.any() else "skipped")


def test_impossible_lengths() -> None:
    with pytest.raises(ValueError, match="query_len <= seq_len"):
        experiment.tile_map(5, 4, 2, 2)


def test_naive_attention_against_sdpa() -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(13, heads, 8, generator=generator, dtype=torch.float64) for heads in (6, 2, 2))
    want = scaled_dot_product_attention(*(x.transpose(0, 1) for x in (q, k, v)), is_causal=True, enable_gqa=True)
    torch.testing.assert_close(experiment.naive_attention(q, k, v), want.transpose(0, 1))


@pytest.mark.parametrize(
    ("run", "floats"),
    [
        (lambda x: (x + 1) + 1, 2000),  # the first sum lives while the second is made
        (lambda x: [(x + 1).sum().item(), (x + 2).sum().item()], 1001),
        (lambda x: [x + 1, x + 2, x + 3], 3000),
        (lambda x: x.view(10, 100)[2:], 0),
        (lambda x: x.add_(1), 0),
        (lambda x: (x + 1).mul_(2), 1000),
    ],
)
def test_peak_bytes(run: object, floats: int) -> None:
    x = torch.zeros(1000)
    assert experiment.peak_bytes(lambda: run(x)) == 4 * floats  # type: ignore[operator]


def test_memory_grows_with_the_length_and_with_its_square() -> None:
    growth = experiment.memory_growth((64, 128, 256))
    slope = {w: experiment.growth_exponent(g["length"], g["bytes"]) for w, g in growth.groupby("way")}
    assert slope["tiles"] == pytest.approx(1, abs=0.1)
    assert slope["all scores"] > 1.6
    assert growth["max_error"].max() < 1e-5


def test_exponent_of_a_power() -> None:
    assert experiment.growth_exponent([1, 2, 4, 8], [3, 3 * 2**1.5, 24, 3 * 8**1.5]) == pytest.approx(1.5)


def test_traffic_of_tiles_of_queries() -> None:
    whole = experiment.tile_traffic(2048, 2048, 2048, LLAMA)
    own = 2 * 2048 * 32 * 128 * 2
    assert whole.bytes == own + 2 * 2048 * 8 * 128 * 2  # keys and values once
    assert whole.flops == 32 * 4 * 128 * 2048 * 2049 / 2
    assert experiment.tile_traffic(2048, 2048, 2048, LLAMA).intensity == pytest.approx(0.4 * 2048, rel=1e-3)
    single = experiment.tile_traffic(1, 4096, 128, LLAMA)
    assert single.bytes == 2 * 32 * 128 * 2 + 2 * 4096 * 8 * 128 * 2
    ragged = experiment.tile_traffic(5, 7, 2, LLAMA)  # tiles end at the queries at positions 3, 5 and 6
    assert ragged.bytes == 2 * 5 * 32 * 128 * 2 + 2 * (4 + 6 + 7) * 8 * 128 * 2


def test_the_sweeps_clock_what_they_say() -> None:
    rates = experiment.sweep_queries((1, 32), context=64, max_seconds=0.05)
    assert rates["query_len"].tolist() == [1, 32]
    assert rates["flops_per_s"].tolist() == pytest.approx((rates["flops"] / rates["seconds"]).tolist())
    assert rates["kv_bytes"].iloc[0] == 2 * 64 * 3 * 64 * 2
    table = experiment.paged_against_contiguous((64,), max_seconds=0.05)
    assert (table[["paged", "contiguous", "sdpa", "slowdown"]] > 0).all(axis=None)
    assert table["length"].tolist() == [64]
