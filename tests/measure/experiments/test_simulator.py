"""The harness that holds the simulator against a real engine: what it records, what it calls a kept promise."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from llmlab import LLM
from llmlab.measure.clock import CalibratedClock, RooflineClock
from llmlab.measure.efficiency import PERFECT
from llmlab.measure.experiments import simulator as experiment
from llmlab.measure.plan import datasheet_hardware
from llmlab.workload import synthetic


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM("tiny", max_num_seqs=5, max_num_batched_tokens=512)


@pytest.fixture
def base(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> RooflineClock:
    """In place of this machine's ceilings, which take ten seconds to measure: a fit does not mind."""
    clock = RooflineClock(llm.config, datasheet_hardware("h200"), PERFECT)
    monkeypatch.setattr(experiment, "roofline_clock", lambda llm: clock)
    return clock


def test_calibration_sees_every_batch_size_and_both_kinds_of_step(llm: LLM, base: RooflineClock) -> None:
    clock, steps = experiment.calibrate(llm, max_num_seqs=5)
    assert isinstance(clock, CalibratedClock) and clock.base is base
    assert (clock.weights >= 0).all() and clock.weights.any()
    table = experiment.fit_errors(clock, steps)
    decodes = table[table["kind"] == "decode"]["requests"].value_counts()
    assert set(range(1, 6)) <= set(decodes[decodes >= 4].index)
    assert table[table["kind"] == "mixed"]["tokens"].max() > 0.9 * 512  # nearly the whole budget
    assert (table["measured"] > 0).all() and (table["modelled"] > 0).all()
    assert not llm.engine.has_unfinished_requests()


def test_validation_compares_like_with_like(llm: LLM, base: RooflineClock) -> None:
    workloads = experiment.validation_workloads(llm, 6, longest_output=9)
    assert not workloads["all at once"].arrivals.any() and workloads["Poisson, half load"].arrivals[0] > 0
    clock = CalibratedClock(base, [1e-3, 0, 0, 1, 1, 1])
    table, runs = experiment.validate(llm, workloads, clock, repeats=2)
    assert table.index.get_level_values("workload").unique().tolist() == ["all at once", "Poisson, half load"]
    real, simulated = runs["all at once"]
    same = ["prompt_len", "output_len", "cached_tokens", "preemptions"]
    pd.testing.assert_frame_equal(real.requests[same], simulated.requests[same])
    assert len(real.steps) == len(simulated.steps)
    row = table.loc[("all at once", "itl_p50")]
    assert row["error"] == pytest.approx(row["simulated"] / row["real"] - 1)
    assert llm.engine.scheduler.schedule.__func__ is type(llm.engine.scheduler).schedule  # nothing of the harness stays


def test_a_busy_engine_is_not_measured(llm: LLM) -> None:
    llm.engine.add_request("in the way", [1, 2, 3])
    with pytest.raises(ValueError, match="the engine is busy"):
        experiment.replay(llm, synthetic(1, prompt=3, output=1, vocab_size=10))
    llm.engine.discard_request("in the way")


def test_a_promise_is_kept_or_not() -> None:
    real = {"output_tokens_per_s": 100.0, "ttft_p50": 1.0, "itl_p50": 0.01, "itl_p99": 0.1, "latency_p50": 2.0}
    simulated = real | {"output_tokens_per_s": 115.1, "ttft_p50": 0.76, "itl_p50": 0.0126, "itl_p99": 0.9}
    table = experiment.compare(real, simulated)
    assert table["holds"].tolist() == ["no", "yes", "no", "", ""]
    assert table["error"].tolist() == pytest.approx([0.151, -0.24, 0.26, 8.0, 0.0])
    assert np.isnan(table.loc["itl_p99", "promised"])
