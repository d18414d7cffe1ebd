"""Attention straight from the paged cache: no copy of K or V, no loop over requests in Python.

Work is dealt as (token, part of its context): a tile of keys is read as it lies in the cache, all heads together, and serves
every query head, with an online softmax (Milakov & Gimelshein 2018, arXiv:1805.02867). Few sequences are split along their
context (Flash-Decoding), and whoever ends the last part of a token merges its parts.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import torch
from numba import njit
from torch import Tensor

from llmlab.ops import attention as reference
from llmlab.ops.cpu import flash, simd
from llmlab.ops.cpu.cache import blocks_alike
from llmlab.ops.cpu.memory import empty, zeros
from llmlab.ops.cpu.parallel import arg, kernel, number, piece, take
from llmlab.ops.cpu.tiles import score_tile, weighted_sum

_TILE = 32  # keys whose scores are computed before the running maximum is looked at
_MAX_GROUP = 8  # query heads together; a larger group is served in parts
_MAX_PARTS = 16
_LOG2_E = math.log2(math.e)


@kernel("qqqqqqqqqqqqqqdqdqqqqqq")
def _decode(method: str, num_heads: int, num_kv_heads: int, head_dim: int) -> Callable[[int], None]:
    """One item: all heads of one token over one part of its context."""
    kind = method.removesuffix("dot")
    size = simd.itemsize(kind)
    per_kv_head = num_heads // num_kv_heads
    group = next(n for n in range(min(per_kv_head, _MAX_GROUP), 0, -1) if per_kv_head % n == 0)
    groups, groups_per_kv_head = num_heads // group, per_kv_head // group
    row, tile, lanes = head_dim * size, _TILE, simd.LANES
    sums_bytes = num_heads * head_dim * 4
    state_bytes = -(-num_heads // lanes) * 64  # one float32 a head
    part_bytes = part_floats(num_heads, head_dim) * 4
    degree = 6 if kind == "f32" else 4
    scores_bytes, offsets_bytes = group * tile * 4, 2 * tile * 8

    def body(p: int) -> None:
        q, q_stride, key_cache, value_cache = arg(p, 0), arg(p, 1), arg(p, 2), arg(p, 3)
        block_size, block_stride, slot_stride = arg(p, 4), arg(p, 5), arg(p, 6)
        block_table, table_stride, query_start_loc = arg(p, 7), arg(p, 8), arg(p, 9)
        seq_lens, num_reqs, tokens, count = arg(p, 10), arg(p, 11), arg(p, 12), arg(p, 13)
        count = simd.load_int64(count) if tokens else count
        scale, window, soft_cap = np.float32(number(p, 14)), arg(p, 15), np.float32(number(p, 16))
        max_parts, parts, counters, out, lse, threads = (
            arg(p, 17),
            arg(p, 18),
            arg(p, 19),
            arg(p, 20),
            arg(p, 21),
            arg(p, 22),
        )
        sums, highs, totals = simd.scratch(sums_bytes), simd.scratch(state_bytes), simd.scratch(state_bytes)
        scores, shrinks, offsets = simd.scratch(scores_bytes), simd.scratch(64), simd.scratch(offsets_bytes)
        low, zero = np.float32(-np.inf), np.float32(0.0)
        factor = np.float32(_LOG2_E) if soft_cap > zero else scale * np.float32(_LOG2_E)  # weights are powers of 2
        longest = 0
        for r in range(num_reqs):
            longest = max(longest, simd.load_int32(seq_lens + 4 * r))
        part_keys = max((longest + max_parts * tile - 1) // (max_parts * tile), 1) * tile
        most = max((longest + part_keys - 1) // part_keys, 1)  # parts that the longest context has
        item, last_item = piece(take(p, 1), count * most, threads)
        half, ready = 0, 0  # which half of the offsets is this tile's; how many of them are known already
        while item < last_item:
            which, part = item // most, item % most
            token = simd.load_int64(tokens + 8 * which) if tokens else which
            request, begin, end, num_parts = _range(token, part, part_keys, query_start_loc, seq_lens, num_reqs, window)
            following, past = item + 1, last_item
            if following >= past:
                following, past = piece(take(p, 1), count * most, threads)
            item, last_item = following, past
            table = block_table + 4 * table_stride * request
            for i in range(0, sums_bytes, 64):
                simd.store("f32", sums + i, simd.splat(zero))
            for i in range(0, state_bytes, 64):
                simd.store("f32", highs + i, simd.splat(low))
                simd.store("f32", totals + i, simd.splat(zero))
            for start in range(begin, end, tile):
                n = min(tile, end - start)
                here, there = offsets + half * tile * 8, offsets + (1 - half) * tile * 8
                if ready == 0:
                    _locate(table, start, n, block_size, block_stride, slot_stride, here)
                for j in range(n, (n + lanes - 1) // lanes * lanes):
                    simd.store_int64(
                        here + 8 * j, simd.load_int64(here + 8 * (n - 1))
                    )  # fill the last vector; masked below
                # the tile after this one, which is asked for bit by bit while this one is worked on
                ready = min(tile, end - start - tile)
                if ready > 0:
                    _locate(table, start + tile, ready, block_size, block_stride, slot_stride, there)
                elif item < last_item:
                    next_token = simd.load_int64(tokens + 8 * (item // most)) if tokens else item // most
                    next_request, next_begin, next_end, _ = _range(
                        next_token, item % most, part_keys, query_start_loc, seq_lens, num_reqs, window
                    )
                    ready = min(tile, next_end - next_begin)
                    next_table = block_table + 4 * table_stride * next_request
                    _locate(next_table, next_begin, ready, block_size, block_stride, slot_stride, there)
                ready, half = max(ready, 0), 1 - half
                for of in range(groups):
                    head = of * group
                    shift = of // groups_per_kv_head * row
                    queries = q + token * q_stride + head * row
                    some, more = of * ready // groups, (of + 1) * ready // groups
                    _ask(key_cache, there, some, more, slot_stride)
                    for j in range(0, n, lanes):
                        at = scores + 4 * j
                        score_tile(method, group, head_dim, queries, key_cache + shift, here + 8 * j, at, 4 * tile)
                    for g in range(group):
                        mine = scores + g * tile * 4
                        top = simd.splat(low)
                        for j in range(0, n, lanes):
                            s = simd.load("f32", mine + 4 * j)
                            if soft_cap > zero:
                                s = simd.capped(s * simd.splat(scale), soft_cap)
                            s = simd.keep_first(s * simd.splat(factor), n - j, low)
                            simd.store("f32", mine + 4 * j, s)
                            top = simd.maximum(s, top)
                        old = simd.load_one("f32", highs + 4 * (head + g))
                        high = max(old, simd.highest(top))
                        summed = simd.splat(zero)
                        for j in range(0, n, lanes):
                            weight = simd.exp2(degree, simd.load("f32", mine + 4 * j) - simd.splat(high))
                            simd.store("f32", mine + 4 * j, weight)
                            summed = summed + weight
                        shrink = simd.exp2_one(old - high)
                        total = simd.load_one("f32", totals + 4 * (head + g)) * shrink + simd.total(summed)
                        simd.store("f32", shrinks + 4 * g, shrink)
                        simd.store("f32", highs + 4 * (head + g), high)
                        simd.store("f32", totals + 4 * (head + g), total)
                    mine = sums + head * head_dim * 4
                    _ask(value_cache, there, some, more, slot_stride)
                    weighted_sum(kind, group, head_dim, value_cache + shift, here, n, scores, 4 * tile, shrinks, mine)
            if begin >= end:
                continue  # no such part
            if num_parts > 1:
                # leave the part for whoever comes last; who does, reads all of them in order
                mine = parts + which * max_parts * part_bytes
                own = mine + part * part_bytes
                simd.copy(own, sums, sums_bytes)
                simd.copy(own + sums_bytes, highs, state_bytes)
                simd.copy(own + sums_bytes + state_bytes, totals, state_bytes)
                if simd.fetch_add(counters + 8 * which, 1) < num_parts - 1:
                    continue
                simd.store_int64(counters + 8 * which, 0)
                for head in range(num_heads):
                    high, total = low, zero
                    for s in range(num_parts):
                        high = max(high, simd.load_one("f32", mine + s * part_bytes + sums_bytes + 4 * head))
                    for i in range(0, head_dim * 4, 64):
                        simd.store("f32", sums + head * head_dim * 4 + i, simd.splat(zero))
                    for s in range(num_parts):
                        state = mine + s * part_bytes + sums_bytes + 4 * head
                        share = simd.exp2_one(simd.load_one("f32", state) - high)
                        total += share * simd.load_one("f32", state + state_bytes)
                        for i in range(head * head_dim * 4, (head + 1) * head_dim * 4, 64):
                            added = simd.load("f32", mine + s * part_bytes + i)
                            simd.store("f32", sums + i, simd.fma(simd.splat(share), added, simd.load("f32", sums + i)))
                    simd.store("f32", highs + 4 * head, high)
                    simd.store("f32", totals + 4 * head, total)
            for head in range(num_heads):
                total = simd.load_one("f32", totals + 4 * head)
                inverse = simd.splat(np.float32(1.0) / total)
                for i in range(0, head_dim, lanes):
                    value = simd.load("f32", sums + (head * head_dim + i) * 4) * inverse
                    simd.store(kind, out + (token * num_heads + head) * row + i * size, value)
                if lse != 0:
                    natural = math.log(total) + simd.load_one("f32", highs + 4 * head) / _LOG2_E
                    simd.store("f32", lse + (token * num_heads + head) * 4, np.float32(natural))

    return body


@njit
def _range(token, part, part_keys, query_start_loc, seq_lens, num_reqs, window):  # type: ignore[no-untyped-def]
    """``(request, first key, last key + 1, number of parts)`` of a part of a token's context; without keys: no such part."""
    request, above = 0, num_reqs  # the request is the last one that starts at or before the token
    while above - request > 1:
        middle = (request + above) // 2
        if simd.load_int32(query_start_loc + 4 * middle) <= token:
            request = middle
        else:
            above = middle
    after = simd.load_int32(query_start_loc + 4 * (request + 1)) - 1 - token
    keys = simd.load_int32(seq_lens + 4 * request) - after
    begin = max(keys - window, 0) if window > 0 else 0
    num_parts = max((keys - begin + part_keys - 1) // part_keys, 1)
    begin = min(begin + part * part_keys, keys)
    return request, begin, min(begin + part_keys, keys), num_parts


@njit
def _locate(table, first, count, block_size, block_stride, slot_stride, offsets):  # type: ignore[no-untyped-def]
    """Where ``count`` keys from ``first`` on stand in the cache, in bytes."""
    index, slot = first // block_size, first % block_size
    j = 0
    while j < count:
        offset = simd.load_int32(table + 4 * index) * block_stride + slot * slot_stride
        for _ in range(min(block_size - slot, count - j)):
            simd.store_int64(offsets + 8 * j, offset)
            offset, j = offset + slot_stride, j + 1
        index, slot = index + 1, 0


@njit
def _ask(cache, offsets, first, last, size):  # type: ignore[no-untyped-def]
    """Prefetch ``size`` bytes of each key or value from ``first`` to ``last``, in the order in which they lie."""
    for j in range(first, last):
        at = cache + simd.load_int64(offsets + 8 * j)
        for line in range(0, size, 64):
            simd.prefetch(at + line)


def part_floats(num_heads: int, head_dim: int) -> int:
    """Size of one part's result: weighted sums, and of each head the highest score and the total weight."""
    return num_heads * head_dim + 2 * -(-num_heads // simd.LANES) * simd.LANES


def paged_attention(
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
    *,
    max_parts: int | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """The op's equal; ``max_parts`` is into how many parts a token's context is cut at most (None: by tokens and threads)."""
    tokens, num_heads, head_dim = q.shape
    _, block_size, num_kv_heads, _ = key_cache.shape
    kind = simd.KINDS.get(q.dtype)
    if (
        kind is None
        or head_dim % simd.LANES
        or scale <= 0
        or (sliding_window is not None and sliding_window <= 0)
        or (soft_cap is not None and soft_cap <= 0)
        or not (q.dtype == key_cache.dtype == value_cache.dtype)
        or not (block_table.dtype == query_start_loc.dtype == seq_lens.dtype == torch.int32)
        or not (blocks_alike(key_cache, value_cache) and block_table.stride(1) == 1)
    ):
        return reference.paged_attention.reference(
            q,
            key_cache,
            value_cache,
            block_table,
            query_start_loc,
            seq_lens,
            scale,
            sliding_window,
            soft_cap,
            return_lse,
        )
    q, query_start_loc, seq_lens = simd.heads_together(q), query_start_loc.contiguous(), seq_lens.contiguous()
    out = empty(q.shape, q.dtype)
    lse = empty((tokens, num_heads), torch.float32) if return_lse else None
    # As many tokens as requests are done token by token. Otherwise requests with many queries are done in tiles.
    count, plan, num_reqs = tokens, None, seq_lens.shape[0]
    if tokens != num_reqs:
        plan = flash.Plan.of(query_start_loc, seq_lens, tokens, block_table.shape[1] * block_size, sliding_window)
        count = plan.few.shape[0]
        if tokens >= flash.FEWEST:
            flash.attend(plan, q, key_cache, value_cache, block_table, scale, sliding_window, soft_cap, out, lse)
    size = q.element_size()
    if count:
        if max_parts is None:
            max_parts = max(min(16 * torch.get_num_threads() // count, _MAX_PARTS), 1)
        parts = counters = out
        if max_parts > 1:
            parts = empty((count * max_parts * part_floats(num_heads, head_dim),), torch.float32)
            counters = zeros((count,), torch.int64)
        method = "bf16dot" if kind == "bf16" and simd.cpu_has("avx512bf16") and head_dim % 32 == 0 else kind
        _decode(method, num_heads, num_kv_heads, head_dim).parallel(
            q.data_ptr(),
            q.stride(0) * size,
            key_cache.data_ptr(),
            value_cache.data_ptr(),
            block_size,
            key_cache.stride(0) * size,
            key_cache.stride(1) * size,
            block_table.data_ptr(),
            block_table.stride(0),
            query_start_loc.data_ptr(),
            seq_lens.data_ptr(),
            num_reqs,
            0 if plan is None else plan.few.data_ptr(),
            count if plan is None else plan.words.data_ptr() + flash.FEW,
            scale,
            sliding_window or 0,
            soft_cap or 0.0,
            max_parts,
            parts.data_ptr(),
            counters.data_ptr(),
            out.data_ptr(),
            0 if lse is None else lse.data_ptr(),
            torch.get_num_threads(),
        )
    return out if lse is None else (out, lse)
