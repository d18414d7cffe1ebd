"""Attention without the S×S matrix: the online softmax step by step, tiles that are touched, memory, traffic and speed.

After Milakov & Gimelshein 2018, "Online normalizer calculation for softmax" (arXiv:1805.02867), and Dao 2023,
"FlashAttention-2" (arXiv:2307.08691), sections 2 and 3.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from llmlab.measure.experiments.paging import SMOLLM2, AttentionBatch, Heads, attention_batch, engine_attention
from llmlab.measure.timer import compare, measure, measure_in_turns
from llmlab.ops.attention import visible_pairs
from llmlab.ops.registry import Cost


def online_softmax_steps(scores: Sequence[float], values: Sequence[float], tile: int) -> pd.DataFrame:
    """One query's softmax-weighted sum of scalar values, ``tile`` keys at a time, in float64.

    Columns, after each tile: tile, keys (seen so far), tile_max, max and sum (the running ones), correction (what sum and
    accumulator were multiplied by), accumulator, answer (accumulator / sum: exact for the keys seen so far).
    """
    if tile < 1 or len(scores) != len(values) or not len(scores):
        raise ValueError(
            f"need a tile of at least 1, and as many scores as values; got {tile}, {len(scores)}, {len(values)}"
        )
    scores, values = np.asarray(scores, np.float64), np.asarray(values, np.float64)
    highest, total, accumulator, rows = -np.inf, 0.0, 0.0, []
    for first in range(0, len(scores), tile):
        s, v = scores[first : first + tile], values[first : first + tile]
        new = max(highest, s.max())
        correction, weights = np.exp(highest - new), np.exp(s - new)
        total = total * correction + weights.sum()
        accumulator = accumulator * correction + weights @ v
        highest = new
        rows.append(
            {"tile": first // tile, "keys": first + len(s), "tile_max": s.max(), "max": highest, "sum": total}
            | {"correction": correction, "accumulator": accumulator, "answer": accumulator / total}
        )
    return pd.DataFrame(rows)


def tile_map(
    query_len: int, seq_len: int, block_m: int, block_n: int, sliding_window: int | None = None
) -> pd.DataFrame:
    """What a kernel does with each tile of the scores of one request: a row a tile, ``block_m`` queries by ``block_n`` keys.

    Columns: row, column, kind: "skipped" (no pair is visible), "whole" (all are: no mask needed) or "masked". Causality is
    bottom-right aligned: query i stands at position ``seq_len − query_len + i``. Raises ValueError for impossible lengths.
    """
    if not 1 <= query_len <= seq_len or block_m < 1 or block_n < 1:
        raise ValueError(
            f"need 1 <= query_len <= seq_len and blocks of at least 1; got {query_len}, {seq_len}, {block_m}, {block_n}"
        )
    rows = []
    for row in range(-(-query_len // block_m)):
        first = seq_len - query_len + row * block_m  # position of the tile's first query, and of its last
        last = min(first + block_m, seq_len) - 1
        for column in range(-(-seq_len // block_n)):
            left, right = column * block_n, min((column + 1) * block_n, seq_len) - 1
            too_old = sliding_window is not None and right <= first - sliding_window
            all_seen = right <= first and (sliding_window is None or left > last - sliding_window)
            kind = "skipped" if left > last or too_old else "whole" if all_seen else "masked"
            rows.append((row, column, kind))
    return pd.DataFrame(rows, columns=["row", "column", "kind"])


def naive_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention with the whole matrix of scores: q ``[S, Hq, D]``, k, v ``[S, Hkv, D]`` → ``[S, Hq, D]``."""
    group, length = q.shape[1] // k.shape[1], q.shape[0]
    keys, values = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = torch.einsum("qhd,khd->hqk", q, keys) * q.shape[-1] ** -0.5
    hidden = torch.ones(length, length, dtype=torch.bool, device=q.device).triu(1)
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, float("-inf")).softmax(-1), values)


def peak_bytes(run: Callable[[], object], device: str | torch.device = "cpu") -> int:
    """The most bytes of tensors that lived at one moment of ``run()``, beyond those that were there before.

    On a GPU the caching allocator's own count; on a CPU, where there is none, the storages of all tensors that ops make.
    """
    device = torch.device(device)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        run()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    with _AllocationWatch() as watch:
        run()
    return watch.peak


