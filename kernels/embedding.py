"""Rows picked from a table: the token embedding, and each request's last token before the LM head."""

import torch
import triton
import triton.language as tl
from llmlab.kernels.launch import launch
from llmlab.kernels.spec import CompileCase, capture
from llmlab.kernels.tiles import ceil_div, next_power_of_2, require_unit_stride
from torch import Tensor


@triton.jit
def copy_rows_kernel(
    index_ptr, table_ptr, out_ptr, row_length, index_stride, table_stride, offset, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = cols < row_length
    source = tl.load(index_ptr + row * index_stride).to(tl.int64) + offset
    values = tl.load(table_ptr + source * table_stride + cols, mask=mask, other=0.0)
    tl.store(out_ptr + row * row_length + cols, values, mask=mask)


def embedding(token_ids: Tensor, weight: Tensor) -> Tensor:
    """``weight[V, H]`` looked up by ``token_ids[T]`` (int32 or int64, each in ``[0, V)``) → ``[T, H]`` in weight's dtype."""
    return _copy_rows("embedding", token_ids, weight, 0)


def gather_last_tokens(x: Tensor, query_start_loc: Tensor) -> Tensor:
    """The last row of each request: ``x[T, H]`` at ``query_start_loc[1:] - 1`` → ``[R, H]``. No request may be empty."""
    return _copy_rows("gather_last_tokens", query_start_loc[1:], x, -1)


def _copy_rows(op: str, index: Tensor, table: Tensor, offset: int) -> Tensor:
    if index.ndim != 1 or table.ndim != 2:
        raise ValueError(f"{op}: needs a vector and a matrix, not {tuple(index.shape)} and {tuple(table.shape)}")
    require_unit_stride(op, table)
    num_rows, row_length = index.shape[0], table.shape[1]
    out = torch.empty(num_rows, row_length, dtype=table.dtype, device=table.device)
    if out.numel() == 0:
        return out
    block = min(next_power_of_2(row_length), 2048)
    launch(
        copy_rows_kernel,
        (num_rows, ceil_div(row_length, block)),
        index,
        table,
        out,
        row_length,
        index.stride(0),
        table.stride(0),
        offset,
        BLOCK=block,
        num_warps=max(1, min(8, block // 256)),
        num_stages=1,
    )
    return out


def compile_cases() -> list[CompileCase]:
    """Llama-3-8B's table and SmolLM2-135M's."""
    cases: list[CompileCase] = []
    for name, vocab_size, hidden_size in (("llama3_8b", 128256, 4096), ("smollm2_135m", 49152, 576)):
        token_ids = torch.empty(4096, dtype=torch.int64, device="meta")
        weight = torch.empty(vocab_size, hidden_size, dtype=torch.bfloat16, device="meta")
        cases += capture(f"embedding_{name}", lambda t=token_ids, w=weight: embedding(t, w))
    x = torch.empty(4096, 4096, dtype=torch.bfloat16, device="meta")
    starts = torch.empty(65, dtype=torch.int32, device="meta")
    return cases + capture("gather_last_tokens", lambda: gather_last_tokens(x, starts))
