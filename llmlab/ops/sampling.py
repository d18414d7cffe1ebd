"""From logits to tokens: penalties, temperature, min-p, top-k, top-p, the Gumbel race and top-n log-probabilities.

Two things are defined down to the bit, so that every backend, every batch and every order of summation agrees:

- **Noise** is counter-based: Philox 4x32-10 (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3") with the
  request's 64-bit seed as key and (token id // 4, position) as counter. A token's noise depends on nothing else.
- **Probability mass** for top-p is fixed-point: :func:`softmax_weights` are integers, whose sums are exact in any order, so
  a sort-free kernel keeps the very set that the sorted reference keeps.

All ops take float32 logits [num_reqs, vocab_size]; a masked token's logit is −inf.
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor

from llmlab.ops.registry import Cost, op

PHILOX_ROUNDS = 10
PHILOX_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
PHILOX_WEYL = (0x9E3779B9, 0xBB67AE85)
WORD = 0xFFFFFFFF

SERIES_BELOW = 2.0**-10
"""Where −log(1 − u) is summed as a series: 1 − u has too few bits left there."""

LARGEST_UNIFORM = 1.0 - 2.0**-24
"""The largest float32 below 1."""

WEIGHT_BITS = 40
"""The weight of the most likely token is 2^40; a sum over 2^22 tokens still fits 63 bits."""

TOP_P_SLACK = 2.0**-22
"""Top-p is reached when its float32 value is, up to this share of it: 0.5 + 0.3 reaches 0.8, whatever the last bits say."""

LOG2_E = 1.4426950408889634

EXP2_COEFFICIENTS = (2977043937, 1031755265, 238328357, 41136672, 5469617, 466326)
"""c₁…c₆ of ``2^−f ≈ 1 − f·(c₁ − f·(c₂ − …))`` on [0, 1) in units of 2^-32: exact at 0, within 4e-9 elsewhere."""


def philox4x32(counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
    """Philox 4x32-10: four random 32-bit words for each 128-bit counter and 64-bit key, all held as int64 in [0, 2^32).

    A product of two words wraps around in int64, which leaves its bits, and so both of its halves, right.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(PHILOX_ROUNDS):
        p0, p1 = c0 * PHILOX_MULTIPLIERS[0], c2 * PHILOX_MULTIPLIERS[1]
        c0, c1, c2, c3 = ((p1 >> 32) & WORD) ^ c1 ^ k0, p1 & WORD, ((p0 >> 32) & WORD) ^ c3 ^ k1, p0 & WORD
        k0, k1 = (k0 + PHILOX_WEYL[0]) & WORD, (k1 + PHILOX_WEYL[1]) & WORD
    return c0, c1, c2, c3


