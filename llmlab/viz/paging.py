"""Pictures of the paged cache: which block is whose over time, how a table maps positions to slots, what a block size costs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from matplotlib.patches import Patch, Rectangle

from llmlab.viz.style import INK, LINE, MARKERS, SERIES, SOFT, log_axis, new_figure, styled

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_EMPTY = "#f6f8fa"
_HATCHES = ("", "///", "...", "xxx", "\\\\\\")


def _look(names: Sequence[str]) -> dict[str, dict[str, str]]:
    """Colour and hatch of each request, in order of their names' first appearance."""
    return {
        name: {"facecolor": SERIES[i % len(SERIES)], "hatch": _HATCHES[i % len(_HATCHES)]}
        for i, name in enumerate(dict.fromkeys(names))
    }


def _block(axis: Axes, x: float, y: float, size: int, filled: int, width: float, look: dict[str, str] | None) -> None:
    """A block as a row of slots: the filled ones coloured, those handed out and unused pale in a coloured frame."""
    for slot in range(size):
        used = look is not None and slot < filled
        style = {"facecolor": _EMPTY, "edgecolor": LINE, "linewidth": 0.5}
        if used:
            style = {**look, "edgecolor": "white", "linewidth": 0.5}
        axis.add_patch(Rectangle((x + slot * width / size, y), width / size, 0.8, **style))
    frame = look["facecolor"] if look else LINE
    axis.add_patch(Rectangle((x, y), width, 0.8, fill=False, edgecolor=frame, linewidth=1.2))


@styled
def pool_figure(story: pd.DataFrame, num_blocks: int, block_size: int, title: str) -> Figure:
    """The pool after every event: a column an event, a row a block, a small box a slot.

    Args:
        story: :meth:`llmlab.measure.experiments.paging.PoolStory.table`.
    """
    labels = story.drop_duplicates("event").set_index("event")["label"]
    num_events, look = int(story["event"].max()) + 1, _look(story["request"].tolist())
    fig = new_figure(max(1.0 + 0.95 * num_events, 7.0), 1.5 + 0.33 * num_blocks)
    axis = fig.subplots()
    at = {(row.event, row.block): row for row in story.itertuples()}
    for event in range(num_events):
        for block in range(num_blocks):
            row = at.get((event, block))
            own = look[row.request] if row else None
            _block(axis, event - 0.44, block - 0.4, block_size, row.filled if row else 0, 0.88, own)
            if row:
                box = {"facecolor": "white", "edgecolor": "none", "pad": 0.8}
                text = f"{row.request}{row.index}"
                axis.text(event, block, text, ha="center", va="center", fontsize=7.5, color=INK, bbox=box)
    axis.set_xticks(range(num_events), [labels.get(event, "") for event in range(num_events)], fontsize=8.5)
    axis.set_yticks(range(num_blocks))
    axis.set_xlim(-0.6, num_events - 0.4)
    axis.set_ylim(num_blocks - 0.4, -0.6)
    axis.set_xlabel("event (request, tokens more)")
    axis.set_ylabel("block")
    axis.grid(visible=False)
    handles = [Patch(edgecolor="white", label=f"request {name}", **style) for name, style in look.items()]
    handles.append(Patch(facecolor=_EMPTY, edgecolor=LINE, label="slot without a token"))
    fig.legend(handles=handles, loc="outside lower center", ncols=len(handles))
    axis.set_title(title)
    return fig


@styled
def table_figure(story: pd.DataFrame, event: int, num_blocks: int, block_size: int, title: str) -> Figure:
    """How requests see their tokens (above, in order) and where these lie in the pool (below), joined by the block tables.

    Args:
        story: :meth:`llmlab.measure.experiments.paging.PoolStory.table`; ``event`` is the number of one of its events.
    """
    look, moment = _look(story["request"].tolist()), story[story["event"] == event]
    lengths = moment.groupby("request")["index"].max() + 1
    gap = 0.6
    starts, x = {}, 0.0
    for name, count in lengths.items():
        starts[name] = x
        x += count + gap
    width = max(x - gap, num_blocks)
    shift_top, shift_pool = (width - (x - gap)) / 2, (width - num_blocks) / 2
    fig = new_figure(max(0.82 * width, 6.5), 3.9)
    axis = fig.subplots()
    held = {row.block: row for row in moment.itertuples()}
    for block in range(num_blocks):
        row, left = held.get(block), block + shift_pool
        _block(axis, left + 0.03, 2.6, block_size, row.filled if row else 0, 0.94, look[row.request] if row else None)
        axis.text(left + 0.5, 3.62, str(block), ha="center", va="center", fontsize=9, color=INK)
    for row in moment.itertuples():
        left = starts[row.request] + row.index + shift_top
        colour = look[row.request]["facecolor"]
        _block(axis, left + 0.03, 0.0, block_size, row.filled, 0.94, look[row.request])
        ends = [left + 0.5, row.block + shift_pool + 0.5]
        axis.annotate(
            "", (ends[1], 2.56), (ends[0], 0.84), arrowprops={"arrowstyle": "-|>", "color": colour, "linewidth": 1.3}
        )
    for name, count in lengths.items():
        own = moment[moment["request"] == name].sort_values("index")
        text = f"{name}: {own['filled'].sum()} tokens, table {own['block'].tolist()}"
        axis.text(starts[name] + shift_top + count / 2, -0.3, text, ha="center", va="center", fontsize=9, color=INK)
    axis.text(width / 2, 4.0, "block id in the pool", ha="center", va="center", fontsize=9, color=SOFT)
    axis.set_xlim(-0.2, width + 0.2)
    axis.set_ylim(4.25, -0.65)
    axis.set_xticks([])
    axis.set_yticks([0.4, 3.0], ["positions,\nin order", "slots\nin memory"])
    axis.grid(visible=False)
    axis.spines[:].set_visible(False)
    axis.tick_params(length=0)
    axis.set_xlabel(f"a box is a slot, a frame a block of {block_size}; pale: handed out or free, no token yet")
    axis.set_title(title)
    return fig


