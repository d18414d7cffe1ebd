"""The model's end: FLOPs counted by hand, and steps that give the same logits whichever way they are clocked."""

import dataclasses

import pytest
import torch

from llmlab import ops
from llmlab.measure.experiments.lm_head import (
    head_flops,
    head_share,
    head_times,
    last_layer,
    trimmed_share,
    trimmed_times,
)
from llmlab.measure.known_models import known_config
from llmlab.measure.roofline import StepDriver
from llmlab.model.llama import LlamaForCausalLM
from llmlab.model.weights import random_weights

LLAMA = known_config("llama-3-8b")


def test_the_heads_share():
    assert head_flops(LLAMA, 3) == 2 * 3 * 4096 * 128256
    table = head_share({"llama": LLAMA}, [16, 1024]).set_index("tokens")
    assert table["saved"].tolist() == [1 - 1 / 16, 1 - 1 / 1024]
    # the embedding has no FLOPs: 0.5253 of 7.5047 G parameters in products, less a little for attention
    assert table.loc[16, "share_all"] == pytest.approx(525_336_576 / 7_504_658_432, rel=2e-3)
    assert (table["share_last"] < table["share_all"]).all()


def test_the_last_layer_by_hand():
    table = last_layer(LLAMA, 100).set_index(["way", "group"])["flops"]
    kv, q, mlp = 2 * 4096 * 2048, 2 * 4096 * 4096, 6 * 4096 * 14336
    assert table["all tokens", "K and V"] == pytest.approx(100 * kv)
    assert table["trimmed", "K and V"] == 100 * kv
    assert table["all tokens", "Q"] == pytest.approx(100 * q) and table["trimmed", "Q"] == q
    assert table["all tokens", "MLP"] == pytest.approx(100 * mlp, rel=1e-3)
    assert table["trimmed", "attention"] == pytest.approx(table["all tokens", "attention"] * 100 / 5050)
    assert table["trimmed", "MLP"] * 100 == table["all tokens", "MLP"]


def test_trimming_saves_about_one_layer():
    table = trimmed_share({"llama": LLAMA}, [512])
    assert table["times_layers"].iloc[0] == pytest.approx(1.0, abs=0.05)
    assert table["saved"].iloc[0] * 32 == pytest.approx(table["times_layers"].iloc[0])


def test_clocked_tables_hold_what_they_say():
    tiny = dataclasses.replace(
        known_config("smollm2-135m-instruct"),
        hidden_size=32, intermediate_size=64, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=16, vocab_size=64,
        rope=dataclasses.replace(known_config("smollm2-135m-instruct").rope, rotary_dim=16), sliding_windows=(None,) * 2,
    )  # fmt: skip
    cpu = torch.device("cpu")
    model = LlamaForCausalLM(tiny, random_weights(tiny, torch.float32, cpu), ops.bind("reference", cpu), 64)
    driver = StepDriver(model, torch.float32, 64)
    heads = head_times(driver, [8], max_seconds=0.01)
    steps = trimmed_times(driver, [8, 16], max_seconds=0.01)
    assert heads["tokens"].tolist() == [8] and steps["tokens"].tolist() == [8, 16]
    assert (steps["p10"] <= steps["saved"]).all() and (steps["saved"] <= steps["p90"]).all()
    assert (steps["saved"] < 1).all() and (heads["gain"] > 0).all()
