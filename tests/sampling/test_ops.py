"""The sampling ops: golden values computed by hand, Random123's and Triton's Philox, Hugging Face's warpers, and torch.

``ops`` runs each test with the references and with the CPU twins.
"""

from __future__ import annotations

import math
import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from llmlab import ops as all_ops
from llmlab.ops import sampling

NEG_INF = float("-inf")
FACES = [all_ops.bind(name, "cpu") for name in ("reference", "torch")]


def logits_of(probs: list[float]) -> Tensor:
    return torch.tensor([probs]).log()


def kept(logits: Tensor) -> list[int]:
    return (logits[0] > NEG_INF).nonzero().flatten().tolist()


def top_k_top_p(ops, logits: Tensor, k: int = 0, p: float = 1.0) -> Tensor:
    rows = len(logits)
    return ops.apply_top_k_top_p(logits, torch.full((rows,), k), torch.full((rows,), p))


# ---- Philox and the noise --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [  # Random123's kat_vectors, philox 4x32-10
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_gives_the_published_words(counter, key, words):
    def as_tensors(values):
        return tuple(torch.tensor([v]) for v in values)

    assert tuple(int(w) for w in sampling.philox4x32(as_tensors(counter), as_tensors(key))) == words


PHILOX_KERNEL = """
import torch, triton, triton.language as tl

@triton.jit
def words(out, seed_ptr, position, n: tl.constexpr):
    block = tl.arange(0, n).to(tl.uint32)
    zero = block * 0
    a, b, c, d = tl.philox(tl.load(seed_ptr).to(tl.uint64), block, zero + position, zero, zero)
    i = 4 * tl.arange(0, n)
    tl.store(out + i, a.to(tl.int64))
    tl.store(out + i + 1, b.to(tl.int64))
    tl.store(out + i + 2, c.to(tl.int64))
    tl.store(out + i + 3, d.to(tl.int64))

out = torch.zeros(64, dtype=torch.int64)
words[(1,)](out, torch.tensor([-0x123456789ABCDEF1]), 77, 16)
print(*out.tolist())
"""


def test_the_noise_is_the_one_that_tritons_philox_gives(tmp_path):
    """``tl.philox(seed, token id // 4, position, 0, 0)``, in Triton's own interpreter and a process of its own."""
    pytest.importorskip("triton")
    script = tmp_path / "philox_words.py"
    script.write_text(PHILOX_KERNEL)
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    ran = subprocess.run([sys.executable, script], env=environment, capture_output=True, text=True, check=True)
    words = np.array(ran.stdout.split(), dtype=np.float64)
    noise = sampling.exponential_noise(torch.tensor([-0x123456789ABCDEF1]), torch.tensor([77]), 64)
    # 1 − u is rounded to float32, hence 2⁻²⁴ against a u of at least 2⁻¹⁰.
    np.testing.assert_allclose(noise[0].numpy(), -np.log1p(-(words + 0.5) * 2.0**-32), rtol=7e-5)


def test_noise_depends_on_seed_position_and_token_alone():
    seeds, positions = torch.tensor([5, -1, 5, 5]), torch.tensor([3, 3, 4, 3])
    noise = sampling.exponential_noise(seeds, positions, 101)
    assert torch.equal(noise[0], noise[3])
    assert torch.equal(noise[1], sampling.exponential_noise(seeds[1:2], positions[1:2], 101)[0])
    assert torch.equal(noise[0, :50], sampling.exponential_noise(seeds[:1], positions[:1], 50)[0])
    assert all(not torch.equal(noise[0], noise[r]) for r in (1, 2))


def test_noise_is_never_zero_nor_infinite_at_the_ends_of_the_words(monkeypatch):
    """An Exp(1) variable of 0 would divide by zero, one of infinity would lose to a masked token."""
    ends = torch.tensor([[0, 1, 2**32 - 2, 2**32 - 1]])
    monkeypatch.setattr(sampling, "philox4x32", lambda counter, key: tuple(ends[:, i : i + 1] for i in range(4)))
    noise = sampling.exponential_noise(torch.tensor([0]), torch.tensor([0]), 4)[0]
    assert (noise > 0).all() and noise.isfinite().all() and torch.log(noise).isfinite().all()
    assert noise[0] == pytest.approx(2.0**-33) and noise[1] == pytest.approx(3 * 2.0**-33)


def test_noise_has_the_moments_of_the_exponential_distribution():
    noise = sampling.exponential_noise(torch.arange(4), torch.arange(4), 1 << 18).double()
    for order in (1, 2, 3):
        moment = math.factorial(order)
        error = math.sqrt((math.factorial(2 * order) - moment**2) / noise.numel())
        assert abs(noise.pow(order).mean() - moment) < 4 * error


