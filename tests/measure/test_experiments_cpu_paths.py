"""The CPU's experiments: every path computes the same product, predictions are the roofline's, packing is what is drawn."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("numba")

from llmlab import LLM
from llmlab.config import ModelConfig
from llmlab.hub import tiny_model_dir
from llmlab.measure.cost import decode_costs, least_seconds, prefill_costs
from llmlab.measure.datasheets import Roof
from llmlab.measure.experiments import cpu_paths
from llmlab.measure.experiments.cpu_paths import engine_variants, linear_paths, memory_order
from llmlab.measure.experiments.quantization import quantization_error, weight_error

ROOF = Roof("m", "float32", "memory", 1e12, 1e10, "measured")


@pytest.mark.parametrize("name", list(cpu_paths._PATHS))
def test_every_path_is_the_same_product(name):
    weights = [torch.randn(64, 96, generator=torch.Generator().manual_seed(i)).bfloat16() for i in range(2)]
    x = torch.randn(5, 96, generator=torch.Generator().manual_seed(9)).bfloat16()
    if not cpu_paths._available(cpu_paths._PATHS[name], weights[0]):
        pytest.skip("not in this build of torch")
    with torch.inference_mode():
        products, size = cpu_paths._PATHS[name](weights)
        for product, weight in zip(products, weights, strict=True):
            expected = x.double() @ weight.double().T
            error = (product(x).double() - expected).norm() / expected.norm()
            assert error < (0.005 if size == 2 else 0.015)


def test_linear_paths_counts_what_is_read():
    config = ModelConfig.from_pretrained(tiny_model_dir())
    table = linear_paths(config, (1, 3), max_seconds=0.01, layers=1)
    assert {"F.linear", "llmlab", "llmlab int8"} <= set(table["path"]) and set(table["tokens"]) == {1, 3}
    elements = table["weight_bytes"].max() / 2
    assert (table["flops"] == 2 * elements * table["tokens"]).all() and (table["seconds"] > 0).all()
    assert set(table[table["path"].str.contains("int8")]["weight_bytes"]) == {elements}


def test_variants_beside_their_predictions():
    make = lambda **options: LLM("tiny", device="cpu", dtype="float32", num_kv_blocks=64, **options)
    variants = {"plain": make(), "int8": make(quantization="int8")}
    roofs = dict.fromkeys(variants, ROOF)
    table = engine_variants(variants, roofs, decode=(2,), prefill=(8,), repeats=1, steps=4, context=8)
    rows = {(r.work, r.variant): r for r in table.itertuples()}
    config = variants["plain"].config
    assert rows["decode", "plain"].predicted == pytest.approx(
        least_seconds(decode_costs(config, 2, 10, dtype=torch.float32, weight_dtype=torch.bfloat16), ROOF)
    )
    assert rows["prefill", "int8"].predicted == pytest.approx(
        least_seconds(prefill_costs(config, 1, 8, dtype=torch.float32), ROOF)
    )
    assert rows["decode", "int8"].predicted < rows["decode", "plain"].predicted
    assert (table["low"] <= table["seconds"]).all() and (table["seconds"] <= table["high"]).all()
    assert not any(llm.engine.has_unfinished_requests() for llm in variants.values())


def test_a_panel_is_sixteen_outputs_input_by_input():
    table = memory_order(32, 16).query("layout == 'panels'").set_index(["out", "in"])["position"]
    for out, feature in ((0, 0), (5, 3), (15, 15), (16, 0), (31, 7)):
        assert table[out, feature] == out // 16 * 256 + feature * 16 + out % 16
    assert memory_order(32, 16).query("layout == 'rows'")["position"].is_monotonic_increasing


def test_rounding_error_of_a_weight_is_as_predicted():
    found = weight_error(torch.randn(64, 512, generator=torch.Generator().manual_seed(0)))
    assert found["relative_error"] == pytest.approx(found["predicted"], rel=0.05)
    assert 0.005 < found["relative_error"] < 0.015


def test_quantization_error_of_an_engine():
    exact = LLM("tiny", device="cpu", dtype="float32", num_kv_blocks=64)
    tokens = exact.tokenizer.encode("Once upon a time there was a little tokenizer that ate words.")
    same = quantization_error(exact, exact, tokens, window=8)
    assert same["cosine_worst"] == pytest.approx(1, abs=1e-5) and same["greedy_agreement"] == 1
    logprobs = torch.cat(
        [exact.forward_logits(tokens[i : i + 8]).log_softmax(-1)[:-1] for i in range(0, len(tokens), 8)]
    )
    targets = [t for i in range(0, len(tokens), 8) for t in tokens[i + 1 : i + 8]]
    loss = -logprobs[range(len(targets)), targets].mean()
    assert same["perplexity"] == pytest.approx(float(loss.exp()), rel=1e-5) and same["logprob_error"] == 0
    quantized = LLM("tiny", device="cpu", dtype="float32", num_kv_blocks=64, quantization="int8")
    found = quantization_error(exact, quantized, tokens, window=8)
    assert 0.99 < found["cosine"] < 1 and 0 < found["logprob_error"] < 0.2
    with pytest.raises(ValueError, match="at least two tokens"):
        quantization_error(exact, exact, [1])
