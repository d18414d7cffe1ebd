"""Pictures of batching: a flat batch on its way into the paged cache, and what request-level batching wastes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np
from matplotlib.colors import to_rgb
from matplotlib.patches import Patch, Rectangle

from llmlab.viz.style import INK, LINE, MARKERS, SERIES, SOFT, log_axis, new_figure, styled

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from llmlab.engine.batch import Batch


def slot_table(batch: Batch, block_size: int) -> pd.DataFrame:
    """Every token that the step's requests have in the cache. One row a token of a request, in the order of positions:

    request, position, block, slot, row (its place in the flat batch; −1 if it was computed in a step before).
    """
    import pandas as pd

    rows, starts = [], batch.query_start_loc.tolist()
    for r, request in enumerate(batch.req_ids):
        length = int(batch.seq_lens[r])
        first = length - (starts[r + 1] - starts[r])
        for position in range(length):
            block = int(batch.block_table[r, position // block_size])
            row = starts[r] + position - first if position >= first else -1
            rows.append((request, position, block, block * block_size + position % block_size, row))
    return pd.DataFrame(rows, columns=["request", "position", "block", "slot", "row"])


@styled
def batch_figure(table: pd.DataFrame, block_size: int, title: str) -> Figure:
    """A step's tokens, one after another, and the slots of the paged cache that they are written to.

    Args:
        table: from :func:`slot_table`. Blocks that no request holds are left out.
    """
    requests = list(dict.fromkeys(table["request"]))
    colour_of = dict(zip(requests, (SERIES * len(requests)), strict=False))
    blocks = sorted(table["block"].unique())
    pitch = block_size + 1
    width = len(blocks) * pitch - 1
    new = table[table["row"] >= 0].sort_values("row")
    fig = new_figure(11.0, 3.6)
    axis = fig.subplots()
    cell, high, low = min(width / len(new), 2.5), 5.0, 0.0
    left = (width - cell * len(new)) / 2
    for token in new.itertuples():
        x, target = left + cell * token.row, blocks.index(token.block) * pitch + token.slot % block_size
        _cell(axis, x, high, cell, colour_of[token.request], f"{token.request}{token.position}", True)
        axis.plot([x + cell / 2, target + 0.5], [high, low + 1], color=colour_of[token.request], linewidth=1, zorder=0)
    for slot, holders in table.groupby("slot"):
        x = blocks.index(slot // block_size) * pitch + slot % block_size
        names = "".join(holders["request"]) + str(holders["position"].iloc[0])
        written = holders[holders["row"] >= 0]
        owner = (holders if written.empty else written)["request"].iloc[0]
        _cell(axis, x, low, 1, colour_of[owner], names, not written.empty)
    for i in range(len(blocks)):
        axis.add_patch(Rectangle((i * pitch, low), block_size, 1, fill=False, edgecolor=INK, linewidth=1.2, zorder=3))
    axis.set_xlim(-0.5, width + 0.5)
    axis.set_ylim(-0.2, high + 1.2)
    axis.set_xticks([i * pitch + block_size / 2 for i in range(len(blocks))], [f"block {b}" for b in blocks])
    axis.set_yticks([high + 0.5, low + 0.5], ["flat batch", "KV cache"])
    axis.set_xlabel(f"blocks in use, {block_size} slots each")
    axis.tick_params(length=0)
    axis.grid(visible=False)
    for side in ("left", "bottom"):
        axis.spines[side].set_visible(False)
    axis.set_title(title)
    handles = [Patch(facecolor=colour_of[r], label=f"request {r}") for r in requests]
    handles.append(Patch(facecolor=_pale(SOFT), edgecolor=LINE, label="computed before"))
    fig.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False)
    return fig


def _cell(axis: Axes, x: float, y: float, width: float, colour: str, text: str, strong: bool) -> None:
    fill = colour if strong else _pale(colour)
    axis.add_patch(Rectangle((x, y), width, 1, facecolor=fill, edgecolor="white", linewidth=0.8))
    dark = np.dot(to_rgb(fill), (0.299, 0.587, 0.114)) < 0.6
    axis.text(x + width / 2, y + 0.5, text, ha="center", va="center", fontsize=7.5 if len(text) < 3 else 6,
              color="white" if dark else INK)  # fmt: skip


def _pale(colour: str) -> tuple[float, ...]:
    return tuple(0.75 + 0.25 * c for c in to_rgb(colour))


@styled
def slots_figure(table: pd.DataFrame, title: str) -> Figure:
    """Share of slot-steps that give a token, over the spread of output lengths.

    Args:
        table: columns spread, static, continuous (:func:`llmlab.measure.experiments.scheduling.slots_by_spread`).
    """
    fig = new_figure(8.0, 4.2)
    axis = fig.subplots()
    for i, way in enumerate(("continuous", "static")):
        axis.plot(table["spread"], 100 * table[way], marker=MARKERS[i], color=SERIES[i], label=f"{way} batching")
    axis.fill_between(table["spread"], 100 * table["static"], 100 * table["continuous"], color=SERIES[1], alpha=0.12)
    axis.set_ylim(0, 105)
    axis.set_xlabel("spread of output lengths: uniform within mean · (1 ± spread)")
    axis.set_ylabel("slot-steps that gave a token (%)")
    axis.set_title(title)
    axis.legend(loc="lower left")
    return fig


@styled
def throughput_figure(table: pd.DataFrame, title: str) -> Figure:
    """Left: tokens/s over the batch, against a straight line through batch 1. Right: where an eager step's time goes.

    Args:
        table: from :func:`llmlab.measure.experiments.scheduling.throughput_by_batch`.
    """
    fig = new_figure(10.5, 4.2)
    left, right = fig.subplots(1, 2)
    reqs = table["num_reqs"]
    rate, error = table["tokens_per_s"], [reqs / table["seconds"] - reqs / table["high"], reqs / table["low"]]
    error[1] = error[1] - rate
    ideal = rate.iloc[0] / reqs.iloc[0] * reqs
    left.plot(reqs, ideal, color=SOFT, linestyle=":", label="batch 1 times the batch")
    left.errorbar(reqs, rate, yerr=np.clip(error, 0, None), marker="o", color=SERIES[0], capsize=3, label="engine")
    for which in ("x", "y"):
        log_axis(left, which, base=2 if which == "x" else 10)
    left.set_xticks(list(reqs), [str(r) for r in reqs])
    left.set_xlabel("requests in the step, log")
    left.set_ylabel("tokens/s, log")
    left.set_title(title)
    left.legend(loc="upper left")
    places = np.arange(len(table))
    inside, outside = 1e3 * table["op_seconds"], 1e3 * table["outside_seconds"]
    right.bar(places, inside, color=SERIES[0], label="inside ops")
    right.bar(
        places,
        outside,
        bottom=inside,
        color=SERIES[1],
        hatch="//",
        edgecolor="white",
        label="outside of any op, recorder included",
    )
    right.set_xticks(places, [str(r) for r in reqs])
    right.set_xlabel("requests in the step")
    right.set_ylabel("a step, op by op (ms)")
    right.set_title("A step's time")
    right.legend(loc="upper left")
    return fig


@styled
def waiting_figure(served: Mapping[str, pd.DataFrame], title: str) -> Figure:
    """When each request waited and when it ran: one panel a way of batching, one bar a request, on the same clock.

    Args:
        served: way → table from :func:`llmlab.measure.experiments.scheduling.serve`.
    """
    tallest = max(len(table) for table in served.values())
    fig = new_figure(10.5, 1.4 + 0.14 * tallest)
    panels = np.atleast_1d(fig.subplots(1, len(served), sharey=True, sharex=True))
    for axis, (way, table) in zip(panels, served.items(), strict=True):
        rows = np.arange(len(table))
        axis.barh(rows, table["first_token"], color=LINE, height=0.8, label="until the first token")
        axis.barh(rows, table["finished"] - table["first_token"], left=table["first_token"], color=SERIES[0], height=0.8,
                  label="until the last")  # fmt: skip
        end = table["finished"].max()
        axis.axvline(end, color=SERIES[1], linestyle="--", linewidth=1)
        axis.set_title(f"{way}: all done after {end:.2f} s")
        axis.set_xlabel("seconds since all arrived")
        axis.grid(axis="y", visible=False)
    panels[0].set_ylim(tallest - 0.4, -0.6)
    panels[0].set_ylabel("request, in order of arrival")
    fig.suptitle(title, x=0.01, ha="left", fontsize=11, fontweight="bold")
    fig.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=2, frameon=False)
    return fig


@styled
def thrashing_figure(tables: Mapping[str, pd.DataFrame], title: str) -> Figure:
    """Tokens computed again for each token computed once, over the size of the pool: one panel a setting, one line a policy.

    Args:
        tables: setting → table from :func:`llmlab.measure.experiments.scheduling.thrashing`.
    """
    fig = new_figure(10.5, 4.2)
    panels = np.atleast_1d(fig.subplots(1, len(tables)))
    for axis, (setting, table) in zip(panels, tables.items(), strict=True):
        sums = table.groupby(["policy", "num_blocks"])[["recomputed", "useful"]].sum()
        share = sums["recomputed"] / sums["useful"]
        for i, policy in enumerate(dict.fromkeys(table["policy"])):
            line = share[policy]
            style = ("-", "--", ":")[i % 3]  # lines may lie on one another
            axis.plot(line.index, line, marker=MARKERS[i], color=SERIES[i], linestyle=style, label=policy)
        log_axis(axis, "x", base=2)
        axis.set_xticks(sorted(table["num_blocks"].unique()), [str(n) for n in sorted(table["num_blocks"].unique())])
        axis.set_xlabel("blocks in the pool, log")
        axis.set_title(setting)
        axis.set_ylim(bottom=0)
    panels[0].set_ylabel("tokens computed again\nper token computed once")
    panels[-1].legend(loc="upper right")
    fig.suptitle(title, x=0.01, ha="left", fontsize=11, fontweight="bold")
    return fig
