"""``x @ weight.T + bias``: a persistent tiled GEMM fed by TMA, and a plain tiled one that can split K for small batches.

Few rows leave few tiles, too few to keep every SM streaming weights; then K is cut among programs, each writes its
float32 part, and a second kernel adds the parts in a fixed order (no atomics: the same call gives the same bits).
"""

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from llmlab.kernels.launch import launch
from llmlab.kernels.spec import CompileCase, Work, capture
from llmlab.kernels.tiles import architecture, ceil_div, require_product_dtype, require_unit_stride, sm_count
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor


@triton.jit
def tile_of(program, num_tiles_m, num_tiles_n, GROUP_M: tl.constexpr):
    """Row and column of the ``program``-th tile, in the grouped order that reuses x and weight tiles in L2."""
    per_group = GROUP_M * num_tiles_n
    first_m = program // per_group * GROUP_M
    rows = tl.minimum(num_tiles_m - first_m, GROUP_M)
    return first_m + program % per_group % rows, program % per_group // rows


@triton.jit(do_not_specialize=["M"])
def linear_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    out_ptr,  # [M, N]; with splits [SPLIT_K, M, N] in float32, without the bias
    M,
    N,
    K,
    x_stride,
    weight_stride,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    SPLIT_K: tl.constexpr,
    STAGES: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    EVEN_K: tl.constexpr,
    PRECISION: tl.constexpr,
):
    tile_m, tile_n = tile_of(tl.program_id(0), tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N), GROUP_M)
    split = tl.program_id(1)
    rows = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    ks = tl.arange(0, BLOCK_K)
    row_mask = rows < M
    col_mask = cols < N
    k_per_split = tl.cdiv(tl.cdiv(K, BLOCK_K), SPLIT_K) * BLOCK_K
    k_start = split * k_per_split
    k_end = tl.minimum(k_start + k_per_split, K)
    x_ptrs = x_ptr + rows[:, None].to(tl.int64) * x_stride + ks[None, :]
    weight_ptrs = weight_ptr + cols[None, :].to(tl.int64) * weight_stride + ks[:, None]
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for k in tl.range(k_start, k_end, BLOCK_K, num_stages=STAGES):
        if EVEN_K:
            x = tl.load(x_ptrs + k, mask=row_mask[:, None], other=0.0)
            weight = tl.load(weight_ptrs + k, mask=col_mask[None, :], other=0.0)
        else:
            k_mask = k + ks < k_end
            x = tl.load(x_ptrs + k, mask=row_mask[:, None] & k_mask[None, :], other=0.0)
            weight = tl.load(weight_ptrs + k, mask=col_mask[None, :] & k_mask[:, None], other=0.0)
        acc = tl.dot(x, weight, acc, input_precision=PRECISION)
    if HAS_BIAS:
        acc += tl.load(bias_ptr + cols, mask=col_mask, other=0.0).to(tl.float32)[None, :]
    out_rows = split.to(tl.int64) * M + rows
    out_ptrs = out_ptr + out_rows[:, None] * N + cols[None, :]
    tl.store(out_ptrs, acc.to(out_ptr.dtype.element_ty), mask=row_mask[:, None] & col_mask[None, :])


