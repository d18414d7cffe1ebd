"""Figures of benchmark runs: every engine and number is there, nothing is clipped, data and drawing agree."""

from __future__ import annotations

import pandas as pd
import pytest

from llmlab.bench.result import BenchResult, EngineRun, Turn
from llmlab.measure.datasheets import Roof
from llmlab.measure.experiments.step_split import PARTS
from llmlab.viz.bench import (
    PART_LOOKS,
    bench_figure,
    memory_order_figure,
    paths_figure,
    step_split_figure,
    variants_figure,
)

ENGINES = ("llmlab", "hf", "llamacpp", "vllm", "openvino")


def result() -> BenchResult:
    workloads = {"prefill512": 8000.0, "decode1": 120.0}
    turns = [
        Turn(w, e, r, floor * (0.2 + 0.1 * i + 0.02 * r))
        for w, floor in workloads.items()
        for i, e in enumerate(ENGINES)
        for r in range(4)
    ]
    engines = [EngineRun(e, "1", 1.0, 500_000_000 + i) for i, e in enumerate(ENGINES)]
    ceilings = {"flops": 2e12, "bandwidth": 4e10}
    return BenchResult("m", "bfloat16", None, "2026-01-02", "x", "x", ceilings, workloads, engines, turns, {}, {})


def test_bars_are_shares_of_the_floor():
    fig = bench_figure(result())
    (axis,) = fig.axes
    heights = sorted(round(bar.get_height(), 2) for bar in axis.patches)
    assert heights == sorted([100 * round(0.2 + 0.1 * i + 0.04, 3) for i in range(5)] * 2)
    labels = [text.get_text() for text in axis.get_legend().get_texts()]
    assert [label.split()[0] for label in labels] == list(ENGINES) and all("MB" in label for label in labels)
    assert axis.get_ylim()[0] == 0 and "% of what the machine allows" in axis.get_ylabel()
    fig.draw_without_rendering()
    inside = axis.get_window_extent()
    assert all(text.get_window_extent().y1 <= inside.y1 + 1 for text in axis.texts)


def test_the_split_adds_up_to_the_whole_step():
    rows = [
        {"num_reqs": n, "part": p, "seconds": 1e-3 * (i + 1), "share": (i + 1) / 36}
        for n in (1, 8)
        for i, p in enumerate(PARTS)
    ]
    fig = step_split_figure(pd.DataFrame(rows), "t")
    whole, rest = fig.axes
    tops = [bar.get_y() + bar.get_height() for bar in whole.patches]
    assert max(tops) == pytest.approx(100)
    assert max(bar.get_y() + bar.get_height() for bar in rest.patches) == pytest.approx(100 * (1 - 3 / 36))
    assert set(PART_LOOKS) == set(PARTS)


def test_memory_order_frames_the_first_vector():
    pytest.importorskip("numba")
    from llmlab.measure.experiments.cpu_paths import memory_order

    rows, panels, _ = memory_order_figure(memory_order(), "t").axes
    (frame,) = rows.patches
    assert (frame.get_width(), frame.get_height()) == (16, 1)
    (frame,) = panels.patches
    assert (frame.get_width(), frame.get_height()) == (1, 16)


def test_paths_are_rates_under_their_limits():
    roof = Roof("m", "bfloat16", "memory", 2e12, 4e10, "measured")
    table = pd.DataFrame(
        {"tokens": t, "path": p, "seconds": s, "low": s * 0.9, "high": s * 1.1, "flops": 1e9 * t, "weight_bytes": 1e9}
        for t, s in ((1, 0.1), (512, 1.0))
        for p in ("a", "b")
    )
    left, right = paths_figure(table, roof, "t").axes
    assert left.get_lines()[0].get_ydata().tolist() == pytest.approx([10, 1])
    assert right.get_lines()[0].get_ydata().tolist() == pytest.approx([0.01, 0.512])
    assert left.get_ylim()[1] > 40 and right.get_ylim()[1] > 2 and left.get_ylim()[0] == right.get_ylim()[0] == 0


def test_variants_show_milliseconds_and_predictions():
    table = pd.DataFrame(
        {
            "work": w,
            "size": n,
            "variant": v,
            "seconds": 0.01 * k,
            "low": 0.009 * k,
            "high": 0.011 * k,
            "predicted": 0.005,
        }
        for w, n in (("decode", 1), ("prefill", 512))
        for k, v in enumerate(("x", "y"), 1)
    )
    for axis in variants_figure(table, "t").axes:
        assert [bar.get_height() for bar in axis.patches] == pytest.approx([10, 20])
        assert axis.get_ylim()[0] == 0
