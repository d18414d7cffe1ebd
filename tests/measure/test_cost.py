"""The cost of a step on paper, against Hugging Face's parameters, torch's FLOP counter and a real step's ledger."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from llmlab import ops
from llmlab.config import ModelConfig
from llmlab.measure.cost import (
    GROUPS,
    LINEAR_GROUPS,
    cost_table,
    crossover_tokens,
    decode_costs,
    kv_bytes_per_token,
    least_seconds,
    linear_intensity,
    linear_shapes,
    parameters,
    prefill_costs,
    step_costs,
    total,
)
from llmlab.measure.datasheets import DATASHEETS
from llmlab.measure.known_models import known_config
from llmlab.measure.roofline import StepDriver
from llmlab.model.llama import LlamaForCausalLM
from llmlab.model.weights import random_weights
from llmlab.ops.attention import visible_pairs
from llmlab.ops.registry import record_ops

LLAMA = known_config("llama-3-8b")
SIZES = {
    "vocab_size": 50,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
VARIANTS = {
    "llama": ("LlamaForCausalLM", {}),
    "mha": ("LlamaForCausalLM", {"num_key_value_heads": 6, "tie_word_embeddings": True}),
    "mqa with wide heads": ("LlamaForCausalLM", {"num_key_value_heads": 1, "head_dim": 16}),
    "llama with biases": ("LlamaForCausalLM", {"attention_bias": True, "mlp_bias": True}),
    "mistral": ("MistralForCausalLM", {"sliding_window": 5}),
    "qwen2": ("Qwen2ForCausalLM", {}),
    "qwen3": ("Qwen3ForCausalLM", {"head_dim": 16}),
}


def hf_config(variant: str) -> Any:
    architecture, changes = VARIANTS[variant]
    config = getattr(transformers, architecture).config_class(**{**SIZES, **changes})
    config.architectures = [architecture]
    return config


def hf_model(config: Any, **kwargs: Any) -> Any:
    return getattr(transformers, config.architectures[0])._from_config(config, **kwargs)


@pytest.mark.parametrize("variant", VARIANTS)
def test_parameters_are_hugging_faces(variant: str) -> None:
    config = hf_config(variant)
    with torch.device("meta"):
        model = hf_model(config)
    counted = parameters(ModelConfig.from_dict(config.to_dict()))
    assert sum(counted.values()) == sum(p.numel() for p in model.parameters())


def test_llama_3_8b_has_its_parameters() -> None:
    counted = parameters(LLAMA)
    assert sum(counted.values()) == 8_030_261_248
    assert counted["gate+up"] + counted["down"] == 5_637_144_576
    assert counted["QKV"] + counted["O"] == 1_342_177_280
    assert counted["embedding"] == counted["head"] == 525_336_576
    assert counted["norms"] == 266_240
    assert kv_bytes_per_token(LLAMA) == 131_072


@pytest.mark.filterwarnings("ignore:.past_key_values. is deprecated:FutureWarning")
@pytest.mark.parametrize("variant", ["llama", "mha", "mqa with wide heads"])
@pytest.mark.parametrize(("new", "cached"), [(7, 0), (1, 11)])
def test_flops_are_those_that_torch_counts(variant: str, new: int, cached: int) -> None:
    """With eager attention: under SDPA on a CPU torch's counter does not see attention at all."""
    config = hf_config(variant)
    model = hf_model(config, attn_implementation="eager").eval()
    reqs, context = 2, new + cached
    past = transformers.DynamicCache(config=config)
    with torch.no_grad():
        if cached:
            model(torch.randint(50, (reqs, cached)), past_key_values=past, use_cache=True)
        with FlopCounterMode(display=False) as counter:
            model(torch.randint(50, (reqs, new)), past_key_values=past, use_cache=True, logits_to_keep=1)
    counts = counter.get_flop_counts()
    linear = counted_attention = 0
    for name, by_op in counts.items():
        if name.endswith((".self_attn", ".mlp", "lm_head")):
            for op, flops in by_op.items():
                if "bmm" in str(op):
                    counted_attention += flops
                else:
                    linear += flops
    ours = ModelConfig.from_dict(config.to_dict())
    table = cost_table(step_costs(ours, [new] * reqs, [context] * reqs, dtype=torch.float32))
    assert table.loc[list(LINEAR_GROUPS), "flops"].sum() == linear
    # Torch counts the whole square of a causal attention, and the two products only; ours adds five operations a pair.
    pairs, square = visible_pairs(new, context), new * context
    products = table.loc["attention", "flops"] * 4 * ours.head_dim / (4 * ours.head_dim + 5)
    assert products * square / pairs == pytest.approx(counted_attention, rel=1e-12)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("lens", [([6], [6]), ([1, 1, 1], [3, 17, 40]), ([5, 1, 7], [9, 33, 7])])
