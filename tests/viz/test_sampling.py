"""Figures of notebook 10: legible, and showing what their tables say."""

import numpy as np
import pandas as pd
import pytest
import torch

from llmlab.measure.experiments.sampling import filter_stages, min_p_thresholds
from llmlab.viz.sampling import (
    draw_times_figure,
    draws_figure,
    filter_figure,
    logprobs_figure,
    min_p_figure,
    race_figure,
)

SETTINGS = {"temperature": 0.8, "min_p": 0.02, "top_k": 12, "top_p": 0.85}
STAGES = filter_stages(3 * torch.randn(500, generator=torch.Generator().manual_seed(0)), **SETTINGS)
TOKENS = [f" word{i}" for i in range(24)]
RACE = pd.DataFrame({"token": [" red", " blue", " green"], "p": [0.5, 0.3, 0.01], "q": [0.9, 0.2, 3.0]})
DRAWS = pd.DataFrame({"p": [0.5, 0.3, 0.2], "race": [510, 290, 200], "multinomial": [480, 310, 210]})
TIMES = pd.DataFrame(
    {
        "vocab_size": [1024, 131072],
        "race_seconds": [1e-5, 1e-3],
        "multinomial_seconds": [9e-5, 9e-3],
        "prefix_seconds": [8e-5, 7e-3],
    }
)
LOGPROBS = pd.DataFrame(
    {"token": [" red", " blue", " green"], "raw": [-0.5, -1.5, -6.0], "processed": [-0.3, -1.2, -np.inf]}
)
FIGURES = {
    "filters": lambda: filter_figure(STAGES, TOKENS, SETTINGS),
    "two filters": lambda: filter_figure(STAGES, TOKENS, SETTINGS, columns=("raw", "temperature", "top_p")),
    "min p": lambda: min_p_figure(min_p_thresholds(0.1, (0.9, 0.5, 0.2, 0.08)), 0.1),
    "race": lambda: race_figure(RACE, 1),
    "draws": lambda: draws_figure(DRAWS, 1000, {"race": 0.5, "multinomial": 0.4}),
    "times": lambda: draw_times_figure(TIMES, 8),
    "logprobs": lambda: logprobs_figure(LOGPROBS, "raw and processed"),
}


@pytest.mark.parametrize("name", FIGURES)
def test_figures_are_legible(name, legible):
    legible(FIGURES[name]())


def test_a_bar_for_each_kept_token_and_a_cross_for_each_removed_one():
    for axis, stage in zip(FIGURES["filters"]().axes, ("raw", "temperature", "min_p", "top_k", "top_p"), strict=True):
        kept = int((STAGES[stage].head(24) > 0).sum())
        assert len(axis.patches) == kept and len(axis.lines[0].get_xdata()) == 24 - kept


def test_the_winner_arrives_first():
    axis = FIGURES["race"]().axes[2]
    assert [text.get_text().endswith("first") for text in axis.texts] == [False, True, False]
