"""Splitting the keys of few sequences: how programs fill a machine, what a split gains where it can be clocked, and the merge.

After Dao, Haziza, Massa & Sizov 2023, "Flash-Decoding for long-context inference" (pytorch.org/blog/flash-decoding).
"""

from __future__ import annotations

import heapq
import os
from collections.abc import Callable, Sequence
from functools import partial

import pandas as pd
import torch
from torch import Tensor

from llmlab.measure.experiments.paging import SMOLLM2, Heads, attention_batch, cache_memory
from llmlab.measure.timer import compare, measure_in_turns, torch_threads


def decode_programs(num_reqs: int, num_kv_heads: int, num_splits: int) -> int:
    """Programs of decode attention: one a request, KV head (all its query heads together) and split."""
    return num_reqs * num_kv_heads * num_splits


def fill(num_programs: int, num_units: int) -> float:
    """Share of a machine's units that work, on average, while equal programs run on it in waves."""
    waves = -(-num_programs // num_units)
    return num_programs / (waves * num_units)


def schedule(tiles_of_programs: Sequence[int], num_units: int, merge_tiles: float = 0.0) -> pd.DataFrame:
    """Who computes what when: programs in order, each given to the unit that is free first, time in tiles of keys.

    Args:
        tiles_of_programs: how many tiles of keys each program walks over.
        merge_tiles: length of a merge that starts when all programs have ended; 0: none.

    Columns: program (−1: the merge), unit, start, end.
    """
    if num_units < 1:
        raise ValueError(f"num_units must be at least 1, not {num_units}")
    free = [(0.0, unit) for unit in range(num_units)]
    rows = []
    for program, tiles in enumerate(tiles_of_programs):
        start, unit = heapq.heappop(free)
        rows.append((program, unit, start, start + tiles))
        heapq.heappush(free, (start + tiles, unit))
    end = max(row[3] for row in rows)
    if merge_tiles:
        rows.append((-1, 0, end, end + merge_tiles))
    return pd.DataFrame(rows, columns=["program", "unit", "start", "end"])


def utilisation(plan: pd.DataFrame, num_units: int) -> float:
    """Share of unit-time between the start and the last end that a :func:`schedule` uses for programs."""
    work = (plan["end"] - plan["start"])[plan["program"] >= 0].sum()
    return float(work / (num_units * plan["end"].max()))


def cores() -> int:
    """Hardware threads that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def split_against_whole(
    contexts: Sequence[int] = (512, 2048, 8192, 32768),
    *,
    num_reqs: int = 1,
    heads: Heads = SMOLLM2,
    dtype: torch.dtype = torch.bfloat16,
    device: str | torch.device = "cpu",
    layers: int = 8,
    max_seconds: float = 1.5,
) -> pd.DataFrame:
    """Decode attention with every context in one piece, and cut into parts, in turns.

    On a GPU the pieces go to programs (:mod:`llmlab.kernels.flash_decoding`, the number of splits by the machine). On a CPU they
    go to its cores, as many threads as there are: uncut, one sequence keeps one of them busy. A sample is ``layers`` calls on the
    caches of as many layers, so that none finds its keys where the call before left them.

    Columns: context, whole, split (seconds of one call, medians), speedup, sure_low, sure_high, units (SMs or threads),
    max_error (largest difference between the two). Raises ValueError on a CPU with one core.
    """
    device = torch.device(device)
    on_gpu = device.type == "cuda"
    units = torch.cuda.get_device_properties(device).multi_processor_count if on_gpu else cores()
    if units < 2:
        raise ValueError("splitting needs at least two cores, this process may use one")
    whole, split = _attention(on_gpu)
    rows = []
    with torch_threads(torch.get_num_threads() if on_gpu else units):
        for context in contexts:
            batch = attention_batch([1] * num_reqs, [context] * num_reqs, heads, 16, dtype=dtype, device=device)
            caches = cache_memory((layers, 2, *batch.key_cache.shape), dtype, device)
            caches[:, 0], caches[:, 1] = batch.key_cache, batch.value_cache
            q, _, _, *rest = batch.args
            run = lambda attend, q=q, caches=caches, rest=rest: [attend(q, k, v, *rest) for k, v in caches]
            error = (run(whole)[0].float() - run(split)[0].float()).abs().max().item()
            runs = {"whole": partial(run, whole), "split": partial(run, split)}
            clocked = measure_in_turns(runs, device=device, repeats=200, max_seconds=max_seconds)
            ratio = compare("split", clocked["split"], "whole", clocked["whole"])
            rows.append(
                {"context": context}
                | {name: taken.median / layers for name, taken in clocked.items()}
                | {"speedup": ratio.ratio, "sure_low": ratio.sure_low, "sure_high": ratio.sure_high}
                | {"units": units, "max_error": error}
            )
    return pd.DataFrame(rows)


def _attention(on_gpu: bool) -> tuple[Callable[..., Tensor], Callable[..., Tensor]]:
    """Decode attention with contexts uncut, and cut as the machine wants it."""
    if on_gpu:
        from llmlab.kernels.flash_decoding import flash_decoding

        return partial(flash_decoding, num_splits=1), flash_decoding
    from llmlab.ops.cpu.attention import paged_attention

    return partial(paged_attention, max_parts=1), paged_attention
