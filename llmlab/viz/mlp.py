"""Figures of the feed-forward half of a layer: where parameters and FLOPs are, wide and narrow products, SiLU·mul's traffic."""

from __future__ import annotations

from typing import TYPE_CHECKING

from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

from llmlab.viz.style import GROUP_COLOURS, INK, LINE, MARKERS, SERIES, SOFT, log_axis, new_figure, styled

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PART_STYLE = {
    "MLP": (GROUP_COLOURS["gate+up"], ""),
    "attention": (GROUP_COLOURS["QKV"], "///"),
    "embedding and head": (GROUP_COLOURS["head"], "..."),
    "norms": (GROUP_COLOURS["rest"], "xxx"),
}


@styled
def shares_figure(table: pd.DataFrame, context: int) -> Figure:
    """Shares of parameters, and of a decode step's FLOPs, as one bar a model.

    Args:
        table: :func:`llmlab.measure.experiments.mlp.shares`. context: that of the FLOPs.
    """
    models = list(dict.fromkeys(table["model"]))
    fig = new_figure(10.5, 0.5 * len(models) + 1.7)
    axes = fig.subplots(1, 2, sharey=True)
    panels = (("share", "Parameters"), ("flops_share", f"FLOPs of a decode step, context {context:,}"))
    for axis, (column, title) in zip(axes, panels, strict=True):
        left = dict.fromkeys(models, 0.0)
        for part, (colour, hatch) in PART_STYLE.items():
            rows = table[table["part"] == part].set_index("model")
            for y, model in enumerate(reversed(models)):
                value = 100 * rows.loc[model, column]
                label = part if y == 0 else None
                axis.barh(y, value, left=left[model], color=colour, hatch=hatch, edgecolor="white", label=label)
                if value >= 7:
                    box = {"boxstyle": "round,pad=0.15", "facecolor": "white", "edgecolor": "none"}
                    axis.text(
                        left[model] + value / 2, y, f"{value:.0f}", ha="center", va="center", fontsize=8.5, bbox=box
                    )
                left[model] += value
        axis.set_xlim(0, 100)
        axis.set_xlabel("share (%)")
        axis.set_title(title)
        axis.grid(axis="y", visible=False)
    axes[0].set_yticks(range(len(models)), list(reversed(models)))
    handles, labels = axes[0].get_legend_handles_labels()
    fig.legend(handles, labels, loc="outside lower center", ncols=len(labels))
    return fig


@styled
def wide_figure(table: pd.DataFrame, title: str) -> Figure:
    """How many times as fast the joined product is, over the number of tokens; bars from the 10th to the 90th percentile.

    Args:
        table: :func:`llmlab.measure.experiments.mlp.wide_against_narrow`.
    """
    fig = new_figure(7.5, 4.2)
    axis = fig.add_subplot()
    axis.axhline(1.0, color=INK, linewidth=1.0, linestyle="--")
    for i, (projection, rows) in enumerate(table.groupby("projection", sort=False)):
        spread = [rows["gain"] - rows["p10"], rows["p90"] - rows["gain"]]
        shift = 1.04 ** (2 * i - 1)  # so that bars at the same number of tokens stand side by side
        parts = "two" if projection == "gate/up" else "three"
        axis.errorbar(
            rows["tokens"] * shift, rows["gain"], spread, color=SERIES[i], marker=MARKERS[i], capsize=3,
            label=f"{projection}: one product against {parts}",
        )  # fmt: skip
    log_axis(axis, "x", base=2)
    ticks = sorted(set(table["tokens"]))
    axis.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
    axis.set_ylim(0, max(2.0, 1.1 * table["p90"].max()))
    axis.set_xlabel("tokens in the step, log")
    axis.set_ylabel("narrow products' time / wide product's")
    axis.set_title(title)
    axis.legend(loc="lower right")
    return fig