# ---- the fixed-point softmax -----------------------------------------------------------------------------------------


def test_weights_are_exact_for_powers_of_two_and_close_elsewhere():
    logits = torch.tensor([1.0, 0.5, 0.25, 2.0**-12, 2.0**-40, 2.0**-41, 0.0]).log()
    weights = sampling.softmax_weights(logits, logits[0])
    assert weights.tolist() == [2**40, 2**39, 2**38, 2**28, 1, 0, 0]
    below = torch.linspace(0, 20, 10_001)
    weights = sampling.softmax_weights(-below, torch.zeros(()))
    assert torch.allclose(weights.double() * 2.0**-40, torch.exp(-below.double()), rtol=2e-6, atol=2.0**-40)
    assert (weights.diff() <= 0).all()


# ---- top-p, top-k ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("p", "count"), [(0.5, 1), (0.75, 2), (0.750001, 3), (0.875, 3), (0.876, 4), (1.0, 4), (1e-9, 1), (0.0, 1)]
)
@pytest.mark.parametrize("order", [(0, 1, 2, 3), (3, 2, 1, 0), (2, 0, 3, 1)])
def test_top_p_keeps_the_smallest_set_that_reaches_p(ops, p, count, order):
    probs = [0.5, 0.25, 0.125, 0.125]
    out = top_k_top_p(ops, logits_of([probs[i] for i in order]), p=p)
    assert len(kept(out)) == count


@pytest.mark.parametrize(
    ("probs", "p", "expected"),
    [
        ([0.3, 0.1, 0.1, 0.5], 0.8, [0, 3]),  # a strict comparison kept a third
        ([0.1, 0.2, 0.3, 0.4], 0.6, [2, 3]),  # the crossing token was once dropped
        ([0.25] * 4, 0.5, [0, 1]),  # of ties, the lower ids
        ([0.125, 0.5, 0.125, 0.25], 0.875, [0, 1, 3]),
    ],
)
def test_top_p_keeps_the_crossing_token_and_no_more(ops, probs, p, expected):
    assert kept(top_k_top_p(ops, logits_of(probs), p=p)) == expected


def test_top_k_keeps_ties_with_the_kth(ops):
    logits = torch.tensor([[1.0, 3.0, 2.0, 2.0, 0.0, 2.0]])
    assert kept(top_k_top_p(ops, logits, k=1)) == [1]
    assert kept(top_k_top_p(ops, logits, k=2)) == [1, 2, 3, 5]
    assert kept(top_k_top_p(ops, logits, k=5)) == [0, 1, 2, 3, 5]
    for off in (0, 6, 7, 100):
        assert torch.equal(top_k_top_p(ops, logits, k=off), logits)


def test_top_p_counts_mass_among_what_top_k_left(ops):
    logits = logits_of([0.5, 0.25, 0.125, 0.125])
    # After top-k 2 the masses are 2/3 and 1/3.
    assert kept(top_k_top_p(ops, logits, k=2, p=0.66)) == [0]
    assert kept(top_k_top_p(ops, logits, k=2, p=0.67)) == [0, 1]


def test_a_row_that_asks_for_nothing_is_left_alone_beside_others(ops):
    """Not even a token whose probability rounds to 0 may go: alone in its batch, the row would keep it."""
    logits = torch.tensor([[0.0, -200.0, -1.0], [0.0, -200.0, -1.0]])
    out = ops.apply_top_k_top_p(logits, torch.tensor([0, 1]), torch.tensor([1.0, 0.9]))
    assert torch.equal(out[0], logits[0]) and kept(out[1:]) == [0]


def test_masks_are_minus_infinity(ops):
    out = top_k_top_p(ops, torch.tensor([[5.0, 4.9]]), k=1)
    assert out.tolist() == [[5.0, NEG_INF]]


def test_rows_without_a_finite_maximum_pass_unchanged(ops):
    bad = torch.tensor([[NEG_INF] * 4, [1.0, float("nan"), 2.0, 0.0], [1.0, float("inf"), 2.0, 0.0]])
    for out in (top_k_top_p(ops, bad, k=1, p=0.5), ops.apply_min_p(bad, torch.tensor([0.0, 0.5, 0.5]))[:2]):
        np.testing.assert_array_equal(out.numpy(), bad[: len(out)].numpy())


# ---- min-p, temperature, penalties -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("temperature", "count"), [(0.5, 1), (1.0, 2), (2.0, 4)])
def test_min_p_comes_after_temperature(ops, temperature, count):
    logits = ops.apply_temperature(torch.tensor([[4.0, 3.0, 2.0, 1.0]]), torch.tensor([temperature]))
    assert len(kept(ops.apply_min_p(logits, torch.tensor([0.2])))) == count


