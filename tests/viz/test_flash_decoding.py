"""Figures of Flash-Decoding: legible, and drawn from the numbers that they are given."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pandas as pd
import pytest
from matplotlib.figure import Figure

from llmlab.measure.experiments import flash_decoding as experiment
from llmlab.viz import flash_decoding as draw

PLANS = {
    "uncut: 3 programs": experiment.schedule([64] * 3, 16),
    "cut in 8: 24 programs": experiment.schedule([8] * 24, 16, merge_tiles=1),
}
SHARES = pd.DataFrame(
    {name: {p: experiment.fill(8 * p, units) for p in (1, 8, 64)} for name, units in (("A", 108), ("B", 304))}
)
SPEEDUP = pd.DataFrame(
    {"context": [512, 8192], "speedup": [1.1, 1.7], "sure_low": [1.0, 1.6], "sure_high": [1.2, 1.8], "units": 2}
)
FIGURES: dict[str, Callable[[], Figure]] = {
    "schedule": lambda: draw.schedule_figure(PLANS, [1, 8], 16, "One request"),
    "fill": lambda: draw.fill_figure(SHARES, "Units at work"),
    "merge": lambda: draw.merge_figure([1.0, 3.0, 4.5, 2.0], "Four parts"),
    "speedup": lambda: draw.speedup_figure(SPEEDUP, "Cut against uncut"),
}


@pytest.mark.parametrize("name", FIGURES)
def test_legible(name: str, legible: Callable[[Figure], None]) -> None:
    legible(FIGURES[name]())


def test_a_program_a_bar() -> None:
    uncut, cut = FIGURES["schedule"]().axes
    assert len(uncut.patches) == 3
    assert len(cut.patches) == 24 + 1  # and the merge
    assert {patch.get_width() for patch in uncut.patches} == {64}
    assert uncut.get_xlim() == cut.get_xlim()


def test_the_weights_are_a_softmax_of_the_log_sum_exps() -> None:
    _, right = FIGURES["merge"]().axes
    want = np.exp([1.0, 3.0, 4.5, 2.0]) / np.exp([1.0, 3.0, 4.5, 2.0]).sum()
    assert [bar.get_height() for bar in right.patches] == pytest.approx(want.tolist())


def test_lines_are_the_data() -> None:
    (axis,) = FIGURES["fill"]().axes
    assert axis.lines[1].get_ydata().tolist() == (100 * SHARES["B"]).tolist()
    assert axis.get_ylim()[0] == 0
    (axis,) = FIGURES["speedup"]().axes
    assert "2 units at work instead of one" in [text.get_text() for text in axis.get_legend().get_texts()]
