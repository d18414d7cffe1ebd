"""Figures of one step: what each stage of the pipeline moves, and what the sampler chooses from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from llmlab.viz.style import INK, SERIES, engineering, new_figure, styled

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

    from llmlab.ops.ledger import Ledger


def stage_table(ledger: Ledger) -> pd.DataFrame:
    """One row a stage in pipeline order, summed over layers: shapes of the first layer, calls, FLOPs, bytes, weight bytes.

    Columns: stage, shapes, calls, flops, bytes, weight_bytes (the part of bytes that are weights), intensity (FLOP/byte).
    """
    import pandas as pd

    rows: dict[str, dict] = {}
    for record in ledger.records:
        stage = record.stage or record.op
        row = rows.setdefault(
            stage, {"stage": stage, "shapes": _shapes(record), "calls": 0, "flops": 0, "bytes": 0, "weight_bytes": 0}
        )
        weights = sum(t.nbytes for t in record.tensors if t.name in ("weight", "bias"))
        row["calls"] += 1
        row["flops"] += record.cost.flops
        row["bytes"] += record.cost.bytes
        row["weight_bytes"] += min(weights, record.cost.bytes) if record.op != "embedding" else 0
    frame = pd.DataFrame(rows.values())
    frame["intensity"] = frame["flops"] / frame["bytes"]
    return frame


def _shapes(record: object) -> str:
    """``[34, 576] → [34, 960]``: the first argument and the first result."""
    shape = lambda role: next((list(t.shape) for t in record.tensors if t.role == role), None)
    first, out = shape("in"), shape("out")
    return f"{first} → {out}" if out is not None else f"{first} → cache"


@styled
def step_figure(steps: Sequence[tuple[str, pd.DataFrame]], title: str) -> Figure:
    """Bytes that each stage moves, weights apart from the rest, one panel a step; FLOP/byte at the end of each bar.

    Args:
        steps: ``(name, stage_table(ledger))`` of each step, with the same stages.
    """
    fig = new_figure(11.0, 0.36 * len(steps[0][1]) + 1.6)
    axes = fig.subplots(1, len(steps), sharex=True, squeeze=False)[0]
    longest = max(table["bytes"].max() for _, table in steps) / 1e6
    for axis, (name, table) in zip(axes, steps, strict=True):
        rows = range(len(table))[::-1]
        weights, others = table["weight_bytes"] / 1e6, (table["bytes"] - table["weight_bytes"]) / 1e6
        axis.barh(rows, weights, color=SERIES[0], label="weights")
        axis.barh(
            rows, others, left=weights, color=SERIES[1], hatch="///", edgecolor="white", label="activations and KV"
        )
        for y, total, intensity in zip(rows, table["bytes"] / 1e6, table["intensity"], strict=True):
            axis.text(
                total + 0.01 * longest, y, f"{engineering(intensity, digits=2)}", va="center", fontsize=8, color=INK
            )
        labels = [f"{stage}\n{shapes}" for stage, shapes in zip(table["stage"], table["shapes"], strict=True)]
        axis.set_yticks(list(rows), labels, fontsize=7.5)
        axis.set_xlim(0, longest * 1.12)
        axis.set_title(name)
        axis.set_xlabel("MB moved in the step, all layers (number: FLOP/byte)")
        axis.grid(axis="y", visible=False)
    axes[0].legend(loc="lower right")
    fig.suptitle(title, x=0.01, ha="left", fontweight="bold")
    return fig


@styled
def next_token_figure(tokens: Sequence[str], probabilities: Sequence[float], title: str) -> Figure:
    """The most likely next tokens, as bars; spaces and line ends are made visible by quotes."""
    fig = new_figure(7.5, 0.32 * len(tokens) + 1.2)
    axis = fig.subplots()
    rows = range(len(tokens))[::-1]
    axis.barh(rows, probabilities, color=SERIES[0])
    for y, p in zip(rows, probabilities, strict=True):
        axis.text(p + 0.005, y, f"{p:.3f}", va="center", fontsize=8.5, color=INK)
    axis.set_yticks(list(rows), [repr(token) for token in tokens])
    axis.set_xlim(0, max(probabilities) * 1.12)
    axis.set_xlabel("probability")
    axis.set_title(title)
    axis.grid(axis="y", visible=False)
    return fig
