"""Simulated (or real) serving: what a step's time is made of, load over time, latencies, and what throughput costs in latency.

Tables come from :class:`llmlab.measure.serving.ServingRun`, from a clock's ``parts`` and from :func:`llmlab.simulate.sweep`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
from matplotlib.patheffects import withStroke

from llmlab.viz.style import MARKERS, SERIES, SOFT, log_axis, new_figure, styled

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from llmlab.measure.serving import ServingRun

PARTS = {
    "linear": ("#44aa99", "", "linear layers"),
    "attention": ("#cc6677", "//", "attention"),
    "rest": ("#aa4499", "..", "the rest"),
    "communication": ("#332288", "xx", "all-reduces"),
    "overhead": (SOFT, "", "outside of any op"),
}
QUANTILES = np.concatenate([np.linspace(0, 0.99, 100), [0.995, 0.999, 1.0]])
_HALO = [withStroke(linewidth=3, foreground="white")]


def latency_table(runs: Mapping[str, ServingRun]) -> pd.DataFrame:
    """Columns run, latency ("ttft" or "itl"), share, seconds: the quantiles of both latencies."""
    rows = []
    for name, run in runs.items():
        ttft = run.requests["ttft"].quantile(QUANTILES).to_numpy()
        for latency, seconds in (("ttft", ttft), ("itl", run.itl_quantile(QUANTILES))):
            rows += [(name, latency, q, s) for q, s in zip(QUANTILES, seconds, strict=True)]
    return pd.DataFrame(rows, columns=["run", "latency", "share", "seconds"])


def load_table(run: ServingRun, points: int = 300) -> pd.DataFrame:
    """Means over equal stretches of time: num_running, num_waiting, kv_cache_usage (idle time counts as 0), step_seconds.

    Of data-parallel copies, requests are summed and shares averaged.
    """
    edges = np.linspace(0.0, run.steps["time"].max(), points + 1)
    width, replicas = edges[1] - edges[0], run.steps["replica"].nunique()
    areas = dict.fromkeys(("num_running", "num_waiting", "kv_cache_usage", "seconds", "busy"), 0.0)
    for _, steps in run.steps.groupby("replica"):
        ends, lengths = steps["time"].to_numpy(), steps["seconds"].to_numpy()
        corners = np.stack(
            [ends - lengths, ends], axis=1
        ).ravel()  # a step holds its values from its beginning to its end
        for name in areas:
            values = np.ones(len(steps)) if name == "busy" else steps[name].to_numpy()
            after = np.cumsum(values * lengths)
            area = np.stack([after - values * lengths, after], axis=1).ravel()
            areas[name] = areas[name] + np.diff(np.interp(edges, corners, area))
    busy = np.maximum(areas["busy"], 1e-12)
    return pd.DataFrame(
        {
            "time": (edges[1:] + edges[:-1]) / 2,
            "num_running": areas["num_running"] / width,
            "num_waiting": areas["num_waiting"] / width,
            "kv_cache_usage": areas["kv_cache_usage"] / width / replicas,
            "step_seconds": areas["seconds"] / busy,
        }
    )


@styled
def step_figure(parts: pd.DataFrame, title: str) -> Figure:
    """What a step's time is made of: a bar a row, its index the step in words, columns as in :data:`PARTS`, in seconds."""
    shown = [name for name in PARTS if parts[name].max() > 0]
    fig = new_figure(9.5, 1.5 + 0.42 * len(parts))
    axis = fig.add_subplot()
    left = np.zeros(len(parts))
    for name in shown:
        colour, hatch, label = PARTS[name]
        width = 1e3 * parts[name].to_numpy()
        axis.barh(
            parts.index, width, left=left, color=colour, hatch=hatch, edgecolor="white", linewidth=0.6, label=label
        )
        left += width
    for row, sum_ in enumerate(left):
        axis.annotate(f"{sum_:.3g}", (sum_, row), (4, 0), textcoords="offset points", va="center", fontsize=9)
    axis.set_xlim(0, 1.1 * left.max())
    axis.invert_yaxis()
    axis.grid(visible=False, axis="y")
    axis.set_xlabel("step (ms)")
    axis.set_title(title)
    axis.legend(loc="center left", bbox_to_anchor=(1.01, 0.5))
    return fig


@styled
def load_figure(table: pd.DataFrame, title: str) -> Figure:
    """A run over time, as :func:`load_table` has it: requests running and waiting, KV blocks held, length of a step."""
    fig = new_figure(9.5, 5.4)
    top, middle, bottom = fig.subplots(3, 1, sharex=True, height_ratios=[1.5, 1, 1])
    top.plot(table["time"], table["num_running"], color=SERIES[0], label="running")
    top.plot(table["time"], table["num_waiting"], color=SERIES[1], linestyle="--", label="waiting")
    top.set_ylabel("requests")
    top.set_ylim(bottom=0)
    top.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=2, borderaxespad=0.2)
    fig.suptitle(title, x=0.01, ha="left", fontweight="bold", fontsize=11)
    middle.fill_between(table["time"], 100 * table["kv_cache_usage"], color=SERIES[2], alpha=0.5, linewidth=0)
    middle.plot(table["time"], 100 * table["kv_cache_usage"], color=SERIES[2])
    middle.set_ylabel("KV blocks\nheld (%)")
    middle.set_ylim(bottom=0)
    bottom.plot(table["time"], 1e3 * table["step_seconds"], color=SERIES[3])
    bottom.set_ylabel("step (ms)")
    bottom.set_ylim(bottom=0)
    bottom.set_xlabel("time (s)")
    bottom.set_xlim(0, table["time"].max())
    fig.align_ylabels()
    return fig


