"""Figures of simulated serving: their tables say what the run says, every label can be read."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pandas as pd
import pytest
from matplotlib.figure import Figure

from llmlab.measure.clock import RooflineClock
from llmlab.measure.efficiency import Efficiency
from llmlab.measure.known_models import known_config
from llmlab.measure.plan import datasheet_hardware
from llmlab.measure.serving import ServingRun
from llmlab.simulate import simulate, sweep
from llmlab.viz.simulate import (
    PARTS,
    latency_figure,
    latency_table,
    load_curve_figure,
    load_figure,
    load_table,
    step_figure,
    tradeoff_figure,
)
from llmlab.workload import synthetic

MODEL = known_config("llama-3-8b")
WORKLOAD = synthetic(60, 30.0, "uniform:50:900", "uniform:5:60", seed=1)


@pytest.fixture(scope="module")
def served() -> ServingRun:
    return simulate(MODEL, "h200", WORKLOAD)


def parts_table() -> pd.DataFrame:
    clock = RooflineClock(MODEL, datasheet_hardware("h200"), Efficiency(), tensor_parallel_size=2)
    steps = {"1 decode": ([1], [500]), "64 decodes": ([1] * 64, [500] * 64), "a chunk of 512": ([512], [2048])}
    rows = {n: clock.parts(np.array(q), np.array(s), np.ones(len(q), bool)) for n, (q, s) in steps.items()}
    return pd.DataFrame(rows).T


def pareto() -> Figure:
    axes = {"tensor_parallel_size": [1, 2], "max_num_seqs": [4, 16, 60]}
    table = sweep(axes, model=MODEL, hardware="h200", workload=synthetic(60, prompt=100, output=20))
    labels = {"itl_p50": "between two tokens (s)", "output_tokens_per_s": "output tokens/s",
              "tensor_parallel_size": "{} GPUs", "max_num_seqs": "sequences"}  # fmt: skip
    return tradeoff_figure(table, "itl_p50", "output_tokens_per_s", "tensor_parallel_size", "max_num_seqs",
                           title="Pareto", labels=labels, limits={"itl_p50": 0.01})  # fmt: skip


def curve() -> Figure:
    table = sweep({"max_num_batched_tokens": [64, 512, 4096]}, model=MODEL, hardware="h200", workload=WORKLOAD)
    labels = {"max_num_batched_tokens": "token budget", "ttft_p99": "TTFT, p99", "itl_p99": "ITL, p99"}
    return load_curve_figure(table, "max_num_batched_tokens", ["ttft_p99", "itl_p99"], title="Budget", labels=labels)


FIGURES: dict[str, Callable[[], Figure]] = {
    "step": lambda: step_figure(parts_table(), "What a step's time is made of"),
    "load": lambda: load_figure(load_table(simulate(MODEL, "h200", WORKLOAD), 50), "Load over time"),
    "latency": lambda: latency_figure(
        latency_table({"one": simulate(MODEL, "h200", WORKLOAD), "two": simulate(MODEL, "h200", WORKLOAD)}),
        "Latencies",
        {"ttft": 0.1, "itl": 0.02},
    ),
    "pareto": pareto,
    "curve": curve,
}


@pytest.fixture(scope="module", params=FIGURES)
def figure(request: pytest.FixtureRequest) -> Figure:
    return FIGURES[request.param]()


def test_every_figure_can_be_read(figure: Figure, legible: Callable[[Figure], None]) -> None:
    legible(figure)


def test_load_is_averaged_over_time() -> None:
    """Steps of 1 s with 2 running, of 3 s with 6, then 2 s of nothing and 2 s with 1; in stretches of 2 s."""
    steps = pd.DataFrame(
        {
            "time": [1.0, 4.0, 8.0],
            "seconds": [1.0, 3.0, 2.0],
            "num_running": [2, 6, 1],
            "num_waiting": [0, 4, 0],
            "kv_cache_usage": [0.1, 0.5, 0.2],
            "replica": 0,
        }
    )
    table = load_table(ServingRun(pd.DataFrame(), steps, np.array([]), np.array([])), 4)
    assert table["time"].tolist() == [1, 3, 5, 7]
    assert table["num_running"].tolist() == [4, 6, 0, 1]
    assert table["num_waiting"].tolist() == [2, 4, 0, 0]
    assert table["kv_cache_usage"].tolist() == pytest.approx([0.3, 0.5, 0, 0.2])
    assert table["step_seconds"].tolist() == pytest.approx([2, 3, 0, 2])


def test_copies_are_summed() -> None:
    one = simulate(MODEL, "h200", WORKLOAD, data_parallel_size=2)
    table, steps = load_table(one, 7), one.steps
    width = steps["time"].max() / 7
    assert table["num_running"].sum() * width == pytest.approx((steps["num_running"] * steps["seconds"]).sum())
    assert table["kv_cache_usage"].sum() * width * 2 == pytest.approx(
        (steps["kv_cache_usage"] * steps["seconds"]).sum()
    )


def test_latencies_are_the_runs_quantiles(served: ServingRun) -> None:
    table = latency_table({"run": served}).set_index(["latency", "share"])["seconds"]
    assert table["ttft"].iloc[-1] == served.requests["ttft"].max()
    assert table["itl"].iloc[-1] == served.itl.max()
    assert table["itl"].iloc[0] == served.itl.min()


def test_bars_add_up_to_the_clock() -> None:
    parts = parts_table()
    axis = step_figure(parts, "t").axes[0]
    assert len(axis.containers) == len(PARTS)
    ends = [bar.get_x() + bar.get_width() for bar in axis.containers[-1]]
    assert ends == pytest.approx((1e3 * parts.sum(axis=1)).tolist())
