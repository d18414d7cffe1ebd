"""Prefix caching, chunked prefill and preemption experiments: counts that follow from the definitions, and paper arithmetic."""

from __future__ import annotations

import hashlib
import math
from array import array

import numpy as np
import pandas as pd
import pytest

from llmlab import LLM
from llmlab.hub import tiny_model_dir
from llmlab.measure.datasheets import DATASHEETS, Roof
from llmlab.measure.experiments.chunked_prefill import compare_budgets, long_prompt_arrives
from llmlab.measure.experiments.preemption import (
    PCIE_GENERATION,
    break_even_link,
    by_gpu,
    claim_numbers,
    crossover,
    on_paper,
    pcie_bandwidth,
    recompute_and_swap,
    recompute_seconds,
    swap_seconds,
)
from llmlab.measure.experiments.prefix_caching import first_token_by_shared, hash_chain, pool_state, savings
from llmlab.measure.experiments.scheduling import another_engine
from llmlab.measure.known_models import known_config
from llmlab.sampling.params import SamplingParams

LLAMA = known_config("llama-3-8b")
H100 = DATASHEETS["H100 SXM"].roof()


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(
        tiny_model_dir(),
        dtype="float32",
        device="cpu",
        num_kv_blocks=64,
        block_size=16,
        max_model_len=256,
        preemption_mode="swap",
        num_host_blocks=16,
    )


def test_a_hash_is_that_of_the_parent_and_the_tokens() -> None:
    """By hashlib alone: sha256 over the parent's 32 bytes and the tokens as 32-bit integers."""
    table = hash_chain({"a": [1, 2, 3, 4, 5], "b": [1, 2, 3, 9], "c": [7, 2, 3, 4]}, block_size=2)
    parent = bytes(32)
    for row in table[table["request"] == "a"].head(2).itertuples():
        digest = hashlib.sha256(parent + array("i", row.tokens).tobytes()).digest()
        assert (row.parent, row.hash) == (parent.hex()[:8], digest.hex()[:8])
        parent = digest
    a, b, c = (table[table["request"] == name].set_index("index") for name in "abc")
    assert a["hash"][0] == b["hash"][0] and a["hash"][1] != b["hash"][1]
    assert a["tokens"][1] == c["tokens"][1] and a["hash"][1] != c["hash"][1], "equal tokens after another beginning"
    assert a["hash"][2] == "" and a["parent"][2] == a["hash"][1]


def test_pool_state_lists_every_block_once_in_the_order_of_reuse(llm: LLM) -> None:
    engine = another_engine(llm, num_blocks=6)
    engine.add_request("a", list(range(40)), SamplingParams(temperature=0, max_tokens=1))
    engine.step()
    names = {
        block.block_hash: f"a{i}" for i, block in enumerate(engine.scheduler.kv_cache_manager.block_pool.blocks[:2])
    }
    state = pool_state(engine.scheduler, names)
    assert sorted(block for block, _, _ in state) == list(range(6))
    assert [content for _, content, _ in state] == ["", "", "", "", "a1", "a0"], "tails go first, cached content last"
    assert {kind for _, _, kind in state} == {"free"}


def test_cached_tokens_are_whole_blocks_of_what_is_shared(llm: LLM) -> None:
    table = first_token_by_shared(llm, 100, [20, 64, 96], repeats=3)
    assert table["shared"].tolist() == [0, 20, 64, 96] * 3
    assert table["cached"].tolist() == [0, 16, 64, 96] * 3
    saved = savings(table, 100)
    assert saved["cached_share"].tolist() == [0, 0.16, 0.64, 0.96] and saved["saved_share"][0] == 0
    ratios = [table["seconds"][i + 3] / table["seconds"][i] for i in (0, 4, 8)]
    assert saved["saved_share"][3] == pytest.approx(1 - np.median(ratios))
    with pytest.raises(ValueError, match="of 64"):
        first_token_by_shared(llm, 250, [16] * 4)


@pytest.mark.parametrize(("budget", "chunks"), [(256, [150]), (68, [64, 64, 22]), (54, [50, 50, 50])])
def test_every_token_of_the_long_prompt_is_in_a_step(llm: LLM, budget: int, chunks: list[int]) -> None:
    engine = another_engine(llm, max_num_batched_tokens=budget, enable_prefix_caching=False)
    table, ttft = long_prompt_arrives(engine, num_running=4, context=5, prompt_len=150, before=3, after=2)
    with_prompt = table[table["long_tokens"] > 0]
    assert with_prompt["long_tokens"].tolist() == chunks
    assert with_prompt["step"].tolist() == list(range(len(chunks)))
    assert table["step"].min() == -3
    decodes = table["num_tokens"] - table["long_tokens"]
    assert (decodes[table["step"] < len(chunks)] == 4).all() and (decodes[table["step"] >= len(chunks)] == 5).all()
    assert 0 < ttft <= with_prompt["itl"].sum(), "it arrives after the token that the first latency is counted from"
    assert not engine.has_unfinished_requests()


