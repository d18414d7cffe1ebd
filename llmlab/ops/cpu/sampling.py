"""The sampling ops on a CPU: one pass, or a few, over each row while it stands in cache; rows in parallel. No sort anywhere.

Results equal the references' to the bit, but for the last place of a logarithm in the Gumbel race.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba import carray, njit, types
from numba.extending import intrinsic
from torch import Tensor

from llmlab.ops import sampling as reference
from llmlab.ops.cpu.parallel import Kernel, arg, kernel, take

_CHUNK = 512
_WORD = np.uint64(0xFFFFFFFF)
_M0, _M1 = (np.uint64(m) for m in reference.PHILOX_MULTIPLIERS)
_W0, _W1 = (np.uint64(w) for w in reference.PHILOX_WEYL)
_ROUNDS = reference.PHILOX_ROUNDS
_SERIES_BELOW = np.float32(reference.SERIES_BELOW)
_LARGEST_UNIFORM = np.float32(reference.LARGEST_UNIFORM)
_LOG2_E = np.float32(reference.LOG2_E)
_C1, _C2, _C3, _C4, _C5, _C6 = (np.uint64(c) for c in reference.EXP2_COEFFICIENTS)
_WEIGHT_SHIFT = np.uint64(reference.WEIGHT_BITS - 32)
_UNIT = 2.0**-reference.WEIGHT_BITS
_TOP_P_SHARE = 1.0 - reference.TOP_P_SLACK
_BIN_SHIFT, _NUM_BINS = 20, 1025  # sixteen bins for each halving of the probability, 64 halvings, and the rest
_NEG_INF = np.float32(-np.inf)
_LARGEST_N = 256  # above it, sorting the row beats inserting into a sorted list
_SERIAL_BELOW = 1 << 15  # elements; below, one core is done before another is awake

# Loops below run from 0 over slices, never over [start, stop): only then does numba know that no index is negative, and
# LLVM vectorises them.


@intrinsic
def _pointer(typingctx: Any, address: Any) -> Any:
    def codegen(context: Any, b: ir.IRBuilder, sig: Any, args: Any) -> Any:
        return b.inttoptr(args[0], ir.IntType(8).as_pointer())

    return types.voidptr(types.int64), codegen


@njit(inline="always")
def _matrix(address, rows, columns, dtype):
    return carray(_pointer(address), (rows, columns), dtype)


@njit(inline="always")
def _vector(address, length, dtype):
    return carray(_pointer(address), (length,), dtype)


@njit(inline="always")
def _num_chunks(vocab_size):
    return (vocab_size + _CHUNK - 1) // _CHUNK


def _run(one: Kernel, logits: Tensor, *rest: Tensor | int) -> None:
    """Over the rows of contiguous float32 logits: their address and shape come first, then other tensors and integers."""
    rows, vocab_size = logits.shape
    run = one.serial if rows == 1 or logits.numel() < _SERIAL_BELOW else one.parallel
    run(logits.data_ptr(), rows, vocab_size, *(x.data_ptr() if isinstance(x, Tensor) else x for x in rest))


@njit
def _extremes(bits):
    """Signed and unsigned maximum of the bits of float32 numbers, as integers: maxima of floats do not vectorise."""
    signed, unsigned = np.int32(-(2**31)), np.uint32(0)
    for i in range(bits.shape[0]):
        signed = max(signed, bits[i])
        unsigned = max(unsigned, np.uint32(bits[i]))
    return signed, unsigned


@njit
def _least(bits):
    least = np.int32(2**31 - 1)
    for i in range(bits.shape[0]):
        least = min(least, bits[i])
    return least


@njit
def _maximum(bits):
    """(bits of the largest of these float32 numbers, whether none is a NaN or +inf).

    Non-negative floats order as their bits do, negative ones the other way round.
    """
    signed, unsigned = _extremes(bits)
    finite = signed < np.int32(0x7F800000) and unsigned <= np.uint32(0xFF800000)
    return (signed if signed >= 0 else _least(bits)), finite


@njit
def _first(x, value):
    """Index of the first element equal to ``value``, as floats (so −0.0 and 0.0 are one)."""
    for i in range(x.shape[0]):
        if x[i] == value:
            return i
    return -1


@njit
def _row_argmax(x, bits, tops):
    """Index of the first largest element, −1 if the maximum is not finite; ``tops`` gets each chunk's maximum."""
    tops_bits = tops.view(np.int32)
    best, best_chunk = _NEG_INF, 0
    for c in range(tops.shape[0]):
        top, finite = _maximum(bits[c * _CHUNK : (c + 1) * _CHUNK])
        if not finite:
            return -1
        tops_bits[c] = top
        if tops[c] > best:
            best, best_chunk = tops[c], c
    if best == _NEG_INF:
        return -1
    return best_chunk * _CHUNK + _first(x[best_chunk * _CHUNK : (best_chunk + 1) * _CHUNK], best)


