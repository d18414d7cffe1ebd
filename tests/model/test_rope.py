"""The rotary table far out: float32 throughout, whatever the model's dtype is; every position has a row of its own."""

from __future__ import annotations

import pytest
import torch

from llmlab import ops
from llmlab.config import ModelConfig, RopeConfig
from llmlab.model.llama import LlamaForCausalLM
from llmlab.model.rope import RotaryTable, inverse_frequencies
from llmlab.model.weights import random_weights

LLAMA31 = RopeConfig(
    "llama3",
    500000.0,
    128,
    131072,
    {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192},
)
PLAIN = RopeConfig("default", 10000.0, 128, 131072)


@pytest.mark.parametrize(("position", "error"), [(4097, 4e-4), (131071, 1e-2)])
def test_phases_far_out_are_those_of_float64(position, error):
    """Half-precision positions or angles would be wrong by whole radians there; float32 leaves 1e-4 and 4e-3."""
    table = RotaryTable(PLAIN, position + 1, torch.device("cpu"))
    exact = position / 10000.0 ** (torch.arange(0, 128, 2, dtype=torch.float64) / 128)
    cos, sin = table.cos_sin_cache[position].double().chunk(2)
    assert max((cos - exact.cos()).abs().max(), (sin - exact.sin()).abs().max()) < error


def test_neighbouring_positions_differ():
    """In bfloat16, 257 is 256 and 1003 is 1004."""
    rows = RotaryTable(PLAIN, 1100, torch.device("cpu")).cos_sin_cache
    assert (rows.diff(dim=0).abs().amax(1) > 0.1).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_half_precision_model_has_a_float32_table(random_hf_model, dtype):
    config = ModelConfig.from_pretrained(random_hf_model(num_hidden_layers=1)[1])
    weights = random_weights(config, dtype, torch.device("cpu"))
    rotary = LlamaForCausalLM(config, weights, ops.bind("reference", "cpu"), 64).rotary
    assert rotary.cos_sin_cache.dtype == rotary.inv_freq.dtype == torch.float32
    assert torch.equal(rotary.cos_sin_cache, RotaryTable(config.rope, 64, torch.device("cpu")).cos_sin_cache)


def test_llama3_scaling_keeps_the_fast_and_slows_the_slow_by_its_factor():
    scaled, plain = inverse_frequencies(LLAMA31), inverse_frequencies(RopeConfig("default", 500000.0, 128, 131072))
    assert torch.equal(scaled[:29], plain[:29])
    torch.testing.assert_close(scaled[35:], plain[35:] / 8, rtol=1e-6, atol=0)
    between = scaled[29:35] / plain[29:35]
    assert ((between > 1 / 8) & (between < 1)).all() and (between.diff() < 0).all()