@styled
def silu_flow_figure(traffic: pd.DataFrame) -> Figure:
    """What SiLU·mul reads and writes in two steps and in one: memory above, kernels below, an arrow for each pass over a tensor.

    Args:
        traffic: :func:`llmlab.measure.experiments.mlp.silu_traffic`.
    """
    forms = list(dict.fromkeys(traffic["form"]))
    fig = new_figure(10.5, 3.9)
    axes = fig.subplots(1, len(forms), sharey=True)
    for axis, form in zip(axes, forms, strict=True):
        rows = traffic[traffic["form"] == form]
        tensors = [t for t in ("gate", "silu(gate)", "up", "out") if t in set(rows["tensor"])]
        steps = list(dict.fromkeys(rows["step"]))
        place = {t: i for i, t in enumerate(tensors)}
        at = {s: (i + 0.5) * len(tensors) / len(steps) - 0.5 for i, s in enumerate(steps)}
        for name, x in place.items():
            _box(axis, x, 1.0, f"{name}\n[T, I]", "white")
        for name, x in at.items():
            _box(axis, x, 0.0, name, "#e8e4f5")
        for row in rows.itertuples():
            mine = sorted(place[t] for t in rows.loc[rows["step"] == row.step, "tensor"])  # no two arrows cross
            spread = 0.2 * (mine.index(place[row.tensor]) - (len(mine) - 1) / 2)
            ends = (place[row.tensor] + (0.06 if row.role == "read" else -0.06), 0.83), (at[row.step] + spread, 0.17)
            colour, ends = (SERIES[0], ends) if row.role == "read" else (SERIES[1], ends[::-1])
            style = "-" if row.role == "read" else "--"
            axis.add_patch(
                FancyArrowPatch(
                    *ends, arrowstyle="-|>", mutation_scale=13, color=colour, linestyle=style, linewidth=1.6
                )
            )
        reads, writes = (int((rows["role"] == role).sum()) for role in ("read", "write"))
        axis.set_title(f"{form}: {reads} read + {writes} written = {reads + writes}·T·I elements")
        axis.set_xlim(-0.6, len(tensors) - 0.4)
        axis.set_ylim(-0.35, 1.35)
        axis.set_xticks([])
        axis.set_yticks([0.0, 1.0], ["kernel", "memory"])
        axis.grid(visible=False)
        axis.spines[:].set_visible(False)
        axis.tick_params(length=0)
        axis.set_xlabel("solid arrows: read, dashed arrows: written")
    return fig


def _box(axis: Axes, x: float, y: float, text: str, colour: str) -> None:
    axis.add_patch(
        FancyBboxPatch(
            (x - 0.33, y - 0.15), 0.66, 0.3, boxstyle="round,pad=0.02", facecolor=colour, edgecolor=SOFT, linewidth=1.2
        )
    )
    axis.text(x, y, text, ha="center", va="center", fontsize=9, color=INK)


@styled
def silu_times_figure(table: pd.DataFrame, copy_bandwidth: float | None = None) -> Figure:
    """Time of either form over the bytes that the fused one moves.

    Args:
        table: :func:`llmlab.measure.experiments.mlp.silu_times`. copy_bandwidth: B/s, drawn as the least time, if given.
    """
    fig = new_figure(7.5, 4.2)
    axis = fig.add_subplot()
    moved = table["fused_bandwidth"] * table["fused_seconds"] / 1e6
    for i, (column, label) in enumerate((("two_step_seconds", "SiLU, then product"), ("fused_seconds", "fused"))):
        axis.plot(moved, table[column] * 1e6, color=SERIES[1 - i], marker=MARKERS[1 - i], label=label)
    if copy_bandwidth:
        axis.plot(
            moved, moved * 1e12 / copy_bandwidth, color=LINE, linestyle="--", label="3·T·I elements at copy bandwidth"
        )
    log_axis(axis, "x")
    log_axis(axis, "y")
    axis.set_xlabel("MB that the fused form moves, log")
    axis.set_ylabel("µs, log")
    axis.set_title("SiLU·mul in one pass and in two")
    axis.legend()
    return fig
