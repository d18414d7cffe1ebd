"""Figures of rotary embedding: turning pairs, scores that see distances, wavelengths of the scaling types, size of the table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from matplotlib.ticker import MaxNLocator

from llmlab.viz.style import INK, LINE, MARKERS, SERIES, SOFT, log_axis, new_figure, styled

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure
    from torch import Tensor

_DASHES = ("-", (0, (6, 2)), (0, (2, 1.5)), (0, (6, 2, 1, 2)), (0, (1, 1)), (0, (8, 2, 1, 2, 1, 2)))


@styled
def turning_pairs_figure(inv_freq: Sequence[float], pairs: Sequence[int], num_positions: int) -> Figure:
    """Some pairs of dimensions as pointers that start at (1, 0) and turn with the position, one circle a pair.

    Args:
        inv_freq: radians a position, by pair.
        pairs: which to draw.
        num_positions: positions 0 to num_positions − 1 are drawn as dots, darker with the position.
    """
    fig = new_figure(10.5, 3.5)
    round_ = np.linspace(0, 2 * np.pi, 200)
    positions = np.arange(num_positions)
    for axis, pair in zip(fig.subplots(1, len(pairs)), pairs):
        axis.plot(np.cos(round_), np.sin(round_), color=LINE, linewidth=1.0)
        angles = positions * inv_freq[pair]
        x, y = np.cos(angles), np.sin(angles)
        axis.plot([0, x[-1]], [0, y[-1]], color=SERIES[1], linewidth=1.8)
        shown = axis.scatter(x, y, c=positions, cmap="viridis_r", s=34, edgecolor="white", linewidth=0.5, zorder=3)
        turn = 2 * np.pi / inv_freq[pair]
        axis.set_title(f"pair {pair}: a turn in\n{turn:,.1f} positions", fontsize=10)
        axis.set_aspect("equal")
        axis.set_xlim(-1.2, 1.2)
        axis.set_ylim(-1.2, 1.2)
        axis.set_xticks([])
        axis.set_yticks([])
        axis.grid(visible=False)
        for side in ("left", "bottom"):
            axis.spines[side].set_visible(False)
        axis.set_xlabel(f"$x_{{{pair}}}$ and its partner, turned", fontsize=8.5, color=SOFT)
    bar = fig.colorbar(shown, ax=fig.axes, shrink=0.75, label="position", ticks=MaxNLocator(5, integer=True))
    bar.ax.set_label("<colorbar>")
    return fig


@styled
def relative_figure(scores: Tensor) -> Figure:
    """Scores of one q and one k at all pairs of positions, and the same against the distance: every diagonal is one value.

    Args:
        scores: ``[num_positions, num_positions]``, :func:`llmlab.measure.experiments.rope.relative_scores`.
    """
    values = scores.numpy()
    fig = new_figure(10.5, 4.2)
    left, right = fig.subplots(1, 2)
    top = np.abs(values).max()
    shown = left.imshow(values, cmap="RdBu_r", vmin=-top, vmax=top, origin="upper")
    left.set_xlabel("position n of the key")
    left.set_ylabel("position m of the query")
    left.set_title("One q and one k, at all positions")
    left.grid(visible=False)
    bar = fig.colorbar(shown, ax=left, shrink=0.85, label="$(R_m q) \\cdot (R_n k)$")
    bar.ax.set_label("<colorbar>")
    rows, columns = np.indices(values.shape)
    right.plot((rows - columns).ravel(), values.ravel(), marker="o", markersize=3, linestyle="", color=SERIES[0])
    right.axhline(0, color=SOFT, linewidth=0.8)
    right.set_xlabel("distance m − n (positions)")
    right.set_ylabel("score")
    right.set_title(f"All {values.size:,} scores, by distance")
    return fig


@styled
def wavelength_figure(table: pd.DataFrame, trained: int, length: int) -> Figure:
    """Positions that each pair needs for a full turn, one line a scaling type.

    Args:
        table: :func:`llmlab.measure.experiments.rope.wavelengths`.
        trained: length that the model was trained on; length: the one that it is stretched to.
    """
    fig = new_figure(9.6, 5.0)
    axis = fig.add_subplot()
    for i, (name, rows) in enumerate(table.groupby("type", sort=False)):
        axis.plot(
            rows["pair"],
            rows["wavelength"],
            color=SERIES[i],
            linestyle=_DASHES[i],
            marker=MARKERS[i],
            markevery=(i, 8),
            label=name,
        )
    for size, words in ((trained, "trained on"), (length, "stretched to")):
        axis.axhline(size, color=INK, linewidth=0.9)
        axis.text(0.5, size * 1.12, f"{words} {size:,} tokens", fontsize=8.5, color=INK)
    log_axis(axis, "y")
    axis.set_xlim(0, table["pair"].max())
    axis.set_xlabel("pair of dimensions")
    axis.set_ylabel("wavelength (positions a turn), log")
    axis.set_title("What each rope type does to the wavelengths")
    axis.legend(loc="center left", bbox_to_anchor=(1.01, 0.5))
    return fig


@styled
def table_size_figure(models: pd.DataFrame, limit_mb: float = 100.0) -> Figure:
    """Size of the float32 table over the number of positions, for the rotary dimensions that occur, with models as points.

    Args:
        models: :func:`llmlab.measure.experiments.rope.table_sizes`.
        limit_mb: drawn as a line.
    """
    fig = new_figure(8.6, 4.4)
    axis = fig.add_subplot()
    positions = np.array([2**i for i in range(11, 21)])
    for i, dim in enumerate(sorted(models["rotary_dim"].unique())):
        axis.plot(
            positions, positions * dim * 4 / 1e6, color=SERIES[i], linestyle=_DASHES[i], label=f"rotary_dim {dim}"
        )
    axis.axhline(limit_mb, color=INK, linewidth=1.0)
    axis.text(positions[0], limit_mb * 1.15, f"{limit_mb:g} MB", fontsize=9, color=INK)
    largest = models["rotary_dim"].max()
    for (dim, size, mb), rows in models.groupby(["rotary_dim", "max_position", "mb"]):
        axis.plot(size, mb, marker="o", markersize=8, color=SERIES[4], markeredgecolor=INK, linestyle="")
        above = dim == largest  # the labels stand on the outer sides of the lines
        place = {"xytext": (-8, 4), "ha": "right", "va": "bottom"} if above else {"xytext": (8, -5), "va": "top"}
        axis.annotate(", ".join(rows["model"]), (size, mb), textcoords="offset points", fontsize=8.5, **place)
    log_axis(axis, "x", base=2)
    log_axis(axis, "y", "B")
    axis.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axis.yaxis.set_minor_formatter(lambda value, _: "")
    axis.set_xticks(positions[1::2], [f"{size:,}" for size in positions[1::2]])
    axis.set_xlabel("positions in the table, log")
    axis.set_ylabel("size of the table (MB), log")
    axis.set_title("Positions × rotary_dim × 4 bytes, once for all layers")
    axis.legend(loc="lower right")
    return fig
