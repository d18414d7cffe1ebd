"""The write into the paged KV cache (Kwon et al. 2023, arXiv:2309.06180, section 4)."""

from __future__ import annotations

from jaxtyping import Float, Int
from torch import Tensor

from llmlab.ops.registry import Cost, op


def _reshape_and_cache_cost(k: Tensor, v: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor) -> Cost:
    elements = k.numel() + v.numel()
    slots = slot_mapping.numel() * slot_mapping.element_size()
    return Cost(0, elements * (k.element_size() + key_cache.element_size()) + slots)


@op(cost=_reshape_and_cache_cost)
def reshape_and_cache(
    k: Float[Tensor, "num_sched_tokens num_kv_heads head_dim"],
    v: Float[Tensor, "num_sched_tokens num_kv_heads head_dim"],
    key_cache: Float[Tensor, "num_blocks block_size num_kv_heads head_dim"],
    value_cache: Float[Tensor, "num_blocks block_size num_kv_heads head_dim"],
    slot_mapping: Int[Tensor, "num_sched_tokens"],
) -> None:
    """Scatter each token's K and V to its slot, in place. ``slot = block · block_size + offset``; slot −1 is skipped."""
    slots = slot_mapping.long()
    block_size = key_cache.shape[1]
    if slots.numel() and int(slots.min()) < 0:
        kept = slots >= 0
        k, v, slots = k[kept], v[kept], slots[kept]
    block, offset = slots // block_size, slots % block_size
    key_cache[block, offset] = k.to(key_cache.dtype)
    value_cache[block, offset] = v.to(value_cache.dtype)
