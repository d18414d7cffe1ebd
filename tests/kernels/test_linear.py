"""The GEMMs against float64: every tile of the tables, splits of K, TMA and plain, odd shapes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from llmlab.kernels.linear import (
    FLOAT32_TILE,
    PLAIN_TILE,
    SMALL_TILES,
    TMA_TILES,
    choose_split,
    choose_tile,
    choose_tma_tile,
    linear,
    run_tile,
)

FUZZ = settings(
    derandomize=True, deadline=None, max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


def matrix(rows: int, cols: int, dtype: torch.dtype, seed: int, pad: int = 3) -> torch.Tensor:
    g = torch.Generator().manual_seed(seed)
    whole = torch.full((rows, cols + 2 * pad), float("nan"), dtype=dtype)
    whole[:, pad : pad + cols] = (torch.randn(rows, cols, generator=g) / cols**0.5).to(dtype)
    return whole[:, pad : pad + cols]


def product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    out = x.double() @ weight.double().T
    return out if bias is None else out + bias.double()


@FUZZ
@given(
    rows=st.sampled_from([1, 2, 15, 16, 17, 33, 65, 130]),
    cols=st.sampled_from([1, 7, 32, 65, 200, 576]),
    depth=st.sampled_from([1, 16, 48, 100, 129, 576]),
    dtype=st.sampled_from([torch.float32, torch.float16, torch.bfloat16]),
    with_bias=st.booleans(),
    seed=st.integers(0, 99),
)
def test_linear(assert_near, rows, cols, depth, dtype, with_bias, seed):
    x, weight = matrix(rows, depth, dtype, seed), matrix(cols, depth, dtype, seed + 1, pad=5)
    bias = matrix(1, cols, dtype, seed + 2)[0].contiguous() if with_bias else None
    out = linear(x, weight, bias)
    assert out.dtype == dtype and out.is_contiguous()
    assert_near(out, product(x, weight, bias))


@pytest.mark.parametrize("split", [1, 2, 4, 16])
@pytest.mark.parametrize("tile", [FLOAT32_TILE, PLAIN_TILE, *SMALL_TILES.values()], ids=str)
def test_every_tile_and_split(assert_near, tile, split):
    dtype = torch.float32 if tile == FLOAT32_TILE else torch.float16
    for depth in (3 * tile.block_k, 2 * tile.block_k + 9):
        x, weight = matrix(tile.block_m + 1, depth, dtype, 0), matrix(2 * tile.block_n - 1, depth, dtype, 1)
        bias = matrix(1, len(weight), dtype, 2)[0].contiguous()
        assert_near(run_tile(x, weight, bias, tile, split), product(x, weight, bias))


@pytest.mark.parametrize("tile", TMA_TILES, ids=str)
@pytest.mark.parametrize(("dtype", "with_bias"), [(torch.float16, True), (torch.bfloat16, False)])
def test_the_persistent_kernel(assert_near, tile, dtype, with_bias):
    """More tiles than programs (one, on a CPU), and edges in all three directions."""
    rows, cols, depth = 2 * tile.block_m + 24, tile.block_n + 40, 2 * tile.block_k + 8
    x, weight = matrix(rows, depth, dtype, 0, pad=0), matrix(cols, depth, dtype, 1, pad=0)
    bias = matrix(1, cols, dtype, 2)[0].contiguous() if with_bias else None
    assert_near(run_tile(x, weight, bias, tile, 1), product(x, weight, bias))


def test_splits_give_the_same_bits_every_time():
    x, weight = matrix(3, 512, torch.float16, 0), matrix(40, 512, torch.float16, 1)
    runs = [run_tile(x, weight, None, SMALL_TILES[16], 4) for _ in range(2)]
    assert torch.equal(*runs)


def test_rows_past_two_to_the_31_elements():
    """Weight rows that lie 2^30 + 16 elements apart (memory that is reserved, and hardly touched)."""
    weight = torch.empty_strided((3, 32), (2**30 + 16, 1), dtype=torch.float16)
    for row in range(3):
        weight[row] = row + 1.0
    assert linear(torch.ones(1, 32, dtype=torch.float16), weight).tolist() == [[32.0, 64.0, 96.0]]


def meta(rows: int, cols: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(rows, cols, dtype=dtype, device="meta")


def test_the_tile_follows_the_shape():
    weight = meta(4096, 4096)
    assert choose_tile(meta(1, 4096), weight) == SMALL_TILES[16]
    assert choose_tile(meta(128, 4096), weight) == SMALL_TILES[128]
    assert choose_tile(meta(129, 4096), weight).tma
    assert choose_tile(meta(129, 4100)[:, :4096], weight) == PLAIN_TILE, "a stride of 8200 bytes is none for TMA"
    assert choose_tile(meta(129, 4096), meta(4100, 4096)) == PLAIN_TILE, "nor is it for the result"
    assert choose_tile(torch.empty(129, 64, dtype=torch.bfloat16), weight) == PLAIN_TILE, "no TMA on a CPU"
    assert choose_tile(meta(1, 64, torch.float32), meta(8, 64, torch.float32)) == FLOAT32_TILE


def test_large_tiles_need_enough_of_them():
    sizes = [choose_tma_tile(rows, 4096, 132) for rows in (256, 512, 1024, 4096)]
    assert [(tile.block_m, tile.block_n) for tile in sizes] == [(64, 128), (128, 128), (128, 256), (128, 256)]


def test_splits_fill_the_machine_while_parts_stay_small():
    tile = SMALL_TILES[16]
    assert choose_split(1, 4096, 4096, tile, 132) == 4, "128 tiles are less than two waves of 132"
    assert choose_split(1, 128256, 4096, tile, 132) == 1
    assert choose_split(1, 576, 576, tile, 132) == 1, "too shallow to cut"
    assert choose_split(4096, 4096, 4096, next(iter(TMA_TILES)), 132) == 1


def test_nothing_in_nothing_out():
    assert linear(torch.empty(0, 16), torch.ones(4, 16)).shape == (0, 4)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: linear(torch.ones(2, 3), torch.ones(4, 5)), r"x must be \[T, I\] and weight \[O, I\] alike"),
        (lambda: linear(torch.ones(2, 3), torch.ones(4, 3).half()), "alike"),
        (lambda: linear(torch.ones(2, 3), torch.ones(4, 3), torch.ones(3)), r"bias must be contiguous \[4\]"),
        (lambda: linear(torch.ones(2, 3).double(), torch.ones(4, 3).double()), "not torch.float64"),
        (lambda: linear(torch.ones(3, 2).T, torch.ones(4, 3)), "last dimension must be contiguous"),
    ],
)
def test_bad_input_is_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()
