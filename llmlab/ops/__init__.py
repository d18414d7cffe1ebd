"""Everything that the model computes, as ops with four faces each (see :mod:`llmlab.ops.registry`).

``llmlab.ops.NAME(...)`` runs where its tensors are; ``.reference``, ``.kernel``, ``.cpu`` and ``.cost`` are the faces.
"""

import torch

from llmlab.ops.attention import merge_attention_states, paged_attention
from llmlab.ops.cache import reshape_and_cache
from llmlab.ops.embedding import embedding, gather_last_tokens
from llmlab.ops.linear import linear
from llmlab.ops.mlp import silu_and_mul
from llmlab.ops.norm import fused_add_rms_norm, rms_norm
from llmlab.ops.registry import BACKENDS, Cost, Op, OpSet, op, record_ops
from llmlab.ops.rope import rotary_embedding
from llmlab.ops.sampling import (
    apply_min_p,
    apply_penalties,
    apply_temperature,
    apply_top_k_top_p,
    greedy_argmax,
    gumbel_argmax,
    top_n_logprobs,
)

ALL: dict[str, Op] = {name: value for name, value in globals().copy().items() if isinstance(value, Op)}


def bind(backend: str, device: torch.device | str) -> OpSet:
    """All ops bound to one backend ("torch", "triton" or "reference") on one device."""
    return OpSet(ALL, backend, torch.device(device))


__all__ = ["ALL", "BACKENDS", "Cost", "Op", "OpSet", "bind", "op", "record_ops", *ALL]
