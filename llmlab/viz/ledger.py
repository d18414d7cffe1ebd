"""The shape ledger as a picture: what one layer of one step reads and writes, tensor by tensor."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from matplotlib.patches import Patch

from llmlab.viz.style import INK, engineering, log_axis, new_figure, styled

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

_KINDS = {"weight": "#332288", "KV cache": "#cc6677", "activation": "#44aa99", "index": "#999933"}


def ledger_bytes(table: pd.DataFrame, layer: int) -> pd.DataFrame:
    """One row a tensor of one layer of ``Ledger.table()``: its kind, its size, and a label that says what and how large.

    A cache counts as allocated, not as read: how much of it a step touches is in the op's cost.

    Raises ValueError if the ledger has no such layer.
    """
    rows = table[table["layer"] == layer]
    if rows.empty:
        raise ValueError(f"the ledger has no layer {layer}")
    rows = rows[["stage", "op", "role", "tensor", "symbolic", "shape", "dtype", "bytes"]].copy()
    rows["kind"] = [_kind(tensor, dtype) for tensor, dtype in zip(rows["tensor"], rows["dtype"], strict=True)]
    return rows.reset_index(drop=True)


@styled
def ledger_figure(rows: pd.DataFrame, title: str) -> Figure:
    """Bytes of every tensor of one layer, in the order of the step (from :func:`ledger_bytes`), on a logarithmic axis."""
    rows = rows[rows["bytes"] > 0]
    fig = new_figure(9.2, 1.4 + 0.23 * len(rows))
    axis = fig.add_subplot()
    y = np.arange(len(rows))[::-1]
    left = rows["bytes"].min() / 3
    colours = [_KINDS[kind] for kind in rows["kind"]]
    hatches = ["///" if role == "out" else "" for role in rows["role"]]
    axis.barh(y, rows["bytes"] - left, 0.78, left, color=colours, edgecolor="white", hatch=hatches, linewidth=0.4)
    for place, row in zip(y, rows.itertuples(), strict=True):
        shape = " × ".join(str(size) for size in row.shape)
        axis.text(row.bytes, place, f" {engineering(row.bytes, 'B')}  [{shape}]", va="center", fontsize=7.5, color=INK)
    axis.set_yticks(y, [f"{row.stage} · {row.tensor}" for row in rows.itertuples()], fontsize=8)
    log_axis(axis, "x", "B")
    axis.set_xlim(left, rows["bytes"].max() * 60)
    axis.set_ylim(-0.7, len(rows) - 0.3)
    axis.set_xlabel("size of the tensor (bytes), log")
    axis.grid(axis="y", visible=False)
    handles = [Patch(facecolor=colour, label=kind) for kind, colour in _KINDS.items() if kind in set(rows["kind"])]
    handles.append(Patch(facecolor="white", edgecolor=INK, hatch="///", label="result"))
    fig.legend(handles=handles, loc="outside lower center", ncols=len(handles))
    axis.set_title(title)
    return fig


def _kind(tensor: str, dtype: str) -> str:
    if tensor == "weight":
        return "weight"
    if tensor in ("key_cache", "value_cache"):
        return "KV cache"
    return "index" if dtype.startswith("int") else "activation"
