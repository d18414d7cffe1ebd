"""Writing keys and values into the paged cache: token t goes to slot ``slot_mapping[t]`` (block slot // B, place slot % B)."""

import torch
import triton
import triton.language as tl
from llmlab.kernels.launch import launch
from llmlab.kernels.spec import CompileCase, capture
from llmlab.kernels.tiles import next_power_of_2, require_near_heads, require_unit_stride
from torch import Tensor


@triton.jit
def reshape_and_cache_kernel(
    k_ptr,
    v_ptr,
    key_cache_ptr,
    value_cache_ptr,
    slot_mapping_ptr,
    slot_mapping_stride,
    k_stride_token,
    k_stride_head,
    v_stride_token,
    v_stride_head,
    key_stride_block,
    key_stride_slot,
    key_stride_head,
    value_stride_block,
    value_stride_slot,
    value_stride_head,
    block_size,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping_ptr + token * slot_mapping_stride).to(tl.int64)
    if slot < 0:
        return
    block = slot // block_size
    index = slot % block_size
    heads = tl.arange(0, BLOCK_HEADS)
    dims = tl.arange(0, BLOCK_DIM)
    mask = (heads < NUM_KV_HEADS)[:, None] & (dims < HEAD_DIM)[None, :]
    k = tl.load(k_ptr + token * k_stride_token + heads[:, None] * k_stride_head + dims[None, :], mask=mask, other=0.0)
    v = tl.load(v_ptr + token * v_stride_token + heads[:, None] * v_stride_head + dims[None, :], mask=mask, other=0.0)
    key_ptr = key_cache_ptr + block * key_stride_block + index * key_stride_slot
    value_ptr = value_cache_ptr + block * value_stride_block + index * value_stride_slot
    tl.store(
        key_ptr + heads[:, None] * key_stride_head + dims[None, :], k.to(key_cache_ptr.dtype.element_ty), mask=mask
    )
    tl.store(
        value_ptr + heads[:, None] * value_stride_head + dims[None, :],
        v.to(value_cache_ptr.dtype.element_ty),
        mask=mask,
    )


def reshape_and_cache(k: Tensor, v: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor) -> None:
    """Write ``k, v[T, Hkv, D]`` into ``key_cache, value_cache[N, B, Hkv, D]`` at ``slot_mapping[T]`` (int64; −1 skipped).

    Slots within a call must differ. Raises ValueError for shapes that do not belong together.
    """
    check_cache("reshape_and_cache", k, v, key_cache, value_cache, slot_mapping)
    num_tokens, num_kv_heads, head_dim = k.shape
    if num_tokens == 0:
        return
    block_heads, block_dim = next_power_of_2(num_kv_heads), next_power_of_2(head_dim)
    launch(
        reshape_and_cache_kernel,
        (num_tokens,),
        k,
        v,
        key_cache,
        value_cache,
        slot_mapping,
        slot_mapping.stride(0),
        k.stride(0),
        k.stride(1),
        v.stride(0),
        v.stride(1),
        key_cache.stride(0),
        key_cache.stride(1),
        key_cache.stride(2),
        value_cache.stride(0),
        value_cache.stride(1),
        value_cache.stride(2),
        key_cache.shape[1],
        NUM_KV_HEADS=num_kv_heads,
        HEAD_DIM=head_dim,
        BLOCK_HEADS=block_heads,
        BLOCK_DIM=block_dim,
        num_warps=max(1, min(8, block_heads * block_dim // 256)),
        num_stages=1,
    )


def check_cache(op: str, k: Tensor, v: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor) -> None:
    """Raise ValueError, in ``op``'s name, unless new keys and values, caches and slots belong together."""
    if k.ndim != 3 or v.shape != k.shape:
        raise ValueError(f"{op}: k and v must be [T, Hkv, D] alike, not {tuple(k.shape)} and {tuple(v.shape)}")
    if key_cache.ndim != 4 or key_cache.shape[2:] != k.shape[1:] or value_cache.shape != key_cache.shape:
        raise ValueError(
            f"{op}: the caches must be [N, B, {k.shape[1]}, {k.shape[2]}] alike, "
            f"not {tuple(key_cache.shape)} and {tuple(value_cache.shape)}"
        )
    if slot_mapping.shape != k.shape[:1]:
        raise ValueError(f"{op}: slot_mapping must be [{k.shape[0]}], not {tuple(slot_mapping.shape)}")
    for name, tensor in (("k", k), ("v", v), ("key_cache", key_cache), ("value_cache", value_cache)):
        require_unit_stride(f"{op}: {name}", tensor)
        require_near_heads(f"{op}: {name}", tensor)


def compile_cases() -> list[CompileCase]:
    """Llama-3-8B's and SmolLM2-135M's heads, k and v being views of one qkv tensor."""
    cases: list[CompileCase] = []
    for name, num_heads, num_kv_heads, head_dim in (("llama3_8b", 32, 8, 128), ("smollm2_135m", 9, 3, 64)):
        qkv = torch.empty(4096, num_heads + 2 * num_kv_heads, head_dim, dtype=torch.bfloat16, device="meta")
        k, v = qkv[:, num_heads : num_heads + num_kv_heads], qkv[:, num_heads + num_kv_heads :]
        cache = torch.empty(2, 1024, 16, num_kv_heads, head_dim, dtype=torch.bfloat16, device="meta")
        slots = torch.empty(4096, dtype=torch.int64, device="meta")
        cases += capture(name, lambda k=k, v=v, c=cache, s=slots: reshape_and_cache(k, v, c[0], c[1], s))
    return cases