@styled
def capacity_figure(capacity: pd.DataFrame, title: str) -> Figure:
    """What a block size costs in memory: slots handed out in vain, and requests that fit, against reserving.

    Args:
        capacity: :func:`llmlab.measure.experiments.paging.capacity`.
    """
    paged = capacity[capacity["layout"] == "paged"]
    reserved = capacity[capacity["layout"] == "reserved"].iloc[0]
    fig = new_figure(9.6, 4.0)
    waste, fit = fig.subplots(1, 2)
    waste.plot(paged["block_size"], 100 * paged["waste"], marker=MARKERS[0], color=SERIES[0], label="paged")
    waste.axhline(100 * reserved["waste"], color=SERIES[1], linestyle="--", label="reserved")
    waste.set_ylim(0, 105 * max(reserved["waste"], paged["waste"].max()))
    waste.set_ylabel("slots handed out that hold no token (%)")
    fit.plot(paged["block_size"], paged["requests"], marker=MARKERS[0], color=SERIES[0], label="paged")
    fit.axhline(
        reserved["requests"], color=SERIES[1], linestyle="--", label=f"reserved, {reserved['block_size']} slots each"
    )
    fit.set_ylim(0, 1.15 * paged["requests"].max())
    fit.set_ylabel("requests that fit")
    for axis in (waste, fit):
        log_axis(axis, "x", base=2)
        axis.set_xticks(paged["block_size"])
        axis.set_xlabel("block size (tokens), log")
    fit.legend(loc="center left", bbox_to_anchor=(0.0, 0.3))
    fig.suptitle(title, x=0.01, ha="left", fontweight="bold")
    return fig


@styled
def slowdown_figure(sweep: pd.DataFrame, title: str) -> Figure:
    """Time of decode attention through tables over that of contiguous keys, by block size and order of the blocks.

    Args:
        sweep: :func:`llmlab.measure.experiments.paging.sweep_block_size`.
    """
    fig = new_figure(8.4, 4.4)
    axis = fig.subplots()
    for i, (order, rows) in enumerate(sweep[sweep["layout"] != "contiguous"].groupby("layout", sort=False)):
        x = rows["block_size"] * (0.97 if i == 0 else 1.03)  # side by side
        errors = np.abs(rows[["sure_low", "sure_high"]].to_numpy().T - rows["slowdown"].to_numpy())
        axis.errorbar(
            x,
            rows["slowdown"],
            yerr=errors,
            marker=MARKERS[i],
            color=SERIES[i],
            capsize=3,
            label=f"blocks {order} in the pool",
        )
    axis.axhline(1.0, color=INK, linewidth=1.0)
    axis.axhline(1.1, color=SOFT, linewidth=1.0, linestyle=":", label="a tenth slower")
    log_axis(axis, "x", base=2)
    axis.set_xticks(sorted(set(sweep["block_size"]) - {0}))
    top = max(1.15, sweep["sure_high"].max())
    axis.set_ylim(min(0.9, sweep["sure_low"].min() - 0.02), top + 0.03)
    axis.set_xlabel("block size (tokens), log")
    axis.set_ylabel("time over contiguous (bars: 95 % of the median)")
    axis.legend()
    axis.set_title(title)
    return fig


@styled
def fragmentation_figure(lengths: Sequence[int], block_size: int, title: str = "") -> Figure:
    """Requests of these lengths in blocks of one size: what each uses (solid) and what its last block leaves empty (pale)."""
    lengths = list(lengths)
    handed = [-(-length // block_size) * block_size for length in lengths]
    fig = new_figure(9.0, 1.6 + 0.3 * len(lengths))
    axis = fig.subplots()
    for row, (length, slots) in enumerate(zip(lengths, handed)):
        axis.barh(row, length, color=SERIES[0], height=0.7)
        if slots > length:
            axis.barh(row, slots - length, left=length, color=_EMPTY, edgecolor=SERIES[1], hatch="///", height=0.7)
        if block_size * 150 >= max(handed):  # narrower blocks would be a grey smear
            edges = np.arange(block_size, slots, block_size)
            axis.vlines(edges, row - 0.35, row + 0.35, color="white", linewidth=0.8)
    waste = 1 - sum(lengths) / sum(handed)
    axis.set_yticks(range(len(lengths)), [f"{length} tokens" for length in lengths])
    axis.invert_yaxis()
    axis.set_xlabel("slots")
    axis.grid(axis="y", visible=False)
    text = f"block size {block_size}: {sum(handed) // block_size} blocks, {waste:.1%} of the slots empty"
    axis.set_title(f"{title}: {text}" if title else text)
    return fig
