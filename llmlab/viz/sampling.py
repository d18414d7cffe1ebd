"""Figures of sampling: one distribution through the filters, min-p's threshold, the race, what was drawn, and what it costs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from llmlab.viz.style import INK, LINE, MARKERS, SERIES, SOFT, log_axis, new_figure, styled

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

STAGE_TITLES = {
    "raw": "softmax of the raw logits",
    "temperature": "after temperature",
    "min_p": "after min_p",
    "top_k": "after top-k",
    "top_p": "after top-p",
}


@styled
def filter_figure(
    stages: pd.DataFrame,
    tokens: Sequence[str],
    settings: Mapping[str, float],
    columns: Sequence[str] = ("raw", "temperature", "min_p", "top_k", "top_p"),
) -> Figure:
    """The most likely tokens after each step of the sampler: bars where a token is kept, a cross where it is not.

    Args:
        stages: :func:`llmlab.measure.experiments.sampling.filter_stages`. tokens: text of its first rows, all that are drawn.
        settings: the values of temperature, min_p, top_k and top_p, for the titles. columns: which stages are drawn.
    """
    shown = stages.head(len(tokens))
    fig = new_figure(9.5, 1.25 * len(columns) + 1.2)
    axes = fig.subplots(len(columns), 1, sharex=True, sharey=True, squeeze=False)[:, 0]
    places = np.arange(len(tokens))
    highest = max(float(stages[name].max()) for name in columns)
    for i, (axis, name) in enumerate(zip(axes, columns, strict=True)):
        probs = shown[name].to_numpy()
        kept, everywhere = probs > 0, stages[name].to_numpy() > 0
        axis.bar(places[kept], probs[kept], color=SERIES[i], width=0.75)
        axis.plot(places[~kept], np.full((~kept).sum(), 0.02 * highest), "x", color=SOFT, markersize=4)
        title = STAGE_TITLES[name] + (f" {settings[name]:g}" if name in settings else "")
        beyond = float(stages[name].iloc[len(tokens) :].sum())
        rest = f"; {100 * beyond:.1f} % of the mass lies beyond these {len(tokens)}" if beyond >= 5e-4 else ""
        axis.set_title(f"{title}: {int(everywhere.sum()):,} tokens{rest}", fontsize=9.5)
        axis.grid(axis="x", visible=False)
        axis.set_ylim(0, 1.08 * highest)
    axes[-1].set_xticks(places, [repr(token) for token in tokens], rotation=60, ha="right", fontsize=8)
    axes[-1].set_xlabel("token, most likely first (cross: removed)")
    fig.supylabel("probability", fontsize=10)
    return fig


@styled
def min_p_figure(table: pd.DataFrame, min_p: float) -> Figure:
    """The least probability that min-p keeps, against the best token's: found with the op, and by the rule.

    Args:
        table: :func:`llmlab.measure.experiments.sampling.min_p_thresholds`.
    """
    fig = new_figure(6.5, 4.0)
    axis = fig.add_subplot()
    axis.plot(table["highest"], table["rule"], color=LINE, linewidth=3, label=f"{min_p:g} × p_max")
    axis.plot(
        table["highest"],
        table["threshold"],
        color=SERIES[0],
        marker=MARKERS[0],
        linestyle="",
        label="found by bisection",
    )
    for row in table.itertuples():
        axis.annotate(
            f"{row.threshold:.3g}",
            (row.highest, row.threshold),
            xytext=(6, -11),
            textcoords="offset points",
            fontsize=8.5,
        )
    log_axis(axis, "x")
    log_axis(axis, "y")
    axis.set_xlabel("probability of the most likely token, p_max, log")
    axis.set_ylabel("least probability kept, log")
    axis.set_title("min-p's threshold follows the model's confidence")
    axis.legend()
    return fig


@styled
def race_figure(table: pd.DataFrame, winner: int) -> Figure:
    """One draw as a race: each token runs q / p long, and the first to arrive is the sample.

    Args:
        table: one row a token, with ``token`` (text), ``p``, ``q`` (Exp(1) noise). winner: its row.
    """
    fig = new_figure(10.5, 0.34 * len(table) + 1.5)
    axes = fig.subplots(1, 3, sharey=True)
    rows = np.arange(len(table))[::-1]
    arrival = table["q"] / table["p"]
    panels = (
        (axes[0], table["p"], "p: how likely", "probability"),
        (axes[1], table["q"], "q ~ Exp(1): the luck of this draw", "noise"),
        (axes[2], arrival, "q / p: when it arrives", "arrival time, log"),
    )
    colours = [SERIES[1] if i == winner else SERIES[0] for i in range(len(table))]
    hatches = ["///" if i == winner else "" for i in range(len(table))]
    for axis, values, title, label in panels:
        if axis is not axes[2]:  # a bar on a logarithmic axis begins nowhere: points there
            axis.barh(rows, values, color=colours, hatch=hatches, edgecolor="white")
        axis.set_title(title)
        axis.set_xlabel(label)
        axis.grid(axis="y", visible=False)
    log_axis(axes[2], "x")
    axes[2].set_xlim(0.4 * arrival.min(), 20 * arrival.max())
    for i, (y, value) in enumerate(zip(rows, arrival, strict=True)):
        axes[2].plot(value, y, MARKERS[1] if i == winner else MARKERS[0], color=colours[i])
        mark = f"   {value:.3g}" + ("  first" if i == winner else "")
        axes[2].text(value, y, mark, va="center", fontsize=8.5, color=INK)
    axes[0].set_yticks(rows, [repr(token) for token in table["token"]])
    return fig


@styled
def draws_figure(table: pd.DataFrame, count: int, p_values: Mapping[str, float]) -> Figure:
    """How often each token was drawn against how often it should be, in standard deviations, for several ways to draw.

    Args:
        table: one row a token, most likely first: ``p`` and one column of counts a way. count: draws in all.
        p_values: of the chi-square test, by way.
    """
    fig = new_figure(9.0, 3.8)
    axis = fig.add_subplot()
    places = np.arange(1, len(table) + 1)
    expected = count * table["p"].to_numpy()
    spread = np.sqrt(expected * (1 - table["p"].to_numpy()))
    axis.axhspan(-2, 2, color=LINE, alpha=0.5, label="±2 standard deviations")
    axis.axhline(0, color=INK, linewidth=0.8)
    for i, (way, p_value) in enumerate(p_values.items()):
        off = (table[way].to_numpy() - expected) / spread
        axis.plot(
            places + 0.2 * (2 * i - 1), off, MARKERS[i], color=SERIES[i], label=f"{way}: chi-square p = {p_value:.2f}"
        )
    axis.set_xlabel("token, most likely first")
    axis.set_ylabel("(drawn − expected) / σ")
    axis.set_title(f"{count:,} draws from one distribution")
    axis.set_ylim(-4.5, 4.5)
    axis.legend(loc="upper center", ncols=3)
    return fig


@styled
def draw_times_figure(table: pd.DataFrame, num_reqs: int) -> Figure:
    """Time of one draw a request over the size of the vocabulary, three ways.

    Args:
        table: :func:`llmlab.measure.experiments.sampling.draw_times`.
    """
    names = {
        "race": "Gumbel race",
        "multinomial": "softmax, torch.multinomial",
        "prefix": "softmax, prefix sum, search",
    }
    fig = new_figure(7.5, 4.2)
    axis = fig.add_subplot()
    for i, (way, label) in enumerate(names.items()):
        axis.plot(table["vocab_size"], 1e6 * table[f"{way}_seconds"], color=SERIES[i], marker=MARKERS[i], label=label)
    log_axis(axis, "x")
    log_axis(axis, "y")
    axis.set_xlabel("vocab_size, log")
    axis.set_ylabel(f"µs for {num_reqs} requests, log")
    axis.set_title("Drawing one token a request")
    axis.legend()
    return fig


@styled
def logprobs_figure(table: pd.DataFrame, title: str) -> Figure:
    """Raw and processed logprobs of the likeliest tokens side by side; a token that was removed has no processed one.

    Args:
        table: :func:`llmlab.measure.experiments.sampling.raw_and_processed`.
    """
    fig = new_figure(9.5, 4.0)
    axis = fig.add_subplot()
    places = np.arange(len(table))
    axis.plot(places, table["raw"], color=SERIES[0], marker=MARKERS[0], label="raw: the model's")
    kept = np.isfinite(table["processed"])
    axis.plot(
        places[kept],
        table["processed"][kept],
        color=SERIES[1],
        marker=MARKERS[1],
        label="processed: what is drawn from",
    )
    low = min(table["raw"].min(), table["processed"][kept].min()) - 1.0
    axis.plot(places[~kept], np.full((~kept).sum(), low + 0.3), "x", color=SERIES[1], label="removed (−∞)")
    axis.set_ylim(low, 0.3)
    axis.set_xticks(places, [repr(token) for token in table["token"]], rotation=60, ha="right", fontsize=8)
    axis.set_xlabel("token, most likely first")
    axis.set_ylabel("logprob (nats)")
    axis.set_title(title)
    axis.legend(loc="upper right")
    return fig
