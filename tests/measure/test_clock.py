"""Clocks: the roofline's equals the cost model at any shape, and a calibrated one finds the weights that made its samples."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from llmlab.config import ModelConfig
from llmlab.measure.clock import CalibratedClock, ConstantClock, RooflineClock, StepSample, step_features
from llmlab.measure.cost import least_seconds, step_costs
from llmlab.measure.efficiency import PERFECT, Efficiency
from llmlab.measure.known_models import known_config
from llmlab.measure.plan import datasheet_hardware
from llmlab.ops.attention import visible_keys, visible_pairs

H200 = datasheet_hardware("H200")
ONE, BOTH = np.array([True]), np.array([True, True])
SIZES = {
    "vocab_size": 50,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
CONFIGS = {
    "llama-3-8b": known_config("llama-3-8b"),
    "tied": known_config("smollm2-135m-instruct"),
    "windows": ModelConfig.from_dict({**SIZES, "architectures": ["MistralForCausalLM"], "sliding_window": 5}),
    "some windows": ModelConfig.from_dict(
        {
            **SIZES,
            "architectures": ["Qwen2ForCausalLM"],
            "sliding_window": 7,
            "use_sliding_window": True,
            "max_window_layers": 1,
        }
    ),
    "qk norm": ModelConfig.from_dict({**SIZES, "architectures": ["Qwen3ForCausalLM"], "head_dim": 16}),
    "mha": ModelConfig.from_dict({**SIZES, "architectures": ["LlamaForCausalLM"], "num_key_value_heads": 6}),
}
STEPS = st.lists(st.tuples(st.integers(1, 300), st.integers(0, 900)), min_size=1, max_size=8)
CLOCKS = {name: RooflineClock(config, H200, PERFECT, block_size=4) for name, config in CONFIGS.items()}


@pytest.mark.parametrize("name", CONFIGS)
@given(step=STEPS)
@settings(max_examples=12, deadline=None)
def test_the_roofline_clock_is_the_cost_models_bound(name: str, step: list[tuple[int, int]]) -> None:
    query_lens = np.array([q for q, _ in step])
    seq_lens = query_lens + np.array([c for _, c in step])
    costs = step_costs(CONFIGS[name], query_lens.tolist(), seq_lens.tolist(), block_size=4)
    want = least_seconds(costs, H200.roof)
    assert CLOCKS[name].seconds(query_lens, seq_lens, np.ones(len(step), bool)) == pytest.approx(want, rel=1e-12)


@given(step=STEPS, window=st.one_of(st.none(), st.integers(1, 400)))
def test_features_count_what_attention_sees(step: list[tuple[int, int]], window: int | None) -> None:
    query_lens = np.array([q for q, _ in step])
    seq_lens = query_lens + np.array([c for _, c in step])
    both = list(zip(query_lens.tolist(), seq_lens.tolist()))
    keys = [visible_keys(q, s, window) for q, s in both]
    want = [1, sum(query_lens), len(step), sum(visible_pairs(q, s, window) for q, s in both), sum(keys)]
    assert step_features(query_lens, seq_lens, 16, window).tolist() == [*want, sum(-(-k // 16) for k in keys)]


def test_efficiency_divides_and_overhead_adds() -> None:
    q, s = np.array([1, 1]), np.array([500, 700])
    least = RooflineClock(CONFIGS["llama-3-8b"], H200, PERFECT).seconds(q, s, BOTH)
    half = RooflineClock(CONFIGS["llama-3-8b"], H200, Efficiency(0.5, 0.5, step_overhead=0.25)).seconds(q, s, BOTH)
    assert half == pytest.approx(2 * least + 0.25, rel=1e-12)


def test_partial_prefills_do_not_meet_the_lm_head() -> None:
    config = CONFIGS["llama-3-8b"]
    q, s = np.full(3, 200), np.full(3, 900)
    clock = RooflineClock(config, H200, PERFECT)
    seconds = [clock.seconds(q, s, np.arange(3) < n) for n in range(4)]
    assert seconds == sorted(seconds)
    head = 2 * config.hidden_size * config.vocab_size  # bf16 bytes that a step reads only if somebody is sampled
    assert seconds[1] - seconds[0] >= head / H200.roof.bandwidth
    assert seconds[3] - seconds[1] < 0.01 * head / H200.roof.bandwidth


def test_a_constant_clock() -> None:
    assert ConstantClock(2.0, 0.5).seconds(np.array([3, 1]), np.array([3, 9]), BOTH) == 4.0


def samples(base: RooflineClock, weights: np.ndarray, count: int = 60) -> list[StepSample]:
    rng = np.random.default_rng(0)
    made = []
    truth = CalibratedClock(base, weights)
    for i in range(count):
        reqs = int(rng.integers(1, 30))
        query = np.ones(reqs, np.int64) if i % 2 else rng.integers(1, 400, reqs)
        seq, sampled = query + rng.integers(0, 2000, reqs), np.arange(reqs) > 0
        made.append(StepSample(query, seq, sampled, truth.seconds(query, seq, sampled)))
    return made


@pytest.mark.parametrize(
    "weights", [(1e-3, 2e-3, 1e-5, 1.3, 2.0, 4.0), (0.0, 0.0, 0.0, 1.3, 2.0, 0.0), (5e-4, 0.0, 1e-5, 1.0, 0.0, 1.0)]
)
def test_a_fit_finds_the_weights_behind_exact_samples(weights: tuple[float, ...]) -> None:
    base = CLOCKS["tied"]
    found = CalibratedClock.fit(base, samples(base, np.array(weights))).weights
    assert found == pytest.approx(np.array(weights), rel=1e-5, abs=1e-9)


def test_disturbed_steps_do_not_drag_the_fit_along() -> None:
    base, weights = CLOCKS["tied"], np.array((1e-3, 2e-3, 1e-5, 1.3, 2.0, 4.0))
    made = samples(base, weights)
    disturbed = [replace(s, seconds=s.seconds * (3 if i % 7 == 0 else 1)) for i, s in enumerate(made)]
    found = CalibratedClock.fit(base, disturbed)
    errors = [found.seconds(s.query_lens, s.seq_lens, s.sampled) / s.seconds - 1 for s in made]
    assert np.abs(errors).max() < 0.03


def test_a_fit_is_scipys_nonnegative_one() -> None:
    from scipy.optimize import nnls

    from llmlab.measure.clock import _nonnegative_least_squares

    rng = np.random.default_rng(1)
    for _ in range(30):
        a, b = rng.standard_normal((20, 6)), rng.standard_normal(20)
        assert _nonnegative_least_squares(a, b) == pytest.approx(nnls(a, b)[0], abs=1e-8)


def test_a_fit_refuses_what_it_cannot_use() -> None:
    base = CLOCKS["tied"]
    some = samples(base, np.ones(6), 8)
    with pytest.raises(ValueError, match="5 steps are too few"):
        CalibratedClock.fit(base, some[:5])
    with pytest.raises(ValueError, match="positive time"):
        CalibratedClock.fit(base, [*some, StepSample(np.array([1]), np.array([1]), ONE, 0.0)])


def test_a_dtype_counts_its_bytes() -> None:
    q, s = np.array([1]), np.array([100])
    single = RooflineClock(
        CONFIGS["llama-3-8b"], datasheet_hardware("H200", torch.float32), PERFECT, dtype=torch.float32
    )
    both = single.seconds(q, s, ONE) / RooflineClock(CONFIGS["llama-3-8b"], H200, PERFECT).seconds(q, s, ONE)
    assert both == pytest.approx(2.0, rel=1e-3)
