"""Attention over the paged KV cache: which launches of the kernel a batch takes.

Decodes and prefill chunks want different tiles: a decode reads a whole context for a handful of rows, so it takes a
narrow tile and many programs (``flash_decoding``); a chunk reuses what it reads, so it takes a wide one. A batch of both
takes two launches, each leaving the other's requests out: which requests those are only the device knows.
"""

from dataclasses import replace

import torch
from llmlab.kernels.attention_tile import TILES, Tile, attention_work, choose_tile, queries_per_tile
from llmlab.kernels.flash_decoding import attend_in_splits, choose_splits
from llmlab.kernels.merge import merge_attention_states
from llmlab.kernels.paged_kernel import check_attention, launch_paged_attention, meta_batch
from llmlab.kernels.spec import CompileCase, capture
from llmlab.kernels.tiles import architecture
from torch import Tensor

__all__ = ["merge_attention_states", "paged_attention"]


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
) -> Tensor | tuple[Tensor, Tensor]:
    """Causal attention of every request's queries to its keys and values in the cache.

    ``q[T, Hq, D]``, ``key_cache, value_cache[N, B, Hkv, D]``, ``block_table[R, M]``, ``query_start_loc[R + 1]`` and
    ``seq_lens[R]`` int32. Query i of request r stands at position ``seq_lens[r] - query_len + i`` and sees the keys up to
    its own, with ``sliding_window`` only the last that many; ``soft_cap`` c turns a score s into c * tanh(s / c). Slots
    past ``seq_lens[r]`` and unused table entries may hold anything. Returns ``[T, Hq, D]`` in q's dtype, and with
    ``return_lse`` the natural log-sum-exp of the scores ``[T, Hq]`` in float32. Raises ValueError for shapes, a scale, a
    window or a cap that make no sense.
    """
    check_attention(q, key_cache, value_cache, block_table, query_start_loc, seq_lens, scale, sliding_window, soft_cap)
    num_tokens, num_heads, head_dim = q.shape
    num_reqs, group = seq_lens.shape[0], num_heads // key_cache.shape[2]
    machine = architecture(q.device)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    lse = torch.empty(num_tokens, num_heads, dtype=torch.float32, device=q.device) if return_lse else None
    operands = (q, key_cache, value_cache, block_table, query_start_loc, seq_lens, scale, sliding_window, soft_cap)
    if out.numel() == 0:
        pass
    elif num_tokens <= num_reqs or num_reqs == 1 or q.dtype == torch.float32:
        tile = choose_tile(num_tokens, num_reqs, group, head_dim, q.dtype, machine)
        attend_in_splits(
            out, lse, *operands, tile, choose_splits(q, key_cache, block_table, num_reqs, sliding_window, tile)
        )
    else:
        narrow = choose_tile(num_reqs, num_reqs, group, head_dim, q.dtype, machine)
        if machine == "hopper" and narrow.block_m == 16 and 64 < head_dim <= 128 and sliding_window and soft_cap:
            narrow = replace(narrow, max_registers=128)  # both masks at once: left alone, ptxas takes 96 and spills
        # Were no request empty, none could have more queries than this.
        wide = choose_tile(num_tokens - num_reqs + 1, 1, group, head_dim, q.dtype, machine)
        fitting = queries_per_tile(narrow, group)
        if num_tokens > fitting:
            launch_paged_attention(out, lse, *operands, wide, shorter_than=fitting + 1)
        splits = choose_splits(q, key_cache, block_table, num_reqs, sliding_window, narrow, by_request=True)
        attend_in_splits(out, lse, *operands, narrow, splits, by_request=True)
    return out if lse is None else (out, lse)


def compile_cases() -> list[CompileCase]:
    """What Llama-like batches launch on Hopper and later, and every tile of the other machines' tables."""
    cases: list[CompileCase] = []

    def add(
        name: str,
        batch: tuple[int, int, int, int, int],
        block_size: int = 16,
        dtype: torch.dtype = torch.bfloat16,
        **options: object,
    ) -> None:
        num_tokens, num_reqs, num_heads, num_kv_heads, head_dim = batch
        args = meta_batch(*batch, block_size=block_size, dtype=dtype)
        tile = choose_tile(num_tokens, num_reqs, num_heads // num_kv_heads, head_dim, dtype, "hopper")
        work = {"paged_attention_kernel": attention_work(tile, head_dim, dtype.itemsize)}
        call = lambda: paged_attention(*args, head_dim**-0.5, **options)
        cases.extend(capture(name, call, work=work, targets=("sm_90", "sm_100")))

    def add_tile(
        name: str,
        tile: Tile,
        head_dim: int,
        target: str,
        window: int | None = None,
        splits: int = 1,
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        args = meta_batch(8192, 64, 32, 8, head_dim, dtype=dtype)
        out = torch.empty(args[0].shape, dtype=dtype, device="meta")
        work = {"paged_attention_kernel": attention_work(tile, head_dim, dtype.itemsize)}
        call = lambda: attend_in_splits(out, None, *args, head_dim**-0.5, window, None, tile, splits)
        cases.extend(capture(name, call, work=work, targets=(target,)))

    for head_dim in (64, 80, 96, 128, 256):
        add(f"prefill_d{head_dim}", (8192, 1, 32, 8, head_dim))
    for head_dim in (64, 128, 256):
        add(f"short_d{head_dim}", (16, 1, 32, 8, head_dim))
        add(f"decode_d{head_dim}", (64, 64, 32, 8, head_dim))
        add(f"float32_d{head_dim}", (8192, 1, 32, 8, head_dim), dtype=torch.float32)
        masks = {"sliding_window": 4096, "soft_cap": 50.0}
        add(f"float32_d{head_dim}_soft_cap_window", (8192, 1, 32, 8, head_dim), dtype=torch.float32, **masks)
        add(f"float32_decode_d{head_dim}_window", (8, 8, 32, 8, head_dim), dtype=torch.float32, sliding_window=4096)
    add("mixed_d128", (2048, 65, 32, 8, 128))
    add("mixed_d128_soft_cap_window", (2048, 65, 32, 8, 128), sliding_window=4096, soft_cap=50.0)
    add("prefill_d64_group3", (8192, 1, 9, 3, 64))
    add("decode_d128_group32", (64, 64, 32, 1, 128))
    add("prefill_d128_page64", (8192, 1, 32, 8, 128), 64)
    add("prefill_d128_lse", (8192, 1, 32, 8, 128), return_lse=True)
    add("prefill_d128_window", (8192, 1, 32, 8, 128), sliding_window=4096)
    add("decode_d128_window", (64, 64, 32, 8, 128), sliding_window=4096)
    add("prefill_d256_soft_cap_window", (8192, 1, 16, 8, 256), sliding_window=4096, soft_cap=50.0)
    for machine, target in (("ampere", "sm_80"), ("cdna", "gfx942")):
        for kind in ("wide", "middle", "narrow", "float32"):
            dtype = torch.float32 if kind == "float32" else torch.bfloat16
            for head_dim, tile in getattr(TILES[machine], kind).items():
                add_tile(f"{machine}_{kind}_d{head_dim}", tile, head_dim, target, dtype=dtype)
        add_tile(f"{machine}_wide_d128_window", TILES[machine].wide[128], 128, target, window=4096)
        add_tile(f"{machine}_wide_d80", TILES[machine].wide[128], 80, target)
        add_tile(f"{machine}_narrow_d128_splits", TILES[machine].narrow[128], 128, target, splits=8)
    return cases