@kernel("qqqq")
def _argmax() -> Callable[[int], None]:
    def body(p: int) -> None:
        rows, vocab_size = arg(p, 1), arg(p, 2)
        x, bits = _matrix(arg(p, 0), rows, vocab_size, np.float32), _matrix(arg(p, 0), rows, vocab_size, np.int32)
        out = _vector(arg(p, 3), rows, np.int64)
        tops = np.empty(_num_chunks(vocab_size), np.float32)
        while True:
            r = take(p, 1)
            if r >= rows:
                break
            out[r] = _row_argmax(x[r], bits[r], tops)

    return body


def greedy_argmax(logits: Tensor) -> Tensor:
    if logits.dtype != torch.float32:
        return reference.greedy_argmax.reference(logits)
    out = torch.empty(logits.shape[0], dtype=torch.int64)
    _run(_argmax(), logits.contiguous(), out)
    return out


@njit
def _philox(seed, position, first_block, w0, w1, w2, w3):
    """Fill four arrays with Philox's words 0…3 for the blocks from ``first_block`` on."""
    for j in range(w0.shape[0]):
        c0, c1, c2, c3 = first_block + np.uint64(j), position, np.uint64(0), np.uint64(0)
        k0, k1 = seed & _WORD, seed >> np.uint64(32)
        for _ in range(_ROUNDS):
            p0, p1 = c0 * _M0, c2 * _M1
            c0, c1 = (p1 >> np.uint64(32)) ^ c1 ^ k0, p1 & _WORD
            c2, c3 = (p0 >> np.uint64(32)) ^ c3 ^ k1, p0 & _WORD
            k0, k1 = (k0 + _W0) & _WORD, (k1 + _W1) & _WORD
        w0[j], w1[j], w2[j], w3[j] = c0, c1, c2, c3


@njit
def _gumbel(word):
    """−log of the Exp(1) noise that a word stands for, float32."""
    u = min(np.float32(word) * np.float32(2.0**-32) + np.float32(2.0**-33), _LARGEST_UNIFORM)
    if u < _SERIES_BELOW:
        third = np.float32(1.0 / 3.0)
        return -math.log(u * (np.float32(1.0) + u * (np.float32(0.5) + u * third)))
    return -math.log(-math.log(np.float32(1.0) - u))