class _AllocationWatch(TorchDispatchMode):
    """Adds up the storages that ops bring to life inside the block, until each dies: ``live`` and ``peak``, bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self._seen = weakref.WeakSet()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        given = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                if storage._cdata not in given and storage not in self._seen:  # neither a view nor changed in place
                    self._seen.add(storage)
                    self._add(storage.nbytes())
                    weakref.finalize(storage, self._add, -storage.nbytes()).atexit = False
        return result

    def _add(self, nbytes: int) -> None:
        self.live += nbytes
        self.peak = max(self.peak, self.live)


def memory_growth(
    lengths: Sequence[int] = (128, 256, 512, 1024), heads: Heads = SMOLLM2, device: str | torch.device = "cpu"
) -> pd.DataFrame:
    """Peak bytes that causal attention of one prompt takes beyond its inputs, in float32; and how far the two ways differ.

    Columns: way ("all scores" or "tiles", which is the engine's op), length, bytes, max_error (against float64, two passes).
    """
    rows, attend = [], engine_attention(device)
    for length in lengths:
        flat = attention_batch([length], [length], heads, length, device=device, shuffled=False)
        tensors = flat.q, flat.key_cache[0], flat.value_cache[0]
        exact = naive_attention(*(tensor.double() for tensor in tensors))
        ways = {"all scores": lambda t=tensors: naive_attention(*t), "tiles": lambda f=flat: attend(*f.args)}
        for way, run in ways.items():
            error = (run() - exact).abs().max().item()  # the first call also compiles
            rows.append({"way": way, "length": length, "bytes": peak_bytes(run, device), "max_error": error})
    return pd.DataFrame(rows)


def growth_exponent(sizes: Sequence[float], amounts: Sequence[float]) -> float:
    """Slope of log(amount) over log(size): 1 where an amount grows in proportion, 2 where it grows with the square."""
    return float(np.polyfit(np.log(sizes), np.log(amounts), 1)[0])


def tile_traffic(query_len: int, seq_len: int, tile_queries: int, heads: Heads, itemsize: int = 2) -> Cost:
    """FLOPs of causal attention, and the bytes it moves if every tile of queries reads the keys that it sees once.

    A tile holds ``tile_queries`` tokens with all query heads of a KV head; with 1, each token reads its own keys as in decode.
    """
    flops = heads.num_heads * visible_pairs(query_len, seq_len) * 4 * heads.head_dim
    keys = sum(
        seq_len - query_len + min(first + tile_queries, query_len) for first in range(0, query_len, tile_queries)
    )
    own = 2 * query_len * heads.num_heads * heads.head_dim * itemsize  # q in, out out
    return Cost(flops, own + 2 * keys * heads.num_kv_heads * heads.head_dim * itemsize)


def sweep_queries(
    query_lens: Sequence[int] = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512),
    *,
    context: int = 8192,
    heads: Heads = SMOLLM2,
    dtype: torch.dtype = torch.bfloat16,
    device: str | torch.device = "cpu",
    max_seconds: float = 0.6,
) -> pd.DataFrame:
    """How fast the engine's attention is for chunks of that many queries at the end of a context.

    Columns: query_len, seconds (median), low, high, flops, flops_per_s, kv_bytes (of the context, one layer).
    """
    rows, attend = [], engine_attention(device)
    kv_bytes = 2 * context * heads.num_kv_heads * heads.head_dim * dtype.itemsize
    for query_len in query_lens:
        batch = attention_batch([query_len], [context], heads, 16, dtype=dtype, device=device)
        taken = measure(lambda b=batch: attend(*b.args), device=device, repeats=50, max_seconds=max_seconds)
        flops = tile_traffic(query_len, context, 1, heads).flops
        rows.append(
            {"query_len": query_len, "seconds": taken.median, "low": taken.low, "high": taken.high}
            | {"flops": flops, "flops_per_s": flops / taken.median, "kv_bytes": kv_bytes}
        )
    return pd.DataFrame(rows)


def paged_against_contiguous(
    lengths: Sequence[int] = (256, 1024, 2048),
    *,
    heads: Heads = SMOLLM2,
    dtype: torch.dtype = torch.bfloat16,
    device: str | torch.device = "cpu",
    max_seconds: float = 1.5,
) -> pd.DataFrame:
    """Prefill attention of one prompt: from shuffled blocks of 16, from contiguous keys, and torch's SDPA, in turns.

    Paged and contiguous are the same code: on a GPU the kernel with and without its table, on a CPU blocks of 16 and one block
    that holds the prompt. SDPA reads contiguous keys too, but is other code: it says how good ours is, not what pages cost.

    Columns: length, paged, contiguous, sdpa (seconds, medians), slowdown (paged over contiguous), sure_low, sure_high.
    """
    rows, attend = [], engine_attention(device)
    for length in lengths:
        paged = attention_batch([length], [length], heads, 16, dtype=dtype, device=device)
        flat = attention_batch([length], [length], heads, length, dtype=dtype, device=device, shuffled=False)
        q, k, v = (x.transpose(0, 1)[None] for x in (flat.q, flat.key_cache[0], flat.value_cache[0]))
        runs = {
            "paged": lambda b=paged: attend(*b.args),
            "contiguous": _contiguous(attend, flat),
            "sdpa": lambda t=(q, k, v): scaled_dot_product_attention(*t, is_causal=True, enable_gqa=True),
        }
        clocked = measure_in_turns(runs, device=device, repeats=100, max_seconds=max_seconds)
        ratio = compare("contiguous", clocked["contiguous"], "paged", clocked["paged"])
        rows.append(
            {"length": length}
            | {name: taken.median for name, taken in clocked.items()}
            | {"slowdown": ratio.ratio, "sure_low": ratio.sure_low, "sure_high": ratio.sure_high}
        )
    return pd.DataFrame(rows)


def _contiguous(attend: Callable[..., Tensor], flat: AttentionBatch) -> Callable[[], Tensor]:
    if not flat.q.is_cuda:
        return lambda: attend(*flat.args)
    from llmlab.kernels.contiguous_attention import contiguous_attention

    q, starts = flat.q, flat.query_start_loc
    keys, values = flat.key_cache[0], flat.value_cache[0]
    return lambda: contiguous_attention(q, keys, values, starts, starts, q.shape[-1] ** -0.5)
