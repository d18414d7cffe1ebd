"""Figures of the paged cache: what they show is what the tables say, and nothing is cut off."""

from __future__ import annotations

from collections.abc import Callable

import pandas as pd
import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from llmlab.measure.experiments import paging
from llmlab.viz import paging as draw


def tale() -> pd.DataFrame:
    told = paging.PoolStory(num_blocks=4, block_size=4)
    told.grow("A", 6)
    told.grow("B", 3)
    told.finish("A")
    told.grow("C", 9)
    return told.table()


def prices() -> pd.DataFrame:
    rows = [("contiguous", 0, 1.0)] + [(o, b, 1 + 0.3 / b) for o in ("in order", "shuffled") for b in (1, 4, 16)]
    sweep = pd.DataFrame(rows, columns=["layout", "block_size", "slowdown"])
    return sweep.assign(sure_low=sweep.slowdown - 0.02, sure_high=sweep.slowdown + 0.05)


def room() -> pd.DataFrame:
    return paging.capacity([5, 16, 7, 9, 1, 12, 16, 3] * 4, 64, 16, [1, 4, 16])


FIGURES: dict[str, Callable[[], Figure]] = {
    "pool": lambda: draw.pool_figure(tale(), 4, 4, "A pool"),
    "tables": lambda: draw.table_figure(tale(), 3, 4, 4, "Tables"),
    "capacity": lambda: draw.capacity_figure(room(), "Memory that holds nothing"),
    "slowdown": lambda: draw.slowdown_figure(prices(), "Price"),
    "fragmentation": lambda: draw.fragmentation_figure([37, 16, 200], 16),
}


@pytest.mark.parametrize("name", FIGURES)
def test_legible(name: str, legible: Callable[[Figure], None]) -> None:
    legible(FIGURES[name]())


def texts(axis: Axes) -> list[str]:
    return [text.get_text() for text in (*axis.texts, *axis.get_xticklabels())]


def test_the_pool_shows_every_block_at_every_event() -> None:
    (axis,) = FIGURES["pool"]().axes
    shown = texts(axis)
    for label in ("A0", "A1", "B0", "C0", "C1", "C2", "A +6", "B +3", "A ends", "C +9"):
        assert label in shown
    slots = [p for p in axis.patches if isinstance(p, Rectangle) and p.get_fill()]
    assert len(slots) == 4 * 4 * 4  # events, blocks, slots
    coloured = [p for p in slots if p.get_facecolor()[:3] != slots[-1].get_facecolor()[:3]]
    assert len(coloured) == 6 + 9 + 3 + 12


def test_tables_point_at_their_blocks() -> None:
    (axis,) = FIGURES["tables"]().axes
    shown = " ".join(texts(axis))
    assert "B: 3 tokens, table [2]" in shown
    assert "C: 9 tokens, table [0, 1, 3]" in shown or "C: 9 tokens, table [1, 0, 3]" in shown
    arrows = [t for t in axis.texts if getattr(t, "arrow_patch", None)]
    assert len(arrows) == 4


def test_capacity_and_waste_against_block_size() -> None:
    table = room()
    waste, fit = FIGURES["capacity"]().axes
    assert waste.lines[0].get_ydata().tolist() == pytest.approx((100 * table["waste"][1:]).tolist())
    assert fit.lines[0].get_ydata().tolist() == table["requests"][1:].tolist()
    assert "log" in waste.get_xlabel() and "(%)" in waste.get_ylabel()
    assert waste.get_ylim()[0] == fit.get_ylim()[0] == 0


def test_slowdown_by_order_and_block_size() -> None:
    (axis,) = FIGURES["slowdown"]().axes
    legend = {text.get_text() for text in axis.get_legend().get_texts()}
    assert legend >= {"blocks in order in the pool", "blocks shuffled in the pool"}
    assert axis.get_ylim()[1] > 1.35


@pytest.mark.parametrize(("block_size", "blocks", "share"), [(16, 4, "17.2%"), (1, 53, "0.0%")])
def test_fragmentation(block_size: int, blocks: int, share: str) -> None:
    (axis,) = draw.fragmentation_figure([37, 16], block_size).axes
    assert f"block size {block_size}: {blocks} blocks, {share} of the slots empty" in axis.get_title(loc="left")
