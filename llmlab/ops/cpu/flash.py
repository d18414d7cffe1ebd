"""Attention of many queries of one request: prompts and chunks of them, in tiles, with the matrix product's inner loops.

First the keys and values that the request sees are laid out like weights (:mod:`llmlab.ops.cpu.panels`): a key is an output
feature of q · kᵀ, a value an input feature of p · v. Then each item of work, 32 queries of one head, goes over its keys in
tiles with an online softmax (FlashAttention-2: Dao 2023, arXiv:2307.08691, algorithm 1). Never a matrix of all scores.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from llmlab.ops.cpu import amx, simd
from llmlab.ops.cpu.cast import to_float32
from llmlab.ops.cpu.memory import empty
from llmlab.ops.cpu.parallel import arg, kernel, number, take
from llmlab.ops.cpu.tiles import panel_tile

QUERIES = 32  # of one head together
FEWEST = 17  # below so many queries of a request, :mod:`llmlab.ops.cpu.attention` is faster
_PAD = 32  # keys are laid out in multiples of it
_LOG2_E = math.log2(math.e)
_HEADER = 64  # bytes of a plan before its rows
_ROW = 128  # bytes of a request's row
FEW = 24  # where in the header the number of tokens left over stands


@dataclass(frozen=True)
class Plan:
    """Which requests of a batch are attended to in tiles, and which tokens are left over.

    A kernel writes it and kernels read it, so that a recorded step finds a new batch's plan in the old place. Sizes are what a
    batch of this shape can need at most.

    Attributes:
        words: int64; a header of four counts (requests in tiles, their keys laid out with padding, their blocks of queries,
            tokens left over), then a row a request: first query, number of queries, sequence length, row of the block table,
            first key laid out (a multiple of 32), where its keys begin in the laid-out buffer, first item of the layout,
            first block of queries; and its tile configuration.
        few: ``[most tokens left over]`` int64, which these are.
        most_keys: that can be laid out.
    """

    words: Tensor
    few: Tensor
    most_keys: int

    @staticmethod
    def of(query_start_loc: Tensor, seq_lens: Tensor, tokens: int, longest: int, window: int | None) -> Plan:
        """The plan of a batch of ``tokens`` tokens whose sequences have at most ``longest``."""
        num_reqs = seq_lens.shape[0]
        most = min(num_reqs, tokens // FEWEST)
        words = empty(((_HEADER + most * _ROW) // 8,), torch.int64)
        few = empty((min(tokens, num_reqs * (FEWEST - 1)),), torch.int64)
        _plan().serial(
            query_start_loc.data_ptr(), seq_lens.data_ptr(), num_reqs, window or 0, words.data_ptr(), few.data_ptr()
        )
        return Plan(words, few, most * -(-longest // _PAD) * _PAD)


@kernel("qqqqqq")
def _plan() -> Callable[[int], None]:
    pad, queries, fewest, header, row_bytes = _PAD, QUERIES, FEWEST, _HEADER, _ROW

    def body(p: int) -> None:
        query_start_loc, seq_lens, num_reqs, window = arg(p, 0), arg(p, 1), arg(p, 2), arg(p, 3)
        plan, few = arg(p, 4), arg(p, 5)
        row = plan + header
        rows, keys, blocks, count = 0, 0, 0, 0
        for r in range(num_reqs):
            start, end = simd.load_int32(query_start_loc + 4 * r), simd.load_int32(query_start_loc + 4 * r + 4)
            length, n = simd.load_int32(seq_lens + 4 * r), end - start
            if n < fewest:
                for token in range(start, end):
                    simd.store_int64(few + 8 * count, token)
                    count += 1
                continue
            first = max(length - n + 1 - window, 0) // pad * pad if window > 0 else 0
            simd.store_int64(row, start)
            simd.store_int64(row + 8, n)
            simd.store_int64(row + 16, length)
            simd.store_int64(row + 24, r)
            simd.store_int64(row + 32, first)
            simd.store_int64(row + 40, keys)
            simd.store_int64(row + 48, keys // pad)
            simd.store_int64(row + 56, blocks)
            amx.write_config(row + 64, min(n, queries) - amx.BLOCK)
            rows, row = rows + 1, row + row_bytes
            keys += (length - first + pad - 1) // pad * pad
            blocks += (n + queries - 1) // queries
        simd.store_int64(plan, rows)
        simd.store_int64(plan + 8, keys)
        simd.store_int64(plan + 16, blocks)
        simd.store_int64(plan + 24, count)

    return body


@kernel("qqqqqqqqqq")
def _lay_out(kind: str, pairs: int, head_dim: int) -> Callable[[int], None]:
    """One item: 32 keys and values of one KV head. ``pairs``: bfloat16 as it is, in pairs; otherwise widened to float32."""
    size = simd.itemsize(kind)
    packed = 2 if pairs else 4
    features = 2 * simd.LANES if pairs else simd.LANES  # of one transposed square
    lanes, pad, header, row_bytes = simd.LANES, _PAD, _HEADER, _ROW

    def body(p: int) -> None:
        key_cache, value_cache, block_size = arg(p, 0), arg(p, 1), arg(p, 2)
        block_stride, slot_stride, block_table, table_stride = arg(p, 3), arg(p, 4), arg(p, 5), arg(p, 6)
        plan, heads, keys_out = arg(p, 7), arg(p, 8), arg(p, 9)
        num_reqs, total_keys, rows = simd.load_int64(plan), simd.load_int64(plan + 8), plan + header
        values_out = keys_out + heads * total_keys * head_dim * packed
        offsets = simd.scratch(256)
        while True:
            item = take(p, 1)
            if item >= total_keys // pad * heads:
                break
            head, tile = item % heads, item // heads
            request = 0
            while request + 1 < num_reqs and simd.load_int64(rows + (request + 1) * row_bytes + 48) <= tile:
                request += 1
            row = rows + request * row_bytes
            length, table_row = simd.load_int64(row + 16), simd.load_int64(row + 24)
            first, base = simd.load_int64(row + 32), simd.load_int64(row + 40)
            padded = (length - first + pad - 1) // pad * pad
            local = (tile - simd.load_int64(row + 48)) * pad  # key of this tile, from the request's first laid-out one
            table = block_table + 4 * table_stride * table_row
            for j in range(pad):
                key = min(first + local + j, length - 1)
                block = simd.load_int32(table + 4 * (key // block_size))
                at = block * block_stride + key % block_size * slot_stride + head * head_dim * size
                simd.store_int64(offsets + 8 * j, at)
            own = (head * total_keys + base) * head_dim * packed
            for j in range(0, pad, lanes):
                for i in range(0, head_dim, features):
                    target = keys_out + own + (local + j) * head_dim * packed + i * lanes * packed
                    simd.transpose("f32" if pairs else kind, key_cache + i * size, offsets + 8 * j, target)
            valid = min(length - first - local, pad)
            for i in range(0, head_dim, lanes):
                target = values_out + own + (i * padded + local * lanes) * packed
                if pairs:
                    for j in range(0, pad, 2):
                        even = value_cache + simd.load_int64(offsets + 8 * j) + i * size if j < valid else 0
                        odd = value_cache + simd.load_int64(offsets + 8 * j + 8) + i * size if j + 1 < valid else 0
                        simd.interleave(even, odd, target + j * lanes * packed)
                else:
                    for j in range(pad):
                        value = simd.splat(np.float32(0.0))
                        if j < valid:
                            value = simd.load(kind, value_cache + simd.load_int64(offsets + 8 * j) + i * size)
                        simd.store("f32", target + j * lanes * packed, value)

    return body


@kernel("qqqqqqdqdqq")
def _attend(method: str, kind: str, head_dim: int) -> Callable[[int], None]:
    """One item: 32 queries of one head (the last ones once more where their number is no multiple of 32).

    method: "amx" or "bf16dot" (laid out in pairs), or "f32". kind: of out.
    """
    on_tiles, pairs = method == "amx", method != "f32"
    packed = 2 if pairs else 4
    weight_kind, degree = ("bf16", 4) if pairs else ("f32", 6)
    tile = 128 if pairs else 64  # keys
    size, lanes, pad, queries, header, row_bytes = simd.itemsize(kind), simd.LANES, _PAD, QUERIES, _HEADER, _ROW
    dim_panels = head_dim // simd.LANES
    together = 2 if dim_panels % 2 == 0 and simd.cpu_has("avx512f") else 1
    key_panels, rows_together = (2, 8) if simd.cpu_has("avx512f") else (1, 4)
    scores_bytes, sums_bytes, weights_bytes = queries * tile * 4, queries * head_dim * 4, queries * tile * packed
    inner_bytes = head_dim * simd.LANES * packed

    def body(p: int) -> None:
        q, q_stride, keys, plan, heads, per_kv_head = arg(p, 0), arg(p, 1), arg(p, 2), arg(p, 3), arg(p, 4), arg(p, 5)
        scale, window, soft_cap = np.float32(number(p, 6)), arg(p, 7), np.float32(number(p, 8))
        out, lse = arg(p, 9), arg(p, 10)
        num_reqs, total_keys, blocks = simd.load_int64(plan), simd.load_int64(plan + 8), simd.load_int64(plan + 16)
        table, values = plan + header, keys + heads // per_kv_head * total_keys * head_dim * packed
        scores, sums, weights = simd.scratch(scores_bytes), simd.scratch(sums_bytes), simd.scratch(weights_bytes)
        highs, highs_now, shrinks, totals = simd.scratch(128), simd.scratch(128), simd.scratch(128), simd.scratch(128)
        low, zero, one = np.float32(-np.inf), np.float32(0.0), np.float32(1.0)
        lowest = np.float32(-1e30)  # of a query that has seen no key yet: finite, so that its weights come out 0
        factor = np.float32(_LOG2_E) if soft_cap > zero else scale * np.float32(_LOG2_E)
        if not pairs:
            weights = scores  # overwritten in place
        while True:
            item = take(p, 1)
            if item >= blocks * heads:
                break
            head, block = item % heads, blocks - 1 - item // heads  # late queries see more keys: they go first
            request = num_reqs - 1
            while simd.load_int64(table + request * row_bytes + 56) > block:
                request -= 1
            row = table + request * row_bytes
            begin, num_queries, length = simd.load_int64(row), simd.load_int64(row + 8), simd.load_int64(row + 16)
            first, base = simd.load_int64(row + 32), simd.load_int64(row + 40)
            padded = (length - first + pad - 1) // pad * pad
            start = max(min((block - simd.load_int64(row + 56)) * queries, num_queries - queries), 0)
            rows = min(num_queries, queries)
            position = length - num_queries + start  # of the first query
            x = q + (begin + start) * q_stride + head * head_dim * (2 if pairs else 4)
            own = (head // per_kv_head * total_keys + base) * head_dim * packed
            for i in range(0, sums_bytes, 64):
                simd.store("f32", sums + i, simd.splat(zero))
            for i in range(0, 128, 64):
                simd.store("f32", highs + i, simd.splat(lowest))
                simd.store("f32", totals + i, simd.splat(zero))
            if on_tiles:
                amx.configure(row + 64)
            from_key = max(first, (position + 1 - window) // pad * pad) if window > 0 else first
            for k in range(from_key, position + rows, tile):
                n = min((position + rows - k + pad - 1) // pad * pad, tile)
                local = k - first
                for j in range(0, n, pad):
                    wj, sj = keys + own + (local + j) * head_dim * packed, scores + 4 * j
                    if on_tiles:
                        amx.product(2, 2, 0, 0, wj, inner_bytes, x, q_stride, head_dim, sj, 4 * tile)
                    else:
                        for i in range(0, pad, key_panels * lanes):
                            wi, si = wj + i * head_dim * packed, sj + 4 * i
                            for r in range(0, rows - rows % rows_together, rows_together):
                                xr, sr = x + r * q_stride, si + r * 4 * tile
                                panel_tile(
                                    method,
                                    key_panels,
                                    rows_together,
                                    1,
                                    0,
                                    "f32",
                                    wi,
                                    inner_bytes,
                                    xr,
                                    q_stride,
                                    head_dim,
                                    0,
                                    sr,
                                    4 * tile,
                                )
                            for r in range(rows - rows % rows_together, rows):
                                xr, sr = x + r * q_stride, si + r * 4 * tile
                                panel_tile(
                                    method,
                                    key_panels,
                                    1,
                                    1,
                                    0,
                                    "f32",
                                    wi,
                                    inner_bytes,
                                    xr,
                                    q_stride,
                                    head_dim,
                                    0,
                                    sr,
                                    4 * tile,
                                )
                # the highest score of each query so far, in units of ln 2, so that weights are powers of 2
                for r in range(rows):
                    mine = scores + r * tile * 4
                    seen = min(position + r + 1 - k, n)  # keys of this tile that the query sees: [hidden, seen)
                    hidden = max(position + r + 1 - window - k, 0) if window > 0 else 0
                    top = simd.splat(low)
                    for j in range(0, n, lanes):
                        s = simd.load("f32", mine + 4 * j)
                        if soft_cap > zero:
                            s = simd.capped(s * simd.splat(scale), soft_cap)
                        if j + lanes > seen or j < hidden:
                            s = simd.keep_from(simd.keep_first(s, seen - j, low), hidden - j, low)
                        if soft_cap > zero or j + lanes > seen or j < hidden:
                            simd.store("f32", mine + 4 * j, s)
                        top = simd.maximum(s, top)
                    high = max(simd.load_one("f32", highs + 4 * r), simd.highest(top) * factor)
                    simd.store("f32", highs_now + 4 * r, high)
                for r in range(0, queries * 4, 64):
                    now = simd.load("f32", highs_now + r)
                    shrink = simd.exp2(6, simd.load("f32", highs + r) - now)
                    simd.store("f32", shrinks + r, shrink)
                    simd.store("f32", highs + r, now)
                    simd.store("f32", totals + r, simd.load("f32", totals + r) * shrink)
                for r in range(rows):
                    mine, high = scores + r * tile * 4, simd.load_one("f32", highs + 4 * r)
                    below, factors = simd.splat(-high), simd.splat(factor)
                    summed = simd.splat(zero)
                    for j in range(0, n, lanes):
                        weight = simd.exp2(degree, simd.fma(simd.load("f32", mine + 4 * j), factors, below))
                        simd.store(weight_kind, weights + (r * tile + j) * packed, weight)
                        summed = summed + weight
                    simd.store("f32", totals + 4 * r, simd.load_one("f32", totals + 4 * r) + simd.total(summed))
                    shrink = simd.load_one("f32", shrinks + 4 * r)
                    if shrink != one:
                        for i in range(r * head_dim * 4, (r + 1) * head_dim * 4, 64):
                            simd.store("f32", sums + i, simd.load("f32", sums + i) * simd.splat(shrink))
                for i in range(0, dim_panels, together):
                    wi = values + own + (i * padded + local) * lanes * packed
                    at, stride, width = sums + i * 64, head_dim * 4, padded * lanes * packed
                    if on_tiles:
                        amx.product(2, together, 1, 0, wi, width, weights, tile * packed, n, at, stride)
                    else:
                        for r in range(0, rows - rows % rows_together, rows_together):
                            wr, sr = weights + r * tile * packed, at + r * stride
                            panel_tile(
                                method,
                                together,
                                rows_together,
                                1,
                                0,
                                "+f32",
                                wi,
                                width,
                                wr,
                                tile * packed,
                                n,
                                0,
                                sr,
                                stride,
                            )
                        for r in range(rows - rows % rows_together, rows):
                            wr, sr = weights + r * tile * packed, at + r * stride
                            panel_tile(
                                method, together, 1, 1, 0, "+f32", wi, width, wr, tile * packed, n, 0, sr, stride
                            )
            for r in range(rows):
                token = begin + start + r
                total = simd.load_one("f32", totals + 4 * r)
                inverse = simd.splat(one / total)
                for i in range(0, head_dim, lanes):
                    value = simd.load("f32", sums + (r * head_dim + i) * 4) * inverse
                    simd.store(kind, out + ((token * heads + head) * head_dim + i) * size, value)
                if lse != 0:
                    natural = math.log(total) + simd.load_one("f32", highs + 4 * r) / _LOG2_E
                    simd.store("f32", lse + (token * heads + head) * 4, np.float32(natural))
        if on_tiles:
            amx.release()

    return body


def attend(
    plan: Plan,
    q: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    scale: float,
    sliding_window: int | None,
    soft_cap: float | None,
    out: Tensor,
    lse: Tensor | None,
) -> None:
    """Attention of the plan's requests, into their rows of ``out`` (contiguous) and ``lse``. The scale is positive."""
    _, num_heads, head_dim = q.shape
    _, block_size, num_kv_heads, _ = key_cache.shape
    kind, size = simd.KINDS[q.dtype], q.element_size()
    method = _method(q.dtype, head_dim)
    pairs = method != "f32"
    if not pairs:
        q = to_float32(q.flatten(1))
    laid_out = empty((2, num_kv_heads, plan.most_keys, head_dim), torch.bfloat16 if pairs else torch.float32)
    _lay_out(kind, int(pairs), head_dim).parallel(
        key_cache.data_ptr(),
        value_cache.data_ptr(),
        block_size,
        key_cache.stride(0) * size,
        key_cache.stride(1) * size,
        block_table.data_ptr(),
        block_table.stride(0),
        plan.words.data_ptr(),
        num_kv_heads,
        laid_out.data_ptr(),
    )
    _attend(method, kind, head_dim).parallel(
        q.data_ptr(),
        q.stride(0) * q.element_size(),
        laid_out.data_ptr(),
        plan.words.data_ptr(),
        num_heads,
        num_heads // num_kv_heads,
        scale,
        sliding_window or 0,
        soft_cap or 0.0,
        out.data_ptr(),
        0 if lse is None else lse.data_ptr(),
    )


def _method(dtype: torch.dtype, head_dim: int) -> str:
    if dtype != torch.bfloat16 or head_dim % 32:
        return "f32"
    if amx.available():
        return "amx"
    return "bf16dot" if simd.cpu_has("avx512bf16") else "f32"
