"""The step timeline: which request computed which tokens in which step, and what that did to the block pool.

Record with :func:`record_schedule`, look with :func:`timeline_figure`. A cell is one request in one step; its colour says what
its tokens were: part of a prompt, a decode, or tokens computed again after a preemption.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from matplotlib.colors import ListedColormap
from matplotlib.patches import Patch

from llmlab.viz.style import INK, SERIES, SOFT, new_figure, styled

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from llmlab.engine.plan import SchedulerOutput
    from llmlab.engine.scheduler import Scheduler

KINDS = ("prefill", "decode", "recompute")
_COLOURS = ("#88ccee", "#332288", "#cc6677")
_LABELS = {"prefill": "prompt tokens", "decode": "decode", "recompute": "computed again"}
_WRITTEN_CELLS = 600  # up to so many, token counts are written into the cells


@dataclass
class Schedule:
    """What was recorded: ``tokens``, one row a request and step; ``steps``, one row a step; as lists of dicts."""

    token_budget: int
    num_blocks: int
    tokens: list[dict] = field(default_factory=list)
    steps: list[dict] = field(default_factory=list)
    events: list[dict] = field(default_factory=list)

    def token_table(self) -> pd.DataFrame:
        """Columns: step, request_id, first_position, num_tokens, kind ("prefill", "decode" or "recompute")."""
        import pandas as pd

        return pd.DataFrame(self.tokens, columns=["step", "request_id", "first_position", "num_tokens", "kind"])

    def step_table(self) -> pd.DataFrame:
        """Columns: step, blocks_used, num_running, num_waiting."""
        import pandas as pd

        return pd.DataFrame(self.steps, columns=["step", "blocks_used", "num_running", "num_waiting"])

    def event_table(self) -> pd.DataFrame:
        """Columns: step, request_id, event ("hit" or "preempted"), num_tokens (found in the cache, for hits)."""
        import pandas as pd

        return pd.DataFrame(self.events, columns=["step", "request_id", "event", "num_tokens"])

    def add(self, output: SchedulerOutput, scheduler: Scheduler) -> None:
        for request_id, count in output.num_scheduled_tokens.items():
            request, first = scheduler.requests[request_id], output.num_computed_tokens[request_id]
            if first < request.num_tokens_to_recompute:
                kind = "recompute"
            else:
                kind = "prefill" if first < request.num_prompt_tokens else "decode"
            self.tokens.append(
                {
                    "step": output.step,
                    "request_id": request_id,
                    "first_position": first,
                    "num_tokens": count,
                    "kind": kind,
                }
            )
        for request_id, count in output.num_cached_tokens.items():
            if count:
                self.events.append({"step": output.step, "request_id": request_id, "event": "hit", "num_tokens": count})
        for request_id in output.preempted_req_ids:
            self.events.append({"step": output.step, "request_id": request_id, "event": "preempted", "num_tokens": 0})
        pool = scheduler.kv_cache_manager.block_pool
        self.steps.append(
            {
                "step": output.step,
                "blocks_used": pool.num_blocks - pool.num_free,
                "num_running": len(scheduler.running),
                "num_waiting": len(scheduler.waiting),
            }
        )


@contextmanager
def record_schedule(scheduler: Scheduler) -> Iterator[Schedule]:
    """Write down every step that the scheduler plans inside the block, and the pool's state right after planning."""
    schedule = Schedule(scheduler.config.max_num_batched_tokens, scheduler.kv_cache_manager.block_pool.num_blocks)
    plan = scheduler.schedule

    def watched() -> SchedulerOutput:
        output = plan()
        schedule.add(output, scheduler)
        return output

    scheduler.schedule = watched  # type: ignore[method-assign]  # this object's alone, and only inside the block
    try:
        yield schedule
    finally:
        del scheduler.schedule


