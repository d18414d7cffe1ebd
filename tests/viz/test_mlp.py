"""Figures of notebook 08: legible, and showing what their tables say."""

import pandas as pd
import pytest

from llmlab.measure.experiments.mlp import shares, silu_traffic
from llmlab.viz.mlp import shares_figure, silu_flow_figure, silu_times_figure, wide_figure

WIDE = pd.DataFrame(
    {"projection": ["gate/up"] * 3 + ["QKV"] * 3, "tokens": [1, 16, 256] * 2, "gain": [1.1, 1.0, 0.97, 1.4, 1.2, 1.0]}
)
WIDE = WIDE.assign(p10=WIDE["gain"] - 0.1, p90=WIDE["gain"] + 0.2)
TIMES = pd.DataFrame({"fused_seconds": [2e-6, 9e-5], "two_step_seconds": [9e-6, 3e-4], "fused_bandwidth": [2e9, 1e10]})
FIGURES = {
    "shares": lambda: shares_figure(shares(["smollm2-135m-instruct", "llama-2-7b", "llama-3-70b"]), 2048),
    "wide": lambda: wide_figure(WIDE, "One wide product against narrow ones"),
    "flow": lambda: silu_flow_figure(silu_traffic(512, 1536)),
    "times": lambda: silu_times_figure(TIMES),
    "times with a bound": lambda: silu_times_figure(TIMES, copy_bandwidth=2e10),
}


@pytest.mark.parametrize("name", FIGURES)
def test_figures_are_legible(name, legible):
    legible(FIGURES[name]())


def test_an_arrow_for_each_pass_over_a_tensor():
    from matplotlib.patches import FancyArrowPatch

    arrows = [sum(isinstance(p, FancyArrowPatch) for p in axis.patches) for axis in FIGURES["flow"]().axes]
    assert arrows == [5, 3]


def test_the_bars_fill_the_whole():
    for axis in FIGURES["shares"]().axes:
        widths = [bar.get_width() for bars in axis.containers for bar in bars]
        assert sum(widths) == pytest.approx(3 * 100)
