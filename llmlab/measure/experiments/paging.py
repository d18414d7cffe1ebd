"""What paging costs and buys: who owns which block over time, how many requests fit, and what reading through a table takes.

After Kwon et al. 2023, "Efficient Memory Management for Large Language Model Serving with PagedAttention" (arXiv:2309.06180),
sections 3 and 4 (fragmentation, block tables) and 7.2 (the block size). The bookkeeping is the engine's own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from llmlab import ops
from llmlab.config import CacheConfig
from llmlab.engine.kv_cache import KVCacheManager
from llmlab.engine.request import Request
from llmlab.measure.timer import compare, measure_in_turns
from llmlab.ops.cpu.memory import large_pages
from llmlab.sampling.params import SamplingParams


class Heads(NamedTuple):
    """What attention needs to know of a model."""

    num_heads: int
    num_kv_heads: int
    head_dim: int


SMOLLM2 = Heads(9, 3, 64)


@dataclass(frozen=True)
class AttentionBatch:
    """The arguments of one call of ``paged_attention``."""

    q: Tensor
    key_cache: Tensor
    value_cache: Tensor
    block_table: Tensor
    query_start_loc: Tensor
    seq_lens: Tensor

    @property
    def args(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, float]:
        """In the op's order, with the usual scale."""
        tensors = (self.q, self.key_cache, self.value_cache, self.block_table, self.query_start_loc, self.seq_lens)
        return (*tensors, self.q.shape[-1] ** -0.5)


