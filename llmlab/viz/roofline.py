"""Rooflines: points of a real step, trails over batch and context, where the time goes, and what the roof would allow.

Every function takes the tables of :mod:`llmlab.measure.roofline` and returns a figure; the caller saves it with its table.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.patheffects import withStroke

from llmlab.measure.datasheets import Roof
from llmlab.viz.style import (
    GROUP_COLOURS,
    INK,
    LINE,
    MARKERS,
    SERIES,
    SOFT,
    engineering,
    log_axis,
    new_figure,
    styled,
)

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PHASE_MARKERS = {"prefill": "o", "decode": "s"}
_DASHES = ((0, (5, 2)), (0, (5, 2, 1, 2)), (0, (2, 1)))


@styled
def roofline_figure(points: pd.DataFrame, roofs: Sequence[Roof], title: str) -> Figure:
    """Groups of ops of one or two phases under the roofs.

    Args:
        points: columns phase, group, intensity, flops_per_s, share (as :func:`llmlab.measure.roofline.points`, phase added).
        roofs: the first is the one that the phases are judged by; the others (other memories) are drawn thin.
    """
    points = _visible(points)
    fig = new_figure(9.2, 5.6)
    axis = fig.add_subplot()
    low = min(0.2, points["intensity"].min() / 2)
    high = max(points["intensity"].max(), roofs[0].ridge) * 6
    _draw_roofs(axis, roofs, low, high)
    for phase, of_phase in points.groupby("phase", sort=False):
        for row in of_phase.sort_values("share", ascending=False).itertuples():  # small ones in front
            axis.scatter(
                row.intensity,
                row.flops_per_s,
                s=40 + 900 * row.share,
                marker=PHASE_MARKERS[phase],
                color=GROUP_COLOURS[row.group],
                edgecolor="white",
                linewidth=1.0,
                alpha=0.9,
                zorder=4,
            )
    axis.set_xlim(low, high)
    bottom = min(points["flops_per_s"].min() / 3, roofs[0].attainable(low))
    axis.set_ylim(bottom, max(roof.flops for roof in roofs) * 3)
    axis.set_title(title)
    seen = [group for group in GROUP_COLOURS if group in set(points["group"])]
    handles = [
        Line2D([], [], marker="o", ls="", color=GROUP_COLOURS[group], markersize=8, label=group) for group in seen
    ]
    handles += [
        Line2D([], [], marker=PHASE_MARKERS[phase], ls="", color=SOFT, markersize=8, label=phase)
        for phase in points["phase"].unique()
    ]
    handles += _roof_handles(roofs)
    axis.legend(
        handles=handles, loc="center left", bbox_to_anchor=(1.01, 0.5), title="area: share of\nthe phase's time"
    )
    return fig


@styled
def trail_figure(trails: pd.DataFrame, roof: Roof, title: str) -> Figure:
    """How kinds of ops move across the plane as batch or length grows: one panel a phase.

    Args:
        trails: columns phase, kind, size (batch or tokens, written at the points), intensity, flops_per_s.
    """
    phases = list(trails["phase"].unique())
    fig = new_figure(10.5, 4.8)
    axes = fig.subplots(1, len(phases), sharey=True, squeeze=False)[0]
    low, high = trails["intensity"].min() / 2.5, max(trails["intensity"].max(), roof.ridge) * 4
    for axis, phase in zip(axes, phases, strict=True):
        _draw_roofs(axis, [roof], low, high)
        for i, (kind, trail) in enumerate(trails[trails["phase"] == phase].groupby("kind", sort=False)):
            axis.plot(
                trail["intensity"], trail["flops_per_s"], marker=MARKERS[i], color=SERIES[i], label=kind, zorder=4
            )
            for row, label in _labels(trail):
                axis.annotate(
                    label,
                    (row.intensity, row.flops_per_s),
                    (5, -12) if i == 0 else (-7, 6),
                    textcoords="offset points",
                    ha="left" if i == 0 else "right",
                    fontsize=8.5,
                    color=SERIES[i],
                    path_effects=[withStroke(linewidth=3, foreground="white")],
                    zorder=5,
                )
        axis.set_xlim(low, high)
        axis.set_ylim(trails["flops_per_s"].min() / 4, roof.flops * 2.5)
        axis.set_title(phase)
        axis.legend(loc="upper left")  # above the roof, where no point can be
    axes[-1].set_ylabel("")
    fig.suptitle(title, x=0.01, ha="left", fontweight="bold", fontsize=11)
    return fig


@styled
def breakdown_figure(points: pd.DataFrame, title: str) -> Figure:
    """Where the time of a step goes, and where the roof says it should: two stacked bars a phase, hatched where memory bounds.

    Args:
        points: as for :func:`roofline_figure`; columns seconds, least_seconds and bound are used.
    """
    points = _visible(points)
    phases = list(points["phase"].unique())
    fig = new_figure(9.2, 1.2 + 1.45 * len(phases))
    axes = fig.subplots(len(phases), 1, squeeze=False)[:, 0]
    for axis, phase in zip(axes, phases, strict=True):
        of_phase = points[points["phase"] == phase]
        longest = 0.0
        for height, column in ((1, "seconds"), (0, "least_seconds")):
            left = 0.0
            for row in of_phase.itertuples():
                width = getattr(row, column) * 1e3
                axis.barh(
                    height,
                    width,
                    0.68,
                    left,
                    color=GROUP_COLOURS[row.group],
                    edgecolor="white",
                    hatch="///" if row.bound == "memory" else None,
                    linewidth=0.8,
                )
                left += width
            longest = max(longest, left)
            axis.text(left, height, f"  {left:,.{0 if left >= 100 else 1}f} ms", va="center", fontsize=9, color=INK)
        axis.set_yticks([1, 0], ["measured", "allowed by the roof"])
        axis.set_xlim(0, 1.14 * longest)
        axis.grid(axis="y", visible=False)
        axis.set_title(phase, fontsize=10)
    axes[-1].set_xlabel("time of one step (ms)")
    seen = [group for group in GROUP_COLOURS if group in set(points["group"])]
    handles = [Patch(facecolor=GROUP_COLOURS[group], label=group) for group in seen]
    handles.append(Patch(facecolor="white", edgecolor=SOFT, hatch="///", label="memory-bound"))
    fig.legend(handles=handles, loc="outside right center")
    fig.suptitle(title, x=0.01, ha="left", fontweight="bold", fontsize=11)
    return fig


@styled
def sweep_figure(sweep: pd.DataFrame, title: str) -> Figure:
    """Decode over batch and context: time of a step with its spread beside the roof's bound, and throughput."""
    fig = new_figure(10.5, 4.6)
    left, right = fig.subplots(1, 2)
    for i, (context, rows) in enumerate(sweep.groupby("context")):
        spread = np.abs(np.stack([rows["seconds"] - rows["low"], rows["high"] - rows["seconds"]])) * 1e3
        left.errorbar(
            rows["num_reqs"],
            rows["seconds"] * 1e3,
            spread,
            marker=MARKERS[i],
            color=SERIES[i],
            capsize=3,
            label=f"{context}",
        )
        left.plot(rows["num_reqs"], rows["least_seconds"] * 1e3, color=SERIES[i], ls=":", lw=1.3)
        right.plot(rows["num_reqs"], rows["tokens_per_s"], marker=MARKERS[i], color=SERIES[i])
        right.plot(rows["num_reqs"], rows["num_reqs"] / rows["least_seconds"], color=SERIES[i], ls=":", lw=1.3)
    for axis, label in ((left, "time of a step (ms), log"), (right, "output tokens/s, all requests, log")):
        log_axis(axis, "x", base=2)
        log_axis(axis, "y")
        axis.set_xticks(sorted(sweep["num_reqs"].unique()), [str(b) for b in sorted(sweep["num_reqs"].unique())])
        axis.set_xlabel("requests in the step (batch), log")
        axis.set_ylabel(label)
    left.set_title("Time of a step")
    right.set_title("Throughput")
    handles, labels = left.get_legend_handles_labels()
    handles.append(Line2D([], [], color=SOFT, ls=":"))
    fig.legend(handles, [*labels, "allowed by\nthe roof"], title="context (tokens)", loc="outside right center")
    fig.suptitle(title, x=0.01, ha="left", fontweight="bold", fontsize=11)
    return fig


