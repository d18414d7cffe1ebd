"""From logits to tokens: penalties, temperature, min-p, and the argmax with or without Gumbel noise.

Noise and probability mass are those that ``llmlab.ops.sampling`` defines: Philox 4x32-10 keyed by the seed with (token id // 4,
position) as counter, and integers whose sums are exact. Float operations that must round as torch's do are kept from being
contracted (``enable_fp_fusion``) and divide by IEEE. Top-k, top-p and top-n stand in ``selection``.
"""

import torch
import triton
import triton.language as tl
from llmlab.kernels.launch import launch
from llmlab.kernels.selection import apply_top_k_top_p, check_logits, top_n_logprobs
from llmlab.kernels.spec import CompileCase, capture
from llmlab.kernels.tiles import ceil_div, next_power_of_2, require_unit_stride
from torch import Tensor

__all__ = [
    "apply_min_p",
    "apply_penalties",
    "apply_temperature",
    "apply_top_k_top_p",
    "greedy_argmax",
    "gumbel_argmax",
    "top_n_logprobs",
]

BLOCK = 4096  # logits a program


@triton.jit(do_not_specialize=["num_cells"])
def apply_penalties_kernel(
    logits_ptr,  # changed in place
    rows_ptr,
    token_ids_ptr,
    output_counts_ptr,
    repetition_ptr,
    frequency_ptr,
    presence_ptr,
    num_cells,
    vocab_size,
    BLOCK: tl.constexpr,
):
    cells = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = cells < num_cells
    rows = tl.load(rows_ptr + cells, mask=mask, other=0).to(tl.int64)
    token_ids = tl.load(token_ids_ptr + cells, mask=mask, other=0)
    counts = tl.load(output_counts_ptr + cells, mask=mask, other=0)
    repetition = tl.load(repetition_ptr + rows, mask=mask, other=1.0)
    logits_ptrs = logits_ptr + rows * vocab_size + token_ids
    x = tl.load(logits_ptrs, mask=mask, other=0.0)
    x = tl.where(x > 0, tl.math.div_rn(x, repetition), x * repetition)
    x = x - tl.load(frequency_ptr + rows, mask=mask, other=0.0) * counts.to(tl.float32)
    x = x - tl.load(presence_ptr + rows, mask=mask, other=0.0) * (counts > 0).to(tl.float32)
    tl.store(logits_ptrs, x, mask=mask)