def attention_batch(
    query_lens: Sequence[int],
    seq_lens: Sequence[int],
    heads: Heads,
    block_size: int,
    *,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
    shuffled: bool = True,
    seed: int = 0,
) -> AttentionBatch:
    """A batch of random q, K and V. The same seed gives the same keys at every position for any block size and order.

    Args:
        shuffled: blocks stand in the pool in a random order, as in a cache that has been in use; otherwise one after another.
    """
    generator = torch.Generator().manual_seed(seed)
    shape = (heads.num_kv_heads, heads.head_dim)
    q = torch.randn(sum(query_lens), heads.num_heads, heads.head_dim, generator=generator)
    table = block_tables(seq_lens, block_size, shuffled, seed)
    caches = torch.zeros(2, int(table.max()) + 1, block_size, *shape)
    for row, length in zip(table.long(), seq_lens, strict=True):
        positions = torch.arange(length)
        content = torch.randn(2, length, *shape, generator=generator)
        caches[:, row[positions // block_size], positions % block_size] = content
    place = {"dtype": dtype, "device": device}
    starts = torch.tensor([0, *np.cumsum(query_lens)], dtype=torch.int32, device=device)
    lens = torch.tensor(seq_lens, dtype=torch.int32, device=device)
    return AttentionBatch(q.to(**place), *caches.to(**place), table.to(device), starts, lens)


def engine_attention(device: str | torch.device) -> Callable[..., Any]:
    """``paged_attention`` as the engine runs it on a device: the Triton kernel on a GPU, the compiled twin on a CPU."""
    device = torch.device(device)
    return ops.paged_attention.implementation("triton" if device.type == "cuda" else "torch", device)


def cache_memory(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros where the engine would keep its cache: in large pages on a CPU, which matters to whoever jumps about in it."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    return large_pages(math.prod(shape) * dtype.itemsize).view(dtype).view(shape)


def block_tables(seq_lens: Sequence[int], block_size: int, shuffled: bool, seed: int = 0) -> Tensor:
    """Tables ``[num_reqs, max_blocks_per_req]``, int32, over a pool that these requests fill; unused entries are 0."""
    counts = [-(-length // block_size) for length in seq_lens]
    ids = np.random.default_rng(seed).permutation(sum(counts)) if shuffled else np.arange(sum(counts))
    table = torch.zeros(len(counts), max(counts), dtype=torch.int32)
    for row, own in zip(table, np.split(ids, np.cumsum(counts)[:-1]), strict=True):
        row[: len(own)] = torch.from_numpy(own)
    return table


class PoolStory:
    """Drives a :class:`KVCacheManager` by hand and writes down, after every event, which slots of which block are whose."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        config = CacheConfig(num_blocks=num_blocks, block_size=block_size, enable_prefix_caching=False)
        self.manager = KVCacheManager(config)
        self.requests: dict[str, Request] = {}
        self.rows: list[dict] = []
        self.events: list[str] = []

    def grow(self, name: str, num_tokens: int) -> bool:
        """Slots for that many more tokens of a request, which a new name opens; False, and nothing changed, if they don't fit."""
        request = self.requests.get(name) or Request(name, [1], SamplingParams())
        if not self.manager.allocate_slots(request, num_tokens):
            self._write(f"{name} +{num_tokens}\nrefused")
            return False
        self.requests[name] = request
        request.num_computed_tokens += num_tokens
        self._write(f"{name} +{num_tokens}")
        return True

    def finish(self, name: str) -> None:
        """The request ends and gives its blocks back. KeyError if there is none of that name."""
        self.manager.free(self.requests.pop(name))
        self._write(f"{name} ends")

    def table(self) -> pd.DataFrame:
        """One row an event and block in use. Columns: event (its number), label, block, request, index (in the request's
        table), filled (slots that hold a token)."""
        return pd.DataFrame(self.rows, columns=["event", "label", "block", "request", "index", "filled"])

    def _write(self, label: str) -> None:
        size = self.manager.block_size
        for name, request in self.requests.items():
            for index, block in enumerate(request.block_ids):
                filled = min(request.num_computed_tokens - index * size, size)
                self.rows.append(
                    {"event": len(self.events), "label": label, "block": block, "request": name, "index": index}
                    | {"filled": filled}
                )
        self.events.append(label)


def capacity(
    lengths: Sequence[int], num_slots: int, max_model_len: int, block_sizes: Sequence[int], entry_bytes: int = 4
) -> pd.DataFrame:
    """How many requests of these lengths, in order, fit a cache of ``num_slots`` tokens, by block size, and what is left unused.

    The first row reserves ``max_model_len`` slots for each request, whatever it will need. Columns: layout, block_size, requests,
    used (share of all slots that hold tokens), waste (share of the slots handed out that hold none), worst_waste_blocks (of one
    request), table_bytes (of the entries in use).

    Raises ValueError if not all lengths are within 1 and ``max_model_len``, or if there are too few to fill the cache.
    """
    if not all(1 <= length <= max_model_len for length in lengths):
        raise ValueError(f"lengths must be 1 to max_model_len = {max_model_len}, not {min(lengths)} to {max(lengths)}")
    rows = [_fill("reserved", lengths, num_slots, max_model_len, lambda length: max_model_len, 0)]
    for block_size in block_sizes:
        rows.append(_fill("paged", lengths, num_slots, block_size, lambda length: length, entry_bytes))
    return pd.DataFrame(rows)


def _fill(
    layout: str,
    lengths: Sequence[int],
    num_slots: int,
    block_size: int,
    asked: Callable[[int], int],
    entry_bytes: int,
) -> dict[str, object]:
    config = CacheConfig(num_blocks=num_slots // block_size, block_size=block_size, enable_prefix_caching=False)
    manager, fitted, worst = KVCacheManager(config), [], 0.0
    for i, length in enumerate(lengths):
        request = Request(str(i), [1], SamplingParams())
        if not manager.allocate_slots(request, asked(length)):
            break
        fitted.append(length)
        worst = max(worst, len(request.block_ids) - length / block_size)
    else:
        raise ValueError(f"{len(lengths)} requests do not fill {num_slots} slots: give more lengths")
    blocks = manager.block_pool.num_blocks - manager.block_pool.num_free
    return {
        "layout": layout,
        "block_size": block_size,
        "requests": len(fitted),
        "used": sum(fitted) / num_slots,
        "waste": 1 - sum(fitted) / (blocks * block_size),
        "worst_waste_blocks": worst,
        "table_bytes": blocks * entry_bytes,
    }


def sweep_block_size(
    block_sizes: Sequence[int] = (1, 2, 4, 8, 16, 32, 64, 128, 256),
    *,
    num_reqs: int = 8,
    context: int = 4096,
    heads: Heads = SMOLLM2,
    dtype: torch.dtype = torch.bfloat16,
    device: str | torch.device = "cpu",
    layers: int = 4,
    max_seconds: float = 6.0,
) -> pd.DataFrame:
    """Decode attention of ``num_reqs`` queries through block tables of every block size, against contiguous keys, in turns.

    A sample is the attention of ``layers`` layers, one after another, as a step runs it: none finds its keys where the call
    before left them. All layouts are views of the same memory, so that they differ by their tables alone. Contiguous is, on a
    GPU, the same kernel with the table compiled out (:mod:`llmlab.kernels.contiguous_attention`); on a CPU one block that holds
    a whole context, so that there is one look-up a request. Shuffled blocks are the cache of a server that has run for a while.

    Columns: layout ("contiguous", "in order", "shuffled"), block_size, seconds (of a layer, median), low, high (10th and 90th
    percentile), slowdown (over contiguous) with slowdown_low and slowdown_high (single runs), sure_low and sure_high (of the
    median, 95 %), bytes_per_s (of keys and values).

    Raises ValueError for a block size that does not divide the context.
    """
    if wrong := [size for size in block_sizes if size < 1 or context % size]:
        raise ValueError(f"block sizes must divide the context {context}, {wrong} do not")
    device, generator = torch.device(device), torch.Generator().manual_seed(0)
    shape = (layers, 2, num_reqs * context, heads.num_kv_heads, heads.head_dim)
    caches = cache_memory(shape, dtype, device).copy_(torch.randn(shape, generator=generator))
    q = torch.randn(num_reqs, heads.num_heads, heads.head_dim, generator=generator).to(device, dtype)
    starts = torch.arange(num_reqs + 1, dtype=torch.int32, device=device)
    lens = torch.full((num_reqs,), context, dtype=torch.int32, device=device)
    scale, attend = heads.head_dim**-0.5, engine_attention(device)

    def paged(block_size: int, shuffled: bool) -> Callable[[], list[Tensor]]:
        table = block_tables([context] * num_reqs, block_size, shuffled).to(device)
        views = [layer.unflatten(1, (-1, block_size)) for layer in caches]
        return lambda: [attend(q, *layer, table, starts, lens, scale) for layer in views]

    def contiguous() -> Callable[[], list[Tensor]]:
        if device.type != "cuda":
            return paged(context, False)
        from llmlab.kernels.contiguous_attention import contiguous_attention

        key_starts = starts * context
        return lambda: [contiguous_attention(q, *layer, starts, key_starts, scale) for layer in caches]

    runs = {("contiguous", 0): contiguous()} | {
        (order, size): paged(size, order == "shuffled") for order in ("in order", "shuffled") for size in block_sizes
    }
    clocked = measure_in_turns(runs, device=device, repeats=200, max_seconds=max_seconds)  # type: ignore[arg-type]
    base, moved, rows = clocked["contiguous", 0], caches.numel() * caches.element_size(), []  # type: ignore[index]
    for (layout, size), taken in clocked.items():  # type: ignore[misc]
        ratio = compare("contiguous", base, "paged", taken)
        rows.append(
            {"layout": layout, "block_size": size}
            | {"seconds": taken.median / layers, "low": taken.low / layers, "high": taken.high / layers}
            | {"slowdown": ratio.ratio, "slowdown_low": ratio.low, "slowdown_high": ratio.high}
            | {"sure_low": ratio.sure_low, "sure_high": ratio.sure_high, "bytes_per_s": moved / taken.median}
        )
    return pd.DataFrame(rows)