def test_budgets_are_compared_by_medians() -> None:
    table = lambda worst: pd.DataFrame({"step": [-2, -1, 0], "long_tokens": [0, 0, 9], "itl": [1.0, 3.0, worst]})
    compared = compare_budgets({"whole": [(table(w), w + 1) for w in (5.0, 9.0, 7.0)]})
    assert compared.loc["whole"].to_dict() == {"steps": 1, "usual_itl": 2.0, "worst_itl": 7.0, "ttft": 8.0}


def test_a_budget_without_room_is_refused(llm: LLM) -> None:
    with pytest.raises(ValueError, match="max_num_batched_tokens=4 leaves nothing"):
        long_prompt_arrives(another_engine(llm, max_num_batched_tokens=4), num_running=4)


def test_both_ways_of_preempting_are_clocked(llm: LLM) -> None:
    table = recompute_and_swap(llm, [16, 100], repeats=3)
    assert table["context"].tolist() == [16, 100]
    assert (table.drop(columns="context") > 0).all(axis=None)
    assert (table["swap_low"] <= table["swap"]).all() and (table["swap"] <= table["swap_high"]).all()
    with pytest.raises(ValueError, match="at most 256"):
        recompute_and_swap(llm, [257])
    llm.engine.add_request("busy", [1])
    with pytest.raises(ValueError, match="unfinished"):
        recompute_and_swap(llm, [16])
    llm.engine.discard_request("busy")


def test_swapped_blocks_come_back_as_they_were(llm: LLM) -> None:
    runner = llm.engine.runner
    runner.kv_cache.normal_()
    kept = runner.kv_cache.clone()
    runner.swap([(3, 0), (60, 15)])
    runner.kv_cache[:, :, [3, 60]] = float("nan")
    runner.swap((), [(0, 3), (15, 60)])
    assert runner.kv_cache.equal(kept)


def test_links_by_the_standard() -> None:
    assert pcie_bandwidth(4) == pytest.approx(31.5e9, rel=1e-3)
    assert pcie_bandwidth(5) == pytest.approx(63.0e9, rel=1e-3)
    assert pcie_bandwidth(3, lanes=8) == pytest.approx(7.88e9, rel=1e-3)
    with pytest.raises(ValueError, match="got 9"):
        pcie_bandwidth(9)


def test_paper_times_by_hand() -> None:
    assert swap_seconds(LLAMA, 64e9, 1000) == pytest.approx(2 * 1000 * 131_072 / 64e9)
    # a long prompt alone is its linear layers' arithmetic and a little more: 2 FLOP a parameter and token
    linear = 2 * 6.98e9 * 4096 / H100.flops
    assert linear < recompute_seconds(LLAMA, H100, 4096) < 1.3 * linear
    # a token alone costs the reading of all weights; beside 64 decodes, which read them anyway, nearly nothing
    assert recompute_seconds(LLAMA, H100, 1) == pytest.approx(15.0e9 / H100.bandwidth, rel=0.02)
    assert recompute_seconds(LLAMA, H100, 1, decodes=64, decode_context=512) < 1e-4
    link = break_even_link(LLAMA, lambda n: recompute_seconds(LLAMA, H100, n), 2048)
    assert swap_seconds(LLAMA, link, 2048) == pytest.approx(recompute_seconds(LLAMA, H100, 2048))


def test_shares_of_the_peak_slow_their_side_down() -> None:
    no_memory_bound = Roof("a device", "bfloat16", "memory", 1e15, 1e18, "datasheet")
    full = on_paper(LLAMA, no_memory_bound, 64e9, [512])
    less = on_paper(LLAMA, no_memory_bound, 64e9, [512], mfu=0.5, link_share=0.25)
    assert less["recompute"][0] / full["recompute"][0] == pytest.approx(2, rel=1e-3)
    assert less["swap"][0] / full["swap"][0] == pytest.approx(4)


def test_the_crossover_of_two_power_laws() -> None:
    contexts = np.array([16, 64, 256, 1024])
    table = pd.DataFrame({"context": contexts, "recompute": 1e-6 * contexts**1.5, "swap": 1e-5 * contexts**1.0})
    assert crossover(table) == pytest.approx(100)
    assert crossover(table.assign(swap=table["recompute"] * 2)) == math.inf
    assert crossover(table.assign(swap=table["recompute"] / 2)) == 0
    numbers = claim_numbers(table)
    assert numbers["crossover_context"] == pytest.approx(100)
    assert (numbers["smallest_context"], numbers["largest_context"]) == (16, 1024)
    assert numbers["recompute_seconds"] == table["recompute"][2]


def test_every_gpu_is_worked_out_as_one_is() -> None:
    contexts = [64, 512, 4096]
    table = by_gpu(LLAMA, contexts, [0, 16], decode_context=512).set_index(["gpu", "decodes"])
    assert len(table) == 2 * len(PCIE_GENERATION)
    one = on_paper(LLAMA, H100, pcie_bandwidth(5), contexts, decodes=16, decode_context=512)
    row = table.loc[("H100 SXM", 16)]
    assert (row["recompute"], row["swap"]) == (one["recompute"][1], one["swap"][1])
    assert row["crossover"] == crossover(one)
    assert table.loc[("H100 SXM", 0), "verdict"] == "refuted", "alone, it has to read all weights even for 64 tokens"
