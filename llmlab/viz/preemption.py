"""Recompute or swap: the time that each takes, over the length of what was preempted."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

from llmlab.viz.style import SERIES, SOFT, log_axis, new_figure, styled

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure


@styled
def recompute_or_swap_figure(tables: Mapping[str, tuple[pd.DataFrame, float]], title: str) -> Figure:
    """One panel a setting: seconds to bring a request back by recomputing and by copying out and in; where they cross is marked.

    Args:
        tables: setting → ``(table with columns context, recompute, swap, crossover in tokens)``; where the columns
            ``recompute_low``, ``recompute_high`` (and those of swap) exist, they are drawn as bands.
    """
    fig = new_figure(1.0 + 3.6 * len(tables), 4.0)
    panels = fig.subplots(1, len(tables), sharey=True, squeeze=False)[0]
    for axis, (setting, (table, crossover)) in zip(panels, tables.items(), strict=True):
        for way, colour, marker in (("recompute", SERIES[0], "o"), ("swap", SERIES[1], "s")):
            label = "recompute" if way == "recompute" else "swap out and in"
            axis.plot(table["context"], table[way], color=colour, marker=marker, markersize=4, label=label)
            if f"{way}_low" in table:
                axis.fill_between(table["context"], table[f"{way}_low"], table[f"{way}_high"], color=colour, alpha=0.2)
        if 0 < crossover < math.inf:
            axis.axvline(crossover, color=SOFT, linestyle="--", linewidth=1)
            axis.annotate(f"{crossover:.0f} tokens", (crossover, 0.03), xycoords=("data", "axes fraction"), xytext=(4, 0),
                          textcoords="offset points", fontsize=8.5, color=SOFT)  # fmt: skip
        log_axis(axis, "x", base=2)
        shown = list(table["context"])[:: 1 + len(table) // 7]
        axis.set_xticks(shown, [str(context) for context in shown])
        log_axis(axis, "y", "s")
        axis.set_xlabel("tokens preempted, log")
        axis.set_title(setting, fontsize=9.5)
    panels[0].set_ylabel("time to bring it back, log")
    panels[0].legend(loc="upper left")
    fig.suptitle(title, x=0.01, ha="left", fontsize=11, fontweight="bold")
    return fig