@triton.jit
def apply_temperature_kernel(logits_ptr, temperatures_ptr, out_ptr, vocab_size, logits_stride, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = cols < vocab_size
    temperature = tl.load(temperatures_ptr + row)
    x = tl.load(logits_ptr + row * logits_stride + cols, mask=mask, other=0.0)
    x = tl.math.div_rn(x, tl.where(temperature == 0.0, 1.0, temperature))
    tl.store(out_ptr + row * vocab_size + cols, x, mask=mask)


@triton.jit
def apply_min_p_kernel(logits_ptr, log_min_p_ptr, out_ptr, vocab_size, logits_stride, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    row_ptr = logits_ptr + row * logits_stride
    cols = tl.arange(0, BLOCK)
    highest = tl.full([BLOCK], float("-inf"), tl.float32)
    spoilt = tl.zeros([BLOCK], tl.int32)
    for start in tl.range(0, vocab_size, BLOCK):
        x = tl.load(row_ptr + start + cols, mask=start + cols < vocab_size, other=float("-inf"))
        spoilt = spoilt | (x != x).to(tl.int32)
        highest = tl.maximum(highest, x)
    maximum = tl.max(highest, 0)
    threshold = tl.load(log_min_p_ptr + row)
    if tl.max(spoilt, 0) != 0:
        threshold = float("-inf")  # no maximum, nothing to compare with
    for start in tl.range(0, vocab_size, BLOCK):
        mask = start + cols < vocab_size
        x = tl.load(row_ptr + start + cols, mask=mask, other=float("-inf"))
        tl.store(
            out_ptr + row * vocab_size + start + cols, tl.where(x - maximum < threshold, float("-inf"), x), mask=mask
        )


@triton.jit
def uniform_words(seed, position, first_token, BLOCK: tl.constexpr):
    """Random 32-bit words of the tokens from ``first_token``, a multiple of 4: one Philox call for every four."""
    counters = (first_token // 4 + tl.arange(0, BLOCK // 4)).to(tl.uint32)
    zeros = tl.zeros([BLOCK // 4], tl.uint32)
    w0, w1, w2, w3 = tl.philox(seed, counters, zeros + position.to(tl.uint32), zeros, zeros)
    return tl.interleave(tl.interleave(w0, w2), tl.interleave(w1, w3))


@triton.jit
def exponential_noise(words):
    """Exp(1) noise of random words, never 0 and never infinite; see ``llmlab.ops.sampling.exponential_noise``."""
    u = tl.minimum(words.to(tl.float32) * 2.3283064365386963e-10 + 1.1641532182693481e-10, 0.99999994039535522)
    series = u * (1.0 + u * (0.5 + u * 0.3333333333333333))
    return tl.where(u < 0.0009765625, series, -tl.log(1.0 - u))


@triton.jit
def block_argmax_kernel(
    logits_ptr,
    temperatures_ptr,
    seeds_ptr,
    positions_ptr,
    scores_ptr,  # [R, blocks] float32
    ids_ptr,  # [R, blocks] int32
    highest_ptr,  # [R, blocks] float32: the maximal logit, +inf if there is a NaN
    vocab_size,
    logits_stride,
    num_blocks,
    NOISE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    cols = block * BLOCK + tl.arange(0, BLOCK)
    mask = cols < vocab_size
    x = tl.load(logits_ptr + row * logits_stride + cols, mask=mask, other=float("-inf")).to(tl.float32)
    spoilt = tl.max((x != x).to(tl.int32), 0)
    x = tl.where(x != x, float("-inf"), x)
    score = x
    if NOISE:
        temperature = tl.load(temperatures_ptr + row)
        if temperature != 0.0:
            words = uniform_words(tl.load(seeds_ptr + row), tl.load(positions_ptr + row), block * BLOCK, BLOCK)
            score = tl.math.div_rn(x, temperature) - tl.log(exponential_noise(words))
            score = tl.where(mask, score, float("-inf"))
    best = tl.max(score, 0)
    out = row * num_blocks + block
    tl.store(scores_ptr + out, best)
    tl.store(ids_ptr + out, tl.min(tl.where((score == best) & mask, cols, 0x7FFFFFFF), 0))
    tl.store(highest_ptr + out, tl.where(spoilt != 0, float("inf"), tl.max(x, 0)))


@triton.jit
def row_argmax_kernel(scores_ptr, ids_ptr, highest_ptr, out_ptr, num_blocks, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    blocks = tl.arange(0, BLOCK)
    mask = blocks < num_blocks
    scores = tl.load(scores_ptr + row * num_blocks + blocks, mask=mask, other=float("-inf"))
    ids = tl.load(ids_ptr + row * num_blocks + blocks, mask=mask, other=0x7FFFFFFF)
    highest = tl.max(tl.load(highest_ptr + row * num_blocks + blocks, mask=mask, other=float("-inf")), 0)
    winner = tl.min(tl.where(scores == tl.max(scores, 0), ids, 0x7FFFFFFF), 0)  # the first of equals
    sound = (highest > float("-inf")) & (highest < float("inf"))
    tl.store(out_ptr + row, tl.where(sound, winner, -1).to(tl.int64))


def apply_penalties(
    logits: Tensor,
    rows: Tensor,
    token_ids: Tensor,
    output_counts: Tensor,
    repetition_penalties: Tensor,
    frequency_penalties: Tensor,
    presence_penalties: Tensor,
) -> Tensor:
    """Repetition, frequency and presence penalty on the cells ``(rows[C], token_ids[C])`` of ``logits[R, V]``, each once.

    ``output_counts[C]`` is how often the token stands in the output; penalties are ``[R]``. Returns a new tensor.
    """
    penalties = {
        "repetition_penalties": repetition_penalties,
        "frequency_penalties": frequency_penalties,
        "presence_penalties": presence_penalties,
    }
    check_logits("apply_penalties", logits, **penalties)
    if rows.ndim != 1 or token_ids.shape != rows.shape or output_counts.shape != rows.shape:
        raise ValueError(
            "apply_penalties: rows, token_ids and output_counts must be [C] alike, not "
            f"{tuple(rows.shape)}, {tuple(token_ids.shape)} and {tuple(output_counts.shape)}"
        )
    out = logits.clone(memory_format=torch.contiguous_format)
    num_cells = rows.shape[0]
    if num_cells:
        block = 256
        launch(
            apply_penalties_kernel,
            (ceil_div(num_cells, block),),
            out,
            rows.contiguous(),
            token_ids.contiguous(),
            output_counts.contiguous(),
            *(penalty.contiguous() for penalty in penalties.values()),
            num_cells,
            logits.shape[1],
            BLOCK=block,
            num_warps=4,
            num_stages=1,
            enable_fp_fusion=False,
        )
    return out


def apply_temperature(logits: Tensor, temperatures: Tensor) -> Tensor:
    """``logits[R, V] / temperatures[R]``; a row of temperature 0 passes undivided. Returns a new tensor."""
    check_logits("apply_temperature", logits, temperatures=temperatures)
    num_reqs, vocab_size = logits.shape
    out = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
    if out.numel():
        launch(
            apply_temperature_kernel,
            (num_reqs, ceil_div(vocab_size, BLOCK)),
            logits,
            temperatures.contiguous(),
            out,
            vocab_size,
            logits.stride(0),
            BLOCK=BLOCK,
            num_warps=8,
            num_stages=1,
        )
    return out


def apply_min_p(logits: Tensor, min_p: Tensor) -> Tensor:
    """Mask what is less likely than ``min_p[R]`` times the most likely token of its row of ``logits[R, V]``."""
    check_logits("apply_min_p", logits, min_p=min_p)
    num_reqs, vocab_size = logits.shape
    out = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
    if out.numel():
        launch(
            apply_min_p_kernel,
            (num_reqs,),
            logits,
            torch.log(min_p.contiguous()),  # here, so that every backend compares with the same number
            out,
            vocab_size,
            logits.stride(0),
            BLOCK=BLOCK,
            num_warps=8,
            num_stages=1,
        )
    return out


def greedy_argmax(logits: Tensor) -> Tensor:
    """The most likely token of each row of ``logits[R, V]`` (any float dtype), the first of equals; int64.

    −1 for a row whose maximum is not finite: everything masked, a NaN or a +inf.
    """
    return _argmax("greedy_argmax", logits, None, None, None)


def gumbel_argmax(logits: Tensor, temperatures: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
    """Each row's token drawn from ``softmax(logits[R, V] / temperatures[R])`` by the Gumbel-max trick; int64.

    ``seeds[R]`` are the bits of 64-bit seeds in int64, ``positions[R]`` within [0, 2^32): a token's noise depends on its seed,
    position and id alone. Temperature 0 takes the most likely token; −1 as in ``greedy_argmax``.
    """
    check_logits("gumbel_argmax", logits, temperatures=temperatures, seeds=seeds, positions=positions)
    return _argmax("gumbel_argmax", logits, temperatures.contiguous(), seeds.contiguous(), positions.contiguous())


def _argmax(
    op: str, logits: Tensor, temperatures: Tensor | None, seeds: Tensor | None, positions: Tensor | None
) -> Tensor:
    if logits.ndim != 2 or logits.shape[1] == 0:
        raise ValueError(
            f"{op}: logits must be [num_reqs, vocab_size] with a token at least, not {tuple(logits.shape)}"
        )
    require_unit_stride(f"{op}: logits", logits)
    num_reqs, vocab_size = logits.shape
    num_blocks = ceil_div(vocab_size, BLOCK)
    device = logits.device
    out = torch.empty(num_reqs, dtype=torch.int64, device=device)
    if num_reqs == 0:
        return out
    scores, highest = torch.empty(2, num_reqs, num_blocks, dtype=torch.float32, device=device)
    ids = torch.empty(num_reqs, num_blocks, dtype=torch.int32, device=device)
    launch(
        block_argmax_kernel,
        (num_reqs, num_blocks),
        logits,
        temperatures,
        seeds,
        positions,
        scores,
        ids,
        highest,
        vocab_size,
        logits.stride(0),
        num_blocks,
        NOISE=temperatures is not None,
        BLOCK=BLOCK,
        num_warps=8,
        num_stages=1,
        enable_fp_fusion=False,
    )
    launch(
        row_argmax_kernel,
        (num_reqs,),
        scores,
        ids,
        highest,
        out,
        num_blocks,
        BLOCK=next_power_of_2(num_blocks),
        num_warps=1,
        num_stages=1,
    )
    return out


def compile_cases() -> list[CompileCase]:
    """Llama 3's vocabulary, 64 requests."""
    logits = torch.empty(64, 128256, dtype=torch.float32, device="meta")
    floats = torch.empty(64, dtype=torch.float32, device="meta")
    ints = torch.empty(64, dtype=torch.int64, device="meta")
    return [
        *capture("penalties", lambda: apply_penalties(logits, ints, ints, ints, floats, floats, floats)),
        *capture("temperature", lambda: apply_temperature(logits, floats)),
        *capture("min_p", lambda: apply_min_p(logits, floats)),
        *capture("greedy", lambda: greedy_argmax(logits)),
        *capture("greedy_bfloat16", lambda: greedy_argmax(logits.bfloat16())),
        *capture("gumbel", lambda: gumbel_argmax(logits, floats, ints, ints)),
    ]
