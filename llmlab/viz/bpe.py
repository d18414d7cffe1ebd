"""Figures of byte-pair encoding: the tree of merges in one piece of text, and what a larger vocabulary gains."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from llmlab.viz.style import INK, LINE, MARKERS, SERIES, SOFT, log_axis, new_figure, styled

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def readable_bytes(token: bytes) -> str:
    """A token as a reader sees it: UTF-8 with visible spaces and line ends, or hexadecimal if it is no whole text.

    Characters that the figures' font does not have are written by their number: U+1F999.
    """
    try:
        text = token.decode()
    except UnicodeDecodeError:
        return token.hex(" ")
    text = text.replace(" ", "␣").replace("\n", "⏎").replace("\t", "⇥")
    text = "".join(c if ord(c) < 0x2E80 else f"U+{ord(c):X}" for c in text)
    return text if text.isprintable() and text else token.hex(" ")


@styled
def merge_tree_figure(steps: pd.DataFrame, piece: str) -> Figure:
    """How one piece became tokens: bytes at the bottom, one row a merge, its rank beside it; what is left on top are the tokens.

    Args:
        steps: :func:`llmlab.measure.experiments.bpe.merge_steps` of the piece.
    """
    raw = piece.encode()
    height = len(steps) + 1
    fig = new_figure(max(5.5, 0.62 * len(raw) + 1.6), 0.46 * height + 1.5)
    axis = fig.add_subplot()
    centre = {(i, i + 1): (i + 0.5, 0.0) for i in range(len(raw))}
    labels = {(i, i + 1): raw[i : i + 1] for i in range(len(raw))}
    roots = dict.fromkeys(centre, None)
    for row in steps.itertuples():
        span = (row.start, row.end)
        centre[span] = ((row.start + row.end) / 2, float(row.step))
        labels[span] = row.token
        for child in ((row.start, row.middle), (row.middle, row.end)):
            roots.pop(child)
            (x, y), (top_x, top_y) = centre[child], centre[span]
            axis.plot([x, x, top_x], [y, top_y, top_y], color=SOFT, linewidth=1.2, zorder=1)
        roots[span] = None
        axis.text(len(raw) + 0.35, row.step, f"{row.rank:,}", va="center", ha="right", fontsize=8.5, color=INK)
    axis.text(len(raw) + 0.35, height, "rank", va="center", ha="right", fontsize=8.5, color=SOFT)
    for span, (x, y) in centre.items():
        _node(axis, x, y, readable_bytes(labels[span]), final=span in roots)
    axis.set_xlim(-0.1, len(raw) + 0.45)
    axis.set_ylim(-0.6, height + 0.4)
    axis.set_yticks(range(height), ["bytes", *map(str, range(1, height))])
    axis.set_xticks([])
    axis.set_ylabel("merge step")
    axis.set_xlabel("position in the piece (bytes)")
    axis.grid(visible=False)
    count = "one token" if len(roots) == 1 else f"{len(roots)} tokens"
    axis.set_title(f"{readable_bytes(raw)}: {len(raw)} bytes, {len(steps)} merges, {count}")
    return fig


def _node(axis: Axes, x: float, y: float, label: str, final: bool) -> None:
    colour = SERIES[2] if final else "white"
    axis.text(
        x,
        y,
        label,
        ha="center",
        va="center",
        fontsize=9,
        family="monospace",
        color="white" if final else INK,
        fontweight="bold" if final else "normal",
        bbox={"boxstyle": "round,pad=0.25", "facecolor": colour, "edgecolor": SERIES[2] if final else LINE},
        zorder=3,
    )


@styled
def compression_figure(table: pd.DataFrame, ceilings: Mapping[str, float], others: pd.DataFrame) -> Figure:
    """Bytes a token over the size of the vocabulary, one line a text.

    Args:
        table: columns text, vocab_size, bytes_per_token (:func:`llmlab.measure.experiments.bpe.compression`).
        ceilings: text → bytes a piece: no vocabulary can do better, because no token crosses the border of two pieces.
        others: the same columns and ``tokenizer``: how other tokenizers do on these texts.
    """
    fig = new_figure(8.6, 4.8)
    axis = fig.add_subplot()
    colours = dict(zip(table["text"].unique(), SERIES))
    for marker, (name, rows) in zip(MARKERS, table.groupby("text", sort=False)):
        axis.plot(rows["vocab_size"], rows["bytes_per_token"], marker=marker, color=colours[name], label=name)
    for name, ceiling in ceilings.items():
        axis.axhline(ceiling, color=colours[name], linestyle=(0, (4, 3)), linewidth=1.1, label=f"{name}: bytes a piece")
    for row in others.itertuples():
        axis.plot(
            row.vocab_size,
            row.bytes_per_token,
            marker="*",
            markersize=13,
            color=colours[row.text],
            linestyle="",
            label=f"{row.text}: {row.tokenizer}",
        )
    log_axis(axis, "x", base=2)
    sizes = sorted({2 ** round(np.log2(size)) for size in (*table["vocab_size"], *others["vocab_size"])})
    axis.set_xticks(sizes, [f"{size:,}" for size in sizes], rotation=30)
    axis.set_xlim(220, max(*table["vocab_size"], *others["vocab_size"]) * 1.5)
    axis.set_ylim(0, max(*ceilings.values(), *table["bytes_per_token"], *others["bytes_per_token"]) * 1.1)
    axis.set_xlabel("size of the vocabulary (tokens), log")
    axis.set_ylabel("bytes a token")
    axis.set_title("What a larger vocabulary gains, on text like its training text and on other text")
    axis.legend(loc="center left", bbox_to_anchor=(1.01, 0.5))
    return fig