def test_paper_equals_the_ledger_of_a_real_step(variant: str, lens: tuple[list[int], list[int]]) -> None:
    config = ModelConfig.from_dict(hf_config(variant).to_dict())
    cpu = torch.device("cpu")
    model = LlamaForCausalLM(config, random_weights(config, torch.float32, cpu), ops.bind("reference", cpu), 64)
    driver = StepDriver(model, torch.float32, max_tokens=128, block_size=4)
    batch = driver.batch(*lens)
    with record_ops() as ledger:
        driver.run(batch)
    real = Counter((r.stage, r.op, r.cost) for r in ledger.records)
    paper = Counter()
    for c in step_costs(config, *lens, dtype=torch.float32, block_size=4, trim_last_layer=True):
        paper[c.stage, c.op, c.cost] += c.calls
    assert paper == real
    with record_ops() as ledger:
        driver.run(replace(batch, wanted=None))
    real = Counter((r.stage, r.op, r.cost) for r in ledger.records)
    paper = Counter()
    for c in step_costs(config, *lens, dtype=torch.float32, block_size=4):
        paper[c.stage, c.op, c.cost] += c.calls
    assert paper == real


def test_matrix_products_cost_two_flops_a_parameter_and_token() -> None:
    counted = parameters(LLAMA)
    matmul = sum(counted[group] for group in LINEAR_GROUPS)
    assert matmul == 7_504_658_432
    table = cost_table(decode_costs(LLAMA, 3, 100))
    assert table.loc[list(LINEAR_GROUPS), "flops"].sum() == 3 * 2 * matmul
    # Only the two products of attention: 4 · layers · heads · head_dim · context = 524,288 FLOP a token of context.
    assert table.loc["attention", "flops"] * 512 / 517 == 3 * 524_288 * 100


def test_decode_reads_weights_and_cache_once() -> None:
    costs = decode_costs(LLAMA, 1, 2048)
    assert total(costs).bytes == pytest.approx(15.29e9, rel=1e-3)
    shares = cost_table(costs)["bytes_share"]
    assert shares["gate+up"] + shares["down"] == pytest.approx(0.738, abs=1e-3)
    assert shares["attention"] == pytest.approx(0.018, abs=1e-3)
    assert cost_table(decode_costs(LLAMA, 32, 2048)).loc["attention", "bytes_share"] == pytest.approx(0.359, abs=2e-3)


def test_decode_attention_has_the_groups_intensity() -> None:
    for reqs, context in ((1, 1024), (32, 4096)):
        assert cost_table(decode_costs(LLAMA, reqs, context)).loc["attention", "intensity"] == pytest.approx(
            4, rel=0.02
        )


def test_keys_and_values_in_fewer_bytes_cost_less() -> None:
    table = lambda kv: cost_table(decode_costs(LLAMA, 8, 4096, kv_dtype=kv))
    half, full = table(torch.float8_e4m3fn), table(None)
    assert half.loc["attention", "bytes"] / full.loc["attention", "bytes"] == pytest.approx(0.5, rel=0.01)
    assert half.loc["gate+up", "bytes"] == full.loc["gate+up", "bytes"]


