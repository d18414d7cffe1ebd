"""The benchmark of the sampler: both ways draw from one distribution, and the table says what was clocked."""

from __future__ import annotations

import pytest
import torch
from scipy.stats import chi2_contingency

from llmlab import ops
from llmlab.measure.sampler import CONFIGURATIONS, sampler_benchmark, sort_and_multinomial


@pytest.mark.parametrize("settings", CONFIGURATIONS.values(), ids=CONFIGURATIONS)
def test_the_plain_way_draws_from_the_distribution_that_the_ops_draw_from(settings):
    rows, vocab_size = 20_000, 12
    settings = settings | ({"top_k": 4} if "top_k" in settings else {})
    logits = torch.randn(vocab_size, generator=torch.Generator().manual_seed(1)).repeat(rows, 1)
    torch.manual_seed(0)
    plain = sort_and_multinomial(logits, **settings)
    ours, full = ops.bind("torch", "cpu"), torch.ones(rows)
    tempered = ours.apply_temperature(logits, full * settings["temperature"])
    tempered = ours.apply_min_p(tempered, full * settings.get("min_p", 0.0))
    top_k, top_p = torch.full((rows,), settings.get("top_k", 0)), full * settings.get("top_p", 1.0)
    narrowed = ours.apply_top_k_top_p(tempered, top_k, top_p)
    random = full * (settings["temperature"] > 0)
    drawn = ours.gumbel_argmax(narrowed, random, torch.arange(rows), torch.zeros(rows, dtype=torch.int64))
    table = torch.stack([torch.bincount(x, minlength=vocab_size) for x in (plain, drawn)])
    table = table[:, table.sum(0) > 0].numpy()
    assert (table > 0).all()
    if table.shape[1] > 1:
        assert chi2_contingency(table).pvalue > 1e-3


def test_the_table_has_a_row_for_each_configuration():
    table = sampler_benchmark(vocab_size=64, num_reqs=4, max_seconds=0.01)
    assert table["configuration"].tolist() == list(CONFIGURATIONS)
    assert (table[["sampler ms", "torch ms", "ratio", "p10", "p90"]] > 0).all().all()
    assert (table["p10"] <= table["ratio"]).all() and (table["ratio"] <= table["p90"]).all()
