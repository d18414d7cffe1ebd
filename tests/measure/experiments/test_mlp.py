"""The FFN's experiments: shares against counted parameters, traffic against the op's cost, products that are the same product."""

import pytest
import torch

from llmlab import ops
from llmlab.measure.experiments.mlp import (
    least_gain,
    shares,
    silu_times,
    silu_traffic,
    two_step_silu,
    wide_against_narrow,
)
from llmlab.measure.known_models import known_config


@pytest.mark.parametrize(
    ("name", "total"),
    [("llama-2-7b", 6_738_415_616), ("qwen2.5-7b", 7_615_616_512), ("qwen3-8b", 8_190_735_360)],
)
def test_known_models_have_their_published_number_of_parameters(name, total):
    table = shares([name])
    assert table["parameters"].sum() == total


def test_shares_are_of_one_whole():
    names = ["smollm2-135m-instruct", "llama-3-8b"]
    table = shares(names, context=64)
    assert table.groupby("model")[["share", "flops_share"]].sum().to_numpy() == pytest.approx(1.0)
    mlp = table.set_index(["part", "model"]).loc["MLP"]
    assert mlp.loc["llama-3-8b", "parameters"] == 3 * 4096 * 14336 * 32
    longer = shares(names, context=4096).set_index(["part", "model"]).loc["attention", "flops_share"]
    assert (longer > table.set_index(["part", "model"]).loc["attention", "flops_share"]).all()


def test_traffic_is_the_ops_cost():
    table = silu_traffic(7, 32, itemsize=4).groupby("form")["bytes"].sum()
    assert table["fused"] == ops.silu_and_mul.cost(torch.empty(7, 64)).bytes
    assert table["fused"] / table["two steps"] == pytest.approx(3 / 5)


def test_both_forms_of_silu_are_the_same_function():
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(two_step_silu(x), ops.silu_and_mul.reference(x))
    table = silu_times([(2, 32)], torch.float32, max_seconds=0.01)
    assert (table[["fused_seconds", "two_step_seconds", "gain"]] > 0).all(axis=None)


def test_gains_are_ratios_of_the_times():
    config = known_config("smollm2-135m-instruct")
    table = wide_against_narrow(config, (1, 3), torch.float32, layers=2, repeats=5, max_seconds=0.01)
    assert table["projection"].tolist() == ["gate/up", "gate/up", "QKV", "QKV"]
    assert (table["p10"] <= table["gain"]).all() and (table["gain"] <= table["p90"]).all()
    assert least_gain(table, "QKV") == table["sure_low"].iloc[2:].min()
