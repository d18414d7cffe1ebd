"""Figures of the norm: what addition and norm move, apart and joined, and how long they and LayerNorm take beside each other."""

from __future__ import annotations

from typing import TYPE_CHECKING

from matplotlib.patches import FancyBboxPatch

from llmlab.viz.style import INK, LINE, MARKERS, SERIES, SOFT, engineering, log_axis, new_figure, styled

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


@styled
def traffic_figure(table: pd.DataFrame) -> Figure:
    """Tensors in memory below, ops on the processor above, one arrow a pass over a tensor; one panel a form.

    Args:
        table: :func:`llmlab.measure.experiments.norm.fused_traffic`. The weight, a row, is left out of the picture.
    """
    table = table[table["tensor"] != "weight"]
    forms = list(table["form"].unique())
    fig = new_figure(10.5, 3.6)
    for axis, form in zip(fig.subplots(1, len(forms), sharey=True), forms):
        rows = table[table["form"] == form]
        places = {tensor: 1.5 * i for i, tensor in enumerate(("x", "residual", "sum", "normed"))}
        middle = {op: sum(places[t] for t in mine["tensor"]) / len(mine) for op, mine in rows.groupby("op", sort=False)}
        for tensor, x in places.items():
            _box(axis, x, 0, tensor, "white", INK)
        for op, x in middle.items():
            _box(axis, x, 2, op, SERIES[0], "white", width=1.4 if len(op) > 5 else 1.0)
        for row in rows.itertuples():
            x, top = places[row.tensor], middle[row.op] + 0.28 * (places[row.tensor] - middle[row.op])
            reads = row.direction == "read"
            axis.annotate(
                "",
                (top, 1.68) if reads else (x, 0.32),
                (x, 0.32) if reads else (top, 1.68),
                arrowprops={
                    "arrowstyle": "-|>",
                    "color": SERIES[2] if reads else SERIES[1],
                    "linewidth": 2.2,
                    "linestyle": "-" if reads else (0, (4, 2)),
                    "shrinkA": 0,
                    "shrinkB": 0,
                },
            )
        axis.axhspan(-0.6, 0.55, color="#f3f4f6", zorder=0)
        axis.text(-0.95, -0.5, "memory", fontsize=9, color=SOFT)
        axis.set_xlim(-1.0, 5.5)
        axis.set_ylim(-0.65, 2.6)
        axis.set_xticks([])
        axis.set_yticks([])
        axis.grid(visible=False)
        for side in ("left", "bottom"):
            axis.spines[side].set_visible(False)
        axis.set_title(f"{form.capitalize()}: {len(rows)} passes, {engineering(rows['bytes'].sum(), 'B')}")
        axis.set_xlabel("green: read; red, dashed: written")
    return fig


def _box(axis: Axes, x: float, y: float, label: str, colour: str, ink: str, width: float = 1.0) -> None:
    patch = FancyBboxPatch(
        (x - width / 2, y - 0.25), width, 0.5, boxstyle="round,pad=0.05", facecolor=colour, edgecolor=LINE, zorder=3
    )
    axis.add_patch(patch)
    axis.text(x, y, label, ha="center", va="center", fontsize=9.5, color=ink, zorder=4)


@styled
def norm_times_figure(norms: pd.DataFrame, fused: pd.DataFrame) -> Figure:
    """Left: LayerNorm's time over RMSNorm's, one line a way of writing them. Right: fused over apart, and the share of bytes.

    Args:
        norms: :func:`llmlab.measure.experiments.norm.rms_against_layer`.
        fused: :func:`llmlab.measure.experiments.norm.fused_against_apart`.
    """
    fig = new_figure(11.0, 4.4)
    left, right = fig.subplots(1, 2)
    for i, (name, rows) in enumerate(norms.groupby("implementation", sort=False)):
        _line(left, rows, i, name)
    _line(right, fused, 3, "fused over apart")
    right.plot(fused["working_set"], fused["bytes_ratio"], color=INK, linestyle=(0, (4, 3)), label="share of the bytes")
    for axis, table in ((left, norms), (right, fused)):
        axis.axhline(1.0, color=SOFT, linewidth=1.0)
        log_axis(axis, "x", "B")
        top = min(table["high"].max(), 1.6 * table["ratio"].max())  # a bar that other work made long is cut off
        axis.set_ylim(0, max(top, 1.0) * 1.45)
        axis.set_xlabel("bytes of inputs and results, log")
        axis.legend(loc="upper left")
    left.set_ylabel("LayerNorm's time over RMSNorm's")
    left.set_title("Above 1: RMSNorm is cheaper")
    right.set_ylabel("fused: time over add and norm apart")
    right.set_title("Below 1: fusing saves time")
    return fig


def _line(axis: Axes, rows: pd.DataFrame, i: int, label: str) -> None:
    spread = (rows["ratio"] - rows["low"], rows["high"] - rows["ratio"])
    axis.errorbar(
        rows["working_set"],
        rows["ratio"],
        spread,
        marker=MARKERS[i],
        color=SERIES[i],
        capsize=3,
        linewidth=1.4,
        label=label,
    )
