"""Figures of the flat batch: where each token of a step stands and goes, and what a padded batch would compute in vain."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
from matplotlib.patches import Patch, Rectangle
from matplotlib.ticker import MaxNLocator

from llmlab.viz.style import INK, LINE, SERIES, SOFT, new_figure, styled

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_HATCHES = ("", "///", "...", "\\\\\\", "xxx")
_PAD = {"facecolor": "#f3f4f6", "edgecolor": LINE, "hatch": "xx"}


@styled
def flat_batch_figure(
    tokens: pd.DataFrame, computed: Mapping[str, Sequence[int]], block_size: int, num_blocks: int
) -> Figure:
    """One step three times: as a padded rectangle, as the flat row that is computed, and as slots of the KV cache.

    Args:
        tokens: :func:`llmlab.measure.experiments.batching.token_table` of the batch.
        computed: request → slots of its tokens from earlier steps, in order of position.
        num_blocks: blocks of the cache to draw.
    """
    names = list(dict.fromkeys(tokens["request"]))
    longest = int(tokens.groupby("request").size().max())
    fig = new_figure(10.5, 0.38 * (len(names) + num_blocks) + 3.4)
    heights = [len(names) + 1, 2.2, num_blocks + 0.6]
    padded, flat, cache = fig.subplots(3, 1, gridspec_kw={"height_ratios": heights})
    for y, name in enumerate(names):
        mine = tokens[tokens["request"] == name]
        for x in range(longest):
            label = str(mine["position"].iloc[x]) if x < len(mine) else ""
            _cell(padded, x, y, names.index(name) if label else None, label)
    in_vain = len(names) * longest - len(tokens)
    share = in_vain / (len(names) * longest)
    padded.set_title(
        f"Padded [{len(names)}, {longest}]: {in_vain} of {len(names) * longest} cells are padding ({share:.0%})"
    )
    _frame(padded, longest, len(names), "column", names)

    for token in tokens.itertuples():
        _cell(flat, token.row, 0, names.index(token.request), str(token.position))
    starts = [0, *tokens.groupby("request", sort=False).size().cumsum()]
    flat.set_title(f"Flat [{len(tokens)}]: query_start_loc = {starts}; in the cells: positions")
    _frame(flat, len(tokens), 1, "row of the batch", [""])
    flat.set_xticks(starts, starts)
    for start in starts:
        flat.axvline(start, color=INK, linewidth=2.0)

    new = dict(zip(tokens["slot"], zip(tokens["request"], tokens["position"])))
    old = {slot: (name, position) for name, slots in computed.items() for position, slot in enumerate(slots)}
    for slot in range(num_blocks * block_size):
        block, offset = divmod(slot, block_size)
        name, position = new.get(slot, old.get(slot, ("", "")))
        _cell(
            cache, offset, block, names.index(name) if name else None, str(position), faint=slot in old, empty=not name
        )
    cache.set_title("slot_mapping: where each token's K and V go (faint: computed in earlier steps; white: free)")
    _frame(cache, block_size, num_blocks, "offset in the block", [f"block {block}" for block in range(num_blocks)])
    handles = [
        Patch(facecolor=SERIES[i], edgecolor="white", hatch=_HATCHES[i % len(_HATCHES)], label=name)
        for i, name in enumerate(names)
    ]
    fig.legend(handles=[*handles, Patch(**_PAD, label="padding")], loc="outside lower center", ncols=len(names) + 1)
    return fig


def _cell(
    axis: Axes, x: float, y: float, series: int | None, label: str, faint: bool = False, empty: bool = False
) -> None:
    if series is None:
        style = {"facecolor": "white", "edgecolor": LINE} if empty else _PAD
        axis.add_patch(Rectangle((x, y), 1, 1, linewidth=0.8, **style))
        return
    colour = SERIES[series]
    axis.add_patch(
        Rectangle(
            (x, y),
            1,
            1,
            facecolor=colour,
            edgecolor="white",
            hatch=_HATCHES[series % len(_HATCHES)],
            alpha=0.35 if faint else 1.0,
            linewidth=0.8,
        )
    )
    box = {"boxstyle": "round,pad=0.12", "facecolor": "white", "edgecolor": "none"}
    axis.text(x + 0.5, y + 0.5, label, ha="center", va="center", fontsize=7.5, color=INK, bbox=box)


def _frame(axis: Axes, width: int, height: int, label: str, rows: Sequence[str]) -> None:
    axis.set_xlim(-0.05, width + 0.05)
    axis.set_ylim(height, 0)
    axis.set_xticks(np.arange(width) + 0.5, range(width))
    axis.set_yticks(np.arange(height) + 0.5, rows)
    axis.set_xlabel(label)
    axis.grid(visible=False)
    axis.tick_params(length=0)
    for side in ("left", "bottom"):
        axis.spines[side].set_visible(False)


@styled
def padding_figure(steps: Mapping[str, Sequence[tuple[int, int]]], table: pd.DataFrame) -> Figure:
    """Each step as bars of its query lengths inside the rectangle that padding would make of it, one panel a step.

    Args:
        steps: name → ``(query_len, seq_len)`` of each request, the longest first.
        table: :func:`llmlab.measure.experiments.batching.padding_table` of the same steps.
    """
    columns = min(3, len(steps))
    rows = -(-len(steps) // columns)
    fig = new_figure(10.5, 2.5 * rows + 0.6)
    axes = list(fig.subplots(rows, columns, squeeze=False).flat)
    for axis, (name, step) in zip(axes, steps.items()):
        lengths = [query for query, _ in step]
        x = np.arange(len(lengths))
        axis.bar(x, lengths, 1.0, color=SERIES[0], edgecolor="white", linewidth=0.3)
        axis.bar(x, [max(lengths) - n for n in lengths], 1.0, bottom=lengths, linewidth=0.0, **_PAD)
        axis.set_xlim(-0.5, len(lengths) - 0.5)
        axis.set_ylim(0, max(lengths) * 1.02)
        axis.set_title(f"{name}:\n{table.loc[name, 'flop_waste']:.0%} of the FLOPs in vain", fontsize=10)
        axis.grid(visible=False)
        axis.set_xticks([])
        axis.yaxis.set_major_locator(MaxNLocator(5, integer=True))
    for axis in axes[len(steps) :]:
        axis.remove()
    for i, axis in enumerate(axes[: len(steps)]):
        if i % columns == 0:
            axis.set_ylabel("query tokens")
        if i + columns >= len(steps):
            axis.set_xlabel("requests of the step", color=SOFT)
    handles = [Patch(facecolor=SERIES[0], label="tokens"), Patch(**_PAD, label="padding")]
    fig.legend(handles=handles, loc="outside lower center", ncols=2)
    return fig
