"""The gated activation between the two halves of the FFN (Shazeer 2020, arXiv:2002.05202, SwiGLU)."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from llmlab.ops.registry import Cost, op


def _silu_and_mul_cost(x: Tensor) -> Cost:
    # exp, add, divide, two products for each output; 2I elements read, I written: 3/5 of what SiLU and product apart move.
    out = x.numel() // 2
    return Cost(5 * out, 3 * out * x.element_size())


@op(cost=_silu_and_mul_cost)
def silu_and_mul(
    x: Float[Tensor, "num_sched_tokens 2*intermediate_size"],
) -> Float[Tensor, "num_sched_tokens intermediate_size"]:
    """``silu(x[:, :I]) · x[:, I:]`` (gate first), in float32, rounded once."""
    gate, up = x.float().chunk(2, dim=-1)
    return (torch.nn.functional.silu(gate) * up).to(x.dtype)
