"""Flash-Decoding (Dao et al., 2023): the keys of one request cut among several programs, and their results merged exactly.

Few sequences with long contexts leave most of a GPU idle when a program walks a whole context. Each split gives a partial
result and its log-sum-exp; a second kernel weighs them. A split without keys has log-sum-exp −inf and is not read.
"""

import torch
import triton
import triton.language as tl
from llmlab.kernels.attention_tile import Tile, attention_work, choose_tile, queries_per_tile
from llmlab.kernels.launch import launch
from llmlab.kernels.paged_kernel import check_attention, launch_paged_attention, meta_batch
from llmlab.kernels.spec import CompileCase, capture
from llmlab.kernels.tiles import architecture, ceil_div, next_power_of_2, sm_count
from torch import Tensor

MAX_SPLITS = 64


@triton.jit
def merge_splits_kernel(
    out_ptr,
    lse_ptr,
    partial_ptr,  # [rows, Hq, NUM_SPLITS, D]
    partial_lse_ptr,  # [rows, Hq, NUM_SPLITS], base 2
    query_start_loc_ptr,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    BY_REQUEST: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    STORE_LSE: tl.constexpr,
):
    row = tl.program_id(0)
    head = tl.program_id(1)
    token = row.to(tl.int64)
    if BY_REQUEST:
        request = row // BLOCK_Q
        query_start = tl.load(query_start_loc_ptr + request)
        query_len = tl.load(query_start_loc_ptr + request + 1) - query_start
        if (row % BLOCK_Q >= query_len) | (query_len > BLOCK_Q):
            return
        token = (query_start + row % BLOCK_Q).to(tl.int64)
    splits = (row.to(tl.int64) * NUM_HEADS + head) * NUM_SPLITS + tl.arange(0, NUM_SPLITS)
    dims = tl.arange(0, BLOCK_D)
    lse = tl.load(partial_lse_ptr + splits)
    highest = tl.max(lse, 0)
    weights = tl.math.exp2(lse - tl.where(highest == float("-inf"), 0.0, highest))
    mask = (lse > float("-inf"))[:, None] & (dims < HEAD_DIM)[None, :]
    partial = tl.load(partial_ptr + splits[:, None] * HEAD_DIM + dims[None, :], mask=mask, other=0.0)
    total = tl.sum(weights, 0)
    denominator = tl.where(total == 0.0, 1.0, total)
    out = tl.sum(partial * weights[:, None], 0) / denominator
    out_row = token * NUM_HEADS + head
    tl.store(out_ptr + out_row * HEAD_DIM + dims, out.to(out_ptr.dtype.element_ty), mask=dims < HEAD_DIM)
    if STORE_LSE:
        tl.store(lse_ptr + out_row, (highest + tl.math.log2(denominator)) * 0.6931471805599453)


