"""Healthy kernels to break: paged attention, RMSNorm with a residual, and the KV-cache write, each as small as it can be."""

import triton
import triton.language as tl


@triton.jit
def find_request(start_ptr, query_block, num_reqs, BLOCK_Q: tl.constexpr):
    low = 0
    high = num_reqs
    while low < high:
        middle = (low + high) // 2
        first_block = tl.load(start_ptr + middle) // BLOCK_Q + middle
        if first_block <= query_block:
            low = middle + 1
        else:
            high = middle
    return low - 1


@triton.jit
def attention(
    out_ptr,
    q_ptr,
    key_ptr,
    value_ptr,
    table_ptr,
    start_ptr,
    len_ptr,
    scale_log2,
    num_reqs,
    table_stride,
    q_stride,
    out_stride,
    block_stride,
    slot_stride,
    head_stride,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    BLOCK_Q: tl.constexpr = BLOCK_M // GROUP
    block = tl.program_id(0)
    kv_head = tl.program_id(1)
    request = find_request(start_ptr, block, num_reqs, BLOCK_Q)
    start = tl.load(start_ptr + request)
    query_len = tl.load(start_ptr + request + 1) - start
    local = block - (start // BLOCK_Q + request)
    if local * BLOCK_Q >= query_len:
        return
    seq_len = tl.load(len_ptr + request)
    context = seq_len - query_len
    m = tl.arange(0, BLOCK_M)
    d = tl.arange(0, D)
    n = tl.arange(0, BLOCK_N)
    query = local * BLOCK_Q + m // GROUP
    head = m % GROUP
    row_mask = query < query_len
    q_rows = (start + query).to(tl.int64) * q_stride + (kv_head * GROUP + head) * D
    q = tl.load(q_ptr + q_rows[:, None] + d[None, :], mask=row_mask[:, None], other=0.0)
    row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, D], tl.float32)
    table = table_ptr + request.to(tl.int64) * table_stride
    end = tl.minimum(context + (local + 1) * BLOCK_Q, seq_len)
    full_end = (context + local * BLOCK_Q + 1) // BLOCK_N * BLOCK_N
    keys = key_ptr + kv_head * head_stride
    values = value_ptr + kv_head * head_stride
    for tile in tl.range(0, full_end, BLOCK_N):
        kn = tile + n
        rows = tl.load(table + kn // BLOCK_SIZE).to(tl.int64) * block_stride + (kn % BLOCK_SIZE) * slot_stride
        k = tl.load(keys + rows[None, :] + d[:, None])
        v = tl.load(values + rows[:, None] + d[None, :])
        score = tl.dot(q, k) * scale_log2
        new_max = tl.maximum(row_max, tl.max(score, 1))
        p = tl.math.exp2(score - new_max[:, None])
        alpha = tl.math.exp2(row_max - new_max)
        row_sum = row_sum * alpha + tl.sum(p, 1)
        acc = tl.dot(p.to(v.dtype), v, acc * alpha[:, None])
        row_max = new_max
    for tile in tl.range(full_end, end, BLOCK_N):
        kn = tile + n
        seen = kn < end
        pages = tl.load(table + kn // BLOCK_SIZE, mask=seen, other=0).to(tl.int64)
        rows = pages * block_stride + (kn % BLOCK_SIZE) * slot_stride
        k = tl.load(keys + rows[None, :] + d[:, None], mask=seen[None, :], other=0.0)
        v = tl.load(values + rows[:, None] + d[None, :], mask=seen[:, None], other=0.0)
        score = tl.dot(q, k) * scale_log2
        score = tl.where((kn[None, :] <= context + query[:, None]) & seen[None, :], score, float("-inf"))
        new_max = tl.maximum(row_max, tl.max(score, 1))
        p = tl.math.exp2(score - new_max[:, None])
        alpha = tl.math.exp2(row_max - new_max)
        row_sum = row_sum * alpha + tl.sum(p, 1)
        acc = tl.dot(p.to(v.dtype), v, acc * alpha[:, None])
        row_max = new_max
    out_rows = (start + query).to(tl.int64) * out_stride + (kv_head * GROUP + head) * D
    out = (acc / row_sum[:, None]).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + out_rows[:, None] + d[None, :], out, mask=row_mask[:, None])


@triton.jit
def rms_norm(x_ptr, residual_ptr, weight_ptr, out_ptr, length, stride, eps, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    i = tl.arange(0, BLOCK)
    mask = i < length
    x = tl.load(x_ptr + row * stride + i, mask=mask, other=0.0).to(tl.float32)
    h = x + tl.load(residual_ptr + row * stride + i, mask=mask, other=0.0).to(tl.float32)
    tl.store(residual_ptr + row * stride + i, h.to(residual_ptr.dtype.element_ty), mask=mask)
    variance = tl.sum(h * h, 0) / length
    weight = tl.load(weight_ptr + i, mask=mask, other=0.0).to(tl.float32)
    out = (h * tl.rsqrt(variance + eps) * weight).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + row * stride + i, out, mask=mask)


@triton.jit
def write_cache(k_ptr, cache_ptr, slot_ptr, length, stride, BLOCK: tl.constexpr):
    token = tl.program_id(0)
    slot = tl.load(slot_ptr + token)
    if slot < 0:
        return
    i = tl.arange(0, BLOCK)
    mask = i < length
    k = tl.load(k_ptr + token * length + i, mask=mask)
    tl.store(cache_ptr + slot.to(tl.int64) * stride + i, k, mask=mask)
