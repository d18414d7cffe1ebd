"""Rotary position embedding (Su et al., 2021), pairs (i, i + rotary_dim / 2) as in NeoX and Hugging Face.

Three forms: angles from a table of cosines and sines; angles computed in the kernel (to weigh the table against
arithmetic); and the table form joined with the KV-cache write. One program a token; float32 inside, rounded once.
"""

import torch
import triton
import triton.language as tl
from llmlab.kernels.cache import check_cache
from llmlab.kernels.launch import launch
from llmlab.kernels.spec import CompileCase, capture
from llmlab.kernels.tiles import next_power_of_2, require_near_heads, require_unit_stride
from torch import Tensor


@triton.jit
def _cos_and_sin(angle):
    """Cosine and sine of a float32 angle, to about an ulp up to 1e7 radians.

    The device library's own have a slow path for large angles that keeps an array in local memory. Here the quadrant is found
    in float64, and Taylor's series to x^9 and x^10 does the rest within pi/4.
    """
    turns = angle.to(tl.float64) * 0.6366197723675814  # quarter turns: 2 / pi
    quadrant = tl.floor(turns + 0.5)
    x = ((turns - quadrant) * 1.5707963267948966).to(tl.float32)
    square = x * x
    sine = 1.0 + square * (-1 / 6 + square * (1 / 120 + square * (-1 / 5040 + square * (1 / 362880))))
    sine *= x
    cosine = 1 / 24 + square * (-1 / 720 + square * (1 / 40320 + square * (-1 / 3628800)))
    cosine = 1.0 + square * (-0.5 + square * cosine)
    index = quadrant.to(tl.int32) & 3
    odd = (index & 1) == 1
    cos = tl.where(odd, sine, cosine)
    sin = tl.where(odd, cosine, sine)
    return tl.where((index == 1) | (index == 2), -cos, cos), tl.where(index >= 2, -sin, sin)