@pytest.mark.parametrize(("highest", "threshold"), [(0.9, 0.09), (0.08, 0.008)])
def test_min_p_adapts_to_the_most_likely_token(ops, highest, threshold):
    probs = [threshold * 1.001, threshold * 0.999, highest, threshold / 2]
    assert kept(ops.apply_min_p(logits_of(probs), torch.tensor([0.1]))) == [0, 2]


def test_min_p_keeps_a_token_at_the_threshold_and_the_best_one_always(ops):
    logits = logits_of([0.5, 0.25, 0.125, 0.125])
    assert kept(ops.apply_min_p(logits, torch.tensor([0.5]))) == [0, 1]
    assert kept(ops.apply_min_p(logits, torch.tensor([1.0]))) == [0]
    assert torch.equal(ops.apply_min_p(logits, torch.tensor([0.0])), logits)


def test_greedy_rows_pass_temperature_undivided(ops):
    logits = torch.tensor([[1.0, 2.0], [1.0, 2.0]])
    assert ops.apply_temperature(logits, torch.tensor([0.0, 0.5])).tolist() == [[1.0, 2.0], [2.0, 4.0]]


@pytest.mark.parametrize(
    ("repetition", "frequency", "presence", "expected"),
    [
        (2.0, 0.0, 0.0, [1, -4, 1, -2, 0.5]),
        (2.0, 0.5, 0.0, [1, -5, 1, -2, 0.5]),
        (2.0, 0.5, 0.25, [1, -5.25, 1, -2, 0.5]),
    ],
)
def test_penalties_in_order_over_prompt_and_output(ops, repetition, frequency, presence, expected):
    logits = torch.tensor([[9.0] * 5, [2.0, -2.0, 1.0, -1.0, 0.5]])
    rows, ids, counts = (
        torch.tensor([1, 1, 1]),
        torch.tensor([0, 3, 1]),
        torch.tensor([0, 0, 2]),
    )  # prompt {0, 3}, out 1 1
    off = torch.tensor([1.0, 0.0, 0.0])
    out = ops.apply_penalties(
        logits,
        rows,
        ids,
        counts,
        *(torch.tensor([float(o), on]) for o, on in zip(off, (repetition, frequency, presence), strict=True)),
    )
    assert out.tolist() == [[9.0] * 5, expected]
    assert logits[1].tolist() == [2.0, -2.0, 1.0, -1.0, 0.5]  # ops are pure


def test_penalties_leave_a_masked_token_masked(ops):
    one = torch.tensor([0])
    out = ops.apply_penalties(
        torch.tensor([[NEG_INF, 1.0]]), one, one, one, torch.tensor([0.5]), torch.tensor([-2.0]), torch.tensor([-2.0])
    )
    assert out.tolist() == [[NEG_INF, 1.0]]


# ---- choosing --------------------------------------------------------------------------------------------------------


def test_argmax_takes_the_first_of_equals_and_refuses_rows_without_a_finite_maximum(ops):
    nan, inf = float("nan"), float("inf")
    rows = [
        ([1.0, 3.0, 3.0, 2.0], 1),
        ([-0.0, 0.0, -1.0, -2.0], 0),
        ([-5.0, -3.0, -4.0, -3.0], 1),
        ([NEG_INF, NEG_INF, -3.0, NEG_INF], 2),
        ([NEG_INF] * 4, -1),
        ([1.0, nan, 3.0, 2.0], -1),
        ([-1.0, -nan, -3.0, -2.0], -1),
        ([1.0, inf, 3.0, 2.0], -1),
    ]
    logits, expected = torch.tensor([r for r, _ in rows]), [e for _, e in rows]
    assert ops.greedy_argmax(logits).tolist() == expected
    zeros = torch.zeros(len(rows), dtype=torch.int64)
    assert ops.gumbel_argmax(logits, zeros.float(), zeros, zeros).tolist() == expected
    drawn = ops.gumbel_argmax(logits, zeros.float() + 1, zeros, zeros).tolist()
    assert [d == -1 for d in drawn] == [e == -1 for e in expected] and drawn[3] == 2


def test_a_negative_nan_is_found_in_a_long_row(ops):
    logits = torch.full((1, 5000), -3.0)
    logits[0, 4321] = -torch.tensor(float("nan"))
    assert ops.greedy_argmax(logits).tolist() == [-1]