@styled
def utilisation_figure(sweep: pd.DataFrame, size: str, label: str, title: str) -> Figure:
    """MFU and MBU over one size, and the throughput beside them.

    Args:
        sweep: one row a size, columns ``size``, mfu, mbu, tokens_per_s, least_seconds, num_reqs, query_len.
        size: the column on the x axis. label: what it is called there.
    """
    fig = new_figure(10.5, 4.2)
    left, right = fig.subplots(1, 2)
    left.plot(sweep[size], 100 * sweep["mfu"], marker="o", color=SERIES[0], label="MFU: of peak FLOP/s")
    left.plot(sweep[size], 100 * sweep["mbu"], marker="s", color=SERIES[1], label="MBU: of peak bandwidth")
    left.set_ylim(0, max(100, 105 * max(sweep["mfu"].max(), sweep["mbu"].max())))
    left.set_ylabel("share of the measured ceiling (%)")
    left.legend(loc="best")
    tokens = sweep["num_reqs"] * sweep["query_len"]
    right.plot(sweep[size], sweep["tokens_per_s"], marker="o", color=SERIES[0], label="measured")
    right.plot(sweep[size], tokens / sweep["least_seconds"], color=SOFT, ls=":", label="allowed by the roof")
    right.set_ylabel("tokens/s, log")
    log_axis(right, "y")
    right.legend(loc="best")
    for axis in (left, right):
        log_axis(axis, "x", base=2)
        axis.set_xticks(list(sweep[size]), [str(s) for s in sweep[size]])
        axis.set_xlabel(f"{label}, log")
    left.set_title("Utilisation")
    right.set_title("Throughput")
    fig.suptitle(title, x=0.01, ha="left", fontweight="bold", fontsize=11)
    return fig


