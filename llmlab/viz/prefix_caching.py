"""Pictures of prefix caching: the chain of block hashes, the order in which cached blocks are reused, and the time saved."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
from matplotlib.patches import FancyArrowPatch, Patch, Rectangle

from llmlab.viz.style import INK, LINE, MARKERS, SERIES, SOFT, new_figure, styled

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_HELD, _CACHED, _EMPTY = "#88ccee", "#ddcc77", "#ffffff"


@styled
def hash_chain_figure(table: pd.DataFrame, title: str) -> Figure:
    """Blocks as boxes, an arrow from each to its parent; blocks of equal hash are one box, with the names of all that share it.

    Args:
        table: from :func:`llmlab.measure.experiments.prefix_caching.hash_chain`, three requests or so.
    """
    requests = list(dict.fromkeys(table["request"]))
    row_of = {request: i for i, request in enumerate(requests)}
    nodes: dict[tuple, tuple[int, int]] = {}
    columns = int(table["index"].max()) + 1
    fig = new_figure(11.0, 1.3 + 1.2 * len(requests))
    axis = fig.subplots()
    root = (-1.0, (len(requests) - 1) / 2)
    axis.text(*root, "NONE_HASH", ha="center", va="center", fontsize=8, color=SOFT)
    places = {table["parent"].iloc[0]: root}
    for request in requests:
        for block in table[table["request"] == request].itertuples():
            key = (block.index, block.hash) if block.hash else (request, "partial")
            if key in nodes:
                continue
            nodes[key] = (block.index, row_of[request])
            same = table[(table["hash"] == block.hash) & (table["index"] == block.index)] if block.hash else [0]
            shared = len(same) > 1
            _block(axis, block, row_of[request], shared, ", ".join(same["request"]) if shared else request)
            x, y = places[block.parent]
            start = (block.index - 0.42, row_of[request])
            end = (x + 0.42 if x >= 0 else x + 0.24, y)
            axis.add_patch(FancyArrowPatch(start, end, arrowstyle="-|>", mutation_scale=10, color=SOFT, linewidth=1,
                                           shrinkA=0, shrinkB=0))  # fmt: skip
            if block.hash:
                places[block.hash] = (block.index, row_of[request])
    axis.set_xlim(-1.3, columns - 0.5)
    axis.set_ylim(len(requests) - 0.5, -0.5)
    axis.set_xticks(range(columns), [f"block {i}" for i in range(columns)])
    axis.set_yticks([])
    axis.set_xlabel("arrows point to the parent, whose hash goes into the block's own")
    axis.tick_params(length=0)
    axis.grid(visible=False)
    for side in ("left", "bottom"):
        axis.spines[side].set_visible(False)
    axis.set_title(title)
    named = (
        (_CACHED, "-", "the same block for several"),
        (_HELD, "-", "one request's own"),
        (_EMPTY, "--", "not full"),
    )
    handles = [Patch(facecolor=colour, edgecolor=INK, linestyle=line, label=label) for colour, line, label in named]
    fig.legend(handles=handles, loc="outside lower center", ncols=3, frameon=False)
    return fig


def _block(axis: Axes, block: object, row: int, shared: bool, names: str) -> None:
    partial = not block.hash
    axis.add_patch(
        Rectangle(
            (block.index - 0.42, row - 0.3),
            0.84,
            0.6,
            facecolor=_EMPTY if partial else _CACHED if shared else _HELD,
            edgecolor=SOFT if partial else INK,
            linestyle="--" if partial else "-",
        )
    )
    tokens = " ".join(str(t) for t in block.tokens)
    hash_line = "not full: no hash" if partial else f"hash {block.hash}…"
    axis.text(block.index, row - 0.13, f"{names}:  {tokens}", ha="center", va="center", fontsize=8.5, color=INK)
    axis.text(
        block.index, row + 0.13, hash_line, ha="center", va="center", fontsize=7.5, color=SOFT if partial else INK
    )


@styled
def pool_figure(moments: Mapping[str, Sequence[tuple[int, str, str]]], title: str) -> Figure:
    """The pool at several moments, one row each: blocks in use first, then the free queue, next to be reused on its left.

    Args:
        moments: label → ``(block id, content, "held" or "free")`` of every block
            (:func:`llmlab.measure.experiments.prefix_caching.pool_state`).
    """
    fig = new_figure(11.0, 1.1 + 0.62 * len(moments))
    axis = fig.subplots()
    width = max(map(len, moments.values()))
    for row, blocks in enumerate(moments.values()):
        held = sum(state == "held" for _, _, state in blocks)
        for i, (block_id, content, state) in enumerate(blocks):
            x = i + (0.6 if state == "free" else 0)
            colour = _HELD if state == "held" else _CACHED if content else _EMPTY
            axis.add_patch(Rectangle((x, row - 0.36), 0.92, 0.72, facecolor=colour, edgecolor=INK, linewidth=0.8))
            axis.text(x + 0.46, row - 0.13, content or "·", ha="center", va="center", fontsize=8.5, color=INK)
            axis.text(x + 0.46, row + 0.18, f"#{block_id}", ha="center", va="center", fontsize=6.5, color=SOFT)
        axis.plot([held + 0.26] * 2, [row - 0.42, row + 0.42], color=SERIES[1], linewidth=1.6)
    axis.set_xlim(-0.2, width + 0.8)
    axis.set_ylim(len(moments) - 0.4, -0.6)
    axis.set_yticks(range(len(moments)), list(moments))
    axis.set_xticks([])
    axis.set_xlabel("in use  |  free, in the order of reuse: the leftmost goes first")
    axis.tick_params(length=0)
    axis.grid(visible=False)
    for side in ("left", "bottom"):
        axis.spines[side].set_visible(False)
    axis.set_title(title)
    named = ((_HELD, "in use"), (_CACHED, "free, content still cached"), (_EMPTY, "free, nothing to find"))
    handles = [Patch(facecolor=colour, edgecolor=INK, label=label) for colour, label in named]
    fig.legend(handles=handles, loc="outside lower center", ncols=3, frameon=False)
    return fig


@styled
def savings_figure(table: pd.DataFrame, prompt_len: int, title: str) -> Figure:
    """Time to first token over the part of the prompt that was cached, against a line along which only the rest costs anything.

    Args:
        table: from :func:`llmlab.measure.experiments.prefix_caching.savings`.
    """
    fig = new_figure(8.0, 4.2)
    axis = fig.subplots()
    cold = 1e3 * table["seconds"].iloc[0]
    axis.plot([0, prompt_len], [cold, 0], color=SOFT, linestyle=":", label="if only uncached tokens cost")
    error = 1e3 * np.array([table["seconds"] - table["low"], table["high"] - table["seconds"]])
    axis.errorbar(table["cached"], 1e3 * table["seconds"], yerr=error, marker=MARKERS[0], color=SERIES[0], capsize=3,
                  label="measured: median, 10th to 90th percentile")  # fmt: skip
    axis.fill_between(table["cached"], 1e3 * table["seconds"], cold, color=LINE, alpha=0.5, label="saved")
    axis.set_ylim(bottom=0)
    axis.set_xlabel(f"tokens of the prompt found in the cache (of {prompt_len})")
    axis.set_ylabel("time to first token (ms)")
    axis.set_title(title)
    axis.legend(loc="lower left")
    return fig
