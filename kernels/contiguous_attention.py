"""Attention over contiguous keys and values: the paged kernel with nothing between a position and its row.

It is there to be compared with ``paged_attention``: same loop, same tiles, no block table. What they differ by is what the
indirection costs.
"""

import torch
from llmlab.kernels.attention_tile import attention_work, choose_tile
from llmlab.kernels.paged_kernel import launch_paged_attention
from llmlab.kernels.spec import CompileCase, capture
from llmlab.kernels.tiles import architecture, require_product_dtype, require_unit_stride
from torch import Tensor


def contiguous_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    query_start_loc: Tensor,
    key_start_loc: Tensor,
    scale: float,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Causal attention, bottom-right aligned, of flattened requests: ``q[T, Hq, D]``, ``k, v[S, Hkv, D]``.

    Request r has the queries ``query_start_loc[r] .. [r + 1]`` and the keys ``key_start_loc[r] .. [r + 1]`` (int32). Otherwise
    as ``paged_attention``. Raises ValueError for shapes or values that make no sense.
    """
    shaped = q.ndim == 3 and k.ndim == 3 and v.shape == k.shape and k.shape[2] == q.shape[2]
    if not shaped or not k.shape[1] or q.shape[1] % k.shape[1]:
        raise ValueError(
            "contiguous_attention: q must be [T, Hq, D] and k, v [S, Hkv, D] with Hkv dividing Hq, not "
            f"{tuple(q.shape)}, {tuple(k.shape)} and {tuple(v.shape)}"
        )
    if query_start_loc.ndim != 1 or key_start_loc.shape != query_start_loc.shape:
        raise ValueError(
            "contiguous_attention: query_start_loc and key_start_loc must be [R + 1] alike, not "
            f"{tuple(query_start_loc.shape)} and {tuple(key_start_loc.shape)}"
        )
    for name, value in (("scale", scale), ("sliding_window", sliding_window), ("soft_cap", soft_cap)):
        if value is not None and not value > 0:
            raise ValueError(f"contiguous_attention: {name} must be positive, not {value}")
    require_product_dtype("contiguous_attention", q)
    if k.dtype != q.dtype or v.dtype != q.dtype:
        raise ValueError(f"contiguous_attention: q is {q.dtype}, k and v are {k.dtype} and {v.dtype}")
    starts = (("query_start_loc", query_start_loc), ("key_start_loc", key_start_loc))
    for name, tensor in (("q", q), ("k", k), ("v", v), *starts):
        require_unit_stride(f"contiguous_attention: {name}", tensor)
    num_tokens, num_heads, head_dim = q.shape
    num_reqs = query_start_loc.shape[0] - 1
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    lse = torch.empty(num_tokens, num_heads, dtype=torch.float32, device=q.device) if return_lse else None
    if out.numel():
        tile = choose_tile(num_tokens, num_reqs, num_heads // k.shape[1], head_dim, q.dtype, architecture(q.device))
        launch_paged_attention(
            out,
            lse,
            q,
            k.unsqueeze(0),
            v.unsqueeze(0),
            key_start_loc.unsqueeze(1),
            query_start_loc,
            query_start_loc[1:],  # not read: lengths follow from key_start_loc
            scale,
            sliding_window,
            soft_cap,
            tile,
            paged=False,
        )
    return out if lse is None else (out, lse)


def compile_cases() -> list[CompileCase]:
    """Llama-3-8B's prefill and decode, to be set beside the paged ones."""
    cases: list[CompileCase] = []
    for name, num_tokens, num_reqs in (("prefill_d128", 8192, 1), ("decode_d128", 64, 64)):
        q = torch.empty(num_tokens, 32, 128, dtype=torch.bfloat16, device="meta")
        k = torch.empty(65536, 8, 128, dtype=torch.bfloat16, device="meta")
        starts = torch.empty(num_reqs + 1, dtype=torch.int32, device="meta")
        work = attention_work(choose_tile(num_tokens, num_reqs, 4, 128, torch.bfloat16, "hopper"), 128, 2)
        cases += capture(
            name,
            lambda q=q, k=k, s=starts: contiguous_attention(q, k, k, s, s, 128**-0.5),
            work=work,
            targets=("sm_90", "sm_100"),
        )
    return cases
