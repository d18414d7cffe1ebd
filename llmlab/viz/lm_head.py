"""Figures of the model's end: which tokens the last layer computes, the LM head's share, and what trimming saves."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from llmlab.viz.style import GROUP_COLOURS, INK, LINE, MARKERS, SERIES, SOFT, log_axis, new_figure, styled

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from llmlab.engine.batch import Batch

LAST_STEPS = ("input norm", "K, V → cache", "Q", "attention", "O", "MLP", "final norm", "LM head")
FOR_EVERY_TOKEN = 2  # so many of them


def last_layer_map(batch: Batch) -> pd.DataFrame:
    """Which token of a step goes through which part of the last layer and beyond: part, token, request, computed."""
    import pandas as pd

    starts = batch.query_start_loc.tolist()
    wanted = set(range(starts[-1]) if batch.wanted is None else batch.wanted.rows.tolist())
    last = {end - 1 for end, discard in zip(starts[1:], batch.discard, strict=True) if not discard}
    rows = []
    for part, name in enumerate(LAST_STEPS):
        for r, (begin, end) in enumerate(pairwise(starts)):
            for token in range(begin, end):
                computed = token in (last if name == "LM head" else wanted) or part < FOR_EVERY_TOKEN
                rows.append({"part": name, "token": token, "request": batch.req_ids[r], "computed": computed})
    return pd.DataFrame(rows)


@styled
def last_layer_figure(maps: dict[str, pd.DataFrame]) -> Figure:
    """The tokens of one step as columns, the parts of the last layer as rows: filled where something is computed.

    Args:
        maps: :func:`last_layer_map` by name, one panel each.
    """
    fig = new_figure(11.0, 3.6)
    axes = fig.subplots(1, len(maps), sharey=True, squeeze=False)[0]
    for axis, (name, table) in zip(axes, maps.items(), strict=True):
        parts = list(dict.fromkeys(table["part"]))
        grid = table.pivot(index="part", columns="token", values="computed").loc[parts].to_numpy(bool)
        for y, row in enumerate(grid):
            for x, computed in enumerate(row):
                colour = SERIES[2] if y < FOR_EVERY_TOKEN else SERIES[0]
                axis.add_patch(
                    _cell(x, y, facecolor=colour if computed else "white", edgecolor="white" if computed else LINE)
                )
        first = table[table["part"] == parts[0]].groupby("request", sort=False)["token"].agg(["min", "max"])
        for request, (begin, end) in first.iterrows():
            axis.text((begin + end) / 2, -1.15, request, ha="center", va="center", fontsize=9, color=INK)
            if begin:
                axis.axvline(begin - 0.5, color=INK, linewidth=1.0)
        axis.set_xlim(-0.6, grid.shape[1] - 0.4)
        axis.set_ylim(len(parts) - 0.4, -1.7)
        axis.set_yticks(range(len(parts)), parts)
        axis.set_xticks([])
        axis.set_xlabel(f"the step's tokens, by request: {int(grid.sum())} of {grid.size} cells computed")
        axis.set_title(name)
        axis.grid(visible=False)
        axis.spines[:].set_visible(False)
        axis.tick_params(length=0)
    return fig


def _cell(x: int, y: int, **style: str) -> object:
    from matplotlib.patches import Rectangle

    return Rectangle((x - 0.42, y - 0.4), 0.84, 0.8, linewidth=0.8, **style)


@styled
def head_share_figure(table: pd.DataFrame) -> Figure:
    """The LM head's share of a prefill's FLOPs over the prompt's length: over all rows, and over the last one.

    Args:
        table: :func:`llmlab.measure.experiments.lm_head.head_share`.
    """
    fig = new_figure(8.0, 4.2)
    axis = fig.add_subplot()
    for i, (model, rows) in enumerate(table.groupby("model", sort=False)):
        for column, style, what in (("share_all", "-", "all rows"), ("share_last", "--", "last row")):
            axis.plot(
                rows["tokens"], 100 * rows[column], color=SERIES[i], marker=MARKERS[i], linestyle=style,
                markerfacecolor=SERIES[i] if style == "-" else "white", label=f"{model}, {what}",
            )  # fmt: skip
    _token_axis(axis, table["tokens"])
    axis.set_ylim(0, None)
    axis.set_ylabel("LM head's share of the FLOPs (%)")
    axis.set_title("What the LM head takes of a prefill")
    axis.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))
    return fig


@styled
def last_layer_flops_figure(table: pd.DataFrame, title: str) -> Figure:
    """GFLOP of the last layer, group by group, for all tokens and trimmed.

    Args:
        table: :func:`llmlab.measure.experiments.lm_head.last_layer`.
    """
    colours = {"K and V": SERIES[2], "Q": GROUP_COLOURS["QKV"], "attention": GROUP_COLOURS["attention"],
               "O": GROUP_COLOURS["O"], "MLP": GROUP_COLOURS["down"], "norms, RoPE, cache": GROUP_COLOURS["rest"]}  # fmt: skip
    hatches = dict(zip(colours, ("", "///", "...", "xxx", "\\\\\\", "+++"), strict=True))
    ways = list(dict.fromkeys(table["way"]))
    fig = new_figure(9.0, 2.6)
    axis = fig.add_subplot()
    for y, way in enumerate(reversed(ways)):
        left = 0.0
        for row in table[table["way"] == way].itertuples():
            label = row.group if y == 0 else None
            axis.barh(
                y,
                row.flops / 1e9,
                left=left,
                color=colours[row.group],
                hatch=hatches[row.group],
                edgecolor="white",
                label=label,
            )
            left += row.flops / 1e9
        axis.text(left, y, f" {left:.3g}", va="center", fontsize=9, color=INK)
    axis.set_yticks(range(len(ways)), list(reversed(ways)))
    axis.set_xlim(0, 1.1 * table.groupby("way")["flops"].sum().max() / 1e9)
    axis.set_xlabel("GFLOP of the last layer")
    axis.set_title(title)
    axis.grid(axis="y", visible=False)
    fig.legend(loc="outside lower center", ncols=6)
    return fig


@styled
def saved_figure(paper: pd.DataFrame, clocked: pd.DataFrame, model: str, num_layers: int) -> Figure:
    """What trimming saves of a prefill, in units of 1/num_layers: FLOPs on paper for several models, time for one.

    Args:
        paper: :func:`llmlab.measure.experiments.lm_head.trimmed_share`. clocked: ``trimmed_times`` of ``model``.
    """
    fig = new_figure(10.5, 4.2)
    axes = fig.subplots(1, 2)
    for i, (name, rows) in enumerate(paper.groupby("model", sort=False)):
        label = f"{name} ({rows['num_layers'].iloc[0]} layers)"
        axes[0].plot(rows["tokens"], rows["times_layers"], color=SERIES[i + 1], marker=MARKERS[i + 1], label=label)
    median = num_layers * clocked["saved"]
    spread = np.abs(num_layers * clocked[["sure_low", "sure_high"]].to_numpy().T - median.to_numpy())
    axes[1].errorbar(
        clocked["tokens"], median, spread, color=SERIES[0], marker=MARKERS[0], linestyle=":", capsize=3,
        label="median of pairs, 95 % interval",
    )  # fmt: skip
    axes[1].axhline(0.0, color=SOFT, linewidth=0.8)
    for axis, table, title in (
        (axes[0], paper, "FLOPs, on paper"),
        (axes[1], clocked, f"time of a step, {model}"),
    ):
        axis.axhline(1.0, color=INK, linewidth=1.0, linestyle="--")
        _token_axis(axis, table["tokens"])
        axis.set_title(title)
    axes[0].set_ylabel("saved share × num_layers (1: a whole layer)")
    axes[0].set_ylim(0, 1.1)
    axes[0].legend(loc="lower right")
    axes[1].legend(loc="best")
    return fig


def _token_axis(axis: Axes, tokens: Iterable[int]) -> None:
    log_axis(axis, "x", base=2)
    ticks = sorted(set(tokens))
    axis.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
    axis.set_xlabel("tokens of the prompt, log")