@styled
def crossover_figure(crossovers: pd.DataFrame, title: str) -> Figure:
    """Tokens in a step from which each projection is compute-bound, for several machines.

    Args:
        crossovers: index machine, one column a projection; inf where it never is (drawn as an arrow at the right edge).
    """
    fig = new_figure(9.2, 1.3 + 0.85 * len(crossovers))
    axis = fig.add_subplot()
    least = crossovers.min().min() / 1.6
    never = 2.5 * crossovers.replace(np.inf, np.nan).max().max()
    height = 0.8 / len(crossovers.columns)
    for i, column in enumerate(crossovers.columns):
        where = np.arange(len(crossovers))[::-1] + 0.4 - (i + 0.5) * height
        there = np.isfinite(crossovers[column].to_numpy(float))
        ends = np.where(there, crossovers[column], never)
        style = {"color": GROUP_COLOURS[column], "s": 36, "zorder": 3}
        axis.scatter(ends[there], where[there], marker=MARKERS[i], label=column, **style)
        axis.scatter(ends[~there], where[~there], marker=5, **style)  # an arrow: further right than the axis goes
        for y, value, end in zip(where, crossovers[column], ends, strict=True):
            text = "never" if np.isinf(value) else f"{value:.0f}"
            axis.annotate(text, (end, y), (7, 0), textcoords="offset points", va="center", fontsize=8)
    for edge in np.arange(len(crossovers) - 1) + 0.5:
        axis.axhline(edge, color=LINE, lw=0.8, zorder=1)
    log_axis(axis, "x")
    axis.set_xlim(least, never * 2)
    axis.set_yticks(np.arange(len(crossovers))[::-1], crossovers.index)
    axis.set_xlabel("tokens in a step (all requests together), log")
    axis.grid(axis="y", visible=False)
    axis.legend(loc="center left", bbox_to_anchor=(1.01, 0.5))
    axis.set_title(title)
    return fig


