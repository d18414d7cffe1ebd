"""From sweeps and recordings of steps to the numbers that the claims on rooflines and batching read."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from llmlab.config import ModelConfig

if TYPE_CHECKING:
    import pandas as pd


def bound_shares(points: pd.DataFrame) -> dict[str, float]:
    """C14: the share of each phase's time in ops on the side of the ridge that is claimed.

    Args:
        points: columns phase ("prefill", "decode"), bound ("compute", "memory"), seconds.
    """
    sums = points.groupby(["phase", "bound"])["seconds"].sum()
    share = lambda phase, side: float(sums.get((phase, side), 0.0) / sums[phase].sum())
    return {"prefill_compute_share": share("prefill", "compute"), "decode_memory_share": share("decode", "memory")}


def batch_lifts(sweep: pd.DataFrame) -> dict[str, float]:
    """C15: from batch 1 to the largest batch of one context (rows of :func:`llmlab.measure.roofline.sweep_decode`)."""
    first, last = _ends(sweep)
    intensity = lambda row, kind: row[f"{kind}_flops"] / row[f"{kind}_bytes"]
    rate = lambda row, kind: row[f"{kind}_flops"] / row[f"{kind}_seconds"]
    return {"batch_gain": float(last["num_reqs"] / first["num_reqs"])} | {
        f"{kind}_{what}_gain": float(of(last, kind) / of(first, kind))
        for kind in ("linear", "attention")
        for what, of in (("intensity", intensity), ("rate", rate))
    }


def batching(sweep: pd.DataFrame) -> dict[str, float]:
    """C01: tokens/s at the largest batch over batch 1, and the same in ops alone."""
    first, last = _ends(sweep)
    in_ops = lambda row: row[["linear_seconds", "attention_seconds", "other_seconds"]].sum()
    return {
        "throughput_gain": float(last["tokens_per_s"] / first["tokens_per_s"]),
        "gain_in_ops": float(last["num_reqs"] / first["num_reqs"] * in_ops(first) / in_ops(last)),
    }


def decode_attention(sweep: pd.DataFrame, config: ModelConfig, dtype: torch.dtype) -> dict[str, float]:
    """C16: intensity of decode attention over a sweep, and how its time grows with the context at the largest batch that has
    every context of the sweep."""
    busiest = _busiest(sweep)
    slope = np.polyfit(np.log(busiest["context"].astype(float)), np.log(busiest["attention_seconds"].astype(float)), 1)[
        0
    ]
    intensity = sweep["attention_flops"] / sweep["attention_bytes"]
    return {
        "predicted_intensity": 2 * config.num_heads / config.num_kv_heads / dtype.itemsize,
        "least_intensity": float(intensity.min()),
        "most_intensity": float(intensity.max()),
        "context_exponent": float(slope),
    }


def context_slopes(sweep: pd.DataFrame) -> pd.DataFrame:
    """How attention's time grows from one context to the next at that batch: num_reqs, from, to (tokens), slope of logarithms.

    1 is linear; less is a start that costs more than what follows.
    """
    import pandas as pd

    busiest = _busiest(sweep)
    contexts, seconds = (busiest[name].to_numpy(float) for name in ("context", "attention_seconds"))
    slope = np.diff(np.log(seconds)) / np.diff(np.log(contexts))
    return pd.DataFrame(
        {
            "num_reqs": int(busiest["num_reqs"].iloc[0]),
            "from": contexts[:-1].astype(int),
            "to": contexts[1:].astype(int),
            "slope": slope,
        }
    )


def recorded_step(row: pd.Series, graph_seconds: float | None = None, recorded: bool = True) -> dict[str, float]:
    """C38: a step at batch 1, op by op and as the engine runs it (or as a graph plays it, if that time is given)."""
    if row["num_reqs"] != 1:
        raise ValueError(f"the claim is about batch 1, got a step of {row['num_reqs']} requests")
    seconds = row["seconds"] if graph_seconds is None else graph_seconds
    return {"eager_seconds": float(row["eager_seconds"]), "graph_seconds": float(seconds), "recorded": float(recorded)}


def _busiest(sweep: pd.DataFrame) -> pd.DataFrame:
    contexts = sweep["context"].nunique()
    complete = sweep.groupby("num_reqs").filter(lambda rows: rows["context"].nunique() == contexts)
    busiest = complete[complete["num_reqs"] == complete["num_reqs"].max()].sort_values("context")
    if len(busiest) < 2:
        raise ValueError("needs a batch that was run at two contexts at least")
    return busiest


def _ends(sweep: pd.DataFrame) -> tuple[pd.Series, pd.Series]:
    rows = sweep.sort_values("num_reqs")
    if rows["context"].nunique() != 1 or rows["num_reqs"].iloc[0] != 1 or len(rows) < 2:
        raise ValueError("needs several batches of one context, the smallest of one request")
    return rows.iloc[0], rows.iloc[-1]