@triton.jit(do_not_specialize=["M"])
def sum_splits_kernel(
    parts_ptr, bias_ptr, out_ptr, M, N, SPLIT_K: tl.constexpr, BLOCK_N: tl.constexpr, HAS_BIAS: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask = cols < N
    total = tl.zeros([BLOCK_N], tl.float32)
    for split in tl.static_range(SPLIT_K):
        total += tl.load(parts_ptr + (split * M + row) * N + cols, mask=mask, other=0.0)
    if HAS_BIAS:
        total += tl.load(bias_ptr + cols, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * N + cols, total.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["M", "num_programs"])
def linear_tma_kernel(
    x_desc,  # [M, K] in blocks [BLOCK_M, BLOCK_K]
    weight_desc,  # [N, K] in blocks [BLOCK_N, BLOCK_K]
    out_desc,  # [M, N] in blocks [BLOCK_M, BLOCK_N]
    bias_ptr,
    M,
    N,
    K,
    num_programs,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    STAGES: tl.constexpr,
    HAS_BIAS: tl.constexpr,
):
    num_tiles_m = tl.cdiv(M, BLOCK_M)
    num_tiles_n = tl.cdiv(N, BLOCK_N)
    for program in tl.range(tl.program_id(0), num_tiles_m * num_tiles_n, num_programs):
        tile_m, tile_n = tile_of(program, num_tiles_m, num_tiles_n, GROUP_M)
        row = tile_m * BLOCK_M
        col = tile_n * BLOCK_N
        acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for k in tl.range(0, K, BLOCK_K, num_stages=STAGES):
            x = x_desc.load([row, k])
            weight = weight_desc.load([col, k])
            acc = tl.dot(x, weight.T, acc)
        if HAS_BIAS:
            cols = col + tl.arange(0, BLOCK_N)
            acc += tl.load(bias_ptr + cols, mask=cols < N, other=0.0).to(tl.float32)[None, :]
        out_desc.store([row, col], acc.to(out_desc.dtype))


@dataclass(frozen=True)
class GemmTile:
    """Rows, columns and depth of a tile, warps and pipeline stages; ``tma`` selects the persistent kernel."""

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    tma: bool = False


# By the number of rows, up to and including. Few rows: narrow tiles and deep pipelines, to stream the weight.
SMALL_TILES = {
    16: GemmTile(16, 32, 128, 4, 5),
    32: GemmTile(32, 64, 128, 4, 4),
    128: GemmTile(64, 64, 128, 4, 3),
}
PLAIN_TILE = GemmTile(128, 128, 64, 8, 3)
# With the share of the tensor cores' rate that each may reach by its ratio of products to bytes of shared memory read.
TMA_TILES = {
    GemmTile(128, 256, 64, 8, 3, tma=True): 1.0,
    GemmTile(128, 128, 64, 8, 4, tma=True): 0.85,
    GemmTile(64, 128, 64, 4, 4, tma=True): 0.6,
}
CDNA_STAGES = 2  # 64 KiB of shared memory hold no more
FLOAT32_TILE = GemmTile(32, 64, 32, 4, 2)  # full float32 has no tensor cores: for exactness and not for speed
GROUP_M = 8


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``x[T, I] @ weight[O, I].T + bias[O]`` → ``[T, O]`` in x's dtype, accumulated in float32.

    Raises ValueError for shapes, dtypes or strides that the kernels cannot take.
    """
    if x.ndim != 2 or weight.ndim != 2 or x.shape[1] != weight.shape[1] or x.dtype != weight.dtype:
        raise ValueError(
            f"linear: x must be [T, I] and weight [O, I] alike, not {tuple(x.shape)} {x.dtype} "
            f"and {tuple(weight.shape)} {weight.dtype}"
        )
    require_product_dtype("linear", x)
    if bias is not None and (bias.shape != weight.shape[:1] or not bias.is_contiguous()):
        raise ValueError(f"linear: bias must be contiguous [{weight.shape[0]}], not {tuple(bias.shape)}")
    require_unit_stride("linear: x", x)
    require_unit_stride("linear: weight", weight)
    tile = choose_tile(x, weight)
    return run_tile(
        x, weight, bias, tile, choose_split(x.shape[0], weight.shape[0], x.shape[1], tile, sm_count(x.device))
    )


def choose_tile(x: Tensor, weight: Tensor) -> GemmTile:
    """The tile for these operands: by rows, and by whether the device and the strides allow TMA."""
    if x.dtype == torch.float32:
        return FLOAT32_TILE
    fitting = [tile for rows, tile in SMALL_TILES.items() if x.shape[0] <= rows]
    out_ready = weight.shape[0] * x.element_size() % 16 == 0
    if not fitting and has_tma(x.device) and tma_ready(x) and tma_ready(weight) and out_ready:
        return choose_tma_tile(x.shape[0], weight.shape[0], sm_count(x.device))
    tile = fitting[0] if fitting else PLAIN_TILE
    return replace(tile, num_stages=CDNA_STAGES) if architecture(x.device) == "cdna" else tile


def choose_tma_tile(num_rows: int, num_cols: int, num_sms: int) -> GemmTile:
    """The tile with the least time by waves: a large one where there are enough of them, else one that fills the machine."""

    def time(tile: GemmTile) -> float:
        tiles = ceil_div(num_rows, tile.block_m) * ceil_div(num_cols, tile.block_n)
        return ceil_div(tiles, num_sms) * tile.block_m * tile.block_n / TMA_TILES[tile]

    return min(TMA_TILES, key=time)


def choose_split(num_rows: int, num_cols: int, depth: int, tile: GemmTile, num_sms: int) -> int:
    """Into how many programs to cut K: two waves of programs at least, as long as the parts stay small against the weight."""
    if tile.tma:
        return 1
    tiles = ceil_div(num_rows, tile.block_m) * ceil_div(num_cols, tile.block_n)
    split = 1
    while split < 16 and tiles * split < 2 * num_sms and depth >= 8 * split * max(tile.block_k, 2 * num_rows):
        split *= 2
    return split


def has_tma(device: torch.device) -> bool:
    """Whether the tensor memory accelerator is there: NVIDIA's Hopper and later."""
    return device.type in ("cuda", "meta") and architecture(device) == "hopper"


def tma_ready(matrix: Tensor) -> bool:
    """Whether a descriptor can address ``matrix``: base and row stride in multiples of 16 bytes."""
    return matrix.stride(0) * matrix.element_size() % 16 == 0 and matrix.data_ptr() % 16 == 0


def run_tile(x: Tensor, weight: Tensor, bias: Tensor | None, tile: GemmTile, split_k: int) -> Tensor:
    """``linear`` with a given tile and split."""
    num_rows, depth = x.shape
    num_cols = weight.shape[0]
    out = torch.empty(num_rows, num_cols, dtype=x.dtype, device=x.device)
    if out.numel() == 0:
        return out
    tiles = ceil_div(num_rows, tile.block_m) * ceil_div(num_cols, tile.block_n)
    if tile.tma:
        num_programs = min(tiles, sm_count(x.device))
        launch(
            linear_tma_kernel,
            (num_programs,),
            TensorDescriptor.from_tensor(x, [tile.block_m, tile.block_k]),
            TensorDescriptor.from_tensor(weight, [tile.block_n, tile.block_k]),
            TensorDescriptor.from_tensor(out, [tile.block_m, tile.block_n]),
            bias,
            num_rows,
            num_cols,
            depth,
            num_programs,
            BLOCK_M=tile.block_m,
            BLOCK_N=tile.block_n,
            BLOCK_K=tile.block_k,
            GROUP_M=GROUP_M,
            STAGES=tile.num_stages,
            HAS_BIAS=bias is not None,
            num_warps=tile.num_warps,
            num_stages=tile.num_stages,
        )
        return out
    parts = torch.empty(split_k, num_rows, num_cols, dtype=torch.float32, device=x.device) if split_k > 1 else out
    launch(
        linear_kernel,
        (tiles, split_k),
        x,
        weight,
        bias,
        parts,
        num_rows,
        num_cols,
        depth,
        x.stride(0),
        weight.stride(0),
        BLOCK_M=tile.block_m,
        BLOCK_N=tile.block_n,
        BLOCK_K=tile.block_k,
        GROUP_M=GROUP_M,
        SPLIT_K=split_k,
        STAGES=tile.num_stages,
        HAS_BIAS=bias is not None and split_k == 1,
        EVEN_K=depth % tile.block_k == 0,
        PRECISION="ieee" if x.dtype == torch.float32 else None,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
    if split_k > 1:
        block_n = 512
        launch(
            sum_splits_kernel,
            (num_rows, ceil_div(num_cols, block_n)),
            parts,
            bias,
            out,
            num_rows,
            num_cols,
            SPLIT_K=split_k,
            BLOCK_N=block_n,
            HAS_BIAS=bias is not None,
            num_warps=4,
            num_stages=1,
        )
    return out


def compile_cases() -> list[CompileCase]:
    """Llama-3-8B's projections by batch size, one with a bias, an odd depth, and what machines without TMA launch."""
    cases: list[CompileCase] = []

    def add(
        name: str, rows: int, cols: int, depth: int, dtype: torch.dtype = torch.bfloat16, with_bias: bool = False
    ) -> None:
        x = torch.empty(rows, depth, dtype=dtype, device="meta")
        weight = torch.empty(cols, depth, dtype=dtype, device="meta")
        bias = torch.empty(cols, dtype=dtype, device="meta") if with_bias else None
        tile = choose_tile(x, weight)
        work = dict.fromkeys(("linear_kernel", "linear_tma_kernel"), gemm_work(tile, x.element_size()))
        targets = ("sm_90", "sm_100") if tile.tma else ("sm_80", "sm_90", "sm_100")
        cases.extend(capture(name, lambda: linear(x, weight, bias), work=work, targets=targets))

    def add_tile(name: str, tile: GemmTile, rows: int, targets: tuple[str, ...]) -> None:
        x = torch.empty(rows, 4096, dtype=torch.bfloat16, device="meta")
        weight = torch.empty(4096, 4096, dtype=torch.bfloat16, device="meta")
        cases.extend(
            capture(name, lambda: run_tile(x, weight, None, tile, 1), work=gemm_work(tile, 2), targets=targets)
        )

    for rows in (1, 32, 128, 256, 512, 4096):
        add(f"rows{rows}", rows, 4096, 4096)
    add("rows4096_bias", 4096, 6144, 4096, with_bias=True)
    add("rows1_bias", 1, 6144, 4096, with_bias=True)
    add("rows1_vocabulary", 1, 128256, 4096)
    add("rows1_k576", 1, 576, 576)
    add("float32", 64, 576, 576, torch.float32)
    add_tile("rows4096_without_tma", PLAIN_TILE, 4096, ("sm_80", "sm_90", "sm_100"))
    for rows, tile in {**SMALL_TILES, 4096: PLAIN_TILE}.items():
        add_tile(f"cdna_rows{rows}", replace(tile, num_stages=CDNA_STAGES), rows, ("gfx942",))
    return cases


def gemm_work(tile: GemmTile, itemsize: int) -> Work:
    """What one step along K costs: one product of tiles, and both tiles read once."""
    return Work(
        flops=2.0 * tile.block_m * tile.block_n * tile.block_k,
        bytes=float((tile.block_m + tile.block_n) * tile.block_k * itemsize),
        scope="loop",
    )
