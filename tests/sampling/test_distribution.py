"""Drawn tokens have the distribution that the parameters say: chi-square tests with fixed seeds (so they cannot flicker)."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy.stats import chi2_contingency, chisquare
from torch import Tensor

from llmlab import ops as all_ops
from llmlab.ops import sampling
from llmlab.sampling.sampler import Sampler

DRAWS = 40_000
LIKELY = 1e-3  # a right sampler falls below this once in a thousand seeds; the seeds here are fixed


def distribution(vocab_size: int = 40, seed: int = 0) -> Tensor:
    return (torch.randn(vocab_size, generator=torch.Generator().manual_seed(seed)) * 1.5).log_softmax(-1)


def counts(token_ids: Tensor, vocab_size: int) -> np.ndarray:
    return torch.bincount(token_ids, minlength=vocab_size).numpy()


def fit(observed: np.ndarray, probs: Tensor) -> float:
    """p-value of the counts under the probabilities; tokens of probability 0 must not appear."""
    possible = probs.numpy() > 0
    assert observed[~possible].sum() == 0
    expected = probs.double().numpy()[possible]
    return chisquare(observed[possible], expected / expected.sum() * observed.sum()).pvalue


def draw(face: str, logits: Tensor, temperature: float = 1.0, first_seed: int = 0) -> Tensor:
    """The same row for many seeds; ``face`` is an op set, "race" or "multinomial"."""
    rows = logits.expand(DRAWS, -1)
    seeds, positions = torch.arange(DRAWS) + first_seed, torch.arange(DRAWS) % 97
    if face == "multinomial":
        generator = torch.Generator().manual_seed(first_seed)
        return torch.multinomial((logits / temperature).softmax(-1), DRAWS, replacement=True, generator=generator)
    if face == "race":
        return sampling.exponential_race((rows / temperature).softmax(-1), seeds, positions)
    return all_ops.bind(face, "cpu").gumbel_argmax(rows, torch.full((DRAWS,), temperature), seeds, positions)


@pytest.mark.parametrize("face", ["reference", "torch", "race", "multinomial"])
@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_gumbel_and_race_fit_the_distribution_as_multinomial_does(face, temperature):
    logits = distribution()
    observed = counts(draw(face, logits, temperature), len(logits))
    assert fit(observed, (logits / temperature).softmax(-1)) > LIKELY


def test_the_three_ways_cannot_be_told_apart():
    logits = distribution(seed=1)
    faces = [("torch", 0), ("race", 10**6), ("multinomial", 0)]
    table = np.stack([counts(draw(face, logits, 1.0, seed), len(logits)) for face, seed in faces])
    assert chi2_contingency(table).pvalue > LIKELY


def test_the_test_would_see_a_small_fault():
    """The power of the method: the same draws against a distribution in which one token is 10 % likelier."""
    probs = distribution().softmax(-1)
    observed = counts(draw("torch", distribution()), len(probs))
    wrong = probs.clone()
    wrong[probs.argmax()] *= 1.1
    assert fit(observed, wrong) < LIKELY


def test_successive_positions_of_one_seed_are_independent():
    """Pairs (token at position i, token at position i + 1) of one seed fill the product of the distributions."""
    logits = distribution(6, seed=2)
    positions = torch.arange(DRAWS)
    rows = logits.expand(DRAWS, -1)
    tokens = all_ops.bind("torch", "cpu").gumbel_argmax(rows, torch.ones(DRAWS), torch.full((DRAWS,), 9), positions)
    probs = logits.softmax(-1)
    pairs = counts(tokens[:-1:2] * 6 + tokens[1::2], 36)
    assert fit(pairs, torch.outer(probs, probs).flatten()) > LIKELY


def test_neighbouring_seeds_are_independent():
    logits = distribution(6, seed=3)
    tokens = draw("torch", logits, first_seed=2**40)
    probs = logits.softmax(-1)
    assert fit(counts(tokens[:-1:2] * 6 + tokens[1::2], 36), torch.outer(probs, probs).flatten()) > LIKELY


def test_a_flat_row_over_a_large_vocabulary_favours_no_end_of_it():
    """Where float32 noise is coarse, ties go to low ids: here the noise is finest where the winners lie."""
    vocab_size = 2**17
    logits = torch.zeros(4000, vocab_size)
    tokens = all_ops.bind("torch", "cpu").gumbel_argmax(
        logits, torch.ones(4000), torch.arange(4000), torch.zeros(4000, dtype=torch.int64)
    )
    assert chisquare(torch.bincount(tokens * 64 // vocab_size, minlength=64).numpy()).pvalue > LIKELY


@pytest.mark.parametrize(
    ("params", "transform"),
    [
        ({"temperature": 0.7}, lambda x: x / 0.7),
        ({"top_k": 5}, lambda x: x.masked_fill(x < x.topk(5).values[-1], float("-inf"))),
        ({"min_p": 0.1}, lambda x: x.masked_fill(x.softmax(-1) < 0.1 * x.softmax(-1).max(), float("-inf"))),
        ({"temperature": 1.3, "top_p": 0.8}, None),
        ({"logit_bias": {3: 2.0, 5: float("-inf")}}, lambda x: x + torch.eye(40)[3] * 2 - torch.eye(40)[5] * 1e9),
        ({"allowed_token_ids": [1, 4, 30]}, lambda x: x.masked_fill(1 - torch.eye(40)[[1, 4, 30]].sum(0) > 0, -1e9)),
    ],
)
def test_the_sampler_draws_from_the_distribution_that_the_parameters_say(kit, params, transform):
    logits = distribution(40, seed=4)
    if transform is None:  # the nucleus, by hand
        probs = (logits / 1.3).double().softmax(-1)
        order = probs.argsort(descending=True)
        size = int((probs[order].cumsum(0) < 0.8).sum()) + 1
        expected = torch.zeros(40, dtype=torch.float64)
        expected[order[:size]] = probs[order[:size]]
    else:
        expected = transform(logits.double()).softmax(-1)
    sampler = Sampler(40, {0}, seed=11)
    observed = np.zeros(40, dtype=np.int64)
    requests = [kit.request(sampler, max_tokens=None, **params) for _ in range(200)]
    rows = logits.repeat(200, 1)
    for _ in range(100):
        tokens = sampler(rows, requests).token_ids
        observed += np.bincount(tokens, minlength=40)
        for request, token_id in zip(requests, tokens, strict=True):
            request.append_output_token_id(token_id)
    assert fit(observed, expected) > LIKELY