def test_a_masked_token_is_never_drawn(ops):
    logits = top_k_top_p(ops, torch.tensor([[5.0, 4.9]]).repeat(1000, 1), k=1)
    drawn = ops.gumbel_argmax(logits, torch.ones(1000), torch.arange(1000), torch.zeros(1000, dtype=torch.int64))
    assert set(drawn.tolist()) == {0}
    only = torch.tensor([[0.0, 1.0]]).log().repeat(1000, 1)
    assert set(sampling.exponential_race(only.exp(), torch.arange(1000), torch.zeros(1000).long()).tolist()) == {1}


def test_half_precision_logits_at_a_tiny_temperature_do_not_overflow(ops):
    logits = torch.tensor([[10.0, 9.0]], dtype=torch.float16)
    drawn = ops.gumbel_argmax(logits.float(), torch.tensor([1e-4]), torch.tensor([0]), torch.tensor([0]))
    assert drawn.tolist() == [0]


def test_the_race_over_probabilities_is_the_race_over_logits(ops):
    logits = torch.randn(200, 333, generator=torch.Generator().manual_seed(0))
    seeds, positions = torch.arange(200) * 7 - 500, torch.arange(200)
    race = sampling.exponential_race(logits.softmax(-1), seeds, positions)
    assert torch.equal(ops.gumbel_argmax(logits, torch.ones(200), seeds, positions), race)


# ---- the references and the CPU twins are one ------------------------------------------------------------------------


