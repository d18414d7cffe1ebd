"""Figures of attention in tiles: legible, and drawn from the numbers that they are given."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pandas as pd
import pytest
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from llmlab.measure.datasheets import Roof
from llmlab.measure.experiments import attention as experiment
from llmlab.measure.experiments.paging import Heads
from llmlab.viz import attention as draw

SCORES = np.array([0.2, -0.5, 0.4, 0.1, 0.9, 1.3, -0.2, 0.6, 2.6, 1.1, -0.4, 1.9])
VALUES = np.linspace(-1, 1, 12)
STEPS = experiment.online_softmax_steps(SCORES, VALUES, 4)
ROOF = Roof("a machine", "bfloat16", "L3", 1.5e12, 19e9, "measured")


def growth() -> pd.DataFrame:
    rows = [
        (way, n, 100 * n**2 if way == "all scores" else 4000 * n)
        for n in (128, 256, 1024)
        for way in ("all scores", "tiles")
    ]
    return pd.DataFrame(rows, columns=["way", "length", "bytes"])


def intensity() -> pd.DataFrame:
    heads = Heads(32, 8, 128)
    return pd.DataFrame(
        {n: {t: experiment.tile_traffic(n, n, t, heads).intensity for t in (1, 16, 256)} for n in (512, 8192)}
    )


def rates() -> pd.DataFrame:
    table = pd.DataFrame({"query_len": [1, 16, 64, 512], "flops_per_s": [39e9, 44e9, 355e9, 434e9]})
    table["flops"] = 1e7 * table["query_len"]
    table["seconds"] = table["flops"] / table["flops_per_s"]
    return table.assign(low=0.95 * table["seconds"], high=1.1 * table["seconds"])


FIGURES: dict[str, Callable[[], Figure]] = {
    "online softmax": lambda: draw.online_softmax_figure(SCORES, VALUES, STEPS, "One query"),
    "tiles": lambda: draw.tile_figure(experiment.tile_map(64, 64, 16, 16), 64, 64, 16, 16, "A prompt"),
    "chunk": lambda: draw.tile_figure(experiment.tile_map(20, 256, 16, 32, 100), 20, 256, 16, 32),
    "memory": lambda: draw.memory_figure(growth(), "Memory"),
    "intensity": lambda: draw.intensity_figure(intensity(), {"a GPU": 295.0, "another": 153.0}, "Intensity"),
    "rates": lambda: draw.query_rate_figure(rates(), 58e9, ROOF, "Rates"),
}


@pytest.mark.parametrize("name", FIGURES)
def test_legible(name: str, legible: Callable[[Figure], None]) -> None:
    legible(FIGURES[name]())


def test_the_running_maximum_and_its_corrections() -> None:
    top, middle, bottom = FIGURES["online softmax"]().axes
    shown = [text.get_text() for text in middle.texts]
    assert shown == [f"× {c:.2f}" for c in STEPS["correction"] if 0 < c < 1]
    assert len(shown) == 2  # the maximum rose twice
    exact = np.exp(SCORES) @ VALUES / np.exp(SCORES).sum()
    assert bottom.lines[0].get_ydata()[0] == pytest.approx(exact)
    assert max(top.get_xticks()) == 12


def test_a_tile_a_rectangle() -> None:
    tiles = experiment.tile_map(64, 64, 16, 16)
    (axis,) = FIGURES["tiles"]().axes
    drawn = [p for p in axis.patches if isinstance(p, Rectangle)]
    assert len(drawn) == len(tiles) == 16
    assert "62% of the 16 tiles are computed" in axis.get_title(loc="left")
    assert {(p.get_x(), p.get_y()) for p in drawn} == {(16 * c, 16 * r) for r in range(4) for c in range(4)}


def test_lines_are_the_data() -> None:
    memory = FIGURES["memory"]().axes[0]
    assert memory.lines[0].get_ydata().tolist() == growth().query("way == 'all scores'")["bytes"].tolist()
    lines = FIGURES["intensity"]().axes[0]
    assert lines.lines[0].get_ydata().tolist() == intensity()[512].tolist()
    assert "ridge of a GPU: 295" in [text.get_text() for text in lines.texts]
    legend = [text.get_text() for text in FIGURES["rates"]().axes[0].get_legend().get_texts()]
    assert "each query reads its own keys: 58 GFLOP/s" in legend
