"""The matrix product with a weight ``[out_features, in_features]``: QKV, O, gate/up, down and LM head are all this op."""

from __future__ import annotations

import torch
from jaxtyping import Float, Real
from torch import Tensor

from llmlab.ops.quantization import Int8Weight
from llmlab.ops.registry import Cost, op


def _linear_cost(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Cost:
    (tokens, in_features), out_features, size = x.shape, weight.shape[0], x.element_size()
    flops = 2 * tokens * in_features * out_features
    moved = in_features * out_features * weight.itemsize + tokens * (in_features + out_features) * size
    if bias is not None:
        flops, moved = flops + tokens * out_features, moved + out_features * size
    return Cost(flops, moved)


@op(cost=_linear_cost)
def linear(
    x: Float[Tensor, "num_sched_tokens in_features"],
    weight: Real[Tensor, "out_features in_features"],  # int8 when quantised
    bias: Float[Tensor, "out_features"] | None = None,
) -> Float[Tensor, "num_sched_tokens out_features"]:
    """``x · weightᵀ + bias``; the weight may be a :class:`~llmlab.ops.quantization.Int8Weight` too."""
    if isinstance(weight, Int8Weight):
        return weight.linear(x, bias)
    return torch.nn.functional.linear(x, weight, bias)
