"""Merging attention over two disjoint sets of keys by their log-sum-exps (Dao et al., 2022, arXiv:2205.14135, section 3.1)."""

import torch
import triton
import triton.language as tl
from llmlab.kernels.launch import launch
from llmlab.kernels.spec import CompileCase, capture
from llmlab.kernels.tiles import ceil_div, row_tile
from torch import Tensor


@triton.jit(do_not_specialize=["num_rows"])
def merge_attention_states_kernel(
    out_a_ptr,
    lse_a_ptr,
    out_b_ptr,
    lse_b_ptr,
    out_ptr,
    lse_ptr,
    num_rows,
    HEAD_DIM: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    rows = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    dims = tl.arange(0, BLOCK_D)
    row_mask = rows < num_rows
    offsets = rows[:, None] * HEAD_DIM + dims[None, :]
    mask = row_mask[:, None] & (dims < HEAD_DIM)[None, :]
    lse_a = tl.load(lse_a_ptr + rows, mask=row_mask, other=float("-inf"))
    lse_b = tl.load(lse_b_ptr + rows, mask=row_mask, other=float("-inf"))
    highest = tl.maximum(lse_a, lse_b)
    reference = tl.where(highest == float("-inf"), 0.0, highest)
    weight_a = tl.exp(lse_a - reference)
    weight_b = tl.exp(lse_b - reference)
    total = weight_a + weight_b
    denominator = tl.where(total == 0.0, 1.0, total)
    # A part that saw no key has weight 0, and its out may be anything: it is not even loaded.
    out_a = tl.load(out_a_ptr + offsets, mask=mask & (weight_a > 0.0)[:, None], other=0.0).to(tl.float32)
    out_b = tl.load(out_b_ptr + offsets, mask=mask & (weight_b > 0.0)[:, None], other=0.0).to(tl.float32)
    out = (out_a * weight_a[:, None] + out_b * weight_b[:, None]) / denominator[:, None]
    tl.store(out_ptr + offsets, out.to(out_ptr.dtype.element_ty), mask=mask)
    tl.store(lse_ptr + rows, highest + tl.log(denominator), mask=row_mask)


def merge_attention_states(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """Attention over the union of two disjoint sets of keys, from ``out[T, Hq, D]`` and ``lse[T, Hq]`` over each.

    A part without keys has lse −inf and counts for nothing; two of them give 0 and −inf. Returns (out, lse) in a's dtypes.
    Raises ValueError for shapes that differ.
    """
    if out_a.ndim != 3 or out_b.shape != out_a.shape or lse_a.shape != out_a.shape[:2] or lse_b.shape != lse_a.shape:
        raise ValueError(
            "merge_attention_states: both outs must be [T, Hq, D] and both lses [T, Hq], not "
            f"{tuple(out_a.shape)}, {tuple(lse_a.shape)}, {tuple(out_b.shape)} and {tuple(lse_b.shape)}"
        )
    out_a, lse_a, out_b, lse_b = (tensor.contiguous() for tensor in (out_a, lse_a, out_b, lse_b))
    out, lse = torch.empty_like(out_a), torch.empty_like(lse_a)
    if out.numel() == 0:
        return out, lse
    block_rows, block_d, num_warps = row_tile(out.shape[2])
    launch(
        merge_attention_states_kernel,
        (ceil_div(lse.numel(), block_rows),),
        out_a,
        lse_a,
        out_b,
        lse_b,
        out,
        lse,
        lse.numel(),
        HEAD_DIM=out.shape[2],
        BLOCK_ROWS=block_rows,
        BLOCK_D=block_d,
        num_warps=num_warps,
        num_stages=1,
    )
    return out, lse


def compile_cases() -> list[CompileCase]:
    """Llama-3-8B's heads, and a padded head_dim."""
    cases: list[CompileCase] = []
    for head_dim in (80, 128):
        out = torch.empty(4096, 32, head_dim, dtype=torch.bfloat16, device="meta")
        lse = torch.empty(4096, 32, dtype=torch.float32, device="meta")
        cases += capture(f"d{head_dim}", lambda o=out, s=lse: merge_attention_states(o, s, o, s))
    return cases