@styled
def latency_figure(table: pd.DataFrame, title: str, slo: Mapping[str, float] | None = None) -> Figure:
    """Distribution of both latencies, a line a run; ``slo`` may give an objective in seconds for "ttft" and "itl"."""
    fig = new_figure(10.0, 4.2)
    axes = fig.subplots(1, 2, sharey=True)
    words = {"ttft": "arrival to first token (s)", "itl": "between two tokens (s)"}
    for axis, (latency, label) in zip(axes, words.items(), strict=True):
        for i, (name, line) in enumerate(table[table["latency"] == latency].groupby("run", sort=False)):
            style = ("-", "--", "-.", ":")[i % 4]
            axis.plot(line["seconds"], 100 * line["share"], color=SERIES[i % len(SERIES)], linestyle=style, label=name)
        if slo and latency in slo:
            axis.axvline(slo[latency], color=SOFT, linewidth=1.2, linestyle=(0, (1, 1)), label="objective")
        log_axis(axis, "x")
        axis.set_xlabel(f"{label}, log")
        axis.set_ylim(0, 101)
    axes[0].set_ylabel("share not later (%)")
    fig.suptitle(title, x=0.01, ha="left", fontweight="bold", fontsize=11)
    axes[1].legend(loc="lower right")
    return fig


@styled
def tradeoff_figure(
    table: pd.DataFrame,
    x: str,
    y: str,
    by: str,
    at: str,
    *,
    title: str,
    labels: Mapping[str, str],
    limits: Mapping[str, float] | None = None,
) -> Figure:
    """A frontier: one line a value of column ``by``, a point a row, the value of ``at`` written beside it.

    Args:
        labels: words with units for the axes ``x`` and ``y``, for ``by`` (as in "8 GPUs") and for ``at``.
        limits: an objective for ``x`` or ``y``, drawn as a line.
    """
    fig = new_figure(8.8, 5.0)
    axis = fig.add_subplot()
    for i, (value, line) in enumerate(table.groupby(by, sort=False)):
        colour, marker = SERIES[i % len(SERIES)], MARKERS[i % len(MARKERS)]
        axis.plot(line[x], line[y], color=colour, marker=marker, label=labels[by].format(value))
        offset, side = ((6, 4), "left") if i % 2 == 0 else ((-6, 4), "right")
        for row in line.itertuples():
            axis.annotate(f"{getattr(row, at):g}", (getattr(row, x), getattr(row, y)), offset, ha=side, fontsize=8,
                          textcoords="offset points", color=colour, path_effects=_HALO)  # fmt: skip
    for which, column in (("x", x), ("y", y)):
        log_axis(axis, which)
        (axis.set_xlabel if which == "x" else axis.set_ylabel)(f"{labels[column]}, log")
        low, high = table[column].min(), table[column].max()
        limit = (limits or {}).get(column)
        if limit is not None:
            (axis.axvline if which == "x" else axis.axhline)(
                limit, color=SOFT, linestyle="--", linewidth=1.2, label="objective"
            )
            low, high = min(low, limit), max(high, limit)
        (axis.set_xlim if which == "x" else axis.set_ylim)(low / 1.4, high * 1.5)
    axis.set_title(title)
    axis.legend(title=f"at the points: {labels[at]}", loc="center left", bbox_to_anchor=(1.01, 0.5))
    return fig


@styled
def load_curve_figure(
    table: pd.DataFrame, x: str, lines: Sequence[str], *, title: str, labels: Mapping[str, str]
) -> Figure:
    """Latencies over one swept number: columns ``lines`` (seconds, logarithmic) over column ``x`` (so too if it spans far)."""
    fig = new_figure(8.8, 4.4)
    axis = fig.add_subplot()
    for i, column in enumerate(lines):
        axis.plot(table[x], table[column], color=SERIES[i], marker=MARKERS[i], label=labels[column])
    log_axis(axis, "y", "s")
    wide = table[x].max() > 16 * table[x].min()
    if wide:
        log_axis(axis, "x", base=2)
        axis.set_xticks(table[x], [f"{value:g}" for value in table[x]])
    axis.set_xlabel(labels[x] + (", log" if wide else ""))
    axis.set_ylabel("latency, log")
    values: Any = table[list(lines)].to_numpy()
    axis.set_ylim(values.min() / 1.6, values.max() * 1.8)
    axis.set_title(title)
    axis.legend(loc="center left", bbox_to_anchor=(1.01, 0.5))
    return fig
