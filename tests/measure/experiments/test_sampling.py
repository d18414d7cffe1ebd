"""Experiments on sampling: filters against Hugging Face's warpers, a chi-square test that can tell, draws from what they say."""

import math

import numpy as np
import pytest
import torch
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from llmlab.measure.experiments.sampling import (
    chi_square,
    draw_times,
    draws_by_multinomial,
    draws_by_race,
    filter_stages,
    inverse_cdf,
    min_p_thresholds,
    raw_and_processed,
    smallest_set,
    stage_summary,
)

LOGITS = 3 * torch.randn(300, generator=torch.Generator().manual_seed(0))


def test_stages_are_hugging_faces_warpers_one_after_another():
    stages = filter_stages(LOGITS, temperature=0.7, min_p=0.01, top_k=20, top_p=0.9)
    x = LOGITS[None]
    for name, warper in (
        ("temperature", TemperatureLogitsWarper(0.7)),
        ("min_p", MinPLogitsWarper(0.01)),
        ("top_k", TopKLogitsWarper(20)),
        ("top_p", TopPLogitsWarper(0.9)),
    ):
        x = warper(None, x)
        expected = x.softmax(-1)[0][torch.tensor(stages["token_id"].to_numpy())]
        np.testing.assert_allclose(stages[name], expected, atol=1e-6)
    assert stages["raw"].is_monotonic_decreasing


def test_the_summary_counts():
    summary = stage_summary(filter_stages(torch.tensor([0.5, 0.25, 0.125, 0.125]).log(), top_k=2)).set_index("stage")
    assert summary["kept"].tolist() == [4, 4, 4, 2, 2]
    assert summary.loc["raw", "entropy_bits"] == pytest.approx(1.75)
    assert summary.loc["top_k", "raw_mass"] == pytest.approx(0.75)
    assert summary.loc["top_k", "best"] == pytest.approx(2 / 3)


def test_min_p_thresholds_are_the_rule():
    table = min_p_thresholds(0.1, (0.9, 0.3, 0.08))
    np.testing.assert_allclose(table["threshold"], table["rule"], rtol=1e-3)


def test_the_smallest_set_reaches_p_and_no_smaller_one_does():
    probs = LOGITS.double().softmax(-1)
    for p in (0.1, 0.5, 0.9, 0.999):
        found = smallest_set(LOGITS, p)
        best = probs.sort(descending=True).values
        assert best[: len(found)].sum() >= p > best[: len(found) - 1].sum()
        assert set(found) == set(probs.topk(len(found)).indices.tolist())


def test_chi_square_has_its_textbook_values():
    # 3.841 is the 5 % point with one degree of freedom, 18.307 with ten
    fair = chi_square(torch.tensor([0] * 60 + [1] * 40), torch.tensor([0.5, 0.5]))
    assert fair["statistic"] == pytest.approx(4.0) and fair["freedom"] == 1
    assert fair["p_value"] == pytest.approx(0.0455, abs=1e-4)
    loaded = chi_square(torch.tensor([0] * 100), torch.tensor([0.5, 0.5]))
    assert loaded["p_value"] < 1e-20


def test_rare_tokens_share_a_cell():
    probs = torch.tensor([0.5, 0.498, 0.001, 0.001])
    found = chi_square(torch.tensor([0] * 50 + [1] * 50), probs)
    assert found["freedom"] == 1 and found["p_value"] > 0.9


@pytest.mark.parametrize("draw", [draws_by_race, draws_by_multinomial])
def test_draws_are_from_the_distribution_and_the_test_can_tell(draw):
    logits = LOGITS[:50]
    drawn = draw(logits, 20_000, 5)
    assert chi_square(drawn, logits.double().softmax(-1))["p_value"] > 1e-3
    assert chi_square(drawn, (logits.double() / 1.2).softmax(-1))["p_value"] < 1e-9


def test_inverse_cdf_falls_where_the_uniform_number_does():
    logits = torch.tensor([[0.25, 0.5, 0.25]]).log().expand(4, -1)
    assert inverse_cdf(logits, torch.tensor([[0.0], [0.3], [0.7], [0.99]])).tolist() == [0, 1, 1, 2]


def test_draw_times_has_all_its_columns():
    table = draw_times((16, 64), num_reqs=2, repeats=3, max_seconds=0.01)
    assert table["vocab_size"].tolist() == [16, 64]
    assert (table[["race_seconds", "multinomial_seconds", "prefix_seconds", "speedup"]] > 0).all(axis=None)


@pytest.mark.filterwarnings("ignore:.*has no tokenizer")
def test_raw_logprobs_are_the_models_and_processed_ones_sum_to_one(default_model):
    from llmlab import LLM

    llm = LLM(default_model, device="cpu", dtype="float32", max_model_len=64, num_kv_blocks=8)
    table = raw_and_processed(llm, "The sky is", temperature=0.5, top_k=5, seed=1)
    np.testing.assert_allclose(table["raw"], table["model"], atol=1e-4)
    kept = table["processed"][np.isfinite(table["processed"])]
    assert len(kept) == 5 and sum(map(math.exp, kept)) == pytest.approx(1.0, abs=1e-5)
