"""Numbers of the claims on rooflines, from sweeps whose answers are known by hand."""

from __future__ import annotations

import pandas as pd
import pytest
import torch

from llmlab.measure.experiments import roofline
from llmlab.measure.known_models import known_config


def test_claim_numbers_from_a_sweep() -> None:
    rows = [
        {"num_reqs": b, "context": c, "linear_flops": 2.0 * b, "linear_bytes": 1.0, "linear_seconds": 1.0, "tokens_per_s": b,
         "attention_flops": 6.0 * b * c, "attention_bytes": 2.0 * b * c, "attention_seconds": 1e-3 * b * c, "other_seconds": 0.0}
        for b in (1, 4) for c in (100, 200)
    ]  # fmt: skip
    sweep = pd.DataFrame(rows)
    at_100 = sweep[sweep["context"] == 100]
    assert roofline.batch_lifts(at_100) == pytest.approx(
        {
            "batch_gain": 4,
            "linear_intensity_gain": 4,
            "linear_rate_gain": 4,
            "attention_intensity_gain": 1,
            "attention_rate_gain": 1,
        }
    )
    assert roofline.batching(at_100) == pytest.approx({"throughput_gain": 4, "gain_in_ops": 4 * 1.1 / 1.4})
    with pytest.raises(ValueError, match="one context"):
        roofline.batching(sweep)
    numbers = roofline.decode_attention(sweep, known_config("smollm2-135m-instruct"), torch.bfloat16)
    assert numbers == pytest.approx(
        {"predicted_intensity": 3, "least_intensity": 3, "most_intensity": 3, "context_exponent": 1}
    )
    slopes = roofline.context_slopes(sweep)
    assert slopes.to_dict("records") == [{"num_reqs": 4, "from": 100, "to": 200, "slope": pytest.approx(1)}]
    with pytest.raises(ValueError, match="two contexts"):
        roofline.context_slopes(at_100)
    with pytest.raises(ValueError, match="batch 1"):
        roofline.recorded_step(pd.Series({"num_reqs": 4}))


def test_shares_of_the_claimed_side() -> None:
    points = pd.DataFrame(
        [("prefill", "compute", 3.0), ("prefill", "memory", 1.0), ("decode", "memory", 2.0)],
        columns=["phase", "bound", "seconds"],
    )
    assert roofline.bound_shares(points) == {"prefill_compute_share": 0.75, "decode_memory_share": 1.0}


def test_a_step_from_a_recording() -> None:
    row = pd.Series({"num_reqs": 1, "seconds": 0.01, "eager_seconds": 0.016})
    assert roofline.recorded_step(row) == {"eager_seconds": 0.016, "graph_seconds": 0.01, "recorded": 1.0}
    assert roofline.recorded_step(row, 0.005)["graph_seconds"] == 0.005
    assert roofline.recorded_step(row, recorded=False)["recorded"] == 0.0
