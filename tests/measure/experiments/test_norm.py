"""Norms of notebook 03: against torch's own in float64, and against the ops' costs."""

import pytest
import torch

from llmlab import ops
from llmlab.measure.experiments import norm

SHAPES = ((3, 64), (40, 576))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("tokens", "hidden"), [(1, 16), (7, 576), (40, 1024)])
def test_compiled_layer_norm_is_the_formula(dtype, tokens, hidden):
    pytest.importorskip("numba")
    from llmlab.measure.experiments.norm_cpu import layer_norm

    x, _, weight, bias = norm._inputs(tokens, hidden, dtype, torch.device("cpu"))
    got = layer_norm(x + 2, weight, bias, 1e-5)
    exact = torch.nn.functional.layer_norm((x + 2).double(), (hidden,), weight.double(), bias.double(), 1e-5)
    step = torch.finfo(dtype).eps
    torch.testing.assert_close(got.double(), exact, rtol=2 * step, atol=8 * step)
    torch.testing.assert_close(got, norm.layer_norm(x + 2, weight, bias, 1e-5), rtol=2 * step, atol=16 * step)


def test_compiled_layer_norm_refuses_what_it_cannot_take():
    pytest.importorskip("numba")
    from llmlab.measure.experiments.norm_cpu import layer_norm

    with pytest.raises(ValueError, match="multiple of 16"):
        layer_norm(torch.ones(2, 20), torch.ones(20), torch.ones(20), 1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(1, 16), (3, 576), (70, 4096)])
def test_compiled_addition_is_torch_s(dtype, shape):
    pytest.importorskip("numba")
    from llmlab.measure.experiments.norm_cpu import add

    x, residual, *_ = norm._inputs(*shape, dtype, torch.device("cpu"))
    assert torch.equal(add(x, residual), x + residual)
    with pytest.raises(ValueError, match="alike"):
        add(x, residual[:, ::2])


def test_pairs_are_the_same_two_formulas():
    x, _, weight, bias = norm._inputs(5, 64, torch.float32, torch.device("cpu"))
    for name, (rms, layer) in norm.norm_pairs(torch.device("cpu")).items():
        torch.testing.assert_close(
            rms(x, weight, bias, 1e-5), torch.nn.functional.rms_norm(x, (64,), weight, 1e-5), msg=name
        )
        want = torch.nn.functional.layer_norm(x, (64,), weight, bias, 1e-5)
        torch.testing.assert_close(layer(x, weight, bias, 1e-5), want, msg=name)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_traffic_is_what_the_ops_cost(dtype):
    x, residual, weight, _ = norm._inputs(9, 48, dtype, torch.device("cpu"))
    moved = norm.fused_traffic(9, 48, dtype).groupby("form")["bytes"].sum()
    assert moved["fused"] == ops.fused_add_rms_norm.cost(x, residual, weight, 1e-5).bytes
    assert moved["apart"] == 3 * x.nbytes + ops.rms_norm.cost(x, weight, 1e-5).bytes


def test_errors_are_rounding():
    table = norm.norm_errors(8, 64)
    assert len(table) == 8
    for dtype, rows in table.groupby("dtype"):
        eps = torch.finfo(getattr(torch, dtype)).eps
        assert (rows[["rms_error", "layer_error"]] < 100 * eps).all(axis=None)
        assert (rows[["rms_error", "layer_error"]] > 0).all(axis=None)


def test_sweeps_have_a_row_a_shape():
    norms = norm.rms_against_layer(SHAPES, max_seconds=0.01)
    assert len(norms) == len(SHAPES) * len(norm.norm_pairs(torch.device("cpu")))
    assert norms["working_set"].tolist()[:2] == [2 * 3 * 64 * 2, 2 * 40 * 576 * 2]
    fused = norm.fused_against_apart(SHAPES, max_seconds=0.01)
    assert fused["tokens"].tolist() == [3, 40]
    assert fused["bytes_ratio"].between(0.8, 0.83).all()
    for table in (norms, fused):
        assert (table["sure_low"] <= table["ratio"]).all() and (table["ratio"] <= table["sure_high"]).all()