def exponential_noise(seeds: Tensor, positions: Tensor, vocab_size: int) -> Tensor:
    """Exp(1) noise ``q`` [num_reqs, vocab_size] float32, never 0 and never infinite; the same for the same seed and position.

    Token ``v`` gets word ``v % 4`` of the counter ``(v // 4, position, 0, 0)`` under the key (low, high half of the seed).
    ``u = word·2^-32 + 2^-33``, kept below 1, is uniform in (0, 1) and finest near 0, where the winners of the race lie;
    ``q = −log(1 − u)``.

    Args:
        seeds: [num_reqs] int64, the bits of the 64-bit seeds; a narrower one stands for the same number in 64 bits.
        positions: [num_reqs] int64 in [0, 2^32).
    """
    seeds, positions = seeds.long(), positions.long()
    blocks = torch.arange(-(-vocab_size // 4), device=seeds.device)[None, :]
    zero = torch.zeros_like(blocks)
    key = (seeds[:, None] & WORD, (seeds[:, None] >> 32) & WORD)
    words = philox4x32((blocks, positions[:, None].expand(-1, blocks.shape[1]), zero, zero), key)
    word = torch.stack(words, dim=-1).flatten(1)[:, :vocab_size]
    u = (word.float() * 2.0**-32 + 2.0**-33).clamp_(max=LARGEST_UNIFORM)
    return torch.where(u < SERIES_BELOW, u * (1.0 + u * (0.5 + u * (1.0 / 3.0))), -torch.log(1.0 - u))


def softmax_weights(logits: Tensor, highest: Tensor) -> Tensor:
    """``exp(logit − highest)`` as integers (int64, in units of 2^-40): the probabilities up to a common factor.

    ``2^−y`` with ``y = (highest − logit)·log2 e`` rounded to float32 and cut to 24 fractional bits; the fraction's power by
    integer Horner steps, the whole part by a shift. Only one float multiplication is rounded, so all backends agree.

    Args:
        logits: [..., n] float32. highest: broadcastable to it, not below any of them.
    """
    y = ((highest - logits) * LOG2_E).clamp_(max=64.0)
    fixed = (y * 2.0**24).to(torch.int64)
    fraction = (fixed & 0xFFFFFF) << 8
    inner = torch.full_like(fraction, EXP2_COEFFICIENTS[-1])
    for coefficient in EXP2_COEFFICIENTS[-2::-1]:
        inner = coefficient - ((fraction * inner) >> 32)
    power = (1 << 32) - ((fraction * inner) >> 32)
    return (power << (WEIGHT_BITS - 32)) >> (fixed >> 24).clamp_(max=63)


def _with_finite_maximum(token_ids: Tensor, maximum: Tensor) -> Tensor:
    return torch.where(maximum.isfinite(), token_ids, -1)


def _rows_cost(logits: Tensor, flops_per_element: int, passes: int, *vectors: Tensor | None) -> Cost:
    extra = sum(v.numel() * v.element_size() for v in vectors if v is not None)
    return Cost(flops_per_element * logits.numel(), passes * logits.numel() * logits.element_size() + extra)


def _apply_penalties_cost(
    logits: Tensor,
    rows: Tensor,
    token_ids: Tensor,
    output_counts: Tensor,
    repetition_penalties: Tensor,
    frequency_penalties: Tensor,
    presence_penalties: Tensor,
) -> Cost:
    # The result is a new tensor: every logit is read and written; only the listed ones are computed with.
    copied = _rows_cost(logits, 0, 2, rows, token_ids, output_counts)
    return copied + Cost(5 * rows.numel(), 3 * repetition_penalties.numel() * repetition_penalties.element_size())


@op(cost=_apply_penalties_cost)
def apply_penalties(
    logits: Float[Tensor, "num_reqs vocab_size"],
    rows: Int[Tensor, "num_cells"],
    token_ids: Int[Tensor, "num_cells"],
    output_counts: Int[Tensor, "num_cells"],
    repetition_penalties: Float[Tensor, "num_reqs"],
    frequency_penalties: Float[Tensor, "num_reqs"],
    presence_penalties: Float[Tensor, "num_reqs"],
) -> Float[Tensor, "num_reqs vocab_size"]:
    """Repetition, then frequency, then presence penalty on the (row, token) cells listed, each cell once.

    A cell is a distinct token of a request's prompt or output. Repetition divides a positive logit and multiplies a negative
    one (Keskar et al. 2019, arXiv:1909.05858, section 4.1, as used since); frequency subtracts once for each time that the
    token stands in the output, presence once if it does (``output_counts`` is 0 for a token of the prompt alone).
    """
    values = logits[rows, token_ids]
    repetition = repetition_penalties[rows]
    values = torch.where(values > 0, values / repetition, values * repetition)
    values = values - frequency_penalties[rows] * output_counts
    values = values - presence_penalties[rows] * (output_counts > 0)
    return logits.index_put((rows, token_ids), values)


def _apply_temperature_cost(logits: Tensor, temperatures: Tensor) -> Cost:
    return _rows_cost(logits, 1, 2, temperatures)


@op(cost=_apply_temperature_cost)
def apply_temperature(
    logits: Float[Tensor, "num_reqs vocab_size"], temperatures: Float[Tensor, "num_reqs"]
) -> Float[Tensor, "num_reqs vocab_size"]:
    """``logits / temperature``; a greedy row (temperature 0) passes undivided."""
    return logits / torch.where(temperatures == 0, 1.0, temperatures)[:, None]


def _apply_min_p_cost(logits: Tensor, min_p: Tensor) -> Cost:
    return _rows_cost(logits, 2, 2, min_p)


@op(cost=_apply_min_p_cost)
def apply_min_p(
    logits: Float[Tensor, "num_reqs vocab_size"], min_p: Float[Tensor, "num_reqs"]
) -> Float[Tensor, "num_reqs vocab_size"]:
    """Mask tokens less likely than ``min_p`` times the most likely one (Nguyen et al. 2024, arXiv:2407.01082, section 3).

    ``p < min_p·p_max`` is ``logit − max < log(min_p)``: no softmax is needed, and the top token always stays.
    """
    below = logits - logits.amax(-1, keepdim=True)
    return logits.masked_fill(below < torch.log(min_p)[:, None], float("-inf"))


def _apply_top_k_top_p_cost(logits: Tensor, top_k: Tensor, top_p: Tensor) -> Cost:
    # By selection, without a sort: maximum, fixed-point weight (about 20 operations) and one comparison a token.
    return _rows_cost(logits, 22, 2, top_k, top_p)


@op(cost=_apply_top_k_top_p_cost)
def apply_top_k_top_p(
    logits: Float[Tensor, "num_reqs vocab_size"], top_k: Int[Tensor, "num_reqs"], top_p: Float[Tensor, "num_reqs"]
) -> Float[Tensor, "num_reqs vocab_size"]:
    """Keep the ``top_k`` most likely tokens, then the smallest set of those whose mass reaches ``top_p``; −inf elsewhere.

    Top-k (Fan et al. 2018, arXiv:1805.04833, section 5.4) keeps every token tied with the k-th. Top-p (Holtzman et al. 2019,
    arXiv:1904.09751, section 3.1) takes tokens in the order of (logit descending, id ascending) while the mass before them is
    below ``top_p`` of the total left by top-k: the crossing token is kept, and the first one always.

    Args:
        top_k: 0, or vocab_size or more, switches it off. top_p: 1 or more switches it off.

    A row without a finite maximum passes unchanged.
    """
    vocab_size = logits.shape[-1]
    ordered, order = logits.sort(dim=-1, descending=True, stable=True)
    highest = ordered[:, :1]
    k = torch.where((top_k <= 0) | (top_k > vocab_size), vocab_size, top_k).long()
    dropped = ordered < ordered.gather(-1, k[:, None] - 1)
    weights = softmax_weights(ordered, highest).masked_fill(dropped, 0)
    mass = weights.cumsum(-1)
    target = top_p.double() * (1.0 - TOP_P_SLACK) * mass[:, -1].double()
    past = ((mass - weights).double() >= target[:, None]) & (top_p < 1.0)[:, None]
    past[:, 0] = False
    dropped |= past
    dropped &= highest.isfinite()  # a NaN sorts as the highest
    kept = torch.empty_like(dropped).scatter_(-1, order, ~dropped)
    return torch.where(kept, logits, float("-inf"))


def _greedy_argmax_cost(logits: Tensor) -> Cost:
    return _rows_cost(logits, 1, 1) + Cost(0, 8 * logits.shape[0])


@op(cost=_greedy_argmax_cost)
def greedy_argmax(logits: Float[Tensor, "num_reqs vocab_size"]) -> Int[Tensor, "num_reqs"]:
    """The most likely token of each row (the first of equals), int64; −1 for a row whose maximum is not finite.

    That is a row in which every token is masked, or one with a NaN or a +inf.
    """
    maximum, token_ids = logits.max(-1)
    return _with_finite_maximum(token_ids, maximum)


def _gumbel_argmax_cost(logits: Tensor, temperatures: Tensor, seeds: Tensor, positions: Tensor) -> Cost:
    # A quarter of a Philox call (ten rounds of two products, four xors and two additions), and the noise itself.
    return _rows_cost(logits, 30, 1, temperatures, seeds, positions) + Cost(0, 8 * logits.shape[0])


@op(cost=_gumbel_argmax_cost)
def gumbel_argmax(
    logits: Float[Tensor, "num_reqs vocab_size"],
    temperatures: Float[Tensor, "num_reqs"],
    seeds: Int[Tensor, "num_reqs"],
    positions: Int[Tensor, "num_reqs"],
) -> Int[Tensor, "num_reqs"]:
    """Draw each row's token from ``softmax(logits / temperature)`` by the Gumbel-max trick, int64.

    ``argmax(logits/T − log q)`` with ``q`` from :func:`exponential_noise`: −log of an Exp(1) variable is a Gumbel variable
    (Gumbel 1954; Maddison et al. 2014, arXiv:1411.0030), so no softmax and no prefix sum is needed. The first of equals wins.
    A row of temperature 0 takes its most likely token; −1 for a row whose maximum is not finite, as in :func:`greedy_argmax`.
    """
    noise = exponential_noise(seeds, positions, logits.shape[-1])
    greedy = (temperatures == 0)[:, None]
    scores = apply_temperature.reference(logits, temperatures) - torch.log(noise).masked_fill_(greedy, 0.0)
    return _with_finite_maximum(scores.argmax(-1), logits.amax(-1))


def exponential_race(
    probs: Float[Tensor, "num_reqs vocab_size"], seeds: Int[Tensor, "num_reqs"], positions: Int[Tensor, "num_reqs"]
) -> Int[Tensor, "num_reqs"]:
    """The same draw in the form of a race: token ``v`` arrives at time ``q/p``, and the first wins: ``argmax(probs / q)``.

    Up to rounding the token of :func:`gumbel_argmax`, as the same noise is used and a logarithm changes no order.
    """
    return (probs / exponential_noise(seeds, positions, probs.shape[-1])).argmax(-1)


def _top_n_logprobs_cost(logits: Tensor, token_ids: Tensor, n: int) -> Cost:
    out = logits.shape[0] * (n + 1) * (4 + 8 + 8)
    return _rows_cost(logits, 4, 1, token_ids) + Cost(0, out)


@op(cost=_top_n_logprobs_cost)
def top_n_logprobs(
    logits: Float[Tensor, "num_reqs vocab_size"], token_ids: Int[Tensor, "num_reqs"], n: int
) -> tuple[
    Float[Tensor, "num_reqs num_logprobs"], Int[Tensor, "num_reqs num_logprobs"], Int[Tensor, "num_reqs num_logprobs"]
]:
    """``log_softmax`` at the given token and at the ``n`` most likely ones: (logprobs, token ids, ranks) [num_reqs, n + 1].

    Column 0 is the given token, then the most likely in the order of (logit descending, id ascending). A rank is the number
    of tokens at least as likely, so 1 is best and ties count against a token. The sum under the logarithm is that of
    :func:`softmax_weights`: exact, and so the same in any order.

    A row without a finite maximum (all masked, a NaN or a +inf) is no distribution: logprobs NaN, every id the given token's,
    every rank vocab_size. (The Triton kernel spares itself the look: what it returns for such a row means nothing.)
    """
    ordered, order = logits.sort(dim=-1, descending=True, stable=True)
    highest = ordered[:, :1]
    values = torch.cat((logits.gather(-1, token_ids[:, None]), ordered[:, :n]), dim=-1)
    mass = softmax_weights(ordered, highest).sum(-1, keepdim=True)
    logprobs = (values - highest).double() - torch.log(mass.double() * 2.0**-WEIGHT_BITS)
    # In ascending order the entries at least as large as a value are those from its left insertion point on.
    ranks = logits.shape[-1] - torch.searchsorted(ordered.flip(-1), values)
    ids = torch.cat((token_ids[:, None], order[:, :n]), dim=-1)
    sound = highest.isfinite()  # a NaN sorts as the highest
    return (
        logprobs.float().masked_fill(~sound, float("nan")),
        torch.where(sound, ids, token_ids[:, None]),
        ranks.masked_fill(~sound, logits.shape[-1]),
    )
