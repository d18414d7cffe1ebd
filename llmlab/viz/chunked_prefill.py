"""What a long prompt does to the steps of those who are already running."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np
from matplotlib.ticker import MaxNLocator

from llmlab.viz.style import SERIES, SOFT, new_figure, styled

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure


@styled
def interference_figure(runs: Mapping[str, tuple[pd.DataFrame, float]], title: str) -> Figure:
    """Inter-token latency of the running requests, step by step: one panel a way, the same scale, steps with the prompt marked.

    Args:
        runs: way → ``(table, seconds to the long prompt's first token)``
            from :func:`llmlab.measure.experiments.chunked_prefill.long_prompt_arrives`.
    """
    fig = new_figure(10.5, 1.2 + 2.0 * len(runs))
    panels = np.atleast_1d(fig.subplots(len(runs), 1, sharex=True, sharey=True))
    highest = max(1e3 * table["itl"].max() for table, _ in runs.values())
    for axis, (way, (table, ttft)) in zip(panels, runs.items(), strict=True):
        with_prompt = table["long_tokens"] > 0
        for chosen, colour, hatch, label in (
            (~with_prompt, SERIES[0], "", "decodes alone"),
            (with_prompt, SERIES[1], "//", "with a part of the long prompt"),
        ):
            part = table[chosen]
            axis.bar(part["step"], 1e3 * part["itl"], color=colour, hatch=hatch, edgecolor="white", label=label)
        last = table.loc[with_prompt, "step"].max()
        axis.axvline(last + 0.5, color=SOFT, linestyle="--", linewidth=1)
        axis.text(last + 0.7, 0.93 * highest, f"its first token: {1e3 * ttft:.0f} ms after arrival", va="top", color=SOFT,
                  fontsize=9)  # fmt: skip
        axis.set_title(f"{way}: worst {1e3 * table['itl'].max():.0f} ms")
        axis.set_ylabel("inter-token\nlatency (ms)")
    panels[0].set_ylim(0, 1.08 * highest)
    panels[-1].xaxis.set_major_locator(MaxNLocator(integer=True))
    panels[-1].set_xlabel("step; the long prompt arrives at 0")
    fig.suptitle(title, x=0.01, ha="left", fontsize=11, fontweight="bold")
    fig.legend(*panels[-1].get_legend_handles_labels(), loc="outside lower center", ncols=2, frameon=False)
    return fig
