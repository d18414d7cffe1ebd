"""SwiGLU's elementwise half (Shazeer, 2020): ``silu(gate) * up`` in one pass, instead of two passes and a tensor between."""

import torch
import triton
import triton.language as tl
from llmlab.kernels.launch import launch
from llmlab.kernels.spec import CompileCase, capture
from llmlab.kernels.tiles import ceil_div, next_power_of_2, require_unit_stride
from torch import Tensor


@triton.jit
def silu_and_mul_kernel(x_ptr, out_ptr, intermediate_size, x_stride, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = cols < intermediate_size
    row_ptr = x_ptr + token * x_stride
    gate = tl.load(row_ptr + cols, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(row_ptr + intermediate_size + cols, mask=mask, other=0.0).to(tl.float32)
    out = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(out_ptr + token * intermediate_size + cols, out.to(out_ptr.dtype.element_ty), mask=mask)


def silu_and_mul(x: Tensor) -> Tensor:
    """``x[T, 2I]``, gate in the first half and up in the second, → ``[T, I]``: float32 inside, rounded once to x's dtype."""
    if x.ndim != 2 or x.shape[1] % 2:
        raise ValueError(f"silu_and_mul: x must be [T, 2 * intermediate_size], not {tuple(x.shape)}")
    require_unit_stride("silu_and_mul: x", x)
    num_tokens, intermediate_size = x.shape[0], x.shape[1] // 2
    out = torch.empty(num_tokens, intermediate_size, dtype=x.dtype, device=x.device)
    if out.numel() == 0:
        return out
    block = min(next_power_of_2(intermediate_size), 2048)
    launch(
        silu_and_mul_kernel,
        (num_tokens, ceil_div(intermediate_size, block)),
        x,
        out,
        intermediate_size,
        x.stride(0),
        BLOCK=block,
        num_warps=max(1, min(8, block // 256)),
        num_stages=1,
    )
    return out


def compile_cases() -> list[CompileCase]:
    """Llama-3-8B's intermediate size and SmolLM2-135M's."""
    cases: list[CompileCase] = []
    for dtype in (torch.bfloat16, torch.float32):
        for intermediate_size in (1536, 14336):
            x = torch.empty(4096, 2 * intermediate_size, dtype=dtype, device="meta")
            label = f"{str(dtype).removeprefix('torch.')}_i{intermediate_size}"
            cases += capture(f"silu_and_mul_{label}", lambda x=x: silu_and_mul(x))
    return cases
