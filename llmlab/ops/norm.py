"""RMSNorm, alone and fused with the residual addition before it (Zhang & Sennrich 2019, arXiv:1910.07467, eq. 4)."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from llmlab.ops.registry import Cost, op


def _rms_norm_cost(x: Tensor, weight: Tensor, eps: float) -> Cost:
    # square, add, scale, weight: four operations an element by convention; x is read and written once, the weight read.
    return Cost(4 * x.numel(), 2 * x.numel() * x.element_size() + weight.numel() * weight.element_size())


@op(cost=_rms_norm_cost)
def rms_norm(
    x: Float[Tensor, "num_sched_tokens hidden_size"], weight: Float[Tensor, "hidden_size"], eps: float
) -> Float[Tensor, "num_sched_tokens hidden_size"]:
    """``x / sqrt(mean(x²) + eps) · weight`` over the last dimension.

    Statistics in float32; the normalised row is rounded to ``x.dtype`` before it meets the weight, as in Hugging Face's Llama.
    """
    x32 = x.float()
    normed = x32 * torch.rsqrt(x32.square().mean(-1, keepdim=True) + eps)
    return weight * normed.to(x.dtype)


def _fused_add_rms_norm_cost(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Cost:
    # x and residual read, sum and normed written: four passes, where add and norm apart need five.
    return Cost(5 * x.numel(), 4 * x.numel() * x.element_size() + weight.numel() * weight.element_size())


@op(cost=_fused_add_rms_norm_cost)
def fused_add_rms_norm(
    x: Float[Tensor, "num_sched_tokens hidden_size"],
    residual: Float[Tensor, "num_sched_tokens hidden_size"],
    weight: Float[Tensor, "hidden_size"],
    eps: float,
) -> tuple[Float[Tensor, "num_sched_tokens hidden_size"], Float[Tensor, "num_sched_tokens hidden_size"]]:
    """``residual ← x + residual`` (rounded to the storage dtype), then :func:`rms_norm` of it: ``(normed, residual)``."""
    residual = x + residual
    return rms_norm.reference(residual, weight, eps), residual
