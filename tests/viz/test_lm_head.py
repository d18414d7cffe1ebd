"""Figures of notebook 09: legible, and showing what their tables say."""

from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch

from llmlab.engine.batch import WantedRows
from llmlab.measure.experiments.lm_head import head_share, last_layer, trimmed_share
from llmlab.measure.known_models import known_config
from llmlab.viz.lm_head import (
    LAST_STEPS,
    head_share_figure,
    last_layer_figure,
    last_layer_flops_figure,
    last_layer_map,
    saved_figure,
)

CONFIGS = {name: known_config(name) for name in ("smollm2-135m-instruct", "llama-3-8b")}
STARTS, DISCARD = np.array([0, 1, 2, 7, 11]), (False, False, True, False)


def step(trimmed: bool) -> SimpleNamespace:
    wanted = WantedRows.find(STARTS, DISCARD, [False] * 4, np.arange(11)) if trimmed else None
    return SimpleNamespace(
        query_start_loc=torch.from_numpy(STARTS), discard=DISCARD, wanted=wanted, req_ids=("A", "B", "C", "D")
    )


def maps() -> dict[str, pd.DataFrame]:
    return {"every token to the end": last_layer_map(step(False)), "only what is read": last_layer_map(step(True))}


CLOCKED = pd.DataFrame(
    {
        "tokens": [64, 256, 1024],
        "saved": [0.0, 0.02, 0.04],
        "sure_low": [-0.01, 0.01, 0.03],
        "sure_high": [0.02, 0.03, 0.05],
    }
)
FIGURES = {
    "head": lambda: head_share_figure(head_share(CONFIGS, [16, 256, 4096])),
    "map": lambda: last_layer_figure(maps()),
    "last layer": lambda: last_layer_flops_figure(last_layer(CONFIGS["llama-3-8b"], 512), "The last layer"),
    "saved": lambda: saved_figure(trimmed_share(CONFIGS, [16, 256, 4096]), CLOCKED, "smollm2-135m-instruct", 30),
}


@pytest.mark.parametrize("name", FIGURES)
def test_figures_are_legible(name, legible):
    legible(FIGURES[name]())


def test_the_map_shows_what_is_computed():
    every, trimmed = (table.pivot(index="part", columns="token", values="computed") for table in maps().values())
    assert every.drop("LM head").all(axis=None)
    assert every.columns[every.loc["LM head"]].tolist() == [0, 1, 10]
    for part in LAST_STEPS:
        expected = list(range(11)) if part in LAST_STEPS[:2] else [0, 1, 10]
        assert trimmed.columns[trimmed.loc[part]].tolist() == expected


def test_a_cell_for_every_token_and_part():
    for axis in FIGURES["map"]().axes:
        assert len(axis.patches) == 11 * len(LAST_STEPS)
