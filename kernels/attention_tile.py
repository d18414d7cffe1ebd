"""What every attention kernel here shares: the step of the online softmax, the search for a request, and the tiles.

The loop is FlashAttention-2's (Dao, 2023, arXiv:2307.08691): a program owns BLOCK_M rows of queries and walks the keys
tile by tile, so no score matrix ever exists. The rows are consecutive tokens times the query heads of one KV head, so
that a tile of keys is read once for the whole group.
"""

from dataclasses import dataclass, field

import torch
import triton
import triton.language as tl
from llmlab.kernels.spec import Work
from llmlab.kernels.tiles import next_power_of_2


@triton.jit
def find_request(query_start_loc_ptr, query_block, num_reqs, BLOCK_Q: tl.constexpr):
    """The request that owns ``query_block``, when request r's blocks of queries start at ``query_start_loc[r] // BLOCK_Q + r``.

    That start leaves room for the partial block at each request's end, and needs no prefix sum of block counts.
    """
    low = 0
    high = num_reqs
    while low < high:
        middle = (low + high) // 2
        start = tl.load(query_start_loc_ptr + middle) // BLOCK_Q + middle
        if start <= query_block:
            low = middle + 1
        else:
            high = middle
    return low - 1


@triton.jit
def attend_tile(
    q,
    k,
    v,
    keys,
    last_key,
    end_key,
    window,
    acc,
    row_max,
    row_sum,
    scale_log2,
    soft_cap,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFT_CAP: tl.constexpr,
    MASKED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One step of the online softmax: fold ``q[M, D]`` against ``k[N, D]`` and ``v[N, D]`` into the running state.

    ``last_key[M]`` is the last key that each row may see. Scores are in base 2: ``scale_log2`` is the scale times
    log2(e). With soft capping, ``soft_cap`` is the cap times log2(e) and ``scale_log2`` 2 log2(e) scale / cap.
    """
    scores = tl.dot(q, k.T, input_precision=PRECISION)
    if HAS_SOFT_CAP:
        # cap * tanh(s / cap) = cap * (1 - 2 / (exp(2 s / cap) + 1)); exp2 saturates without a NaN.
        scores = soft_cap - (2.0 * soft_cap) / (tl.math.exp2(scores * scale_log2) + 1.0)
    if MASKED:
        visible = (keys[None, :] <= last_key[:, None]) & (keys < end_key)[None, :]
        if HAS_WINDOW:
            visible = visible & (keys[None, :] > last_key[:, None] - window)
        scores = tl.where(visible, scores, float("-inf"))
    if HAS_SOFT_CAP:
        new_max = tl.maximum(row_max, tl.max(scores, 1))
    else:
        new_max = tl.maximum(row_max, tl.max(scores, 1) * scale_log2)
    reference = new_max
    if MASKED:
        reference = tl.where(new_max == float("-inf"), 0.0, new_max)  # no key seen yet: keep -inf - (-inf) out
    if HAS_SOFT_CAP:
        p = tl.math.exp2(scores - reference[:, None])
    else:
        p = tl.math.exp2(scores * scale_log2 - reference[:, None])
    correction = tl.math.exp2(row_max - reference)
    row_sum = row_sum * correction + tl.sum(p, 1)
    acc = acc * correction[:, None]
    acc = tl.dot(p.to(v.dtype), v, acc, input_precision=PRECISION)
    return acc, new_max, row_sum


@dataclass(frozen=True)
class Tile:
    """Rows of queries, keys a step, warps and pipeline stages of one shape class.

    ``max_registers`` is a limit for ptxas, which otherwise may spill for an occupancy that shared memory forbids.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    max_registers: int | None = None


# Full float32 has no tensor cores on NVIDIA: small tiles, for exactness and not for speed.
FLOAT32_TILES = {
    64: Tile(16, 32, 4, 2, max_registers=255),
    128: Tile(16, 32, 8, 2, max_registers=255),
    256: Tile(16, 16, 8, 2),
}


@dataclass(frozen=True)
class Tiles:
    """One machine's tiles by padded head_dim: ``wide`` for prefill, ``middle`` for up to 64 rows, ``narrow`` for decode."""

    wide: dict[int, Tile]
    middle: dict[int, Tile]
    narrow: dict[int, Tile]
    float32: dict[int, Tile] = field(default_factory=lambda: FLOAT32_TILES)


# Stages count the block-table read too: five keep two tiles of K and V in flight where mma.sync consumes them.
TILES = {
    "hopper": Tiles(
        wide={64: Tile(128, 128, 8, 3), 128: Tile(128, 128, 8, 2), 256: Tile(128, 32, 8, 2)},
        middle={
            64: Tile(64, 64, 4, 2, max_registers=255),
            128: Tile(64, 64, 4, 2, max_registers=255),
            256: Tile(64, 64, 8, 2),
        },
        narrow={64: Tile(16, 64, 4, 5), 128: Tile(16, 32, 4, 5), 256: Tile(16, 32, 4, 5)},
    ),
    "ampere": Tiles(
        wide={64: Tile(128, 64, 8, 3), 128: Tile(128, 32, 8, 3), 256: Tile(64, 32, 8, 2)},
        middle={64: Tile(64, 64, 4, 3, max_registers=255), 128: Tile(64, 32, 4, 3), 256: Tile(64, 32, 8, 2)},
        narrow={64: Tile(16, 64, 4, 5), 128: Tile(16, 32, 4, 5), 256: Tile(16, 32, 4, 5)},
    ),
    "cdna": Tiles(
        wide={64: Tile(64, 64, 4, 2), 128: Tile(64, 32, 4, 2), 256: Tile(64, 32, 4, 2)},
        middle={64: Tile(64, 64, 4, 2), 128: Tile(64, 32, 4, 2), 256: Tile(64, 32, 4, 2)},
        narrow={64: Tile(16, 64, 4, 2), 128: Tile(16, 64, 4, 2), 256: Tile(16, 32, 4, 2)},
        float32={64: Tile(16, 32, 4, 2), 128: Tile(16, 32, 8, 2), 256: Tile(16, 16, 8, 2)},
    ),
}


def choose_tile(num_tokens: int, num_reqs: int, group: int, head_dim: int, dtype: torch.dtype, machine: str) -> Tile:
    """The tile of a batch: by its mean query length, which is all that is known without asking the device."""
    block_d = max(64, next_power_of_2(head_dim))
    if block_d not in FLOAT32_TILES:
        raise ValueError(f"head_dim must be at most {max(FLOAT32_TILES)}, not {head_dim}")
    tiles = TILES[machine]
    if dtype == torch.float32:
        return tiles.float32[block_d]
    rows = max(num_tokens * group // max(num_reqs, 1), group)
    return (tiles.narrow if rows <= 16 else tiles.middle if rows <= 64 else tiles.wide)[block_d]


def queries_per_tile(tile: Tile, group: int) -> int:
    """How many consecutive tokens of a request one tile of queries holds."""
    return tile.block_m // min(group, tile.block_m)


def attention_work(tile: Tile, head_dim: int, itemsize: int) -> Work:
    """What one tile of keys costs: two matrix products, and K and V read once."""
    return Work(
        flops=4.0 * tile.block_m * tile.block_n * head_dim, bytes=2.0 * tile.block_n * head_dim * itemsize, scope="loop"
    )
