"""Top-k, top-p and top-n over a vocabulary without sorting it: find the threshold, keep what lies above.

One program a row. A pass over the row finds its highest logit; a second counts and weighs what lies within 2, 4, 8 and 16
of it; the smallest of these windows that holds the threshold is copied aside, usually a few hundred keys of a hundred
thousand; bisection over the keys' integer order then finds the threshold exactly. Ties go to the lower token id.

Exactness: keys order as float32 does, and probability mass is the fixed point of ``llmlab.ops.sampling.softmax_weights``,
whose sums are exact in any order; the kept set is the very one of a sort.
"""

import torch
import triton
import triton.language as tl
from llmlab.kernels.launch import launch
from llmlab.kernels.spec import CompileCase, capture
from llmlab.kernels.tiles import require_unit_stride
from torch import Tensor

BLOCK = 2048
NUM_WARPS = 8
WINDOWS = 4
WEIGHT_BITS = 40


@triton.jit
def ordered_key(x):
    """int32 that orders as float32 does, −0 and 0 alike. Its own inverse on the bits: see ``key_value``."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def key_value(key):
    """The float32 of an ``ordered_key``."""
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def softmax_weight(x, highest):
    """``exp(x - highest)`` as an integer in units of 2^-40, int64; bit for bit ``llmlab.ops.sampling.softmax_weights``."""
    y = tl.minimum((highest - x) * 1.4426950408889634, 64.0)
    fixed = (y * 16777216.0).to(tl.int32)
    fraction = (fixed & 0xFFFFFF).to(tl.uint32) << 8
    inner = 5469617 - tl.umulhi(fraction, tl.full(fraction.shape, 466326, tl.uint32))
    inner = 41136672 - tl.umulhi(fraction, inner)
    inner = 238328357 - tl.umulhi(fraction, inner)
    inner = 1031755265 - tl.umulhi(fraction, inner)
    inner = 2977043937 - tl.umulhi(fraction, inner)
    power = 4294967296 - tl.umulhi(fraction, inner).to(tl.int64)
    return (power << 8) >> tl.minimum(fixed >> 24, 63).to(tl.int64)


@triton.jit
def highest_logit(row_ptr, vocab_size, BLOCK: tl.constexpr):
    """(the row's maximum, whether it is a number and finite); one NaN makes the row unsound."""
    cols = tl.arange(0, BLOCK)
    highest = tl.full([BLOCK], float("-inf"), tl.float32)
    spoilt = tl.zeros([BLOCK], tl.int32)
    for start in tl.range(0, vocab_size, BLOCK):
        x = tl.load(row_ptr + start + cols, mask=start + cols < vocab_size, other=float("-inf"))
        spoilt = spoilt | (x != x).to(tl.int32)
        highest = tl.maximum(highest, x)
    maximum = tl.max(highest, 0)
    sound = (tl.max(spoilt, 0) == 0) & (maximum > float("-inf")) & (maximum < float("inf"))
    return maximum, sound


@triton.jit
def weigh_windows(row_ptr, vocab_size, highest, BLOCK: tl.constexpr, WINDOWS: tl.constexpr):
    """(counts[W] int32, masses[W] int64, the row's whole mass) of the logits within 2, 4, 8, 16 of the highest."""
    cols = tl.arange(0, BLOCK)
    thresholds = highest - (2 << tl.arange(0, WINDOWS)).to(tl.float32)
    counts = tl.zeros([WINDOWS, BLOCK], tl.int32)
    masses = tl.zeros([WINDOWS, BLOCK], tl.int64)
    whole = tl.zeros([BLOCK], tl.int64)
    for start in tl.range(0, vocab_size, BLOCK):
        x = tl.load(row_ptr + start + cols, mask=start + cols < vocab_size, other=float("-inf"))
        weight = softmax_weight(x, highest)
        whole += weight
        inside = x[None, :] >= thresholds[:, None]
        counts += inside.to(tl.int32)
        masses += tl.where(inside, weight[None, :], 0)
    return tl.sum(counts, 1), tl.sum(masses, 1), tl.sum(whole, 0)


@triton.jit
def mass_target(top_p, mass):
    """The mass at which top-p is reached, float64, with the slack of float32's resolution; at least one token's."""
    return tl.maximum(top_p.to(tl.float64) * 0.9999997615814209 * mass.to(tl.float64), 1.0)


@triton.jit
def window_floor(highest, holds, WINDOWS: tl.constexpr):
    """The lower bound of the smallest window that ``holds[W]`` the threshold; −inf if none does."""
    window = tl.min(tl.where(holds, tl.arange(0, WINDOWS), WINDOWS), 0)
    return tl.where(window < WINDOWS, highest - (2 << window).to(tl.float32), float("-inf"))


@triton.jit
def copy_window(row_ptr, keys_ptr, vocab_size, threshold, BLOCK: tl.constexpr):
    """Copy the keys of the logits from ``threshold`` up to ``keys_ptr``; returns their number."""
    cols = tl.arange(0, BLOCK)
    count = 0
    for start in tl.range(0, vocab_size, BLOCK):
        mask = start + cols < vocab_size
        x = tl.load(row_ptr + start + cols, mask=mask, other=float("-inf"))
        taken = (mask & (x >= threshold)).to(tl.int32)
        places = count + tl.cumsum(taken, 0) - 1
        tl.store(keys_ptr + places, ordered_key(x), mask=taken == 1)
        count += tl.sum(taken, 0)
    tl.debug_barrier()  # the keys are read back by other threads than stored them
    return count


@triton.jit
def count_from(keys_ptr, num_keys, key, BLOCK: tl.constexpr):
    """How many of the keys are at least ``key``."""
    cols = tl.arange(0, BLOCK)
    count = tl.zeros([BLOCK], tl.int32)
    for start in tl.range(0, num_keys, BLOCK):
        keys = tl.load(keys_ptr + start + cols, mask=start + cols < num_keys, other=-0x80000000)
        count += ((start + cols < num_keys) & (keys >= key)).to(tl.int32)
    return tl.sum(count, 0)


@triton.jit
def mass_from(keys_ptr, num_keys, key, highest, BLOCK: tl.constexpr):
    """The mass, int64, of the keys that are at least ``key``."""
    cols = tl.arange(0, BLOCK)
    mass = tl.zeros([BLOCK], tl.int64)
    for start in tl.range(0, num_keys, BLOCK):
        mask = start + cols < num_keys
        keys = tl.load(keys_ptr + start + cols, mask=mask, other=-0x80000000)
        mass += tl.where(mask & (keys >= key), softmax_weight(key_value(keys), highest), 0)
    return tl.sum(mass, 0)


@triton.jit
def middle(low, high):
    """The upper middle of two int32, without overflow."""
    return (low.to(tl.int64) + (high.to(tl.int64) - low.to(tl.int64) + 1) // 2).to(tl.int32)


@triton.jit
def kth_key(keys_ptr, num_keys, k, low, high, BLOCK: tl.constexpr):
    """The k-th largest key: the largest that k keys reach. ``low`` must be reached by k keys, none lies above ``high``."""
    while low < high:
        key = middle(low, high)
        if count_from(keys_ptr, num_keys, key, BLOCK) >= k:
            low = key
        else:
            high = key - 1
    return low


@triton.jit
def mass_key(keys_ptr, num_keys, target, highest, low, high, BLOCK: tl.constexpr):
    """The largest key whose own mass and that of all above reach ``target``; bounds as in ``kth_key``."""
    while low < high:
        key = middle(low, high)
        if mass_from(keys_ptr, num_keys, key, highest, BLOCK).to(tl.float64) >= target:
            low = key
        else:
            high = key - 1
    return low


@triton.jit
def top_k_top_p_kernel(
    logits_ptr,
    out_ptr,
    top_k_ptr,
    top_p_ptr,
    keys_ptr,  # [R, V] int32, scratch
    vocab_size,
    logits_stride,
    BLOCK: tl.constexpr,
    WINDOWS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    row_ptr = logits_ptr + row * logits_stride
    out_ptr += row * vocab_size
    keys_ptr += row * vocab_size
    k = tl.load(top_k_ptr + row).to(tl.int64)
    top_p = tl.load(top_p_ptr + row)
    by_k = (k > 0) & (k < vocab_size)
    by_p = top_p < 1.0
    highest, sound = highest_logit(row_ptr, vocab_size, BLOCK)
    threshold = tl.full([], -0x80000000, tl.int32)  # keeps everything
    above = tl.full([], 0, tl.int64)  # the mass above the threshold
    target = tl.full([], 0.0, tl.float64)
    tie_weight = tl.full([], 0, tl.int64)
    ranked = tl.full([], False, tl.int1)  # whether only some of the logits at the threshold are kept
    if sound & (by_k | by_p):
        counts, masses, mass = weigh_windows(row_ptr, vocab_size, highest, BLOCK, WINDOWS)
        target = mass_target(top_p, mass)
        holds = tl.where(by_k, counts.to(tl.int64) >= k, masses.to(tl.float64) >= target)
        floor = window_floor(highest, holds, WINDOWS)
        num_keys = copy_window(row_ptr, keys_ptr, vocab_size, floor, BLOCK)
        threshold = ordered_key(floor)
        if by_k:
            threshold = kth_key(keys_ptr, num_keys, k, threshold, ordered_key(highest), BLOCK)
            mass = mass_from(keys_ptr, num_keys, threshold, highest, BLOCK)
        if by_p:
            target = mass_target(top_p, mass)
            threshold = mass_key(keys_ptr, num_keys, target, highest, threshold, ordered_key(highest), BLOCK)
            above = mass_from(keys_ptr, num_keys, threshold + 1, highest, BLOCK)
            tie_weight = softmax_weight(key_value(threshold), highest)
            ties = count_from(keys_ptr, num_keys, threshold, BLOCK) - count_from(
                keys_ptr, num_keys, threshold + 1, BLOCK
            )
            ranked = (above + (ties - 1) * tie_weight).to(tl.float64) >= target
    cols = tl.arange(0, BLOCK)
    if ranked:
        # Of equal logits the lower ids come first, each while the mass before it is below the target.
        rank = tl.full([], 0, tl.int64)
        for start in tl.range(0, vocab_size, BLOCK):
            mask = start + cols < vocab_size
            x = tl.load(row_ptr + start + cols, mask=mask, other=float("-inf"))
            key = ordered_key(x)
            tie = (mask & (key == threshold)).to(tl.int32)
            before = above + (rank + tl.cumsum(tie, 0) - 1) * tie_weight
            kept = (key > threshold) | ((tie == 1) & (before.to(tl.float64) < target))
            tl.store(out_ptr + start + cols, tl.where(kept, x, float("-inf")), mask=mask)
            rank += tl.sum(tie, 0)
    else:
        for start in tl.range(0, vocab_size, BLOCK):
            mask = start + cols < vocab_size
            x = tl.load(row_ptr + start + cols, mask=mask, other=float("-inf"))
            tl.store(out_ptr + start + cols, tl.where(ordered_key(x) >= threshold, x, float("-inf")), mask=mask)


@triton.jit(do_not_specialize=["n"])
def top_n_kernel(
    logits_ptr,
    token_ids_ptr,
    highest_ptr,  # [R] float32
    mass_ptr,  # [R] int64
    value_ptr,  # [R] float32: the given token's logit
    rank_ptr,  # [R] int32: how many logits are at least that
    picked_ptr,  # [R, N] int64: key and token id packed, unordered
    last_rank_ptr,  # [R] int32: how many logits are at least the N-th
    keys_ptr,  # [R, V] int32, scratch
    vocab_size,
    logits_stride,
    n,
    BLOCK: tl.constexpr,
    WINDOWS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    row_ptr = logits_ptr + row * logits_stride
    highest, _ = highest_logit(row_ptr, vocab_size, BLOCK)
    counts, _, mass = weigh_windows(row_ptr, vocab_size, highest, BLOCK, WINDOWS)
    value = tl.load(row_ptr + tl.load(token_ids_ptr + row))
    cols = tl.arange(0, BLOCK)
    at_least = tl.zeros([BLOCK], tl.int32)
    for start in tl.range(0, vocab_size, BLOCK):
        mask = start + cols < vocab_size
        x = tl.load(row_ptr + start + cols, mask=mask, other=float("-inf"))
        at_least += (mask & (x >= value)).to(tl.int32)
    tl.store(highest_ptr + row, highest)
    tl.store(mass_ptr + row, mass)
    tl.store(value_ptr + row, value)
    tl.store(rank_ptr + row, tl.sum(at_least, 0))
    if n > 0:
        keys_ptr += row * vocab_size
        picked_ptr += row * n
        floor = window_floor(highest, counts >= n, WINDOWS)
        num_keys = copy_window(row_ptr, keys_ptr, vocab_size, floor, BLOCK)
        threshold = kth_key(keys_ptr, num_keys, n, ordered_key(floor), ordered_key(highest), BLOCK)
        tl.store(last_rank_ptr + row, count_from(keys_ptr, num_keys, threshold, BLOCK))
        above = tl.full([], 0, tl.int32)
        ties = count_from(keys_ptr, num_keys, threshold + 1, BLOCK)  # those above the threshold come before its equals
        for start in tl.range(0, vocab_size, BLOCK):
            mask = start + cols < vocab_size
            key = ordered_key(tl.load(row_ptr + start + cols, mask=mask, other=float("-inf")))
            over = (mask & (key > threshold)).to(tl.int32)
            tie = (mask & (key == threshold)).to(tl.int32)
            place = tl.where(over == 1, above + tl.cumsum(over, 0), ties + tl.cumsum(tie, 0)) - 1
            packed = (key.to(tl.int64) << 32) + (0x7FFFFFFF - (start + cols))
            tl.store(picked_ptr + place, packed, mask=((over == 1) | (tie == 1)) & (place < n))
            above += tl.sum(over, 0)
            ties += tl.sum(tie, 0)


def apply_top_k_top_p(logits: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """Keep the ``top_k[R]`` most likely tokens and those tied with the last, then the smallest set of them, lower ids first
    among equals, whose mass reaches ``top_p[R]``; −inf elsewhere. ``logits[R, V]`` float32 → a new tensor.

    ``top_k`` off: 0, or V or more. ``top_p`` off: 1 or more. A row without a finite maximum, or with a NaN, passes unchanged.
    """
    check_logits("apply_top_k_top_p", logits, top_k=top_k, top_p=top_p)
    num_reqs, vocab_size = logits.shape
    out = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
    if out.numel():
        keys = torch.empty(num_reqs, vocab_size, dtype=torch.int32, device=logits.device)
        launch(
            top_k_top_p_kernel,
            (num_reqs,),
            logits,
            out,
            top_k.contiguous(),
            top_p.float().contiguous(),
            keys,
            vocab_size,
            logits.stride(0),
            BLOCK=BLOCK,
            WINDOWS=WINDOWS,
            num_warps=NUM_WARPS,
            num_stages=1,
            enable_fp_fusion=False,
        )
    return out


def top_n_logprobs(logits: Tensor, token_ids: Tensor, n: int) -> tuple[Tensor, Tensor, Tensor]:
    """``log_softmax`` of ``logits[R, V]`` (float32) at ``token_ids[R]`` and at the ``n`` most likely tokens.

    Returns (logprobs float32, token ids int64, ranks int64), each ``[R, n + 1]``: column 0 is the given token, then the
    most likely by (logit descending, id ascending). A rank is the number of tokens at least as likely.
    """
    check_logits("top_n_logprobs", logits, token_ids=token_ids)
    num_reqs, vocab_size = logits.shape
    if not 0 <= n <= vocab_size:
        raise ValueError(f"top_n_logprobs: n must be within 0..{vocab_size} (vocab_size), not {n}")
    device = logits.device
    highest, value = torch.empty(2, num_reqs, dtype=torch.float32, device=device)
    rank, last_rank = torch.zeros(2, num_reqs, dtype=torch.int32, device=device)
    mass = torch.empty(num_reqs, dtype=torch.int64, device=device)
    picked = torch.full(
        (num_reqs, n), 0x7FFFFFFF, dtype=torch.int64, device=device
    )  # a row of NaNs leaves places empty
    if num_reqs:
        launch(
            top_n_kernel,
            (num_reqs,),
            logits,
            token_ids.contiguous(),
            highest,
            mass,
            value,
            rank,
            picked,
            last_rank,
            torch.empty(num_reqs, vocab_size if n else 0, dtype=torch.int32, device=device),
            vocab_size,
            logits.stride(0),
            n,
            BLOCK=BLOCK,
            WINDOWS=WINDOWS,
            num_warps=NUM_WARPS,
            num_stages=1,
            enable_fp_fusion=False,
        )
    picked = picked.sort(dim=-1, descending=True).values
    keys = (picked >> 32).int()
    values = torch.cat((value[:, None], (keys ^ ((keys >> 31) & 0x7FFFFFFF)).view(torch.float32)), dim=1)
    ranks = n - torch.searchsorted(keys.flip(-1).contiguous(), keys)
    ranks = torch.where(keys == keys[:, -1:], last_rank[:, None], ranks) if n else ranks
    log_mass = torch.log(mass.double() * 2.0**-WEIGHT_BITS)[:, None]
    logprobs = ((values - highest[:, None]).double() - log_mass).float()
    ids = 0x7FFFFFFF - (picked & 0xFFFFFFFF)
    return logprobs, torch.cat((token_ids[:, None].long(), ids), 1), torch.cat((rank[:, None].long(), ranks.long()), 1)


def check_logits(op: str, logits: Tensor, **rows: Tensor) -> None:
    """Raise ValueError, in ``op``'s name, unless ``logits`` is float32 [R, V] and every other tensor [R]."""
    if logits.ndim != 2 or logits.dtype != torch.float32 or logits.shape[1] >= 2**31:
        raise ValueError(
            f"{op}: logits must be float32 [num_reqs, vocab_size], not {logits.dtype} {tuple(logits.shape)}"
        )
    require_unit_stride(f"{op}: logits", logits)
    for name, tensor in rows.items():
        if tensor.shape != logits.shape[:1]:
            raise ValueError(f"{op}: {name} must be [{logits.shape[0]}], not {tuple(tensor.shape)}")


def compile_cases() -> list[CompileCase]:
    """Llama 3's vocabulary."""
    logits = torch.empty(64, 128256, dtype=torch.float32, device="meta")
    ids = torch.empty(64, dtype=torch.int64, device="meta")
    top_p = torch.empty(64, dtype=torch.float32, device="meta")
    return [
        *capture("top_k_top_p_v128k", lambda: apply_top_k_top_p(logits, ids.int(), top_p)),
        *capture("top_n_v128k", lambda: top_n_logprobs(logits, ids, 20)),
    ]