@styled
def kv_share_figure(shares: pd.DataFrame, marks: Mapping[str, float], title: str) -> Figure:
    """Share of a decode step's bytes that are keys and values, over batch and context.

    Args:
        shares: index batch, columns context, values 0 to 1; both in powers of two.
        marks: label → number of tokens (batch · context), each a line of equal KV bytes.
    """
    fig = new_figure(7.6, 5.0)
    axis = fig.add_subplot()
    batches, contexts = shares.index.to_numpy(float), shares.columns.to_numpy(float)
    edges = lambda centres: np.append(centres / 2**0.5, centres[-1] * 2**0.5)
    filled = axis.pcolormesh(edges(contexts), edges(batches), 100 * shares.to_numpy(), cmap="cividis", vmin=0, vmax=100)
    for ls, (label, tokens) in zip(("-", "--", ":", "-."), marks.items()):
        axis.plot(edges(contexts), tokens / edges(contexts), color="white", lw=3.4, solid_capstyle="butt")
        axis.plot(edges(contexts), tokens / edges(contexts), color="#882255", lw=1.8, ls=ls, label=label)
    log_axis(axis, "x", base=2)
    log_axis(axis, "y", base=2)
    axis.set_xlim(*edges(contexts)[[0, -1]])
    axis.set_ylim(*edges(batches)[[0, -1]])
    axis.set_xticks(contexts, [f"{c:.0f}" if c < 1024 else f"{c / 1024:.0f}k" for c in contexts])
    axis.set_yticks(batches, [f"{b:.0f}" for b in batches])
    axis.grid(visible=False)
    axis.set_xlabel("context (tokens a request), log")
    axis.set_ylabel("batch (requests), log")
    fig.colorbar(filled, label="keys and values, share of the step's bytes (%)")
    axis.legend(loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=1)
    axis.set_title(title)
    return fig


def _visible(points: pd.DataFrame) -> pd.DataFrame:
    """Without groups that do no arithmetic, or take less than half a percent of either phase."""
    points = points.reset_index() if "group" not in points.columns else points
    shown = points.groupby("group")["share"].transform("max") >= 0.005
    return points[shown & (points["flops"] > 0)]


def _labels(trail: pd.DataFrame) -> list[tuple[Any, str]]:
    """Points to write at, and what: a point too near to the last labelled one gets none, and if it coincides joins its label."""
    labels: list[tuple[Any, str]] = []
    for row in trail.rename(columns={"size": "size_"}).itertuples():
        if labels:
            first = labels[-1][0]
            apart = max(abs(np.log10(getattr(row, c) / getattr(first, c))) for c in ("intensity", "flops_per_s"))
            if apart < 0.05:
                labels[-1] = first, f"{first.size_}–{row.size_}"
            if apart < 0.2:
                continue
        labels.append((row, str(row.size_)))
    return labels


def _draw_roofs(axis: Axes, roofs: Sequence[Roof], low: float, high: float) -> None:
    """The first roof solid, with its ridge; of the others, which are other memories, the slopes alone."""
    x = np.geomspace(low, high, 400)
    for i, roof in enumerate(roofs):
        y = np.minimum(roof.flops, x * roof.bandwidth)
        if i == 0:
            axis.plot(x, y, color=INK, lw=2.0, zorder=3)
            axis.axvline(roof.ridge, color=SOFT, lw=0.9, ls=(0, (1, 2)), zorder=1)
        else:
            slope = x <= roof.ridge
            axis.plot(x[slope], y[slope], color=SOFT, lw=1.1, ls=_DASHES[i - 1], zorder=2)
    log_axis(axis, "x")
    log_axis(axis, "y")
    axis.set_xlabel("arithmetic intensity (FLOP per byte moved), log")
    axis.set_ylabel("achieved (FLOP/s), log")
    main = roofs[0]
    axis.annotate(
        f"ridge {main.ridge:.0f}",
        (main.ridge, 0),
        (4, 5),
        xycoords=("data", "axes fraction"),
        textcoords="offset points",
        fontsize=9,
        color=SOFT,
    )
    peak = f"{main.dtype} {engineering(main.flops, 'FLOP/s')}"
    axis.annotate(peak, (high, main.flops), (-4, 5), textcoords="offset points", ha="right", fontsize=9, color=INK)


def _roof_handles(roofs: Sequence[Roof]) -> list[Line2D]:
    styles = [{"color": INK, "lw": 2.0}, *({"color": SOFT, "lw": 1.1, "ls": dashes} for dashes in _DASHES)]
    return [
        Line2D([], [], label=f"{roof.memory} {engineering(roof.bandwidth, 'B/s')}", **style)
        for roof, style in zip(roofs, styles)
    ]
