"""RMSNorm (Zhang and Sennrich, 2019) alone and joined with the residual addition before it.

A program holds whole rows in registers: one read, one write, statistics in float32. Rounding follows Hugging Face's Llama:
normalise in float32, round to the storage dtype, then multiply by the weight.
"""

import torch
import triton
import triton.language as tl
from llmlab.kernels.launch import launch
from llmlab.kernels.spec import CompileCase, capture
from llmlab.kernels.tiles import ceil_div, require_unit_stride, row_tile
from torch import Tensor


@triton.jit(do_not_specialize=["num_rows"])
def rms_norm_kernel(
    x_ptr,
    weight_ptr,
    out_ptr,
    num_rows,
    row_length,
    rows_inner,  # row r of x starts at (r // rows_inner) * stride_outer + (r % rows_inner) * stride_inner
    x_stride_outer,
    x_stride_inner,
    eps,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_LENGTH: tl.constexpr,
):
    rows = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    cols = tl.arange(0, BLOCK_LENGTH)
    col_mask = cols < row_length
    mask = (rows < num_rows)[:, None] & col_mask[None, :]
    starts = rows // rows_inner * x_stride_outer + rows % rows_inner * x_stride_inner
    x = tl.load(x_ptr + starts[:, None] + cols[None, :], mask=mask, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + cols, mask=col_mask, other=0.0).to(tl.float32)
    reciprocal = tl.rsqrt(tl.sum(x * x, 1) / row_length + eps)
    normed = (x * reciprocal[:, None]).to(out_ptr.dtype.element_ty).to(tl.float32)
    out = (normed * weight[None, :]).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + rows[:, None] * row_length + cols[None, :], out, mask=mask)


@triton.jit(do_not_specialize=["num_rows"])
def fused_add_rms_norm_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    out_ptr,
    sum_ptr,
    num_rows,
    row_length,
    x_stride,
    residual_stride,
    eps,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_LENGTH: tl.constexpr,
):
    rows = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    cols = tl.arange(0, BLOCK_LENGTH)
    col_mask = cols < row_length
    mask = (rows < num_rows)[:, None] & col_mask[None, :]
    x = tl.load(x_ptr + rows[:, None] * x_stride + cols[None, :], mask=mask, other=0.0).to(tl.float32)
    residual = tl.load(residual_ptr + rows[:, None] * residual_stride + cols[None, :], mask=mask, other=0.0)
    weight = tl.load(weight_ptr + cols, mask=col_mask, other=0.0).to(tl.float32)
    out_offsets = rows[:, None] * row_length + cols[None, :]
    rounded = (x + residual.to(tl.float32)).to(sum_ptr.dtype.element_ty)
    tl.store(sum_ptr + out_offsets, rounded, mask=mask)
    # The statistics are those of the sum that the next layer will read back, so that fused and unfused agree bit for bit.
    total = rounded.to(tl.float32)
    reciprocal = tl.rsqrt(tl.sum(total * total, 1) / row_length + eps)
    normed = (total * reciprocal[:, None]).to(out_ptr.dtype.element_ty).to(tl.float32)
    out = (normed * weight[None, :]).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + out_offsets, out, mask=mask)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """``x[T, H]`` (or ``[T, heads, H]``, any row strides) normed over its last dimension and scaled by ``weight[H]``.

    Returns a contiguous tensor of x's shape and dtype. Raises ValueError for a shape or a stride that the kernel cannot take.
    """
    _check(x, weight)
    if x.ndim not in (2, 3):
        raise ValueError(f"rms_norm: x must have 2 or 3 dimensions, not {x.ndim}")
    require_unit_stride("rms_norm: x", x)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if x.numel() == 0:
        return out
    row_length = x.shape[-1]
    rows_inner = x.shape[1] if x.ndim == 3 else 1
    num_rows = x.shape[0] * rows_inner
    block_rows, block_length, num_warps = row_tile(row_length)
    launch(
        rms_norm_kernel,
        (ceil_div(num_rows, block_rows),),
        x,
        weight,
        out,
        num_rows,
        row_length,
        rows_inner,
        x.stride(0),
        x.stride(1) if x.ndim == 3 else 0,
        eps,
        BLOCK_ROWS=block_rows,
        BLOCK_LENGTH=block_length,
        num_warps=num_warps,
        num_stages=1,
    )
    return out


def fused_add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """``(rms_norm(s, weight, eps), s)`` with ``s = x + residual`` rounded once to x's dtype; all ``[T, H]``.

    Raises ValueError for shapes that differ or a stride that the kernel cannot take.
    """
    _check(x, weight)
    if x.ndim != 2 or residual.shape != x.shape or residual.dtype != x.dtype:
        raise ValueError(
            f"fused_add_rms_norm: x and residual must be [T, H] alike, not {tuple(x.shape)} {x.dtype} "
            f"and {tuple(residual.shape)} {residual.dtype}"
        )
    require_unit_stride("fused_add_rms_norm: x", x)
    require_unit_stride("fused_add_rms_norm: residual", residual)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    total = torch.empty_like(out)
    if x.numel() == 0:
        return out, total
    num_rows, row_length = x.shape
    block_rows, block_length, num_warps = row_tile(row_length)
    launch(
        fused_add_rms_norm_kernel,
        (ceil_div(num_rows, block_rows),),
        x,
        residual,
        weight,
        out,
        total,
        num_rows,
        row_length,
        x.stride(0),
        residual.stride(0),
        eps,
        BLOCK_ROWS=block_rows,
        BLOCK_LENGTH=block_length,
        num_warps=num_warps,
        num_stages=1,
    )
    return out, total


def _check(x: Tensor, weight: Tensor) -> None:
    if weight.shape != x.shape[-1:] or not weight.is_contiguous():
        raise ValueError(
            f"the norm's weight must be contiguous, of shape {tuple(x.shape[-1:])}, not {tuple(weight.shape)}"
        )


def compile_cases() -> list[CompileCase]:
    """Llama-3-8B's, SmolLM2-135M's and a QK-norm's rows."""
    cases: list[CompileCase] = []
    for dtype in (torch.bfloat16, torch.float32):
        for hidden_size in (576, 4096, 8192):
            x = torch.empty(4096, hidden_size, dtype=dtype, device="meta")
            weight = torch.empty(hidden_size, dtype=dtype, device="meta")
            label = f"{str(dtype).removeprefix('torch.')}_h{hidden_size}"
            cases += capture(f"rms_norm_{label}", lambda x=x, w=weight: rms_norm(x, w, 1e-5))
            cases += capture(f"fused_add_rms_norm_{label}", lambda x=x, w=weight: fused_add_rms_norm(x, x, w, 1e-5))
    qkv = torch.empty(4096, 6144, dtype=torch.bfloat16, device="meta")
    weight = torch.empty(128, dtype=torch.bfloat16, device="meta")
    return cases + capture("qk_norm_d128", lambda: rms_norm(qkv[:, :4096].view(4096, 32, 128), weight, 1e-6))