@triton.jit
def _rotate_heads(
    in_ptr,
    out_ptr,
    in_stride_head,
    out_stride_head,
    cos,
    sin,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_TAIL: tl.constexpr,
):
    """Rotate one token's heads; the pointers stand at its first head, and dims from ROTARY_DIM on are copied."""
    HALF: tl.constexpr = ROTARY_DIM // 2
    heads = tl.arange(0, BLOCK_HEADS)
    dims = tl.arange(0, BLOCK_HALF)
    mask = (heads < NUM_HEADS)[:, None] & (dims < HALF)[None, :]
    in_offsets = heads[:, None] * in_stride_head + dims[None, :]
    out_offsets = heads[:, None] * out_stride_head + dims[None, :]
    first = tl.load(in_ptr + in_offsets, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(in_ptr + in_offsets + HALF, mask=mask, other=0.0).to(tl.float32)
    dtype = out_ptr.dtype.element_ty
    tl.store(out_ptr + out_offsets, (first * cos[None, :] - second * sin[None, :]).to(dtype), mask=mask)
    tl.store(out_ptr + out_offsets + HALF, (second * cos[None, :] + first * sin[None, :]).to(dtype), mask=mask)
    if ROTARY_DIM < HEAD_DIM:
        tail = ROTARY_DIM + tl.arange(0, BLOCK_TAIL)
        tail_mask = (heads < NUM_HEADS)[:, None] & (tail < HEAD_DIM)[None, :]
        rest = tl.load(in_ptr + heads[:, None] * in_stride_head + tail[None, :], mask=tail_mask, other=0.0)
        tl.store(out_ptr + heads[:, None] * out_stride_head + tail[None, :], rest.to(dtype), mask=tail_mask)


@triton.jit
def rotary_embedding_kernel(
    positions_ptr,
    q_ptr,
    k_ptr,
    angles_ptr,  # the table [max_position, ROTARY_DIM] of cosines | sines, or the frequencies [ROTARY_DIM / 2]
    q_out_ptr,
    k_out_ptr,
    positions_stride,
    q_stride_token,
    q_stride_head,
    k_stride_token,
    k_stride_head,
    table_stride,
    attention_factor,
    FROM_TABLE: tl.constexpr,
    NUM_Q_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    BLOCK_Q_HEADS: tl.constexpr,
    BLOCK_KV_HEADS: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_TAIL: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    HALF: tl.constexpr = ROTARY_DIM // 2
    dims = tl.arange(0, BLOCK_HALF)
    position = tl.load(positions_ptr + token * positions_stride).to(tl.int64)
    if FROM_TABLE:
        row_ptr = angles_ptr + position * table_stride
        cos = tl.load(row_ptr + dims, mask=dims < HALF, other=0.0)
        sin = tl.load(row_ptr + HALF + dims, mask=dims < HALF, other=0.0)
    else:
        angle = position.to(tl.float32) * tl.load(angles_ptr + dims, mask=dims < HALF, other=0.0)
        cos, sin = _cos_and_sin(angle)
        cos *= attention_factor
        sin *= attention_factor
    _rotate_heads(
        q_ptr + token * q_stride_token,
        q_out_ptr + token * (NUM_Q_HEADS * HEAD_DIM),
        q_stride_head,
        HEAD_DIM,
        cos,
        sin,
        NUM_Q_HEADS,
        HEAD_DIM,
        ROTARY_DIM,
        BLOCK_Q_HEADS,
        BLOCK_HALF,
        BLOCK_TAIL,
    )
    _rotate_heads(
        k_ptr + token * k_stride_token,
        k_out_ptr + token * (NUM_KV_HEADS * HEAD_DIM),
        k_stride_head,
        HEAD_DIM,
        cos,
        sin,
        NUM_KV_HEADS,
        HEAD_DIM,
        ROTARY_DIM,
        BLOCK_KV_HEADS,
        BLOCK_HALF,
        BLOCK_TAIL,
    )


@triton.jit
def rope_and_cache_kernel(
    positions_ptr,
    q_ptr,
    k_ptr,
    v_ptr,
    table_ptr,
    q_out_ptr,
    key_cache_ptr,
    value_cache_ptr,
    slot_mapping_ptr,
    q_stride_token,
    q_stride_head,
    k_stride_token,
    k_stride_head,
    v_stride_token,
    v_stride_head,
    table_stride,
    key_stride_block,
    key_stride_slot,
    key_stride_head,
    value_stride_block,
    value_stride_slot,
    value_stride_head,
    block_size,
    NUM_Q_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    BLOCK_Q_HEADS: tl.constexpr,
    BLOCK_KV_HEADS: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_TAIL: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    HALF: tl.constexpr = ROTARY_DIM // 2
    dims = tl.arange(0, BLOCK_HALF)
    row_ptr = table_ptr + tl.load(positions_ptr + token).to(tl.int64) * table_stride
    cos = tl.load(row_ptr + dims, mask=dims < HALF, other=0.0)
    sin = tl.load(row_ptr + HALF + dims, mask=dims < HALF, other=0.0)
    _rotate_heads(
        q_ptr + token * q_stride_token,
        q_out_ptr + token * (NUM_Q_HEADS * HEAD_DIM),
        q_stride_head,
        HEAD_DIM,
        cos,
        sin,
        NUM_Q_HEADS,
        HEAD_DIM,
        ROTARY_DIM,
        BLOCK_Q_HEADS,
        BLOCK_HALF,
        BLOCK_TAIL,
    )
    slot = tl.load(slot_mapping_ptr + token).to(tl.int64)
    if slot >= 0:
        block = slot // block_size
        index = slot % block_size
        _rotate_heads(
            k_ptr + token * k_stride_token,
            key_cache_ptr + block * key_stride_block + index * key_stride_slot,
            k_stride_head,
            key_stride_head,
            cos,
            sin,
            NUM_KV_HEADS,
            HEAD_DIM,
            ROTARY_DIM,
            BLOCK_KV_HEADS,
            BLOCK_HALF,
            BLOCK_TAIL,
        )
        heads = tl.arange(0, BLOCK_KV_HEADS)
        all_dims = tl.arange(0, BLOCK_DIM)
        mask = (heads < NUM_KV_HEADS)[:, None] & (all_dims < HEAD_DIM)[None, :]
        v = tl.load(
            v_ptr + token * v_stride_token + heads[:, None] * v_stride_head + all_dims[None, :], mask=mask, other=0.0
        )
        value_slot_ptr = value_cache_ptr + block * value_stride_block + index * value_stride_slot
        tl.store(
            value_slot_ptr + heads[:, None] * value_stride_head + all_dims[None, :],
            v.to(value_cache_ptr.dtype.element_ty),
            mask=mask,
        )


def rotary_embedding(positions: Tensor, q: Tensor, k: Tensor, cos_sin_cache: Tensor) -> tuple[Tensor, Tensor]:
    """Rotate ``q[T, Hq, D]`` and ``k[T, Hkv, D]`` by rows ``positions[T]`` of ``cos_sin_cache[P, rotary_dim]`` (float32).

    A row is cosines | sines, of rotary_dim / 2 each. Dims from rotary_dim on pass through. Returns new contiguous tensors.
    Raises ValueError for a shape or a stride that the kernel cannot take.
    """
    require_unit_stride("rotary_embedding: cos_sin_cache", cos_sin_cache)
    return _rotate(positions, q, k, cos_sin_cache, cos_sin_cache.shape[1], cos_sin_cache.stride(0), 1.0, True)


def rotary_embedding_computed(
    positions: Tensor, q: Tensor, k: Tensor, inv_freq: Tensor, attention_factor: float = 1.0
) -> tuple[Tensor, Tensor]:
    """As ``rotary_embedding``, with the angles ``positions * inv_freq[rotary_dim / 2]`` (float32) and their cosines and sines,
    times ``attention_factor``, computed in the kernel instead of read from a table."""
    if inv_freq.ndim != 1 or not inv_freq.is_contiguous():
        raise ValueError(
            f"rotary_embedding_computed: inv_freq must be contiguous [rotary_dim / 2], not {tuple(inv_freq.shape)}"
        )
    return _rotate(positions, q, k, inv_freq, 2 * inv_freq.shape[0], 0, attention_factor, False)


def rope_and_cache(
    positions: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos_sin_cache: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
) -> Tensor:
    """``rotary_embedding`` and ``reshape_and_cache`` in one launch: returns the rotated q, and writes the rotated k and v into
    their slots (``[N, B, Hkv, D]`` caches; a slot of −1 is skipped). The rotated k goes nowhere else."""
    rotary_dim = cos_sin_cache.shape[1]
    _check_heads(positions, q, k, rotary_dim)
    check_cache("rope_and_cache", k, v, key_cache, value_cache, slot_mapping)
    require_unit_stride("rope_and_cache: cos_sin_cache", cos_sin_cache)
    num_tokens, num_heads, head_dim = q.shape
    num_kv_heads = k.shape[1]
    q_out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if num_tokens == 0:
        return q_out
    tile = _tile(num_heads, num_kv_heads, head_dim, rotary_dim)
    launch(
        rope_and_cache_kernel,
        (num_tokens,),
        positions.contiguous(),
        q,
        k,
        v,
        cos_sin_cache,
        q_out,
        key_cache,
        value_cache,
        slot_mapping.contiguous(),
        q.stride(0),
        q.stride(1),
        k.stride(0),
        k.stride(1),
        v.stride(0),
        v.stride(1),
        cos_sin_cache.stride(0),
        key_cache.stride(0),
        key_cache.stride(1),
        key_cache.stride(2),
        value_cache.stride(0),
        value_cache.stride(1),
        value_cache.stride(2),
        key_cache.shape[1],
        BLOCK_DIM=next_power_of_2(head_dim),
        **tile,
    )
    return q_out


def _rotate(
    positions: Tensor,
    q: Tensor,
    k: Tensor,
    angles: Tensor,
    rotary_dim: int,
    table_stride: int,
    attention_factor: float,
    from_table: bool,
) -> tuple[Tensor, Tensor]:
    _check_heads(positions, q, k, rotary_dim)
    num_tokens, num_heads, head_dim = q.shape
    q_out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    k_out = torch.empty(k.shape, dtype=k.dtype, device=k.device)
    if num_tokens == 0:
        return q_out, k_out
    launch(
        rotary_embedding_kernel,
        (num_tokens,),
        positions,
        q,
        k,
        angles,
        q_out,
        k_out,
        positions.stride(0),
        q.stride(0),
        q.stride(1),
        k.stride(0),
        k.stride(1),
        table_stride,
        attention_factor,
        FROM_TABLE=from_table,
        **_tile(num_heads, k.shape[1], head_dim, rotary_dim),
    )
    return q_out, k_out


def _tile(num_heads: int, num_kv_heads: int, head_dim: int, rotary_dim: int) -> dict[str, int]:
    """Constexprs and warps for one token a program: about sixteen pairs a thread."""
    block_heads = next_power_of_2(num_heads)
    block_half = next_power_of_2(rotary_dim // 2)
    return {
        "NUM_Q_HEADS": num_heads,
        "NUM_KV_HEADS": num_kv_heads,
        "HEAD_DIM": head_dim,
        "ROTARY_DIM": rotary_dim,
        "BLOCK_Q_HEADS": block_heads,
        "BLOCK_KV_HEADS": next_power_of_2(num_kv_heads),
        "BLOCK_HALF": block_half,
        "BLOCK_TAIL": next_power_of_2(head_dim - rotary_dim),
        "num_warps": max(1, min(8, block_heads * block_half // 512)),
        "num_stages": 1,
    }


def _check_heads(positions: Tensor, q: Tensor, k: Tensor, rotary_dim: int) -> None:
    if q.ndim != 3 or k.ndim != 3 or q.shape[0] != k.shape[0] or q.shape[2] != k.shape[2]:
        raise ValueError(f"q must be [T, Hq, D] and k [T, Hkv, D], not {tuple(q.shape)} and {tuple(k.shape)}")
    if positions.shape != q.shape[:1]:
        raise ValueError(f"positions must be [{q.shape[0]}], not {tuple(positions.shape)}")
    if rotary_dim % 2 or not 0 < rotary_dim <= q.shape[2]:
        raise ValueError(f"rotary_dim must be even and within 2..{q.shape[2]} (head_dim), not {rotary_dim}")
    for name, tensor in (("q", q), ("k", k)):
        require_unit_stride(name, tensor)
        require_near_heads(name, tensor)


def compile_cases() -> list[CompileCase]:
    """Llama-3-8B's heads in every form, SmolLM2-135M's (odd counts), a head_dim of 80 and a partial rotation."""
    cases: list[CompileCase] = []
    for name, num_heads, num_kv_heads, head_dim, rotary_dim in (
        ("llama3_8b", 32, 8, 128, 128),
        ("smollm2_135m", 9, 3, 64, 64),
        ("d80", 32, 32, 80, 80),
        ("partial_d128", 32, 8, 128, 64),
    ):
        qkv = torch.empty(4096, num_heads + 2 * num_kv_heads, head_dim, dtype=torch.bfloat16, device="meta")
        q, k, v = qkv.split([num_heads, num_kv_heads, num_kv_heads], 1)
        positions = torch.empty(4096, dtype=torch.int64, device="meta")
        table = torch.empty(8192, rotary_dim, dtype=torch.float32, device="meta")
        cases += capture(f"table_{name}", lambda p=positions, q=q, k=k, t=table: rotary_embedding(p, q, k, t))
        if name == "llama3_8b":
            inv_freq = torch.empty(rotary_dim // 2, dtype=torch.float32, device="meta")
            cases += capture(
                "computed_llama3_8b", lambda p=positions, q=q, k=k, f=inv_freq: rotary_embedding_computed(p, q, k, f)
            )
        cache = torch.empty(2, 1024, 16, num_kv_heads, head_dim, dtype=torch.bfloat16, device="meta")
        cases += capture(
            f"and_cache_{name}",
            lambda p=positions, q=q, k=k, v=v, t=table, c=cache: rope_and_cache(p, q, k, v, t, c[0], c[1], p),
        )
    return cases
