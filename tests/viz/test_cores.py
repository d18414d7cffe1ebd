"""Figures of the small cache and of shared cores: the rows are drawn, in the units of the axes."""

from __future__ import annotations

import pandas as pd
import pytest

from llmlab.viz.cores import busy_cores_figure, tile_loads_figure

LOADS = pd.DataFrame(
    [
        {
            "in_features": n,
            "way": way,
            "seconds": 1e-3 * s,
            "low": 9e-4 * s,
            "high": 2e-3 * s,
            "flops": 2e9,
            "bytes": 128 * n,
        }
        for n in (128, 512)
        for way, s in (("through", 2.0), ("past", 1.0))
    ]
)
BUSY = pd.DataFrame(
    [
        {"busy": n, "way": way, "seconds": 1e-5 * (1 + n * k), "low": 1e-5, "high": 1e-4}
        for n in (0, 1)
        for way, k in (("barrier", 6), ("gate", 1))
    ]
)


@pytest.mark.parametrize("cache", [None, 48 << 10])
def test_rates_and_where_the_cache_ends(cache):
    (axis,) = tile_loads_figure(LOADS, cache, "t").axes
    heights = [
        list(line.get_ydata())
        for line in axis.get_lines()
        if len(line.get_xdata()) == 2 and line.get_marker() != "None"
    ]
    assert [1.0, 1.0] in heights and [2.0, 2.0] in heights
    edges = [line.get_xdata()[0] for line in axis.get_lines() if line.get_linestyle() == "--"]
    assert edges == ([] if cache is None else [384.0, 768.0])


def test_how_many_times_the_idle_ones():
    (axis,) = busy_cores_figure(BUSY, "t").axes
    assert sorted(round(bar.get_height()) for bar in axis.patches) == [10, 10, 20, 70]
    assert [text.get_text() for text in axis.texts] == ["7.0×", "2.0×"]
