"""Figures of one core's small cache, and of cores that are shared with others."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from llmlab.viz.style import INK, SERIES, SOFT, new_figure, styled

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

LOOKS = ((SERIES[0], "o", ""), (SERIES[1], "s", "///"))


@styled
def tile_loads_figure(table: pd.DataFrame, cache_bytes: int | None, title: str) -> Figure:
    """FLOP/s of AMX products by their length, inputs loaded through or past the L1 cache.

    Args:
        table: columns in_features, way, seconds, low, high, flops, bytes (of a product's inputs and panels, half each).
        cache_bytes: size of the L1 cache; None if it isn't known.
    """
    fig = new_figure(8.0, 4.2)
    axis = fig.subplots()
    for (way, rows), (colour, marker, _) in zip(table.groupby("way", sort=False), LOOKS, strict=True):
        rate = rows["flops"] / rows["seconds"] / 1e12
        spread = [rate - rows["flops"] / rows["high"] / 1e12, rows["flops"] / rows["low"] / 1e12 - rate]
        looks = {"color": colour, "marker": marker, "capsize": 3}
        axis.errorbar(rows["in_features"], rate, yerr=[s.clip(lower=0) for s in spread], label=way, **looks)
    axis.set_ylim(0, None)
    axis.set_xlim(0, None)
    axis.set_xlabel("input features of the product")
    axis.set_ylabel("TFLOP/s, one thread")
    if cache_bytes:
        a_feature = table["bytes"].iloc[0] / table["in_features"].iloc[0]
        for edge, words in ((cache_bytes / a_feature, "both fit"), (2 * cache_bytes / a_feature, "the panels fit")):
            axis.axvline(edge, color=INK, linestyle="--", linewidth=1.1)
            axis.annotate(
                f"{words} in L1 up to here",
                (edge, 0.02),
                (-4, 0),
                xycoords=("data", "axes fraction"),
                textcoords="offset points",
                ha="right",
                va="bottom",
                rotation=90,
                fontsize=8.5,
                color=SOFT,
            )
    axis.legend(loc="lower right")
    fig.suptitle(title, x=0.01, ha="left", fontweight="bold")
    return fig


@styled
def busy_cores_figure(table: pd.DataFrame, title: str) -> Figure:
    """Time of a small parallel region, by how many other processes want a core; the number is how many times that of idle cores.

    Args:
        table: columns busy, way, seconds, low, high.
    """
    fig = new_figure(7.0, 4.2)
    axis = fig.subplots()
    counts = sorted(set(table["busy"]))
    for i, ((way, rows), (colour, _, hatch)) in enumerate(zip(table.groupby("way", sort=False), LOOKS, strict=True)):
        places = np.arange(len(counts)) + 0.4 * (i - 0.5)
        micro = rows.set_index("busy").loc[counts, ["seconds", "low", "high"]] * 1e6
        axis.bar(places, micro["seconds"], 0.36, color=colour, hatch=hatch, edgecolor="white", label=way)
        axis.vlines(places, micro["low"], micro["high"], color=INK, linewidth=1.2)
        for place, (count, row) in zip(places, micro.iterrows(), strict=True):
            if count:
                times = f"{row['seconds'] / micro['seconds'].iloc[0]:.1f}×"
                axis.annotate(times, (place, row["high"]), (0, 3), textcoords="offset points", ha="center", fontsize=9)
    axis.set_xticks(range(len(counts)), [str(n) for n in counts])
    axis.set_xlabel("other processes that want a core all the time")
    axis.set_ylabel("µs a region")
    axis.margins(y=0.12)
    axis.grid(axis="x", visible=False)
    axis.legend(loc="upper left")
    fig.suptitle(title, x=0.01, ha="left", fontweight="bold")
    return fig
