"""Parallel plans, by hand: shares of a rank, seconds of collectives, blocks that are left."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from llmlab.config import ModelConfig
from llmlab.measure.clock import RooflineClock
from llmlab.measure.cost import parameters
from llmlab.measure.datasheets import DATASHEETS
from llmlab.measure.efficiency import PERFECT, Efficiency
from llmlab.measure.known_models import known_config
from llmlab.measure.plan import (
    all_gather_seconds,
    all_reduce_seconds,
    datasheet_hardware,
    kv_blocks,
    shard_config,
    weight_bytes,
)

LLAMA_8B, LLAMA_70B = known_config("llama-3-8b"), known_config("llama-3-70b")
H200 = datasheet_hardware("h200")


@pytest.mark.parametrize("config", [LLAMA_8B, LLAMA_70B], ids=["8b", "70b"])
@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_a_rank_holds_its_share(config: ModelConfig, tp: int) -> None:
    whole, rank = parameters(config), parameters(shard_config(config, tp))
    for group in ("QKV", "O", "gate+up", "down", "head", "embedding"):
        assert rank[group] * tp == whole[group]
    assert rank["norms"] == whole["norms"]


def test_llama_3_70b_weighs_141_gigabytes() -> None:
    assert weight_bytes(LLAMA_70B, torch.bfloat16) == 2 * 70_553_706_496


def test_kv_heads_are_shared_by_ranks_when_there_are_too_few() -> None:
    assert [shard_config(LLAMA_8B, tp).num_kv_heads for tp in (1, 2, 8, 16, 32)] == [8, 4, 1, 1, 1]


@pytest.mark.parametrize(
    ("config", "tp", "message"),
    [
        (LLAMA_8B, 3, "does not divide the model's 32 attention heads"),
        (LLAMA_8B, 64, "does not divide the model's 32 attention heads"),
        (LLAMA_8B, -1, "must be an integer of at least 1, got -1"),
        (LLAMA_8B, 2.0, "must be an integer of at least 1, got 2.0"),
        (known_config("smollm2-135m-instruct"), 9, "tensor_parallel_size=9 does not divide intermediate_size=1536"),
    ],
)
def test_what_cannot_be_split_is_refused(config: ModelConfig, tp: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        shard_config(config, tp)


def test_heads_that_fit_no_kv_heads() -> None:
    sizes = {
        "vocab_size": 8,
        "hidden_size": 48,
        "intermediate_size": 48,
        "num_hidden_layers": 1,
        "num_attention_heads": 6,
    }
    config = ModelConfig.from_dict({"architectures": ["LlamaForCausalLM"], **sizes, "num_key_value_heads": 2})
    with pytest.raises(ValueError, match="tensor_parallel_size=3 and the model's 2 KV heads"):
        shard_config(config, 3)


def test_collectives_of_a_decode_step_by_hand() -> None:
    """Llama-3-70B, 8 ranks, 32 tokens: 161 all-reduces of 32·8192 bf16 over 450 GB/s · 0.7, and the logits' all-gather."""
    efficiency = Efficiency(link=0.7, link_latency=5e-6)
    clock = RooflineClock(LLAMA_70B, H200, efficiency, tensor_parallel_size=8)
    q, s = np.ones(32, np.int64), np.full(32, 1000)
    bandwidth = 450e9 * 0.7
    reduced = 5e-6 + 32 * 8192 * 2 * 2 * 7 / 8 / bandwidth
    gathered = 5e-6 + 32 * 128256 * 2 * 7 / 8 / bandwidth
    parts = clock.parts(q, s, np.ones(32, bool))
    assert parts["communication"] == pytest.approx(161 * reduced + gathered, rel=1e-12)
    alone = RooflineClock(LLAMA_70B, H200, efficiency).parts(q, s, np.ones(32, bool))
    assert alone["communication"] == 0
    assert alone["linear"] / parts["linear"] == pytest.approx(8, rel=0.01)
    assert alone["attention"] / parts["attention"] == pytest.approx(8, rel=0.01)


def test_one_rank_tells_nobody_anything() -> None:
    assert all_reduce_seconds(1e9, 1, 1e9, 1.0) == all_gather_seconds(1e9, 1, 1e9, 1.0) == 0
    assert all_reduce_seconds(1e9, 2, 1e9, 0.0) == 1.0
    assert all_gather_seconds(1e9, 4, 1e9, 0.0) == 0.75


def test_blocks_left_on_an_h200_by_hand() -> None:
    """0.9 · 141 GB less 16.06 GB of weights and the activations of 2048 tokens; a token's KV takes 131,072 bytes."""
    activations = max(2048 * (2 * 4096 + 3 * 14336) * 2, 256 * 128256 * 4)
    left = 0.9 * 141e9 - 2 * 8_030_261_248 - activations
    assert kv_blocks(LLAMA_8B, H200) == int(left // (16 * 131_072))
    assert kv_blocks(LLAMA_8B, H200, block_size=32) == int(left // (32 * 131_072))
    assert kv_blocks(LLAMA_8B, H200, tensor_parallel_size=8) > 8 * kv_blocks(LLAMA_8B, H200)


def test_a_model_that_does_not_fit_says_by_how_much() -> None:
    with pytest.raises(ValueError, match=r"141.1 GB of weights .* H200 SXM has 126.9 GB \(90% of 141\)"):
        kv_blocks(LLAMA_70B, H200)
    assert kv_blocks(LLAMA_70B, H200, tensor_parallel_size=2) > 0


def test_names_of_gpus() -> None:
    assert {datasheet_hardware(name).name for name in DATASHEETS} == set(DATASHEETS)
    assert datasheet_hardware("h200").name == "H200 SXM"
    assert datasheet_hardware("H200").roof.source == "datasheet"
    for wrong in ("", "h", "V100"):
        with pytest.raises(ValueError, match="no single GPU is called"):
            datasheet_hardware(wrong)


@pytest.mark.parametrize(
    "shares",
    [{"flops": 0.0}, {"bandwidth": 1.1}, {"link": -1.0}, {"step_overhead": -1e-3}, {"link_latency": float("inf")}],
)
def test_an_impossible_efficiency_is_refused(shares: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(shares))):
        Efficiency(**shares)


def test_perfect_is_the_roof_itself() -> None:
    assert (PERFECT.flops, PERFECT.bandwidth, PERFECT.step_overhead) == (1, 1, 0)