@st.composite
def batches(draw: st.DrawFn) -> tuple[Tensor, torch.Generator]:
    rows, vocab_size = draw(st.integers(1, 4)), draw(st.sampled_from([1, 2, 5, 31, 511, 512, 513, 1500]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    logits = torch.randn(rows, vocab_size, generator=generator) * draw(st.sampled_from([0.0, 0.1, 1.0, 5.0, 30.0]))
    if draw(st.booleans()):
        logits = logits.round()  # ties
    if draw(st.booleans()):
        logits[torch.rand(logits.shape, generator=generator) < draw(st.sampled_from([0.1, 0.9, 1.0]))] = NEG_INF
    return logits + draw(st.sampled_from([0.0, 50.0, -50.0])), generator


FUZZ = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True)


@FUZZ
@given(batches(), st.integers(0, 40))
def test_cpu_twins_keep_the_same_sets(batch, k):
    logits, generator = batch
    top_k = torch.randint(0, k + 1, (len(logits),), generator=generator)
    top_p = torch.rand(len(logits), generator=generator)
    for p in (top_p, torch.ones_like(top_p), (top_p * 8).round() / 8):
        expected, found = (ops.apply_top_k_top_p(logits, top_k, p) for ops in FACES)
        assert torch.equal(expected, found)
    expected, found = (ops.apply_min_p(logits, top_p) for ops in FACES)
    assert torch.equal(expected, found)


@FUZZ
@given(batches(), st.sampled_from([0.01, 0.7, 1.0, 3.0]))
def test_cpu_twins_choose_the_same_tokens(batch, temperature):
    logits, generator = batch
    assert torch.equal(*(ops.greedy_argmax(logits) for ops in FACES))
    temperatures = torch.full((len(logits),), temperature)
    temperatures[0] = 0.0
    seeds = torch.randint(-(2**63), 2**63 - 1, (len(logits),), generator=generator)
    positions = torch.randint(0, 2**20, (len(logits),), generator=generator)
    assert torch.equal(*(ops.gumbel_argmax(logits, temperatures, seeds, positions) for ops in FACES))


@FUZZ
@given(batches(), st.integers(0, 12))
def test_top_n_logprobs_agree_with_torch_and_numpy(batch, n):
    logits, generator = batch
    if (logits.amax(-1) == NEG_INF).any():
        return
    n = min(n, logits.shape[1])
    token_ids = torch.randint(0, logits.shape[1], (len(logits),), generator=generator)
    expected = logits.double().log_softmax(-1)
    for ops in FACES:
        logprobs, ids, ranks = ops.top_n_logprobs(logits, token_ids, n)
        assert torch.equal(ids[:, 0], token_ids)
        assert torch.allclose(logprobs.double(), expected.gather(-1, ids), rtol=1e-6, atol=4e-6)
        for row, values in enumerate(logits.numpy()):
            best = sorted(range(len(values)), key=lambda i: (-values[i], i))[:n]
            assert ids[row, 1:].tolist() == best
            assert ranks[row].tolist() == [int((values >= values[i]).sum()) for i in ids[row]]


def test_rows_that_are_no_distribution_have_no_logprobs(ops):
    nan, inf = float("nan"), float("inf")
    logits = torch.tensor(
        [[1.0, nan, 3.0, 2.0], [-nan] * 4, [NEG_INF] * 4, [1.0, inf, 2.0, 0.0], [0.0, NEG_INF, 0.0, 1.0]]
    )
    token_ids = torch.tensor([1, 2, 3, 0, 1])
    for n in (0, 2, 4):
        logprobs, ids, ranks = ops.top_n_logprobs(logits, token_ids, n)
        assert logprobs[:4].isnan().all() and (ranks[:4] == 4).all()
        assert torch.equal(ids[:4], token_ids[:4, None].expand(-1, n + 1))
        assert logprobs[4, 0] == NEG_INF and ranks[4, 0] == 4
        assert ids[4, 1:].tolist() == [3, 0, 2, 1][:n]


def test_logprobs_of_a_token_outside_the_vocabulary_are_refused(ops):
    for bad in (-1, 4):
        with pytest.raises((IndexError, RuntimeError)):
            ops.top_n_logprobs(torch.zeros(2, 4), torch.tensor([0, bad]), 1)


# ---- Hugging Face, where the semantics agree -------------------------------------------------------------------------


@FUZZ
@given(batches(), st.integers(1, 50))
def test_top_k_is_hugging_faces(batch, k):
    logits, _ = batch
    expected = TopKLogitsWarper(k)(None, logits)
    for ops in FACES:
        assert torch.equal(top_k_top_p(ops, logits, k=k), expected)


@FUZZ
@given(batches(), st.sampled_from([0.05, 0.3, 0.5, 0.9, 0.99]))
def test_top_p_is_hugging_faces_but_at_the_very_border(batch, p):
    logits, _ = batch
    finite = logits[logits.amax(-1) > NEG_INF]
    expected = TopPLogitsWarper(p)(None, finite)
    probs = finite.double().softmax(-1)
    mass = probs.sort(dim=-1, descending=True).values.cumsum(-1)
    clear = ((mass - p).abs() > 1e-5).all(-1)  # a border within float32's reach may fall on either side
    for ops in FACES:
        out = top_k_top_p(ops, finite, p=p)
        # Which of tied tokens stays is the sort's affair there: compare how many, and their mass.
        assert torch.equal((out > NEG_INF).sum(-1)[clear], (expected > NEG_INF).sum(-1)[clear])
        ours, theirs = ((probs * (x > NEG_INF)).sum(-1) for x in (out, expected))
        assert torch.allclose(ours[clear], theirs[clear], atol=1e-9)


@FUZZ
@given(batches(), st.sampled_from([0.01, 0.1, 0.5, 0.9]))
def test_min_p_is_hugging_faces_but_at_the_very_border(batch, min_p):
    logits, _ = batch
    finite = logits[logits.amax(-1) > NEG_INF]
    expected = MinPLogitsWarper(min_p)(None, finite)
    ratio = (finite - finite.amax(-1, keepdim=True)).double().exp() / min_p
    clear = (ratio - 1).abs() > 1e-5
    for ops in FACES:
        out = ops.apply_min_p(finite, torch.full((len(finite),), min_p))
        assert torch.equal(out[clear], expected[clear])


@FUZZ
@given(batches(), st.sampled_from([0.5, 1.3, 2.0]), st.integers(1, 30))
def test_temperature_and_repetition_are_hugging_faces(batch, value, length):
    logits, generator = batch
    seen = torch.randint(0, logits.shape[1], (len(logits), length), generator=generator)
    cells = [(row, token) for row, ids in enumerate(seen.tolist()) for token in set(ids)]
    rows, ids = torch.tensor(cells).T
    zeros = torch.zeros(len(logits))
    for ops in FACES:
        assert torch.equal(ops.apply_temperature(logits, zeros + value), TemperatureLogitsWarper(value)(None, logits))
        out = ops.apply_penalties(logits, rows, ids, torch.zeros_like(ids), zeros + value, zeros, zeros)
        assert torch.equal(out, RepetitionPenaltyLogitsProcessor(value)(seen, logits))


# ---- dtypes of seeds and positions -----------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", [7, -1, -(2**31), 2**31 - 1])
def test_seeds_of_32_bits_are_the_same_numbers(ops, seed):
    logits = torch.randn(64, 1000, generator=torch.Generator().manual_seed(0))
    temperatures, positions = torch.ones(64), torch.arange(64)
    wide, narrow = (torch.full((64,), seed, dtype=dtype) for dtype in (torch.int64, torch.int32))
    expected = ops.gumbel_argmax(logits, temperatures, wide, positions)
    assert torch.equal(ops.gumbel_argmax(logits, temperatures, narrow, positions.int()), expected)
