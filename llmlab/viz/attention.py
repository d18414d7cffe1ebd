"""Pictures of attention in tiles: the running softmax, the tiles that a mask leaves, what that saves in memory and traffic."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
from matplotlib.patches import Patch, Rectangle

from llmlab.viz.style import INK, LINE, MARKERS, SERIES, SOFT, engineering, log_axis, new_figure, styled

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from llmlab.measure.datasheets import Roof

_KINDS = {
    "whole": ({"facecolor": SERIES[0]}, "computed, no mask needed"),
    "masked": ({"facecolor": SERIES[1], "hatch": "///"}, "computed with a mask"),
    "skipped": ({"facecolor": "#f6f8fa"}, "never touched"),
}


@styled
def online_softmax_figure(scores: np.ndarray, values: np.ndarray, steps: pd.DataFrame, title: str) -> Figure:
    """One query walks over its keys: scores and running maximum, running sum, and the answer so far against the exact one.

    Args:
        steps: :func:`llmlab.measure.experiments.attention.online_softmax_steps` of these scores and values.
    """
    ends = steps["keys"].to_numpy()
    starts = np.concatenate(([0], ends[:-1]))
    weights = np.exp(scores - scores.max())
    exact = weights @ values / weights.sum()
    fig = new_figure(9.4, 6.2)
    top, middle, bottom = fig.subplots(3, 1, sharex=True, height_ratios=[3, 2, 2])
    keys = np.arange(len(scores)) + 0.5
    top.vlines(keys, min(0, scores.min()), scores, color=SERIES[4], linewidth=3)
    top.plot(keys, scores, "o", color=SERIES[4], markersize=4, label="score of a key")
    top.stairs(
        steps["max"], [*starts, ends[-1]], baseline=None, color=SERIES[0], linewidth=2, label="running maximum m"
    )
    top.set_ylabel("score")
    top.set_ylim(scores.min() - 0.6, scores.max() + 0.35 * np.ptp(scores))
    top.legend(loc="upper left", ncols=2)
    middle.stairs(steps["sum"], [*starts, ends[-1]], color=SERIES[2], fill=True, alpha=0.8)
    for row, start in zip(steps.itertuples(), starts, strict=True):
        if 0 < row.correction < 1:
            text = f"× {row.correction:.2f}"
            middle.text((start + row.keys) / 2, row.sum + 0.03 * steps["sum"].max(), text, ha="center", color=INK)
    middle.set_ylabel("running sum ℓ")
    middle.set_ylim(0, 1.25 * steps["sum"].max())
    bottom.stairs(steps["answer"], [*starts, ends[-1]], baseline=None, color=SERIES[1], linewidth=2, label="acc / ℓ")
    bottom.axhline(exact, color=INK, linestyle="--", linewidth=1, label="two passes over all keys")
    bottom.set_ylabel("answer so far")
    bottom.legend(loc="upper right", ncols=2)
    low, high = min(steps["answer"].min(), exact), max(steps["answer"].max(), exact)
    bottom.set_ylim(low - 0.1 * (high - low), high + 0.6 * (high - low))
    bottom.set_xlabel("key (vertical lines: tiles; × c: what ℓ and acc so far were multiplied by as m rose)")
    for axis in (top, middle, bottom):
        axis.set_xticks([0, *ends])
        axis.grid(axis="y", visible=False)
    fig.suptitle(title, x=0.01, ha="left", fontweight="bold")
    return fig


@styled
def tile_figure(
    tiles: pd.DataFrame, query_len: int, seq_len: int, block_m: int, block_n: int, title: str = ""
) -> Figure:
    """The matrix of scores of one request that never exists, with what the kernel does in each tile.

    Args:
        tiles: :func:`llmlab.measure.experiments.attention.tile_map` of these sizes.
    """
    fig = new_figure(max(4.5, min(9.5, 8.5 * seq_len / max(query_len, seq_len / 3))), 5.2)
    axis = fig.subplots()
    for tile in tiles.itertuples():
        x, y = tile.column * block_n, tile.row * block_m
        width, height = min(block_n, seq_len - x), min(block_m, query_len - y)
        style, _ = _KINDS[tile.kind]
        edge = LINE if tile.kind == "skipped" else "white"
        axis.add_patch(Rectangle((x, y), width, height, edgecolor=edge, linewidth=0.8, **style))
    context = seq_len - query_len
    diagonal = np.repeat(np.arange(query_len + 1), 2)
    axis.plot(context + diagonal[1:], diagonal[:-1], color=INK, linewidth=1.4)
    axis.set_xlim(0, seq_len)
    axis.set_ylim(query_len, 0)
    axis.set_aspect("equal" if query_len * 3 >= seq_len else "auto")
    axis.grid(visible=False)
    axis.set_xlabel("key (position)")
    axis.set_ylabel("query (of this chunk)")
    computed = (tiles["kind"] != "skipped").mean()
    text = f"{computed:.0%} of the {len(tiles)} tiles are computed"
    axis.set_title(f"{title}: {text}" if title else text)
    present = [kind for kind in _KINDS if (tiles["kind"] == kind).any()]
    handles = [Patch(edgecolor=SOFT, label=_KINDS[kind][1], **_KINDS[kind][0]) for kind in present]
    fig.legend(handles=handles, loc="outside lower center", ncols=len(handles))
    return fig


@styled
def memory_figure(growth: pd.DataFrame, title: str) -> Figure:
    """Peak memory of attention by prompt length, both ways, with lines of slope 1 and 2 through the last points.

    Args:
        growth: :func:`llmlab.measure.experiments.attention.memory_growth`.
    """
    fig = new_figure(7.6, 4.4)
    axis = fig.subplots()
    for i, (way, rows) in enumerate(growth.groupby("way")):
        slope = 2 if way == "all scores" else 1
        x = rows["length"].to_numpy(float)
        axis.plot(x, rows["bytes"], marker=MARKERS[i], color=SERIES[i], label=f"{way}: measured")
        line = rows["bytes"].iloc[-1] * (x / x[-1]) ** slope
        axis.plot(x, line, color=SERIES[i], linestyle=":", label=f"grows as S{'²' if slope == 2 else ''}")
    log_axis(axis, "x", base=2)
    log_axis(axis, "y", "B")
    _plain_ticks(axis, sorted(set(growth["length"])))
    axis.set_xlabel("prompt S (tokens), log")
    axis.set_ylabel("peak memory beyond the inputs, log")
    axis.legend()
    axis.set_title(title)
    return fig


@styled
def intensity_figure(intensity: pd.DataFrame, ridges: Mapping[str, float], title: str) -> Figure:
    """Intensity of prefill attention over the queries of a tile, a line a prompt length, against the ridges of machines.

    Args:
        intensity: index: queries in a tile; columns: prompt lengths; FLOP/byte.
        ridges: machine → FLOP/byte from which arithmetic is its limit.
    """
    fig = new_figure(8.4, 4.8)
    axis = fig.subplots()
    for i, length in enumerate(intensity):
        axis.plot(
            intensity.index, intensity[length], marker=MARKERS[i], color=SERIES[i], label=f"prompt of {length:,} tokens"
        )
    for name, ridge in ridges.items():
        axis.axhline(ridge, color=SOFT, linestyle="--", linewidth=1)
        axis.text(
            intensity.index[0], ridge * 1.05, f"ridge of {name}: {ridge:.0f}", va="bottom", fontsize=8.5, color=INK
        )
    log_axis(axis, "x", base=2)
    log_axis(axis, "y")
    _plain_ticks(axis, list(intensity.index))
    axis.set_ylim(top=2.5 * max(intensity.to_numpy().max(), *ridges.values()))
    axis.set_xlabel("query tokens in a tile (1: every token reads its own keys), log")
    axis.set_ylabel("FLOP per byte moved, log")
    axis.legend(loc="lower right")
    axis.set_title(title)
    return fig


@styled
def query_rate_figure(sweep: pd.DataFrame, unamortised: float, roof: Roof, title: str) -> Figure:
    """FLOP/s of attention over the number of queries of a chunk, against what rereading the keys for each would allow.

    Args:
        sweep: :func:`llmlab.measure.experiments.attention.sweep_queries`.
        unamortised: FLOP/s that bandwidth allows at the intensity of decode.
    """
    fig = new_figure(8.4, 4.6)
    axis = fig.subplots()
    rate = sweep["flops_per_s"]
    errors = [rate - sweep["flops"] / sweep["high"], sweep["flops"] / sweep["low"] - rate]
    axis.errorbar(
        sweep["query_len"],
        rate,
        yerr=errors,
        marker=MARKERS[0],
        color=SERIES[0],
        capsize=3,
        label="measured (p10 to p90)",
    )
    lines = (
        (unamortised, SERIES[1], f"each query reads its own keys: {engineering(unamortised, 'FLOP/s')}"),
        (roof.flops, SERIES[2], f"peak of a {roof.dtype} matrix product: {engineering(roof.flops, 'FLOP/s')}"),
    )
    for value, colour, text in lines:
        axis.axhline(value, color=colour, linestyle="--", label=text)
    log_axis(axis, "x", base=2)
    log_axis(axis, "y", "FLOP/s")
    _plain_ticks(axis, list(sweep["query_len"]))
    axis.set_ylim(min(rate.min(), unamortised) / 2, 4 * roof.flops)
    axis.set_xlabel("queries in the chunk, log")
    axis.set_ylabel("attention, log")
    axis.legend(loc="upper left")
    axis.set_title(title)
    return fig


def _plain_ticks(axis: Axes, numbers: Sequence[int]) -> None:
    axis.set_xticks(numbers, [f"{number:,}" for number in numbers])
