"""The sampling kernels give the references' very bits, and the references' sets are those of a plain sort written here."""

from __future__ import annotations

import math

import pytest
import torch
import triton
import triton.language as tl
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from llmlab.kernels.sampling import (
    apply_min_p,
    apply_penalties,
    apply_temperature,
    apply_top_k_top_p,
    exponential_noise,
    greedy_argmax,
    gumbel_argmax,
    top_n_logprobs,
    uniform_words,
)
from llmlab.kernels.selection import key_value, ordered_key, softmax_weight
from torch import Tensor

from llmlab import ops
from llmlab.interpreter import run

FUZZ = settings(
    derandomize=True, deadline=None, max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
INF = float("inf")
VOCABULARIES = st.sampled_from([1, 2, 5, 100, 2048, 2049, 4500])
KINDS = st.lists(st.sampled_from(["normal", "flat", "wide", "ties", "equal", "masked"]), min_size=1, max_size=4)


def rows_of(kinds: list[str], vocab_size: int, seed: int) -> Tensor:
    """One row of each kind, in a view whose row stride is not the vocabulary."""
    g = torch.Generator().manual_seed(seed)
    whole = torch.full((len(kinds), vocab_size + 3), float("nan"))
    logits = whole[:, 1 : 1 + vocab_size]
    scales = {"normal": 4.0, "flat": 0.1, "wide": 40.0, "ties": 2.0, "equal": 0.0, "masked": 4.0}
    for row, kind in zip(logits, kinds, strict=True):
        row.copy_(torch.randn(vocab_size, generator=g) * scales[kind])
        if kind == "ties":
            row.round_()
        if kind == "masked":
            row[torch.rand(vocab_size, generator=g) < 0.7] = -INF
            row[vocab_size // 2] = 1.0
    return logits


def same(actual: Tensor, expected: Tensor) -> bool:
    return torch.equal(actual.nan_to_num(123.0), expected.nan_to_num(123.0))


@FUZZ
@given(kinds=KINDS, vocab_size=VOCABULARIES, seed=st.integers(0, 99), data=st.data())
def test_top_k_top_p_is_the_reference(kinds, vocab_size, seed, data):
    logits = rows_of(kinds, vocab_size, seed)
    some_k = st.sampled_from([0, 1, 2, 50, vocab_size // 2, vocab_size, vocab_size + 1, -1])
    some_p = st.sampled_from([0.0, 1e-9, 0.1, 0.5, 0.9, 0.999, 1.0, 2.0])
    top_k = torch.tensor(data.draw(st.lists(some_k, min_size=len(kinds), max_size=len(kinds))), dtype=torch.int32)
    top_p = torch.tensor(data.draw(st.lists(some_p, min_size=len(kinds), max_size=len(kinds))))
    out = apply_top_k_top_p(logits, top_k, top_p)
    assert torch.equal(out, ops.apply_top_k_top_p.reference(logits, top_k, top_p))


@pytest.mark.parametrize(("top_k", "top_p"), [(0, 0.9), (7, 1.0), (40, 0.6), (3000, 0.95)])
@pytest.mark.parametrize("kind", ["normal", "flat", "wide", "ties", "equal"])
def test_the_kept_set_is_that_of_a_sort(kind, top_k, top_p):
    """A sort in float64, away from borders that only exact arithmetic can decide; with ties the count is what is certain."""
    logits = rows_of([kind], 4500, seed=1)
    probs = logits[0].double().softmax(-1)
    order = sorted(range(4500), key=lambda i: (-logits[0, i].item(), i))
    if top_k:
        border = logits[0, order[top_k - 1]]
        order = [i for i in order if logits[0, i] >= border]
    mass = probs[order].cumsum(-1) / probs[order].sum()
    kept = order if top_p == 1.0 else order[: int((mass < top_p - 1e-6).sum()) + 1]
    out = apply_top_k_top_p(logits, torch.tensor([top_k]), torch.tensor([top_p]))
    assert set(out[0].isfinite().nonzero()[:, 0].tolist()) == set(kept)


@pytest.mark.parametrize(
    ("top_p", "count"), [(1e-9, 1), (0.0, 1), (0.5, 1), (0.75, 2), (0.7501, 3), (0.875, 3), (0.876, 4), (1.0, 4)]
)
def test_the_crossing_token_is_kept(top_p, count):
    logits = torch.log2(torch.tensor([[0.125, 0.5, 0.125, 0.25]])) * math.log(2)
    kept = apply_top_k_top_p(logits, torch.tensor([0]), torch.tensor([top_p]))[0].isfinite()
    assert kept.sum() == count and kept[1]


def test_rows_that_have_no_softmax_pass_unchanged():
    logits = torch.randn(4, 50, generator=torch.Generator().manual_seed(0))
    logits[0, 3], logits[1], logits[2, 7] = float("nan"), -INF, INF
    out = apply_top_k_top_p(logits, torch.full((4,), 2), torch.full((4,), 0.5))
    assert same(out[:3], logits[:3]) and out[3].isfinite().sum() <= 2


@FUZZ
@given(kinds=KINDS, vocab_size=VOCABULARIES, n=st.sampled_from([0, 1, 5, 20, 10**6]), seed=st.integers(0, 99))
def test_top_n_logprobs_is_the_reference(kinds, vocab_size, n, seed):
    logits = rows_of(kinds, vocab_size, seed)
    token_ids = torch.randint(0, vocab_size, (len(kinds),), generator=torch.Generator().manual_seed(seed))
    n = min(n, vocab_size)
    for actual, expected in zip(
        top_n_logprobs(logits, token_ids, n), ops.top_n_logprobs.reference(logits, token_ids, n), strict=True
    ):
        assert actual.dtype == expected.dtype and torch.equal(actual, expected)


def test_logprobs_ranks_and_ties():
    """[2, 1, 2, 0]: two tokens share rank 2, lower id first; logprobs are torch's."""
    logits = torch.tensor([[2.0, 1.0, 2.0, 0.0]])
    logprobs, token_ids, ranks = top_n_logprobs(logits, torch.tensor([3]), 3)
    assert token_ids.tolist() == [[3, 0, 2, 1]] and ranks.tolist() == [[4, 2, 2, 3]]
    torch.testing.assert_close(logprobs[0], logits[0].log_softmax(-1)[[3, 0, 2, 1]])


@FUZZ
@given(
    kinds=KINDS,
    vocab_size=st.sampled_from([1, 3, 100, 4096, 4097, 9000]),
    seed=st.integers(-(2**63), 2**63 - 1),
    position=st.integers(0, 2**32 - 1),
)
def test_argmax_with_and_without_noise(kinds, vocab_size, seed, position):
    logits = rows_of(kinds, vocab_size, seed % 100)
    temperatures = torch.tensor([1.0, 0.0, 0.5, 3.0])[: len(kinds)]
    seeds = torch.full((len(kinds),), seed)
    positions = torch.full((len(kinds),), position)
    assert torch.equal(greedy_argmax(logits), logits.argmax(-1))
    assert torch.equal(greedy_argmax(logits.bfloat16()), logits.bfloat16().float().argmax(-1))
    tokens = gumbel_argmax(logits, temperatures, seeds, positions)
    assert torch.equal(tokens, ops.gumbel_argmax.reference(logits, temperatures, seeds, positions))


def test_the_first_of_equals_wins_across_blocks_and_unsound_rows_give_minus_one():
    logits = torch.full((5, 9000), -1.0)
    logits[0, [100, 5000, 8999]] = 3.0
    logits[1, [4096, 4095]] = 3.0
    logits[2, 6000], logits[3], logits[4, 10] = float("nan"), -INF, INF
    assert greedy_argmax(logits).tolist() == [100, 4095, -1, -1, -1]
    zeros = torch.zeros(5, dtype=torch.int64)
    assert gumbel_argmax(logits, torch.zeros(5), zeros, zeros).tolist() == [100, 4095, -1, -1, -1]
    drawn = gumbel_argmax(logits, torch.ones(5), zeros, zeros).tolist()
    assert drawn[2:] == [-1, -1, -1] and min(drawn[:2]) >= 0


def test_noise_depends_on_seed_position_and_token_alone():
    """The same draw in another row of another batch; another one at the next position or seed."""
    g = torch.Generator().manual_seed(0)
    logits = torch.randn(1, 5000, generator=g).expand(40, -1)
    positions = torch.arange(40)
    draws = gumbel_argmax(logits, torch.ones(40), torch.full((40,), 7), positions)
    back = gumbel_argmax(logits, torch.ones(40), torch.full((40,), 7), positions.flip(0)).flip(0)
    assert torch.equal(draws, back) and len(set(draws.tolist())) > 30
    assert not torch.equal(draws, gumbel_argmax(logits, torch.ones(40), torch.full((40,), 8), positions))


@triton.jit
def bits_kernel(x_ptr, seed, position, words_ptr, noise_ptr, weight_ptr, back_ptr, highest, N: tl.constexpr):
    i = tl.arange(0, N)
    words = uniform_words(seed, position, 0, N)
    tl.store(words_ptr + i, words.to(tl.int64))
    tl.store(noise_ptr + i, exponential_noise(words))
    x = tl.load(x_ptr + i)
    tl.store(weight_ptr + i, softmax_weight(x, highest))
    tl.store(back_ptr + i, key_value(ordered_key(x)))


@pytest.mark.parametrize("seed", [0, 7, -1, 2**62 + 12345])
def test_the_parts_to_the_bit(seed):
    """Philox words and softmax weights are the references' exactly, noise to an ulp of the logarithm; keys invert."""
    n = 1024
    x = torch.randn(n, generator=torch.Generator().manual_seed(1)) * 10
    x[:3] = torch.tensor([-INF, -0.0, x.max().item() + 1])
    words, weights = torch.empty(2, n, dtype=torch.int64)
    noise, back = torch.empty(2, n)
    run(bits_kernel, (1,), x, torch.tensor(seed).item(), 2**32 - 5, words, noise, weights, back, x.max().item(), N=n)
    key = torch.tensor([seed])
    zero = torch.zeros(n // 4, dtype=torch.int64)
    expected = ops.sampling.philox4x32(
        (torch.arange(n // 4), zero + 2**32 - 5, zero, zero), (key & 0xFFFFFFFF, (key >> 32) & 0xFFFFFFFF)
    )
    assert torch.equal(words, torch.stack(expected, -1).flatten())
    torch.testing.assert_close(
        noise, ops.sampling.exponential_noise(key, torch.tensor([2**32 - 5]), n)[0], rtol=3e-7, atol=0
    )
    assert torch.equal(weights, ops.sampling.softmax_weights(x, x.max()))
    assert torch.equal(back, x)


@FUZZ
@given(vocab_size=st.sampled_from([1, 100, 5000]), seed=st.integers(0, 99))
def test_temperature_min_p_and_penalties(vocab_size, seed):
    g = torch.Generator().manual_seed(seed)
    logits = rows_of(["normal", "masked", "ties", "equal"], vocab_size, seed)
    temperatures = torch.tensor([0.0, 0.3, 1.7, 1.0])
    min_p = torch.tensor([0.0, 0.1, 0.5, 1.0])
    assert torch.equal(apply_temperature(logits, temperatures), ops.apply_temperature.reference(logits, temperatures))
    assert torch.equal(apply_min_p(logits, min_p), ops.apply_min_p.reference(logits, min_p))
    before = logits.clone()
    cells = torch.randperm(4 * vocab_size, generator=g)[: min(300, vocab_size)]
    counts = torch.randint(0, 5, cells.shape, generator=g)
    penalties = [torch.rand(4, generator=g) + 0.5 for _ in range(3)]
    args = (logits, cells // vocab_size, cells % vocab_size, counts, *penalties)
    assert torch.equal(apply_penalties(*args), ops.apply_penalties.reference(*args))
    assert torch.equal(logits, before)


def test_known_values():
    logits = torch.tensor([[4.0, 3.0, 2.0, 1.0]])
    kept = [int(apply_min_p(logits / t, torch.tensor([0.2])).isfinite().sum()) for t in (0.5, 1.0, 2.0)]
    assert kept == [1, 2, 4]
    penalised = apply_penalties(
        torch.tensor([[2.0, -2.0, 1.0, -1.0, 0.5]]),
        torch.zeros(3, dtype=torch.int64),
        torch.tensor([0, 3, 1]),
        torch.tensor([0, 0, 2]),
        torch.tensor([2.0]),
        torch.tensor([0.5]),
        torch.tensor([0.25]),
    )
    assert penalised.tolist() == [[1.0, -5.25, 1.0, -2.0, 0.5]]


def test_a_row_with_a_nan_passes_min_p_unchanged():
    logits = torch.tensor([[1.0, float("nan"), -50.0]])
    assert same(apply_min_p(logits, torch.tensor([0.5])), logits)


def test_rows_past_two_to_the_31_elements():
    """The second row starts 2^31 + 16 elements after the first (memory that is reserved, and hardly touched)."""
    logits = torch.empty_strided((2, 64), (2**31 + 16, 1))
    logits[0], logits[1] = torch.linspace(0, 1, 64), torch.linspace(5, 0, 64)
    ones, ids = torch.ones(2), torch.zeros(2, dtype=torch.int64)
    assert greedy_argmax(logits).tolist() == [63, 0]
    assert apply_temperature(logits, ones)[1, 0] == 5 and apply_min_p(logits, ones)[1].isfinite().sum() == 1
    assert apply_top_k_top_p(logits, torch.full((2,), 3), ones)[1].isfinite().nonzero()[:, 0].tolist() == [0, 1, 2]
    assert top_n_logprobs(logits, ids, 2)[1].tolist() == [[0, 63, 62], [0, 0, 1]]


def test_nothing_in_nothing_out():
    logits, none, ids = torch.empty(0, 9), torch.empty(0), torch.empty(0, dtype=torch.int64)
    assert apply_penalties(logits, ids, ids, ids, none, none, none).shape == (0, 9)
    assert apply_temperature(logits, none).shape == apply_min_p(logits, none).shape == (0, 9)
    assert apply_top_k_top_p(logits, ids, none).shape == (0, 9)
    assert greedy_argmax(logits).shape == gumbel_argmax(logits, none, ids, ids).shape == (0,)
    assert [t.shape for t in top_n_logprobs(logits, ids, 3)] == [(0, 4)] * 3


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x, v: apply_temperature(x.half(), v), r"logits must be float32 \[num_reqs, vocab_size\]"),
        (lambda x, v: apply_min_p(x, v[:1]), r"min_p must be \[2\], not \(1,\)"),
        (lambda x, v: apply_top_k_top_p(x.T, v, v), "last dimension must be contiguous"),
        (lambda x, v: top_n_logprobs(x, v.long(), 9), "within 0..8"),
        (lambda x, v: greedy_argmax(x[:, :0]), "with a token at least"),
        (lambda x, v: apply_penalties(x, v.long(), v.long()[:1], v.long(), v, v, v), r"\[C\] alike"),
    ],
)
def test_bad_input_is_named(call, message):
    with pytest.raises(ValueError, match=message):
        call(torch.zeros(2, 8), torch.ones(2))