@styled
def timeline_figure(schedule: Schedule, title: str) -> Figure:
    """Three panels over the same steps: requests (rows, in order of arrival), tokens against the budget, blocks in use.

    Raises ValueError if nothing was recorded.
    """
    if not schedule.tokens:
        raise ValueError("nothing was recorded: no step ran inside record_schedule")
    tokens, steps, events = schedule.token_table(), schedule.step_table(), schedule.event_table()
    requests = list(dict.fromkeys(tokens["request_id"]))
    height = min(max(0.26 * len(requests), 1.6), 7.5)
    fig = new_figure(11.0, height + 3.6)
    top, middle, bottom = fig.subplots(3, 1, sharex=True, height_ratios=[height, 1.3, 1.3])
    _draw_requests(top, tokens, events, requests, steps["step"])
    _draw_tokens(middle, tokens, steps["step"], schedule.token_budget)
    bottom.step(steps["step"], steps["blocks_used"], where="mid", color=SERIES[3])
    bottom.axhline(schedule.num_blocks, color=SOFT, linestyle="--", linewidth=1)
    bottom.set_ylim(0, schedule.num_blocks * 1.12)
    bottom.set_ylabel("KV blocks\nin use")
    bottom.set_xlabel("step")
    bottom.annotate(f"all {schedule.num_blocks}", (1, schedule.num_blocks), xycoords=("axes fraction", "data"),
                    xytext=(-4, 2), textcoords="offset points", ha="right", fontsize=8, color=SOFT)  # fmt: skip
    top.set_title(title)
    return fig


def _draw_requests(
    axis: Axes, tokens: pd.DataFrame, events: pd.DataFrame, requests: list[str], steps: pd.Series
) -> None:
    first, last = int(steps.min()), int(steps.max())
    row_of = {request_id: i for i, request_id in enumerate(requests)}
    grid = np.full((len(requests), last - first + 1), np.nan)
    for cell in tokens.itertuples():
        grid[row_of[cell.request_id], cell.step - first] = KINDS.index(cell.kind)
    axis.pcolormesh(
        np.arange(first, last + 2) - 0.5,
        np.arange(len(requests) + 1) - 0.5,
        np.ma.masked_invalid(grid),
        cmap=ListedColormap(_COLOURS),
        vmin=0,
        vmax=len(KINDS) - 1,
        edgecolors="white",
        linewidth=0.6 if grid.size <= 4000 else 0.0,
    )
    if grid.size > 4000:  # too many cells for a frame each; neighbouring requests must not melt into one
        axis.hlines(np.arange(1, len(requests)) - 0.5, first - 0.5, last + 0.5, color="white", linewidth=0.7)
    if grid.size <= _WRITTEN_CELLS and last - first < 40:
        for cell in tokens.itertuples():
            dark = cell.kind != "prefill"
            axis.text(cell.step, row_of[cell.request_id], str(cell.num_tokens), ha="center", va="center", fontsize=7,
                      color="white" if dark else INK)  # fmt: skip
    marks = {"preempted": ("X", "#b42318", "preempted"), "hit": ("o", "#117733", "prefix-cache hit")}
    handles = [
        Patch(color=colour, label=_LABELS[kind])
        for kind, colour in zip(KINDS, _COLOURS)
        if (tokens["kind"] == kind).any()
    ]
    for event, (marker, colour, label) in marks.items():
        chosen = events[events["event"] == event]
        chosen = chosen[chosen["request_id"].isin(row_of)]
        if len(chosen):
            x = chosen["step"] - (0.5 if event == "hit" else 0.0)
            points = axis.scatter(x, chosen["request_id"].map(row_of), marker=marker, s=28, color=colour, zorder=3, label=label,
                                  edgecolors="white", linewidths=0.5)  # fmt: skip
            handles.append(points)
    axis.set_ylim(len(requests) - 0.5, -0.5)
    axis.set_xlim(first - 0.8, last + 0.8)
    axis.grid(visible=False)
    every = max(1, -(-len(requests) // 24))
    axis.set_yticks(range(0, len(requests), every), requests[::every], fontsize=8)
    axis.set_ylabel("request")
    axis.legend(
        handles=handles, loc="upper left", bbox_to_anchor=(0, -0.01), ncols=len(handles), frameon=False, borderaxespad=0
    )


def _draw_tokens(axis: Axes, tokens: pd.DataFrame, steps: pd.Series, budget: int) -> None:
    below = np.zeros(len(steps))
    for kind, colour in zip(KINDS, _COLOURS, strict=True):
        counts = (
            tokens[tokens["kind"] == kind].groupby("step")["num_tokens"].sum().reindex(steps, fill_value=0).to_numpy()
        )
        axis.bar(steps, counts, bottom=below, width=0.9, color=colour)
        below += counts
    axis.set_ylabel("tokens")
    if budget <= 4 * below.max():  # a budget that is never near would press the bars flat
        axis.axhline(budget, color=SOFT, linestyle="--", linewidth=1)
        axis.set_ylim(0, budget * 1.15)
        axis.annotate("token budget", (1, budget), xycoords=("axes fraction", "data"), xytext=(-4, 2),
                      textcoords="offset points", ha="right", fontsize=8, color=SOFT)  # fmt: skip
