"""Figures of notebook 02: legible, every token where the batch has it."""

from types import SimpleNamespace

import pytest

from llmlab.engine.batch import Batch
from llmlab.measure.experiments.batching import length_distributions, padding_table, token_table
from llmlab.measure.known_models import known_config
from llmlab.viz.batch import flat_batch_figure, padding_figure


def flat():
    names, blocks = "ABC", {"A": [0, 1, 4], "B": [2, 3], "C": [5, 6]}
    plan = SimpleNamespace(
        num_scheduled_tokens={"A": 1, "B": 7, "C": 3}, num_computed_tokens={"A": 9, "B": 0, "C": 4}, block_ids=blocks
    )
    requests = {n: SimpleNamespace(all_token_ids=list(range(12)), num_tokens=12, num_prompt_tokens=10) for n in names}
    tokens = token_table(Batch.build(plan, requests, 4), 4)
    computed = {n: [blocks[n][p // 4] * 4 + p % 4 for p in range(plan.num_computed_tokens[n])] for n in names}
    return flat_batch_figure(tokens, computed, 4, 8)


def padding(count=6):
    steps = dict(list(length_distributions(8).items())[:count])
    return padding_figure(steps, padding_table(known_config("smollm2-135m-instruct"), steps))


FIGURES = {"flat batch": flat, "padding": padding, "two panels": lambda: padding(2), "four panels": lambda: padding(4)}


@pytest.mark.parametrize("name", FIGURES)
def test_figures_are_legible(name, legible):
    legible(FIGURES[name]())


def test_the_three_views_show_the_same_tokens():
    padded, row, cache = flat().axes
    new = [9, 0, 1, 2, 3, 4, 5, 6, 4, 5, 6]
    labels = lambda axis: [int(text.get_text()) for text in axis.texts if text.get_text()]
    assert labels(padded) == labels(row) == new
    assert sorted(labels(cache)) == sorted([*new, *range(9), *range(4)])
    assert "10 of 21 cells are padding (48%)" in padded.get_title(loc="left")
    assert "query_start_loc = [0, 1, 8, 11]" in row.get_title(loc="left")
    assert len(cache.patches) == 8 * 4


def test_bars_fill_the_rectangle():
    figure = padding(2)
    for axis in figure.axes:
        lengths, pads = (bars.datavalues for bars in axis.containers)
        assert len(set(lengths + pads)) == 1
