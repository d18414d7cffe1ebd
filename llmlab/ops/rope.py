"""Rotary position embedding (Su et al. 2021, arXiv:2104.09864, section 3.4.2), from a table of cosines and sines.

Dimension ``i`` is paired with ``i + rotary_dim/2`` (the "rotate half" order of GPT-NeoX and Hugging Face), and each pair is
turned by ``position · inv_freq[i]``.
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor

from llmlab.ops.registry import Cost, op


def _rotary_embedding_cost(positions: Tensor, q: Tensor, k: Tensor, cos_sin_cache: Tensor) -> Cost:
    rotary_dim = cos_sin_cache.shape[1]
    rotated = positions.numel() * (q.shape[1] + k.shape[1]) * rotary_dim
    moved = 2 * (q.numel() + k.numel()) * q.element_size()
    table = positions.numel() * (rotary_dim * cos_sin_cache.element_size() + positions.element_size())
    return Cost(3 * rotated, moved + table)


@op(cost=_rotary_embedding_cost)
def rotary_embedding(
    positions: Int[Tensor, "num_sched_tokens"],
    q: Float[Tensor, "num_sched_tokens num_heads head_dim"],
    k: Float[Tensor, "num_sched_tokens num_kv_heads head_dim"],
    cos_sin_cache: Float[Tensor, "max_position rotary_dim"],
) -> tuple[
    Float[Tensor, "num_sched_tokens num_heads head_dim"], Float[Tensor, "num_sched_tokens num_kv_heads head_dim"]
]:
    """Rotate q and k by their positions. A row of the float32 table is ``[cos(rotary_dim/2) | sin(rotary_dim/2)]``.

    Computed in float32 and rounded once; dimensions from ``rotary_dim`` on pass through. Either may have no heads at all:
    so the other is rotated alone.
    """
    cos, sin = cos_sin_cache[positions.long()].float().unsqueeze(1).chunk(2, dim=-1)
    half = cos.shape[-1]

    def rotate(x: Tensor) -> Tensor:
        first, second = x[..., :half].float(), x[..., half : 2 * half].float()
        turned = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)
        return torch.cat((turned, x[..., 2 * half :]), dim=-1)

    return rotate(q), rotate(k)