@pytest.mark.parametrize(
    ("gpu", "decode_1", "decode_64", "prefill"),
    [("A100-80GB SXM", 7.50, 16.2, 102.1), ("H100 SXM", 4.56, 9.85, 34.2), ("H200 SXM", 3.19, 6.87, 32.9)],
)
def test_least_times_of_llama_3_8b(gpu: str, decode_1: float, decode_64: float, prefill: float) -> None:
    """Milliseconds worked out by hand for unfused norms and residuals: fusing saves a little of decode, more of prefill."""
    roof = DATASHEETS[gpu].roof()
    milliseconds = [
        least_seconds(costs, roof) * 1e3
        for costs in (decode_costs(LLAMA, 1, 2048), decode_costs(LLAMA, 64, 2048), prefill_costs(LLAMA, 1, 2048))
    ]
    assert milliseconds[0] == pytest.approx(decode_1, rel=2e-3)
    assert milliseconds[1] == pytest.approx(decode_64, rel=5e-3)
    assert 0.98 * prefill < milliseconds[2] < prefill


@pytest.mark.parametrize(
    ("gpu", "square", "narrow", "wide", "head"),
    [("A100-80GB SXM", 165, 188, 161, 159), ("H100 SXM", 345, 462, 326, 319), ("RTX 4090", 178, 205, 173, 171)],
)
def test_crossovers_of_llama_3_8b(gpu: str, square: int, narrow: int, wide: int, head: int) -> None:
    ridge = DATASHEETS[gpu].roof().ridge
    shapes = [(4096, 4096), (4096, 1024), (14336, 4096), (4096, 128256)]
    assert [round(crossover_tokens(ridge, *shape)) for shape in shapes] == [square, narrow, wide, head]


@given(st.floats(1, 400), st.integers(64, 20000), st.integers(64, 20000), st.sampled_from([1, 2, 4]))
def test_at_the_crossover_intensity_is_the_ridge(ridge: float, rows: int, columns: int, weight_bytes: int) -> None:
    tokens = crossover_tokens(ridge, rows, columns, weight_bytes)
    if tokens == float("inf"):  # even endless tokens stay below
        assert linear_intensity(1e12, rows, columns, weight_bytes) <= ridge * (1 + 1e-6)
    else:
        assert linear_intensity(tokens, rows, columns, weight_bytes) == pytest.approx(ridge)


def test_shapes_multiply_to_the_parameters() -> None:
    for name in ("smollm2-135m-instruct", "llama-3-8b", "llama-3-70b"):
        config = known_config(name)
        counted = parameters(config)
        for group, (rows, columns) in linear_shapes(config).items():
            times = 1 if group == "head" else config.num_layers
            if counted[group]:
                assert rows * columns * times == counted[group]


def test_the_groups_are_the_whole_step() -> None:
    costs = step_costs(LLAMA, [3, 1], [10, 20])
    table = cost_table(costs, DATASHEETS["H100 SXM"].roof())
    assert list(table.index) == [group for group in GROUPS if group != "sampling"]
    assert table["flops"].sum() == total(costs).flops
    assert table["bytes"].sum() == total(costs).bytes
    assert table[["flops_share", "bytes_share"]].sum().tolist() == pytest.approx([1, 1])
    assert table["least_seconds"].sum() == pytest.approx(least_seconds(costs, DATASHEETS["H100 SXM"].roof()))
    assert set(table["bound"]) == {"memory"}


@pytest.mark.parametrize(("query_lens", "seq_lens"), [([], []), ([1], [1, 2]), ([0], [5]), ([6], [5])])
def test_impossible_steps_are_refused(query_lens: list[int], seq_lens: list[int]) -> None:
    with pytest.raises(ValueError, match=r"query_len|seq_lens"):
        step_costs(LLAMA, query_lens, seq_lens)


def test_unknown_names_are_refused() -> None:
    with pytest.raises(ValueError, match="gpt-9"):
        known_config("gpt-9")
