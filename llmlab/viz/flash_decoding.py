"""Pictures of Flash-Decoding: programs on a machine's units with and without splits, how full machines get, and the merge."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
from matplotlib.patches import Patch

from llmlab.viz.style import INK, MARKERS, SERIES, SOFT, log_axis, new_figure, styled

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

_HATCHES = ("", "///", "...", "xxx", "\\\\\\", "++", "oo")


@styled
def schedule_figure(
    plans: Mapping[str, pd.DataFrame], programs_per_head: Sequence[int], units: int, title: str
) -> Figure:
    """Who computes when, a panel a plan over the same axis of time; a colour a KV head.

    Args:
        plans: name → :func:`llmlab.measure.experiments.flash_decoding.schedule`.
        programs_per_head: of each plan, how many consecutive programs belong to one KV head.
        units: of the machine; idle ones are shown empty.
    """
    fig = new_figure(10.0, 1.2 + len(plans) * (0.9 + 0.16 * units))
    axes = fig.subplots(len(plans), 1, sharex=True, squeeze=False)[:, 0]
    end = max(plan["end"].max() for plan in plans.values())
    heads = 0
    for axis, (name, plan), per_head in zip(axes, plans.items(), programs_per_head, strict=True):
        for row in plan.itertuples():
            if row.program < 0:
                axis.barh(row.unit, row.end - row.start, left=row.start, height=0.9, color=INK)
                continue
            head = row.program // per_head
            heads = max(heads, head + 1)
            style = {"color": SERIES[head % len(SERIES)], "hatch": _HATCHES[head % len(_HATCHES)]}
            axis.barh(
                row.unit, row.end - row.start, left=row.start, height=0.9, edgecolor="white", linewidth=0.5, **style
            )
        axis.set_ylim(units - 0.4, -0.6)
        axis.set_yticks([0, units - 1])
        axis.set_ylabel("unit (SM)")
        axis.grid(axis="y", visible=False)
        axis.set_title(name)
    axes[-1].set_xlim(0, 1.02 * end)
    axes[-1].set_xlabel("time (tiles of keys)")
    handles = [
        Patch(
            facecolor=SERIES[h % len(SERIES)],
            hatch=_HATCHES[h % len(_HATCHES)],
            edgecolor="white",
            label=f"KV head {h}",
        )
        for h in range(heads)
    ]
    handles.append(Patch(facecolor=INK, label="merge"))
    fig.legend(handles=handles, loc="outside lower center", ncols=len(handles))
    fig.suptitle(title, x=0.01, ha="left", fontweight="bold")
    return fig


@styled
def fill_figure(shares: pd.DataFrame, title: str) -> Figure:
    """How full machines get over the number of splits: a line a machine.

    Args:
        shares: index: splits; columns: machines; share of units that work.
    """
    fig = new_figure(8.0, 4.4)
    axis = fig.subplots()
    for i, name in enumerate(shares):
        axis.plot(shares.index, 100 * shares[name], marker=MARKERS[i], color=SERIES[i], label=name)
    log_axis(axis, "x", base=2)
    axis.set_xticks(list(shares.index), [str(splits) for splits in shares.index])
    axis.set_ylim(0, 104)
    axis.set_xlabel("splits of each context, log")
    axis.set_ylabel("units that work (%)")
    axis.legend(loc="upper left")
    axis.set_title(title)
    return fig


@styled
def merge_figure(lse: Sequence[float], title: str) -> Figure:
    """Log-sum-exps of the parts of one query's context, and the weights that follow from them."""
    lse = np.asarray(lse, float)
    weights = np.exp(lse - lse.max())
    weights /= weights.sum()
    parts = np.arange(len(lse))
    fig = new_figure(8.6, 3.6)
    left, right = fig.subplots(1, 2)
    left.bar(parts, lse, color=SERIES[0])
    left.set_ylabel("log-sum-exp of the part's scores")
    right.bar(parts, weights, color=SERIES[1], hatch="///", edgecolor="white")
    right.set_ylabel("weight of the part's result")
    right.set_ylim(0, 1.15 * weights.max())
    for part, weight in zip(parts, weights, strict=True):
        right.text(part, weight + 0.02 * weights.max(), f"{weight:.2f}", ha="center", fontsize=8.5, color=INK)
    for axis in (left, right):
        axis.set_xticks(parts)
        axis.set_xlabel("part of the context")
        axis.grid(axis="x", visible=False)
    fig.suptitle(title, x=0.01, ha="left", fontweight="bold")
    return fig


@styled
def speedup_figure(table: pd.DataFrame, title: str) -> Figure:
    """What splitting gained, by context, with 95 % intervals of the medians.

    Args:
        table: :func:`llmlab.measure.experiments.flash_decoding.split_against_whole`.
    """
    fig = new_figure(8.0, 4.2)
    axis = fig.subplots()
    units = int(table["units"].iloc[0])
    errors = np.abs(table[["sure_low", "sure_high"]].to_numpy().T - table["speedup"].to_numpy())
    axis.errorbar(
        table["context"], table["speedup"], yerr=errors, marker=MARKERS[0], color=SERIES[0], capsize=3, label="measured"
    )
    axis.axhline(1.0, color=INK, linewidth=1, label="no gain")
    axis.axhline(1.2, color=SOFT, linestyle=":", label="the rule's 1.2")
    if units <= 16:
        axis.axhline(units, color=SERIES[2], linestyle="--", label=f"{units} units at work instead of one")
    log_axis(axis, "x", base=2)
    axis.set_xticks(list(table["context"]), [f"{context:,}" for context in table["context"]])
    top = max(table["sure_high"].max(), units if units <= 16 else 1.2)
    axis.set_ylim(min(0.8, table["sure_low"].min() - 0.05), 1.35 * top)
    axis.set_xlabel("context (tokens), log")
    axis.set_ylabel("times as fast as uncut")
    axis.legend(loc="upper left", ncols=2)
    axis.set_title(title)
    return fig
