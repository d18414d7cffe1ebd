"""The attention kernel: one for any mix of prefill chunks and decodes, paged or contiguous, whole or cut into splits.

Requests are found by bisecting query_start_loc, so that the grid depends on shapes alone and needs no host
synchronisation. Rows of keys are addressed through the block table one by one, in strides known at compile time; every
key that is not to be seen is loaded as zeros, because an unwritten slot may hold NaN.
"""

import torch
import triton
import triton.language as tl
from llmlab.kernels.attention_tile import Tile, attend_tile, find_request, queries_per_tile
from llmlab.kernels.launch import launch
from llmlab.kernels.tiles import LOG2_E, ceil_div, next_power_of_2, require_product_dtype, require_unit_stride
from torch import Tensor


@triton.jit
def load_kv_tile(
    cache_ptr,  # stands at this KV head of slot 0
    block_table_ptr,  # stands at this request's row
    keys,
    first_key,
    end_key,
    STRIDE_BLOCK: tl.constexpr,
    STRIDE_SLOT: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    MASKED: tl.constexpr,
):
    """The keys (or values) at positions ``keys[N]`` as [N, BLOCK_D]; with MASKED, zeros outside [first_key, end_key)."""
    dims = tl.arange(0, BLOCK_D)
    key_mask = (keys >= first_key) & (keys < end_key)
    if BLOCK_SIZE == 0:
        rows = keys.to(tl.int64) * STRIDE_SLOT
    else:
        if MASKED:
            blocks = tl.load(block_table_ptr + keys // BLOCK_SIZE, mask=key_mask, other=0).to(tl.int64)
        else:
            blocks = tl.load(block_table_ptr + keys // BLOCK_SIZE).to(tl.int64)
        rows = blocks * STRIDE_BLOCK + keys % BLOCK_SIZE * STRIDE_SLOT
    pointers = cache_ptr + rows[:, None] + dims[None, :]
    if MASKED:
        mask = key_mask[:, None]
        if HEAD_DIM < BLOCK_D:
            mask = mask & (dims < HEAD_DIM)[None, :]
        return tl.load(pointers, mask=mask, other=0.0)
    elif HEAD_DIM < BLOCK_D:
        return tl.load(pointers, mask=(dims < HEAD_DIM)[None, :], other=0.0)
    else:
        return tl.load(pointers)


@triton.jit
def fold_paged_tile(
    q,
    start,
    acc,
    row_max,
    row_sum,
    key_ptr,
    value_ptr,
    table_ptr,
    last_key,
    first_key,
    end_key,
    scale_log2,
    soft_cap,
    window,
    KEY_STRIDE_BLOCK: tl.constexpr,
    KEY_STRIDE_SLOT: tl.constexpr,
    VALUE_STRIDE_BLOCK: tl.constexpr,
    VALUE_STRIDE_SLOT: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFT_CAP: tl.constexpr,
    PRECISION: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Load the tile of keys at ``start`` and its values from their pages, and attend to it."""
    BLOCK_D: tl.constexpr = q.shape[1]
    keys = start + tl.arange(0, BLOCK_N)
    k = load_kv_tile(
        key_ptr,
        table_ptr,
        keys,
        first_key,
        end_key,
        KEY_STRIDE_BLOCK,
        KEY_STRIDE_SLOT,
        HEAD_DIM,
        BLOCK_D,
        BLOCK_SIZE,
        MASKED,
    )
    v = load_kv_tile(
        value_ptr,
        table_ptr,
        keys,
        first_key,
        end_key,
        VALUE_STRIDE_BLOCK,
        VALUE_STRIDE_SLOT,
        HEAD_DIM,
        BLOCK_D,
        BLOCK_SIZE,
        MASKED,
    )
    return attend_tile(
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
        HAS_WINDOW,
        HAS_SOFT_CAP,
        MASKED,
        PRECISION,
    )


@triton.jit(do_not_specialize=["num_reqs", "num_query_blocks", "shorter_than", "block_table_stride", "window"])
def paged_attention_kernel(
    out_ptr,  # [T, Hq, D]; with splits [rows, Hq, NUM_SPLITS, D] in float32
    lse_ptr,  # [T, Hq] in natural logarithms; with splits [rows, Hq, NUM_SPLITS] in base 2
    q_ptr,
    key_cache_ptr,
    value_cache_ptr,
    block_table_ptr,  # [R, blocks a request]; for contiguous keys, where each request's start in them, [R + 1]
    query_start_loc_ptr,
    seq_lens_ptr,
    num_reqs,
    num_query_blocks,
    shorter_than,  # leave out requests with fewer queries
    q_stride_token,
    q_stride_head,
    block_table_stride,
    scale_log2,
    soft_cap,
    window,
    KEY_STRIDE_BLOCK: tl.constexpr,
    KEY_STRIDE_SLOT: tl.constexpr,
    KEY_STRIDE_HEAD: tl.constexpr,
    VALUE_STRIDE_BLOCK: tl.constexpr,
    VALUE_STRIDE_SLOT: tl.constexpr,
    VALUE_STRIDE_HEAD: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEADS_PER_TILE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,  # 0: keys and values are contiguous, not paged
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    BY_REQUEST: tl.constexpr,  # one block a request, leaving out those with more queries; the rows of splits follow them
    HAS_WINDOW: tl.constexpr,
    HAS_SOFT_CAP: tl.constexpr,
    STORE_LSE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    BLOCK_Q: tl.constexpr = BLOCK_M // HEADS_PER_TILE
    # A narrow tile within a window meets few keys: one loop for all of them saves the registers of three.
    ALL_MASKED: tl.constexpr = HAS_WINDOW and BLOCK_M <= 16
    PARTS: tl.constexpr = (GROUP + HEADS_PER_TILE - 1) // HEADS_PER_TILE
    program = tl.program_id(0)
    part = program % PARTS
    kv_head = program // PARTS % NUM_KV_HEADS
    # Late queries see the most keys under the causal mask: they go first, so that the short programs fill the tail.
    query_block = num_query_blocks - 1 - program // (PARTS * NUM_KV_HEADS)
    if BY_REQUEST:
        request = query_block
    else:
        request = find_request(query_start_loc_ptr, query_block, num_reqs, BLOCK_Q)
    query_start = tl.load(query_start_loc_ptr + request)
    query_len = tl.load(query_start_loc_ptr + request + 1) - query_start
    first_query = 0
    if BY_REQUEST:
        if (query_len == 0) | (query_len > BLOCK_Q):
            return
    else:
        first_query = (query_block - query_start // BLOCK_Q - request) * BLOCK_Q
        if (first_query >= query_len) | (query_len < shorter_than):
            return
    if BLOCK_SIZE == 0:
        key_start = tl.load(block_table_ptr + request)
        seq_len = tl.load(block_table_ptr + request + 1) - key_start
    else:
        seq_len = tl.load(seq_lens_ptr + request)
    context_len = seq_len - query_len

    rows = tl.arange(0, BLOCK_M)
    dims = tl.arange(0, BLOCK_D)
    queries = first_query + rows // HEADS_PER_TILE
    heads = part * HEADS_PER_TILE + rows % HEADS_PER_TILE
    q_heads = (kv_head * GROUP + heads).to(tl.int64)
    row_mask = (queries < query_len) & (rows < BLOCK_Q * HEADS_PER_TILE) & (heads < GROUP)
    q_mask = row_mask[:, None] & (dims < HEAD_DIM)[None, :]
    tokens = (query_start + queries).to(tl.int64)
    out_tokens = tokens
    if BY_REQUEST and NUM_SPLITS > 1:
        out_tokens = request.to(tl.int64) * BLOCK_Q + queries
    q = tl.load(
        q_ptr + (tokens * q_stride_token + q_heads * q_stride_head)[:, None] + dims[None, :], mask=q_mask, other=0.0
    )

    # Tiles of keys [first_tile, left_end) meet the window's edge, [left_end, full_end) are seen by every row,
    # [full_end, end_key) meet the diagonal.
    last_key = context_len + queries
    end_key = tl.minimum(context_len + first_query + BLOCK_Q, seq_len)
    first_key = 0
    if HAS_WINDOW:
        first_key = tl.maximum(context_len + first_query - window + 1, 0)
    first_tile = first_key // BLOCK_N * BLOCK_N
    split = 0
    if NUM_SPLITS > 1:
        split = tl.program_id(1)
    out_rows = (out_tokens * (NUM_KV_HEADS * GROUP) + q_heads) * NUM_SPLITS + split
    if NUM_SPLITS > 1:
        tiles_per_split = tl.cdiv(tl.cdiv(end_key - first_tile, BLOCK_N), NUM_SPLITS)
        first_tile += split * tiles_per_split * BLOCK_N
        end_key = tl.minimum(end_key, first_tile + tiles_per_split * BLOCK_N)
        if first_tile >= end_key:
            tl.store(lse_ptr + out_rows, tl.full([BLOCK_M], float("-inf"), tl.float32), mask=row_mask)
            return
    full_end = tl.minimum(context_len + first_query + 1, end_key) // BLOCK_N * BLOCK_N
    full_end = tl.maximum(full_end, first_tile)
    left_end = first_tile
    if ALL_MASKED:
        full_end = first_tile
    elif HAS_WINDOW:
        left_end = tl.cdiv(context_len + first_query + BLOCK_Q - window, BLOCK_N) * BLOCK_N
        left_end = tl.minimum(tl.maximum(left_end, first_tile), full_end)

    key_ptr = key_cache_ptr + kv_head.to(tl.int64) * KEY_STRIDE_HEAD
    value_ptr = value_cache_ptr + kv_head.to(tl.int64) * VALUE_STRIDE_HEAD
    table_ptr = block_table_ptr + request.to(tl.int64) * block_table_stride
    if BLOCK_SIZE == 0:
        key_ptr += key_start.to(tl.int64) * KEY_STRIDE_SLOT
        value_ptr += key_start.to(tl.int64) * VALUE_STRIDE_SLOT
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    if HAS_WINDOW and not ALL_MASKED:
        for start in tl.range(first_tile, left_end, BLOCK_N, num_stages=STAGES):
            acc, row_max, row_sum = fold_paged_tile(
                q,
                start,
                acc,
                row_max,
                row_sum,
                key_ptr,
                value_ptr,
                table_ptr,
                last_key,
                first_key,
                end_key,
                scale_log2,
                soft_cap,
                window,
                KEY_STRIDE_BLOCK,
                KEY_STRIDE_SLOT,
                VALUE_STRIDE_BLOCK,
                VALUE_STRIDE_SLOT,
                HEAD_DIM,
                BLOCK_SIZE,
                BLOCK_N,
                HAS_WINDOW,
                HAS_SOFT_CAP,
                PRECISION,
                MASKED=True,
            )
    if not ALL_MASKED:
        for start in tl.range(left_end, full_end, BLOCK_N, num_stages=STAGES):
            acc, row_max, row_sum = fold_paged_tile(
                q,
                start,
                acc,
                row_max,
                row_sum,
                key_ptr,
                value_ptr,
                table_ptr,
                last_key,
                first_key,
                end_key,
                scale_log2,
                soft_cap,
                window,
                KEY_STRIDE_BLOCK,
                KEY_STRIDE_SLOT,
                VALUE_STRIDE_BLOCK,
                VALUE_STRIDE_SLOT,
                HEAD_DIM,
                BLOCK_SIZE,
                BLOCK_N,
                HAS_WINDOW,
                HAS_SOFT_CAP,
                PRECISION,
                MASKED=False,
            )
    for start in tl.range(full_end, end_key, BLOCK_N, num_stages=STAGES):
        acc, row_max, row_sum = fold_paged_tile(
            q,
            start,
            acc,
            row_max,
            row_sum,
            key_ptr,
            value_ptr,
            table_ptr,
            last_key,
            first_key,
            end_key,
            scale_log2,
            soft_cap,
            window,
            KEY_STRIDE_BLOCK,
            KEY_STRIDE_SLOT,
            VALUE_STRIDE_BLOCK,
            VALUE_STRIDE_SLOT,
            HEAD_DIM,
            BLOCK_SIZE,
            BLOCK_N,
            HAS_WINDOW,
            HAS_SOFT_CAP,
            PRECISION,
            MASKED=True,
        )

    # A row that saw no key gives 0 and a log-sum-exp of -inf.
    denominator = tl.where(row_sum == 0.0, 1.0, row_sum)
    out = acc / denominator[:, None]
    tl.store(out_ptr + out_rows[:, None] * HEAD_DIM + dims[None, :], out.to(out_ptr.dtype.element_ty), mask=q_mask)
    if STORE_LSE:
        lse = row_max + tl.math.log2(denominator)
        if NUM_SPLITS == 1:
            lse *= 0.6931471805599453
        tl.store(lse_ptr + out_rows, lse, mask=row_mask)


def launch_paged_attention(
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
    num_splits: int = 1,
    by_request: bool = False,
    shorter_than: int = 0,
    paged: bool = True,
) -> None:
    """Launch the kernel with one tile; with splits, ``out`` and ``lse`` are the partial results that it describes.

    ``by_request`` computes only requests whose queries fit one tile (``queries_per_tile``); ``shorter_than`` leaves out
    those with fewer queries. Without ``paged`` the caches are ``[1, S, Hkv, D]``, and ``block_table`` says where each request
    starts in them.
    """
    num_tokens, num_heads, head_dim = q.shape
    num_reqs = seq_lens.shape[0]
    _, block_size, num_kv_heads, _ = key_cache.shape
    group = num_heads // num_kv_heads
    heads_per_tile = min(group, tile.block_m)
    num_query_blocks = num_reqs if by_request else num_tokens // queries_per_tile(tile, group) + num_reqs
    cap_log2, scale_log2 = 0.0, scale * LOG2_E
    if soft_cap is not None:
        cap_log2, scale_log2 = soft_cap * LOG2_E, 2.0 * scale / soft_cap * LOG2_E
    limit = {} if tile.max_registers is None else {"maxnreg": tile.max_registers}
    launch(
        paged_attention_kernel,
        (num_query_blocks * num_kv_heads * ceil_div(group, heads_per_tile), num_splits),
        out,
        lse,
        q,
        key_cache,
        value_cache,
        block_table,
        query_start_loc,
        seq_lens,
        num_reqs,
        num_query_blocks,
        shorter_than,
        q.stride(0),
        q.stride(1),
        block_table.stride(0),
        scale_log2,
        cap_log2,
        sliding_window or 0,
        KEY_STRIDE_BLOCK=key_cache.stride(0),
        KEY_STRIDE_SLOT=key_cache.stride(1),
        KEY_STRIDE_HEAD=key_cache.stride(2),
        VALUE_STRIDE_BLOCK=value_cache.stride(0),
        VALUE_STRIDE_SLOT=value_cache.stride(1),
        VALUE_STRIDE_HEAD=value_cache.stride(2),
        NUM_KV_HEADS=num_kv_heads,
        GROUP=group,
        HEADS_PER_TILE=heads_per_tile,
        HEAD_DIM=head_dim,
        BLOCK_D=max(16, next_power_of_2(head_dim)),
        BLOCK_SIZE=block_size if paged else 0,
        BLOCK_M=tile.block_m,
        BLOCK_N=tile.block_n,
        STAGES=tile.num_stages,
        NUM_SPLITS=num_splits,
        BY_REQUEST=by_request,
        HAS_WINDOW=sliding_window is not None,
        HAS_SOFT_CAP=soft_cap is not None,
        STORE_LSE=lse is not None,
        PRECISION="ieee" if q.dtype == torch.float32 else None,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        **limit,
    )


def check_attention(
    q: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    scale: float,
    sliding_window: int | None,
    soft_cap: float | None,
) -> None:
    """Raise ValueError unless the arguments of ``paged_attention`` belong together."""
    if q.ndim != 3 or key_cache.ndim != 4 or value_cache.shape != key_cache.shape or key_cache.shape[3] != q.shape[2]:
        raise ValueError(
            f"paged_attention: q must be [T, Hq, D] and both caches [N, B, Hkv, D], not {tuple(q.shape)}, "
            f"{tuple(key_cache.shape)} and {tuple(value_cache.shape)}"
        )
    require_product_dtype("paged_attention", q)
    if not key_cache.shape[2] or q.shape[1] % key_cache.shape[2]:
        raise ValueError(f"paged_attention: {q.shape[1]} query heads cannot share {key_cache.shape[2]} KV heads evenly")
    if key_cache.dtype != q.dtype or value_cache.dtype != q.dtype:
        raise ValueError(f"paged_attention: q is {q.dtype}, the caches are {key_cache.dtype} and {value_cache.dtype}")
    num_reqs = seq_lens.shape[0]
    if block_table.ndim != 2 or block_table.shape[0] < num_reqs or query_start_loc.shape != (num_reqs + 1,):
        raise ValueError(
            f"paged_attention: for {num_reqs} requests, block_table must have their rows and query_start_loc "
            f"{num_reqs + 1} entries, not {tuple(block_table.shape)} and {tuple(query_start_loc.shape)}"
        )
    for name, tensor in (
        ("q", q),
        ("key_cache", key_cache),
        ("value_cache", value_cache),
        ("block_table", block_table),
        ("query_start_loc", query_start_loc),
        ("seq_lens", seq_lens),
    ):
        require_unit_stride(f"paged_attention: {name}", tensor)
    for name, cache in (("key_cache", key_cache), ("value_cache", value_cache)):
        if cache.shape[1] * cache.stride(1) >= 2**31:
            raise ValueError(f"paged_attention: a block of {name} spans 2^31 elements or more")
    if not scale > 0.0:
        raise ValueError(f"paged_attention: scale must be positive, not {scale}")
    if sliding_window is not None and sliding_window < 1:
        raise ValueError(f"paged_attention: sliding_window must be at least 1, not {sliding_window}")
    if soft_cap is not None and not soft_cap > 0.0:
        raise ValueError(f"paged_attention: soft_cap must be positive, not {soft_cap}")


def meta_batch(
    num_tokens: int,
    num_reqs: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    block_size: int = 16,
    dtype: torch.dtype = torch.bfloat16,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """(q, key_cache, value_cache, block_table, query_start_loc, seq_lens) on the meta device, q being a view of qkv."""
    qkv = torch.empty(num_tokens, num_heads + 2 * num_kv_heads, head_dim, dtype=dtype, device="meta")
    cache = torch.empty(2, 4096, block_size, num_kv_heads, head_dim, dtype=dtype, device="meta")
    block_table = torch.empty(num_reqs, 512, dtype=torch.int32, device="meta")
    query_start_loc = torch.empty(num_reqs + 1, dtype=torch.int32, device="meta")
    seq_lens = torch.empty(num_reqs, dtype=torch.int32, device="meta")
    return qkv[:, :num_heads], cache[0], cache[1], block_table, query_start_loc, seq_lens