@njit
def _race(x, temperature, seed, position, words, tops, best_id):
    """The winner of one row's race, whose largest logit stands at ``best_id``.

    The noise of a token is at most −log u, so a token whose u is above ``exp(logit/T − best)`` cannot win. Nearly all are
    turned away by one integer comparison with the chunk's bound, and the logarithms are left for the few others.
    """
    w0, w1, w2, w3 = words[0], words[1], words[2], words[3]
    _philox(seed, position, np.uint64(best_id // 4), w0[:1], w1[:1], w2[:1], w3[:1])
    best = x[best_id] / temperature + _gumbel(words[best_id % 4, 0])
    for c in range(tops.shape[0]):
        # The slack covers the rounding of both sums; 2^32·u = word + 1/2.
        gap = np.float64(tops[c] / temperature - best) + 1e-3 + 1e-6 * abs(np.float64(best))
        limit = math.exp(min(gap, 1.0)) * 4294967296.0
        if limit <= 0.5:
            continue
        chunk = x[c * _CHUNK : (c + 1) * _CHUNK]
        n = (chunk.shape[0] + 3) // 4
        v0, v1, v2, v3 = w0[:n], w1[:n], w2[:n], w3[:n]
        _philox(seed, position, np.uint64(c * (_CHUNK // 4)), v0, v1, v2, v3)
        bound = np.uint64(min(limit, 4294967295.0))
        for j in range(n):
            if min(min(v0[j], v1[j]), min(v2[j], v3[j])) <= bound:
                for k in range(4):
                    i = 4 * j + k
                    if i < chunk.shape[0] and words[k, j] <= bound:
                        score = chunk[i] / temperature + _gumbel(words[k, j])
                        token_id = c * _CHUNK + i
                        if score > best or (score == best and token_id < best_id):
                            best, best_id = score, token_id
    return best_id


@kernel("qqqqqqq")
def _gumbel_argmax() -> Callable[[int], None]:
    def body(p: int) -> None:
        rows, vocab_size = arg(p, 1), arg(p, 2)
        x, bits = _matrix(arg(p, 0), rows, vocab_size, np.float32), _matrix(arg(p, 0), rows, vocab_size, np.int32)
        temperatures = _vector(arg(p, 3), rows, np.float32)
        seeds, positions = _vector(arg(p, 4), rows, np.uint64), _vector(arg(p, 5), rows, np.uint64)
        out = _vector(arg(p, 6), rows, np.int64)
        words = np.empty((4, _CHUNK // 4), np.uint64)
        tops = np.empty(_num_chunks(vocab_size), np.float32)
        while True:
            r = take(p, 1)
            if r >= rows:
                break
            winner = _row_argmax(x[r], bits[r], tops)
            if winner >= 0 and temperatures[r] != 0:
                winner = _race(x[r], temperatures[r], seeds[r], positions[r], words, tops, winner)
            out[r] = winner

    return body


def gumbel_argmax(logits: Tensor, temperatures: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
    out = torch.empty(logits.shape[0], dtype=torch.int64)
    rows = (temperatures.float().contiguous(), seeds.long().contiguous(), positions.long().contiguous())
    _run(_gumbel_argmax(), logits.float().contiguous(), *rows, out)
    return out


@njit
def _fixed_point(x, highest, fixed):
    """``(highest − x)·log2 e`` with 24 fractional bits, at most 2^30."""
    for i in range(x.shape[0]):
        fixed[i] = np.int32(min((highest - x[i]) * _LOG2_E, np.float32(64.0)) * np.float32(2.0**24))


@njit
def _weight(fixed):
    """``2^-fixed`` in units of 2^-40: one element of the reference's ``softmax_weights``."""
    f = np.uint64((fixed & np.int32(0xFFFFFF)) << np.int32(8)) & _WORD
    inner = _C5 - ((f * _C6) >> np.uint64(32))
    inner = _C4 - ((f * inner) >> np.uint64(32))
    inner = _C3 - ((f * inner) >> np.uint64(32))
    inner = _C2 - ((f * inner) >> np.uint64(32))
    inner = _C1 - ((f * inner) >> np.uint64(32))
    power = np.uint64(1 << 32) - ((f * inner) >> np.uint64(32))
    return (power << _WEIGHT_SHIFT) >> np.uint64(min(fixed >> np.int32(24), np.int32(63)))


@njit
def _total(fixed):
    mass = np.uint64(0)
    for i in range(fixed.shape[0]):
        mass += _weight(fixed[i])
    return mass


@njit
def _order_key(bits):
    """An integer that orders as the float32 with these bits does, −0.0 and 0.0 alike."""
    if bits >= 0:
        return np.int64(bits)
    return -np.int64(bits & np.int32(0x7FFFFFFF))


@njit
def _bin_members(x, bits, fixed, b, floor, keys, ids, weights):
    """Order keys, ids and weights of the elements of one bin that are not below ``floor``; how many there are."""
    n = 0
    for i in range(x.shape[0]):
        if fixed[i] >> _BIN_SHIFT == b and x[i] >= floor:
            keys[n], ids[n], weights[n] = _order_key(bits[i]), i, _weight(fixed[i])
            n += 1
    return n


@njit
def _last_needed(keys, weights, before, target):
    """The largest key that reaches the target: by bisection, ``before`` + the weights of this key and all above ≥ target."""
    low, high = keys.min(), keys.max()
    while low < high:
        middle = (low + high + 1) >> 1
        mass = before
        for i in range(keys.shape[0]):
            if keys[i] >= middle:
                mass += weights[i]
        if np.float64(mass) >= target:
            low = middle
        else:
            high = middle - 1
    return low


@njit
def _kth_largest(x, bits, fixed, k, keys, ids, weights):
    """The k-th largest element: its bin by counting, then a bisection within the bin."""
    counts = np.zeros(_NUM_BINS, np.int64)
    for i in range(fixed.shape[0]):
        counts[fixed[i] >> _BIN_SHIFT] += 1
    before, b = 0, 0
    while before + counts[b] < k:
        before += counts[b]
        b += 1
    n = _bin_members(x, bits, fixed, b, _NEG_INF, keys, ids, weights)
    weights[:n] = 1
    key = _last_needed(keys[:n], weights[:n], np.uint64(before), np.float64(k))
    for i in range(n):
        if keys[i] == key:
            return x[ids[i]]
    return _NEG_INF


@njit
def _nucleus_end(x, bits, fixed, floor, top_p, keys, ids, weights):
    """(logit, id) of the last token, by (logit descending, id ascending), that top-p keeps among those not below ``floor``."""
    masses = np.zeros(_NUM_BINS, np.uint64)
    total = np.uint64(0)
    for i in range(x.shape[0]):
        if x[i] >= floor:
            weight = _weight(fixed[i])
            total += weight
            masses[fixed[i] >> _BIN_SHIFT] += weight
    target = np.float64(top_p) * _TOP_P_SHARE * np.float64(total)
    before, b = np.uint64(0), 0
    while np.float64(before + masses[b]) < target:
        before += masses[b]
        b += 1
    n = _bin_members(x, bits, fixed, b, floor, keys, ids, weights)
    key = _last_needed(keys[:n], weights[:n], before, target)
    for i in range(n):
        if keys[i] > key:
            before += weights[i]
    last = -1
    for i in range(n):  # of those that are equal, the first ones
        if keys[i] == key and (last < 0 or np.float64(before) < target):
            last = ids[i]
            before += weights[i]
    return x[last], last


@njit
def _keep(x, value, last_id, out):
    """Copy what comes no later than (value, last_id); −inf for the rest."""
    for i in range(x.shape[0]):
        out[i] = x[i] if x[i] > value or (x[i] == value and i <= last_id) else _NEG_INF


@kernel("qqqqqq")
def _top_k_top_p() -> Callable[[int], None]:
    def body(p: int) -> None:
        rows, vocab_size = arg(p, 1), arg(p, 2)
        x, bits = _matrix(arg(p, 0), rows, vocab_size, np.float32), _matrix(arg(p, 0), rows, vocab_size, np.int32)
        top_k, top_p = _vector(arg(p, 3), rows, np.int64), _vector(arg(p, 4), rows, np.float32)
        out = _matrix(arg(p, 5), rows, vocab_size, np.float32)
        tops = np.empty(_num_chunks(vocab_size), np.float32)
        fixed = np.empty(vocab_size, np.int32)
        keys, ids = np.empty(vocab_size, np.int64), np.empty(vocab_size, np.int64)
        weights = np.empty(vocab_size, np.uint64)
        while True:
            r = take(p, 1)
            if r >= rows:
                break
            best = _row_argmax(x[r], bits[r], tops)
            by_k, by_p = 0 < top_k[r] < vocab_size, top_p[r] < 1.0
            if best < 0 or not (by_k or by_p):
                out[r] = x[r]
                continue
            _fixed_point(x[r], x[r, best], fixed)
            value, last_id = _NEG_INF, vocab_size
            if by_k:
                value = _kth_largest(x[r], bits[r], fixed, top_k[r], keys, ids, weights)
            if by_p:
                value, last_id = _nucleus_end(x[r], bits[r], fixed, value, top_p[r], keys, ids, weights)
            _keep(x[r], value, last_id, out[r])

    return body


def apply_top_k_top_p(logits: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    out = torch.empty(logits.shape, dtype=torch.float32)
    _run(_top_k_top_p(), logits.float().contiguous(), top_k.long().contiguous(), top_p.float().contiguous(), out)
    return out


@njit
def _keep_above(x, highest, log_ratio, out):
    for i in range(x.shape[0]):
        out[i] = _NEG_INF if x[i] - highest < log_ratio else x[i]


@kernel("qqqqq")
def _min_p() -> Callable[[int], None]:
    def body(p: int) -> None:
        rows, vocab_size = arg(p, 1), arg(p, 2)
        x, bits = _matrix(arg(p, 0), rows, vocab_size, np.float32), _matrix(arg(p, 0), rows, vocab_size, np.int32)
        log_min_p, out = _vector(arg(p, 3), rows, np.float32), _matrix(arg(p, 4), rows, vocab_size, np.float32)
        tops = np.empty(_num_chunks(vocab_size), np.float32)
        while True:
            r = take(p, 1)
            if r >= rows:
                break
            best = _row_argmax(x[r], bits[r], tops)
            if best < 0:
                out[r] = x[r]
            else:
                _keep_above(x[r], x[r, best], log_min_p[r], out[r])

    return body


def apply_min_p(logits: Tensor, min_p: Tensor) -> Tensor:
    out = torch.empty(logits.shape, dtype=torch.float32)
    _run(_min_p(), logits.float().contiguous(), torch.log(min_p.float()).contiguous(), out)
    return out


@njit
def _count_at_least(x, value):
    count = 0
    for i in range(x.shape[0]):
        count += x[i] >= value
    return count


@njit
def _top_n(x, tops, values, ids):
    """Fill ``values`` and ``ids`` with the largest elements, by (value descending, id ascending)."""
    n = values.shape[0]
    values[:], ids[:] = _NEG_INF, -1
    found = 0
    for c in range(tops.shape[0]):
        if found == n and tops[c] <= values[n - 1]:
            continue
        chunk = x[c * _CHUNK : (c + 1) * _CHUNK]
        for i in range(chunk.shape[0]):
            if found < n or chunk[i] > values[n - 1]:
                j = found if found < n else n - 1
                while j > 0 and values[j - 1] < chunk[i]:
                    values[j], ids[j] = values[j - 1], ids[j - 1]
                    j -= 1
                values[j], ids[j] = chunk[i], c * _CHUNK + i
                found = min(found + 1, n)


@kernel("qqqqqqqq")
def _top_n_logprobs() -> Callable[[int], None]:
    def body(p: int) -> None:
        rows, vocab_size, n = arg(p, 1), arg(p, 2), arg(p, 4)
        x, bits = _matrix(arg(p, 0), rows, vocab_size, np.float32), _matrix(arg(p, 0), rows, vocab_size, np.int32)
        token_ids, logprobs = _vector(arg(p, 3), rows, np.int64), _matrix(arg(p, 5), rows, n + 1, np.float32)
        ids, ranks = _matrix(arg(p, 6), rows, n + 1, np.int64), _matrix(arg(p, 7), rows, n + 1, np.int64)
        tops = np.empty(_num_chunks(vocab_size), np.float32)
        fixed = np.empty(vocab_size, np.int32)
        values = np.empty(n + 1, np.float32)
        while True:
            r = take(p, 1)
            if r >= rows:
                break
            best = _row_argmax(x[r], bits[r], tops)
            ids[r, 0] = token_ids[r]
            if best < 0:
                logprobs[r], ids[r], ranks[r] = np.nan, token_ids[r], vocab_size
                continue
            _fixed_point(x[r], x[r, best], fixed)
            log_mass = math.log(np.float64(_total(fixed)) * _UNIT)
            values[0] = x[r, token_ids[r]]
            ranks[r, 0] = _count_at_least(x[r], values[0])
            if n > 0:
                _top_n(x[r], tops, values[1:], ids[r, 1:])
                ranks[r, n] = _count_at_least(x[r], values[n])
                for j in range(n - 1, 0, -1):
                    ranks[r, j] = ranks[r, j + 1] if values[j] == values[j + 1] else j
            for j in range(n + 1):
                logprobs[r, j] = np.float64(values[j] - x[r, best]) - log_mass

    return body


def top_n_logprobs(logits: Tensor, token_ids: Tensor, n: int) -> tuple[Tensor, Tensor, Tensor]:
    if n > _LARGEST_N:
        return reference.top_n_logprobs.reference(logits, token_ids, n)
    if token_ids.numel() and not 0 <= int(token_ids.min()) <= int(token_ids.max()) < logits.shape[1]:
        raise IndexError(f"token ids {token_ids.tolist()} do not all lie in the vocabulary [0, {logits.shape[1]})")
    shape = (logits.shape[0], n + 1)
    logprobs = torch.empty(shape, dtype=torch.float32)
    ids, ranks = torch.empty(shape, dtype=torch.int64), torch.empty(shape, dtype=torch.int64)
    _run(_top_n_logprobs(), logits.float().contiguous(), token_ids.long().contiguous(), n, logprobs, ids, ranks)
    return logprobs, ids, ranks