def flash_decoding(
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
    num_splits: int | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """``paged_attention`` with the keys of every request cut into ``num_splits`` (a power of two; None: by the machine).

    Right for any batch, made for few queries on long contexts. Raises ValueError as ``paged_attention`` does.
    """
    check_attention(q, key_cache, value_cache, block_table, query_start_loc, seq_lens, scale, sliding_window, soft_cap)
    if num_splits is not None and (not 1 <= num_splits <= MAX_SPLITS or num_splits & (num_splits - 1)):
        raise ValueError(f"flash_decoding: num_splits must be a power of two up to {MAX_SPLITS}, not {num_splits}")
    num_tokens, num_heads, head_dim = q.shape
    num_reqs = seq_lens.shape[0]
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    lse = torch.empty(num_tokens, num_heads, dtype=torch.float32, device=q.device) if return_lse else None
    if out.numel():
        group = num_heads // key_cache.shape[2]
        tile = choose_tile(num_tokens, num_reqs, group, head_dim, q.dtype, architecture(q.device))
        if num_splits is None:
            num_splits = choose_splits(q, key_cache, block_table, num_reqs, sliding_window, tile)
        operands = (q, key_cache, value_cache, block_table, query_start_loc, seq_lens, scale, sliding_window, soft_cap)
        attend_in_splits(out, lse, *operands, tile, num_splits)
    return out if lse is None else (out, lse)


def choose_splits(
    q: Tensor,
    key_cache: Tensor,
    block_table: Tensor,
    num_reqs: int,
    sliding_window: int | None,
    tile: Tile,
    by_request: bool = False,
) -> int:
    """A power of two that gives every SM about four programs, as long as a split may still have four tiles of keys.

    How long the contexts are only the device knows; what the block table has room for is what counts here, and splits
    beyond a context's end cost little.
    """
    num_kv_heads = key_cache.shape[2]
    group = q.shape[1] // num_kv_heads
    blocks = num_reqs if by_request else ceil_div(q.shape[0], queries_per_tile(tile, group))
    programs = max(blocks, num_reqs) * num_kv_heads * ceil_div(group, tile.block_m)
    max_keys = block_table.shape[1] * key_cache.shape[1]
    if sliding_window is not None:
        max_keys = min(max_keys, sliding_window + queries_per_tile(tile, group))
    splits = 1
    while splits < MAX_SPLITS and programs * splits < 2 * sm_count(q.device) and max_keys >= 8 * splits * tile.block_n:
        splits *= 2
    return splits


def attend_in_splits(
    out: Tensor,
    lse: Tensor | None,
    q: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    scale: float,
    sliding_window: int | None,
    soft_cap: float | None,
    tile: Tile,
    num_splits: int,
    by_request: bool = False,
) -> None:
    """Launch the kernel with ``num_splits`` and, if there are several, the merge of their results into ``out`` and ``lse``."""
    operands = (q, key_cache, value_cache, block_table, query_start_loc, seq_lens, scale, sliding_window, soft_cap)
    if num_splits == 1:
        launch_paged_attention(out, lse, *operands, tile, by_request=by_request)
        return
    num_tokens, num_heads, head_dim = q.shape
    block_q = queries_per_tile(tile, num_heads // key_cache.shape[2])
    num_rows = seq_lens.shape[0] * block_q if by_request else num_tokens
    partial = torch.empty(num_rows, num_heads, num_splits, head_dim, dtype=torch.float32, device=q.device)
    partial_lse = torch.empty(num_rows, num_heads, num_splits, dtype=torch.float32, device=q.device)
    launch_paged_attention(partial, partial_lse, *operands, tile, num_splits, by_request)
    launch(
        merge_splits_kernel,
        (num_rows, num_heads),
        out,
        lse,
        partial,
        partial_lse,
        query_start_loc,
        NUM_HEADS=num_heads,
        HEAD_DIM=head_dim,
        BLOCK_D=next_power_of_2(head_dim),
        NUM_SPLITS=num_splits,
        BY_REQUEST=by_request,
        BLOCK_Q=block_q,
        STORE_LSE=lse is not None,
        num_warps=4,
        num_stages=1,
    )


def compile_cases() -> list[CompileCase]:
    """One long request, and a handful, with Llama-3-8B's and SmolLM2-135M's heads."""
    cases: list[CompileCase] = []
    for name, num_reqs, num_heads, num_kv_heads, head_dim in (
        ("llama3_8b_batch1", 1, 32, 8, 128),
        ("llama3_8b_batch8", 8, 32, 8, 128),
        ("smollm2_135m_batch1", 1, 9, 3, 64),
    ):
        args = meta_batch(num_reqs, num_reqs, num_heads, num_kv_heads, head_dim)
        tile = choose_tile(num_reqs, num_reqs, num_heads // num_kv_heads, head_dim, torch.bfloat16, "hopper")
        work = {"paged_attention_kernel": attention_work(tile, head_dim, 2)}
        cases += capture(
            name, lambda a=args, d=head_dim: flash_decoding(*a, d**-0.5), work=work, targets=("sm_90", "sm_100")
        )
    return cases
