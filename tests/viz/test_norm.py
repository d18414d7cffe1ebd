"""Figures of notebook 03: legible, an arrow a pass."""

import pandas as pd
import pytest

from llmlab.measure.experiments.norm import fused_traffic
from llmlab.viz.norm import norm_times_figure, traffic_figure

SIZES = [2**14, 2**20, 2**26]


def times():
    def table(name, ratio):
        rows = {"implementation": name, "working_set": SIZES, "ratio": ratio}
        return pd.DataFrame(rows).assign(low=lambda t: 0.9 * t["ratio"], high=lambda t: 1.2 * t["ratio"])

    norms = pd.concat([table("plain torch", [1.4, 1.5, 1.5]), table("torch's own", [0.3, 0.1, 0.1])])
    return norm_times_figure(norms, table("", [0.9, 0.8, 0.7]).assign(bytes_ratio=[0.83, 0.8, 0.8]))


FIGURES = {"traffic": lambda: traffic_figure(fused_traffic(64, 32)), "times": times}


@pytest.mark.parametrize("name", FIGURES)
def test_figures_are_legible(name, legible):
    legible(FIGURES[name]())


def test_an_arrow_stands_for_a_pass():
    apart, fused = traffic_figure(fused_traffic(64, 32)).axes
    arrows = lambda axis: [text for text in axis.texts if getattr(text, "arrow_patch", None) is not None]
    assert (len(arrows(apart)), len(arrows(fused))) == (5, 4)
    assert apart.get_title(loc="left") == "Apart: 5 passes, 20.5 kB"
    assert fused.get_title(loc="left") == "Fused: 4 passes, 16.4 kB"


def test_times_start_at_zero_and_show_the_spread():
    for axis in times().axes:
        assert axis.get_ylim()[0] == 0
        assert axis.containers
